"""LangChain's ChatOpenAI and OpenAI."""

from harness import BASE_URL, KEY, MODEL, QUESTION, expect, feature, run
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

chat_model = ChatOpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, max_tokens=200)


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=30)
    people: int = Field(ge=0, le=99)


@tool
def note_city(city: str, people: int) -> str:
    """Note a city."""
    return f"{city}: {people}"


@feature("chat")
def chat() -> None:
    expect(chat_model.invoke(QUESTION).content)
    expect(len(chat_model.batch([QUESTION, "Hello"])) == 2)


@feature("completions")
def completions() -> None:
    expect(OpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, max_tokens=8).invoke("One two"))


@feature("streams")
def streams() -> None:
    expect("".join(str(chunk.content) for chunk in chat_model.stream(QUESTION)))


@feature("JSON schema")
def json_schema() -> None:
    expect(isinstance(chat_model.with_structured_output(City).invoke(QUESTION), City))


@feature("tools, required")
def tools_required() -> None:
    expect(isinstance(chat_model.with_structured_output(City, method="function_calling").invoke(QUESTION), City))
    made = chat_model.bind_tools([note_city], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION)
    expect(made.tool_calls[0]["name"] == "note_city")


@feature("tools, auto")
def tools_auto() -> None:
    made = chat_model.bind_tools([note_city]).invoke(QUESTION)
    expect(made.content or made.tool_calls)


@feature("tools, history")
def tools_history() -> None:
    call = {"name": "note_city", "args": {"city": "Paris", "people": 2}, "id": "call_1", "type": "tool_call"}
    history = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), ToolMessage("noted", tool_call_id="call_1")]
    expect(chat_model.bind_tools([note_city], tool_choice="none").invoke(history).content)


@feature("Responses")
def responses() -> None:
    made = ChatOpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, max_tokens=16, use_responses_api=True)
    expect(made.invoke(QUESTION).content)
    expect(list(made.stream(QUESTION)))


@feature("embeddings")
def embeddings() -> None:
    made = OpenAIEmbeddings(base_url=BASE_URL, api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    expect(len(made.embed_documents(["one", "two"])) == 2)


run()

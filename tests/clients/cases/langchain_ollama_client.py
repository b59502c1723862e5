"""LangChain's Ollama."""

from harness import MODEL, QUESTION, ROOT_URL, expect, feature, run
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel, Field

AT = {"base_url": ROOT_URL, "model": MODEL, "temperature": 0}
model = ChatOllama(**AT, num_predict=16, validate_model_on_init=True)


class City(BaseModel):
    city: str = Field(max_length=30)
    people: int = Field(ge=0, le=99)


@tool
def note_city(city: str, people: int) -> str:
    """Note a city."""
    return "noted"


@feature("chat")
def chat() -> None:
    made = model.invoke(QUESTION)
    expect(made.content and made.usage_metadata["output_tokens"] > 1, made)


@feature("streams")
def streams() -> None:
    pieces = list(model.stream(QUESTION))
    expect(len(pieces) > 4 and "".join(piece.content for piece in pieces) == model.invoke(QUESTION).content, pieces)


@feature("streams, async")
async def streams_async() -> None:
    expect([piece async for piece in model.astream(QUESTION)])


@feature("completions")
def completions() -> None:
    expect(OllamaLLM(**AT, num_predict=8).invoke("One two three"))


@feature("JSON schema")
def json_schema() -> None:
    long = ChatOllama(**AT, num_predict=80)
    expect(isinstance(long.with_structured_output(City).invoke(QUESTION), City))
    expect(ChatOllama(**AT, num_predict=400, format="json", stop=["}"]).invoke(QUESTION).content.startswith("{"))


@feature("tools, auto")
def tools_auto() -> None:
    made = model.bind_tools([note_city]).invoke(QUESTION)
    expect(made.content or made.tool_calls, made)


@feature("tools, history")
def tools_history() -> None:
    call = {"name": "note_city", "args": {"city": "Paris", "people": 2}, "id": "call_1"}
    history = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), ToolMessage("noted", tool_call_id="call_1")]
    made = model.bind_tools([note_city]).invoke(history)
    expect(made.response_metadata["done"], made)


@feature("embeddings")
def embeddings() -> None:
    made = OllamaEmbeddings(base_url=ROOT_URL, model=MODEL)
    expect(len(made.embed_documents(["one", "two"])) == 2 and len(made.embed_query("one")) > 8)


run()

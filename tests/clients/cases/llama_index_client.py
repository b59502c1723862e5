"""LlamaIndex's OpenAILike."""

from harness import BASE_URL, KEY, MODEL, QUESTION, expect, feature, run
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class City(BaseModel):
    city: str = Field(max_length=30)
    people: int = Field(ge=0, le=99)


def make(**more: object) -> OpenAILike:
    return OpenAILike(api_base=BASE_URL, api_key=KEY, model=MODEL, is_chat_model=True, max_tokens=200, **more)


@feature("chat")
def chat() -> None:
    expect(make().chat([ChatMessage(role="user", content=QUESTION)]).message.content)


@feature("completions")
def completions() -> None:
    made = OpenAILike(api_base=BASE_URL, api_key=KEY, model=MODEL, is_chat_model=False, max_tokens=8)
    expect(made.complete("One two").text)


@feature("streams")
def streams() -> None:
    expect(list(make().stream_chat([ChatMessage(role="user", content=QUESTION)]))[-1].message.content)


@feature("JSON schema")
def json_schema() -> None:
    made = make(should_use_structured_outputs=True).structured_predict(City, PromptTemplate(QUESTION))
    expect(isinstance(made, City))


@feature("tools, required")
def tools_required() -> None:
    def note_city(city: str, people: int) -> str:
        """Note a city."""
        return city

    llm = make(is_function_calling_model=True)
    made = llm.chat_with_tools([FunctionTool.from_defaults(note_city)], user_msg=QUESTION, tool_required=True)
    expect(llm.get_tool_calls_from_response(made)[0].tool_name == "note_city")
    expect(isinstance(llm.structured_predict(City, PromptTemplate(QUESTION)), City))


run()

"""Pydantic AI's agents."""

from harness import BASE_URL, KEY, MODEL, QUESTION, expect, feature, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)
SETTINGS = {"max_tokens": 100, "parallel_tool_calls": False}


class City(BaseModel):
    city: str = Field(max_length=30)
    people: int = Field(ge=0, le=99)


@feature("chat")
def chat() -> None:
    expect(Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output)


@feature("streams")
async def streams() -> None:
    async with Agent(model, model_settings=SETTINGS).run_stream(QUESTION) as stream:
        expect(await stream.get_output())


@feature("JSON schema")
def json_schema() -> None:
    made = Agent(model, output_type=NativeOutput(City), model_settings=SETTINGS).run_sync(QUESTION)
    expect(isinstance(made.output, City))


@feature("tools, required")
def tools_required() -> None:
    expect(isinstance(Agent(model, output_type=City, model_settings=SETTINGS).run_sync(QUESTION).output, City))


@feature("tools, auto")
def tools_auto() -> None:
    agent = Agent(model, model_settings=SETTINGS)

    @agent.tool_plain
    def note_city(city: str, people: int) -> str:
        """Note a city."""
        return f"{city}: {people}"

    expect(agent.run_sync(QUESTION).output)


@feature("Responses")
def responses() -> None:
    made = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings={"max_tokens": 16}).run_sync(QUESTION)
    expect(made.output)


run()

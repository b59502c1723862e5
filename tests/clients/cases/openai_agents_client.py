"""OpenAI's Agents SDK: both classes of models."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from harness import BASE_URL, KEY, MODEL, QUESTION, expect, feature, run
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=200)


class City(BaseModel):
    city: str = Field(max_length=30)
    people: int = Field(ge=0, le=99)


@function_tool
def note_city(city: str, people: int) -> str:
    """Note a city."""
    return f"{city}: {people}"


def agent(kind: type, **more: object) -> Agent:
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE_URL, api_key=KEY))
    settings = more.pop("settings", SETTINGS)
    return Agent(name="A", instructions="Be brief.", model=model, model_settings=settings, **more)


CALL = ModelSettings(temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)


@feature("chat")
async def chat() -> None:
    expect((await Runner.run(agent(OpenAIChatCompletionsModel), QUESTION)).final_output)


@feature("streams")
async def streams() -> None:
    made = Runner.run_streamed(agent(OpenAIChatCompletionsModel), QUESTION)
    expect([event async for event in made.stream_events()])


@feature("JSON schema")
async def json_schema() -> None:
    made = await Runner.run(agent(OpenAIChatCompletionsModel, output_type=City), QUESTION)
    expect(isinstance(made.final_output, City))


@feature("tools, required")
async def tools_required() -> None:
    made = agent(OpenAIChatCompletionsModel, tools=[note_city], settings=CALL, tool_use_behavior="stop_on_first_tool")
    expect(":" in (await Runner.run(made, QUESTION)).final_output)


@feature("Responses")
async def responses() -> None:
    expect((await Runner.run(agent(OpenAIResponsesModel), QUESTION)).final_output)
    made = Runner.run_streamed(agent(OpenAIResponsesModel), QUESTION)
    expect([event async for event in made.stream_events()])
    made = await Runner.run(agent(OpenAIResponsesModel, output_type=City), QUESTION)
    expect(isinstance(made.final_output, City))
    made = agent(OpenAIResponsesModel, tools=[note_city], settings=CALL, tool_use_behavior="stop_on_first_tool")
    expect(":" in (await Runner.run(made, QUESTION)).final_output)


run()

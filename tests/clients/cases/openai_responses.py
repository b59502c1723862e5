"""`/v1/responses` with OpenAI's SDK."""

import json
from typing import Any

import openai
from harness import BASE_URL, CITY_SCHEMA, KEY, MODEL, QUESTION, expect, feature
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

CLIENT: Any = OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
SHORT: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
LONG: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 200}
TOOL: dict[str, Any] = {"type": "function", "name": "note_city", "parameters": CITY_SCHEMA, "strict": True}
ONE_CALL: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
MESSAGE = {"role": "user", "content": QUESTION}


class City(BaseModel):
    city: str = Field(max_length=30)
    people: int = Field(ge=0, le=99)


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def call_of(response: Any) -> Any:
    (call,) = [item for item in response.output if item.type == "function_call"]
    return call


@feature("Responses")
def responses() -> None:
    chat = CLIENT.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "Be brief."}, MESSAGE], temperature=0, max_tokens=24
    )
    made = CLIENT.responses.create(**SHORT, instructions="Be brief.", input=QUESTION, store=False)
    expect(made.output_text == chat.choices[0].message.content, made.output_text)
    expect(made.status in ("completed", "incomplete"), made.status)
    expect(made.usage.input_tokens == chat.usage.prompt_tokens)
    expect(made.usage.output_tokens == chat.usage.completion_tokens)
    history = [MESSAGE, *(item.to_dict() for item in made.output), {"role": "user", "content": "And of Italy?"}]
    expect(CLIENT.responses.create(**SHORT, input=history).output_text)


@feature("Responses, streams")
async def responses_streams() -> None:
    whole = CLIENT.responses.create(**SHORT, input=QUESTION)
    events = list(CLIENT.responses.create(**SHORT, input=QUESTION, stream=True))
    expect([event.sequence_number for event in events] == list(range(len(events))))
    expect(text_of(events) == whole.output_text == events[-1].response.output_text)
    async with AsyncOpenAI(base_url=BASE_URL, api_key=KEY) as other:
        stream: Any = await other.responses.create(**SHORT, input=QUESTION, stream=True)
        expect(text_of([event async for event in stream]) == whole.output_text)
    # The SDK's own helper asks for an end of the model's own, which a choice makes certain.
    choice = {"structured_outputs": {"choice": ["Paris", "Rome"]}}
    with CLIENT.responses.stream(model=MODEL, temperature=0, input=QUESTION, extra_body=choice) as stream:
        text = text_of(list(stream))
        final = stream.get_final_response()
    expect(final.status == "completed" and final.output_text == text and text in ("Paris", "Rome"), text)


@feature("Responses, JSON schema")
def responses_json_schema() -> None:
    made = CLIENT.responses.parse(**LONG, input=QUESTION, text_format=City)
    expect(isinstance(made.output_parsed, City))
    with CLIENT.responses.stream(**LONG, input=QUESTION, text_format=City) as stream:
        expect(stream.get_final_response().output_parsed == made.output_parsed)
    form = {"type": "json_schema", "name": "city", "schema": CITY_SCHEMA, "strict": True}
    City.model_validate_json(CLIENT.responses.create(**LONG, input=QUESTION, text={"format": form}).output_text)


@feature("Responses, tools")
def responses_tools() -> None:
    call = call_of(CLIENT.responses.create(**LONG, input=[MESSAGE], **ONE_CALL))
    City.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noted"}
    history = [MESSAGE, call.to_dict(), result]
    expect(CLIENT.responses.create(**SHORT, input=history, tools=[TOOL], tool_choice="none").output_text)
    named = {**ONE_CALL, "tool_choice": {"type": "function", "name": "note_city"}}
    whole = call_of(CLIENT.responses.create(**LONG, input=QUESTION, **named))
    with CLIENT.responses.stream(**LONG, input=QUESTION, **named) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        streamed = call_of(stream.get_final_response())
    expect("".join(pieces) == whole.arguments == streamed.arguments, pieces)
    expect(set(json.loads(whole.arguments)) == {"city", "people"})


@feature("Responses, logprobs")
def responses_logprobs() -> None:
    made = CLIENT.responses.create(**SHORT, input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = made.output[0].content[0].logprobs
    expect(len(logprobs) == made.usage.output_tokens)
    expect(all(len(one.top_logprobs) == 2 for one in logprobs))


@feature("Responses, refused by name")
def responses_refused() -> None:
    fields: dict[str, Any]
    for fields in (
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "web_search_preview"}]},
        {"extra_body": {"conversation": "conv_1"}},
    ):
        try:
            CLIENT.responses.create(**SHORT, input=QUESTION, **fields)
        except openai.BadRequestError as error:
            body: Any = error.body
            expect(body["param"].startswith(next(iter(fields.get("extra_body", fields)))), error)
        else:
            raise AssertionError(f"accepted: {fields}")

"""OpenAI's Python client (1.x and later) against `/v1/responses`, beside `/v1/chat/completions`."""

import asyncio
import json
import sys
from typing import Any

import openai
import pydantic
from checks import arguments, run

ARGS = arguments("openai")
OPTIONS: dict[str, Any] = {"base_url": f"{ARGS.base_url}/v1", "api_key": ARGS.api_key, "max_retries": 0, "timeout": 300}
CLIENT: Any = openai.OpenAI(**OPTIONS)
QUESTION = "What is the capital of France?"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
SHORT: dict[str, Any] = {"model": ARGS.model, "temperature": 0, "max_output_tokens": 24}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    inhabitants: int = pydantic.Field(ge=0, le=99_999_999)


def text_equals_that_of_chat_completions():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = CLIENT.chat.completions.create(model=ARGS.model, messages=messages, temperature=0, max_tokens=24)
    answer = CLIENT.responses.create(**SHORT, instructions="Be brief.", input=QUESTION)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    assert answer.store is False or not hasattr(answer, "store")
    return repr(answer.output_text[:60])


def a_conversation_of_items_goes_on():
    first = CLIENT.responses.create(**SHORT, input=[{"role": "user", "content": QUESTION}], store=False)
    history = [{"role": "user", "content": QUESTION}, *(item.to_dict() for item in first.output)]
    second = CLIENT.responses.create(**SHORT, input=[*history, {"role": "user", "content": "And of Italy?"}])
    assert second.output_text
    return repr(second.output_text[:60])


def a_stream_has_the_text_and_numbered_events():
    whole = CLIENT.responses.create(**SHORT, input=QUESTION)
    events = list(CLIENT.responses.create(**SHORT, input=QUESTION, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == whole.output_text


def the_streaming_helper_gives_the_final_response():
    cities = {"structured_outputs": {"choice": ["Paris", "Rome"]}}  # any model comes to an end
    with CLIENT.responses.stream(model=ARGS.model, temperature=0, input=QUESTION, extra_body=cities) as stream:
        seen = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == seen
    assert seen in ("Paris", "Rome")


def the_streaming_helper_parses():
    with CLIENT.responses.stream(
        model=ARGS.model, temperature=0, input="Paris, in figures", text_format=City, max_output_tokens=200
    ) as stream:
        stream.until_done()
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, City)


def parse_gives_an_object():
    answer = CLIENT.responses.parse(
        model=ARGS.model, temperature=0, input="Paris, in figures", text_format=City, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, City)
    return repr(answer.output_parsed)


def a_json_schema_is_kept():
    form = {
        "type": "json_schema",
        "name": "city",
        "schema": {**City.model_json_schema(), "additionalProperties": False},
        "strict": True,
    }
    answer = CLIENT.responses.create(
        model=ARGS.model, temperature=0, input="Paris", text={"format": form}, max_output_tokens=200
    )
    City.model_validate_json(answer.output_text)


def log_probabilities_come_when_included():
    answer = CLIENT.responses.create(**SHORT, input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == answer.usage.output_tokens
    assert all(len(one.top_logprobs) == 2 for one in logprobs)


def a_required_call_parses():
    answer = CLIENT.responses.create(
        model=ARGS.model, temperature=0, input="The weather in Paris?", tools=[WEATHER], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=200,
    )  # fmt: skip
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"city"}
    return call.arguments


def a_named_call_streams_the_same_arguments():
    fields = {
        "model": ARGS.model, "temperature": 0, "input": "The weather in Paris?", "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "get_weather"}, "max_output_tokens": 200,
    }  # fmt: skip
    whole = CLIENT.responses.create(**fields)
    with CLIENT.responses.stream(**fields) as stream:
        pieces = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    (call,) = [item for item in whole.output if item.type == "function_call"]
    (streamed,) = [item for item in final.output if item.type == "function_call"]
    assert "".join(pieces) == call.arguments == streamed.arguments


def the_result_of_a_call_goes_back():
    question = {"role": "user", "content": "The weather in Paris?"}
    first = CLIENT.responses.create(
        model=ARGS.model, temperature=0, input=[question], tools=[WEATHER], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=200,
    )  # fmt: skip
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees, sunny"}
    second = CLIENT.responses.create(
        **SHORT, input=[question, call.to_dict(), result], tools=[WEATHER], tool_choice="none"
    )
    assert second.output_text
    return repr(second.output_text[:60])


def what_is_stored_elsewhere_is_refused_by_name():
    refused: list[dict[str, Any]] = [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "web_search_preview"}]},
        {"extra_body": {"conversation": "conv_1"}},
    ]
    for fields in refused:
        try:
            CLIENT.responses.create(**SHORT, input="Hi", **fields)
        except openai.BadRequestError as caught:
            error: Any = caught
        else:
            raise AssertionError(f"accepted: {fields}")
        assert error.body["param"].startswith(next(iter(fields.get("extra_body", fields)))), error


def the_asynchronous_client_streams():
    async def scenario() -> str:
        client: Any
        async with openai.AsyncOpenAI(**OPTIONS) as client:
            stream = await client.responses.create(**SHORT, input=QUESTION, stream=True)
            return "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])

    assert asyncio.run(scenario()) == CLIENT.responses.create(**SHORT, input=QUESTION).output_text


CHECKS = [
    text_equals_that_of_chat_completions,
    a_conversation_of_items_goes_on,
    a_stream_has_the_text_and_numbered_events,
    the_streaming_helper_gives_the_final_response,
    the_streaming_helper_parses,
    parse_gives_an_object,
    a_json_schema_is_kept,
    log_probabilities_come_when_included,
    a_required_call_parses,
    a_named_call_streams_the_same_arguments,
    the_result_of_a_call_goes_back,
    what_is_stored_elsewhere_is_refused_by_name,
    the_asynchronous_client_streams,
]

if __name__ == "__main__":
    sys.exit(run(f"openai {openai.__version__}, {ARGS.model}", CHECKS, ARGS.only))

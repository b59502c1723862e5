"""Anthropic's Python client against `/v1/messages`."""

import asyncio
import sys
from typing import Any

import anthropic  # pyright: ignore[reportMissingImports] - in an environment of its own
import pydantic
from checks import arguments, run

ARGS = arguments("anthropic")
OPTIONS: dict[str, Any] = {"base_url": ARGS.base_url, "api_key": ARGS.api_key, "max_retries": 0, "timeout": 300}
CLIENT: Any = anthropic.Anthropic(**OPTIONS)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"extra_body": {"temperature": 0}}
SHORT: dict[str, Any] = {"model": ARGS.model, "max_tokens": 24, "messages": QUESTION, **GREEDY}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALLS: dict[str, Any] = {
    "model": ARGS.model, "max_tokens": 200, "tools": [WEATHER], **GREEDY,
    "messages": [{"role": "user", "content": "The weather in Paris?"}],
}  # fmt: skip


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    inhabitants: int = pydantic.Field(ge=0, le=99_999_999)


def a_message_has_text_and_usage():
    message = CLIENT.messages.create(**SHORT, system="Be brief.")
    (block,) = message.content
    assert block.type == "text"
    assert block.text
    assert message.usage.output_tokens > 0
    assert message.stop_reason in ("end_turn", "max_tokens")
    return repr(block.text[:60])


def a_stream_has_the_events_in_order():
    whole = CLIENT.messages.create(**SHORT)
    events = list(CLIENT.messages.create(**SHORT, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == whole.content[0].text


def the_streaming_helper_gives_text_and_message():
    with CLIENT.messages.stream(**SHORT) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    assert final.stop_reason == CLIENT.messages.create(**SHORT).stop_reason


def a_stop_sequence_is_named():
    text = CLIENT.messages.create(**SHORT).content[0].text
    word = text.split()[2]
    message = CLIENT.messages.create(**SHORT, stop_sequences=[word])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert message.content[0].text == text[: text.index(word)]
    return repr(word)


def tokens_are_counted_as_the_answer_does():
    count = CLIENT.messages.count_tokens(model=ARGS.model, messages=QUESTION, system="Be brief.")
    usage = CLIENT.messages.create(**SHORT, system="Be brief.").usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    return count.input_tokens


def a_schema_is_kept():
    schema = {**City.model_json_schema(), "additionalProperties": False}
    form = {"format": {"type": "json_schema", "schema": schema}}
    message = CLIENT.messages.create(model=ARGS.model, max_tokens=200, messages=QUESTION, output_config=form, **GREEDY)
    City.model_validate_json(message.content[0].text)


def any_tool_is_used():
    message = CLIENT.messages.create(**CALLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    (block,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert set(block.input) == {"city"}
    return block.input


def a_named_tool_streams_the_same_input():
    choice = {"type": "tool", "name": "get_weather"}
    whole = CLIENT.messages.create(**CALLS, tool_choice=choice)
    with CLIENT.messages.stream(**CALLS, tool_choice=choice) as stream:
        pieces = [e.partial_json for e in stream if e.type == "input_json"]
        final = stream.get_final_message()
    assert pieces
    assert final.content[-1].input == whole.content[-1].input
    assert final.stop_reason == whole.stop_reason == "tool_use"


def the_result_of_a_tool_goes_back():
    first = CLIENT.messages.create(**CALLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    use = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "22 degrees, sunny"}
    history = [
        *CALLS["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = CLIENT.messages.create(**{**CALLS, "messages": history}, tool_choice={"type": "none"})
    assert second.content[0].text
    return repr(second.content[0].text[:60])


def errors_are_the_clients_own():
    for fields, kind in (
        ({"extra_body": {"temperature": 1.5}}, anthropic.BadRequestError),
        ({"model": "another"}, anthropic.NotFoundError),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError),
    ):
        try:
            CLIENT.messages.create(**{**SHORT, **fields})
        except kind as caught:
            body = caught.body
        else:
            raise AssertionError(f"accepted: {fields}")
        assert body["type"] == "error"
        assert body["error"]["type"] in ("invalid_request_error", "not_found_error")


def the_asynchronous_client_streams():
    async def scenario() -> str:
        async with anthropic.AsyncAnthropic(**OPTIONS) as client, client.messages.stream(**SHORT) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(scenario()) == CLIENT.messages.create(**SHORT).content[0].text


CHECKS = [
    a_message_has_text_and_usage,
    a_stream_has_the_events_in_order,
    the_streaming_helper_gives_text_and_message,
    a_stop_sequence_is_named,
    tokens_are_counted_as_the_answer_does,
    a_schema_is_kept,
    any_tool_is_used,
    a_named_tool_streams_the_same_input,
    the_result_of_a_tool_goes_back,
    errors_are_the_clients_own,
    the_asynchronous_client_streams,
]

if __name__ == "__main__":
    sys.exit(run(f"anthropic {anthropic.__version__}, {ARGS.model}", CHECKS, ARGS.only))

"""Blocks of an answer: thinking, text and tools, streamed as they stand in the whole message."""

import json
from typing import Any

import pytest

from apt_jax.text.chat import ChatTemplate
from serve.http_api.messages.request import read_call
from serve.http_api.messages.response import MessagesResponse
from tests.support.chat_templates import CHATML
from tests.support.scripted_output import deltas, merged, scripted, streamed
from tests.support.toy_serving import toy_parts

SCRIPT = ["rhm", "r, well", "cIt ", "cis", "fweather", 'a{"city":', 'a"Paris"}', "ftime", "a{}"]


@pytest.fixture(scope="module")
def parts():
    made = toy_parts(chat_template=ChatTemplate(CHATML))
    yield made
    assert made.chat_template is not None
    made.chat_template.close()


def answer(
    parts: Any, script: list[str], reason: Any = "stop", **fields: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole message, and the events of the stream."""

    def read(text: str) -> list[dict[str, Any]]:
        return [json.loads(block.partition("\ndata: ")[2]) for block in text.split("\n\n") if block]

    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, **fields}
    call = scripted(read_call(parts, body, {}, 0.0))
    whole = json.loads(MessagesResponse(parts, call).whole([merged(call.requests[0], script, reason)]))
    call = scripted(read_call(parts, {**body, "stream": True}, {}, 0.0))
    return whole, streamed(MessagesResponse(parts, call), deltas(call.requests[0], script, reason), read)


def replayed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client makes of events, each of which must come in its place."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                is_open, json_text = True, ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                match event["delta"]:
                    case {"type": "text_delta", "text": text}:
                        blocks[-1]["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        blocks[-1]["thinking"] += text
                    case {"type": "signature_delta", "signature": text}:
                        blocks[-1]["signature"] += text
                    case {"type": "input_json_delta", "partial_json": text}:
                        json_text += text
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
                is_open = False
                if json_text:
                    blocks[-1]["input"] = json.loads(json_text)
    assert not is_open
    return blocks


def test_blocks_follow_each_other_and_the_stream_says_the_same(parts):
    whole, events = answer(parts, SCRIPT)
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm, well", "signature": ""},
        {"type": "text", "text": "It is"},
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "call_1", "name": "time", "input": {}},
    ]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    assert replayed(events) == whole["content"]
    assert [event["type"] for event in events].count("ping") == 1
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(SCRIPT)


def test_a_call_that_is_cut_off_has_no_input(parts):
    whole, events = answer(parts, ["fweather", 'a{"ci'], "length")
    assert whole["content"] == [{"type": "tool_use", "id": "call_0", "name": "weather", "input": {}}]
    assert whole["stop_reason"] == "max_tokens"
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_thinking_can_be_left_out_of_the_answer(parts):
    whole, events = answer(parts, ["rhm", "cyes"], thinking={"type": "adaptive", "display": "omitted"})
    assert whole["content"] == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": "yes"}]
    assert replayed(events) == whole["content"]
    assert "thinking_delta" not in json.dumps(events)

"""Items of an answer: reasoning, text and calls, streamed as they stand in the whole answer."""

import json
from typing import Any

import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from apt_jax.text.chat import ChatTemplate
from serve.http_api.responses.request import read_call
from serve.http_api.responses.response import ResponsesResponse
from tests.support.chat_templates import CHATML
from tests.support.scripted_output import deltas, merged, scripted, streamed
from tests.support.toy_serving import toy_parts

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
SCRIPT = ["rhm", "r, well", "cIt ", "cis", "fweather", 'a{"city":', 'a"Paris"}', "ftime", "a{}", "cdone"]


@pytest.fixture(scope="module")
def parts():
    made = toy_parts(chat_template=ChatTemplate(CHATML))
    yield made
    assert made.chat_template is not None
    made.chat_template.close()


def answer(parts: Any, script: list[str], reason: Any = "stop") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the events of the stream."""

    def read(text: str) -> list[dict[str, Any]]:
        events = [json.loads(block.partition("\ndata: ")[2]) for block in text.split("\n\n") if block]
        for event in events:
            EVENT.validate_python(event)
        return events

    call = scripted(read_call(parts, {"input": "hi"}, {}, 0.0))
    whole = json.loads(ResponsesResponse(parts, call).whole(deltas(call.requests[0], script, reason)))
    Response.model_validate(whole)
    at_once = json.loads(ResponsesResponse(parts, call).whole([merged(call.requests[0], script, reason)]))
    assert at_once["output"] == whole["output"]  # whatever pieces the output comes in
    call = scripted(read_call(parts, {"input": "hi", "stream": True, "request_id": call.base_id}, {}, 0.0))
    events = streamed(ResponsesResponse(parts, call), deltas(call.requests[0], script, reason), read)
    return whole, events


def test_items_follow_each_other_and_the_stream_says_the_same(parts):
    whole, events = answer(parts, SCRIPT)
    assert [item["type"] for item in whole["output"]] == [
        "reasoning", "message", "function_call", "function_call", "message",
    ]  # fmt: skip
    thought, said, weather, time, done = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm, well"}]
    assert said["content"][0]["text"] == "It is"
    assert (weather["call_id"], weather["name"], weather["arguments"]) == ("call_0", "weather", '{"city":"Paris"}')
    assert (time["call_id"], time["name"], time["arguments"]) == ("call_1", "time", "{}")
    assert done["content"][0]["text"] == "done"
    assert len({item["id"] for item in whole["output"]}) == 5
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == whole["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_every_item_begins_grows_and_ends_before_the_next_one(parts):
    _, events = answer(parts, SCRIPT)
    of_items: dict[int, list[str]] = {}
    for event in events:
        if "output_index" in event:
            of_items.setdefault(event["output_index"], []).append(event["type"].removeprefix("response."))
    text = [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert of_items[0] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
    ]  # fmt: skip
    assert of_items[1] == [*text[:3], *text[2:]]
    assert of_items[2] == [*call[:2], *call[1:]]
    assert of_items[3] == call
    assert of_items[4] == text
    order = [event["output_index"] for event in events if "output_index" in event]
    assert order == sorted(order)


def test_tokens_of_reasoning_are_counted(parts):
    whole, events = answer(parts, SCRIPT)
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert whole["usage"] == events[-1]["response"]["usage"]
    assert whole["usage"]["output_tokens"] == len(SCRIPT)


def test_what_is_cut_off_is_incomplete(parts):
    whole, events = answer(parts, ["cwell", "fweather", 'a{"ci'], "length")
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
    assert whole["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"] == whole["output"]

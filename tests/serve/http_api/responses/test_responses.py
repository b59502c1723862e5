"""The Responses API: the text of chat completions, events as OpenAI publishes them, and what is refused."""

import asyncio
import json
import threading
from typing import Any

import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from apt_jax.text.chat import ChatTemplate
from tests.support.chat_templates import CHATML
from tests.support.fake_executor import Fault, FaultKind
from tests.support.http_serving import post_head, run
from tests.support.toy_serving import toy_parts

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


TEMPLATE = ChatTemplate(CHATML)


@pytest.fixture(scope="module", autouse=True)
def template():
    yield
    TEMPLATE.close()


def parts(**fields: Any):
    return toy_parts(chat_template=TEMPLATE, max_model_len=512, **fields)


async def chat(served: Any, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    response = await served.post("/v1/chat/completions", {"messages": messages, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def ask(served: Any, given: Any, **fields: Any) -> dict[str, Any]:
    """An answer, which OpenAI's types allow."""
    response = await served.post("/v1/responses", {"input": given, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    return response.json()


async def events(served: Any, given: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which OpenAI's types allow."""
    response = await served.post("/v1/responses", {"input": given, "stream": True, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    made = []
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    for number, block in enumerate(blocks):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        made.append(event)
    return made


def text_of(answer: dict[str, Any]) -> str:
    (item,) = answer["output"]
    (part,) = item["content"]
    return part["text"]


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"input": "hello"}, [("user", "hello")]),
        ({"input": "hello", "instructions": "Be brief."}, [("system", "Be brief."), ("user", "hello")]),
        (
            {
                "input": [
                    {"role": "developer", "content": "Rhyme."},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                    {"type": "reasoning", "id": "rs_1", "summary": []},
                    {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
                    {"role": "user", "content": "d"},
                ]
            },
            [("developer", "Rhyme."), ("user", "ab"), ("assistant", "c"), ("user", "d")],
        ),
    ],
)  # fmt: skip
def test_an_answer_has_the_text_and_the_usage_of_a_chat_completion(given, messages):
    async def scenario(served):
        want = await chat(served, [{"role": role, "content": text} for role, text in messages], max_tokens=12)
        answer = await ask(served, given.pop("input"), max_output_tokens=12, **given)
        assert text_of(answer) == want["choices"][0]["message"]["content"]
        usage = answer["usage"]
        assert usage["input_tokens"] == want["usage"]["prompt_tokens"]
        assert (usage["output_tokens"], usage["total_tokens"]) == (12, usage["input_tokens"] + 12)
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (answer["model"], answer["object"]) == ("toy", "response")

    run(scenario, parts=parts())


def test_a_stream_has_the_published_events_in_order():
    async def scenario(served):
        whole = await ask(served, "hello", max_output_tokens=20)
        stream = await events(served, "hello", max_output_tokens=20)
        kinds = [event["type"] for event in stream]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert {*kinds[4:-4]} == {"response.output_text.delta"}
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
        text = "".join(event["delta"] for event in stream[4:-4])
        assert text == stream[-4]["text"] == stream[-3]["part"]["text"] == text_of(whole)
        assert stream[0]["response"]["output"] == []
        assert stream[0]["response"]["usage"] is None
        assert [stream[-2]["item"]] == stream[-1]["response"]["output"]
        assert stream[-1]["response"]["usage"]["output_tokens"] == 20
        assert len({event["response"]["id"] for event in stream if "response" in event}) == 1
        assert len({event["item_id"] for event in stream if "item_id" in event}) == 1

    run(scenario, parts=parts())


def test_an_answer_that_stops_is_completed_also_without_text():
    async def scenario(served):
        text = text_of(await ask(served, "hello", max_output_tokens=20))
        stop = text[3]
        answer = await ask(served, "hello", max_output_tokens=20, stop=stop)
        assert text_of(answer) == text[: text.index(stop)]
        assert (answer["status"], answer["output"][0]["status"]) == ("completed", "completed")
        assert answer["completed_at"] >= answer["created_at"]
        stream = await events(served, "hello", max_output_tokens=20, stop=text[0])
        assert [e["type"] for e in stream][-1] == "response.completed"
        assert text_of(stream[-1]["response"]) == ""
        assert "response.output_text.delta" not in [e["type"] for e in stream]

    run(scenario, parts=parts())


def test_log_probabilities_are_those_of_a_chat_completion():
    async def scenario(served):
        want = await chat(served, [{"role": "user", "content": "hello"}], max_tokens=9, logprobs=True, top_logprobs=2)
        fields = {"max_output_tokens": 9, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        answer = await ask(served, "hello", **fields)
        logprobs = answer["output"][0]["content"][0]["logprobs"]
        assert logprobs == want["choices"][0]["logprobs"]["content"]
        stream = await events(served, "hello", **fields)
        deltas = [event["logprobs"] for event in stream if event["type"] == "response.output_text.delta"]
        assert stream[-4]["logprobs"] == logprobs
        assert [one for delta in deltas for one in delta] == logprobs[: sum(map(len, deltas))]
        without = await ask(served, "hello", max_output_tokens=9, include=["reasoning.encrypted_content"])
        assert without["output"][0]["content"][0]["logprobs"] == []

    run(scenario, parts=parts())


def test_a_json_schema_holds_and_is_shown():
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }

    async def scenario(served):
        form = {"type": "json_schema", "name": "form", "schema": schema, "strict": True}
        answer = await ask(served, "hello", max_output_tokens=60, text={"format": form}, ignore_eos=False)
        assert json.loads(text_of(answer))["a"] in ("x", "y")
        assert answer["text"]["format"] == {**form, "description": None}
        plain = await ask(served, "hello", max_output_tokens=2, text={"verbosity": "low"})
        assert plain["text"] == {"format": {"type": "text"}, "verbosity": "low"}
        served.parts.grammars.close()

    run(scenario, parts=parts())


def test_what_the_body_says_comes_back_and_nothing_is_stored():
    async def scenario(served):
        fields = {
            "metadata": {"a": "b"}, "top_p": 0.5, "user": "me", "truncation": "auto", "instructions": "Be brief.",
            "reasoning": {"effort": "low"}, "service_tier": "flex", "safety_identifier": "s",
        }  # fmt: skip
        for store in ({}, {"store": True}, {"store": False}):
            answer = await ask(served, "hello", max_output_tokens=2, **fields, **store)
            assert answer["store"] is False
        shown = {**fields, "reasoning": {"effort": "low", "summary": None}}
        assert {name: answer[name] for name in fields} == shown
        assert (answer["max_output_tokens"], answer["temperature"]) == (2, 0)
        response = await served.http.get(f"/v1/responses/{answer['id']}")
        assert response.status_code == 404

    run(scenario, parts=parts())


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no response is stored"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "no conversation is stored"),
        ({"background": True}, "background", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not stored"),
        ({"tools": [{"type": "web_search_preview"}]}, "tools[0]", "'web_search_preview' is not supported"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "has no name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "'file_search' is not supported"),
        ({"input": None}, "input", "missing"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "no item is stored"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "'computer_call' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]", "images"),
        ({"input": [{"role": "bot", "content": "x"}]}, "input[0]", "'bot'"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "a number"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments", "an object"),
        ({"input": [{"role": "user", "content": "x"}] * 8193}, "input", "at most 8192"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "0 must"),
        ({"messages": []}, "messages", "use input"),
        ({"n": 2}, "n", "use /v1/chat/completions"),
        ({"response_format": {"type": "json_object"}}, "response_format", "use text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "no schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "'grammar'"),
        ({"include": ["everything"]}, "include", "'everything'"),
        ({"metadata": {"a": 5}}, "metadata", "strings"),
        ({"truncation": "middle"}, "truncation", "'middle'"),
        ({"model": "gpt"}, "model", "'gpt'"),
        ({"input": "x" * 4000}, "input", ""),
        ({"slo": {"ttft": 5}}, "slo", "'ttft'"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(one_server, fields, param, text):
    status, error = one_server.post({"input": "hello", "max_output_tokens": 2, **fields})
    assert status == (404 if param == "model" else 400), error
    assert error["param"] == param
    assert text in error["message"]
    assert "\n" not in error["message"]


class _OneServer:
    """A server of the module, in a thread."""

    def __init__(self) -> None:
        self._ready, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: run(self._serve, limit_s=300, parts=parts()))
        self._thread.start()
        assert self._ready.wait(30)

    async def _serve(self, served: Any) -> None:
        self._served, self._loop = served, asyncio.get_running_loop()
        self._ready.set()
        await asyncio.to_thread(self._end.wait)

    def post(self, body: Any) -> tuple[int, dict[str, Any]]:
        future = asyncio.run_coroutine_threadsafe(self._served.post("/v1/responses", body), self._loop)
        response = future.result(30)
        return response.status_code, response.json().get("error")

    def close(self) -> None:
        self._end.set()
        self._thread.join(30)


@pytest.fixture(scope="module")
def one_server():
    server = _OneServer()
    yield server
    server.close()


# --- the life of a call --------------------------------------------------------------------------------------------


def test_a_stream_that_breaks_says_so_in_both_forms():
    def fault(batch):
        fault.steps += 1
        if fault.steps == 10:
            assert read.wait(30)
        return Fault(kind=FaultKind.NOT_FINITE) if fault.steps == 10 else None

    read = threading.Event()
    fault.steps = 0

    async def scenario(served):
        body = {"input": "hello", "stream": True, "max_output_tokens": 30, **GREEDY}
        async with served.http.stream("POST", "/v1/responses", json=body) as response:
            text = ""
            async for piece in response.aiter_text():
                text += piece
                read.set()
        *_, error, failed = events_of(text)
        assert error["type"] == "error"
        assert "not finite" in error["message"]
        assert error["error"]["code"] == "request_failed"  # what OpenAI's clients raise for
        assert failed["type"] == "response.failed"
        assert (failed["response"]["status"], failed["response"]["error"]["code"]) == ("failed", "server_error")

    run(scenario, parts=parts(fault=fault, debug=False))


def test_an_aborted_answer_is_a_failure():
    async def scenario(served):
        body = {"input": "hello", "max_output_tokens": 90, "request_id": "mine", **GREEDY}
        task = asyncio.create_task(served.post("/v1/responses", body))
        await served.until(lambda: served.parts.engine.num_live == 1)
        await asyncio.wrap_future(served.engine.abort("mine"))
        response = await task
        assert response.status_code == 500
        assert "aborted" in response.json()["error"]["message"]

    run(scenario, parts=parts(step_s=0.01))


def test_a_client_that_leaves_is_cancelled_and_a_deadline_ends_the_call(caplog):
    caplog.set_level("INFO")

    async def scenario(served):
        body = json.dumps({"input": "hello", "max_output_tokens": 90, **GREEDY}).encode()
        connection = await served.raw(post_head("/v1/responses", len(body)) + body)
        await served.until(lambda: served.parts.engine.num_live == 1)
        connection.writer.transport.abort()
        await served.idle(5)
        late = await served.post("/v1/responses", {"input": "hello", "slo": {"deadline_ms": 50}, **GREEDY})
        assert late.status_code == 408
        await served.idle()
        assert "/v1/responses" in caplog.text
        assert ": 499," in caplog.text

    run(scenario, parts=parts(step_s=0.01))


def test_the_id_finds_the_timeline_and_objectives_are_reported():
    async def scenario(served):
        answer = await ask(served, "hello", max_output_tokens=3, aptjax_timings=True, slo={"ttft_ms": 60000})
        assert answer["aptjax"]["slo"]["ttft_attained"] is True
        assert answer["id"] == f"resp_{answer['aptjax']['request_id']}"
        found = await served.http.get(f"/v1/requests/{answer['id']}/decisions")
        assert found.json()["request_id"] == answer["aptjax"]["request_id"]

    run(scenario, parts=parts())

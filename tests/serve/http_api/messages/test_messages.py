"""Anthropic's Messages API: the text of chat completions, its events and errors, and what is refused."""

import asyncio
import json
import threading
from typing import Any

import pytest

from apt_jax.text.chat import ChatTemplate
from tests.support.chat_templates import CHATML
from tests.support.fake_executor import Fault, FaultKind
from tests.support.http_serving import post_head, run
from tests.support.toy_serving import toy_parts

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
HELLO = [{"role": "user", "content": "hello"}]
HEADERS = {"anthropic-version": "2023-06-01", "x-api-key": "none"}


TEMPLATE = ChatTemplate(CHATML)


@pytest.fixture(scope="module", autouse=True)
def template():
    yield
    TEMPLATE.close()


def parts(**fields: Any):
    return toy_parts(chat_template=TEMPLATE, max_model_len=512, **fields)


async def ask(served: Any, **fields: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "max_tokens": 12, **GREEDY, **fields}
    response = await served.post("/v1/messages", body, headers=HEADERS)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "toy")
    return answer


async def events(served: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": HELLO, "max_tokens": 12, "stream": True, **GREEDY, **fields}
    response = await served.post("/v1/messages", body, headers=HEADERS)
    assert response.status_code == 200, response.text
    return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    made = []
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    for block in blocks:
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        made.append(event)
    return made


def error_of(response: Any) -> dict[str, Any]:
    """The error of an answer, in Anthropic's shape."""
    body = response.json()
    assert list(body) == ["type", "error"]
    assert body["type"] == "error"
    assert list(body["error"]) == ["type", "message"]
    assert "\n" not in body["error"]["message"]
    return body["error"]


async def chat(served: Any, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    response = await served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 12, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_has_the_text_and_the_usage_of_a_chat_completion():
    async def scenario(served):
        for system in ("Be brief.", [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}]):
            want = await chat(served, [{"role": "system", "content": "Be brief."}, *HELLO])
            answer = await ask(served, system=system)
            assert answer["content"] == [{"type": "text", "text": want["choices"][0]["message"]["content"]}]
            usage = answer["usage"]
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == want["usage"]["prompt_tokens"]
            assert usage["output_tokens"] == 12
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)

    run(scenario, parts=parts())


def test_a_stream_has_the_events_in_order():
    async def scenario(served):
        whole = await ask(served)
        stream = await events(served)
        kinds = [event["type"] for event in stream]
        assert kinds[:3] == ["message_start", "content_block_start", "ping"]
        assert {*kinds[3:-3]} == {"content_block_delta"}
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        start, block, end = stream[0]["message"], stream[1], stream[-2]
        assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
        assert (block["index"], block["content_block"]) == (0, {"type": "text", "text": ""})
        deltas = [event["delta"] for event in stream[3:-3]]
        assert {delta["type"] for delta in deltas} == {"text_delta"}
        assert "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"]
        assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
        assert end["usage"]["output_tokens"] == 12
        assert end["usage"]["input_tokens"] + end["usage"]["cache_read_input_tokens"] > 100

    run(scenario, parts=parts())


def test_a_stop_sequence_is_named_and_an_answer_may_be_empty():
    async def scenario(served):
        text = (await ask(served))["content"][0]["text"]
        answer = await ask(served, stop_sequences=["never", text[4]])
        assert answer["content"][0]["text"] == text[: text.index(text[4])]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[4])
        stream = await events(served, stop_sequences=[text[0]])
        assert [event["type"] for event in stream] == ["message_start", "message_delta", "message_stop"]
        assert stream[1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": text[0]}
        first = (await chat(served, HELLO, return_token_ids=True))["choices"][0]["token_ids"][0]
        ended = await ask(served, stop_token_ids=[first])
        assert (ended["content"], ended["stop_reason"]) == ([], "end_turn")

    run(scenario, parts=parts())


def test_tokens_are_counted_as_the_prompt_is():
    async def scenario(served):
        body = {"messages": HELLO, "system": "Be brief."}
        response = await served.post("/v1/messages/count_tokens", body, headers=HEADERS)
        want = await chat(served, [{"role": "system", "content": "Be brief."}, *HELLO])
        assert response.json() == {"input_tokens": want["usage"]["prompt_tokens"]}
        refused = await served.post("/v1/messages/count_tokens", {"messages": "hi"}, headers=HEADERS)
        assert refused.status_code == 400
        assert error_of(refused)["message"] == "messages: a string is not a list"

    run(scenario, parts=parts())


def test_a_last_message_of_the_assistant_goes_on():
    async def scenario(served):
        begun = [*HELLO, {"role": "assistant", "content": "Well"}]
        want = await chat(served, begun, continue_final_message=True, add_generation_prompt=False)
        answer = await ask(served, messages=begun)
        assert answer["content"][0]["text"] == want["choices"][0]["message"]["content"]
        count = await served.post("/v1/messages/count_tokens", {"messages": begun})
        assert count.json()["input_tokens"] == want["usage"]["prompt_tokens"]

    run(scenario, parts=parts())


def test_thinking_sets_the_variable_of_the_template():
    template = ChatTemplate("{{ messages[0].content }}{% if enable_thinking is false %} briefly{% endif %}")

    async def scenario(served):
        async def length(**fields: Any) -> int:
            response = await served.post("/v1/messages/count_tokens", {"messages": HELLO, **fields})
            return response.json()["input_tokens"]

        plain = await length()
        assert await length(thinking={"type": "enabled", "budget_tokens": 2000}) == plain
        assert await length(thinking={"type": "disabled"}) == plain + len(" briefly")
        kept = {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}}
        assert await length(**kept) == plain + len(" briefly")
        template.close()

    run(scenario, parts=toy_parts(chat_template=template))


def test_a_json_schema_holds_by_both_names():
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "schema": schema}

    async def scenario(served):
        for fields in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
            answer = await ask(served, max_tokens=60, ignore_eos=False, **fields)
            assert json.loads(answer["content"][0]["text"])["a"] in ("x", "y")
        served.parts.grammars.close()

    run(scenario, parts=parts())


REFUSALS = [
    ({"max_tokens": None}, "max_tokens: missing"),
    ({"max_tokens": 0}, "max_tokens: 0 must"),
    ({"temperature": 1.5}, "temperature: 1.5 must lie in [0, 1]"),
    ({"stop_sequences": "x"}, "stop_sequences: a string is not a list"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop": ["x"]}, "stop: is not a field of this API; use stop_sequences"),
    ({"messages": []}, "messages: must not be empty"),
    ({"messages": None}, "messages: missing"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]: role 'tool' must be one of"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "image"}]}]}, "messages[1].content[0]: images are"),
    ({"system": 5}, "system: a number is neither"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: the tool 'web_search_20250305' is not"),
    ({"tools": [{"name": "f"}]}, "tools[0]: must have a name, and an input_schema"),
    ({"tool_choice": "any"}, "tool_choice: must be"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice: names no tool"),
    ({"thinking": {"type": "deep"}}, "thinking: type 'deep' must be one of"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: is not supported"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: "),
    ({"metadata": {"user_id": 5}}, "metadata.user_id: "),
    ({"n": 2}, "n: is not supported here"),
    ({"service_tier": "flex"}, "service_tier: 'flex' must be one of"),
]  # fmt: skip


def test_what_cannot_be_served_is_refused_by_name():
    async def scenario(served):
        for fields, message in REFUSALS:
            response = await served.post("/v1/messages", {"messages": HELLO, "max_tokens": 2, **fields})
            assert response.status_code == 400, fields
            error = error_of(response)
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith(message), error
        response = await served.post("/v1/messages", {"model": "claude", "messages": HELLO, "max_tokens": 2})
        assert (response.status_code, error_of(response)["type"]) == (404, "not_found_error")
        response = await served.http.get("/v1/messages")
        assert (response.status_code, error_of(response)["type"]) == (405, "invalid_request_error")
        response = await served.http.get("/v1/messages/batches")
        assert (response.status_code, error_of(response)["type"]) == (404, "not_found_error")
        response = await served.http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"})
        assert (response.status_code, error_of(response)["type"]) == (415, "invalid_request_error")

    run(scenario, parts=parts())


# --- the life of a call --------------------------------------------------------------------------------------------


def test_a_stream_that_breaks_ends_with_an_error_event():
    def fault(batch):
        fault.steps += 1
        if fault.steps == 10:
            assert read.wait(30)
        return Fault(kind=FaultKind.NOT_FINITE) if fault.steps == 10 else None

    read = threading.Event()
    fault.steps = 0

    async def scenario(served):
        body = {"messages": HELLO, "stream": True, "max_tokens": 30, **GREEDY}
        async with served.http.stream("POST", "/v1/messages", json=body) as response:
            text = ""
            async for piece in response.aiter_text():
                text += piece
                read.set()
        *before, last = events_of(text)
        assert last["type"] == "error"
        assert last["error"]["type"] == "api_error"
        assert "not finite" in last["error"]["message"]
        assert "message_stop" not in [event["type"] for event in before]

    run(scenario, parts=parts(fault=fault, debug=False))


def test_a_full_queue_and_a_late_answer_have_anthropics_types():
    async def scenario(served):
        body = {"messages": HELLO, "max_tokens": 90, **GREEDY}
        first = [asyncio.create_task(served.post("/v1/messages", body)) for _ in range(6)]
        answers = await asyncio.gather(*first)
        full = [answer for answer in answers if answer.status_code == 429]
        assert full
        assert {error_of(answer)["type"] for answer in full} == {"rate_limit_error"}
        late = await served.post("/v1/messages", {**body, "slo": {"deadline_ms": 20}})
        assert (late.status_code, error_of(late)["type"]) == (408, "timeout_error")
        await served.idle()

    run(scenario, parts=parts(max_num_seqs=1, max_num_queued_reqs=1, step_s=0.005))


def test_a_client_that_leaves_is_cancelled(caplog):
    caplog.set_level("INFO")

    async def scenario(served):
        body = json.dumps({"messages": HELLO, "max_tokens": 90, "stream": True, **GREEDY}).encode()
        connection = await served.raw(post_head("/v1/messages", len(body)) + body)
        await served.until(lambda: served.parts.engine.num_live == 1)
        connection.writer.transport.abort()
        await served.idle(5)
        assert "/v1/messages" in caplog.text
        assert ": 499," in caplog.text

    run(scenario, parts=parts(step_s=0.01))


def test_objectives_are_reported_and_the_id_finds_the_timeline():
    async def scenario(served):
        answer = await ask(served, aptjax_timings=True, slo={"ttft_ms": 60000})
        assert answer["aptjax"]["slo"]["ttft_attained"] is True
        found = await served.http.get(f"/v1/requests/{answer['id']}/decisions")
        assert found.json()["request_id"] == answer["aptjax"]["request_id"]
        *_, end, _ = await events(served, aptjax_timings=True)
        assert end["aptjax"]["slo"]["class"] == "rt"

    run(scenario, parts=parts())

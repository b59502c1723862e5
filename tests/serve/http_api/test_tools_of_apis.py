"""Tools over the Responses and Messages APIs: the calls of chat completions, streamed or not, and their results back."""

import json
from typing import Any

import pytest

from apt_jax.text.chat import ChatTemplate
from tests.support.chat_templates import CHATML
from tests.support.http_serving import run
from tests.support.toy_serving import toy_parts

pytest.importorskip("llguidance")

GREEDY: dict[str, Any] = {"temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION = "Weather?"


def chat_body(choice: Any) -> dict[str, Any]:
    functions = [{"name": name, "description": "d", "parameters": SCHEMA} for name in ("weather", "time")]
    return {
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 120,
        **GREEDY,
    }


def responses_body(choice: Any) -> dict[str, Any]:
    tools = [
        {"type": "function", "name": name, "description": "d", "parameters": SCHEMA} for name in ("weather", "time")
    ]
    return {
        "input": QUESTION, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 120,
        **GREEDY,
    }  # fmt: skip


def messages_body(choice: Any) -> dict[str, Any]:
    tools = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("weather", "time")]
    return {
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": tools,
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "max_tokens": 120,
        **GREEDY,
    }


async def answer(served: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await served.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(served: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await served.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(block.partition("\ndata: ")[2]) for block in response.text.split("\n\n") if block]


def test_a_required_call_is_that_of_a_chat_completion():
    async def scenario(served):
        chat = await answer(served, "/v1/chat/completions", chat_body("required"))
        (want,) = chat["choices"][0]["message"]["tool_calls"]
        name, arguments = want["function"]["name"], want["function"]["arguments"]
        assert json.loads(arguments)["city"] in ("Paris", "Rome")

        response = await answer(served, "/v1/responses", responses_body("required"))
        (call,) = response["output"]
        assert (call["type"], call["status"], response["status"]) == ("function_call", "completed", "completed")
        assert (call["name"], call["arguments"]) == (name, arguments)
        events = await streamed(served, "/v1/responses", responses_body("required"))
        deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
        assert "".join(deltas) == arguments
        assert events[-1]["response"]["output"][0]["call_id"].startswith("call_")

        message = await answer(served, "/v1/messages", messages_body({"type": "any"}))
        (use,) = message["content"]
        assert (use["type"], use["name"], use["input"]) == ("tool_use", name, json.loads(arguments))
        assert message["stop_reason"] == "tool_use"
        events = await streamed(served, "/v1/messages", messages_body({"type": "any"}))
        deltas = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
        assert "".join(deltas) == arguments
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        served.parts.grammars.close()

    run(scenario, parts=toy_parts(chat_template=ChatTemplate(CHATML), max_model_len=2048, num_blocks=2048))


def test_a_named_and_an_allowed_function_are_called():
    async def scenario(served):
        named = responses_body({"type": "function", "name": "time"})
        (call,) = (await answer(served, "/v1/responses", named))["output"]
        assert call["name"] == "time"
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
        response = await answer(served, "/v1/responses", responses_body(allowed))
        (call,) = response["output"]
        assert call["name"] == "time"
        assert response["tool_choice"] == allowed
        assert len(response["tools"]) == 2
        message = await answer(served, "/v1/messages", messages_body({"type": "tool", "name": "time"}))
        assert message["content"][0]["name"] == "time"
        absent = {**allowed, "tools": [{"type": "function", "name": "other"}]}
        response = await served.post("/v1/responses", responses_body(absent))
        assert response.json()["error"]["param"] == "tool_choice"
        served.parts.grammars.close()

    run(scenario, parts=toy_parts(chat_template=ChatTemplate(CHATML), max_model_len=2048, num_blocks=2048))


def test_results_go_back_as_in_a_chat_completion():
    async def scenario(served):
        called = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": '{"city":"Rome"}'}}
        history = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        ]
        chat = {**chat_body("none"), "messages": history, "max_tokens": 9}
        want = (await answer(served, "/v1/chat/completions", chat))["usage"]["prompt_tokens"]
        items = [
            {"role": "user", "content": QUESTION},
            {"type": "function_call", "call_id": "c1", "name": "time", "arguments": '{"city":"Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        ]
        response = await answer(
            served, "/v1/responses", {**responses_body("none"), "input": items, "max_output_tokens": 9}
        )
        assert response["usage"]["input_tokens"] == want
        blocks = [
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "time", "input": {"city": "Rome"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "noon"}]},
        ]
        body = {**messages_body({"type": "none"}), "messages": blocks}
        counted = await answer(served, "/v1/messages/count_tokens", body)
        assert counted["input_tokens"] == want

    run(scenario, parts=toy_parts(chat_template=ChatTemplate(CHATML), max_model_len=2048, num_blocks=2048))


@pytest.mark.parametrize("max_tokens", [2, 8, 30])
def test_a_required_call_that_is_cut_off_leaves_no_content(max_tokens):
    """All three APIs, and a stream."""

    async def scenario(served):
        body = {**chat_body("required"), "max_tokens": max_tokens}
        (choice,) = (await answer(served, "/v1/chat/completions", body))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
        response = await served.post("/v1/chat/completions", {**body, "stream": True})
        chunks = [
            json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: {")
        ]
        assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)
        body = {**responses_body("required"), "max_output_tokens": max_tokens}
        items = (await answer(served, "/v1/responses", body))["output"]
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        assert not any(texts)
        body = {**messages_body({"type": "any"}), "max_tokens": max_tokens}
        blocks = (await answer(served, "/v1/messages", body))["content"]
        assert {block["type"] for block in blocks} <= {"tool_use"}

    run(scenario, parts=toy_parts(chat_template=ChatTemplate(CHATML), max_model_len=2048, num_blocks=2048))

"""Sessions as clients name them, over HTTP and gRPC."""

import json
from typing import Any

import pytest

from apt_jax.engine.sessions import Sessions
from apt_jax.sched.retention.sessions import PERSON, TOOL
from apt_jax.text.chat import ChatTemplate
from serve.grpc_api.messages import slo_fields
from serve.security.api_keys import ApiKeys
from serve.slo_headers import session_id
from tests.support.http_serving import bearer, run

KEY, OTHER = "sk-0123456789abcdefghij", "sk-another-key-of-a-tenant"
TEMPLATE = ChatTemplate("{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a long beginning of a chat"}], "max_tokens": 2}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def sessions_of(served) -> Sessions:
    found = served.parts.engine.states.sessions
    assert found is not None
    return found


def names_of(served) -> set[str]:
    return {name for _, name in sessions_of(served)._named}


def test_every_api_takes_the_session_that_its_clients_send():
    async def scenario(served):
        calls: list[tuple[str, dict[str, Any], dict[str, str], str]] = [
            ("/v1/completions", {"prompt": "x", "max_tokens": 1, "session_id": "own"}, {}, "own"),
            ("/v1/completions", {"prompt": "x", "max_tokens": 1, "prompt_cache_key": "openai"}, {}, "openai"),
            ("/v1/chat/completions", {**CHAT, "prompt_cache_key": "chat"}, {"x-session-id": "less"}, "chat"),
            ("/v1/chat/completions", CHAT, {"x-session-id": "header"}, "header"),
            ("/v1/responses", {"input": "x", "max_output_tokens": 1, "prompt_cache_key": "codex"}, {}, "codex"),
            ("/v1/messages", CHAT, {"x-claude-code-session-id": "claude"}, "claude"),
            ("/v1/messages", {**CHAT, "metadata": {"user_id": "user_1_account__session_abc-1"}}, {}, "abc-1"),
            ("/api/chat", {**CHAT, "model": "toy", "stream": False}, {"x-session-id": "ollama"}, "ollama"),
        ]  # fmt: skip
        seen = set()
        for path, body, headers, name in calls:
            response = await served.post(path, body, headers=headers)
            assert response.status_code == 200, (path, response.text)
            seen.add(name)
            assert names_of(served) == seen, path

    run(scenario, chat_template=TEMPLATE, retention="knapsack")


def test_who_works_after_an_answer_follows_from_the_tools_offered():
    async def scenario(served):
        for fields, work in (({}, PERSON), ({"tools": TOOLS}, TOOL), ({"tools": TOOLS, "tool_choice": "none"}, PERSON)):
            body = {**CHAT, **fields, "session_id": f"s{work}{len(fields)}"}
            response = await served.post("/v1/chat/completions", body)
            assert response.status_code == 200, response.text
            rows = {name: rows for (_, name), rows in sessions_of(served)._named.items()}
            assert sessions_of(served).table.work[rows[f"s{work}{len(fields)}"]].tolist() == [work]

    run(scenario, chat_template=TEMPLATE, retention="knapsack")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
@pytest.mark.parametrize("streamed", [False, True])
def test_who_works_after_an_answer_is_known_once_the_answer_is_parsed(path, streamed):
    """A tool if the answer calls one; a person if tools were offered in vain."""
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    anthropic = [{"name": "f", "input_schema": {"type": "object"}}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {**CHAT, "tools": TOOLS},
        "/v1/messages": {**CHAT, "tools": anthropic},
        "/v1/responses": {"input": "a long beginning of a chat", "max_output_tokens": 2, "tools": flat},
        "/api/chat": {"messages": CHAT["messages"], "model": "toy", "tools": TOOLS, "options": {"num_predict": 2}},
    }
    required: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"tool_choice": "required", "max_tokens": 64},
        "/v1/messages": {"tool_choice": {"type": "any"}, "max_tokens": 64},
        "/v1/responses": {"tool_choice": "required", "max_output_tokens": 64},
    }

    async def scenario(served):
        async def work(name: str, fields: dict[str, Any]) -> int:
            body = {**bodies[path], **fields, "stream": streamed}
            response = await served.post(path, body, headers={"x-session-id": name})
            assert response.status_code == 200, response.text
            (row,) = next(rows for (_, known), rows in sessions_of(served)._named.items() if known == name)
            return row

        spoke = await work("spoke", {})
        called = await work("called", required[path]) if path in required else None
        await work("next", {})  # before it arrives, both are known
        table = sessions_of(served).table
        assert table.work[spoke] == PERSON
        assert called is None or table.work[called] == TOOL

    run(scenario, chat_template=TEMPLATE, retention="cache-ttl")


def test_a_session_is_ended_by_its_own_key_alone():
    async def scenario(served):
        async def cached(key: str) -> int:
            body = {"prompt": "the same long beginning of a prompt", "max_tokens": 2, "session_id": "s/1"}
            response = await served.post("/v1/completions", body, headers=bearer(key))
            return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        async def end(key: str) -> dict[str, Any]:
            response = await served.http.request("DELETE", "/v1/sessions/s%2F1", headers=bearer(key))
            assert response.status_code == 200
            return response.json()

        assert await cached(KEY) == 0
        assert await end(OTHER) == {"id": "s/1", "object": "session.deleted", "deleted": False}
        assert await cached(KEY) > 0
        assert await end(KEY) == {"id": "s/1", "object": "session.deleted", "deleted": True}
        assert await end(KEY) == {"id": "s/1", "object": "session.deleted", "deleted": False}  # it has ended before
        assert await cached(KEY) == 0

    run(scenario, retention="knapsack", app={"keys": ApiKeys([KEY, OTHER])})


def test_without_retention_there_is_nothing_to_end():
    async def scenario(served):
        response = await served.http.request("DELETE", "/v1/sessions/s")
        assert response.json()["deleted"] is False

    run(scenario)


@pytest.mark.parametrize("value", ["", 5, "x" * 513, ["a"]])
def test_a_name_that_is_none_is_refused(value):
    async def scenario(served):
        response = await served.post("/v1/completions", {"prompt": "x", "session_id": value})
        assert response.status_code == 400
        assert "1 to 512 characters" in response.json()["error"]["message"]

    run(scenario)


@pytest.mark.parametrize("value", ["a\nb", "\0", "a\x7f", "\x9b", "a\u2028"])
def test_a_name_with_control_characters_is_refused_without_printing_them(value):
    async def scenario(served):
        response = await served.post("/v1/completions", {"prompt": "x", "session_id": value})
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "must not contain control characters" in message
        assert message.isprintable()

    run(scenario)


def test_a_cache_key_that_is_no_name_is_ignored():
    async def scenario(served):
        for key in ("", "x" * 513, "a\nb", "\ud800", "k"):
            data = json.dumps({"prompt": "x", "max_tokens": 1, "prompt_cache_key": key}).encode()
            headers = {"content-type": "application/json"}
            response = await served.http.post("/v1/completions", content=data, headers=headers)
            assert response.status_code == 200
        assert names_of(served) == {"k"}

    run(scenario, retention="knapsack")


def test_headers_of_clients_that_do_not_know_the_server_are_never_refused():
    assert session_id({"x-session-id": " a ", "session-id": "b"}) == "a"
    assert session_id({"session_id": b"codex"}) == "codex"
    for bad in ("", " ", "x" * 513, "a\x00b", b"\xff\x00"):
        assert session_id({"x-session-id": bad}) is None
    assert session_id({}) is None


def test_metadata_of_grpc_calls_name_sessions_too():
    assert slo_fields([("x-session-id", "a"), ("x-session-id", "b")])["session_id"] == "a"
    assert slo_fields([])["session_id"] is None

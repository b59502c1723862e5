"""Requests in the shape in which Claude Code and Codex send them, and what is left out of them."""

import logging
from typing import Any

import pytest

from apt_jax.errors import InvalidRequestError
from apt_jax.text.chat import ChatTemplate
from serve.http_api import translation
from serve.http_api.messages import request as messages_request
from serve.http_api.messages.content import messages_of
from serve.http_api.responses import request as responses_request
from serve.http_api.responses import tools as responses_tools
from tests.support.toy_serving import toy_parts

pytest.importorskip("llguidance")

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}<{{ c.function.name }}>{% endfor %}|{% endfor %}"
)


@pytest.fixture(scope="module")
def parts():
    template = ChatTemplate(TEMPLATE)
    yield toy_parts(chat_template=template, max_model_len=4096)
    template.close()


def billing(cch: str) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch={cch};"


def claude_code(**fields: Any) -> dict[str, Any]:
    return {
        "model": "toy",
        "max_tokens": 32,
        "stream": True,
        "metadata": {"user_id": "user_0_account__session_1"},
        "system": [
            {"type": "text", "text": billing("36ee5")},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}, {"type": "text", "text": "hi"}]},
            {"role": "system", "content": "Mode: plan."},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}, "caller": {"type": "direct"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "README", "is_error": False, "cache_control": {"type": "ephemeral"}},
            ]},
        ],
        "tools": [
            {"name": "Bash", "description": "Run.", "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"], "additionalProperties": False}, "eager_input_streaming": True, "defer_loading": False},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "betas": ["context-management-2025-06-27"],
        "diagnostics": {"previous_message_id": None},
        "temperature": 1,
        **fields,
    }  # fmt: skip


def codex(**fields: Any) -> dict[str, Any]:
    return {
        "model": "toy",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "abc"},
            {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "README"},
            {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
            {"type": "local_shell_call", "call_id": "call_2", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "call_2", "output": "README"},
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "d", "strict": False, "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}, "required": ["command"], "additionalProperties": False}},
            {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}},
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation", "output_format": "png"},
            {"type": "namespace", "name": "mcp", "description": "d", "tools": []},
            {"type": "local_shell"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198",
        "client_metadata": {"x-codex-installation-id": "1"},
        "text": {"verbosity": "low"},
        **fields,
    }  # fmt: skip


def prompt(parts, call) -> str:
    return parts.tokenizer.decode(call.requests[0].prompt_token_ids.tolist())


def test_requests_of_claude_code_are_served(parts):
    got = prompt(parts, messages_request.read_call(parts, claude_code(), {}, 0.0))
    assert got == (
        "Bash;system: You are an agent.Be brief.|user: <system-reminder>x</system-reminder>hi|system: Mode: plan.|"
        "assistant: <Bash>|tool: README|"
    )
    counted = claude_code()
    for name in ("max_tokens", "stream", "temperature", "metadata"):
        del counted[name]
    assert messages_request.count_tokens(parts, counted).startswith(b'{"input_tokens":')


def test_requests_of_codex_are_served(parts):
    got = prompt(parts, responses_request.read_call(parts, codex(), {}, 0.0))
    assert got == (
        "shell;apply_patch;system: You are an agent.\n\n<permissions>|user: <environment_context>|user: hi|"
        "assistant: <shell>|tool: README|assistant: <local_shell>|tool: README|"
    )


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ([{"type": "text", "text": billing("{}")}, {"type": "text", "text": "Be."}], ["Be."]),
        ([{"type": "text", "text": billing("{}") + "\nBe."}], ["Be."]),
        ([{"type": "text", "text": billing("{}") + "Be."}], ["Be."]),
        (billing("{}") + "\nBe.", "Be."),
        (billing("{}"), ""),
        ([{"type": "text", "text": "Be."}, {"type": "text", "text": billing("1")}], ["Be.", billing("1")]),
        ("About x-anthropic-billing-header: a=b;", "About x-anthropic-billing-header: a=b;"),
        ([], []),
    ],
)
def test_a_line_that_differs_in_every_request_is_no_part_of_the_prompt(system, expected):
    for cch in ("36ee5", "0aaa9"):
        given = (
            system.replace("{}", cch)
            if isinstance(system, str)
            else [{**block, "text": block["text"].replace("{}", cch)} for block in system]
        )
        content = messages_of(given, [{"role": "user", "content": "hi"}])[0]["content"]
        assert (content if isinstance(content, str) else [part["text"] for part in content]) == expected


def test_tools_that_the_server_would_run_are_left_out_beside_others_and_named_once(caplog):
    translation._left_out.clear()
    shell, search = {"type": "function", "name": "shell"}, {"type": "web_search"}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made, shown = responses_tools.chat_tools([search, shell])
    assert [tool["function"]["name"] for tool in made] == [tool["name"] for tool in shown] == ["shell"]
    assert [record.getMessage() for record in caplog.records if "web_search" in record.getMessage()] == [
        "requests list the tool 'web_search', which this server does not run: it is left out"
    ]
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]: the tool 'web_search' is not supported"):
        responses_tools.chat_tools([search])


def test_what_other_servers_have_run_stands_in_the_conversation():
    turn = [
        {"type": "text", "text": "Let me look."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "x", "page_age": None}]},
        {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "echo", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False, "content": [{"type": "text", "text": "r"}]},
        {"type": "text", "text": "Done.", "citations": []},
    ]  # fmt: skip
    made = messages_of(None, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": turn}])
    assert [(m["role"], m.get("tool_call_id"), [c["function"]["name"] for c in m.get("tool_calls", ())]) for m in made] == [
        ("user", None, []), ("assistant", None, ["web_search"]), ("tool", "srvtoolu_1", []),
        ("assistant", None, ["echo"]), ("tool", "mcptoolu_1", []), ("assistant", None, []),
    ]  # fmt: skip
    assert made[2]["content"] == '{"type": "web_search_result", "title": "T", "url": "u"}'
    assert made[4]["content"] == "r"
    assert made[5]["content"] == [{"type": "text", "text": "Done."}]

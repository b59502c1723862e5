"""Converts tools of the Responses API to tools of a chat completion. Only functions and custom tools are supported, not
tools that the server would have to run."""

from collections.abc import Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.text.chat import MAX_TOOLS
from apt_jax.validation import check_flag
from serve.http_api.records import quoted
from serve.http_api.translation import leave_out_tools

CHOICES = ("auto", "none", "required")
KINDS = ("function", "custom")

Tool = dict[str, Any]


def chat_tools(tools: object) -> tuple[list[Tool], list[Tool]]:
    """Return the tools in the format of chat completions, and the tools as the response shows them. Tools that the
    server would have to run are left out of both.

    Raises:
        InvalidRequestError: a tool is malformed, or the server would have to run all of them.
    """
    if tools is None:
        return [], []
    if not isinstance(tools, list):
        raise InvalidRequestError("tools", f"{json_kind(tools)} is not a list of tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"{len(tools)} tools; at most {MAX_TOOLS}")
    made, shown = [], []
    others: dict[str, str] = {}
    for number, tool in enumerate(tools):
        field = f"tools[{number}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or not isinstance(kind, str):
            raise InvalidRequestError(field, 'must be {"type": "function", "name": ..., "parameters": ...}')
        if kind == "custom":
            facts = {key: tool[key] for key in ("name", "description", "format") if tool.get(key) is not None}
            grammar = facts.get("format")
            if isinstance(grammar, Mapping) and grammar.get("syntax") == "lark":  # Codex checks the text itself
                facts["format"] = {"type": "text"}
            made.append({"type": "custom", "custom": facts})
            shown.append({"type": "custom", **facts})
            continue
        if kind != "function":
            others.setdefault(kind, field)
            continue
        name, strict = tool.get("name"), tool.get("strict")
        if not isinstance(name, str):
            raise InvalidRequestError(field, "has no name")
        if strict is not None:
            check_flag(f"{field}.strict", strict)
        facts = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
        made.append({"type": "function", "function": {"name": name, **facts}})
        shown.append(
            {"type": "function", "name": name, "description": None, "parameters": None, "strict": None, **facts}
        )
    leave_out_tools(next(iter(others.values()), "tools"), others, bool(made))
    return made, shown


def chat_choice(choice: object) -> object:
    """Return `tool_choice` in the format of chat completions.

    Raises:
        InvalidRequestError: `choice` is malformed, or asks for a tool that the server would have to run.
    """
    if isinstance(choice, str) and choice in CHOICES:
        return choice
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind in KINDS and isinstance(choice.get("name"), str):
            return {"type": kind, kind: {"name": choice["name"]}}
        if kind == "allowed_tools":
            return _allowed(choice)
        if kind is not None and kind not in KINDS:
            raise InvalidRequestError("tool_choice", f"the type {quoted(kind)} is not supported; name a function")
    raise InvalidRequestError(
        "tool_choice", f'must be one of {", ".join(CHOICES)}, or {{"type": "function", "name": ...}}'
    )


def _allowed(choice: Mapping[str, Any]) -> object:
    given = choice.get("tools")
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        return {"type": "allowed_tools", "allowed_tools": None}  # rejected when the chat completion is checked
    tools = []
    for tool in given:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in KINDS or not isinstance(tool.get("name"), str):
            raise InvalidRequestError("tool_choice", 'allowed_tools must be {"type": "function", "name": ...}')
        tools.append({"type": kind, kind: {"name": tool["name"]}})
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}

"""Converts tools of Anthropic's API to tools of a chat completion. Only tools that the client runs are supported."""

import re
from collections.abc import Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.text.chat import MAX_TOOLS
from apt_jax.validation import check_flag
from serve.http_api.records import quoted
from serve.http_api.translation import leave_out_tools

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

OTHER_PATTERN = r"[a-z_]{1,64}_[0-9]{8}"
"""Pattern of the types of Anthropic's predefined tools, which have no schema in the request."""
_OTHER = re.compile(OTHER_PATTERN)

Tool = dict[str, Any]


def chat_tools(tools: object) -> list[Tool]:
    """Return the tools in the format of chat completions, without Anthropic's predefined tools.

    Raises:
        InvalidRequestError: a tool is malformed, or all tools are predefined by Anthropic.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidRequestError("tools", f"{json_kind(tools)} is not a list of tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"{len(tools)} tools; at most {MAX_TOOLS}")
    made = []
    others: dict[str, str] = {}
    for number, tool in enumerate(tools):
        field = f"tools[{number}]"
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(field, 'must be {"name": ..., "input_schema": ...}')
        if tool.get("type") not in (None, "custom"):
            if not isinstance(tool["type"], str) or not _OTHER.fullmatch(tool["type"]):
                kind = quoted(tool["type"])
                raise InvalidRequestError(
                    field, f"the type {kind} is not supported; leave it out, and give an input_schema"
                )
            others.setdefault(tool["type"], field)
            continue
        name, schema, strict = tool.get("name"), tool.get("input_schema"), tool.get("strict")
        if not isinstance(name, str) or not isinstance(schema, Mapping):
            raise InvalidRequestError(field, "must have a name, and an input_schema that is an object")
        facts = {"name": name, "description": tool.get("description"), "parameters": schema}
        if strict is not None:
            facts["strict"] = check_flag(f"{field}.strict", strict)
        made.append({"type": "function", "function": {k: v for k, v in facts.items() if v is not None}})
    leave_out_tools(next(iter(others.values()), "tools"), others, bool(made))
    return made


def chat_choice(choice: object) -> tuple[object, bool | None]:
    """Convert `tool_choice` of Anthropic's API to `tool_choice` and `parallel_tool_calls` of a chat completion.

    Raises:
        InvalidRequestError: `choice` is malformed.
    """
    if choice is None:
        return None, None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(kind, str) or kind not in (*_CHOICES, "tool"):
        raise InvalidRequestError("tool_choice", 'must be {"type": ...} with one of auto, any, tool, none')
    alone = choice.get("disable_parallel_tool_use")
    parallel = None if alone is None else not check_flag("tool_choice.disable_parallel_tool_use", alone)
    if kind != "tool":
        return _CHOICES[kind], parallel
    if not isinstance(choice.get("name"), str):
        raise InvalidRequestError("tool_choice", "names no tool")
    return {"type": "function", "function": {"name": choice["name"]}}, parallel

"""Tools of the Responses API to those of a chat completion: functions, and nothing that the server would have to run."""

from collections.abc import Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError
from apt_jax.text.chat import MAX_TOOLS
from apt_jax.validation import check_flag
from serve.http_api.translation import quoted

CHOICES = ("auto", "none", "required")

Tool = dict[str, Any]


def chat_tools(tools: object) -> tuple[list[Tool], list[Tool]]:
    """Return the tools as chat completions have them, and as the answer shows them.

    Raises:
        InvalidRequestError: they are malformed, or one is no function.
    """
    if tools is None:
        return [], []
    if not isinstance(tools, list):
        raise InvalidRequestError("tools", f"{type(tools).__name__} is not a list of tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"{len(tools)} tools; at most {MAX_TOOLS}")
    made, shown = [], []
    for number, tool in enumerate(tools):
        field = f"tools[{number}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or kind is None:
            raise InvalidRequestError(field, 'must be {"type": "function", "name": ..., "parameters": ...}')
        if kind != "function":
            raise InvalidRequestError(field, f"the tool {quoted(kind)} is not supported; only functions are")
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
    return made, shown


def chat_choice(choice: object) -> tuple[object, list[str] | None]:
    """Return `tool_choice` as chat completions have it, and the names of the only functions that are allowed, if some are
    named.

    Raises:
        InvalidRequestError: it is malformed, or asks for a tool that is no function.
    """
    if isinstance(choice, str) and choice in CHOICES:
        return choice, None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if isinstance(choice, Mapping):
        if kind == "function" and isinstance(choice.get("name"), str):
            return {"type": "function", "function": {"name": choice["name"]}}, None
        if kind == "allowed_tools":
            return _allowed(choice)
        if kind is not None and kind != "function":
            raise InvalidRequestError("tool_choice", f"the type {quoted(kind)} is not supported; name a function")
    raise InvalidRequestError(
        "tool_choice", f"must be one of {', '.join(CHOICES)}, or {{'type': 'function', 'name': ...}}"
    )


def _allowed(choice: Mapping[str, Any]) -> tuple[object, list[str]]:
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools or len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            "tool_choice", f"allowed_tools must have a mode, auto or required, and 1 to {MAX_TOOLS} tools"
        )
    names = []
    for tool in tools:
        named = isinstance(tool, Mapping) and tool.get("type") == "function" and isinstance(tool.get("name"), str)
        if not named:
            raise InvalidRequestError("tool_choice", "allowed_tools must be {'type': 'function', 'name': ...}")
        names.append(tool["name"])
    return mode, names

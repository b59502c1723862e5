"""The tools of a request: functions, and which of them the model may or must call."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from apt_jax.errors import InvalidRequestError
from apt_jax.text.chat import MAX_TOOLS, checked_tools
from apt_jax.validation import check_flag
from apt_jax.validation.limits import MAX_TOOL_CALLS
from serve.http_api.tool_calls.other_forms import function_of

NAME_PATTERN = r"[a-zA-Z0-9_-]{1,64}"
_NAME = re.compile(NAME_PATTERN)

Mode = Literal["none", "auto", "required"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, which describes an object."""
    strict: bool
    """True if arguments must match the schema exactly, even if no call is required."""
    is_custom: bool = False
    """True if the function represents a custom tool."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolSet:
    """Functions, and how the model may use them."""

    definitions: Sequence[Mapping[str, Any]] | None = None
    """Tool definitions for the chat template, in OpenAI's format; None: the prompt does not describe tools."""
    functions: Sequence[Function] = ()
    """Functions that the model may call."""
    mode: Mode = "none"
    """Use of the functions: "none" forbids calls, "auto" allows calls, and "required" demands at least one call."""
    max_calls: int = MAX_TOOL_CALLS
    """Maximum number of calls in one output."""


NO_TOOLS = ToolSet()


def read_tools(tools: object, choice: object = None, parallel: object = None) -> ToolSet:
    """Check the tools of a request, in the format of chat completions.

    Args:
        tools: a list of ``{"type": "function", "function": {"name", "description", "parameters", "strict"}}`` and
            ``{"type": "custom", "custom": {"name", "description", "format"}}``; None or empty: no tools.
        choice: ``"none"``, ``"auto"``, ``"required"``, ``{"type": "function", "function": {"name": ...}}``,
            ``{"type": "custom", "custom": {"name": ...}}`` or
            ``{"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}``; None means ``"auto"``.
        parallel: False allows at most one call; None means True.

    Raises:
        InvalidRequestError: a value is invalid; `.field` begins with ``tools``, ``tool_choice`` or
            ``parallel_tool_calls``.
    """
    custom: list[bool] = []
    if isinstance(tools, list) and len(tools) <= MAX_TOOLS:
        custom = [isinstance(tool, Mapping) and tool.get("type") == "custom" for tool in tools]
        tools = [
            function_of(f"tools[{n}]", tool) if is_custom else tool
            for n, (tool, is_custom) in enumerate(zip(tools, custom, strict=True))
        ]
    checked = checked_tools(tools) or []
    functions = [
        _function(number, tool["function"], bool(custom) and custom[number]) for number, tool in enumerate(checked)
    ]
    by_name = {function.name: function for function in functions}
    if len(by_name) < len(functions):
        raise InvalidRequestError("tools", "two functions have the same name")
    several = parallel is None or check_flag("parallel_tool_calls", parallel)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(choice, by_name)
        checked = [tool for tool in checked if tool["function"]["name"] in allowed]
        functions = [function for function in functions if function.name in allowed]
    named = _named(choice)
    if named is None and choice not in (None, "none", "auto", "required"):
        raise InvalidRequestError(
            "tool_choice",
            'must be none, auto, required, or {"type": "function", "function": {"name": ...}}',
        )
    if not functions:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice", "asks for a call; give the functions in tools")
        return NO_TOOLS
    if choice == "none":
        return NO_TOOLS
    if named is not None and named not in by_name:
        raise InvalidRequestError("tool_choice", f"{named[:64]!r} is not the name of a function in tools")
    return ToolSet(
        definitions=[_for_template(tool) for tool in checked],
        functions=functions if named is None else [by_name[named]],
        mode="auto" if choice in (None, "auto") else "required",
        max_calls=MAX_TOOL_CALLS if several and named is None else 1,
    )


def _named(choice: object) -> str | None:
    """Return the name of the tool that a choice names; None for other choices."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    tool = choice.get(kind) if isinstance(choice, Mapping) and kind in ("function", "custom") else None
    name = tool.get("name") if isinstance(tool, Mapping) else None
    return name if isinstance(name, str) else None


def _allowed(choice: Mapping[str, Any], known: Mapping[str, Function]) -> tuple[str, frozenset[str]]:
    """Return the mode and the tool names of an ``allowed_tools`` choice."""
    allowed = choice.get("allowed_tools")
    mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidRequestError(
            "tool_choice", f"allowed_tools must have a mode, auto or required, and 1 to {MAX_TOOLS} tools"
        )
    names = frozenset(_named(tool) for tool in tools)
    unknown = next((name for name in names if name is None or name not in known), None)
    if None in names:
        raise InvalidRequestError(
            "tool_choice", 'allowed_tools must be {"type": "function", "function": {"name": ...}}'
        )
    if unknown is not None:
        raise InvalidRequestError("tool_choice", f"{unknown[:64]!r} is not the name of a function in tools")
    return mode, frozenset(name for name in names if name is not None)


def _function(number: int, given: Mapping[str, Any], is_custom: bool) -> Function:
    name, parameters, strict = given["name"], given.get("parameters"), given.get("strict")
    field = f"tools[{number}]"
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(field, f"the name {name[:64]!r} must match {NAME_PATTERN}")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidRequestError(field, f"parameters of {name!r} must be a JSON schema of an object")
    if "x-guidance" in parameters:
        raise InvalidRequestError(field, "'x-guidance' is not accepted in parameters; leave it out")
    if strict is not None:
        strict = check_flag(f"{field}.strict", strict)
    return Function(name=name, parameters=parameters, strict=bool(strict), is_custom=is_custom)


def _for_template(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool definition without `strict`, which models have not seen in training."""
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {**tool, "function": function}

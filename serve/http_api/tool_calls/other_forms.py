"""Converts other kinds of tools in chat completions to functions in `tools`: OpenAI's older fields `functions` and
`function_call`, and its custom tools, whose input is text.

A custom tool becomes a function with one argument, the text `input`. Responses show its calls as calls of a custom tool.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError, json_kind

INPUT = "input"
"""Name of the argument of a function that represents a custom tool."""
OLD_NAMES = {"tools": "functions", "tool_choice": "function_call"}
"""Maps fields to the older fields with the same meaning."""
_SYNTAXES = ("lark", "regex")

Json = dict[str, Any]


def uses_functions(body: Mapping[str, Any]) -> bool:
    """Return whether a body has `functions`, in which case its response has `function_call`."""
    return bool(body.get("functions"))


def with_tools(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of a chat completion with `functions` converted to `tools`, and all calls in its messages converted
    to function calls.

    Raises:
        InvalidRequestError: a field is malformed, or both `functions` and `tools` are given.
    """
    functions, choice = body.get("functions"), body.get("function_call")
    changed: Json = {}
    if uses_functions(body):
        if body.get("tools"):
            raise InvalidRequestError("functions", "cannot be given together with tools; put the functions there")
        if not isinstance(functions, list):
            raise InvalidRequestError("functions", f"{json_kind(functions)} is not a list of functions")
        changed["tools"] = [{"type": "function", "function": function} for function in functions]
        changed["tool_choice"] = _old_choice(choice)
        changed["parallel_tool_calls"] = False
    elif functions not in (None, []):
        raise InvalidRequestError("functions", f"{json_kind(functions)} is not a list of functions")
    elif choice not in (None, "none", "auto"):
        raise InvalidRequestError("function_call", "asks for a call; give the functions in functions")
    messages = body.get("messages")
    if isinstance(messages, list) and any(map(_has_other_form, messages)):
        changed["messages"] = list(_messages(messages))
    return {**body, **changed} if changed else body


def _old_choice(choice: object) -> object:
    if choice in (None, "none", "auto"):
        return choice
    if isinstance(choice, Mapping) and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    raise InvalidRequestError("function_call", 'must be none, auto or {"name": ...}')


def _has_other_form(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    calls = message.get("tool_calls")
    return (
        message.get("role") == "function"
        or message.get("function_call") is not None
        or (isinstance(calls, list) and any(isinstance(c, Mapping) and c.get("type") == "custom" for c in calls))
    )


def _messages(messages: list[Any]) -> Iterator[Any]:
    """Yield the messages with all calls converted to function calls. A `function_call` and its result get the same id."""
    last_id: str | None = None
    for number, message in enumerate(messages):
        if not _has_other_form(message):
            yield message
            continue
        made = {key: value for key, value in message.items() if key != "function_call"}
        call, calls = message.get("function_call"), message.get("tool_calls")
        if calls:
            made["tool_calls"] = [_call(f"messages[{number}].tool_calls", c) for c in calls]
        elif call is not None:
            if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
                raise InvalidRequestError(
                    f"messages[{number}].function_call", 'must be {"name": ..., "arguments": ...}'
                )
            last_id = f"f{number:08}"  # nine characters, as Mistral's templates require
            function = {"name": call["name"], "arguments": call.get("arguments")}
            made["tool_calls"] = [{"id": last_id, "type": "function", "function": function}]
        if message.get("role") == "function":
            made["role"] = "tool"
            if last_id is not None:
                made["tool_call_id"] = last_id
        yield made


def _call(field: str, call: Any) -> Any:
    """Convert a call in a message to a function call."""
    if not isinstance(call, Mapping) or call.get("type") != "custom":
        return call
    custom = call.get("custom")
    if not isinstance(custom, Mapping) or not all(isinstance(custom.get(key), str) for key in ("name", "input")):
        raise InvalidRequestError(field, 'a call of a custom tool must be {"custom": {"name": ..., "input": ...}}')
    function = {"name": custom["name"], "arguments": {INPUT: custom["input"]}}
    return {**{key: value for key, value in call.items() if key != "custom"}, "type": "function", "function": function}


def function_of(field: str, tool: Mapping[str, Any]) -> Json:
    """Return the function that represents a custom tool.

    Args:
        field: field of the tool, for errors.
        tool: ``{"type": "custom", "custom": {"name", "description", "format"}}``.

    Raises:
        InvalidRequestError: the tool is malformed, or its format cannot be enforced.
    """
    custom = tool.get("custom")
    if not isinstance(custom, Mapping) or not isinstance(custom.get("name"), str):
        raise InvalidRequestError(field, 'must be {"type": "custom", "custom": {"name": ..., ...}}')
    description = custom.get("description")
    if not isinstance(description, str | None):
        raise InvalidRequestError(field, f"has a description that is not text but {json_kind(description)}")
    schema = {"type": "string", **_pattern(field, custom.get("format"))}
    function = {
        "name": custom["name"],
        "parameters": {
            "type": "object",
            "properties": {INPUT: schema},
            "required": [INPUT],
            "additionalProperties": False,
        },
        "strict": True,
    }
    return {"type": "function", "function": function | ({} if description is None else {"description": description})}


def _pattern(field: str, wanted: object) -> Json:
    """Return the constraint on a custom tool's input as part of the input's JSON schema."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if wanted is None or kind == "text":
        return {}
    if not isinstance(wanted, Mapping) or kind != "grammar":
        raise InvalidRequestError(f"{field}.format", "type must be text or grammar")
    grammar = wanted.get("grammar", wanted)  # the Responses API has the grammar's fields here
    syntax = grammar.get("syntax") if isinstance(grammar, Mapping) else None
    definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
    if syntax not in _SYNTAXES or not isinstance(definition, str):
        raise InvalidRequestError(
            f"{field}.format", f"a grammar must have a syntax, one of {', '.join(_SYNTAXES)}, and a definition"
        )
    if syntax == "lark":
        raise InvalidRequestError(
            f"{field}.format",
            "a lark grammar cannot be enforced within a call, where the input is a JSON string; use the syntax regex, or the format text",
        )
    return {"pattern": f"^(?:{definition})$"}


def input_of(arguments: str) -> str:
    """Return the input of a custom tool's call, given the call's arguments. Cut-off arguments are completed if
    possible; if the arguments have no `input`, they are returned unchanged."""
    for text in (arguments, arguments + '"}'):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get(INPUT), str):
            return value[INPUT]
    return arguments

"""Converts input items of the Responses API to the messages of a chat completion.

A function call is added to the preceding message if that is the assistant's, else to a new message without text.
Reasoning becomes the `reasoning_content` of the assistant's message that follows; the chat template determines whether
it is part of the prompt.
"""

import json
from collections.abc import Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError, json_kind
from serve.http_api.records import quoted
from serve.http_api.translation import check_items

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
_PARTS_WITHOUT_TEXT = {"input_image": "images", "input_file": "files", "input_audio": "audio"}
ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)
LEFT_OUT = (
    "code_interpreter_call",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "web_search_call",
)
"""Types of items about tools that another server ran. They are left out, because the model's messages already reflect
their results."""

Message = dict[str, Any]


def messages_of(instructions: object, given: object) -> list[Message]:
    """Return the conversation of a body as messages of a chat completion.

    Args:
        instructions: the system prompt; None if there is none.
        given: value of `input`, the user's text or a list of items.

    Raises:
        InvalidRequestError: an item is malformed or not supported.
    """
    messages: list[Message] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise InvalidRequestError("instructions", f"{json_kind(instructions)} is not text")
        messages.append({"role": "system", "content": instructions})
    if given is None:
        raise InvalidRequestError("input", "missing; give a text or a list of items")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for number, item in enumerate(check_items("input", given)):
        _add(messages, f"input[{number}]", item)
    return messages


def _add(messages: list[Message], field: str, item: object) -> None:
    if not isinstance(item, Mapping):
        raise InvalidRequestError(field, f"{json_kind(item)} is not an item")
    kind = item.get("type")
    match "message" if kind is None else kind:
        case "message":
            role = item.get("role")
            if role not in ROLES:
                raise InvalidRequestError(field, f"role {quoted(role)} must be one of {', '.join(ROLES)}")
            content = _content(f"{field}.content", item.get("content"))
            if role == "assistant" and _is_thought(messages):
                messages[-1]["content"] = content
            else:
                messages.append({"role": role, "content": content})
        case "function_call":
            names = ("call_id", "name", "arguments")
            call_id, name, arguments = (_text(f"{field}.{key}", item.get(key)) for key in names)
            _add_call(messages, {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        case "custom_tool_call":
            names = ("call_id", "name", "input")
            call_id, name, text = (_text(f"{field}.{key}", item.get(key)) for key in names)
            _add_call(messages, {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}})
        case "local_shell_call":
            call_id, action = _text(f"{field}.call_id", item.get("call_id")), item.get("action")
            function = {"name": "local_shell", "arguments": action if isinstance(action, Mapping) else {}}
            _add_call(messages, {"id": call_id, "type": "function", "function": function})
        case "mcp_call":
            call_id, name = (_text(f"{field}.{key}", item.get(key)) for key in ("id", "name"))
            function = {"name": name, "arguments": item.get("arguments")}
            _add_call(messages, {"id": call_id, "type": "function", "function": function})
            output = item.get("output") or item.get("error") or ""
            output = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case str() if kind in LEFT_OUT:
            pass
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            call_id = _text(f"{field}.call_id", item.get("call_id"))
            content = _content(f"{field}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case "reasoning":
            text = _reasoning(field, item)
            if text:
                messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        case "item_reference":
            raise InvalidRequestError(field, "no item is stored here; send the item itself")
        case _:
            raise InvalidRequestError(field, f"type {quoted(kind)} is not supported; only {', '.join(ITEMS)} are")


def _add_call(messages: list[Message], call: dict[str, Any]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _is_thought(messages: list[Message]) -> bool:
    """Return whether the last message has only reasoning, without content or tool calls."""
    last = messages[-1] if messages else {}
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last


def _reasoning(field: str, item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item: its content, or else its summary; may be empty."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if parts is None or parts == []:
            continue
        at = f"{field}.{name}"
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            raise InvalidRequestError(at, "is not a list of parts")
        return "\n\n".join(_text(at, part.get("text")) for part in parts)
    return ""


def _content(field: str, content: object) -> object:
    """Return a string unchanged; convert a list of text parts to the format of chat completions."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(field, f"{json_kind(content)} is neither text nor a list of parts")
    parts = []
    for number, part in enumerate(content):
        at = f"{field}[{number}]"
        if not isinstance(part, Mapping):
            raise InvalidRequestError(at, f"{json_kind(part)} is not a part")
        kind = part.get("type")
        if isinstance(kind, str) and kind in _PARTS_WITHOUT_TEXT:
            raise InvalidRequestError(at, f"{_PARTS_WITHOUT_TEXT[kind]} are not supported; send text")
        if kind != "refusal" and kind not in TEXT_PARTS:
            raise InvalidRequestError(at, f"type {quoted(kind)} is not supported; only {', '.join(TEXT_PARTS)} are")
        parts.append({"type": "text", "text": _text(at, part.get("refusal" if kind == "refusal" else "text"))})
    return parts


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(
            field, f"{'missing; give a text' if value is None else f'{json_kind(value)} is not text'}"
        )
    return value

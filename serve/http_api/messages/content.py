"""Converts messages of Anthropic's API, which consist of content blocks, to messages of a chat completion.

Tool results in a user's message become separate messages, in the order of the blocks. Consecutive messages of the same
role are merged, as in Anthropic's API. Thinking blocks become `reasoning_content`; the chat template determines whether
it is part of the prompt.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError, json_kind
from serve.http_api.records import quoted
from serve.http_api.translation import check_items

ROLES = ("user", "assistant", "system")
_UNSUPPORTED = {"image": "images", "document": "documents", "search_result": "search results"}
BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking", "server_tool_use", "mcp_tool_use"),
    "system": ("text",),
}
"""Supported block types for each role. An assistant message may also have results of tools that another server ran."""
_RESULT = "_tool_result"
_BILLING = "x-anthropic-billing-header:"
"""Start of the first line of Claude Code's system prompt. The line differs in every request and would prevent prefix
cache hits."""
_BILLING_FIELD = re.compile(r" ?[a-z_]{1,32}=[^;\s]{0,256}")
_MAX_BILLING_FIELDS = 16
BETWEEN_TURNS = "\n\n"
"""Separator between the texts of merged messages."""

Message = dict[str, Any]


def messages_of(system: object, given: object) -> list[Message]:
    """Return the conversation of a body as messages of a chat completion.

    Args:
        system: the system prompt as text or text blocks; None if there is none.
        given: value of `messages`.

    Raises:
        InvalidRequestError: a message is malformed or not supported.
    """
    made: list[Message] = []
    if system is not None:
        made.append({"role": "system", "content": _without_billing(_texts("system", system))})
    if given is None:
        raise InvalidRequestError("messages", "missing; give a list of messages")
    for number, message in enumerate(check_items("messages", given)):
        field = f"messages[{number}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or role not in ROLES:
            raise InvalidRequestError(field, f"role {quoted(role)} must be one of {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise InvalidRequestError(field, "has content that is neither text nor a list of blocks")
        turn = _turn(made, role, content)
        for at, block in enumerate(content):
            turn = _add(made, turn, role, f"{field}.content[{at}]", block)
    for message in made:
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n\n".join(filter(None, message["reasoning_content"]))
    return made


def _turn(made: list[Message], role: str, blocks: list[Any]) -> Message:
    """Return the message to add these blocks to: the last message if it has the same role, else a new message."""
    if made and made[-1]["role"] == role and role != "system":
        turn = made[-1]
        text_first = blocks and isinstance(blocks[0], Mapping) and blocks[0].get("type") == "text"
        if turn["content"] and text_first:
            turn["content"].append({"type": "text", "text": BETWEEN_TURNS})
        return turn
    made.append({"role": role, "content": []})
    return made[-1]


def _add(made: list[Message], turn: Message, role: str, field: str, block: object) -> Message:
    """Add a content block to the conversation. Returns the message to add the next block to."""
    if not isinstance(block, Mapping):
        raise InvalidRequestError(field, f"{json_kind(block)} is not a block")
    kind = block.get("type")
    if isinstance(kind, str) and kind in _UNSUPPORTED:
        raise InvalidRequestError(field, f"{_UNSUPPORTED[kind]} are not supported; send text")
    is_result = role == "assistant" and isinstance(kind, str) and kind.endswith(_RESULT)
    if kind not in BLOCKS[role] and not is_result:
        allowed = ", ".join(BLOCKS[role])
        raise InvalidRequestError(
            field, f"type {quoted(kind)} is not supported in messages of this role; only {allowed} are"
        )
    if turn["role"] == "tool" and (kind == "text" or (role == "assistant" and not is_result)):
        turn = {"role": role, "content": []}
        made.append(turn)
    if kind == "text":
        turn["content"].append({"type": "text", "text": _text(field, block.get("text"))})
    elif kind == "thinking":
        thought = _text(field, block.get("thinking"))
        turn.setdefault("reasoning_content", []).append(thought)  # joined at the end
    elif kind in ("tool_use", "server_tool_use", "mcp_tool_use"):
        name, call_id, arguments = _text(field, block.get("name")), _text(field, block.get("id")), block.get("input")
        if not isinstance(arguments, Mapping):
            raise InvalidRequestError(field, "input is not an object")
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        turn.setdefault("tool_calls", []).append(call)
    elif is_result:
        call_id, content = _text(field, block.get("tool_use_id")), block.get("content")
        turn = {"role": "tool", "tool_call_id": call_id, "content": _shown(content)}
        made.append(turn)
    elif kind == "tool_result":
        if turn["role"] != "tool" and not turn["content"]:
            made.pop()  # the user's message has no text before the result
        call_id, content = _text(field, block.get("tool_use_id")), block.get("content")
        turn = {
            "role": "tool",
            "tool_call_id": call_id,
            "content": "" if content is None else _texts(f"{field}.content", content),
        }
        made.append(turn)
    return turn


def _without_billing(content: Any) -> Any:
    """Return the system prompt without the billing prefix that Claude Code adds; any text after the prefix is kept."""
    if isinstance(content, str):
        if not content.startswith(_BILLING):
            return content
        rest = content.removeprefix(_BILLING)
        for _ in range(_MAX_BILLING_FIELDS):
            field, found, after = rest.partition(";")
            if not found or not _BILLING_FIELD.fullmatch(field):
                break
            rest = after
        return rest.removeprefix("\n")
    parts = [{**part, "text": _without_billing(part["text"])} for part in content[:1]] + content[1:]
    return parts if not parts or parts[0]["text"] else parts[1:]


def _shown(content: object) -> str:
    """Convert the result of a tool that another server ran to text: items with text to their text, and other items to
    JSON without encrypted fields."""
    items = content if isinstance(content, list) else [content]
    texts = []
    for item in items:
        if isinstance(item, Mapping):
            text = item.get("text")
            kept = {key: value for key, value in item.items() if not key.startswith("encrypted_") and value is not None}
            texts.append(text if isinstance(text, str) else json.dumps(kept, ensure_ascii=False))
        elif item is not None:
            texts.append(item if isinstance(item, str) else json.dumps(item, ensure_ascii=False))
    return "\n".join(texts)


def _texts(field: str, content: object) -> object:
    """Return a string unchanged; convert a list of text blocks to text parts of a chat completion."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(field, f"{json_kind(content)} is neither text nor a list of blocks")
    parts = []
    for at, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(kind, str) and kind in _UNSUPPORTED:
            raise InvalidRequestError(f"{field}[{at}]", f"{_UNSUPPORTED[kind]} are not supported; send text")
        if not isinstance(block, Mapping) or kind != "text":
            raise InvalidRequestError(f"{field}[{at}]", f"type {quoted(kind)} is not supported; only text is")
        parts.append({"type": "text", "text": _text(f"{field}[{at}]", block.get("text"))})
    return parts


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"{json_kind(value)} is not text")
    return value

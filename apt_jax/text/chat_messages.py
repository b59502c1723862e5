"""Checks clients' messages and tool calls; only fields that chat templates know are kept."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.text.json_values import plain_json

MAX_MESSAGES = 8192
MAX_NAME_CHARS = 256
"""Length limit of a message's `name` and `tool_call_id`."""
MAX_TOOLS_CHARS = 2**18
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's messages; `function` is an older name for `tool`."""
ROLE_PATTERN = r"[A-Za-z][A-Za-z0-9_-]{0,31}"
_ROLE = re.compile(ROLE_PATTERN)
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Name of the field that holds the text, keyed by the type of the content part."""
_THOUGHT_PARTS = ("thinking", "reasoning", "redacted_thinking")


def text_of(messages: Any) -> str:
    """Return the joined text of unchecked messages; content of other types is left out."""
    texts: list[str] = []
    for message in messages if isinstance(messages, Sequence) and not isinstance(messages, str) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else [{"text": content}]
        given = (part.get("text") for part in parts if isinstance(part, Mapping))
        texts += [text for text in given if isinstance(text, str)]
    return "".join(texts)


def checked_messages(messages: Any, template: str) -> list[dict[str, Any]]:
    """Return messages with known fields only, so that a template cannot misread others.

    The known fields are role, content, name, tool call id, reasoning and tool calls. Content is a string or a list of
    ``{"type": "text", "text": ...}``. Other fields, such as those in answers of other servers, are dropped.

    Args:
        messages: unchecked messages of a client.
        template: text of the chat template. Roles besides `ROLES` are accepted if the template names them.

    Raises:
        InvalidRequestError: the messages are malformed.
    """

    def refuse(problem: str) -> InvalidRequestError:
        return InvalidRequestError("messages", problem)

    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise refuse("must be a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise refuse(f"{len(messages)} messages; at most {MAX_MESSAGES}")
    checked: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise refuse(f"[{number}] must have role and content")
        role = message.get("role")
        if role is None:
            raise refuse(f"[{number}] must have role and content")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            shown = f"{role!r:.40}" if isinstance(role, str) else json_kind(role)
            raise refuse(f"[{number}] has the role {shown}, which is not a name")
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise refuse(
                f"[{number}] has the role {role!r}; the roles are {', '.join(ROLES)}, and those that the chat template names"
            )
        calls = message.get("tool_calls")
        if calls is not None:
            calls = _checked_calls("messages", calls)
        content = _content(f"[{number}]", message)
        if content is None:
            if role not in ("assistant", "tool", "function") and calls is None:
                raise refuse(f"[{number}] must have role and content")
            content = ""
        made: dict[str, Any] = {"role": "tool" if role == "function" else role, "content": content}
        for name in ("name", "tool_call_id"):
            value = message.get(name)
            if value is not None:
                if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
                    raise refuse(f"[{number}] has a {name} that is not a short text")
                made[name] = plain_json("messages", value)
        thought = _reasoning(f"[{number}]", message)
        if thought is not None:
            made["reasoning_content"] = thought
            # gpt-oss: without the reasoning before a call, the model does not know what it called for.
            if calls and not content and ".thinking" in template:
                made["thinking"] = thought
        if calls:
            made["tool_calls"] = calls
        checked.append(made)
    return checked


def with_system_role(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn developer messages into system messages, for templates that do not know the role. A developer message after
    a system message is appended to it, since many templates accept only one system message."""
    made: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "developer":
            made.append(message)
        elif made and made[-1]["role"] == "system":
            before, content = made[-1]["content"], message["content"]
            made[-1] = {**made[-1], "content": [*_parts(before), {"type": "text", "text": "\n\n"}, *_parts(content)]}
        else:
            made.append({**message, "role": "system"})
    return made


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _content(where: str, message: Mapping[str, Any]) -> str | list[dict[str, Any]] | None:
    """Return the content of a message, or None if it has no content."""
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        audio = message.get("audio")
        content = message.get("refusal") or (audio.get("transcript") if isinstance(audio, Mapping) else None)
    if content is None:
        return None
    if isinstance(content, str):
        return _unicode(where, content)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequestError("messages", f"{where} has content that is not text")
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in _THOUGHT_PARTS:
            continue
        text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else part
        if not isinstance(text, str):
            what = f" of type {kind!r:.40}" if isinstance(kind, str) and kind != "text" else ""
            raise InvalidRequestError("messages", f"{where} has content{what} that is not text")
        parts.append({"type": "text", "text": _unicode(where, text)})
    return parts


def _reasoning(where: str, message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of the model, from `reasoning_content` or, as in vLLM and OpenRouter, from `reasoning`."""
    thought = message.get("reasoning_content")
    if thought is None:
        other = message.get("reasoning")
        thought = other if isinstance(other, str) else None
    if thought is None:
        return None
    if not isinstance(thought, str):
        raise InvalidRequestError("messages", f"{where} has a reasoning_content that is not text")
    return plain_json("messages", thought)


def _unicode(where: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError("messages", f"{where} has content that is not Unicode text") from None
    return str(text)


def _checked_calls(field: str, calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, as templates expect them."""
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidRequestError(field, f"{json_kind(calls)} is not a list of calls")
    checked = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(field, 'a call must be {"function": {"name": ..., "arguments": ...}}')
        plain = plain_json(field, call)
        arguments = plain["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = plain_json(field, json.loads(arguments)) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                if isinstance(error, InvalidRequestError):
                    raise
                raise InvalidRequestError(field, "arguments are not JSON") from None
        if not isinstance(arguments, dict | None):
            raise InvalidRequestError(field, "arguments are not a JSON object")
        plain["function"]["arguments"] = arguments or {}
        checked.append(plain)
    if len(json.dumps(checked)) > MAX_TOOLS_CHARS:
        raise InvalidRequestError(field, f"more than {MAX_TOOLS_CHARS >> 10} KiB of JSON")
    return checked

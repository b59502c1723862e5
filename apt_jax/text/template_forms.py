"""Detects, by rendering samples, which message formats a chat template accepts.

Templates differ: content may be a string or a list of parts, and arguments of calls may be objects or JSON text. Given
the wrong format, some templates silently write nothing.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_FIRST, _SECOND = "Zebra1", "Zebra2"
_PARTS_WORD = re.compile(r"""['".]text\b""")
_AS_DATA = re.compile(r"""['"]text['"]: """)
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "zebra", "arguments": {}}}
_BEFORE_AND_AFTER: dict[str, tuple[list[Any], list[Any]]] = {
    "user": ([], []),
    "system": ([], [{"role": "user", "content": "Hi"}]),
    "developer": ([], [{"role": "user", "content": "Hi"}]),
    "assistant": ([{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}]),
    "tool": (
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}],
        [],
    ),
}
"""Messages before and after the sample message, keyed by the sample's role."""

Render = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Function that renders messages; it returns None if the template fails."""


@dataclasses.dataclass(frozen=True)
class TemplateForms:
    """Message formats that a template accepts."""

    part_roles: frozenset[str] = frozenset()
    """Roles whose content may be a list of several parts."""
    no_text_roles: frozenset[str] = frozenset()
    """Roles whose content must be a list of parts."""
    arguments_as_text: bool = False
    """True if the template takes the arguments of calls as JSON text."""

    def content(self, role: str, content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
        """Return message content in a format that the template accepts."""
        role = role if role in _BEFORE_AND_AFTER else "user"
        if not isinstance(content, str):
            if role in self.part_roles:
                return [dict(part) for part in content]
            content = joined(content)
        return [{"type": "text", "text": content}] if role in self.no_text_roles else content


def joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return message content as text, with its parts joined."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def find_forms(source: str, render: Render) -> TemplateForms:
    """Determine which message formats a template accepts.

    Args:
        source: Jinja source of the template.
        render: function that renders messages with the template.
    """
    part_roles, no_text_roles = set(), set()
    for role in _BEFORE_AND_AFTER if _PARTS_WORD.search(source) else ():  # otherwise it does not support parts
        parts = _with_content(render, role, [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}])
        if parts is None or _FIRST not in parts or _AS_DATA.search(parts):
            continue
        if _SECOND in parts:
            part_roles.add(role)
        text = _with_content(render, role, _FIRST)
        if text is None or _FIRST not in text:
            no_text_roles.add(role)
    return TemplateForms(frozenset(part_roles), frozenset(no_text_roles), _wants_text_arguments(source, render))


def _with_content(render: Render, role: str, content: Any) -> str | None:
    before, after = _BEFORE_AND_AFTER[role]
    return render([*before, {"role": role, "content": content, "tool_call_id": _CALL["id"], "name": "zebra"}, *after])


def _wants_text_arguments(source: str, render: Render) -> bool:
    if "arguments" not in source:
        return False

    def written(arguments: Any) -> bool:
        call = {**_CALL, "function": {"name": "zebra", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "Hi", "tool_call_id": _CALL["id"], "name": "zebra"}
        text = render([{"role": "user", "content": "Hi"}, answer, result])
        return text is not None and _FIRST in text

    return not written({"x": _FIRST}) and written(f'{{"x": "{_FIRST}"}}')

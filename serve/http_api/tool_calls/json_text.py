"""Finds and parses JSON values in growing text."""

import json
import re
from typing import Any, NamedTuple

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonEnd:
    """Finds the end of an object or array in growing text, scanning each character only once."""

    def __init__(self) -> None:
        self._at = 0
        """Number of characters of the value that have been scanned."""
        self._depth = 0
        self._in_string = False
        self._end: int | None = None
        """Length of the value in characters; None until its end has been found."""

    def find(self, text: str, start: int = 0) -> int | None:
        """Return the offset of the end of the value; None if the value is not complete.

        Args:
            text: the text of the previous call of this method, with more text appended; scanned text may have been
                removed from its start.
            start: offset of the value's first bracket, which is negative if the bracket has been removed.
        """
        if self._end is not None:
            return start + self._end
        at = start + self._at
        while at < len(text):
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                at = len(text)
                break
            if found[0] == "\\":
                at = found.end() + 1  # the escaped character may not be in the text yet
                continue
            at = found.end()
            if found[0] == '"':
                self._in_string = not self._in_string
            elif found[0] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self._end = at - start
                    return at
        self._at = at - start
        return None


class ParsedCall(NamedTuple):
    """A function call in the text of a model."""

    name: str
    arguments: str
    """Arguments as the JSON text of an object, as the model wrote it."""


def skip_space(text: str, at: int = 0) -> int:
    """Return the offset of the first character at or after `at` that is not whitespace."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def calls_in(text: str) -> list[ParsedCall] | None:
    """Return the tool calls in JSON text.

    Returns:
        The call of an object with `name` and, unless they are empty, `arguments` or `parameters`; all calls of an array
        of such objects; None for any other text.
    """
    try:
        pieces = _items(text) if text.startswith("[") else [text]
        calls = [_call(piece) for piece in pieces]
    except (ValueError, RecursionError):
        return None
    return [call for call in calls if call is not None] if calls and None not in calls else None


def is_object(text: str) -> bool:
    """Return whether `text` is a JSON object."""
    try:
        return isinstance(json.loads(text, parse_constant=_no_constant), dict)
    except (ValueError, RecursionError):
        return False


def _call(text: str) -> ParsedCall | None:
    members = _members(text)
    name, raw = members.get("name"), None
    if name is None:
        return None
    for key in ("arguments", "parameters"):
        if key in members:
            raw = members[key]
            break
    if raw is None or raw == "null":  # models leave out empty arguments
        raw = "{}"
    found = json.loads(name)
    if not isinstance(found, str):
        return None
    if raw.startswith('"'):  # JSON in a string, as in OpenAI's API
        raw = json.loads(raw)
    return ParsedCall(found, raw) if isinstance(raw, str) and is_object(raw) else None


def _members(text: str) -> dict[str, str]:
    """Return the JSON text of each value in an object, keyed by name.

    Raises:
        ValueError, RecursionError: the text is not a JSON object, or nested too deeply.
    """
    members: dict[str, str] = {}
    at = skip_space(text, _expect(text, 0, "{"))
    if text.startswith("}", at):
        _end(text, at + 1)
        return members
    while True:
        key, at = _decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a key that is not text")
        start = skip_space(text, _expect(text, skip_space(text, at), ":"))
        _, at = _decode(text, start)
        members[key] = text[start:at]
        at = skip_space(text, at)
        if text.startswith("}", at):
            _end(text, at + 1)
            return members
        at = skip_space(text, _expect(text, at, ","))


def _items(text: str) -> list[str]:
    """Return the JSON text of each value in an array.

    Raises:
        ValueError, RecursionError: the text is not a JSON array, or nested too deeply.
    """
    items: list[str] = []
    at = skip_space(text, 1)
    if text.startswith("]", at):
        _end(text, at + 1)
        return items
    while True:
        _, end = _decode(text, at)
        items.append(text[at:end])
        at = skip_space(text, end)
        if text.startswith("]", at):
            _end(text, at + 1)
            return items
        at = skip_space(text, _expect(text, at, ","))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _decode(text: str, at: int) -> tuple[Any, int]:
    return _DECODER.raw_decode(text, at)


def _expect(text: str, at: int, character: str) -> int:
    if not text.startswith(character, at):
        raise ValueError(f"no {character!r}")
    return at + 1


def _end(text: str, at: int) -> None:
    if skip_space(text, at) < len(text):
        raise ValueError("more follows")

"""Strings that record which of their characters a chat template wrote.

`Text` is a `str` in which runs of characters are marked as written by the template. Methods, operators and Jinja's
filters keep the marks. If an operation loses them, its result counts as content: unmarked text never counts as written
by the template.

This file imports nothing from the package, so that `chat_worker` is small and starts quickly.
"""

import bisect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges of characters in order, non-empty and not adjacent."""

_CONVERSION = re.compile(r"%(?:\((\w{1,64})\))?[sd%]")
"""The supported conversions; the result of formatting with other conversions counts as content."""


class Text(str):
    """A string with marks; `Text(value)` has no marks. The methods are those of `str`; their results keep the marks."""

    _runs: Runs = ()  # a public name could be read by templates

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        whole = str.__mul__(self, times)
        return concat([self] * (len(whole) // len(self))) if self._runs else Text(whole)

    def __rmul__(self, times: SupportsIndex) -> str:
        return self * times

    def __mod__(self, values: Any) -> str:
        whole = str.__mod__(self, values)
        return _if_same(whole, _formatted(self, values)) if self._runs else Text(whole)

    def __iter__(self) -> Iterator[str]:
        return (self[at] for at in range(len(self))) if self._runs else map(Text, str.__iter__(self))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        part = str.__getitem__(self, key)
        if not self._runs:
            return Text(part)
        places = range(len(self))[key]
        if isinstance(places, int):
            return _part(self, places, places + 1)
        return _part(self, places.start, places.stop) if places.step == 1 else concat([self[at] for at in places])

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return _parts(self, str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return _parts(self, str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:  # type: ignore[override]
        starts = itertools.accumulate(map(len, str.splitlines(self, True)), initial=0)
        return [
            _part(self, at, at + len(line)) for at, line in zip(starts, str.splitlines(self, keepends), strict=False)
        ]

    def partition(self, sep: str) -> tuple[str, str, str]:
        pieces = _parts(self, str.partition(self, sep), "")
        return pieces[0], pieces[1], pieces[2]

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        pieces = _parts(self, str.rpartition(self, sep), "")
        return pieces[0], pieces[1], pieces[2]

    def strip(self, chars: str | None = None) -> str:
        start = len(self) - len(str.lstrip(self, chars))
        return _part(self, start, start + len(str.strip(self, chars)))

    def lstrip(self, chars: str | None = None) -> str:
        return _part(self, len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> str:
        return _part(self, 0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return _part(self, len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return _part(self, 0, len(str.removesuffix(self, suffix)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:  # type: ignore[override]
        if old and (self._runs or _runs(new)):
            return Text.join(_text(new), self.split(old, count))
        return Text(str.replace(self, old, new, count))

    def join(self, texts: Iterable[str]) -> str:
        texts = list(texts)
        if not self._runs and not any(map(_runs, texts)):
            return Text(str.join(self, texts))
        str.join(self, texts)  # raises the errors of `str`
        return concat([piece for text in texts for piece in (self, text)][1:])

    def upper(self) -> str:
        return changed(self, str.upper(self))

    def lower(self) -> str:
        return changed(self, str.lower(self))

    def casefold(self) -> str:
        return changed(self, str.casefold(self))

    def capitalize(self) -> str:
        return changed(self, str.capitalize(self))

    def title(self) -> str:
        return changed(self, str.title(self))

    def swapcase(self) -> str:
        return changed(self, str.swapcase(self))


def written(text: str) -> Text:
    """Return a string with all characters marked as written by the template."""
    return _marked(text, ((0, len(text)),) if text else ())


def changed(text: str, value: str) -> Text:
    """Return `value`, derived from `text`, with the marks of `text`: character by character if the lengths are equal;
    if not, all of `value` is marked if all of `text` is."""
    if len(value) == len(text):
        return _marked(value, _runs(text))
    return written(value) if _runs(text) == ((0, len(text)),) else Text(value)


def runs_of(text: str) -> Runs:
    """Return the ranges of a string that the template wrote."""
    return _runs(text)


def as_text(value: object) -> str:
    """Return a value as text, as templates write it. Numbers, booleans and None are marked, since no special token
    consists of such text."""
    if isinstance(value, str):
        return value
    return written(str(value)) if value is None or isinstance(value, int | float) else str(value)


def concat(pieces: Iterable[str]) -> Text:
    """Return the concatenated pieces."""
    pieces = list(pieces)
    runs: list[tuple[int, int]] = []
    at = 0
    for piece in pieces:
        for start, end in _runs(piece):
            if runs and runs[-1][1] == at + start:
                runs[-1] = (runs[-1][0], at + end)
            else:
                runs.append((at + start, at + end))
        at += len(piece)
    return _marked("".join(pieces), tuple(runs))


def content_of(value: Any) -> Any:
    """Return a copy of a JSON value in which every string, keys included, is a `Text` without marks."""
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, list):
        return [content_of(item) for item in value]
    if isinstance(value, dict):
        return {Text(key): content_of(item) for key, item in value.items()}
    return value


def constant(value: Any) -> Any:
    """Return a constant of a template with every string in it marked."""
    if isinstance(value, str):
        return written(value)
    if isinstance(value, list | tuple):
        return type(value)(map(constant, value))
    if isinstance(value, dict):
        return {constant(key): constant(item) for key, item in value.items()}
    return value


def _runs(text: str) -> Runs:
    return text._runs if isinstance(text, Text) else ()


def _text(text: str) -> Text:
    return text if isinstance(text, Text) else Text(text)


def _marked(text: str, runs: Runs) -> Text:
    made = Text(text)
    if runs:
        made._runs = runs
    return made


def _part(text: Text, start: int, end: int) -> Text:
    """Return the characters [start, end) with their marks."""
    runs = text._runs
    part = str.__getitem__(text, slice(start, end))
    if not runs or not part:
        return Text(part)
    first = bisect.bisect_right(runs, start, key=lambda run: run[1])
    last = bisect.bisect_left(runs, end, first, key=lambda run: run[0])
    return _marked(part, tuple((max(a, start) - start, min(b, end) - start) for a, b in runs[first:last]))


def _parts(text: Text, parts: Sequence[str], sep: str | None) -> list[str]:
    """Return the given parts of a string with their marks; they were separated by `sep`, or by whitespace if it is
    None."""
    if not text._runs:
        return list(map(Text, parts))
    made: list[str] = []
    at = 0
    for part in parts:
        if sep is None:
            at = str.find(text, part, at)
        made.append(_part(text, at, at + len(part)))
        at += len(part) + len(sep or "")
    return made


def _formatted(text: Text, values: Any) -> str:
    """Return `text % values` with marks; the result is wrong if `text` has unsupported conversions (see `_if_same`)."""
    pieces: list[str] = []
    at = taken = 0
    for found in _CONVERSION.finditer(text):
        pieces.append(_part(text, at, found.start()))
        at = found.end()
        if found[0] == "%%":
            pieces.append(_part(text, at - 1, at))
        elif found[1] is not None and isinstance(values, Mapping):
            pieces.append(as_text(values[found[1]]))
        else:
            pieces.append(as_text(values[taken] if isinstance(values, tuple) else values))
            taken += 1
    return concat([*pieces, _part(text, at, len(text))])


def _if_same(whole: str, pieces: str) -> str:
    return pieces if pieces == whole else Text(whole)

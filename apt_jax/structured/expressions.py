"""Analysis of regular expressions in JSON schemas: their parts, and whether a string can match two of them.

This uses Python's own parser, which has no public name. If a Python version lacks it, schemas that need the analysis
are rejected.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

try:
    from re import _parser  # type: ignore[attr-defined]
except ImportError:
    _parser = None

Part: TypeAlias = tuple[Any, Any]
"""An operator, whose attribute `name` is its name, and its argument."""

_OTHER = 128
"""Bit of a character set that stands for all non-ASCII characters."""
_END = 1 << 129
"""Bit of a character set that stands for the end of a string."""
_ALL = (1 << 130) - 1
_CLASSES = {
    "CATEGORY_DIGIT": "0123456789",
    "CATEGORY_WORD": "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_",
    "CATEGORY_SPACE": "\t\n\v\f\r\x1c\x1d\x1e\x1f ",
}
"""ASCII characters of each class; which other characters belong to it differs between regex dialects."""
_MAX_LEADING = 64
_READ_OTHERWISE = re.compile(r"\[\[|\[\^\[|\[:|&&|--|~~|\{,|\\[<>AZz]|\\[xuU]\{")
"""Syntax that other regex dialects interpret differently from Python."""


def parsed(pattern: str) -> Sequence[Part] | None:
    """Return the parts of an expression; None if it has flags, or this Python version lacks the parser.

    Raises:
        re.error, RecursionError, OverflowError: it is not a valid expression in Python.
    """
    if _parser is None:
        return None
    tree = _parser.parse(pattern)
    return None if tree.state.flags & ~re.UNICODE else tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    """Properties common to all strings that a regular expression matches; character sets are bit masks."""

    leading: tuple[int, ...] = ()
    """Sets of possible characters at the first positions of a match."""
    is_whole: bool = False
    """True if every match is exactly as long as `leading`."""
    alphabet: int = _ALL
    """Set of characters that a match may contain."""
    needed: int = 0
    """Set of ASCII characters that every match contains."""


_ANYTHING = _Shape()
_NOTHING = _Shape(is_whole=True, alphabet=0)


def are_apart(first: str, second: str) -> bool:
    """Return True if simple checks show that no string matches both expressions: matches differ in one of their first
    characters, or one expression needs a character that the other does not allow."""
    a, b = _shape_of(first), _shape_of(second)
    if any(ours & theirs == 0 for ours, theirs in zip(a.leading, b.leading, strict=False)):
        return True
    return bool(a.needed & ~b.alphabet or b.needed & ~a.alphabet)


@functools.lru_cache(maxsize=256)
def _shape_of(pattern: str) -> _Shape:
    try:
        parts = None if _READ_OTHERWISE.search(pattern) else parsed(pattern)
        if not parts:
            return _ANYTHING
        made = _joined(parts)
    except (re.error, RecursionError, OverflowError):
        return _ANYTHING
    begins, ends = (str(part[1]) for part in (parts[0], parts[-1]))
    is_anchored = begins == "AT_BEGINNING"
    return dataclasses.replace(
        made,
        leading=made.leading if is_anchored else (),
        alphabet=made.alphabet if is_anchored and ends == "AT_END" else _ALL,
    )


def _joined(parts: Iterable[Part]) -> _Shape:
    """Return the shape of a sequence of parts."""
    leading: list[int] = []
    is_whole, alphabet, needed = True, 0, 0
    for operator, argument in parts:
        shape = _shape(operator.name, argument)
        if is_whole:
            leading += shape.leading
            is_whole = shape.is_whole and len(leading) <= _MAX_LEADING
        alphabet |= shape.alphabet
        needed |= shape.needed
    return _Shape(leading=tuple(leading[:_MAX_LEADING]), is_whole=is_whole, alphabet=alphabet, needed=needed)


def _shape(name: str, argument: Any) -> _Shape:
    if name == "LITERAL":
        bit = 1 << min(argument, _OTHER)
        return _Shape(leading=(bit,), is_whole=True, alphabet=bit, needed=bit if argument < _OTHER else 0)
    if name in ("IN", "NOT_LITERAL", "ANY"):
        characters = _characters(argument) if name == "IN" else _ALL & ~_END
        return _Shape(leading=(characters,), is_whole=True, alphabet=characters)
    if name == "BRANCH":
        return _either([_joined(branch) for branch in argument[1]])
    if name == "SUBPATTERN":
        return _ANYTHING if argument[1] or argument[2] else _joined(argument[3])
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return _repeated(_joined(argument[2]), argument[0], argument[1])
    if name == "AT" and argument.name == "AT_END":
        line_end = 1 << ord("\n")  # in some dialects `$` also matches before a line ending
        return _Shape(leading=(_END | line_end,), alphabet=line_end)
    if name in ("AT", "ASSERT", "ASSERT_NOT"):
        return _NOTHING
    return _ANYTHING


def _either(shapes: list[_Shape]) -> _Shape:
    lengths = {len(shape.leading) for shape in shapes}
    alphabet, needed = 0, _ALL
    for shape in shapes:
        alphabet |= shape.alphabet
        needed &= shape.needed
    leading = []
    for sets in zip(*(shape.leading for shape in shapes), strict=False):
        leading.append(functools.reduce(int.__or__, sets))
    is_whole = len(lengths) == 1 and all(shape.is_whole for shape in shapes)
    return _Shape(leading=tuple(leading), is_whole=is_whole, alphabet=alphabet, needed=needed)


def _repeated(once: _Shape, fewest: int, most: int) -> _Shape:
    times = min(fewest, _MAX_LEADING) if once.is_whole else min(fewest, 1)
    leading = tuple(itertools.islice(itertools.cycle(once.leading), times * len(once.leading)))
    is_whole = once.is_whole and fewest == most and fewest <= _MAX_LEADING
    return _Shape(
        leading=leading[: _MAX_LEADING + 1],
        is_whole=is_whole and len(leading) <= _MAX_LEADING,
        alphabet=once.alphabet,
        needed=once.needed if fewest else 0,
    )


def _characters(items: Iterable[Part]) -> int:
    found = 0
    for operator, argument in items:
        if operator.name == "LITERAL":
            found |= 1 << min(argument, _OTHER)
        elif operator.name == "RANGE":
            low, high = (min(code, _OTHER) for code in argument)
            found |= (1 << (high + 1)) - (1 << low)
        elif operator.name == "CATEGORY" and argument.name in _CLASSES:
            found |= sum(1 << ord(letter) for letter in _CLASSES[argument.name]) | 1 << _OTHER
        else:
            return _ALL & ~_END
    return found

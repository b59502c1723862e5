"""Lists the property names that the regular expressions of a schema match."""

import re
from collections.abc import Iterable
from typing import TypeAlias

from apt_jax.structured.expressions import Part, parsed

_MAX_NAME_CHARS = 128
"""Maximum length of a listed name."""
_MAX_CHARS = 400_000
"""Maximum number of characters of all names of one schema."""

_BEGIN, _END = "begin", "end"
_Text: TypeAlias = tuple[str, ...]
"""Characters of a string, including marks for its start and end."""


class Names:
    """Lists the strings that regular expressions match, with a bound on the total work."""

    def __init__(self) -> None:
        self._left = _MAX_CHARS

    def matched(self, pattern: str, most: int) -> frozenset[str] | None:
        """Return the strings that match a regular expression of a JSON schema; None if there are more than `most`, or
        the expression is not supported.

        Raises:
            ValueError: the total work for all expressions is too large.
        """
        try:
            parts = parsed(pattern)
            texts = None if parts is None else self._texts(parts, 4 * most + 16)
        except (re.error, RecursionError, OverflowError):
            return None
        found: set[str] = set()
        for text in texts or ():
            places = [place for place, part in enumerate(text) if part not in (_BEGIN, _END)]
            first, last = (places[0], places[-1] + 1) if places else (len(text), 0)
            inside = _END in text[:first] or _BEGIN in text[last:] or len(places) < last - first
            if places and inside:
                continue  # the start and the end of a string are never inside it
            if _BEGIN not in text[:first] or _END not in text[last:]:
                return None
            found.add("".join(text[place] for place in places))
        return None if texts is None or len(found) > most else frozenset(found)

    def _texts(self, tree: Iterable[Part], most: int) -> set[_Text] | None:
        """Return the strings that a parsed expression matches; None if there are more than `most`, or parts are not
        supported."""
        made: set[_Text] = {()}
        for operator, argument in tree:
            parts: set[_Text] | None = None
            name = operator.name
            if name == "LITERAL":
                parts = {(chr(argument),)}
            elif name == "IN":
                parts = _characters(argument, most)
            elif name == "BRANCH":
                branches = [self._texts(branch, most) for branch in argument[1]]
                parts = None if None in branches else set().union(*filter(None, branches))
            elif name == "SUBPATTERN" and not argument[1] and not argument[2]:
                parts = self._texts(argument[3], most)
            elif name in ("MAX_REPEAT", "MIN_REPEAT") and argument[1] <= most:
                once = self._texts(argument[2], most)
                parts = None if once is None else self._repeated(once, argument[0], argument[1], most)
            elif name == "AT" and argument.name in ("AT_BEGINNING", "AT_END"):
                parts = {(_BEGIN if argument.name == "AT_BEGINNING" else _END,)}
            made = self._joined(made, parts or set(), most)
            if parts is None or not made:
                return None
        return made

    def _joined(self, before: set[_Text], after: set[_Text], most: int) -> set[_Text]:
        """Return each string of `before` followed by each of `after`; empty if there would be more than `most` strings,
        or a string might be too long."""
        longest = max(map(len, before), default=0) + max(map(len, after), default=0)
        if len(before) * len(after) > most or longest > _MAX_NAME_CHARS:
            return set()
        self._left -= len(before) * len(after) * longest
        if self._left < 0:
            raise ValueError("patternProperties: the expressions match too many names; list the names in properties")
        return {first + second for first in before for second in after}

    def _repeated(self, once: set[_Text], fewest: int, longest: int, most: int) -> set[_Text] | None:
        found: set[_Text] = set()
        texts: set[_Text] = {()}
        for count in range(longest + 1):
            found |= texts if count >= fewest else set()
            if count < longest:
                texts = self._joined(texts, once, most)
            if not texts or len(found) > most:
                return None
        return found


def _characters(items: Iterable[Part], most: int) -> set[_Text] | None:
    found: set[_Text] = set()
    for operator, argument in items:
        if operator.name == "LITERAL":
            found.add((chr(argument),))
        elif operator.name == "RANGE" and argument[1] - argument[0] < most:
            found |= {(chr(code),) for code in range(argument[0], argument[1] + 1)}
        elif operator.name == "CATEGORY" and argument.name == "CATEGORY_DIGIT":
            found |= {(digit,) for digit in "0123456789"}
        else:
            return None
    return found

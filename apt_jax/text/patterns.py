"""Regular expressions built from literal strings."""

import itertools
import re
from collections.abc import Iterable, Sequence


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of `texts`, the longest at each position.

    Common prefixes are compared only once, so the search time does not grow with the number of strings; there can be
    thousands of special tokens.

    Args:
        texts: strings to match; at least one, none empty.
    """
    ordered = sorted(set(texts))
    try:
        return re.compile(_tree(ordered))
    except RecursionError:  # hundreds of strings, each a prefix of the next
        return re.compile("|".join(map(re.escape, sorted(ordered, key=len, reverse=True))))


def _tree(texts: Sequence[str]) -> str:
    """Return a pattern that branches after common prefixes, for sorted, distinct strings."""
    first, last = texts[0], texts[-1]
    shared = first[
        : sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    ]
    rests = [text[len(shared) :] for text in texts]
    is_whole = not rests[0]
    branches = [_tree(list(group)) for _, group in itertools.groupby(rests[is_whole:], key=lambda rest: rest[0])]
    if not branches:
        return re.escape(shared)
    return f"{re.escape(shared)}(?:{'|'.join(branches)}){'?' if is_whole else ''}"

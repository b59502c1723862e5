"""Patterns that are made of texts."""

import itertools
import re
from collections.abc import Iterable, Sequence


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Match any of `texts`, of several at one place the longest.

    The time to search a text does not grow with their number, which for special tokens is in the thousands: what texts
    have in common is compared once.

    Args:
        texts: at least one, none empty.
    """
    ordered = sorted(set(texts))
    try:
        return re.compile(_tree(ordered))
    except RecursionError:  # hundreds that each begin with the one before
        return re.compile("|".join(map(re.escape, sorted(ordered, key=len, reverse=True))))


def _tree(texts: Sequence[str]) -> str:
    """A pattern of sorted, different texts, which branches where they do."""
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

"""Cases that a test runs: some of them in `make test`, or others every day, and all in `make test-slow`."""

import collections
import os
import random
from collections.abc import Collection, Iterable
from typing import Any

import pytest

ALL = os.environ.get("APT_JAX_TEST_CASES") == "all"


def num_cases(few: int, every: int) -> int:
    """Return how many seeds or Hypothesis examples to run; the test that asks has the marker `seeds`."""
    return every if ALL else few


def cover(every: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return all cases for `pytest.mark.parametrize`; those that are not among `quick` have the marker `slow`."""
    cases = list(every)
    assert all(case in cases for case in quick)

    def slow(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)

    return [case if case in quick else slow(case) for case in cases]


def mark_all_but_those_in_turn(items: Iterable[pytest.Item]) -> None:
    """Mark as `slow` the cases of tests with the marker `in_turn` that have no turn today.

    They are drawn for each day, that of $APT_JAX_SEED_BASE. In `make test-slow` none has.
    """
    day = int(os.environ["APT_JAX_SEED_BASE"]) // 10_000
    groups: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    sizes: dict[str, int] = {}
    for item in items:
        marker = item.get_closest_marker("in_turn")
        if marker is not None and item.get_closest_marker("slow") is None:
            name = marker.kwargs.get("group") or item.nodeid.partition("[")[0]
            groups[name].append(item)
            sizes[name] = 0 if ALL else marker.args[0]
    for name, members in groups.items():
        members.sort(key=lambda item: item.nodeid)
        random.Random(f"{day} {name}").shuffle(members)
        for item in members[sizes[name] :]:
            item.add_marker(pytest.mark.slow)

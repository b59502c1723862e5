"""Cases that a test runs: some of them in `make test`, all in `make test-slow`."""

import os
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

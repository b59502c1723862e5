"""How many random cases a test runs: a few in `make test`, all of them in `make test-slow`."""

import os

ALL = os.environ.get("APT_JAX_TEST_CASES") == "all"


def num_cases(few: int, every: int) -> int:
    """Return how many seeds or Hypothesis examples to run; the test that asks has the marker `seeds`."""
    return every if ALL else few

"""The targets of coverage-guided fuzzing without atheris: bytes from Hypothesis, and the inputs that failed."""

import random

import pytest
from hypothesis import strategies as st

from tests.fuzz.coverage_guided import SEEDS, TARGETS
from tests.support.cases import num_cases
from tests.support.fuzzing import cases, fuzz
from tests.support.mutations import mutate_bytes


def _changed(seed: bytes, number: int) -> bytes:
    return mutate_bytes(random.Random(number), seed, 4000)


@pytest.mark.seeds
@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes_are_a_value_or_refused(target):
    for data in SEEDS[target]:
        TARGETS[target](data)
    total = cases(num_cases(80, 300), 2_000, 50_000)
    changed = st.builds(_changed, st.sampled_from(SEEDS[target]), st.integers(0, 2**32))
    fuzz(f"coverage-{target}", TARGETS[target], total, data=changed | st.binary(max_size=100))

"""Pooled states of prompts come whole and once, whatever happens to their requests."""

from typing import Literal

import numpy as np
import pytest

from tests.support.cases import num_cases
from tests.support.fake_executor import reference_embedding
from tests.support.fake_serving import prompt_with_shared_beginning, unsteady

POOLINGS: list[Literal["mean", "last"]] = ["mean", "last"]


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(num_cases(24, 300)))
def test_preemptions_switches_conversions_and_failures(seed):
    rng = np.random.default_rng([23, seed])
    fails = {int(rng.integers(0, 8))} if seed % 2 else set()
    served = unsteady(rng, seed, fails=fails, overlap=bool(seed % 3))
    for i in range(6):
        served.add(
            prompt_with_shared_beginning(rng, i), int(rng.integers(1, 4)), pooling=None if i == 2 else POOLINGS[i % 2]
        )
        served.step()
    served.drain()
    assert served.engine.dead_reason is None
    for name, request in served.requests.items():
        pooling = request.params.pooling
        assert served.ended[name] == "length"
        if pooling is None:
            assert name not in served.pooled
        else:
            wanted = reference_embedding(request.prompt_token_ids, pooling)
            np.testing.assert_allclose(served.pooled[name], wanted, rtol=1e-6)
    served.assert_as_expected()

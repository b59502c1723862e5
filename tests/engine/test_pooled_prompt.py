"""Pooled states of prompts come whole and once, whatever happens to their requests."""

from typing import Literal

import numpy as np
import pytest

from tests.support.cases import num_cases
from tests.support.fake_executor import Fault, FaultKind, reference_embedding
from tests.support.fake_serving import Served, prompt
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy

POOLINGS: list[Literal["mean", "last"]] = ["mean", "last"]


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(num_cases(24, 300)))
def test_preemptions_switches_conversions_and_failures(seed):
    rng = np.random.default_rng([23, seed])
    steps = iter(range(10**6))
    fails = {int(rng.integers(0, 8))} if seed % 2 else set()

    def fault(_batch) -> Fault | None:
        return Fault(kind=FaultKind.RAISE_IN_RESULT) if next(steps) in fails else None

    served = Served(budget=int(rng.integers(8, 40)), overlap=bool(seed % 3), debug=True, fault=fault)
    whims = RandomPlanPolicy(preempt=0.15, skip=0.1, chunk=0.4, flip=0.3, convert=0.3)
    served.engine.policy = RandomPolicy(seed, whims)
    shared = prompt(12)
    for i in range(6):
        text = np.concatenate([shared[: int(rng.integers(0, 13))], prompt(int(rng.integers(1, 30)), i)])
        served.add(text, int(rng.integers(1, 4)), pooling=None if i == 2 else POOLINGS[i % 2])
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

"""Requests of several LoRA adapters in one engine: each has its own cache, and nobody finds another's."""

import dataclasses
import itertools

import numpy as np
import pytest

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.errors import InvalidRequestError
from tests.support.fake_serving import Served, prompt

ADAPTERS = ("french", "sql")
EVERY = (None, *ADAPTERS)


@pytest.mark.parametrize("kind", [KV, HIDDEN])
def test_a_prefix_is_found_by_requests_of_the_same_adapter_alone(kind):
    served = Served(adapters=ADAPTERS, offered=(kind == KV, kind == HIDDEN))
    for turn, adapter in itertools.product(range(2), EVERY):
        name = served.add(prompt(17), adapter=adapter)
        served.drain()
        assert served.cached[name] == 16 * turn, (adapter, turn)
    served.assert_as_expected()
    assert len({tuple(tokens) for tokens in served.tokens.values()}) == 3


@pytest.mark.parametrize("share", [False, True])
def test_tenants_adapters_and_salts_of_one_name_have_prefixes_of_their_own(share):
    served = Served(adapters=ADAPTERS)
    request = served.requests[served.add(prompt(9), adapter="sql")]
    prefixes = served.engine.states.prefixes
    prefixes._share = share
    roots = {
        prefixes.root_of(dataclasses.replace(request, tenant=tenant, adapter=adapter, cache_salt=salt))
        for tenant in (None, "a", "sql")
        for adapter in EVERY
        for salt in (None, "a", "sql", "s" * 512)
    }
    assert len(roots) == (1 if share else 3) * 3 * 4


def test_batches_say_which_row_has_which_adapter():
    served = Served(adapters=ADAPTERS)
    for i in range(9):
        served.add(prompt(10 + i, seed=i), max_tokens=6, adapter=EVERY[i % 3])
    served.drain()
    served.assert_as_expected()
    together = [set(batch.adapters.tolist()) for batch in served.batches if batch.adapters is not None]
    assert {0, 1, 2} in together
    assert len(together) == len(served.batches)
    part = next(b for b in served.batches if len(b.slots) > 2).part(np.array([0, 2]))
    assert part.adapters is not None
    assert part.adapters.shape == (2,)


@pytest.mark.parametrize("seed", range(3))
def test_preemptions_keep_the_adapter(seed):
    served = Served(adapters=ADAPTERS, num_blocks=40, policy="apt")
    rng = np.random.default_rng(seed)
    names = [served.add(prompt(12, seed=i % 2), max_tokens=12, adapter=EVERY[i % 3]) for i in range(8)]
    preempted = 0
    while served.engine.has_work:
        served.step()
        if rng.random() < 0.3:
            preempted += served.engine.preempt(names[int(rng.integers(len(names)))])
    assert preempted
    served.assert_as_expected()


def test_unknown_adapters_are_refused_and_others_cost_nothing():
    served = Served(adapters=ADAPTERS)
    with pytest.raises(InvalidRequestError, match="'dutch' is not an adapter of this engine"):
        served.add(prompt(9), adapter="dutch")
    plain = Served()
    plain.serve(prompt(9))
    assert all(batch.adapters is None for batch in plain.batches)

"""Histories of the real engine, each from one seed (see `simulation_harness`)."""

import pytest

from tests.support.cases import num_cases
from tests.support.seeds import TWICE_EVERY, digests_elsewhere, failed_seeds, run_seeds, seed_base
from tests.support.simulation_harness import REAL_POLICIES, draw_scenario, scenario_rng

RARE_STATES = {
    "a kind switch hidden to kv": 0.05,
    "a kind switch kv to hidden": 0.08,
    "abort in the step that delivers": 0.055,
    "abort with a token in flight": 0.059,
    "abort: ending": 0.016,
    "abort: preempted": 0.03,
    "abort: prefill": 0.019,
    "abort: running": 0.1,
    "abort: waiting": 0.14,
    "allocation failure of > 1 block": 0.107,
    "bad row with >= 2 bystanders": 0.019,
    "block copied": 0.06,
    "block loaded": 0.11,
    "block read by two rows": 0.11,
    "block saved": 0.3,
    "blocks cached at the end": 0.52,
    "chunked prefill": 0.5,
    "conversion": 0.121,
    "conversion of shared layer inputs": 0.005,
    "conversion of two rows": 0.032,
    "conversion put off": 0.009,
    "conversion with a token in flight": 0.069,
    "conversion within a prompt": 0.055,
    "drained with preempted requests": 0.19,
    "ends at a block border": 0.59,
    "engine ended after two failures": 0.008,
    "finish: abort": 0.27,
    "finish: error": 0.2,
    "finish: length": 0.67,
    "finish: stop": 0.56,
    "group evicted": 0.42,
    "group exchanged": 0.12,
    "group read from disk": 0.006,
    "mixed prefill and decode": 0.42,
    "pinned to hidden": 0.24,
    "positions recomputed": 0.33,
    "preempted 3 times": 0.045,
    "preempted before a new token": 0.029,
    "preempted from outside": 0.08,
    "preempted in mid-prompt": 0.09,
    "preempted with a token in flight": 0.22,
    "prefix dropped": 0.13,
    "prefix found": 0.31,
    "refused: never fits": 0.26,
    "refused: queue full": 0.24,
    "row deferred": 0.17,
    "slots loaded": 0.011,
    "slots saved for a request of the other class": 0.017,
    "step failure with >= 2 rows": 0.06,
    "step failure with a token in flight": 0.06,
    "step failure: out_of_memory": 0.04,
    "step failure: partial": 0.025,
    "step failure: raise_after": 0.01,
    "step failure: raise_before": 0.01,
    "step failure: raise_in_result": 0.04,
    "stop found late, row in flight dropped": 0.43,
}
"""States that must occur, and at least in what share of the seeds: what never happens is not tested. `Tally.missing`
allows five standard deviations, so that the rare ones count in `make test-slow` alone."""


@pytest.mark.seeds
@pytest.mark.timeout(3600)
def test_I1_to_I19_every_promise_holds_and_rare_states_occur():
    """One test: the histories are many, and workers would repeat them."""
    base = seed_base()
    tally = run_seeds("engine", range(base, base + num_cases(50, 4_000)))
    assert not tally.failures, "\n".join(text for _, text in tally.failures)
    assert not tally.missing(RARE_STATES)
    twice = [seed for seed in tally.digests if seed % TWICE_EVERY == 0]
    assert digests_elsewhere("engine", twice) == {seed: tally.digests[seed] for seed in twice}


def test_seeds_that_once_failed_pass():
    tally = run_seeds("engine", failed_seeds("engine"), keep=False)
    assert not tally.failures, "\n".join(text for _, text in tally.failures)


def test_every_policy_is_drawn():
    drawn = {draw_scenario(scenario_rng(seed)).policy.partition("+")[0] for seed in range(360)}
    assert drawn >= set(REAL_POLICIES)

"""Histories of whole servers, each from one seed (see `tests.support.serving_simulation`)."""

import pytest

from tests.support.cases import num_cases
from tests.support.seeds import TWICE_EVERY, digests_elsewhere, failed_seeds, run_seeds, seed_base

RARE_STATES = {
    "SIGTERM": 0.1,
    "aborted by an operator": 0.06,
    "bad row": 0.1,
    "breaker half-open": 0.005,
    "breaker open": 0.01,
    "clock jumped": 0.03,
    "engine died: hung step": 0.07,
    "engine died: two failures": 0.02,
    "engine rejects: DuplicateRequestError": 0.02,
    "engine rejects: InvalidRequestError": 0.02,
    "engine rejects: QueueFullError": 0.1,
    "hung step": 0.07,
    "left before the body": 0.142,
    "left preempted": 0.004,
    "left queued": 0.057,
    "left running": 0.19,
    "left while building": 0.135,
    "left while written to": 0.05,
    "network cut off": 0.04,
    "outcome: aborted": 0.05,
    "outcome: deadline": 0.13,
    "outcome: error": 0.13,
    "outcome: indeterminate": 0.11,
    "outcome: invalid": 0.32,
    "outcome: left": 0.32,
    "outcome: ok": 0.56,
    "outcome: rejected": 0.39,
    "outcome: unavailable": 0.12,
    "preempted from outside": 0.1,
    "process killed": 0.024,
    "process paused": 0.02,
    "process started again": 0.07,
    "rejected while a step ran": 0.28,
    "rejected: share of the tenant": 0.08,
    "retried on another replica": 0.16,
    "slow step": 0.12,
    "stalled reader cut": 0.16,
    "step failure with >= 2 rows": 0.02,
    "step failure: out_of_memory": 0.02,
    "step failure: partial": 0.02,
    "step failure: raise_before": 0.02,
    "step failure: raise_in_result": 0.01,
    "step failure: raise_in_sample": 0.002,
    "stopped while building": 0.04,
    "stopped with preempted requests": 0.004,
    "stopped with queued requests": 0.02,
    "stopped with running requests": 0.07,
    "writer waits for a slow reader": 0.2,
}
"""See `tests/dst/test_simulation.py`."""


@pytest.mark.seeds
@pytest.mark.timeout(3600)
def test_I10_to_I20_every_promise_holds_and_rare_states_occur():
    """One test: the histories are many, and workers would repeat them."""
    base = seed_base()
    tally = run_seeds("serving", range(base, base + num_cases(45, 4_000)))
    assert not tally.failures, "\n".join(text for _, text in tally.failures)
    assert not tally.missing(RARE_STATES)
    twice = [seed for seed in tally.digests if seed % TWICE_EVERY == 0]
    assert digests_elsewhere("serving", twice) == {seed: tally.digests[seed] for seed in twice}


def test_seeds_that_once_failed_pass():
    tally = run_seeds("serving", failed_seeds("serving"), keep=False)
    assert not tally.failures, "\n".join(text for _, text in tally.failures)

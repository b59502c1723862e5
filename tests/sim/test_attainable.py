"""The bound on attainment: against all subsets of small instances, and above what policies attain."""

import dataclasses
import itertools

import numpy as np
import pytest

from apt_jax.config import SLO
from apt_jax.sim.attainable import attainable, first_tokens_share, least_prefill_s, least_token_s, most_on_time
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.simulator import simulate


def fits(chosen, arrival_s, work_s, within_s) -> bool:
    """Return True if each interval from an arrival to a deadline has room for the work in it: enough, with preemption,
    on one machine."""
    return all(
        sum(work_s[i] for i in chosen if arrival_s[a] <= arrival_s[i] <= arrival_s[b])
        <= arrival_s[b] + within_s - arrival_s[a] + 1e-9
        for a in chosen
        for b in chosen
        if arrival_s[a] <= arrival_s[b]
    )


def most_by_trying(arrival_s, work_s, within_s) -> int:
    n = len(arrival_s)
    return max(
        len(chosen)
        for size in range(n + 1)
        for chosen in itertools.combinations(range(n), size)
        if fits(chosen, arrival_s, work_s, within_s)
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_most_of_all_subsets(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 10))
    arrival_s = np.sort(rng.choice([0.0, 0.5, 1.0, 2.0, 3.0, rng.uniform(0, 3)], n))
    work_s = rng.uniform(0.05, 1.5, n) if seed % 2 else rng.integers(1, 5, n) / 4
    within_s = float(rng.choice([0.5, 1.0, 2.0]))
    assert most_on_time(arrival_s, work_s, within_s) == most_by_trying(arrival_s, work_s, within_s)


def test_nobody_and_everybody():
    none = np.empty(0)
    assert most_on_time(none, none, 1.0) == 0
    assert most_on_time(np.arange(5.0), np.full(5, 2.0), 1.0) == 0
    assert most_on_time(np.arange(5.0), np.full(5, 0.9), 1.0) == 5
    assert most_on_time(np.zeros(5), np.full(5, 0.3), 1.0) == 3


def test_a_prompt_takes_at_least_its_own_steps():
    """In any chunks, alone or beside others, a step of prompts takes no less than what its tokens are counted with."""
    costs = load_hardware("opt-13b", "a100-40gb").step_costs("absorb")
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 2000, 40).astype(np.int32)
    left, took_s = prompts.copy(), 0.0
    while left.any():
        share = np.minimum(left, rng.integers(2, 300, left.size)).astype(np.int32)
        share = np.where(left - share == 1, left, share)  # no chunk of a single token
        share = np.where(np.cumsum(share) <= 2048, share, 0).astype(np.int32)
        rows = np.flatnonzero(share)
        took_s += costs.step_s(share[rows], (prompts - left)[rows], np.zeros(rows.size, np.int8))
        left -= share
    assert took_s >= least_prefill_s(prompts, costs, 2048).sum() - 1e-9


def test_replicas_and_prompts_that_take_too_long():
    costs = load_hardware("opt-13b", "a100-40gb").step_costs("absorb")
    arrival_s = np.zeros(40)
    prompts = np.full(40, 1000, np.int32)
    shares = [
        first_tokens_share(arrival_s, prompts, costs, ttft_s=1.0, step_tokens=2048, replicas=r) for r in (1, 2, 4)
    ]
    assert 0 < shares[0] < shares[1] < shares[2] <= 1
    assert first_tokens_share(arrival_s, prompts, costs, ttft_s=1e-3, step_tokens=2048, replicas=1000) == 0


@pytest.mark.parametrize("policy", ["fcfs", "sarathi", "vllm-v1", "qoserve", "apt", "apt-plus"])
@pytest.mark.parametrize(
    ("trace", "rate", "cv", "ttft_s"), [("longbench", 2.0, 10.0, 4.0), ("sharegpt", 20.0, 8.0, 0.3)]
)
def test_no_policy_attains_more(policy, trace, rate, cv, ttft_s):
    config = SimulationConfig(
        trace=trace, rate=rate, cv=cv, num_requests=60, output_scale=0.2, policy=policy, slo=SLO(ttft_s=ttft_s, tbt_s=1.0)
    )  # fmt: skip
    result = simulate(config)
    assert result.slo_attainment_bound is not None
    assert result.summary.ttft_attainment <= result.slo_attainment_bound < 1
    assert result.as_dict()["slo_attainment_bound"] == result.slo_attainment_bound
    assert result.strict_attainment_bound is not None
    assert result.summary.strict_attainment <= result.strict_attainment_bound <= result.slo_attainment_bound


def test_a_further_token_takes_at_least_its_share_of_the_pool():
    """In steps of any rows that fit the pool, decoded or computed again, with keys and values or layer inputs."""
    hardware = load_hardware("opt-13b", "a100-40gb")
    costs = hardware.step_costs("absorb")
    rng = np.random.default_rng(0)
    for _ in range(200):
        prompts = rng.integers(2, 1500, 200).astype(np.int32)
        groups = -(-prompts // hardware.block_size)
        token_s = least_token_s(prompts, costs, np.stack([2 * groups, groups], axis=1) / hardware.num_blocks)
        rows = rng.permutation(200)
        kind = rng.integers(0, 2, 200).astype(np.int8)
        rows = rows[np.cumsum((2 - kind[rows]) * groups[rows]) <= hardware.num_blocks]
        again = rng.random(rows.size) < rng.choice([0.0, 0.1, 0.5, 1.0])
        num_tokens = np.where(again, prompts[rows], 1).astype(np.int32)
        start = np.where(again, 0, prompts[rows]).astype(np.int32)
        assert costs.step_s(num_tokens, start, kind[rows]) >= token_s[rows].sum()


def test_the_strict_bound_falls_with_load_and_the_other_does_not_where_requests_may_pause():
    hardware = load_hardware("opt-13b", "a100-40gb")
    costs = hardware.step_costs("absorb")
    prompts, outputs = np.full(6000, 280, np.int32), np.full(6000, 240, np.int32)
    groups = -(-prompts // hardware.block_size)
    shares = np.stack([2 * groups, groups], axis=1) / hardware.num_blocks

    def bounds(rate: float, num_outputs: int = 240):
        return attainable(
            np.arange(6000) / rate, prompts, np.minimum(outputs, num_outputs), costs,
            slo=SLO(ttft_s=1.0, tbt_s=1.0), step_tokens=2048, pool_shares=shares,
        )  # fmt: skip

    assert bounds(4.0).strict == bounds(4.0).slo == 1.0
    assert bounds(20.0).slo == 1.0  # everybody pauses once
    assert 0.2 < bounds(20.0).strict < 0.8
    assert bounds(20.0, 80).slo < bounds(20.0, 80).strict + 0.3  # 79 gaps forgive none
    assert bounds(40.0, 80).slo < 1.0


@pytest.mark.parametrize("policy", ["vllm-v1", "apt", "apt-plus", "apt-plus?forgiven_gaps=0"])
def test_no_policy_attains_more_strictly_under_overload(policy):
    config = SimulationConfig(
        trace="sharegpt", rate=100.0, num_requests=600, policy=policy, slo=SLO(ttft_s=1.0, tbt_s=0.05), cache="hybrid"
    )  # fmt: skip
    result = simulate(config)
    assert result.strict_attainment_bound is not None
    assert result.summary.strict_attainment <= result.strict_attainment_bound < 0.97
    assert result.slo_attainment_bound is not None
    assert result.slo_attainment <= result.slo_attainment_bound


def test_where_nothing_is_known_there_is_none():
    config = SimulationConfig(trace="humaneval", rate=4.0, num_requests=5, policy="fcfs")
    assert simulate(config).slo_attainment_bound == 1.0
    assert simulate(config, step_s=lambda batch: 0.01).slo_attainment_bound is None
    slos = simulate(dataclasses.replace(config, slo=SLO(ttft_s=1e-4, tbt_s=1.0)))
    assert slos.slo_attainment_bound == slos.slo_attainment == 0.0


@pytest.mark.parametrize("e2e_s", [0.5, 2.0, 8.0])
def test_the_bounds_hold_with_an_end_to_end_objective(e2e_s):
    config = SimulationConfig(
        trace="sharegpt", rate=20.0, num_requests=60, output_scale=0.2, policy="fcfs", slo=SLO(ttft_s=0.3, tbt_s=1.0)
    )  # fmt: skip
    without = simulate(config)
    found = simulate(dataclasses.replace(config, slo=dataclasses.replace(config.slo, e2e_s=e2e_s)))
    assert found.summary.e2e_s == without.summary.e2e_s  # policies do not read it
    assert found.slo_attainment <= without.slo_attainment
    assert found.summary.strict_attainment <= without.summary.strict_attainment
    assert (found.slo_attainment_bound, found.strict_attainment_bound) == (
        without.slo_attainment_bound,
        without.strict_attainment_bound,
    )
    alone = simulate(dataclasses.replace(config, slo=SLO(e2e_s=e2e_s)))
    assert alone.slo_attainment == alone.summary.e2e_attainment
    assert alone.slo_attainment_bound == 1.0

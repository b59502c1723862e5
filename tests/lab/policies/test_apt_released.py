"""`AptReleasedPolicy` decides what a plain transcription of the released scheduler decides (`apt_released`)."""

import functools

import numpy as np
import pytest

from apt_jax.sched import Plan, make_policy
from tests.support.apt_paper import decide
from tests.support.apt_released import Released
from tests.support.cases import num_cases
from tests.support.sched_world import HIDDEN, KV, Arrival, World, drain, random_world, short_run


def assert_alike(plan: Plan, world: World, released: Released) -> None:
    expected = released.decide(world.view())
    runs = dict(zip(plan.rows.tolist(), plan.kind.tolist(), strict=True))
    assert (plan.iteration == "prefill") == expected.prefill
    assert runs == expected.runs
    assert set(plan.preempt.tolist()) == expected.preempts


@pytest.mark.seeds
def test_the_transcription_decides_the_same_in_random_states():
    num = num_cases(400, 2000)
    rng = np.random.default_rng(2026)
    seen = {"prefill": 0, "decode": 0, "idle": 0, "preempt": 0, "hidden": 0}
    for _ in range(num):
        world = random_world(rng)
        if world.table.live.any():
            plan = world.schedule(make_policy("apt-released"))
            assert_alike(plan, world, Released())
            seen[plan.iteration] += 1
            seen["preempt"] += plan.preempt.size > 0
            seen["hidden"] += bool((plan.kind == HIDDEN).any())
    assert min(seen["prefill"], seen["decode"]) > num / 5, seen
    assert min(seen["preempt"], seen["hidden"]) > 0.15 * num, seen


@pytest.mark.seeds
def test_the_transcription_decides_the_same_in_short_runs():
    """Queues, and the marks of requests that were once chosen with the hidden kind, outlive an iteration."""
    plans: list[Plan] = []
    num = num_cases(30, 200)
    for seed in range(num):
        check = functools.partial(assert_alike, released=Released())
        plans += short_run(seed, make_policy("apt-released"), check)
    assert len(plans) > 25 * num
    assert sum(plan.preempt.size for plan in plans) > 2 * num
    assert sum(bool((plan.kind == HIDDEN).any()) for plan in plans) > 2 * num


@pytest.mark.seeds
def test_limits_in_the_pass_are_those_of_the_transcription_of_the_paper():
    num = num_cases(400, 2000)
    rng = np.random.default_rng(2027)
    differs = 0
    for i in range(num):
        world = random_world(rng)
        if world.table.live.any():
            options = "?keep_kind=false&violation_decay=0.4" if i % 2 else "?keep_kind=false"
            plan = world.schedule(make_policy(f"apt-in-pass{options}"))
            expected = decide(world.view(), decay=0.4 * (i % 2), in_pass=True)
            assert dict(zip(plan.rows.tolist(), plan.kind.tolist(), strict=True)) == expected.runs
            assert set(plan.preempt.tolist()) == expected.preempts
            usual = world.schedule(make_policy(f"apt{options}"))
            differs += usual.rows.tolist() != plan.rows.tolist() or usual.kind.tolist() != plan.kind.tolist()
    assert differs > 0.05 * num


def test_hidden_caches_are_given_up_at_the_first_decode_step():
    world = World(num_blocks=100)
    row = world.hold(world.add(20, 50, tbt_s=1.0), HIDDEN)
    other = world.hold(world.add(20, 50, tbt_s=1.0), KV)
    plan = world.schedule(make_policy("apt-released"))
    assert plan.rows.tolist() == [other]
    assert plan.preempt.tolist() == [row]


def test_a_prompt_in_chunks_keeps_its_cache_for_its_last_token():
    """One of 33 tokens in chunks of 16 is left, which looks like a decode step and is none."""
    world = World(num_blocks=100, max_num_batched_tokens=16)
    row = world.hold(world.add(33, 50), HIDDEN, cached=32)
    plan = world.schedule(make_policy("apt-released"))
    assert (plan.rows.tolist(), plan.num_tokens.tolist(), plan.preempt.tolist()) == ([row], [1], [])


def test_the_pass_ends_at_the_first_prompt_that_exceeds_the_step():
    """`apt` goes on to options of less memory; the released pass ends, even for a change to keys and values."""
    world = World(num_blocks=100, max_num_batched_tokens=25)
    first = world.add(20, 50, ttft_s=10.0, arrival_s=-3.0)
    world.add(20, 50, ttft_s=10.0, arrival_s=-2.0)
    plan = world.schedule(make_policy("apt-released"))
    assert plan.rows.tolist() == [first]
    assert plan.kind.tolist() == [HIDDEN]


@pytest.mark.parametrize("mode", ["kv", "hidden", "hybrid"])
def test_everything_is_served_long_prompts_and_prompts_too_long_for_keys_and_values_too(mode: str):
    rng = np.random.default_rng(3)
    world = World(num_blocks=60, mode=mode, max_num_batched_tokens=16)
    arrivals = [
        Arrival(
            at_step=int(rng.integers(0, 50)),
            prompt_len=int(rng.integers(1, 40)),
            max_tokens=int(rng.integers(1, 60)),
            ttft_s=0.1,
            tbt_s=0.1,
        )
        for _ in range(30)
    ]
    drain(world, make_policy("apt-released"), arrivals, limit=8000)
    assert len(world.finished) == 30

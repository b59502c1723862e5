"""`AptPolicy` decides what a plain transcription of the paper's text decides (`apt_paper`), iteration by iteration."""

import functools

import numpy as np
import pytest

from apt_jax.sched import AptPolicy, Plan, make_policy
from tests.support.apt_paper import decide
from tests.support.cases import num_cases
from tests.support.sched_world import HIDDEN, World, random_world, short_run

READINGS = (
    {"prefill_memory": "kv"},
    {"prefill_memory": "held"},
    {"prefill_memory": "kv", "count_violated": False},
    {"prefill_memory": "held", "keep_kind": True},
)


def assert_alike(plan: Plan, world: World, **reading: object) -> None:
    expected = decide(world.view(), **reading)  # pyright: ignore[reportArgumentType]
    runs = dict(zip(plan.rows.tolist(), plan.kind.tolist(), strict=True))
    assert (plan.iteration == "prefill") == expected.prefill
    assert runs == expected.runs
    assert set(plan.preempt.tolist()) == expected.preempts


@pytest.mark.seeds
def test_the_transcription_decides_the_same_in_random_states():
    num = num_cases(400, 2000)
    rng = np.random.default_rng(2025)
    seen = {"prefill": 0, "decode": 0, "idle": 0, "preempt": 0, "hidden": 0, "violated": 0}
    for i in range(num):
        world = random_world(rng)
        if not world.table.live.any():
            continue
        reading = dict(READINGS[i % len(READINGS)])
        decay = 0.4 if i % 3 == 0 else 0.0
        plan = world.schedule(AptPolicy(decay, **({"keep_kind": False} | reading)))  # pyright: ignore[reportArgumentType]
        assert_alike(plan, world, decay=decay, **reading)
        seen[plan.iteration] += 1
        seen["preempt"] += plan.preempt.size > 0
        seen["hidden"] += bool((plan.kind == HIDDEN).any())
    assert min(seen["prefill"], seen["decode"]) > num / 4, seen
    assert min(seen["preempt"], seen["hidden"]) > 0.15 * num, seen


@pytest.mark.seeds
def test_the_transcription_decides_the_same_in_short_runs():
    plans: list[Plan] = []
    num = num_cases(30, 200)
    for seed in range(num):
        reading = dict(READINGS[seed % len(READINGS)])
        policy = AptPolicy(**({"keep_kind": False} | reading))  # pyright: ignore[reportArgumentType]
        plans += short_run(seed, policy, functools.partial(assert_alike, **reading))
    assert len(plans) > 25 * num
    assert sum(plan.preempt.size for plan in plans) > 2.5 * num


@pytest.mark.parametrize("mode", ["kv", "hidden"])
def test_with_one_kind_and_ample_memory_all_readings_agree(mode):
    """The readings of `apt`: M, who counts, kinds kept or not, and Apt-Serve's solver against a pool where all fit."""
    policies = [AptPolicy(**reading) for reading in READINGS]  # pyright: ignore[reportArgumentType]
    rng = np.random.default_rng(7)
    world = World(num_blocks=10_000, mode=mode, max_num_seqs=64, max_num_batched_tokens=120)
    for _ in range(400):
        if rng.random() < 0.3:
            world.add(int(rng.integers(1, 60)), int(rng.integers(1, 30)), ttft_s=0.2, tbt_s=0.05)
        first, *others = (world.schedule(policy) for policy in policies)
        for other in others:
            for field in ("rows", "num_tokens", "kind", "preempt"):
                assert np.array_equal(getattr(first, field), getattr(other, field))
        assert not first.preempt.size
        world.apply(first)
    assert len(world.finished) > 50


def test_the_policy_by_name_is_the_paper_with_a_reprojected_hidden_kind():
    rng = np.random.default_rng(1)
    for _ in range(100):
        world = random_world(rng)
        if world.table.live.any():
            assert_alike(world.schedule(make_policy("apt")), world)

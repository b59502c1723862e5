"""Text Generation Inference's queue: reservations, when running requests are paused, and for how many."""

import numpy as np
import pytest

from apt_jax.lab.policies.tgi import TgiPolicy
from apt_jax.sched import make_policy
from tests.support.sched_world import KV, World


def running(world: World, num: int, max_tokens: int = 100) -> list[int]:
    return [world.hold(world.add(10, max_tokens), KV) for _ in range(num)]


def test_whole_lengths_are_reserved():
    # 4 tokens per block and two of each: 10 + 23 - 1 positions are 16 blocks.
    world = World(num_blocks=47, mode="kv")
    rows = [world.add(10, 23) for _ in range(3)]
    assert world.schedule(make_policy("tgi")).rows.tolist() == rows[:2]
    world = World(num_blocks=48, mode="kv")
    rows = [world.add(10, 23) for _ in range(3)]
    assert world.schedule(make_policy("tgi")).rows.tolist() == rows


def test_what_runs_keeps_the_room_that_it_may_still_take():
    world = World(num_blocks=31, mode="kv")
    held = world.hold(world.add(10, 23), KV)
    world.add(10, 23)
    plan = world.schedule(make_policy("tgi"))
    assert (plan.rows.tolist(), plan.iteration) == ([held], "decode")


def test_few_waiting_requests_do_not_pause_many():
    world = World(num_blocks=4000, mode="kv", max_num_seqs=40)
    held = running(world, 10)
    waiting = [world.add(10) for _ in range(2)]
    policy = TgiPolicy(max_waiting_tokens=5)
    assert world.schedule(policy).iteration == "decode"  # 2 are less than 0.3 of 10
    waiting.append(world.add(10))
    plan = world.step(policy)
    assert (plan.rows.tolist(), plan.iteration) == (waiting, "prefill")
    later = world.add(10)
    # A decode comes after a prefill that paused others; the fourth one since lets a single request join.
    plans = [world.step(policy) for _ in range(5)]
    assert [p.iteration for p in plans] == ["decode"] * 4 + ["prefill"]
    assert plans[0].rows.tolist() == [*held, *waiting]
    assert plans[4].rows.tolist() == [later]


def test_a_batch_that_must_be_small_does_not_pause_many():
    """Enough wait, but fewer fit than the ratio asks for."""
    world = World(num_blocks=4000, mode="kv", max_num_seqs=12)
    running(world, 10)
    for _ in range(5):
        world.add(10)
    assert world.schedule(make_policy("tgi")).iteration == "decode"
    assert world.schedule(TgiPolicy(waiting_served_ratio=0.2)).rows.size == 2


def test_prompts_of_a_prefill_are_limited():
    world = World(num_blocks=4000, mode="kv", max_num_seqs=40, max_num_batched_tokens=400)
    rows = [world.add(30) for _ in range(5)]
    policy = TgiPolicy(max_batch_prefill_tokens=100)
    assert world.step(policy).rows.tolist() == rows[:3]
    assert world.step(policy).rows.tolist() == rows[3:]  # 2 are not less than 0.3 of 3


def test_a_longer_prompt_is_computed_in_chunks_before_anything_else():
    world = World(num_blocks=4000, mode="kv", max_num_seqs=8, max_num_batched_tokens=16)
    held, long = running(world, 1), world.add(40)
    policy = TgiPolicy(max_waiting_tokens=1)
    plans = [world.step(policy) for _ in range(4)]
    assert [p.num_tokens.tolist() for p in plans] == [[16], [16], [8], [1, 1]]
    assert plans[3].rows.tolist() == [*held, long]


@pytest.mark.parametrize("seed", range(8))
def test_nobody_is_ever_evicted(seed: int):
    rng = np.random.default_rng(seed)
    world = World(num_blocks=120, mode="kv", max_num_seqs=6, max_num_batched_tokens=80)
    policy = make_policy("tgi")
    for _ in range(30):
        world.add(int(rng.integers(1, 100)), int(rng.integers(1, 60)))
    while world.table.live.any():
        plan = world.step(policy)
        assert plan.rows.size
        assert not plan.preempt.size

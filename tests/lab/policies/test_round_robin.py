"""Two classes in turn."""

import numpy as np
import pytest

from apt_jax.lab.policies.round_robin import RoundRobinPolicy
from apt_jax.sched import make_policy
from tests.support.cases import num_cases
from tests.support.sched_world import KV, World


def best_effort(world: World, row: int) -> int:
    world.table.best_effort[row] = True
    return row


def test_classes_take_turns():
    world = World(num_blocks=400, mode="kv")
    rt = [world.add(8, 6) for _ in range(2)]
    be = [best_effort(world, world.add(8, 6)) for _ in range(2)]
    policy = make_policy("round-robin")
    served = [world.step(policy).rows.tolist() for _ in range(12)]
    assert served == [rt, be] * 6
    assert not world.table.live.any()


def test_a_class_without_work_leaves_its_turn():
    world = World(num_blocks=400, mode="kv")
    be = best_effort(world, world.add(8, 6))
    policy = make_policy("round-robin")
    assert [world.step(policy).rows.tolist() for _ in range(3)] == [[be]] * 3
    rt = world.add(8, 6)
    assert [world.step(policy).rows.tolist() for _ in range(4)] == [[rt], [be], [rt], [be]]


def test_a_turn_holds_both_phases_unless_they_are_kept_apart():
    def turns(policy: RoundRobinPolicy) -> list[tuple[str, list[int]]]:
        world = World(num_blocks=400, mode="kv")
        old = [best_effort(world, world.hold(world.add(8, 6), KV)), world.hold(world.add(8, 6), KV)]
        new = [best_effort(world, world.add(8, 6)), world.add(8, 6)]
        assert (old, new) == ([0, 1], [2, 3])
        plans = [world.step(policy) for _ in range(4)]
        return [(plan.iteration, plan.rows.tolist()) for plan in plans]

    assert turns(RoundRobinPolicy()) == [
        ("mixed", [1, 3]),
        ("mixed", [0, 2]),
        ("decode", [1, 3]),
        ("decode", [0, 2]),
    ]
    assert turns(RoundRobinPolicy(mixed=False)) == [
        ("prefill", [3]),
        ("prefill", [2]),
        ("decode", [1, 3]),
        ("decode", [0, 2]),
    ]


def test_nobody_is_admitted_while_those_that_decode_outgrow_the_pool():
    world = World(num_blocks=16, mode="kv")
    rows = [world.hold(world.add(15), KV, num_outputs=2) for _ in range(2)]  # 8 blocks, 10 next
    world.add(1)
    plan = world.schedule(RoundRobinPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == (rows[:1], rows[1:])


def test_the_latest_of_the_other_class_makes_room():
    world = World(num_blocks=20, mode="kv")
    be = [best_effort(world, world.hold(world.add(15), KV)) for _ in range(2)]  # 8 blocks each
    rt = world.add(15)
    assert world.schedule(make_policy("round-robin")).rows.tolist() == be
    world.table.tokens_since_preemption[be] = 16
    plan = world.schedule(make_policy("round-robin"))
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([rt], be[1:])


def test_a_class_evicts_its_own_beyond_half_of_the_pool():
    world = World(num_blocks=24, mode="kv")
    rt = [world.hold(world.add(15), KV, num_outputs=2) for _ in range(2)]  # 8 blocks, 10 next
    best_effort(world, world.hold(world.add(14), KV))
    world.add(30)
    plan = world.schedule(make_policy("round-robin"))
    assert (plan.rows.tolist(), plan.preempt.tolist()) == (rt[:1], rt[1:])


def test_prompts_under_way_are_not_interrupted():
    world = World(num_blocks=22, mode="kv", max_num_batched_tokens=8)
    be = best_effort(world, world.hold(world.add(35), KV, cached=16))
    world.add(15)
    plan = world.schedule(make_policy("round-robin"))
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([be], [])


@pytest.mark.seeds
def test_everything_ends_with_little_room():
    for seed in range(num_cases(15, 60)):
        rng = np.random.default_rng(seed)
        slots = int(rng.choice([1, 2, 8]))
        world = World(
            num_blocks=int(rng.choice([40, 50, 80])),
            mode="kv",
            max_num_seqs=slots,
            max_num_batched_tokens=slots + int(rng.choice([4, 16, 64])),
        )
        policy = make_policy("round-robin")
        left = 0
        for _ in range(12):
            row = world.add(int(rng.integers(1, 50)), int(rng.integers(1, 30)))
            world.table.best_effort[row] = rng.random() < 0.5
            left += int(world.table.max_tokens_total[row])
        idle = 0
        while world.table.live.any():
            idle = 0 if world.step(policy).rows.size else idle + 1
            assert idle < 4
            assert world.num_steps < 100 + 4 * left

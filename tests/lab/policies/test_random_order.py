"""Random order: admission, eviction, seeds."""

import numpy as np

from apt_jax.sched import make_policy
from tests.support.sched_world import KV, World


def admitted(seed: int) -> list[int]:
    world = World(num_blocks=40, mode="kv", max_num_seqs=4)
    for _ in range(12):
        world.add(7, 4)
    return world.schedule(make_policy("random", seed=seed)).rows.tolist()


def test_the_order_of_admission_comes_from_the_seed():
    assert admitted(3) == admitted(3)
    assert len({tuple(admitted(seed)) for seed in range(8)}) > 4
    assert {row for seed in range(40) for row in admitted(seed)} == set(range(12))


def evicted(seed: int) -> list[int]:
    world = World(num_blocks=16, mode="kv")
    for _ in range(4):
        world.hold(world.add(7), KV, num_outputs=2)  # 8 cached positions: 4 blocks; the ninth takes 2 more
    plan = world.schedule(make_policy("random", seed=seed))
    assert plan.iteration == "decode"
    assert sorted([*plan.rows.tolist(), *plan.preempt.tolist()]) == [0, 1, 2, 3]
    return plan.preempt.tolist()


def test_eviction_hits_anybody_and_no_more_than_it_must():
    assert {len(evicted(seed)) for seed in range(8)} == {2}
    assert {row for seed in range(20) for row in evicted(seed)} == {0, 1, 2, 3}


def test_a_prompt_that_does_not_fit_blocks_the_queue_for_a_draw_only():
    world = World(num_blocks=64, mode="kv", max_num_batched_tokens=200)
    world.hold(world.add(39), KV)
    large = world.add(100, 10)
    small = [world.add(5, 10) for _ in range(4)]
    policy = make_policy("random", seed=1)
    for _ in range(12):
        world.step(policy)
    assert all(world.table.num_outputs[row] for row in small)
    assert not world.table.num_outputs[large]


def test_whoever_was_preempted_comes_back():
    world = World(num_blocks=14, mode="kv")
    for _ in range(3):
        world.add(8, 16)
    policy = make_policy("random", seed=2)
    preempted = 0
    while world.table.live.any():
        preempted += world.step(policy).preempt.size
        assert world.num_steps < 200
    assert preempted
    assert np.array_equal(np.sort(world.finished), [0, 1, 2])

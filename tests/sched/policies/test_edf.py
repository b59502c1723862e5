"""Earliest deadline first."""

from apt_jax.sched import EdfPolicy
from tests.support.deadline_world import decode, step, world_of
from tests.support.sched_world import KV


def test_edf_serves_everybody_in_one_order():
    world = world_of()
    decode(world, last_s=0.0, tbt_s=0.5)  # due at 0.5
    world.add(30, arrival_s=0.0, ttft_s=0.3)  # 0.3
    world.hold(world.add(40, arrival_s=0.0, ttft_s=0.4), KV, cached=20)  # 0.4
    world.add(30, arrival_s=0.0, ttft_s=0.2)  # 0.2
    plan = world.schedule(EdfPolicy(budget=70))
    assert plan.rows.tolist() == [3, 1, 2]
    assert plan.num_tokens.tolist() == [30, 30, 10]
    assert step(world, EdfPolicy()) == ("mixed", {3: 30, 1: 30, 2: 20, 0: 1}, [])


def test_edf_preempts_the_last_due_and_none_for_waiting_requests():
    world = world_of(block_size=4)
    for tbt_s in (0.5, 0.1, 0.3):
        decode(world, last_s=0.0, tbt_s=tbt_s)  # 4 blocks, 2 more now
    world.add(4, arrival_s=-9.0, ttft_s=0.1)  # overdue
    world.num_blocks = 16
    assert step(world, EdfPolicy()) == ("decode", {1: 1, 2: 1}, [0])
    world.num_blocks = 18
    assert step(world, EdfPolicy()) == ("decode", {1: 1, 2: 1, 0: 1}, [])
    world.num_blocks = 20
    assert step(world, EdfPolicy()) == ("mixed", {3: 4, 1: 1, 2: 1, 0: 1}, [])

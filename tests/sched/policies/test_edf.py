"""Earliest deadline first."""

import numpy as np
import pytest

from apt_jax.sched import EdfPolicy
from apt_jax.sched.policies.edf import deadline_s, next_deadline_s
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


def test_an_end_to_end_deadline_counts_while_it_can_be_met():
    world = world_of()
    world.add(9, ttft_s=1.0, e2e_s=9.0)
    world.add(9, ttft_s=9.0, e2e_s=4.0)
    world.add(9, e2e_s=5.0)
    decode(world, last_s=3.5, tbt_s=1.0, e2e_s=4.0)
    row = world.add(9, e2e_s=1.0)
    world.table.best_effort[row] = True
    rows = np.arange(5, dtype=np.int32)
    assert next_deadline_s(world.view(), rows) == pytest.approx([1.0, 9.0, np.inf, 4.5, np.inf])
    world.now_s = 4.0
    assert deadline_s(world.view(), rows) == pytest.approx([1.0, 4.0, 5.0, 4.0, np.inf])
    world.now_s = 4.1
    assert deadline_s(world.view(), rows) == pytest.approx([1.0, 9.0, 5.0, 4.5, np.inf])


def test_edf_serves_and_preempts_by_end_to_end_deadlines_too():
    world = world_of(block_size=4)
    for e2e_s in (2.0, np.inf, 1.0):
        decode(world, e2e_s=e2e_s)
    world.num_blocks = 16
    assert step(world, EdfPolicy()) == ("decode", {2: 1, 0: 1}, [1])
    world = world_of()
    for e2e_s in (3.0, np.inf, 1.0, 2.0):
        world.add(30, e2e_s=e2e_s)
    assert step(world, EdfPolicy(budget=70)) == ("prefill", {2: 30, 3: 30, 0: 10}, [])
    world.now_s = 1.5  # too late for one of them: it comes with those that have no deadline, by arrival
    assert step(world, EdfPolicy(budget=100)) == ("prefill", {3: 30, 0: 30, 1: 30, 2: 10}, [])

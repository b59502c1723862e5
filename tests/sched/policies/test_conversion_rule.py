"""The rule for converting hidden requests: against hand calculation, brute force, and in a running world."""

import dataclasses
import time

import numpy as np
import pytest

from apt_jax.sched import NO_KIND, Plan, SchedulerView, StepCosts, check_plan, make_policy
from apt_jax.sched.conversion import rows_to_convert, spare_blocks, steps_left
from apt_jax.sched.step_packer import split_running
from tests.support.sched_world import HIDDEN, KV, Arrival, World, drain


def world(lengths: list[int], num_blocks: int = 200, max_tokens: int = 50, **options) -> World:
    """Hidden requests that have said one token."""
    made = World(num_blocks=num_blocks, can_convert=True, **options)
    for length in lengths:
        made.hold(made.add(length, max_tokens), HIDDEN)
    return made


def chosen(made: World, room: int = 1000, **changes) -> list[int]:
    view = dataclasses.replace(made.view(), **changes)
    return rows_to_convert(view, view.running, room).tolist()


def test_the_most_expensive_go_first_as_far_as_there_is_room():
    made = world([3, 30, 11, 12])  # 4, 31, 12 and 13 tokens: 2, 16, 6 and 8 blocks
    assert chosen(made) == [1, 3, 2, 0]
    assert chosen(made, room=32) == [1, 3, 2, 0]
    assert chosen(made, room=31) == [1, 3, 2]
    assert chosen(made, room=15) == [3, 2]
    assert chosen(made, room=9) == [3]
    assert chosen(made, room=7) == [2]
    assert chosen(made, room=1) == []
    assert chosen(made, room=-3) == []


def test_only_where_it_can_be_done_and_pays():
    made = world([9, 9])
    made.hold(made.add(9, 50), KV)
    assert chosen(made) == [0, 1]
    assert chosen(made, can_convert=False) == []
    assert chosen(made, total_blocks=29) == []  # 59 positions: 30 blocks
    assert chosen(made, total_blocks=30) == [0, 1]
    assert chosen(world([9], per_token_s=-1e-5)) == []  # absorbed: cheaper than KV
    assert chosen(world([9], per_token_s=-1e-5, base_s=1e-3)) == [0]
    # Two tokens allowed, one said: a conversion costs as much as the only step that it would save.
    assert chosen(world([9], max_tokens=2)) == []
    assert chosen(world([9], max_tokens=3)) == [0]


def test_measured_steps_count_whatever_policies_are_told_to_charge():
    made = world([9, 99], num_blocks=400, per_token_s=-1.0)
    made.costs = StepCosts(decode_per_token_s=1e-6, decode_per_hidden_token_s=3e-6)
    assert chosen(made) == [1, 0]
    made.costs = dataclasses.replace(made.costs, decode_per_request_s=1e-4)  # of KV: 2e-6 * 50 tokens
    assert chosen(made) == [1]


def test_a_measured_cost_counts():
    made = world([9, 99], max_tokens=11, base_s=1e-3, num_blocks=400)  # 10 steps left; 1.1 and 2 ms each
    for per_token_s, expected in ((1e-5, [1, 0]), (5e-4, [0]), (1.2e-3, [])):
        made.costs = StepCosts(convert_per_hidden_token_s=per_token_s)
        assert chosen(made) == expected, per_token_s


def test_steps_left_are_those_of_ended_requests_that_went_on():
    made = world([9, 9, 9], max_tokens=1000)
    table, rows = made.table, np.arange(3, dtype=np.int32)
    table.num_outputs[rows] = 1, 10, 200
    table.num_tokens[rows] = 10, 19, 209
    assert steps_left(made.view(), rows).tolist() == [999, 990, 800]
    lengths = [5] * 30 + [20] * 30
    for length in lengths:
        table.record_output_length(length)
    expected = [np.mean(lengths) - 1, 20 - 10, 800]
    assert steps_left(made.view(), rows) == pytest.approx(expected)
    table.num_outputs[0] = 19
    assert steps_left(made.view(), rows)[0] == 1
    table.num_outputs[0] = 20  # nobody has had more
    assert steps_left(made.view(), rows)[0] == 999


def test_blocks_of_the_next_admissions_are_left():
    made = world([9], max_num_seqs=3)
    for length in (8, 9, 100):
        made.add(length)
    view = made.view()
    assert spare_blocks(view, 20, view.waiting) == 20 - 2 - 3  # two slots; as layer inputs
    assert spare_blocks(view, 4, view.waiting) == 0
    for budget, blocks in ((17, 5), (16, 2), (3, 2)):  # a step that begins fewer, one in any case
        few = dataclasses.replace(view, max_num_batched_tokens=budget)
        assert spare_blocks(few, 20, view.waiting) == 20 - blocks
    assert spare_blocks(view, 20, view.waiting[:0]) == 20
    kv_only = World(num_blocks=100, mode="kv")
    kv_only.add(9)
    view = kv_only.view()
    assert spare_blocks(view, 20, view.waiting) == 14


class Converting:
    """`fcfs` that begins with layer inputs, and whatever the rule says on top."""

    name = "converting"
    converts = True

    def __init__(self) -> None:
        self.inner = make_policy("fcfs")

    def schedule(self, view: SchedulerView) -> Plan:
        plan = self.inner.schedule(view)
        if not plan.rows.size:
            return plan
        table, rows = view.table, plan.rows
        begins = table.kind[rows] == NO_KIND
        plan = dataclasses.replace(plan, kind=np.where(begins, np.int8(HIDDEN), plan.kind))
        if plan.iteration != "decode":
            return plan
        needed = view.blocks_for(table.num_cached[rows] + plan.num_tokens, plan.kind)
        grown = int((needed - table.num_blocks[rows] - table.num_shared[rows]).sum())
        free = view.free_blocks + int(table.num_blocks[plan.preempt].sum()) - grown
        decoding, _ = split_running(view)
        room = spare_blocks(view, free, view.waiting)
        convert = rows_to_convert(view, rows[np.isin(rows, decoding)], room)
        return dataclasses.replace(plan, convert=convert)


def test_plans_with_the_rule_keep_their_promises_and_everything_ends():
    rng = np.random.default_rng(5)
    arrivals = [
        Arrival(int(step), int(rng.integers(1, 60)), int(rng.integers(1, 40)), 0.3, 0.1)
        for step in np.sort(rng.integers(0, 150, 60))
    ]
    counts = []
    for num_blocks in (60, 200):
        made = World(num_blocks=num_blocks, can_convert=True, per_token_s=1e-4)
        drain(made, Converting(), arrivals, 5000)
        counts.append(made.num_conversions)
    assert min(counts) > 0


def test_it_takes_the_most_valuable_set_of_few_where_one_length_is_like_another():
    rng = np.random.default_rng(9)
    for _ in range(200):
        made = world(rng.integers(1, 60, 6).tolist(), num_blocks=400)
        room = int(rng.integers(0, 120))
        view = made.view()
        rows = rows_to_convert(view, view.running, room)
        blocks = view.blocks_for(made.table.num_tokens, KV)
        assert blocks[rows].sum() <= room
        left = np.setdiff1d(view.running, rows)
        assert (blocks[left] > room - blocks[rows].sum()).all()  # nobody else would fit
        plan = Plan(
            rows=view.running, num_tokens=np.ones(6, np.int32), kind=np.full(6, HIDDEN, np.int8),
            preempt=view.running[:0], iteration="decode", convert=rows,
        )  # fmt: skip
        check_plan(view, plan)


def test_a_call_takes_far_less_than_a_millisecond():
    made = world(np.random.default_rng(0).integers(1, 900, 256).tolist(), 40_000, max_num_seqs=256)
    view = made.view()
    for length in range(1, 500):
        made.table.record_output_length(length)
    times = []
    for _ in range(30):
        started = time.perf_counter()
        rows = rows_to_convert(view, view.running, 10_000)
        times.append(time.perf_counter() - started)
    assert rows.size
    assert np.median(times) < 1e-3

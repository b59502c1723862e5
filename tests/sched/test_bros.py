"""BROS: order, time of a step, classes, blocks, batch size."""

import time

import numpy as np
import pytest
from sched_world import HIDDEN, KV, World

from apt_jax.sched import StepCosts, make_policy
from apt_jax.sched.bros import BASE_BATCH, BrosPolicy, prefix_step_s

COSTS = StepCosts(
    prefill_base_s=0.01, prefill_per_token_s=1e-3, decode_base_s=0.01, decode_per_request_s=1e-4
)


def best_effort(world: World, row: int) -> int:
    world.table.best_effort[row] = True
    return row


def test_times_of_prefixes_are_those_of_steps():
    rng = np.random.default_rng(1)
    costs = StepCosts(
        **{name: float(rng.uniform(1e-4, 1e-2)) for name in StepCosts.__dataclass_fields__}
    )
    for _ in range(20):
        n = int(rng.integers(1, 30))
        num_tokens = np.where(rng.random(n) < 0.6, 1, rng.integers(1, 9, n)).astype(np.int32)
        start = np.where(rng.random(n) < 0.7, rng.integers(0, 50, n), 0).astype(np.int32)
        kind = rng.choice([KV, HIDDEN], n).astype(np.int8)
        expected = [costs.step_s(num_tokens[:i], start[:i], kind[:i]) for i in range(1, n + 1)]
        np.testing.assert_allclose(prefix_step_s(costs, num_tokens, start, kind), expected)


def test_the_least_remaining_time_goes_first():
    world = World(num_blocks=400, mode="kv", costs=COSTS)
    relaxed = world.add(10, ttft_s=5.0)
    urgent = world.add(10, ttft_s=1.0)
    decoding = world.hold(world.add(10, ttft_s=5.0, tbt_s=0.5), KV)
    world.table.last_token_s[decoding] = world.now_s
    plan = world.schedule(make_policy("bros"))
    assert plan.rows.tolist() == [decoding, urgent, relaxed]


def test_a_step_ends_before_the_first_deadline():
    world = World(num_blocks=400, mode="kv", costs=COSTS)
    decoding = world.hold(world.add(10, tbt_s=0.05), KV)
    first, second = (world.add(length, ttft_s=9.0) for length in (20, 30))
    world.table.last_token_s[decoding] = world.now_s
    plan = world.schedule(make_policy("bros"))
    # 0.01 s and 0.001 s a token: the decode and the first prompt leave time for 19 tokens of the second.
    assert plan.rows.tolist() == [decoding, first, second]
    assert plan.num_tokens.tolist() == [1, 20, 19]
    assert COSTS.step_s(plan.num_tokens, world.table.num_cached[plan.rows], plan.kind) <= 0.05


def test_a_missed_deadline_stops_nobody():
    world = World(num_blocks=400, mode="kv", costs=COSTS)
    late = [world.add(20, arrival_s=-2.0, ttft_s=1.0) for _ in range(2)]
    policy = make_policy("bros")
    assert world.step(policy).rows.tolist() == late
    fine = world.add(20, ttft_s=1.0)
    world.table.last_token_s[late] = -9.0
    assert world.schedule(policy).rows.tolist() == [fine, *late]


def test_best_effort_takes_what_is_left_of_the_time():
    world = World(num_blocks=400, mode="kv", costs=COSTS)
    be = best_effort(world, world.add(60))
    rt = world.add(20, ttft_s=0.05)
    plan = world.schedule(make_policy("bros"))
    assert plan.rows.tolist() == [rt, be]
    assert plan.num_tokens.tolist() == [20, 20]


def test_best_effort_alone_knows_no_time():
    world = World(num_blocks=400, mode="kv", costs=COSTS)
    for _ in range(3):
        best_effort(world, world.add(20, ttft_s=1e-3))
    assert world.schedule(make_policy("bros")).num_tokens.tolist() == [20, 20, 20]


def test_best_effort_makes_room_and_the_latest_first():
    world = World(num_blocks=20, mode="kv")
    be = [best_effort(world, world.hold(world.add(14), KV)) for _ in range(2)]  # 8 blocks each
    rt = world.add(18)
    plan = world.schedule(make_policy("bros"))
    assert plan.rows.tolist() == [rt, be[0]]
    assert plan.preempt.tolist() == be[1:]


def test_then_the_real_time_request_with_the_most_time():
    world = World(num_blocks=16, mode="kv")
    relaxed = world.hold(world.add(15, tbt_s=9.0), KV, num_outputs=2)
    urgent = world.hold(world.add(15, tbt_s=1.0), KV, num_outputs=2)
    waiting = world.add(4, ttft_s=0.1)
    plan = world.schedule(make_policy("bros"))
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([urgent], [relaxed])
    assert waiting not in plan.rows


def test_a_relaxed_request_makes_way_for_best_effort():
    world = World(num_blocks=4000, mode="kv", max_num_seqs=400, max_num_batched_tokens=1000)
    rows = [world.hold(world.add(10, tbt_s=9.0), KV) for _ in range(BASE_BATCH)]
    be = [best_effort(world, world.hold(world.add(10), KV)) for _ in range(2)]
    plan = world.schedule(make_policy("bros"))
    assert plan.rows.size == BASE_BATCH
    assert set(be) <= set(plan.rows.tolist())
    world.table.slo_tbt_s[rows] = 0.5
    world.now_s = 1.0
    assert not set(be) & set(world.schedule(make_policy("bros")).rows.tolist())


def test_the_batch_doubles_until_time_is_short():
    world = World(
        num_blocks=9000, mode="kv", max_num_seqs=600, max_num_batched_tokens=600, costs=COSTS
    )
    for _ in range(500):
        best_effort(world, world.hold(world.add(10), KV))
    policy = make_policy("bros")
    assert [world.step(policy).rows.size for _ in range(4)] == [128, 256, 500, 500]
    world.table.last_token_s[:] = world.now_s
    rt = world.add(10, ttft_s=0.045)
    plan = world.step(policy)
    assert rt in plan.rows
    assert plan.rows.size < 500
    assert world.step(policy).rows.size == BASE_BATCH


def test_a_preempted_best_effort_request_comes_back_in_time():
    world = World(num_blocks=200, mode="kv", max_num_seqs=2)
    old = best_effort(world, world.add(30, 4))
    world.table.num_preemptions[old] = 1
    policy = make_policy("bros")
    for _ in range(400):
        if np.count_nonzero(world.table.live) < 4:
            best_effort(world, world.add(8, 4))
        world.step(policy)
        if old in world.finished:
            return
    raise AssertionError("never served")


@pytest.mark.parametrize("costs", [StepCosts(), COSTS], ids=["unknown", "known"])
def test_everything_ends_with_little_room(costs):
    for seed in range(16):
        rng = np.random.default_rng(seed)
        seats = int(rng.choice([1, 2, 8]))
        world = World(
            num_blocks=int(rng.choice([40, 50, 80])),
            mode="kv",
            max_num_seqs=seats,
            max_num_batched_tokens=seats + int(rng.choice([4, 16, 64])),
            costs=costs,
        )
        policy = make_policy("bros")
        left = 0
        for _ in range(12):
            row = world.add(
                int(rng.integers(1, 50)),
                int(rng.integers(1, 30)),
                ttft_s=float(rng.choice([0.05, 1.0, np.inf])),
                tbt_s=float(rng.choice([0.02, 0.1, np.inf])),
            )
            world.table.best_effort[row] = rng.random() < 0.5
            left += int(world.table.max_tokens_total[row])
        idle = 0
        while world.table.live.any():
            idle = 0 if world.step(policy).rows.size else idle + 1
            assert idle < 4
            assert world.num_steps < 100 + 4 * left


def test_a_decision_is_quick():
    world = World(
        num_blocks=90000,
        block_size=16,
        mode="kv",
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        costs=COSTS,
    )
    for i in range(128):
        row = world.hold(world.add(300, tbt_s=0.2), KV, num_outputs=1 + i)
        world.table.best_effort[row] = i % 2
    for i in range(40):
        row = world.add(300, ttft_s=0.4)
        world.table.best_effort[row] = i % 2
    view, policy = world.view(), BrosPolicy()
    took_s = []
    for _ in range(40):
        began_s = time.perf_counter()
        policy.schedule(view)
        took_s.append(time.perf_counter() - began_s)
    assert min(took_s) < 2e-3

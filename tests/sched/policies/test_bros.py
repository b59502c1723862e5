"""BROS: order, time of a step, classes, blocks, batch size."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apt_jax.costs.model import prefix_step_s
from apt_jax.sched import StepCosts, make_policy
from apt_jax.sched.policies.bros import BASE_BATCH, MOST_REPLACEMENTS, BrosPolicy
from apt_jax.sched.policies.bros_candidates import poll
from apt_jax.sim.hardware import load_hardware
from tests.support.cases import num_cases
from tests.support.sched_world import HIDDEN, KV, World

COSTS = StepCosts(prefill_base_s=0.01, prefill_per_token_s=1e-3, decode_base_s=0.01, decode_per_request_s=1e-4)


def best_effort(world: World, row: int) -> int:
    world.table.best_effort[row] = True
    return row


@pytest.mark.parametrize("one_program", [True, False])
def test_times_of_prefixes_are_those_of_steps(one_program):
    rng = np.random.default_rng(1)
    numbers = [name for name in StepCosts.__dataclass_fields__ if name != "one_program"]
    values = {name: float(rng.uniform(1e-4, 1e-2)) for name in numbers} | {
        "window_tokens": 20.0,
        "experts_per_token": 0.2,
    }
    costs = StepCosts(**values, one_program=one_program)
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


@pytest.mark.parametrize(
    ("policy", "attention", "kind"),
    [("bros", "absorb", KV), ("bros?kinds=by-cost", "absorb", HIDDEN), ("bros?kinds=by-cost", "reproject", KV)],
)
def test_kinds_of_requests_that_begin(policy, attention, kind):
    hardware = load_hardware("opt-13b", "a100-40gb")
    costs = hardware.step_costs(attention)
    world = World(num_blocks=hardware.num_blocks, block_size=16, costs=costs, max_num_batched_tokens=2048)
    world.kinds = hardware.kinds("hybrid", attention)
    holds = world.hold(best_effort(world, world.add(300, 100)), KV)
    begins = [world.add(300, 100, ttft_s=60.0), best_effort(world, world.add(300, 100))]
    plan = world.schedule(make_policy(policy))
    assert dict(zip(plan.rows.tolist(), plan.kind.tolist(), strict=True)) == {holds: KV} | dict.fromkeys(begins, kind)


@given(
    pending=st.lists(st.integers(0, 9), max_size=8),
    waiting=st.lists(st.integers(0, 9), max_size=12),
    in_order=st.booleans(),
    most=st.integers(0, 14),
)
def test_polling_two_queues_is_sorting_them(pending, waiting, in_order, most):
    if in_order:
        waiting.sort()
    keys = np.array([*pending, *waiting], float)
    p = len(pending)
    is_waiting = np.arange(keys.size) >= p
    expected = [int(i) for i in np.lexsort((is_waiting, keys))]
    later = [i for i in expected if i >= p][most:]
    got = poll(keys[:p], keys[p:], most)
    assert got.tolist() == [i for i in expected if i not in later]


def test_waiting_requests_that_a_step_cannot_have_change_nothing():
    """Only as many are pulled as the batch may have."""
    rng = np.random.default_rng(5)
    world = World(num_blocks=90000, mode="kv", max_num_seqs=900, max_num_batched_tokens=9000)
    for i in range(2 * BASE_BATCH):
        row = world.add(2, arrival_s=-0.4 + i / 1000, ttft_s=float(rng.uniform(0.6, 0.9)))
        world.table.best_effort[row] = i % 3 == 0
    slack_s = world.table.arrival_s + world.table.slo_ttft_s
    rt = np.flatnonzero(world.table.live & ~world.table.best_effort)
    plan = world.schedule(make_policy("bros"))
    expected = rt[np.argsort(slack_s[rt], kind="stable")][:BASE_BATCH]
    kept = BASE_BATCH - MOST_REPLACEMENTS
    assert plan.rows[:kept].tolist() == expected[:kept].tolist()
    assert world.table.best_effort[plan.rows[kept:]].all()
    assert plan.rows.size == BASE_BATCH


def test_a_group_of_tokens_shares_a_deadline():
    world = World(num_blocks=400, mode="kv", costs=COSTS)
    row = world.add(10, tbt_s=0.05)
    policy = BrosPolicy(token_group=4)
    for _ in range(3):
        world.step(policy, seconds=0.01)
    table = world.table  # the first token at 0.01 s, two of its group of four since
    assert table.num_delivered[row] == 3
    world.now_s = 0.1
    rows = np.array([row], np.int32)
    view = world.view()
    left_s = policy._slack_s(view, rows, np.ones(1, np.int32))
    # Due 4 x 0.05 s after the first token; two tokens of the group are still to come, this one included.
    assert left_s[0] == pytest.approx(0.21 - 0.1 - policy._average_s)
    single = BrosPolicy()._slack_s(view, rows, np.ones(1, np.int32))
    assert single[0] == pytest.approx(0.05 - (0.1 - 0.03))


def test_best_effort_has_time_that_a_group_can_spare():
    def tokens(group: int) -> int:
        world = World(num_blocks=400, mode="kv", costs=COSTS)
        world.table.last_token_s[world.hold(world.add(10, tbt_s=0.04), KV)] = world.now_s
        best_effort(world, world.add(60))
        return int(world.schedule(BrosPolicy(token_group=group)).num_tokens.sum())

    # 0.04 s for one token; 0.12 s for three, of which two come after this step.
    assert tokens(1) < tokens(3) == 61


def test_a_token_group_has_a_token():
    with pytest.raises(ValueError, match="token_group=0"):
        BrosPolicy(token_group=0)


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


def test_a_missed_deadline_stops_no_request():
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
    world = World(num_blocks=9000, mode="kv", max_num_seqs=600, max_num_batched_tokens=600, costs=COSTS)
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


@pytest.mark.seeds
@pytest.mark.parametrize("costs", [StepCosts(), COSTS], ids=["unknown", "known"])
def test_everything_ends_with_little_room(costs):
    for seed in range(num_cases(5, 16)):
        rng = np.random.default_rng(seed)
        slots = int(rng.choice([1, 2, 8]))
        world = World(
            num_blocks=int(rng.choice([40, 50, 80])),
            mode="kv",
            max_num_seqs=slots,
            max_num_batched_tokens=slots + int(rng.choice([4, 16, 64])),
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

import numpy as np
import pytest
from sched_world import HIDDEN, KV, World

from apt_jax.sched.value import NEAR_ZERO, option_values, urgency

LATE = NEAR_ZERO


def rows_of(world: World) -> np.ndarray:
    view = world.view()
    return np.concatenate([view.waiting, view.running])


def test_pending_time_is_since_arrival_and_then_since_the_last_token():
    world = World(num_blocks=100)
    waiting = world.add(5, arrival_s=2.0)
    running = world.hold(world.add(5, arrival_s=1.0), KV)
    world.table.last_token_s[running] = 9.0
    world.now_s = 10.0
    urgent = urgency(world.view(), rows_of(world))
    assert dict(zip(rows_of(world).tolist(), urgent.pending_s.tolist(), strict=True)) == {
        waiting: 8.0,
        running: 1.0,
    }


def test_hidden_costs_all_requests_its_extra_time():
    # Eq. 8: g = p - (|W| + |R|) (c0 + c1 tokens) = 4 - 3 (0.1 + 0.01 * 20)
    world = World(num_blocks=1000, base_s=0.1, per_token_s=0.01)
    for _ in range(3):
        world.add(20, arrival_s=0.0)
    world.now_s = 4.0
    view = world.view()
    urgent = urgency(view, view.waiting)
    value = option_values(view, view.waiting, urgent.pending_s, urgent.weight, urgent.num_counted)
    assert value == pytest.approx(np.tile([4.0, 4 - 3 * 0.3], (3, 1)))


def test_negative_extra_time_makes_hidden_worth_more():
    world = World(num_blocks=1000, per_token_s=-0.01)
    world.add(20, arrival_s=0.0)
    world.now_s = 4.0
    view = world.view()
    urgent = urgency(view, view.waiting)
    value = option_values(view, view.waiting, urgent.pending_s, urgent.weight, urgent.num_counted)
    assert value[0, HIDDEN] == pytest.approx(4.2)


@pytest.mark.parametrize(("mode", "only"), [("kv", KV), ("hidden", HIDDEN)])
def test_a_request_without_choice_is_not_charged(mode, only):
    world = World(num_blocks=1000, mode=mode, per_token_s=1.0)
    world.add(20, arrival_s=0.0)
    world.now_s = 4.0
    view = world.view()
    value = option_values(view, view.waiting, np.array([4.0]), np.array([1.0]), 1)
    assert value[0, only] == 4.0
    assert value[0, 1 - only] == -np.inf


def test_a_kind_that_cannot_hold_the_request_to_its_end_is_not_allowed():
    world = World(num_blocks=10, block_size=4)  # KV: at most 20 positions, hidden: 40
    world.add(5, 16, arrival_s=0.0)
    view = world.view()
    assert option_values(view, view.waiting, np.ones(1), np.ones(1), 1).tolist() == [[-np.inf, 1.0]]


def fallback(world: World, decay: float = 0.0) -> dict[int, float]:
    rows = rows_of(world)
    return dict(zip(rows.tolist(), urgency(world.view(), rows, decay).weight.tolist(), strict=True))


def test_a_request_that_missed_its_first_token_has_near_zero_value_and_is_not_counted():
    world = World(num_blocks=100)
    late = world.add(5, arrival_s=0.0, ttft_s=5.0)
    good = world.add(5, arrival_s=6.0, ttft_s=5.0)
    world.now_s = 10.0
    assert fallback(world) == {late: LATE, good: 1.0}
    urgent = urgency(world.view(), rows_of(world))
    assert urgent.num_counted == 1
    assert urgent.weighted_s.tolist() == pytest.approx([10 * LATE, 4.0])


def test_violation_decay_is_the_factor():
    world = World(num_blocks=100)
    late = world.add(5, arrival_s=0.0, ttft_s=5.0)
    world.now_s = 10.0
    assert fallback(world, 0.4) == {late: 0.4}
    assert fallback(world, 1.0) == {late: 1.0}


def test_a_late_first_token_counts_for_ever():
    world = World(num_blocks=100)
    row = world.add(5, arrival_s=0.0, ttft_s=1.0, tbt_s=1.0)
    world.hold(row, KV, num_outputs=0)
    world.table.note_tokens(np.array([row], np.int32), 2.0)
    world.now_s = 2.1
    assert world.table.ttft_missed[row]
    assert fallback(world) == {row: LATE}


def test_the_open_gap_counts_as_soon_as_it_is_too_long():
    world = World(num_blocks=100)
    row = world.hold(world.add(5, arrival_s=0.0, tbt_s=1.0), KV, num_outputs=3)
    world.table.last_token_s[row] = 5.0
    world.now_s = 5.9
    assert fallback(world) == {row: 1.0}
    world.now_s = 6.1
    assert fallback(world) == {row: LATE}


def test_one_late_gap_in_a_hundred_is_within_the_99th_percentile():
    world = World(num_blocks=1000)
    row = world.hold(world.add(5, arrival_s=0.0, tbt_s=1.0), KV, num_outputs=50)
    world.table.num_late_gaps[row] = 1
    world.table.last_token_s[row] = world.now_s = 60.0
    assert fallback(world) == {row: LATE}
    world.table.num_outputs[row] = 101
    assert fallback(world) == {row: 1.0}
    world.table.num_late_gaps[row] = 2
    assert fallback(world) == {row: LATE}


def test_notes_of_delivered_tokens():
    world = World(num_blocks=1000)
    row = world.hold(world.add(5, arrival_s=1.0, ttft_s=1.0, tbt_s=0.5), KV)
    table, rows = world.table, np.array([row], np.int32)
    table.num_delivered[row] = 0
    for now_s in (2.0, 2.4, 3.0, 3.5):
        table.note_tokens(rows, now_s)
    assert not table.ttft_missed[row]
    assert (table.num_delivered[row], table.num_late_gaps[row], table.last_token_s[row]) == (
        4,
        1,
        3.5,
    )

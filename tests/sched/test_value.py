import numpy as np
import pytest

from apt_jax.sched.value import NEAR_ZERO, option_values, pending_value
from tests.support.sched_world import HIDDEN, KV, World


def rows_of(world: World) -> np.ndarray:
    view = world.view()
    return np.concatenate([view.waiting, view.running])


def values(world: World, **options) -> np.ndarray:
    view, rows = world.view(), rows_of(world)
    return option_values(view, rows, pending_value(view, rows), rows.size, **options)


def violated(world: World) -> list[bool]:
    return pending_value(world.view(), rows_of(world)).violated.tolist()


def test_pending_time_is_since_arrival_and_then_since_the_last_token():
    world = World(num_blocks=100)
    waiting = world.add(5, arrival_s=2.0)
    running = world.hold(world.add(5, arrival_s=1.0), KV)
    world.table.last_token_s[running] = 9.0
    world.now_s = 10.0
    urgent = pending_value(world.view(), rows_of(world))
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
    assert values(world) == pytest.approx(np.tile([4.0, 4 - 3 * 0.3], (3, 1)))


def test_negative_extra_time_makes_hidden_worth_more():
    world = World(num_blocks=1000, per_token_s=-0.01)
    world.add(20, arrival_s=0.0)
    world.now_s = 4.0
    assert values(world)[0, HIDDEN] == pytest.approx(4.2)


@pytest.mark.parametrize(("mode", "only"), [("kv", KV), ("hidden", HIDDEN)])
def test_a_request_without_choice_is_not_charged(mode, only):
    world = World(num_blocks=1000, mode=mode, per_token_s=1.0)
    world.add(20, arrival_s=0.0)
    world.now_s = 4.0
    value = values(world)
    assert value[0, only] == 4.0
    assert value[0, 1 - only] == -np.inf


def test_one_kind_each_on_request():
    world = World(num_blocks=1000, per_token_s=1.0)
    for _ in range(2):
        world.add(20, arrival_s=0.0)
    world.now_s = 4.0
    only = np.array([HIDDEN, KV], np.int8)
    assert values(world, only=only).tolist() == [[-np.inf, 4.0], [4.0, -np.inf]]


def test_a_kind_that_cannot_hold_the_request_to_its_end_is_not_allowed():
    world = World(num_blocks=10, block_size=4)  # KV: at most 20 positions, hidden: 40
    world.add(5, 16, arrival_s=0.0)
    world.now_s = 1.0
    assert values(world).tolist() == [[-np.inf, 1.0]]


def test_a_violated_request_has_the_constant_value_and_one_kind():
    world = World(num_blocks=1000)
    world.add(5, arrival_s=0.0, ttft_s=5.0)
    world.add(5, arrival_s=6.0, ttft_s=5.0)
    world.now_s = 10.0
    assert violated(world) == [True, False]
    value = values(world)
    assert value[0].tolist() == [NEAR_ZERO, -np.inf]
    assert value[1] == pytest.approx([4.0, 4.0 - 2 * 1e-5 * 5])


def test_violation_decay_is_the_factor():
    world = World(num_blocks=1000)
    world.add(5, arrival_s=0.0, ttft_s=5.0)
    world.now_s = 10.0
    assert values(world, violation_decay=0.4)[0] == pytest.approx([4.0, 0.4 * (10 - 5e-5)])


def test_only_the_objective_of_the_state_now_counts():
    world = World(num_blocks=100)
    row = world.add(5, arrival_s=0.0, ttft_s=1.0, tbt_s=1.0)
    world.hold(row, KV, num_outputs=0)
    world.table.record_tokens(np.array([row], np.int32), 2.0)
    assert world.table.ttft_missed[row]
    world.now_s = 2.9
    assert violated(world) == [False]
    world.now_s = 3.1
    assert violated(world) == [True]


def test_notes_of_delivered_tokens():
    world = World(num_blocks=1000)
    row = world.hold(world.add(5, arrival_s=1.0, ttft_s=1.0, tbt_s=0.5), KV)
    table, rows = world.table, np.array([row], np.int32)
    table.num_delivered[row] = 0
    for now_s in (2.0, 2.4, 3.0, 3.5):
        table.record_tokens(rows, now_s)
    assert not table.ttft_missed[row]
    assert (table.num_delivered[row], table.num_late_gaps[row], table.last_token_s[row]) == (
        4,
        1,
        3.5,
    )

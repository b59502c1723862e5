"""How many requests of batches are given to the engine."""

from apt_jax.sched import StepCosts
from serve.batches.window import MEMORY_S, FeedWindow, short_step_rows

FLAT = StepCosts(decode_base_s=0.02, decode_per_request_s=1e-5)  # reads of weights: rows cost nearly nothing
STEEP = StepCosts(decode_base_s=0.0005, decode_per_request_s=5e-4)  # each row costs


def test_a_batch_alone_has_every_place():
    window = FeedWindow(64, 64, STEEP)
    assert [window.room(t, 0, n) for t, n in ((0, 0), (1, 40), (2, 64), (3, 63))] == [64, 24, 0, 1]
    assert FeedWindow(64, 10, STEEP).room(0, 0, 4) == 6


def test_places_that_interactive_requests_use_are_left_free_for_a_while():
    window = FeedWindow(64, 64, FLAT)
    assert window.room(0, 30, 0) == 64 - 30 - 4
    assert window.room(1, 2, 10) == 64 - 30 - 4 - 10
    assert window.room(1 + MEMORY_S, 2, 10) == min(64 - 2 - 4, short_step_rows(64, FLAT)) - 10
    assert window.room(2 + 2 * MEMORY_S, 0, 10) == 54


def test_nothing_is_added_while_somebody_may_wait():
    window = FeedWindow(8, 8, STEEP)
    assert window.room(0, 20, 0) == window.room(0, 5, 3) == 0
    assert window.room(1, 3, 0) == 1  # it goes on, however slowly


def test_steps_beside_interactive_requests_are_as_short_as_the_throughput_allows():
    def rows_per_s(rows: int, costs: StepCosts) -> float:
        return rows / (costs.decode_base_s + rows * costs.decode_per_request_s)

    for costs in (FLAT, STEEP, StepCosts(decode_base_s=0.004, decode_per_request_s=2e-4)):
        rows = short_step_rows(64, costs)
        assert rows_per_s(rows, costs) >= 0.9 * rows_per_s(64, costs)
        assert rows == 8 or rows_per_s(rows - 1, costs) < 0.9 * rows_per_s(64, costs)
    assert short_step_rows(64, STEEP) == 8
    assert short_step_rows(64, FLAT) > 50
    assert short_step_rows(64, None) == short_step_rows(64, StepCosts()) == 16

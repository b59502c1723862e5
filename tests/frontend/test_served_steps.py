"""Step costs estimated from the steps that a server runs."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from apt_jax.core.kinds import HIDDEN, KIND_NAMES, KV
from apt_jax.costs.model import StepCosts
from apt_jax.costs.programs import ProgramShapes
from apt_jax.engine.events import Iteration, ScheduledRow
from apt_jax.frontend.early_start import BackgroundPreparation
from apt_jax.frontend.served_steps import ServedSteps
from tests.frontend.test_early_start import FakeEngine, _until

COSTS = StepCosts(
    prefill_base_s=0.01,
    prefill_per_token_s=1e-3,
    prefill_per_pair_s=1e-7,
    decode_base_s=0.02,
    decode_per_request_s=1e-3,
    decode_per_token_s=1e-6,
    decode_per_hidden_request_s=2e-3,
    decode_per_hidden_token_s=3e-6,
    one_program=False,
)
SHAPES = ProgramShapes(
    decode_buckets=(1, 2, 4, 8),
    prefill_buckets=(32, 64, 128, 256, 512),
    max_num_seqs=8,
    mixed=False,
    rows_per_tile=1,
    tokens_per_tile=16,
    query_tile=16,
    key_tile=16,
)


def iteration(rows: list[tuple[int, int, int]], costs: StepCosts = COSTS, **fields: object) -> Iteration:
    num_tokens, start, kind = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    scheduled = tuple(
        ScheduledRow(request_id=str(i), num_tokens=n, start=s, kind=KIND_NAMES[k]) for i, (n, s, k) in enumerate(rows)
    )
    step_s = costs.step_s(num_tokens, start, kind.astype(np.int8))
    given = Iteration(number=0, at_s=0.0, type="mixed", scheduled=scheduled, step_s=step_s)
    for name, value in fields.items():
        setattr(given, name, value)
    return given


def served(steps: ServedSteps, count: int, kinds: tuple[int, ...] = (KV,), seed: int = 0) -> None:
    """Steps of a server under load: some decodes, in a third of the steps a chunk beside."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        rows = [(1, int(rng.integers(10, 2000)), int(rng.choice(kinds))) for _ in range(int(rng.integers(1, 9)))]
        if i % 3 == 0:
            rows[-1] = (int(rng.integers(2, 513)), int(rng.integers(0, 2) * rng.integers(0, 2000)), rows[-1][2])
        steps.note(iteration(rows))


def test_a_fit_to_served_steps_predicts_others():
    steps = ServedSteps(SHAPES)
    served(steps, 200, (KV, HIDDEN))
    costs = steps.fit(steps.points()).costs
    rng = np.random.default_rng(1)
    for _ in range(50):
        rows = [(1, int(rng.integers(10, 2000)), int(rng.integers(0, 2))) for _ in range(int(rng.integers(1, 8)))]
        rows += [(int(rng.integers(2, 513)), 0, KV)] * int(rng.integers(0, 2))
        args = [np.array(column) for column in zip(*rows, strict=True)]
        assert costs.step_s(*args) == pytest.approx(COSTS.step_s(*args), rel=0.1)


def test_there_is_a_fit_once_both_phases_and_several_sizes_were_seen_and_then_each_time_they_double():
    steps = ServedSteps(SHAPES)
    for _ in range(40):
        steps.note(iteration([(1, 100, KV)]))
    assert steps.points() == []  # no chunk
    for _ in range(40):
        steps.note(iteration([(512, 0, KV)]))
    assert steps.points() == []  # chunks of one size tell no cost of a token
    steps.note(iteration([(20, 0, KV)]))
    assert steps.points()
    assert steps.points() == []
    for _ in range(80):
        steps.note(iteration([(1, 100, KV)]))
    assert steps.points() == []
    steps.note(iteration([(1, 100, KV)]))
    assert steps.points()


def test_common_programs_do_not_crowd_out_rare_ones():
    steps = ServedSteps(SHAPES)
    served(steps, 30)
    for _ in range(5000):
        steps.note(iteration([(1, 100, KV)]))
    points = steps.points()
    assert len(points) < 200
    assert sum(point.is_prefill for point in points) == 10


def test_a_kind_that_was_not_seen_costs_what_the_other_one_does():
    steps = ServedSteps(SHAPES)
    served(steps, 200, (HIDDEN,))
    costs = steps.fit(steps.points()).costs
    assert costs.decode_per_token_s == costs.decode_per_hidden_token_s > 0
    kv, hidden = steps.fit(steps.points() or [*_points(steps)]).kinds((True, True), absorbs=True)
    assert (hidden.extra_base_s, hidden.extra_per_token_s) == (0.0, 0.0)
    assert kv.offered


def _points(steps: ServedSteps):
    served(steps, 400, (HIDDEN,), seed=2)
    return steps.points()


@pytest.mark.parametrize(
    "fields", [{"failed": True}, {"step_s": None}, {"converted": ["a"]}, {"deferred": ("a",)}, {"scheduled": ()}]
)
def test_steps_that_did_something_else_are_left_out(fields):
    steps = ServedSteps(SHAPES)
    for _ in range(20):
        steps.note(iteration([(20, 0, KV)], **fields))
        steps.note(iteration([(200, 0, KV)], **fields))
        steps.note(iteration([(1, 9, KV)], **fields))
    assert steps.points() == []


def test_a_step_that_no_program_of_these_holds_is_left_out():
    steps = ServedSteps(SHAPES)
    served(steps, 60)
    num = len(steps.points())
    steps.note(iteration([(5000, 0, KV)]))
    served(steps, 200, seed=3)
    assert num
    assert max(sum(point.num_tokens) for point in steps.points()) < 5000


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine that is never idle and reports some steps to whoever listens."""
    monkeypatch.setattr("apt_jax.executor.calibrate.program_shapes", lambda executor: SHAPES)
    monkeypatch.setattr("apt_jax.frontend.early_start.with_costs", _with)
    engine: Any = FakeEngine([])
    engine.num_open = 3
    engine.parts.unprepared = dataclasses.replace(engine.parts.unprepared, calibration_s=1.0)

    def listen(note: Any) -> None:
        if note is not None:
            rng = np.random.default_rng(0)
            for _ in range(100):
                note(iteration([(int(rng.integers(2, 400)), 0, KV)]))
                note(iteration([(1, int(rng.integers(1, 900)), KV)]))

    engine.listen = listen
    return engine


def _with(parts: Any, model: Any) -> Any:
    parts.cost_model, parts.costs = model, model.step_costs()
    return parts


def _prepare(engine: Any, caplog: pytest.LogCaptureFixture, until_said: str) -> None:
    preparation = BackgroundPreparation(engine)
    with caplog.at_level("INFO"):
        preparation.start()
        _until(lambda: any(until_said in line for line in caplog.messages) or engine.failed)
    assert preparation.stop()
    assert engine.failed == []


def test_a_loaded_server_learns_its_costs_without_a_pause(busy: Any, caplog: pytest.LogCaptureFixture):
    _prepare(busy, caplog, "estimated from")
    assert busy.expected is busy.parts.costs is not None
    assert not any("not known yet" in line for line in caplog.messages)


@pytest.mark.parametrize("error", [RuntimeError("Maximum number of iterations reached."), ValueError("too few")])
def test_a_fit_that_fails_ends_nothing(
    busy: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("apt_jax.frontend.served_steps.fit_cost_model", fail)
    _prepare(busy, caplog, "could not be estimated from")
    assert busy.parts.cost_model is None

"""How well a calibration on the card predicts: steps that were held back, steps that were served, and attainment.

Helpers of stage `serve`: `quality_rows` after the calibration; `TimedSteps` around the executor while serving; then
`step_error_row` and `twin_row`.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from apt_jax.executor import Executor, StepBatch, StepHandle, StepResult
from apt_jax.metrics import Summary
from apt_jax.sched.costs.fit import CostModel
from apt_jax.sched.costs.hardware import Hardware
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate
from apt_jax.sim.workload import Workload

GOAL_R2, GOAL_ERROR, GOAL_POINTS = 0.98, 0.04, 5.0
"""Goals for held-back points, R2 at least and mean relative error at most, and for attainment: points between served and
simulated."""


def quality_rows(model: CostModel) -> list[dict[str, Any]]:
    """A row a phase: R2 and relative errors on points that were held back, and whether they meet the goal."""
    rows = []
    for phase, quality in (("prompts", model.prefill_quality), ("decode", model.decode_quality)):
        rows.append({
            "case": f"calibration {phase}", "r2": quality.r2, "mean_error": quality.mean_relative_error,
            "worst_error": quality.worst_relative_error, "points": quality.num_points, "held_back": quality.num_held_back,
            "meets_goal": quality.r2 >= GOAL_R2 and quality.mean_relative_error <= GOAL_ERROR,
        })  # fmt: skip
    return rows


class _TimedHandle:
    def __init__(self, inner: StepHandle, ended: Callable[[], None]) -> None:
        self._inner, self._ended = inner, ended

    def result(self) -> StepResult:
        result = self._inner.result()
        self._ended()
        return result


class TimedSteps:
    """An executor that notes what was in each step and when its tokens came. For steps without masks.

    Args:
        inner: the executor that computes.
        timer: seconds.

    Attributes:
        steps: arguments of `ProgramCosts.step_s`, of every step.
    """

    def __init__(self, inner: Executor, timer: Callable[[], float] = time.perf_counter) -> None:
        self._inner, self._timer = inner, timer
        self.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def clear(self) -> None:
        """Forget all steps."""
        self.steps: list[tuple[Any, Any, Any]] = []
        self._dispatched_s: list[float] = []
        self._ended_s: dict[int, float] = {}

    def execute(self, batch: StepBatch) -> _TimedHandle:
        step, ended_s = len(self.steps), self._ended_s
        self.steps.append((batch.num_tokens.copy(), batch.start.copy(), batch.kind.copy()))
        self._dispatched_s.append(self._timer())

        def ended() -> None:
            ended_s.setdefault(step, self._timer())

        return _TimedHandle(self._inner.execute(batch), ended)

    def durations_s(self) -> dict[int, float]:
        """Seconds of each step that ended: from the end of the one before, or from its dispatch where that was later."""
        found, before_s = {}, -np.inf
        for step, ended_s in sorted(self._ended_s.items()):
            found[step] = ended_s - max(before_s, self._dispatched_s[step])
            before_s = ended_s
        return found


def step_error_row(timed: TimedSteps, model: CostModel) -> dict[str, float]:
    """Relative errors of the predictions of served steps, of those with chunks and of the others; quantiles, since single
    steps have waited for the host or for another step's tokens."""
    durations_s = timed.durations_s()
    errors: dict[str, list[float]] = {"prompt": [], "decode": []}
    for step, measured_s in durations_s.items():
        rows = timed.steps[step]
        phase = "prompt" if rows[0].max() > 1 else "decode"
        errors[phase].append(abs(model.programs.step_s(*rows) - measured_s) / measured_s)
    return {
        f"{phase}_step_error_{name}": float(of(values))
        for phase, values in errors.items()
        if values
        for name, of in (("mean", np.mean), ("p50", np.median), ("p99", lambda v: np.percentile(v, 99)))
    }


def twin_row(served: Summary, config: SimulationConfig, hardware: Hardware, workload: Workload) -> dict[str, Any]:
    """Simulate what was served, and say how far apart they are.

    Args:
        config: policy, cache, objectives and bounds of the run.
        hardware: `calibrate.describe` of the executor that served.
        workload: what was served.
    """
    simulated = simulate(config, hardware=hardware, workload=workload).summary
    points = 100 * (served.slo_attainment - simulated.slo_attainment)
    return {
        "simulated_attainment": simulated.slo_attainment,
        "difference_points": points,
        "meets_goal": abs(points) <= GOAL_POINTS,
        "simulated_tokens_s": simulated.tokens_per_s,
    } | {
        f"simulated_{what}_{q}_ms": 1e3 * (getattr(values, q) or 0.0)
        for what, values in (("ttft", simulated.ttft_s), ("tbt", simulated.tbt_s))
        for q in ("p50", "p99")
    }


def twin_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Text of rows of `twin_row` joined with the served ones (`case`, `attainment`)."""
    lines = [f"{'':28s}{'served':>8s}{'simulated':>10s}{'points':>8s}"]
    for row in rows:
        attained = [100 * float(row[name]) for name in ("attainment", "simulated_attainment")]
        lines.append(f"{row['case']:28s}{attained[0]:8.1f}{attained[1]:10.1f}{float(row['difference_points']):+8.1f}")
    return lines

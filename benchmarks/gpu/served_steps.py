"""How well a calibration predicts the steps that were served: what was in each, and when its tokens came."""

import time
from collections.abc import Callable

import numpy as np

from apt_jax.core.step import StepBatch, StepResult
from apt_jax.costs.fit import CostModel
from apt_jax.executor import StepHandle
from apt_jax.executor.jax_executor import JaxExecutor
from benchmarks.gpu.whole_model import Recorded


class _TimedHandle:
    def __init__(self, inner: StepHandle, ended: Callable[[], None]) -> None:
        self._inner, self._ended = inner, ended

    def result(self) -> StepResult:
        result = self._inner.result()
        self._ended()
        return result


class TimedSteps(Recorded):
    """`Recorded`, which also notes when the tokens of each step came. For steps without masks.

    Args:
        timer: seconds.
    """

    def __init__(
        self, inner: JaxExecutor, num_blocks: int | None = None, timer: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(inner, num_blocks)
        self._timer = timer
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self.steps = []
        self._dispatched_s: list[float] = []
        self._ended_s: dict[int, float] = {}

    def execute(self, batch: StepBatch) -> _TimedHandle:
        """Dispatch a step."""
        step, ended_s = len(self.steps), self._ended_s
        self._dispatched_s.append(self._timer())

        def ended() -> None:
            ended_s.setdefault(step, self._timer())

        return _TimedHandle(super().execute(batch), ended)

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

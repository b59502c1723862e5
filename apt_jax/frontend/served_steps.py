"""Step costs estimated from the steps that a server runs, until costs have been measured."""

import collections
import dataclasses

from apt_jax.core.kinds import HIDDEN, KIND_NAMES, KV
from apt_jax.costs.fit import CostModel, StepPoint, fit_cost_model
from apt_jax.costs.programs import ProgramShapes
from apt_jax.engine.events import Iteration

_PER_PROGRAM = 24
"""Number of recent steps kept per compiled program, so that common programs do not displace rare programs."""
_FEWEST = 8
"""Minimum number of steps with prompt chunks, and of steps without, for a fit; also the minimum number of steps with a
cache kind for the kind to get costs of its own."""


class ServedSteps:
    """Keeps the recent steps of each program, and fits a `CostModel` to them.

    A fit to few step sizes is inaccurate for other sizes, so it is used only until a calibration and is not stored.

    Args:
        shapes: shapes of the executor's programs.
    """

    def __init__(self, shapes: ProgramShapes) -> None:
        self._shapes = shapes
        self._points: dict[object, collections.deque[StepPoint]] = collections.defaultdict(
            lambda: collections.deque(maxlen=_PER_PROGRAM)
        )
        self._num_seen, self._fitted_at = 0, 0

    def note(self, iteration: Iteration) -> None:
        """Store the step of an iteration, unless it failed, was not timed, or converted or deferred requests. Runs in
        the engine's thread."""
        rows = iteration.scheduled
        if not rows or iteration.failed or not iteration.step_s or iteration.converted or iteration.deferred:
            return
        point = StepPoint(
            num_tokens=[row.num_tokens for row in rows],
            start=[row.start for row in rows],
            kind=[KIND_NAMES.index(row.kind) for row in rows],
            time_s=iteration.step_s,
        )
        num_decode = sum(row.num_tokens == 1 for row in rows)
        try:
            programs, _ = self._shapes.programs_of(num_decode, sum(point.num_tokens) - num_decode)
        except ValueError:  # no known program is large enough
            return
        self._points[tuple(programs)].append(point)
        self._num_seen += 1

    def points(self) -> list[StepPoint]:
        """Return the stored steps if it is time for a new fit, else an empty list. Runs in the engine's thread.

        It is time if the number of steps seen has doubled since the last fit, and there are enough steps of both phases
        and prompts of different sizes.
        """
        if self._num_seen < 2 * self._fitted_at:
            return []
        points = [point for of_program in self._points.values() for point in of_program]
        sizes = [sum(point.num_tokens) for point in points if point.is_prefill]
        if min(len(sizes), len(points) - len(sizes)) < _FEWEST or max(sizes) < 2 * min(sizes):
            return []
        self._fitted_at = self._num_seen
        return points

    def fit(self, points: list[StepPoint]) -> CostModel:
        """Fit a cost model to `points`; a cache kind with too few steps gets the costs of the other kind.
        Thread-safe."""
        model = fit_cost_model(points, self._shapes)
        of_kinds = [
            {name: getattr(model.costs, name) for name in names}
            for names in (
                ("decode_per_request_s", "decode_per_token_s", "prefill_per_kv_prefix_s"),
                ("decode_per_hidden_request_s", "decode_per_hidden_token_s", "prefill_per_hidden_prefix_s"),
            )
        ]
        costs = model.costs
        for kind, other in ((KV, HIDDEN), (HIDDEN, KV)):
            if sum(kind in point.kind for point in points) < _FEWEST:
                taken = zip(of_kinds[kind], of_kinds[other].values(), strict=True)
                costs = dataclasses.replace(costs, **dict(taken))
        return dataclasses.replace(model, costs=costs)

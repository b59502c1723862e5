"""Counters that the parts of the engine increment."""

import collections
import enum

import numpy as np

from apt_jax.core.kinds import NUM_KINDS
from apt_jax.metrics import Distribution

# Bucket bounds of the distributions; the token bounds are the same as in vLLM.
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SCHEDULE_S = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 1.0)

_NEW_COST_ERROR = 1 / 32


class RecomputeCause(enum.IntEnum):
    """Cause of a request's last cache loss, after which its positions are recomputed."""

    MEMORY = 0
    """Preempted because the next positions of all running requests did not fit the pool, or saved slots did not fit
    host memory."""
    POLICY = 1
    """Preempted by the policy or an operator although the next positions of all running requests fitted the pool."""
    KIND_SWITCH = 2
    """Preempted by the policy or an operator, and scheduled again with another cache kind."""
    FAILED_STEP = 3
    """A failed step destroyed the pool."""
    PREFIX_LOST = 4
    """Positions found in the prefix cache earlier were no longer cached, or slots saved to host memory were lost."""


PROMPT_SOURCES = ("device", "host", "disk", "evicted", "new")
"""Where prompt tokens came from when their request was first scheduled: found on the device or in host memory, read from
disk into host memory, computed although they had been cached before, or computed for the first time."""


class RollingPercentiles:
    """Percentiles of the last few thousand values."""

    def __init__(self, size: int = 4096) -> None:
        self._values = np.zeros(size)
        self._count = 0

    def add(self, value: float) -> None:
        self._values[self._count % self._values.size] = value
        self._count += 1

    def percentile(self, q: float) -> float:
        if not self._count:
            return 0.0
        return float(np.percentile(self._values[: min(self._count, self._values.size)], q))


class EngineCounters:
    """Counts since the engine was created, updated by its parts; most have the same names in `EngineStats`."""

    def __init__(self) -> None:
        self.iterations: collections.Counter[str] = collections.Counter()
        self.finished: collections.Counter[str] = collections.Counter()
        self.kind_switches = np.zeros((NUM_KINDS, NUM_KINDS), np.int64)
        """(kinds, kinds) number of switches, indexed by [from, to]."""
        self.num_conversions = 0
        self.num_preemptions = 0
        self.recomputed = np.zeros(len(RecomputeCause), np.int64)
        """(causes,) recomputed positions, indexed by `RecomputeCause`."""
        self.changed_prefix_tokens = 0
        self.prompt_sources: dict[str, int] = dict.fromkeys(PROMPT_SOURCES, 0)
        self.cache_hit_tokens = 0
        """Positions found on the device or in host memory."""
        self.host_hit_tokens = 0
        self.restores: collections.Counter[str] = collections.Counter()
        self.num_lost_groups = 0
        self.disk_hit_tokens = 0
        self.num_rejected = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.tenant_prompt_tokens: collections.Counter[str] = collections.Counter()
        self.tenant_generation_tokens: collections.Counter[str] = collections.Counter()
        """Number of tokens delivered to each tenant; requests without a tenant are not counted."""
        self.best_effort_prompt_tokens = 0
        self.ended_best_effort_tokens = 0
        """Output tokens of ended best-effort requests."""
        self.num_deferred_requests = 0
        self.num_discarded_tokens = 0
        self.num_invalid_plan_rows = 0
        self.fallback_iterations = 0
        self.step_failures = 0
        self.busy_s = 0.0
        self.cost_errors: dict[str, float] = {}
        self.host_s = RollingPercentiles()
        self.last_schedules_s = RollingPercentiles()
        self.schedule_s = Distribution(_SCHEDULE_S)
        self.dispatch_s = RollingPercentiles()
        self.mask_s = RollingPercentiles()
        self.step_tokens = Distribution(_STEP_TOKENS)

    @property
    def recomputed_tokens(self) -> int:
        return int(self.recomputed.sum())

    def add_schedule(self, seconds: float) -> None:
        """Record the duration of one scheduling decision."""
        self.last_schedules_s.add(seconds)
        self.schedule_s.add(seconds)

    def add_step(self, step_s: float, predicted_s: float | None, phase: str) -> None:
        """Record the duration of a step, and the error of its prediction (None: not measured)."""
        self.busy_s += step_s
        if predicted_s is not None and step_s > 0:
            error = abs(predicted_s - step_s) / step_s
            before = self.cost_errors.get(phase, error)
            self.cost_errors[phase] = before + _NEW_COST_ERROR * (error - before)

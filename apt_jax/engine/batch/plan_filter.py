"""Checks plans against the current states of the requests; rows that cannot run are removed and reported."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, NO_KIND, NUM_KINDS
from apt_jax.engine.policy_runner import PolicyRunner
from apt_jax.engine.recovery import StepLimits
from apt_jax.engine.request_states import RUNNING, WAITING, RequestStates
from apt_jax.sched.view import Plan


class PlanFilter:
    """Checks plans against the states of the requests.

    Args:
        states: the live requests.
        limits: limits of a step.
        policies: receives reports of violations.
        is_offered: (num_kinds,) True: the cache kind is available.
        can_convert: True: rows may be converted to keys and values.
    """

    def __init__(
        self,
        states: RequestStates,
        limits: StepLimits,
        policies: PolicyRunner,
        is_offered: NDArray[np.bool_],
        can_convert: bool,
    ) -> None:
        self._states = states
        self._limits = limits
        self._policies = policies
        self._is_offered = is_offered
        self._can_convert = can_convert
        self._place = np.zeros(states.capacity, np.int32)  # scratch of `_is_plain`

    def may_preempt(self, row: int) -> bool:
        """Return True if a row holds cache; otherwise report a violation and return False."""
        states = self._states
        if 0 <= row < states.capacity and states.status[row] == RUNNING:
            return True
        self._policies.report_violation(1, f"row {row} holds no cache to preempt")
        return False

    def converted_rows(self, plan: Plan, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return an (n,) mask of the rows that the plan converts, without rows that cannot be converted, which are
        reported. `rows` are the plan's valid rows."""
        if not plan.convert.size:
            return np.zeros(rows.size, np.bool_)
        wanted = np.isin(rows, plan.convert)
        fits = self._states.pinned_kind[rows] != HIDDEN
        may = wanted & (self._states.table.kind[rows] == HIDDEN) & fits & self._can_convert
        if may.sum() != plan.convert.size:
            bad = np.setdiff1d(plan.convert, rows[may])
            self._policies.report_violation(bad.size, f"rows {bad.tolist()} cannot be converted")
        return may

    def valid_rows(self, plan: Plan) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int8]]:
        """Return rows, token counts and cache kinds of a plan, without rows that cannot run. A waiting request
        that fits the pool with only one kind gets this kind."""
        rows, num_tokens, kind = (
            np.asarray(plan.rows, np.int32),
            np.asarray(plan.num_tokens, np.int32),
            np.asarray(plan.kind, np.int8),
        )
        if self._is_plain(rows, num_tokens, kind, plan.preempt):
            return rows, num_tokens, kind
        states, table = self._states, self._states.table
        known = (rows >= 0) & (rows < states.capacity) & (kind >= 0) & (kind < NUM_KINDS)
        if not known.all():
            self._policies.report_violation(int(np.count_nonzero(~known)), "unknown rows or kinds")
            rows, num_tokens, kind = rows[known], num_tokens[known], kind[known]
        status = states.status[rows]
        held = table.kind[rows]
        fresh = status == WAITING
        pinned = states.pinned_kind[rows]
        left = table.num_tokens[rows] - table.num_cached[rows]
        moved = fresh & (pinned != NO_KIND) & (pinned != kind)
        if moved.any():
            kind = np.where(moved, pinned, kind)
            most = left - table.cached_prefix_tokens[rows, kind]
            num_tokens = np.where(moved, np.minimum(num_tokens, most), num_tokens)
        ok = (fresh & (states.in_flight[rows] == 0) & self._is_offered[kind]) | ((status == RUNNING) & (held == kind))
        ok &= (num_tokens >= 1) & (num_tokens <= left - table.cached_prefix_tokens[rows, kind])
        if plan.preempt.size:
            ok &= ~np.isin(rows, plan.preempt)
        ok &= np.cumsum(num_tokens) <= self._limits.num_tokens
        if np.unique(rows).size != rows.size:
            first = np.zeros(rows.size, np.bool_)
            first[np.unique(rows, return_index=True)[1]] = True
            ok &= first
        if not ok.all():
            bad = np.flatnonzero(~ok)
            message = f"rows {rows[bad].tolist()} with {num_tokens[bad].tolist()} tokens cannot run"
            self._policies.report_violation(bad.size, message)
            rows, num_tokens, kind = rows[ok], num_tokens[ok], kind[ok]
        return rows, num_tokens, kind

    def _is_plain(
        self,
        rows: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kind: NDArray[np.int8],
        preempt: NDArray[np.int32],
    ) -> bool:
        """Return True if a plan is valid and schedules only running requests: a fast check that most plans pass."""
        states = self._states
        if rows.min() < 0 or rows.max() >= states.capacity or preempt.size:
            return False
        if self._place.size < states.capacity:
            self._place = np.zeros(states.capacity, np.int32)
        table, n = states.table, rows.size
        order = np.arange(n, dtype=np.int32)
        self._place[rows] = order  # a duplicate row keeps its last place
        left = table.num_tokens.take(rows) - table.num_cached.take(rows)
        ok = states.status.take(rows) == RUNNING
        ok &= self._place.take(rows) == order
        ok &= table.kind.take(rows) == kind
        ok &= num_tokens <= left
        within = num_tokens.min() >= 1 and num_tokens.sum() <= self._limits.num_tokens
        return bool(ok.all() and within)

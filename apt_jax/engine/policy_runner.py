"""Runs the scheduling policy, or `fcfs` if the policy fails."""

import logging
from collections.abc import Callable

from apt_jax.engine.counters import EngineCounters
from apt_jax.errors import counted, one_line
from apt_jax.sched.plan_check import checked_schedule
from apt_jax.sched.policies.fcfs import FcfsPolicy
from apt_jax.sched.view import Plan, Policy, SchedulerView

logger = logging.getLogger("apt_jax.engine")

FALLBACK_LOG_S = 60.0
"""Minimum time between two log lines about a failing policy, seconds."""

STALL_LIMIT = 100
"""Number of consecutive idle iterations, with requests but no step in flight, after which the engine breaks the
stall."""


class PolicyRunner:
    """Runs the policy, lets `fcfs` schedule if the policy fails or violates the contract of `Plan`, and counts these
    failures.

    Args:
        policy: plans each iteration.
        counters: counts the failures of the policy.
        check_plans: True: check each plan before it is used, and pass the policy a read-only table.
        debug: True: raise the errors of the policy.
        timer: function that returns the time in seconds; used to limit the rate of log lines.
    """

    def __init__(
        self,
        policy: Policy,
        counters: EngineCounters,
        *,
        check_plans: bool,
        debug: bool,
        timer: Callable[[], float],
    ) -> None:
        self.policy = policy
        self.check_plans = check_plans
        self.debug = debug
        self.timer = timer
        self.fallback = FcfsPolicy()
        self._counters = counters
        self._fallback_logged_s: float | None = None
        self._num_idle = 0
        self._is_stuck = False

    def schedule(self, view: SchedulerView) -> Plan | None:
        """Return the plan of one iteration; None: both the policy and `fcfs` failed."""
        try:
            return self._decide(view)
        except (Exception, SystemExit) as error:  # a library may exit
            if self.debug:
                raise
            try:
                return self._fall_back(view, error)
            except Exception as worse:
                logger.error("the policy fcfs failed", exc_info=worse)
                return None

    def _decide(self, view: SchedulerView) -> Plan:
        if self._is_stuck:
            raise RuntimeError(f"it scheduled nothing in {STALL_LIMIT} iterations")
        if self.check_plans:
            return checked_schedule(self.policy, view)
        return self.policy.schedule(view)

    def _fall_back(self, view: SchedulerView, error: BaseException) -> Plan:
        """Return the plan of `fcfs`, which keeps no state, after the policy has raised or made an invalid plan."""
        plan = self.fallback.schedule(view)
        self._counters.fallback_iterations += 1
        now_s, last_s = self.timer(), self._fallback_logged_s  # real, not simulated, because people read the log
        if last_s is None or now_s - last_s >= FALLBACK_LOG_S:
            self._fallback_logged_s = now_s
            logger.error(
                "policy %s failed, fcfs schedules instead (%s so far): %s: %s",
                self.policy.name,
                counted(self._counters.fallback_iterations, "iteration"),
                type(error).__name__,
                one_line(str(error))[:400],
                exc_info=error,
            )
        return plan

    def report_violation(self, num_rows: int, message: str) -> None:
        """Count and log rows that are left out because they violate the contract of `Plan`; raises in debug mode."""
        if self.debug:
            raise AssertionError(f"policy {self.policy.name}: {message}")
        if not self._counters.num_invalid_plan_rows:
            logger.error("policy %s violated the contract of Plan: %s (reported once)", self.policy.name, message)
        self._counters.num_invalid_plan_rows += num_rows

    @property
    def is_idle(self) -> bool:
        """True if nothing ran in the last iteration and nothing is in flight, although requests are live."""
        return self._num_idle > 0

    def note_progress(self) -> None:
        """Record that an iteration ran a step."""
        self._num_idle, self._is_stuck = 0, False

    def note_idle(self, has_requests: bool) -> bool:
        """Count an idle iteration without a step in flight; returns True if the engine must break the stall.

        The engine must break the stall after `STALL_LIMIT` idle iterations. If plans are checked, however, and not in
        debug mode, `fcfs` then makes the plans until a step runs, and the engine must break the stall only if `fcfs`
        schedules nothing for as many iterations.
        """
        if not has_requests:
            self._num_idle = 0
            return False
        self._num_idle += 1
        if self._num_idle < STALL_LIMIT:
            return False
        self._num_idle = 0
        self._is_stuck = self.check_plans and not self.debug and not self._is_stuck
        return not self._is_stuck

"""Recovery from failures: recomputation, smaller steps, breaking a stall, and the end of the engine."""

import logging

import numpy as np

from apt_jax.engine.counters import EngineCounters
from apt_jax.engine.events import Iteration
from apt_jax.engine.policy_runner import STALL_LIMIT
from apt_jax.engine.request_states import ENDING, RUNNING, RequestStates
from apt_jax.errors import EngineDeadError, counted
from apt_jax.executor import Executor, is_device_lost, is_out_of_memory
from apt_jax.sched.view import SchedulerView
from apt_jax.utils.clock import Clock

logger = logging.getLogger("apt_jax.engine")

FAILURE_WINDOW_S = 60.0
"""A second failure of a step within this time ends the engine."""

_LEAST_TOKENS = 16
"""Minimum size of a step, however little memory there is: programs are not compiled for fewer, and prompts must go
on."""
OOM_BACKOFF_S = 600.0
"""Time for which steps stay small after one ran out of memory, seconds."""


class StepLimits:
    """Limits of a step, which are lower for a while after a step ran out of memory.

    Attributes:
        num_seqs: requests of a step at most.
        num_tokens: tokens of a step at most.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._configured = max_num_seqs, max_num_batched_tokens
        self.num_seqs, self.num_tokens = self._configured
        self._until_s: float | None = None

    def reduce(self, num_tokens: int, now_s: float) -> None:
        """Limit the next steps to half of `num_tokens`, the size of a step that ran out of memory."""
        self.num_tokens = max(_LEAST_TOKENS, min(self.num_tokens, num_tokens) // 2)
        self.num_seqs = min(self.num_seqs, self.num_tokens)
        self._until_s = now_s + OOM_BACKOFF_S
        logger.error(
            "no memory for a step of %s: for %.0f s steps have at most %s and %s. If it happens "
            "again, lower --max-num-batched-tokens, --max-num-seqs or --device-memory-utilization",
            counted(num_tokens, "token"),
            OOM_BACKOFF_S,
            counted(self.num_tokens, "token"),
            counted(self.num_seqs, "request"),
        )

    def restore_if_due(self, clock: Clock) -> None:
        """Go back to the configured limits once their time has come."""
        if self._until_s is not None and clock.now_s() >= self._until_s:
            self._until_s = None
            self.num_seqs, self.num_tokens = self._configured
            logger.warning("step limits restored to %d tokens", self.num_tokens)


class Recovery:
    """Puts the engine back to where it can go on after a failure, or ends it.

    Attributes:
        dead_reason: why the engine ended; None while it lives.
    """

    def __init__(self, states: RequestStates, limits: StepLimits, clock: Clock, counters: EngineCounters) -> None:
        self._states = states
        self._limits = limits
        self._clock = clock
        self._counters = counters
        self._last_failure_s: float | None = None
        self.dead_reason: str | None = None

    def recover(self, error: Exception, executor: Executor, iteration: Iteration | None, num_tokens: int) -> None:
        """Reset the executor after a step that failed and took the pool with it; every request with cache waits again.

        Args:
            error: what the step raised.
            executor: ran it.
            iteration: its decision, not yet reported; None: there is no listener.
            num_tokens: its size.
        """
        self._counters.step_failures += 1
        logger.error("a step failed; the cache is rebuilt: %s", error, exc_info=error)
        if is_device_lost(error):
            self.end("the device reported an error that only a new process clears")
        if self.note_failure("a step failed"):
            return
        if is_out_of_memory(error):
            self._limits.reduce(num_tokens, self._clock.now_s())
        states = self._states
        if iteration is not None:
            held = np.flatnonzero((states.status == RUNNING) | (states.status == ENDING))
            iteration.lost = tuple(states.ids(held.astype(np.int32)))
        try:
            executor.reset()
        except Exception as reset_error:
            logger.critical("the executor cannot be reset", exc_info=reset_error)
            self.end("the executor cannot be reset")
            return
        states.lose_cache()

    def note_failure(self, what: str) -> bool:
        """Record a failure; returns True where the engine has ended, by this second one within `FAILURE_WINDOW_S` or
        before."""
        now_s, last_s = self._clock.now_s(), self._last_failure_s
        self._last_failure_s = now_s
        if last_s is not None and now_s - last_s < FAILURE_WINDOW_S:
            self.end(f"{what}, twice within {FAILURE_WINDOW_S:.0f} s")
        return self.dead_reason is not None

    def end(self, reason: str) -> None:
        """End the engine, and every request with an error."""
        if self.dead_reason is None:
            self.dead_reason = reason
        self._states.end_all(f"the engine has ended: {reason}")

    def raise_if_dead(self) -> None:
        """Raise `EngineDeadError` where the engine has ended."""
        if self.dead_reason is not None:
            raise EngineDeadError(f"the engine has ended: {self.dead_reason}")


def break_stall(states: RequestStates, view: SchedulerView, policy_name: str, *, debug: bool) -> None:
    """Break a stall, in which the policy schedules nothing: preempt the last request in order, or end the only one."""
    message = (
        f"{policy_name} scheduled nothing in {STALL_LIMIT} iterations: {view.waiting.size} waiting, "
        f"{view.running.size} running, {view.free_blocks} free blocks"
    )
    if debug:
        raise AssertionError(message)
    logger.error("%s", message)
    if view.running.size > 1:
        states.preempt(int(view.running[-1]))
    else:
        head = view.running[0] if view.running.size else view.waiting[0]
        states.finish(states.state(int(head)), "error", error="the request could not be scheduled")

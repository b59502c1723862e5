"""Recovery from failures: recomputes caches, makes steps smaller, breaks stalls, or stops the engine."""

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
"""Time within which a second failure of a step or the policy stops the engine, seconds."""

_LEAST_TOKENS = 16
"""Minimum token limit of steps after a step ran out of memory; no programs are compiled for fewer tokens."""
OOM_BACKOFF_S = 600.0
"""Time for which steps stay small after a step ran out of memory, seconds."""


class StepLimits:
    """Limits of a step, which are lower for a while after a step ran out of memory.

    Attributes:
        num_seqs: maximum number of requests in a step.
        num_tokens: maximum number of tokens in a step.
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
            "out of memory in a step of %s: for the next %.0f s, steps have at most %s and %s. If it happens "
            "again, lower --max-num-batched-tokens, --max-num-seqs or --device-memory-utilization",
            counted(num_tokens, "token"),
            OOM_BACKOFF_S,
            counted(self.num_tokens, "token"),
            counted(self.num_seqs, "request"),
        )

    def restore_if_due(self, clock: Clock) -> None:
        """Restore the configured limits if `OOM_BACKOFF_S` has passed."""
        if self._until_s is not None and clock.now_s() >= self._until_s:
            self._until_s = None
            self.num_seqs, self.num_tokens = self._configured
            logger.warning("step limits restored to %d tokens", self.num_tokens)


class Recovery:
    """Returns the engine to a working state after a failure, or stops it.

    Attributes:
        dead_reason: reason why the engine stopped; None: it has not stopped.
    """

    def __init__(self, states: RequestStates, limits: StepLimits, clock: Clock, counters: EngineCounters) -> None:
        self._states = states
        self._limits = limits
        self._clock = clock
        self._counters = counters
        self._last_failure_s: float | None = None
        self.dead_reason: str | None = None

    def recover(self, error: Exception, executor: Executor, iteration: Iteration | None, num_tokens: int) -> None:
        """Reset the executor after a failed step, which destroyed the pool; all requests with cache wait again.

        Args:
            error: exception raised by the step.
            executor: executor of the step.
            iteration: decision of the step, not yet reported; None: no listener is attached.
            num_tokens: number of tokens of the step.
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
        """Record a failure, and stop the engine if it is the second within `FAILURE_WINDOW_S`; returns True if the
        engine has stopped."""
        now_s, last_s = self._clock.now_s(), self._last_failure_s
        self._last_failure_s = now_s
        if last_s is not None and now_s - last_s < FAILURE_WINDOW_S:
            self.end(f"{what}, twice within {FAILURE_WINDOW_S:.0f} s")
        return self.dead_reason is not None

    def end(self, reason: str) -> None:
        """Stop the engine, and end every request with an error."""
        if self.dead_reason is None:
            self.dead_reason = reason
        self._states.end_all(f"the engine has ended: {reason}")

    def raise_if_dead(self) -> None:
        """Raise `EngineDeadError` if the engine has stopped."""
        if self.dead_reason is not None:
            raise EngineDeadError(f"the engine has ended: {self.dead_reason}")


def break_stall(states: RequestStates, view: SchedulerView, policy_name: str, *, debug: bool) -> None:
    """Break a stall, after the policy has scheduled nothing for too long: preempt the last of several running requests,
    otherwise end the first request with an error."""
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

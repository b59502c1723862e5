"""Dispatches steps to the executor, waits for their results, and recovers from steps that fail."""

import time
from typing import cast

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import HybridCache
from apt_jax.core.step import StepBatch, StepResult
from apt_jax.costs.model import StepCosts
from apt_jax.engine.batch.builder import BatchBuilder
from apt_jax.engine.commit import StepMasks, TokenCommitter
from apt_jax.engine.counters import EngineCounters
from apt_jax.engine.iteration_recorder import IterationRecorder
from apt_jax.engine.policy_runner import PolicyRunner
from apt_jax.engine.recovery import Recovery
from apt_jax.engine.request_state import InFlightStep, RequestState
from apt_jax.executor import Executor, MaskedStepHandle
from apt_jax.sched.view import Plan

_COST_ERROR_EVERY = 8
"""One in this many steps of a type is compared with the cost model."""


class StepRunner:
    """Runs steps; a step may be in flight while the next step is dispatched.

    Args:
        executor: runs the steps.
        cache: cancels the saves of a step that could not be dispatched.
        builder: updates the request table for dispatched steps.
        masks: fills the token masks that steps wait for.
        committer: commits the step in flight if dispatching the next step fails.
        recovery: resets the engine after a failure.
        recorder: reports each decision when its step ends.
        policies: if it is in debug mode, assertion errors of the executor are raised.
        counters: counts the steps.

    Attributes:
        pending: the step in flight; None: no step.
    """

    def __init__(
        self,
        executor: Executor,
        cache: HybridCache,
        builder: BatchBuilder,
        masks: StepMasks,
        committer: TokenCommitter,
        recovery: Recovery,
        recorder: IterationRecorder,
        policies: PolicyRunner,
        counters: EngineCounters,
    ) -> None:
        self._executor, self._cache, self._builder = executor, cache, builder
        self._masks, self._committer, self._recovery = masks, committer, recovery
        self._recorder, self._policies, self._counters = recorder, policies, counters
        self.pending: InFlightStep | None = None
        self._last_result_s = 0.0

    def execute(
        self,
        plan: Plan,
        batch: StepBatch,
        rows: NDArray[np.int32],
        requests: list[RequestState],
        costs: StepCosts,
    ) -> InFlightStep | None:
        """Dispatch a step, and update the request table and the counters.

        Args:
            plan: plan of the step.
            batch: batch to run.
            rows: (n,) rows of the request table.
            requests: requests of `rows`.
            costs: cost model that predicts the duration of the step.

        Returns:
            The dispatched step; None: it failed.
        """
        dispatched_s = time.perf_counter()
        try:
            handle = self._executor.execute(batch)
        except Exception as error:
            self._raise_in_debug(error)
            self._cache.forget_saved(batch.saves[:, 1])
            # The previous step was dispatched without an error, so its tokens are valid.
            oldest, self.pending = self.pending, None
            result = self.fetch(oldest) if oldest is not None else None
            if oldest is not None and result is not None:
                self._committer.commit(oldest, result)
            if oldest is None or result is not None:  # else `fetch` has recovered already
                num_tokens = int(batch.num_tokens.sum())
                self._recovery.recover(error, self._executor, self._recorder.current, num_tokens)
            self._recorder.end(self._recorder.current, None)
            return None
        self._counters.iterations[plan.iteration] += 1
        num_tokens = int(batch.num_tokens.sum())
        self._counters.step_tokens.add(num_tokens)
        return InFlightStep(
            handle=handle,
            requests=requests,
            rows=rows,
            samples=batch.samples,
            position=batch.position,
            num_tokens=num_tokens,
            masked=batch.masked,
            kind=batch.kind,
            filled=self._builder.account(batch, rows, requests),
            dispatched_s=dispatched_s,
            predicted_s=self._predicted_s(plan, batch, costs),
            has_chunks=plan.iteration != "decode",
            prompt_targets=batch.prompt_targets,
            pool_spans=batch.pool_spans,
            iteration=self._recorder.current,
        )

    def _predicted_s(self, plan: Plan, batch: StepBatch, costs: StepCosts) -> float | None:
        """Return the duration predicted by the cost model, seconds; None: no prediction. Only every eighth step of a
        type is predicted, because a prediction takes about 0.01 ms."""
        if self._counters.iterations[plan.iteration] % _COST_ERROR_EVERY:
            return None
        step_s = costs.step_s(batch.num_tokens, batch.start, batch.kind)
        step_s += costs.conversion_s(batch.num_converted_tokens)
        return max(step_s, costs.transfer_s(*batch.moved_blocks(self._cache.block_sizes))) or None

    def sample_masked(self, step: InFlightStep | None) -> InFlightStep | None:
        """Fill the masks that a dispatched step waits for, and dispatch its sampler; all earlier tokens must be known.

        Returns:
            The step; None: it failed.
        """
        if step is None or step.masked is None:
            return step
        masks = self._masks.fill(step)
        try:
            cast("MaskedStepHandle", step.handle).sample(masks)
        except Exception as error:
            self._raise_in_debug(error)
            self._recover(error, step)
            return None
        return step

    def fetch(self, step: InFlightStep) -> StepResult | None:
        """Wait for a step and return its result; None: it failed, and `Recovery.recover` has run."""
        try:
            result = step.handle.result()
            shape = (len(step.requests),)
            if result.token_ids.shape != shape or result.finite.shape != shape:
                raise RuntimeError(f"the step returned {result.token_ids.shape} tokens for {shape} rows")
        except Exception as error:
            self._raise_in_debug(error)
            pending, self.pending = self.pending, None
            self._recover(error, step)
            if pending is not None:  # it used the same pool, after the failed step
                self._recorder.end_step(pending, None)
            return None
        now_s = time.perf_counter()
        step_s = now_s - max(step.dispatched_s, self._last_result_s)
        self._recorder.end_step(step, step_s)
        self._last_result_s = now_s
        self._counters.add_step(step_s, step.predicted_s, "prefill" if step.has_chunks else "decode")
        return result

    def _recover(self, error: Exception, step: InFlightStep) -> None:
        self._recovery.recover(error, self._executor, step.iteration, step.num_tokens)
        self._recorder.end_step(step, None)

    def _raise_in_debug(self, error: Exception) -> None:
        if self._policies.debug and isinstance(error, AssertionError):
            raise error

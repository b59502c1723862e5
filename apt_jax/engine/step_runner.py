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
"""Steps per comparison with the cost model."""


class StepRunner:
    """Runs steps, of which one may be in flight while the next one is dispatched.

    Args:
        executor: runs them.
        cache: forgets what a step that was not dispatched should have saved.
        builder: accounts for steps that have been dispatched.
        masks: fills the masks of steps that wait for them.
        committer: delivers the step before one that failed.
        recovery: puts everything back after a failure.
        recorder: told of the ends of steps.
        policies: in debug mode failures raise.
        counters: steps are counted there.

    Attributes:
        pending: the step in flight; None: there is none.
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
        """Dispatch a step and account for it.

        Args:
            plan: that the step is made from.
            batch: the step.
            rows: (n,) its rows of the request table.
            requests: of these rows.
            costs: predict how long the step takes.

        Returns:
            The step, None where it failed.
        """
        dispatched_s = time.perf_counter()
        try:
            handle = self._executor.execute(batch)
        except Exception as error:
            self._raise_in_debug(error)
            self._cache.forget_saved(batch.saves[:, 1])
            # The step before it was dispatched in good order: what it sampled is good.
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
        """Predict every eighth step of a type by the cost model, if there is one: it takes some hundredths of a
        millisecond."""
        if self._counters.iterations[plan.iteration] % _COST_ERROR_EVERY:
            return None
        step_s = costs.step_s(batch.num_tokens, batch.start, batch.kind)
        step_s += costs.conversion_s(batch.num_converted_tokens)
        return max(step_s, costs.transfer_s(*batch.moved_blocks(self._cache.block_sizes))) or None

    def sample_masked(self, step: InFlightStep | None) -> InFlightStep | None:
        """Fill the masks that a dispatched step waits for and dispatch its sampler; every token before is known.

        Returns:
            The step, None where it failed.
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
        """Wait for a step. None: it failed, and everything has been put back to where it can go on."""
        try:
            result = step.handle.result()
            shape = (len(step.requests),)
            if result.token_ids.shape != shape or result.finite.shape != shape:
                raise RuntimeError(f"the step returned {result.token_ids.shape} tokens for {shape} rows")
        except Exception as error:
            self._raise_in_debug(error)
            pending, self.pending = self.pending, None
            self._recover(error, step)
            if pending is not None:  # computed on the same pool, after the step that failed
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

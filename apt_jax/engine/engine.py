"""The engine: one loop that schedules, builds, executes and commits. It knows neither the device nor the clock.

The life of a request:

1. `Engine.add_request` gives it a row of the `RequestTable` and puts it among the waiting ones, or rejects it: nothing
   is allocated for a rejected request.
2. Each `Engine.step` makes four calls: *schedule* (the policy's pure decision), *build* (block accounting and the
   batch), *execute* (the executor runs the rows) and *commit* (tokens are delivered, requests end).
3. The first time that it is scheduled it takes a slot and blocks of one kind and is running. Its prompt is computed in
   one step or in chunks; the step that reaches its end samples the first token, and every later step one more.
4. A policy may *convert* it from layer inputs to keys and values (`Plan.convert`): it gets new blocks, the executor
   computes their content from the old ones, and the step itself runs it as a KV request. Its old blocks are given back
   when the step has been put together; whoever gets them writes them in a later step. Without free blocks it stays
   hidden.
5. A policy may *preempt* it: cache and slot are gone, it waits again under its old rank, and prompt and output so far
   are recomputed when it is next scheduled, with either kind (Apt-Serve §4.3: a switch of the cache type discards
   the cache and recomputes it).
6. It ends once: "stop", "length", "abort" or "error". The last `StepOutput` says so.

Prefixes. With `CacheConfig.enable_prefix_caching` a request that is scheduled starts with the cached prefix of its
tokens, computed by others or by itself before a preemption; `PrefixHitTracker` shows the policy how much that would be.
At least its last token is computed, since logits are not cached: where all of a last block is cached, it gets a copy of
it to write to (`StepBatch.copies`). Blocks are published at commit, when a token that was sampled over them was good,
and not before. A step that fails clears the prefix cache. A request for log probabilities of its prompt finds nothing
until it has them all, and recomputes after a preemption without asking for any of them again (`PromptScores`).

Overlap. With `SchedulerConfig.overlap` a step is dispatched before the tokens of the one before it are fetched:

    host    | schedule n+1, build | execute n+1 | result n, commit n | schedule n+2 ...
    device  ... step n ............................| step n+1 ................

The table counts tokens in flight, so that the policy sees the lengths that will be; their values are `TOKEN_ON_DEVICE`
to the next step. Four things follow:

* A request whose last allowed token is in flight takes part in no further step. Its cache is no longer needed and is
  released right after dispatch. Steps run in order: whoever gets the blocks writes them in a later step.
* A stop token is seen one step late. The row that has been dispatched meanwhile is discarded at its commit, because its
  request has ended; its blocks were given back before, for the same reason as above.
* A request with structured output samples under a mask that depends on the token before. Its step is dispatched like
  any other up to the sampler; then the step before is fetched and committed, masks are filled, and the sampler follows.
  The host does this while the device computes, so that overlap is lost for the sampler alone.
* A preempted request's token in flight is delivered like any other. Until it is, the request is not shown to the
  policy: recomputing takes tokens that the host knows.

Policies. One that raises, or whose plan violates the contract of `Plan`, has its iteration scheduled by `fcfs` instead.
Plans of policies from outside this package are checked each time (0.1 ms), those of its own by their tests.

Failures. What can be blamed on one request (logits that are not finite, a token outside the vocabulary, its output
processor, its grammar) ends that request alone. A step that raises has destroyed the pool: the executor is reset, every
request that held cache waits again, and the loop goes on; a second failure within a minute ends the engine, visibly.
After a step that ran out of memory, steps are at most half as large for a while (`OOM_BACKOFF_S`). Accounting that
contradicts itself (`CacheIntegrityError`) ends the engine at once: better than serving one request another's memory.

Parts. `RequestStates` owns the requests and their transitions, `PolicyRunner` the policy, `BatchBuilder` turns plans
into batches, `TokenCommitter` results into outputs, `Recovery` deals with failures. None of them knows the engine.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import CacheIntegrityError, HybridCache
from apt_jax.cache.block_sharing import LentBlocks
from apt_jax.config import CacheConfig, SchedulerConfig
from apt_jax.core.kinds import KINDS, NUM_KINDS, CacheKindSpec
from apt_jax.core.step import StepBatch, StepResult
from apt_jax.core.tiers import DiskStore, HostMemory
from apt_jax.costs.model import StepCosts
from apt_jax.engine.admission import Admission, AdmissionController, QueueSnapshot
from apt_jax.engine.batch_builder import BatchBuilder, PlanFilter
from apt_jax.engine.commit import FillMasks, MaskFiller, TokenCommitter
from apt_jax.engine.counters import EngineCounters
from apt_jax.engine.disk_reads import DiskReads
from apt_jax.engine.events import Iteration
from apt_jax.engine.integrity import check_engine
from apt_jax.engine.iteration_recorder import IterationRecorder
from apt_jax.engine.policy_runner import PolicyRunner
from apt_jax.engine.recovery import Recovery, StepLimits, break_stall
from apt_jax.engine.request_state import InFlightStep, OutputProcessor, RequestState, StepOutput
from apt_jax.engine.request_states import RUNNING, WAITING, RequestPrefixes, RequestStates
from apt_jax.engine.restore import RestoreChoice
from apt_jax.engine.stats import EngineStats, TenantUsage, collect_stats
from apt_jax.errors import ConfigError, InvalidRequestError, QueueFullError
from apt_jax.executor import Executor, MaskedStepHandle
from apt_jax.request import EngineRequest, RequestMetrics
from apt_jax.sched.registry import is_bundled
from apt_jax.sched.request_table import RequestTable
from apt_jax.sched.view import Plan, Policy, SchedulerView
from apt_jax.structured.constraint import fill_one_by_one
from apt_jax.utils.clock import Clock

logger = logging.getLogger("apt_jax.engine")

CLOSE_S = 20.0
"""Most that the end of an engine waits for cached prefixes to be written to disk, seconds."""
_COST_ERROR_EVERY = 8
"""Steps per comparison with the cost model."""


class Engine:
    """Serves requests with an executor and a policy; synchronous, for one thread.

    Args:
        executor: runs steps; its pool and its slots set the limits.
        policy: decides each iteration.
        clock: the current time.
        kinds: cache kinds as data, indexed by `core.kinds.KV` and `HIDDEN`.
        scheduler_config: limits and whether steps overlap.
        cache_config: block size.
        costs: iteration times for the policy; may be replaced at any time (`engine.costs = ...`).
        vocab_size: V; a sampled token outside [0, V) ends its request. None: only negative ones do.
        output_processor: the front end's hook for every token.
        fill_masks: fills the masks of a step; needs `vocab_size`.
        adapters: names of the LoRA adapters that requests may have, in the order of the executor's.
        host_memory: of the executor, for cached groups that leave its pool; None: they are lost.
        disk: keeps cached groups that leave host memory, over restarts; needs `host_memory`; None: they are lost.
        share_blocks: let real-time and best-effort requests share blocks (`apt_jax.cache.block_sharing`); needs
            `host_memory`.
        debug: check everything after every step, and let contract violations and failures of the policy raise.
        check_plans: check each plan against the contract of `Plan` before anything is done, and give the policy a table
            that it cannot write to; None: unless the policy belongs to this package.
        lengths_only: the executor looks at lengths and kinds alone, as a cost model does: token ids, block tables,
            sampling parameters and histories of a `StepBatch` are left empty, and `step` delivers the last output of
            each request only. Decisions and accounting are the same, in half the time.
        timer: seconds for the host-time statistics; never enters a decision.
    """

    def __init__(
        self,
        executor: Executor,
        policy: Policy,
        clock: Clock,
        kinds: Sequence[CacheKindSpec],
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        costs: StepCosts = StepCosts(),
        vocab_size: int | None = None,
        output_processor: OutputProcessor | None = None,
        fill_masks: FillMasks = fill_one_by_one,
        adapters: Sequence[str] = (),
        host_memory: HostMemory | None = None,
        disk: DiskStore | None = None,
        share_blocks: bool = False,
        debug: bool = False,
        check_plans: bool | None = None,
        lengths_only: bool = False,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        if executor.block_size != cache_config.block_size:
            raise ConfigError(
                f"block_size={cache_config.block_size} differs from the executor's {executor.block_size} (--block-size)"
            )
        if len(kinds) != NUM_KINDS or not any(k.offered for k in kinds):
            raise ConfigError(
                f"kinds={[k.name for k in kinds if k.offered]}: at least one cache kind must be offered (--cache)"
            )
        self.executor = executor
        self.clock = clock
        self._host_memory, self._disk = host_memory, disk
        self.kinds = tuple(kinds)
        self._costs = costs
        self.max_num_seqs = min(scheduler_config.max_num_seqs, executor.max_num_seqs)
        self.last_plan: Plan | None = None
        """The last decision, as the policy made it."""
        self.last_tokens_scheduled = 0
        """Tokens of the last step that was run."""
        self.before_dispatch: Callable[[StepBatch], None] | None = None
        """Called when a step has been put together and is about to be run: requests may be added, and nothing else."""
        self._overlap = scheduler_config.overlap
        self._timer = timer
        self._pending: InFlightStep | None = None
        self._reads: DiskReads | None = None
        self._is_closed = False
        self._last_result_s = 0.0

        is_offered = np.array([k.offered for k in kinds])
        # Blocks that are used from their right end are not converted.
        self._can_convert = executor.can_convert and bool(is_offered.all()) and not share_blocks
        self.table = RequestTable()
        self.cache = cache = HybridCache(
            num_blocks=executor.num_blocks,
            block_size=executor.block_size,
            hidden_block_size=executor.hidden_block_size,
            max_num_seqs=self.max_num_seqs,
            blocks_per_group=[k.blocks_per_group for k in kinds],
            prefix_caching=cache_config.enable_prefix_caching,
            num_host_blocks=0 if host_memory is None else host_memory.num_blocks,
        )
        if share_blocks:
            cache.share_blocks(LentBlocks(cache.groups), self._is_best_effort)
        # Cheapest first: a request that fits with a later one fits with every earlier one too.
        self._offered = sorted(
            (k for k in KINDS if kinds[k].offered), key=lambda k: kinds[k].blocks_per_group / cache.block_sizes[k]
        )
        self._counters = EngineCounters()
        self._recorder = IterationRecorder(clock)
        self.states = RequestStates(
            self.table,
            cache,
            RequestPrefixes(
                cache,
                self.table,
                self._offered,
                None if disk is None else disk.salt,
                share=cache_config.share_prefixes,
            ),
            clock,
            self._counters,
            self._recorder,
            scheduler_config.max_num_seqs,
            adapters,
        )
        if cache.tier is not None and self.states.prefixes.hits is not None:
            choice = self.states.prefixes.hits.restores = RestoreChoice(
                lambda: self._costs, cache.block_sizes, cache.blocks_per_group, scheduler_config.max_num_batched_tokens
            )
            if self._can_convert:
                self.states.prefixes.hits.converts = choice.converts
            if disk is not None:
                cache.tier.disk = disk
                self._reads = self.states.prefixes.reads = DiskReads(
                    self.states, cache, self.states.prefixes.hits, disk, choice, self._counters, clock
                )
        self._limits = StepLimits(self.max_num_seqs, scheduler_config.max_num_batched_tokens)
        self._policies = PolicyRunner(
            policy,
            self._counters,
            check_plans=not is_bundled(policy) if check_plans is None else check_plans,
            debug=debug,
            timer=timer,
        )
        plans = PlanFilter(self.states, self._limits, self._policies, is_offered, self._can_convert)
        self._builder = BatchBuilder(
            self.states,
            cache,
            plans,
            self._counters,
            self._recorder,
            host_memory,
            lengths_only=lengths_only,
        )
        self._masks = MaskFiller(self.states, self._counters, fill_masks, vocab_size, timer)
        self.admission = Admission(scheduler_config)
        self._committer = TokenCommitter(
            self.states,
            cache,
            clock,
            self._counters,
            self.admission,
            output_processor,
            2**31 if vocab_size is None else vocab_size,
            lengths_only=lengths_only,
        )
        self._recovery = Recovery(self.states, self._limits, clock, self._counters)
        self._controller = AdmissionController(
            self.admission, scheduler_config, self.states, cache, clock, self._offered, can_mask=vocab_size is not None
        )

    def _is_best_effort(self, owner: int) -> bool:
        rows = np.flatnonzero((self.table.rank == owner) & self.table.live)
        return bool(self.table.best_effort[rows[0]])

    # --- requests --------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Put a request among the waiting ones. A rejected one leaves no trace.

        Raises:
            DuplicateRequestError: the id is alive.
            InvalidRequestError: prompt and `max_tokens` cannot fit the pool with any kind on offer.
            QueueFullError: the waiting queue is at one of its limits.
            EngineDeadError: the engine has ended.
        """
        self._recovery.raise_if_dead()
        if request.adapter is not None and request.adapter not in self.states.adapters:
            raise InvalidRequestError("adapter", f"{request.adapter[:80]!r} is no adapter of this engine")
        try:
            pinned_kind, expected_ttft_s = self._controller.check(request, self.costs)
        except (InvalidRequestError, QueueFullError):
            self.note_refused()
            raise
        self.states.add(request, pinned_kind, expected_ttft_s)

    def note_refused(self) -> None:
        """Count a request that was rejected early, by the `queue_snapshot`."""
        self._counters.num_rejected += 1

    def abort(self, request_id: str) -> bool:
        """End a live request now; its blocks are free at once, its terminal output comes with the next `step`.

        Returns:
            False when no live request has this id (it may have ended already).
        """
        state = self.states.by_id.get(request_id)
        if state is None:
            return False
        self.states.finish(state, "abort")
        return True

    def preempt(self, request_id: str) -> bool:
        """Preempt a running request, as a policy could. For operators and tests.

        Returns:
            False when no live request with this id holds cache.
        """
        state = self.states.by_id.get(request_id)
        if state is None or self.states.status[state.row] != RUNNING:
            return False
        self.states.preempt(state.row)
        return True

    # --- the loop --------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Run one iteration. Returns what there is to deliver: with overlap the tokens of the iteration before.

        Raises:
            EngineDeadError: the engine ended in an earlier step (which delivered an error to every request).
        """
        self._recovery.raise_if_dead()
        try:
            self._step()
            if self.debug:
                self.check_integrity()
        except Exception as error:
            if self.debug:
                raise
            # Not a step that failed (see `Recovery`) but our own accounting or code: what it says is not to be trusted.
            logger.critical("engine shutting down after an internal error: %s", error, exc_info=True)
            self._pending = None
            self._recovery.end(f"internal error: {type(error).__name__}")
        return self.states.take_outputs()

    def _step(self) -> None:
        timer = self._timer
        started = timer()
        if self._reads is not None:
            self._reads.take()
        plan = self._schedule()
        self._recorder.begin(plan, timer() - started)
        batch, rows, requests = self._builder.build(plan)
        self._builder.record(batch, rows)
        if self.before_dispatch is not None and batch is not None:
            self.before_dispatch(batch)
        prepared = timer()
        dispatched = self._execute(plan, batch, rows, requests) if batch is not None else None
        launched = timer()
        if self._overlap:
            oldest, self._pending = self._pending, dispatched
        else:
            oldest = self._sample_masked(dispatched)
        waited = 0.0
        if oldest is not None:
            started_waiting = timer()
            result = self._fetch(oldest)
            waited = timer() - started_waiting
            if result is not None:
                self._committer.commit(oldest, result)
        self._pending = self._sample_masked(self._pending)
        self._recorder.end_current(ran=batch is not None)
        if batch is not None:
            self._policies.note_progress()
            self._counters.dispatch_s.add(launched - prepared)
        elif oldest is None and self._reads is not None and self._reads.is_reading:
            self._reads.wait()
        elif oldest is None and self._policies.note_idle(bool(self.states.by_id)):
            break_stall(self.states, self.view(), self.policy.name, debug=self.debug)
        is_idle = not self.states.by_id and self._pending is None and self.dead_reason is None
        if is_idle and self.cache.num_free != self.cache.pool.num_blocks:
            raise CacheIntegrityError("blocks are held, and no request is alive")
        if batch is not None or oldest is not None:
            self._counters.host_s.add(timer() - started - (launched - prepared) - waited)

    def view(self) -> SchedulerView:
        """Show the policy the state of the engine."""
        return self.states.view(
            kinds=self.kinds,
            max_num_seqs=self._limits.num_seqs,
            max_num_batched_tokens=self._limits.num_tokens,
            costs=self.costs,
            can_convert=self._can_convert,
        )

    def _schedule(self) -> Plan:
        started = self._timer()
        self._limits.restore_if_due(self.clock)
        view = self.view()
        if not view.waiting.size and not view.running.size:
            return Plan.idle()
        plan = self._policies.schedule(view)
        if plan is None:
            if self._recovery.note_failure("the policy failed"):
                self._pending = None
            return Plan.idle()
        self.last_plan = plan
        self._counters.add_schedule(self._timer() - started)
        return plan

    def _execute(
        self, plan: Plan, batch: StepBatch, rows: NDArray[np.int32], requests: list[RequestState]
    ) -> InFlightStep | None:
        """Dispatch a step and account for it; None: it failed."""
        dispatched_s = self._timer()
        try:
            handle = self.executor.execute(batch)
        except Exception as error:
            self._raise_in_debug(error)
            self.cache.forget_saved(batch.saves[:, 1])
            # The step before it was dispatched in good order: what it sampled is good.
            oldest, self._pending = self._pending, None
            result = self._fetch(oldest) if oldest is not None else None
            if oldest is not None and result is not None:
                self._committer.commit(oldest, result)
            if oldest is None or result is not None:  # else `_fetch` has recovered already
                num_tokens = int(batch.num_tokens.sum())
                self._recovery.recover(error, self.executor, self._recorder.current, num_tokens)
            self._recorder.end(self._recorder.current, None)
            return None
        self._counters.iterations[plan.iteration] += 1
        self.last_tokens_scheduled = int(batch.num_tokens.sum())
        self._counters.step_tokens.add(self.last_tokens_scheduled)
        return InFlightStep(
            handle=handle,
            requests=requests,
            rows=rows,
            samples=batch.samples,
            position=batch.position,
            num_tokens=self.last_tokens_scheduled,
            masked=batch.masked,
            kind=batch.kind,
            filled=self._builder.account(batch, rows, requests),
            dispatched_s=dispatched_s,
            predicted_s=self._predicted_s(plan, batch),
            has_chunks=plan.iteration != "decode",
            prompt_targets=batch.prompt_targets,
            pool_spans=batch.pool_spans,
            iteration=self._recorder.current,
        )

    def _predicted_s(self, plan: Plan, batch: StepBatch) -> float | None:
        """Predict every eighth step of a type by the cost model, if there is one: it takes some hundredths of a
        millisecond."""
        if self._counters.iterations[plan.iteration] % _COST_ERROR_EVERY:
            return None
        step_s = self.costs.step_s(batch.num_tokens, batch.start, batch.kind)
        step_s += self.costs.conversion_s(batch.num_converted_tokens)
        return max(step_s, self.costs.transfer_s(*batch.moved_blocks(self.cache.block_sizes))) or None

    def _sample_masked(self, step: InFlightStep | None) -> InFlightStep | None:
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

    def _fetch(self, step: InFlightStep) -> StepResult | None:
        """Wait for a step. None: it failed, and everything has been put back to where it can go on."""
        try:
            result = step.handle.result()
            shape = (len(step.requests),)
            if result.token_ids.shape != shape or result.finite.shape != shape:
                raise RuntimeError(f"the step returned {result.token_ids.shape} tokens for {shape} rows")
        except Exception as error:
            self._raise_in_debug(error)
            pending, self._pending = self._pending, None
            self._recover(error, step)
            if pending is not None:  # computed on the same pool, after the step that failed
                self._recorder.end_step(pending, None)
            return None
        now_s = self._timer()
        step_s = now_s - max(step.dispatched_s, self._last_result_s)
        self._recorder.end_step(step, step_s)
        self._last_result_s = now_s
        self._counters.add_step(step_s, step.predicted_s, "prefill" if step.has_chunks else "decode")
        return result

    def _recover(self, error: Exception, step: InFlightStep) -> None:
        self._recovery.recover(error, self.executor, step.iteration, step.num_tokens)
        self._recorder.end_step(step, None)

    def _raise_in_debug(self, error: Exception) -> None:
        if self.debug and isinstance(error, AssertionError):
            raise error

    def close(self, timeout_s: float = CLOSE_S, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Write all cached prefixes to disk, where there is one, and end its threads. No request is alive; nothing may be
        run afterwards.

        Args:
            timeout_s: what has not been written by then is lost.
            is_hurried: asked meanwhile; True ends it at once.
        """
        disk = self._disk
        if disk is None or self._is_closed:
            return
        self._is_closed = True
        until_s = self._timer() + timeout_s

        def is_written() -> bool:
            while not disk.flush(0.1):
                if is_hurried() or self._timer() > until_s:
                    return False
            return not is_hurried()

        try:
            if self.dead_reason is None and not self.states.by_id and self._host_memory is not None:
                self.cache.groups.write_all(self._host_memory.save_now, is_written)
            if not is_written():
                logger.warning(
                    "not all cached prefixes have been written to disk: the end was limited to %g s", timeout_s
                )
        except Exception as error:
            logger.error("cached prefixes could not be written to disk: %s", error)
        disk.close()

    # --- looking in ------------------------------------------------------------------------------------------------

    @property
    def costs(self) -> StepCosts:
        """Iteration times for the policy."""
        return self._costs

    @costs.setter
    def costs(self, costs: StepCosts) -> None:
        self._costs = costs
        if self.cache.tier is not None and self.states.prefixes.hits is not None:
            self.states.prefixes.hits.refresh()

    @property
    def policy(self) -> Policy:
        """Decides each iteration."""
        return self._policies.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policies.policy = policy

    @property
    def debug(self) -> bool:
        """True: contract violations and failures raise."""
        return self._policies.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        self._policies.debug = debug

    @property
    def after_step(self) -> Callable[[Iteration], None] | None:
        """Told of every decision, in order, when its step has ended; must be quick and must not raise."""
        return self._recorder.listener

    @after_step.setter
    def after_step(self, listener: Callable[[Iteration], None] | None) -> None:
        self._recorder.listener = listener

    @property
    def num_decisions(self) -> int:
        """The number of the next `Iteration`."""
        return self._recorder.num_decisions

    @property
    def has_work(self) -> bool:
        """True while another `step` has something to do."""
        return bool(self.states.by_id or self.states.outputs) or self._pending is not None

    @property
    def num_generated(self) -> int:
        """Tokens delivered since the engine was made."""
        return self._counters.generation_tokens

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self.states.by_id)

    def usage_of(self, tenant: str) -> TenantUsage:
        """Counters and gauges of a tenant."""
        states, counters = self.states, self._counters
        running, waiting = (
            int(np.count_nonzero(self.table.tenant[states.rows(status)] == states.tenants.get(tenant, -1)))
            for status in (RUNNING, WAITING)
        )
        return TenantUsage(
            num_running=running,
            num_waiting=waiting,
            prompt_tokens=counters.tenant_prompt_tokens[tenant],
            generation_tokens=counters.tenant_generation_tokens[tenant],
        )

    @property
    def dead_reason(self) -> str | None:
        """Reason for which the engine ended; None while it is alive."""
        return self._recovery.dead_reason

    def is_live(self, request: EngineRequest) -> bool:
        """Return True if this very request, not another one of its id, is alive."""
        state = self.states.by_id.get(request.request_id)
        return state is not None and state.request is request

    def metrics_of(self, request_id: str) -> RequestMetrics:
        """Return the metrics of a live request, which go on changing until it has ended. Raises KeyError: no such
        request."""
        return self.states.by_id[request_id].metrics

    def has(self, request_id: str) -> bool:
        """Return True if a live request has this id. Thread-safe."""
        return request_id in self.states.by_id

    def has_been_scheduled(self, request_id: str) -> bool:
        """Return True if a live request has ever been scheduled, and for a request that is not alive."""
        state = self.states.by_id.get(request_id)
        return state is None or state.metrics.first_scheduled_s is not None

    def num_cached(self, request: EngineRequest) -> int:
        """Count the prompt tokens that a new request would find cached; 0 where admission does not need to know.

        For any thread: what is found may be gone a moment later.
        """
        return self._controller.num_cached(request)

    def min_blocks_for(self, num_tokens: int) -> int:
        """Count the blocks of these positions in the cheapest kind on offer. For any thread."""
        return self._controller.min_blocks_for(num_tokens)

    def queue_snapshot(self) -> QueueSnapshot:
        """Return the queue for early rejection while the step runs that has just been built (`before_dispatch`)."""
        return self._controller.queue_snapshot(self.costs)

    def stats(self) -> EngineStats:
        """Return counters and gauges; takes a tenth of a millisecond."""
        return collect_stats(
            self.states,
            self._counters,
            num_slo_at_risk_admitted=self.admission.num_slo_at_risk_admitted,
            compilations=self.executor.compilations,
            expected_wait_s=self._controller.expected_wait_s(self.costs),
            host_block_bytes=0 if self._host_memory is None else self._host_memory.block_bytes,
            disk=None if self._disk is None else self._disk.counts(),
        )

    def check_integrity(self) -> None:
        """Recount everything: the pool, the tables, and that engine, request table, cache and device say the same.

        Raises:
            CacheIntegrityError: they do not.
            RuntimeError: the device does not.
        """
        if self.dead_reason is None:
            self.executor.check_integrity()
            check_engine(self.states, self._offered, self._pending)
            if self._reads is not None:
                self._reads.check_integrity()

"""The engine: one loop that schedules, builds, executes and commits, independent of the device and the clock.

The life of a request:

1. `Engine.add_request` gives it a row of the `RequestTable`, in which it waits, or rejects it: nothing is allocated
   for a rejected request.
2. Each `Engine.step` makes four calls: *schedule* (the policy's pure decision), *build* (block accounting and the
   batch), *execute* (the executor runs the rows) and *commit* (tokens are delivered, requests end).
3. When it is first scheduled, it takes a slot and blocks of one kind and is running. Its prompt is computed in one
   step or in chunks; the step that computes its last position samples the first token, each later step one token.
4. A policy may *convert* it from layer inputs to keys and values (`Plan.convert`): it gets new blocks, the executor
   computes their contents from the old blocks, and the step itself runs it as a KV request. Its old blocks are freed
   when the step has been built; their next owner writes to them in a later step. If too few blocks are free, it keeps
   its layer inputs.
5. A policy may *preempt* it: it loses cache and slot and waits again with its old rank. When it is scheduled again,
   with either kind, its prompt and its output so far are recomputed (Apt-Serve §4.3: a switch of the cache type
   discards the cache and recomputes it).
6. It ends exactly once; its last `StepOutput` has the finish reason: "stop", "length", "abort" or "error".

Prefixes. With `CacheConfig.enable_prefix_caching` a request that is scheduled reuses the cached prefix of its tokens,
computed by other requests, or by itself before a preemption; `PrefixHitTracker` gives the policy the prefix's length.
At least the last token is computed, because logits are not cached: if the last block is fully cached, the request gets
a copy of the block to write to (`StepBatch.copies`). Blocks are registered at commit, after a valid token has been
sampled from them. A step that fails clears the prefix cache on the device. A request for log probabilities of its
prompt uses no cached prefix until all of them are known; those known before a preemption are not computed again
(`PromptScores`).

Overlap. With `SchedulerConfig.overlap` a step is dispatched before the tokens of the previous step are fetched:

    host    | schedule n+1, build | execute n+1 | result n, commit n | schedule n+2 ...
    device  ... step n ............................| step n+1 ................

The table counts tokens in flight, so the policy sees the lengths after the step in flight; the next step gets
`TOKEN_ON_DEVICE` in place of their values. This has four consequences:

* A request whose last allowed token is in flight takes part in no further step. Its cache is no longer needed and is
  released right after dispatch. Steps run in order, so the next owner of the blocks writes to them in a later step.
* A stop token is seen one step late. The row dispatched in the meantime is discarded at its commit, because its request
  has ended; its blocks are freed before that, which is safe because steps run in order.
* A request with structured output samples under a mask that depends on the previous token. Its step is dispatched like
  any other up to the sampler; then the previous step is fetched and committed, masks are filled, and the sampler is
  dispatched. The host does this while the device computes the rest of the step, so only the sampler does not overlap.
* A preempted request's token in flight is delivered like any other. Until then the policy does not see the request:
  only tokens known to the host can be recomputed.

Policies. If a policy raises, or its plan violates the contract of `Plan`, `fcfs` schedules the iteration instead.
Plans of policies from outside this package are checked in every iteration (0.1 ms); bundled policies are checked only
by tests.

Failures. A failure of one request (logits that are not finite, a token outside the vocabulary, its output processor,
its grammar) ends only that request. A step that raises has destroyed the pool: the executor is reset, every request
that held cache waits again, and the loop continues. A second failure within a minute, or an error that only a new
process clears, stops the engine with an error for each request. After a step that ran out of memory, steps are at most
half as large for a while (`OOM_BACKOFF_S`). Inconsistent accounting (`CacheIntegrityError`) stops the engine at once,
because a request could read another's memory.

Parts. `RequestStates` owns the requests and their transitions, `PolicyRunner` calls the policy, `BatchBuilder` turns
plans into batches, `TokenCommitter` turns results into outputs, `Recovery` handles failures. None of them uses
`Engine`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from apt_jax.cache import CacheIntegrityError, HybridCache
from apt_jax.config import CacheConfig, SchedulerConfig
from apt_jax.core.kinds import KINDS, KV, NUM_KINDS, CacheKindSpec
from apt_jax.core.step import StepBatch
from apt_jax.core.tiers import Tiers
from apt_jax.costs.model import StepCosts
from apt_jax.engine.admission import Admission, AdmissionController, QueueSnapshot
from apt_jax.engine.batch import PlainReserver, Reserver
from apt_jax.engine.batch.builder import BatchBuilder
from apt_jax.engine.batch.cached_prefixes import CachedPrefixes
from apt_jax.engine.batch.plan_filter import PlanFilter
from apt_jax.engine.changed_prefixes import ChangedPrefixes
from apt_jax.engine.commit import StepMasks, TokenCommitter
from apt_jax.engine.counters import EngineCounters
from apt_jax.engine.disk_reads import DiskReads
from apt_jax.engine.disk_writes import write_prefixes
from apt_jax.engine.events import Iteration
from apt_jax.engine.integrity import check_engine
from apt_jax.engine.iteration_recorder import IterationRecorder
from apt_jax.engine.policy_runner import PolicyRunner
from apt_jax.engine.recovery import Recovery, StepLimits, break_stall
from apt_jax.engine.request_state import OutputProcessor, StepOutput
from apt_jax.engine.request_states import RUNNING, RequestPrefixes, RequestStates
from apt_jax.engine.restore import RestoreChoice
from apt_jax.engine.sessions import Sessions
from apt_jax.engine.stats import EngineStats, TenantUsage, collect_stats, usage_of
from apt_jax.engine.step_runner import StepRunner
from apt_jax.errors import ConfigError, InvalidRequestError, QueueFullError
from apt_jax.executor import Executor
from apt_jax.request import EngineRequest, RequestMetrics
from apt_jax.sched.registry import is_bundled
from apt_jax.sched.request_table import RequestTable
from apt_jax.sched.retention import Retention, make_retention
from apt_jax.sched.view import Plan, Policy, SchedulerView
from apt_jax.structured.constraint import MaskFiller
from apt_jax.utils.clock import Clock

logger = logging.getLogger("apt_jax.engine")

CLOSE_S = 20.0
"""Default time limit for writing cached prefixes to disk when the engine closes, seconds."""


class Engine:
    """Serves requests with an executor and a policy; synchronous, to be used from one thread.

    Args:
        executor: runs steps; its pool and its slots limit how many requests run.
        policy: decides each iteration.
        clock: the current time.
        kinds: specifications of the cache kinds, indexed by `core.kinds.KV` and `HIDDEN`.
        scheduler_config: limits, and overlap of steps.
        cache_config: block size, prefix caching and sharing of blocks.
        costs: cost model of iteration times, for the policy; may be replaced at any time (`engine.costs = ...`).
        vocab_size: V; a sampled token outside [0, V) ends its request. None: only a negative token does.
        output_processor: the front end's hook for every token.
        tiers: host memory and disk, for cached groups evicted from the pool.
        reserver: class that reserves blocks for requests; see `apt_jax.engine.batch.reserver_for`.
        retention: retention policy; None: as `cache_config.retention` names it.
        debug: check all accounting after every step, and raise if the policy fails or violates its contract.

    If the executor uses only lengths (`Executor.lengths_only`), `step` delivers only the last output of each request;
    decisions and accounting are the same, but take half the time.
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
        tiers: Tiers = Tiers(),
        reserver: type[Reserver] = PlainReserver,
        retention: Retention | None = None,
        debug: bool = False,
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
        self._tiers = tiers
        self.kinds = tuple(kinds)
        self._costs = costs
        self.max_num_seqs = min(scheduler_config.max_num_seqs, executor.max_num_seqs)
        self.last_plan: Plan | None = None
        """The last plan of the policy, or of `fcfs` in its place; None: no plan yet."""
        self.before_dispatch: Callable[[StepBatch], None] | None = None
        """Function called between building and dispatching a step; it may add requests, but must change nothing
        else."""
        self._overlap = scheduler_config.overlap
        self._reads: DiskReads | None = None
        self._is_closed = False

        is_offered = np.array([k.offered for k in kinds])
        # Requests that may fill blocks from the right end cannot be converted.
        self._can_convert = executor.can_convert and bool(is_offered.all()) and not reserver.fills_both_ends
        self.table = RequestTable()
        self.cache = cache = HybridCache(
            num_blocks=executor.num_blocks,
            block_size=executor.block_size,
            hidden_block_size=executor.hidden_block_size,
            max_num_seqs=self.max_num_seqs,
            blocks_per_group=[k.blocks_per_group for k in kinds],
            prefix_caching=cache_config.enable_prefix_caching,
            num_host_blocks=0 if tiers.host is None else tiers.host.num_blocks,
            windows=kinds[KV].windows,
        )
        # Cheapest first: a request that fits with one kind also fits with every kind before it.
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
                None if tiers.disk is None else tiers.disk.salt,
                share=cache_config.share_prefixes,
            ),
            clock,
            self._counters,
            self._recorder,
            scheduler_config.max_num_seqs,
            executor.adapters,
        )
        retention = make_retention(cache_config.retention) if retention is None else retention
        order = scheduler_config.session_order
        if cache.prefixes is not None and (retention is not None or order != "arrival"):
            self.states.sessions = Sessions(cache, self.table, retention, order, clock, lambda: self._costs)
        if cache.prefixes is not None and not executor.lengths_only:
            self.states.changed_prefixes = ChangedPrefixes(clock, self._counters)
        if cache.tier is not None and self.states.prefixes.hits is not None:
            choice = self.states.prefixes.hits.restores = RestoreChoice(
                lambda: self._costs, cache.block_sizes, cache.blocks_per_group, scheduler_config.max_num_batched_tokens
            )
            if self._can_convert:
                self.states.prefixes.hits.converts = choice.converts
            if tiers.disk is not None:
                cache.tier.disk = tiers.disk
                self._reads = self.states.prefixes.reads = DiskReads(
                    self.states, cache, self.states.prefixes.hits, tiers.disk, choice, self._counters, clock
                )
        self._limits = StepLimits(self.max_num_seqs, scheduler_config.max_num_batched_tokens)
        self._policies = PolicyRunner(
            policy,
            self._counters,
            check_plans=not is_bundled(policy),
            debug=debug,
            timer=time.perf_counter,
        )
        self._reserver = reserver(self.states, tiers.host)
        plans = PlanFilter(self.states, self._limits, self._policies, is_offered, self._can_convert)
        self._builder = BatchBuilder(
            self.states,
            cache,
            plans,
            CachedPrefixes(self.states, cache, self._counters, tiers.host),
            self._reserver,
            self._counters,
            self._recorder,
            lengths_only=executor.lengths_only,
        )
        self._masks = StepMasks(self.states, self._counters, MaskFiller(), vocab_size)
        self.admission = Admission(scheduler_config)
        self._committer = TokenCommitter(
            self.states,
            cache,
            clock,
            self._counters,
            self.admission,
            output_processor,
            2**31 if vocab_size is None else vocab_size,
            lengths_only=executor.lengths_only,
        )
        self._recovery = Recovery(self.states, self._limits, clock, self._counters)
        self._steps = StepRunner(
            executor,
            cache,
            self._builder,
            self._masks,
            self._committer,
            self._recovery,
            self._recorder,
            self._policies,
            self._counters,
        )
        self._controller = AdmissionController(
            self.admission, scheduler_config, self.states, cache, clock, self._offered, can_mask=vocab_size is not None
        )

    # --- requests --------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Add a request to the waiting requests. A rejected request changes no state.

        Raises:
            DuplicateRequestError: a live request has this id.
            InvalidRequestError: the request can never be served, for example because it does not fit the pool.
            QueueFullError: the waiting queue is at one of its limits, or the SLO cannot be met now.
            EngineDeadError: the engine has stopped.
        """
        self._recovery.raise_if_dead()
        if request.adapter is not None and request.adapter not in self.states.adapters:
            raise InvalidRequestError("adapter", f"{request.adapter[:80]!r} is not an adapter of this engine")
        try:
            pinned_kind, expected_ttft_s = self._controller.check(request, self.costs)
        except (InvalidRequestError, QueueFullError):
            self.note_refused()
            raise
        self.states.add(request, pinned_kind, expected_ttft_s)

    def note_refused(self) -> None:
        """Count a rejected request; the front end calls this for early rejections, which the engine does not see."""
        self._counters.num_rejected += 1

    def abort(self, request_id: str) -> bool:
        """End a live request now. Its blocks are freed at once; the next `step` returns its last output.

        Returns:
            False: no live request has this id (it may have ended already).
        """
        state = self.states.by_id.get(request_id)
        if state is None:
            return False
        self.states.finish(state, "abort")
        return True

    def preempt(self, request_id: str) -> bool:
        """Preempt a running request as a policy would; for operators and tests.

        Returns:
            False: no live request with this id holds cache.
        """
        state = self.states.by_id.get(request_id)
        if state is None or self.states.status[state.row] != RUNNING:
            return False
        self.states.preempt(state.row)
        return True

    def end_session(self, session_id: str, tenant: str | None = None) -> bool:
        """End a session: cached blocks that only it needs are freed. Its live calls go on.

        Returns:
            False: the tenant has no such session here.
        """
        if self.states.changed_prefixes is not None:
            self.states.changed_prefixes.forget(tenant, session_id)
        number = self.states.tenants.get(tenant)
        return self.states.sessions is not None and number is not None and self.states.sessions.end(number, session_id)

    def note_answer(self, request_id: str, work: Literal["tool", "person"]) -> None:
        """Tell the kind of work before the next call of an ended request's session: a tool if its answer calls one,
        else a person. Thread-safe."""
        if self.states.sessions is not None:
            self.states.sessions.note_answer(request_id, work)

    # --- the loop --------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Run one iteration and return the outputs to deliver; with overlap, they belong to the previous iteration.

        Raises:
            EngineDeadError: the engine stopped in an earlier step (which delivered an error to every request).
        """
        self._recovery.raise_if_dead()
        try:
            self._step()
            if self.debug:
                self.check_integrity()
        except Exception as error:
            if self.debug:
                raise
            # `Recovery` handles steps that fail: this is a bug in our own code, so the accounting cannot be trusted.
            logger.critical("engine shutting down after an internal error: %s", error, exc_info=True)
            self._steps.pending = None
            self._recovery.end(f"internal error: {type(error).__name__}")
        return self.states.take_outputs()

    def _step(self) -> None:
        timer, steps = time.perf_counter, self._steps
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
        dispatched = steps.execute(plan, batch, rows, requests, self.costs) if batch is not None else None
        launched = timer()
        if self._overlap:
            oldest, steps.pending = steps.pending, dispatched
        else:
            oldest = steps.sample_masked(dispatched)
        waited = 0.0
        if oldest is not None:
            started_waiting = timer()
            result = steps.fetch(oldest)
            waited = timer() - started_waiting
            if result is not None:
                self._committer.commit(oldest, result)
        steps.pending = steps.sample_masked(steps.pending)
        self._recorder.end_current(ran=batch is not None)
        if batch is not None:
            self._policies.note_progress()
            self._counters.dispatch_s.add(launched - prepared)
        elif oldest is None and self._reads is not None and self._reads.is_reading:
            self._reads.wait()
        elif oldest is None and self._policies.note_idle(bool(self.states.by_id)):
            break_stall(self.states, self.view(), self.policy.name, debug=self.debug)
        is_idle = not self.states.by_id and steps.pending is None and self.dead_reason is None
        if is_idle and self.cache.num_free != self.cache.pool.num_blocks:
            raise CacheIntegrityError("blocks are held, but no request is live")
        if batch is not None or oldest is not None:
            self._counters.host_s.add(timer() - started - (launched - prepared) - waited)

    def view(self) -> SchedulerView:
        """Return the policy's view of the state of the engine."""
        return self.states.view(
            kinds=self.kinds,
            max_num_seqs=self._limits.num_seqs,
            max_num_batched_tokens=self._limits.num_tokens,
            costs=self.costs,
            can_convert=self._can_convert,
            takeable=self._reserver.takeable(),
        )

    def _schedule(self) -> Plan:
        started = time.perf_counter()
        self._limits.restore_if_due(self.clock)
        view = self.view()
        if not view.waiting.size and not view.running.size:
            return Plan.idle()
        if self.states.sessions is not None:
            view = self.states.sessions.retain(view, is_stuck=self._policies.is_idle)
        plan = self._policies.schedule(view)
        if plan is None:
            if self._recovery.note_failure("the policy failed"):
                self._steps.pending = None
            return Plan.idle()
        self.last_plan = plan
        self._counters.add_schedule(time.perf_counter() - started)
        return plan

    def close(self, timeout_s: float = CLOSE_S, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Write all cached prefixes to disk, if there is a disk tier, and close the tier. Call it when no request is
        live; no step may be run afterwards.

        Args:
            timeout_s: time limit, seconds; prefixes not written by then are lost.
            is_hurried: function called repeatedly while writing; writing stops when it returns True.
        """
        if self._tiers.disk is None or self._is_closed:
            return
        self._is_closed = True
        is_whole = self.dead_reason is None and not self.states.by_id
        host = self._tiers.host if is_whole else None
        write_prefixes(self.cache, host, self._tiers.disk, timeout_s, is_hurried)

    # --- inspection ------------------------------------------------------------------------------------------------

    @property
    def costs(self) -> StepCosts:
        """Cost model of iteration times, for the policy."""
        return self._costs

    @costs.setter
    def costs(self, costs: StepCosts) -> None:
        self._costs = costs
        if self.cache.tier is not None and self.states.prefixes.hits is not None:
            self.states.prefixes.hits.refresh()

    @property
    def policy(self) -> Policy:
        """The policy, which plans each iteration."""
        return self._policies.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policies.policy = policy

    @property
    def debug(self) -> bool:
        """True: check all accounting after every step, and raise errors of the policy and internal errors instead of
        handling them."""
        return self._policies.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        self._policies.debug = debug

    @property
    def after_step(self) -> Callable[[Iteration], None] | None:
        """Function called with every `Iteration`, in order, when its step has ended; must be quick and must not
        raise."""
        return self._recorder.listener

    @after_step.setter
    def after_step(self, listener: Callable[[Iteration], None] | None) -> None:
        self._recorder.listener = listener

    @property
    def num_decisions(self) -> int:
        """Number of the next `Iteration`."""
        return self._recorder.num_decisions

    @property
    def has_work(self) -> bool:
        """True while requests are live, outputs are undelivered, or a step is in flight."""
        return bool(self.states.by_id or self.states.outputs) or self._steps.pending is not None

    @property
    def num_generated(self) -> int:
        """Tokens delivered since the engine was created."""
        return self._counters.generation_tokens

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self.states.by_id)

    def usage_of(self, tenant: str) -> TenantUsage:
        """Return counters and gauges of a tenant."""
        return usage_of(self.states, self._counters, tenant)

    @property
    def dead_reason(self) -> str | None:
        """Reason why the engine stopped; None: it has not stopped."""
        return self._recovery.dead_reason

    def is_live(self, request: EngineRequest) -> bool:
        """Return True if this request object is live; another live request with the same id does not count."""
        state = self.states.by_id.get(request.request_id)
        return state is not None and state.request is request

    def metrics_of(self, request_id: str) -> RequestMetrics:
        """Return the metrics of a live request; the object is updated until the request ends.

        Raises:
            KeyError: no live request has this id.
        """
        return self.states.by_id[request_id].metrics

    def has(self, request_id: str) -> bool:
        """Return True if a live request has this id. Thread-safe."""
        return request_id in self.states.by_id

    def has_been_scheduled(self, request_id: str) -> bool:
        """Return True if the request has been scheduled at least once, or is not live."""
        state = self.states.by_id.get(request_id)
        return state is None or state.metrics.first_scheduled_s is not None

    def num_cached(self, request: EngineRequest) -> int:
        """Return the number of cached prompt tokens of a new request; 0 if admission does not need the number.

        Callable from any thread; the cache may change right after the call.
        """
        return self._controller.num_cached(request)

    def min_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` positions take in the cheapest available kind. Thread-safe."""
        return self._controller.min_blocks_for(num_tokens)

    def queue_snapshot(self) -> QueueSnapshot:
        """Return a snapshot of the queue. A snapshot taken in `before_dispatch` serves early rejection while the step
        runs."""
        return self._controller.queue_snapshot(self.costs)

    def stats(self) -> EngineStats:
        """Return counters and gauges; takes about 0.1 ms."""
        return collect_stats(
            self.states,
            self._counters,
            num_slo_at_risk_admitted=self.admission.num_slo_at_risk_admitted,
            compilations=self.executor.compilations,
            expected_wait_s=self._controller.expected_wait_s(self.costs),
            host_block_bytes=0 if self._tiers.host is None else self._tiers.host.block_bytes,
            disk=None if self._tiers.disk is None else self._tiers.disk.counts(),
        )

    def check_integrity(self) -> None:
        """Recount pool and tables, and check that engine, request table, cache and device are consistent.

        Raises:
            CacheIntegrityError: engine, request table or cache is inconsistent.
            RuntimeError: the state of the device is inconsistent.
        """
        if self.dead_reason is None:
            self.executor.check_integrity()
            check_engine(self.states, self._offered, self._steps.pending)
            if self._reads is not None:
                self._reads.check_integrity()

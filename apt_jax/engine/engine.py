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

import numpy as np

from apt_jax.cache import CacheIntegrityError, HybridCache
from apt_jax.config import CacheConfig, SchedulerConfig
from apt_jax.core.kinds import KINDS, NUM_KINDS, CacheKindSpec
from apt_jax.core.step import StepBatch
from apt_jax.core.tiers import Tiers
from apt_jax.costs.model import StepCosts
from apt_jax.engine.admission import Admission, AdmissionController, QueueSnapshot
from apt_jax.engine.batch import PlainReserver, Reserver
from apt_jax.engine.batch.builder import BatchBuilder
from apt_jax.engine.batch.cached_prefixes import CachedPrefixes
from apt_jax.engine.batch.plan_filter import PlanFilter
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
from apt_jax.engine.stats import EngineStats, TenantUsage, collect_stats, usage_of
from apt_jax.engine.step_runner import StepRunner
from apt_jax.errors import ConfigError, InvalidRequestError, QueueFullError
from apt_jax.executor import Executor
from apt_jax.request import EngineRequest, RequestMetrics
from apt_jax.sched.registry import is_bundled
from apt_jax.sched.request_table import RequestTable
from apt_jax.sched.view import Plan, Policy, SchedulerView
from apt_jax.structured.constraint import MaskFiller
from apt_jax.utils.clock import Clock

logger = logging.getLogger("apt_jax.engine")

CLOSE_S = 20.0
"""Most that the end of an engine waits for cached prefixes to be written to disk, seconds."""


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
        tiers: where cached groups go that leave the pool.
        reserver: how requests get blocks (`apt_jax.engine.batch.reserver_for`).
        debug: check everything after every step, and let contract violations and failures of the policy raise.

    With an executor that looks at lengths alone (`Executor.lengths_only`), `step` delivers the last output of each request
    only; decisions and accounting are the same, in half the time.
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
        """The last decision, as the policy made it."""
        self.before_dispatch: Callable[[StepBatch], None] | None = None
        """Called when a step has been put together and is about to be run: requests may be added, and nothing else."""
        self._overlap = scheduler_config.overlap
        self._reads: DiskReads | None = None
        self._is_closed = False

        is_offered = np.array([k.offered for k in kinds])
        # Blocks that are used from their right end are not converted.
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
        )
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
                None if tiers.disk is None else tiers.disk.salt,
                share=cache_config.share_prefixes,
            ),
            clock,
            self._counters,
            self._recorder,
            scheduler_config.max_num_seqs,
            executor.adapters,
        )
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
            takeable=self._reserver.takeable(),
        )

    def _schedule(self) -> Plan:
        started = time.perf_counter()
        self._limits.restore_if_due(self.clock)
        view = self.view()
        if not view.waiting.size and not view.running.size:
            return Plan.idle()
        plan = self._policies.schedule(view)
        if plan is None:
            if self._recovery.note_failure("the policy failed"):
                self._steps.pending = None
            return Plan.idle()
        self.last_plan = plan
        self._counters.add_schedule(time.perf_counter() - started)
        return plan

    def close(self, timeout_s: float = CLOSE_S, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Write all cached prefixes to disk, where there is one, and end its threads. No request is alive; nothing may be
        run afterwards.

        Args:
            timeout_s: what has not been written by then is lost.
            is_hurried: asked meanwhile; True ends it at once.
        """
        if self._tiers.disk is None or self._is_closed:
            return
        self._is_closed = True
        is_whole = self.dead_reason is None and not self.states.by_id
        host = self._tiers.host if is_whole else None
        write_prefixes(self.cache, host, self._tiers.disk, timeout_s, is_hurried)

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
        return bool(self.states.by_id or self.states.outputs) or self._steps.pending is not None

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
        return usage_of(self.states, self._counters, tenant)

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
            host_block_bytes=0 if self._tiers.host is None else self._tiers.host.block_bytes,
            disk=None if self._tiers.disk is None else self._tiers.disk.counts(),
        )

    def check_integrity(self) -> None:
        """Recount everything: the pool, the tables, and that engine, request table, cache and device say the same.

        Raises:
            CacheIntegrityError: they do not.
            RuntimeError: the device does not.
        """
        if self.dead_reason is None:
            self.executor.check_integrity()
            check_engine(self.states, self._offered, self._steps.pending)
            if self._reads is not None:
                self._reads.check_integrity()

"""The engine: one loop that decides, books, runs and delivers. It knows neither the device nor the clock.

The life of a request:

1. `Engine.add_request` gives it a row of the `RequestTable` and puts it among the waiting ones, or refuses it: nothing
   is allocated for a refused request.
2. Each `Engine.step` makes four calls: *schedule* (the policy's pure decision), *apply* (block accounting), *execute*
   (the executor runs the rows) and *commit* (tokens are delivered, requests end).
3. The first time that it is scheduled it takes a seat and blocks of one kind and is running. Its prompt is computed in
   one step or in chunks; the step that reaches its end samples the first token, and every later step one more.
4. A policy may *convert* it from layer inputs to keys and values (`Plan.convert`): it gets new blocks, the executor computes
   what they hold from the old ones, and the step itself runs it as a KV request. Its old blocks are given back when the
   step has been put together; whoever gets them writes them in a later step. Where there are no new blocks it stays hidden.
5. A policy may *preempt* it: cache and seat are gone, it waits again under its old rank, and prompt and output so far
   are computed anew when it is next scheduled, with either kind (Apt-Serve §4.3: a switch of the cache type discards
   the cache and recomputes it).
6. It ends once: "stop", "length", "abort" or "error". The last `StepOutput` says so.

Prefixes. With `CacheConfig.enable_prefix_caching` a request that is scheduled begins with the cache of what others, or it
itself before a preemption, have computed of its tokens; `HitWatch` shows the policy how much that would be. At least its
last token is computed, since logits are not cached: where all of a last block is cached, it gets a copy of it to write to
(`StepBatch.copies`). Blocks become findable at commit, when a token that was sampled over them was good, and not before.
After a step that failed nothing is findable.

Overlap. With `SchedulerConfig.overlap` a step is dispatched before the tokens of the one before it are fetched:

    host    | schedule n+1, apply | execute n+1 | result n, commit n | schedule n+2 ...
    device  ... step n ............................| step n+1 ................

The table counts tokens in flight, so that the policy sees the lengths that will be; their values are `TOKEN_ON_DEVICE`
to the next step. Four things follow:

* A request whose last allowed token is in flight takes part in no further step. Its cache is needed no more and is
  released right after dispatch. Steps run in order: whoever gets the blocks writes them in a later step.
* A stop token is seen one step late. The row that has been dispatched meanwhile is dropped at its commit, because its
  request has ended; its blocks were given back before, for the same reason as above.
* A request with structured output samples under a mask that depends on the token before. Its step is dispatched like any
  other up to the sampler; then the step before is fetched and committed, masks are filled, and the sampler follows. The
  host does this while the device computes, so that overlap is lost for the sampler alone.
* A preempted request's token in flight is delivered like any other. Until it is, the request is not shown to the
  policy: recomputing takes tokens that the host knows.

Policies. One that raises, or whose plan breaks a promise of `Plan`, has its iteration scheduled by `fcfs` instead. Plans of
policies from outside this package are checked each time (0.1 ms), those of its own by their tests.

Failures. What can be blamed on one request (logits that are not finite, a token outside the vocabulary, its output
processor, its grammar) ends that request alone. A step that raises has destroyed the pool: the executor is reset, every request
that held cache waits again, and the loop goes on; a second failure within a minute ends the engine, visibly. After a step
for which there was no memory, steps are at most half as large for a while (`SQUEEZE_S`). Accounting that contradicts itself
(`CacheIntegrityError`) ends the engine at once: better than serving one request another's memory.
"""

import collections
import dataclasses
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from apt_jax.admission import Admission, Outlook, Queue
from apt_jax.cache import NO_SEAT, CacheIntegrityError, CacheKind, HybridCache
from apt_jax.clock import Clock
from apt_jax.config import CacheConfig, SchedulerConfig
from apt_jax.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    one_line,
)
from apt_jax.executor import (
    NO_TOKEN,
    NULL_BLOCK,
    TOKEN_ON_DEVICE,
    Conversions,
    Executor,
    MaskedStepHandle,
    StepBatch,
    StepHandle,
    StepResult,
    is_out_of_memory,
)
from apt_jax.grammar import GrammarError, fill_one_by_one
from apt_jax.metrics import Distribution
from apt_jax.prefix import extend_digests, root_digest
from apt_jax.request import (
    CacheKindName,
    EngineRequest,
    FinishReason,
    RequestMetrics,
    SamplingParams,
    TokenConstraint,
)
from apt_jax.sched.check import checked_schedule
from apt_jax.sched.fcfs import FcfsPolicy
from apt_jax.sched.registry import is_bundled
from apt_jax.sched.view import (
    HIDDEN,
    KV,
    NO_KIND,
    KindSpec,
    Plan,
    Policy,
    RequestTable,
    SchedulerView,
    StepCosts,
)
from apt_jax.watch import Iteration, KindSwitch, PreemptedRow, ScheduledRow

logger = logging.getLogger(__name__)

FAILURE_WINDOW_S = 60.0
"""A second failure of a step within this time ends the engine."""

_LEAST_TOKENS = 16
"""Of a step, however little memory there is: programs are not compiled for fewer, and prompts must go on."""
SQUEEZE_S = 600.0
"""How long steps are kept small after one for which there was no memory."""

_NOT_FINITE = "numeric: the model's output for this request is not finite"
_NOTHING_LEFT = "grammar: it allows no token that min_tokens, stop tokens and logit_bias leave"

FALLBACK_LOG_S = 60.0
"""A policy that fails is in the log at most once in this time."""

STALL_LIMIT = 100
"""Iterations in a row that may schedule nothing, with requests there and nothing in flight, before the engine acts."""

_KIND_NAMES: tuple[CacheKindName, ...] = ("kv", "hidden")

_COST_ERROR_EVERY, _NEW_COST_ERROR = 8, 1 / 32
# Bounds of the distributions in `EngineStats`; tokens as vLLM has them.
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SCHEDULE_S = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 1.0)

_NO_INTS = np.zeros(0, np.int32)
_NO_TABLES = np.zeros((0, 2, 0), np.int32)

# What `_status` says about a row of the table.
_FREE = 0  # no request
_WAITING = 1  # no cache
_RUNNING = 2  # holds cache and a seat
_ENDING = 3  # the last allowed token is in flight; holds nothing any more


FillMasks = Callable[
    [Sequence[TokenConstraint], NDArray[np.int32], Sequence[int]], list[bool | Exception]
]
"""Fills ``masks[rows[i]]`` for ``constraints[i]``; see `apt_jax.grammar.fill_one_by_one`."""


class OutputProcessor(Protocol):
    """What the front end does with each token: detokenise, and look for stop strings."""

    def on_token(self, request: EngineRequest, token_id: int) -> str | None:
        """Called in commit, in order, for each token that is not itself a stop token.

        Returns:
            The stop string that this token completed, else None. Ignored before `min_tokens`. An exception ends this
            request alone, with `finish_reason="error"`.
        """
        ...


@dataclasses.dataclass(kw_only=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one token."""

    logprob: float
    """Of the sampled token."""
    top_ids: NDArray[np.int32]
    """(k,) most likely tokens, best first; k is the request's `logprobs`."""
    top_logprobs: NDArray[np.float32]
    """(k,)"""


@dataclasses.dataclass(kw_only=True, slots=True)
class StepOutput:
    """News of one request. A request has any number of these, and exactly one with a `finish_reason`, its last."""

    request: EngineRequest
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry a new token where the request asked for it."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it. Validation merges EOS into the stop tokens: it is named here too."""
    error: str | None = None
    """Why it ended with "error"."""
    num_outputs: int = 0
    """Tokens delivered so far, the new ones included."""
    metrics: RequestMetrics
    """Of the whole request; the object goes on changing until the request has ended."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine was made, gauges as of now."""

    num_waiting: int
    """Requests without cache, preempted ones among them."""
    num_running: int
    """Requests that hold cache."""
    num_ending: int
    """Requests whose last token is in flight."""
    waiting_prompt_tokens: int
    waiting_uncached_tokens: int
    """Positions that the waiting requests have to compute, prompt and what they lost by preemption, as far as they would not
    find it cached."""
    total_blocks: int
    free_blocks: int
    """Cached ones among them."""
    cached_blocks: int
    """Blocks of cached prefixes that no request holds: they are found again until they are needed."""
    blocks_by_kind: dict[str, int]
    requests_by_kind: dict[str, int]
    """Running requests by kind."""
    iterations: dict[str, int]
    """Steps run, by `Plan.iteration`."""
    num_preemptions: int
    kind_switches: dict[tuple[str, str], int]
    """By (from, to), of requests that came back after a preemption."""
    num_conversions: int
    """Times that a running request went from layer inputs to keys and values."""
    recomputed_tokens: int
    """Positions computed again after preemptions and failures."""
    prefix_cache_queries: int
    """Tokens of requests that were scheduled for the first time; 0 without prefix caching."""
    prefix_cache_hits: int
    """Those of them whose cache was there."""
    finished: dict[str, int]
    """Ended requests by reason."""
    num_refused: int
    num_doubtful: int
    prompt_tokens: int
    """Prompt tokens of requests that have delivered a token."""
    generation_tokens: int
    """Tokens delivered."""
    deferred_rows: int
    """Rows that a plan held and for which no block was there after all."""
    dropped_rows: int
    """Rows of a step in flight whose request had ended meanwhile."""
    refused_plan_rows: int
    """Rows of plans that broke the promises of `Plan`; any is a bug in the policy."""
    fallback_iterations: int
    """Iterations that `fcfs` scheduled, because the policy raised or its plan broke a promise."""
    step_failures: int
    compilations: int
    step_tokens: Distribution
    """Tokens of each step that was run."""
    schedule_s: Distribution
    """The policy's time for each decision, seconds."""
    host_p50_ms: float
    """Host work per iteration over the last 4,096: schedule, apply, building the batch, commit; neither dispatch nor
    waiting for the device. 0 before the first iteration."""
    host_p99_ms: float
    schedule_p50_ms: float
    """The policy's share of it."""
    schedule_p99_ms: float
    dispatch_p50_ms: float
    """`Executor.execute`, likewise."""
    mask_p50_ms: float
    """Filling the masks of a step, over the last 4,096 steps with any; part of the host work."""
    mask_p99_ms: float
    cost_errors: dict[str, float]
    """Mean relative error of the times that `StepCosts` predicts, over about the last 32 of every eighth step, for "prefill" (steps
    with chunks) and "decode"; empty without a cost model."""
    busy_s: float
    """Seconds that the steps took."""
    expected_wait_s: float | None
    """How long a new request with objectives would wait for others, as admission reckons; None without a cost model."""

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - self.free_blocks


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Live:
    """A live request, host side. `ended` is never undone: a step in flight checks it at commit."""

    request: EngineRequest
    row: int
    rank: int
    """Arrival order; also its name as an owner of blocks."""
    tokens: NDArray[np.int32]
    """(prompt_len + max_tokens,) prompt, then the outputs that the host knows."""
    num_known: int
    """How much of `tokens` is filled."""
    prompt_len: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    metrics: RequestMetrics
    constraint: TokenConstraint | None = None
    root: bytes
    """Where the digests of its prefixes begin."""
    digests: tuple[list[bytes], ...]
    """By kind, of the full groups of its known tokens, as far as they were needed; kinds whose groups are equally long
    share a list."""
    expected_ttft_s: float | None = None
    """As admission thought; None: it had nothing to wait for, or no objective."""
    num_found: int = 0
    """Groups that it did not compute itself, since it was last scheduled."""
    is_proven: bool = False
    """Whether a token was good since then: so are the groups that it found."""
    found_kind: int = NO_KIND
    """The kind of what it found: the one that it was last scheduled with."""
    last_kind: int = NO_KIND
    """The kind held last."""
    ended: bool = False


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Filled:
    """Groups that are full once a step in flight has ended; `firsts` and `generations` as for `HybridCache.register`."""

    index: int
    """Of the request in the step."""
    kind: int
    begin: int
    firsts: NDArray[np.int32]
    generations: NDArray[np.int64]


@dataclasses.dataclass(kw_only=True, slots=True)
class _InFlight:
    """A dispatched step. It holds the requests themselves: a row of the table may have a new request by its commit."""

    handle: StepHandle
    requests: list[_Live]
    rows: NDArray[np.int32]
    """Of the table; of a request that has not ended they are still its own."""
    samples: NDArray[np.bool_]
    position: NDArray[np.int32]
    num_tokens: int
    masked: NDArray[np.int64] | None = None
    """Rows that wait for masks before anything of the step is sampled."""
    kind: NDArray[np.int8]
    filled: list[_Filled]
    dispatched_s: float
    predicted_s: float | None
    """Its time by the cost model; None: this step is not looked at."""
    has_chunks: bool
    iteration: Iteration | None
    """What `Engine.on_iteration` is told when it has ended; None: nobody watches, or it has been told."""


class _Ring:
    """The last few thousand of a number."""

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


class Engine:
    """Serves requests with an executor and a policy; synchronous, for one thread.

    Args:
        executor: runs steps; its pool and its seats set the limits.
        policy: decides each iteration.
        clock: tells the time.
        kinds: cache kinds as data, indexed by `sched.view.KV` and `HIDDEN`.
        scheduler_config: limits and whether steps overlap.
        cache_config: block size.
        costs: iteration times for the policy; may be replaced at any time (`engine.costs = ...`).
        vocab_size: V; a sampled token outside [0, V) ends its request. None: only negative ones do.
        output_processor: the front end's hook for every token.
        fill_masks: how the masks of a step are filled; needs `vocab_size`.
        debug: check everything after every step, and let broken promises and failures of the policy raise.
        check_plans: whether each plan is held against the promises of `Plan` before anything is done, and the policy gets
            a table that it cannot write to; None: unless the policy is one of this package.
        lengths_only: the executor looks at lengths and kinds alone, as a cost model does: token ids, block tables, sampling
            parameters and histories of a `StepBatch` are left empty, and `step` delivers the last output of each request
            only. Decisions and accounting are the same, in half the time.
        timer: seconds for the host-time statistics; never enters a decision.
    """

    def __init__(
        self,
        executor: Executor,
        policy: Policy,
        clock: Clock,
        kinds: Sequence[KindSpec],
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        costs: StepCosts = StepCosts(),  # noqa: B008 - frozen
        vocab_size: int | None = None,
        output_processor: OutputProcessor | None = None,
        fill_masks: FillMasks = fill_one_by_one,
        debug: bool = False,
        check_plans: bool | None = None,
        lengths_only: bool = False,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        if executor.block_size != cache_config.block_size:
            raise ConfigError(
                f"block_size={cache_config.block_size} differs from the executor's {executor.block_size} (--block-size)"
            )
        if len(kinds) != len(CacheKind) or not any(k.offered for k in kinds):
            raise ConfigError(
                f"kinds={[k.name for k in kinds if k.offered]}: at least one cache kind must be offered (--cache)"
            )
        self.executor = executor
        self.policy = policy
        self.clock = clock
        self.kinds = tuple(kinds)
        self.costs = costs
        self.output_processor = output_processor
        self.debug = debug
        self._check_plans = not is_bundled(policy) if check_plans is None else check_plans
        self._lengths_only = lengths_only
        self.max_num_seqs = min(scheduler_config.max_num_seqs, executor.max_num_seqs)
        # Lower for a while after a step for which there was no memory.
        self._most_rows, self._most_tokens = (
            self.max_num_seqs,
            scheduler_config.max_num_batched_tokens,
        )
        self._squeezed_until_s: float | None = None
        self.table = RequestTable()
        self.cache = HybridCache(
            num_blocks=executor.num_blocks,
            block_size=executor.block_size,
            hidden_block_size=executor.hidden_block_size,
            max_num_seqs=self.max_num_seqs,
            blocks_per_group=[k.blocks_per_group for k in kinds],
            prefix_caching=cache_config.enable_prefix_caching,
        )
        self._hits = (
            self.cache.watch_hits(self.table) if cache_config.enable_prefix_caching else None
        )
        self._salt = os.urandom(16)  # digests are unlike those of any other engine
        self.last_plan: Plan | None = None
        """The last decision, as the policy made it."""
        self.last_tokens_scheduled = 0
        """Tokens of the last step that was run."""
        self.on_iteration: Callable[[Iteration], None] | None = None
        """Told of every decision, in order, when its step has ended; must be quick and must not raise."""

        self.on_plan: Callable[[StepBatch], None] | None = None
        """Called when a step has been put together and is about to be run: requests may be added, and nothing else."""

        self._config = scheduler_config
        self._vocab_size = 2**31 if vocab_size is None else vocab_size
        self._mask_words = None if vocab_size is None else -(-vocab_size // 32)
        self._fill_masks = fill_masks
        self._timer = timer
        # Cheapest first: a request that fits with a later one fits with every earlier one too.
        self._offered = sorted(
            (k for k in CacheKind if kinds[k].offered),
            key=lambda k: kinds[k].blocks_per_group / self.cache.block_sizes[k],
        )
        self._is_offered = np.array([k.offered for k in kinds])
        self._can_convert = executor.can_convert and bool(self._is_offered.all())

        capacity = self.table.capacity
        self._status = np.zeros(capacity, np.int8)
        self._seat = np.full(capacity, NO_SEAT, np.int32)
        self._in_flight = np.zeros(
            capacity, np.int8
        )  # tokens of the row that the host has not seen
        self._last_token = np.zeros(capacity, np.int32)  # the last one that it has seen
        self._computed_once = np.zeros(
            capacity, np.int32
        )  # positions computed before the cache was last lost
        self._pinned = np.full(
            capacity, NO_KIND, np.int8
        )  # the only kind that can hold the row's request
        self._num_filled = np.zeros(
            capacity, np.int32
        )  # groups found, registered, or full once a step in flight has ended
        self._by_row: list[_Live | None] = [None] * capacity
        self._by_id: dict[str, _Live] = {}
        self._next_rank = 0
        self._order: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
        self._place = np.zeros(capacity, np.int32)  # scratch of `_is_plain`

        self._pending: _InFlight | None = None
        self._outputs: list[StepOutput] = []
        self._last_failure_s: float | None = None
        self._dead: str | None = None
        self._stalled = 0
        self._fallback = FcfsPolicy()
        self._fallback_logged_s: float | None = None
        self._policy_is_stuck = False
        self._noted: Iteration | None = (
            None  # the decision that is being carried out, if anybody watches
        )
        self._preempted_between: list[PreemptedRow] = []  # by no decision; told with the next
        self._num_decisions = 0
        self._last_result_s = 0.0

        self._iterations: collections.Counter[str] = collections.Counter()
        self._finished: collections.Counter[str] = collections.Counter()
        self._kind_switches = np.zeros((len(kinds), len(kinds)), np.int64)
        self._num_conversions = 0
        self._num_preemptions = 0
        self._recomputed_tokens = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0
        self._num_refused = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._deferred_rows = 0
        self._dropped_rows = 0
        self._refused_plan_rows = 0
        self._fallback_iterations = 0
        self._step_failures = 0
        self._host_s = _Ring()
        self._schedule_s = _Ring()
        self._step_tokens = Distribution(_STEP_TOKENS)
        self._schedule_times_s = Distribution(_SCHEDULE_S)
        self._dispatch_s = _Ring()
        self._mask_s = _Ring()
        self._cost_errors: dict[str, float] = {}
        self._busy_s = 0.0
        # Of several batches: the requests of one may end together.
        self._finish_times_s: collections.deque[float] = collections.deque(
            maxlen=4 * scheduler_config.max_num_seqs
        )
        self.admission = Admission(scheduler_config)
        self._tenants: dict[str | None, int] = {None: 0}
        """Numbers of the tenants that there have been; bounded by the keys."""

    # --- requests --------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Put a request among the waiting ones. A refused one leaves no trace.

        Raises:
            DuplicateRequestError: the id is alive.
            InvalidRequestError: prompt and `max_tokens` cannot fit the pool with any kind on offer.
            QueueFullError: the waiting queue is at one of its limits.
            EngineDeadError: the engine has ended.
        """
        self._raise_if_dead()
        try:
            pinned, expected_ttft_s = self._check_admission(request)
        except (InvalidRequestError, QueueFullError):
            self._num_refused += 1
            raise
        prompt_len = int(request.prompt_token_ids.size)
        params = request.params
        constraint = None if request.grammar is None else request.grammar.start()
        row = self.table.add(
            arrival_s=request.arrival_s,
            rank=self._next_rank,
            prompt_len=prompt_len,
            max_tokens=params.max_tokens,
            slo_ttft_s=request.slo.ttft_s,
            slo_tbt_s=request.slo.tbt_s,
            best_effort=request.slo_class == "be",
            tenant=self._tenants.setdefault(request.tenant, len(self._tenants)),
        )
        if row >= self._status.size:
            self._grow_rows()
        tokens = np.empty(prompt_len + params.max_tokens, np.int32)
        tokens[:prompt_len] = request.prompt_token_ids
        live = _Live(
            request=request,
            row=row,
            rank=self._next_rank,
            tokens=tokens,
            num_known=prompt_len,
            prompt_len=prompt_len,
            params=params,
            stop_token_ids=frozenset(params.stop_token_ids),
            metrics=RequestMetrics(arrival_s=request.arrival_s, slo=request.slo),
            constraint=constraint,
            root=self._root_of(request),
            expected_ttft_s=expected_ttft_s,
            digests=self._no_digests(),
        )
        self._next_rank += 1
        self._by_row[row] = live
        self._by_id[request.request_id] = live
        self._status[row] = _WAITING
        self._seat[row] = NO_SEAT
        self._in_flight[row] = 0
        self._last_token[row] = tokens[prompt_len - 1]
        self._computed_once[row] = 0
        self._pinned[row] = pinned
        self._num_filled[row] = 0
        self._order = None
        self._await_hits(live)

    def abort(self, request_id: str) -> bool:
        """End a live request now; its blocks are free at once, its terminal output comes with the next `step`.

        Returns:
            False when no live request has this id (it may have ended already).
        """
        live = self._by_id.get(request_id)
        if live is None:
            return False
        self._finish(live, "abort")
        return True

    def preempt(self, request_id: str) -> bool:
        """Take a running request's cache from it, as a policy could. For operators and tests.

        Returns:
            False when no live request with this id holds cache.
        """
        live = self._by_id.get(request_id)
        if live is None or self._status[live.row] != _RUNNING:
            return False
        self._preempt(live.row)
        return True

    @property
    def has_work(self) -> bool:
        """Whether another `step` has anything to do."""
        return bool(self._by_id or self._outputs) or self._pending is not None

    @property
    def num_generated(self) -> int:
        """Tokens delivered since the engine was made."""
        return self._generation_tokens

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._by_id)

    @property
    def dead_reason(self) -> str | None:
        """Why the engine ended; None while it lives."""
        return self._dead

    # --- the loop --------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """One iteration. Returns what there is to deliver: with overlap the tokens of the iteration before.

        Raises:
            EngineDeadError: the engine ended in an earlier step (which delivered an error to every request).
        """
        self._raise_if_dead()
        try:
            self._step()
            if self.debug:
                self.check_integrity()
        except Exception as error:
            if self.debug:
                raise
            # Not a step that failed (see `_recover`) but our own accounting or code: what it says is not to be trusted.
            logger.critical("the engine ends: %s", error, exc_info=True)
            self._die(f"internal error: {type(error).__name__}")
        outputs, self._outputs = self._outputs, []
        return outputs

    def _step(self) -> None:
        started = self._timer()
        plan = self._schedule()
        self._noted = noted = self._note(plan, self._timer() - started)
        batch, rows, lives = self._apply(plan)
        if noted is not None:
            self._note_applied(noted, batch, rows)
        if self.on_plan is not None and batch is not None:
            self.on_plan(batch)
        prepared = self._timer()
        dispatched = self._execute(plan, batch, rows, lives) if batch is not None else None
        launched = self._timer()
        waited = 0.0
        if self._config.overlap:
            oldest, self._pending = self._pending, dispatched
        else:
            oldest = self._sample_masked(dispatched)
        if oldest is not None:
            started_waiting = self._timer()
            result = self._fetch(oldest)
            waited = self._timer() - started_waiting
            if result is not None:
                self._commit(oldest, result)
        self._pending = self._sample_masked(self._pending)
        if noted is not None and batch is None and self.on_iteration is not None:
            self.on_iteration(noted)
        self._noted = None
        if batch is None and oldest is None:
            self._note_stall()
        elif batch is not None:
            self._stalled = 0
            self._policy_is_stuck = False
        if batch is not None or oldest is not None:
            self._host_s.add(self._timer() - started - (launched - prepared) - waited)
        if batch is not None:
            self._dispatch_s.add(launched - prepared)

    # --- 1. schedule -----------------------------------------------------------------------------------------------

    def view(self) -> SchedulerView:
        """What the policy is shown."""
        if self._order is None:
            rank = self.table.rank
            waiting = np.flatnonzero(self._status == _WAITING).astype(np.int32)
            running = np.flatnonzero(self._status == _RUNNING).astype(np.int32)
            waiting, running = (
                waiting[np.argsort(rank[waiting])],
                running[np.argsort(rank[running])],
            )
            waiting.flags.writeable = running.flags.writeable = False
            self._order = waiting, running
        waiting, running = self._order
        if self._pending is not None:
            unseen = self._in_flight[waiting] > 0
            if unseen.any():
                # Preempted from outside after its last dispatch: the host must see the token first.
                waiting = waiting[~unseen]
        shared_blocks = 0
        if self._hits is not None:
            private = int(self.table.num_blocks[running].sum())
            shared_blocks = self.cache.pool.num_blocks - self.cache.num_free - private
        return SchedulerView(
            now_s=self.clock.now_s(),
            table=self.table,
            waiting=waiting,
            running=running,
            free_blocks=self.cache.num_free,
            total_blocks=self.cache.pool.num_blocks,
            shared_blocks=shared_blocks,
            block_size=self.cache.block_sizes[CacheKind.KV],
            hidden_block_size=self.cache.block_sizes[CacheKind.HIDDEN],
            kinds=self.kinds,
            max_num_seqs=self._most_rows,
            max_num_batched_tokens=self._most_tokens,
            costs=self.costs,
            can_convert=self._can_convert,
        )

    def _schedule(self) -> Plan:
        started = self._timer()
        if self._squeezed_until_s is not None and self.clock.now_s() >= self._squeezed_until_s:
            self._unsqueeze()
        view = self.view()
        if not view.waiting.size and not view.running.size:
            return Plan.idle()
        try:
            plan = self._decide(view)
        except (Exception, SystemExit) as error:  # a library may exit
            if self.debug:
                raise
            try:
                plan = self._fall_back(view, error)
            except Exception as worse:
                logger.error("the policy fcfs failed", exc_info=worse)
                self._is_fatal("the policy failed")
                return Plan.idle()
        self.last_plan = plan
        elapsed = self._timer() - started
        self._schedule_s.add(elapsed)
        self._schedule_times_s.add(elapsed)
        return plan

    def _decide(self, view: SchedulerView) -> Plan:
        if self._policy_is_stuck:
            raise RuntimeError(f"it scheduled nothing in {STALL_LIMIT} iterations")
        if self._check_plans:
            return checked_schedule(self.policy, view)
        return self.policy.schedule(view)

    def _fall_back(self, view: SchedulerView, error: BaseException) -> Plan:
        """The policy has raised, or made a plan that cannot be used: `fcfs`, which keeps no state, decides this iteration."""
        plan = self._fallback.schedule(view)
        self._fallback_iterations += 1
        now_s, last_s = (
            self._timer(),
            self._fallback_logged_s,
        )  # not simulated time: somebody reads it
        if last_s is None or now_s - last_s >= FALLBACK_LOG_S:
            self._fallback_logged_s = now_s
            logger.error(
                "policy %s failed, fcfs schedules instead (%d iterations so far): %s: %s",
                self.policy.name,
                self._fallback_iterations,
                type(error).__name__,
                one_line(str(error))[:400],
                exc_info=error,
            )
        return plan

    # --- 2. apply --------------------------------------------------------------------------------------------------

    def _apply(self, plan: Plan) -> tuple[StepBatch | None, NDArray[np.int32], list[_Live]]:
        """Preempt, then reserve in order. Returns the batch (None: nothing to run), its rows of the table, their requests."""
        if plan.preempt.size:
            for row in plan.preempt.tolist():
                if 0 <= row < self._status.size and self._status[row] == _RUNNING:
                    self._preempt(row)
                else:
                    self._broken_promise(1, f"row {row} holds no cache to preempt")
        if not plan.rows.size:
            return None, plan.rows, []
        rows, num_tokens, kind = self._checked_rows(plan)
        if not rows.size:
            return None, rows, []

        seats = self._seat[rows]
        found, sources = self._attach(rows, seats, kind)
        convert = self._conversions(plan, rows)
        inputs: dict[int, NDArray[np.int32]] = {}
        if not convert.any():
            ok = self._reserve(rows, seats, num_tokens, kind, found)
        else:  # after the others: what they give back is for the next step
            ok, others = np.zeros(rows.size, np.bool_), np.flatnonzero(~convert)
            their_seats = seats[others]
            ok[others] = self._reserve(
                rows[others], their_seats, num_tokens[others], kind[others], found[others]
            )
            seats[others] = their_seats
            inputs, ok[convert] = self._convert(rows[convert], num_tokens[convert])
            kind = np.where(np.isin(rows, list(inputs)), np.int8(KV), kind)
        if not ok.all():
            self._deferred_rows += int(np.count_nonzero(~ok))
            if self._noted is not None:
                self._noted.deferred = tuple(self._ids(rows[~ok]))
            rows, num_tokens, kind, seats = rows[ok], num_tokens[ok], kind[ok], seats[ok]
            found = found[ok]
            if not rows.size:
                self._sync_charges()
                return None, rows, []
        for i in np.flatnonzero(self._status[rows] == _WAITING).tolist():
            self._start(int(rows[i]), int(seats[i]), int(kind[i]), int(found[i]))
        lives = self._lives(rows)
        batch = self._build_batch(rows, num_tokens, kind, seats, lives)
        self.cache.check_writable(seats, batch.start)
        sources = {row: sources[row] for row in rows.tolist() if row in sources} if sources else {}
        if sources:
            batch = dataclasses.replace(batch, copies=self._copies(sources))
        if inputs:
            batch = dataclasses.replace(batch, conversions=_conversions_of(rows, inputs))
        return batch, rows, lives

    def _conversions(self, plan: Plan, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """(n,) which rows of a step, all of them checked, a plan may convert."""
        if not plan.convert.size:
            return np.zeros(rows.size, np.bool_)
        table = self.table
        wanted = np.isin(rows, plan.convert)
        fits = self._pinned[rows] != HIDDEN
        may = wanted & (table.kind[rows] == HIDDEN) & fits & self._can_convert
        if may.sum() != plan.convert.size:
            bad = np.setdiff1d(plan.convert, rows[may])
            self._broken_promise(bad.size, f"rows {bad.tolist()} cannot be converted")
        return may

    def _convert(
        self, rows: NDArray[np.int32], num_tokens: NDArray[np.int32]
    ) -> tuple[dict[int, NDArray[np.int32]], list[bool]]:
        """Running rows change from layer inputs to keys and values, as far as there are blocks.

        Returns:
            By row the blocks of its layer inputs, of those that change; and of each row, whether it can run.
        """
        table = self.table
        given_back, ok = self.cache.convert_rows(
            table.rank[rows].tolist(), (table.num_cached[rows] + num_tokens).tolist()
        )
        inputs = {}
        for row, blocks in zip(rows.tolist(), given_back, strict=True):
            if blocks is None:
                continue
            inputs[row] = blocks
            live = self._live(row)
            live.last_kind = KV
            live.metrics.cache_kind = _KIND_NAMES[KV]
            live.metrics.num_conversions += 1
            table.kind[row] = KV
            self._num_filled[row] = 0
            self._num_conversions += 1
            if self._noted is not None:
                self._noted.converted.append(live.request.request_id)
        return inputs, ok

    def _reserve(
        self,
        rows: NDArray[np.int32],
        seats: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kind: NDArray[np.int8],
        found: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        """Blocks for rows, in order; `seats` changes in place where a row takes one. (n,) False for those that must wait."""
        ok = self.cache.reserve_rows(
            self.table.rank[rows], seats, self.table.num_cached[rows] + found + num_tokens, kind
        )
        return ok if ok.all() else self._retry(rows, seats, num_tokens, kind, found, ok)

    def _retry(
        self,
        rows: NDArray[np.int32],
        seats: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kind: NDArray[np.int8],
        found: NDArray[np.int32],
        ok: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Not all rows got their blocks. Those that must wait give back what they have found, which may help others."""
        cache, owners = self.cache, self.table.rank[rows]
        gave_back = False
        for i in np.flatnonzero(~ok & (found > 0)).tolist():
            if cache.seat_of(int(owners[i])) != NO_SEAT:
                cache.release(int(owners[i]))
                seats[i] = NO_SEAT
                gave_back = True
        again = np.flatnonzero(~ok & (found == 0))
        if gave_back and again.size:
            their_seats = seats[again]
            ok[again] = cache.reserve_rows(
                owners[again],
                their_seats,
                self.table.num_cached[rows[again]] + num_tokens[again],
                kind[again],
            )
            seats[again] = their_seats
        return ok

    def _attach(
        self, rows: NDArray[np.int32], seats: NDArray[np.int32], kind: NDArray[np.int8]
    ) -> tuple[NDArray[np.int32], dict[int, NDArray[np.int32]]]:
        """Requests that begin take what is cached of them, all of them before anybody is given new blocks.

        Args:
            rows, kind: of the plan.
            seats: changed in place where a row takes one.

        Returns:
            (n,) positions that need no computing, and by row the blocks (first, second) of groups to be copied.
        """
        found = np.zeros(rows.size, np.int32)
        sources: dict[int, NDArray[np.int32]] = {}
        hits = self._hits
        if hits is None:
            return found, sources
        found += self.table.hit_tokens[rows, kind]  # 0 where they run
        for i in np.flatnonzero(found).tolist():
            row, owner = int(rows[i]), int(self.table.rank[rows[i]])
            num_groups, rest = divmod(int(found[i]), self.cache.block_sizes[kind[i]])
            node = hits.node(row, int(kind[i]))
            if num_groups and self.cache.attach(owner, node.path(num_groups), int(kind[i])):
                seats[i] = self.cache.seat_of(owner)
            if rest:
                sources[row] = self.cache.source_of(node)
        return found, sources

    def _copies(self, sources: dict[int, NDArray[np.int32]]) -> NDArray[np.int32]:
        """(m, 2) source and destination blocks: the last group of each row is a copy."""
        pairs = []
        for row, source in sources.items():
            at = int(self.table.num_cached[row]) // self.cache.block_sizes[self.table.kind[row]]
            pairs.append(np.stack([source, self.cache.tables[self._seat[row], :, at]], axis=1))
        copies = np.concatenate(pairs)
        return copies[copies[:, 1] != NULL_BLOCK]

    def _checked_rows(
        self, plan: Plan
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int8]]:
        """The rows of a plan that keep its promises; a policy's mistake must not reach the device."""
        rows, num_tokens, kind = (
            np.asarray(plan.rows, np.int32),
            np.asarray(plan.num_tokens, np.int32),
            np.asarray(plan.kind, np.int8),
        )
        if self._is_plain(rows, num_tokens, kind, plan.preempt):
            return rows, num_tokens, kind
        table = self.table
        known = (rows >= 0) & (rows < self._status.size) & (kind >= 0) & (kind < len(self.kinds))
        if not known.all():
            self._broken_promise(int(np.count_nonzero(~known)), "unknown rows or kinds")
            rows, num_tokens, kind = rows[known], num_tokens[known], kind[known]
        status = self._status[rows]
        held = table.kind[rows]
        fresh = status == _WAITING
        pinned = self._pinned[rows]
        left = table.num_tokens[rows] - table.num_cached[rows]
        moved = fresh & (pinned != NO_KIND) & (pinned != kind)
        if moved.any():
            kind = np.where(moved, pinned, kind)
            most = left - table.hit_tokens[rows, kind]
            num_tokens = np.where(moved, np.minimum(num_tokens, most), num_tokens)
        ok = (fresh & (self._in_flight[rows] == 0) & self._is_offered[kind]) | (
            (status == _RUNNING) & (held == kind)
        )
        ok &= (num_tokens >= 1) & (num_tokens <= left - table.hit_tokens[rows, kind])
        if plan.preempt.size:
            ok &= ~np.isin(rows, plan.preempt)
        ok &= np.cumsum(num_tokens) <= self._most_tokens
        if np.unique(rows).size != rows.size:
            first = np.zeros(rows.size, np.bool_)
            first[np.unique(rows, return_index=True)[1]] = True
            ok &= first
        if not ok.all():
            bad = np.flatnonzero(~ok)
            self._broken_promise(
                bad.size,
                f"rows {rows[bad].tolist()} with {num_tokens[bad].tolist()} tokens cannot run",
            )
            rows, num_tokens, kind = rows[ok], num_tokens[ok], kind[ok]
        return rows, num_tokens, kind

    def _is_plain(
        self,
        rows: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kind: NDArray[np.int8],
        preempt: NDArray[np.int32],
    ) -> bool:
        """Whether a plan runs nobody but requests that run, and keeps its promises: so do most, and this is quicker to see."""
        if rows.min() < 0 or rows.max() >= self._status.size or preempt.size:
            return False
        table, n = self.table, rows.size
        order = np.arange(n, dtype=np.int32)
        self._place[rows] = order  # of a row that is there twice the last place stays
        left = table.num_tokens.take(rows) - table.num_cached.take(rows)
        ok = self._status.take(rows) == _RUNNING
        ok &= self._place.take(rows) == order
        ok &= table.kind.take(rows) == kind
        ok &= num_tokens <= left
        within = num_tokens.min() >= 1 and num_tokens.sum() <= self._most_tokens
        return bool(ok.all() and within)

    def _broken_promise(self, num_rows: int, message: str) -> None:
        if self.debug:
            raise AssertionError(f"policy {self.policy.name}: {message}")
        if not self._refused_plan_rows:
            logger.error("policy %s broke a promise: %s (reported once)", self.policy.name, message)
        self._refused_plan_rows += num_rows

    def _start(self, row: int, seat: int, kind: int, num_found: int) -> None:
        """A waiting request has got its first blocks, and the cache of `num_found` positions."""
        live = self._live(row)
        if self._hits is not None:
            self._hits.end(row)
            live.num_found = num_found // self.cache.block_sizes[kind]
            live.found_kind = kind
            live.is_proven = not num_found
            self.table.num_cached[row] = num_found
            self._num_filled[row] = live.num_found
            if live.metrics.first_scheduled_s is None:
                live.metrics.num_cached_tokens = num_found
                self._prefix_cache_queries += live.prompt_len
                self._prefix_cache_hits += num_found
        self._status[row] = _RUNNING
        self._seat[row] = seat
        self._order = None
        self.table.kind[row] = kind
        if live.last_kind not in (NO_KIND, kind):
            self._kind_switches[live.last_kind, kind] += 1
            if self._noted is not None:
                self._noted.switched.append(
                    KindSwitch(
                        request_id=live.request.request_id,
                        old=_KIND_NAMES[live.last_kind],
                        new=_KIND_NAMES[kind],
                    )
                )
            self.table.num_kind_switches[row] += 1
            live.metrics.num_kind_switches += 1
        live.last_kind = kind
        live.metrics.cache_kind = _KIND_NAMES[kind]
        if live.metrics.first_scheduled_s is None:
            live.metrics.first_scheduled_s = self.clock.now_s()

    def _build_batch(
        self,
        rows: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kind: NDArray[np.int8],
        seats: NDArray[np.int32],
        lives: list[_Live],
    ) -> StepBatch:
        table = self.table
        start = table.num_cached.take(rows)
        total = table.num_tokens.take(rows)
        samples = start + num_tokens == total
        if self._lengths_only:
            return StepBatch(
                seats=seats,
                num_tokens=num_tokens,
                start=start,
                kind=kind,
                token_ids=_NO_INTS,
                block_tables=_NO_TABLES,
                samples=samples,
                position=table.num_outputs.take(rows),
                params=(),
                history=(),
                prompt_len=_NO_INTS,
                masked=self._masked_rows(lives, samples),
            )
        single = samples & (num_tokens == 1)
        in_flight = self._in_flight[rows] > 0
        if not (single | ~in_flight).all():
            raise CacheIntegrityError(
                "a token that the host has not seen would have to be recomputed"
            )
        last = np.where(in_flight, np.int32(TOKEN_ON_DEVICE), self._last_token[rows])
        if single.all():
            token_ids = last
        else:
            ends = np.cumsum(num_tokens)
            token_ids = np.empty(int(ends[-1]), np.int32)
            token_ids[ends[single] - 1] = last[single]
            for i in np.flatnonzero(~single).tolist():
                begin, n = int(start[i]), int(num_tokens[i])
                token_ids[ends[i] - n : ends[i]] = lives[i].tokens[begin : begin + n]
        return StepBatch(
            seats=seats,
            num_tokens=num_tokens,
            start=start,
            kind=kind,
            token_ids=token_ids,
            block_tables=self.cache.block_tables(seats),
            samples=samples,
            position=table.num_outputs[rows],
            params=[live.params for live in lives],
            history=[live.tokens[: live.num_known] for live in lives],
            prompt_len=table.prompt_len[rows],
            masked=self._masked_rows(lives, samples),
        )

    @staticmethod
    def _masked_rows(lives: list[_Live], samples: NDArray[np.bool_]) -> NDArray[np.int64] | None:
        rows = [i for i, live in enumerate(lives) if live.constraint is not None and samples[i]]
        return np.array(rows, np.int64) if rows else None

    # --- 3. execute ------------------------------------------------------------------------------------------------

    def _execute(
        self, plan: Plan, batch: StepBatch, rows: NDArray[np.int32], lives: list[_Live]
    ) -> _InFlight | None:
        dispatched_s = self._timer()
        try:
            handle = self.executor.execute(batch)
        except Exception as error:
            if self.debug and isinstance(error, AssertionError):
                raise
            # The step before it was dispatched in good order: what it sampled is good.
            oldest, self._pending = self._pending, None
            result = self._fetch(oldest) if oldest is not None else None
            if oldest is not None and result is not None:
                self._commit(oldest, result)
            if oldest is None or result is not None:  # else `_fetch` has recovered already
                num_tokens = int(batch.num_tokens.sum())
                self._recover(error, "a step failed", self._noted, num_tokens)
            if self._noted is not None:
                self._tell(self._noted, None)
            return None
        self._iterations[plan.iteration] += 1
        self.last_tokens_scheduled = int(batch.num_tokens.sum())
        self._step_tokens.add(self.last_tokens_scheduled)
        filled = self._book(batch, rows, lives)
        return _InFlight(
            handle=handle,
            requests=lives,
            rows=rows,
            samples=batch.samples,
            position=batch.position,
            num_tokens=self.last_tokens_scheduled,
            masked=batch.masked,
            kind=batch.kind,
            filled=filled,
            dispatched_s=dispatched_s,
            predicted_s=self._predicted_s(plan, batch),
            has_chunks=plan.iteration != "decode",
            iteration=self._noted,
        )

    def _sample_masked(self, step: _InFlight | None) -> _InFlight | None:
        """Fill the masks that a dispatched step waits for and dispatch its sampler; every token before is known.

        Rows whose request has ended, now or before, may sample anything: it is dropped at commit.

        Returns:
            The step, None where it failed.
        """
        if step is None or step.masked is None:
            return step
        started = self._timer()
        masked = step.masked.tolist()
        lives = [step.requests[i] for i in masked]
        assert self._mask_words is not None
        masks = np.full((len(lives), self._mask_words), -1, np.int32)
        rows = [j for j, live in enumerate(lives) if not live.ended]
        constraints = [c for j in rows if (c := lives[j].constraint) is not None]
        try:
            outcomes = self._fill_masks(constraints, masks, rows)
        except Exception as error:  # of these requests: the others go on
            outcomes = [error] * len(rows)
        for j, outcome in zip(rows, outcomes, strict=True):
            if outcome is True:
                continue
            masks[j] = -1
            if outcome is False:
                self._finish(lives[j], "stop")
            else:
                self._finish(lives[j], "error", error=_grammar_failed(outcome))
        self._mask_s.add(self._timer() - started)
        step.masked = None
        try:
            cast("MaskedStepHandle", step.handle).sample(masks)
        except Exception as error:
            if self.debug and isinstance(error, AssertionError):
                raise
            self._recover(error, "a step failed", step.iteration, step.num_tokens)
            self._tell_step(step, None)
            return None
        return step

    def _book(self, batch: StepBatch, rows: NDArray[np.int32], lives: list[_Live]) -> list[_Filled]:
        """Count what a dispatched step will have done; returns the groups that it will have filled."""
        table = self.table
        end = batch.start + batch.num_tokens
        table.num_cached[rows] = end
        if self.cache.charges_changed:
            self._sync_charges()
        elif self._hits is None:
            table.num_blocks[rows] = self.cache.num_blocks_of(batch.seats)
        else:
            table.num_blocks[rows] = self.cache.num_private_blocks_of(batch.seats)
            table.num_shared[rows] = self.cache.num_blocks_of(batch.seats) - table.num_blocks[rows]
        filled = self._filled(batch, rows, end) if self._hits is not None else []
        again = np.minimum(end, self._computed_once.take(rows)) - batch.start
        for i in np.flatnonzero(again > 0).tolist() if again.max() > 0 else ():
            lives[i].metrics.recomputed_tokens += int(again[i])
            self._recomputed_tokens += int(again[i])
        sampling = rows if batch.samples.all() else rows[batch.samples]
        num_tokens = table.num_tokens.take(sampling) + 1
        table.num_tokens[sampling] = num_tokens
        table.num_outputs[sampling] += 1
        table.tokens_since_preemption[sampling] += 1
        self._in_flight[sampling] += 1
        last = sampling[num_tokens >= table.max_tokens_total.take(sampling)]
        for row in last.tolist():
            # Its last token is in flight, no later step will read its cache, and steps run in order.
            self._release(row, _ENDING)
        return filled

    def _filled(
        self, batch: StepBatch, rows: NDArray[np.int32], end: NDArray[np.int32]
    ) -> list[_Filled]:
        """Full groups whose fate a step decides. A chunk that samples nothing decides nothing: it may not be finite."""
        groups = end // np.array(self.cache.block_sizes, np.int32)[batch.kind]
        more = batch.samples & (groups > self._num_filled[rows])
        filled = []
        for i in np.flatnonzero(more).tolist():
            begin = int(self._num_filled[rows[i]])
            firsts, generations = self.cache.expect(int(batch.seats[i]), begin, int(groups[i]))
            filled.append(
                _Filled(
                    index=i,
                    kind=int(batch.kind[i]),
                    begin=begin,
                    firsts=firsts,
                    generations=generations,
                )
            )
        self._num_filled[rows[more]] = groups[more]
        return filled

    def _sync_charges(self) -> None:
        """Tell the table what each running request is charged with, after others came to share it or ceased to."""
        rows = np.flatnonzero(self._status == _RUNNING)
        seats = self._seat[rows]
        private = self.cache.num_private_blocks_of(seats)
        self.table.num_blocks[rows] = private
        self.table.num_shared[rows] = self.cache.num_blocks_of(seats) - private
        self.cache.charges_changed = False

    def _fetch(self, step: _InFlight) -> StepResult | None:
        """Wait for a step. None: it failed, and everything has been put back to where it can go on."""
        try:
            result = step.handle.result()
            shape = (len(step.requests),)
            if result.token_ids.shape != shape or result.finite.shape != shape:
                raise RuntimeError(
                    f"the step returned {result.token_ids.shape} tokens for {shape} rows"
                )
        except Exception as error:
            if self.debug and isinstance(error, AssertionError):
                raise
            pending, self._pending = self._pending, None
            self._recover(error, "a step failed", step.iteration, step.num_tokens)
            self._tell_step(step, None)
            if pending is not None:  # computed on the same pool, after the step that failed
                self._tell_step(pending, None)
            return None
        now_s = self._timer()
        step_s = now_s - max(step.dispatched_s, self._last_result_s)
        self._tell_step(step, step_s)
        self._last_result_s = now_s
        self._busy_s += step_s
        if step.predicted_s is not None and step_s > 0:
            phase = "prefill" if step.has_chunks else "decode"
            error = abs(step.predicted_s - step_s) / step_s
            before = self._cost_errors.get(phase, error)
            self._cost_errors[phase] = before + _NEW_COST_ERROR * (error - before)
        return result

    def _predicted_s(self, plan: Plan, batch: StepBatch) -> float | None:
        """What the cost model says of every eighth step of a type, where there is one: it takes some hundredths of a millisecond."""
        if self._iterations[plan.iteration] % _COST_ERROR_EVERY:
            return None
        step_s = self.costs.step_s(batch.num_tokens, batch.start, batch.kind)
        return step_s + self.costs.conversion_s(batch.num_converted_tokens) or None

    # --- 4. commit -------------------------------------------------------------------------------------------------

    def _commit(self, step: _InFlight, result: StepResult) -> None:
        """Deliver the tokens of a step and end the requests that are done."""
        lives = step.requests
        if self._hits is not None:
            self._judge(step, result)
        sampling = np.flatnonzero(step.samples)
        picks = [i for i in sampling.tolist() if not lives[i].ended]
        self._dropped_rows += sampling.size - len(picks)
        if not picks:
            return
        now_s = self.clock.now_s()
        rows, sampled = step.rows, result.token_ids
        if len(picks) < rows.size:
            rows, sampled = rows[picks], sampled[picks]
        self._in_flight[rows] -= 1
        self._last_token[rows] = sampled
        self.table.note_tokens(rows, now_s)
        token_ids, finite, position = (
            result.token_ids.tolist(),
            result.finite.tolist(),
            step.position.tolist(),
        )
        for i in picks:
            live, token = lives[i], token_ids[i]
            if live.ended:  # by the output processor of an earlier row
                self._dropped_rows += 1
            elif not finite[i]:
                self._finish(live, "error", error=_NOT_FINITE)
            elif token == NO_TOKEN and live.constraint is not None:
                self._finish(live, "error", error=_NOTHING_LEFT)
            elif not 0 <= token < self._vocab_size:
                self._finish(
                    live, "error", error="numeric: a token outside the vocabulary was sampled"
                )
            else:
                if position[i] != live.num_known - live.prompt_len:
                    raise CacheIntegrityError(
                        f"output token {position[i]} arrives after {live.num_known - live.prompt_len}"
                    )
                asked = live.params.logprobs is not None
                logprobs = self._logprobs(live, result, i) if asked else None
                self._deliver(live, token, now_s, logprobs)
                if self._hits is not None and not live.ended and self._status[live.row] == _WAITING:
                    self._await_hits(live)  # it was preempted: now its tokens are known

    def _judge(self, step: _InFlight, result: StepResult) -> None:
        """Register the groups that a step has filled where its token is good; forget those of a request where it is not."""
        good = result.finite & (result.token_ids >= 0) & (result.token_ids < self._vocab_size)
        for filled in step.filled:
            live = step.requests[filled.index]
            if live.ended or not good[filled.index]:
                self.cache.discard(filled.firsts, filled.generations)
                continue
            end = filled.begin + filled.firsts.size
            self.cache.register(
                live.rank,
                filled.kind,
                self._digests(live, filled.kind, end),
                filled.begin,
                filled.firsts,
                filled.generations,
            )
        # A mask that leaves no token says nothing about the cache.
        bad = step.samples & ~good & ~(result.finite & (result.token_ids == NO_TOKEN))
        for i in np.flatnonzero(step.samples).tolist() if bad.any() else ():
            live = step.requests[i]
            if bad[i] and not live.ended:
                # What it found is beyond doubt only if it has had a good token over it.
                begin = live.num_found if live.is_proven else 0
                kind, found_kind = int(step.kind[i]), live.found_kind
                self.cache.drop_prefix(found_kind, live.digests[found_kind], begin)
                if kind != found_kind:  # it was converted, and has computed all of these
                    self.cache.drop_prefix(kind, live.digests[kind], 0)
        for i in np.flatnonzero(step.samples & good).tolist():
            step.requests[i].is_proven = True
        if self.cache.charges_changed:
            self._sync_charges()

    def _logprobs(self, live: _Live, result: StepResult, i: int) -> list[TokenLogprobs] | None:
        k = live.params.logprobs
        if k is None or result.logprob is None:
            return None
        no_ids, no_values = np.zeros(0, np.int32), np.zeros(0, np.float32)
        top_ids = no_ids if result.top_ids is None else result.top_ids[i, :k]
        top_logprobs = no_values if result.top_logprobs is None else result.top_logprobs[i, :k]
        return [
            TokenLogprobs(
                logprob=float(result.logprob[i]), top_ids=top_ids, top_logprobs=top_logprobs
            )
        ]

    def _deliver(
        self, live: _Live, token: int, now_s: float, logprobs: list[TokenLogprobs] | None
    ) -> None:
        """Append one token and find out whether it is the last: error before stop token, stop string, grammar, length."""
        params, known = live.params, live.num_known
        count = known - live.prompt_len + 1
        reason: FinishReason | None = None
        stop: int | str | None = None
        error: str | None = None
        if token in live.stop_token_ids and count >= params.min_tokens:
            reason, stop = "stop", token
        elif self.output_processor is not None or live.constraint is not None:
            reason, stop, error = self._process(live, token, count >= params.min_tokens)
            if live.ended:  # the processor has aborted its own request: the terminal output is out
                self._dropped_rows += 1
                return
        if reason is None and count >= params.max_tokens:
            reason, stop = "length", None
        live.tokens[known] = token
        live.num_known = known + 1
        live.metrics.token_times_s.append(now_s)
        if live.expected_ttft_s is not None:
            self.admission.learn(live.expected_ttft_s, now_s - live.metrics.arrival_s, now_s)
            live.expected_ttft_s = None
        self._generation_tokens += 1
        if count == 1:
            self._prompt_tokens += live.prompt_len
        if reason is None:
            if self._lengths_only:
                return
            self._outputs.append(
                StepOutput(
                    request=live.request,
                    new_token_ids=[token],
                    logprobs=logprobs,
                    num_outputs=count,
                    metrics=live.metrics,
                )
            )
        else:
            self._finish(
                live,
                reason,
                stop_reason=stop,
                error=error,
                new_token_ids=[token],
                logprobs=logprobs,
            )

    def _process(
        self, live: _Live, token: int, may_stop: bool
    ) -> tuple[FinishReason | None, str | None, str | None]:
        """What output processor and grammar say to a token: reason to end, stop string and error."""
        stop: str | None = None
        if self.output_processor is not None:
            try:
                stop = self.output_processor.on_token(live.request, token)
            except Exception as caught:
                name = type(caught).__name__
                logger.error("the output processor failed for one request: %s", name)
                return "error", None, f"output processing failed: {name}"
            if live.ended:
                return None, None, None
        complete = False
        if live.constraint is not None:
            try:
                live.constraint.accept(token)
                complete = live.constraint.ended
            except Exception as caught:
                return "error", None, _grammar_failed(caught)
        if stop is not None and may_stop:
            return "stop", stop, None
        return ("stop" if complete else None), None, None

    # --- changes of state ------------------------------------------------------------------------------------------

    def _preempt(self, row: int) -> None:
        live = self._live(row)
        if self.on_iteration is not None:
            told = self._preempted_between if self._noted is None else self._noted.preempted
            told.append(
                PreemptedRow(
                    request_id=live.request.request_id,
                    num_tokens=int(self.table.num_cached[row]),
                    kind=_KIND_NAMES[self.table.kind[row]],
                )
            )
        self._release(row, _WAITING)
        self.table.num_preemptions[row] += 1
        self.table.tokens_since_preemption[row] = 0
        live.metrics.num_preemptions += 1
        self._num_preemptions += 1

    def _release(self, row: int, status: int) -> None:
        """Take cache and seat from a running row."""
        table, live = self.table, self._by_row[row]
        if live is not None:
            live.metrics.num_blocks = int(table.num_blocks[row] + table.num_shared[row])
        self.cache.release(int(table.rank[row]))
        self._computed_once[row] = max(self._computed_once[row], table.num_cached[row])
        self._num_filled[row] = 0
        table.num_cached[row] = 0
        table.num_blocks[row] = 0
        table.num_shared[row] = 0
        table.kind[row] = NO_KIND
        self._seat[row] = NO_SEAT
        self._status[row] = status
        self._order = None
        if self.cache.charges_changed:
            self._sync_charges()
        if status == _WAITING:
            self._await_hits(self._live(row))

    def _root_of(self, request: EngineRequest) -> bytes:
        """Where the digests of a request's prefixes begin: requests of a tenant find what its others left, and nothing of
        anybody else's, whose prompts the time to a first token would otherwise tell (CVE-2025-46570)."""
        if self._hits is None:
            return b""
        return root_digest(self._salt, (request.tenant or "").encode())

    def _no_digests(self) -> tuple[list[bytes], ...]:
        """Empty lists by kind, see `_Live.digests`."""
        of_size = {size: list[bytes]() for size in self.cache.block_sizes}
        return tuple(of_size[size] for size in self.cache.block_sizes)

    def _await_hits(self, live: _Live) -> None:
        """A request waits: keep in the table what it would find cached. Not while a token of it is in flight."""
        if self._hits is None or self._in_flight[live.row]:
            return
        pinned = int(self._pinned[live.row])
        kinds = [int(k) for k in self._offered if pinned in (NO_KIND, k)]
        for kind in kinds:
            self._digests(live, kind)
        self._hits.begin(live.row, live.digests, kinds)

    def _digests(self, live: _Live, kind: int, num_groups: int | None = None) -> list[bytes]:
        """Digests of the full groups of a request's known tokens with `kind`, at least of the first `num_groups`."""
        digests, size = live.digests[kind], self.cache.block_sizes[kind]
        num_known = live.num_known if num_groups is None else min(live.num_known, num_groups * size)
        extend_digests(digests, live.root, live.tokens[:num_known], size)
        return digests

    def _finish(
        self,
        live: _Live,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        new_token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """End a request, from any state: the only place where requests end while the engine lives."""
        row = live.row
        if self._status[row] == _RUNNING:
            self._release(row, _FREE)
        if self._hits is not None:
            self._hits.end(row)
        self._status[row] = _FREE
        self._order = None
        self._by_row[row] = None
        del self._by_id[live.request.request_id]
        if reason in ("stop", "length"):
            self.table.note_length(live.num_known - live.prompt_len)
        self.table.remove(row)
        self._announce_end(live, reason, stop_reason, error, new_token_ids or [], logprobs)
        if live.metrics.first_scheduled_s is not None:  # it gives back seat and blocks
            self._finish_times_s.append(self.clock.now_s())

    def _announce_end(
        self,
        live: _Live,
        reason: FinishReason,
        stop_reason: int | str | None,
        error: str | None,
        new_token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
    ) -> None:
        live.ended = True
        live.metrics.finished_s = self.clock.now_s()
        self._finished[reason] += 1
        self._outputs.append(
            StepOutput(
                request=live.request,
                new_token_ids=new_token_ids,
                logprobs=logprobs,
                finish_reason=reason,
                stop_reason=stop_reason,
                error=error,
                num_outputs=live.num_known - live.prompt_len,
                metrics=live.metrics,
            )
        )

    # --- failures --------------------------------------------------------------------------------------------------

    def _recover(
        self, error: Exception, what: str, iteration: Iteration | None, num_tokens: int
    ) -> None:
        """A step failed and took the pool with it: reset the executor, and compute every holder of cache anew.

        Args:
            error: what it raised.
            what: the same in a few words of ours.
            iteration: the step's, still to be told; None: nobody watches.
            num_tokens: of the step.
        """
        self._step_failures += 1
        logger.error("%s; the cache is rebuilt: %s", what, error, exc_info=error)
        if self._is_fatal(what):
            return
        if is_out_of_memory(error):
            self._squeeze(num_tokens)
        if iteration is not None:
            held = np.flatnonzero((self._status == _RUNNING) | (self._status == _ENDING))
            iteration.lost = tuple(self._ids(held.astype(np.int32)))
        try:
            self.executor.reset()
        except Exception as reset_error:
            logger.critical("the executor cannot be reset", exc_info=reset_error)
            self._die("the executor cannot be reset")
            return
        for row in np.flatnonzero(self._status == _RUNNING).tolist():
            self._release(row, _WAITING)
            self.table.tokens_since_preemption[row] = 0
        # Tokens in flight will never arrive; who waited for nothing else has its last token still to compute.
        self._status[self._status == _ENDING] = _WAITING
        self._order = None
        rows = np.flatnonzero(self._in_flight > 0)
        rows = rows[self._status[rows] != _FREE]
        table = self.table
        table.num_tokens[rows] -= self._in_flight[rows]
        table.num_outputs[rows] -= self._in_flight[rows]
        self._in_flight[rows] = 0
        if self._hits is not None:
            self.cache.clear_prefixes()
            for row in np.flatnonzero(self._status == _WAITING).tolist():
                self._await_hits(self._live(row))

    def _squeeze(self, num_tokens: int) -> None:
        """There was no memory for a step of so many tokens: keep the next ones to half of it, as nobody runs just now."""
        self._most_tokens = max(_LEAST_TOKENS, min(self._most_tokens, num_tokens) // 2)
        self._most_rows = min(self._most_rows, self._most_tokens)
        self._squeezed_until_s = self.clock.now_s() + SQUEEZE_S
        logger.error(
            "no memory for a step of %d tokens: for %.0f s steps have at most %d tokens and %d requests. If it happens again, "
            "lower --max-num-batched-tokens, --max-num-seqs or --device-memory-utilization",
            num_tokens,
            SQUEEZE_S,
            self._most_tokens,
            self._most_rows,
        )

    def _unsqueeze(self) -> None:
        self._squeezed_until_s = None
        self._most_rows, self._most_tokens = self.max_num_seqs, self._config.max_num_batched_tokens
        logger.warning("steps have up to %d tokens again", self._most_tokens)

    def _is_fatal(self, what: str) -> bool:
        """Note a failure; True where it is the second one within `FAILURE_WINDOW_S` and has ended the engine."""
        now_s, last_s = self.clock.now_s(), self._last_failure_s
        self._last_failure_s = now_s
        if last_s is not None and now_s - last_s < FAILURE_WINDOW_S:
            self._die(f"{what}, twice within {FAILURE_WINDOW_S:.0f} s")
            return True
        return self._dead is not None

    def _die(self, reason: str) -> None:
        """End every request with an error. The accounting is left alone: it may be what is wrong."""
        if self._dead is None:
            self._dead = reason
        self._pending = None
        lives = list(self._by_id.values())
        self._by_id.clear()
        for live in lives:
            self._announce_end(live, "error", None, f"the engine has ended: {reason}", [], None)

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine has ended: {self._dead}")

    def _note_stall(self) -> None:
        """Nothing was scheduled and nothing is in flight. No policy should let that last; never spin for ever."""
        if not self._by_id:
            self._stalled = 0
            return
        self._stalled += 1
        if self._stalled < STALL_LIMIT:
            return
        if self._check_plans and not self.debug and not self._policy_is_stuck:
            # fcfs decides until something runs; if it finds nothing to run either, we come back.
            self._stalled, self._policy_is_stuck = 0, True
            return
        self._stalled, self._policy_is_stuck = 0, False
        view = self.view()
        message = f"{self.policy.name} scheduled nothing in {STALL_LIMIT} iterations"
        if self.debug:
            raise AssertionError(
                f"{message}: {view.waiting.size} waiting, {view.running.size} running, {view.free_blocks} free blocks"
            )
        logger.error(
            "%s: %d waiting, %d running, %d free blocks",
            message,
            view.waiting.size,
            view.running.size,
            view.free_blocks,
        )
        if view.running.size > 1:
            self._preempt(int(view.running[-1]))
        else:
            head = view.running[0] if view.running.size else view.waiting[0]
            self._finish(self._live(int(head)), "error", error="the request could not be scheduled")

    # --- admission -------------------------------------------------------------------------------------------------

    def _check_admission(self, request: EngineRequest) -> tuple[int, float | None]:
        """Refuse what cannot be served; returns the only kind that can hold the request, `NO_KIND` where any can, and what
        `Admission.check` does.

        The check is on prompt + `max_tokens`: a request that fits a pool of its own always ends, since the policy can
        give it the whole pool. A kind that could hold only a part of it must never be chosen, or it would run until
        the pool is full and then be preempted for ever (RELIABILITY R3).
        """
        prompt_len, max_tokens = int(request.prompt_token_ids.size), request.params.max_tokens
        if request.request_id in self._by_id:
            raise DuplicateRequestError(request.request_id)
        if prompt_len < 1:
            raise InvalidRequestError("prompt", "must hold at least one token")
        if max_tokens < 1:
            raise InvalidRequestError("max_tokens", f"{max_tokens} must be at least 1")
        if request.grammar is not None and self._mask_words is None:
            raise InvalidRequestError(
                "structured_outputs", "this engine does not know the size of its vocabulary"
            )
        total, pool = prompt_len + max_tokens, self.cache.pool.num_blocks
        fitting = [kind for kind in self._offered if self.cache.blocks_needed(total, kind) <= pool]
        if not fitting:
            least = self.cache.blocks_needed(total, self._offered[0])
            raise InvalidRequestError(
                "max_tokens",
                f"prompt and output of up to {total} tokens take {least} cache blocks of {self.cache.block_sizes[self._offered[0]]} tokens, the pool has {pool}",
            )
        expected_ttft_s = self.admission.check(
            prompt_len=prompt_len,
            own_tokens=prompt_len - self.num_cached(request),
            ttft_s=request.slo.ttft_s,
            tenant=request.tenant,
            queue=self._queue_before(request, min(self.cache.blocks_needed(prompt_len, k) for k in fitting)),
            costs=self.costs,
            now_s=self.clock.now_s(),
        )  # fmt: skip
        return fitting[0] if len(fitting) < len(self._offered) else NO_KIND, expected_ttft_s

    def num_cached(self, request: EngineRequest) -> int:
        """Prompt tokens that a new request would find cached; 0 where admission does not ask for it. For any thread: what is found
        may be gone a moment later."""
        asks = self._config.slo_admission != "off" and math.isfinite(request.slo.ttft_s)
        prefixes = self.cache.prefixes
        if not asks or prefixes is None:
            return 0
        root, most = self._root_of(request), 0
        for kind in self._offered:
            size = self.cache.block_sizes[kind]
            digests: list[bytes] = []
            extend_digests(digests, root, request.prompt_token_ids, size)
            found = itertools.takewhile(lambda d, k=kind: prefixes.find(k, d) is not None, digests)
            most = max(most, size * sum(1 for _ in found))
        return min(most, int(request.prompt_token_ids.size) - 1)

    def _queue_before(self, request: EngineRequest, blocks: int) -> Queue:
        """What stands before a new request that needs `blocks` for its prompt."""
        waiting = np.flatnonzero(self._status == _WAITING)
        tenant, num_of_tenant = request.tenant, 0
        if tenant is not None:
            number = self._tenants.get(tenant, -1)
            num_of_tenant = int(np.count_nonzero(self.table.tenant[waiting] == number))
        # Best-effort requests come behind those with objectives.
        before = waiting if request.slo_class == "be" else waiting[~self.table.best_effort[waiting]]
        return self._queue(waiting, before, blocks, num_of_tenant)

    def note_refused(self) -> None:
        """A request was refused for the engine, by its `outlook`."""
        self._num_refused += 1

    def outlook(self) -> Outlook:
        """For requests that come while the step runs that has just been put together (`on_plan`)."""
        waiting = np.flatnonzero(self._status == _WAITING)
        with_objectives = waiting[~self.table.best_effort[waiting]]
        queue = self._queue(waiting, with_objectives, 0, 0)
        last = queue if with_objectives.size == waiting.size else self._queue(waiting, waiting, 0, 0)  # fmt: skip
        return Outlook(
            queues=(queue, last),
            of_tenants=self._by_tenant(waiting),
            costs=self.costs,
            margin_s=self.admission.margin_s(self.clock.now_s()),
        )

    def _expected_wait_s(self) -> float | None:
        if self.costs == StepCosts():
            return None
        outlook = self.outlook()
        return self.admission.expected_wait_s(outlook.queues[0], self.costs, outlook.margin_s)

    def _by_tenant(self, rows: NDArray[Any]) -> dict[str | None, int]:
        if len(self._tenants) == 1:
            return {}
        counts = np.bincount(self.table.tenant[rows], minlength=len(self._tenants)).tolist()
        return dict(zip(self._tenants, counts, strict=True))

    def _queue(
        self, waiting: NDArray[Any], before: NDArray[Any], blocks: int, num_of_tenant: int
    ) -> Queue:
        kind = self._offered[-1]  # the smallest
        groups = -(-self.table.num_tokens[before] // self.cache.block_sizes[kind])
        needed = int(groups.sum()) * self.cache.blocks_per_group[kind] + blocks
        times, per_s = self._finish_times_s, 0.0
        # Up to now, so that a rate of long ago counts for little.
        if len(times) > 1 and self.clock.now_s() > times[0]:
            per_s = len(times) / (self.clock.now_s() - times[0])
        num_running = int(np.count_nonzero(self._status == _RUNNING))
        held = self.cache.pool.num_blocks - self.cache.num_free
        return Queue(
            num_waiting=int(waiting.size),
            waiting_tokens=int(self.table.prompt_len[waiting].sum()),
            num_of_tenant=num_of_tenant,
            uncached_tokens=self._uncached_tokens(before),
            uncached_requests=int(before.size),
            missing_blocks=needed - self.cache.num_free,
            missing_seats=int(before.size) + 1 + num_running - self._config.max_num_seqs,
            blocks_per_s=per_s * held / num_running if num_running else 0.0,
            requests_per_s=per_s,
        )

    def least_blocks(self, num_tokens: int) -> int:
        """Blocks of so many positions in the kind on offer that takes fewest."""
        return min(self.cache.blocks_needed(num_tokens, kind) for kind in self._offered)

    def _uncached_tokens(self, rows: NDArray[Any]) -> int:
        """Positions of waiting requests that would not be found cached; `rows` by number or as a mask."""
        uncached = self.table.num_tokens[rows] - self.table.hit_tokens[rows].max(axis=1)
        return int(uncached.sum())

    @property
    def num_decisions(self) -> int:
        """The number of the next `Iteration`."""
        return self._num_decisions

    def is_live(self, request: EngineRequest) -> bool:
        """Whether this very request, not another one of its id, is alive."""
        live = self._by_id.get(request.request_id)
        return live is not None and live.request is request

    def metrics_of(self, request_id: str) -> RequestMetrics:
        """Of a live request; the object goes on changing until the request has ended. Raises KeyError: none has this id."""
        return self._by_id[request_id].metrics

    def has(self, request_id: str) -> bool:
        """Whether a live request has this id. For any thread."""
        return request_id in self._by_id

    def has_begun(self, request_id: str) -> bool:
        """Whether a live request has ever been scheduled; True also for one that is not alive."""
        live = self._by_id.get(request_id)
        return live is None or live.metrics.first_scheduled_s is not None

    # --- telling who watches ---------------------------------------------------------------------------------------

    def _note(self, plan: Plan, schedule_s: float) -> Iteration | None:
        """A decision that does something; None where nobody watches."""
        preempted, self._preempted_between = self._preempted_between, []
        if not plan.rows.size and not plan.preempt.size and not preempted:
            return None
        number, self._num_decisions = self._num_decisions, self._num_decisions + 1
        if self.on_iteration is None:
            return None
        return Iteration(
            number=number,
            at_s=self.clock.now_s(),
            type=plan.iteration,
            preempted=preempted,
            schedule_s=schedule_s,
        )

    def _note_applied(
        self, noted: Iteration, batch: StepBatch | None, rows: NDArray[np.int32]
    ) -> None:
        noted.num_waiting = int(np.count_nonzero(self._status == _WAITING))
        noted.num_running = int(np.count_nonzero(self._status == _RUNNING))
        noted.free_blocks = self.cache.num_free
        if batch is not None:
            columns = zip(
                self._ids(rows),
                batch.num_tokens.tolist(),
                batch.start.tolist(),
                batch.kind.tolist(),
                strict=True,
            )
            noted.scheduled = tuple(
                ScheduledRow(request_id=i, num_tokens=n, start=s, kind=_KIND_NAMES[k])
                for i, n, s, k in columns
            )

    def _ids(self, rows: NDArray[np.int32]) -> list[str]:
        return [self._live(row).request.request_id for row in rows.tolist()]

    def _tell_step(self, step: _InFlight, step_s: float | None) -> None:
        iteration, step.iteration = step.iteration, None
        if iteration is not None:
            self._tell(iteration, step_s)

    def _tell(self, iteration: Iteration, step_s: float | None) -> None:
        """Of a decision whose step has ended after so long, or has failed (None)."""
        iteration.step_s, iteration.failed = step_s, step_s is None
        if self.on_iteration is not None:
            self.on_iteration(iteration)

    # --- looking in ------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges; a tenth of a millisecond."""
        status = self._status
        waiting = status == _WAITING
        kinds = self.table.kind[status == _RUNNING]
        switches = {
            (_KIND_NAMES[a], _KIND_NAMES[b]): int(self._kind_switches[a, b])
            for a in range(len(self.kinds))
            for b in range(len(self.kinds))
            if a != b
        }
        return EngineStats(
            num_waiting=int(np.count_nonzero(waiting)),
            num_running=int(kinds.size),
            num_ending=int(np.count_nonzero(status == _ENDING)),
            waiting_prompt_tokens=int(self.table.prompt_len[waiting].sum()),
            waiting_uncached_tokens=self._uncached_tokens(waiting),
            total_blocks=self.cache.pool.num_blocks,
            free_blocks=self.cache.num_free,
            cached_blocks=self.cache.num_idle,
            blocks_by_kind={
                _KIND_NAMES[kind]: n for kind, n in self.cache.blocks_by_kind().items()
            },
            requests_by_kind={
                _KIND_NAMES[kind]: int(np.count_nonzero(kinds == kind)) for kind in CacheKind
            },
            iterations=dict(self._iterations),
            num_preemptions=self._num_preemptions,
            kind_switches=switches,
            num_conversions=self._num_conversions,
            recomputed_tokens=self._recomputed_tokens,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
            finished=dict(self._finished),
            num_refused=self._num_refused,
            num_doubtful=self.admission.num_doubtful,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            deferred_rows=self._deferred_rows,
            dropped_rows=self._dropped_rows,
            refused_plan_rows=self._refused_plan_rows,
            fallback_iterations=self._fallback_iterations,
            step_failures=self._step_failures,
            compilations=self.executor.compilations,
            step_tokens=self._step_tokens.copy(),
            schedule_s=self._schedule_times_s.copy(),
            host_p50_ms=1e3 * self._host_s.percentile(50),
            host_p99_ms=1e3 * self._host_s.percentile(99),
            schedule_p50_ms=1e3 * self._schedule_s.percentile(50),
            schedule_p99_ms=1e3 * self._schedule_s.percentile(99),
            dispatch_p50_ms=1e3 * self._dispatch_s.percentile(50),
            mask_p50_ms=1e3 * self._mask_s.percentile(50),
            mask_p99_ms=1e3 * self._mask_s.percentile(99),
            cost_errors=dict(self._cost_errors),
            busy_s=self._busy_s,
            expected_wait_s=self._expected_wait_s(),
        )

    def check_integrity(self) -> None:
        """Recount everything: the pool, the tables, and that engine, request table and cache say the same.

        Raises:
            CacheIntegrityError: they do not.
        """
        if self._dead is not None:
            return
        table, cache = self.table, self.cache
        lives = self._by_id.values()
        cache.check_integrity(live.rank for live in lives)

        def require(condition: object, message: str) -> None:
            if not condition:
                raise CacheIntegrityError(message)

        rows = np.array([live.row for live in lives], np.int32)
        require(np.unique(rows).size == rows.size, "two requests share a row")
        require(
            all(self._by_row[live.row] is live and not live.ended for live in lives),
            "rows and requests differ",
        )
        require(
            np.flatnonzero(self._status != _FREE).tolist() == sorted(rows.tolist()),
            "a row without a request is in use",
        )
        require(
            np.flatnonzero(table.live).tolist() == sorted(rows.tolist()),
            "the request table holds other rows",
        )
        status, seats = self._status[rows], self._seat[rows]
        running = status == _RUNNING
        require(
            ((seats != NO_SEAT) == running).all(),
            "a request without cache has a seat, or the reverse",
        )
        require(
            (table.num_cached[rows] >= 0).all()
            and (table.num_cached[rows] <= table.num_tokens[rows]).all(),
            "cached positions beyond the tokens",
        )
        require(
            (table.num_cached[rows[~running]] == 0).all()
            and (table.num_blocks[rows[~running]] == 0).all()
            and (table.num_shared[rows[~running]] == 0).all(),
            "cache of a request that has none",
        )
        require(
            (table.kind[rows[~running]] == NO_KIND).all(), "cache kind of a request that has none"
        )
        require(
            int(np.count_nonzero(running)) == int(np.count_nonzero(cache.owner >= 0)),
            "seats and running requests differ",
        )
        held, held_seats = rows[running], seats[running]
        require(
            (cache.owner[held_seats] == table.rank[held]).all(), "a seat belongs to another request"
        )
        require(
            (cache.kind[held_seats] == table.kind[held]).all(),
            "cache and table differ about a kind",
        )
        require(
            (cache.num_tokens[held_seats] == table.num_cached[held]).all(),
            "cache and table differ about positions",
        )
        private = cache.num_private_blocks_of(held_seats)
        require(
            (private == table.num_blocks[held]).all()
            and (cache.num_blocks_of(held_seats) - private == table.num_shared[held]).all(),
            "cache and table differ about blocks",
        )
        require(
            cache.num_free + cache.num_shared + int(private.sum()) == cache.pool.num_blocks,
            "blocks are charged twice, or to nobody",
        )
        self._check_hits(rows)
        known = np.array([live.num_known for live in lives], np.int32)
        require(
            (known + self._in_flight[rows] == table.num_tokens[rows]).all(),
            "tokens in flight are miscounted",
        )
        require(
            (table.num_outputs[rows] == table.num_tokens[rows] - table.prompt_len[rows]).all(),
            "outputs are miscounted",
        )
        require(
            (table.num_tokens[rows] <= table.max_tokens_total[rows]).all(),
            "more tokens than max_tokens",
        )
        in_flight = np.zeros(self._in_flight.size, np.int8)
        if self._pending is not None:
            for i in np.flatnonzero(self._pending.samples).tolist():
                live = self._pending.requests[i]
                in_flight[live.row] += not live.ended
        require((in_flight[rows] == self._in_flight[rows]).all(), "tokens in flight without a step")
        ending = rows[status == _ENDING]
        require(
            (self._in_flight[ending] > 0).all(), "a request waits for a token that will not come"
        )

    def _check_hits(self, rows: NDArray[np.int32]) -> None:
        """Look up anew what each waiting request would find, and compare."""
        table, cache = self.table, self.cache
        hit_tokens, hit_blocks = np.zeros_like(table.hit_tokens), np.zeros_like(table.hit_blocks)
        waits = (self._status[rows] == _WAITING) & (self._in_flight[rows] == 0)
        for row in rows[waits].tolist() if cache.prefixes is not None else ():
            assert cache.prefixes is not None
            live = self._live(row)
            for kind in self._offered:
                if self._pinned[row] not in (NO_KIND, kind):
                    continue
                size, digests, blocks = cache.block_sizes[kind], list[bytes](), list[int]()
                extend_digests(digests, live.root, live.tokens[: live.num_known], size)
                for digest in digests:
                    node = cache.prefixes.find(kind, digest)
                    if node is None:
                        break
                    blocks.append(node.block)
                tokens = min(len(blocks) * size, live.num_known - 1)
                taken = blocks[: tokens // size]
                hit_tokens[row, kind] = tokens
                hit_blocks[row, kind] = (
                    np.count_nonzero(cache.num_refs[taken]) * cache.blocks_per_group[kind]
                )
        if not (
            np.array_equal(hit_tokens, table.hit_tokens)
            and np.array_equal(hit_blocks, table.hit_blocks)
        ):
            raise CacheIntegrityError("what waiting requests would find is not what the table says")

    def _live(self, row: int) -> _Live:
        live = self._by_row[row]
        if live is None:
            raise CacheIntegrityError(f"row {row} has no request")
        return live

    def _lives(self, rows: NDArray[np.int32]) -> list[_Live]:
        lives = [self._by_row[row] for row in rows.tolist()]
        if None in lives:
            raise CacheIntegrityError(f"rows {rows.tolist()}: one has no request")
        return cast("list[_Live]", lives)

    def _grow_rows(self) -> None:
        more = self.table.capacity - self._status.size

        def grown(values: NDArray, fill: int) -> NDArray:
            return np.concatenate([values, np.full(more, fill, values.dtype)])

        self._status = grown(self._status, _FREE)
        self._seat = grown(self._seat, NO_SEAT)
        self._in_flight = grown(self._in_flight, 0)
        self._last_token = grown(self._last_token, 0)
        self._pinned = grown(self._pinned, NO_KIND)
        self._num_filled = grown(self._num_filled, 0)
        self._computed_once = grown(self._computed_once, 0)
        self._place = grown(self._place, 0)
        self._by_row.extend([None] * more)


def _conversions_of(rows: NDArray[np.int32], inputs: dict[int, NDArray[np.int32]]) -> Conversions:
    """`StepBatch.conversions` of a step's rows; `inputs` are the blocks of those that are converted."""
    at = np.flatnonzero(np.isin(rows, list(inputs)))
    tables = [inputs[row] for row in rows[at].tolist()]
    padded = np.full((at.size, max(t.size for t in tables)), NULL_BLOCK, np.int32)
    for line, table in zip(padded, tables, strict=True):
        line[: table.size] = table
    return Conversions(rows=at, inputs=padded)


def _grammar_failed(error: Exception) -> str:
    """The reason that users see: our own words, or the kind of the exception alone."""
    text = str(error) if isinstance(error, GrammarError) else type(error).__name__
    logger.error("the grammar of one request failed: %s", type(error).__name__)
    return f"grammar: {text}"

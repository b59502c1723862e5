"""The live requests of an engine: their rows, their states, and the transitions between these states."""

import collections
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import NO_SLOT, CacheIntegrityError, HybridCache
from apt_jax.cache.prefix_hits import PrefixHitTracker
from apt_jax.cache.prefix_tree import extend_digests, root_digest
from apt_jax.core.kinds import HIDDEN, KIND_NAMES, KV, NO_KIND, WINDOWED, CacheKindSpec
from apt_jax.costs.model import StepCosts
from apt_jax.engine.changed_prefixes import ChangedPrefixes
from apt_jax.engine.counters import PROMPT_SOURCES, EngineCounters, RecomputeCause
from apt_jax.engine.iteration_recorder import IterationRecorder
from apt_jax.engine.pooled_prompt import PooledPrompt
from apt_jax.engine.prompt_scores import PromptScores
from apt_jax.engine.request_state import RequestState, StepOutput, TokenLogprobs
from apt_jax.engine.sessions import Sessions
from apt_jax.request import EngineRequest, FinishReason, PromptLogprobs, RequestMetrics, TokenConstraint
from apt_jax.sched.request_table import ColumnTable, RequestTable, column
from apt_jax.sched.view import SchedulerView, TakeableGroups
from apt_jax.structured.token_rules import start_constraint
from apt_jax.utils.clock import Clock


class PrefixReads(Protocol):
    """Protocol of `DiskReads`, which reads prefixes of waiting requests from disk."""

    def begin(self, state: RequestState) -> None: ...

    def end(self, row: int) -> None: ...


class RequestPrefixes:
    """Looks up cached prefixes of requests.

    Args:
        cache: the cache; without prefix caching no prefix is found.
        table: request table, in which `PrefixHitTracker` keeps the prefix hits of waiting requests.
        offered: available cache kinds.
        salt: salt of the root digest; None: random, so the digests of any two engines differ.
        share: True: tenants share prefixes.

    Attributes:
        hits: tracks the cached prefixes of waiting requests; None: prefix caching is off.
        reads: reads of prefixes from disk; None: there is no disk tier.
    """

    def __init__(
        self,
        cache: HybridCache,
        table: RequestTable,
        offered: Sequence[int],
        salt: bytes | None = None,
        *,
        share: bool = False,
    ) -> None:
        self._cache = cache
        self._offered = offered
        self._salt = os.urandom(16) if salt is None else salt
        self._share = share
        self.reads: PrefixReads | None = None
        self.hits: PrefixHitTracker | None = None if cache.prefixes is None else cache.watch_hits(table)

    def root_of(self, request: EngineRequest) -> bytes:
        """Return the root digest of a request's prefixes.

        Unless tenants share prefixes, a request finds only prefixes of its own tenant: the time to the first token
        would otherwise reveal prompts of others (CVE-2025-46570). Requests with different adapters, whose caches
        differ, or with different `cache_salt` share no prefixes either.
        """
        if self.hits is None:
            return b""
        root = root_digest(self._salt, b"" if self._share else (request.tenant or "").encode())
        if request.adapter is None and request.cache_salt is None:
            return root
        root = root_digest(root, (request.adapter or "").encode())  # even if empty: a salt may equal an adapter name
        return root if request.cache_salt is None else root_digest(root, request.cache_salt.encode())

    def no_digests(self) -> tuple[list[bytes], ...]:
        """Return new, empty digest lists for `RequestState.digests`; kinds with the same block size share a list."""
        of_size = {size: list[bytes]() for size in self._digest_sizes}
        return tuple(of_size[size] for size in self._digest_sizes)

    @property
    def _digest_sizes(self) -> tuple[int, ...]:
        """Number of positions of a group by kind, and of a group of windowed layers if there are any."""
        windows = self._cache.windows
        return (*self._cache.block_sizes, *(() if windows is None else (windows.spec.block_size,)))

    def digests(self, state: RequestState, kind: int, num_groups: int | None = None) -> list[bytes]:
        """Return the digests of the full groups of a request's known tokens; with `num_groups`, digests of later groups
        may be missing."""
        digests, size = state.digests[kind], self._digest_sizes[kind]
        num_known = state.num_known if num_groups is None else min(state.num_known, num_groups * size)
        extend_digests(digests, state.root, state.tokens[:num_known], size)
        return digests

    def track(self, state: RequestState, pinned_kind: int) -> None:
        """Keep the length of a waiting request's cached prefix up to date in the request table until `untrack`, and
        read groups from disk if that saves time."""
        if self.hits is None:
            return
        kinds = [int(k) for k in self._offered if pinned_kind in (NO_KIND, k)]
        if state.needs_all_states:
            self.hits.begin(state.row, self.no_digests(), kinds)
            return
        for kind in kinds if self._cache.windows is None else [*kinds, WINDOWED]:
            self.digests(state, kind)
        self.hits.begin(state.row, state.digests, kinds)
        if self.reads is not None:
            self.reads.begin(state)

    def converted_rows(self, rows: NDArray[np.int32], kind: NDArray[np.int8]) -> NDArray[np.bool_] | None:
        """Return an (n,) mask of rows that reuse cached layer inputs, converted in the same step; None: no row does."""
        if self.hits is None or not self.hits.any_converted:
            return None
        found = [self.hits.is_converted(row, k) for row, k in zip(rows.tolist(), kind.tolist(), strict=True)]
        return np.array(found) if any(found) else None

    def untrack(self, row: int) -> None:
        """Stop tracking a row; does nothing if it is not tracked."""
        if self.hits is not None:
            self.hits.end(row)
        if self.reads is not None:
            self.reads.end(row)

    def num_cached(self, request: EngineRequest) -> int:
        """Return the number of cached prompt tokens of a new request.

        Callable from any thread; the cache may change right after the call.
        """
        prefixes, most = self._cache.prefixes, 0
        if prefixes is None or request.params.prompt_logprobs is not None or request.params.pooling == "mean":
            return 0
        root = self.root_of(request)
        for kind in self._offered:
            size = self._cache.block_sizes[kind]
            digests: list[bytes] = []
            extend_digests(digests, root, request.prompt_token_ids, size)
            found = itertools.takewhile(lambda d, k=kind: prefixes.find(k, d) is not None, digests)
            tokens = size * sum(1 for _ in found)
            if self._cache.windows is not None:
                spec, windowed = self._cache.windows.spec, list[bytes]()
                extend_digests(windowed, root, request.prompt_token_ids, spec.block_size)
                tokens = prefixes.usable(spec, windowed, tokens, math.lcm(size, spec.block_size))
            most = max(most, tokens)
        return min(most, int(request.prompt_token_ids.size) - 1)


# Values of `RequestStates.status`.
FREE = 0  # no request
WAITING = 1  # no cache
RUNNING = 2  # holds cache and a slot
ENDING = 3  # the last allowed token is in flight; holds neither cache nor slot


class RequestStates(ColumnTable):
    """The live requests: columns in addition to the `RequestTable`, state transitions, and outputs to be delivered.

    Args:
        table: columns of the requests that policies see, with the same rows.
        cache: blocks and slots of the running requests.
        prefixes: cached prefixes of the waiting requests.
        clock: the current time.
        counters: counts the transitions.
        recorder: records preemptions and changes of the cache kind.
        max_num_seqs: maximum number of running requests.
        adapters: names of the LoRA adapters that requests may use.

    Attributes:
        by_id: live requests by id.
        by_row: live requests by row; None: the row is free.
        adapters: number of each adapter, keyed by name.
        tenants: number of each tenant seen so far, keyed by name; there are at most as many as API keys.
        sessions: sessions of the requests; None: neither retention nor order of requests depends on them.
        outputs: outputs that `Engine.step` has not returned yet.
        finish_times_s: times at which the latest requests ended, on the engine's clock, seconds; only requests that had
            been scheduled.
    """

    status = column(np.int8)
    slot = column(np.int32, fill=NO_SLOT)
    in_flight = column(np.int8)  # tokens of the row that the host has not seen
    last_token = column(np.int32)  # last token of the row that the host has seen
    computed_once = column(np.int32)  # positions computed before the cache was last lost
    found = column(np.int32)  # positions that the row found cached when it last started
    found_before = column(np.int32)  # positions found, but not computed, before the cache was last lost
    lost_by = column(np.int8)  # `RecomputeCause` of the last cache loss
    pinned_kind = column(np.int8, fill=NO_KIND)  # the only kind that can hold the row's request
    adapter = column(np.int32)  # number of the adapter in `adapters`, from 1; 0: no adapter
    read = column(np.int32)  # positions read from disk for the row
    held = column(np.bool_)  # the row waits for a read from disk, and is hidden from the policy
    order = column(np.float64)  # requests are listed by `order`, then by rank (`SchedulerConfig.session_order`)
    num_filled = column(np.int32)  # groups found, registered, or full after the step in flight

    def __init__(
        self,
        table: RequestTable,
        cache: HybridCache,
        prefixes: RequestPrefixes,
        clock: Clock,
        counters: EngineCounters,
        recorder: IterationRecorder,
        max_num_seqs: int,
        adapters: Sequence[str] = (),
    ) -> None:
        super().__init__(table.capacity)
        self.adapters = {name: i for i, name in enumerate(adapters, 1)}
        self.table = table
        self.cache = cache
        self.prefixes = prefixes
        self._clock = clock
        self._counters = counters
        self._recorder = recorder
        self.by_id: dict[str, RequestState] = {}
        self.by_row: list[RequestState | None] = [None] * self.capacity
        self.tenants: dict[str | None, int] = {None: 0}
        self.outputs: list[StepOutput] = []
        self.sessions: Sessions | None = None
        self.changed_prefixes: ChangedPrefixes | None = None
        # Long enough for several batches, because the requests of a batch may end together.
        self.finish_times_s: collections.deque[float] = collections.deque(maxlen=4 * max_num_seqs)
        self._next_rank = 0
        self._by_rank: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None

    # --- looking up ------------------------------------------------------------------------------------------------

    def state(self, row: int) -> RequestState:
        """Return the request of a row, which must be in use."""
        state = self.by_row[row]
        if state is None:
            raise CacheIntegrityError(f"row {row} has no request")
        return state

    def states(self, rows: NDArray[np.int32]) -> list[RequestState]:
        """Return the requests of some rows, all of which must be in use."""
        states = [self.by_row[row] for row in rows.tolist()]
        if None in states:
            raise CacheIntegrityError(f"rows {rows.tolist()}: a row has no request")
        return cast("list[RequestState]", states)

    def ids(self, rows: NDArray[np.int32]) -> list[str]:
        """Return the request ids of some rows."""
        return [self.state(row).request.request_id for row in rows.tolist()]

    def rows(self, status: int) -> NDArray[np.intp]:
        """Return the rows with a status, ascending."""
        return np.flatnonzero(self.status == status)

    def count(self, status: int) -> int:
        """Count the rows with a status."""
        return int(np.count_nonzero(self.status == status))

    def by_rank(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the rows of waiting and of running requests, sorted by order and rank, as read-only arrays."""
        if self._by_rank is None:
            rank = self.table.rank
            waiting, running = self.rows(WAITING).astype(np.int32), self.rows(RUNNING).astype(np.int32)
            if self.sessions is None:
                waiting, running = waiting[np.argsort(rank[waiting])], running[np.argsort(rank[running])]
            else:
                waiting = waiting[np.lexsort((rank[waiting], self.order[waiting]))]
                running = running[np.lexsort((rank[running], self.order[running]))]
            waiting.flags.writeable = running.flags.writeable = False
            self._by_rank = waiting, running
        return self._by_rank

    def uncached_tokens(self, rows: NDArray[Any]) -> int:
        """Return the number of uncached positions of waiting requests; `rows` are indexes or a mask."""
        uncached = self.table.num_tokens[rows] - self.table.cached_prefix_tokens[rows].max(axis=1)
        return int(uncached.sum())

    def view(
        self,
        *,
        kinds: Sequence[CacheKindSpec],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        costs: StepCosts,
        can_convert: bool,
        takeable: TakeableGroups | None,
    ) -> SchedulerView:
        """Return the policy's view of the requests."""
        table, cache = self.table, self.cache
        if cache.windows is not None and self.prefixes.hits is not None:
            self.prefixes.hits.check_windows()
        waiting, running = self.by_rank()
        unseen = (self.in_flight[waiting] > 0) | self.held[waiting]
        if unseen.any():
            # Hide requests that are held, or were preempted with a token in flight, which the host must see first.
            waiting = waiting[~unseen]
        if self.sessions is not None:
            waiting = self.sessions.ordered(waiting)
        shared_blocks = 0
        if cache.prefixes is not None:
            shared_blocks = cache.pool.num_blocks - cache.num_free - int(table.num_blocks[running].sum())
        return SchedulerView(
            now_s=self._clock.now_s(),
            table=table,
            waiting=waiting,
            running=running,
            free_blocks=cache.num_free,
            total_blocks=cache.pool.num_blocks,
            shared_blocks=shared_blocks,
            block_size=cache.block_sizes[KV],
            hidden_block_size=cache.block_sizes[HIDDEN],
            kinds=kinds,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            costs=costs,
            can_convert=can_convert,
            takeable=takeable,
        )

    # --- transitions -----------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, pinned_kind: int, expected_ttft_s: float | None) -> None:
        """Add a request to the waiting requests.

        Args:
            request: request admitted by `AdmissionController.check`.
            pinned_kind: the only cache kind that can hold the request; `NO_KIND`: any kind can.
            expected_ttft_s: expected TTFT returned by `Admission.check`, seconds.
        """
        prompt_len = int(request.prompt_token_ids.size)
        params = request.params
        constraint = start_constraint(request)
        row = self.table.add(
            arrival_s=request.arrival_s,
            rank=self._next_rank,
            prompt_len=prompt_len,
            max_tokens=params.max_tokens,
            slo_ttft_s=request.slo.ttft_s,
            slo_tbt_s=request.slo.tbt_s,
            slo_e2e_s=request.slo.e2e_s,
            best_effort=request.slo_class == "be",
            tenant=self.tenants.setdefault(request.tenant, len(self.tenants)),
            known_length=_has_known_length(request, constraint),
        )
        if row >= self.capacity:
            self.grow(self.table.capacity)
            self.by_row.extend([None] * (self.capacity - len(self.by_row)))
        tokens = np.empty(prompt_len + params.max_tokens, np.int32)
        tokens[:prompt_len] = request.prompt_token_ids
        state = RequestState(
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
            root=self.prefixes.root_of(request),
            expected_ttft_s=expected_ttft_s,
            digests=self.prefixes.no_digests(),
        )
        if params.prompt_logprobs is not None:
            state.prompt_scores = PromptScores(request.prompt_token_ids, params.prompt_logprobs)
        if params.pooling is not None:
            state.pooled = PooledPrompt(prompt_len, params.pooling)
        self._next_rank += 1
        self.by_row[row] = state
        self.by_id[request.request_id] = state
        self.clear_row(row)
        self.status[row] = WAITING
        self.last_token[row] = tokens[prompt_len - 1]
        self.pinned_kind[row] = pinned_kind
        self.adapter[row] = 0 if request.adapter is None else self.adapters[request.adapter]
        if self.prefixes.hits is not None and not self.table.known_length[row]:
            root = root_digest(root_digest(b"", (request.tenant or "").encode()), (request.adapter or "").encode())
            self.table.histograms[row] = self.table.lengths.begin(root, request.prompt_token_ids)
        self._by_rank = None
        self.await_hits(state)
        if self.sessions is not None:
            self.order[row] = self.sessions.arrived(row, request.session_id, request.retain_s)
        if self.changed_prefixes is not None:
            self.changed_prefixes.arrived(request, int(self.table.cached_prefix_tokens[row].max()))

    def await_hits(self, state: RequestState) -> None:
        """Track the cached prefix of a waiting request, unless it has a token in flight."""
        if not self.in_flight[state.row]:
            self.prefixes.track(state, int(self.pinned_kind[state.row]))

    def start(self, row: int, slot: int, kind: int, num_found: int, num_copied: int) -> None:
        """Mark a waiting request as running, after it has got its first blocks and `num_found` cached positions,
        `num_copied` of them from host memory."""
        state = self.state(row)
        if self.prefixes.hits is not None:
            if state.metrics.first_scheduled_s is None:
                state.metrics.num_cached_tokens = num_found
                self._count_sources(state, num_found, num_copied)
            self.prefixes.hits.end(row)
            state.num_found = num_found // self.cache.block_sizes[kind]
            state.found_kind = kind
            state.is_proven = not num_found
            self.table.num_cached[row] = num_found
            self.num_filled[row] = state.num_found
            self._counters.cache_hit_tokens += num_found
        self.found[row] = num_found
        self.status[row] = RUNNING
        self.slot[row] = slot
        self._by_rank = None
        self.table.kind[row] = kind
        if state.last_kind not in (NO_KIND, kind):
            if self.lost_by[row] == RecomputeCause.POLICY:
                self.lost_by[row] = RecomputeCause.KIND_SWITCH
            self._counters.kind_switches[state.last_kind, kind] += 1
            self._recorder.switched(state.request.request_id, state.last_kind, kind)
            self.table.num_kind_switches[row] += 1
            state.metrics.num_kind_switches += 1
        state.last_kind = kind
        state.metrics.cache_kind = KIND_NAMES[kind]
        if state.metrics.first_scheduled_s is None:
            state.metrics.first_scheduled_s = self._clock.now_s()
            if self.sessions is not None:
                self.sessions.started(row, num_found)

    def _count_sources(self, state: RequestState, num_found: int, num_copied: int) -> None:
        assert self.prefixes.hits is not None
        known = max(min(self.prefixes.hits.num_known(state.row), state.prompt_len), num_found)
        read = min(int(self.read[state.row]), num_copied)
        parts = (num_found - num_copied, num_copied - read, read, known - num_found, state.prompt_len - known)
        for source, num in zip(PROMPT_SOURCES, parts, strict=True):
            self._counters.prompt_sources[source] += num

    def convert(self, row: int) -> None:
        """Record that a running request was converted from layer inputs to keys and values."""
        state = self.state(row)
        state.last_kind = KV
        state.metrics.cache_kind = KIND_NAMES[KV]
        state.metrics.num_conversions += 1
        self.table.kind[row] = KV
        self.num_filled[row] = 0
        self._counters.num_conversions += 1
        self._recorder.converted(state.request.request_id)

    def preempt(self, row: int, cause: RecomputeCause = RecomputeCause.POLICY) -> None:
        """Take cache and slot from a running request, which then waits again."""
        state = self.state(row)
        self.lost_by[row] = cause
        num_cached, kind = int(self.table.num_cached[row]), int(self.table.kind[row])
        self._recorder.preempted(state.request.request_id, num_cached, kind)
        self.release(row, WAITING)
        self.table.num_preemptions[row] += 1
        self.table.tokens_since_preemption[row] = 0
        state.metrics.num_preemptions += 1
        self._counters.num_preemptions += 1

    def release(self, row: int, status: int) -> None:
        """Free cache and slot of a running request, and set its status."""
        table, state = self.table, self.by_row[row]
        if state is not None:
            state.metrics.num_blocks = int(table.num_blocks[row] + table.num_shared[row])
        self.cache.release(int(table.rank[row]))
        self.computed_once[row] = max(self.computed_once[row], table.num_cached[row])
        if table.num_cached[row] < self.found_before[row]:  # some positions found before are still not computed
            self.found_before[row] = max(self.found_before[row], self.found[row])
        else:
            self.found_before[row] = self.found[row]
        self.num_filled[row] = 0
        table.num_cached[row] = 0
        table.num_blocks[row] = 0
        table.num_shared[row] = 0
        table.checkpointed_blocks[row] = 0
        table.kind[row] = NO_KIND
        self.slot[row] = NO_SLOT
        self.status[row] = status
        self._by_rank = None
        if self.cache.ownership_changed:
            self.sync_charges()
        if status == WAITING:
            self.await_hits(self.state(row))

    def count_recomputed(self, state: RequestState, start: int, num_tokens: int) -> None:
        """Count `num_tokens` positions of a request, from `start` on, as recomputed."""
        row, cause = state.row, RecomputeCause(int(self.lost_by[state.row]))
        state.metrics.recomputed_tokens += num_tokens
        recomputed, only_found = self._counters.recomputed, 0
        if cause is not RecomputeCause.FAILED_STEP:
            only_found = min(max(int(self.found_before[row]) - start, 0), num_tokens)
            recomputed[RecomputeCause.PREFIX_LOST] += only_found
        recomputed[cause] += num_tokens - only_found

    def sync_charges(self) -> None:
        """Update the block counts of all running requests in the table after the sharing of blocks has changed."""
        rows = self.rows(RUNNING)
        slots = self.slot[rows]
        private = self.cache.num_private_blocks_of(slots)
        self.table.num_blocks[rows] = private
        self.table.num_shared[rows] = self.cache.num_blocks_of(slots) - private
        self.cache.ownership_changed = False

    def lose_cache(self) -> None:
        """Make all requests with cache wait again and discard tokens in flight, after a failed step has destroyed the
        pool."""
        table = self.table
        self.lost_by[(self.status == RUNNING) | (self.status == ENDING)] = RecomputeCause.FAILED_STEP
        for row in self.rows(RUNNING).tolist():
            self.release(row, WAITING)
            table.tokens_since_preemption[row] = 0
        # Requests that waited only for their last token must compute it again.
        ending = self.status == ENDING
        table.tokens_since_preemption[ending] = 0
        self.status[ending] = WAITING
        self._by_rank = None
        rows = np.flatnonzero((self.in_flight > 0) & (self.status != FREE))
        table.num_tokens[rows] -= self.in_flight[rows]
        table.num_outputs[rows] -= self.in_flight[rows]
        self.in_flight[rows] = 0
        for row in np.flatnonzero(self.status != FREE).tolist():
            if (pooled := self.state(row).pooled) is not None:
                pooled.forget_asked()
        if self.prefixes.hits is not None:
            self.cache.lose_device()
            for row in self.rows(WAITING).tolist():
                self.await_hits(self.state(row))

    # --- ends ------------------------------------------------------------------------------------------------------

    def finish(
        self,
        state: RequestState,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        new_token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        pooled: NDArray[np.float32] | None = None,
    ) -> None:
        """End a request, whatever its status. All requests end here, unless the engine itself stops (`end_all`)."""
        row = state.row
        if self.status[row] == RUNNING:
            self.release(row, FREE)
        self.prefixes.untrack(row)
        self.status[row] = FREE
        self._by_rank = None
        self.by_row[row] = None
        del self.by_id[state.request.request_id]
        self._learn_length(state, reason)
        if self.table.best_effort[row]:
            self._counters.ended_best_effort_tokens += state.num_known - state.prompt_len
        if self.sessions is not None:
            self._end_call(state)
        self.table.remove(row)
        self._announce_end(state, reason, stop_reason, error, new_token_ids or [], logprobs, prompt_logprobs, pooled)
        if state.metrics.first_scheduled_s is not None:
            self.finish_times_s.append(self._clock.now_s())

    def _end_call(self, state: RequestState) -> None:
        assert self.sessions is not None
        num_computed = state.num_known - (state.metrics.num_cached_tokens or 0) + state.metrics.recomputed_tokens
        has_run = state.metrics.first_scheduled_s is not None
        self.sessions.ended(state.request, state.row, state.num_known, num_computed, has_run=has_run)

    def _learn_length(self, state: RequestState, reason: FinishReason) -> None:
        table, num_outputs = self.table, state.num_known - state.prompt_len
        if reason in ("stop", "length"):
            table.record_output_length(num_outputs)
        numbers = table.histograms[state.row]
        if reason != "error" and num_outputs and not table.known_length[state.row]:
            table.lengths.record(numbers, num_outputs, cut_off=reason != "stop")
        table.lengths.end(numbers)

    def end_all(self, error: str) -> None:
        """End every request with an error, without changing the accounting, which may be inconsistent."""
        states = list(self.by_id.values())
        self.by_id.clear()
        for state in states:
            self._announce_end(state, "error", None, error, [], None)

    def _announce_end(
        self,
        state: RequestState,
        reason: FinishReason,
        stop_reason: int | str | None,
        error: str | None,
        new_token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: PromptLogprobs | None = None,
        pooled: NDArray[np.float32] | None = None,
    ) -> None:
        state.ended = True
        state.prompt_scores = None
        state.pooled = None
        state.metrics.finished_s = self._clock.now_s()
        self._counters.finished[reason] += 1
        self.outputs.append(
            StepOutput(
                request=state.request,
                new_token_ids=new_token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                pooled=pooled,
                finish_reason=reason,
                stop_reason=stop_reason,
                error=error,
                num_outputs=state.num_known - state.prompt_len,
                metrics=state.metrics,
            )
        )

    def take_outputs(self) -> list[StepOutput]:
        """Return and clear the outputs that have not been returned yet."""
        outputs, self.outputs = self.outputs, []
        return outputs


def _has_known_length(request: EngineRequest, constraint: TokenConstraint | None) -> bool:
    """Return True if only `max_tokens` can end a request (EOS is a stop token), so its length is known."""
    params = request.params
    return constraint is None and (not (params.stop_token_ids or params.stop) or params.min_tokens >= params.max_tokens)

"""Turns a plan into a `StepBatch`: preempts, reserves blocks, attaches cached prefixes, and does the accounting."""

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import NO_SLOT, CacheIntegrityError, HybridCache
from apt_jax.cache.block_sharing import BlockSharing, SlotTransfers
from apt_jax.cache.prefix_tree import Node
from apt_jax.core.kinds import HIDDEN, KIND_NAMES, KV, NO_KIND, NUM_KINDS
from apt_jax.core.step import NULL_BLOCK, TOKEN_ON_DEVICE, Conversions, PoolSpan, PromptTargets, StepBatch
from apt_jax.core.tiers import HostMemory
from apt_jax.engine.counters import EngineCounters, RecomputeCause
from apt_jax.engine.iteration_recorder import IterationRecorder
from apt_jax.engine.policy_runner import PolicyRunner
from apt_jax.engine.recovery import StepLimits
from apt_jax.engine.request_state import FilledBlocks, RequestState
from apt_jax.engine.request_states import ENDING, RUNNING, WAITING, RequestStates
from apt_jax.sched.view import Plan


class _CopySource(NamedTuple):
    """Group that a request's first new one begins as a copy of, as it was before this step gave blocks away."""

    group: NDArray[np.int32] | Node
    """Its blocks (first, second), or the group where it is copied from host memory."""
    is_downward: bool
    """True if positions lie in it from the right end."""


class PlanFilter:
    """Checks plans against the states of the requests.

    Args:
        states: the requests as they are.
        limits: of a step.
        policies: receives violations.
        is_offered: (num_kinds,) cache kinds on offer.
        can_convert: whether rows may be converted.
    """

    def __init__(
        self,
        states: RequestStates,
        limits: StepLimits,
        policies: PolicyRunner,
        is_offered: NDArray[np.bool_],
        can_convert: bool,
    ) -> None:
        self._states = states
        self._limits = limits
        self._policies = policies
        self._is_offered = is_offered
        self._can_convert = can_convert
        self._place = np.zeros(states.capacity, np.int32)  # scratch of `_is_plain`

    def may_preempt(self, row: int) -> bool:
        """Check that a row holds cache."""
        states = self._states
        if 0 <= row < states.capacity and states.status[row] == RUNNING:
            return True
        self._policies.report_violation(1, f"row {row} holds no cache to preempt")
        return False

    def converted_rows(self, plan: Plan, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """(n,) mask of the `rows`, checked ones of the plan, that it may convert."""
        if not plan.convert.size:
            return np.zeros(rows.size, np.bool_)
        wanted = np.isin(rows, plan.convert)
        fits = self._states.pinned_kind[rows] != HIDDEN
        may = wanted & (self._states.table.kind[rows] == HIDDEN) & fits & self._can_convert
        if may.sum() != plan.convert.size:
            bad = np.setdiff1d(plan.convert, rows[may])
            self._policies.report_violation(bad.size, f"rows {bad.tolist()} cannot be converted")
        return may

    def valid_rows(self, plan: Plan) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int8]]:
        """Return rows, numbers of tokens and kinds of a plan, without rows that cannot run."""
        rows, num_tokens, kind = (
            np.asarray(plan.rows, np.int32),
            np.asarray(plan.num_tokens, np.int32),
            np.asarray(plan.kind, np.int8),
        )
        if self._is_plain(rows, num_tokens, kind, plan.preempt):
            return rows, num_tokens, kind
        states, table = self._states, self._states.table
        known = (rows >= 0) & (rows < states.capacity) & (kind >= 0) & (kind < NUM_KINDS)
        if not known.all():
            self._policies.report_violation(int(np.count_nonzero(~known)), "unknown rows or kinds")
            rows, num_tokens, kind = rows[known], num_tokens[known], kind[known]
        status = states.status[rows]
        held = table.kind[rows]
        fresh = status == WAITING
        pinned = states.pinned_kind[rows]
        left = table.num_tokens[rows] - table.num_cached[rows]
        moved = fresh & (pinned != NO_KIND) & (pinned != kind)
        if moved.any():
            kind = np.where(moved, pinned, kind)
            most = left - table.cached_prefix_tokens[rows, kind]
            num_tokens = np.where(moved, np.minimum(num_tokens, most), num_tokens)
        ok = (fresh & (states.in_flight[rows] == 0) & self._is_offered[kind]) | ((status == RUNNING) & (held == kind))
        ok &= (num_tokens >= 1) & (num_tokens <= left - table.cached_prefix_tokens[rows, kind])
        if plan.preempt.size:
            ok &= ~np.isin(rows, plan.preempt)
        ok &= np.cumsum(num_tokens) <= self._limits.num_tokens
        if np.unique(rows).size != rows.size:
            first = np.zeros(rows.size, np.bool_)
            first[np.unique(rows, return_index=True)[1]] = True
            ok &= first
        if not ok.all():
            bad = np.flatnonzero(~ok)
            message = f"rows {rows[bad].tolist()} with {num_tokens[bad].tolist()} tokens cannot run"
            self._policies.report_violation(bad.size, message)
            rows, num_tokens, kind = rows[ok], num_tokens[ok], kind[ok]
        return rows, num_tokens, kind

    def _is_plain(
        self,
        rows: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kind: NDArray[np.int8],
        preempt: NDArray[np.int32],
    ) -> bool:
        """Return True if a plan is valid and schedules only running requests: a fast check, which most plans pass."""
        states = self._states
        if rows.min() < 0 or rows.max() >= states.capacity or preempt.size:
            return False
        if self._place.size < states.capacity:
            self._place = np.zeros(states.capacity, np.int32)
        table, n = states.table, rows.size
        order = np.arange(n, dtype=np.int32)
        self._place[rows] = order  # of a row that is there twice the last place stays
        left = table.num_tokens.take(rows) - table.num_cached.take(rows)
        ok = states.status.take(rows) == RUNNING
        ok &= self._place.take(rows) == order
        ok &= table.kind.take(rows) == kind
        ok &= num_tokens <= left
        within = num_tokens.min() >= 1 and num_tokens.sum() <= self._limits.num_tokens
        return bool(ok.all() and within)


_NO_INTS = np.zeros(0, np.int32)
_NO_TABLES = np.zeros((0, 2, 0), np.int32)


class BatchBuilder:
    """Builds the batch of a plan, and accounts for it once it has been dispatched.

    Args:
        states: the requests; those of the batch are running afterwards.
        cache: gives the blocks.
        plans: filters the plans.
        counters: counts what happens to rows.
        recorder: receives rows that must wait.
        host_memory: of the executor, where the cache has a second tier.
        lengths_only: leave token ids, block tables, sampling parameters and histories empty.
    """

    def __init__(
        self,
        states: RequestStates,
        cache: HybridCache,
        plans: PlanFilter,
        counters: EngineCounters,
        recorder: IterationRecorder,
        host_memory: HostMemory | None,
        *,
        lengths_only: bool,
    ) -> None:
        self._states = states
        self._table = states.table
        self._cache = cache
        self._host_memory = host_memory
        self._plans = plans
        self._first = np.zeros(0, np.int32)
        """`Plan.num_first` rows of the plan."""
        self._counters = counters
        self._recorder = recorder
        self._lengths_only = lengths_only
        self._block_sizes = np.array(cache.block_sizes, np.int32)
        self._from_host: dict[int, int] = {}
        """By row, positions of the step being built that are copied from host memory."""

    # --- before dispatch -------------------------------------------------------------------------------------------

    def build(self, plan: Plan) -> tuple[StepBatch | None, NDArray[np.int32], list[RequestState]]:
        """Preempt, then reserve in order. Returns the batch (None: nothing to run), its rows of the table, their
        requests."""
        states = self._states
        if plan.preempt.size:
            cause = self._cause_of_preemption(plan)
            for row in plan.preempt.tolist():
                if self._plans.may_preempt(row):
                    states.preempt(row, cause)
        if not plan.rows.size:
            return None, plan.rows, []
        rows, num_tokens, kind = self._plans.valid_rows(plan)
        self._first = plan.rows[: plan.num_first]
        if not rows.size:
            return None, rows, []

        slots = states.slot[rows]
        convert = self._plans.converted_rows(plan, rows)
        begins = self._states.prefixes.converted_rows(rows, kind)
        found, sources = self._attach(rows, slots, kind, begins)
        if begins is not None:  # they hold layer inputs for now
            begins &= found > 0
            kind = np.where(begins, np.int8(HIDDEN), kind)
            convert |= begins
        inputs: dict[int, NDArray[np.int32]] = {}
        if not convert.any():
            copied = np.isin(rows, list(sources))
            ok = self._reserve(rows, slots, num_tokens, kind, found, copied)
        else:  # after the others: the blocks that conversions give back are for the next step
            ok, others = np.zeros(rows.size, np.bool_), np.flatnonzero(~convert)
            their_slots = slots[others]
            copied = np.isin(rows[others], list(sources))
            ok[others] = self._reserve(
                rows[others], their_slots, num_tokens[others], kind[others], found[others], copied
            )
            slots[others] = their_slots
            inputs, ok[convert] = self._convert(rows[convert], num_tokens[convert], found[convert])
            kind = np.where(np.isin(rows, list(inputs)), np.int8(KV), kind)
        if not ok.all():
            self._counters.num_deferred_requests += int(np.count_nonzero(~ok))
            if self._recorder.current is not None:
                self._recorder.current.deferred = tuple(states.ids(rows[~ok]))
            rows, num_tokens, kind, slots = rows[ok], num_tokens[ok], kind[ok], slots[ok]
            found = found[ok]
            if not rows.size:
                self._cache.cancel_saves()
                states.sync_charges()
                return None, rows, []
        for i in np.flatnonzero(states.status[rows] == WAITING).tolist():
            if self._cache.tier is not None:
                self._count_restore(int(rows[i]), int(kind[i]), int(found[i]))
            states.start(int(rows[i]), int(slots[i]), int(kind[i]), int(found[i]))
        requests = states.states(rows)
        self._turn_copies(rows, sources)
        batch = self._make_batch(rows, num_tokens, kind, slots, requests)
        self._cache.check_writable(slots, batch.start)
        sources = {row: sources[row] for row in rows.tolist() if row in sources} if sources else {}
        if sources:
            batch = dataclasses.replace(batch, copies=self._copies(sources))
        if self._cache.tier is not None:
            saves, loads = self._cache.tier.take_transfers()
            if len(saves) or len(loads):
                batch = dataclasses.replace(batch, saves=saves, loads=loads)
        if self._cache.sharing is not None:
            batch = _with_slot_transfers(batch, self._cache.sharing.take_transfers())
            states.sync_checkpoints()
        if inputs:
            batch = dataclasses.replace(batch, conversions=_conversions_of(rows, inputs))
        return batch, rows, requests

    def _cause_of_preemption(self, plan: Plan) -> RecomputeCause:
        """`MEMORY` if the running requests do not all fit the pool: those of the plan with the tokens that they get,
        the preempted ones with one more, the others as they are."""
        table, running = self._table, self._states.rows(RUNNING)
        num_tokens = np.zeros(self._states.capacity, np.int64)
        for rows, more in ((plan.preempt, np.int32(1)), (plan.rows, plan.num_tokens)):
            known = (rows >= 0) & (rows < num_tokens.size)
            num_tokens[rows[known]] = np.broadcast_to(more, rows.shape)[known]
        kind = table.kind[running]
        groups = -(-(table.num_cached[running] + num_tokens[running]) // self._block_sizes[kind])
        needed = groups * np.array(self._cache.blocks_per_group)[kind]
        growth = np.maximum(needed - table.num_blocks[running] - table.num_shared[running], 0)
        return RecomputeCause.MEMORY if int(growth.sum()) > self._cache.num_free else RecomputeCause.POLICY

    def _attach(
        self,
        rows: NDArray[np.int32],
        slots: NDArray[np.int32],
        kind: NDArray[np.int8],
        begins: NDArray[np.bool_] | None,
    ) -> tuple[NDArray[np.int32], dict[int, _CopySource]]:
        """Give requests that begin their cached prefixes, all of them before any request gets new blocks.

        Args:
            rows, kind: of the plan.
            slots: changed in place where a row takes one.
            begins: rows that begin with layer inputs, to be converted; None: there are none.

        Returns:
            (n,) positions that need no computing, and by row the group that its first new one begins as a copy of.
        """
        found = np.zeros(rows.size, np.int32)
        sources: dict[int, _CopySource] = {}
        hits, cache = self._states.prefixes.hits, self._cache
        if hits is None:
            return found, sources
        loads = cache.tier is not None and bool(self._table.host_prefix_tokens[rows, kind].any())
        self._from_host.clear()
        if loads:
            self._prepare_loads(rows, kind)
        found += self._table.cached_prefix_tokens[rows, kind]  # 0 where they run
        for i in np.flatnonzero(found).tolist():
            row, owner = int(rows[i]), int(self._table.rank[rows[i]])
            of_kind, is_converted = int(kind[i]), begins is not None and bool(begins[i])
            if loads:  # those of a request before it may have taken, or brought, what this one finds
                found[i] = min(found[i], self._table.cached_prefix_tokens[row, of_kind])
                self._from_host[row] = min(int(self._table.host_prefix_tokens[row, of_kind]), int(found[i]))
            if hits.is_converted(row, of_kind) != is_converted:
                found[i] = 0
                continue
            if is_converted:
                if found[i] and cache.attach(owner, hits.found_nodes(row, of_kind), HIDDEN):
                    slots[i] = cache.slot_of(owner)
                else:
                    found[i] = 0
                continue
            num_groups, rest = divmod(int(found[i]), cache.block_sizes[of_kind])
            node = hits.node(row, of_kind)
            if num_groups and cache.attach(owner, node.path(num_groups), of_kind):
                slots[i] = cache.slot_of(owner)
            elif num_groups:
                found[i] = rest = 0
            if rest:
                source = cache.copy_source(node)
                if source is None:
                    found[i] -= rest
                else:
                    sources[row] = _CopySource(source, self._is_downward(source))
        return found, sources

    def _count_restore(self, row: int, kind: int, found: int) -> None:
        """Count how a request that begins uses its cached prefix."""
        copied, hits = self._from_host.pop(row, 0), self._states.prefixes.hits
        assert hits is not None
        self._counters.host_hit_tokens += copied if found else 0
        if hits.is_converted(row, kind) and found:
            self._counters.restores["converted"] += 1
        elif copied and found:
            self._counters.restores[KIND_NAMES[kind]] += 1
        elif hits.node(row, kind).depth > -(-found // self._cache.block_sizes[kind]):
            self._counters.restores["recomputed"] += 1

    def _prepare_loads(self, rows: NDArray[np.int32], kind: NDArray[np.int8]) -> None:
        """Check the copies in host memory that rows begin with; what is lost is not found any more."""
        hits, cache, table = self._states.prefixes.hits, self._cache, self._table
        assert hits is not None
        assert cache.tier is not None
        assert self._host_memory is not None
        nodes: dict[Node, None] = {}
        for i in np.flatnonzero(table.cached_prefix_tokens[rows, kind]).tolist():
            path = hits.found_nodes(int(rows[i]), int(kind[i]))
            cache.touch(path)
            nodes.update(dict.fromkeys(node for node in path if node.block == NULL_BLOCK))
        wanted = list(nodes)
        ready = self._host_memory.ready_to_load(np.array([block for node in wanted for block in node.host], np.int32))
        ends = np.cumsum([len(node.host) for node in wanted])
        lost = [node for node, end in zip(wanted, ends, strict=True) if not ready[end - len(node.host) : end].all()]
        self._counters.num_lost_groups += len(lost)
        cache.drop_lost(lost)
        cache.tier.pin([node for node in wanted if node.host])

    def _reserve(
        self,
        rows: NDArray[np.int32],
        slots: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kind: NDArray[np.int8],
        found: NDArray[np.int32],
        copied: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Reserve blocks for rows, in order; `slots` changes in place where a row takes one. (n,) False: the row must
        wait. `copied`: the first new group of the row begins as a copy.

        Rows that must wait give back the prefix that they have found, which may help others.
        """
        cache, sharing, owners = self._cache, self._cache.sharing, self._table.rank[rows]
        if sharing is not None:
            return self._reserve_shared(sharing, rows, slots, num_tokens, kind, found, copied)
        ok = cache.reserve_rows(owners, slots, self._table.num_cached[rows] + found + num_tokens, kind)
        if not ok.all() and self._give_back(rows, slots, ok, found):
            again = np.flatnonzero(~ok & (found == 0))
            their_slots = slots[again]
            num_positions = self._table.num_cached[rows[again]] + num_tokens[again]
            ok[again] = cache.reserve_rows(owners[again], their_slots, num_positions, kind[again])
            slots[again] = their_slots
        return ok

    def _give_back(
        self, rows: NDArray[np.int32], slots: NDArray[np.int32], ok: NDArray[np.bool_], found: NDArray[np.int32]
    ) -> bool:
        """Give back the prefixes that rows that must wait have found; returns True if there were any. `slots` changes in
        place."""
        gave_back = False
        for i in np.flatnonzero(~ok & (found > 0)).tolist():
            owner = int(self._table.rank[rows[i]])
            if self._cache.slot_of(owner) != NO_SLOT:
                self._cache.release(owner)
                slots[i] = NO_SLOT
                gave_back = True
        return gave_back

    def _reserve_shared(
        self,
        sharing: BlockSharing,
        rows: NDArray[np.int32],
        slots: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kind: NDArray[np.int8],
        found: NDArray[np.int32],
        copied: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """`_reserve` where requests share blocks: what they lack of their own is restored."""
        table = self._table
        best_effort = table.best_effort[rows]
        if self._first.size:  # they have their turn among real-time ones
            best_effort &= ~np.isin(rows, self._first)
        is_lost, ok = self._lost_slots(sharing, slots), np.zeros(rows.size, np.bool_)

        def reserve(index: NDArray[np.intp]) -> None:
            of_rows, their_slots = rows[index], slots[index]
            ok[index] = sharing.reserve_rows(
                table.rank[of_rows],
                their_slots,
                table.num_cached[of_rows] + found[index] + num_tokens[index],
                kind[index],
                best_effort[index],
                copied[index],
                running=slots[ok | (found > 0)].tolist(),  # what they have found is not taken from them
            )
            slots[index] = their_slots

        reserve(np.flatnonzero(~is_lost))
        if not ok.all() and self._give_back(rows, slots, ok, found):
            reserve(np.flatnonzero(~ok & ~is_lost & (found == 0)))
        for row in rows[is_lost].tolist():
            self._states.preempt(row, RecomputeCause.PREFIX_LOST)
        for owner in sharing.transfers.lost:
            if self._cache.slot_of(owner) != NO_SLOT:  # it has not given its cache back already
                row = int(np.flatnonzero((table.rank == owner) & table.live)[0])
                self._states.preempt(row, RecomputeCause.MEMORY)
        return ok

    def _lost_slots(self, sharing: BlockSharing, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """(n,) True: the request's cache in host memory is lost."""
        if not sharing.preempted:
            return np.zeros(slots.size, np.bool_)
        spans, owners = sharing.lacking(slots)
        if not len(spans):
            return np.zeros(slots.size, np.bool_)
        assert self._host_memory is not None
        return np.isin(slots, owners[~self._host_memory.slots_ready(spans)])

    def _convert(
        self, rows: NDArray[np.int32], num_tokens: NDArray[np.int32], found: NDArray[np.int32]
    ) -> tuple[dict[int, NDArray[np.int32]], list[bool]]:
        """Convert rows from layer inputs to keys and values, as far as there are blocks.

        Args:
            found: (n,) positions that those which begin have found.

        Returns:
            By row the blocks of its layer inputs, of those that change; and for each row, whether it can run.
        """
        table, states, cache = self._table, self._states, self._cache
        owners = table.rank[rows].tolist()
        given_back, ok = cache.convert_rows(owners, (table.num_cached[rows] + found + num_tokens).tolist())
        inputs = {row: b for row, b in zip(rows.tolist(), given_back, strict=True) if b is not None}
        for row, owner, num, can_run in zip(rows.tolist(), owners, found.tolist(), ok, strict=True):
            begins = states.status[row] == WAITING
            if begins and not can_run:
                cache.release(owner)
            if row in inputs:
                if begins:
                    self._count_restore(row, KV, num)
                    states.start(row, cache.slot_of(owner), HIDDEN, num)
                states.convert(row)
        return inputs, ok

    def _make_batch(
        self,
        rows: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kind: NDArray[np.int8],
        slots: NDArray[np.int32],
        requests: list[RequestState],
    ) -> StepBatch:
        table, states = self._table, self._states
        start = table.num_cached.take(rows)
        total = table.num_tokens.take(rows)
        samples = start + num_tokens == total
        if self._lengths_only:
            return StepBatch(
                slots=slots,
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
                masked=_masked_rows(requests, samples),
            )
        single = samples & (num_tokens == 1)
        in_flight = states.in_flight[rows] > 0
        if not (single | ~in_flight).all():
            raise CacheIntegrityError("a token that the host has not seen would have to be recomputed")
        last = np.where(in_flight, np.int32(TOKEN_ON_DEVICE), states.last_token[rows])
        if single.all():
            token_ids = last
        else:
            ends = np.cumsum(num_tokens)
            token_ids = np.empty(int(ends[-1]), np.int32)
            token_ids[ends[single] - 1] = last[single]
            for i in np.flatnonzero(~single).tolist():
                begin, n = int(start[i]), int(num_tokens[i])
                token_ids[ends[i] - n : ends[i]] = requests[i].tokens[begin : begin + n]
        return StepBatch(
            slots=slots,
            num_tokens=num_tokens,
            start=start,
            kind=kind,
            token_ids=token_ids,
            block_tables=self._cache.directed_tables(slots),
            samples=samples,
            position=table.num_outputs[rows],
            params=[state.params for state in requests],
            history=[state.tokens[: state.num_known] for state in requests],
            prompt_len=table.prompt_len[rows],
            masked=_masked_rows(requests, samples),
            prompt_targets=_prompt_targets(requests, start, num_tokens),
            adapters=states.adapter[rows] if states.adapters else None,
            pool_spans=_pool_spans(requests, start, num_tokens),
        )

    def _is_downward(self, source: NDArray[np.int32] | Node) -> bool:
        """True if positions lie from the right end in a group that is to be copied."""
        if isinstance(source, Node):
            return source.host_is_downward
        return self._cache.sharing is not None and bool(self._cache.sharing.is_downward[source[0]])

    def _turn_copies(self, rows: NDArray[np.int32], sources: dict[int, _CopySource]) -> None:
        """Note from which end positions lie in groups that begin as copies."""
        sharing = self._cache.sharing
        if sharing is None:
            return
        for row in rows.tolist() if sources else ():
            if row in sources:
                size = self._cache.block_sizes[self._table.kind[row]]
                first = self._cache.tables[self._states.slot[row], 0, int(self._table.num_cached[row]) // size]
                sharing.is_downward[first] = sources[row].is_downward

    def _copies(self, sources: dict[int, _CopySource]) -> NDArray[np.int32]:
        """(m, 2) source and destination blocks: the last group of each row is a copy."""
        pairs = [np.zeros((0, 2), np.int32)]
        for row, (source, _) in sources.items():
            at = int(self._table.num_cached[row]) // self._cache.block_sizes[self._table.kind[row]]
            blocks = self._cache.tables[self._states.slot[row], :, at]
            if isinstance(source, Node):
                assert self._cache.tier is not None
                self._cache.tier.load_copy(source, blocks.tolist())
            else:
                pairs.append(np.stack([source, blocks], axis=1))
        copies = np.concatenate(pairs)
        return copies[copies[:, 1] != NULL_BLOCK]

    def record(self, batch: StepBatch | None, rows: NDArray[np.int32]) -> None:
        """Record the result of `build`, if there is a listener."""
        if self._recorder.current is not None:
            self._recorder.built(
                batch,
                self._states.ids(rows),
                num_waiting=self._states.count(WAITING),
                num_running=self._states.count(RUNNING),
                free_blocks=self._cache.num_free,
            )

    # --- after dispatch --------------------------------------------------------------------------------------------

    def account(self, batch: StepBatch, rows: NDArray[np.int32], requests: list[RequestState]) -> list[FilledBlocks]:
        """Advance the counts by a dispatched step; returns the groups that it fills."""
        states, table, cache = self._states, self._table, self._cache
        end = batch.start + batch.num_tokens
        table.num_cached[rows] = end
        has_prefixes = cache.prefixes is not None
        if cache.ownership_changed:
            states.sync_charges()
        elif not has_prefixes:
            table.num_blocks[rows] = cache.num_blocks_of(batch.slots)
        else:
            table.num_blocks[rows] = cache.num_private_blocks_of(batch.slots)
            table.num_shared[rows] = cache.num_blocks_of(batch.slots) - table.num_blocks[rows]
        filled = self._filled(batch, rows, end) if has_prefixes else []
        again = np.minimum(end, states.computed_once.take(rows)) - batch.start
        for i in np.flatnonzero(again > 0).tolist() if again.max() > 0 else ():
            states.count_recomputed(requests[i], int(batch.start[i]), int(again[i]))
        sampling = rows if batch.samples.all() else rows[batch.samples]
        num_tokens = table.num_tokens.take(sampling) + 1
        table.num_tokens[sampling] = num_tokens
        table.num_outputs[sampling] += 1
        table.tokens_since_preemption[sampling] += 1
        states.in_flight[sampling] += 1
        last = sampling[num_tokens >= table.max_tokens_total.take(sampling)]
        for row in last.tolist():
            # Its last token is in flight, no later step will read its cache, and steps run in order.
            states.release(row, ENDING)
        return filled

    def _filled(self, batch: StepBatch, rows: NDArray[np.int32], end: NDArray[np.int32]) -> list[FilledBlocks]:
        """Full groups whose fate a step decides. A chunk that samples nothing decides nothing: it may not be finite."""
        num_filled = self._states.num_filled
        groups = end // self._block_sizes[batch.kind]
        more = batch.samples & (groups > num_filled[rows])
        filled = []
        for i in np.flatnonzero(more).tolist():
            begin = int(num_filled[rows[i]])
            firsts, generations = self._cache.expect(int(batch.slots[i]), begin, int(groups[i]))
            filled.append(
                FilledBlocks(index=i, kind=int(batch.kind[i]), begin=begin, firsts=firsts, generations=generations)
            )
        num_filled[rows[more]] = groups[more]
        return filled


def _with_slot_transfers(batch: StepBatch, transfers: SlotTransfers) -> StepBatch:
    if not (transfers.saves or transfers.copies or transfers.loads):
        return batch
    copies = np.array(transfers.copies, np.int32).reshape(-1, 2)
    return dataclasses.replace(
        batch,
        slot_saves=np.array(transfers.saves, np.int32).reshape(-1, 5),
        slot_loads=np.array(transfers.loads, np.int32).reshape(-1, 5),
        copies=np.concatenate([batch.copies, copies]),
    )


def _masked_rows(requests: list[RequestState], samples: NDArray[np.bool_]) -> NDArray[np.int64] | None:
    rows = [i for i, state in enumerate(requests) if state.constraint is not None and samples[i]]
    return np.array(rows, np.int64) if rows else None


def _prompt_targets(
    requests: list[RequestState], start: NDArray[np.int32], num_tokens: NDArray[np.int32]
) -> dict[int, PromptTargets]:
    targets: dict[int, PromptTargets] = {}
    for row, state in enumerate(requests):
        if state.prompt_scores is not None:
            found = state.prompt_scores.targets(int(start[row]), int(num_tokens[row]))
            if found is not None:
                targets[row] = found
    return targets


def _pool_spans(
    requests: list[RequestState], start: NDArray[np.int32], num_tokens: NDArray[np.int32]
) -> dict[int, PoolSpan]:
    spans: dict[int, PoolSpan] = {}
    for row, state in enumerate(requests):
        if state.pooled is not None:
            span = state.pooled.take_span(int(start[row]), int(num_tokens[row]))
            if span is not None:
                spans[row] = span
    return spans


def _conversions_of(rows: NDArray[np.int32], inputs: dict[int, NDArray[np.int32]]) -> Conversions:
    """`StepBatch.conversions` of a step's rows; `inputs` are the blocks of those that are converted."""
    at = np.flatnonzero(np.isin(rows, list(inputs)))
    tables = [inputs[row] for row in rows[at].tolist()]
    padded = np.full((at.size, max(t.size for t in tables)), NULL_BLOCK, np.int32)
    for line, table in zip(padded, tables, strict=True):
        line[: table.size] = table
    return Conversions(rows=at, inputs=padded)

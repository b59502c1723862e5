"""Builds a `StepBatch` from a plan: preempts requests, attaches cached prefixes, reserves blocks, and updates the
request table."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import CacheIntegrityError, HybridCache
from apt_jax.cache.group_pool import CopySource
from apt_jax.cache.windows import WindowTables
from apt_jax.core.kinds import HIDDEN, KV, WINDOWED
from apt_jax.core.step import NULL_BLOCK, TOKEN_ON_DEVICE, Conversions, PoolSpan, PromptTargets, StepBatch
from apt_jax.engine.batch.cached_prefixes import CachedPrefixes
from apt_jax.engine.batch.plan_filter import PlanFilter
from apt_jax.engine.batch.reserver import Demand, Reserver
from apt_jax.engine.counters import EngineCounters, RecomputeCause
from apt_jax.engine.iteration_recorder import IterationRecorder
from apt_jax.engine.request_state import FilledBlocks, RequestState
from apt_jax.engine.request_states import ENDING, RUNNING, WAITING, RequestStates
from apt_jax.sched.view import Plan

_NO_INTS = np.zeros(0, np.int32)
_NO_TABLES = np.zeros((0, 2, 0), np.int32)


class BatchBuilder:
    """Builds the batch of a plan, and updates the request table after the batch has been dispatched.

    Args:
        states: the requests; the requests of a batch are running afterwards.
        cache: holds the blocks.
        plans: filters the plans.
        prefixes: attaches cached prefixes to requests that start to run.
        reserver: reserves blocks for rows.
        counters: counts deferred rows and restored prefixes.
        recorder: receives the batch and the rows that must wait.
        lengths_only: leave token ids, block tables, sampling parameters and histories empty.
    """

    def __init__(
        self,
        states: RequestStates,
        cache: HybridCache,
        plans: PlanFilter,
        prefixes: CachedPrefixes,
        reserver: Reserver,
        counters: EngineCounters,
        recorder: IterationRecorder,
        *,
        lengths_only: bool,
    ) -> None:
        self._states = states
        self._table = states.table
        self._cache = cache
        self._plans, self._prefixes, self._reserver = plans, prefixes, reserver
        self._counters = counters
        self._recorder = recorder
        self._lengths_only = lengths_only
        self._block_sizes = np.array(cache.block_sizes, np.int32)

    # --- before dispatch -------------------------------------------------------------------------------------------

    def build(self, plan: Plan) -> tuple[StepBatch | None, NDArray[np.int32], list[RequestState]]:
        """Preempt the requests that a plan preempts, reserve blocks for its rows in order, and build the batch.

        Returns:
            The batch (None: nothing to run), its rows in the request table, and their requests.
        """
        states = self._states
        if plan.preempt.size:
            cause = self._cause_of_preemption(plan)
            for row in plan.preempt.tolist():
                if self._plans.may_preempt(row):
                    states.preempt(row, cause)
        if not plan.rows.size:
            return None, plan.rows, []
        rows, num_tokens, kind = self._plans.valid_rows(plan)
        if not rows.size:
            return None, rows, []

        slots = states.slot[rows]
        convert = self._plans.converted_rows(plan, rows)
        begins = self._states.prefixes.converted_rows(rows, kind)
        found, sources = self._prefixes.attach(rows, slots, kind, begins)
        if begins is not None:  # these rows hold layer inputs until they are converted
            begins &= found > 0
            kind = np.where(begins, np.int8(HIDDEN), kind)
            convert |= begins
        demand = Demand(
            rows=rows,
            slots=slots,
            num_tokens=num_tokens,
            kind=kind,
            found=found,
            sources=sources,
            first=plan.rows[: plan.num_first],
        )
        inputs: dict[int, NDArray[np.int32]] = {}
        if not convert.any():
            ok = self._reserver.reserve(demand)
        else:  # last, because the blocks that conversions free cannot be used in this step
            ok, others = np.zeros(rows.size, np.bool_), np.flatnonzero(~convert)
            other_demand = demand.part(others)
            ok[others] = self._reserver.reserve(other_demand)
            slots[others] = other_demand.slots
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
            row, of_kind, num = int(rows[i]), int(kind[i]), int(found[i])
            copied = 0 if self._cache.tier is None else self._prefixes.count_restore(row, of_kind, num)
            states.start(row, int(slots[i]), of_kind, num, copied)
        requests = states.states(rows)
        copies = self._begin_copies(rows, slots, sources) if sources else None
        batch = self._make_batch(rows, num_tokens, kind, slots, requests)
        self._cache.check_writable(slots, batch.start)
        if copies is not None:
            batch = dataclasses.replace(batch, copies=copies)
        if self._cache.tier is not None:
            saves, loads = self._cache.tier.take_transfers()
            if len(saves) or len(loads):
                batch = dataclasses.replace(batch, saves=saves, loads=loads)
        batch = self._reserver.finish(batch)
        if inputs:
            batch = dataclasses.replace(batch, conversions=_conversions_of(rows, inputs))
        return batch, rows, requests

    def _cause_of_preemption(self, plan: Plan) -> RecomputeCause:
        """Return `MEMORY` if the pool is too small for all running requests, else `POLICY`. Requests of the plan are
        counted with the tokens that it gives them, preempted requests with one more token, the others unchanged."""
        table, running = self._table, self._states.rows(RUNNING)
        num_tokens = np.zeros(self._states.capacity, np.int64)
        for rows, more in ((plan.preempt, np.int32(1)), (plan.rows, plan.num_tokens)):
            known = (rows >= 0) & (rows < num_tokens.size)
            num_tokens[rows[known]] = np.broadcast_to(more, rows.shape)[known]
        kind = table.kind[running]
        positions = table.num_cached[running] + num_tokens[running]
        needed = -(-positions // self._block_sizes[kind]) * np.array(self._cache.blocks_per_group)[kind]
        if self._cache.windows is not None:
            needed += self._cache.windows.spec.num_blocks(positions)
        growth = np.maximum(needed - table.num_blocks[running] - table.num_shared[running], 0)
        return RecomputeCause.MEMORY if int(growth.sum()) > self._cache.num_free else RecomputeCause.POLICY

    def _convert(
        self, rows: NDArray[np.int32], num_tokens: NDArray[np.int32], found: NDArray[np.int32]
    ) -> tuple[dict[int, NDArray[np.int32]], list[bool]]:
        """Convert rows from layer inputs to keys and values while there are free blocks.

        Args:
            found: (n,) numbers of cached positions attached to rows that start to run; 0 for running rows.

        Returns:
            A map from each converted row to its blocks of layer inputs, and for each of `rows` True if it can run.
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
                    copied = self._prefixes.count_restore(row, KV, num)
                    states.start(row, cache.slot_of(owner), HIDDEN, num, copied)
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
            windows=None if self._cache.windows is None else self._cache.windows.blocks_of(slots),
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

    def _begin_copies(
        self, rows: NDArray[np.int32], slots: NDArray[np.int32], sources: Mapping[int, CopySource]
    ) -> NDArray[np.int32]:
        """Prepare the step to copy each group in `sources` into its row's first new group.

        Returns:
            (m, 2) source and destination blocks that the step must copy.
        """
        copies = [
            self._cache.begin_copy(slot, int(self._table.num_cached[row]), sources[row])
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True)
            if row in sources
        ]
        return np.concatenate([np.zeros((0, 2), np.int32), *copies])

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
        """Update the request table for a dispatched step, and return the groups that the step fills."""
        states, table, cache = self._states, self._table, self._cache
        end = batch.start + batch.num_tokens
        table.num_cached[rows] = end
        has_prefixes = cache.prefixes is not None
        filled = self._filled(batch, rows, end) if has_prefixes else []
        cache.leave_windows(batch.slots, end)
        if cache.ownership_changed:
            states.sync_charges()
        elif not has_prefixes:
            table.num_blocks[rows] = cache.num_blocks_of(batch.slots)
        else:
            table.num_blocks[rows] = cache.num_private_blocks_of(batch.slots)
            table.num_shared[rows] = cache.num_blocks_of(batch.slots) - table.num_blocks[rows]
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
            # Its last token is in flight, so no later step reads its cache, and steps run in order.
            states.release(row, ENDING)
        return filled

    def _filled(self, batch: StepBatch, rows: NDArray[np.int32], end: NDArray[np.int32]) -> list[FilledBlocks]:
        """Return the full groups that the commit of a step registers or discards. Rows that sample no token are left
        out, because it is not known whether their values are finite."""
        num_filled = self._states.num_filled
        filled = [] if self._cache.windows is None else self._filled_windows(self._cache.windows, batch, end)
        groups = end // self._block_sizes[batch.kind]
        more = batch.samples & (groups > num_filled[rows])
        for i in np.flatnonzero(more).tolist():
            begin = int(num_filled[rows[i]])
            firsts, generations = self._cache.expect(int(batch.slots[i]), begin, int(groups[i]))
            filled.append(
                FilledBlocks(index=i, kind=int(batch.kind[i]), begin=begin, firsts=firsts, generations=generations)
            )
        num_filled[rows[more]] = groups[more]
        return filled

    def _filled_windows(self, windows: WindowTables, batch: StepBatch, end: NDArray[np.int32]) -> list[FilledBlocks]:
        """Return `_filled` for windowed layers, whose groups are registered first: prefixes are found by the others."""
        groups = end // windows.spec.block_size
        filled = []
        for i in np.flatnonzero(batch.samples & (groups > windows.num_filled[batch.slots])).tolist():
            expected = windows.expect(int(batch.slots[i]), int(groups[i]))
            if expected is not None:
                begin, firsts, generations = expected
                filled.append(FilledBlocks(index=i, kind=WINDOWED, begin=begin, firsts=firsts, generations=generations))
        return filled


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
    """Return `StepBatch.conversions`; `inputs` maps each converted row to its blocks of layer inputs."""
    at = np.flatnonzero(np.isin(rows, list(inputs)))
    tables = [inputs[row] for row in rows[at].tolist()]
    padded = np.full((at.size, max(t.size for t in tables)), NULL_BLOCK, np.int32)
    for line, table in zip(padded, tables, strict=True):
        line[: table.size] = table
    return Conversions(rows=at, inputs=padded)

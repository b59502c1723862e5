"""One algorithm, many schedulers: InferMax Algorithm 1 (§3.1) and its configurations (Table 1, §4.4, §4.6, §6)."""

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.reservation import Reservation, expected_tokens
from apt_jax.sched.step_packer import (
    Rows,
    allowed_kinds,
    decode_plan,
    held_blocks_for,
    split_running,
    start_blocks_for,
)
from apt_jax.sched.view import Plan, SchedulerView

First = Literal["decode", "prefill", "nobody"]
Order = Literal["arrival", "input", "output"]
Reserve = Literal["input", "all", "estimate"]

FEW_OUTPUTS = 8
"""Ended requests below which the histogram of output lengths says nothing."""


class UnifiedPolicy:
    """GetNextBatch of InferMax Algorithm 1: groups in order of priority, each candidate added if it can be allocated.

    The steps of the paper and the arguments that stand for them:

    1. *GroupRequests*: `first="decode"` makes the groups running in decode, running in prefill, waiting (Sarathi);
       `"prefill"` running in prefill, waiting, running in decode (vLLM); `"nobody"` one group of all. Inside a group
       `order` decides, ties by arrival, except that with `longest_first` those that decode come by falling cache size.
    2. *CheckHybridBatching*: without `hybrid` a candidate of the other phase than the batch is skipped.
    3. *CanAllocate*: a decode takes one of the C tokens of the step, a prefill must find its tokens within P as well,
       all tokens of the batch counted. With `chunked` it is cut to what is left of P. In memory a decode needs its next
       position and a prefill its whole prompt, of which the part not yet computed stays set aside while it runs.
       `reserve="all"` admits a waiting request only if everybody's full length fits (I + O - 1 positions; O is
       `max_tokens`, which is the output length only where it is known, as in a simulation): nobody is ever evicted.
       `"estimate"` does the same with estimated lengths, and a number with that quantile of them.
    4. *EvictLowerPriorityRequest*: where memory is short, running requests of lower priority than the candidate lose
       their cache, the lowest first, and the candidate itself where there are none. Waiting candidates evict nobody,
       but end their group; in the one group of `first="nobody"` they rank above running ones and evict like them.

    Where the paper is silent:

    * Memory is counted in blocks. A request takes KV, or the hidden kind where KV is not on offer or can never hold it.
    * A waiting request also needs a slot; slots are never taken from others.
    * An evicted request joins the waiting group as its first member, and does not fit: where waiting ones come last,
      nobody is admitted in the same iteration.
    * The first waiting request that does not fit, for tokens or memory, ends admission: skipping it could starve it.
    * A prompt longer than P is computed in chunks also without `chunked`: it could never run otherwise.

    How it is computed: lists of candidates are only gone through one by one where a prompt is. For those that run, the
    loop of steps 3 and 4 ends with a prefix of them by priority, the longest one whose positions fit the pool.

    *Estimates* (§6). `RequestTable.output_lengths` is the online histogram. A request with o outputs so far is expected
    to reach the mean length of the ended ones that were longer than o (the sum over many requests is near the sum of
    their means), at most its `max_tokens`; nothing is reserved while fewer than `FEW_OUTPUTS` of those are known.
    In a simulation of 3000 Azure conversations (Llama-3-70B, four A100, M = 100K, all there at once) estimates differ
    little: the mean ends after 1056 s, quantiles of 0.5, 0.7 and 0.9 after 1057, 1061 and 1063 s. `longest_first` alone
    takes 1051 s with 212 evictions, `sarathi` 1060 s with 141.

    *Ranks* (§4.6). The paper does not say which switches its ranked schedulers have. Here they are those of Sarathi.

    *Starvation.* All but `order="input"` and `"output"` serve by arrival. Those two prefer short requests and never
    reach a long one while short ones keep the pool full.

    Args:
        name: of the policy.
        first: the phase that goes first.
        order: of requests inside a group: arrival, fewer prompt tokens, fewer output tokens (`max_tokens`).
        longest_first: decoding requests by falling number of cached tokens.
        hybrid: decodes and prefills may share a step.
        chunked: prompts may be computed in chunks.
        prefill_tokens: P; at most `max_num_batched_tokens`, which is C.
        reserve: what a waiting request and those that run are counted with when it is admitted; a number in (0, 1]: the
            quantile of its output length (`apt_jax.sched.reservation.expected_tokens`).
    """

    def __init__(
        self,
        name: str,
        *,
        first: First = "decode",
        order: Order = "arrival",
        longest_first: bool = False,
        hybrid: bool = True,
        chunked: bool = True,
        prefill_tokens: int = 512,
        reserve: Reserve | float = "input",
    ) -> None:
        if prefill_tokens < 1:
            raise ValueError(f"{prefill_tokens=} must be at least 1")
        if not isinstance(reserve, str):
            Reservation(reserve)  # raises where it is no quantile
        self.name = name
        self.first = first
        self.order = order
        self.longest_first = longest_first
        self.hybrid = hybrid
        self.chunked = chunked
        self.prefill_tokens = prefill_tokens
        self.reserve = reserve
        self._mean_length: NDArray[np.float64] | None = None
        self._num_lengths = -1

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        rows, waiting, above = self._grouped(view)
        decodes = view.remaining(rows) == 1
        held = table.num_blocks[rows]
        running = _Running(
            rows=rows,
            decodes=decodes,
            num_decodes=int(np.count_nonzero(decodes)),
            held=held,
            need=held_blocks_for(view, rows, table.num_tokens[rows]),
            capacity=view.free_blocks + int(held.sum()),
        )
        step = _Prefills(min(self.prefill_tokens, view.max_num_batched_tokens))
        decodes_only = self.first == "decode" and running.num_decodes > 0 and not self.hybrid
        if (waiting.size or running.num_decodes < rows.size) and not decodes_only:
            self._prefill(view, step, running, waiting, above)
        runs = self._decode(view, step, running)

        # Step 4 for everybody at once: those stay that fit, by priority; who sits this step out needs no more blocks.
        need, preempt = running.need, rows[:0]
        if runs is not decodes:
            need = np.where(decodes & ~runs, held, need)
        capacity = running.capacity - step.blocks
        if int(need.sum()) > capacity:
            num_kept = int(np.searchsorted(np.cumsum(need), capacity, side="right"))
            rows, preempt, runs = rows[:num_kept], rows[num_kept:], runs[:num_kept]
            step.drop(preempt)
        return step.plan(view, rows if runs.all() else rows[runs], preempt)

    # --- 1. GroupRequests ------------------------------------------------------------------------------------------

    def _grouped(self, view: SchedulerView) -> tuple[Rows, Rows, NDArray[np.int64]]:
        """Running and waiting rows by falling priority, and how many running ones are above each waiting one."""
        table = view.table
        running, waiting = view.running, view.waiting
        if self.first == "nobody":
            rows = np.concatenate([running, waiting])
            length = table.prompt_len[rows]
            if self.order == "output":
                length = table.max_tokens_total[rows] - length
            key = length if self.order != "arrival" else table.rank[rows]
            order = np.lexsort((table.rank[rows], key))
            is_running = order < running.size
            above = np.cumsum(is_running)[~is_running]
            rows = rows[order]
            return rows[is_running], rows[~is_running], above
        decoding, partial = split_running(view)
        if self.longest_first:
            decoding = decoding[np.argsort(-table.num_cached[decoding], kind="stable")]
        if self.first == "decode":
            num_above, groups = running.size, (decoding, partial)
        else:
            num_above, groups = partial.size, (partial, decoding)
        running = np.concatenate(groups) if partial.size else decoding
        return running, waiting, np.full(waiting.size, num_above)

    # --- 2. and 3. CheckHybridBatching, CanAllocate -------------------------------------------------------------------

    def _prefill(
        self,
        view: SchedulerView,
        step: "_Prefills",
        running: "_Running",
        waiting: Rows,
        above: NDArray[np.int64],
    ) -> None:
        """Chunks and whole prompts, under way and waiting, in order of priority."""
        table = view.table
        kind, blocks = self._admissible(view, running, waiting, above)
        decodes_above = np.concatenate([[0], np.cumsum(running.decodes)]).tolist()
        partial = np.flatnonzero(~running.decodes).tolist()
        i, num_partial = 0, 0
        num_waiting = blocks.size
        while num_partial < len(partial) or i < num_waiting:
            under_way = num_partial < len(partial) and (i >= num_waiting or partial[num_partial] < above[i])
            position = partial[num_partial] if under_way else int(above[i])
            left = step.limit - step.tokens - decodes_above[position]
            if left < 1:
                return
            if under_way:
                num_partial += 1
                row = int(running.rows[position])
                remaining = int(table.num_tokens[row] - table.num_cached[row])
                step.add(row, min(remaining, left), int(table.kind[row]), 0, position)
                continue
            row = int(waiting[i])
            length = int(table.num_tokens[row] - table.cached_prefix_tokens[row, kind[i]])
            if length > left and not self.chunked and length <= step.limit:
                num_waiting = i  # admission ends
                continue
            step.add(row, min(length, left), int(kind[i]), int(blocks[i]), position)
            i += 1

    def _admissible(
        self, view: SchedulerView, running: "_Running", waiting: Rows, above: NDArray[np.int64]
    ) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Kinds and blocks of the first waiting requests for which there are slots and memory."""
        waiting = waiting[: max(view.max_num_seqs - running.rows.size, 0)]
        if not waiting.size:
            none = np.zeros(0, np.int32)
            return none.astype(np.intp), none
        kind = allowed_kinds(view, waiting).argmax(axis=1)
        blocks = start_blocks_for(view, waiting, view.table.num_tokens[waiting], kind)
        # What counts against an admission: running requests above it, those below it, waiting ones before it.
        before, after, booked = running.need, running.need, blocks
        if self.first != "nobody":
            after = np.where(running.decodes, running.held, running.need)
        if self.reserve != "input":
            most = held_blocks_for(view, running.rows, self._final_tokens(view, running.rows))
            before, after = np.maximum(before, most), np.maximum(after, most)
            final = start_blocks_for(view, waiting, self._final_tokens(view, waiting), kind)
            booked = np.maximum(booked, final)
        if self.first == "nobody":
            after = np.zeros_like(after)  # they may be evicted
        spoken_for = np.zeros(running.rows.size + 1, np.int64)
        np.cumsum(before, out=spoken_for[1:])
        spoken_for[:-1] += np.cumsum(after[::-1])[::-1]
        room = running.capacity - spoken_for[above[: waiting.size]] - np.cumsum(booked)
        num_fitting = int(np.searchsorted(-room, 0, side="right"))
        return kind[:num_fitting], blocks[:num_fitting]

    def _decode(self, view: SchedulerView, step: "_Prefills", running: "_Running") -> NDArray[np.bool_]:
        """Decodes that run: all of them, unless the phases may not mix or prefills above have used C up."""
        decodes = running.decodes
        if step.tokens and not self.hybrid:
            return np.zeros_like(decodes)
        if running.num_decodes + step.tokens <= view.max_num_batched_tokens:
            return decodes
        prefilled = np.zeros(decodes.size + 1, np.int64)
        np.add.at(prefilled, step.position, step.num_tokens)
        tokens = np.cumsum(decodes) + np.cumsum(prefilled[:-1])
        return decodes & (tokens <= view.max_num_batched_tokens)

    def _final_tokens(self, view: SchedulerView, rows: Rows) -> NDArray[np.int32]:
        """Positions that `rows` are expected to have cached when they end: I + O - 1."""
        table = view.table
        if not isinstance(self.reserve, str):
            return expected_tokens(view, rows, self.reserve) - np.int32(1)
        if self.reserve == "all":
            return table.max_tokens_total[rows] - np.int32(1)
        means = self._means(view)
        outputs = np.minimum(table.num_outputs[rows], means.size - 1)
        expected = table.prompt_len[rows] + np.ceil(means[outputs]).astype(np.int32)
        expected = np.clip(expected, table.num_tokens[rows], table.max_tokens_total[rows])
        return expected - np.int32(1)

    def _means(self, view: SchedulerView) -> NDArray[np.float64]:
        """(longest + 1,) mean length of ended requests with more than o outputs, by o; 0 where too few are known."""
        counts = view.table.output_lengths
        num = view.table.num_output_lengths
        if self._mean_length is None or num != self._num_lengths:
            number = np.cumsum(counts[::-1])[::-1]
            total = np.cumsum((counts * np.arange(counts.size))[::-1])[::-1]
            means = total / np.maximum(number, 1)
            means[number < FEW_OUTPUTS] = 0.0
            self._mean_length, self._num_lengths = np.append(means[1:], 0.0), num
        return self._mean_length


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Running:
    """Requests that hold cache, by falling priority."""

    rows: Rows
    decodes: NDArray[np.bool_]
    num_decodes: int
    held: NDArray[np.int32]
    """Blocks."""
    need: NDArray[np.int32]
    """Blocks for the next position, or for the whole of a prompt that is under way."""
    capacity: int
    """Blocks that are free or held."""


class _Prefills:
    """The prefills of a step, in order of priority.

    Args:
        limit: P.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens = 0
        self.blocks = 0
        """Blocks set aside for formerly waiting requests."""
        self.position: list[int] = []
        """Running requests of higher priority than each."""
        self.num_tokens: list[int] = []
        self._rows: list[int] = []
        self._kind: list[int] = []

    def add(self, row: int, num_tokens: int, kind: int, blocks: int, position: int) -> None:
        self._rows.append(row)
        self.num_tokens.append(num_tokens)
        self._kind.append(kind)
        self.position.append(position)
        self.tokens += num_tokens
        self.blocks += blocks

    def drop(self, rows: Rows) -> None:
        """Take evicted rows out."""
        gone = set(rows.tolist())
        kept = [i for i, row in enumerate(self._rows) if row not in gone]
        self._rows = [self._rows[i] for i in kept]
        self.num_tokens = [self.num_tokens[i] for i in kept]
        self._kind = [self._kind[i] for i in kept]

    def plan(self, view: SchedulerView, decoding: Rows, preempt: Rows) -> Plan:
        """The step, with a token of each of `decoding`."""
        if not self._rows:
            return decode_plan(view, decoding, preempt)
        rows = np.array(self._rows, np.int32)
        num_tokens = np.array(self.num_tokens, np.int32)
        kind = np.array(self._kind, np.int8)
        if decoding.size:
            rows = np.concatenate([decoding, rows])
            num_tokens = np.concatenate([np.ones(decoding.size, np.int32), num_tokens])
            kind = np.concatenate([view.table.kind[decoding], kind])
        return Plan(
            rows=rows,
            num_tokens=num_tokens,
            kind=kind,
            preempt=preempt,
            iteration="mixed" if decoding.size else "prefill",
        )

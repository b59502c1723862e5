"""One algorithm, many schedulers: InferMax Algorithm 1 (§3.1) and its configurations (Table 1, §4.4, §4.6, §6)."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.policy import (
    Rows,
    allowed_kinds,
    blocks_per_group,
    groups_for,
    held_blocks_for,
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
       `"estimate"` does the same with estimated lengths.
    4. *EvictLowerPriorityRequest*: where memory is short, running requests of lower priority than the candidate lose
       their cache, the lowest first, and the candidate itself where there are none. Waiting candidates evict nobody, but
       end their group; in the one group of `first="nobody"` they rank above running ones and evict like them.

    Where the paper is silent:

    * Memory is counted in blocks. A request takes KV, or the hidden kind where KV is not on offer or can never hold it.
    * A waiting request also needs a seat; seats are never taken from others.
    * An evicted request joins the waiting group as its first member, and does not fit: where waiting ones come last,
      nobody is admitted in the same iteration.
    * The first waiting request that does not fit, for tokens or memory, ends admission: skipping it could starve it.
    * A prompt longer than P is computed in chunks also without `chunked`: it could never run otherwise.

    How it is computed: lists of candidates are only gone through one by one where a prompt is. For those that run, the
    loop of steps 3 and 4 ends with a prefix of them by priority, the longest one whose positions fit the pool.

    *Estimates* (§6). `RequestTable.output_lengths` is the online histogram. A request with o outputs so far is expected
    to reach the mean length of the ended ones that were longer than o (the sum over many requests is near the sum of
    their means), at most its `max_tokens`; nothing is reserved while fewer than `FEW_OUTPUTS` of those are known.

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
        reserve: what a waiting request and those that run are counted with when it is admitted.
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
        reserve: Reserve = "input",
    ) -> None:
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
        running, waiting, above = self._grouped(view)
        decodes = view.remaining(running) == 1
        need = held_blocks_for(view, running, table.num_tokens[running])
        held = table.num_blocks[running]
        capacity = view.free_blocks + int(held.sum())
        step = _Prefills(min(self.prefill_tokens, view.max_num_batched_tokens))

        # Steps 2 and 3 for prefills, by priority.
        num_decodes = int(np.count_nonzero(decodes))
        if not (self.first == "decode" and num_decodes and not self.hybrid):
            partial = np.flatnonzero(~decodes) if num_decodes < running.size else None
            if partial is not None or waiting.size:
                self._prefill(
                    view, step, running, decodes, need, held, capacity, partial, waiting, above
                )

        # Decodes get what is left of C.
        runs = decodes
        if step.tokens and not self.hybrid:
            runs = np.zeros(running.size, np.bool_)
        elif num_decodes + step.tokens > view.max_num_batched_tokens:
            tokens = np.cumsum(decodes)
            if self.first == "prefill":
                tokens += step.tokens
            elif self.first == "nobody":
                before = np.zeros(running.size + 1, np.int64)
                np.add.at(before, step.position, step.num_tokens)
                tokens += np.cumsum(before[:-1])
            runs = decodes & (tokens <= view.max_num_batched_tokens)

        # Step 4 for everybody at once.
        if runs is not decodes:
            need = np.where(decodes & ~runs, held, need)
        capacity -= step.blocks
        preempt = running[:0]
        if int(need.sum()) > capacity:
            num_kept = int(np.searchsorted(np.cumsum(need), capacity, side="right"))
            running, preempt, runs = running[:num_kept], running[num_kept:], runs[:num_kept]
            step.drop(preempt)
        decoding = running if runs.all() else running[runs]
        return self._plan(view, decoding, step, preempt)

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
        remaining = view.remaining(running)
        is_decode = remaining == 1
        all_decode = bool(is_decode.all())
        decoding = running if all_decode else running[is_decode]
        if self.longest_first:
            decoding = decoding[np.argsort(-table.num_cached[decoding], kind="stable")]
        partial = running[:0] if all_decode else running[~is_decode]
        if self.first == "decode":
            above = running.size
            running = np.concatenate([decoding, partial]) if partial.size else decoding
        else:
            above = partial.size
            running = np.concatenate([partial, decoding]) if partial.size else decoding
        return running, waiting, np.full(waiting.size, above)

    # --- 2. and 3. prefills -----------------------------------------------------------------------------------------

    def _prefill(
        self,
        view: SchedulerView,
        step: "_Prefills",
        running: Rows,
        decodes: NDArray[np.bool_],
        need: NDArray[np.int32],
        held: NDArray[np.int32],
        capacity: int,
        partial: NDArray[np.intp] | None,
        waiting: Rows,
        above: NDArray[np.int64],
    ) -> None:
        """Chunks and whole prompts, partly computed ones and waiting ones in order of priority."""
        table = view.table
        n = running.size
        seats = view.max_num_seqs - n
        waiting = waiting[: max(seats, 0)]
        positions = [] if partial is None else partial.tolist()
        if waiting.size:
            kind = allowed_kinds(view, waiting).argmax(axis=1)
            per_group = blocks_per_group(view)[kind]
            blocks = groups_for(view, table.num_tokens[waiting]) * per_group
            booked, claims, waiting_booked = self._booked(
                view, running, decodes, need, held, blocks, waiting, per_group
            )
            # Blocks that others hold or may claim first, by the number of running requests above.
            spoken_for = np.zeros(n + 1, np.int64)
            np.cumsum(booked, out=spoken_for[1:])
            spoken_for[:-1] += np.cumsum(claims[::-1])[::-1]
            room = capacity - spoken_for[above[: waiting.size]] - np.cumsum(waiting_booked)
            num_fitting = int(np.argmin(np.append(room, -1) >= 0))
        else:
            num_fitting = 0
            kind = blocks = waiting
        decodes_above = np.concatenate([[0], np.cumsum(decodes)])
        i = 0
        while positions or i < num_fitting:
            from_running = bool(positions) and (i >= num_fitting or positions[0] < above[i])
            position = positions[0] if from_running else int(above[i])
            left = step.limit - step.tokens - int(decodes_above[position])
            if left < 1:
                return
            if from_running:
                row = int(running[positions.pop(0)])
                length = min(int(table.num_tokens[row] - table.num_cached[row]), left)
                step.add(row, length, int(table.kind[row]), 0, position)
                continue
            row = int(waiting[i])
            length = int(table.num_tokens[row])
            if length > left:
                if not self.chunked and length <= step.limit:
                    num_fitting = i
                    continue
                length = left
            step.add(row, length, int(kind[i]), int(blocks[i]), position)
            i += 1

    def _booked(
        self,
        view: SchedulerView,
        running: Rows,
        decodes: NDArray[np.bool_],
        need: NDArray[np.int32],
        held: NDArray[np.int32],
        blocks: NDArray[np.int32],
        waiting: Rows,
        per_group: NDArray[np.int32],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Blocks that count against an admission: of a running request above, of one below, of a waiting one."""
        above, below = need, np.where(decodes, held, need)
        if self.first == "nobody":
            below = np.zeros_like(need)  # may be evicted
        if self.reserve == "input":
            return above, below, blocks
        most = held_blocks_for(view, running, self._final_tokens(view, running))
        above = np.maximum(above, most)
        if self.first != "nobody":
            below = np.maximum(below, most)
        final = groups_for(view, self._final_tokens(view, waiting)) * per_group
        return above, below, np.maximum(blocks, final)

    def _final_tokens(self, view: SchedulerView, rows: Rows) -> NDArray[np.int32]:
        """Positions that `rows` are expected to have cached when they end: I + O - 1."""
        table = view.table
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

    def _plan(self, view: SchedulerView, decoding: Rows, step: "_Prefills", preempt: Rows) -> Plan:
        if not step.rows:
            if not decoding.size:
                return Plan.idle(preempt)
            rows, num_tokens = decoding, np.ones(decoding.size, np.int32)
            kind = view.table.kind[decoding]
            return Plan(
                rows=rows, num_tokens=num_tokens, kind=kind, preempt=preempt, iteration="decode"
            )
        rows = np.array(step.rows, np.int32)
        num_tokens = np.array(step.num_tokens, np.int32)
        kind = np.array(step.kind, np.int8)
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


class _Prefills:
    """The prefills of a step, in order of priority."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens = 0
        self.blocks = 0
        """Set aside for those that were waiting."""
        self.rows: list[int] = []
        self.num_tokens: list[int] = []
        self.kind: list[int] = []
        self.position: list[int] = []
        """Running requests of higher priority than each."""

    def add(self, row: int, num_tokens: int, kind: int, blocks: int, position: int) -> None:
        self.rows.append(row)
        self.num_tokens.append(num_tokens)
        self.kind.append(kind)
        self.position.append(position)
        self.tokens += num_tokens
        self.blocks += blocks

    def drop(self, rows: Rows) -> None:
        """Take evicted rows out."""
        gone = set(rows.tolist())
        keep = [i for i, row in enumerate(self.rows) if row not in gone]
        for name in ("rows", "num_tokens", "kind", "position"):
            values = getattr(self, name)
            setattr(self, name, [values[i] for i in keep])

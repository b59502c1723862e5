"""InferMax's unified scheduler: Algorithm 1 (§3.1) and its configurations (Table 1, §4.4, §4.6, §6)."""

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
"""Minimum number of finished requests for which the histogram of output lengths gives an estimate."""


class UnifiedPolicy:
    """GetNextBatch of InferMax Algorithm 1: goes through groups by priority and adds each candidate that fits.

    The steps of the paper and the arguments that select them:

    1. *GroupRequests*: `first="decode"` orders the groups as running in decode, running in prefill, waiting (Sarathi);
       `"prefill"` as running in prefill, waiting, running in decode (vLLM); `"nobody"` makes a single group of all
       requests. Within a group `order` decides, and arrival among equals; with `longest_first` decoding requests are
       ordered by decreasing cache size instead.
    2. *CheckHybridBatching*: without `hybrid` a candidate whose phase differs from the batch's is skipped.
    3. *CanAllocate*: a decode takes one of the C tokens of a step. A prefill must also fit P, in which all tokens of
       the batch count; with `chunked` it is cut to the rest of P. A decode needs memory for its next position, a
       prefill for its whole prompt, whose uncomputed part stays reserved while it runs. `reserve="all"` admits a
       waiting request only if the full lengths of all requests fit (I + O - 1 positions; O is `max_tokens`, which
       equals the output length only if that is known, as in a simulation), so no request is ever evicted. `"estimate"`
       does the same with estimated mean output lengths; a number in (0, 1] uses that quantile of the output lengths
       instead.
    4. *EvictLowerPriorityRequest*: if memory is short, running requests of lower priority than the candidate lose their
       cache, the lowest first, or the candidate itself if there are no such requests. Waiting candidates evict no
       requests, and the first that does not fit ends its group; in the single group of `first="nobody"` they can evict
       running requests that rank below them.

    Rules for cases that the paper does not cover:

    * Memory is counted in blocks. A request takes KV, or the hidden kind if KV is not offered or can never hold it.
    * A waiting request also needs a slot; slots are never taken from other requests.
    * An evicted request becomes the first of the waiting group and does not fit. So if the waiting group comes last, no
      request is admitted in the same iteration.
    * The first waiting request that does not fit, for lack of tokens or memory, ends admission, because skipping it
      could starve it.
    * A prompt longer than P is computed in chunks even without `chunked`, because it could never run otherwise.

    Computation: only prefill candidates are visited one by one. For running requests the loop of steps 3 and 4 amounts
    to keeping the longest prefix, by priority, whose positions fit the pool.

    *Estimates* (§6). `RequestTable.output_lengths` is the online histogram. A request with o outputs so far is expected
    to reach the mean length of the finished requests with more than o outputs, limited to its `max_tokens` (the sum
    over many requests is near the sum of their means). No output is reserved while fewer than `FEW_OUTPUTS` such
    requests have finished. In a simulation of 3000 Azure conversations (Llama-3-70B, four A100, M = 100K, all arriving
    at once) the estimates differ little: the run takes 1056 s with the mean, and 1057, 1061 and 1063 s with quantiles
    of 0.5, 0.7 and 0.9. With only `longest_first` it takes 1051 s and 212 evictions; with `sarathi`, 1060 s and 141.

    *Ranks* (§4.6). The paper does not say which options its ranked schedulers use; here they use those of Sarathi.

    *Starvation.* All configurations serve by arrival, except `order="input"` and `"output"`. These prefer short
    requests and never reach a long request while short requests keep the pool full.

    Args:
        name: name of the policy.
        first: phase that comes first.
        order: order of requests within a group: arrival, fewer prompt tokens, or fewer output tokens (`max_tokens`).
        longest_first: whether decoding requests are ordered by decreasing number of cached tokens.
        hybrid: whether decodes and prefills may share a step.
        chunked: whether prompts may be computed in chunks.
        prefill_tokens: P, limited to `max_num_batched_tokens`, which is C.
        reserve: length assumed for running and waiting requests at admission: "input", "all", "estimate" (see above),
            or a number in (0, 1]: this quantile of the output length (`apt_jax.sched.reservation.expected_tokens`).
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
            Reservation(reserve)  # raises if it is not a quantile
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

        # Step 4 for all rows at once: by priority, rows stay while they fit; rows that skip this step need no more
        # blocks.
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
        """Return running rows and waiting rows in decreasing order of priority, and how many running rows rank above
        each waiting row."""
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
        """Add prompts and chunks of running and waiting requests to `step`, in order of priority."""
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
        """Return the kinds and blocks of the first waiting requests for which there are slots and memory."""
        waiting = waiting[: max(view.max_num_seqs - running.rows.size, 0)]
        if not waiting.size:
            none = np.zeros(0, np.int32)
            return none.astype(np.intp), none
        kind = allowed_kinds(view, waiting).argmax(axis=1)
        blocks = start_blocks_for(view, waiting, view.table.num_tokens[waiting], kind)
        # Blocks that count against an admission: of running requests above it, of those below it, of earlier waiting
        # requests.
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
        """Return the mask of running rows that decode in this step.

        All decodes run unless the phases may not mix or prefills of higher priority have used up C.
        """
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
        """Return the (n,) number of positions that `rows` are expected to have cached when they end: I + O - 1."""
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
        """Return (longest + 1,) means: entry o is the mean length of requests with more than o outputs; 0: too few."""
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
    """Requests that hold cache, in decreasing order of priority; arrays of shape (n,)."""

    rows: Rows
    decodes: NDArray[np.bool_]
    num_decodes: int
    held: NDArray[np.int32]
    """Blocks that each request holds."""
    need: NDArray[np.int32]
    """Blocks that each request needs for its next position, or for the whole of a partly computed prompt."""
    capacity: int
    """Number of blocks that are free or held by these requests."""


class _Prefills:
    """The prefills of a step, in order of priority.

    Args:
        limit: maximum number of tokens in the step when a prefill is added (P).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens = 0
        self.blocks = 0
        """Number of blocks for the waiting requests that start in this step."""
        self.position: list[int] = []
        """Number of running requests of higher priority than each prefill."""
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
        """Remove evicted rows from the step."""
        gone = set(rows.tolist())
        kept = [i for i, row in enumerate(self._rows) if row not in gone]
        self._rows = [self._rows[i] for i in kept]
        self.num_tokens = [self.num_tokens[i] for i in kept]
        self._kind = [self._kind[i] for i in kept]

    def plan(self, view: SchedulerView, decoding: Rows, preempt: Rows) -> Plan:
        """Return the plan of the step, which also decodes one token for each of `decoding`."""
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

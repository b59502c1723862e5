"""DeepSpeed-FastGen's Dynamic SplitFuse: every step fills a fixed token budget (a baseline of Apt-Serve §6.2)."""

import numpy as np

from apt_jax.sched.step_packer import (
    Rows,
    allowed_kinds,
    held_blocks_for,
    split_running,
    start_blocks_for,
)
from apt_jax.sched.view import Plan, SchedulerView


class FastGenPolicy:
    """Runs decodes first, then prompts in order of arrival, until the token budget is used up exactly.

    Long prompts are split over steps. Short prompts are combined, and the last of them is split too, so each step has
    exactly `budget` tokens as long as there is work ("even short prompts may be decomposed to ensure the budget is
    precisely met").

    Differences from `sarathi` (`UnifiedPolicy`), following the published scheduler of DeepSpeed-MII:

    * *Memory is taken when it is used.* A prompt starts or continues if all of its remaining tokens currently fit the
      free blocks; no blocks are reserved for tokens that later steps compute.
    * *No request is evicted for a decode.* A decode whose next position does not fit skips the step and keeps its
      cache, and later decodes still run.
    * Caches are dropped only if no request can run. DeepSpeed-MII then drops all caches ("deadlock detected"); here the
      latest arrivals lose theirs, one by one, until a request can run.

    Args:
        budget: number of tokens per step, decodes included; limited to `max_num_batched_tokens`.
    """

    name = "fastgen"

    def __init__(self, budget: int = 512) -> None:
        if budget < 1:
            raise ValueError(f"{budget=} must be at least 1")
        self.budget = budget

    def schedule(self, view: SchedulerView) -> Plan:
        decoding, partial = split_running(view)
        plan = self._compose(view, decoding, partial, view.running[:0])
        if plan.rows.size or not view.running.size:
            return plan
        running = view.running
        for num_kept in range(running.size - 1, 0, -1):
            kept = running[:num_kept]
            is_decode = view.remaining(kept) == 1
            plan = self._compose(view, kept[is_decode], kept[~is_decode], running[num_kept:])
            if plan.rows.size:
                return plan
        return Plan.idle(running)

    def _compose(self, view: SchedulerView, decoding: Rows, partial: Rows, preempt: Rows) -> Plan:
        """Return the plan of a step that preempts `preempt` and runs the other given requests, then waiting requests if
        `preempt` is empty."""
        table = view.table
        free = view.free_blocks + int(table.num_blocks[preempt].sum())
        budget = min(self.budget, view.max_num_batched_tokens)
        growth = held_blocks_for(view, decoding, table.num_tokens[decoding])
        growth -= table.num_blocks[decoding]
        if int(growth.sum()) > free:
            # Kinds grow by different numbers of blocks: a later row may fit if an earlier row does not.
            fits = np.ones(decoding.size, np.bool_)
            left = free
            for i in np.flatnonzero(growth).tolist():
                fits[i] = growth[i] <= left
                left -= int(growth[i]) if fits[i] else 0
            decoding, growth = decoding[fits], growth[fits]
        decoding, growth = decoding[:budget], growth[:budget]
        free -= int(growth.sum())
        budget -= decoding.size

        rows: list[int] = []
        num_tokens: list[int] = []
        kinds: list[int] = []
        for row in partial.tolist():
            if budget < 1:
                break
            kind = int(table.kind[row])
            cached, total = int(table.num_cached[row]), int(table.num_tokens[row])
            length, one = min(total - cached, budget), np.array([row])
            ends = np.array([total, cached + length], np.int32)
            whole, needed = (held_blocks_for(view, one, ends) - table.num_blocks[row]).tolist()
            if whole > free:
                break
            free -= needed
            budget -= length
            rows.append(row)
            num_tokens.append(length)
            kinds.append(kind)
        else:
            # After a preemption no new request is admitted: caches were dropped so that running requests can continue.
            slots = 0 if preempt.size else view.max_num_seqs - view.running.size
            if budget > 0 and slots > 0 and view.waiting.size:
                self._start(view, view.waiting[:slots], budget, free, rows, num_tokens, kinds)
        if not rows:
            if not decoding.size:
                return Plan.idle(preempt)
            iteration = "decode"
        else:
            iteration = "mixed" if decoding.size else "prefill"
        return Plan(
            rows=np.concatenate([decoding, np.array(rows, np.int32)]),
            num_tokens=np.concatenate([np.ones(decoding.size, np.int32), np.array(num_tokens, np.int32)]),
            kind=np.concatenate([table.kind[decoding], np.array(kinds, np.int8)]),
            preempt=preempt,
            iteration=iteration,
        )

    def _start(
        self,
        view: SchedulerView,
        waiting: Rows,
        budget: int,
        free: int,
        rows: list[int],
        num_tokens: list[int],
        kinds: list[int],
    ) -> None:
        """Start waiting prompts in order, by appending to `rows`, `num_tokens` and `kinds`; the last prompt gets the
        rest of the budget."""
        kind = allowed_kinds(view, waiting).argmax(axis=1)
        table = view.table
        total = view.remaining(waiting, kind)
        found, shared = table.cached_prefix_tokens[waiting, kind], table.shared_prefix_blocks[waiting, kind]
        blocks = start_blocks_for(view, waiting, table.num_tokens[waiting], kind)
        for i in range(waiting.size):
            if budget < 1 or blocks[i] > free:
                return
            length = min(int(total[i]), budget)
            free -= view.blocks_of(int(found[i]) + length, int(kind[i])) - int(shared[i])
            budget -= length
            rows.append(int(waiting[i]))
            num_tokens.append(length)
            kinds.append(int(kind[i]))

"""Round robin between real-time and best-effort requests, iteration by iteration (BROS §2.2, Fig. 4)."""

import dataclasses

import numpy as np

from apt_jax.sched.policies.fcfs import FcfsPolicy
from apt_jax.sched.step_packer import (
    Rows,
    allowed_kinds,
    held_blocks_for,
    split_running,
    start_blocks_for,
    target_tokens,
)
from apt_jax.sched.view import Plan, SchedulerView

QUANTUM_TOKENS = 16
"""Number of tokens that a request must generate after its last start before a class that holds no cache may preempt it.
Without this rule, two requests that each need more than half of the pool would keep preempting each other."""


class RoundRobinPolicy:
    """Serves two first-come-first-served queues in turn; a class that cannot run passes its turn to the other class.

    A turn is one iteration of one class, with its decodes and prefills in the same step, as in BROS, whose round robin
    runs on the paper's own engine (§7.1), which batches requests "regardless of the stages" (§6). With `mixed=False` a
    turn is a prefill or a decode, as in vLLM's first scheduler.

    Within a class `FcfsPolicy` decides. If it would evict a request or cannot run any, decoding requests of the other
    class are preempted, the latest arrivals first, as long as the class then needs at most half of the pool. Each class
    can take back its half, so the classes do not evict each other in every turn. A class that holds no cache may take
    the blocks for its first request from requests that have generated `QUANTUM_TOKENS` since their last start. Partly
    computed prompts are not preempted by the other class, and the blocks that they still need stay reserved for them.

    Args:
        mixed: let a turn combine prefills and decodes.
    """

    name = "round-robin"
    has_classes = True

    def __init__(self, *, mixed: bool = True) -> None:
        self._best_effort_next = False
        self._inside = FcfsPolicy(mixed=mixed)

    def schedule(self, view: SchedulerView) -> Plan:
        for best_effort in (self._best_effort_next, not self._best_effort_next):
            plan = self._serve(view, best_effort)
            if plan is not None:
                self._best_effort_next = not best_effort
                return plan
        return self._inside.schedule(view)

    def _serve(self, view: SchedulerView, best_effort: bool) -> Plan | None:
        table = view.table
        mine = table.best_effort[view.running] == best_effort
        running, others = view.running[mine], view.running[~mine]
        waiting = view.waiting[table.best_effort[view.waiting] == best_effort]
        if not running.size and not waiting.size:
            return None
        if not others.size:
            own = dataclasses.replace(view, waiting=waiting)
            plan = self._inside.schedule(own)
            return plan if plan.rows.size or plan.preempt.size else None
        remaining = view.remaining(others)
        under_way = others[remaining > 1]
        kept = held_blocks_for(view, under_way, target_tokens(view, under_way, 1))
        kept = int(np.maximum(kept - table.num_blocks[under_way], 0).sum())
        own = dataclasses.replace(
            view,
            waiting=waiting,
            running=running,
            free_blocks=max(view.free_blocks - kept, 0),
            max_num_seqs=view.max_num_seqs - others.size,
        )
        plan = self._inside.schedule(own)
        if plan.rows.size and not plan.preempt.size:
            return plan
        taken = self._taken(own, others[remaining == 1])
        if taken.size:
            own = dataclasses.replace(
                own,
                free_blocks=own.free_blocks + int(table.num_blocks[taken].sum()),
                max_num_seqs=own.max_num_seqs + taken.size,
            )
            with_taken = self._inside.schedule(own)
            if with_taken.rows.size:
                preempt = np.concatenate([taken, with_taken.preempt])
                return dataclasses.replace(with_taken, preempt=preempt)
        return plan if plan.rows.size else None

    @staticmethod
    def _taken(own: SchedulerView, others: Rows) -> Rows:
        """Return the rows of `others` to preempt so that the class gets the blocks and slots that it needs next."""
        table = own.table
        if own.running.size:
            decoding, partial = split_running(own)
            needed = int(held_blocks_for(own, decoding, table.num_tokens[decoding]).sum())
            needed += int(held_blocks_for(own, partial, table.num_tokens[partial]).sum())
            if needed > own.total_blocks // 2:
                return others[:0]
            needed -= int(table.num_blocks[own.running].sum())
            slots = 0
        else:
            others = others[table.tokens_since_preemption[others] >= QUANTUM_TOKENS]
            first = own.waiting[:1]
            kind = allowed_kinds(own, first).argmax(axis=1)
            needed = int(start_blocks_for(own, first, target_tokens(own, first, 1), kind).sum())
            slots = max(1 - own.max_num_seqs, 0)
        short = needed - own.free_blocks
        freed = np.cumsum(table.num_blocks[others[::-1]])
        num_taken = int(np.searchsorted(freed, short)) + 1 if short > 0 else 0
        if num_taken > others.size:
            return others[:0]
        num_taken = min(max(num_taken, slots), others.size)
        return others[others.size - num_taken :]

"""The preemptive policy of BROS §2.2 (Fig. 3): whoever has waited longest goes first."""

import numpy as np

from apt_jax.sched import FcfsPolicy, Plan, SchedulerView
from apt_jax.sched.step_packer import (
    StepPacker,
    allowed_kinds,
    held_blocks_for,
    split_running,
    start_blocks_for,
    target_tokens,
)

WATERMARK = 0.01
"""Share of the pool that admission leaves free, as under `fcfs`."""


class LongestWaitPolicy:
    """vLLM's engine, a prefill or a decode a step, with the time since the last token (or the arrival) as priority.

    "Each request's waiting time between completing one iteration and scheduling the next is used as the priority value"
    (BROS §2.2). Requests without cache go in this order, those that decode do so together. Where there is no room for
    the first one that waits, decoding requests lose their cache, the one that has waited least and came last first. The
    paper does not say how often that may happen; a request has `quantum` tokens before, or all time would go into
    recomputation.

    Args:
        quantum: tokens since a request (re)started before it may be preempted.
    """

    name = "longest-wait"

    def __init__(self, quantum: int = 64) -> None:
        self.quantum = quantum
        self._fcfs = FcfsPolicy()

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        decoding, partial = split_running(view)
        if partial.size or not view.waiting.size:
            return self._fcfs.schedule(view)
        waited_s = view.now_s - table.last_token_s[view.waiting]
        waiting = view.waiting[np.argsort(-waited_s, kind="stable")]
        kind = allowed_kinds(view, waiting).argmax(axis=1).astype(np.int8)
        blocks = start_blocks_for(view, waiting, target_tokens(view, waiting, 1), kind)
        held = table.num_blocks[decoding]
        needed = held_blocks_for(view, decoding, table.num_tokens[decoding])
        room = view.free_blocks - int((needed - held).sum())
        if decoding.size:
            room -= int(np.ceil(WATERMARK * view.total_blocks))
        victims = decoding[:0]
        slots = view.max_num_seqs - decoding.size
        if blocks[0] > room or slots < 1:
            since_s = view.now_s - table.last_token_s[decoding]
            order = np.lexsort((-table.rank[decoding], since_s))
            may = table.tokens_since_preemption[decoding] >= self.quantum
            may &= since_s < waited_s.max()
            order = order[may[order]]
            victims, freed = decoding[order], np.cumsum(needed[order])
            num = max(int(np.searchsorted(freed, blocks[0] - room)) + 1, 1 - slots)
            if num > victims.size:
                return self._fcfs.decode(view)
            victims = victims[:num]
            room += int(freed[num - 1])
        fits = int(np.searchsorted(np.cumsum(blocks), room, side="right"))
        packer = StepPacker(view, victims)
        packer.start(waiting[:fits], kind[:fits], in_order=True)
        plan = packer.plan()
        return plan if plan.rows.size else self._fcfs.schedule(view)

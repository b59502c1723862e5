"""First come, first served: vLLM's first scheduler (V0), the paper's baseline (Apt-Serve §2.2, §6.1)."""

import numpy as np

from apt_jax.sched.reservation import Reservation
from apt_jax.sched.step_packer import (
    StepPacker,
    allowed_kinds,
    decode_plan,
    held_blocks_for,
    resolve_prefill_deadlock,
    split_running,
    start_blocks_for,
    target_tokens,
)
from apt_jax.sched.view import Plan, SchedulerView

WATERMARK = 0.01
"""Share of the pool that admission leaves free; running requests can grow into it before any is evicted."""


class FcfsPolicy:
    """Prefills while the first waiting request fits, else decodes all running requests; evicts the latest arrival.

    * Admission is strictly by arrival rank, which preempted requests keep. Admission ends at the first request that
      does not fit (blocks for its prompt and one more position, watermark, slots, tokens of the step).
    * A prompt longer than a step is computed in chunks, before any other request.
    * If the next positions do not fit the pool, running requests lose their cache, the latest arrival first, and are
      recomputed later.
    * Every request takes KV, or the hidden kind if KV is not offered or can never hold it.

    `--scheduling-policy` accepts it as `fcfs` or `vllm-v0`; vLLM's current scheduler is `vllm-v1`.

    Args:
        name: name of the policy.
        mixed: whether all decodes run in the same step as prefills, as in an engine that batches both phases (BROS §6).
            No request is admitted while the next positions of the decodes do not fit.
        reserve: quantile of the output lengths for which memory is reserved: a request is admitted only if the pool can
            hold it and all running requests up to these lengths (`apt_jax.sched.reservation`). With 1 the lengths are
            `max_tokens`, and no request is ever evicted. None: no reservation.
    """

    def __init__(self, name: str = "fcfs", *, mixed: bool = False, reserve: float | None = None) -> None:
        self.name = name
        self._mixed = mixed
        self._reservation = None if reserve is None else Reservation(reserve)

    def schedule(self, view: SchedulerView) -> Plan:
        decoding, partial = split_running(view)
        beside = decoding[: view.max_num_batched_tokens] if self._mixed else decoding[:0]
        next_blocks = self._next_blocks(view, beside)
        if next_blocks > view.free_blocks:
            return self.decode(view)
        plan = self._prefill(view, decoding.size + partial.size > 0, partial, beside, next_blocks)
        if plan.rows.size:
            return plan
        if decoding.size:
            return self.decode(view)
        return resolve_prefill_deadlock(view, partial) if partial.size else Plan.idle()

    @staticmethod
    def _next_blocks(view: SchedulerView, decoding: np.ndarray) -> int:
        """Return the number of free blocks that the next positions of `decoding` take."""
        if not decoding.size:
            return 0
        table = view.table
        needed = held_blocks_for(view, decoding, table.num_tokens[decoding])
        return int((needed - table.num_blocks[decoding]).sum())

    def _prefill(
        self,
        view: SchedulerView,
        anything_runs: bool,
        partial: np.ndarray,
        beside: np.ndarray,
        next_blocks: int,
    ) -> Plan:
        packer = StepPacker(view)
        if beside.size:
            packer.decode(beside)
        if partial.size:
            packer.continue_prefill(partial)
        waiting = view.waiting[: max(packer.slots_left, 0)]
        if not waiting.size or packer.tokens_left < 1:
            return packer.plan()
        kind = allowed_kinds(view, waiting).argmax(axis=1)
        blocks = start_blocks_for(view, waiting, target_tokens(view, waiting, 1), kind)
        watermark = int(np.ceil(WATERMARK * view.total_blocks)) if anything_runs else 0
        room = view.free_blocks - next_blocks - watermark
        if partial.size:
            needed = held_blocks_for(view, partial, target_tokens(view, partial, 1))
            room -= int((needed - view.table.num_blocks[partial]).sum())
        num_fitting = int(np.searchsorted(np.cumsum(blocks), room, side="right"))
        if self._reservation is not None:
            budget = view.max_num_batched_tokens - view.max_num_seqs if self._mixed else None
            num_fitting = self._reservation.num_admissible(view, waiting[:num_fitting], kind[:num_fitting], budget)
        packer.start(waiting[:num_fitting], kind[:num_fitting].astype(np.int8), in_order=True)
        return packer.plan()

    def decode(self, view: SchedulerView) -> Plan:
        """Return a plan that decodes the longest prefix of the running queue (by rank) whose next positions fit, and
        preempts the rest."""
        rows, table = view.running, view.table
        remaining = view.remaining(rows)
        held = table.num_blocks[rows]
        needed = held_blocks_for(view, rows, table.num_tokens.take(rows))
        decodes = remaining == 1
        # Partly computed prompts (they are blocked, otherwise this step would be a prefill) only keep their blocks.
        needed = np.where(decodes, needed, held)
        have = view.free_blocks + int(held.sum())
        num_kept = int(np.searchsorted(np.cumsum(needed), have, side="right"))
        kept, preempt = rows[:num_kept], rows[num_kept:]
        return decode_plan(view, kept[decodes[:num_kept]], preempt)

"""Scheduling like Text Generation Inference (TGI), with memory reserved for whole lengths (BROS §7.1, §7.3)."""

import dataclasses

import numpy as np

from apt_jax.sched.policies.fcfs import FcfsPolicy
from apt_jax.sched.step_packer import (
    Rows,
    StepPacker,
    allowed_kinds,
    held_blocks_for,
    resolve_prefill_deadlock,
    split_running,
    start_blocks_for,
    target_tokens,
)
from apt_jax.sched.view import Plan, SchedulerView


class TgiPolicy:
    """Serves requests by arrival and reserves memory for prompt and output on admission, so it never evicts a request.

    BROS names TGI as a baseline (§7.1) but does not describe its scheduler. This policy follows the documentation of
    TGI's launcher and the order of steps of its version 3 router without prefix caching:

    * An iteration is a prefill of new requests or a decode of all running requests, never both.
    * Requests are admitted by arrival as long as they fit: prompts within `max_batch_prefill_tokens`, and blocks for
      `prompt + max_tokens - 1` positions of all requests (TGI's `max_batch_total_tokens`, which is the pool here). The
      first request that does not fit ends the admission.
    * If requests run, a prefill needs at least `waiting_served_ratio` times as many waiting requests, or must wait
      until `max_waiting_tokens` tokens have been decoded since the last prefill. A prefill that paused running requests
      is followed by a decode.

    TGI rejects a prompt that is longer than a prefill; this policy computes it in chunks, without decodes in between.
    If requests hold more than their reservations (because another policy filled the pool), the latest arrivals lose
    their cache, as under `fcfs`. Every request takes KV, or the hidden kind if KV is not offered or can never hold it.

    Args:
        waiting_served_ratio: minimum ratio of waiting to running requests for a prefill; TGI's default from version 2
            on is 0.3 (before: 1.2).
        max_waiting_tokens: number of decode iterations after which any waiting request that fits may start; the default
            is TGI's.
        max_batch_prefill_tokens: maximum number of prompt tokens per prefill, limited to the tokens of a step; the
            default is TGI's up to version 1 (later: `max_input_tokens + 50`).
    """

    name = "tgi"

    def __init__(
        self,
        *,
        waiting_served_ratio: float = 0.3,
        max_waiting_tokens: int = 20,
        max_batch_prefill_tokens: int = 4096,
    ) -> None:
        if max_batch_prefill_tokens < 1:
            raise ValueError(f"{max_batch_prefill_tokens=} must be at least 1")
        self.waiting_served_ratio = waiting_served_ratio
        self.max_waiting_tokens = max_waiting_tokens
        self.max_batch_prefill_tokens = max_batch_prefill_tokens
        self._waiting_tokens = 1
        """Number of tokens that each running request has generated since the last prefill, including the prefill's
        token."""
        self._decode_next = False
        self._decodes = FcfsPolicy()

    def schedule(self, view: SchedulerView) -> Plan:
        decoding, partial = split_running(view)
        limit = min(self.max_batch_prefill_tokens, view.max_num_batched_tokens)
        prefills = dataclasses.replace(view, max_num_batched_tokens=limit)
        if partial.size:
            packer = StepPacker(prefills)
            packer.continue_prefill(partial)
            if not packer.is_empty:
                return packer.plan()
        elif view.waiting.size and not (self._decode_next and decoding.size):
            plan = self._join(prefills, decoding)
            if plan.rows.size:
                self._waiting_tokens, self._decode_next = 1, decoding.size > 0
                return plan
        if decoding.size:
            self._waiting_tokens, self._decode_next = self._waiting_tokens + 1, False
            return self._decodes.decode(view)
        return resolve_prefill_deadlock(view, partial) if partial.size else Plan.idle()

    def _join(self, view: SchedulerView, decoding: Rows) -> Plan:
        """Return a prefill of the waiting requests that fit; an idle plan if they are too few to pause `decoding`."""
        table = view.table
        waiting = view.waiting[: max(view.max_num_seqs - decoding.size, 0)]
        least = 0
        if self._waiting_tokens < self.max_waiting_tokens:
            least = int(decoding.size * self.waiting_served_ratio)
        if waiting.size < max(least, 1):
            return Plan.idle()
        kind = allowed_kinds(view, waiting).argmax(axis=1).astype(np.int8)
        final = np.maximum(table.max_tokens_total[waiting] - 1, target_tokens(view, waiting, 0))
        final_running = np.maximum(table.max_tokens_total[decoding] - 1, table.num_tokens[decoding]).astype(np.int32)
        growth = held_blocks_for(view, decoding, final_running) - table.num_blocks[decoding]
        room = view.free_blocks - int(growth.sum())
        blocks = np.cumsum(start_blocks_for(view, waiting, final.astype(np.int32), kind))
        tokens = np.cumsum(view.remaining(waiting, kind))
        num = int(np.searchsorted(blocks, room, side="right"))
        if tokens[0] <= view.max_num_batched_tokens:  # otherwise the first prompt is computed in chunks
            num = min(num, int(np.searchsorted(tokens, view.max_num_batched_tokens, side="right")))
        else:
            num = min(num, 1)
        if num < max(least, 1):
            return Plan.idle()
        packer = StepPacker(view)
        packer.start(waiting[:num], kind[:num], in_order=True)
        return packer.plan()

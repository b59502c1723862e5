"""First come, first served on the hybrid cache, as released by Apt-Serve's authors together with their greedy policy
(Apt-Serve Table 5)."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV, NO_KIND
from apt_jax.sched.conversion import with_conversions
from apt_jax.sched.policies.fcfs import FcfsPolicy
from apt_jax.sched.step_packer import (
    Rows,
    StepPacker,
    allowed_kinds,
    held_blocks_for,
    split_running,
    start_blocks_for,
)
from apt_jax.sched.view import Plan, SchedulerView

MAX_HIDDEN_TOKENS = 7200
"""Maximum number of hidden tokens over all requests, as in the released code: a quarter of the pool with OPT-13B on one
A100 of 40 GB."""


class FcfsHybridPolicy:
    """`fcfs` whose oldest requests change to the hidden kind when blocks run out, before any request is evicted.

    * All requests start with KV. Admission and order are those of `FcfsPolicy`.
    * If the next positions do not fit the pool, the oldest decoding requests that hold KV change to the hidden kind: as
      few as are needed, as long as all hidden tokens together stay within `max_hidden_tokens` and the tokens to
      recompute within one step. They are recomputed in their own prefill step, before any other request.
    * If no request can change its kind, the latest arrival is evicted, and starts again with KV.

    Differences from the released code: there, a request is recomputed in the same iteration that changes its kind. A
    `Plan` cannot run a request that it preempts, so here the other requests decode in that iteration, and the prefill
    follows in the next. Also, here admission never changes other requests to the hidden kind; the released code has a
    limit for this, which is 0 tokens and never raised.

    If only one kind is offered, it acts like `FcfsPolicy`.

    Args:
        max_hidden_tokens: maximum number of hidden tokens over all requests; with 0 it acts like `FcfsPolicy`.
        convert: let hidden requests change back to keys and values within a decode step (`Plan.convert`) if that is
            worthwhile and no waiting request needs the blocks (`apt_jax.sched.conversion`). In the released code they
            stay hidden.
    """

    name = "fcfs-hybrid"

    def __init__(self, max_hidden_tokens: int = MAX_HIDDEN_TOKENS, *, convert: bool = False) -> None:
        if max_hidden_tokens < 0:
            raise ValueError(f"{max_hidden_tokens=} must be at least 0")
        self.max_hidden_tokens = max_hidden_tokens
        self.converts = convert
        self._fcfs = FcfsPolicy()
        self._turned: dict[int, int] = {}  # row -> rank of requests that will be recomputed as hidden

    def schedule(self, view: SchedulerView) -> Plan:
        if not (view.kinds[KV].offered and view.kinds[HIDDEN].offered):
            return self._fcfs.schedule(view)
        turned = self._still_turned(view)
        if self._turned:  # no other request may take their freed blocks
            plan = self._recompute(view, turned)
            if plan.rows.size:
                return plan
            view = dataclasses.replace(view, waiting=view.waiting[:0])
        plan = self._fcfs.schedule(view)
        if plan.preempt.size:
            return self._turn(view) or plan
        if self.converts and plan.iteration == "decode" and not self._turned:
            return with_conversions(view, plan, plan.rows)
        return plan

    def _still_turned(self, view: SchedulerView) -> Rows:
        """Return the waiting rows that will be recomputed as hidden, and forget rows that were recomputed or have
        finished."""
        table = view.table
        self._turned = {
            row: rank
            for row, rank in self._turned.items()
            if table.live[row] and table.rank[row] == rank and table.kind[row] == NO_KIND
        }
        return view.waiting[np.isin(view.waiting, list(self._turned))]

    def _recompute(self, view: SchedulerView, rows: Rows) -> Plan:
        kind = np.full(rows.size, HIDDEN, np.int8)
        blocks = start_blocks_for(view, rows, view.table.num_tokens.take(rows), kind)
        num_fitting = int(np.searchsorted(np.cumsum(blocks), view.free_blocks, side="right"))
        packer = StepPacker(view)
        packer.start(rows[:num_fitting], kind[:num_fitting], in_order=True)
        return packer.plan()

    def _turn(self, view: SchedulerView) -> Plan | None:
        """Return a plan that preempts the oldest KV requests, to recompute them as hidden, and decodes the others.

        None: no request can change its kind.
        """
        table = view.table
        decoding, _ = split_running(view)
        tokens = table.num_tokens.take(decoding)
        held = table.num_blocks.take(decoding)
        growth = held_blocks_for(view, decoding, tokens) - held
        hidden = view.blocks_for(tokens, HIDDEN)
        can_turn = (table.kind.take(decoding) == KV) & (held > hidden)
        can_turn &= allowed_kinds(view, decoding)[:, HIDDEN]
        oldest = np.flatnonzero(can_turn)
        all_tokens = np.cumsum(tokens[oldest])
        most = min(self._tokens_left(view), view.max_num_batched_tokens)
        oldest = oldest[: int(np.searchsorted(all_tokens, most, side="right"))]
        if not oldest.size:
            return None
        # A request that turns hidden frees blocks, and its own next position needs none in this step.
        lacking = int(growth.sum()) - view.free_blocks
        gain = np.cumsum(held[oldest] - hidden[oldest] + growth[oldest])
        oldest = oldest[: int(np.searchsorted(gain, lacking)) + 1]
        turns = np.zeros(decoding.size, np.bool_)
        turns[oldest] = True
        preempt, rest = decoding[turns], decoding[~turns]
        room = view.free_blocks + int((held - hidden)[turns].sum())
        num_run = int(np.searchsorted(np.cumsum(growth[~turns]), room, side="right"))
        rows = rest[: min(num_run, view.max_num_batched_tokens)]
        self._turned.update(zip(preempt.tolist(), table.rank[preempt].tolist(), strict=True))
        if not rows.size:
            return Plan.idle(preempt)
        return Plan(
            rows=rows,
            num_tokens=np.ones(rows.size, np.int32),
            kind=table.kind[rows],
            preempt=preempt,
            iteration="decode",
        )

    def _tokens_left(self, view: SchedulerView) -> int:
        """Return the number of tokens that may still change to the hidden kind."""
        table = view.table
        rows: NDArray[np.int32] = view.running[table.kind[view.running] == HIDDEN]
        waiting = np.fromiter(self._turned, np.int32, len(self._turned))
        hidden = table.num_tokens[rows].sum() + table.num_tokens[waiting].sum()
        return self.max_hidden_tokens - int(hidden)

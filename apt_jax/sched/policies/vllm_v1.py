"""vLLM's current scheduler (V1)."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.reservation import Reservation
from apt_jax.sched.step_packer import (
    Rows,
    admissible,
    blocks_after,
    num_that_fit,
    share_tokens,
    step_plan,
)
from apt_jax.sched.view import Plan, SchedulerView

BUDGET = 2048
"""Tokens of a step: vLLM's `max_num_batched_tokens` where nobody sets it."""


class VllmV1Policy:
    """Running requests first, then waiting ones, within one budget of tokens (vLLM 0.32, `vllm/v1/core/sched`).

    * Running requests come in order of arrival, decodes and partly computed prompts alike. Each gets the tokens that it
      has still to compute, or what is left of the budget.
    * When the blocks of one of them are not there, the last running request loses its cache and is recomputed later,
      then the one before it, until they are. Nobody is admitted in such a step.
    * Waiting requests follow in order of arrival, preempted ones among them at their old place. One is admitted when
      its whole prompt fits the free blocks (vLLM's `scheduler_reserve_full_isl`), and gets a chunk when the budget
      ends. Nothing is set aside for the rest of that prompt. The first that does not fit ends the admission.

    The number of slots limits how many run (`--max-num-seqs`), and `watermark` is 0, as in vLLM.

    Where it differs from vLLM: a request takes KV, or the hidden kind where KV is not on offer or can never hold it.
    vLLM's priorities, prefix replay, speculation and long-prefill threshold are not there (all off by default).
    `tests/sched/policies/vllm_decisions.json` holds decisions of vLLM's own scheduler, which this one repeats.

    With `reserve` a request is also admitted only when the pool holds what it and all running ones will need
    (`apt_jax.sched.reservation`), and decodes have their tokens of a step before partly computed prompts.

    Args:
        name: of the policy.
        budget: tokens of a step; at most `max_num_batched_tokens`.
        reserve: quantile of the output lengths for which memory is reserved; 1: up to `max_tokens`, which preempts
            nobody. None: nothing is.
    """

    def __init__(self, name: str = "vllm-v1", budget: int = BUDGET, reserve: float | None = None) -> None:
        if budget < 1:
            raise ValueError(f"{budget=} must be at least 1")
        self.name = name
        self.budget = budget
        self.reservation = None if reserve is None else Reservation(reserve)

    def schedule(self, view: SchedulerView) -> Plan:
        running = view.running
        budget = min(self.budget, view.max_num_batched_tokens)
        num_tokens = self._shared(view, running, budget)
        kept = self._kept(view, num_tokens)
        preempt = running[~kept]
        if preempt.size:
            running, num_tokens = running[kept], num_tokens[kept]
            return step_plan(view, running, num_tokens, view.table.kind[running], preempt)
        kind = view.table.kind[running]
        left = budget - int(num_tokens.sum())
        if left > 0 and view.waiting.size and running.size < view.max_num_seqs:
            growth = blocks_after(view, running, num_tokens) - view.table.num_blocks[running]
            free = view.free_blocks - int(growth.sum())
            started, wanted, their_kind = admissible(view, self._in_order(view), free)
            if self.reservation is not None:
                num = self.reservation.num_admissible(view, started, their_kind, budget - view.max_num_seqs)
                started, wanted, their_kind = started[:num], wanted[:num], their_kind[:num]
            running = np.concatenate([running, started])
            num_tokens = np.concatenate([num_tokens, share_tokens(wanted, left)])
            kind = np.concatenate([kind, their_kind])
        return step_plan(view, running, num_tokens, kind, preempt)

    def _shared(self, view: SchedulerView, rows: Rows, budget: int) -> NDArray[np.int32]:
        """(n,) tokens of `budget` for running `rows`."""
        wanted = view.remaining(rows)
        if self.reservation is None or (wanted == 1).all():
            return share_tokens(wanted, budget)
        order = np.argsort(wanted > 1, kind="stable")
        num_tokens = np.empty_like(wanted)
        num_tokens[order] = share_tokens(wanted[order], budget)
        return num_tokens

    def _kept(self, view: SchedulerView, num_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """(n,) which of `view.running` keep their cache when they compute `num_tokens`."""
        return np.arange(view.running.size) < num_that_fit(view, view.running, num_tokens)

    def _in_order(self, view: SchedulerView) -> Rows:
        """`view.waiting` in the order of admission."""
        return view.waiting

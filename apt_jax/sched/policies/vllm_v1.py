"""The current scheduler of vLLM (V1)."""

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
"""Default number of tokens per step: vLLM's default of `max_num_batched_tokens`."""


class VllmV1Policy:
    """Serves running requests first, then waiting requests, within a token budget (vLLM 0.32, `vllm/v1/core/sched`).

    * Running requests, decodes as well as partly computed prompts, come in order of arrival. Each gets all tokens that
      it has left to compute, or the rest of the budget.
    * If the blocks for a running request are not free, the last running request loses its cache and is recomputed
      later, then the one before it, until the blocks are free. No request is admitted in such a step.
    * Waiting requests, including preempted requests, follow in order of arrival. A request is admitted if its whole
      prompt fits the free blocks (vLLM's `scheduler_reserve_full_isl`), and gets a chunk if the budget runs out. No
      blocks are reserved for the rest of that prompt. The first request that does not fit ends the admission.

    The number of slots limits the running requests (`--max-num-seqs`), and `watermark` is 0, as in vLLM.

    Differences from vLLM: a request takes KV, or the hidden kind if KV is not offered or can never hold it; vLLM's
    priorities, prefix replay, speculation and long-prefill threshold, all off by default, are not implemented.
    `tests/sched/policies/vllm_decisions.json` holds decisions of vLLM's own scheduler, which this policy reproduces.

    With `reserve` a request is admitted only if the pool can also hold the future tokens of this request and of all
    running requests (`apt_jax.sched.reservation`), and decodes get their tokens in a step before partly computed
    prompts.

    Args:
        name: name of the policy.
        budget: maximum number of tokens per step, limited to `max_num_batched_tokens`.
        reserve: quantile of the output lengths for which memory is reserved; 1: `max_tokens`; no request is then
            preempted. None: no reservation.
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
        """Return the (n,) numbers of tokens that running `rows` get from `budget`."""
        wanted = view.remaining(rows)
        if self.reservation is None or (wanted == 1).all():
            return share_tokens(wanted, budget)
        order = np.argsort(wanted > 1, kind="stable")
        num_tokens = np.empty_like(wanted)
        num_tokens[order] = share_tokens(wanted[order], budget)
        return num_tokens

    def _kept(self, view: SchedulerView, num_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return the (n,) mask of `view.running` rows that keep their cache if they compute `num_tokens`."""
        return np.arange(view.running.size) < num_that_fit(view, view.running, num_tokens)

    def _in_order(self, view: SchedulerView) -> Rows:
        """Return `view.waiting` in the order of admission."""
        return view.waiting

"""Apt-Serve with chunked prefills and mixed batches: "Apt-Serve-S" (Apt-Serve §6.7)."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.knapsack.greedy import solve_greedy
from apt_jax.sched.knapsack.problem import KnapsackProblem
from apt_jax.sched.policies.apt import AptPolicy, can_begin, keeps_kind
from apt_jax.sched.step_packer import (
    StepPacker,
    growth,
    resolve_prefill_deadlock,
    split_by_phase,
    start_options,
    target_tokens,
)
from apt_jax.sched.value import option_values, pending_value
from apt_jax.sched.view import Plan, SchedulerView

STEP_TOKENS = 512
"""Maximum number of tokens per step, decodes and chunks together: Sarathi-Serve's budget."""


class AptSPolicy(AptPolicy):
    """Schedules the running queue R and the waiting queue W in every step, without iteration types (Apt-Serve §6.7).

    *Composition.* The policy solves the decode knapsack of `AptPolicy` over R with the whole pool, then its prefill
    knapsack over the requests of W that can start in this step. The constraint M of the second knapsack is Eq. 7 with
    the requests of R that continue.

    *Step* (Sarathi-Serve). A step holds all decodes, then chunks of partly computed prompts, then new prompts in
    decreasing order of marginal gain, at most `STEP_TOKENS` tokens in total; a prompt may be split. Partly computed
    prompts always continue, so the blocks of their whole prompts are set aside before both knapsacks.

    The paper says only that the iteration type is no longer decided, and that the result is better than that of the
    policy with iteration types. With two knapsacks in every step this holds in five of the six cases of Fig. 11. With
    one knapsack over both queues (`one_knapsack`) it holds in only two, because waiting requests, whose pending times
    are longer, then evict running requests (docs/lab/reproduction.md).

    Args:
        violation_decay: see `AptPolicy`.
        count_violated: see `AptPolicy`.
        keep_kind: see `AptPolicy`.
        one_knapsack: whether R and W compete in one knapsack with the whole pool as M.
    """

    name = "apt-s"

    def __init__(
        self,
        violation_decay: float = 0.0,
        *,
        count_violated: bool = True,
        keep_kind: bool | None = None,
        one_knapsack: bool = False,
    ) -> None:
        super().__init__(violation_decay, count_violated=count_violated, keep_kind=keep_kind)
        self.one_knapsack = one_knapsack

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        decoding, partial = split_by_phase(view)
        rows = np.concatenate([decoding, partial, view.waiting])
        if not rows.size:
            return Plan.idle()
        urgent = pending_value(view, rows)
        num_requests = self._num_requests(urgent)
        budget = min(STEP_TOKENS, view.max_num_batched_tokens)
        memory = view.free_blocks + int(table.num_blocks[decoding].sum()) - growth(view, partial)

        n = decoding.size
        keep = keeps_kind(view, self.keep_kind)
        running = urgent.part(slice(0, n))
        value, cost = self._running_options(view, running, num_requests, decoding, keep)
        waiting = view.waiting
        tokens = budget - n - int(view.remaining(partial).sum())
        slots = view.max_num_seqs - view.running.size
        if waiting.size and tokens > 0 and slots > 0:
            wanting = urgent.part(slice(rows.size - waiting.size, None))
            options = option_values(view, waiting, wanting, num_requests, self.violation_decay)
            blocks = start_options(view, waiting, target_tokens(view, waiting, 1))
            first = can_begin(view, waiting, options, blocks, tokens, slots, split=True)
            waiting = waiting[first]
            value = np.concatenate([value, options[first]])
            cost = np.concatenate([cost, blocks[first]])
        else:
            waiting = waiting[:0]

        if self.one_knapsack:
            kind = _solve(value, cost, memory)
        else:
            goes_on = _solve(value[:n], cost[:n], memory)
            kept = decoding[goes_on == table.kind[decoding]]
            set_aside = int(table.num_blocks[kept].sum()) + self._promised(view, kept)
            kind = np.concatenate([goes_on, _solve(value[n:], cost[n:], memory - set_aside)])
        stays = kind[:n] == table.kind[decoding]
        packer = StepPacker(view, decoding[~stays])
        packer.tokens_left = budget
        if stays.any():
            runs = decoding[stays]
            if runs.size > budget:
                runs = runs[np.argsort(table.last_token_s[runs], kind="stable")[:budget]]
            packer.decode(runs)
        if partial.size and packer.tokens_left > 0:
            packer.continue_prefill(partial)
        begins = kind[n:] >= 0
        if begins.any():
            packer.start(waiting[begins], kind[n:][begins].astype(np.int8), in_order=True, split=True)
        if packer.is_empty and partial.size and not packer.preempt.size:
            return resolve_prefill_deadlock(view, partial)
        return packer.plan()


def _solve(value: NDArray[np.float64], cost: NDArray[np.int32], memory: int) -> NDArray[np.integer]:
    """Return the (n,) kinds that Algorithm 1 chooses; -1: the request does not run."""
    return solve_greedy(KnapsackProblem(value, cost, max(memory, 0)), fill=False).kind

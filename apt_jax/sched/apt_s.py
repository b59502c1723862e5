"""Apt-Serve on chunked prefill and coalesced batches: "Apt-Serve-S" (Apt-Serve §6.7)."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.apt import (
    RESERVE_TOKENS,
    SWITCH_WINDOW_TOKENS,
    AptPolicy,
    _often_preempted,
    charge_hits,
)
from apt_jax.sched.greedy import solve_greedy
from apt_jax.sched.policy import (
    Rows,
    held_blocks_for,
    split_running,
    start_options,
    target_tokens,
)
from apt_jax.sched.problem import NOT_CHOSEN, KnapsackProblem
from apt_jax.sched.value import NEAR_ZERO, SHORTEST_PENDING_S, Urgency, option_values, urgency
from apt_jax.sched.view import NO_KIND, Plan, SchedulerView

STEP_TOKENS = 512
"""Tokens of a step, decodes and chunks together: Sarathi-Serve's budget."""


class AptSPolicy(AptPolicy):
    """One knapsack a step decides who holds cache; no iteration type (Apt-Serve §6.7).

    *Who holds cache.* A knapsack over all requests and the whole pool. A waiting request has the values and costs of
    `AptPolicy`. One that holds cache offers only the kind that it holds, at the room of `RESERVE_TOKENS` more tokens
    (the whole prompt, where that is partly computed), and counts more a block than any that waits: it gives way only
    when what runs outgrows the pool. Letting those that have missed their objectives make room for fresh ones was
    tried: the recomputations cost more attainment than the room brings. Nobody loses cache unless its room is needed
    in this very step.

    *Step.* All decodes, then chunks of partly computed prompts, then new prompts by falling value a block, at most
    `STEP_TOKENS` tokens. A prompt is begun only if its blocks are set aside as a whole.

    *Kinds.* Chosen at admission; a request that decodes may change its kind as in `AptPolicy`, one a step and where
    everything fits.

    *Progress.* Partly computed prompts stay, so that each comes to its token, and who was preempted too often goes
    first, as in `AptPolicy`.
    """

    name = "apt-s"

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        decoding, partial = split_running(view)
        rows = np.concatenate([decoding, partial, view.waiting])
        if not rows.size:
            return Plan.idle()
        num_holding = decoding.size + partial.size
        urgent = urgency(view, rows, self.violation_decay)
        value, cost = self._options(view, rows, decoding.size, num_holding, urgent)
        capacity = view.free_blocks + int(table.num_blocks[view.running].sum())
        budget = min(STEP_TOKENS, view.max_num_batched_tokens)
        budget_left = budget - decoding.size - int(view.remaining(partial).sum())

        new = np.zeros(0, np.int64)
        kind = np.full(rows.size, NOT_CHOSEN)
        if view.waiting.size and budget_left > 0:
            kind = solve_greedy(KnapsackProblem(value, cost, capacity), fill=False).kind
            new = num_holding + np.flatnonzero(kind[num_holding:] >= 0)
            density = value[new, kind[new]] / cost[new, kind[new]]
            new = new[np.argsort(-density, kind="stable")]
            length = view.remaining(rows[new], kind[new])
            new = new[np.cumsum(length) - length < budget_left]
        kind[:num_holding] = table.kind[rows[:num_holding]]

        # What must be there in this step: next positions, whole prompts. Less than `cost` where requests decode.
        asked = np.concatenate([np.arange(num_holding), new])
        blocks = cost[asked, kind[asked]]
        blocks[: decoding.size] = held_blocks_for(view, decoding, table.num_tokens[decoding])
        left = capacity - int(blocks.sum())
        if left < 0 or asked.size > view.max_num_seqs:
            density = value[asked, kind[asked]] / cost[asked, kind[asked]]
            served = _first_that_fit(
                density, blocks, asked >= num_holding, capacity, view.max_num_seqs
            )
        else:
            served = np.ones(asked.size, np.bool_)
            if decoding.size and self._may_switch(view):
                switch = self._switch(view, decoding, urgent, left)
                served[: decoding.size] = ~np.isin(decoding, switch)
        return self._step(view, rows[asked], kind[asked], served, decoding.size, budget)

    def _options(
        self, view: SchedulerView, rows: Rows, num_decoding: int, num_holding: int, urgent: Urgency
    ) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Values and costs (n, num_kinds) of all requests; those that hold cache come first, decoding ones before all."""
        table = view.table
        value = option_values(view, rows, urgent.pending_s, urgent.weight, urgent.num_counted)
        charge_hits(view, rows, value, urgent.weight * urgent.num_counted)
        tokens = target_tokens(view, rows, 1)
        tokens[:num_decoding] = target_tokens(view, rows[:num_decoding], RESERVE_TOKENS)
        cost = start_options(view, rows, tokens)
        level = np.zeros(rows.size)
        level[_often_preempted(view, rows)] = 1
        if num_holding:
            each, held = np.arange(num_holding), table.kind[rows[:num_holding]]
            cost[each, held] -= table.num_shared[rows[:num_holding]]
            stay = np.maximum(
                value[each, held],
                NEAR_ZERO * urgent.weight[:num_holding] * urgent.pending_s[:num_holding],
            )
            value[:num_holding] = -np.inf
            value[each, held] = stay
            level[:num_holding] += 2
            level[num_decoding:num_holding] += 1
        value += (2 * level * max(float((value / cost).max()), SHORTEST_PENDING_S))[:, None] * cost
        return value, cost

    def _switch(self, view: SchedulerView, decoding: Rows, urgent: Urgency, left: int) -> Rows:
        """At most one decoding request that gives its cache up for another kind, as in `AptPolicy`."""
        table, costs = view.table, view.costs
        n = decoding.size
        each, held = np.arange(n), table.kind[decoding]
        weight, pending_s = urgent.weight[:n], urgent.pending_s[:n]
        value = option_values(view, decoding, pending_s, weight, urgent.num_counted)
        stay = np.maximum(value[each, held], NEAR_ZERO * weight * pending_s)
        recompute_s = costs.prefill_base_s + costs.prefill_per_token_s * table.num_tokens[decoding]
        value -= (weight * urgent.num_counted * recompute_s / SWITCH_WINDOW_TOKENS)[:, None]
        value[~self._switchable(view, decoding)] = -np.inf
        value[each, held] = stay
        cost = view.block_options(target_tokens(view, decoding, 1))
        cost[each, held] = held_blocks_for(view, decoding, table.num_tokens[decoding])
        return self._run_all_but_one_switch(view, decoding, held, value, cost, left).preempt

    @staticmethod
    def _step(
        view: SchedulerView,
        rows: Rows,
        kind: NDArray[np.int64],
        served: NDArray[np.bool_],
        num_decoding: int,
        budget: int,
    ) -> Plan:
        """The step of those of `rows` that are `served`, in order; who holds cache and is not gives it up."""
        holds = view.table.kind[rows] != NO_KIND
        preempt = rows[holds & ~served]
        num_decoding = int(np.count_nonzero(served[:num_decoding]))
        rows, kind = rows[served], kind[served]
        if num_decoding > budget:
            longest = np.argsort(view.table.last_token_s[rows[:num_decoding]], kind="stable")
            rows, kind, num_decoding = rows[longest], kind[longest], budget
        remaining = view.remaining(rows, kind)
        ends = np.minimum(np.cumsum(remaining), budget)
        num_tokens = np.diff(ends, prepend=0).astype(np.int32)
        run = num_tokens > 0
        if not run.any():
            return Plan.idle(preempt)
        rows = rows[run]
        num_prompts = int(np.count_nonzero(run)) - num_decoding
        return Plan(
            rows=rows,
            num_tokens=num_tokens[run],
            kind=kind[run].astype(np.int8),
            preempt=preempt,
            iteration="mixed"
            if num_prompts and num_decoding
            else "prefill"
            if num_prompts
            else "decode",
        )


def _first_that_fit(
    density: NDArray[np.float64],
    blocks: NDArray[np.int32],
    is_new: NDArray[np.bool_],
    capacity: int,
    seats: int,
) -> NDArray[np.bool_]:
    """By falling density while blocks and seats last; new requests end at the first that does not fit."""
    order = np.argsort(-density, kind="stable")
    for _ in range(2):
        fit = int(np.searchsorted(np.cumsum(blocks[order]), capacity, side="right"))
        fit = min(fit, seats)
        # A new request that does not fit takes nothing from the holders that come after it.
        beyond = np.arange(order.size) >= fit
        order = order[~(beyond & is_new[order])]
    served = np.zeros(density.size, np.bool_)
    served[order[:fit]] = True
    return served

"""Apt-Serve's adaptive scheduling: iteration type by urgency, batch by knapsack (Apt-Serve §4.2, §5)."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.greedy import solve_greedy
from apt_jax.sched.policy import (
    Rows,
    StepPacker,
    decode_plan,
    held_blocks_for,
    hit_advantage_s,
    split_running,
    start_options,
    target_tokens,
    unblock,
)
from apt_jax.sched.problem import KnapsackProblem
from apt_jax.sched.value import NEAR_ZERO, Urgency, option_values, urgency
from apt_jax.sched.view import Plan, SchedulerView

RESERVE_TOKENS = 8
"""Admission leaves room for this many more tokens of each decoding request: a prompt that is let in only to evict
somebody a few steps later costs two recomputations."""

SLACK_SHARE = 0.5
"""Share of its TBT objective that a request may have been kept waiting after a prefill for violated ones."""

SWITCH_WINDOW_TOKENS = 64
"""At most two switches of the kind a request in this many output tokens, half of it apart."""

PROTECTION_AFTER = 8
"""Preemptions in `SWITCH_WINDOW_TOKENS` output tokens after which a request goes first."""


class AptPolicy:
    """Chooses prefill or decode, then who runs and with which cache kind, to cut the most pending time.

    *Iteration type.* Prefill if those who need one (waiting, or with a partly computed prompt) have the larger
    cumulative pending time, each weighted by the SLO-aware fallback, and something can be scheduled; else decode.
    Two differences from the paper: the weights, without which requests that have missed everything would force
    prefill for ever; and where only they would have it so, prefill still happens while it cannot make anybody late
    (`SLACK_SHARE`), so that a backlog of violated requests does not leave the pool empty.

    *Prefill.* Partly computed prompts go on first. Then a knapsack over the waiting requests and the kinds, with the
    free blocks less what those prompts still need and what decoding requests will take next. The chosen ones are
    packed into the step by value a token.

    *Decode.* Everything that decodes runs if its next position fits the pool. Otherwise the knapsack decides who stays,
    with the pool less what partly computed prompts need. Who is left out, or is chosen with the kind that it does not
    hold, is preempted. The other kind is charged with the recomputation as Eq. 5 charges time: `(|W| + |R|)` times
    `prefill_base_s + prefill_per_token_s * tokens`, spread over the `SWITCH_WINDOW_TOKENS` tokens that it shall serve.
    Without measured costs kinds are not switched. Unlike the paper a request that runs is not dropped for a negative
    value alone, only for want of room.

    *Cached prefixes.* A waiting request costs the blocks that must be free for it, and its value a token counts the
    tokens that are left to compute. A kind of which less is cached than of the other is charged with the difference,
    like a switch.

    *Solver.* The greedy one of the paper, which stops at the first increment that does not fit (`fill=False`).

    *Progress.* Each decode iteration keeps one request whatever the knapsack says, the one of the highest value, and it
    yields a token; a prompt is begun only when all its blocks are set aside. A request that was preempted
    `PROTECTION_AFTER` times goes first. So every iteration brings someone a token or a chunk nearer to one.

    Args:
        violation_decay: factor on the value of violated requests (Apt-Serve §6.6 uses 0.4); 0: near zero (§4.2).
    """

    name = "apt"

    def __init__(self, violation_decay: float = 0.0) -> None:
        self.violation_decay = violation_decay

    def schedule(self, view: SchedulerView) -> Plan:
        decoding, partial = split_running(view)
        num_waiting, num_partial = view.waiting.size, partial.size
        rows = np.concatenate([view.waiting, partial, decoding])
        if not rows.size:
            return Plan.idle()
        urgent = urgency(view, rows, self.violation_decay)
        first_decoding = num_waiting + num_partial
        if first_decoding and self._prefill_is_due(view, urgent, decoding, first_decoding):
            plan = self._prefill(view, urgent, decoding, partial)
            if plan.rows.size:
                return plan
        if decoding.size:
            return self._decode(view, urgent, decoding, partial)
        return unblock(view, partial) if num_partial else Plan.idle()

    # --- iteration type --------------------------------------------------------------------------------------------

    def _prefill_is_due(
        self, view: SchedulerView, urgent: Urgency, decoding: Rows, first_decoding: int
    ) -> bool:
        """Iteration type (Apt-Serve §5): the queue with the higher cumulative pending time."""
        if not decoding.size:
            return True
        weighted_s = urgent.weighted_s
        if weighted_s[:first_decoding].sum() > weighted_s[first_decoding:].sum():
            return True
        pending_s = urgent.pending_s
        if pending_s[:first_decoding].sum() <= pending_s[first_decoding:].sum():
            return False
        costs = view.costs
        step_s = costs.prefill_base_s + costs.prefill_per_token_s * view.max_num_batched_tokens
        kept_s = pending_s[first_decoding:] + step_s
        harmed = (kept_s > SLACK_SHARE * view.table.slo_tbt_s[decoding]) & ~urgent.violated[
            first_decoding:
        ]
        return not harmed.any()

    # --- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self, view: SchedulerView, urgent: Urgency, decoding: Rows, partial: Rows) -> Plan:
        packer = StepPacker(view)
        if partial.size:
            packer.go_on(partial)
        if view.waiting.size and packer.seats_left > 0 and packer.tokens_left > 0:
            capacity = view.free_blocks
            if partial.size:
                capacity -= _growth(view, partial, 1)
            if decoding.size:
                capacity -= _growth(view, decoding, RESERVE_TOKENS)
            if capacity > 0:
                packer.start(*self._admit(view, urgent, capacity), in_order=False)
        return packer.plan()

    def _admit(
        self, view: SchedulerView, urgent: Urgency, capacity: int
    ) -> tuple[Rows, NDArray[np.int8]]:
        """Waiting rows that the knapsack chooses, by falling value a token, and their kinds."""
        rows = view.waiting
        n = rows.size
        value = option_values(
            view, rows, urgent.pending_s[:n], urgent.weight[:n], urgent.num_counted
        )
        charge_hits(view, rows, value, urgent.weight[:n] * urgent.num_counted)
        protected = _often_preempted(view, rows)
        if protected.any():
            value[protected] += np.maximum(value.max(), 0.0) + urgent.pending_s[:n][protected, None]
        cost = start_options(view, rows, target_tokens(view, rows, 1))
        kind = solve_greedy(KnapsackProblem(value, cost, capacity), fill=False).kind
        chosen = np.flatnonzero(kind >= 0)
        density = value[chosen, kind[chosen]] / view.remaining(rows[chosen], kind[chosen])
        chosen = chosen[np.argsort(-density, kind="stable")]
        return rows[chosen], kind[chosen].astype(np.int8)

    # --- decode ----------------------------------------------------------------------------------------------------

    def _decode(self, view: SchedulerView, urgent: Urgency, decoding: Rows, partial: Rows) -> Plan:
        table = view.table
        n = decoding.size
        pending_s, weight = urgent.pending_s[-n:], urgent.weight[-n:]
        needed = held_blocks_for(view, decoding, table.num_tokens[decoding])
        capacity = view.free_blocks + int(table.num_blocks[decoding].sum())
        if partial.size:
            capacity -= _growth(view, partial, 1)
        num_needed = int(needed.sum())
        fits = num_needed <= capacity
        if fits and not self._may_switch(view):
            return decode_plan(view, decoding, view.running[:0])

        held = table.kind[decoding]
        each = np.arange(n)
        value = option_values(view, decoding, pending_s, weight, urgent.num_counted)
        costs = view.costs
        recompute_s = costs.prefill_base_s + costs.prefill_per_token_s * table.num_tokens[decoding]
        switched = (
            value - (weight * urgent.num_counted * recompute_s / SWITCH_WINDOW_TOKENS)[:, None]
        )
        switched[~self._switchable(view, decoding)] = -np.inf
        stay = value[each, held]
        # Who runs may keep what it has where there is room: a cache that slows the others down by more than its request
        # gains (a negative value) must make way first, but dropping it for nothing would only add its recomputation.
        stay = np.maximum(stay, NEAR_ZERO * weight * pending_s)
        value = switched
        value[each, held] = stay
        cost = view.block_options(target_tokens(view, decoding, 1))
        cost[each, held] = needed

        if fits:
            return self._run_all_but_one_switch(
                view, decoding, held, value, cost, capacity - num_needed
            )
        keep = self._favourite(view, decoding, stay)
        given_up = partial[:0]
        while needed[keep] > capacity and partial.size:
            # Not even one fits beside the prompts that are under way: the youngest of them waits again.
            given_up, partial = np.append(given_up, partial[-1]), partial[:-1]
            capacity += int(table.num_blocks[given_up[-1]]) + _growth(view, given_up[-1:], 1)
        others = np.delete(each, keep)
        stays = np.zeros(n, np.bool_)
        if needed[keep] <= capacity:
            stays[keep] = True
            capacity -= int(needed[keep])
        problem = KnapsackProblem(value[others], cost[others], max(capacity, 0))
        stays[others] = solve_greedy(problem, fill=False).kind == held[others]
        return decode_plan(view, decoding[stays], np.concatenate([given_up, decoding[~stays]]))

    def _run_all_but_one_switch(
        self,
        view: SchedulerView,
        decoding: Rows,
        held: NDArray[np.int8],
        value: NDArray[np.float64],
        cost: NDArray[np.int32],
        left: int,
    ) -> Plan:
        """Everything fits: one request may change its kind, where that pays for its own recomputation."""
        each = np.arange(decoding.size)
        gain = value - value[each, held][:, None]
        gain[cost - cost[each, held][:, None] > left] = -np.inf
        best = gain.max(axis=1)
        row = int(best.argmax())
        if best[row] <= 0:
            return decode_plan(view, decoding, view.running[:0])
        return decode_plan(view, np.delete(decoding, row), decoding[row : row + 1])

    def _may_switch(self, view: SchedulerView) -> bool:
        costs = view.costs
        known = costs.prefill_base_s > 0 or costs.prefill_per_token_s > 0
        return known and sum(kind.offered for kind in view.kinds) > 1

    def _switchable(self, view: SchedulerView, rows: Rows) -> NDArray[np.bool_]:
        """(n,) whether a request may be given another kind now: costs are known, and hysteresis allows it."""
        if not self._may_switch(view):
            return np.zeros(rows.size, np.bool_)
        table = view.table
        windows = 1 + table.num_outputs[rows] // SWITCH_WINDOW_TOKENS
        settled = table.tokens_since_preemption[rows] >= SWITCH_WINDOW_TOKENS // 2
        return settled & (table.num_kind_switches[rows] < 2 * windows)

    def _favourite(self, view: SchedulerView, decoding: Rows, value: NDArray[np.float64]) -> int:
        """The request that stays in any case: the oldest that was preempted too often, else the one of most value."""
        often = _often_preempted(view, decoding)
        return int(often.argmax()) if often.any() else int(value.argmax())


def charge_hits(
    view: SchedulerView, rows: Rows, value: NDArray[np.float64], factor: NDArray[np.float64]
) -> None:
    """Lower `value` (n, num_kinds) where another kind has more cached, as a switch is charged with its recomputation."""
    lost_s = hit_advantage_s(view, rows)
    if lost_s is not None:
        value -= (factor * lost_s.T / SWITCH_WINDOW_TOKENS).T


def _growth(view: SchedulerView, rows: Rows, ahead: int) -> int:
    """Blocks that running `rows` lack for `ahead` more tokens than they have."""
    lacking = (
        held_blocks_for(view, rows, target_tokens(view, rows, ahead)) - view.table.num_blocks[rows]
    )
    return int(np.maximum(lacking, 0).sum())


def _often_preempted(view: SchedulerView, rows: Rows) -> NDArray[np.bool_]:
    table = view.table
    windows = 1 + table.num_outputs.take(rows) // SWITCH_WINDOW_TOKENS
    return table.num_preemptions.take(rows) >= PROTECTION_AFTER * windows

"""apt-plus: Apt-Serve's knapsack over requests that can still attain their SLOs, for which other requests may be paused
(docs/apt-plus.md)."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import KV
from apt_jax.sched.kind_by_cost import kinds_by_cost
from apt_jax.sched.knapsack.greedy import solve_greedy
from apt_jax.sched.knapsack.problem import KnapsackProblem
from apt_jax.sched.reservation import expected_tokens
from apt_jax.sched.step_packer import (
    Rows,
    StepPacker,
    growth,
    held_blocks_for,
    resolve_prefill_deadlock,
    split_running,
    start_blocks_for,
    target_tokens,
)
from apt_jax.sched.value import check_decay
from apt_jax.sched.view import Plan, SchedulerView

TBT_SHARE = 0.8
"""Share of a TBT objective that a step may take; the rest is a margin for steps that take longer than predicted."""

URGENT_SHARE = 0.8
"""A waiting request may pause others only if it would be late after waiting this share of its objective more; until then
a running request may finish on its own."""

RECOMPUTE_SHARE = 0.5
"""Share of the time that the recomputation of paused requests may take; pauses for lack of memory are charged too. It
ends a spiral of pauses under any overload; less than it takes costs attainment and gains little throughput."""

RECOMPUTE_START_S, RECOMPUTE_MOST_S = 4.0, 10.0
"""Initial and maximum recomputation allowance in seconds; unspent allowance is saved for bursts."""

LARGEST_SHARE = 0.05
"""Share of the remaining allowance that one waiting request may use; a small allowance is thus spent on small requests.
A prompt that takes more than this share of `RECOMPUTE_MOST_S` to compute never pauses other requests."""

_FIRST = 1e6
"""Factor on a value that ranks it before all other values."""

RESERVE_TOKENS = 16
"""Number of further tokens per decoding request for which admission leaves blocks free."""

GAP_S = 0.5
"""Approximate time limit in seconds for the prompts in a step that also decodes requests without a TBT objective."""

LEFTOVER_TOKENS = 64
"""Like `RESERVE_TOKENS`, but for the admission of requests that can no longer attain their SLOs and would be paused
first."""

END_SHARE = 0.5
"""Share of the time left to its end-to-end deadline that the rest of a request may take if it is to be paused."""

_MOST_EXTRA = 8
"""Maximum number of requests without a miss that a step preempts so that more waiting requests are on time
(`forgiven_gaps` = 0)."""


class AptPlusPolicy:
    """Decodes all running requests in every step, together with prompts, and gives memory to requests that can still
    attain their SLOs.

    1. *One step for both phases.* The weights are read once for decodes and prompts; there are no iteration types
       (Apt-Serve-S, §6.7). The prompt tokens of a step are limited so that, by the cost model, no request that can
       still attain its SLOs gets a gap above `TBT_SHARE` of its TBT objective. If requests without an objective decode,
       the prompts of the step are also limited to about `GAP_S`.
    2. *Kind by the price of memory.* A request takes the hidden kind if filling the blocks that this saves with more
       requests gains more than its slower reads cost (`kinds_by_cost`): always with absorption, hardly ever with
       reprojection.
    3. *Admission.* The knapsack of Apt-Serve Eq. 7, with the pending times p_i as values, chooses among the waiting
       requests that would be on time if they started now; a request with an end-to-end objective must also be expected
       to end in time (`time_to_end`). Requests that were paused in the middle of their answer and have no objective
       rank before all others. Late requests get the blocks that are left after `LEFTOVER_TOKENS` more tokens are set
       aside for every decoding request: first requests without a token, then paused requests, each group by arrival.
    4. *Pausing.* A waiting request that would soon be late (`URGENT_SHARE`) takes the memory of running requests that
       lose no attainment by a pause: requests that have missed an objective, and requests with so many tokens that
       their 99th percentile meets the objective despite one more late gap, if the rest of the request takes at most
       `END_SHARE` of the time left by its end-to-end objective. No other requests are paused for it. The latest
       arrivals are paused first, because they have the most tokens left, so their memory is free for the longest time.
       Recomputation of paused requests may take `RECOMPUTE_SHARE` of the time. If the next positions do not fit the
       pool, requests are paused in the same order.
    5. *Two classes.* Best-effort requests have no objectives. They are paused before all others, also for lack of
       slots. They pause no other request, get only the memory left by real-time requests, and do not shorten steps.

    Args:
        violation_decay: factor on the value of late waiting requests (Apt-Serve §6.6); 0: they only get leftover
            memory.
        forgiven_gaps: number of late gaps that a request may have and still attain its objectives, if its 99th
            percentile allows as many. None: as many as the percentile allows. 0: every gap counts, so requests that have
            missed an objective are paused for others. A request that has missed none is preempted too, the largest first, if
            at least two more waiting requests can then start in time; it makes way again from then on.
        two_classes: whether best-effort requests follow rule 5. False: they are treated like real-time requests.
        gap_s: see `GAP_S`.
        urgent_share: see `URGENT_SHARE`.
        recompute_share: see `RECOMPUTE_SHARE`.
        largest_share: see `LARGEST_SHARE`.
        reserve_tokens: see `RESERVE_TOKENS`.
        leftover_tokens: see `LEFTOVER_TOKENS`.
    """

    name = "apt-plus"

    def __init__(
        self,
        violation_decay: float = 0.0,
        *,
        forgiven_gaps: int | None = None,
        two_classes: bool = True,
        gap_s: float = GAP_S,
        urgent_share: float = URGENT_SHARE,
        recompute_share: float = RECOMPUTE_SHARE,
        largest_share: float = LARGEST_SHARE,
        reserve_tokens: int = RESERVE_TOKENS,
        leftover_tokens: int = LEFTOVER_TOKENS,
    ) -> None:
        if forgiven_gaps is not None and forgiven_gaps < 0:
            raise ValueError(f"{forgiven_gaps=} must be at least 0")
        for name, value in {
            "gap_s": gap_s, "urgent_share": urgent_share, "recompute_share": recompute_share, "largest_share": largest_share,
            "reserve_tokens": reserve_tokens, "leftover_tokens": leftover_tokens,
        }.items():  # fmt: skip
            if not value >= 0:  # NaN is not
                raise ValueError(f"{name}={value!r} must be at least 0")
        self.violation_decay = check_decay(violation_decay)
        self.forgiven_gaps = forgiven_gaps
        self.has_classes = two_classes
        self.gap_s = gap_s
        self.urgent_share = urgent_share
        self.recompute_share = recompute_share
        self.largest_share = largest_share
        self.reserve_tokens = reserve_tokens
        self.leftover_tokens = leftover_tokens
        self._allowance_s = RECOMPUTE_START_S
        self._last_s: float | None = None

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        decoding, partial = split_running(view)
        if not (decoding.size or partial.size or view.waiting.size):
            return Plan.idle()
        ones = np.ones(decoding.size, np.int32)
        decode_s = view.costs.step_s(ones, table.num_cached[decoding], table.kind[decoding])
        low = self._best_effort(view, partial)
        partial, low_partial = partial[~low], partial[low]
        waiting = _Waiting(self, view, partial, decode_s) if view.waiting.size else None
        order, is_free = self._pause_order(view, decoding)
        since_s = 0.0 if self._last_s is None else max(view.now_s - self._last_s, 0.0)
        self._last_s = view.now_s
        self._allowance_s = min(self._allowance_s + self.recompute_share * since_s, RECOMPUTE_MOST_S)
        num_out = self._num_paused(view, decoding, np.concatenate([partial, low_partial]), waiting, order, is_free)
        lost = float(table.num_cached[decoding[order[:num_out]]].sum())
        lost_s = view.costs.prefill_per_token_s * lost
        self._allowance_s = max(self._allowance_s - lost_s, -RECOMPUTE_MOST_S)
        stays = np.ones(decoding.size, np.bool_)
        stays[order[:num_out]] = False
        preempt, decoding = decoding[~stays], decoding[stays]
        if partial.size or low_partial.size:
            kept, given_up = _keep_prompts(view, decoding, np.concatenate([partial, low_partial]), preempt)
            partial, low_partial = kept[: partial.size], kept[partial.size :]
            preempt = np.concatenate([preempt, given_up])
        if decoding.size > view.max_num_batched_tokens:
            oldest = np.argsort(table.last_token_s[decoding], kind="stable")
            decoding = decoding[np.sort(oldest[: view.max_num_batched_tokens])]

        packer = StepPacker(view, preempt)
        packer.decode(decoding)
        attain = decoding[~(self.has_missed(view, decoding) | self._best_effort(view, decoding))]
        packer.tokens_left = _prompt_tokens(view, attain, decode_s, packer.tokens_left)
        if not np.isfinite(table.slo_tbt_s[decoding[~self._best_effort(view, decoding)]]).all():
            begun = int(table.num_cached[partial[:1]].sum())
            packer.tokens_left = _tokens_within(view, begun, self.gap_s, packer.tokens_left)
        if partial.size:
            packer.continue_prefill(partial)
        under_way = np.concatenate([partial, low_partial])
        if waiting is not None and packer.slots_left > 0 and packer.tokens_left > 0:
            self._admit(view, waiting, packer, decoding, under_way, low_partial, attain)
        elif low_partial.size:
            _spare(packer, attain, table.num_cached[low_partial])
            packer.continue_prefill(low_partial)
        if packer.is_empty and under_way.size and not preempt.size:
            return resolve_prefill_deadlock(view, under_way)
        return packer.plan()

    # --- who pauses ------------------------------------------------------------------------------------------------

    def _pause_order(self, view: SchedulerView, decoding: Rows) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return indices into `decoding` in the order of pausing, and the (n,) mask of rows that may pause freely.

        A row may pause freely if its pause costs no attainment. With two classes, best-effort rows come first, then
        other rows that may pause freely, then the rest; within each group the latest arrivals come first. If every gap
        counts, the rest is ordered by size, the largest first.
        """
        is_free, low = self.may_wait(view, decoding), self._best_effort(view, decoding)
        last = -np.arange(decoding.size)
        if self.forgiven_gaps == 0:
            last = np.where(is_free, last, -view.table.num_blocks.take(decoding))
        return np.lexsort((last, ~is_free, ~low)), is_free

    def _best_effort(self, view: SchedulerView, rows: Rows) -> NDArray[np.bool_]:
        """Return the (n,) mask of best-effort rows; all False without classes."""
        return view.table.best_effort.take(rows) if self.has_classes else np.zeros(rows.size, np.bool_)

    def may_wait(self, view: SchedulerView, rows: Rows) -> NDArray[np.bool_]:
        """Return the (n,) mask of rows for which a pause of any length costs no attainment (rule 4).

        All rows must have produced a token.
        """
        table = view.table
        free = self.has_missed(view, rows) | self._best_effort(view, rows)
        late = table.num_late_gaps.take(rows) + 1
        left_s, rest_s = time_to_end(view, rows)
        rest_s += view.costs.prefill_per_token_s * table.num_tokens.take(rows)  # computed again after the pause
        can_end = rest_s <= END_SHARE * left_s
        return free | (can_end & (late <= self._num_forgiven(table.num_outputs.take(rows))))

    def has_missed(self, view: SchedulerView, rows: Rows) -> NDArray[np.bool_]:
        """Return the (n,) mask of requests that count as having missed an objective.

        A request counts if its first token was late, if its end-to-end deadline has passed, if the gap since its last
        token is already late, or if more gaps were late than are forgiven. The last two may change back, because more
        late gaps are forgiven in a longer output.
        """
        table = view.table
        ends_late = view.now_s > table.arrival_s.take(rows) + table.slo_e2e_s.take(rows)
        open_late = view.now_s - table.last_token_s.take(rows) > table.slo_tbt_s.take(rows)
        over = table.num_late_gaps.take(rows) > self._num_forgiven(table.num_outputs.take(rows))
        return table.ttft_missed.take(rows) | ends_late | over | open_late

    def _num_forgiven(self, num_outputs: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return, for each request, how many gaps may be late without its missing the TBT objective.

        That is 1 % of its gaps, because the objective is on their 99th percentile, and at most `forgiven_gaps`.
        """
        allowed = 0.01 * np.maximum(num_outputs - 1, 0)
        return allowed if self.forgiven_gaps is None else np.minimum(allowed, self.forgiven_gaps)

    def _num_paused(
        self,
        view: SchedulerView,
        decoding: Rows,
        partial: Rows,
        waiting: "_Waiting | None",
        order: NDArray[np.intp],
        is_free: NDArray[np.bool_],
    ) -> int:
        """Return how many rows, from the front of `order`, must pause for next positions to fit and urgent requests to
        start."""
        table = view.table
        if not decoding.size:
            return 0
        held = table.num_blocks[decoding][order]
        grown = held_blocks_for(view, decoding, table.num_tokens[decoding])[order]
        freed = np.cumsum(grown)
        lacking = int(freed[-1] - held.sum()) - view.free_blocks
        num_out = 0
        if lacking > 0:
            num_out = int(np.searchsorted(freed, lacking)) + 1
            if num_out >= decoding.size and grown[-1] <= view.total_blocks:
                num_out = decoding.size - 1  # the last row continues; partly computed prompts lose their cache
        if waiting is None or not waiting.urgent.size:
            return num_out
        # Freeing blocks for m tokens costs the recomputation of about m tokens.
        per_token_s, urgent = view.costs.prefill_per_token_s, waiting.urgent
        if per_token_s <= 0:  # the cost is unknown
            return num_out
        about_s = per_token_s * table.num_tokens[view.waiting[urgent]]
        urgent = urgent[about_s <= self.largest_share * self._allowance_s]
        if not urgent.size:
            return num_out
        reserve = self._growth(view, decoding, self.reserve_tokens)
        wanted = np.cumsum(waiting.blocks[urgent])
        wanted += reserve - view.free_blocks + growth(view, partial)
        # Pausing the first n rows of `order` frees the blocks that they hold and those that they would take next.
        enough = np.where(wanted > 0, np.searchsorted(freed, wanted) + 1, 0)
        cost_s = np.cumsum(table.num_cached[decoding][order]) * per_token_s
        num_cheap = int(np.searchsorted(cost_s, self._allowance_s, side="right"))
        may_pause = np.count_nonzero(is_free) + np.arange(_MOST_EXTRA if self.forgiven_gaps == 0 else 1)
        num_served = np.searchsorted(enough, np.minimum(may_pause, num_cheap), side="right")
        served = int(num_served[(num_served - np.arange(num_served.size)).argmax()])
        if served:
            num_out = max(num_out, int(enough[served - 1]))
        # Best-effort requests, which come first in `order`, are also paused if slots are lacking.
        num_low = int(np.count_nonzero(self._best_effort(view, decoding)))
        num_slots = served - (view.max_num_seqs - view.running.size)
        return max(num_out, min(num_slots, num_low, num_cheap))

    # --- who is admitted -------------------------------------------------------------------------------------------

    def _admit(
        self,
        view: SchedulerView,
        waiting: "_Waiting",
        packer: StepPacker,
        decoding: Rows,
        partial: Rows,
        low_partial: Rows,
        attain: Rows,
    ) -> None:
        """Add waiting real-time requests to the step, then partly computed best-effort prompts, then waiting
        best-effort requests; those take no more time than `attain` leaves, the decoding rows that may still be on
        time."""
        blocks, value = waiting.blocks, waiting.value
        room = packer.blocks_left - growth(view, partial)
        first = np.flatnonzero(value > 0)
        capacity = room - self._growth(view, decoding, self.reserve_tokens)
        if first.size and capacity > 0:
            problem = KnapsackProblem(value[first, None], blocks[first, None], capacity)
            first = first[solve_greedy(problem).kind >= 0]
            first = first[np.argsort(-value[first] / blocks[first], kind="stable")]
        else:
            first = first[:0]
        room -= int(blocks[first].sum()) + self._growth(view, decoding, self.leftover_tokens)
        chosen = np.concatenate([first, waiting.others(self, room)])
        low = self._best_effort(view, view.waiting[chosen])
        packer.start(view.waiting[chosen[~low]], waiting.kind[chosen[~low]], in_order=False, split=True)
        rows, kind = view.waiting[chosen[low]], waiting.kind[chosen[low]]
        found = view.table.cached_prefix_tokens[rows, kind]
        _spare(packer, attain, np.concatenate([view.table.num_cached[low_partial], found]))
        if low_partial.size and packer.tokens_left > 0:
            packer.continue_prefill(low_partial)
        packer.start(rows, kind, in_order=False, split=True)

    def _growth(self, view: SchedulerView, rows: Rows, ahead: int) -> int:
        """Return the number of additional blocks that running `rows` need for `ahead` more tokens each."""
        if not rows.size:
            return 0
        needed = held_blocks_for(view, rows, view.table.num_tokens[rows] + np.int32(ahead))
        return int(np.maximum(needed - view.table.num_blocks[rows], 0).sum())


class _Waiting:
    """Values, kinds and blocks of the waiting requests in one decision; arrays in the order of `view.waiting`."""

    def __init__(self, policy: AptPlusPolicy, view: SchedulerView, partial: Rows, decode_s: float) -> None:
        self._view = view
        table, rows = view.table, view.waiting
        self.value = np.zeros(rows.size)
        """(n,) values: p_i for requests on time, `violation_decay` times p_i for late requests, 0 for best-effort
        requests, and `_FIRST` times p_i for requests without an objective that were paused in the middle of their
        answer."""
        self.kind = np.full(rows.size, KV, np.int8)
        self.blocks = np.zeros(rows.size, np.int32)
        pending_s = np.maximum(view.now_s - table.last_token_s.take(rows), 1e-6)
        started = table.num_delivered.take(rows) > 0
        objective_s = np.where(started, table.slo_tbt_s.take(rows), table.slo_ttft_s.take(rows))
        has_value = ~policy._best_effort(view, rows)
        if policy.violation_decay <= 0:
            has_value &= pending_s <= objective_s
        near = np.flatnonzero(has_value)  # under overload few of many
        self.place(near)
        rows, kind, blocks = rows[near], self.kind[near], self.blocks[near]
        pending_s, started, objective_s = pending_s[near], started[near], objective_s[near]
        at_best_s = pending_s + prefill_s(view, rows, kind, partial, decode_s)
        left_s, rest_s = time_to_end(view, rows)
        objective_s = np.minimum(objective_s, pending_s + left_s - rest_s)
        on_time = (at_best_s <= objective_s) & ~(started & policy.may_wait(view, rows))
        value = np.where(on_time, pending_s, policy.violation_decay * pending_s)
        stopped = started & ~np.isfinite(objective_s)
        value[stopped] = _FIRST * pending_s[stopped]
        self.value[near] = value
        waits_s = policy.urgent_share * np.where(np.isfinite(objective_s), objective_s, 0.0)
        urgent = np.flatnonzero(on_time & (at_best_s > objective_s - waits_s))
        urgent = urgent[np.argsort(-value[urgent] / blocks[urgent], kind="stable")]
        lengths = view.remaining(rows[urgent], kind[urgent])
        num = int(np.searchsorted(np.cumsum(lengths), view.max_num_batched_tokens, side="right"))
        self.urgent = near[urgent[: max(num, 1)]]
        """Indices of requests that may pause others and start in this step, in decreasing order of value per block."""

    def place(self, indices: NDArray[np.intp]) -> None:
        """Set `kind` and `blocks` at `indices`; requests with a value have them."""
        view, rows = self._view, self._view.waiting[indices]
        self.kind[indices] = kind = kinds_by_cost(view, rows)
        self.blocks[indices] = start_blocks_for(view, rows, target_tokens(view, rows, 1), kind)

    def others(self, policy: AptPlusPolicy, room: int) -> NDArray[np.intp]:
        """Return the indices of the requests without a value that fit `room` blocks one after another: real-time
        requests first, then requests without a token, then by arrival."""
        view = self._view
        most = room // int(view.blocks_per_group[view.offered].min())  # each takes at least one group
        if most < 1:
            return np.zeros(0, np.intp)
        rest = np.flatnonzero(self.value <= 0)
        rows = view.waiting[rest]
        key = 2 * policy._best_effort(view, rows) + (view.table.num_delivered.take(rows) > 0)
        rest = rest[np.argsort(key, kind="stable")[:most]]
        self.place(rest)
        return rest[: int(np.searchsorted(np.cumsum(self.blocks[rest]), room, side="right"))]


def time_to_end(view: SchedulerView, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how long each row has until its end-to-end deadline, and how long its tokens after the next one take.

    The number of these tokens is the median of what similar requests had (`expected_tokens`; with too few such requests
    it is 0), and they come at the pace of a step of the requests that decode now.

    Returns:
        Two (n,) arrays of seconds: the time left, negative if the deadline has passed and infinite without an
        end-to-end objective; and the time of the tokens, 0 without one.
    """
    table = view.table
    left_s = table.arrival_s.take(rows) + table.slo_e2e_s.take(rows) - view.now_s
    rest_s = np.zeros(rows.size)
    due = np.flatnonzero(np.isfinite(left_s))
    if due.size:
        decoding = split_running(view)[0]
        ones = np.ones(decoding.size, np.int32)
        step_s = view.costs.step_s(ones, table.num_cached[decoding], table.kind[decoding])
        later = expected_tokens(view, rows[due], 0.5) - table.num_tokens.take(rows[due]) - 1
        rest_s[due] = np.maximum(later, 0) * step_s
    return left_s, rest_s


def prefill_s(
    view: SchedulerView, rows: Rows, kind: NDArray[np.int8], partial: Rows, decode_s: float
) -> NDArray[np.float64]:
    """Return the (n,) seconds until the next token of each waiting row if the row started now.

    The partly computed prompts in `partial` are computed first.
    """
    costs = view.costs
    tokens = view.remaining(rows, kind).astype(np.float64)
    cached = view.table.cached_prefix_tokens[rows, kind]
    ahead = float(view.remaining(partial).sum()) if partial.size else 0.0
    steps = np.ceil((tokens + ahead) / view.max_num_batched_tokens)
    bases = (decode_s, costs.prefill_base_s)
    return (
        costs.prefill_per_token_s * (tokens + ahead)
        + costs.prefill_per_pair_s * tokens * (tokens + 2 * cached)
        + steps * (max(bases) if costs.one_program else sum(bases))
    )


def _keep_prompts(view: SchedulerView, decoding: Rows, partial: Rows, preempt: Rows) -> tuple[Rows, Rows]:
    """Return the partly computed prompts that keep their cache, and the prompts that lose it.

    The youngest prompts lose their cache until the next positions of `decoding` fit.
    """
    have = view.free_blocks + int(view.table.num_blocks[preempt].sum())
    lacking = growth(view, decoding) - have
    num_kept = partial.size
    while lacking > 0 and num_kept:
        num_kept -= 1
        lacking -= int(view.table.num_blocks[partial[num_kept]])
    return partial[:num_kept], partial[num_kept:]


def _prompt_tokens(view: SchedulerView, attain: Rows, decode_s: float, limit: int) -> int:
    """Return how many prompt tokens a step may compute within the `TBT_SHARE` limit of all rows in `attain`.

    The number is at most `limit`. It is at least one block (or `limit` if that is less), so prompts progress even if an
    objective allows fewer tokens. If costs are unknown, it is `limit`.
    """
    costs = view.costs
    per_token_s = costs.prefill_per_token_s
    if per_token_s <= 0 or not attain.size:
        return limit
    table = view.table
    until_s = table.last_token_s[attain] + TBT_SHARE * table.slo_tbt_s[attain]
    slack_s = float(until_s.min()) - view.now_s - decode_s
    if not costs.one_program:
        slack_s -= costs.prefill_base_s
    if slack_s >= limit * per_token_s:
        return limit
    return max(min(int(slack_s / per_token_s), limit), min(view.block_size, limit))


def _spare(packer: StepPacker, attain: Rows, cached: NDArray[np.int32]) -> None:
    """Limit the tokens left for best-effort prompts if the step decodes rows in `attain`: a token after many cached ones
    takes longer than the tokens left are counted with (`_prompt_tokens`).

    Args:
        packer: the step.
        attain: decoding rows that may still be on time.
        cached: (n,) cached positions of the prompts that follow; the most count.
    """
    if attain.size and cached.size and packer.tokens_left > 0:
        left, per_token_s = packer.tokens_left, packer.view.costs.prefill_per_token_s
        packer.tokens_left = _tokens_within(packer.view, int(cached.max()), left * per_token_s, left)


def _tokens_within(view: SchedulerView, start: int, limit_s: float, limit: int) -> int:
    """Return how many prompt tokens a step can compute within about `limit_s`.

    The number is at most `limit`, and at least one block (or `limit` if that is less). If costs are unknown, it is
    `limit`.

    Args:
        view: the scheduler's view.
        start: number of cached positions before them, which cost time too.
        limit_s: time limit in seconds.
        limit: maximum number of prompt tokens.
    """
    costs = view.costs
    a, b = costs.prefill_per_pair_s, costs.prefill_per_token_s + 2 * start * costs.prefill_per_pair_s
    if b <= 0 or costs.chunk_s(limit, start, KV) <= limit_s:  # zero: unknown
        return limit
    # The positive root of a n^2 + b n = limit_s, in a form that is safe for a = 0.
    num = 2 * limit_s / (b + (b * b + 4 * a * limit_s) ** 0.5)
    return max(min(int(num), limit), min(view.block_size, limit))

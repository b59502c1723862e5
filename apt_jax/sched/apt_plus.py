"""apt-plus: Apt-Serve's knapsack where attention on the hidden cache is cheap, with what simulation showed to help.

What differs from `apt`, and why, is in docs/apt-plus.md on one page with what each part contributes.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.greedy import solve_greedy
from apt_jax.sched.policy import (
    Rows,
    StepPacker,
    allowed_kinds,
    held_blocks_for,
    split_running,
    start_blocks_for,
    target_tokens,
    unblock,
)
from apt_jax.sched.problem import KnapsackProblem, Schedule
from apt_jax.sched.value import Urgency, urgency
from apt_jax.sched.view import HIDDEN, KV, Plan, SchedulerView

Solver = Callable[[KnapsackProblem], Schedule]

RESERVE_TOKENS = 16
"""Admission leaves room for this many more tokens of everyone who decodes."""

LATE_RESERVE_TOKENS = 256
"""The same before a late request is let in: what it takes now, those that arrive on time would miss."""

TBT_SHARE = 0.8
"""Share of a TBT objective that a step may take up: the rest is for steps that turn out longer."""

TYPICAL_TOKENS = 512
"""Length of the requests that would fill freed memory, where the price of memory is reckoned."""

URGENT_SHARE = 0.5
"""Share of its objective that a request must have waited before others are asked to make room for it."""

SACRIFICE_RATIO = 1.5
"""Someone on time makes room for another only if finishing it would cost this many times as much."""

PROTECTION_AFTER = 8
"""Preemptions in 64 output tokens after which a request gives its cache up last, and is let in first."""

PRIOR_TOKENS = 256.0
PRIOR_COUNT = 20.0
"""Before requests have ended, outputs are taken to be memoryless with this mean; it weighs as much as so many requests."""


class RemainingOutput:
    """What is still to come of a request with a output tokens, from the lengths of those that have ended.

    With S(a) the share of requests longer than a: the expected number of further steps is the sum over k of S(a + k) / S(a),
    and their expected lengths added up, n + k each, give the token steps that a cache of n tokens will be held for.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._fit(np.zeros(1, np.int64))

    def learn(self, lengths: NDArray[np.int64], num: int) -> None:
        """Take `RequestTable.output_lengths` in, once enough is new."""
        if num - self._num_seen >= max(16, self._num_seen // 16):
            self._num_seen = num
            self._fit(lengths)

    def _fit(self, lengths: NDArray[np.int64]) -> None:
        longest = int(np.flatnonzero(lengths)[-1]) if lengths.any() else 0
        counts = np.zeros(max(longest + 1, int(8 * PRIOR_TOKENS)))
        counts[: longest + 1] = lengths[: longest + 1]
        prior = PRIOR_COUNT * np.exp(-np.arange(counts.size) / PRIOR_TOKENS)
        longer = np.cumsum(counts[::-1])[::-1] + prior
        tail = np.cumsum(longer[::-1])[::-1]
        self._steps = tail / longer
        self._more = np.cumsum(tail[::-1])[::-1] / longer - self._steps

    def token_steps(
        self, num_outputs: NDArray[np.int32], num_tokens: NDArray[np.int32]
    ) -> NDArray[np.float64]:
        """(n,) expected sum of the lengths over the remaining steps."""
        a = np.minimum(num_outputs, self._steps.size - 1)
        return num_tokens * self._steps[a] + self._more[a]


class AptPlusPolicy:
    """Everyone who can decodes in every step; prompts ride along as far as memory and objectives allow.

    1. *One step for both phases.* The weights are read once for decodes and prompts. There is no iteration type, so
       that neither queue's objective is missed for the other's sake (Apt-Serve-S, §6.7).
    2. *Chunk by cost.* The step may grow by as many prompt tokens as the cost model allows without a gap above
       `TBT_SHARE` of the objective of anyone who is on time. A tight objective makes small chunks, a loose one whole prompts.
    3. *Kind by the price of memory.* A request takes the hidden kind where the blocks that it saves, filled with more
       requests, gain more than its slower reads cost (`_kinds`): always with absorption, hardly ever with reprojection.
    4. *Who is let in.* The knapsack of Apt-Serve Eq. 7 over waiting requests, values p_i, filled up after the greedy stop.
       Requests that can no longer be on time, by the cost model, are late before their objective has passed; late
       ones get what is left beyond `LATE_RESERVE_TOKENS` of everybody's growth (`violation_decay` > 0: they compete
       with their value times that, as in §6.6).
    5. *Who gives way.* Finishing a request costs machine time: its prompt, and its share of the memory for the steps that
       it will hold it, which the lengths of ended requests tell (`RemainingOutput`, `_burden_s`). When the next positions
       do not fit, late requests go first, then the dearest. And where a waiting request has used up half of its
       objective and would cost much less to finish than someone who runs, the dear one makes room: at a rate that
       cannot be met for all, the fewest lose their objective.

    Args:
        violation_decay: factor on the value of late requests; 0: they get what is left.
        solver: of the knapsack; `solve_exact` shows what an optimal one would add.
        mixed: False: a step is for prompts or for decodes, as in `apt`: prompts whenever they may be.
        foresee: False: a request is late only when its objective has passed.
        sacrifice: False: nobody on time makes room for others.
        kinds_by_price: False: KV wherever it is offered.
        clairvoyant: True: output lengths are known (`max_tokens`, exact in a simulation): a bound, not a policy.
    """

    name = "apt-plus"

    def __init__(
        self,
        violation_decay: float = 0.0,
        *,
        solver: Solver = solve_greedy,
        mixed: bool = True,
        foresee: bool = True,
        sacrifice: bool = True,
        kinds_by_price: bool = True,
        clairvoyant: bool = False,
    ) -> None:
        self.violation_decay = violation_decay
        self._solver = solver
        self._mixed = mixed
        self._foresee = foresee
        self._sacrifice = sacrifice
        self._kinds_by_price = kinds_by_price
        self._clairvoyant = clairvoyant
        self._remaining = RemainingOutput()

    def schedule(self, view: SchedulerView) -> Plan:
        decoding, partial = split_running(view)
        rows = np.concatenate([view.waiting, partial, decoding])
        if not rows.size:
            return Plan.idle()
        self._remaining.learn(view.table.output_lengths, view.table.num_output_lengths)
        urgent = urgency(view, rows)
        waiting = _Waiting(self, view, urgent) if view.waiting.size else None
        first_decoding = rows.size - decoding.size
        late = urgent.violated[first_decoding:]
        stays = self._make_room(view, decoding, late, waiting, partial)
        preempt = decoding[~stays]
        if partial.size:
            partial, given_up = self._keep_prompts(view, decoding[stays], partial, preempt)
            preempt = np.concatenate([preempt, given_up])
        pending_s, late, decoding = (
            urgent.pending_s[first_decoding:][stays],
            late[stays],
            decoding[stays],
        )
        if decoding.size > view.max_num_batched_tokens:
            oldest = np.sort(np.argsort(-pending_s, kind="stable")[: view.max_num_batched_tokens])
            pending_s, late, decoding = pending_s[oldest], late[oldest], decoding[oldest]

        packer = StepPacker(view, preempt)
        decode_s = self._decode_s(view, decoding)
        prompts_only = not self._mixed and self._is_prompts_turn(
            view, partial, decode_s, pending_s, late
        )
        if not prompts_only:
            packer.decode(decoding)
        if self._mixed or prompts_only or not decoding.size:
            packer.tokens_left = self._prompt_tokens(
                view, decoding, ~late, pending_s, decode_s, packer.tokens_left
            )
            if partial.size:
                packer.go_on(partial)
            if waiting is not None and packer.seats_left > 0 and packer.tokens_left > 0:
                self._admit(view, waiting, packer, decoding, partial, decode_s)
            if prompts_only and packer.is_empty:
                packer.decode(decoding)
        if packer.is_empty and partial.size and not preempt.size:
            return unblock(view, partial)
        return packer.plan()

    # --- who gives way ---------------------------------------------------------------------------------------------

    def _make_room(
        self,
        view: SchedulerView,
        decoding: Rows,
        late: NDArray[np.bool_],
        waiting: "_Waiting | None",
        partial: Rows,
    ) -> NDArray[np.bool_]:
        """(n,) which of `decoding` keep their cache."""
        table = view.table
        stays = np.ones(decoding.size, np.bool_)
        held = table.num_blocks[decoding]
        growth = held_blocks_for(view, decoding, table.num_tokens[decoding]) - held
        lacking = int(growth.sum()) - view.free_blocks
        wanted = waiting.urgent if waiting is not None and self._sacrifice else decoding[:0]
        if not decoding.size or (lacking <= 0 and not wanted.size):
            return stays
        burden_s = self._burden_s(view, decoding, table.kind[decoding])
        often = _often_preempted(view, decoding)
        # First to go: late, then dear; last: who was preempted often.
        order = np.lexsort((-burden_s, ~late, often))
        num_out = 0
        if lacking > 0:
            freed = np.cumsum(held[order] + growth[order])
            num_out = int(np.searchsorted(freed, lacking)) + 1
            if num_out >= decoding.size and (held + growth)[order[-1]] <= view.total_blocks:
                num_out = decoding.size - 1  # it goes on in any case; prompts make room
        elif waiting is not None:
            reserve = _growth(view, decoding, RESERVE_TOKENS)
            room = view.free_blocks - _growth(view, partial, 1) - reserve
            price_s = np.where(late, np.inf, burden_s)[order]
            price_s[often[order]] = 0.0
            num_out = self._num_sacrificed(
                waiting.blocks[wanted],
                waiting.burden_s(self, view)[wanted],
                held[order],
                price_s,
                room,
            )
        stays[order[:num_out]] = False
        return stays

    @staticmethod
    def _num_sacrificed(
        blocks: NDArray[np.int32],
        burden_s: NDArray[np.float64],
        held: NDArray[np.int32],
        price_s: NDArray[np.float64],
        room: int,
    ) -> int:
        """How many of those who run, in their order, make room for those who wait, cheapest first."""
        num_out = 0
        for i in np.argsort(burden_s, kind="stable").tolist():
            lacking, out = int(blocks[i]) - room, num_out
            one_has_gone = False
            while lacking > 0 and out < held.size:
                # Late ones cost nothing; of those on time at most one goes for another.
                if one_has_gone or price_s[out] < SACRIFICE_RATIO * burden_s[i]:
                    return num_out
                one_has_gone = bool(price_s[out] < np.inf)
                lacking -= int(held[out])
                out += 1
            if lacking > 0:
                return num_out
            num_out, room = out, -lacking
        return num_out

    def _keep_prompts(
        self, view: SchedulerView, decoding: Rows, partial: Rows, preempt: Rows
    ) -> tuple[Rows, Rows]:
        """Prompts under way that keep their cache, and those that give it up: the youngest, while not even what is left
        of `decoding` fits beside them."""
        have = view.free_blocks + int(view.table.num_blocks[preempt].sum())
        lacking = _growth(view, decoding, 0) - have
        num_kept = partial.size
        while lacking > 0 and num_kept:
            num_kept -= 1
            lacking -= int(view.table.num_blocks[partial[num_kept]])
        return partial[:num_kept], partial[num_kept:]

    def _burden_s(
        self, view: SchedulerView, rows: Rows, kind: NDArray[np.int8]
    ) -> NDArray[np.float64]:
        """(n,) machine time that finishing each request takes, seconds: its prompt, where that is still to be computed,
        and its share of the memory, of the time of a step with the memory full, for every step to come."""
        table = view.table
        tokens = table.num_tokens[rows]
        if self._clairvoyant:
            left = np.maximum(table.max_tokens_total[rows] - tokens, 1).astype(np.float64)
            token_steps = tokens * left + 0.5 * left * left
        else:
            token_steps = self._remaining.token_steps(table.num_outputs[rows], tokens)
        share = (view.blocks_per_group / (view.block_sizes * float(view.total_blocks)))[kind]
        prompt = view.remaining(rows, kind)
        prompt_s = np.where(prompt > 1, view.costs.prefill_per_token_s * prompt, 0.0)
        return token_steps * share * _full_step_s(view) + prompt_s

    # --- how many prompt tokens ------------------------------------------------------------------------------------

    def _decode_s(self, view: SchedulerView, decoding: Rows) -> float:
        table = view.table
        ones = np.ones(decoding.size, np.int32)
        return view.costs.step_s(ones, table.num_cached[decoding], table.kind[decoding])

    def _prompt_tokens(
        self,
        view: SchedulerView,
        decoding: Rows,
        on_time: NDArray[np.bool_],
        pending_s: NDArray[np.float64],
        decode_s: float,
        limit: int,
    ) -> int:
        """Prompt tokens that may ride along: no gap of anyone on time may come near its objective.

        At least one block of them: prompts must go on, whatever the objectives.
        """
        per_token_s = view.costs.prefill_per_token_s
        if per_token_s <= 0 or not on_time.any():
            return limit
        slack_s = (TBT_SHARE * view.table.slo_tbt_s[decoding] - pending_s)[on_time].min() - decode_s
        if slack_s >= limit * per_token_s:
            return limit
        return max(min(int(slack_s / per_token_s), limit), min(view.block_size, limit))

    def _is_prompts_turn(
        self,
        view: SchedulerView,
        partial: Rows,
        decode_s: float,
        pending_s: NDArray[np.float64],
        late: NDArray[np.bool_],
    ) -> bool:
        """Without mixed steps: whether prompts may go first, by the objectives of those who decode."""
        if not partial.size and not view.waiting.size:
            return False
        costs = view.costs
        step_s = costs.prefill_base_s + costs.prefill_per_token_s * view.max_num_batched_tokens
        objective_s = TBT_SHARE * view.table.slo_tbt_s[split_running(view)[0]]
        if objective_s.size != pending_s.size:
            return False
        return not ((pending_s + step_s + decode_s > objective_s) & ~late).any()

    # --- who is let in ---------------------------------------------------------------------------------------------

    def _admit(
        self,
        view: SchedulerView,
        waiting: "_Waiting",
        packer: StepPacker,
        decoding: Rows,
        partial: Rows,
        decode_s: float,
    ) -> None:
        rows, pending_s = view.waiting, waiting.pending_s
        late = waiting.late
        if self._foresee:
            late = late | self._too_late(
                view, rows, waiting.kind, pending_s, partial, packer, decode_s
            )
        room = packer.blocks_left - _growth(view, partial, 1)
        value = np.where(late, self.violation_decay * pending_s, pending_s)
        often = _often_preempted(view, rows)
        if often.any():
            value[often] = pending_s[often] + value.max()
        first, rest = np.flatnonzero(value > 0), np.flatnonzero(value <= 0)
        reserve = _growth(view, decoding, RESERVE_TOKENS)
        chosen = first[self._choose(value[first], waiting.blocks[first], room - reserve)]
        if rest.size:
            room -= int(waiting.blocks[chosen].sum()) + _growth(view, decoding, LATE_RESERVE_TOKENS)
            picked = rest[self._choose(pending_s[rest], waiting.blocks[rest], room)]
            chosen = np.concatenate([chosen, picked])
        packer.start(rows[chosen], waiting.kind[chosen], in_order=False, split=True)

    def _choose(
        self, value: NDArray[np.float64], blocks: NDArray[np.int32], capacity: int
    ) -> NDArray[np.intp]:
        """Positions that the knapsack takes, by falling value a block."""
        if not value.size or capacity < 1:
            return np.zeros(0, np.intp)
        problem = KnapsackProblem(value[:, None], blocks[:, None], capacity)
        chosen = np.flatnonzero(self._solver(problem).kind >= 0)
        return chosen[np.argsort(-value[chosen] / blocks[chosen], kind="stable")]

    def _too_late(
        self,
        view: SchedulerView,
        rows: Rows,
        kind: NDArray[np.int8],
        pending_s: NDArray[np.float64],
        partial: Rows,
        packer: StepPacker,
        decode_s: float,
    ) -> NDArray[np.bool_]:
        """(n,) whose first token would miss its objective if their prompt were begun right now."""
        table, costs = view.table, view.costs
        tokens = view.remaining(rows, kind).astype(np.float64)
        cached = table.hit_tokens[rows, kind]
        ahead = float(view.remaining(partial).sum()) if partial.size else 0.0
        steps = np.ceil((tokens + ahead) / max(packer.tokens_left, 1))
        prefill_s = (
            costs.prefill_per_token_s * (tokens + ahead)
            + costs.prefill_per_pair_s * tokens * (tokens + 2 * cached)
            + steps * max(decode_s, costs.prefill_base_s)
        )
        return (table.num_delivered[rows] == 0) & (pending_s + prefill_s > table.slo_ttft_s[rows])

    def kinds(self, view: SchedulerView, rows: Rows) -> NDArray[np.int8]:
        """The kind that each waiting row would take.

        Say the pool is full of N typical requests with KV and a step takes T. A request of m tokens that takes the
        hidden kind instead saves a share s of the pool. Filled, that brings s N more requests a step: the rate N / T
        gains s, and loses the share by which the step grows, of its own slower reads and of the newcomers':

            s T > t(m) + s N (per request + per token * typical length)
        """
        allowed = allowed_kinds(view, rows)
        kind = np.where(allowed[:, KV], KV, HIDDEN).astype(np.int8)
        both = allowed[:, KV] & allowed[:, HIDDEN]
        if not both.any() or not self._kinds_by_price:
            return kind
        hidden = view.kinds[HIDDEN]
        tokens = np.maximum(view.table.num_tokens[rows], TYPICAL_TOKENS // 2)
        saved = view.blocks_for(tokens, KV) - view.blocks_for(tokens, HIDDEN)
        share = saved / view.total_blocks
        extra_s = hidden.extra_base_s + hidden.extra_per_token_s * tokens
        # T less the newcomers' part of it is what does not grow with the number of requests.
        kind[both & (share * view.costs.decode_base_s > extra_s)] = HIDDEN
        hits = view.table.hit_tokens[rows]
        if hits.any():
            # Half of the prompt is worth more than what either kind costs in reads or memory.
            gain = hits[np.arange(rows.size), 1 - kind] - hits[np.arange(rows.size), kind]
            other = both & (gain > view.table.num_tokens[rows] // 2)
            kind[other] = 1 - kind[other]
        return kind


class _Waiting:
    """What one decision needs to know of the waiting requests; arrays in the order of `view.waiting`."""

    def __init__(self, policy: AptPlusPolicy, view: SchedulerView, urgent: Urgency) -> None:
        table, rows = view.table, view.waiting
        n = rows.size
        self.rows = rows
        self.pending_s = urgent.pending_s[:n]
        self.late = urgent.violated[:n]
        self.kind = policy.kinds(view, rows)
        self.blocks = start_blocks_for(view, rows, target_tokens(view, rows, 1), self.kind)
        started = table.num_delivered[rows] > 0
        objective_s = np.where(started, table.slo_tbt_s[rows], table.slo_ttft_s[rows])
        self.urgent = np.flatnonzero(~self.late & (self.pending_s > URGENT_SHARE * objective_s))

    def burden_s(self, policy: AptPlusPolicy, view: SchedulerView) -> NDArray[np.float64]:
        return policy._burden_s(view, self.rows, self.kind)


def _full_step_s(view: SchedulerView) -> float:
    """Time of a decode step with the pool full of typical requests with KV; 1 where no costs are known."""
    costs = view.costs
    blocks = int(view.blocks_for(np.array([TYPICAL_TOKENS], np.int32), KV)[0])
    each_s = costs.decode_per_request_s + costs.decode_per_token_s * TYPICAL_TOKENS
    return (costs.decode_base_s + view.total_blocks / blocks * each_s) or 1.0


def _often_preempted(view: SchedulerView, rows: Rows) -> NDArray[np.bool_]:
    table = view.table
    windows = 1 + table.num_outputs[rows] // 64
    return table.num_preemptions[rows] >= PROTECTION_AFTER * windows


def _growth(view: SchedulerView, rows: Rows, ahead: int) -> int:
    """Blocks that running `rows` lack for `ahead` more tokens than they have."""
    if not rows.size:
        return 0
    needed = held_blocks_for(view, rows, view.table.num_tokens[rows] + np.int32(ahead))
    return int(np.maximum(needed - view.table.num_blocks[rows], 0).sum())

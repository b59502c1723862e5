"""BROS: real-time requests by remaining time, best-effort ones into what is left (BROS §4, Algorithm 1).

The paper's bidirectional blocks, shared between a real-time and a best-effort request, are not part of this: here a
request that must make room is preempted and recomputed.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.policy import (
    Rows,
    allowed_kinds,
    held_blocks_for,
    start_blocks_for,
    target_tokens,
)
from apt_jax.sched.view import HIDDEN, Plan, SchedulerView, StepCosts

BASE_BATCH = 128
"""B_base (BROS §4.2)."""

AGING_TOKENS_PER_S = 100.0
"""A best-effort request that waits gains this many recomputation tokens a second on those that come after it."""

RESERVE_TOKENS = 8
"""Best-effort requests are let in only if whoever decodes then has room for this many more tokens."""

AVERAGE_WEIGHT = 0.1
"""Of the newest step in T_avg."""

MOST_REPLACEMENTS = 4
"""Real-time requests that make way for best-effort ones in one step."""


def prefix_step_s(
    costs: StepCosts,
    num_tokens: NDArray[np.int32],
    start: NDArray[np.int32],
    kind: NDArray[np.int8],
) -> NDArray[np.float64]:
    """(n,) what `costs.step_s` says about the first 1, 2, .. n rows, in one pass."""
    c, m = num_tokens.astype(np.float64), start.astype(np.float64)
    decode = (num_tokens == 1) & (start > 0)
    chunk = ~decode
    hidden = kind == HIDDEN
    read_s = np.where(
        decode,
        (m + 1) * np.where(hidden, costs.decode_per_hidden_token_s, costs.decode_per_token_s),
        costs.prefill_per_pair_s * c * (c + 2 * m)
        + m * np.where(hidden, costs.prefill_per_hidden_prefix_s, costs.prefill_per_kv_prefix_s),
    )
    request_s = np.where(hidden, costs.decode_per_hidden_request_s, costs.decode_per_request_s)
    decode_s = np.where(decode, request_s, 0.0).cumsum()
    decode_s += costs.decode_base_s * np.logical_or.accumulate(decode)
    prefill_s = (costs.prefill_per_token_s * c + costs.prefill_per_request_s * chunk).cumsum()
    prefill_s += costs.prefill_base_s
    both_s = np.where(np.logical_or.accumulate(chunk), np.maximum(decode_s, prefill_s), decode_s)
    return both_s + read_s.cumsum()


@dataclasses.dataclass(eq=False)
class _Candidates:
    """Requests in the order of their priority, with what each would do in this step."""

    rows: Rows
    kind: NDArray[np.int8]
    num_tokens: NDArray[np.int32]
    start: NDArray[np.int32]
    slack_s: NDArray[np.float64]
    """Time that is left when this step begins, for it and nothing else; inf for best-effort requests."""

    holds: NDArray[np.bool_]
    """Whether it holds cache."""
    need: NDArray[np.int32]
    """Blocks that it must be given: for its next positions, or for the whole prompt if it waits."""

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "_Candidates":
        return _Candidates(
            self.rows[index],
            self.kind[index],
            self.num_tokens[index],
            self.start[index],
            self.slack_s[index],
            self.holds[index],
            self.need[index],
        )

    def join(self, other: "_Candidates") -> "_Candidates":
        return _Candidates(
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.kind, other.kind]),
            np.concatenate([self.num_tokens, other.num_tokens]),
            np.concatenate([self.start, other.start]),
            np.concatenate([self.slack_s, other.slack_s]),
            np.concatenate([self.holds, other.holds]),
            np.concatenate([self.need, other.need]),
        )

    @property
    def prompts(self) -> NDArray[np.bool_]:
        return (self.num_tokens > 1) | (self.start == 0)


class BrosPolicy:
    """Packs a step by urgency, up to the time that the most urgent request has left.

    *Real-time requests* are ordered by remaining time `T_SLO - t_i - (k_i - 1) * T_avg`: the objective of the token
    that comes next (TTFT before the first, TBT after it), the time since the last one, and the steps that this token
    still needs (more than one for prompts longer than a step) at the average time of the steps so far. The least of
    them is the time that a step may take. Requests that would be late in a step of their own do not count for it, or
    one lost deadline would stop everything, and come after those that can still be in time.
    Two more departures from Algorithm 1: what does not fit a step's time, tokens or blocks ends the admission of
    prompts, while decodes behind it still go; and the first request goes in any case.

    *Best-effort requests* follow: those with cache, then waiting ones by the tokens that must be recomputed (which
    stand for the paper's swapped blocks), less `AGING_TOKENS_PER_S` a second, so that none waits for ever. When the
    step has no time or place for the next one, real-time requests of the most remaining time are replaced, if they can
    wait for the next step and still be in time. Where no real-time request sets a deadline, time is no limit.

    *Blocks.* Real-time requests take those of best-effort ones, the latest arrived first. Where running ones outgrow
    the pool even so, those with the most remaining time are preempted, but prompts under way last. A waiting request
    takes no block from a real-time one: its recomputation would be late. A best-effort request takes free blocks only.

    *Batch size.* Starts at `BASE_BATCH`, doubles after each step that time did not cut short, and goes back otherwise.

    Without calibrated costs every step takes no time: the order stays, and nothing is cut short.
    """

    name = "bros"

    def __init__(self) -> None:
        self._batch_size = BASE_BATCH
        self._average_s = 0.0

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        rows = np.concatenate([view.running, view.waiting])
        if not rows.size:
            return Plan.idle()
        kind = table.kind[rows]
        kind[view.running.size :] = allowed_kinds(view, view.waiting).argmax(axis=1)
        remaining = view.remaining(rows, kind)
        steps = -(-remaining // np.int32(view.max_num_batched_tokens))
        num_tokens = np.minimum(remaining, np.int32(view.max_num_batched_tokens))
        start = table.num_cached[rows] + table.hit_tokens[rows, kind]
        holds = np.arange(rows.size) < view.running.size
        tokens = np.where(holds, start + num_tokens, target_tokens(view, rows, 1))
        need = start_blocks_for(view, rows, tokens, kind)
        need -= table.num_blocks[rows] + table.num_shared[rows]
        slack_s = self._slack_s(view, rows, steps)
        need = np.maximum(need, 0)
        everyone = _Candidates(rows, kind, num_tokens, start, slack_s, holds, need)
        best_effort = table.best_effort[rows]
        everyone.slack_s[best_effort] = np.inf
        real_time = everyone.take(~best_effort)
        alone_s = _alone_s(view.costs, real_time)
        late = real_time.slack_s < alone_s
        limit_s = float(real_time.slack_s.min(initial=np.inf, where=~late))
        order = np.lexsort((table.rank[real_time.rows], real_time.slack_s, late))
        real_time, alone_s = real_time.take(order), alone_s[order]

        step, victims, cut = self._real_time(view, real_time, everyone.take(best_effort), limit_s)
        step, more_victims, cut_too = self._best_effort(
            view, step, everyone.take(best_effort), victims, limit_s
        )
        victims = np.concatenate([victims, more_victims])
        early = cut or cut_too
        if early:
            self._batch_size = BASE_BATCH
        else:
            self._batch_size = min(2 * self._batch_size, max(BASE_BATCH, view.max_num_seqs))
        if not step.rows.size:
            return Plan.idle(victims)
        step_s = view.costs.step_s(step.num_tokens, step.start, step.kind)
        self._average_s += (step_s - self._average_s) * (AVERAGE_WEIGHT if self._average_s else 1.0)
        prompts = step.prompts
        return Plan(
            rows=step.rows,
            num_tokens=step.num_tokens,
            kind=step.kind,
            preempt=victims,
            iteration="prefill" if prompts.all() else "mixed" if prompts.any() else "decode",
        )

    def _slack_s(
        self, view: SchedulerView, rows: Rows, steps: NDArray[np.int32]
    ) -> NDArray[np.float64]:
        table = view.table
        target_s = np.where(
            table.num_delivered[rows] == 0, table.slo_ttft_s[rows], table.slo_tbt_s[rows]
        )
        waited_s = view.now_s - table.last_token_s[rows]
        return target_s - waited_s - (steps - 1) * self._average_s

    def _real_time(
        self, view: SchedulerView, asked: _Candidates, best_effort: _Candidates, limit_s: float
    ) -> tuple[_Candidates, Rows, bool]:
        """The real-time part of the step, who is preempted for it, and whether time cut it short."""
        table = view.table
        need, holds = asked.need, asked.holds
        theirs = best_effort.rows[best_effort.holds]
        room = view.free_blocks + int(table.num_blocks[theirs].sum())
        victims = theirs[:0]
        short = int(need[holds].sum()) - room
        if short > 0:
            kept, victims = _outgrown(view, asked.take(holds), room)
            asked = asked.take(np.isin(asked.rows, kept))
        else:
            seats = view.max_num_seqs - (view.running.size - theirs.size)
            fresh = np.flatnonzero(~holds)
            fits = np.cumsum(need[fresh]) <= -short
            fits &= np.arange(1, fresh.size + 1) <= seats
            if not fits.all():
                asked = asked.take(np.delete(np.arange(holds.size), fresh[~fits]))
        step, cut, _ = _fit(view, asked, 0, self._batch_size, limit_s)
        short = int(step.need.sum()) - view.free_blocks
        short -= int(table.num_blocks[victims].sum())
        new_seats = int(np.count_nonzero(~step.holds)) - (view.max_num_seqs - view.running.size)
        new_seats = max(new_seats - victims.size, 0)
        taken = theirs[::-1]  # the latest first
        num_taken = 0
        if short > 0:
            num_taken = int(np.searchsorted(np.cumsum(table.num_blocks[taken]), short)) + 1
        taken = taken[: max(num_taken, new_seats)]
        return step, np.concatenate([victims, taken]), cut

    def _best_effort(
        self,
        view: SchedulerView,
        step: _Candidates,
        asked: _Candidates,
        victims: Rows,
        limit_s: float,
    ) -> tuple[_Candidates, Rows, bool]:
        """The step with best-effort requests, who else is preempted, and whether time kept some out."""
        table = view.table
        preempted = victims
        if victims.size:
            asked = asked.take(~np.isin(asked.rows, victims))
        no_victims = victims[:0]
        if not asked.rows.size:
            return step, no_victims, False
        need, holds = asked.need, asked.holds
        left = view.free_blocks + int(table.num_blocks[preempted].sum())
        left -= int(step.need.sum())
        more: Rows = no_victims
        spare = left - int(need[holds].sum())
        if spare < 0:
            kept, more = _outgrown(view, asked.take(holds), left)
            asked = asked.take(np.isin(asked.rows, kept))
        else:
            running = view.running
            if preempted.size:
                running = running[~np.isin(running, preempted)]
            spare -= _reserve(view, running)
            seats = view.max_num_seqs - running.size - int(np.count_nonzero(~step.holds))
            fresh = np.flatnonzero(~holds)
            rows = asked.rows[fresh]
            again = np.where(
                table.num_preemptions[rows] > 0, view.remaining(rows, asked.kind[fresh]), 0
            )
            waited_s = view.now_s - table.last_token_s[rows]
            cost = again - AGING_TOKENS_PER_S * waited_s
            fresh = fresh[np.lexsort((table.rank[rows], cost))]
            fits = (np.cumsum(need[fresh]) <= spare) & (np.arange(1, fresh.size + 1) <= seats)
            if preempted.size:
                fits[:] = False  # what real-time requests have just taken is not given away
            asked = asked.take(np.concatenate([np.flatnonzero(holds), fresh[fits]]))
        if not asked.rows.size:
            return step, more, False
        num_real_time = step.rows.size
        packed, cut, shrunk = _fit(view, step.join(asked), num_real_time, self._batch_size, limit_s)
        if not shrunk and packed.rows.size < num_real_time + asked.rows.size:
            out = asked.take(~np.isin(asked.rows, packed.rows))
            packed = self._replace(view, packed, num_real_time, out, limit_s)
        return packed, more, cut

    def _replace(
        self,
        view: SchedulerView,
        step: _Candidates,
        num_real_time: int,
        out: _Candidates,
        limit_s: float,
    ) -> _Candidates:
        """Real-time requests that can wait for the next step make way for best-effort ones, the least urgent first."""
        for i in range(min(MOST_REPLACEMENTS, out.rows.size, num_real_time - 1)):
            last = num_real_time - 1 - i
            one = step.take(np.array([last]))
            step_s = view.costs.step_s(step.num_tokens, step.start, step.kind)
            if one.slack_s[0] - step_s < _alone_s(view.costs, one)[0] + step_s:
                break
            other = step.take(np.arange(step.rows.size) != last).join(out.take(np.array([i])))
            if (
                other.rows.size > self._batch_size
                or int(other.num_tokens.sum()) > view.max_num_batched_tokens
                or view.costs.step_s(other.num_tokens, other.start, other.kind) > limit_s
            ):
                break
            step = other
        return step


def _alone_s(costs: StepCosts, asked: _Candidates) -> NDArray[np.float64]:
    """(n,) time of a step of each request alone."""
    c, m = asked.num_tokens.astype(np.float64), asked.start.astype(np.float64)
    hidden = asked.kind == HIDDEN
    decode_s = np.where(
        hidden,
        costs.decode_per_hidden_request_s + (m + 1) * costs.decode_per_hidden_token_s,
        costs.decode_per_request_s + (m + 1) * costs.decode_per_token_s,
    )
    prefix_s = np.where(hidden, costs.prefill_per_hidden_prefix_s, costs.prefill_per_kv_prefix_s)
    chunk_s = costs.prefill_per_request_s + costs.prefill_per_token_s * c + prefix_s * m
    chunk_s += costs.prefill_per_pair_s * c * (c + 2 * m)
    return np.where(asked.prompts, costs.prefill_base_s + chunk_s, costs.decode_base_s + decode_s)


def _reserve(view: SchedulerView, running: Rows) -> int:
    """Blocks that `running` requests take before long: whole prompts, `RESERVE_TOKENS` of those that decode."""
    if not running.size:
        return 0
    ahead = np.where(view.remaining(running) > 1, 1, RESERVE_TOKENS).astype(np.int32)
    table = view.table
    tokens = np.minimum(table.num_tokens[running] + ahead, table.max_tokens_total[running])
    lacking = held_blocks_for(view, running, tokens) - table.num_blocks[running]
    return int(np.maximum(lacking, 0).sum())


def _outgrown(view: SchedulerView, asked: _Candidates, room: int) -> tuple[Rows, Rows]:
    """Running requests that stay where not all can, and those that do not.

    Prompts under way stay before the others, by rank, so that they come to an end; the others by their order.
    """
    table = view.table
    under_way = view.remaining(asked.rows) > 1
    order = np.lexsort(
        (np.where(under_way, table.rank[asked.rows], np.arange(under_way.size)), ~under_way)
    )
    asked = asked.take(order)
    held = table.num_blocks[asked.rows]
    beyond = int(held.sum()) - np.cumsum(held)
    fails = np.cumsum(asked.need) > room + beyond
    num_kept = int(fails.argmax()) if fails.any() else fails.size
    return asked.rows[:num_kept], asked.rows[num_kept:]


def _fit(
    view: SchedulerView, asked: _Candidates, num_sure: int, batch_size: int, limit_s: float
) -> tuple[_Candidates, bool, bool]:
    """What of `asked` goes into a step: the first `num_sure` (at least one), then as far as place and time last.

    Where a prompt is the first that does not go, it may get the chunk that does; later prompts stay out, decodes not.

    Returns:
        The step, whether time was what kept some out, and whether a prompt was made shorter.
    """
    if not asked.rows.size:
        return asked, False, False
    num_sure = max(num_sure, 1)
    if (
        asked.rows.size <= batch_size
        and int(asked.num_tokens.sum()) <= view.max_num_batched_tokens
        and view.costs.step_s(asked.num_tokens, asked.start, asked.kind) <= limit_s
    ):
        return asked, False, False
    cut = shrunk = False
    for behind in (True, False):
        step_s = prefix_step_s(view.costs, asked.num_tokens, asked.start, asked.kind)
        ends = np.cumsum(asked.num_tokens)
        index = np.arange(asked.rows.size)
        slow = step_s > limit_s
        fails = slow | (ends > view.max_num_batched_tokens) | (index >= batch_size)
        fails[:num_sure] = False
        if not fails.any():
            break
        first = int(fails.argmax())
        cut |= bool(slow[first])
        if behind and first < batch_size and asked.num_tokens[first] > 1:
            length = float(view.max_num_batched_tokens - ends[first - 1])
            if slow[first]:
                share = (limit_s - step_s[first - 1]) / (step_s[first] - step_s[first - 1])
                length = min(length, share * asked.num_tokens[first])
            if length >= min(view.block_size, asked.num_tokens[first]):
                asked.num_tokens[first] = int(length)
                first += 1
                shrunk = True
        asked = asked.take((index < first) | (behind & ~asked.prompts))
    return asked, cut, shrunk

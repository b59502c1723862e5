"""BROS: real-time requests by remaining time, then best-effort requests in the capacity left (BROS §4, Algorithm 1).

If blocks are shared (`SchedulerView.takeable`; BROS §5), real-time requests take groups of blocks from best-effort
requests; the contents of a group are saved first. Without sharing, or if no more groups can be taken, a request that
must free blocks is preempted as a whole.
"""

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.kind_by_cost import kinds_by_cost
from apt_jax.sched.policies.bros_candidates import (
    Candidates,
    TokenGroups,
    alone_s,
    among,
    end_times_s,
    iteration_s,
    poll,
)
from apt_jax.sched.policies.overdue import OverdueRequests, share_of_step
from apt_jax.sched.step_packer import (
    Rows,
    allowed_kinds,
    held_blocks_for,
    start_blocks_for,
    target_tokens,
)
from apt_jax.sched.view import Plan, SchedulerView

BASE_BATCH = 128
"""Initial maximum number of requests per step: B_base (BROS §4.2)."""

AGING_TOKENS_PER_S = 100.0
"""Aging of best-effort requests: in their order, a second of waiting outweighs this many tokens to recompute."""

RESERVE_TOKENS = 8
"""Number of further tokens per decoding request for which admission of best-effort requests leaves blocks free."""

BEST_EFFORT_TOKENS = 64
"""Number of output tokens that a best-effort request gets after it has waited for `best_effort_wait`."""

AVERAGE_WEIGHT = 0.1
"""Weight of the newest step in the average step time T_avg."""

Kinds = Literal["first", "by-cost"]

MOST_REPLACEMENTS = 4
"""Default maximum number of real-time requests that best-effort requests replace in one step."""


class BrosPolicy:
    """Packs a step by urgency, up to the time that the most urgent request has left.

    *Real-time requests* are ordered by remaining time `T_SLO - t_i - (k_i - 1) * T_avg`. T_SLO is the objective of the
    next token (TTFT for the first token, TBT for later tokens), t_i the time since the last token or the arrival, k_i
    the number of steps until the next token (more than 1 for prompts longer than a step) and T_avg the average step
    time so far. The least remaining time is the time that a step may take. Requests that would be late even in a step
    of their own come after those that can still be on time and do not limit the step, because otherwise one lost
    deadline would stop all others. There are two more departures from Algorithm 1: the first prompt that does not fit a
    step's time, tokens or blocks ends the admission of prompts, but decodes after it still run; and the first request
    always runs.

    *Token groups.* BROS's conclusion speaks of latency metrics of token groups, and k_i of Eq. 6 counts "remaining
    tokens in the current token". With `token_group` = G > 1 there is one deadline per G tokens after the first token: G
    times the TBT objective after the end of the previous group, and k_i counts the tokens up to it. With G = 1 every
    token has a deadline.

    *Best-effort requests* come next: first requests with cache, by their checkpointed blocks M^cpu, then waiting
    requests by the number of tokens to recompute minus `aging_tokens_per_s` per second of waiting, so that no request
    waits forever. If the step has no time or capacity for the next request, the real-time requests with the most
    remaining time are replaced, provided that they can still be on time in the next step. If no real-time request sets
    a deadline, the time of a step is not limited.

    *Overdue requests.* In the paper, best-effort requests wait as long as real-time requests fill every step. With
    `best_effort_wait` = W a best-effort request that has had no new token for W seconds comes before all real-time
    requests until it has had `best_effort_tokens` more tokens (`OverdueRequests`). The time of overdue requests is
    added to the time limit of the step, and their prompts take a share of its tokens.

    *Pulling* (§4.2). Only requests that hold cache are sorted. The waiting queue is in order of arrival, which is the
    order of remaining time if objectives are equal. So both are merged, up to the number of requests that a step may
    have; the waiting queue is sorted only if it is not in order.

    *Blocks.* Real-time requests take free blocks, then groups that only best-effort requests use (`TakeableGroups`),
    then all blocks of best-effort requests, the latest arrivals first. If running requests still do not fit the pool,
    those with the most remaining time are preempted, partly computed prompts last. A waiting request takes no blocks
    from a real-time request, because the latter would be late after its recomputation. A best-effort request takes only
    free blocks.

    *Batch size.* It starts at `BASE_BATCH`, doubles after each step that was not cut short by time, and is reset
    otherwise. It is at most `max_num_seqs`: with 256 there are two sizes, with 1,024 four.

    Without calibrated costs every step is assumed to take no time: the order is the same, and no step is limited by
    time.

    Args:
        token_group: G, number of tokens that share a deadline.
        aging_tokens_per_s: see above; 0: the paper's order, in which a preempted request may wait forever.
        best_effort_wait: W in seconds; None: best-effort requests only get the capacity left, as in the paper.
        best_effort_tokens: number of output tokens that an overdue request gets.
        kinds: how the cache kind of a starting request is chosen if both are offered. "first": keys and values, as in
            the paper. "by-cost": like apt-plus, the hidden kind if the memory that it saves is worth more than its
            slower reads (`kinds_by_cost`). Requests share blocks only with requests of the same kind.
    """

    name = "bros"
    has_classes = True
    takes_groups = True
    most_replacements: int | None = MOST_REPLACEMENTS
    """Maximum number of replaced real-time requests in one step; None: no limit."""

    def __init__(
        self,
        *,
        token_group: int = 1,
        aging_tokens_per_s: float = AGING_TOKENS_PER_S,
        best_effort_wait: float | None = None,
        best_effort_tokens: int = BEST_EFFORT_TOKENS,
        kinds: Kinds = "first",
    ) -> None:
        if token_group < 1:
            raise ValueError(f"{token_group=} must be at least 1")
        self._overdue = None if best_effort_wait is None else OverdueRequests(best_effort_wait, best_effort_tokens)
        self.token_group = token_group
        self.aging_tokens_per_s = aging_tokens_per_s
        self.kinds: Kinds = kinds
        self._batch_size = BASE_BATCH
        self._average_s = 0.0
        self._groups = TokenGroups(token_group)

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        running, waiting = view.running, view.waiting
        if not running.size and not waiting.size:
            return Plan.idle()
        pending = self._candidates(view, running, table.kind[running], holds=True)
        if self.kinds == "by-cost":
            kind = kinds_by_cost(view, waiting)
        else:
            kind = allowed_kinds(view, waiting).argmax(axis=1).astype(np.int8)
        theirs, low = table.best_effort[running], table.best_effort[waiting]
        queued = self._candidates(view, waiting[~low], kind[~low], holds=False)
        real_time, limit_s = self._pull_real_time(view, pending.take(~theirs), queued)
        overdue = None if self._overdue is None else self._overdue.rows(view)
        if overdue is not None and overdue.size:
            own, own_too = (among(view, rows, overdue) for rows in (running, waiting))
            theirs, low = theirs & ~own, low & ~own_too
            first = pending.take(own).join(self._candidates(view, waiting[own_too], kind[own_too], holds=False))
            first = _first(view, first, overdue)
            real_time = first.join(real_time)
            if first.rows.size:
                limit_s += iteration_s(view.costs, first)
        index = np.flatnonzero(low)
        if index.size:
            index = index[self._pull_best_effort(view, waiting[index], kind[index])]
        best_effort = pending.take(theirs).join(self._candidates(view, waiting[index], kind[index], holds=False))
        best_effort.slack_s[:] = np.inf

        step, victims, cut = self._real_time(view, real_time, best_effort, limit_s)
        step, more_victims, cut_too = self._best_effort(view, step, best_effort, victims, limit_s)
        victims = np.concatenate([victims, more_victims])
        early = cut or cut_too
        if early:
            self._batch_size = BASE_BATCH
        else:
            self._batch_size = min(2 * self._batch_size, max(BASE_BATCH, view.max_num_seqs))
        if not step.rows.size:
            return Plan.idle(victims)
        step_s = iteration_s(view.costs, step)
        self._average_s += (step_s - self._average_s) * (AVERAGE_WEIGHT if self._average_s else 1.0)
        prompts = step.prompts
        return Plan(
            rows=step.rows,
            num_tokens=step.num_tokens,
            kind=step.kind,
            preempt=victims,
            iteration="prefill" if prompts.all() else "mixed" if prompts.any() else "decode",
            num_first=0 if self._overdue is None else int(np.count_nonzero(step.slack_s == -np.inf)),
        )

    def _candidates(self, view: SchedulerView, rows: Rows, kind: NDArray[np.int8], *, holds: bool) -> Candidates:
        """Return `rows`, which all hold cache (`holds`) or all wait, as candidates with their work in this step."""
        table = view.table
        remaining = view.remaining(rows, kind)
        budget = np.int32(view.max_num_batched_tokens)
        num_tokens = np.minimum(remaining, budget)
        start = table.num_cached.take(rows)
        if holds:
            tokens = start + num_tokens
            load = table.checkpointed_blocks.take(rows)
            need = np.maximum(held_blocks_for(view, rows, tokens) - table.num_blocks.take(rows), load)
        else:
            start = start + table.cached_prefix_tokens[rows, kind]
            load = view.blocks_for(table.host_prefix_tokens[rows, kind], kind).astype(np.int32)
            need = start_blocks_for(view, rows, target_tokens(view, rows, 1), kind)
        return Candidates(
            rows,
            kind,
            num_tokens,
            start,
            self._slack_s(view, rows, -(-remaining // budget)),
            np.full(rows.size, holds),
            np.maximum(need, 0),
            load,
        )

    def _slack_s(self, view: SchedulerView, rows: Rows, steps: NDArray[np.int32]) -> NDArray[np.float64]:
        table = view.table
        delivered = table.num_delivered.take(rows)
        tbt_s, since_s = table.slo_tbt_s.take(rows), table.last_token_s.take(rows)
        if self.token_group > 1:
            since_s = self._groups.since_s(view, rows, delivered)
            tbt_s = self.token_group * tbt_s
            behind = (delivered - 1) % self.token_group
            steps = steps + np.where(delivered > 0, self.token_group - 1 - behind, 0)
        target_s = np.where(delivered == 0, table.slo_ttft_s.take(rows), tbt_s)
        return target_s - (view.now_s - since_s) - (steps - 1) * self._average_s

    def _pull_real_time(self, view: SchedulerView, pending: Candidates, queued: Candidates) -> tuple[Candidates, float]:
        """Order real-time candidates by remaining time, late requests last; drop waiting requests beyond the batch
        size.

        Returns:
            The candidates, and the time limit of the step in seconds.
        """
        late, late_too = (self._is_late(view, c) for c in (pending, queued))
        limit_s = np.inf
        order: list[NDArray[np.intp]] = []
        most = self._batch_size
        for of_late in (False, True):
            own = np.flatnonzero(late == of_late)
            waiting = np.flatnonzero(late_too == of_late)
            polled = poll(pending.slack_s[own], queued.slack_s[waiting], most)
            order.append(np.concatenate([own, pending.rows.size + waiting])[polled])
            most -= polled.size - own.size
            if not of_late:
                limit_s = min(
                    float(pending.slack_s[own].min(initial=np.inf)),
                    float(queued.slack_s[waiting].min(initial=np.inf)),
                )
        return pending.join(queued).take(np.concatenate(order)), limit_s

    def _is_late(self, view: SchedulerView, asked: Candidates) -> NDArray[np.bool_]:
        """Return the (n,) mask of candidates that would be late even in a step of their own.

        Late candidates come after all other candidates and do not limit the time of the step.
        """
        return asked.slack_s < alone_s(view.costs, asked)

    def _pull_best_effort(self, view: SchedulerView, rows: Rows, kind: NDArray[np.int8]) -> NDArray[np.intp]:
        """Return indices into waiting best-effort `rows`, cheapest to start first, limited to the batch size."""
        table = view.table
        cost = self.aging_tokens_per_s * (table.last_token_s[rows] - view.now_s)
        again = table.num_preemptions[rows] > 0
        own = np.flatnonzero(again)
        if not own.size:
            return poll(cost[:0], cost, self._batch_size)
        cost[own] += view.remaining(rows[own], kind[own])
        new = np.flatnonzero(~again)
        index = np.concatenate([own, new])
        return index[poll(cost[own], cost[new], self._batch_size)][: self._batch_size]

    def _real_time(
        self, view: SchedulerView, asked: Candidates, best_effort: Candidates, limit_s: float
    ) -> tuple[Candidates, Rows, bool]:
        """Return the real-time part of the step, the rows to preempt for it, and whether time cut it short."""
        table = view.table
        need, holds = asked.need, asked.holds
        theirs = best_effort.rows[best_effort.holds]
        room = view.free_blocks + int(table.num_blocks[theirs].sum())
        victims = theirs[:0]
        short = int(need[holds].sum()) - room
        if short > 0:
            kept, victims = _outgrown(view, asked.take(holds), room)
            asked = asked.take(among(view, asked.rows, kept))
        else:
            slots = view.max_num_seqs - (view.running.size - theirs.size)
            fresh = np.flatnonzero(~holds)
            fits = np.cumsum(need[fresh]) <= -short
            fits &= np.arange(1, fresh.size + 1) <= slots
            if not fits.all():
                asked = asked.take(np.delete(np.arange(holds.size), fresh[~fits]))
        num_overdue = int(np.count_nonzero(asked.slack_s == -np.inf))
        step, cut, _ = self._fit(view, asked, num_overdue, limit_s)
        short = int(step.need.sum()) - view.free_blocks
        short -= int(table.num_blocks[victims].sum())
        if shared_groups(view, step, short)[1] == 0:  # the groups that can be taken suffice
            short = 0
        new_slots = int(np.count_nonzero(~step.holds)) - (view.max_num_seqs - view.running.size)
        new_slots = max(new_slots - victims.size, 0)
        taken = theirs[::-1]  # the latest first
        num_taken = 0
        if short > 0:
            num_taken = int(np.searchsorted(np.cumsum(table.num_blocks[taken]), short)) + 1
        taken = taken[: max(num_taken, new_slots)]
        return step, np.concatenate([victims, taken]), cut

    def _best_effort(
        self,
        view: SchedulerView,
        step: Candidates,
        asked: Candidates,
        victims: Rows,
        limit_s: float,
    ) -> tuple[Candidates, Rows, bool]:
        """Return the step with best-effort requests added, the additional rows to preempt, and whether time cut the
        step short."""
        table = view.table
        preempted = victims
        if victims.size:
            asked = asked.take(~among(view, asked.rows, victims))
        no_victims = victims[:0]
        if not asked.rows.size:
            return step, no_victims, False
        left = view.free_blocks + int(table.num_blocks[preempted].sum())
        left -= int(step.need.sum())
        has_taken = left < 0
        if has_taken:
            asked = _without_groups(view, asked, shared_groups(view, step, -left)[0])
            left = 0
        asked = self._by_checkpoints(view, asked)
        asked, more = self._with_place(view, step, asked, preempted, left, gives=not (preempted.size or has_taken))
        if not asked.rows.size:
            return step, more, False
        num_real_time = step.rows.size
        packed, cut, shrunk = self._fit(view, step.join(asked), num_real_time, limit_s)
        if not shrunk and packed.rows.size < num_real_time + asked.rows.size:
            out = asked.take(~among(view, asked.rows, packed.rows))
            packed = self._replace(view, packed, num_real_time, out, limit_s)
        return packed, more, cut

    def _with_place(
        self, view: SchedulerView, step: Candidates, asked: Candidates, preempted: Rows, left: int, *, gives: bool
    ) -> tuple[Candidates, Rows]:
        """Return the best-effort candidates for which blocks and slots are free, and the rows preempted for them.

        Args:
            view: the scheduler's view.
            step: the real-time part of the step.
            asked: best-effort candidates.
            preempted: rows that are preempted for real-time requests.
            left: number of free blocks after the real-time part.
            gives: whether waiting requests may start; False if real-time requests have just taken blocks.
        """
        need, holds = asked.need, asked.holds
        spare = left - int(need[holds].sum())
        waits = holds & (np.cumsum(np.where(holds, need, 0)) > left)
        if spare < 0 and view.takeable is not None and (step.rows.size or not waits[holds].all()):
            return asked.take(holds & ~waits), preempted[:0]  # the others keep their blocks, and are restored later
        if spare < 0:
            kept, more = _outgrown(view, asked.take(holds), left)
            return asked.take(among(view, asked.rows, kept)), more
        running = view.running
        if preempted.size:
            running = running[~among(view, running, preempted)]
        spare -= _reserve(view, running)
        fresh = np.flatnonzero(~holds)
        slots = free_slots(view, step, preempted)
        fits = (np.cumsum(need[fresh]) <= spare) & (np.arange(1, fresh.size + 1) <= slots) & gives
        return asked.take(np.concatenate([np.flatnonzero(holds), fresh[fits]])), preempted[:0]

    def _by_checkpoints(self, view: SchedulerView, asked: Candidates) -> Candidates:
        """Order best-effort candidates by their checkpointed tokens minus their aging (Algorithm 1, line 17)."""
        if view.takeable is None or not asked.load.any():
            return asked
        waited_s = view.now_s - view.table.last_token_s.take(asked.rows)
        tokens = asked.load * (view.block_sizes / view.blocks_per_group)[asked.kind]
        key = np.where(asked.holds, tokens - self.aging_tokens_per_s * waited_s, np.inf)
        key[asked.holds & (asked.load == 0)] = -np.inf
        return asked.take(key.argsort(kind="stable"))

    def _goes(self, view: SchedulerView, step: Candidates, limit_s: float) -> bool:
        """Return True if a step is within the batch size, the tokens per step and `limit_s`."""
        return (
            step.rows.size <= self._batch_size
            and int(step.num_tokens.sum()) <= view.max_num_batched_tokens
            and iteration_s(view.costs, step) <= limit_s
        )

    def _fit(
        self, view: SchedulerView, asked: Candidates, num_sure: int, limit_s: float
    ) -> tuple[Candidates, bool, bool]:
        """Build a step from the first of `asked` that fit the batch size, the tokens and the time of a step.

        The first `num_sure` candidates, but at least one, are always in it. If a prompt is the first candidate that
        does not fit, it may get a chunk that fits; later prompts are left out, but later decodes that fit are not.

        Returns:
            The step, whether a candidate was left out or shortened for lack of time, and whether a prompt was
            shortened.
        """
        if not asked.rows.size or self._goes(view, asked, limit_s):
            return asked, False, False
        num_sure, batch_size = max(num_sure, 1), self._batch_size
        cut = shrunk = False
        for behind in (True, False):
            step_s = end_times_s(view, asked)
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

    def _replace(
        self,
        view: SchedulerView,
        step: Candidates,
        num_real_time: int,
        out: Candidates,
        limit_s: float,
    ) -> Candidates:
        """Add the best-effort requests in `out` to the step (Algorithm 1, lines 18 to 32).

        A request that does not fit replaces the least urgent real-time request, provided that the latter can wait for
        the next step.
        """

        most = out.rows.size if self.most_replacements is None else self.most_replacements
        for i in range(out.rows.size):
            more = step.join(out.take(np.array([i])))
            if not self._goes(view, more, limit_s):
                last = num_real_time - 1
                if most == 0 or last < 1 or not self._may_wait(view, step, last):
                    break
                more = more.take(np.arange(more.rows.size) != last)
                if not self._goes(view, more, limit_s):
                    break
                num_real_time, most = last, most - 1
            step = more
        return step

    def _may_wait(self, view: SchedulerView, step: Candidates, i: int) -> bool:
        """Return True if the i-th request of a step may be replaced, because it can still be on time in the next
        step."""
        if step.slack_s[i] == -np.inf:
            return False
        one, step_s = step.take(np.array([i])), iteration_s(view.costs, step)
        return bool(one.slack_s[0] - step_s >= alone_s(view.costs, one)[0] + step_s)


def _first(view: SchedulerView, asked: Candidates, overdue: Rows) -> Candidates:
    """Return the candidates that get tokens in this step, in the order of `overdue`, with their numbers of tokens."""
    place = np.zeros(view.table.capacity, np.intp)
    place[overdue] = np.arange(overdue.size)
    asked = asked.take(place[asked.rows].argsort())
    asked.num_tokens[:] = share_of_step(asked.num_tokens, view.max_num_batched_tokens)
    asked.slack_s[:] = -np.inf
    return asked.take(asked.num_tokens > 0)


def shared_groups(view: SchedulerView, step: Candidates, short: int) -> tuple[Rows, int]:
    """Choose the groups that a step's real-time requests take from best-effort requests if `short` blocks are missing.

    Overdue requests, the only best-effort requests in the step, neither take nor lose groups.

    Returns:
        The rows that lose groups, one entry per group, and the number of blocks that are still missing.
    """
    taken = [step.rows[:0]]
    if view.takeable is None or short <= 0:
        return taken[0], max(short, 0)
    overdue = view.table.best_effort[step.rows]
    for kind in np.unique(step.kind[~overdue]).tolist():
        halves = int(view.blocks_per_group[kind])
        of_kind = (step.kind == kind) & ~overdue
        copied = of_kind & ~step.holds & (step.start % int(view.block_sizes[kind]) != 0)  # such a group is not shared
        most = int(step.need[of_kind].sum()) - halves * int(np.count_nonzero(copied))
        wanted = min(max(short, 0), most)
        theirs = view.takeable.rows(kind)
        if overdue.any():
            theirs = theirs[~among(view, theirs, step.rows)]
        taken.append(theirs[: -(-wanted // halves)])
        short -= halves * taken[-1].size
    return np.concatenate(taken), max(short, 0)


def _without_groups(view: SchedulerView, asked: Candidates, lost: Rows) -> Candidates:
    """Return the candidates with larger needs: for each entry of `lost`, the blocks that replace a taken group."""
    again = np.bincount(lost, minlength=view.table.capacity)[asked.rows]
    blocks = (again * view.blocks_per_group[asked.kind]).astype(np.int32)
    return dataclasses.replace(asked, need=asked.need + blocks, load=asked.load + blocks)


def free_slots(view: SchedulerView, step: Candidates, preempted: Rows) -> int:
    """Return the number of requests that may start in addition to a step's real-time part, after its preemptions."""
    return view.max_num_seqs - view.running.size + preempted.size - int(np.count_nonzero(~step.holds))


def _reserve(view: SchedulerView, running: Rows) -> int:
    """Return the number of blocks that `running` requests will take soon: for the rest of a prompt and one more token,
    or for `RESERVE_TOKENS` more tokens of a decoding request."""
    if not running.size:
        return 0
    ahead = np.where(view.remaining(running) > 1, 1, RESERVE_TOKENS).astype(np.int32)
    table = view.table
    tokens = np.minimum(table.num_tokens[running] + ahead, table.max_tokens_total[running])
    lacking = held_blocks_for(view, running, tokens) - table.num_blocks[running]
    return int(np.maximum(lacking, 0).sum())


def _outgrown(view: SchedulerView, asked: Candidates, room: int) -> tuple[Rows, Rows]:
    """Return the running rows that keep their cache if not all of them can, and the rows that lose it.

    Partly computed prompts are kept first, by rank, to complete them; then the other rows in their order.
    """
    table = view.table
    under_way = view.remaining(asked.rows) > 1
    order = np.lexsort((np.where(under_way, table.rank[asked.rows], np.arange(under_way.size)), ~under_way))
    asked = asked.take(order)
    held = table.num_blocks[asked.rows]
    beyond = int(held.sum()) - np.cumsum(held)
    fails = np.cumsum(asked.need) > room + beyond
    num_kept = int(fails.argmax()) if fails.any() else fails.size
    return asked.rows[:num_kept], asked.rows[num_kept:]

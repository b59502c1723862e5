"""The greedy scheduler that Apt-Serve's authors released, as plain Python, one request at a time: what
`AptReleasedPolicy` must decide.

Written from `_schedule_greedy` in the scheduler of github.com/eddiegaoo/Apt-Serve (head a97ca49), without a line of
`apt_jax.lab` or `apt_jax.sched` but the state that it reads. A block is one of the released code: keys and values of
`block_size` positions, twice a block of the pool. What that code refuses, a request that the pool can never hold with
keys and values, is as `AptReleasedPolicy` says: it is offered the hidden kind alone.
"""

import dataclasses
import math
from collections.abc import Sequence

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.sched import SchedulerView

LEAST_PENDING_S = 1e-6


@dataclasses.dataclass(eq=False)
class Group:
    """The fields of the released `SequenceGroup` that matter."""

    row: int
    rank: int
    use_hidden: bool = False
    require_preempt: bool = False


@dataclasses.dataclass(frozen=True)
class Decision:
    prefill: bool
    runs: dict[int, int]
    """Row to kind."""
    preempts: frozenset[int]


class Released:
    """The two queues, which outlive an iteration."""

    def __init__(self) -> None:
        self.waiting: list[Group] = []
        self.running: list[Group] = []

    def decide(self, view: SchedulerView) -> Decision:
        """One iteration: `_dynamic_priority`, then `_schedule_fixed_prefills` or `_schedule_fixed_running`."""
        self._follow(view)
        everybody = len(self.waiting) + len(self.running)
        demoted = 0.000001
        if self.waiting:
            elapsed = [self._elapsed(view, g) for g in self.waiting]
            demoted = min(elapsed) * 0.0001 / (view.total_blocks / 2)
        violated = [g for g in self.waiting + self.running if self._elapsed(view, g) > self._slo(view, g)]
        counted = everybody - len(violated)
        waiting_urgency = sum(self._elapsed(view, g) for g in self.waiting)
        running_urgency = sum(self._elapsed(view, g) for g in self.running)
        scheduled: list[Group] = []
        if self.waiting:
            scheduled = self._select_prefill(view, counted, demoted)
            self.waiting = [g for g in self.waiting if g not in scheduled]
        if self.running and (running_urgency > waiting_urgency or not scheduled):
            self._select_decode(view, counted, demoted)
            self.waiting += scheduled
            preempted = [g for g in self.running if g.require_preempt]
            self.running = [g for g in self.running if not g.require_preempt]
            for group in preempted:
                group.use_hidden = group.require_preempt = False
            self.waiting = preempted + self.waiting
            runs = {g.row: HIDDEN if g.use_hidden else KV for g in self.running}
            return Decision(False, runs, frozenset(g.row for g in preempted))
        self.running += scheduled
        runs = {g.row: HIDDEN if g.use_hidden else KV for g in scheduled}
        return Decision(bool(scheduled), runs, frozenset())

    def _follow(self, view: SchedulerView) -> None:
        """Drop what has ended, add what has arrived."""
        rank = view.table.rank
        waiting, running = view.waiting.tolist(), view.running.tolist()
        live = {(row, int(rank[row])) for row in waiting + running}
        self.waiting = [g for g in self.waiting if (g.row, g.rank) in live]
        self.running = [g for g in self.running if (g.row, g.rank) in live]
        known = {(g.row, g.rank) for g in self.waiting + self.running}
        for rows, queue in ((waiting, self.waiting), (running, self.running)):
            for row in rows:
                if (row, int(rank[row])) not in known:
                    queue.append(Group(row, int(rank[row]), use_hidden=view.table.kind[row] == HIDDEN))
        assert {g.row for g in self.waiting} == set(waiting)

    def _elapsed(self, view: SchedulerView, group: Group) -> float:
        return max(view.now_s - float(view.table.last_token_s[group.row]), LEAST_PENDING_S)

    def _slo(self, view: SchedulerView, group: Group) -> float:
        table = view.table
        return float(table.slo_tbt_s[group.row] if table.num_outputs[group.row] > 0 else table.slo_ttft_s[group.row])

    def _only_hidden(self, view: SchedulerView, group: Group) -> bool:
        whole = math.ceil(int(view.table.max_tokens_total[group.row]) / view.block_size)
        kv, hidden = (kind.offered for kind in view.kinds)
        return hidden and not (kv and 2 * whole <= view.total_blocks)

    def _half(self, view: SchedulerView, group: Group, size: int) -> float:
        return size / 2 if self._only_hidden(view, group) else math.ceil(size / 2)

    def _offers(
        self, view: SchedulerView, groups: Sequence[Group], sizes: Sequence[int], counted: int, demoted: float
    ) -> list[tuple[int, bool, float]]:
        """Index, hidden or not, and gain of each offer, the best first (`_process_waiting_queue`)."""
        coef = view.kinds[HIDDEN].extra_per_token_s * view.block_size
        offers = []
        for i, (group, n) in enumerate(zip(groups, sizes, strict=True)):
            profit = self._elapsed(view, group)
            hidden_profit = profit - counted * coef * n
            only = self._only_hidden(view, group)
            if profit > self._slo(view, group):
                offers.append((i, only, demoted))
            elif only:
                offers.append((i, True, profit / (n / 2)))
            elif n == 1 or not view.kinds[HIDDEN].offered or hidden_profit < profit / 2:
                offers.append((i, False, profit / n))
            else:
                offers.append((i, False, (profit - hidden_profit) / math.floor(n / 2)))
                offers.append((i, True, hidden_profit / math.ceil(n / 2)))
        return sorted(offers, key=lambda offer: offer[2], reverse=True)

    def _select_prefill(self, view: SchedulerView, counted: int, demoted: float) -> list[Group]:
        """`greedy_selection_prefill`."""
        lengths = [int(view.table.num_tokens[g.row]) for g in self.waiting]
        sizes = [math.ceil(length / view.block_size) for length in lengths]
        free = view.free_blocks / 2
        used, profit, tokens, slots = 0, 0.0, 0, len(self.running)
        scheduled: list[int] = []
        hidden: set[int] = set()
        for i, use_hidden, gain in self._offers(view, self.waiting, sizes, counted, demoted):
            if tokens + lengths[i] > view.max_num_batched_tokens or slots + 1 > view.max_num_seqs:
                break
            size = self._half(view, self.waiting[i], sizes[i]) if use_hidden else sizes[i]
            if i in scheduled and not use_hidden:
                size = math.floor(size / 2)
            if used + size > free:
                if gain * size > profit:
                    offers_half = view.kinds[HIDDEN].offered
                    least = self._half(view, self.waiting[i], sizes[i]) if offers_half else sizes[i]
                    if not self.running and least > free:
                        continue  # the exceptions that `AptReleasedPolicy` documents
                    scheduled = []  # the released code stores a tuple here, which matches no request
                    if not self.running:
                        scheduled = [i]
                        hidden = {i} if use_hidden or sizes[i] > free else set()
                break
            if i not in scheduled:
                scheduled.append(i)
                tokens += lengths[i]
                slots += 1
            hidden.add(i) if use_hidden else hidden.discard(i)
            profit += gain * size
            used += size
        for i in scheduled:
            if i in hidden:
                self.waiting[i].use_hidden = True
        return [g for i, g in enumerate(self.waiting) if i in scheduled]

    def _select_decode(self, view: SchedulerView, counted: int, demoted: float) -> None:
        """`greedy_selection_decode`."""
        sizes = [math.ceil((int(view.table.num_tokens[g.row]) + 1) / view.block_size) for g in self.running]
        total = view.free_blocks + sum(int(view.table.num_blocks[g.row]) for g in self.running)
        used = 0
        scheduled: list[int] = []
        change: set[int] = set()
        for i, use_hidden, _ in self._offers(view, self.running, sizes, counted, demoted):
            size = self._half(view, self.running[i], sizes[i]) if use_hidden else sizes[i]
            if i in scheduled and not change:
                size = math.floor(size / 2)
            if used + size > total / 2:
                break
            scheduled.append(i)
            holds_hidden = self.running[i].use_hidden
            only = self._only_hidden(view, self.running[i])
            if (only and not holds_hidden) or (not only and (use_hidden or holds_hidden)):
                change.add(i)
            else:
                change.discard(i)
            used += size
        for i, group in enumerate(self.running):
            group.require_preempt = i not in scheduled or i in change

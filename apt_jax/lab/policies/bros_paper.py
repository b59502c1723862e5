"""Variants of `bros` for comparison: one with unlimited replacements, and Algorithm 1 as printed."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.policies.bros import AGING_TOKENS_PER_S, BrosPolicy, Kinds, free_slots, shared_groups
from apt_jax.sched.policies.bros_candidates import Candidates, among, end_times_s
from apt_jax.sched.step_packer import Rows
from apt_jax.sched.view import SchedulerView


class BrosAnyPolicy(BrosPolicy):
    """`bros` with the replacements of Algorithm 1, lines 26 to 32.

    The number of replacements is not limited, and a request may be replaced even if it will then be late. The first
    request of a step is never replaced.

    Args:
        token_group: see `BrosPolicy`.
        aging_tokens_per_s: see `BrosPolicy`.
        kinds: see `BrosPolicy`.
    """

    name = "bros-any"
    most_replacements = None

    def __init__(
        self, *, token_group: int = 1, aging_tokens_per_s: float = AGING_TOKENS_PER_S, kinds: Kinds = "first"
    ) -> None:
        super().__init__(token_group=token_group, aging_tokens_per_s=aging_tokens_per_s, kinds=kinds)

    def _may_wait(self, view: SchedulerView, step: Candidates, i: int) -> bool:
        return True


class BrosPaperPolicy(BrosAnyPolicy):
    """Algorithm 1 of BROS line by line.

    Late requests come first and set the time limit (lines 3 and 4). The first request without a slot, blocks or time
    ends its class's part of the step (6 to 12, 18 to 32). Prompts are not shortened to fit the time, and no blocks are
    reserved. Best-effort requests are ordered only by M^cpu (17). When they have no blocks left to give, the real-time
    requests with the most remaining time are preempted, even for waiting requests (§5.2). The first real-time request
    always runs, because otherwise no request would run after a missed deadline; while it is late, it runs alone.

    Args:
        token_group: see `BrosPolicy`.
        kinds: see `BrosPolicy`.
    """

    name = "bros-paper"

    def __init__(self, *, token_group: int = 1, kinds: Kinds = "first") -> None:
        super().__init__(token_group=token_group, aging_tokens_per_s=0.0, kinds=kinds)

    def _is_late(self, view: SchedulerView, asked: Candidates) -> NDArray[np.bool_]:
        return np.zeros(asked.rows.size, np.bool_)

    def _real_time(
        self, view: SchedulerView, asked: Candidates, best_effort: Candidates, limit_s: float
    ) -> tuple[Candidates, Rows, bool]:
        """Like `BrosPolicy._real_time`, but the most urgent request always gets its blocks (BROS §5.2).

        If the blocks of all best-effort requests are too few, the real-time requests with the most remaining time are
        preempted as well.
        """
        table, holds = view.table, asked.holds
        theirs = best_effort.rows[best_effort.holds]
        held = np.where(holds, table.num_blocks[asked.rows], 0)
        others = holds.sum() - np.cumsum(holds)
        slots = view.max_num_seqs - (view.running.size - theirs.size) + others
        reach = view.free_blocks + int(table.num_blocks[theirs].sum()) + held.sum() - np.cumsum(held)
        found = _until(np.cumsum(asked.need) <= reach, np.cumsum(~holds) <= slots)
        step, cut, _ = self._fit(view, asked.take(found), 0, limit_s)
        short = int(step.need.sum()) - view.free_blocks
        if shared_groups(view, step, short)[1] == 0:  # the groups that can be taken suffice
            short = 0
        rest = asked.rows[holds & ~among(view, asked.rows, step.rows)]
        victims = np.concatenate([theirs[::-1], rest[::-1]])
        num_taken = int(np.searchsorted(np.cumsum(table.num_blocks[victims]), short)) + 1 if short > 0 else 0
        new_slots = int(np.count_nonzero(~step.holds)) - (view.max_num_seqs - view.running.size)
        return step, victims[: max(num_taken, new_slots)], cut

    def _with_place(
        self, view: SchedulerView, step: Candidates, asked: Candidates, preempted: Rows, left: int, *, gives: bool
    ) -> tuple[Candidates, Rows]:
        slots = free_slots(view, step, preempted)
        found = _until(np.cumsum(asked.need) <= left, np.cumsum(~asked.holds) <= slots)
        if step.rows.size or found.size:
            return asked.take(found), preempted[:0]
        return super()._with_place(view, step, asked, preempted, left, gives=gives)

    def _by_checkpoints(self, view: SchedulerView, asked: Candidates) -> Candidates:
        return asked.take(asked.load.argsort(kind="stable"))

    def _fit(
        self, view: SchedulerView, asked: Candidates, num_sure: int, limit_s: float
    ) -> tuple[Candidates, bool, bool]:
        """Like `BrosPolicy._fit`, but the step ends before the first candidate that does not fit."""
        if not asked.rows.size or self._goes(view, asked, limit_s):
            return asked, False, False
        slow = end_times_s(view, asked) > limit_s
        index = np.arange(asked.rows.size)
        fails = slow | (np.cumsum(asked.num_tokens) > view.max_num_batched_tokens) | (index >= self._batch_size)
        fails[: max(num_sure, 1)] = False
        first = int(fails.argmax()) if fails.any() else fails.size
        return asked.take(index < first), first < min(fails.size, self._batch_size) and bool(slow[first]), False


def _until(*ok: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the indices before the first index at which any of `ok` is False."""
    all_ok = np.logical_and.reduce(ok)
    return np.arange(all_ok.size if all_ok.all() else all_ok.argmin())

"""Our retention policy: cached sessions and waiting requests compete for the pool by value per block."""

import math

import numpy as np
from numpy.typing import NDArray

from apt_jax.errors import ConfigError
from apt_jax.sched.retention.gaps import GapRecord
from apt_jax.sched.retention.sessions import SessionTable
from apt_jax.sched.retention.view import LruRetention, RetentionView, Rows
from apt_jax.sched.view import SchedulerView

_AWAITED = 1e12
_NEVER_S = 3600.0
"""A session that is forgotten after this many seconds without a call counts as one that never came back."""


class KnapsackRetention(LruRetention):
    """Keeps the blocks that save the most device time per block and second.

    The value of a session's idle blocks is

        density = index(age) * saved_s / blocks

    where `index` is the rate of returns (`apt_jax.sched.retention.gaps`), learned by tenant and kind of work, and
    `saved_s` the prefill that the next call saves. The session with the lowest density loses its blocks first: to host
    memory, and from there the lowest of all again.

    With `keeps`, idle blocks also compete with the waiting requests before each scheduling decision (`kept`). A block
    that a request takes pushes another to host memory, and the block of the lowest density out of it. A block that is
    held back delays the requests that wait for it by as much time as it is held, so blocks are released, the lowest
    density first, until

        density >= weight of the requests that do not fit / blocks that they need

    where a request weighs 1, and 1 more for each TTFT objective that it has waited. Sessions whose next call waits are
    kept for it. In the measurements (docs/lab/sessions.md) this gains nothing where there is host memory.

    Args:
        name: name of the policy.
        keeps: whether idle blocks may be held back from waiting requests; False: only the order of eviction is chosen.
        min_own: number of gaps of one sort after which they count, instead of those of all sorts (`GapRecord`).
    """

    def __init__(self, name: str = "knapsack", *, keeps: bool = False, min_own: int = 64) -> None:
        if min_own < 1:
            raise ConfigError(f"min_own={min_own} must be at least 1")
        self.name, self.keeps = name, keeps
        self.gaps = GapRecord(min_own=min_own)

    def returned(self, sessions: SessionTable, row: int, now_s: float) -> None:
        if sessions.num_calls[row] and not sessions.num_live[row]:
            self._learn(sessions, row, max(now_s - float(sessions.ended_s[row]), 0.0))

    def forgotten(self, sessions: SessionTable, row: int, now_s: float) -> None:
        away_s = now_s - float(sessions.ended_s[row])
        if sessions.num_calls[row] and (sessions.is_over[row] or away_s > _NEVER_S):
            self._learn(sessions, row, math.inf)

    def _learn(self, sessions: SessionTable, row: int, gap_s: float) -> None:
        last_gap_s = float(sessions.last_gap_s[row])
        self.gaps.add(int(sessions.tenant[row]), int(sessions.work[row]), last_gap_s, gap_s)

    def values(self, view: RetentionView) -> NDArray[np.float64]:
        sessions, rows = view.sessions, view.rows
        density = self.index(view) * view.saved_s / np.maximum(view.device_blocks + view.host_blocks, 1)
        density[sessions.is_over[rows]] = -1.0
        if view.waits.any():  # the session that began first is worth the most
            density[view.waits] = _AWAITED / (1.0 + sessions.begun_s[rows[view.waits]])
        return density

    def index(self, view: RetentionView) -> NDArray[np.float64]:
        """Return the (n,) rates at which the sessions return, per second."""
        sessions, rows = view.sessions, view.rows
        index = self.gaps.index(sessions.tenant[rows], sessions.work[rows], sessions.last_gap_s[rows], view.age_s)
        hint_s = sessions.hint_s[rows]
        return np.where(hint_s > view.age_s, np.maximum(index, 1.0 / np.maximum(hint_s, 1.0)), index)

    def kept(self, view: RetentionView, scheduler: SchedulerView) -> Rows:
        density = self.values(view)
        order = np.argsort(density, kind="stable")
        rows, density, held = view.rows[order], density[order], view.device_blocks[order]
        on_device = held > 0
        waiting = scheduler.waiting[: max(scheduler.max_num_seqs - scheduler.running.size, 0)]
        if not waiting.size:
            return rows[on_device]
        table = scheduler.table
        blocks = scheduler.block_options(table.num_tokens[waiting]) - table.shared_prefix_blocks[waiting]
        need = np.where(scheduler.offered, blocks, np.iinfo(np.int32).max).min(axis=1)
        needed = np.concatenate([[0], np.cumsum(need)])
        weight = 1.0 + np.maximum(scheduler.now_s - table.last_token_s[waiting], 0.0) / table.slo_ttft_s[waiting]
        behind = np.concatenate([[0.0], np.cumsum(weight)])
        # Blocks that are free once the first 0, 1, .. sessions have lost theirs, here or in host memory.
        lost = view.free_host_blocks + np.concatenate([[0], np.cumsum(held + view.host_blocks[order])])
        total = int(held.sum())
        free = scheduler.free_blocks - total + np.minimum(lost, total)
        num_fit = np.searchsorted(needed, free, side="right") - 1
        lacking = needed[-1] - needed[num_fit]
        price = np.where(lacking > 0, (behind[-1] - behind[num_fit]) / np.maximum(lacking, 1), 0.0)
        stays = density >= price[:-1]
        released = int(lost[int(np.argmax(stays))]) if stays.any() else total
        return rows[on_device & (np.cumsum(held) > released)]


class ClairvoyantRetention(KnapsackRetention):
    """Knows when each session calls again; for simulations.

    Belady's rule with prices: the session whose blocks save the least per block and second until it returns loses its
    blocks first. `SessionTable.hint_s` holds the true gap after the next answer; inf: no call follows.
    """

    def __init__(self, name: str = "clairvoyant", *, keeps: bool = False) -> None:
        super().__init__(name, keeps=keeps)

    def index(self, view: RetentionView) -> NDArray[np.float64]:
        left_s = view.sessions.hint_s[view.rows] - view.age_s
        # The next call of this session is due, but none waits (`values`): the session no longer needs these blocks.
        return np.where(left_s > 1e-6, 1.0 / np.maximum(left_s, 0.1), 0.0)

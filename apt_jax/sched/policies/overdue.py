"""Overdue best-effort requests: after a long wait they come before all other requests until they have made progress."""

import math

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.step_packer import Rows
from apt_jax.sched.view import SchedulerView

OVERDUE_SHARE = 8
"""The limit on requests that are overdue at a time is `max_num_seqs` / `OVERDUE_SHARE`, but at least one."""

CHUNK_SHARE = 4
"""Prompts of overdue requests get at most `max_num_batched_tokens` / `CHUNK_SHARE` tokens per step."""


class OverdueRequests:
    """Keeps track of the overdue best-effort requests.

    A request becomes overdue when `wait_s` have passed since its last token or, before its first token, its arrival. It
    stays overdue until it has had `num_tokens` more tokens or has ended; then its wait starts again. At most
    `max_num_seqs` / `OVERDUE_SHARE` requests are overdue at a time; those that have waited longest come first.

    Args:
        wait_s: seconds without a new token after which a request is overdue.
        num_tokens: number of output tokens that an overdue request gets.
    """

    def __init__(self, wait_s: float, num_tokens: int) -> None:
        if not 0.0 < wait_s < math.inf:
            raise ValueError(f"best_effort_wait={wait_s} must be a positive number of seconds")
        if num_tokens < 1:
            raise ValueError(f"best_effort_tokens={num_tokens} must be at least 1")
        self._wait_s, self._num_tokens = wait_s, num_tokens
        self._rank = np.zeros(0, np.int64)
        self._until = np.zeros(0, np.int32)
        self._since_s = np.zeros(0)

    def rows(self, view: SchedulerView) -> Rows:
        """Update the set of overdue requests, and return their (n,) rows in the order in which their waits began."""
        table = view.table
        rows = np.concatenate([view.running, view.waiting])
        rows = rows[table.best_effort[rows]]
        grown = table.capacity - self._rank.size
        if grown > 0:
            self._rank = np.concatenate([self._rank, np.full(grown, -1)])
            self._until = np.concatenate([self._until, np.zeros(grown, np.int32)])
            self._since_s = np.concatenate([self._since_s, np.zeros(grown)])
        stays = (self._rank[rows] == table.rank[rows]) & (table.num_delivered[rows] < self._until[rows])
        most = max(view.max_num_seqs // OVERDUE_SHARE, 1) - int(np.count_nonzero(stays))
        others = rows[~stays]
        last_s = table.last_token_s[others]
        others = others[view.now_s - last_s >= self._wait_s]
        if others.size and most > 0:
            new = others[np.lexsort((table.rank[others], table.last_token_s[others]))[:most]]
            self._rank[new] = table.rank[new]
            self._until[new] = table.num_delivered[new] + self._num_tokens
            self._since_s[new] = table.last_token_s[new]
            rows = np.concatenate([rows[stays], new])
        else:
            rows = rows[stays]
        return rows[np.lexsort((table.rank[rows], self._since_s[rows]))]


def share_of_step(num_tokens: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
    """Return the (n,) tokens of overdue requests in a step: one for each decode; prompts share a limit (`CHUNK_SHARE`).

    Args:
        num_tokens: (n,) tokens that each request could compute, in order; 1 for a decode.
        budget: maximum number of tokens per step.
    """
    asked = np.where(num_tokens > 1, num_tokens, 0)
    before = np.cumsum(asked) - asked
    left = np.maximum(max(budget // CHUNK_SHARE, 1) - before, 0)
    return np.where(num_tokens > 1, np.minimum(asked, left), num_tokens).astype(np.int32)

"""Retention for a time to live after each call.

A session within its time to live loses blocks only after all others; with `pins` its blocks do not even count as free.
A client's advice replaces the time to live, except with `pins`: it would hold back blocks that waiting requests need.
"""

import collections
import math

import numpy as np
from numpy.typing import NDArray

from apt_jax.errors import ConfigError
from apt_jax.sched.retention.sessions import TOOL, SessionTable
from apt_jax.sched.retention.view import LruRetention, RetentionView, Rows, prefill_s, used_s
from apt_jax.sched.view import SchedulerView

LONGEST_S = 3600.0
"""Maximum time to live in seconds, also of clients' advice."""
MAX_RECORDS = 1000
"""Maximum number of records of one sort, such as gaps."""
_PINNED = 1e9
"""Added to the times of sessions within their time to live: more than any age, and small enough that times stay apart."""


class TtlRetention(LruRetention):
    """Keeps sessions for a fixed time.

    Args:
        name: name of the policy.
        ttl_s: seconds after the end of a call.
        pins: whether the blocks do not count as free for that time. They are released, the longest time to live first,
            if nothing else runs or running requests need them.
    """

    def __init__(self, name: str = "ttl", *, ttl_s: float = 60.0, pins: bool = False) -> None:
        _check_option("ttl_s", ttl_s, 0, LONGEST_S)
        self.name, self.keeps, self._ttl_s = name, pins, ttl_s

    def ended(self, view: RetentionView) -> None:
        row = int(view.rows[0])
        hint_s = 0.0 if self.keeps else float(view.sessions.hint_s[row])
        ttl_s = hint_s or self.ttl_s(view)
        view.sessions.until_s[row] = view.now_s + min(ttl_s, LONGEST_S) if ttl_s > 0 else 0.0

    def ttl_s(self, view: RetentionView) -> float:
        """Return the time to live of the only session of a view, seconds."""
        return self._ttl_s

    def is_pinned(self, view: RetentionView) -> NDArray[np.bool_]:
        """Return the (n,) mask of sessions within their time to live. It goes on while a call waits that came within
        it."""
        until_s = view.sessions.until_s[view.rows]
        return ((until_s > view.now_s) | view.awaited & (until_s > 0)) & ~view.sessions.is_over[view.rows]

    def values(self, view: RetentionView) -> NDArray[np.float64]:
        return used_s(view) + _PINNED * self.is_pinned(view)

    def kept(self, view: RetentionView, scheduler: SchedulerView) -> Rows:
        rows = view.rows[self.is_pinned(view) & (view.device_blocks > 0)]
        return rows[np.argsort(-view.sessions.until_s[rows], kind="stable")]

    def returned(self, sessions: SessionTable, row: int, now_s: float) -> None:
        if sessions.until_s[row] < now_s:
            sessions.until_s[row] = 0.0


class CacheTtlRetention(TtlRetention):
    """The time to live of Continuum (CacheTTL, arXiv 2511.02230v4 §4.2, Eq. 2), by the kind of work and the observed
    gaps.

        tau* = argmax over tau in {0} and the observed gaps of P(gap <= tau) * (eta * T + reload_s) - tau

    T is the mean wait of calls that came back and found their cache gone; eta, the correlation of calls done and calls
    left, is 1 until clients tell when sessions end. Only answers that call a tool are kept. Until more than
    `num_records` gaps are known, every session is kept for `first_ttl_s`.
    """

    def __init__(self, name: str = "cache-ttl", *, num_records: int = 100, first_ttl_s: float = 2.0) -> None:
        _check_option("first_ttl_s", first_ttl_s, 0, LONGEST_S)
        _check_option("num_records", num_records, 1, MAX_RECORDS - 1)
        super().__init__(name, ttl_s=first_ttl_s, pins=True)
        self._num_records = num_records
        self._records: dict[int, collections.deque[float]] = {}
        self._all = collections.deque[float](maxlen=MAX_RECORDS)
        self._waits_s = collections.deque[float](maxlen=MAX_RECORDS)
        self._ended = collections.deque[tuple[int, int]](maxlen=MAX_RECORDS)

    def returned(self, sessions: SessionTable, row: int, now_s: float) -> None:
        if sessions.num_calls[row]:
            gap_s = max(now_s - float(sessions.ended_s[row]), 0.0)
            self._all.append(gap_s)
            self._records.setdefault(int(sessions.work[row]), collections.deque(maxlen=MAX_RECORDS)).append(gap_s)
        super().returned(sessions, row, now_s)

    def started(self, sessions: SessionTable, row: int, waited_s: float, num_found: int) -> None:
        if sessions.num_calls[row] and num_found < sessions.num_tokens[row] / 2:
            self._waits_s.append(waited_s)

    def forgotten(self, sessions: SessionTable, row: int, now_s: float) -> None:
        if sessions.is_over[row]:
            total = int(sessions.num_calls[row])
            self._ended.extend((done, total - done) for done in range(1, min(total, 101)))

    def eta(self) -> float:
        """Return the negative correlation of calls done and calls left; 1 until two are known."""
        if len(self._ended) < 2:
            return 1.0
        done, left = np.array(self._ended, np.float64).T
        if not done.std() or not left.std():
            return 1.0
        return -float(np.clip(np.corrcoef(done, left)[0, 1], -1.0, 1.0))

    def ttl_s(self, view: RetentionView) -> float:
        row = int(view.rows[0])
        if view.sessions.work[row] != TOOL:
            return 0.0
        if len(self._all) <= self._num_records:
            return self._ttl_s
        own = self._records.get(TOOL, self._all)
        records = np.sort(np.array(own if len(own) > self._num_records else self._all))
        wait_s = sum(self._waits_s) / len(self._waits_s) if self._waits_s else 0.0
        taus = np.concatenate([[0.0], records])
        share = np.searchsorted(records, taus, side="right") / records.size
        reward = share * (self.eta() * wait_s + reload_s(view, row)) - taus
        best = int(np.argmax(reward))
        return float(taus[best]) if reward[best] > 0 else 0.0


class ProgressTtlRetention(TtlRetention):
    """The time to live of progress-TTL (vllm-project/router, issue 285 and pull request 286, September 2026).

        ttl* = argmax over ttl in [0, min(longest_s, C)] of P(gap < ttl) C - E[gap; gap < ttl] - ttl P(gap >= ttl)

    C is the prefill of the session's context times (2 - alpha), where alpha is the share of decode throughput that a
    prefill leaves. The gap has the log-normal distribution fitted to the last `num_records` gaps; until there are as
    many, nothing is kept.
    """

    def __init__(
        self, name: str = "progress-ttl", *, num_records: int = 100, longest_s: float = 10.0, alpha: float = 0.15
    ) -> None:
        _check_option("longest_s", longest_s, 0, LONGEST_S)
        _check_option("num_records", num_records, 2, MAX_RECORDS)
        _check_option("alpha", alpha, 0, 1)
        super().__init__(name, ttl_s=longest_s, pins=True)
        self._alpha = alpha
        self._gaps_s = collections.deque[float](maxlen=num_records)

    def returned(self, sessions: SessionTable, row: int, now_s: float) -> None:
        gap_s = now_s - float(sessions.ended_s[row])
        if sessions.num_calls[row] and gap_s > 0:
            self._gaps_s.append(gap_s)
        super().returned(sessions, row, now_s)

    def ttl_s(self, view: RetentionView) -> float:
        if len(self._gaps_s) < (self._gaps_s.maxlen or 0):
            return 0.0
        num_tokens = float(view.sessions.num_tokens[view.rows[0]])
        cost_s = (2.0 - self._alpha) * (
            view.costs.prefill_base_s + float(prefill_s(view.costs, np.array([num_tokens]))[0])
        )
        longest_s = min(self._ttl_s, cost_s)
        if longest_s <= 0:
            return 0.0
        logs = np.log(np.array(self._gaps_s))
        mean, sigma = float(logs.mean()), max(float(logs.std()), 1e-6)
        shortest_s = min(0.05, longest_s)
        taus = [0.0, shortest_s, longest_s, *np.geomspace(shortest_s, longest_s, 32).tolist()]
        best, best_s = 0.0, 0.0
        for tau in taus:
            if tau <= 0:
                continue
            hit = _normal_cdf((math.log(tau) - mean) / sigma)
            within_s = math.exp(mean + sigma**2 / 2) * _normal_cdf((math.log(tau) - mean - sigma**2) / sigma)
            utility = cost_s * hit - within_s - tau * (1.0 - hit)
            if utility >= best:
                best, best_s = utility, tau
        return best_s


def reload_s(view: RetentionView, row: int) -> float:
    """Return the seconds that a session's next call takes to get its whole prefix back: from host memory if there is
    one, else computed."""
    num_tokens = float(view.sessions.num_tokens[row])
    compute_s = float(prefill_s(view.costs, np.array([num_tokens]))[0])
    if not view.has_host:
        return compute_s
    blocks = math.ceil(num_tokens / view.block_sizes[0]) * view.blocks_per_group[0]
    return min(compute_s, view.costs.transfer_s(0, blocks))


def _check_option(option: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{option}={value} must be from {least:g} to {most:g}")


def _normal_cdf(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2.0))

"""The gaps between a session's calls, and the rate at which it returns.

A gap is the time from a call's end to the session's next call; inf: there was none. With the gaps of the past, the
*return index* of a session that has been away for a seconds is

    index(a) = max over T > a of  P(gap <= T | gap > a) / E[min(gap, T) - a | gap > a]

the best rate of returns per second of waiting (the Gittins index of keeping it). For exponential gaps it is their rate;
for heavy tails it falls with a: who has been away for long stays away.
"""

import collections

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.retention.sessions import PERSON, TOOL, UNKNOWN

PRIOR_S: dict[int, tuple[float, ...]] = {
    TOOL: (3, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6, 7, 7, 7, 8, 8, 9, 10, 10, 11, 12, 14, 15, 18, 20, 25, 33, 44, 65, 108, 176, 570),
    PERSON: (2, 4, 5, 9, 16, 33, 47, 62, 81, 100, 119, 142, 167, 180, 199, 240, 286, 320, 364, 459, 525, 680, 815, 1000, 1150, 1590, 2040, 2740, 3370, 6850, 12200, 39500, *(float("inf"),) * 5),
    UNKNOWN: (3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 7, 7, 8, 8, 9, 10, 10, 11, 13, 14, 16, 19, 22, 28, 37, 49, 68, 103, 143, 245, 516, 2370, float("inf")),
}  # fmt: skip
"""Quantiles of the gaps of 352 recorded sessions of coding agents (kv-cache-tester, Apache-2.0), by
`SessionTable.work`."""
_SHORTEST_S = 0.5
"""Expected waits count as at least this long, seconds."""
_AGES_S = np.concatenate([[0.0], np.geomspace(1.0, 36_000.0, 63)])
_REFRESH = 32
"""Number of new gaps after which an index is computed again."""
MAX_TENANTS = 64
"""Number of tenants with gaps of their own; further tenants share one record."""
_OF_ALL = -1
_LENGTHS_S = np.array([0.0, 12.0, 50.0, 250.0, 1000.0])
"""Gaps before are of similar length between two of these, seconds; there was none below the first."""


def return_index(gaps_s: NDArray[np.float64], ages_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (n,) return indices, per second, of sessions that have been away for `ages_s`.

    Args:
        gaps_s: gaps of the past in seconds; inf: no call came.
        ages_s: (n,) ages in seconds. At ages above all finite gaps the index is 0.
    """
    finite = np.sort(gaps_s[np.isfinite(gaps_s)])
    sums = np.concatenate([[0.0], np.cumsum(finite)])
    out = np.zeros(ages_s.size)
    for i, age in enumerate(ages_s.tolist()):
        begin = int(np.searchsorted(finite, age, side="right"))
        left = gaps_s.size - begin
        num = np.arange(1, finite.size - begin + 1)
        if num.size:
            horizon_s = finite[begin:] - age
            waited_s = sums[begin + 1 :] - sums[begin] - num * age + (left - num) * horizon_s
            out[i] = (num / np.maximum(waited_s, _SHORTEST_S * left)).max()
    return out


class GapRecord:
    """Gaps observed by tenant, kind of work and length of the gap before, and return indices from them and the prior.

    The index of a session comes from the first record with at least `min_own` gaps: its tenant's gaps of the same kind
    after a gap of similar length, its tenant's of the kind, all tenants' of that sort, or all of the kind.
    The prior counts beside each.

    Args:
        num_gaps: number of latest gaps in a record.
        min_own: number of gaps that a record needs.
    """

    def __init__(self, num_gaps: int = 256, min_own: int = 64) -> None:
        self._num, self._min_own = num_gaps, min_own
        self._gaps: dict[tuple[int, int, int], collections.deque[float]] = {}
        self._new: collections.Counter[tuple[int, int, int]] = collections.Counter()
        self._curves: dict[tuple[int, int, int], NDArray[np.float64]] = {}

    def add(self, tenant: int, work: int, last_gap_s: float, gap_s: float) -> None:
        """Record a gap after a gap of `last_gap_s` (-1: none); inf: the session ended, or has been away for an hour."""
        for key in _records(min(tenant, MAX_TENANTS), work, int(np.searchsorted(_LENGTHS_S, last_gap_s))):
            self._gaps.setdefault(key, collections.deque(maxlen=self._num)).append(gap_s)
            self._new[key] += 1

    def index(
        self,
        tenant: NDArray[np.int32],
        work: NDArray[np.int8],
        last_gap_s: NDArray[np.float64],
        age_s: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return the (n,) return indices of sessions, per second."""
        out = np.zeros(age_s.size)
        slot = np.clip(np.searchsorted(_AGES_S, age_s, side="right") - 1, 0, _AGES_S.size - 1)
        length, num = np.searchsorted(_LENGTHS_S, last_gap_s), _LENGTHS_S.size + 1
        code = (np.minimum(tenant, MAX_TENANTS).astype(np.int64) * len(PRIOR_S) + work) * num + length
        for each in np.flatnonzero(np.bincount(code)).tolist():
            rest, of_length = divmod(each, num)
            of, kind = divmod(rest, len(PRIOR_S))
            same = code == each
            out[same] = self._curve(of, kind, of_length)[slot[same]]
        return out

    def _curve(self, tenant: int, work: int, length: int) -> NDArray[np.float64]:
        keys = _records(tenant, work, length)
        key = next((key for key in keys if len(self._gaps.get(key, ())) >= self._min_own), keys[-1])
        curve = self._curves.get(key)
        if curve is None or self._new[key] >= _REFRESH:
            self._new[key] = 0
            gaps_s = np.array([*PRIOR_S[work], *self._gaps.get(key, ())])
            curve = self._curves[key] = return_index(gaps_s, _AGES_S)
        return curve


def _records(tenant: int, work: int, length: int) -> tuple[tuple[int, int, int], ...]:
    """Return the records that a gap belongs to, the most particular first."""
    return (tenant, work, length), (tenant, work, _OF_ALL), (_OF_ALL, work, length), (_OF_ALL, work, _OF_ALL)

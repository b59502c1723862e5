"""Latency metrics, computed from recorded token times (docs/metrics.md has every symbol and unit).

A request arrives at a and its tokens are delivered at t_1 <= t_2 <= ... <= t_n. TTFT = t_1 - a; the gaps are TBT_j =
t_{j+1} - t_j; e2e = t_n - a; a request attains its SLO if its TTFT, the 99th percentile of its gaps and its e2e are
within the SLO.
"""

import bisect
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO
from apt_jax.request import RequestMetrics

_RATE_WINDOW_S = 10.0


def percentile(values: Iterable[float], q: float) -> float | None:
    """Return the q-th percentile by NumPy's linear interpolation, q in [0, 100]; None: no values."""
    array = np.sort(np.asarray(list(values), np.float64))
    if not array.size:
        return None
    if math.isnan(array[-1]):
        return math.nan
    # Bit for bit the result of `np.percentile`, in a tenth of its time for few values.
    at = (array.size - 1) * (q / 100)
    low = math.floor(at)
    share = at - low
    a, b = float(array[low]), float(array[min(low + 1, array.size - 1)])
    return b - (b - a) * (1 - share) if share >= 0.5 else a + (b - a) * share


def gaps_s(token_times_s: Sequence[float]) -> list[float]:
    """Return the n - 1 times between n consecutive tokens, in seconds."""
    return np.diff(np.asarray(token_times_s, np.float64)).tolist()


def p99_tbt_s(token_times_s: Sequence[float]) -> float | None:
    """Return the P99 over all gaps of one request, in seconds; None: fewer than two tokens."""
    return percentile(gaps_s(token_times_s), 99)


def p99_tbt_drop_first_s(token_times_s: Sequence[float]) -> float | None:
    """Return `p99_tbt_s` without the first gap, which follows the prefill and is often long because of a preemption;
    None: fewer than three tokens."""
    return percentile(gaps_s(token_times_s)[1:], 99)


class Distribution:
    """A histogram with fixed buckets; adding a value takes a microsecond.

    Args:
        bounds: inclusive upper bounds of the buckets, ascending; larger values belong to a last bucket without a bound.

    Attributes:
        counts: number of values in each bucket; one entry more than `bounds`.
        sum: sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or any(a >= b for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"{bounds=} must be ascending and not empty")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Distribution):
            return NotImplemented
        mine, theirs = (self.bounds, self.counts, self.sum), (other.bounds, other.counts, other.sum)
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_all(self, values: NDArray[np.float64]) -> None:
        """Add each of `values`, (n,)."""
        buckets = np.searchsorted(self.bounds, values, side="left")
        for bucket, count in enumerate(np.bincount(buckets, minlength=len(self.counts)).tolist()):
            self.counts[bucket] += count
        self.sum += float(values.sum())

    def plus(self, other: "Distribution") -> "Distribution":
        """Return the distribution of the values of both distributions; their bounds must be equal."""
        made = Distribution(self.bounds)
        made.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        made.sum = self.sum + other.sum
        return made

    def copy(self) -> "Distribution":
        made = Distribution(self.bounds)
        made.counts, made.sum = list(self.counts), self.sum
        return made

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (upper bound, number of values up to it) for each bucket; the last bound is infinite."""
        return list(zip((*self.bounds, math.inf), itertools.accumulate(self.counts), strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Times and outcome of one request, as seen by its sender. Every request sent needs a record, whatever its
    outcome."""

    arrival_s: float
    """Time at which the request was sent, in seconds."""
    token_times_s: Sequence[float] = ()
    finished_s: float | None = None
    ok: bool = True
    """True if the request ended with "stop" or "length"; False for an error, a rejection, an abort or a lost
    connection."""
    slo: SLO = SLO()  # noqa: RUF009 - frozen

    @classmethod
    def from_metrics(cls, metrics: RequestMetrics, *, ok: bool = True) -> "RequestRecord":
        return cls(
            arrival_s=metrics.arrival_s,
            token_times_s=tuple(metrics.token_times_s),
            finished_s=metrics.finished_s,
            ok=ok,
            slo=metrics.slo,
        )

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @functools.cached_property
    def tbt_s(self) -> float | None:
        """Return the P99 over the gaps between the request's tokens, in seconds; None: fewer than two tokens."""
        return p99_tbt_s(self.token_times_s)

    @property
    def tbt_drop_first_s(self) -> float | None:
        return p99_tbt_drop_first_s(self.token_times_s)

    @functools.cached_property
    def longest_gap_s(self) -> float | None:
        """Return the longest gap between the request's tokens, in seconds; None: fewer than two tokens."""
        return max(gaps_s(self.token_times_s), default=None)

    @property
    def e2e_s(self) -> float | None:
        """Return the time from arrival to the last token, in seconds; None: no token."""
        return self.token_times_s[-1] - self.arrival_s if self.token_times_s else None

    @property
    def completed(self) -> bool:
        """True if the request ended without an error and delivered at least one token."""
        return self.ok and len(self.token_times_s) > 0

    @property
    def ttft_attained(self) -> bool:
        return self.completed and self.ttft_s is not None and self.ttft_s <= self.slo.ttft_s

    @property
    def tbt_attained(self) -> bool:
        """True if the request completed and its P99 gap is within the SLO, or it has no gap."""
        return self.completed and (self.tbt_s is None or self.tbt_s <= self.slo.tbt_s)

    @property
    def e2e_attained(self) -> bool:
        return self.completed and self.e2e_s is not None and self.e2e_s <= self.slo.e2e_s

    @property
    def slo_attained(self) -> bool:
        return self.ttft_attained and self.tbt_attained and self.e2e_attained

    @property
    def strictly_attained(self) -> bool:
        """True if TTFT, e2e and every gap are within the SLO; the P99 of `tbt_attained` forgives one gap in a hundred."""
        longest_s = self.longest_gap_s
        return self.ttft_attained and self.e2e_attained and (longest_s is None or longest_s <= self.slo.tbt_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Percentiles of one quantity over requests; None: the quantity is known for no request."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Percentiles":
        known = [value for value in values if value is not None]
        return cls(p50=percentile(known, 50), p90=percentile(known, 90), p99=percentile(known, 99))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of a run. Fractions refer to all requests sent."""

    num_sent: int
    num_completed: int
    slo_attainment: float
    ttft_attainment: float
    tbt_attainment: float
    e2e_attainment: float
    strict_attainment: float
    """Fraction of requests whose TTFT, e2e and every single gap are within the SLO."""
    ttft_s: Percentiles
    """Percentiles of TTFT over completed requests, in seconds."""
    tbt_s: Percentiles
    """Percentiles, over completed requests, of each request's P99 gap, in seconds."""
    p99_tbt_drop_first_s: Percentiles
    """Like `tbt_s`, but without the first gap of each request."""
    longest_gap_s: Percentiles
    """Percentiles, over completed requests, of each request's longest gap, in seconds."""
    e2e_s: Percentiles
    """Percentiles, over completed requests, of the time from arrival to the last token, in seconds."""
    duration_s: float
    """Time from the first arrival to the last token, in seconds."""
    tokens_per_s: float
    """Output tokens delivered per second of `duration_s`."""
    goodput: float
    """Requests that attained their SLO per second of `duration_s`."""

    def as_dict(self) -> dict[str, object]:
        """Return the fields as plain values for JSON."""
        return dataclasses.asdict(self)


def summarize(records: Sequence[RequestRecord]) -> Summary:
    """Return attainment, latencies and rates over all requests sent.

    Raises:
        ValueError: `records` is empty.
    """
    if not records:
        raise ValueError("no requests to summarise")
    done = [r for r in records if r.completed]
    ends = [r.token_times_s[-1] for r in records if r.token_times_s]
    duration_s = max(ends) - min(r.arrival_s for r in records) if ends else 0.0
    num_tokens = sum(len(r.token_times_s) for r in records)
    num_attained = sum(r.slo_attained for r in records)

    def rate(count: int) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return Summary(
        num_sent=len(records),
        num_completed=len(done),
        slo_attainment=num_attained / len(records),
        ttft_attainment=sum(r.ttft_attained for r in records) / len(records),
        tbt_attainment=sum(r.tbt_attained for r in records) / len(records),
        e2e_attainment=sum(r.e2e_attained for r in records) / len(records),
        strict_attainment=sum(r.strictly_attained for r in records) / len(records),
        ttft_s=Percentiles.of(r.ttft_s for r in done),
        tbt_s=Percentiles.of(r.tbt_s for r in done),
        p99_tbt_drop_first_s=Percentiles.of(r.tbt_drop_first_s for r in done),
        longest_gap_s=Percentiles.of(r.longest_gap_s for r in done),
        e2e_s=Percentiles.of(r.e2e_s for r in done),
        duration_s=duration_s,
        tokens_per_s=rate(num_tokens),
        goodput=rate(num_attained),
    )


class TokenRate:
    """Number of tokens per second of step time over the last ten seconds, from counters that are read at irregular
    times.

    Gateways divide the number of waiting tokens by this rate. Idle time does not count, because otherwise a server with
    little load would look slow.
    """

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[float, int, float]] = collections.deque(maxlen=1024)

    def update(self, now_s: float, tokens: int, busy_s: float) -> float:
        """Add a reading and return the rate since the oldest reading in the window; 0.0 if no step has run since
        then."""
        samples = self._samples
        samples.append((now_s, tokens, busy_s))
        while len(samples) > 2 and samples[1][0] <= now_s - _RATE_WINDOW_S:
            samples.popleft()
        _, tokens_before, busy_before_s = samples[0]
        spent_s = busy_s - busy_before_s
        return (tokens - tokens_before) / spent_s if spent_s > 0 else 0.0

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apt_jax.config import SLO
from apt_jax.metrics import (
    Distribution,
    Percentiles,
    RequestRecord,
    TokenRate,
    gaps_s,
    p99_tbt_drop_first_s,
    p99_tbt_s,
    percentile,
    summarize,
)
from apt_jax.request import RequestMetrics


def test_gaps_and_their_percentiles():
    assert gaps_s([1.0, 1.5, 3.5]) == [0.5, 2.0]
    assert p99_tbt_s([1.0, 1.5, 3.5]) == pytest.approx(0.5 + 0.99 * 1.5)
    assert p99_tbt_drop_first_s([1.0, 9.0, 9.5, 10.0]) == 0.5
    assert p99_tbt_s([1.0]) is None
    assert p99_tbt_drop_first_s([1.0, 2.0]) is None
    assert gaps_s([]) == []


def test_a_distribution_counts_by_upper_bound():
    distribution = Distribution([1, 2, 5])
    for value in (0, 1, 1.5, 2, 5, 6, 100):
        distribution.add(value)
    assert distribution.counts == [2, 2, 1, 2]
    assert distribution.cumulative() == [(1, 2), (2, 4), (5, 5), (math.inf, 7)]
    assert (distribution.count, distribution.sum) == (7, 115.5)
    copied = distribution.copy()
    distribution.add_all(np.array([1.0, 1.1, 7.0]))
    assert distribution.counts == [3, 3, 1, 3]
    assert distribution.sum == pytest.approx(124.6)
    assert copied.counts == [2, 2, 1, 2]
    distribution.add_all(np.array([]))
    assert distribution.count == 10


@pytest.mark.parametrize("bounds", [[], [2, 1], [1, 1]])
def test_bounds_of_a_distribution_rise(bounds):
    with pytest.raises(ValueError, match="ascending"):
        Distribution(bounds)


def test_percentiles_are_numpys_to_the_last_bit():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 50, 100, 101, 102, 1000):
        values = rng.exponential(rng.choice([1e-3, 1.0, 1e3]), size)
        for q in (0, 37.3, 50, 90, 99, 100):
            assert percentile(values, q) == float(np.percentile(values, q))
    assert math.isnan(percentile([1.0, math.nan, 2.0], 50) or 0.0)


def test_percentiles_interpolate_and_are_none_of_nothing():
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([], 50) is None
    assert Percentiles.of([None, 1.0, None]) == Percentiles(p50=1.0, p90=1.0, p99=1.0)


def record(times, *, ok=True, ttft=1.0, tbt=1.0, e2e=math.inf, arrival=0.0) -> RequestRecord:
    return RequestRecord(arrival_s=arrival, token_times_s=times, ok=ok, slo=SLO(ttft_s=ttft, tbt_s=tbt, e2e_s=e2e))


@pytest.mark.parametrize(
    ("r", "ttft", "tbt", "e2e"),
    [
        (record([1.0, 2.0]), True, True, True),  # on the border
        (record([1.0, 2.0], e2e=2.0), True, True, True),
        (record([3.0, 4.0], e2e=2.0, arrival=2.0), True, True, True),
        (record([1.1, 2.0]), False, True, True),
        (record([1.0, 2.5]), True, False, True),
        (record([1.0, 2.0], e2e=1.9), True, True, False),
        (record([1.5, 3.5], e2e=1.0), False, False, False),
        (record([0.5]), True, True, True),  # no gap to miss
        (record([0.5], e2e=0.4), True, True, False),
        (record([0.5], ttft=math.inf, tbt=math.inf, e2e=0.5), True, True, True),
        (record([]), False, False, False),  # an empty completion
        (record([], ttft=math.inf, tbt=math.inf), False, False, False),
        (record([0.1, 0.2], ok=False), False, False, False),  # an error after two good tokens
    ],
)
def test_a_request_attains_its_slo_when_all_parts_do(r, ttft, tbt, e2e):
    assert (r.ttft_attained, r.tbt_attained, r.e2e_attained) == (ttft, tbt, e2e)
    assert r.slo_attained == (ttft and tbt and e2e)
    assert not r.strictly_attained or r.slo_attained


def test_one_long_gap_in_a_hundred_counts_fully_only_near_the_top():
    times = [float(i) * 0.1 for i in range(201)]
    assert record(times, tbt=0.11).slo_attained
    late = [t + (5.0 if i > 100 else 0.0) for i, t in enumerate(times)]
    assert record(late, tbt=0.11).slo_attained  # one of 200 gaps lies above the P99
    assert not record(late, tbt=0.11).strictly_attained
    assert record(late, tbt=0.11).longest_gap_s == pytest.approx(5.1)
    assert record(times, tbt=0.11).strictly_attained
    later = [t + 5.0 * (i > 100) + 5.0 * (i > 150) + 5.0 * (i > 180) for i, t in enumerate(times)]
    assert not record(later, tbt=0.11).slo_attained


def test_strict_attainment_asks_for_the_first_token_and_every_gap():
    assert record([0.5, 1.0]).strictly_attained
    assert record([0.5]).strictly_attained
    assert record([0.5]).longest_gap_s is None
    assert not record([]).strictly_attained
    assert not record([0.1, 0.2], ok=False).strictly_attained
    assert not record([1.5, 1.6]).strictly_attained  # the first token was late
    assert record([0.5, 1.0], e2e=1.0).strictly_attained
    assert not record([0.5, 1.0], e2e=0.9).strictly_attained
    late = [0.1 * i + 2.0 * (i > 100) for i in range(201)]
    summary = summarize([record(late, ttft=1.0, tbt=1.0), record([0.5, 1.0])])
    assert (summary.slo_attainment, summary.strict_attainment) == (1.0, 0.5)
    assert summary.longest_gap_s.p99 == pytest.approx(0.5 + 0.99 * 1.6)


def test_attainment_is_over_all_sent():
    records = [record([0.5, 1.0]), record([2.0, 2.5]), record([]), record([0.1], ok=False)]
    summary = summarize(records)
    assert (summary.num_sent, summary.num_completed) == (4, 2)
    assert summary.slo_attainment == 0.25
    assert summary.ttft_attainment == 0.25
    assert summary.tbt_attainment == 0.5
    assert summary.ttft_s.p50 == 1.25
    assert summary.duration_s == 2.5
    assert summary.tokens_per_s == pytest.approx(5 / 2.5)
    assert summary.goodput == pytest.approx(1 / 2.5)
    assert set(summary.as_dict()) >= {"slo_attainment", "ttft_s", "tbt_s", "tokens_per_s"}


def test_the_end_to_end_latency_is_from_arrival_to_the_last_token_of_completed_requests():
    ends = [3.0, 5.0, 9.0]
    records = [record([2.5, end], arrival=2.0, ttft=math.inf, tbt=math.inf, e2e=3.0) for end in ends]
    summary = summarize([*records, record([1.0, 90.0], ok=False, e2e=3.0), record([], e2e=3.0)])
    assert [r.e2e_s for r in records] == [1.0, 3.0, 7.0]
    assert record([]).e2e_s is None
    assert (summary.e2e_s.p50, summary.e2e_s.p90) == (3.0, pytest.approx(6.2))
    assert summary.e2e_attainment == summary.slo_attainment == 2 / 5
    assert summary.ttft_attainment == summary.tbt_attainment == 3 / 5
    assert summary.as_dict()["e2e_attainment"] == 2 / 5


def test_a_run_without_any_token_has_no_rates():
    summary = summarize([record([])])
    assert (summary.goodput, summary.tokens_per_s, summary.ttft_s.p99) == (0.0, 0.0, None)
    with pytest.raises(ValueError, match="no requests"):
        summarize([])


@given(st.lists(st.floats(0, 100), min_size=2, max_size=50))
def test_record_and_engine_metrics_agree(times):
    times = sorted(times)
    slo = SLO(ttft_s=5.0, tbt_s=5.0, e2e_s=20.0)
    engine = RequestMetrics(arrival_s=0.0, token_times_s=list(times), slo=slo)
    mine = RequestRecord.from_metrics(engine)
    assert mine.ttft_s == engine.ttft_s
    assert mine.tbt_s == engine.tbt_s
    assert mine.e2e_s == engine.e2e_s
    assert mine.e2e_attained == engine.e2e_attained
    assert mine.slo_attained == engine.slo_attained


def test_the_rate_of_tokens_is_that_of_the_last_seconds():
    rate = TokenRate()
    assert rate.update(100.0, 50, 7.0) == 0.0
    assert rate.update(101.0, 80, 8.0) == 30.0
    assert rate.update(105.0, 100, 8.25) == 40.0  # it was idle in between
    assert rate.update(111.0, 200, 14.0) == 20.0  # since 101: the window is ten seconds
    assert rate.update(200.0, 200, 14.0) == 0.0

"""Times to live against plain transcriptions of their sources, on random histories."""

import dataclasses
import math
import statistics

import numpy as np
import pytest

from apt_jax.costs.model import StepCosts
from apt_jax.errors import ConfigError
from apt_jax.sched.retention import RETENTIONS, make_retention
from apt_jax.sched.retention.sessions import PERSON, TOOL, UNKNOWN, SessionTable
from apt_jax.sched.retention.time_to_live import CacheTtlRetention, ProgressTtlRetention, TtlRetention
from apt_jax.sched.retention.view import RetentionView
from tests.support.cases import num_cases

COSTS = StepCosts(prefill_per_token_s=2e-5, prefill_per_pair_s=4e-10, prefill_base_s=0.004)


def view_of(sessions: SessionTable, row: int, now_s: float, *, costs: StepCosts = COSTS, has_host: bool = False):
    return RetentionView(
        now_s=now_s, sessions=sessions, rows=np.array([row], np.int32), awaited=np.zeros(1, np.bool_), waits=np.zeros(1, np.bool_), costs=costs,
        block_sizes=(16, 16), blocks_per_group=(2, 1), has_host=has_host,
    )  # fmt: skip


def continuum_ttl_s(
    by_tool: dict[int, list[float]], tool: int, wait_s: float, reload_s: float, num_records: int = 100
) -> float:
    """Continuum Eq. 2 and its cold start, with eta = 1; a loop over all observed gaps."""
    if tool != TOOL:
        return 0.0
    everything = [gap for gaps in by_tool.values() for gap in gaps]
    if len(everything) <= num_records:
        return 2.0
    own = by_tool.get(tool, [])
    records = own if len(own) > num_records else everything
    best_tau, best_reward = 0.0, 0.0
    for tau in sorted({0.0, *records}):
        share = sum(1 for gap in records if gap <= tau) / len(records)
        reward = share * (wait_s + reload_s) - tau
        if reward > best_reward:
            best_tau, best_reward = tau, reward
    return best_tau


def test_cache_ttl_decides_as_continuum_says():
    for seed in range(num_cases(200, 2000)):
        rng = np.random.default_rng([seed, 3])
        policy, table = CacheTtlRetention(), SessionTable()
        row = table.add()
        table.num_calls[row] = 1
        by_tool: dict[int, list[float]] = {}
        now_s = 0.0
        for _ in range(int(rng.integers(0, 300))):
            table.work[row] = tool = int(rng.choice([TOOL, TOOL, PERSON, UNKNOWN]))
            gap_s = float(rng.lognormal(1.5, 1.5))
            table.ended_s[row], now_s = now_s, now_s + gap_s
            policy.returned(table, row, now_s)
            by_tool.setdefault(tool, []).append(now_s - float(table.ended_s[row]))
        table.num_tokens[row] = num_tokens = int(rng.integers(100, 200_000))
        waits = rng.exponential(5, int(rng.integers(0, 4))).tolist()
        for wait_s in waits:
            policy.started(table, row, wait_s, num_tokens // 3)
        policy.started(table, row, 1e6, num_tokens)  # found its cache, so it does not count
        table.work[row] = tool = int(rng.choice([TOOL, PERSON]))
        table.ended_s[row] = now_s
        has_host = bool(rng.random() < 0.5)
        costs = StepCosts(prefill_per_token_s=2e-5, prefill_per_pair_s=4e-10, load_per_block_s=1e-5)
        policy.ended(view_of(table, row, now_s, costs=costs, has_host=has_host))
        reload_s = 2e-5 * num_tokens + 4e-10 * num_tokens**2
        if has_host:
            reload_s = min(reload_s, 1e-5 * 2 * math.ceil(num_tokens / 16))
        wait_s = sum(waits) / len(waits) if waits else 0.0
        expected_s = continuum_ttl_s(by_tool, tool, wait_s, reload_s)
        until_s = float(table.until_s[row])
        assert (until_s - now_s if until_s else 0.0) == pytest.approx(min(expected_s, 3600.0), abs=1e-6), seed


def test_eta_is_one_for_sessions_of_one_length_and_less_for_mixed_ones():
    policy, table = CacheTtlRetention(), SessionTable()
    assert policy.eta() == 1.0
    for lengths in ([10], [10, 10], [3, 30]):
        for calls in lengths:
            row = table.add()
            table.num_calls[row], table.is_over[row] = calls, True
            policy.forgotten(table, row, 0.0)
        if lengths != [3, 30]:
            assert policy.eta() == pytest.approx(1.0)
    pairs = [(done, n - done) for n in (10, 10, 10, 3, 30) for done in range(1, n)]
    done, left = np.array(pairs, float).T
    assert policy.eta() == pytest.approx(-np.corrcoef(done, left)[0, 1])


def progress_ttl_s(gaps: list[float], num_tokens: int, longest_s: float = 10.0) -> float:
    """The router's calculation, with the standard library's normal distribution."""
    if len(gaps) < 100:
        return 0.0
    cost = (COSTS.prefill_base_s + 2e-5 * num_tokens + 4e-10 * num_tokens**2) * (2 - 0.15)
    logs = [math.log(gap) for gap in gaps[-100:]]
    mean = sum(logs) / 100
    sigma = max(math.sqrt(sum((x - mean) ** 2 for x in logs) / 100), 1e-6)
    most = min(longest_s, cost)
    least = min(0.05, most)
    ratios = [i / 31 for i in range(32)]
    taus = [0.0, least, most] + [math.exp(math.log(least) + (math.log(most) - math.log(least)) * r) for r in ratios]
    normal, best = statistics.NormalDist(), (0.0, -math.inf)
    for tau in taus:
        utility = 0.0
        if tau > 0:
            hit = normal.cdf((math.log(tau) - mean) / sigma)
            within = math.exp(mean + sigma**2 / 2) * normal.cdf((math.log(tau) - mean - sigma**2) / sigma)
            utility = cost * hit - within - tau * (1 - hit)
        if utility >= best[1]:
            best = (tau, utility)
    return best[0]


def test_progress_ttl_decides_as_the_router_does():
    some = 0
    for seed in range(num_cases(200, 2000)):
        rng = np.random.default_rng([seed, 4])
        policy, table = ProgressTtlRetention(), SessionTable()
        row = table.add()
        table.num_calls[row] = 1
        gaps, now_s = [], 1.0
        middle = rng.uniform(-2, 4)
        for _ in range(int(rng.choice([0, 99, 100, 150]))):
            table.ended_s[row] = now_s
            now_s += float(rng.lognormal(middle, 1.0))
            gaps.append(now_s - float(table.ended_s[row]))
            policy.returned(table, row, now_s)
        table.num_tokens[row] = num_tokens = int(rng.integers(1, 200_000))
        policy.ended(view_of(table, row, now_s))
        until_s = float(table.until_s[row])
        expected_s = progress_ttl_s(gaps, num_tokens)
        assert (until_s - now_s if until_s else 0.0) == pytest.approx(expected_s, abs=1e-6), seed
        some += expected_s > 0
    assert some > 20


def test_what_a_client_asks_for_replaces_the_time_to_live_and_is_bounded():
    table = SessionTable()
    row = table.add()
    table.work[row] = TOOL
    for asked_s, given_s in ((5.0, 5.0), (1e9, 3600.0), (math.inf, 3600.0), (0.0, 60.0)):
        table.hint_s[row] = asked_s
        TtlRetention().ended(view_of(table, row, 100.0))
        assert table.until_s[row] == 100.0 + given_s


def test_a_client_does_not_choose_for_how_long_blocks_are_held_back_from_others():
    policies = (TtlRetention(ttl_s=7.0, pins=True), CacheTtlRetention(), ProgressTtlRetention())
    for policy, until_s in zip(policies, (107.0, 102.0, 0.0), strict=True):
        assert policy.keeps
        table = SessionTable()
        row = table.add()
        table.work[row] = TOOL
        for asked_s in (0.0, 5.0, 1e9, math.inf):
            table.hint_s[row] = asked_s
            policy.ended(view_of(table, row, 100.0))
            assert table.until_s[row] == until_s


def test_a_session_within_its_time_to_live_is_worth_more_and_is_kept_until_its_call_has_run():
    policy, table = TtlRetention(ttl_s=10.0, pins=True), SessionTable()
    rows = np.array([table.add() for _ in range(3)], np.int32)
    table.device_groups[rows, 0] = 5
    for i, row in enumerate(rows.tolist()):
        table.ended_s[row] = float(i)
        policy.ended(view_of(table, row, float(i)))
    view = RetentionView(
        now_s=10.5, sessions=table, rows=rows, awaited=np.array([False, False, True]), waits=np.array([False, False, True]), costs=COSTS,
        block_sizes=(16, 16), blocks_per_group=(2, 1),
    )  # fmt: skip
    values = policy.values(view)
    assert values[0] < values[1] < values[2]  # the first has run out
    scheduler = None
    assert policy.kept(view, scheduler).tolist() == [rows[2], rows[1]]  # type: ignore[arg-type] - not read
    later = dataclasses.replace(view, now_s=13.0)
    assert policy.kept(later, scheduler).tolist() == [rows[2]]  # type: ignore[arg-type] - its call waits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rlu", "did you mean lru"),
        ("", "must be one of lru, ttl"),
        ("ttl?ttl_s=-1", "from 0 to 3600"),
        ("ttl?ttl_s=1e9", "from 0 to 3600"),
        ("ttl?ttl=3", "no option 'ttl'"),
        ("knapsack?keeps=maybe", "true or false"),
        ("knapsack?min_own=0", "at least 1"),
        ("lru?x=1", "has no options"),
        ("cache-ttl?first_ttl_s=-1", "first_ttl_s=-1.0 must be from 0 to 3600"),
        ("cache-ttl?num_records=1000", "num_records=1000 must be from 1 to 999"),
        ("progress-ttl?longest_s=-5", "longest_s=-5.0 must be from 0 to 3600"),
        ("progress-ttl?num_records=0", "num_records=0 must be from 2 to 1000"),
        ("progress-ttl?alpha=2", "alpha=2.0 must be from 0 to 1"),
    ],
)
def test_a_wrong_name_or_option_is_told(text, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as raised:
        make_retention(text)
    assert "--retention" in str(raised.value)


def test_every_policy_can_be_built_by_name():
    assert make_retention("lru") is None
    for name in RETENTIONS:
        if name != "lru":
            policy = make_retention(name)
            assert policy is not None
            assert policy.name == name

"""Which session loses its blocks first, by every policy, against plain code over one session at a time."""

import dataclasses
import math

import numpy as np
import pytest

from apt_jax.costs.model import StepCosts
from apt_jax.sched.retention import Retention, make_retention
from apt_jax.sched.retention.gaps import PRIOR_S
from apt_jax.sched.retention.knapsack import ClairvoyantRetention, KnapsackRetention
from apt_jax.sched.retention.sessions import SessionTable
from apt_jax.sched.retention.view import LruRetention, RetentionView
from tests.support.cases import num_cases

LOAD_S = 3e-6
COSTS = StepCosts(prefill_per_token_s=2e-5, prefill_per_pair_s=4e-10, load_per_block_s=LOAD_S)
GROUPS, BLOCKS = (16, 32), (2, 1)  # tokens and blocks per group, by kind
TIMES = ("ttl?ttl_s=40", "ttl?ttl_s=40&pins=true", "cache-ttl", "progress-ttl")


@dataclasses.dataclass
class Session:
    """A session as a policy may know it, in plain numbers."""

    ended: float
    until: float
    hint: float
    begun: float
    last_gap: float
    tenant: int
    work: int
    over: bool
    awaited: bool
    waits: bool
    device: tuple[int, int]
    host: tuple[int, int]

    def blocks(self) -> int:
        return sum(n * b for groups in (self.device, self.host) for n, b in zip(groups, BLOCKS, strict=True))

    def saved(self) -> float:
        tokens = sum(n * t for groups in (self.device, self.host) for n, t in zip(groups, GROUPS, strict=True))
        copied = sum(n * b for n, b in zip(self.host, BLOCKS, strict=True))
        return max(2e-5 * tokens + 4e-10 * tokens**2 - LOAD_S * copied, 0.0)


def sessions_of(rng: np.random.Generator) -> tuple[list[Session], float]:
    now = float(rng.uniform(50, 4000))
    made = []
    for _ in range(int(rng.integers(1, 10))):
        waits = bool(rng.random() < 0.25)
        made.append(
            Session(
                ended=now - float(rng.choice([rng.uniform(0, 5), rng.uniform(0, now)])),
                until=float(rng.choice([0.0, rng.uniform(0, now), now + rng.uniform(0, 60)])),
                hint=float(rng.choice([0.0, rng.uniform(0, 30), rng.uniform(0, 5000), math.inf])),
                begun=float(rng.uniform(0, now)), last_gap=float(rng.choice([-1.0, 3.0, 20.0, 100.0, 500.0, 2000.0])),
                tenant=int(rng.integers(0, 3)), work=int(rng.integers(0, 3)), over=bool(rng.random() < 0.1),
                waits=waits, awaited=waits and bool(rng.random() < 0.7),
                device=(int(rng.integers(0, 400)), int(rng.integers(0, 2) * rng.integers(0, 50))),
                host=(int(rng.integers(0, 2) * rng.integers(0, 400)), 0),
            )
        )  # fmt: skip
    return made, now


def view_of(sessions: list[Session], now: float) -> RetentionView:
    table = SessionTable()
    rows = np.array([table.add() for _ in sessions], np.int32)
    for row, s in zip(rows.tolist(), sessions, strict=True):
        table.ended_s[row], table.until_s[row], table.hint_s[row] = s.ended, s.until, s.hint
        table.begun_s[row], table.last_gap_s[row], table.tenant[row] = s.begun, s.last_gap, s.tenant
        table.work[row], table.is_over[row] = s.work, s.over
        table.device_groups[row], table.host_groups[row] = s.device, s.host
    return RetentionView(
        now_s=now, sessions=table, rows=rows, awaited=np.array([s.awaited for s in sessions]),
        waits=np.array([s.waits for s in sessions]), costs=COSTS, block_sizes=GROUPS, blocks_per_group=BLOCKS,
        has_host=True, free_host_blocks=0,
    )  # fmt: skip


def check_order(found: np.ndarray, expected: list, seed: int) -> None:
    """The values order the sessions as the keys do."""
    for i, a in enumerate(expected):
        for j, b in enumerate(expected):
            if a < b:
                assert found[i] < found[j], (seed, i, j)


@pytest.mark.seeds
def test_least_recently_used_goes_first_and_a_waiting_call_is_a_use():
    for seed in range(num_cases(1000, 10_000)):
        sessions, now = sessions_of(np.random.default_rng([seed, 81]))
        found = LruRetention().values(view_of(sessions, now))
        check_order(found, [now if s.waits else s.ended for s in sessions], seed)


@pytest.mark.seeds
def test_sessions_within_their_time_to_live_go_last_and_are_kept_in_the_order_of_its_end():
    for seed in range(num_cases(1000, 10_000)):
        sessions, now = sessions_of(np.random.default_rng([seed, 82]))
        policy: Retention | None = make_retention(TIMES[seed % len(TIMES)])
        assert policy is not None
        view = view_of(sessions, now)
        alive = [not s.over and (s.until > now or (s.awaited and s.until > 0)) for s in sessions]
        expected = [(is_alive, now if s.waits else s.ended) for is_alive, s in zip(alive, sessions, strict=True)]
        check_order(policy.values(view), expected, seed)
        kept = [i for i, s in enumerate(sessions) if alive[i] and s.device != (0, 0)]
        kept.sort(key=lambda i: -sessions[i].until)  # the longest time to live is released first
        assert policy.kept(view, None).tolist() == [int(view.rows[i]) for i in kept], seed  # type: ignore[arg-type]


def rate_of_return(gaps: list[float], age: float) -> float:
    """The best rate of returns per second of waiting until some time, of the gaps that are longer than the age."""
    left = [gap for gap in gaps if gap > age]
    best = 0.0
    for until in {gap for gap in left if gap < math.inf}:
        waited = sum(min(gap, until) - age for gap in left)
        best = max(best, sum(gap <= until for gap in left) / max(waited, 0.5 * len(left)))
    return best


@dataclasses.dataclass
class PlainRecord:
    """All gaps, with whom they are of; the latest 256 of a sort count beside the prior."""

    gaps: list[tuple[int, int, float, float]]

    def rate(self, tenant: int, work: int, last_gap: float, age: float, min_own: int) -> float:
        def length(gap: float) -> int:
            return sum(gap > bound for bound in (0.0, 12.0, 50.0, 250.0, 1000.0))

        of_work = [g for g in self.gaps if g[1] == work]
        own = [g for g in of_work if g[0] == tenant]
        sorts = [
            [g for g in own if length(g[2]) == length(last_gap)], own,
            [g for g in of_work if length(g[2]) == length(last_gap)], of_work,
        ]  # fmt: skip
        chosen = next((sort for sort in sorts if len(sort[-256:]) >= min_own), of_work)
        ages = [0.0] + [math.exp(math.log(36_000.0) * k / 62) for k in range(63)]
        on_grid = max(a for a in ages if a <= age * (1 + 1e-12))
        return rate_of_return([*PRIOR_S[work], *(g[3] for g in chosen[-256:])], on_grid)


@pytest.mark.seeds
def test_the_knapsack_policy_values_what_saves_the_most_prefill_per_block_and_second():
    learned = 0
    for seed in range(num_cases(150, 2000)):
        rng = np.random.default_rng([seed, 83])
        min_own = int(rng.choice([1, 8, 64]))
        policy, record = KnapsackRetention(min_own=min_own), PlainRecord([])
        table = SessionTable()
        row = table.add()
        for _ in range(int(rng.choice([0, 20, 150, 300]))):
            gap = float(rng.lognormal(2, 1.5))
            tenant, work, last = (
                int(rng.integers(0, 3)),
                int(rng.integers(0, 3)),
                float(rng.choice([-1.0, 3.0, 20.0, 500.0])),
            )
            table.tenant[row], table.work[row], table.last_gap_s[row] = tenant, work, last
            table.num_calls[row], table.num_live[row] = int(rng.random() < 0.9), int(rng.random() < 0.1)
            table.is_over[row], table.ended_s[row] = bool(rng.random() < 0.5), 10.0
            goes = rng.random()
            if goes < 0.8:
                policy.returned(table, row, 10.0 + gap)
                counts = table.num_calls[row] and not table.num_live[row]
            else:
                gap = gap if goes < 0.9 else 3601.0
                policy.forgotten(table, row, 10.0 + gap)
                counts = table.num_calls[row] and (table.is_over[row] or gap > 3600.0)
                gap = math.inf
            if counts:
                record.gaps.append((tenant, work, last, (10.0 + gap) - 10.0))
        sessions, now = sessions_of(rng)
        expected = []
        for s in sessions:
            age = max(now - s.ended, 0.0)
            rate = record.rate(s.tenant, s.work, s.last_gap, age, min_own)
            if s.hint > age:
                rate = max(rate, 1 / max(s.hint, 1.0))
            value = rate * s.saved() / max(s.blocks(), 1)
            expected.append(1e12 / (1 + s.begun) if s.waits else -1.0 if s.over else value)
        found = policy.values(view_of(sessions, now))
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-15), seed
        learned += len(record.gaps) > 64
    assert learned > 20


@pytest.mark.seeds
def test_the_clairvoyant_policy_values_what_saves_the_most_prefill_per_block_and_second_until_it_is_used():
    for seed in range(num_cases(1000, 10_000)):
        sessions, now = sessions_of(np.random.default_rng([seed, 84]))
        expected = []
        for s in sessions:
            left = s.hint - max(now - s.ended, 0.0)
            value = s.saved() / max(s.blocks(), 1) / max(left, 0.1) if 1e-6 < left < math.inf else 0.0
            expected.append(1e12 / (1 + s.begun) if s.waits else -1.0 if s.over else value)
        found = ClairvoyantRetention().values(view_of(sessions, now))
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-15), seed


def test_a_rate_is_learned_again_after_32_gaps():
    policy = KnapsackRetention(min_own=64)
    view = view_of([Session(9.0, 0, 0, 0, 3.0, 0, 1, False, False, False, (10, 0), (0, 0))], 10.0)
    before = policy.values(view).tolist()
    for num in range(1, 64):
        policy.gaps.add(0, 1, 3.0, 1.5)
        assert (policy.values(view).tolist() != before) == (num == 32), num
        before = policy.values(view).tolist()

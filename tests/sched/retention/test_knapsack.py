"""The return index against brute force, and the competition for the pool against a loop."""

import dataclasses
import math

import numpy as np
import pytest

from apt_jax.core.kinds import CacheKindSpec
from apt_jax.costs.model import StepCosts
from apt_jax.sched.request_table import RequestTable
from apt_jax.sched.retention.gaps import GapRecord, return_index
from apt_jax.sched.retention.knapsack import ClairvoyantRetention, KnapsackRetention
from apt_jax.sched.retention.sessions import PERSON, TOOL, SessionTable
from apt_jax.sched.retention.view import RetentionView
from apt_jax.sched.view import SchedulerView
from tests.support.cases import num_cases

KINDS_OF_KV = (
    CacheKindSpec(name="kv", blocks_per_group=2),
    CacheKindSpec(name="hidden", blocks_per_group=1, offered=False),
)
COSTS = StepCosts(prefill_per_token_s=2e-5, prefill_per_pair_s=4e-10)


def index_by_definition(gaps: list[float], age: float) -> float:
    """max over T of P(gap <= T) / E[min(gap, T) - age], given that the gap is longer than the age."""
    left = [gap for gap in gaps if gap > age]
    best = 0.0
    for until in {gap for gap in left if math.isfinite(gap)}:
        came = sum(gap <= until for gap in left)
        waited = sum(min(gap, until) - age for gap in left)
        best = max(best, came / max(waited, 0.5 * len(left)))
    return best


def test_the_return_index_is_its_definition():
    for seed in range(num_cases(100, 1000)):
        rng = np.random.default_rng([seed, 5])
        gaps = rng.choice([rng.exponential(9.0, 30), rng.lognormal(2, 2, 30), rng.integers(0, 5, 30)], 1)[0]
        gaps = np.where(rng.random(30) < 0.1, np.inf, gaps.astype(float))[: int(rng.integers(1, 31))]
        ages = rng.exponential(10, 5)
        found = return_index(gaps, ages)
        assert found == pytest.approx([index_by_definition(gaps.tolist(), age) for age in ages.tolist()]), seed


def test_a_long_absence_of_a_tool_tells_that_the_session_stays_away():
    index = return_index(np.array([2.0, 3.0, 4.0, 5.0, 600.0]), np.array([0.0, 3.5, 10.0]))
    assert index[0] > index[2]
    assert index[1] > index[2]


def test_a_record_learns_by_kind_of_work_by_tenant_and_by_the_gap_before():
    record = GapRecord(min_own=8)
    ages, before = np.full(4, 20.0), np.full(4, 5.0)
    tenants, works = np.array([1, 1, 2, 2], np.int32), np.array([TOOL, PERSON, TOOL, PERSON], np.int8)
    prior = record.index(tenants, works, before, ages)
    assert prior[0] > prior[1]  # tools come back sooner
    assert prior[0] == prior[2]
    for _ in range(300):
        record.add(1, TOOL, 5.0, 21.0)
        record.add(2, TOOL, 5.0, math.inf)
        record.add(1, TOOL, 2000.0, 2000.0)
    learned = record.index(tenants, works, before, ages)
    assert learned[0] > 3 * learned[2]
    assert learned[1] == prior[1]
    assert record.index(tenants, works, np.full(4, 1500.0), ages)[0] < learned[0] / 3
    assert len(record._gaps) <= 10


def state(rng: np.random.Generator) -> tuple[RetentionView, SchedulerView]:
    """Sessions and waiting requests at random."""
    sessions, table = SessionTable(), RequestTable()
    num = int(rng.integers(1, 12))
    rows = np.array([sessions.add() for _ in range(num)], np.int32)
    sessions.device_groups[rows, 0] = rng.integers(0, 200, num)
    sessions.host_groups[rows, 0] = rng.integers(0, 50, num) * (rng.random() < 0.5)
    sessions.ended_s[rows] = rng.uniform(0, 100, num)
    sessions.begun_s[rows] = rng.uniform(0, 10, num)
    sessions.work[rows] = rng.integers(0, 3, num)
    sessions.is_over[rows] = rng.random(num) < 0.1
    view = RetentionView(
        now_s=100.0, sessions=sessions, rows=rows, awaited=(waits := rng.random(num) < 0.2), waits=waits, costs=COSTS,
        block_sizes=(16, 16), blocks_per_group=(2, 1), has_host=True, free_host_blocks=int(rng.integers(0, 2) * 60),
    )  # fmt: skip
    waiting = [
        table.add(
            arrival_s=float(rng.uniform(50, 100)), rank=i, prompt_len=int(rng.integers(1, 3000)), max_tokens=5,
            slo_ttft_s=float(rng.choice([1.0, 10.0, math.inf])), slo_tbt_s=1.0,
        )
        for i in range(int(rng.integers(0, 9)))
    ]  # fmt: skip
    idle = int(view.device_blocks.sum())
    scheduler = SchedulerView(
        now_s=100.0, table=table, waiting=np.array(waiting, np.int32), running=np.zeros(0, np.int32),
        free_blocks=idle + int(rng.integers(0, 300)), total_blocks=4000, block_size=16,
        kinds=KINDS_OF_KV,
        max_num_seqs=int(rng.integers(1, 12)), max_num_batched_tokens=512,
    )  # fmt: skip
    return view, scheduler


def kept_by_a_loop(policy: KnapsackRetention, view: RetentionView, scheduler: SchedulerView) -> list[int]:
    """Lose one session after the other, as long as its blocks are worth less than what the rest of the queue pays."""
    density = policy.values(view)
    order = np.argsort(density, kind="stable").tolist()
    table = scheduler.table
    queue = scheduler.waiting.tolist()[: max(scheduler.max_num_seqs, 0)]
    idle = int(view.device_blocks.sum())
    given_up, todo = view.free_host_blocks, list(order)
    while todo:
        left = scheduler.free_blocks - idle + min(given_up, idle)
        lacking, weight, fits = 0, 0.0, True
        for row in queue:
            need = 2 * math.ceil(int(table.num_tokens[row]) / 16)
            fits = fits and need <= left
            if fits:
                left -= need
            else:
                lacking += need
                weight += 1.0 + (100.0 - float(table.arrival_s[row])) / float(table.slo_ttft_s[row])
        price = weight / lacking if lacking else 0.0
        if density[todo[0]] >= price:
            break
        one = todo.pop(0)
        given_up += int(view.device_blocks[one] + view.host_blocks[one])
    if not todo and queue:
        given_up = idle
    kept, passed = [], 0
    for i in order:
        passed += int(view.device_blocks[i])
        if view.device_blocks[i] and (passed > given_up or not queue):
            kept.append(int(view.rows[i]))
    return kept


def test_sessions_and_waiting_requests_compete_as_a_loop_says():
    sizes = set()
    for seed in range(num_cases(300, 2000)):
        view, scheduler = state(np.random.default_rng([seed, 6]))
        policy = KnapsackRetention(keeps=True)
        kept = policy.kept(view, scheduler).tolist()
        assert kept == kept_by_a_loop(policy, view, scheduler), seed
        sizes.add((len(kept) == 0, len(kept) == int((view.device_blocks > 0).sum())))
    assert len(sizes) >= 3  # nothing, something and everything is kept


def test_a_session_that_the_client_has_ended_goes_first_and_one_whose_call_waits_last():
    view, _ = state(np.random.default_rng(1))
    sessions, rows = view.sessions, view.rows
    sessions.is_over[rows] = False
    sessions.is_over[rows[0]] = True
    awaited = np.zeros(rows.size, np.bool_)
    awaited[-1] = True
    values = KnapsackRetention().values(dataclasses.replace(view, awaited=awaited, waits=awaited))
    assert values.argmin() == 0
    assert values.argmax() == rows.size - 1


def test_the_clairvoyant_policy_drops_those_who_come_last_or_never():
    sessions = SessionTable()
    rows = np.array([sessions.add() for _ in range(4)], np.int32)
    sessions.device_groups[rows, 0] = 10
    sessions.hint_s[rows] = [50.0, math.inf, 5.0, 0.5]
    view = RetentionView(
        now_s=1.0, sessions=sessions, rows=rows, awaited=np.zeros(4, np.bool_), waits=np.zeros(4, np.bool_), costs=COSTS,
        block_sizes=(16, 16), blocks_per_group=(2, 1),
    )  # fmt: skip
    values = ClairvoyantRetention().values(view)
    assert values[2] > values[0] > values[1] == values[3] == 0


def test_what_one_tenant_does_is_the_last_thing_that_another_learns_from():
    record = GapRecord(min_own=8)
    for _ in range(10):
        record.add(1, TOOL, 5.0, 6.0)
    ages, before = np.full(1, 3.0), np.full(1, 300.0)
    own = record.index(np.array([1], np.int32), np.array([TOOL], np.int8), before, ages)
    for _ in range(300):
        record.add(2, TOOL, 300.0, math.inf)
    assert record.index(np.array([1], np.int32), np.array([TOOL], np.int8), before, ages) == own

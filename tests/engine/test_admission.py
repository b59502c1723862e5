"""Admission: queue limits, shares of tenants, SLOs by the cost model; alone and in an engine on virtual time."""

import dataclasses
import logging
import math
from typing import Any

import numpy as np
import pytest

from apt_jax.config import SLO, CacheConfig, SchedulerConfig
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.core.step import StepBatch
from apt_jax.costs.model import StepCosts
from apt_jax.engine import Engine
from apt_jax.engine.admission import TENANT_SHARE, Admission, AdmissionDemand, PendingArrivals, Queue, QueueSnapshot
from apt_jax.errors import ConfigError, InvalidRequestError, QueueFullError
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import make_policy
from apt_jax.utils.clock import VirtualClock
from tests.support.cases import num_cases
from tests.support.fake_executor import FakeExecutor

COSTS = StepCosts(
    prefill_base_s=0.01, prefill_per_token_s=1e-3, prefill_per_request_s=2e-3,
    decode_base_s=0.01, decode_per_request_s=1e-3,
)  # fmt: skip
EMPTY = Queue(
    num_waiting=0, waiting_tokens=0, num_of_tenant=0, uncached_tokens=0, uncached_requests=0,
    missing_blocks=0, missing_slots=0, blocks_per_s=0.0, requests_per_s=0.0,
)  # fmt: skip


def check(
    config: dict[str, Any],
    *,
    prompt_len: int = 10,
    ttft_s: float = math.inf,
    tenant: str | None = None,
    now_s: float = 0.0,
    admission: Admission | None = None,
    **queue: Any,
) -> None:
    (admission or Admission(SchedulerConfig(**config))).check(
        prompt_len=prompt_len,
        own_tokens=prompt_len,
        ttft_s=ttft_s,
        tenant=tenant,
        queue=dataclasses.replace(EMPTY, **queue),
        costs=COSTS,
        now_s=now_s,
    )


def demand(num_tokens: int, blocks: int, tenant: str | None, *, best_effort: bool = False) -> AdmissionDemand:
    return AdmissionDemand(
        prompt_len=num_tokens, uncached_tokens=num_tokens, num_blocks=blocks, best_effort=best_effort, tenant=tenant
    )


class TestEarlyReject:
    """A request that is rejected while a step runs would also be rejected after it."""

    def test_it_rejects_nothing_that_the_check_admits(self):
        rng = np.random.default_rng(0)
        refused = 0
        for _ in range(2000):
            config = {
                "max_num_queued_reqs": int(rng.integers(1, 20)),
                "max_num_queued_tokens": int(rng.integers(1, 400)),
                "slo_admission": "on",
            }
            queue = {
                "num_waiting": int(rng.integers(0, 22)), "waiting_tokens": int(rng.integers(0, 400)),
                "num_of_tenant": int(rng.integers(0, 20)), "uncached_tokens": int(rng.integers(0, 400)),
                "uncached_requests": int(rng.integers(0, 20)), "missing_blocks": int(rng.integers(-20, 20)),
                "missing_slots": int(rng.integers(-8, 8)), "blocks_per_s": float(rng.integers(0, 20)), "requests_per_s": float(rng.integers(0, 5)),
            }  # fmt: skip
            ttft_s, blocks, prompt_len = float(rng.uniform(0.05, 2)), int(rng.integers(0, 4)), int(rng.integers(1, 30))
            before = {**queue, "missing_blocks": queue["missing_blocks"] - blocks}
            one = Queue(**before)
            snapshot = QueueSnapshot(
                queues=(one, one), of_tenants={"a": queue["num_of_tenant"]}, costs=COSTS, margin_s=0.0
            )
            error = Admission(SchedulerConfig(**config)).early_reject(
                snapshot, PendingArrivals(), demand(prompt_len, blocks, "a"), ttft_s
            )
            if error is None:
                continue
            refused += 1
            with pytest.raises((QueueFullError, InvalidRequestError)):
                check(config, ttft_s=ttft_s, tenant="a", prompt_len=prompt_len, **queue)
        assert 200 < refused < 1900

    def test_requests_that_arrived_since_the_snapshot_count_as_waiting(self):
        admission = Admission(SchedulerConfig(max_num_queued_reqs=16))
        snapshot = QueueSnapshot(queues=(EMPTY, EMPTY), of_tenants={}, costs=COSTS, margin_s=0.0)
        coming = PendingArrivals()

        def refused(tenant: str | None = None) -> bool:
            return admission.early_reject(snapshot, coming, demand(5, 1, tenant), math.inf) is not None

        taken = 0
        while not refused("a"):
            coming.add(demand(5, 1, "a"))
            taken += 1
        assert taken == 15  # its share of the queue
        assert not refused("b")
        coming.add(demand(5, 1, None, best_effort=True))
        assert refused("b")
        assert coming.num_before == [15, 16]


class TestCounts:
    def test_the_hint_is_when_a_place_is_free(self):
        check({"max_num_queued_reqs": 4}, num_waiting=3)
        with pytest.raises(QueueFullError, match="--max-num-queued-reqs 4") as caught:
            check({"max_num_queued_reqs": 4}, num_waiting=4, requests_per_s=2.0)
        assert caught.value.retry_after_s == pytest.approx(0.5)
        with pytest.raises(QueueFullError) as caught:
            check({"max_num_queued_reqs": 4}, num_waiting=4, requests_per_s=1e-9)
        assert caught.value.retry_after_s == 60.0

    def test_the_hint_is_when_the_tokens_beyond_the_limit_are_computed(self):
        config: dict[str, Any] = {"max_num_queued_tokens": 1000, "max_num_batched_tokens": 512}
        check(config, prompt_len=100, waiting_tokens=900)
        with pytest.raises(QueueFullError, match="--max-num-queued-tokens 1000") as caught:
            check(config, prompt_len=400, waiting_tokens=900)
        assert caught.value.retry_after_s == pytest.approx(0.01 + 0.002 + 0.3)

    def test_an_empty_queue_takes_a_prompt_longer_than_its_limit(self):
        check({"max_num_queued_tokens": 10}, prompt_len=400)


class TestTenants:
    def test_Q3_one_alone_gets_nearly_all_and_leaves_room(self):
        waiting = 909
        for num in range(waiting + 1):
            check({}, tenant="a", num_waiting=num, num_of_tenant=num)
        waiting += 2
        with pytest.raises(
            QueueFullError,
            match="the queue already holds 911 requests from this API key, which is the key's full share",
        ):
            check({}, tenant="a", num_waiting=waiting, num_of_tenant=waiting)
        check({}, tenant="b", num_waiting=waiting, num_of_tenant=0)

    @pytest.mark.parametrize("count", [2, 5])
    def test_Q3_those_who_ask_for_more_get_the_same(self, count):
        held = dict.fromkeys((f"t{i}" for i in range(count)), 0)
        held["t0"] = 700  # came first; then all ask, and what waits is served in turn
        rng = np.random.default_rng(0)
        for step in range(6000):
            for name in held:
                try:
                    check({}, tenant=name, num_waiting=sum(held.values()), num_of_tenant=held[name])
                    held[name] += 1
                except QueueFullError:
                    pass
            served = rng.choice(list(held), p=np.array(list(held.values())) / sum(held.values()))
            held[served] -= 1
            assert sum(held.values()) <= 1024, step
        share = 1024 * TENANT_SHARE / (1 + count * TENANT_SHARE)
        for name, num in held.items():
            assert num == pytest.approx(share, rel=0.05), name

    def test_nobody_in_particular_has_no_share(self):
        check({}, tenant=None, num_waiting=1023, num_of_tenant=0)


class TestObjectives:
    def test_off_lets_everything_in(self):
        check({}, ttft_s=1e-6, uncached_tokens=10**6, uncached_requests=10)

    def test_on_refuses_until_the_queue_is_short_enough(self):
        config: dict[str, Any] = {"slo_admission": "on", "max_num_batched_tokens": 500}
        queue: dict[str, Any] = {"uncached_tokens": 1000, "uncached_requests": 4}
        expected_s = (2 * 0.01 + 4 * 0.002 + 1.0) + (0.01 + 0.002 + 0.1)
        check(config, prompt_len=100, ttft_s=expected_s + 1e-9, **queue)
        with pytest.raises(QueueFullError, match=r"within 500 ms is out of reach now: about 1140 ms") as caught:
            check(config, prompt_len=100, ttft_s=0.5, **queue)
        assert caught.value.retry_after_s == pytest.approx(expected_s - 0.5)

    def test_memory_counts_where_it_is_short(self):
        config: dict[str, Any] = {"slo_admission": "on"}
        with pytest.raises(QueueFullError, match="about 5022 ms") as caught:
            check(config, ttft_s=1.0, missing_blocks=50, blocks_per_s=10.0)
        assert caught.value.retry_after_s == pytest.approx(4.022)
        check(config, ttft_s=1.0, missing_blocks=50, blocks_per_s=0.0)  # nothing is known

    def test_slots_count_where_they_are_short(self):
        config: dict[str, Any] = {"slo_admission": "on"}
        with pytest.raises(QueueFullError, match="about 4022 ms"):
            check(config, ttft_s=1.0, missing_slots=8, requests_per_s=2.0)
        check(config, ttft_s=1.0, missing_slots=8, requests_per_s=0.0)

    def test_what_is_out_of_reach_alone_is_the_requests_own_fault(self):
        with pytest.raises(InvalidRequestError, match=r"2000 prompt tokens alone take about 2048 ms") as caught:
            check({"slo_admission": "on"}, prompt_len=2000, ttft_s=0.5)
        assert caught.value.field == "slo.ttft_ms"

    def test_it_learns_how_late_the_model_was_and_forgets(self):
        admission = Admission(SchedulerConfig(slo_admission="on"))
        queue: dict[str, Any] = {"uncached_tokens": 100, "uncached_requests": 1}
        for i in range(20):
            admission.learn(0.1, 0.1 + 0.02 * i, now_s=i)  # nine in ten at most 0.36 s late
        for ttft_s, lets_in in ((0.5, True), (0.49, False)):
            try:
                check({}, admission=admission, ttft_s=ttft_s, now_s=20.0, **queue)
                assert lets_in
            except QueueFullError:
                assert not lets_in
        check({}, admission=admission, ttft_s=0.05, now_s=20.0)  # nobody is before it
        check({}, admission=admission, ttft_s=0.15, now_s=60.0, **queue)

    def test_warn_admits_counts_and_logs_at_a_limited_rate(self, caplog):
        admission = Admission(SchedulerConfig(slo_admission="warn"))
        with caplog.at_level(logging.WARNING):
            for now_s in (0.0, 1.0, 2.0, 11.0):
                check({}, admission=admission, ttft_s=0.001, now_s=now_s)
        assert admission.num_slo_at_risk_admitted == 4
        assert len(caplog.records) == 2
        assert "within 1 ms is requested, but about 22 ms" in caplog.text

    @pytest.mark.parametrize(
        ("field", "value"), [("slo_admission", "maybe"), ("max_queue_s", 0.0), ("max_queue_s", math.inf)]
    )
    def test_settings_are_checked(self, field, value):
        with pytest.raises(ConfigError, match=field):
            SchedulerConfig(**{field: value})


def overload(slo_admission: str, rate: float, *, seconds: float = 120.0) -> dict[str, float]:
    """Poisson arrivals on virtual time, steps that take what `COSTS` says, first come, first served."""
    clock = VirtualClock()

    def duration_s(batch: StepBatch) -> float:
        return COSTS.step_s(batch.num_tokens, batch.start, batch.kind)

    executor = FakeExecutor(
        num_blocks=4096, block_size=16, max_num_seqs=32, vocab_size=97, clock=clock, duration_s=duration_s
    )  # fmt: skip
    config = SchedulerConfig(
        policy="fcfs", max_num_seqs=32, max_num_batched_tokens=256, slo_admission=slo_admission  # type: ignore[arg-type]
    )  # fmt: skip
    kinds = (
        CacheKindSpec(name="kv", blocks_per_group=2),
        CacheKindSpec(name="hidden", blocks_per_group=1, offered=False),
    )
    engine = Engine(
        executor, make_policy(config=config), clock, kinds, config,
        CacheConfig(block_size=16, enable_prefix_caching=False), costs=COSTS, vocab_size=97,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    slo = SLO(ttft_s=1.0)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, seed=0)
    hints, ttft, accepted, i = [], [], 0, 0
    while i < len(arrivals) or engine.has_work:
        if not engine.has_work:
            clock.advance_to(max(clock.now_s(), float(arrivals[i])))
        while i < len(arrivals) and arrivals[i] <= clock.now_s():
            ids = rng.integers(0, 97, int(rng.integers(16, 128))).astype(np.int32)
            try:
                engine.add_request(
                    EngineRequest(
                        request_id=str(i), prompt=None, prompt_token_ids=ids, params=params, slo=slo,
                        arrival_s=float(arrivals[i]),
                    )
                )  # fmt: skip
                accepted += 1
            except QueueFullError as error:
                hints.append(error.retry_after_s)
            i += 1
        for output in engine.step():
            if output.finished:
                ttft.append(output.metrics.ttft_s)
    assert len(ttft) == accepted
    return {
        "accepted": accepted / len(arrivals),
        "attained": float(np.mean(np.array(ttft) <= slo.ttft_s)),
        "per_s": accepted / clock.now_s(),
        "hint": float(np.median(hints)) if hints else 0.0,
    }


def test_a_request_counts_the_same_in_the_queue_as_on_its_way_there():
    """With both kinds on offer: the policy may give each the kind that takes fewer blocks."""
    clock = VirtualClock()
    executor = FakeExecutor(num_blocks=256, block_size=4, max_num_seqs=4, vocab_size=97, clock=clock)
    config = SchedulerConfig(policy="fcfs-hybrid", max_num_seqs=4, max_num_batched_tokens=64)
    kinds = (CacheKindSpec(name="kv", blocks_per_group=2), CacheKindSpec(name="hidden", blocks_per_group=1))
    engine = Engine(
        executor, make_policy(config=config), clock, kinds, config, CacheConfig(block_size=4),
        costs=COSTS, vocab_size=97,
    )  # fmt: skip
    before, pending = engine.queue_snapshot(), PendingArrivals()
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, seed=0)
    for i in range(3):
        ids = np.arange(64, dtype=np.int32) + i
        engine.add_request(
            EngineRequest(request_id=str(i), prompt=None, prompt_token_ids=ids, params=params, slo=SLO(), arrival_s=0.0)
        )
        pending.add(demand(64, engine.min_blocks_for(64), None))
    expected = before.queue_before(pending, blocks=16, best_effort=False, tenant=None)
    queue = engine.queue_snapshot().queue_before(PendingArrivals(), blocks=16, best_effort=False, tenant=None)
    assert queue.missing_blocks == expected.missing_blocks == 4 * 16 - 256


def test_what_is_cached_of_a_prompt_takes_no_time():
    clock = VirtualClock()
    executor = FakeExecutor(num_blocks=256, block_size=4, max_num_seqs=4, vocab_size=97, clock=clock)
    config = SchedulerConfig(policy="fcfs", max_num_seqs=4, max_num_batched_tokens=64, slo_admission="on")
    kinds = (CacheKindSpec(name="kv", blocks_per_group=2), CacheKindSpec(name="hidden", blocks_per_group=1))
    engine = Engine(
        executor, make_policy(config=config), clock, kinds, config, CacheConfig(block_size=4),
        costs=COSTS, vocab_size=97,
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(0, 97, 101).astype(np.int32)

    def ask(name: str, ttft_s: float) -> None:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, seed=0)
        slo = SLO(ttft_s=ttft_s)
        engine.add_request(
            EngineRequest(request_id=name, prompt=None, prompt_token_ids=ids, params=params, slo=slo, arrival_s=clock.now_s())
        )  # fmt: skip
        while engine.has_work:
            engine.step()

    with pytest.raises(InvalidRequestError, match="101 prompt tokens"):
        ask("first", 0.05)
    ask("warm", math.inf)
    ask("second", 0.05)
    with pytest.raises(InvalidRequestError, match="1 prompt tokens"):
        ask("third", 0.001)


@pytest.mark.seeds
def test_Q1_under_ten_times_overload_admitted_requests_keep_their_slo():
    # What the machine can do at most, about: 1 / (72 tokens and 16 decode rows of a full batch).
    fits = overload("on", 4.0, seconds=num_cases(30, 120))
    assert fits["accepted"] > 0.99
    seconds = num_cases(12, 30)
    without, refused = overload("off", 80.0, seconds=seconds), overload("on", 80.0, seconds=seconds)
    assert without["attained"] < 0.2
    assert refused["attained"] > 0.8, refused
    assert refused["per_s"] > 0.8 * without["per_s"]  # the machine is as busy
    assert 0.0 < refused["hint"] < 5.0

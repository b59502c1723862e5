"""Replicas: what each does is what it would do alone, and routers choose by what is known at that moment."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apt_jax.config import SLO, CacheConfig, SchedulerConfig
from apt_jax.costs.model import StepCosts
from apt_jax.engine import Engine
from apt_jax.engine.admission import Admission, AdmissionDemand, PendingArrivals, Queue, QueueSnapshot
from apt_jax.errors import ConfigError
from apt_jax.request import EngineRequest, RequestMetrics, SamplingParams
from apt_jax.sched import all_policies, make_policy
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.executor import SimulatedExecutor
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.routing import ROUTING_POLICIES, ReplicaState, expected_ttft_s
from apt_jax.sim.simulator import simulate
from apt_jax.sim.trace import draw_arrivals
from apt_jax.sim.workload import Workload
from apt_jax.utils.clock import VirtualClock
from tests.support.cases import ALL, num_cases

BUSY = SimulationConfig(num_blocks=200)
"""Room for three or four of the requests of `bursts`."""


def bursts(n: int) -> Workload:
    rng = np.random.default_rng(4)
    objectives = SLO(ttft_s=0.5, tbt_s=0.5), SLO(ttft_s=5.0, tbt_s=1.0)
    return Workload(
        prompt_tokens=np.clip(rng.lognormal(5.5, 1.0, n), 1, 1500).astype(np.int32),
        output_tokens=np.clip(rng.lognormal(2.0, 1.0, n), 1, 60).astype(np.int32),
        arrival_s=draw_arrivals(n, 30.0, 4.0, rng),
        best_effort=rng.random(n) < 0.1,
        slos=[objectives[i] for i in rng.integers(0, 2, n)],
    )


def part_of(workload: Workload, index: np.ndarray) -> Workload:
    return Workload(
        prompt_tokens=workload.prompt_tokens[index],
        output_tokens=workload.output_tokens[index],
        arrival_s=workload.arrival_s[index],
        best_effort=workload.best_effort[index],
        slos=None if workload.slos is None else [workload.slos[i] for i in index],
    )


def served_alone(config: SimulationConfig, workload: Workload) -> list[RequestMetrics | None]:
    """Run one engine in a plain loop: add the requests that have arrived, then run a step."""
    hardware, clock = load_hardware(config.model, config.hardware), VirtualClock()
    costs = hardware.step_costs(config.hidden_attention)
    scheduler = SchedulerConfig(
        policy=config.policy, max_num_seqs=256, max_num_batched_tokens=2048, max_num_queued_reqs=1000, overlap=False
    )
    executor = SimulatedExecutor(
        clock, lambda b: costs.step_s(b.num_tokens, b.start, b.kind),
        num_blocks=config.num_blocks or hardware.num_blocks, block_size=16, max_num_seqs=256,
    )  # fmt: skip
    engine = Engine(
        executor, make_policy(config=scheduler, seed=config.seed), clock, hardware.kinds(config.cache, config.hidden_attention),
        scheduler, CacheConfig(mode=config.cache, enable_prefix_caching=False), costs=costs,
    )  # fmt: skip
    n = workload.arrival_s.size
    found: list[RequestMetrics | None] = [None] * n
    sent = ended = 0
    while ended < n:
        if not engine.has_work:
            clock.advance_to(float(workload.arrival_s[sent]))
        now_s = clock.now_s()
        while sent < n and workload.arrival_s[sent] <= now_s:
            engine.add_request(
                EngineRequest(
                    request_id=str(sent), prompt=None, prompt_token_ids=np.zeros(workload.prompt_tokens[sent], np.int32),
                    params=SamplingParams(max_tokens=int(workload.output_tokens[sent]), temperature=0.0),
                    slo=workload.slo(sent, config.slo), arrival_s=float(workload.arrival_s[sent]),
                    slo_class="be" if workload.best_effort[sent] else "rt",
                )
            )  # fmt: skip
            sent += 1
        steps = executor.num_steps
        outputs = engine.step()
        for output in outputs:
            if output.finished:
                found[int(output.request_id)] = output.metrics
                ended += 1
        if executor.num_steps == steps and not outputs and engine.has_work:
            next_s = float(workload.arrival_s[sent]) if sent < n else math.inf
            clock.advance_to(min(next_s, now_s + 0.01))
    return found


@pytest.mark.in_turn(12)
@pytest.mark.seeds
@pytest.mark.parametrize("policy", sorted(all_policies()))
def test_one_replica_is_the_engine_alone(policy):
    """In `make test` with one router for each policy, in turn."""
    config, workload = dataclasses.replace(BUSY, policy=policy), bursts(25)
    alone = served_alone(config, workload)
    routers, turn = list(ROUTING_POLICIES), sorted(all_policies()).index(policy)
    for routing in routers if ALL else [routers[turn % len(routers)]]:
        result = simulate(dataclasses.replace(config, routing_policy=routing), workload=workload)
        assert result.requests == alone
        assert not result.routed_to.any()


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("routing", sorted(ROUTING_POLICIES))
@pytest.mark.parametrize("policy", ["fcfs", "apt", "apt-plus"])
def test_each_replica_does_what_it_would_do_alone(policy, routing):
    config = dataclasses.replace(BUSY, policy=policy, replicas=3, routing_policy=routing)
    workload = bursts(45)
    result = simulate(config, workload=workload, debug=True)
    assert result.summary.num_completed == 45
    for index, replica in enumerate(result.replicas):
        sent_there = np.flatnonzero(result.routed_to == index)
        assert replica.num_sent == sent_there.size > 5
        alone = served_alone(config, part_of(workload, sent_there))
        assert [result.requests[i] for i in sent_there] == alone
    again = simulate(config, workload=workload)
    assert again.requests == result.requests
    assert again.routed_to.tolist() == result.routed_to.tolist()


@pytest.mark.seeds
@settings(max_examples=num_cases(10, 20), deadline=None)
@given(st.data())
def test_every_request_is_served_once_whatever_comes_when(data):
    n = data.draw(st.integers(1, 12))
    lengths = st.tuples(st.integers(1, 600), st.integers(1, 12))
    pairs = data.draw(st.lists(lengths, min_size=n, max_size=n))
    gaps = data.draw(st.lists(st.sampled_from([0.0, 0.0, 1e-4, 0.03, 0.2, 5.0]), min_size=n, max_size=n))
    prompt, output = np.array(pairs, np.int32).T
    workload = Workload(
        prompt_tokens=prompt,
        output_tokens=output,
        arrival_s=np.cumsum(gaps),
        best_effort=np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))),
    )
    config = SimulationConfig(
        policy=data.draw(st.sampled_from(["fcfs", "apt", "bros"])),
        replicas=data.draw(st.integers(1, 4)),
        routing_policy=data.draw(st.sampled_from(sorted(ROUTING_POLICIES))),
        num_blocks=90,
    )
    result = simulate(config, workload=workload, debug=True)
    assert [len(m.token_times_s) for m in result.requests if m is not None] == output.tolist()
    assert sum(replica.num_sent for replica in result.replicas) == n
    for index in range(config.replicas):
        sent_there = np.flatnonzero(result.routed_to == index)
        if sent_there.size:
            alone = served_alone(config, part_of(workload, sent_there))
            assert [result.requests[i] for i in sent_there] == alone


def test_no_router_looks_ahead():
    """Routing does not depend on later requests or on output lengths."""
    config, workload = dataclasses.replace(BUSY, replicas=3), bursts(36)
    cut = part_of(workload, np.arange(24))
    for routing in ROUTING_POLICIES:
        config = dataclasses.replace(config, routing_policy=routing)
        whole = simulate(config, workload=workload).routed_to
        assert simulate(config, workload=cut).routed_to.tolist() == whole[:24].tolist()
    # While the first steps run nobody knows whether they end two requests or none.
    for routing in ROUTING_POLICIES:
        config = dataclasses.replace(config, routing_policy=routing, policy="fcfs")
        routes = []
        for output in (1, 20):
            lengths = np.array([output] * 2 + [20] * 6, np.int32)
            at_once = Workload(
                prompt_tokens=np.full(8, 900, np.int32), output_tokens=lengths,
                arrival_s=np.array([0, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007]), best_effort=np.zeros(8, np.bool_),
            )  # fmt: skip
            routes.append(simulate(config, workload=at_once).routed_to.tolist())
        assert routes[0] == routes[1]


# --- routers ------------------------------------------------------------------------------------------------------

COSTS = StepCosts(prefill_base_s=0.1, prefill_per_token_s=1e-3, decode_base_s=0.01)


def state(**fields: Any) -> ReplicaState:
    """An idle replica with 100 free blocks, but for what is said."""
    of_queue = {f.name: fields.pop(f.name) for f in dataclasses.fields(Queue) if f.name in fields}
    empty = dict.fromkeys((f.name for f in dataclasses.fields(Queue)), 0)
    queue = Queue(**{**empty, "missing_blocks": -100, "missing_slots": -8, **of_queue})
    given = {
        "admission": Admission(SchedulerConfig()), "pending": PendingArrivals(), "busy_s": 0.0, "num_running": 0, "num_blocks": 100,
        "free_blocks": 100, "queued_tokens": 0, "tokens_per_s": 0.0, "min_blocks_for": lambda n: -(-n // 16),
        "queue_snapshot": QueueSnapshot(queues=(queue, queue), of_tenants={}, costs=COSTS, margin_s=0.0),
    }  # fmt: skip
    return ReplicaState(**{**given, **fields})


def request(num_tokens: int = 200, ttft_s: float = 1.0) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt=None, prompt_token_ids=np.zeros(num_tokens, np.int32), params=SamplingParams(max_tokens=1),
        slo=SLO(ttft_s=ttft_s), arrival_s=0.0,
    )  # fmt: skip


def choose(policy: str, *states: ReplicaState, **of_request: Any) -> int:
    return ROUTING_POLICIES[policy]()(request(**of_request), states)


def test_round_robin_takes_turns():
    route = ROUTING_POLICIES["round_robin"]()
    assert [route(request(), [state()] * 3) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_load_is_the_gateways_score():
    assert choose("least_load", state(), state()) == 0  # of equals the first
    # (2048 + 1024) / 1000 = 3.1 s, and 4096 / 2000 = 2.0 s at the rate that is taken for one that is not known
    loaded = state(queued_tokens=2048, num_running=1, tokens_per_s=1000.0)
    assert choose("least_load", loaded, state(queued_tokens=4096)) == 1
    # 0.15 * 9 = 1.35 s for a pool of which nine tenths are used
    assert choose("least_load", state(free_blocks=10), state(queued_tokens=2600)) == 1
    assert choose("least_load", state(free_blocks=10), state(queued_tokens=2800)) == 0
    sent = PendingArrivals()
    sent.add(AdmissionDemand(prompt_len=300, uncached_tokens=300, num_blocks=19, best_effort=False, tenant=None))
    assert choose("least_load", state(pending=sent), state(queued_tokens=200)) == 1


def test_expected_ttft_is_the_running_step_the_queue_and_the_prompt():
    own_s = 0.1 + 200e-3
    assert expected_ttft_s(request(), state()) == pytest.approx(own_s)
    assert expected_ttft_s(request(), state(busy_s=0.25)) == pytest.approx(0.25 + own_s)
    waiting = {"uncached_tokens": 500, "uncached_requests": 2}
    assert expected_ttft_s(request(), state(**waiting)) == pytest.approx(0.6 + own_s)
    # 13 blocks of its own and 7 of others, which become free at 10 a second: later than the prompts before it
    full = state(**waiting, missing_blocks=7, blocks_per_s=10.0)
    assert expected_ttft_s(request(), full) == pytest.approx(2.0 + own_s)
    sent = PendingArrivals()
    sent.add(AdmissionDemand(prompt_len=300, uncached_tokens=300, num_blocks=19, best_effort=False, tenant=None))
    assert expected_ttft_s(request(), state(pending=sent)) == pytest.approx(0.4 + own_s)


def test_expected_slack_prefers_time_then_memory_then_the_first():
    slack = "expected_slack"
    assert choose(slack, state(), state()) == 0
    assert choose(slack, state(busy_s=0.2), state()) == 1
    # Within a twentieth of the objective: the one with more room.
    assert choose(slack, state(missing_blocks=-20), state(busy_s=0.04)) == 1
    assert choose(slack, state(missing_blocks=-20), state(busy_s=0.06)) == 0
    assert choose(slack, state(missing_blocks=-20), state(busy_s=0.06), ttft_s=2.0) == 1
    # Without an objective: the first token.
    assert choose(slack, state(missing_blocks=-20), state(busy_s=1e-6), ttft_s=math.inf) == 0


@pytest.mark.parametrize(
    ("fields", "flag"),
    [({"replicas": 0}, "--replicas"), ({"routing_policy": "leastload"}, "--routing-policy")],
)
def test_impossible_settings_name_the_flag(fields, flag):
    with pytest.raises(ConfigError, match=flag) as error:
        dataclasses.replace(BUSY, **fields)
    assert "\n" not in str(error.value)


def test_a_policy_object_serves_one_replica():
    with pytest.raises(ConfigError, match="one replica"):
        simulate(dataclasses.replace(BUSY, rate=1.0, replicas=2), policy=make_policy("fcfs"))

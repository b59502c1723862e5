"""Real-time and best-effort requests in the same blocks, and nobody can tell from the tokens."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from apt_jax.config import SLO
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import StepBatch
from apt_jax.engine.batch import SharedReserver
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched.view import Plan, SchedulerView
from tests.support.cases import num_cases
from tests.support.fake_executor import Fault, FaultKind
from tests.support.fake_serving import Served, prompt


def add(served: Served, length: int, max_tokens: int, *, best_effort: bool, seed: int) -> str:
    name = f"{'be' if best_effort else 'rt'}{len(served.requests)}"
    served.requests[name] = EngineRequest(
        request_id=name, prompt=None, prompt_token_ids=prompt(length, seed=seed),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0), slo=SLO(ttft_s=1.0, tbt_s=0.5),
        slo_class="be" if best_effort else "rt", arrival_s=served.clock.now_s(),
    )  # fmt: skip
    served.tokens[name] = []
    served.engine.add_request(served.requests[name])
    return name


def shared(
    num_blocks: int = 24, *, policy: str = "bros", offered=(True, False), num_host_blocks: int = 60, **others
) -> Served:
    return Served(
        policy,
        num_blocks=num_blocks,
        offered=offered,
        num_host_blocks=num_host_blocks,
        reserver=SharedReserver,
        **others,
    )


def chat_beside_batch(served: Served) -> None:
    """A best-effort request that fills the whole pool, and a chat that comes once it runs; both have ended."""
    batch = add(served, 40, 8, best_effort=True, seed=1)
    for _ in range(4):
        served.step()
    chat = add(served, 9, 20, best_effort=False, seed=2)
    served.drain()
    served.assert_as_expected()
    assert served.ended[chat] == served.ended[batch] == "length"


@pytest.mark.parametrize(("offered", "size"), [((True, False), 4), ((False, True), 4), ((False, True), 3)])
def test_a_chat_takes_slots_of_a_batch_and_both_end_as_alone(offered, size):
    served = shared(24 if offered[KV] else 48 // size, offered=offered, hidden_block_size=size)
    chat_beside_batch(served)
    host, halves = served.executor.host, 2 if offered[KV] else 1
    stats = served.engine.stats()
    assert host.num_saved_slots == halves * stats.saved_slots > 0
    assert host.num_loaded_slots == halves * stats.loaded_slots > 0
    assert stats.num_preemptions == 0
    blocks = host.num_saved_slots / size + host.num_saved
    assert stats.saved_bytes == round(blocks * host.block_bytes)


@pytest.mark.parametrize("offered", [(True, False), (False, True)])
def test_slots_whose_copies_are_lost_are_computed_again(offered):
    """Every copy in host memory differs from what was saved."""
    served = shared(24 if offered[KV] else 12, offered=offered, lost=lambda: True)
    chat_beside_batch(served)
    assert served.executor.host.num_saved_slots > served.executor.host.num_loaded_slots == 0


def everyone(view: SchedulerView) -> Plan:
    """Plan all requests with all that they lack, whether there are blocks or not."""
    rows = np.concatenate([view.running, view.waiting])
    kind = np.full(rows.size, HIDDEN, np.int8)
    return Plan(
        rows=rows, num_tokens=view.remaining(rows, kind), kind=kind, preempt=np.zeros(0, np.int32), iteration="mixed"
    )


def test_a_copy_into_the_very_group_that_was_found_keeps_its_end(monkeypatch):
    """A group of a real-time request, evicted for the best-effort one that begins as a copy of it."""
    served = shared(2, offered=(False, True), num_host_blocks=5)
    add(served, 4, 1, best_effort=False, seed=1)
    served.drain()
    add(served, 2, 3, best_effort=False, seed=2)
    served.step()  # it has the other group
    monkeypatch.setattr(served.engine._policies.policy, "schedule", everyone)
    again = add(served, 4, 1, best_effort=True, seed=1)
    served.drain()
    served.assert_as_expected()
    assert served.ended[again] == "length"
    assert served.engine.stats().prefix_cache_hits == 3


def test_a_prefix_that_does_not_help_is_given_back_to_those_before_it():
    """A request that runs gets a block that a later one has found cached and can do nothing with."""
    served = shared(5, offered=(False, True), num_host_blocks=5, overlap=False)
    add(served, 12, 1, best_effort=False, seed=1)
    served.drain()  # three groups of its prompt stay
    first = add(served, 8, 6, best_effort=False, seed=2)
    served.step()  # it has the other two, and they are full
    add(served, 17, 1, best_effort=False, seed=1)
    engine = served.engine
    batch, rows, requests = engine._builder.build(everyone(engine.view()))
    assert batch is not None
    assert [state.request.request_id for state in requests] == [first]
    assert rows.size == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_a_group_that_is_copied_whole_is_not_put_beside_that_of_another(overlap):
    """A best-effort request loses the last slots of its first group in a step in which it runs, and no group is free."""
    served = shared(6, block_size=8, overlap=overlap)
    add(served, 9, 6, best_effort=True, seed=2)
    add(served, 1, 12, best_effort=False, seed=1)
    served.step()
    add(served, 7, 5, best_effort=False, seed=3)
    served.drain()
    served.assert_as_expected()
    assert set(served.ended.values()) == {"length"}


def test_a_request_that_begins_with_a_copy_does_not_wait_for_a_group_of_another():
    """Its whole prompt is cached, and a best-effort request has all other blocks."""
    served = shared(12, overlap=False)
    add(served, 8, 1, best_effort=False, seed=1)
    served.drain()
    add(served, 20, 4, best_effort=True, seed=1)
    for _ in range(3):
        served.step()
    assert served.engine.cache.num_free == 0
    chat = add(served, 8, 3, best_effort=False, seed=1)
    served.step()
    served.step()
    assert served.tokens[chat]
    served.drain()
    served.assert_as_expected()


def test_what_a_request_has_just_found_is_not_taken_from_it(monkeypatch):
    """A plan in which a real-time request lacks a group and a best-effort one begins with groups of host memory."""
    served = shared(12, overlap=False, budget=64)
    add(served, 8, 1, best_effort=True, seed=1)
    served.drain()
    add(served, 23, 1, best_effort=False, seed=9)
    served.drain()
    add(served, 8, 4, best_effort=True, seed=3)
    served.step()
    chat = add(served, 12, 2, best_effort=False, seed=5)
    batch = add(served, 9, 2, best_effort=True, seed=1)
    states = served.engine.states
    rows = np.array([states.by_id[name].row for name in (chat, batch)], np.int32)
    assert served.engine.table.host_prefix_tokens[rows[1], KV] == 8

    def both(view: SchedulerView) -> Plan:
        kind = np.full(2, KV, np.int8)
        return Plan(
            rows=rows,
            num_tokens=view.remaining(rows, kind),
            kind=kind,
            preempt=np.zeros(0, np.int32),
            iteration="mixed",
        )

    with monkeypatch.context() as patch:
        patch.setattr(served.engine._policies.policy, "schedule", both)
        served.step()
    served.drain()
    served.assert_as_expected()


def longest_wait_s(policy: str, steps: int) -> float:
    """How long a best-effort request is without a token, while late chats come that would take all blocks."""
    served = shared(32, policy=policy, num_host_blocks=80, max_num_seqs=6, budget=24)
    batch = add(served, 12, 50, best_effort=True, seed=1)
    longest_s, last_s, num_tokens = 0.0, served.clock.now_s(), 0
    for i in range(steps):
        while sum(name.startswith("rt") for name in served.requests) - len(served.ended) < 4:
            add(served, 11, 6, best_effort=False, seed=100 + 10 * i + len(served.requests) % 10)
        served.step()
        if len(served.tokens[batch]) > num_tokens:
            num_tokens, last_s = len(served.tokens[batch]), served.clock.now_s()
        longest_s = max(longest_s, served.clock.now_s() - last_s)
    assert served.engine.stats().fallback_iterations == 0
    served.drain()
    served.assert_as_expected()
    return longest_s


def test_an_overdue_request_keeps_its_groups_among_real_time_ones():
    assert longest_wait_s("bros", 200) > 1.0
    assert longest_wait_s("bros?best_effort_wait=0.3&best_effort_tokens=4", 200) < 0.45


def _kinds_by_length(view: SchedulerView, rows: NDArray[np.int32]) -> NDArray[np.int8]:
    """The hidden kind for long requests; they grow, so that one that comes back may have had the other kind."""
    return np.where(view.table.num_tokens[rows] > 9, HIDDEN, KV).astype(np.int8)


@pytest.mark.seeds
@pytest.mark.parametrize("overlap", [True, False])
def test_random_requests_of_two_classes(overlap, monkeypatch):
    monkeypatch.setattr("apt_jax.sched.policies.bros.kinds_by_cost", _kinds_by_length)
    for seed in range(num_cases(40, 1000)):
        rng = np.random.default_rng([seed, 77])
        fails = set(rng.integers(2, 40, 1).tolist()) if seed % 5 == 0 else ()
        steps = itertools.count()

        def fault(_batch: StepBatch, steps=steps, fails=fails) -> Fault | None:
            return Fault(kind=FaultKind.RAISE_IN_RESULT) if next(steps) in fails else None

        kinds = [(True, False), (False, True), (True, True)][seed % 3]
        lost = None if seed % 4 else lambda rng=rng: bool(rng.random() < 0.1)
        policy = "bros" if seed % 2 else "bros?best_effort_wait=0.02&best_effort_tokens=2"
        if all(kinds):  # by a rule that gives both
            policy = "bros?kinds=by-cost"
        served = shared(
            int(rng.integers(12, 30)), policy=policy, offered=kinds, num_host_blocks=int(rng.integers(2, 60)), overlap=overlap,
            budget=int(rng.integers(8, 40)), lost=lost, fault=fault, hidden_block_size=(4, 3, 7)[seed // 3 % 3],
        )  # fmt: skip
        for i in range(int(rng.integers(3, 9))):
            length, tokens = int(rng.integers(1, 14)), int(rng.integers(1, 9))
            add(served, length, tokens, best_effort=bool(rng.random() < 0.6), seed=1000 * seed + i)
            for _ in range(int(rng.integers(0, 4))):
                served.step()
        try:
            served.drain()
            served.assert_as_expected()
        except Exception as error:
            error.add_note(f"{seed=}")
            raise

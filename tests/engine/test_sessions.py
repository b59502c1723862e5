"""Sessions in the engine: who loses cached blocks, who keeps them, and that no token depends on it."""

import itertools
import typing

import numpy as np
import pytest

from apt_jax.config import SLO, SessionOrder
from apt_jax.core.kinds import KV
from apt_jax.core.step import StepBatch
from apt_jax.engine import sessions as engine_sessions
from apt_jax.engine.sessions import Sessions
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched.retention.sessions import PERSON, TOOL
from tests.support.cases import num_cases
from tests.support.fake_executor import Fault, FaultKind
from tests.support.fake_serving import Served, prompt

ORDERS = typing.get_args(SessionOrder)
RETENTIONS = ("lru", "ttl?ttl_s=0.5", "ttl?ttl_s=0.5&pins=true", "cache-ttl", "progress-ttl?num_records=3", "knapsack", "knapsack?keeps=true")  # fmt: skip


def call(
    served: Served, tokens: np.ndarray, max_tokens: int = 3, *, session: str | None = None, tenant: str | None = None,
    work: typing.Literal["", "tool", "person"] = "", retain_s: float | None = None,
) -> str:  # fmt: skip
    name = f"c{len(served.requests)}"
    served.requests[name] = EngineRequest(
        request_id=name, prompt=None, prompt_token_ids=np.asarray(tokens, np.int32),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0), slo=SLO(), arrival_s=served.clock.now_s(),
        session_id=session, tenant=tenant, work=work, retain_s=retain_s,
    )  # fmt: skip
    served.tokens[name] = []
    served.engine.add_request(served.requests[name])
    return name


def after(served: Served, name: str, num_new: int, seed: int) -> np.ndarray:
    """The prompt of the call after this one: all of it, its answer, and something new."""
    return np.concatenate([served.requests[name].prompt_token_ids, served.tokens[name], prompt(num_new, seed=seed)])


def of(served: Served) -> Sessions:
    found = served.engine.states.sessions
    assert found is not None
    return found


def num_cached(served: Served, name: str) -> int:
    return served.cached[name]


@pytest.mark.seeds
@pytest.mark.parametrize("overlap", [True, False])
def test_random_sessions_get_the_tokens_that_they_get_alone(overlap):
    kept = 0
    for seed in range(num_cases(60, 2000)):
        rng = np.random.default_rng([seed, 39])
        fails = set(rng.integers(2, 60, 1).tolist()) if seed % 5 == 0 else ()
        steps = itertools.count()

        def fault(_batch: StepBatch, steps=steps, fails=fails) -> Fault | None:
            return Fault(kind=FaultKind.RAISE_IN_RESULT) if next(steps) in fails else None

        served = Served(
            ("fcfs", "vllm-v1", "apt-plus", "apt")[seed % 4],
            num_blocks=int(rng.integers(24, 80)),
            offered=[(True, False), (False, True), (True, True)][seed % 3],
            overlap=overlap,
            budget=int(rng.integers(8, 64)),
            num_host_blocks=int(rng.choice([0, 10, 40])),
            lost=None if seed % 7 else lambda rng=rng: bool(rng.random() < 0.1),
            fault=fault,
            retention=RETENTIONS[seed % len(RETENTIONS)] if seed % 3 else "knapsack?keeps=true",
            session_order=ORDERS[seed % len(ORDERS)],
        )
        last: dict[int, str] = {}
        try:
            for i in range(int(rng.integers(4, 20))):
                session = int(rng.integers(0, 5))
                names = (None, f"s{session}")[session % 2 or seed % 2]
                tenant = "b" if session == 4 else None
                before = last.get(session)
                if before is not None and before not in served.ended:
                    served.step()
                    continue
                tokens = (
                    prompt(int(rng.integers(1, 12)), seed=seed if rng.random() < 0.3 else seed * 100 + i)
                    if before is None or len(served.requests[before].prompt_token_ids) > 24
                    else after(served, before, int(rng.integers(1, 6)), seed * 100 + i)
                )
                last[session] = call(
                    served, tokens, int(rng.integers(1, 5)), session=names, tenant=tenant,
                    work=("", "tool", "person")[int(rng.integers(3))], retain_s=[None, 0.2, 1e9][int(rng.integers(3))],
                )  # fmt: skip
                for _ in range(int(rng.integers(0, 6))):
                    served.step()
                    if served.engine.states.sessions is not None:
                        kept += bool(served.engine.cache.groups.is_kept.any())
                if rng.random() < 0.1:
                    served.engine.end_session(f"s{session}", tenant)
                    served.engine.check_integrity()
                if rng.random() < 0.2:
                    served.clock.advance_to(served.clock.now_s() + float(rng.exponential(0.5)))
            served.drain()
            served.assert_as_expected()
        except Exception as error:
            error.add_note(f"{seed=}")
            raise
    assert kept > 0


def two_sessions(retention: str, **others) -> tuple[Served, str, str]:
    """A session whose tool works, and a later one whose person thinks; together they fill the pool."""
    served = Served("fcfs", num_blocks=40, offered=(True, False), retention=retention, **others)
    tool = call(served, prompt(30, seed=1), session="tool", work="tool")
    served.drain()
    person = call(served, prompt(30, seed=2), session="person", work="person")
    served.drain()
    return served, tool, person


@pytest.mark.parametrize(("retention", "keeps_tool"), [("lru", False), ("knapsack", True), ("cache-ttl", True)])
def test_whom_a_tool_brings_back_soon_keeps_its_blocks(retention, keeps_tool):
    served, tool, person = two_sessions(retention)
    call(served, prompt(30, seed=3), session="other")
    served.drain()
    again = call(served, after(served, tool, 2, 4), session="tool")
    served.drain()
    served.assert_as_expected()
    assert (num_cached(served, again) > 20) == keeps_tool
    back = call(served, after(served, person, 2, 5), session="person")
    served.drain()
    assert num_cached(served, back) < 30


def test_blocks_of_the_least_value_leave_host_memory_first():
    served, tool, person = two_sessions("knapsack", num_host_blocks=20)
    for seed in (3, 4):
        call(served, prompt(30, seed=seed), session=f"o{seed}", work="person")
        served.drain()
    again = call(served, after(served, tool, 2, 9), session="tool")
    served.drain()
    assert num_cached(served, again) > 20
    back = call(served, after(served, person, 2, 9), session="person")
    served.drain()
    assert num_cached(served, back) < 30
    served.assert_as_expected()


def test_blocks_that_a_sessions_next_call_does_not_use_leave_first():
    """A context that was compacted, against a person who thinks."""
    served = Served("fcfs", num_blocks=64, offered=(True, False), retention="knapsack")
    call(served, prompt(30, seed=1), session="a", work="tool")
    served.drain()
    person = call(served, prompt(30, seed=2), session="b", work="person")
    served.drain()
    compacted = call(served, prompt(30, seed=3), session="a", work="tool")
    served.drain()
    call(served, prompt(30, seed=4), session="c", work="tool")
    served.drain()
    for before, session in ((person, "b"), (compacted, "a")):
        again = call(served, after(served, before, 2, 9), session=session)
        served.drain()
        assert num_cached(served, again) > 20
    served.assert_as_expected()


@pytest.mark.parametrize("retention", ["lru", "knapsack"])
def test_a_call_of_another_session_may_continue_a_prefix_in_host_memory(retention):
    served = Served(
        "fcfs", num_blocks=40, offered=(True, False), retention=retention, session_order="plas", num_host_blocks=60
    )
    names = [call(served, prompt(30, seed=i), session=f"s{i}") for i in range(6) if not served.drain()]
    for i, name in enumerate(names):
        call(served, after(served, name, 2, 20 + i), session="another")
        served.drain()
        assert served.engine.end_session("another")
        served.engine.check_integrity()
    served.assert_as_expected()


def test_a_held_prefix_tells_nothing_of_whose_it_was_before():
    served = Served("fcfs", num_blocks=40, offered=(True, False), retention="knapsack", num_host_blocks=60)
    first = call(served, prompt(30, seed=1), tenant="a")
    served.drain()
    for i in (2, 3):
        call(served, prompt(60, seed=i), tenant="a")
        served.drain()
    call(served, after(served, first, 2, 4), 12, session="u", tenant="a")  # from host memory
    served.step()
    served.step()
    sessions = of(served)
    for session in list(sessions._unnamed):
        sessions._forget(session)
    call(served, after(served, first, 3, 5), tenant="a")
    call(served, prompt(9, seed=6), tenant="b")
    served.drain()
    served.assert_as_expected()


def test_a_beginning_that_two_sessions_share_does_not_expose_the_better_one():
    """One that its client has ended had it last."""
    served = Served("fcfs", num_blocks=64, offered=(True, False), retention="knapsack")
    shared = prompt(12, seed=1)
    good = call(served, np.concatenate([shared, prompt(16, seed=2)]), session="good", work="tool")
    served.drain()
    call(served, np.concatenate([shared, prompt(16, seed=3)]), session="bad", work="person")
    served.drain()
    of(served).table.is_over[of(served)._named[0, "bad"]] = True
    call(served, prompt(40, seed=4), session="other", work="person")
    served.drain()
    call(served, prompt(16, seed=5), session="more", work="person")
    served.drain()
    again = call(served, after(served, good, 2, 6), session="good")
    served.drain()
    assert num_cached(served, again) >= 28
    served.assert_as_expected()


def test_kept_blocks_that_another_session_takes_over_are_no_longer_kept():
    served = Served("fcfs", num_blocks=60, offered=(True, False), retention="ttl?ttl_s=3600&pins=true", max_num_seqs=2)
    first = call(served, prompt(30, seed=1), session="a")
    served.drain()
    call(served, prompt(20, seed=2), 16, session="x")
    call(served, prompt(20, seed=3), 16, session="y")
    served.step()
    call(served, after(served, first, 60, 4), session="a")
    served.step()
    call(served, after(served, first, 2, 5), session="b")
    served.drain()
    served.assert_as_expected()


def test_one_name_may_stand_for_several_chains_of_calls():
    """An agent and its subagents, or all users of an application."""
    served = Served("fcfs", num_blocks=400, retention="knapsack")
    agent = call(served, prompt(60, seed=1), session="s")
    served.drain()
    title = call(served, prompt(9, seed=2), session="s")
    served.drain()
    rows = of(served)._named[0, "s"]
    assert len(rows) == 2
    assert of(served).table.device_groups[rows].sum(axis=1).tolist() == [15, 2]
    for before in (agent, title):
        call(served, after(served, before, 2, 7), session="s")
        served.drain()
    assert of(served)._named[0, "s"] == rows
    assert of(served).table.num_calls[rows].tolist() == [2, 2]
    assert of(served).table.begun_s[rows[0]] == of(served).table.begun_s[rows[1]]


def test_a_preempted_call_is_worth_more_than_one_who_thinks():
    served = Served("fcfs", num_blocks=80, offered=(True, False), retention="knapsack")
    call(served, prompt(30, seed=1), session="person", work="person")
    served.drain()
    running = call(served, prompt(30, seed=2), 20, session="runs")
    served.step()
    served.step()
    served.engine.preempt(running)
    assert of(served)._ranked()[-1] == of(served)._named[0, "runs"][0]
    served.drain()
    served.assert_as_expected()


def test_a_session_is_known_by_its_prefix_where_no_name_is_sent():
    served = Served("fcfs", num_blocks=200, retention="knapsack")
    first = call(served, prompt(30, seed=1))
    served.drain()
    rows = set(np.flatnonzero(of(served).table.live).tolist())
    call(served, after(served, first, 3, 2))
    served.drain()
    assert set(np.flatnonzero(of(served).table.live).tolist()) == rows
    assert of(served).table.num_calls.max() == 2
    call(served, prompt(30, seed=8))
    served.drain()
    assert np.count_nonzero(of(served).table.live) == len(rows) + 1


def test_a_shared_beginning_alone_is_no_session():
    served = Served("fcfs", num_blocks=200, retention="knapsack")
    call(served, np.concatenate([prompt(8, seed=1), prompt(40, seed=2)]))
    served.drain()
    call(served, np.concatenate([prompt(8, seed=1), prompt(40, seed=3)]))
    served.drain()
    assert of(served).table.num_calls.max() == 1


def test_sessions_of_different_tenants_are_different_whatever_their_names():
    served = Served("fcfs", num_blocks=200, retention="knapsack")
    mine = call(served, prompt(30, seed=1), session="s", tenant="a")
    served.drain()
    theirs = call(served, prompt(30, seed=1), session="s", tenant="b")
    served.drain()
    assert num_cached(served, theirs) == 0
    assert of(served).table.num_calls.max() == 1
    assert not served.engine.end_session("s", "c")
    assert served.engine.end_session("s", "b")
    again = call(served, after(served, mine, 2, 5), session="s", tenant="a")
    served.drain()
    assert num_cached(served, again) > 20


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_an_ended_session_leaves_nothing_but_what_others_need(num_host_blocks):
    served = Served("fcfs", num_blocks=60, offered=(True, False), retention="knapsack", num_host_blocks=num_host_blocks)
    shared = prompt(12, seed=1)
    name = call(served, np.concatenate([shared, prompt(20, seed=2)]), session="a")
    served.drain()
    call(served, np.concatenate([shared, prompt(20, seed=3)]), session="b")
    served.drain()
    if num_host_blocks:  # push a part of both to host memory
        call(served, prompt(60, seed=7), session="c")
        served.drain()
    assert served.engine.end_session("a")
    served.engine.check_integrity()
    assert of(served)._groups.num_groups(of(served)._named[0, "a"][0]) <= 3  # what b needs too
    cached = call(served, after(served, name, 1, 9), session="a")
    served.drain()
    assert num_cached(served, cached) <= 12
    of_b = call(served, np.concatenate([shared, prompt(20, seed=3), prompt(2, seed=4)]), session="b")
    served.drain()
    assert num_cached(served, of_b) >= 28
    served.assert_as_expected()


def test_waiting_requests_get_kept_blocks_rather_than_nothing():
    """The pins of a whole pool are released when nothing else runs."""
    served = Served("fcfs", num_blocks=24, offered=(True, False), retention="ttl?ttl_s=3600&pins=true")
    call(served, prompt(40, seed=1), session="a")
    served.drain()
    name = call(served, prompt(40, seed=2), session="b")
    served.drain()
    assert served.ended[name] == "length"
    served.assert_as_expected()


def test_a_returning_call_finds_the_blocks_that_were_kept_for_it():
    """Its session's blocks are not free for others while it waits, and count as held for itself."""
    served = Served("fcfs", num_blocks=52, offered=(True, False), retention="ttl?ttl_s=3600&pins=true", max_num_seqs=2)
    first = call(served, prompt(40, seed=1), session="a")
    served.drain()
    call(served, prompt(12, seed=2), 12, session="b")
    call(served, prompt(12, seed=3), 12, session="b2")
    served.step()
    served.step()
    again = call(served, after(served, first, 4, 4), session="a")
    served.step()
    state = served.engine.states.by_id[again]
    assert served.engine.table.shared_prefix_blocks[state.row, KV] >= 20
    assert served.engine.cache.groups.is_kept.sum() >= 10
    served.drain()
    assert num_cached(served, again) >= 40
    served.assert_as_expected()


def test_sessions_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(engine_sessions, "MAX_IDLE_SESSIONS", 50)
    monkeypatch.setattr(engine_sessions, "_SWEEP", 10)
    served = Served("fcfs", num_blocks=20, offered=(True, False), retention="knapsack")
    for i in range(200):
        call(served, prompt(5, seed=i), 1, session=None if i % 3 else f"s{i}")
        served.drain()
    assert np.count_nonzero(of(served).table.live) < 100


@pytest.mark.parametrize(
    ("order", "expected"),
    [("arrival", ["new", "old", "short"]), ("program-fcfs", ["old", "new", "short"]), ("plas", ["new", "short", "old"]),
     ("hrrn", ["short", "old", "new"])],
)  # fmt: skip
def test_waiting_calls_come_in_the_order_asked_for(order, expected):
    served = Served("fcfs", num_blocks=8000, max_num_seqs=2, budget=512, session_order=order, debug=False)
    old = call(served, prompt(5000, seed=1), 1, session="old")
    served.drain()
    for i in range(2):
        call(served, prompt(600, seed=20 + i), 30, session=f"busy{i}")
    for _ in range(6):
        served.step()
    names = {
        call(served, prompt(1000, seed=2), 1, session="new"): "new",
        call(served, after(served, old, 300, 3), 1, session="old"): "old",
        call(served, prompt(8, seed=4), 1, session="short"): "short",
    }
    view = served.engine.view()
    assert [names[i] for i in served.engine.states.ids(view.waiting)] == expected
    served.drain()
    served.assert_as_expected()


def test_an_answer_told_after_its_call_decides_who_works_unless_the_session_has_gone_on():
    served = Served("fcfs", num_blocks=200, retention="cache-ttl")
    sessions = of(served)

    def ask(session: str, work: typing.Literal["", "tool", "person"] = "tool") -> str:
        name = call(served, prompt(40, seed=len(served.requests)), session=session, work=work)
        served.drain()
        return name

    def work_of(session: str) -> int:
        return int(sessions.table.work[sessions._named[0, session][-1]])

    first = ask("a")
    row = sessions._named[0, "a"][0]
    assert (work_of("a"), sessions.table.until_s[row] > 0) == (TOOL, True)
    served.engine.note_answer(first, "person")
    served.engine.note_answer("unknown", "person")
    other = ask("b")  # its arrival applies what was told
    assert (work_of("a"), sessions.table.until_s[row]) == (PERSON, 0.0)
    served.engine.note_answer(other, "tool")
    served.engine.note_answer(first, "tool")  # told twice
    person = ask("c", "person")
    assert (work_of("a"), work_of("b")) == (PERSON, TOOL)
    served.engine.note_answer(person, "tool")  # not in question
    served.engine.end_session("b")
    for number in range(engine_sessions._MAX_ANSWERS + 5):
        served.engine.note_answer(f"n{number}", "person")
    assert len(sessions._answers) == engine_sessions._MAX_ANSWERS
    ask("d")
    assert (work_of("c"), len(sessions._answers)) == (PERSON, 0)
    for _ in range(20):
        ask("e")
    assert len(sessions._may_call) <= engine_sessions._MAX_ANSWERS
    served.engine.check_integrity()


def test_sessions_are_counted_by_where_their_cache_is():
    served = Served("fcfs", num_blocks=40, offered=(True, False), retention="knapsack", num_host_blocks=30)
    states: set[str] = set()
    for i in range(12):
        call(served, prompt(30, seed=i), session=f"s{i % 9}", tenant=f"t{i % 9}")
        served.step()
        served.step()
        counts = served.engine.stats().sessions
        assert tuple(counts) == engine_sessions.SESSION_STATES
        assert sum(counts.values()) == np.count_nonzero(of(served).table.live) - 1
        assert counts["running"] == 1
        served.drain()
        states |= {state for state, num in served.engine.stats().sessions.items() if num}
    assert states == {"device", "host", "uncached"}
    assert Served("fcfs", num_blocks=40).engine.stats().sessions == {}

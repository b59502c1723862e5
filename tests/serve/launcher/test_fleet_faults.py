"""Faults of the network and of replicas behind `apt-jax launch`: real processes, the released gateway, a proxy on every
link. Replicas are toy servers, whose answers are known; `make chaos` draws such faults at random over a real model."""

import concurrent.futures
import importlib.util
import signal
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server.faulty_proxy import Condition
from benchmarks.server.fleet import Fleet, until
from benchmarks.server.ledger import Entry, Outcome, ask
from tests.support.toy_launch import POISON
from tests.support.toy_server import server_parts
from tests.support.toy_serving import expected_tokens

pytestmark = pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="needs the gateway (pip install smg)")

TOY = ("-m", "tests.support.toy_launch")
PROMPT = "Shall I compare thee"
LONG = 400
"""Tokens of an answer that takes two seconds."""


@pytest.fixture(scope="module")
def liars(tmp_path_factory) -> Path:
    """File of the replicas that answer INTERNAL to everything."""
    path = tmp_path_factory.mktemp("fleet") / "liars"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def lasting(liars) -> Generator[Fleet]:
    with Fleet(["--routing-policy=round_robin"], script=TOY, env={"TOY_LIARS": str(liars)}) as made:
        yield made


@pytest.fixture
def fleet(lasting, liars) -> Generator[Fleet]:
    """A fleet that is healthy before and after a test."""
    assert until(lambda: complete(lasting, 4).outcome is Outcome.OK, 120) is not None
    yield lasting
    liars.write_text("")
    for proxy in (*lasting.links, lasting.front):
        proxy.heal()
    assert until(lambda: all(served_by(lasting)), 120) is not None, "a healed fleet does not serve"
    assert until(lasting.is_idle, 60) is not None, "blocks are in use after all requests have ended"


_count = 0


def complete(
    fleet: Fleet,
    max_tokens: int,
    *,
    prompt: str = PROMPT,
    stream: bool = True,
    on_first: Callable[[], object] = lambda: None,
    **more: Any,
) -> Entry:
    global _count
    _count += 1
    body = {"model": "toy", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    return ask(fleet.front.port, body, request_id=f"test-{_count}", stream=stream, on_first=on_first)


def answer(max_tokens: int) -> str:
    """By the engine alone."""
    parts = server_parts()
    assert parts.tokenizer is not None
    ids = parts.tokenizer.encode(PROMPT, add_special_tokens=False)
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return parts.tokenizer.decode(expected_tokens(parts.build_request(prompt_token_ids=ids, params=params)))


def served_by(fleet: Fleet) -> list[int]:
    """Number of tokens that each replica generates for six requests."""
    before = [stats.generation_tokens if stats else 0 for stats in map(fleet.stats, (0, 1))]
    for _ in range(6):
        complete(fleet, 2)
    after = [stats.generation_tokens if stats else 0 for stats in map(fleet.stats, (0, 1))]
    return [b - a for a, b in zip(before, after, strict=True)]


def num_running(fleet: Fleet) -> list[int]:
    return [stats.num_running if stats else -1 for stats in map(fleet.stats, (0, 1))]


def start(pool: concurrent.futures.Executor, fleet: Fleet, count: int, max_tokens: int = LONG) -> list[Any]:
    """Start streams, and wait until all of them run, the same number on each replica, and their clients have got text.

    Until then the gateway may send them again.
    """
    arrived = threading.Semaphore(0)
    streams = [pool.submit(complete, fleet, max_tokens, on_first=arrived.release) for _ in range(count)]
    assert all(arrived.acquire(timeout=10) for _ in streams)
    assert num_running(fleet) == [count // 2] * 2
    return streams


# --- links ---------------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(3, group="faults of a fleet")
def test_N4_delay_and_loss_make_answers_only_slower(fleet):
    for condition, number in ((Condition(delay_s=0.5), 2), (Condition(loss=0.3), 6)):
        for proxy in (*fleet.links, fleet.front):
            proxy.set(condition)
        with concurrent.futures.ThreadPoolExecutor(number) as pool:
            entries = list(pool.map(lambda i: complete(fleet, 12, stream=i % 2 == 0), range(number)))
        assert [(e.outcome, e.text) for e in entries] == [(Outcome.OK, answer(12))] * number


@pytest.mark.in_turn(3, group="faults of a fleet")
def test_N3_no_request_is_sent_to_a_replica_behind_a_half_open_link(fleet):
    """Streams on it free their blocks at once; their clients are told when the gateway's own keepalive has failed."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        streams = start(pool, fleet, 2, 900)
        fleet.links[0].set(Condition(half_open=True))
        started_s = time.monotonic()
        freed = until(lambda: num_running(fleet)[0] == 0, 30)
        assert freed is not None
        assert fleet.stats(1).num_running == 1
        time.sleep(max(0.0, 10 - (time.monotonic() - started_s)))
        for _ in range(6):  # within 30 s: each would hang otherwise
            entry = complete(fleet, 4)
            assert (entry.outcome, entry.text) == (Outcome.OK, answer(4))
            assert entry.ended_s - entry.sent_s < 5
        assert time.monotonic() - started_s < 30
        fleet.links[0].reset()
        fleet.links[0].heal()
        outcomes = sorted(stream.result().outcome for stream in streams)
        assert outcomes == [Outcome.ERROR, Outcome.OK]


@pytest.mark.slow
def test_N3_streams_on_a_half_open_link_end_with_an_error(fleet):
    """After the gateway's keepalive: 30 s until it asks, 10 s for the answer."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        streams = start(pool, fleet, 2, 900)
        fleet.links[0].set(Condition(half_open=True))
        started_s = time.monotonic()
        entries = [stream.result() for stream in streams]
        assert time.monotonic() - started_s < 50
    [lost] = [entry for entry in entries if entry.outcome is not Outcome.OK]
    assert lost.outcome is Outcome.ERROR
    assert lost.finish_reason is None
    assert answer(900).startswith(lost.text)


@pytest.mark.in_turn(3, group="faults of a fleet")
def test_N2_a_stream_that_has_begun_is_not_sent_again(fleet):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = start(pool, fleet, 4)
        time.sleep(0.5)
        fleet.links[0].reset()
        entries = [stream.result() for stream in streams]
    lost = [entry for entry in entries if entry.outcome is Outcome.ERROR]
    assert len(lost) == 2
    assert sum(entry.outcome is Outcome.OK for entry in entries) == 2
    for entry in lost:
        assert answer(LONG).startswith(entry.text)
        assert entry.text
        assert entry.finish_reason is None
        ids = [execution.request_id for execution in fleet.executions()]
        assert sum(x.startswith(f"{entry.request_id}-") for x in ids) == 1


@pytest.mark.in_turn(3, group="faults of a fleet")
def test_N6_without_a_replica_requests_are_refused_at_once(fleet):
    for link in fleet.links:
        link.set(Condition(refuses=True))
        link.reset()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda _: complete(fleet, 4), range(8)))
    entries = [complete(fleet, 4) for _ in range(10)]
    for entry in (*first, *entries):
        assert entry.outcome is Outcome.REFUSED
        assert entry.status in (500, 502, 503)  # the first two: a connection that broke
        assert entry.ended_s - entry.sent_s < 2
    assert all(entry.status == 503 for entry in entries[-3:])
    assert "no_available_workers" in entries[-1].error


@pytest.mark.in_turn(3, group="faults of a fleet")
def test_N11_a_replica_that_only_fails_is_left_out(fleet, liars):
    liars.write_text(str(fleet.ports[0]))
    failed = '"message": "vllm.grpc.engine.VllmEngine/Generate: internal'
    before = fleet.says(failed)
    entries = [complete(fleet, 4) for _ in range(30)]
    assert all((entry.outcome, entry.text) == (Outcome.OK, answer(4)) for entry in entries)
    # Five failures open its breaker; a single request tries it again every two seconds.
    lasted_s = entries[-1].ended_s - entries[0].sent_s
    assert 5 <= fleet.says(failed) - before <= 5 + lasted_s / 2 + 1


# --- processes -----------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(3, group="faults of a fleet")
def test_N7_a_gateway_that_is_killed_frees_everything_on_all_replicas(fleet):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = start(pool, fleet, 4, 900)
        time.sleep(0.2)
        before = [fleet.stats(i).finished.get("abort", 0) for i in (0, 1)]
        fleet.gateway().kill()
        assert until(fleet.is_idle, 5) is not None
        assert [fleet.stats(i).finished.get("abort", 0) - b for i, b in enumerate(before)] == [2, 2]
        for stream in streams:
            entry = stream.result()
            assert entry.outcome is Outcome.TRUNCATED
            assert entry.finish_reason is None
            assert answer(900).startswith(entry.text)
    assert ("gateway", "SIGKILL") in fleet.ends()


@pytest.mark.in_turn(3, group="faults of a fleet")
def test_H3_a_replica_that_is_killed_ends_its_streams_at_once_and_comes_back(fleet):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = start(pool, fleet, 4, 900)
        killed_s = time.time()
        fleet.replica(1).send_signal(signal.SIGKILL)
        entries = [stream.result() for stream in streams]
    lost = [entry for entry in entries if entry.outcome is Outcome.ERROR]
    assert len(lost) == 2
    assert all(entry.ended_s - killed_s < 2 for entry in lost)
    assert ("replica 1", "SIGKILL") in fleet.ends()


@pytest.mark.in_turn(3, group="faults of a fleet")
def test_a_reload_does_not_kill_a_replica_that_is_starting(fleet):
    """Nothing handles SIGHUP there yet."""
    ends = len(fleet.ends()) + 1
    fleet.replica(0).kill()
    assert until(lambda: len(fleet.ends()) == ends and fleet.replica(0) is not None, 120) is not None
    for _ in range(10):
        fleet.launcher.send_signal(signal.SIGHUP)
        time.sleep(0.05)
    assert until(lambda: fleet.is_serving(0), 120) is not None
    assert len(fleet.ends()) == ends


@pytest.mark.in_turn(3, group="faults of a fleet")
def test_N5_a_request_kills_at_most_two_replicas():
    with Fleet([], script=TOY, num_replicas=3) as three:
        entry = complete(three, 200, prompt=f"hello{POISON}", stream=False)
        assert entry.outcome is Outcome.REFUSED
        assert entry.status in (500, 502, 503)
        assert until(lambda: len(three.ends()) >= 2, 60) is not None
        time.sleep(1)
        assert len(three.ends()) == 2
        # By the third, as soon as the gateway has left out the others.
        assert until(lambda: complete(three, 4).text == answer(4), 60) is not None
        assert three.terminate() == 0
        assert three.orphans() == []

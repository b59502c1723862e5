"""Faults of clients, load and process, seen at the endpoints of a whole server, in-process if possible, else in
`faulty_server.py`."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx2
import pytest

from serve.client import AptClient
from tests.support.http_serving import HttpServed, completion, run
from tests.support.toy_serving import expected_tokens, toy_parts

ROOT = Path(__file__).parents[2]


# --- clients -------------------------------------------------------------------------------------------------------


def test_C15_a_storm_of_new_connections_meets_the_limits_of_the_queue():
    async def scenario(served: HttpServed) -> None:
        async def one() -> int:
            connection = await served.raw(completion(max_tokens=5))
            status, _ = await connection.answer(40)
            await connection.close()
            return status

        most = watch_queue(served)
        statuses = await asyncio.gather(*(one() for _ in range(120)))
        assert set(statuses) == {200, 429}
        assert most[0] <= 8
        assert (await served.ask("after", max_tokens=3))["usage"]["completion_tokens"] == 3

    run(scenario, max_num_seqs=2, max_num_queued_reqs=8, step_s=0.002)


def watch_queue(served: HttpServed) -> list[int]:
    """The most requests that ever waited, as the engine's thread sees it after each that comes."""
    engine, most = served.parts.engine, [0]
    add = engine.add_request

    def adding(request):
        add(request)
        most[0] = max(most[0], engine.stats().num_waiting)

    engine.add_request = adding  # type: ignore[method-assign]
    return most


def test_C16_a_retry_of_a_live_request_is_a_request_of_its_own_and_counts():
    async def scenario(served: HttpServed) -> None:
        gate = served.parts.executor.gate  # type: ignore[attr-defined]
        gate.clear()
        body = {"prompt": "same", "max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
        tasks = [asyncio.create_task(served.post("/v1/completions", body))]
        await served.until(lambda: served.engine._gate.snapshot is not None)  # its step runs, it waits no more
        tasks.append(asyncio.create_task(served.post("/v1/completions", body)))
        await served.until(lambda: len(served.engine._inbox) + served.parts.engine.num_live == 2)
        third = asyncio.create_task(served.post("/v1/completions", body))
        await served.until(lambda: third.done() or len(served.engine._inbox) + served.parts.engine.num_live == 3)
        gate.set()
        first, second = [r.json() for r in await asyncio.gather(*tasks)]
        assert first["id"] != second["id"]
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
        assert (await third).status_code == 429  # one runs, one waits: there is room for one
        assert served.parts.engine.stats().finished == {"length": 2}

    run(scenario, max_num_seqs=1, max_num_queued_reqs=1)


# --- load ----------------------------------------------------------------------------------------------------------


def test_Q2_a_burst_is_refused_early_and_the_loop_goes_on():
    async def scenario(served: HttpServed) -> None:
        most, gate = watch_queue(served), served.parts.executor.gate  # type: ignore[attr-defined]
        body = {"prompt": "hello", "max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
        gate.clear()  # a step that lasts as long as it takes to refuse them
        first = asyncio.create_task(served.post("/v1/completions", body))
        await served.until(lambda: served.engine._gate.snapshot is not None)
        tasks = [asyncio.create_task(served.post("/v1/completions", body)) for _ in range(400)]
        loop, worst = asyncio.get_running_loop(), 0.0
        while sum(task.done() for task in tasks) < 380:
            before = loop.time()
            await asyncio.sleep(0.005)
            worst = max(worst, loop.time() - before)
        assert {task.result().status_code for task in tasks if task.done()} == {429}
        gate.set()
        answers = [await task for task in (first, *tasks)]
        assert {a.status_code for a in answers} == {200, 429}
        assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status_code == 429)
        assert most[0] <= 16
        assert worst < 3.0  # a tenth of it on a quiet machine, client included
        request = served.parts.build_request(prompt="hello", params={k: v for k, v in body.items() if k != "prompt"})
        text = served.parts.tokenizer.decode(expected_tokens(request))  # type: ignore[union-attr]
        assert all(a.json()["choices"][0]["text"] == text for a in answers if a.status_code == 200)

    run(scenario, max_num_seqs=4, max_num_queued_reqs=16, step_s=0.002)


# --- the process ---------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class FaultyServer:
    """`faulty_server.py` with a plan."""

    def __init__(self, plan: str) -> None:
        self.grpc_port, self.http_port = free_port(), free_port()
        self.base = f"http://127.0.0.1:{self.http_port}"
        command = [
            sys.executable,
            "-m",
            "tests.support.faulty_server",
            str(self.grpc_port),
            str(self.http_port),
            plan,
        ]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def is_healthy(self) -> tuple[bool, bool]:
        """Return the health by HTTP and by gRPC."""
        http = rpc = False
        with contextlib.suppress(httpx2.HTTPError):
            http = httpx2.get(f"{self.base}/health", timeout=5).status_code == 200
        with contextlib.suppress(grpc.RpcError), AptClient(f"127.0.0.1:{self.grpc_port}") as client:
            rpc = client.is_serving(timeout_s=5)
        return http, rpc

    def ask(self, max_tokens: int = 40) -> httpx2.Response:
        body = {"prompt": "hello", "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        return httpx2.post(f"{self.base}/v1/completions", json=body, timeout=60)


@contextlib.contextmanager
def faulty_server(plan: str) -> Iterator[FaultyServer]:
    server = FaultyServer(plan)
    try:
        end_s = time.monotonic() + 60
        while server.is_healthy() != (True, True):
            assert time.monotonic() < end_s
            assert server.process.poll() is None
            time.sleep(0.05)
        yield server
    finally:
        server.process.kill()
        server.process.communicate(timeout=30)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("4:raise,9:raise:after", "twice within 60 s"),
        ("4:memory,9:memory", "twice within 60 s"),
        ("4:exit", "internal error"),
        ("4:hang", "--set step_timeout"),
    ],
    ids=["E2 two failures", "D1 no memory twice", "E6 thread ended", "E4 hang"],
)
def test_E2_E4_E6_the_death_of_the_engine_is_seen_over_both_protocols_and_in_the_exit_code(plan, says):
    with faulty_server(plan) as server:
        answer = server.ask()
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert "planted" not in error["message"]
        told_s = time.monotonic()
        while any(server.is_healthy()):
            assert time.monotonic() - told_s < 5  # two seconds, and time to ask on a busy machine
        assert server.process.wait(30) == 1
        assert server.process.stderr is not None
        assert says in server.process.stderr.read()


def test_H5_a_stopped_process_goes_on_where_it_was_and_late_deadlines_fire():
    # The stop is longer than the time limit of a step, which the plan's name sets to 2 s.
    with faulty_server("2000:hang") as server, AptClient(f"127.0.0.1:{server.grpc_port}") as client:
        params = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
        stream = client.generate("hello", **params)
        late = client.generate("hello", deadline_ms=1000.0, **params)
        tokens = list(next(stream).token_ids)
        next(late)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        server.process.send_signal(signal.SIGCONT)
        for message in stream:
            tokens += message.token_ids
        with pytest.raises(grpc.RpcError) as caught:
            list(late)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        parts = toy_parts()
        assert tokens == expected_tokens(parts.build_request(prompt="hello", params=params))
        assert server.is_healthy() == (True, True)
        stats = client.stats(20.0)
        assert stats.free_blocks == stats.total_blocks
        assert not stats.step_failures


def test_E2_a_server_goes_on_after_one_failure():
    with faulty_server("4:raise,2000:raise") as server:
        answer = server.ask()
        parts = toy_parts()
        params = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
        tokens = expected_tokens(parts.build_request(prompt="hello", params=params))
        assert answer.json()["choices"][0]["text"] == parts.tokenizer.decode(tokens)  # type: ignore[union-attr]
        assert server.is_healthy() == (True, True)

"""Work before the engine: bounded, fair, cancellable, and no danger to the process."""

import asyncio
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest

from apt_jax.errors import QueueFullError
from serve.http_api import openai_request
from serve.preprocessing import BodyBudget, FairQueue, Preprocessing
from tests.serve.test_fault_rows import free_port
from tests.support.http_serving import post_head, run

SLOW = {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79)]}
"""A constraint that takes the compiler's whole time limit."""


def slow_constraint(number: int) -> dict[str, Any]:
    return {"json": {**SLOW, "title": f"t{number}"}}


# --- queues --------------------------------------------------------------------------------------------------------


class Work:
    """Jobs that end when they are told to."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_end = threading.Event()

    def job(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(name)
            self._may_end.wait(20)
            return name

        return work

    def end(self) -> None:
        self._may_end.set()


async def tick() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def queue_of(max_waiting: int = 100, max_waiting_per_owner: int = 100) -> FairQueue:
    return FairQueue(
        "test", 1, max_waiting=max_waiting, max_waiting_per_owner=max_waiting_per_owner, full="too much to do"
    )


def test_Q3_owners_take_turns():
    async def scenario() -> None:
        queue, work = queue_of(), Work()
        names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(queue.run(work.job(name), name[0])))
            await tick()
        assert queue.num_waiting == 6
        work.end()
        assert await asyncio.gather(*tasks) == names
        assert work.begun == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
        assert queue.num_waiting == 0
        queue.close()

    asyncio.run(scenario())


def test_C1_who_leaves_the_queue_is_never_begun():
    async def scenario() -> None:
        queue, work = queue_of(), Work()
        tasks = [asyncio.create_task(queue.run(work.job(f"{i}"), "a")) for i in range(4)]
        await tick()
        for task in (tasks[0], tasks[1], tasks[3]):  # the first one runs already: its thread goes on
            task.cancel()
        await tick()
        assert queue.num_waiting == 1
        work.end()
        assert await tasks[2] == "2"
        assert work.begun == ["0", "2"]
        assert await queue.run(lambda: "next", "b") == "next"  # no thread was lost
        queue.close()

    asyncio.run(scenario())


def test_a_turn_that_comes_together_with_the_cancellation_is_passed_on():
    async def scenario() -> None:
        queue, work = queue_of(), Work()
        first = asyncio.create_task(queue.run(work.job("first"), "a"))
        await tick()
        second = asyncio.create_task(queue.run(work.job("second"), "a"))
        third = asyncio.create_task(queue.run(work.job("third"), "a"))
        await tick()
        work.end()
        time.sleep(0.05)  # the thread has ended, the loop does not know yet
        for _ in range(20):
            await asyncio.sleep(0)
            if queue.num_waiting == 1:  # the second one's turn, in this very iteration
                second.cancel()
                break
        assert await first == "first"
        assert await third == "third"
        assert await queue.run(lambda: "next", "b") == "next"
        queue.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("owners", "limits"), [("ab", {"max_waiting": 3}), ("a", {"max_waiting_per_owner": 3})])
def test_Q3_a_full_queue_rejects(owners, limits):
    async def scenario() -> None:
        queue, work = queue_of(**limits), Work()
        tasks = [asyncio.create_task(queue.run(work.job(f"{i}"), owners[i % len(owners)])) for i in range(4)]
        await tick()
        with pytest.raises(QueueFullError, match="too much to do"):
            await queue.run(work.job("more"), "a")
        if "max_waiting_per_owner" in limits:
            tasks.append(asyncio.create_task(queue.run(work.job("other"), "b")))  # others have their own share
        work.end()
        await asyncio.gather(*tasks)
        assert "more" not in work.begun
        queue.close()

    asyncio.run(scenario())


def test_who_waits_too_long_is_rejected():
    async def scenario() -> None:
        queue, work = queue_of(), Work()
        task = asyncio.create_task(queue.run(work.job("first"), "a"))
        await tick()
        with pytest.raises(QueueFullError):
            await queue.run(work.job("late"), "b", wait_s=0.05)
        assert queue.num_waiting == 0
        work.end()
        await task
        assert work.begun == ["first"]
        queue.close()

    asyncio.run(scenario())


def test_bodies_share_a_budget():
    budget = BodyBudget(100 << 10)
    with budget.lease("a") as first:
        first.grow(16 << 10)  # the first 16 KiB are free
        assert budget.used_bytes == 0
        first.grow(50 << 10)  # half of the budget
        with budget.lease("a") as second:
            second.grow(10 << 10)  # a small one is read all the same
            with pytest.raises(QueueFullError, match="fill their memory budget"):
                second.grow(7 << 10)
        with budget.lease("b") as other:
            other.grow(60 << 10)
            assert budget.used_bytes == (50 + 44) << 10
            with budget.lease("c") as third, pytest.raises(QueueFullError):
                third.grow(23 << 10)
        assert budget.used_bytes == 50 << 10
    assert budget.used_bytes == 0
    assert not budget._by_owner


def test_a_body_beyond_the_budget_is_rejected_and_can_be_sent_again():
    async def scenario(served) -> None:
        served.server.app._service.work.bodies = BodyBudget(256 << 10)
        body = json.dumps({"prompt": "a" * 100}).encode().ljust(140 << 10)
        head = {"content-type": "application/json"}
        slow = await served.raw(post_head("/tokenize", len(body)) + body[:-10])
        await served.until(lambda: served.server.app._service.work.bodies.used_bytes > 100 << 10)
        rejected = await served.http.post("/tokenize", content=body, headers=head)
        assert rejected.status_code == 429
        assert int(rejected.headers["retry-after"]) >= 1
        assert (await served.ask("hello", max_tokens=1))["choices"]  # small ones go on
        slow.writer.write(body[-10:])
        assert (await slow.answer())[0] == 200
        await slow.close()
        assert (await served.http.post("/tokenize", content=body, headers=head)).status_code == 200
        half = await served.raw(post_head("/tokenize", len(body)) + body[:-10])
        await served.until(lambda: served.server.app._service.work.bodies.used_bytes > 100 << 10)
        await half.close()  # a client that leaves gives its share back
        await served.until(lambda: served.server.app._service.work.bodies.used_bytes == 0)

    run(scenario)


def test_R15_containers_of_a_body_are_bounded():
    most = openai_request.MAX_CONTAINERS
    with pytest.raises(ValueError, match="lists and objects"):
        openai_request.parse_json(b'{"prompt":[' + b"[]," * most + b"[]]}")
    with pytest.raises(ValueError, match="lists and objects"):
        openai_request.parse_json(b'{"prompt":[' + b"{}," * most + b"{}]}")
    texts = {"prompt": '{["\\"' * most, "x": ["[" * most]}
    assert openai_request.parse_json(json.dumps(texts).encode()) == texts  # text may hold as many as it likes


# --- constraints ---------------------------------------------------------------------------------------------------


def test_R11_Q10_constraints_of_clients_that_have_left_hold_up_nobody():
    pytest.importorskip("llguidance")

    async def scenario(served) -> None:
        known = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 4}
        await served.ask("q", **known)
        connections = []
        for number in range(60):
            body = json.dumps({"prompt": "q", "structured_outputs": slow_constraint(number)}).encode()
            connections.append(await served.raw(post_head("/v1/completions", len(body)) + body))
        await served.until(lambda: served.parts.grammars.num_trials > 1)
        for connection in connections:
            await connection.close()
        waits = []
        for _ in range(10):
            started = time.monotonic()
            await served.ask("q", **known)
            waits.append(time.monotonic() - started)
        assert statistics.median(waits) < 0.2, waits
        started = time.monotonic()  # a new one waits for the trial that runs, and for no other
        await served.ask("q", structured_outputs={"choice": ["a", "b"]}, max_tokens=4)
        assert time.monotonic() - started < 6.0
        assert served.parts.grammars.num_trials <= 4
        assert served.server.app._service.work._grammars.num_waiting == 0
        served.parts.grammars.close()

    run(scenario)


def test_R11_Q10_constraints_of_cancelled_calls_hold_up_nobody(serve_toy):
    """The same over gRPC."""
    pytest.importorskip("llguidance")

    async def ask(served, constraint: dict[str, Any]) -> None:
        async for _ in served.client.generate("q", max_tokens=4, structured_outputs=constraint):
            pass

    async def scenario(served) -> None:
        await ask(served, {"choice": ["yes", "no"]})
        tasks = [asyncio.create_task(ask(served, slow_constraint(number))) for number in range(30)]
        await served.until(lambda: served.parts.grammars.num_trials > 1)
        for task in tasks:
            task.cancel()
        started = time.monotonic()
        await ask(served, {"choice": ["yes", "no"]})
        assert time.monotonic() - started < 1.0  # two of them would take more
        await ask(served, {"choice": ["a", "b"]})
        assert served.parts.grammars.num_trials <= 4
        served.parts.grammars.close()

    serve_toy(scenario)


def test_R11_a_verdict_is_remembered_and_the_queue_of_a_client_is_bounded():
    pytest.importorskip("llguidance")

    async def scenario(served) -> None:
        body = {"prompt": "q", "structured_outputs": slow_constraint(0)}
        first = await served.post("/v1/completions", body)
        assert first.status_code == 400
        assert "more than 2 s" in first.json()["error"]["message"]
        started = time.monotonic()
        again = await served.post("/v1/completions", body)
        assert again.json() == first.json()
        assert time.monotonic() - started < 1.0
        assert served.parts.grammars.num_trials == 1
        served.server.app._service.work._grammars = queue_of(max_waiting_per_owner=5)
        tasks = [
            asyncio.create_task(
                served.post("/v1/completions", {"prompt": "q", "structured_outputs": slow_constraint(i)})
            )
            for i in range(1, 15)
        ]
        done, waiting = await asyncio.wait(tasks, timeout=1.5)
        assert {task.result().status_code for task in done} == {429}
        assert len(waiting) <= 6
        for task in waiting:
            task.cancel()
        await served.until(lambda: served.server.app._service.work._grammars.num_waiting == 0)
        served.parts.grammars.close()

    run(scenario)


def test_a_constraint_error_names_the_field_of_the_body():
    pytest.importorskip("llguidance")

    async def scenario(served) -> None:
        answer = await served.post(
            "/v1/chat/completions" if served.parts.chat_template else "/v1/completions",
            {
                "prompt": "q",
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}},
            },
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "response_format"
        served.parts.grammars.close()

    run(scenario)


# --- long texts, over a process of its own ---------------------------------------------------------------------------


class RoomyServer:
    """`roomy_server.py`."""

    def __init__(self) -> None:
        grpc_port, self.port = free_port(), free_port()
        command = [sys.executable, "-m", "tests.support.roomy_server", str(grpc_port), str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.http = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    async def ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if (await self.http.get("/ready")).status_code == 200:
                        return
                assert self.process.poll() is None
                await asyncio.sleep(0.05)

    def send_and_leave(self, data: bytes) -> None:
        """Write to a connection of its own, and close it."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(data)

    async def health_s(self) -> float:
        started = time.monotonic()
        assert (await self.http.get("/health")).status_code == 200
        return time.monotonic() - started

    def size_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.asynccontextmanager
async def roomy_server() -> AsyncIterator[RoomyServer]:
    server = RoomyServer()
    try:
        await server.ready()
        yield server
    finally:
        await server.http.aclose()
        server.process.terminate()
        server.process.wait(20)


def tokenize_call(num_chars: int, character: str = "a") -> bytes:
    body = json.dumps({"prompt": character * num_chars}).encode()
    return post_head("/tokenize", len(body)) + body


async def gaps_of_a_stream(server: RoomyServer, gaps: list[float], num_tokens: int) -> None:
    body = {"prompt": "hello", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    async with server.http.stream("POST", "/v1/completions", json=body) as answer:
        last, lines = None, []
        async for line in answer.aiter_lines():
            if line:
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
                lines.append(line)
    assert lines[-1] == "data: [DONE]"
    assert len(lines) >= num_tokens // 2  # a chunk may hold the tokens of several steps


def test_R22_Q10_long_texts_of_clients_that_have_left_hold_up_nobody():
    async def scenario() -> None:
        async with roomy_server() as server:
            quiet: list[float] = []
            await gaps_of_a_stream(server, quiet, 150)
            loaded: list[float] = []
            stream = asyncio.create_task(gaps_of_a_stream(server, loaded, 300))
            call = tokenize_call(2_000_000)
            flood = asyncio.to_thread(lambda: [server.send_and_leave(call) for _ in range(40)])
            flooding, health = asyncio.create_task(flood), []
            while not flooding.done() or len(health) < 40:
                health.append(await server.health_s())
                await asyncio.sleep(0.02)
            await stream
            assert statistics.median(health) < 0.1, health
            assert max(health) < 2.0  # this process and others may take the cores
            assert statistics.median(loaded) < 2 * max(statistics.median(quiet), 0.01)

    asyncio.run(scenario())


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")
def test_a_process_without_memory_for_long_texts_lives_and_answers():
    async def scenario() -> None:
        async with roomy_server() as server:
            limit = server.size_bytes() + (300 << 20)
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, limit))
            before = server.resident_bytes()
            body = {"prompt": "b" * 2_000_000}
            answers = await asyncio.gather(*(server.http.post("/tokenize", json=body) for _ in range(4)))
            for answer in answers:
                assert answer.status_code in (200, 400, 429, 503), answer.text[:200]
                assert answer.status_code != 200 or answer.json()["count"] == 2_000_001
            assert any(answer.status_code == 200 for answer in answers)
            await server.health_s()
            answer = await server.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4})
            assert answer.status_code == 200
            async with asyncio.timeout(20):  # what it took goes back to the system
                while server.resident_bytes() > before + (100 << 20):
                    await asyncio.sleep(0.2)
            assert server.process.poll() is None

    asyncio.run(scenario())


def test_a_text_that_takes_the_child_too_much_is_refused_alone(monkeypatch):
    from apt_jax.text import long_texts

    async def scenario(served) -> None:
        monkeypatch.setattr(long_texts, "MEMORY_BYTES", 64 << 20)
        answer = await served.post("/tokenize", {"prompt": "a" * 1_000_000})
        assert answer.status_code == 400
        assert "too much memory" in answer.json()["error"]["message"]
        assert (await served.post("/tokenize", {"prompt": "a" * 40_000})).json()["count"] == 40_001
        monkeypatch.setattr(long_texts, "TIME_LIMIT_S", 0.001)
        answer = await served.post("/tokenize", {"prompt": "a" * 1_000_000})
        assert answer.status_code == 400
        assert "more than" in answer.json()["error"]["message"]

    run(scenario, max_model_len=1 << 21)


def test_long_and_short_texts_have_the_same_tokens():
    """In the child and in this process, plain and from a template."""
    from apt_jax.text.long_texts import LONG_CHARS
    from tests.support.toy_serving import byte_tokenizer

    plain, apart = byte_tokenizer(), byte_tokenizer()
    apart.use_child_for_long_texts()
    text = "Hello </s> wörld \U0001f642 <pad>\n" * (LONG_CHARS // 16)
    assert len(text) > LONG_CHARS
    for special in (True, False):
        assert apart.encode(text, add_special_tokens=special) == plain.encode(text, add_special_tokens=special)
    text += "</s>"
    written = [(len(text) - 4, len(text))]
    ids = plain.encode_template(text, written)
    assert apart.encode_template(text, written) == ids
    assert apart.decode(ids, skip_special_tokens=False) == plain.backend.decode(ids, skip_special_tokens=False)
    assert apart._child is not None
    apart._child.close()


def test_work_of_both_protocols_is_bounded_together():
    from serve.grpc_api.server import ServerConfig
    from serve.http_api.server import HttpConfig
    from serve.server import ServerGroup

    group = ServerGroup(ServerConfig(port=0), HttpConfig(port=0))
    assert group._http is not None
    assert isinstance(group._grpc._calls.service.work, Preprocessing)
    assert group._grpc._calls.service.work is group._http.app._service.work


def test_R22_a_long_text_is_refused_before_it_is_tokenized(monkeypatch):
    async def scenario(served) -> None:
        monkeypatch.setattr(type(served.parts.tokenizer), "encode", None)  # calling it would fail
        for path, body in (
            ("/tokenize", {"prompt": "a" * 2_000_000}),
            ("/v1/completions", {"prompt": "a" * 2_000_000}),
            ("/detokenize", {"tokens": [5] * 300}),
        ):
            answer = await served.post(path, body)
            assert answer.status_code == 400, path
            assert answer.json()["error"]["param"] in ("prompt", "tokens")

    run(scenario)

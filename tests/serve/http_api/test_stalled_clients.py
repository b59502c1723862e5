"""Clients that are stopped as a whole (SIGSTOP): their kernel goes on acknowledging, they read nothing and answer
nothing."""

import asyncio
import signal
import socket
import subprocess
import sys
import time

import pytest

from serve.http_api import stalled_clients as stopped_readers
from tests.support.http_serving import HttpServed, completion, http_serving

STEP_S = 0.02
"""Fifty tokens a second: all buffers together take the tokens of many seconds."""
TOKENS = 1500
LIMIT_S = 5.0

HTTP = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(sys.stdin.buffer.read())
while connection.recv(65536):
    print(flush=True)
"""
GRPC = """
import sys
from serve.client import AptClient
with AptClient("127.0.0.1:" + sys.argv[1]) as client:
    for _ in client.generate("hello", max_tokens=int(sys.argv[2]), ignore_eos=True):
        print(flush=True)
"""
VLLM = """
import sys
import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb, vllm_engine_pb2_grpc as services
with grpc.insecure_channel("127.0.0.1:" + sys.argv[1]) as channel:
    request = pb.GenerateRequest(request_id="it", text="hello", stream=True)
    request.sampling_params.max_tokens = int(sys.argv[2])
    request.sampling_params.ignore_eos = True
    for _ in services.VllmEngineStub(channel).Generate(request):
        print(flush=True)
"""


CLIENTS = {"http": HTTP, "grpc": GRPC, "vllm": VLLM}


async def started(name: str, served: HttpServed) -> asyncio.subprocess.Process:
    """A client that has read some tokens."""
    port = served.server.port if name == "http" else served.grpc_server.port
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENTS[name], str(port), str(TOKENS), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(completion(max_tokens=TOKENS, stream=True) if name == "http" else b"")
    process.stdin.close()
    async with asyncio.timeout(60):
        for _ in range(5):
            assert await process.stdout.readline()
    return process


def test_C6_stopped_clients_lose_their_blocks_within_5_s():
    async def scenario() -> None:
        processes = []
        async with http_serving(step_s=STEP_S, num_blocks=4096, max_model_len=2048, debug=False) as served:
            try:
                for name in CLIENTS:
                    processes.append(await started(name, served))
                assert served.parts.engine.num_live == len(CLIENTS)
                for process in processes:
                    process.send_signal(signal.SIGSTOP)
                start = time.monotonic()
                await served.idle(LIMIT_S)
                assert time.monotonic() - start < LIMIT_S
                assert served.parts.engine.stats().free_blocks == 4096
                # Nobody else is harmed, and nothing was lost but the requests.
                assert (await served.ask("next", max_tokens=5))["usage"]["completion_tokens"] == 5
            finally:
                for process in processes:
                    process.kill()
                    await process.wait()
        assert served.parts.engine.stats().finished == {"abort": len(CLIENTS), "length": 1}

    asyncio.run(scenario())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_a_reader_on_this_machine_has_read_is_known(host):
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        there = socket.create_connection(listener.getsockname()[:2])
        here, _ = listener.accept()
        with there, here:
            reader = stopped_readers._Reader.of(here, lambda: None)
            assert reader is not None

            def state() -> tuple[int | None, int | None]:
                acknowledged = reader.acknowledged()
                return acknowledged, stopped_readers._unread({reader.family}).get(reader.name)

            assert state()[1] is None
            here.sendall(b"x" * 1000)
            there.recv(100, socket.MSG_PEEK)  # it has arrived
            deadline = time.monotonic() + 20
            while state() != (1000, 1000) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert state() == (1000, 1000)
            assert not reader.has_stopped(*state(), 10.0, 3.0)
            assert not reader.has_stopped(*state(), 12.9, 3.0)
            assert reader.has_stopped(*state(), 13.1, 3.0)
            there.recv(1)
            assert state() == (1000, 999)
            assert not reader.has_stopped(*state(), 13.2, 3.0)  # it reads, a byte is enough
            assert not reader.has_stopped(2000, 1999, 16.1, 3.0)
            assert reader.has_stopped(3000, 2999, 16.3, 3.0)
            there.recv(1000)
            assert not reader.has_stopped(*state(), 99.0, 3.0)  # nothing is unread


def test_readers_elsewhere_are_not_judged():
    with socket.socket() as unconnected:
        assert stopped_readers._Reader.of(unconnected, lambda: None) is None
    left, right = socket.socketpair()
    with left, right:
        assert stopped_readers._Reader.of(left, lambda: None) is None


def test_a_reader_that_has_read_nothing_yet_has_its_time():
    """Between the two questions more may have arrived: then more seems unread than was ever acknowledged."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname()[:2])
        here, _ = listener.accept()
        with there, here:
            reader = stopped_readers._Reader.of(here, lambda: None)
            assert reader is not None
            assert not reader.has_stopped(1000, 1500, 5000.0, 3.0)
            assert not reader.has_stopped(2000, 2500, 5002.9, 3.0)
            assert reader.has_stopped(3000, 3000, 5003.1, 3.0)

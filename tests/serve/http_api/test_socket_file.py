"""HTTP on a unix socket."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import httpx2
import pytest

from serve.cli.commands import serve as serve_command
from serve.errors import CommandError, PortInUseError
from serve.grpc_api.server import ServerConfig
from serve.http_api.browsers import browser_rules
from serve.http_api.server import HttpConfig
from serve.http_api.socket_file import SocketFile
from tests.support.http_serving import HttpServed, run
from tests.support.toy_serving import toy_parts

GREEDY = {"prompt": "hello", "temperature": 0.0, "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def path(tmp_path, monkeypatch) -> str:
    """A short one: the kernel takes 107 bytes."""
    monkeypatch.chdir(tmp_path)
    return "http.sock"


def client(path: str, base_url: str = "http://localhost") -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=path), base_url=base_url, timeout=30)


def test_requests_are_served_and_streamed(path, caplog):
    caplog.set_level("INFO")

    async def scenario(served: HttpServed) -> None:
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
        assert (served.server.address, served.server.port) == (f"unix:{path}", 0)
        async with client(path) as http:
            answer = (await http.post("/v1/completions", json=GREEDY)).json()
            assert answer["usage"]["completion_tokens"] == 5
            assert answer["id"].removesuffix("-0") in caplog.text
            text = ""
            async with http.stream("POST", "/v1/completions", json={**GREEDY, "stream": True}) as streamed:
                async for line in streamed.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            assert text == answer["choices"][0]["text"]
            assert (await http.post("/v1/completions", json={**GREEDY, "prompt": 5})).status_code == 400
        async with client(path, "http://evil.example") as http:
            refused = await http.get("/v1/models")
            assert (refused.status_code, refused.json()["error"]["code"]) == (421, "misdirected_request")

    run(scenario, http={"uds": path}, app={"browsers": browser_rules("localhost", [], [])})
    assert not Path(path).exists()


def test_all_connections_are_of_one_client(path):
    async def scenario(served: HttpServed) -> None:
        request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        with contextlib.ExitStack() as opened:
            sockets = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
            server = served.server._uvicorn
            assert server is not None
            (acceptor,) = server._acceptors
            for i, connection in enumerate(sockets):
                connection.setblocking(False)
                connection.connect(path)
                connection.send(request)
                await served.until(lambda n=i: acceptor._by_address == {"unix": min(n + 1, 2)})
            # The first one has made room.
            await served.until(lambda: len(server.server_state.connections) == 2)
        await served.until(lambda: not server.server_state.connections)
        assert not acceptor._by_address

    run(scenario, http={"uds": path}, connections={"max_connections": 10, "max_connections_per_address": 2})


def test_a_client_that_reads_nothing_is_cut_off(path):
    async def scenario(served: HttpServed) -> None:
        body = json.dumps({"prompt": "hello", "ignore_eos": True, "stream": True, "max_tokens": 200, "logprobs": 5})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(path)
            connection.send(f"{head}\r\n\r\n{body}".encode())
            await served.until(lambda: served.server.num_open == 1)
            await served.idle()
            server = served.server._uvicorn
            assert server is not None
            await served.until(lambda: not server.server_state.connections)

    run(scenario, http={"uds": path}, step_s=0.001, connections={"write_stall_s": 0.3})


def test_the_file_of_a_server_that_has_ended_is_replaced(path):
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(path)
        ended.listen()
    first = SocketFile(path)
    with pytest.raises(PortInUseError, match=r"cannot listen on http.sock \(another server listens on it\); .*--uds"):
        SocketFile(path)
    assert stat.S_ISSOCK(os.lstat(path).st_mode)
    Path(path).unlink()
    second = SocketFile(path)
    first.remove()
    first.listener.close()
    assert Path(path).exists()  # it is another's now
    second.remove()
    assert not Path(path).exists()
    second.listener.close()
    third = SocketFile(path)  # it may have the number of the second one's file
    second.remove()
    assert Path(path).exists()
    third.listener.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Path("http.sock").write_text("notes"), "not a socket"),
        (lambda: Path("http.sock").symlink_to("elsewhere"), "not a socket"),
        (lambda: Path("http.sock").mkdir(), "not a socket"),
        (lambda: "none/http.sock", "No such file or directory"),
        (lambda: "x" * 200, "too long"),
    ],
)
def test_what_cannot_be_a_socket_is_told_in_one_line(path, make, says):
    made = make()
    with pytest.raises(PortInUseError, match=says) as raised:
        SocketFile(made if isinstance(made, str) else path)
    assert "\n" not in str(raised.value)
    assert not isinstance(made, str) or not Path(made).exists()
    if made == 5:
        assert Path(path).read_text() == "notes"


def test_a_stop_while_a_request_waits_for_the_compiler_has_the_process_ended(path):
    parts, begun, release, busy, statuses = toy_parts(), threading.Event(), threading.Event(), threading.Event(), []

    def prepare() -> None:
        begun.set()
        assert release.wait(20)

    parts.executor.prepare_prompt_logprobs = prepare  # type: ignore[method-assign]

    def ask() -> None:
        while not Path(path).exists():
            time.sleep(0.001)
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=path, retries=50), base_url="http://localhost") as http:
            while http.get("/ready").status_code != 200:
                pass
            statuses.append(http.post("/v1/embeddings", json={"input": "hello"}, timeout=30).status_code)

    def stop() -> None:
        begun.wait(20)
        os.kill(os.getpid(), signal.SIGTERM)

    threads = [threading.Thread(target=ask), threading.Thread(target=stop)]
    for thread in threads:
        thread.start()
    code = asyncio.run(
        serve_command.serve(
            parts.config, ServerConfig(port=0), HttpConfig(uds=path), shutdown_timeout_s=30.0, build=lambda: parts, on_busy=busy.set
        )
    )  # fmt: skip
    release.set()
    for thread in threads:
        thread.join()
    assert (code, busy.is_set(), statuses) == (0, True, [503])


def test_the_flag_serves_until_a_signal_and_leaves_no_file(path, monkeypatch, capsys):
    parts = toy_parts()
    monkeypatch.setattr(serve_command, "build_parts", lambda *_, **__: parts)
    monkeypatch.setattr(serve_command, "find_model", lambda _: None)
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    args = parser.parse_args(["toy", "--grpc-port", "0", "--uds", path, "--log-level", "error"])
    statuses = []

    def call() -> None:
        while not Path(path).exists():
            time.sleep(0.001)
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=path, retries=50), base_url="http://localhost") as http:
            while http.get("/ready").status_code != 200:
                pass
            statuses.append(http.post("/v1/completions", json=GREEDY).status_code)
            with pytest.raises(CommandError, match="another server listens on it"):
                serve_command._run(args)

    def ask() -> None:
        try:
            call()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    asker = threading.Thread(target=ask)
    asker.start()
    assert serve_command._run(args) == 0
    asker.join()
    assert statuses == [200]
    assert f" and unix:{path} (HTTP)" in capsys.readouterr().out
    assert not Path(path).exists()

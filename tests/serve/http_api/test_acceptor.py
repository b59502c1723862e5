"""Too many connections: of one client, of all, or more than there are file descriptors."""

import asyncio
import contextlib
import gc
import json
import os
import resource
import socket
import sys
import time

import pytest

from serve.http_api.acceptor import client_of
from tests.support.http_serving import http_serving, post_head

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Clients:
    """Connections to a server; all are closed at the end."""

    def __init__(self, served) -> None:
        self._served, self._writers = served, []

    async def open(self, source: str = "127.0.0.1"):
        reader, writer = await asyncio.open_connection("127.0.0.1", self._served.server.port, local_addr=(source, 0))
        self._writers.append(writer)
        return reader, writer

    async def stream(self):
        """A connection with a request that takes ten seconds."""
        body = json.dumps({"prompt": "hello", "ignore_eos": True, "stream": True, "max_tokens": 200}).encode()
        reader, writer = await self.open()
        writer.write(post_head("/v1/completions", len(body)) + body)
        await reader.readuntil(b"data: ")
        return reader, writer

    async def idle(self, source: str = "127.0.0.1"):
        """A connection without a request, which has had one."""
        reader, writer = await self.open(source)
        writer.write(HEALTH)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        return reader, writer

    async def get(self, path: str, source: str = "127.0.0.1") -> tuple[int, bool]:
        """Status of an answer, and whether the server closes the connection after it."""
        reader, writer = await self.open(source)
        writer.write(HEALTH.replace(b"/health", path.encode()))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
        return int(head.split()[1]), b"connection: close" in head.lower()

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def run(scenario, **connections) -> None:
    async def whole() -> None:
        async with http_serving(step_s=0.05, connections=connections) as served:
            clients = Clients(served)
            try:
                await asyncio.wait_for(scenario(served, clients), 60)
            finally:
                await clients.close()
            await served.idle()
            await served.http.aclose()
            uvicorn = served.server._uvicorn
            assert uvicorn is not None
            await served.until(lambda: not uvicorn.server_state.connections)

    asyncio.run(whole())


async def goes_on(stream) -> bool:
    """Return whether more of a stream comes than has come."""
    await stream[0].read(1 << 16)
    return b"data: " in await asyncio.wait_for(stream[0].readuntil(b"data: "), 20)


async def is_open(connection) -> bool:
    reader, _ = connection
    try:
        await asyncio.wait_for(reader.readuntil(b"never"), 0.2)
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    except TimeoutError:
        return True
    raise AssertionError


def test_the_connection_that_is_idle_for_longest_makes_room():
    async def scenario(served, clients):
        stream = await clients.stream()
        first, second = await clients.idle(), await clients.idle()
        first[1].write(HEALTH)  # now the second one has been idle for longer
        await first[0].readuntil(b"\r\n\r\n")
        third = await clients.idle()
        assert [await is_open(c) for c in (first, second, third)] == [True, False, True]
        assert await goes_on(stream)

    run(scenario, max_connections=3, max_connections_per_address=3)


def test_health_has_a_reserve_when_every_connection_has_a_request():
    async def scenario(served, clients):
        streams = [await clients.stream() for _ in range(3)]
        assert await clients.get("/health") == (200, True)
        assert await clients.get("/ready") == (200, True)
        assert await clients.get("/v1/models") == (503, True)
        for _ in range(40):
            await clients.open()
        await asyncio.sleep(0.3)
        assert await clients.get("/health") == (200, True)
        for stream in streams:
            assert await goes_on(stream)
            stream[1].close()
        await served.idle()
        assert await clients.get("/v1/models") == (200, False)

    run(scenario, max_connections=3, max_connections_per_address=60)


def test_a_reserved_connection_whose_request_has_arrived_is_not_silent():
    """As on a busy machine: the loop accepts further connections before it reads from the one that has waited."""

    async def scenario(served, clients):
        stream = await clients.stream()
        reserved = [await clients.open() for _ in range(16)]
        await asyncio.sleep(0.4)
        with socket.create_connection(("127.0.0.1", served.server.port)):
            reserved[0][1].write(HEALTH)  # sent at once
            assert b" 200 " in await asyncio.wait_for(reserved[0][0].readuntil(b"\r\n\r\n"), 20)
            assert [await is_open(c) for c in reserved[1:]] == [False] * 15
        assert await goes_on(stream)

    run(scenario, max_connections=1, max_connections_per_address=60)


@pytest.mark.skipif(sys.platform != "linux", reason="needs several addresses of the loopback interface")
def test_one_client_cannot_take_all_connections():
    async def scenario(served, clients):
        other = await clients.idle("127.0.0.2")
        mine = [await clients.idle() for _ in range(8)]
        assert [await is_open(c) for c in mine] == [False] * 5 + [True] * 3
        assert await is_open(other)  # although it has been idle for longest
        for _ in range(3):
            await clients.stream()
        assert await clients.get("/v1/models") == (503, True)
        assert await clients.get("/v1/models", "127.0.0.2") == (200, False)

    run(scenario, max_connections=6, max_connections_per_address=3)


def test_connections_that_come_at_once_are_closed_at_once():
    async def scenario(served, clients):
        gc.disable()  # it would close what is left lying about
        sockets = []
        try:
            for _ in range(40):  # the server accepts them in one turn of its loop
                sockets.append(socket.create_connection(("127.0.0.1", served.server.port)))
            await asyncio.sleep(0.5)
            assert await clients.get("/health") == (200, False)
            open_ones = 0
            for client in sockets:
                client.setblocking(False)
                try:
                    assert client.recv(1) == b""
                except BlockingIOError:
                    open_ones += 1
                except ConnectionResetError:
                    pass
            assert open_ones == 3
        finally:
            gc.enable()
            for client in sockets:
                client.close()

    run(scenario, max_connections=4, max_connections_per_address=4)


def test_clients_by_address():
    assert client_of("127.0.0.1") == client_of("::ffff:127.0.0.1") == "127.0.0.1"
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:1") == "2001:db8::/64"
    assert client_of("2001:db8:0:1::1") != client_of("2001:db8::1")
    assert client_of("fe80::1%eth0") == "fe80::/64"


# --- file descriptors ----------------------------------------------------------------------------------------------


def test_H7_without_descriptors_health_answers_and_streams_live(caplog):
    """The only other connection has a request: spare descriptors serve health checks."""

    async def scenario(served, clients):
        loop = asyncio.get_running_loop()
        stream = await clients.stream()
        address = ("127.0.0.1", served.server.port)
        silent, checks = ([socket.socket() for _ in range(count)] for count in (12, 2))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken: list[int] = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (checks[-1].fileno() + 20, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            for client in (*silent, *checks):
                client.setblocking(False)
            for client in silent:
                await loop.sock_connect(client, address)
            used_s, began_s = time.process_time(), time.monotonic()
            await asyncio.sleep(1.5)
            used_s, passed_s = time.process_time() - used_s, time.monotonic() - began_s
            for check in checks:
                await loop.sock_connect(check, address)
                await asyncio.sleep(0.12)
                time.sleep(0.4)  # the server stands still: this silence is not the client's
                for _ in range(4):
                    await asyncio.sleep(0)
                await loop.sock_sendall(check, HEALTH)
                async with asyncio.timeout(20):
                    assert b" 200 " in await loop.sock_recv(check, 4096)
            assert await goes_on(stream)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in taken:
                os.close(descriptor)
            for client in (*silent, *checks):
                client.close()
        assert used_s < 0.5 * passed_s  # it does not spin
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 1
        assert "too many open files" in errors[0]
        stream[1].close()
        await served.idle()
        assert await clients.get("/v1/models") == (200, False)

    run(scenario)

"""The proxy that misbehaves, before an echo server."""

import contextlib
import socket
import threading
import time
from collections.abc import Generator

import pytest

from benchmarks.server.faulty_proxy import Condition, FaultyProxy


def _echo(listener: socket.socket) -> None:
    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


@pytest.fixture
def proxy() -> Generator[FaultyProxy]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        with FaultyProxy(listener.getsockname()[1]) as made:
            yield made
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def client(proxy) -> Generator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5.0) as made:
        assert _ask(made, b"a") == b"a"
        yield made


def _ask(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    found = b""
    while len(found) < len(data):
        piece = client.recv(len(data) - len(found))
        if not piece:
            break
        found += piece
    return found


def _read_into(client: socket.socket, found: bytearray) -> None:
    while piece := client.recv(10):
        found += piece


def test_a_healthy_proxy_forwards_all_bytes_and_the_end(proxy, client):
    data = bytes(range(256)) * 1000
    assert _ask(client, data) == data
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""


def test_a_delay_is_added_in_each_direction(proxy, client):
    proxy.set(Condition(delay_s=0.2))
    started_s = time.monotonic()
    assert _ask(client, b"slow") == b"slow"
    assert time.monotonic() - started_s >= 0.4


def test_losses_come_late_and_in_order(proxy, client):
    proxy.set(Condition(loss=1.0))
    started_s = time.monotonic()
    assert _ask(client, b"first") + _ask(client, b"second") == b"firstsecond"
    assert time.monotonic() - started_s >= 0.8


def test_a_half_open_connection_is_silent_until_healed(proxy, client):
    proxy.set(Condition(half_open=True))
    client.sendall(b"held")
    client.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.recv(1)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=0.3) as other:  # accepted, and silent too
        other.sendall(b"other")
        with pytest.raises(TimeoutError):
            other.recv(1)
        proxy.heal()
        for socket_, expected in ((client, b"held"), (other, b"other")):
            socket_.settimeout(5.0)
            assert socket_.recv(len(expected), socket.MSG_WAITALL) == expected


def test_bytes_trickle_and_flow_once_healed(proxy, client):
    proxy.set(Condition(bytes_per_s=20.0))
    client.sendall(b"x" * 1000)
    time.sleep(0.5)
    client.settimeout(0.1)
    assert 1 <= len(client.recv(1000)) <= 20
    proxy.heal()
    client.settimeout(5.0)
    assert client.recv(1)


def test_a_connection_is_cut_after_so_many_bytes(proxy, client):
    proxy.set(Condition(cut_after=3))
    client.sendall(b"abcdef")
    found = bytearray()
    with pytest.raises(ConnectionResetError):
        _read_into(client, found)
    assert b"abc".startswith(found)  # what had arrived is lost with the reset, or not


def test_a_reset_reaches_both_sides_and_later_connections_work(proxy, client):
    assert proxy.reset() == 1
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5.0) as other:
        assert _ask(other, b"again") == b"again"


def test_a_refusing_proxy_resets_new_connections_alone(proxy, client):
    proxy.set(Condition(refuses=True))
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", proxy.port), timeout=5.0) as other,
    ):
        other.recv(1)
    assert _ask(client, b"open") == b"open"

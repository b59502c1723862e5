"""Broken HTTP/2 at the gRPC port: frames of wrong lengths and orders, floods, headers without an end, half prefaces.

gRPC's own server, which is C++, reads them in this process. Whatever comes, what it sends are whole frames, and
afterwards it answers as before, with its memory and its descriptors where they were.
"""

import contextlib
import select
import socket
import struct
import time
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2
from hypothesis import strategies as st

from serve.client import make_request
from serve.protos.aptjax.v1 import apt_serve_pb2
from tests.support.cases import num_cases
from tests.support.fuzzing import Fuzzed, cases, fuzz, fuzzing, open_descriptors
from tests.support.toy_serving import expected_tokens

_LIMIT_S = 30.0
_SETTLE_S = 0.02
_MEMORY_BYTES = 24 << 20

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x4, 0x8, 0x20


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", length: int | None = None) -> bytes:
    """One frame; `length` is what it claims."""
    size = (len(payload) if length is None else length) & 0xFFFFFF
    return (
        size.to_bytes(3, "big")
        + bytes([kind & 0xFF, flags & 0xFF])
        + (stream & 0xFFFFFFFF).to_bytes(4, "big")
        + payload
    )


def field(name: bytes, value: bytes) -> bytes:
    """A header, not indexed and not compressed."""

    def text(data: bytes) -> bytes:
        if len(data) < 127:
            return bytes([len(data)]) + data
        rest, size = len(data) - 127, b"\x7f"
        while rest >= 128:
            size, rest = size + bytes([rest % 128 + 128]), rest // 128
        return size + bytes([rest]) + data

    return b"\x00" + text(name) + text(value)


_HEALTH = b"/grpc.health.v1.Health/Check"
_GENERATE = b"/aptjax.v1.AptServe/Generate"
_MESSAGE = make_request("hi", max_tokens=2).SerializeToString()


def call_fields(path: bytes = _HEALTH) -> list[tuple[bytes, bytes]]:
    return [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"), (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]  # fmt: skip


def message(data: bytes = b"", length: int | None = None, compressed: int = 0) -> bytes:
    """gRPC's own frame within DATA."""
    return bytes([compressed]) + struct.pack(">I", (len(data) if length is None else length) & 0xFFFFFFFF) + data


_NUMBERS = [0, 1, 2, 3, 5, 127, 128, 16_384, 16_385, 65_535, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 1]
_STREAMS = [0, 1, 1, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**32 - 1]
_FIELDS = [
    (b":method", b"GET"), (b":path", b""), (b":path", b"/"), (b":path", b"/x" * 9000), (b":status", b"200"), (b":x", b"y"), (b"", b""), (b"A", b"b"), (b"te", b"gzip"), (b"connection", b"close"),
    (b"content-length", b"5"), (b"grpc-timeout", b"1n"), (b"grpc-timeout", b"99999999H"), (b"grpc-timeout", b"-1S"), (b"grpc-timeout", b"1.5S"), (b"grpc-encoding", b"gzip"), (b"grpc-encoding", b"x"),
    (b"x-bin", b"====\xff"), (b"x", b"\x00\r\n"), (b"x", b"a" * 20_000), (b"authorization", b"Bearer \xff"), (b"content-type", b"text/html"), (b"content-type", b"application/grpc+x"), (b"grpc-accept-encoding", b"," * 500),
]  # fmt: skip


def _settings(draw: st.DrawFn) -> bytes:
    pairs = draw(
        st.lists(
            st.tuples(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 9, 0xFE03, 0xFFFF]), st.sampled_from(_NUMBERS)),
            max_size=4,
        )
    )
    return b"".join(struct.pack(">HI", name, value & 0xFFFFFFFF) for name, value in pairs)


@st.composite
def call(draw: st.DrawFn, stream: int) -> bytes:
    """Frames of one call, some of them wrong."""
    wrong = draw(st.integers(0, 2)) == 0
    path = draw(st.sampled_from([_HEALTH, _GENERATE, b"/aptjax.v1.AptServe/GetStats", b"/x/y"]))
    fields = call_fields(path)
    if wrong:
        for extra in draw(st.lists(st.sampled_from(_FIELDS), max_size=3)):
            fields.insert(draw(st.integers(0, len(fields))), extra)
        if draw(st.booleans()):
            del fields[draw(st.integers(0, len(fields) - 1))]
    block = b"".join(field(*pair) for pair in fields)
    if wrong and draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(block)))
        block = block[:at] + draw(st.binary(min_size=1, max_size=5)) + block[at:]
    cut = draw(st.integers(0, len(block))) if draw(st.integers(0, 3)) == 0 else None
    end = draw(st.sampled_from([END_HEADERS] * 6 + [0]))
    if cut is None:
        head = frame(HEADERS, end, stream, block)
    else:
        head = frame(HEADERS, 0, stream, block[:cut]) + frame(CONTINUATION, end, stream, block[cut:])
    body = message(_MESSAGE if path == _GENERATE else b"")
    if wrong:
        body = draw(
            st.sampled_from(
                [
                    body,
                    body[:-1],
                    body[:3],
                    message(b"\xff" * 9),
                    message(b"", 2**32 - 1),
                    message(_MESSAGE, compressed=1),
                    message(b"x", compressed=7),
                    body * 3,
                    b"",
                ]
            )
        )
    tail = frame(DATA, draw(st.sampled_from([END_STREAM, END_STREAM, 0, PADDED])), stream, body)
    return head + tail + (frame(RST_STREAM, 0, stream, struct.pack(">I", 8)) if wrong and draw(st.booleans()) else b"")


@st.composite
def odd_frames(draw: st.DrawFn) -> bytes:
    """Frames that are wrong, or too many."""
    stream = draw(st.sampled_from(_STREAMS))
    number = struct.pack(">I", draw(st.sampled_from(_NUMBERS)))
    kind = draw(st.integers(0, 13))
    times = draw(st.sampled_from([1, 1, 3, 200, 2000]))
    if kind == 0:
        payload = draw(st.binary(max_size=40))
        return frame(
            draw(st.integers(0, 255)),
            draw(st.integers(0, 255)),
            stream,
            payload,
            draw(st.sampled_from([None, None, *_NUMBERS])),
        )
    if kind == 1:
        return (
            frame(
                SETTINGS,
                draw(st.sampled_from([0, 0, 1])),
                draw(st.sampled_from([0, 0, 1])),
                _settings(draw) + draw(st.sampled_from([b"", b"", b"x"])),
            )
            * times
        )
    if kind == 2:
        return (
            frame(
                PING,
                draw(st.sampled_from([0, 1])),
                draw(st.sampled_from([0, 0, 1])),
                draw(st.sampled_from([b"12345678", b"1", b"123456789"])),
            )
            * times
        )
    if kind == 3:
        return (
            frame(WINDOW_UPDATE, 0, stream, draw(st.sampled_from([number, b"\x7f\xff\xff\xff", b"\0\0\0\0", b"1"])))
            * times
        )
    if kind == 4:
        return frame(RST_STREAM, 0, stream, draw(st.sampled_from([number, b"", b"12345"]))) * times
    if kind == 5:
        return (
            frame(PRIORITY, 0, stream, draw(st.sampled_from([struct.pack(">IB", stream, 255), b"", b"1234"]))) * times
        )
    if kind == 6:
        return frame(
            GOAWAY,
            0,
            draw(st.sampled_from([0, 1])),
            draw(st.sampled_from([b"", number, number + b"\0\0\0\0" + b"x" * 50])),
        )
    if kind == 7:  # headers that never end
        block = field(b"x", b"y" * draw(st.sampled_from([0, 100, 16_000])))
        return frame(HEADERS, 0, 1, b"".join(field(*pair) for pair in call_fields())) + frame(
            CONTINUATION, 0, 1, block
        ) * min(times, 300)
    if kind == 8:
        return frame(CONTINUATION, draw(st.sampled_from([0, END_HEADERS])), stream, draw(st.binary(max_size=20)))
    if kind == 9:  # opened and reset, again and again
        head = b"".join(field(*pair) for pair in call_fields(_GENERATE))
        body = message(_MESSAGE)
        return b"".join(
            frame(HEADERS, END_HEADERS, 2 * i + 1, head) + frame(DATA, END_STREAM, 2 * i + 1, body) + frame(RST_STREAM, 0, 2 * i + 1, struct.pack(">I", 8))
            for i in range(min(times, 200))
        )  # fmt: skip
    if kind == 10:
        return frame(PUSH_PROMISE, END_HEADERS, stream, number + b"".join(field(*pair) for pair in call_fields()))
    if kind == 11:
        return frame(
            DATA,
            draw(st.sampled_from([0, END_STREAM, PADDED])),
            stream,
            draw(st.sampled_from([b"", b"\xff", b"\xff" + b"x" * 50, b"x" * 16_384, b"x" * 16_385])),
        )
    if kind == 12:  # an index of no table, a table size beyond the limit, a length without end
        return frame(
            HEADERS,
            END_HEADERS,
            1,
            draw(
                st.sampled_from(
                    [
                        b"\xff\xff\xff\xff\x0f",
                        b"\x3f\xff\xff\xff\xff\x0f",
                        b"\x00\x7f" + b"\xff" * 20,
                        b"\xbe",
                        b"\x80",
                        b"\x00\x81\xff\x00",
                    ]
                )
            ),
        )
    return draw(st.binary(max_size=200))


@st.composite
def connections(draw: st.DrawFn) -> list[bytes]:
    """The pieces that one connection sends."""
    start = draw(
        st.sampled_from(
            [PREFACE] * 12
            + [
                PREFACE[:10],
                b"",
                PREFACE[:-1] + b"x",
                b"GET / HTTP/1.1\r\n\r\n",
                PREFACE * 2,
                b"\x16\x03\x01\x00\x05hello",
            ]
        )
    )
    parts = [start, frame(SETTINGS, 0, 0, _settings(draw) if draw(st.integers(0, 3)) == 0 else b"")]
    for number in range(draw(st.integers(0, 4))):
        parts.append(draw(call(2 * number + 1) if draw(st.booleans()) else odd_frames()))
    data = b"".join(parts)
    at = draw(st.integers(0, min(len(data), 600)))
    change = draw(st.integers(0, 11))
    if change == 0:
        data = data[:at]
    elif change == 1:
        data = data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at + draw(st.integers(0, 4)) :]
    cut = draw(st.integers(0, len(data)))
    return [piece for piece in (data[:cut], data[cut:]) if piece]


def check_frames(received: bytes) -> None:
    """Check that the server sent frames, the last one perhaps cut off."""
    if received.startswith((b"HTTP/1", b"GET")):
        return
    while len(received) >= 9:
        length, kind = int.from_bytes(received[:3], "big"), received[3]
        assert length <= 1 << 24
        assert kind <= 9, received[:40]
        received = received[9 + length :]


class Port:
    """Connections to the gRPC port of one server."""

    def __init__(self, fuzzed: Fuzzed) -> None:
        self.fuzzed = fuzzed
        self.port = fuzzed.served.grpc_server.port
        self.num_connections = self.num_answered = 0
        self._base: int | None = None
        self.check_alive()

    def check(self, pieces: list[bytes], end: str) -> None:
        received = self._send(pieces, end)
        self.num_connections += 1
        # gRPC's status of a call, in its trailers.
        self.num_answered += b"grpc-status" in received
        check_frames(received)
        if self.num_connections % 250 == 0:
            self.check_alive()

    def _send(self, pieces: list[bytes], end: str) -> bytes:
        received = b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_LIMIT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(ConnectionError, BrokenPipeError):
                for piece in pieces:
                    connection.settimeout(_LIMIT_S)
                    try:
                        connection.sendall(piece)
                    except TimeoutError:  # it reads no more, as it must answer more than anybody takes
                        break
                    while select.select([connection], [], [], 0)[0] and (data := connection.recv(1 << 16)):
                        received += data
                if end == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return received
                while end == "settle" and select.select([connection], [], [], _SETTLE_S)[0]:
                    data = connection.recv(1 << 16)
                    if not data:
                        return received
                    received += data
                if end == "answer":
                    while b"grpc-status" not in received and (data := connection.recv(1 << 16)):
                        received += data
                with contextlib.suppress(OSError):  # it has closed the connection
                    connection.shutdown(socket.SHUT_WR)
        return received

    def check_alive(self) -> None:
        """The server answers, on a connection of its own and as it must; nothing is left of the others."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            checked = channel.unary_unary(_HEALTH.decode())(b"", timeout=_LIMIT_S)
            assert health_pb2.HealthCheckResponse.FromString(checked).status == health_pb2.HealthCheckResponse.SERVING
            params = {"max_tokens": 4, "temperature": 0.0}
            token_ids = self._generate(channel, params)
        assert token_ids == expected_tokens(self.fuzzed.parts.build_request(prompt="hello", params=params))
        self.fuzzed.check_clean()
        if self._base is None:
            self._base = open_descriptors() + 4  # `check_clean` and this may keep a connection each, both ends
        assert open_descriptors(at_most=self._base) <= self._base

    def _generate(self, channel: grpc.Channel, params: dict[str, Any], attempts: int = 3) -> list[int]:
        request = make_request("hello", **params).SerializeToString()
        try:
            answer = channel.unary_stream(_GENERATE.decode())(request, timeout=_LIMIT_S)
            return [i for part in answer for i in apt_serve_pb2.GenerateResponse.FromString(part).token_ids]
        except grpc.RpcError as error:
            # While it tears down hundreds of calls of a lost connection, grpc.aio cancels one of another now and then,
            # before it calls any handler; a server without a line of ours does so too.
            is_cancelled = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.CANCELLED
            if not is_cancelled or attempts == 1:
                raise
        time.sleep(1.0)
        return self._generate(channel, params, attempts - 1)


@pytest.fixture(scope="module")
def fuzzed():
    with fuzzing("gRPC bytes", 0) as fuzzed:
        yield fuzzed


@pytest.mark.seeds
def test_any_frames_leave_the_server_as_it_was(fuzzed):
    total = cases(num_cases(200, 500), 5_000, 100_000)
    port = Port(fuzzed)
    ends = st.sampled_from(["settle", "settle", "settle", "half", "reset"])
    fuzz("raw-grpc", port.check, total, may_crash=True, pieces=connections(), end=ends)
    port.check_alive()
    print(f"  {port.num_answered} connections had an answer of a call")
    assert port.num_answered > port.num_connections / 20


_HEAD = b"".join(field(*pair) for pair in call_fields(_GENERATE))
_FLOODS = {
    "settings": frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)) * 2000,
    "pings": frame(PING, 0, 0, b"12345678") * 2000,
    "window updates": frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * 2000,
    "priorities": frame(PRIORITY, 0, 1, struct.pack(">IB", 0, 255)) * 2000,
    "resets": b"".join(
        frame(HEADERS, END_HEADERS, 2 * i + 1, _HEAD) + frame(RST_STREAM, 0, 2 * i + 1, struct.pack(">I", 8)) for i in range(200)
    ),
    "headers without an end": frame(HEADERS, 0, 1, _HEAD) + frame(CONTINUATION, 0, 1, field(b"x", b"y" * 16_000)) * 200,
    "calls without an end": b"".join(frame(HEADERS, END_HEADERS, 2 * i + 1, _HEAD) for i in range(200)),
    "a message without an end": frame(HEADERS, END_HEADERS, 1, _HEAD) + frame(DATA, 0, 1, message(b"x" * 16_000, 2**31)),
}  # fmt: skip


def test_floods_take_no_memory(fuzzed):
    """The server holds no more after many rounds than after the first."""
    port = Port(fuzzed)
    memory = []
    for _ in range(3):
        for _ in range(cases(6, 60)):
            for flood in _FLOODS.values():
                port.check([PREFACE + frame(SETTINGS, 0, 0), flood], "half")
        port.check_alive()
        memory.append(psutil.Process().memory_info().rss)
    assert memory[2] - memory[1] < _MEMORY_BYTES, [size >> 20 for size in memory]


def test_calls_cut_off_at_every_byte(fuzzed):
    head = b"".join(field(*pair) for pair in call_fields(_GENERATE))
    whole = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, head) + frame(DATA, END_STREAM, 1, message(_MESSAGE))  # fmt: skip
    port = Port(fuzzed)
    for end in ("half", "reset"):
        for length in range(0, len(whole), cases(5, 1)):
            port.check([whole[:length]], end)
    port.check([whole], "answer")
    port.check_alive()
    assert port.num_answered == 1

"""Any bytes at the HTTP port: broken requests, shapes that smuggle one request in another, requests cut off anywhere.

Whatever comes, what the server sends are whole HTTP/1.1 responses without a status of 5xx, a message whose end is
doubtful is the last one of its connection, and afterwards the server answers as before and has closed every descriptor.
"""

import contextlib
import http.client
import itertools
import json
import logging
import re
import select
import socket
import struct
import time
from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from tests.support.cases import num_cases
from tests.support.fuzzing import KEY, Fuzzed, cases, fuzz, fuzzing, open_descriptors

_LIMIT_S = 30.0
_SETTLE_S = 0.02
_BODY = b'{"prompt": "hi", "max_tokens": 2}'
_AUTHORIZED = b"authorization: Bearer " + KEY.encode()
STATUSES = {200, 400, 401, 403, 404, 405, 408, 411, 413, 415, 417, 421, 426, 429, 431, 501, 505}


@pytest.fixture(scope="module")
def fuzzed():
    with fuzzing("HTTP bytes", 0) as fuzzed:
        yield fuzzed


# --- what is sent ---------------------------------------------------------------------------------------------------

_NUMBERS = [b"+33", b"-1", b"0x21", b"33,33", b"33, 33", b"33;", b" 33 ", b"", b"1e2", b"033", b"3 3", b"\xb2", b"0", b"1", b"34", b"9" * 19, b"9" * 400, b"2147483648", b"33\x00", "٣٣".encode()]  # fmt: skip
_CODINGS = [b"chunked", b"Chunked", b"identity", b"chunked, chunked", b"gzip, chunked", b"chunked, gzip", b"xchunked", b"chunked;q=1", b"chunked,", b",chunked", b'"chunked"', b"\x0bchunked", b"chunked\x00", b"\tchunked", b"", b"chun\nked"]  # fmt: skip
_METHODS = [b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"TRACE", b"CONNECT", b"PRI", b"get", b"", b"G\x00T", b"GE T", b"GET\t", b"\xff", b"A" * 300, b"{}", b"\x16\x03\x01\x02"]  # fmt: skip
_TARGETS = [b"/health", b"/v1/completions", b"/v1/models", b"http://x/health", b"https://evil.example/v1/completions", b"//health", b"/health//", b"*", b"x:80", b"", b"/%00", b"/\x00", b"/..%2f..%2fetc/passwd", b"/../../etc/passwd", b"/health?" + b"a" * 3000, b"/h ealth", b"/\xc3\xa9", b"/health#x", b"\\health", b"/" + b"%2e/" * 50, b"/v1/models/" + b"a" * 3000, b"/%", b"/%ff%fe", b"/health HTTP/1.1\r\nx: y"]  # fmt: skip
_VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.2", b"HTTP/1.9", b"HTTP/9.9", b"http/1.1", b"HTTP/1.1 ", b"HTTP/11", b"HTTP/1", b"HTTP/1.1.1", b"HTTP/ 1.1", b"", b"ICY/1.1", b"HTTP/1.\xb2"]  # fmt: skip
_ENDS = [b"\r\n", b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n ", b"\x00\r\n", b"", b"\x85", b"\xe2\x80\xa8"]
_LINES = [
    b"host: y", b"host:", b"Host : y", b" folded", b"\tfolded", b"no colon", b": empty", b"a b: c", b"x: \x00", b"x: a\rb", b"x:\x7f", b"x: \xff", b"\xffx: y",
    b"expect: 100-continue", b"expect: x", b"connection: close", b"connection: upgrade", b"upgrade: h2c", b"upgrade: websocket", b"connection: keep-alive, close",
    b"http2-settings: AAMAAABkAAQAAP__", b"x: " + b"a" * 20_000, b"x" * 20_000 + b": a", b"content-encoding: gzip", b"accept: */*", b"content-type: text/plain",
    b"content-length: 33", b"transfer-encoding: chunked", b"transfer-encoding : chunked", b"content_length: 5", b"proxy-connection: close", b"range: bytes=0-", b"cookie: " + b"a=b; " * 200,
    b"authorization: Basic eDp5", b"authorization: Bearer", b"authorization:\x00", b"x-forwarded-for: ::1", b"te: trailers", b"trailer: content-length", b"date:",
]  # fmt: skip
_SIZES = [b"21", b"021", b"0x21", b"-1", b"+21", b" 21", b"21 ", b"21;a=b", b"21;" + b"a" * 5000, b"", b"g", b"f" * 8, b"f" * 16, b"f" * 40, b"2\x001", b"20", b"22", b"0", b"00", b"21\n", b"2_1"]  # fmt: skip
_BYTES = [b"\x00", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b":", b"\xff", b"0", b",", b"\x80", b"{", b'"']
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"


def _chunked(mostly: Callable[..., bytes], body: bytes) -> bytes:
    size, end = mostly(b"%x" % len(body), _SIZES), mostly(b"\r\n", _ENDS)
    trailer = mostly(b"", [b"x: y\r\n", b"content-length: 3\r\n", b"x\r\n", b"x: " + b"a" * 20_000 + b"\r\n"])
    last = mostly(b"0", [b"", b"00000000", b"-0", b"0;x", b"1"])
    return size + end + body + mostly(b"\r\n", [b"", b"xx"]) + last + b"\r\n" + trailer + b"\r\n"


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """One request, with something wrong about it more often than not."""

    wrong = draw(st.sampled_from([0, 0, 1, 4]))  # in this message: nothing, a little, much

    def mostly(usual: bytes, others: list[bytes], of: int = 10) -> bytes:
        return draw(st.sampled_from(others)) if draw(st.integers(1, of)) <= wrong else usual

    kind = draw(st.sampled_from(["get", "post", "post", "chunked", "chunked", "both", "head"]))
    lines = [mostly(b"host: x", [b"x: y"]), mostly(_AUTHORIZED, [b"authorization: x"])]
    body = b""
    method, target = b"GET", b"/health"
    if kind == "head":
        method, target = b"HEAD", b"/v1/models"
    if kind in ("post", "chunked", "both"):
        method, target, body = (
            b"POST",
            draw(st.sampled_from([b"/v1/completions", b"/tokenize", b"/v1/chat/completions"])),
            _BODY,
        )
        lines.append(b"content-type: application/json")
        if kind != "chunked":
            lines.append(b"content-length: " + mostly(b"%d" % len(body), _NUMBERS))
        if kind != "post":
            lines.append(b"transfer-encoding: " + mostly(b"chunked", _CODINGS))
            body = _chunked(mostly, body)
        body += mostly(b"", [SMUGGLED])
    for line in draw(st.lists(st.sampled_from(_LINES), max_size=2)) if wrong else ():
        lines.insert(draw(st.integers(0, len(lines))), line)
    lines += [mostly(b"accept: */*", [b"\r\n".join(b"x-%d: y" % i for i in range(count)) for count in (100, 900)], 50)]
    start = b" ".join([mostly(method, _METHODS), mostly(target, _TARGETS), mostly(b"HTTP/1.1", _VERSIONS)])
    ends = [mostly(b"\r\n", _ENDS, 40) for _ in range(len(lines) + 2)]
    return b"".join(part + end for part, end in zip([start, *lines, b""], ends, strict=True)) + body


@st.composite
def connections(draw: st.DrawFn) -> list[bytes]:
    """The pieces that one connection sends."""
    if draw(st.integers(0, 14)) == 0:
        data = draw(st.binary(max_size=300))
    else:
        data = b"".join(draw(st.lists(messages(), min_size=1, max_size=draw(st.sampled_from([1, 1, 2, 5])))))
    change = draw(st.integers(0, 15))
    at = draw(st.integers(0, min(len(data), 4000)))
    if change == 0:
        data = data[:at]
    elif change == 1:
        data = data[:at] + draw(st.sampled_from(_BYTES)) + data[at:]
    elif change == 2:
        data = data[:at] + draw(st.sampled_from(_BYTES)) + data[at + 1 :]
    cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=3))})
    return [data[a:b] for a, b in itertools.pairwise(cuts)]


ENDS = st.sampled_from(["settle", "settle", "settle", "half", "reset", "close"])
"""Wait for an answer, then end the sending half; end it at once; reset; close. "stay" leaves the connection open."""


# --- what comes back ------------------------------------------------------------------------------------------------

_STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) [ -~]*")
_HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [ -~]*")


def read_responses(data: bytes, *, closed: bool, heads: bool) -> list[tuple[int, dict[bytes, bytes], bytes]]:
    """Status, headers and body of each response; the last one may be cut off.

    Args:
        closed: the connection ended while the server may still have been writing.
        heads: a response may have no body although it has a length.
    """
    found: list[tuple[int, dict[bytes, bytes], bytes]] = []
    while data:
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            assert closed, data[:200]
            break
        line, *lines = head.split(b"\r\n")
        status = _STATUS_LINE.fullmatch(line)
        assert status, line[:200]
        assert all(_HEADER.fullmatch(line) for line in lines), lines
        headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)}
        code = int(status[1])
        if code == 100:
            data = rest
            continue
        if headers.get(b"transfer-encoding") == b"chunked":
            assert b"content-length" not in headers
            body, ended = b"", False
            while not ended and b"\r\n" in rest:
                size, _, rest = rest.partition(b"\r\n")
                count = int(size, 16)
                body, rest, ended = body + rest[:count], rest[count + 2 :], count == 0
            assert ended or closed
        elif b"content-length" in headers:
            count = int(headers[b"content-length"])
            if heads and (not rest or rest.startswith(b"HTTP/1.1 ")):
                count = 0
            body, rest = rest[:count], rest[count:]
            assert len(body) == count or closed, (body, count)
        else:
            assert code in (204, 304) or headers.get(b"connection") == b"close", headers
            body, rest = rest, b""
        found.append((code, headers, body))
        data = rest
    return found


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=_LIMIT_S)


def exchange(port: int, pieces: list[bytes], end: str, staying: list[socket.socket]) -> bytes | None:
    """Send pieces and end; what came back until the server closed, None: nobody looked."""
    connection = connect(port)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    received = b""
    try:
        with contextlib.suppress(ConnectionError):  # the server may have closed it already
            for piece in pieces:
                connection.sendall(piece)
            if end == "stay":
                staying.append(connection)
                if len(staying) > 40:
                    staying.pop(0).close()
                return None
            if end == "close":
                return None
            if end == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return None
            if end == "settle":
                while select.select([connection], [], [], _SETTLE_S)[0]:
                    data = connection.recv(1 << 16)
                    if not data:
                        return received
                    received += data
            connection.shutdown(socket.SHUT_WR)
            began_s = time.monotonic()
            while data := connection.recv(1 << 16):
                received += data
                assert time.monotonic() - began_s < _LIMIT_S
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise AssertionError("the connection is still open, although its sender has ended") from None
    finally:
        if end != "stay":
            connection.close()
    return received


class _Errors(logging.Handler):
    """Lines of the log that say that something went wrong here."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class Port:
    """Connections to one server, and counts of what it answered."""

    def __init__(self, fuzzed: Fuzzed) -> None:
        self.fuzzed = fuzzed
        self.port = fuzzed.served.server.port
        self.staying: list[socket.socket] = []
        self.counts: dict[int, int] = {}
        self.num_connections = 0
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=_LIMIT_S)) as client:
            client.request("GET", "/health")
            client.getresponse().read()
        self._base = open_descriptors() + 2  # the connection that `check_clean` may keep, both ends
        self._errors = _Errors()

    def __enter__(self) -> "Port":
        logging.getLogger().addHandler(self._errors)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.staying:
            connection.close()
        logging.getLogger().removeHandler(self._errors)

    def check(self, pieces: list[bytes], end: str) -> None:
        data = b"".join(pieces)
        received = exchange(self.port, pieces, end, self.staying)
        self.num_connections += 1
        if received is not None:
            self.check_received(data, received)
        if not self.staying:
            self._wait_until_over()
        lines, self._errors.lines = self._errors.lines, []
        assert not lines, "".join(lines)
        if self.num_connections % 250 == 0:
            self.check_alive()

    def _wait_until_over(self) -> None:
        """Whatever it did, the server is done with the last connection."""
        uvicorn = self.fuzzed.served.server._uvicorn
        assert uvicorn is not None
        state, end_s = uvicorn.server_state, time.monotonic() + _LIMIT_S
        while state.tasks:
            assert time.monotonic() < end_s, "the connection has ended, its request goes on"
            time.sleep(0.0005)

    def check_received(self, data: bytes, received: bytes) -> None:
        responses = read_responses(received, closed=True, heads=b"HEAD" in data)
        for status, headers, body in responses:
            self.counts[status] = self.counts.get(status, 0) + 1
            assert status in STATUSES, (status, body)
            if status >= 400 and body and len(body) == int(headers.get(b"content-length", b"0")):
                error = json.loads(body)["error"]
                assert "\n" not in error["message"], error
            assert b"root:" not in body
        for (_, headers, _), _after in itertools.pairwise(responses):
            assert headers.get(b"connection", b"").lower() != b"close", "a response after the last one"

    def check_alive(self) -> None:
        """The server answers, nothing is left of any connection."""
        for connection in self.staying:
            connection.close()
        self.staying.clear()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=_LIMIT_S)) as client:
            client.request("GET", "/health")
            response = client.getresponse()
            assert response.status == 200
            response.read()
        self.fuzzed.check_clean()
        assert open_descriptors(at_most=self._base) <= self._base


@pytest.mark.seeds
def test_any_bytes_get_whole_answers_or_none(fuzzed):
    total = cases(num_cases(200, 500), 5_000, 100_000)
    with Port(fuzzed) as port:
        fuzz("raw-http", port.check, total, pieces=connections(), end=ENDS)
        port.check_alive()
    print(f"  answers {dict(sorted(port.counts.items()))}")
    assert port.counts.get(200, 0) > total / 20, port.counts
    assert port.counts.get(400, 0) > total / 20, port.counts


_WHOLE = [
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + _AUTHORIZED + b"\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY,
    b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + _AUTHORIZED + b"\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n10\r\n" + _BODY[:16] + b"\r\n11\r\n" + _BODY[16:] + b"\r\n0\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + _AUTHORIZED + b"\r\n\r\n",
]  # fmt: skip


def test_requests_cut_off_at_every_byte(fuzzed):
    step = cases(7, 1)
    with Port(fuzzed) as port:
        for number, whole in enumerate(_WHOLE):
            for end in ("half", "reset", "stay"):
                for length in range(number, len(whole), step):
                    port.check([whole[:length]], end)
        port.check_alive()
    assert set(port.counts) <= {200, 400}


# A message whose end two readers may see in two places must be the last of its connection, and what follows it must not
# be taken for a request.
_DOUBTFUL = {
    "a length and a coding": b"content-length: 33\r\ntransfer-encoding: chunked",
    "two lengths": b"content-length: 33\r\ncontent-length: 34",
    "a list of lengths": b"content-length: 33, 34",
    "a signed length": b"content-length: +33",
    "a negative length": b"content-length: -33",
    "a hexadecimal length": b"content-length: 0x21",
    "an empty length": b"content-length:",
    "a length of other digits": "content-length: ٣٣".encode(),
    "a coding that is not known": b"transfer-encoding: xchunked",
    "a coding after chunked": b"transfer-encoding: chunked, gzip",
    "chunked twice": b"transfer-encoding: chunked, chunked",
    "two codings": b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
    "a space before the colon": b"content-length : 33",
    "a length and chunks": b"content-length: 33\r\ntransfer-encoding: chunked",
    "chunks and a length": b"transfer-encoding: chunked\r\ncontent-length: 33",
    "a line that ends without CR": b"x: y\ncontent-length: 33",
    "a value in two lines": b"x: y\r\n content-length: 33",
    "a NUL in the length": b"content-length: 3\x003",
}


@pytest.mark.parametrize("kind", _DOUBTFUL)
def test_a_message_whose_end_is_doubtful_is_the_last(fuzzed, kind):
    lines = b"host: x\r\n" + _AUTHORIZED + b"\r\ncontent-type: application/json\r\n" + _DOUBTFUL[kind]
    data = b"POST /tokenize HTTP/1.1\r\n" + lines + b"\r\n\r\n" + _BODY + SMUGGLED
    with connect(fuzzed.served.server.port) as connection:
        connection.sendall(data)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(1 << 16):
                received += piece
    responses = read_responses(received, closed=True, heads=False)
    assert [status for status, _, _ in responses] in ([400], [501])

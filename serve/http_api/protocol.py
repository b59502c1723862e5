"""uvicorn's HTTP/1.1 connection, with the limits that a public server needs.

* The number of connections is limited (`serve.http_api.acceptor`).
* The size of a request's head and the time to receive it are limited.
* A client that reads nothing of its response for some seconds is disconnected, which cancels its request. Unread output
  is limited by small buffers in this process and the kernel. A stalled client on this machine is detected before these
  buffers are full (`serve.http_api.stalled_clients`).
* TCP keepalive detects peers that have vanished.

The application limits the time for the body of a request (`serve.http_api.calls`).
"""

import asyncio
import dataclasses
import logging
import re
import socket
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from serve.compact_json import json_bytes
from serve.http_api.acceptor import Connection
from serve.http_api.calls import CLOSE_HEADERS, ResponseWriter
from serve.http_api.errors import BadCallError, to_http_error
from serve.http_api.stalled_clients import StalledClientDetector
from serve.observability.call_record import NO_ID

logger = logging.getLogger(__name__)

HEALTH_PATHS = (b"/health", b"/ready")

_BUFFER_BYTES = 32 << 10
_STALL_TICK_S = 0.25
_DOUBTFUL_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")
_TOO_MANY = BadCallError(
    503, "too_many_connections", "this server, or this client, has too many open connections", CLOSE_HEADERS
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on connections."""

    max_connections: int = 2048
    """Maximum number of open connections; beyond it, the connection that has been idle longest is closed."""
    max_connections_per_address: int | None = None
    """Maximum number of connections per client; None: three quarters of `max_connections`."""
    max_header_bytes: int = 16 << 10
    """Maximum size of the head of one request in bytes."""
    header_timeout_s: float = 10.0
    """Time limit in seconds for the head of a request, from the start of the connection or the head's first byte."""
    write_stall_s: float = 2.5
    """Seconds after which a client that reads nothing of its response is disconnected."""
    keepalive_time_s: int = 20
    """Seconds of silence after which a connection is probed."""
    keepalive_timeout_s: int = 10
    """Seconds after which unanswered probes close the connection."""
    unacknowledged_s: int = 30
    """Seconds after which a connection with unacknowledged bytes is closed, even if the response is complete."""

    @property
    def max_per_address(self) -> int:
        """Maximum number of connections per client."""
        given = self.max_connections_per_address
        return max(1, self.max_connections * 3 // 4) if given is None else given


class StrictConnection(h11.Connection):
    """h11's parser, extended to reject heads that a proxy may interpret differently: heads with both `content-length`
    and `transfer-encoding`, lines that end without a CR, or header values that continue on the next line."""

    has_other_version = False
    """True if the last head had a major HTTP version other than 1."""

    def next_event(self) -> Any:
        """See `h11.Connection`.

        Raises:
            h11.RemoteProtocolError: the request is malformed or ambiguous, or has an unsupported HTTP version.
        """
        unread = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            head = unread[: len(unread) - len(self.trailing_data[0])]
            if not event.http_version.startswith(b"1."):
                self.has_other_version = True
                raise h11.RemoteProtocolError("unsupported HTTP version (only 1.x)")
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names or _DOUBTFUL_LINE.search(head):
                raise h11.RemoteProtocolError("a head that can be read in two ways")
        return event


class LimitedHttpProtocol(H11Protocol):
    """Protocol of one HTTP connection.

    Args:
        connection: the acceptor's record of the connection.
        limits: limits on connections.
        stalled: detects clients that have stopped reading; shared by all connections.
        *args, **kwargs: see `H11Protocol`.
    """

    def __init__(
        self,
        *args: Any,
        connection: Connection,
        limits: ConnectionLimits,
        stalled: StalledClientDetector,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection(h11.SERVER, limits.max_header_bytes)
        if connection.is_reserved:
            self.app = _health_only(self.app)
        self._connection = connection
        self._limits = limits
        self._stalled = stalled
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._received = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._connection.transport = transport
        transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        self._set_socket(transport.get_extra_info("socket"))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._head_timer = _cancelled(self._head_timer)
        self._write_timer = _cancelled(self._write_timer)
        self._stalled.forget(self)
        self._connection.closed()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received = True
        super().data_received(data)
        # Once the response is complete, the rest of the body must arrive within the time limit for heads.
        answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not answered:
            self._head_timer = _cancelled(self._head_timer)
        elif self._head_timer is None and not self.transport.is_closing():
            self._await_head()
        self._note_request()

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        self._stalled.forget(self)
        super().on_response_complete()
        self._note_request()  # the next request may have arrived already

    def eof_received(self) -> None:
        """See `asyncio.Protocol`. Notifies the application of the disconnect at once, because the connection is closed
        only after all output has been written, which may never happen."""
        self._abandon_request()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        now_s = self.loop.time()
        self._write_timer = self.loop.call_later(
            _STALL_TICK_S, self._check_writes, self.transport.get_write_buffer_size(), now_s
        )

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._write_timer = _cancelled(self._write_timer)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; abort it if part of its last response has not been sent."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Respond to a request that cannot be parsed; see `H11Protocol`."""
        if len(self.conn.trailing_data[0]) > self._limits.max_header_bytes:
            self._reject(
                431,
                "headers_too_large",
                f"a request head may have at most {self._limits.max_header_bytes >> 10} KiB",
            )
        elif isinstance(self.conn, StrictConnection) and self.conn.has_other_version:
            self._reject(505, "http_version_not_supported", "only HTTP/1.1 and HTTP/1.0 are served here")
        else:
            self._reject(400, "malformed_request", "this is not a valid HTTP/1.1 request")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._received:
            self._reject(
                408, "headers_timeout", f"the head of a request must arrive within {self._limits.header_timeout_s:g} s"
            )
        else:
            self.transport.close()

    def _note_request(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        self._connection.set_busy(busy)
        if busy:
            self._stalled.watch(self, self.transport.get_extra_info("socket"), self._cut_off)

    def _check_writes(self, least: int, since_s: float) -> None:
        """Disconnect the client if the number of unsent bytes has not reached a new minimum for `write_stall_s`
        seconds; otherwise check again later.

        Args:
            least: smallest number of unsent bytes so far.
            since_s: time on the event loop's clock when that number was reached.
        """
        unsent, now_s = self.transport.get_write_buffer_size(), self.loop.time()
        if unsent < least:
            least, since_s = unsent, now_s
        if now_s - since_s >= self._limits.write_stall_s:
            self._cut_off()
        else:
            self._write_timer = self.loop.call_later(_STALL_TICK_S, self._check_writes, least, since_s)

    def _cut_off(self) -> None:
        logger.info("disconnecting a client that has read nothing for %g s", self._limits.write_stall_s)
        self.transport.abort()

    def _abandon_request(self) -> None:
        """Notify the application that the client has disconnected. Further output of the application is discarded."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            self.flow.resume_writing()

    def _reject(self, status: int, code: str, message: str) -> None:
        """Send an error response and close the connection. A request in flight is abandoned; if its response has begun,
        the connection is aborted."""
        self._abandon_request()
        failure = to_http_error(BadCallError(status, code, message, {"connection": "close"}), "")
        body = json_bytes(failure.body())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            *failure.headers.items(),
        ]
        try:
            parts = [
                self.conn.send(h11.Response(status_code=status, headers=headers)),
                self.conn.send(h11.Data(data=body)),
                self.conn.send(h11.EndOfMessage()),
            ]
        except h11.LocalProtocolError:  # a response has begun
            self.transport.abort()
            return
        self.transport.write(b"".join(part for part in parts if part))
        self.transport.close()

    def _set_socket(self, connection: Any) -> None:
        if connection is None:
            return
        options = [(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)]
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            options += self._tcp_options()
        try:
            for level, option, value in options:
                connection.setsockopt(level, option, value)
        except OSError:  # the peer has already disconnected
            logger.debug("could not set the socket options of a connection")

    def _tcp_options(self) -> list[tuple[int, int, int]]:
        limits = self._limits
        options = [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            # asyncio sets this only if the listener's protocol number is TCP. Without it, the last write waits until
            # the client has acknowledged earlier writes, which takes up to 40 ms.
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        ]
        # Not every system has these options.
        for name, value in (
            ("TCP_KEEPIDLE", limits.keepalive_time_s),
            ("TCP_KEEPINTVL", max(1, limits.keepalive_timeout_s // 2)),
            ("TCP_KEEPCNT", 2),
            ("TCP_USER_TIMEOUT", limits.unacknowledged_s * 1000),
        ):
            option = getattr(socket, name, None)
            if option is not None:
                options.append((socket.IPPROTO_TCP, option, value))
        return options


def _health_only(app: Any) -> ASGIApp:
    """Return an application that serves only health checks, one per connection, and answers 503 to other calls."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope["raw_path"] in HEALTH_PATHS:
            await app(scope, receive, send_and_close)
        else:
            await ResponseWriter(send).fail(to_http_error(_TOO_MANY, NO_ID), scope["path"])

    return serve


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()

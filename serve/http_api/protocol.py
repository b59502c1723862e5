"""uvicorn's HTTP/1.1 connection, with the limits that a public server needs.

* The number of connections is limited.
* The head of a request must arrive within some seconds and fit some kilobytes.
* A client that reads nothing of its response for some seconds loses the connection, and with it the request. The unread
  output is
  bounded: small buffers here and in the kernel. A stalled client on this machine is detected before they are full
  (`serve.http_api.stalled_clients`).
* The kernel's probes detect a peer that vanished.

The application limits the time for the body of a request (`serve.http_api.calls`).
"""

import asyncio
import dataclasses
import logging
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from serve.compact_json import json_bytes
from serve.http_api.errors import BadCallError, to_http_error
from serve.http_api.stalled_clients import StalledClientDetector

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 32 << 10
_STALL_TICK_S = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Bounds of connections."""

    max_connections: int = 2048
    """Further connections are closed at once."""
    max_header_bytes: int = 16 << 10
    """Limit of the head of one request."""
    header_timeout_s: float = 10.0
    """Time limit for the head of one request, from the connection or its first byte."""
    write_stall_s: float = 2.5
    """A client that reads nothing of its response for this long is disconnected."""
    keepalive_time_s: int = 20
    """A silent connection is probed after this time, in whole seconds."""
    keepalive_timeout_s: int = 10
    """An unanswered probe closes the connection after this time."""
    unacknowledged_s: int = 30
    """Bytes that are not acknowledged for this long end the connection, even if the response is complete."""


class LimitedHttpProtocol(H11Protocol):
    """One connection; uvicorn makes it.

    Args:
        limits: of this server.
        stalled: detects clients that have stopped reading; shared by all connections.
        *args, **kwargs: uvicorn's.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, stalled: StalledClientDetector, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._stalled = stalled
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._received = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        self._set_socket(transport.get_extra_info("socket"))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._head_timer = _cancelled(self._head_timer)
        self._write_timer = _cancelled(self._write_timer)
        self._stalled.forget(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received = True
        super().data_received(data)
        # The rest of a body is not awaited once the response is complete.
        answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not answered:
            self._head_timer = _cancelled(self._head_timer)
        elif self._head_timer is None and not self.transport.is_closing():
            self._await_head()
        self._watch_reader()

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        self._stalled.forget(self)
        super().on_response_complete()
        self._watch_reader()  # the next request may have come already

    def eof_received(self) -> None:
        """See `asyncio.Protocol`. The application is told now: the connection closes only when all is written, which
        may be never."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            self.flow.resume_writing()

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
        """Close an idle connection, at once if its last response is still unread."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Respond to bytes that are not HTTP."""
        if len(self.conn.trailing_data[0]) > self._limits.max_header_bytes:
            self._reject(
                431, "headers_too_large", f"the head of a request must fit {self._limits.max_header_bytes >> 10} KiB"
            )
        else:
            self._reject(400, "malformed_request", "this is no HTTP/1.1 request")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._received:
            self._reject(
                408, "headers_timeout", f"the head of a request must come within {self._limits.header_timeout_s:g} s"
            )
        else:
            self.transport.close()

    def _watch_reader(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stalled.watch(self, self.transport.get_extra_info("socket"), self._cut_off)

    def _check_writes(self, least: int, since_s: float) -> None:
        """Disconnect the client if `least` bytes have been unsent since `since_s` for too long."""
        unsent, now_s = self.transport.get_write_buffer_size(), self.loop.time()
        if unsent < least:
            least, since_s = unsent, now_s
        if now_s - since_s >= self._limits.write_stall_s:
            self._cut_off()
        else:
            self._write_timer = self.loop.call_later(_STALL_TICK_S, self._check_writes, least, since_s)

    def _cut_off(self) -> None:
        logger.info("a client took nothing for %g s and is cut off", self._limits.write_stall_s)
        self.transport.abort()

    def _reject(self, status: int, code: str, message: str) -> None:
        """Respond outside of any request, and close."""
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
        limits = self._limits
        if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        options = [
            (socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            # asyncio sets it only where the listener was made for TCP by name. Without it what is written last waits
            # until the client has acknowledged what came before, which takes it up to 40 ms.
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        ]
        # Not every system has these.
        for name, value in (
            ("TCP_KEEPIDLE", limits.keepalive_time_s),
            ("TCP_KEEPINTVL", max(1, limits.keepalive_timeout_s // 2)),
            ("TCP_KEEPCNT", 2),
            ("TCP_USER_TIMEOUT", limits.unacknowledged_s * 1000),
        ):
            option = getattr(socket, name, None)
            if option is not None:
                options.append((socket.IPPROTO_TCP, option, value))
        try:
            for level, option, value in options:
                connection.setsockopt(level, option, value)
        except OSError:  # the peer has gone already
            logger.debug("the options of a connection could not be set")


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()

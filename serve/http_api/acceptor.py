"""Accepts HTTP connections within limits on their total number, their number per client, and file descriptors.

* At a limit, a new connection replaces the connection that has been idle longest; at the limit per client, the longest
  idle connection of that client. Connections with a request in flight are never closed.
* If no connection can be closed, the new connection becomes one of a few reserved connections: it can call `/health`
  and `/ready`, and gets 503 for any other path.
* Some file descriptors are kept free for files, gRPC and the engine; a connection that would use one of them counts as
  beyond the limits. When no descriptor is left at all, silent connections are closed or, if there are none, spare
  descriptors are used for reserved connections. Accepting then pauses for a moment.
"""

import asyncio
import collections
import contextlib
import ipaddress
import logging
import os
import resource
import select
import socket
import ssl
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

_ACCEPTS_AT_ONCE = 64
_MAX_RESERVED = 16
"""Maximum number of reserved connections, which are accepted beyond the limits and serve only health checks."""
_MAX_DESCRIPTORS_KEPT = 64
_NUM_SPARES = 8
_TURN_S = 0.05
_SILENT_TURNS = 5
"""Number of turns of `_TURN_S` without a request after which a connection may be closed if descriptors or reserved
connections run out. Turns of the event loop are counted instead of seconds, because a blocked event loop does not read
requests that have arrived."""
_LOG_PERIOD_S = 60.0
_HANDSHAKE_TIMEOUT_S = 10.0


class Connection:
    """An accepted connection.

    Args:
        address: identity of its client (`client_of`).
        is_reserved: the connection is beyond the limits and serves only health checks.
        acceptor: the acceptor that accepted it.
    """

    def __init__(self, address: str, is_reserved: bool, acceptor: "Acceptor") -> None:
        self.address, self.is_reserved = address, is_reserved
        self.is_busy = False
        """True while a request is in flight."""
        self.turns = 0
        """For a reserved connection, the number of `_TURN_S` turns of the event loop since it was accepted; for another
        connection, the number of times that descriptors have run out since its last request."""
        self.transport: asyncio.Transport | None = None
        """Transport of the connection; None until it is connected, that is, during the TLS handshake."""
        self.task: asyncio.Task[None] | None = None
        """Task that creates the transport; None once it has finished."""
        self.is_started = False
        """True once `task` has begun to run."""
        self._acceptor = acceptor

    def set_busy(self, busy: bool) -> None:
        """Record whether a request is in flight."""
        if busy != self.is_busy:
            self.is_busy = busy
            self._acceptor.on_busy(self)

    def closed(self) -> None:
        """Record that the connection has been closed."""
        self._acceptor.on_closed(self)


class Acceptor:
    """Accepts the connections of one listener. Used from one event loop only.

    Args:
        listener: a listening socket; closed by `close`.
        make_protocol: creates the protocol of an accepted connection; the protocol must set the connection's transport
            and call its `set_busy` and `closed`.
        max_connections: maximum number of connections in total.
        max_per_address: maximum number of connections per client.
        tls: TLS settings; None: plaintext.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Connection], asyncio.Protocol],
        *,
        max_connections: int,
        max_per_address: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener, self._make_protocol, self._tls = listener, make_protocol, tls
        self._max_connections, self._max_per_address = max_connections, max_per_address
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = 1 << 30 if limit == resource.RLIM_INFINITY else limit
        self._max_descriptor = limit - min(_MAX_DESCRIPTORS_KEPT, limit // 4)
        self._loop = asyncio.get_running_loop()
        self._open: set[Connection] = set()
        self._by_address: collections.Counter[str] = collections.Counter()
        self._idle: dict[Connection, None] = {}
        """Connections without a request in flight, longest idle first."""
        self._reserved: dict[Connection, None] = {}
        self._spares: list[int] = []
        self._resume: asyncio.TimerHandle | None = None
        self._turn: asyncio.TimerHandle | None = None
        """Timer that counts turns while there are reserved connections."""
        self._logged_s = -_LOG_PERIOD_S
        listener.setblocking(False)
        self._take_spares()
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop accepting and close the listener. Open connections stay open."""
        for timer in (self._resume, self._turn):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._give_spares()

    def on_busy(self, connection: Connection) -> None:
        """See `Connection.set_busy`."""
        if connection in self._open:
            self._idle.pop(connection, None)
            if not connection.is_busy:
                self._idle[connection] = None
                connection.turns = 0

    def on_closed(self, connection: Connection) -> None:
        """See `Connection.closed`; it may be called twice."""
        self._reserved.pop(connection, None)
        self._idle.pop(connection, None)
        if connection in self._open:
            self._open.remove(connection)
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    # --- accepting ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._on_failure(error)
                return
            if not self._admit(accepted, _client_at(address)):
                return  # a connection closed for this one frees its descriptor only in the next turn of the loop

    def _on_failure(self, error: OSError) -> None:
        """Pause accepting after `accept` has failed. First close silent connections; if there are none, use the spare
        descriptors to accept reserved connections, which may be health checks."""
        if self._loop.time() - self._logged_s >= _LOG_PERIOD_S:
            self._logged_s = self._loop.time()
            reason = os.strerror(error.errno or 0).lower()
            logger.error(
                "cannot accept connections (%d are open): %s; 'ulimit -n' shows the limit on open files",
                len(self._open),
                reason,
            )
        self._end_silent_reserved()
        for connection in self._idle:
            connection.turns += 1
        if not self._end_first(_silent(self._idle), _NUM_SPARES):
            count = len(self._spares)
            self._give_spares()
            for _ in range(count):
                try:
                    accepted, address = self._listener.accept()
                except OSError:
                    break
                self._admit(accepted, _client_at(address), must_reserve=True)
        self._loop.remove_reader(self._listener)
        self._resume = self._loop.call_later(_TURN_S, self._go_on)

    def _go_on(self) -> None:
        self._take_spares()
        self._loop.add_reader(self._listener, self._accept)

    def _take_spares(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._spares) < _NUM_SPARES:
                self._spares.append(os.open(os.devnull, os.O_RDONLY))

    def _give_spares(self) -> None:
        while self._spares:
            os.close(self._spares.pop())

    def _admit(self, accepted: socket.socket, address: str, *, must_reserve: bool = False) -> bool:
        """Start serving an accepted connection, or close it. Returns True if it is a regular connection and no other
        connection was closed for it."""
        had_room, room = False, not must_reserve
        if room and self._by_address[address] >= self._max_per_address:
            room = self._end_first((other for other in self._idle if other.address == address), 1)
        # The kernel gives the lowest free descriptor, so all lower descriptors are in use.
        elif room and (len(self._open) >= self._max_connections or accepted.fileno() >= self._max_descriptor):
            room = self._end_first(self._idle, 1)
        else:
            had_room = room
        if not room and len(self._reserved) >= _MAX_RESERVED:
            self._end_silent_reserved()
            if len(self._reserved) >= _MAX_RESERVED:
                accepted.close()
                return False
        connection = Connection(address, not room, self)
        if room:
            self._open.add(connection)
            self._by_address[address] += 1
            self._idle[connection] = None
        else:
            self._reserved[connection] = None
            if self._turn is None:
                self._turn = self._loop.call_later(_TURN_S, self._count_turn)
        accepted.setblocking(False)
        connection.task = task = self._loop.create_task(self._connect(accepted, connection))
        task.add_done_callback(lambda _: self._on_connected(accepted, connection))
        return had_room

    @staticmethod
    def _on_connected(accepted: socket.socket, connection: Connection) -> None:
        connection.task = None  # breaks a reference cycle that would keep the socket open
        if not connection.is_started:  # cancelled before it began: nothing else closes the socket
            accepted.close()

    async def _connect(self, accepted: socket.socket, connection: Connection) -> None:
        connection.is_started = True
        timeout_s = None if self._tls is None else _HANDSHAKE_TIMEOUT_S
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(connection), accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, asyncio.CancelledError) as error:  # not TLS, too slow, disconnected, or replaced
            logger.debug("a connection could not be set up: %r", error)
            connection.closed()
        except BaseException:
            connection.closed()
            raise

    def _end_first(self, connections: Iterable[Connection], count: int) -> bool:
        """Close the first `count` connections that can be closed. Returns False if no connection can be closed."""
        ended = 0
        for connection in list(connections):
            if ended == count:
                break
            transport = connection.transport
            if transport is None:
                if connection.task is not None:
                    connection.task.cancel()
            elif transport.get_write_buffer_size():  # part of the response has not been sent
                continue
            else:
                transport.abort()
            connection.closed()
            ended += 1
        return ended > 0

    def _count_turn(self) -> None:
        for connection in self._reserved:
            connection.turns += 1
        self._turn = self._loop.call_later(_TURN_S, self._count_turn) if self._reserved else None

    def _end_silent_reserved(self) -> None:
        silent = _silent(self._reserved)
        self._end_first(silent, len(silent))


def _silent(connections: Iterable[Connection]) -> list[Connection]:
    return [
        other for other in connections if not other.is_busy and other.turns >= _SILENT_TURNS and not _is_readable(other)
    ]


def _is_readable(connection: Connection) -> bool:
    """Return whether the connection has received bytes that the event loop has not read yet."""
    descriptor = -1 if connection.transport is None else connection.transport.get_extra_info("socket").fileno()
    if descriptor < 0:  # not connected yet, or closed
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _client_at(address: tuple | str) -> str:
    """Return the identity of the client at a socket address; all clients of a Unix socket count as one client."""
    return client_of(address[0]) if isinstance(address, tuple) else "unix"


def client_of(address: str) -> str:
    """Return the identity of a client: its IPv4 address, or the /64 network of its IPv6 address, because one client may
    use all addresses of that network."""
    bare = address.partition("%")[0]
    try:
        parsed = ipaddress.ip_address(bare)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return bare

"""Accepts HTTP connections, within limits of their number, of each client's and of file descriptors.

* Where there are too many, the one that has been without a request for longest makes room for the new one: one of the
  same client, if it is the client that has too many. A request in flight is never ended.
* If all have a request in flight, some more are accepted, which get `/health` and `/ready`, and 503 for anything else.
* Some descriptors are left to files, gRPC and the engine: a connection beyond them is one too many. When there is none
  at all, a few spare ones serve such connections, and accepting pauses.
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
"""Connections beyond the limits, for health checks."""
_MAX_DESCRIPTORS_KEPT = 64
_NUM_SPARES = 8
_TURN_S = 0.05
_SILENT_TURNS = 5
"""Turns of the loop without a request after which a connection may be closed where descriptors or the reserve run out. Turns, as a loop that stood still in between had no chance to read it."""
_LOG_PERIOD_S = 60.0
_HANDSHAKE_TIMEOUT_S = 10.0


class Connection:
    """An accepted connection.

    Args:
        address: of its client.
        is_reserved: it is one too many, and gets health checks alone.
        acceptor: has accepted it.
    """

    def __init__(self, address: str, is_reserved: bool, acceptor: "Acceptor") -> None:
        self.address, self.is_reserved = address, is_reserved
        self.is_busy = False
        """True while a request is in flight."""
        self.turns = 0
        """How many times `_TURN_S` have passed, and the loop has turned, since it was reserved; for others, how often
        there was no descriptor since it has had no request."""
        self.transport: asyncio.Transport | None = None
        """None until the protocol has it: during the TLS handshake."""
        self.task: asyncio.Task[None] | None = None
        """Makes the transport."""
        self.is_started = False
        """True once `task` has begun."""
        self._acceptor = acceptor

    def set_busy(self, busy: bool) -> None:
        """Note whether a request is in flight."""
        if busy != self.is_busy:
            self.is_busy = busy
            self._acceptor.on_busy(self)

    def closed(self) -> None:
        """Note that it has ended."""
        self._acceptor.on_closed(self)


class Acceptor:
    """Accepts the connections of one listener; one event loop.

    Args:
        listener: a listening socket; closed by `close`.
        make_protocol: makes the protocol of an accepted connection; it must tell the connection its transport, whether
            it is busy, and its end.
        max_connections: in all.
        max_per_address: of one client.
        tls: None: plaintext.
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
        """Connections without a request, longest idle first."""
        self._reserved: dict[Connection, None] = {}
        self._spares: list[int] = []
        self._resume: asyncio.TimerHandle | None = None
        self._turn: asyncio.TimerHandle | None = None
        """Set while there are reserved connections."""
        self._logged_s = -_LOG_PERIOD_S
        listener.setblocking(False)
        self._take_spares()
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more."""
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
        """See `Connection.closed`; it may come twice."""
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
                return  # what has ended for it is closed in the next turn of the loop

    def _on_failure(self, error: OSError) -> None:
        """Pause. Silent connections end; if there are none, spare descriptors serve what may be a health check."""
        if self._loop.time() - self._logged_s >= _LOG_PERIOD_S:
            self._logged_s = self._loop.time()
            reason = os.strerror(error.errno or 0).lower()
            logger.error(
                "cannot accept connections, %d are open: %s ('ulimit -n' is the limit of open files)",
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
        """Serve a connection; return whether there was room for it."""
        had_room, room = False, not must_reserve
        if room and self._by_address[address] >= self._max_per_address:
            room = self._end_first((other for other in self._idle if other.address == address), 1)
        # The kernel gives the lowest descriptor that is free: those below are in use.
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
        connection.task = None  # a cycle, which would keep the socket
        if not connection.is_started:  # cancelled before it began: nobody else closes the socket
            accepted.close()

    async def _connect(self, accepted: socket.socket, connection: Connection) -> None:
        connection.is_started = True
        timeout_s = None if self._tls is None else _HANDSHAKE_TIMEOUT_S
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(connection), accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, asyncio.CancelledError) as error:  # no TLS, too slow, gone, or one too many
            logger.debug("a connection was not made: %r", error)
            connection.closed()
        except BaseException:
            connection.closed()
            raise

    def _end_first(self, connections: Iterable[Connection], count: int) -> bool:
        """End the first `count` that can be ended; return False if there is none."""
        ended = 0
        for connection in list(connections):
            if ended == count:
                break
            transport = connection.transport
            if transport is None:
                if connection.task is not None:
                    connection.task.cancel()
            elif transport.get_write_buffer_size():  # the response has not gone
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
    """Return whether bytes wait that the loop has not read yet."""
    descriptor = -1 if connection.transport is None else connection.transport.get_extra_info("socket").fileno()
    if descriptor < 0:  # not connected yet, or closed
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _client_at(address: tuple | str) -> str:
    """`client_of` an address of the kernel; all of a unix socket are one client."""
    return client_of(address[0]) if isinstance(address, tuple) else "unix"


def client_of(address: str) -> str:
    """Return the identity of a client: its address; for IPv6 its network of 64 bits, all of which it may use."""
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

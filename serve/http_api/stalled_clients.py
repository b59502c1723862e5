"""Detection of stalled clients on this machine: a stopped process reads nothing, but its kernel goes on acknowledging.

TCP cannot tell a stalled client from a slow one until the buffers of both ends are full, which takes hundreds
of tokens, and HTTP/1.1 has no ping (gRPC has one: `serve.grpc_api.server`). If both ends are on one machine, as with a
gateway or a sidecar, Linux reports how many bytes the other end has received and not read. Acknowledged minus unread
bytes is what it has read, which must grow while anything is unread.

For clients on other machines, or behind network address translation, nothing is found and nothing happens.
"""

import asyncio
import re
import socket
import struct
from collections.abc import Callable, Collection
from pathlib import Path

_TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
_TICK_S = 0.25
_UNREAD = re.compile(rb"^ *\d+: (\S+) (\S+) \S+ [^\s:]+:(?!00000000)(\S+)", re.MULTILINE)
"""Lines of sockets that have something to read: own and other address, bytes."""
_ACKNOWLEDGED = struct.Struct("=120xQ")
"""`tcpi_bytes_acked` of Linux's `struct tcp_info`."""


class StalledClientDetector:
    """Watches connections while responses are streamed over them; one event loop.

    Args:
        limit_s: time without reading after which a client is stalled.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._watched: dict[object, _Reader] = {}
        self._looking: asyncio.Task[None] | None = None

    def watch(self, key: object, connection: socket.socket, stopped: Callable[[], None]) -> None:
        """Call `stopped` once if the other end of the connection stops reading unread bytes."""
        reader = None if key in self._watched else _Reader.of(connection, stopped)
        if reader is not None:
            self._watched[key] = reader
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())

    def forget(self, key: object) -> None:
        """Stop watching: the response or the connection has ended."""
        self._watched.pop(key, None)

    async def _look(self) -> None:
        """Check all connections periodically, as long as any is watched."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(_TICK_S)
        while self._watched:
            # In this order: what is acknowledged in between is then not taken for read.
            acknowledged = {key: reader.acknowledged() for key, reader in self._watched.items()}
            families = {reader.family for reader in self._watched.values()}
            # In a thread: the table has all connections of the machine, closed ones among them.
            unread = await loop.run_in_executor(None, _unread, families)
            for key, reader in list(self._watched.items()):
                if key in acknowledged and reader.has_stopped(
                    acknowledged[key], unread.get(reader.name), loop.time(), self._limit_s
                ):
                    del self._watched[key]
                    reader.stopped()
            await asyncio.sleep(_TICK_S)
        self._looking = None


class _Reader:
    """The other end of a connection."""

    def __init__(self, connection: socket.socket, name: tuple[str, str], stopped: Callable[[], None]) -> None:
        self.family, self.name, self.stopped = connection.family, name, stopped
        self._connection = connection
        self._read = -1
        self._read_at_s = 0.0

    @staticmethod
    def of(connection: socket.socket, stopped: Callable[[], None]) -> "_Reader | None":
        """None: the other end is on another machine as far as can be seen from here."""
        try:
            here, there = connection.getsockname(), connection.getpeername()
        except OSError:
            return None
        if connection.family not in _TABLES or here[0] != there[0]:
            return None
        family = connection.family
        return _Reader(connection, (_in_table(family, there), _in_table(family, here)), stopped)

    def acknowledged(self) -> int | None:
        """Bytes that have arrived there."""
        try:
            data = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except (OSError, AttributeError):
            return None
        return _ACKNOWLEDGED.unpack_from(data)[0] if len(data) >= _ACKNOWLEDGED.size else None

    def has_stopped(self, acknowledged: int | None, unread: int | None, now_s: float, limit_s: float) -> bool:
        """Return whether bytes have stayed unread for `limit_s`."""
        # More may be unread than was acknowledged a moment ago; the first measurement starts the clock all the same.
        read = max((acknowledged or 0) - (unread or 0), 0)
        if not acknowledged or not unread or read > self._read:
            self._read, self._read_at_s = max(read, self._read), now_s
        return now_s - self._read_at_s >= limit_s


def _in_table(family: int, address: tuple) -> str:
    """An address as the kernel's table writes it: words of the machine's byte order, and the port."""
    packed = socket.inet_pton(family, address[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"


def _unread(families: Collection[int]) -> dict[tuple[str, str], int]:
    """Bytes that wait to be read, by the (own, other) addresses of sockets that have any."""
    found = {}
    for family in families:
        try:
            table = _TABLES[socket.AddressFamily(family)].read_bytes()
        except OSError:
            continue
        for own, other, waiting in _UNREAD.findall(table):
            found[own.decode(), other.decode()] = int(waiting, 16)
    return found

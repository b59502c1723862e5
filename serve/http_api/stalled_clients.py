"""Detection of stalled clients on this machine: a stopped process reads nothing, but its kernel still acknowledges data.

Over TCP, a stalled client looks like a slow client until the buffers at both ends are full, which takes hundreds of
tokens, and HTTP/1.1 has no ping, unlike gRPC (`serve.grpc_api.server`). If both ends are on the same machine, for
example with a gateway or a sidecar, Linux reports the number of bytes that the other end has received but not read. The
number of acknowledged bytes minus this number is the number of bytes read, which must grow while bytes are unread.

Clients on other machines or behind network address translation are not checked.
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
"""Matches lines of sockets that have unread bytes; groups: local address, remote address, unread bytes in hex."""
_ACKNOWLEDGED = struct.Struct("=120xQ")
"""`tcpi_bytes_acked` of Linux's `struct tcp_info`."""


class StalledClientDetector:
    """Watches connections while responses are streamed over them. Used from one event loop only.

    Args:
        limit_s: seconds without reading after which a client counts as stalled.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._watched: dict[object, _Reader] = {}
        self._looking: asyncio.Task[None] | None = None

    def watch(self, key: object, connection: socket.socket, stopped: Callable[[], None]) -> None:
        """Watch a connection, and call `stopped` once if its client stops reading although it has unread bytes.

        Do nothing if the client does not seem to be on this machine, or if `key` is already watched.
        """
        reader = None if key in self._watched else _Reader.of(connection, stopped)
        if reader is not None:
            self._watched[key] = reader
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())

    def forget(self, key: object) -> None:
        """Stop watching a connection, because its response or the connection has ended."""
        self._watched.pop(key, None)

    async def _look(self) -> None:
        """Check all connections periodically until no connection is watched."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(_TICK_S)
        while self._watched:
            # In this order, so that bytes acknowledged in between do not count as read.
            acknowledged = {key: reader.acknowledged() for key, reader in self._watched.items()}
            families = {reader.family for reader in self._watched.values()}
            # In a thread, because the table has all connections of the machine, including closed ones.
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
    """The client's end of a connection: counts the bytes that it has read."""

    def __init__(self, connection: socket.socket, name: tuple[str, str], stopped: Callable[[], None]) -> None:
        self.family, self.name, self.stopped = connection.family, name, stopped
        self._connection = connection
        self._read = -1
        self._read_at_s = 0.0

    @staticmethod
    def of(connection: socket.socket, stopped: Callable[[], None]) -> "_Reader | None":
        """Return the reader of a connection; None if the other end does not seem to be on this machine."""
        try:
            here, there = connection.getsockname(), connection.getpeername()
        except OSError:
            return None
        if connection.family not in _TABLES or here[0] != there[0]:
            return None
        family = connection.family
        return _Reader(connection, (_in_table(family, there), _in_table(family, here)), stopped)

    def acknowledged(self) -> int | None:
        """Return the number of bytes that the other end has acknowledged; None if the system does not report it."""
        try:
            data = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except (OSError, AttributeError):
            return None
        return _ACKNOWLEDGED.unpack_from(data)[0] if len(data) >= _ACKNOWLEDGED.size else None

    def has_stopped(self, acknowledged: int | None, unread: int | None, now_s: float, limit_s: float) -> bool:
        """Return whether the client has read nothing for `limit_s` seconds although bytes were unread."""
        # More bytes may be unread now than were acknowledged a moment ago. The first measurement starts the clock.
        read = max((acknowledged or 0) - (unread or 0), 0)
        if not acknowledged or not unread or read > self._read:
            self._read, self._read_at_s = max(read, self._read), now_s
        return now_s - self._read_at_s >= limit_s


def _in_table(family: int, address: tuple) -> str:
    """Return an address in the format of the kernel's table: hexadecimal words in the machine's byte order, and the
    port."""
    packed = socket.inet_pton(family, address[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"


def _unread(families: Collection[int]) -> dict[tuple[str, str], int]:
    """Return a map from (own, other) address to number of unread bytes, for all sockets with unread bytes."""
    found = {}
    for family in families:
        try:
            table = _TABLES[socket.AddressFamily(family)].read_bytes()
        except OSError:
            continue
        for own, other, waiting in _UNREAD.findall(table):
            found[own.decode(), other.decode()] = int(waiting, 16)
    return found

"""TCP proxy that misbehaves on demand: it delays, loses, holds, trickles, cuts, resets and refuses."""

import asyncio
import contextlib
import dataclasses
import random
import socket
import struct
import threading
from typing import Any

_CHUNK_BYTES = 1 << 16
_RETRANSMISSION_S = 0.2
"""TCP's shortest time until it sends a lost packet again."""
_LINGER_NOT = struct.pack("ii", 1, 0)
"""SO_LINGER with which closing a socket sends RST."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
    """State of the network for all connections of a proxy."""

    delay_s: float = 0.0
    """Added to every chunk of bytes, in both directions."""
    loss: float = 0.0
    """Share of chunks that arrive late, after one to three retransmissions. TCP lets nothing get lost or out of
    order."""
    bytes_per_s: float | None = None
    """To the client; None: unlimited."""
    half_open: bool = False
    """Nothing is forwarded and nothing closed; new connections are accepted."""
    cut_after: int | None = None
    """Bytes to the client after which a connection is reset, counted from when this condition was set."""
    refuses: bool = False
    """New connections are reset."""


class FaultyProxy:
    """A proxy on 127.0.0.1 to another port of this machine, on an event loop in a thread of its own; a context.

    Args:
        target: port that it forwards to.
        seed: of the losses.

    Attributes:
        port: where it listens.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._condition = Condition()
        self._changed = asyncio.Event()
        self._open: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._thread.start()
        self._server: asyncio.Server = self._call(self._start())
        self.port: int = self._server.sockets[0].getsockname()[1]

    def set(self, condition: Condition) -> None:
        """Put all connections, open and new, under a condition."""
        self._call(self._set(condition))

    def heal(self) -> None:
        """Forward everything again; what was held is forwarded too."""
        self.set(Condition())

    def reset(self) -> int:
        """Reset all open connections on both sides; returns how many."""
        return self._call(self._reset())

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def close(self) -> None:
        """Reset everything and stop listening."""
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "FaultyProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30.0)

    # --- on the loop ---------------------------------------------------------------------------------------------

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_CHUNK_BYTES)

    async def _stop(self) -> None:
        self._server.close()
        await self._set(Condition(refuses=True))
        await self._reset()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _set(self, condition: Condition) -> None:
        self._condition = condition
        for connection in self._open:
            connection.num_down = 0
        self._changed.set()
        self._changed = asyncio.Event()

    async def _reset(self) -> int:
        count = len(self._open)
        for connection in list(self._open):
            connection.reset()
        return count

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        self._open.add(connection)
        try:
            if self._condition.refuses:
                connection.reset()
                return
            while self._condition.half_open:
                await self._changed.wait()
            try:
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target, limit=_CHUNK_BYTES)
            except OSError:  # as if the client had reached the closed port itself
                connection.reset()
                return
            connection.add(up_writer)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, up_writer, connection, to_client=False))
                pumps.create_task(self._pump(up_reader, writer, connection, to_client=True))
        except* (OSError, asyncio.IncompleteReadError):
            connection.reset()
        finally:
            self._open.discard(connection)
            connection.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: "_Connection", *, to_client: bool
    ) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            await self._hold()
            wait_s = self._condition.delay_s
            if self._random.random() < self._condition.loss:
                wait_s += _RETRANSMISSION_S * self._random.randint(1, 3)
            if wait_s:
                await asyncio.sleep(wait_s)
            if not to_client:
                writer.write(chunk)
                await writer.drain()
                continue
            while chunk:
                await self._hold()
                now = self._condition
                size = len(chunk)
                if now.bytes_per_s is not None:
                    size = 1
                if now.cut_after is not None:
                    size = min(size, now.cut_after - connection.num_down)
                if size <= 0:
                    connection.reset()
                    return
                writer.write(chunk[:size])
                await writer.drain()
                connection.num_down += size
                chunk = chunk[size:]
                if now.bytes_per_s is not None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), 1.0 / now.bytes_per_s)
        await self._hold()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _hold(self) -> None:
        while self._condition.half_open:
            await self._changed.wait()


class _Connection:
    """Both sides of a connection, as far as they are open."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self._writers = [client]
        self.num_down = 0
        """Bytes sent to the client since the last change of the condition."""

    def add(self, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)

    def reset(self) -> None:
        for writer in self._writers:
            given: socket.socket | None = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                if given is not None:
                    given.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            writer.transport.abort()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

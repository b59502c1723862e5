"""One HTTP call on its way between its client and a replica, in place of sockets."""

import asyncio
import collections
import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.support.serving_simulation.calls import Call, key_of

if TYPE_CHECKING:
    from tests.support.serving_simulation.replica import Replica

HIGH_WATER_BYTES = 2048
"""Bytes that a connection takes before it makes the writer wait."""
STALL_S = 5.0
"""A connection whose other end reads nothing for so long is cut, as the real server does."""
LATENCY_S = 0.001


class Connection:
    """One HTTP call on its way: what the client sends, what the application writes, and either's end.

    Args:
        replica: answers it.
        call: sends it.
    """

    def __init__(self, replica: "Replica", call: Call) -> None:
        self.world, self.replica, self.call = replica.world, replica, call
        self.arrival_s = self.world.loop.time()
        self.sent_body = False
        self.cut_s: float | None = None
        """When the server saw the client's end, or its own."""
        self.left_s: float | None = None
        self.buffered = 0
        self.most_buffered = 0
        self.is_blocked = False
        self.state = ""
        self._requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._responses: collections.deque[tuple[str, Any]] = collections.deque()
        self._has_news, self._drained = asyncio.Event(), asyncio.Event()
        self._stall_timer: asyncio.TimerHandle | None = None
        self._leaves_when_blocked = call.leaves == "blocked"
        self._under_way: collections.deque[Callable[[], None]] = collections.deque()
        self._num_arrived = 0
        """Number of those under way that are due; more than 0 while the network or the process stands still."""
        replica.connections.append(self)
        data = json.dumps(call.body).encode()
        headers = [
            (b"host", b"replica"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(data)),
        ]
        if call.tenant is not None:
            headers.append((b"authorization", b"Bearer " + key_of(call.tenant).encode()))
        path = "/v1/completions"
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
        }  # fmt: skip
        self._data = data
        self.task = self.world.loop.create_task(self._serve())

    async def _serve(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self.replica.app(self.scope, self._receive, self._send)
        self._to_client("closed", None)

    @property
    def is_flushed(self) -> bool:
        """The response has been written and read, or nobody will read it."""
        return self.task.done() and not self.buffered

    # --- the network: in order, later while it stands still -----------------------------------------------------------

    def _pass(self, deliver: Callable[[], None]) -> None:
        self._under_way.append(deliver)
        self.world.loop.call_later(LATENCY_S, self._arrive)

    def _arrive(self) -> None:
        """Timers of one moment may fire in any order; what is under way keeps its own."""
        self._num_arrived += 1
        if not self.replica.is_unreachable:
            self.release()

    def release(self) -> None:
        """Deliver what has arrived, or was held back."""
        while self._num_arrived:
            self._num_arrived -= 1
            self._under_way.popleft()()

    # --- the client's end ---------------------------------------------------------------------------------------------

    async def send_body(self) -> None:
        """Send the request; half of it first."""
        half = len(self._data) // 2
        self._to_server({"type": "http.request", "body": self._data[:half], "more_body": True})
        await asyncio.sleep(0.002)
        if self.left_s is None:
            self.sent_body = True
            self._to_server({"type": "http.request", "body": self._data[half:], "more_body": False})

    def leave(self) -> None:
        """Close the client's end."""
        if self.left_s is None:
            self.left_s = self.world.loop.time()
            self.state = self.replica.state_of(self)
            self._pass(self.cut)

    def cut(self) -> None:
        """The server sees that the client has gone."""
        if self.cut_s is None:
            self.cut_s = self.world.loop.time()
            self._requests.put_nowait({"type": "http.disconnect"})
            self._drop_buffer()
            self._to_client("closed", None)

    def _drop_buffer(self) -> None:
        self.buffered = 0
        self._drained.set()
        self._stop_timer()

    def reset(self) -> None:
        """The process is gone."""
        self.cut_s = self.world.loop.time()
        self._responses.append(("closed", None))
        self._has_news.set()
        self._drop_buffer()
        self.task.cancel()

    async def read(self) -> tuple[str, Any]:
        """The next message, ("start", status), ("body", bytes) or ("closed", None)."""
        while not self._responses:
            self._has_news.clear()
            await self._has_news.wait()
        return self._responses.popleft()

    def taken(self, size: int) -> None:
        """The client has read so many bytes."""
        if self.cut_s is not None:
            return
        self.buffered -= size
        self._stop_timer()
        if self.buffered > 0:
            self._start_timer()
        if self.buffered <= HIGH_WATER_BYTES // 2:
            self._drained.set()

    # --- the server's end ---------------------------------------------------------------------------------------------

    def _to_server(self, message: dict[str, Any]) -> None:
        self._pass(lambda: self._requests.put_nowait(message))

    def _to_client(self, what: str, value: Any) -> None:
        def deliver() -> None:
            self._responses.append((what, value))
            self._has_news.set()

        self._pass(deliver)

    async def _receive(self) -> dict[str, Any]:
        return await self._requests.get()

    async def _send(self, message: Any) -> None:
        if self.cut_s is not None:
            return
        if message["type"] == "http.response.start":
            self._to_client("start", message["status"])
            return
        data = message.get("body", b"")
        if data:
            if self.buffered == 0:
                self._start_timer()
            self.buffered += len(data)
            self.most_buffered = max(self.most_buffered, self.buffered - len(data))
            self._to_client("body", data)
        if not message.get("more_body", False):
            self._to_client("end", None)
        if self.buffered > HIGH_WATER_BYTES:
            self.is_blocked = True
            self.world.note["writer waits for a slow reader"] += 1
            if self._leaves_when_blocked:  # once
                self._leaves_when_blocked = False
                self.world.loop.call_later(0.05, self.leave)
            self._drained.clear()
            await self._drained.wait()
            self.is_blocked = False

    def _start_timer(self) -> None:
        def stalled() -> None:
            self.world.note["stalled reader cut"] += 1
            self.cut()

        if self._stall_timer is None and self.cut_s is None:
            self._stall_timer = self.world.loop.call_later(STALL_S, stalled)

    def _stop_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

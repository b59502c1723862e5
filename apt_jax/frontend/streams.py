"""Streams between the engine thread and asyncio code.

The outputs of a step are merged into the streams: each stream has at most one unread `OutputDelta`. The event loops
that read them are woken once per step. A slow reader gets more tokens at a time and delays no other reader; the memory
of a stream is bounded by the request's `max_tokens`. A stream ends once: with a delta that has a `finish_reason`, or
with an exception.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from apt_jax.errors import AptJaxError, EngineDeadError
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.request import EngineRequest, RequestMetrics

if TYPE_CHECKING:
    from apt_jax.frontend.start_stages import StartStatus

_UNKNOWN_START_S, _LONGEST_RETRY_S = 5.0, 60.0
_TAKEN_AT_ONCE = 16
"""Number of outputs that a reader takes in a row before other tasks of its event loop run."""


class EngineClosedError(EngineDeadError):
    """The engine rejects requests because it is shutting down, has been shut down, or is not ready, but not because of
    an error.

    Attributes:
        why: machine-readable reason, as llm-d's router defines it.
    """

    def __init__(self, message: str, *, why: Literal["shutting-down", "no-endpoints", "saturated"] = "shutting-down"):
        super().__init__(message)
        self.why = why


class EngineStartingError(EngineClosedError):
    """The engine is still starting.

    Attributes:
        status: status of the start; None: not known.
        retry_after_s: seconds after which to retry. At most 60, since OpenAI's clients ignore longer waits and retry at
            once.
    """

    def __init__(self, status: "StartStatus | None", what: str = "the server is starting"):
        super().__init__(f"{what}: {status or 'the model is not ready yet'}", why="no-endpoints")
        self.status = status
        left_s = None if status is None else status.left_s
        self.retry_after_s = _UNKNOWN_START_S if left_s is None else min(_LONGEST_RETRY_S, max(1.0, left_s))


class RequestStream:
    """The output of one request: an asynchronous iterator of `OutputDelta`s, for one reader.

    The last delta has a `finish_reason`. If there is no last delta, reading raises:
        DuplicateRequestError, InvalidRequestError, QueueFullError: the request was rejected; nothing was allocated.
        AptJaxError: the stream was cancelled before this read.
        TimeoutError: the deadline has passed.
        EngineDeadError: the engine has stopped or been shut down.

    Args:
        request: request that the output belongs to.
        deadline_s: time on the engine's clock, in seconds, at which the request is ended; None: no deadline.
        on_cancel: called with the stream when its reader cancels it.
        updated: event that is set when there is output to read, shared by the streams of a group; None: its own event.
    """

    def __init__(
        self,
        request: EngineRequest,
        deadline_s: float | None,
        on_cancel: "Callable[[RequestStream], None]",
        updated: asyncio.Event | None = None,
    ) -> None:
        self.request = request
        self.deadline_s = deadline_s
        self.event_loop = asyncio.get_running_loop()
        self.updated = asyncio.Event() if updated is None else updated
        self.cancelled = False
        self.metrics: RequestMetrics | None = None
        """Times of the request so far; set when the engine accepts it."""
        self._on_cancel = on_cancel
        self._lock = threading.Lock()
        self._unread: OutputDelta | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._read_to_end = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._read_to_end:
            self.updated.clear()
            delta = self._take()
            if delta is not None:
                return delta
            await self.updated.wait()
        raise StopAsyncIteration

    def _take(self) -> OutputDelta | None:
        """Return unread output, if any; raises the error that ended the stream, but only once."""
        with self._lock:
            delta, self._unread = self._unread, None
            if delta is not None:
                self._read_to_end = delta.finished
            elif self._error is not None and not self._read_to_end:
                self._read_to_end = True
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error  # no reference cycle through its traceback
            return delta

    @property
    def ended(self) -> bool:
        """True once the engine is done with the request, even if its output is not read yet."""
        return self._ended

    def cancel(self) -> None:
        """Stop reading and end the request within one iteration. Thread-safe; repeated calls are harmless."""
        if not self._ended and not self.cancelled:
            self.cancelled = True
            self._on_cancel(self)

    def push(self, delta: OutputDelta) -> None:
        """Append unread output. The reader is not woken; see `OpenStreams.wake`."""
        with self._lock:
            if self._unread is None:
                self._unread = delta
            else:
                self._unread.merge(delta)
            self._ended = delta.finished

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, unless it has ended. The reader is not woken."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._error = error


class RequestStreamGroup:
    """The outputs of several requests, for one reader: an asynchronous iterator of (index, `OutputDelta`).

    It ends when all requests have ended. It raises the error of the first stream that fails; the other requests
    continue until `cancel`.
    """

    def __init__(self, streams: Sequence[RequestStream], updated: asyncio.Event) -> None:
        self.streams = tuple(streams)
        self._updated = updated
        self._next = 0
        self._num_taken = 0

    def __aiter__(self) -> "RequestStreamGroup":
        return self

    async def __anext__(self) -> tuple[int, OutputDelta]:
        if len(self.streams) == 1:
            return 0, await anext(self.streams[0])
        count = len(self.streams)
        self._num_taken += 1
        if self._num_taken % _TAKEN_AT_ONCE == 0:  # before an output is taken, which a cancellation here would lose
            await asyncio.sleep(0)
        while not all(stream._read_to_end for stream in self.streams):
            self._updated.clear()
            failed = [i for i, stream in enumerate(self.streams) if stream._error is not None]
            # Round robin, but failed streams first: their error ends the group.
            for index in itertools.chain(failed, ((self._next + i) % count for i in range(count))):
                delta = self.streams[index]._take()
                if delta is not None:
                    self._next = index + 1
                    return index, delta
            await self._updated.wait()
        raise StopAsyncIteration

    @property
    def ended(self) -> bool:
        """True once the engine is done with all requests, even if their output is not read yet."""
        return all(stream.ended for stream in self.streams)

    def cancel(self) -> None:
        """Cancel all requests; see `RequestStream.cancel`."""
        for stream in self.streams:
            stream.cancel()


class OpenStreams:
    """The open streams of the engine's requests, and the streams whose readers must be woken. Used in the engine thread
    only.

    Args:
        max_queue_s: maximum time in seconds that a request may wait to be scheduled.

    Attributes:
        by_request: open streams, keyed by request; other objects must not change it.
    """

    def __init__(self, max_queue_s: float) -> None:
        self._max_queue_s = max_queue_s
        self.by_request: dict[EngineRequest, RequestStream] = {}
        self._deadlines: dict[EngineRequest, float] = {}
        self._own_queue_limits: dict[EngineRequest, float] = {}
        """Queue time limits below `max_queue_s`, keyed by request, until they have passed."""
        self._awaiting_first_schedule: dict[EngineRequest, RequestStream] = {}
        self._updated: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}

    def add(self, stream: RequestStream) -> None:
        request = stream.request
        self.by_request[request] = stream
        if stream.deadline_s is not None:
            self._deadlines[request] = stream.deadline_s
        if request.max_queue_s is not None and request.max_queue_s < self._max_queue_s:
            self._own_queue_limits[request] = request.max_queue_s
        self._awaiting_first_schedule[request] = stream

    def remove(self, stream: RequestStream) -> bool:
        """Forget a stream; returns False if it is not the open stream of its request."""
        request = stream.request
        if self.by_request.get(request) is not stream:
            return False
        for held in (self.by_request, self._deadlines, self._own_queue_limits, self._awaiting_first_schedule):
            held.pop(request, None)
        return True

    def clear(self) -> None:
        for held in (self.by_request, self._deadlines, self._own_queue_limits, self._awaiting_first_schedule):
            held.clear()

    def past_deadline(self, now_s: float) -> list[RequestStream]:
        """Return the streams whose deadline has passed."""
        return [self.by_request[request] for request, deadline_s in self._deadlines.items() if now_s >= deadline_s]

    def queued_too_long(self, now_s: float, was_scheduled: Callable[[str], bool]) -> list[RequestStream]:
        """Return the streams whose requests have waited for `max_queue_s`, or their own shorter limit, and have never
        been scheduled.

        Args:
            now_s: time on the engine's clock, in seconds.
            was_scheduled: function that returns True if the live request with the given id has ever been scheduled.
        """
        late: list[RequestStream] = []
        waiting = self._awaiting_first_schedule
        while waiting:  # in order of arrival
            request, stream = next(iter(waiting.items()))
            if now_s - request.arrival_s < self._max_queue_s:
                break
            del waiting[request]
            self._own_queue_limits.pop(request, None)
            if not was_scheduled(request.request_id):
                late.append(stream)
        over = [r for r, limit_s in self._own_queue_limits.items() if now_s - r.arrival_s >= limit_s]
        for request in over:
            del self._own_queue_limits[request]
            if not was_scheduled(request.request_id):
                late.append(self.by_request[request])
        return late

    def push(self, stream: RequestStream, delta: OutputDelta) -> None:
        """Append output to a stream; its reader is woken by the next `wake`."""
        stream.push(delta)
        self._updated.setdefault(stream.event_loop, []).append(stream)

    def fail(self, stream: RequestStream, error: BaseException) -> None:
        """End a stream with an error, unless it has ended; its reader is woken by the next `wake`."""
        stream.fail(error)
        self._updated.setdefault(stream.event_loop, []).append(stream)

    def wake(self) -> list[RequestStream]:
        """Wake the readers of updated streams, with one call into each event loop; returns the streams whose loop is
        closed."""
        updated, self._updated = self._updated, {}
        unread: list[RequestStream] = []
        for event_loop, streams in updated.items():
            try:
                event_loop.call_soon_threadsafe(_set_updated, streams)
            except RuntimeError:
                unread += streams
        return unread


def cancelled_error() -> AptJaxError:
    return AptJaxError("the request was cancelled")


def _set_updated(streams: list[RequestStream]) -> None:
    for stream in streams:
        stream.updated.set()

"""The engine for servers: its loop has a thread of its own, requests come from an asyncio event loop.

1. `AsyncEngine.submit` puts a request into an inbox and returns a `RequestStream`; it never waits.
2. The loop thread empties the inbox between steps: it adds requests, drops the cancelled ones, ends those whose
   deadline has passed, and runs one step. With nothing to do it sleeps on a condition.
   A request that comes while a step runs and would only be refused after it is refused at once: by the `Outlook` that the loop thread
   leaves when it has put the step together, after adding what has come until then.
3. What a step delivers is merged into the streams, at most one unread delta each, and the event loops that read them
   are woken once a step. Whoever reads slowly gets more at a time, whoever never reads blocks nobody, and the memory of
   a stream is bounded by the request's `max_tokens`.
4. A stream ends once: with a delta that has a `finish_reason`, or with an exception. Leaving it early, by `cancel` or by
   closing the generator, ends the request within one iteration.

5. `watch` shows what the scheduler decides, one batch of news an event loop and step at most.

Only the loop thread touches the engine. Other threads may hand it a function to run between two steps (`call`).
"""

import asyncio
import collections
import concurrent.futures
import copy
import dataclasses
import functools
import logging
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from apt_jax.admission import Coming, Outlook
from apt_jax.decisions import DecisionLog, RequestDecisions
from apt_jax.engine import EngineStats, StepOutput
from apt_jax.errors import AptJaxError, EngineDeadError, QueueFullError
from apt_jax.executor import StepBatch
from apt_jax.llm import EngineParts, OutputDelta, RequestState
from apt_jax.request import EngineRequest, RequestMetrics, RequestOutput
from apt_jax.watch import Iteration, SchedulerWatch

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONG_PROMPT = 8192
"""Tokens; of longer ones nobody looks in an event loop what is cached: the engine judges them."""


class Observer(Protocol):
    """Is told of every request that the engine has to do with, from any front end. Called in the engine's thread."""

    def ended(self, delta: OutputDelta) -> None:
        """A request has ended; this is the last of it."""
        ...

    def refused(self, request: EngineRequest) -> None:
        """A request was not taken."""
        ...


class EngineClosedError(EngineDeadError):
    """The engine is shutting down or has been shut down; not after an error."""


class RequestStream:
    """The answers to one request: an asynchronous iterator of `OutputDelta`s, for one reader.

    The last delta has a `finish_reason`. Raises in place of it:
        DuplicateRequestError, InvalidRequestError, QueueFullError: refused, nothing was allocated.
        AptJaxError: it was cancelled, and is read all the same.
        TimeoutError: the deadline has passed.
        EngineDeadError: the engine ended, or is closed.
    """

    def __init__(
        self,
        owner: "AsyncEngine",
        request: EngineRequest,
        deadline_s: float | None,
        news: asyncio.Event | None = None,
    ) -> None:
        self.request = request
        self.deadline_s = deadline_s
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event() if news is None else news
        self._lock = threading.Lock()
        self._unread: OutputDelta | None = None
        self._error: BaseException | None = None
        self._ended = False
        """The engine has nothing more to say about this request."""
        self._read_to_end = False
        self.cancelled = False
        self.metrics: RequestMetrics | None = None
        """Its times so far, from when the engine has taken the request."""

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._read_to_end:
            self._news.clear()
            delta = self._take()
            if delta is not None:
                return delta
            await self._news.wait()
        raise StopAsyncIteration

    def _take(self) -> OutputDelta | None:
        """What is unread, if anything; raises how the stream has ended instead of a last delta."""
        with self._lock:
            delta, self._unread = self._unread, None
            if delta is not None:
                self._read_to_end = delta.finished
            elif self._error is not None and not self._read_to_end:
                self._read_to_end = True
                raise self._error
            return delta

    @property
    def ended(self) -> bool:
        """Whether the engine is done with the request, read or not."""
        return self._ended

    def cancel(self) -> None:
        """Read no more; the request ends within one iteration. From any thread, any number of times."""
        if not self._ended and not self.cancelled:
            self.cancelled = True
            self._owner._cancel(self)

    # Called by the loop thread.

    def _push(self, delta: OutputDelta) -> None:
        with self._lock:
            if self._unread is None:
                self._unread = delta
            else:
                self._unread.merge(delta)
            self._ended = delta.finished

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if not self._ended:
                self._ended = True
                self._error = error


class StreamGroup:
    """The answers to several requests, for one reader: an asynchronous iterator of (index, `OutputDelta`).

    It ends when every one of them has ended. Raises what `RequestStream` raises, for the first that fails; the others go on
    until `cancel`.
    """

    def __init__(self, streams: Sequence[RequestStream], news: asyncio.Event) -> None:
        self.streams = tuple(streams)
        self._news = news
        self._next = 0

    def __aiter__(self) -> "StreamGroup":
        return self

    async def __anext__(self) -> tuple[int, OutputDelta]:
        if len(self.streams) == 1:
            return 0, await anext(self.streams[0])
        count = len(self.streams)
        while not all(stream._read_to_end for stream in self.streams):
            self._news.clear()
            failed = [i for i in range(count) if self.streams[i]._error is not None]
            # All take turns, after one that was refused: it decides what becomes of the others.
            for index in (*failed, *((self._next + i) % count for i in range(count))):
                delta = self.streams[index]._take()
                if delta is not None:
                    self._next = index + 1
                    return index, delta
            await self._news.wait()
        raise StopAsyncIteration

    @property
    def ended(self) -> bool:
        """Whether the engine is done with all requests, read or not."""
        return all(stream.ended for stream in self.streams)

    def cancel(self) -> None:
        """Read no more; see `RequestStream.cancel`."""
        for stream in self.streams:
            stream.cancel()


class AsyncEngine:
    """Runs an engine in a thread and serves requests from asyncio code.

    Args:
        parts: the engine and what belongs to it, from `apt_jax.llm.build_engine`; from now on it is this object's.
        observer: is told of every request that ends.
        step_timeout_s: an iteration that takes longer will never end: every request fails with `EngineDeadError`, and
            `wait_ended` returns. The thread cannot be ended; end the process. None: wait for ever.
        decision_log: requests for which `decisions` is kept; 0: none.
    """

    def __init__(
        self,
        parts: EngineParts,
        observer: Observer | None = None,
        *,
        step_timeout_s: float | None = None,
        decision_log: int = 1024,
    ) -> None:
        self.parts = parts
        self._observer = observer
        self._engine = parts.engine
        self._max_queue_s = parts.config.scheduler.max_queue_s
        self._work = threading.Condition()
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._outlook: Outlook | None = None
        """Of the step that runs; None between steps."""
        self._coming = Coming()
        """What the inbox holds."""
        self._streams: dict[EngineRequest, RequestStream] = {}
        self._deadlines: dict[EngineRequest, float] = {}
        self._young: dict[EngineRequest, RequestStream] = {}  # that may still have waited too long
        self._woken: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
        self._watches: list[SchedulerWatch] = []
        self._iterations_unread = False  # something to read for those who watch
        self._closing = False
        self._drain_until_s = 0.0
        self._end_error: EngineDeadError | None = None
        self._end: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._log: DecisionLog | None = None
        if decision_log:
            self._log = DecisionLog(
                decision_log,
                max_num_seqs=parts.config.scheduler.max_num_seqs,
                blocks_needed=parts.engine.least_blocks,
            )
            self._engine.on_iteration = self._push_iteration
        self._engine.on_plan = self._look_out
        self._abandoned = False
        self._busy_since_s: float | None = None  # the iteration in progress, if any
        self._thread = threading.Thread(target=self._run, name="apt-jax-engine", daemon=True)
        self._thread.start()
        if step_timeout_s is not None:
            args = (step_timeout_s,)
            threading.Thread(target=self._watch_over, args=args, name="apt-jax-watchdog", daemon=True).start()  # fmt: skip

    # --- for users -----------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, *, deadline_s: float | None = None) -> RequestStream:
        """Hand a request to the engine; call it from a coroutine. A refusal comes when the stream is read.

        Args:
            request: from `parts.build_request`.
            deadline_s: on the engine's clock; the request is ended when it has passed. None: none.

        Raises:
            EngineDeadError: the engine has ended or is closing.
        """
        stream = RequestStream(self, request, deadline_s)
        self._submit([stream])
        return stream

    def submit_all(
        self, requests: Sequence[EngineRequest], *, deadline_s: float | None = None
    ) -> StreamGroup:
        """As `submit`, for requests whose answers have one reader."""
        news = asyncio.Event()
        streams = [RequestStream(self, request, deadline_s, news) for request in requests]
        self._submit(streams)
        return StreamGroup(streams, news)

    async def generate(
        self, request: EngineRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """The growing output of a request; each one is whole. Raises what `submit` and `RequestStream` do.

        Leaving the loop early and closing the generator ends the request.
        """
        stream = self.submit(request, deadline_s=deadline_s)
        state = RequestState(request)
        try:
            async for delta in stream:
                state.add(delta)
                yield state.output()
        finally:
            stream.cancel()

    def abort(self, request_id: str) -> "concurrent.futures.Future[bool]":
        """End the live request of this id; its stream ends with `finish_reason="abort"`. False: there is none."""
        return self.call(lambda: self._engine.abort(request_id))

    def watch(self, capacity: int = 256) -> SchedulerWatch:
        """See every decision of the scheduler from now on; call it from a coroutine, and `close` what it returns.

        Args:
            capacity: iterations kept while they are not read; then the oldest are dropped.
        """

        def leave(watch: SchedulerWatch) -> None:
            self.call(lambda: self._unwatch(watch))

        watch = SchedulerWatch(capacity, leave)
        self.call(lambda: self._watch(watch))
        return watch

    async def decisions(self, request_id: str) -> RequestDecisions | None:
        """What became of the last request of this id and why; None: it is not, or no longer, known."""
        log = self._log
        return None if log is None else await asyncio.wrap_future(self.call(lambda: copy.deepcopy(log.of(request_id))))  # fmt: skip

    @property
    def decision_log(self) -> DecisionLog | None:
        """For functions that `call` runs; None: none is kept."""
        return self._log

    async def stats(self) -> EngineStats:
        """The engine's counters and gauges between two steps."""
        return await asyncio.wrap_future(self.call(self._engine.stats))

    def call(self, function: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """Run a function of the engine's state in the loop thread, between two steps; it should be short."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        with self._work:
            if not self._end.done():
                self._inbox.append(run)
                self._work.notify()
                return future
        run()  # the thread is gone, nobody else touches the engine
        return future

    @property
    def is_serving(self) -> bool:
        """Whether new requests are taken."""
        return not self._closing and self._end_error is None

    @property
    def num_open(self) -> int:
        """Requests whose streams have not ended."""
        return len(self._streams)

    @property
    def num_watches(self) -> int:
        """Watchers of the scheduler."""
        return len(self._watches)

    @property
    def dead_reason(self) -> str | None:
        """Why the engine ended by itself; None while it lives and after a shutdown."""
        error = self._end_error
        return None if error is None or isinstance(error, EngineClosedError) else str(error)

    async def wait_ended(self) -> str | None:
        """Wait until the loop has ended; returns `dead_reason`."""
        await asyncio.shield(asyncio.wrap_future(self._end))
        return self.dead_reason

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no new requests, let open ones go on for up to `drain_s` seconds, end the rest, end the thread.

        Streams that are cut off raise `EngineClosedError`. A second call can only shorten the wait.
        """
        self._close(drain_s)
        await asyncio.shield(asyncio.wrap_future(self._end))

    def close(self, drain_s: float = 0.0) -> None:
        """As `shutdown`, for synchronous code."""
        self._close(drain_s)
        self._end.result()

    def lose(self, reason: str) -> None:
        """What the engine runs on is gone, and the step that runs may never end: every request fails with `EngineDeadError`, now."""
        with self._work:
            if self._end.done() or self._abandoned:
                return
            self._abandoned = True
        self._give_up(reason)

    # --- between threads -----------------------------------------------------------------------------------------

    def _close(self, drain_s: float) -> None:
        until_s = self.parts.clock.now_s() + drain_s
        with self._work:
            self._drain_until_s = min(self._drain_until_s, until_s) if self._closing else until_s
            self._closing = True
            self._work.notify()

    def _submit(self, streams: Sequence[RequestStream]) -> None:
        asks_for = [self._asks_for(stream.request) for stream in streams]
        with self._work:
            if self._end_error is not None:
                raise self._end_error
            if self._closing:
                raise EngineClosedError("the engine is shutting down")
            for stream, what in zip(streams, asks_for, strict=True):
                self._inbox.append(self._entry(stream, what))
            self._work.notify()

    def _entry(self, stream: RequestStream, asks_for: dict[str, Any]) -> Callable[[], None]:
        """What to do with a new request; one that would be refused after the step that runs has its refusal already."""
        request, outlook = stream.request, self._outlook
        is_judged = outlook is not None and asks_for["prompt_len"] <= _LONG_PROMPT
        # That an id is taken is the engine's to say: it is not to be tried again.
        if is_judged and not self._engine.has(request.request_id):
            assert outlook is not None
            refusal = self._engine.admission.foresee(outlook, self._coming, ttft_s=request.slo.ttft_s, **asks_for)  # fmt: skip
            if refusal is not None:
                stream._fail(refusal)
                return functools.partial(self._note_refused, request)
        self._coming.add(**asks_for)
        return _Add(self, stream)

    def _asks_for(self, request: EngineRequest) -> dict[str, Any]:
        prompt_len = own_tokens = int(request.prompt_token_ids.size)
        if self._outlook is not None and prompt_len <= _LONG_PROMPT:
            own_tokens -= self._engine.num_cached(request)
        return {
            "prompt_len": prompt_len,
            "own_tokens": own_tokens,
            "blocks": self._engine.least_blocks(prompt_len),
            "best_effort": request.slo_class == "be",
            "tenant": request.tenant,
        }

    def _cancel(self, stream: RequestStream) -> None:
        with self._work:
            self._inbox.append(lambda: self._drop(stream))
            self._work.notify()

    # --- the loop thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._iterate():
                pass
            if not self._abandoned:
                reason = self._engine.dead_reason
                self._end_all(
                    EngineClosedError("the engine has been shut down")
                    if reason is None
                    else EngineDeadError(f"the engine has ended: {reason}")
                )
        except BaseException as caught:
            logger.critical("the engine loop ends: %s", type(caught).__name__, exc_info=caught)
            self.lose("internal error")  # unless the watchdog was quicker

    def _watch_over(self, step_timeout_s: float) -> None:
        """The watchdog's thread."""
        pause_s = min(step_timeout_s / 4, 0.5)
        seen_s, spent_s, last_s = None, 0.0, time.monotonic()
        while not self._end.done():
            time.sleep(pause_s)
            now_s, since_s = time.monotonic(), self._busy_since_s
            # A process that was stopped as a whole has not been at work meanwhile.
            spent_s = 0.0 if since_s != seen_s else spent_s + min(now_s - last_s, 2 * pause_s)
            seen_s, last_s = since_s, now_s
            if since_s is not None and spent_s > step_timeout_s:
                frame = sys._current_frames().get(self._thread.ident or 0)
                where = "".join(traceback.format_stack(frame)) if frame is not None else "nowhere"
                logger.critical(
                    "a step has not ended for %g s; it is at\n%s", step_timeout_s, where
                )
                self._abandon(since_s, f"a step has not ended for {step_timeout_s:g} s (--step-timeout)")  # fmt: skip

    def _abandon(self, since_s: float, reason: str) -> None:
        """End everything but the loop thread, which does not come back, unless the step has ended just now."""
        with self._work:
            if self._end.done() or self._abandoned or self._busy_since_s != since_s:
                return
            self._abandoned = True
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """Tell everybody and leave the engine alone: a step is still in it, or has left it who knows how."""
        error = EngineDeadError(f"the engine has ended: {reason}")
        with self._work:
            self._end_error = error
        streams = list(self._streams.values())
        for held in (self._streams, self._deadlines, self._young):
            held.clear()
        for stream in streams:
            self._fail(stream, error)
        self._finish_ending(error)

    def _iterate(self) -> bool:
        """One turn of the loop; False when it is over."""
        engine = self._engine
        self._busy_since_s = None
        with self._work:
            while not (self._inbox or engine.has_work or self._closing):
                self._work.wait()
            commands = self._emptied()
            closing, drain_until_s = self._closing, self._drain_until_s
        self._busy_since_s = time.monotonic()
        self._obey(commands)
        now_s = self.parts.clock.now_s()
        if closing and (not engine.has_work or now_s >= drain_until_s):
            return False
        late = [request for request, deadline_s in self._deadlines.items() if now_s >= deadline_s]
        for request in late:
            stream = self._streams[request]
            self._fail(stream, TimeoutError("the deadline has passed"))
            self._drop(stream)
        self._give_up_waiting(now_s)
        if engine.has_work:
            outputs = self._step()
            if outputs is None:
                return False
            if engine.dead_reason is not None:
                return False  # `_end_all` tells every stream
            for output in outputs:
                self._deliver(output)
        self._wake()
        return True

    def _emptied(self) -> collections.deque[Callable[[], None]]:
        """What the inbox held; under its lock."""
        commands, self._inbox = self._inbox, collections.deque()
        self._coming, self._outlook = Coming(), None
        return commands

    def _look_out(self, _batch: StepBatch) -> None:
        """A step is about to run: add the requests that have come meanwhile, and tell those that come later how things stand. What was
        asked of the engine between them keeps its place."""
        while True:
            with self._work:
                if not (self._inbox and isinstance(self._inbox[0], _Add)):
                    break
                command = self._inbox.popleft()
            command()
        self._wake()  # those that were refused
        outlook = self._engine.outlook()
        with self._work:
            self._outlook, self._coming = outlook, Coming()
            for command in self._inbox:
                if isinstance(command, _Add):
                    self._coming.add(**self._asks_for(command.stream.request))

    def _step(self) -> list[StepOutput] | None:
        """One step of the engine; None: it took so long that the watchdog has ended everything."""
        outputs = self._engine.step()
        with self._work:
            self._outlook = None  # what has ended leaves room
            if self._abandoned:
                return None
            self._busy_since_s = time.monotonic()
        return outputs

    def _deliver(self, output: StepOutput) -> None:
        stream = self._streams.get(output.request)
        try:
            delta = self.parts.assembler.delta(output)
        except Exception as error:  # of this request: the others go on
            logger.error("an output could not be assembled", exc_info=error)
            if stream is not None:
                self._fail(stream, AptJaxError("the output could not be assembled"))
                self._drop(stream)
            return
        if delta.finished:
            self._observe(lambda observer: observer.ended(delta))
            if self._log is not None:
                reason = delta.finish_reason or "error"
                self._log.end(output.request, reason, self.parts.clock.now_s())
        if stream is None:
            return  # cancelled
        if delta.finished:
            self._forget(stream)
        stream._push(delta)
        self._woken.setdefault(stream._loop, []).append(stream)

    def _watch(self, watch: SchedulerWatch) -> None:
        if self._end_error is not None:
            watch._fail(self._end_error)
            watch._wake()
            return
        self._watches.append(watch)
        self._engine.on_iteration = self._push_iteration

    def _unwatch(self, watch: SchedulerWatch) -> None:
        self._watches = [other for other in self._watches if other is not watch]
        if not self._watches and self._log is None:
            self._engine.on_iteration = None

    def _push_iteration(self, iteration: Iteration) -> None:
        if self._log is not None:
            self._log.note(iteration)
        self._iterations_unread = bool(self._watches)
        for watch in self._watches:
            watch._push(iteration)

    def _wake_watches(self) -> None:
        if self._iterations_unread:
            self._iterations_unread = False
            for watch in [watch for watch in self._watches if not watch._wake()]:
                self._unwatch(watch)

    def _add(self, stream: RequestStream) -> None:
        if stream.cancelled:
            self._fail(stream, _cancelled())
            return
        if self._end_error is not None:
            self._fail(stream, self._end_error)
            return
        request = stream.request
        try:
            if stream.deadline_s is not None and self.parts.clock.now_s() >= stream.deadline_s:
                raise TimeoutError("the deadline has passed")
            self._engine.add_request(request)
        except (AptJaxError, TimeoutError) as error:
            self._observe(lambda observer: observer.refused(request))
            self._fail(stream, error)
            return
        except Exception as error:  # of this request: the others go on
            logger.error("a request could not be added", exc_info=error)
            self._fail(stream, AptJaxError("the request could not be added"))
            return
        except BaseException:  # of everybody, and this one must hear it too
            self._fail(stream, AptJaxError("the request could not be added"))
            raise
        stream.metrics = self._engine.metrics_of(request.request_id)
        self._streams[request] = stream
        if self._log is not None:
            self._log.begin(request, self._engine.num_decisions)
        if stream.deadline_s is not None:
            self._deadlines[request] = stream.deadline_s
        if self._max_queue_s is not None:
            self._young[request] = stream

    def _note_refused(self, request: EngineRequest) -> None:
        self._engine.note_refused()
        self._observe(lambda observer: observer.refused(request))

    def _give_up_waiting(self, now_s: float) -> None:
        """End requests that have waited for `max_queue_s` and never begun; they came in order."""
        limit_s = self._max_queue_s
        while limit_s is not None and self._young:
            request, stream = next(iter(self._young.items()))
            if now_s - request.arrival_s < limit_s:
                return
            del self._young[request]
            if self._engine.has_begun(request.request_id):
                continue
            message = f"the request has waited for {limit_s:g} s (--max-queue-s)"
            self._fail(stream, QueueFullError(message, limit_s))
            self._drop(stream)

    def _drop(self, stream: RequestStream) -> None:
        """End the stream's own request, if it is alive; never another one of the same id."""
        if self._streams.get(stream.request) is stream:
            self._forget(stream)
            if self._engine.is_live(stream.request):
                self._engine.abort(stream.request.request_id)
            self._fail(stream, _cancelled())

    def _forget(self, stream: RequestStream) -> None:
        self._streams.pop(stream.request, None)
        self._deadlines.pop(stream.request, None)
        self._young.pop(stream.request, None)

    def _fail(self, stream: RequestStream, error: BaseException) -> None:
        stream._fail(error)
        self._woken.setdefault(stream._loop, []).append(stream)

    def _wake(self) -> None:
        """One call into each event loop, however many of its streams have news."""
        for loop, streams in self._woken.items():
            try:
                loop.call_soon_threadsafe(_set_all, streams)
            except RuntimeError:  # the event loop is closed, nobody will read these any more
                for stream in streams:
                    self._drop(stream)
        self._woken.clear()
        self._wake_watches()

    def _end_all(self, error: EngineDeadError) -> None:
        with self._work:
            self._end_error = error  # `submit` refuses from here on, `_add` what came before
        for stream in list(self._streams.values()):
            self._fail(stream, error)
            self._drop(stream)
        self._busy_since_s = time.monotonic()
        self._settle()
        if not self._abandoned:
            self._busy_since_s = None
            self._finish_ending(error)

    def _finish_ending(self, error: EngineDeadError) -> None:
        self._empty_inbox()
        for watch in self._watches:
            watch._fail(error)
        self._iterations_unread = True
        with self._work:
            self._end.set_result(None)  # `call` runs functions itself from here on
        self._empty_inbox()
        self._wake()

    def _empty_inbox(self) -> None:
        """At the end: whatever state the engine is in, nobody may wait for an answer for ever."""
        while self._inbox:
            with self._work:
                commands = self._emptied()
            try:
                self._obey(commands)
            except BaseException as error:
                logger.error("the engine has ended, and %s", type(error).__name__, exc_info=error)

    def _obey(self, commands: "collections.deque[Callable[[], None]]") -> None:
        try:
            while commands:
                commands.popleft()()
        except BaseException:
            with self._work:  # those who sent the others are still to be told something
                self._inbox.extendleft(reversed(commands))
            raise

    def _settle(self) -> None:
        """Fetch the step in flight and the last outputs, so that the blocks of all requests are free."""
        try:
            while self._engine.has_work and self._engine.dead_reason is None:
                outputs = self._step()
                if outputs is None:
                    return
                for output in outputs:
                    self._deliver(output)
        except Exception as error:
            logger.error("the engine did not settle", exc_info=error)

    def _observe(self, tell: Callable[[Observer], None]) -> None:
        """Whoever watches cannot disturb who serves."""
        if self._observer is None:
            return
        try:
            tell(self._observer)
        except Exception as error:
            logger.error("the observer failed", exc_info=error)


@dataclasses.dataclass(frozen=True, slots=True)
class _Add:
    """Adds a request, in the loop thread."""

    owner: AsyncEngine
    stream: RequestStream

    def __call__(self) -> None:
        self.owner._add(self.stream)


def _cancelled() -> AptJaxError:
    return AptJaxError("the request was cancelled")


def _set_all(streams: list[RequestStream]) -> None:
    for stream in streams:
        stream._news.set()

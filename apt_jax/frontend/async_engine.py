"""The engine for servers: a thread runs the engine loop, and requests come from asyncio event loops.

1. `AsyncEngine.submit` puts a request into an inbox and returns a `RequestStream`; it never waits.
2. Between steps the engine thread empties the inbox: it adds new requests, drops cancelled requests and ends requests
   whose deadline has passed. Then it runs one step, or waits on a condition if it has no work. Requests that arrive
   while the next step is prepared are added before it is dispatched. If a request arrives while the step runs and
   would be rejected after the step, the `AdmissionGate` rejects it at once.
3. The outputs of a step go to the streams (`apt_jax.frontend.streams`).
4. Leaving a stream early, by `cancel` or by closing the generator, ends the request within one iteration.
5. `watch` reports the scheduler's decisions, at most one batch of iterations per event loop and step.

Threads. Only the engine thread changes the engine; other threads may hand it a function to run between two steps
(`call`). But threads that submit a request read the engine while a step runs, through `AdmissionGate`:

* `engine.min_blocks_for`: block sizes and offered cache kinds, which never change;
* `engine.num_cached`, for requests with a TTFT objective under `slo_admission`: one dict look-up in the prefix index
  per block of the prompt;
* `engine.has`: one look-up in the dict of live requests;
* `engine.admission.early_reject`: the configuration and its arguments, a frozen snapshot and a count that the inbox's
  lock guards.

Under the GIL a look-up sees the dict before or after a change, never in between. An outdated answer is harmless: the
gate can only reject, with an error that invites a retry, and the engine decides about all other requests. Without the
GIL the look-ups would be data races: free-threaded Python is not supported.

Once the engine thread has stopped, `call` runs functions in its caller's thread. If a step hangs or another host is
lost (`fail`), another thread ends all streams, rejects the requests in the inbox and runs the functions in it.
"""

import asyncio
import collections
import concurrent.futures
import copy
import functools
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, TypeVar

from apt_jax.core.step import StepBatch
from apt_jax.engine import EngineStats, StepOutput
from apt_jax.engine.events import Iteration, IterationSubscription
from apt_jax.engine.timeline import RequestTimeline, TimelineLog
from apt_jax.errors import AptJaxError, EngineDeadError, QueueFullError
from apt_jax.frontend.admission_gate import AdmissionGate
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.iteration_feed import IterationFeed
from apt_jax.frontend.outputs import OutputDelta, RequestState
from apt_jax.frontend.rare_programs import RarePrograms
from apt_jax.frontend.streams import (
    EngineClosedError,
    OpenStreams,
    RequestStream,
    RequestStreamGroup,
    cancelled_error,
)
from apt_jax.frontend.watchdog import Watchdog
from apt_jax.request import EngineRequest, RequestOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Observer(Protocol):
    """Receives notice when a request from any front end ends or is rejected. Called in the engine thread."""

    def ended(self, delta: OutputDelta) -> None:
        """Called with the last output of a request that has ended."""
        ...

    def refused(self, request: EngineRequest) -> None:
        """Called with a request that was rejected."""
        ...


class AsyncEngine:
    """Runs an engine in a thread and serves requests from asyncio code.

    Args:
        parts: the engine and its components, from `apt_jax.build_engine`; from now on this object owns them.
        observer: notified when requests end or are rejected.
        step_timeout_s: time in seconds after which an iteration counts as hung, raised to 20 times the larger of the
            recent 99th-percentile step time and the calibrated time of a full step. If an iteration hangs, every
            request fails with `EngineDeadError` and `wait_ended` returns. The thread cannot be stopped, so the process
            must exit. None: no limit.
        decision_log: number of requests whose `decisions` are kept; 0: no decisions are kept.
    """

    def __init__(
        self,
        parts: EngineComponents,
        observer: Observer | None = None,
        *,
        step_timeout_s: float | None = None,
        decision_log: int = 1024,
    ) -> None:
        scheduler = parts.config.scheduler
        self.parts = parts
        self._observer = observer
        self._engine = parts.engine
        self._max_queue_s = scheduler.max_queue_s
        self._work = threading.Condition()
        """Guards the inbox, the gate and the shutdown state; notified when there is work."""
        self._inbox: collections.deque[RequestStream | Callable[[], None]] = collections.deque()
        """New requests, and functions to run between two steps."""
        self._gate = AdmissionGate(parts.engine)
        self._rare_programs = RarePrograms(parts.executor)
        self._streams = OpenStreams(self._max_queue_s)
        self._closing = self._hurried = False
        self._drain_s = self._drain_until_s = 0.0
        self._end_error: EngineDeadError | None = None
        self._end: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._abandoned = False
        """True if all streams were ended during a step that may never end."""
        self._log: TimelineLog | None = None
        if decision_log:
            self._log = TimelineLog(
                decision_log, max_num_seqs=scheduler.max_num_seqs, blocks_needed=parts.engine.min_blocks_for
            )
        self._feed = IterationFeed(parts.engine, self._log)
        self._engine.before_dispatch = self._drain_arrivals_before_dispatch
        self._thread = threading.Thread(target=self._run, name="apt-jax-engine", daemon=True)
        self._watchdog = Watchdog(self._thread, step_timeout_s, self._fail_all)
        self.expect_steps()
        self._start()

    def expect_steps(self) -> None:
        """Set the watchdog's expected step time from the engine's current step costs."""
        most = self.parts.config.scheduler.max_num_batched_tokens
        self._watchdog.expected_step_s = self._engine.admission.prefill_s(most, 1, self._engine.costs)

    def listen(self, listener: Callable[[Iteration], None] | None) -> None:
        """Set the function that is called with every iteration; it must not raise. None: no function. Call this in the
        engine's thread."""
        self._feed.listen(listener)

    def _start(self) -> None:
        """Start the threads. The simulation in `tests/dst` calls `_run_iteration` from its event loop instead."""
        self._thread.start()
        self._watchdog.start()

    # --- for users ---------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, *, deadline_s: float | None = None) -> RequestStream:
        """Submit a request to the engine; call this from a coroutine. If the request is rejected, reading the stream
        raises the error.

        Args:
            request: from `parts.build_request`.
            deadline_s: time on the engine's clock, in seconds, at which the request is ended; None: no deadline.

        Raises:
            EngineDeadError: the engine has stopped or is shutting down.
        """
        stream = RequestStream(request, deadline_s, self._cancel)
        self._submit([stream])
        return stream

    def submit_batch(self, requests: Sequence[EngineRequest], *, deadline_s: float | None = None) -> RequestStreamGroup:
        """Submit several requests whose outputs have one reader; see `submit`."""
        updated = asyncio.Event()
        streams = [RequestStream(request, deadline_s, self._cancel, updated) for request in requests]
        self._submit(streams)
        return RequestStreamGroup(streams, updated)

    async def prepare(self, requests: Sequence[EngineRequest]) -> None:
        """Compile the rarely used programs that the requests need, while the engine runs; call this before `submit`.

        It returns at once if the programs are already compiled. If such a request is submitted without this call, all
        requests wait for the compiler.

        Raises:
            EngineDeadError: the engine stopped before the programs were compiled.
        """
        prepared = self._rare_programs.compile_for(requests)
        if prepared is None:
            return
        if not prepared.done():
            waits = [asyncio.wrap_future(prepared), asyncio.ensure_future(self.wait_ended())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if not prepared.done():
            raise self._end_error or EngineClosedError("the engine is shutting down")
        prepared.result()

    @property
    def is_compiling(self) -> bool:
        """True while a thread compiles for `prepare`; the compilation cannot be stopped."""
        return self._rare_programs.is_compiling

    async def generate(
        self, request: EngineRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the complete output of a request so far, at each update. Raises the errors of `submit` and
        `RequestStream`.

        Leaving the loop early and closing the generator ends the request.
        """
        stream = self.submit(request, deadline_s=deadline_s)
        state = RequestState(request, self.parts.tokenizer)
        try:
            async for delta in stream:
                state.add(delta)
                yield state.output()
        finally:
            stream.cancel()

    def abort(self, request_id: str) -> "concurrent.futures.Future[bool]":
        """Abort the live request with this engine id; its stream ends with `finish_reason="abort"`. The future's result
        is False if no live request has this id."""
        return self.call(lambda: self._engine.abort(request_id))

    def watch(self, capacity: int = 256) -> IterationSubscription:
        """Subscribe to the scheduler's decisions; call this from a coroutine, and `close` the result.

        Args:
            capacity: maximum number of unread iterations to keep; if there are more, the oldest are dropped.
        """

        def leave(watch: IterationSubscription) -> None:
            self.call(lambda: self._feed.unsubscribe(watch))

        watch = IterationSubscription(capacity, leave)
        self.call(lambda: self._watch(watch))
        return watch

    async def decisions(self, request_id: str) -> RequestTimeline | None:
        """Return the scheduler's decisions about the last request with this engine id; None: the id is unknown, or its
        decisions were dropped."""
        log = self._log
        if log is None:
            return None
        return await asyncio.wrap_future(self.call(lambda: copy.deepcopy(log.of(request_id))))

    @property
    def decision_log(self) -> TimelineLog | None:
        """Log of decisions, for functions that `call` runs; None: no log is kept."""
        return self._log

    async def stats(self) -> EngineStats:
        """Return the engine's counters and gauges between two steps."""
        return await asyncio.wrap_future(self.call(self._engine.stats))

    def call(self, function: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """Run a function on the engine's state in the engine thread, between two steps; it should be short."""
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
        run()  # the engine thread has stopped, so no other thread uses the engine
        return future

    @property
    def is_serving(self) -> bool:
        """True while new requests are accepted."""
        return not self._closing and self._end_error is None

    @property
    def has_arrivals(self) -> bool:
        """True while the engine thread has something to do before its next step; for functions that `call` runs."""
        return bool(self._inbox) or self._closing

    @property
    def num_open(self) -> int:
        """Number of requests whose streams have not ended."""
        return len(self._streams.by_request)

    @property
    def dead_reason(self) -> str | None:
        """Reason why the engine stopped by itself; None while it runs and after a shutdown."""
        error = self._end_error
        return None if error is None or isinstance(error, EngineClosedError) else str(error)

    async def wait_ended(self) -> str | None:
        """Wait until the engine loop has stopped, and return `dead_reason`."""
        await asyncio.shield(asyncio.wrap_future(self._end))
        return self.dead_reason

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Stop accepting requests, let open requests run for up to `drain_s` seconds, then end the rest and the thread.

        Streams of requests that are cut off raise `EngineClosedError`. Then cached prefixes are written to disk, if the
        engine has a prefix directory. A second call can only shorten the wait.
        """
        self._close(drain_s)
        await asyncio.shield(asyncio.wrap_future(self._end))

    def close(self, drain_s: float = 0.0) -> None:
        """Shut down from synchronous code; see `shutdown`."""
        self._close(drain_s)
        self._end.result()

    def fail(self, reason: str) -> None:
        """End every request with `EngineDeadError` now, without waiting for a running step, for example because a host
        of the replica is lost."""
        self._fail_all(None, reason)

    # --- between threads ---------------------------------------------------------------------------------------------

    def _submit(self, streams: Sequence[RequestStream]) -> None:
        demands = [self._gate.demand_of(stream.request) for stream in streams]
        with self._work:
            if self._end_error is not None:
                raise self._end_error
            if self._closing:
                raise EngineClosedError("the engine is shutting down")
            for stream, demand in zip(streams, demands, strict=True):
                rejection = self._gate.early_reject(stream.request, demand)
                if rejection is None:
                    self._inbox.append(stream)
                else:
                    stream.fail(rejection)
                    self._inbox.append(functools.partial(self._note_rejected, stream.request))
            self._work.notify()

    def _cancel(self, stream: RequestStream) -> None:
        with self._work:
            self._inbox.append(lambda: self._drop(stream))
            self._work.notify()

    def _close(self, drain_s: float) -> None:
        until_s = self.parts.clock.now_s() + drain_s
        with self._work:
            if self._closing:
                self._hurried |= drain_s < self._drain_s
                self._drain_until_s = min(self._drain_until_s, until_s)
            else:
                self._drain_until_s, self._drain_s = until_s, drain_s
            self._closing = True
            self._work.notify()

    def _fail_all(self, started_s: float | None, reason: str) -> None:
        """End all streams and run no further step, because a step hangs or left the engine in an unknown state.

        Args:
            started_s: start of the hung iteration; if that iteration has ended by now, nothing happens. None: always
                end the streams.
            reason: reason why the engine stops.
        """
        error = EngineDeadError(f"the engine has ended: {reason}")
        with self._work:
            is_over = started_s is not None and started_s != self._watchdog.started_s
            if is_over or self._end.done() or self._abandoned:
                return
            self._abandoned = True
            self._end_error = error
        streams = list(self._streams.by_request.values())
        self._streams.clear()
        for stream in streams:
            self._streams.fail(stream, error)
        self._finish(error)

    # --- the engine thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._run_iteration():
            pass

    def _run_iteration(self) -> bool:
        """Run one iteration of the loop; after the last, end all streams, close the engine and return False."""
        try:
            if self._iterate():
                return True
            if not self._abandoned:
                reason = self._engine.dead_reason
                self._end_all(
                    EngineClosedError("the engine has been shut down")
                    if reason is None
                    else EngineDeadError(f"the engine has ended: {reason}")
                )
        except BaseException as caught:
            logger.critical("the engine loop failed: %s", type(caught).__name__, exc_info=caught)
            self.fail("internal error")  # no effect if the watchdog was faster
        return False

    def _is_due(self) -> bool:
        """Return True if the engine thread has work. The caller holds the inbox's lock."""
        return bool(self._inbox) or self._engine.has_work or self._closing

    def _iterate(self) -> bool:
        """Run one iteration of the loop; returns False when the loop is over."""
        engine = self._engine
        self._watchdog.pause()
        with self._work:
            while not self._is_due():
                self._work.wait()
            commands = self._drain_inbox()
            closing, drain_until_s = self._closing, self._drain_until_s
        self._watchdog.restart()
        self._run_commands(commands)
        now_s = self.parts.clock.now_s()
        if closing and (not engine.has_work or now_s >= drain_until_s):
            return False
        for stream in self._streams.past_deadline(now_s):
            self._drop(stream, TimeoutError("the deadline has passed"))
        for stream in self._streams.queued_too_long(now_s, engine.has_been_scheduled):
            self._drop(stream, self._queued_too_long(stream.request))
        if engine.has_work:
            outputs = self._step()
            if outputs is None or engine.dead_reason is not None:
                return False  # all streams have been ended, or `_end_all` will do it
            for output in outputs:
                self._deliver(output)
        self._wake()
        return True

    def _drain_inbox(self) -> collections.deque[RequestStream | Callable[[], None]]:
        """Return all entries of the inbox and empty it. The caller holds its lock."""
        commands, self._inbox = self._inbox, collections.deque()
        self._gate.end_step()
        return commands

    def _run_commands(self, commands: collections.deque[RequestStream | Callable[[], None]]) -> None:
        try:
            while commands:
                command = commands.popleft()
                if isinstance(command, RequestStream):
                    self._add(command)
                else:
                    command()
        except BaseException:
            with self._work:  # the remaining entries must still be answered
                self._inbox.extendleft(reversed(commands))
            raise

    def _drain_arrivals_before_dispatch(self, _batch: StepBatch) -> None:
        """Add the requests that arrived while a step was prepared, then have the gate check later arrivals. Requests
        queued behind a function stay in the inbox."""
        while True:
            with self._work:
                first = self._inbox[0] if self._inbox else None
                if not isinstance(first, RequestStream):
                    break
                self._inbox.popleft()
            self._add(first)
        self._wake()  # the readers of requests that were rejected
        snapshot = self._engine.queue_snapshot()
        with self._work:
            pending = [command.request for command in self._inbox if isinstance(command, RequestStream)]
            self._gate.begin_step(snapshot, pending)

    def _step(self) -> list[StepOutput] | None:
        """Run one step of the engine; return None if it took so long that the watchdog has ended all streams."""
        outputs = self._engine.step()
        with self._work:
            self._gate.end_step()
            if self._abandoned:
                return None
            self._watchdog.end_step()
        return outputs

    def _deliver(self, output: StepOutput) -> None:
        stream = self._streams.by_request.get(output.request)
        try:
            delta = self.parts.assembler.delta(output)
        except Exception as error:  # affects this request only
            logger.error("an output could not be assembled", exc_info=error)
            if stream is not None:
                self._drop(stream, AptJaxError("the output could not be assembled"))
            return
        if delta.finished:
            self._observe(lambda observer: observer.ended(delta))
            if self._log is not None:
                reason = delta.finish_reason or "error"
                self._log.end(output.request, reason, self.parts.clock.now_s())
        if stream is None:
            return  # cancelled
        if delta.finished:
            self._streams.remove(stream)
        self._streams.push(stream, delta)

    def _add(self, stream: RequestStream) -> None:
        if stream.cancelled:
            self._streams.fail(stream, cancelled_error())
            return
        if self._end_error is not None:
            self._streams.fail(stream, self._end_error)
            return
        request = stream.request
        try:
            if stream.deadline_s is not None and self.parts.clock.now_s() >= stream.deadline_s:
                raise TimeoutError("the deadline has passed")
            self._engine.add_request(request)
        except (AptJaxError, TimeoutError) as error:
            self._observe(lambda observer: observer.refused(request))
            self._streams.fail(stream, error)
            return
        except BaseException as error:
            self._streams.fail(stream, AptJaxError("the request could not be added"))
            if not isinstance(error, Exception):
                raise
            logger.error("a request could not be added", exc_info=error)  # other requests continue
            return
        stream.metrics = self._engine.metrics_of(request.request_id)
        self._streams.add(stream)
        if self._log is not None:
            self._log.begin(request, self._engine.num_decisions)

    def _drop(self, stream: RequestStream, error: BaseException | None = None) -> None:
        """End a stream, and its request if that is still live; another request with the same id is not affected.
        `error` None: the stream was cancelled."""
        if self._streams.remove(stream):
            self._streams.fail(stream, cancelled_error() if error is None else error)
            if self._engine.is_live(stream.request):
                self._engine.abort(stream.request.request_id)

    def _queued_too_long(self, request: EngineRequest) -> QueueFullError:
        limit_s, says = self._max_queue_s, "--set max_queue_s"
        if request.max_queue_s is not None and request.max_queue_s < limit_s:
            limit_s, says = request.max_queue_s, "its own limit"
        return QueueFullError(f"the request has waited for {limit_s:g} s ({says})", limit_s, has_waited=True)

    def _note_rejected(self, request: EngineRequest) -> None:
        self._engine.note_refused()
        self._observe(lambda observer: observer.refused(request))

    def _watch(self, watch: IterationSubscription) -> None:
        if self._end_error is None:
            self._feed.subscribe(watch)
        else:
            watch._fail(self._end_error)
            watch._wake()

    def _wake(self) -> None:
        for stream in self._streams.wake():
            self._drop(stream)  # its event loop is closed, nobody will read it any more
        self._feed.wake()

    def _observe(self, notify: Callable[[Observer], None]) -> None:
        """Notify the observer; its exceptions are only logged."""
        if self._observer is None:
            return
        try:
            notify(self._observer)
        except Exception as error:
            logger.error("the observer failed", exc_info=error)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _end_all(self, error: EngineDeadError) -> None:
        with self._work:
            self._end_error = error  # from here on `submit` rejects new requests, and `_add` those in the inbox
        for stream in list(self._streams.by_request.values()):
            self._drop(stream, error)
        self._watchdog.restart()
        self._flush()
        if not self._abandoned:
            self._watchdog.pause()
            self._engine.close(is_hurried=lambda: self._hurried)
            self._finish(error)

    def _flush(self) -> None:
        """Fetch the step in flight and the last outputs, to free the blocks of all requests."""
        try:
            while self._engine.has_work and self._engine.dead_reason is None:
                outputs = self._step()
                if outputs is None:
                    return
                for output in outputs:
                    self._deliver(output)
        except Exception as error:
            logger.error("the last outputs could not be fetched", exc_info=error)

    def _finish(self, error: EngineDeadError) -> None:
        self._empty_inbox()
        self._feed.fail(error)
        with self._work:
            self._end.set_result(None)  # `call` runs functions itself from here on
        self._watchdog.stop()
        self._empty_inbox()
        self._wake()

    def _empty_inbox(self) -> None:
        """Reject all requests and run all functions left in the inbox, whatever the engine's state; no caller may wait
        forever."""
        while self._inbox:
            with self._work:
                commands = self._drain_inbox()
            try:
                self._run_commands(commands)
            except BaseException as error:
                logger.error("%s after the engine stopped", type(error).__name__, exc_info=error)

"""Submits the requests of running batches to the engine, a few at a time.

Interactive requests always have priority: in the engine through their class and the slots that `FeedWindow` leaves
free for them; before the engine because at most `MAX_READING` batch requests are read and tokenized at once.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable

from apt_jax.frontend.components import EngineComponents
from apt_jax.sched import StepCosts
from serve.batches.calls import ENDPOINTS, BatchCall, failed_outcome
from serve.batches.records import BatchRecord, Outcome, RequestLine
from serve.batches.store import BatchStore
from serve.batches.window import FeedWindow
from serve.generate_call import CallService
from serve.observability.call_log import log_failure

logger = logging.getLogger(__name__)

MAX_READING = 2
_TICK_S = 0.02
"""Interval in seconds at which to check for slots that interactive requests have freed."""
_PAGE = 256
_PAGE_BYTES = 4 << 20
_LONGEST_PAUSE_S = 5.0
_COSTS_WAIT_S = 120.0
"""Maximum time in seconds that batch requests wait for step costs to be measured, which needs an idle engine."""
_SOON_S = 600.0
"""Batches whose deadline is less than this many seconds away do not wait for step costs."""


@dataclasses.dataclass(kw_only=True, eq=False)
class RunningBatch:
    """A batch that has not ended, with its tasks."""

    record: BatchRecord
    pending: collections.deque[tuple[RequestLine, bytes]] = dataclasses.field(default_factory=collections.deque)
    """Requests read ahead from disk, each with the bytes of its line."""
    last: int = 0
    """Number of the last line that has been read ahead."""
    is_read: bool = False
    """True if all lines have been read ahead."""
    reading: asyncio.Task[None] | None = None
    calls: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
    done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when every request has an outcome on disk, or the batch must end for another reason."""
    paused_until_s: float = 0.0
    """Time on the monotonic clock before which no request of the batch starts, because an earlier request must be
    retried or reading ahead failed."""
    failure: BaseException | None = None
    """The error that makes the batch fail, if any."""


class BatchFeeder:
    """Runs requests of batches. Used from one event loop only.

    Args:
        store: provides the lines of the batches' requests.
        service: the engine and the preprocessing queues.
        on_outcome: called with the outcome of each request.
        num_uncommitted: returns the number of outcomes not yet stored; no request starts while there are too many.
    """

    def __init__(
        self,
        store: BatchStore,
        service: CallService,
        on_outcome: Callable[[RunningBatch, RequestLine, Outcome], None],
        num_uncommitted: Callable[[], int],
    ) -> None:
        self._store, self._service = store, service
        self._on_outcome, self._num_uncommitted = on_outcome, num_uncommitted
        self._batches: list[RunningBatch] = []
        """Batches whose requests run, oldest first."""
        self._wake = asyncio.Event()
        self._calls: set[BatchCall] = set()
        self._by_tenant: collections.Counter[str] = collections.Counter()
        """Number of calls in flight per tenant."""
        self._window: FeedWindow | None = None
        self._costs: StepCosts | None = None
        """Step costs that `_window` was created with."""
        self._waiting_since_s: float | None = None
        """Time on the monotonic clock when requests first waited for step costs."""

    @property
    def num_calls(self) -> int:
        """Number of batch requests that are being read, waiting or running."""
        return len(self._calls)

    def add(self, batch: RunningBatch) -> None:
        self._batches.append(batch)
        self._wake.set()

    async def remove(self, batch: RunningBatch) -> None:
        """Start no more requests of a batch; cancel its requests in flight, which get no outcome."""
        if batch in self._batches:
            self._batches.remove(batch)
        tasks = [*batch.calls, *([] if batch.reading is None else [batch.reading])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Start requests whenever `FeedWindow` allows more, until cancelled."""
        while True:
            self._wake.clear()
            self._fill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S if self._batches else None):
                    await self._wake.wait()

    def _fill(self) -> None:
        now_s, engine = time.monotonic(), self._service.attached
        if engine is None:
            return
        parts = engine.parts
        costs = None if parts.cost_model is None else parts.cost_model.costs
        if self._window is None or costs is not self._costs:  # costs may be measured while the server runs
            places = parts.config.scheduler.max_num_seqs
            most = min(self._store.config.max_concurrency or places, places)
            self._window, self._costs = FeedWindow(places, most, costs), costs
        own = sum(max(call.num_requests, 1) for call in self._calls)
        submitted = sum(call.num_requests for call in self._calls)
        room = self._window.room(now_s, max(engine.num_open - submitted, 0), own)
        if self._num_uncommitted() >= _PAGE or self._waits_for_costs(parts, now_s):
            return
        num_reading = sum(not call.num_requests for call in self._calls)
        while room > 0 and num_reading < MAX_READING:
            batch = self._next(now_s)
            if batch is None:
                return
            self._start(batch)
            room, num_reading = room - 1, num_reading + 1

    def _waits_for_costs(self, parts: EngineComponents, now_s: float) -> bool:
        unprepared = parts.unprepared
        if unprepared is None or unprepared.calibration_s is None or parts.cost_model is not None:
            return False
        if not self._batches or any(batch.record.expires_at - time.time() < _SOON_S for batch in self._batches):
            return False
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        return now_s - self._waiting_since_s < _COSTS_WAIT_S

    def _next(self, now_s: float) -> RunningBatch | None:
        """Return the batch whose request runs next, from the tenant with the fewest calls; None if no batch is ready.

        Only each tenant's oldest batch that has requests left and is not paused can run next. If few of its requests
        are in memory, start reading ahead.
        """
        first: dict[str, RunningBatch] = {}
        for batch in self._batches:
            if now_s >= batch.paused_until_s and (batch.pending or not batch.is_read):
                first.setdefault(batch.record.tenant, batch)
        for batch in first.values():
            if len(batch.pending) < _PAGE // 4 and not batch.is_read and batch.reading is None:
                batch.reading = asyncio.create_task(self._read_ahead(batch))
        ready = [batch for batch in first.values() if batch.pending]
        return min(ready, key=lambda batch: self._by_tenant[batch.record.tenant], default=None)

    async def _read_ahead(self, batch: RunningBatch) -> None:
        record, after = batch.record, batch.last
        try:
            found = await self._store.run(lambda: self._store.pending(record, after, _PAGE, _PAGE_BYTES))
        except OSError as error:
            batch.failure = error
            batch.done.set()
            return
        except Exception as error:
            log_failure(logger, "reading requests of a batch", error)
            batch.paused_until_s = time.monotonic() + _LONGEST_PAUSE_S
            return
        finally:
            batch.reading = None
        batch.is_read = not found
        if found:
            batch.pending.extend(found)
            batch.last = found[-1][0].number
        self._wake.set()

    def _start(self, batch: RunningBatch) -> None:
        line, data = batch.pending.popleft()
        record = batch.record
        call = ENDPOINTS[record.endpoint](self._service, data, record.tenant, self._wake.set)
        self._calls.add(call)
        self._by_tenant[record.tenant] += 1
        task = asyncio.create_task(self._serve(batch, line, data, call))
        batch.calls.add(task)

        def ended(task: asyncio.Task[None]) -> None:  # also called if the task was cancelled before it began
            batch.calls.discard(task)
            self._calls.discard(call)
            self._by_tenant[record.tenant] -= 1
            self._wake.set()

        task.add_done_callback(ended)

    async def _serve(self, batch: RunningBatch, line: RequestLine, data: bytes, call: BatchCall) -> None:
        try:
            await call.run()
        except Exception as error:
            log_failure(logger, "request of a batch", error)
            call.outcome = failed_outcome("internal_error", "The request failed because of an internal error.")
        if call.outcome is not None:
            self._on_outcome(batch, line, call.outcome)
            return
        batch.pending.appendleft((line, data))
        pause_s = min(call.retry_after_s or 1.0, _LONGEST_PAUSE_S)
        batch.paused_until_s = max(batch.paused_until_s, time.monotonic() + pause_s)

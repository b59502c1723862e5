"""An asyncio event loop in virtual time: its clock jumps to the next timer when nothing is ready.

Everything runs in one thread, in an order that its timers alone decide. What would block a thread in service, the wait
for a step's result, runs the loop meanwhile (`VirtualLoop.run_until`), so that calls arrive, clients leave and timers
fire while a step runs. Thread pools are `VirtualPool`s, whose jobs take drawn virtual times.
"""

import asyncio
import concurrent.futures
import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from apt_jax.utils.clock import VirtualClock


class StandstillError(AssertionError):
    """Something is waited for, and nothing is left that could ever happen."""


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module docstring. No sockets, no signals, no subprocesses.

    Args:
        job_s: virtual seconds that a job of the default thread pool takes.
        max_callbacks: more of them are taken for a loop that never ends.
    """

    def __init__(self, job_s: Callable[[], float] = lambda: 0.001, max_callbacks: int = 1_000_000) -> None:
        super().__init__()
        self._now_s = 0.0
        self._callbacks_left = max_callbacks
        self._default_pool = VirtualPool(self, 32, lambda function: job_s())
        self.set_exception_handler(self._note_error)
        self.errors: list[dict[str, Any]] = []
        """Errors in callbacks, and in tasks that nobody awaited."""

    def time(self) -> float:
        return self._now_s

    def call_soon_threadsafe(self, callback, *args, context=None):  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor, func, *args):  # type: ignore[override]
        pool = self._default_pool if executor is None else executor
        return asyncio.wrap_future(pool.submit(func, *args), loop=self)

    def run_until(self, at_s: float) -> None:
        """Run whatever happens up to a time; callable from a callback, but not from a task."""
        if at_s == math.inf:
            raise StandstillError("nothing is left that could happen")
        while self._next_s() <= at_s:
            self._run_once()
        self._now_s = max(self._now_s, at_s)

    def _next_s(self) -> float:
        if self._ready:  # type: ignore[attr-defined]
            return self._now_s
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        return timers[0]._when if timers else math.inf

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        next_s = self._next_s()
        if next_s == math.inf:
            raise StandstillError("nothing is left that could happen")
        self._now_s = max(self._now_s, next_s)
        while timers and timers[0]._when <= self._now_s:  # type: ignore[attr-defined]
            handle = heapq.heappop(timers)
            handle._scheduled = False  # type: ignore[attr-defined]
            ready.append(handle)
        for _ in range(len(ready)):
            if not ready:
                break  # a callback has run the loop itself
            handle = ready.popleft()
            if not handle._cancelled:  # type: ignore[attr-defined]
                self._callbacks_left -= 1
                if self._callbacks_left < 0:
                    raise StandstillError("the loop does not come to an end")
                handle._run()  # type: ignore[attr-defined]

    def timers(self) -> list[asyncio.TimerHandle]:
        """Timers that are still to fire."""
        return [timer for timer in self._scheduled if not timer._cancelled]  # type: ignore[attr-defined]

    def _note_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(context)

    # What `asyncio.BaseEventLoop` asks of a loop with sockets.
    def _process_events(self, event_list: object) -> None:
        raise NotImplementedError

    def _write_to_self(self) -> None:
        pass


class LoopClock(VirtualClock):
    """The engine's clock: that of a loop, and ahead of it by what it has jumped."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return self._loop.time() + self.ahead_s

    def advance_to(self, now_s: float) -> None:
        """Let happen what happens until then."""
        while now_s > self.now_s() + 1e-12:  # it may jump meanwhile
            self._loop.run_until(now_s - self.ahead_s)


class VirtualPool(concurrent.futures.Executor):
    """A thread pool whose jobs end after drawn virtual times, first come, first served.

    Args:
        loop: runs the jobs.
        num_threads: jobs at the same time.
        job_s: virtual seconds that a job takes.
    """

    def __init__(self, loop: VirtualLoop, num_threads: int, job_s: Callable[[Callable[..., Any]], float]) -> None:
        self._loop, self._num_threads, self._job_s = loop, num_threads, job_s
        self._queue: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()
        self._num_busy = 0
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Jobs that run or wait."""
        return self._num_busy + len(self._queue)

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[override]
        if self._is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._queue.append((future, lambda: fn(*args, **kwargs)))
        self._fill()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_closed = True
        while cancel_futures and self._queue:
            self._queue.popleft()[0].cancel()

    def _fill(self) -> None:
        while self._queue and self._num_busy < self._num_threads:
            future, function = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._num_busy += 1
                self._loop.call_later(self._job_s(function), self._run, future, function)

    def _run(self, future: concurrent.futures.Future[Any], function: Callable[[], Any]) -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        self._num_busy -= 1
        self._fill()

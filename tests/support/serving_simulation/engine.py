"""Engine, watchdog and clock of a replica: callbacks of the loop take the place of threads and waiting."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.components import EngineComponents
from serve.observability.prometheus import ServerMetrics
from tests.support.simulation_harness import SimulationError
from tests.support.virtual_loop import LoopClock, VirtualLoop

if TYPE_CHECKING:
    from tests.support.serving_simulation.replica import Replica

STEP_TIMEOUT_S = 5.0


class _Inbox:
    """Takes the place of the condition that the engine's thread sleeps on: `notify` has the loop run an iteration."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self.notify = notify

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> None:
        raise SimulationError("an iteration without anything to do")


class _Watchdog:
    """`apt_jax.frontend.watchdog.Watchdog` by timers of the loop."""

    def __init__(self, loop: VirtualLoop, on_timeout: Callable[[float, str], None], is_stopped: Callable[[], bool]):
        self._loop, self._on_timeout, self._is_stopped = loop, on_timeout, is_stopped
        self.started_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def end_step(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.pause()
        if self._is_over:
            return
        self.started_s = self._loop.time()
        self._timer = self._loop.call_later(STEP_TIMEOUT_S, self._look, self.started_s)

    def pause(self) -> None:
        self.started_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stop(self) -> None:
        self._is_over = True
        self.pause()

    def _look(self, started_s: float) -> None:
        if self.started_s == started_s and self._is_stopped():
            self._on_timeout(started_s, f"a step has been running for {STEP_TIMEOUT_S:g} s (--set step_timeout)")
        elif self.started_s == started_s:  # the step has ended, and waits for those that run nested in it
            self._timer = self._loop.call_later(STEP_TIMEOUT_S, self._look, started_s)


class SimulatedEngine(AsyncEngine):
    """An `AsyncEngine` whose iterations are callbacks of the loop."""

    def __init__(self, replica: "Replica", parts: EngineComponents, observer: ServerMetrics) -> None:
        self._replica, self._loop = replica, replica.world.loop
        self.is_over = False
        self._is_scheduled = self._is_running = False
        super().__init__(parts, observer, step_timeout_s=STEP_TIMEOUT_S)

    def _start(self) -> None:
        self._work = _Inbox(self._schedule)  # type: ignore[assignment]
        self._watchdog = _Watchdog(self._loop, self._fail_all, lambda: self._replica.faults.hangs)  # type: ignore[assignment]

    def _schedule(self, after_s: float = 0.0) -> None:
        if not (self._is_scheduled or self._is_running or self.is_over):
            self._is_scheduled = True
            self._loop.call_later(after_s, self._drive)

    def resume(self) -> None:
        """Go on after a pause."""
        self._schedule()

    def _drive(self) -> None:
        self._is_scheduled = False
        replica = self._replica
        if self.is_over or replica.is_paused or replica.is_dead or not self._is_due():
            return
        self._is_running = True
        replica.begin_iteration()
        try:
            goes_on = self._run_iteration()
        except Exception as error:
            replica.world.fail(error)
            return
        finally:
            self._is_running = False
        if replica.is_dead:
            return
        self.is_over = not goes_on
        try:
            replica.checks.end_iteration()
        except Exception as error:
            replica.world.fail(error)
        if goes_on:
            self._schedule(1e-4)


class ReplicaClock(LoopClock):
    """A process that has ended waits for nothing any more."""

    def __init__(self, loop: VirtualLoop, replica: "Replica") -> None:
        super().__init__(loop)
        self._replica = replica

    def advance_to(self, now_s: float) -> None:
        loop, replica = self._loop, self._replica
        while not replica.is_dead and replica.world.error is None:
            end_s = now_s - self.ahead_s  # it may jump meanwhile
            if loop.time() >= end_s - 1e-12 and not replica.is_paused:
                break
            next_s = loop._next_s()
            loop.run_until(next_s if replica.is_paused else min(next_s, end_s))

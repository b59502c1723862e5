"""Clocks of the engine. The engine reads the time only from one of these clocks, so that the simulator and tests can
run the same code."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic time, in seconds from an arbitrary origin."""

    def now_s(self) -> float: ...


class WallClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that advances only by `advance_to`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        """Set the time to `now_s` unless that is in the past."""
        self._now_s = max(self._now_s, now_s)

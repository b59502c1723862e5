"""Time, as the engine sees it. Only a clock tells the time, so that the simulator and the tests run the same code."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds from an arbitrary origin."""

    def now_s(self) -> float: ...


class WallClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Time that moves only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        """Move forward; never backward."""
        self._now_s = max(self._now_s, now_s)

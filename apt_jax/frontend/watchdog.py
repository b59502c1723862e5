"""Detection of engine iterations that never end."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Watchdog:
    """Measures the iterations of a thread, and reports one that takes too long.

    Args:
        thread: whose stack is logged.
        timeout_s: longest time for an iteration; None: no limit, nothing is reported.
        on_timeout: called in the thread of the watchdog with `started_s` and a message.

    Attributes:
        started_s: start of the measurement, on the monotonic clock; None: the thread is idle.
    """

    def __init__(
        self, thread: threading.Thread, timeout_s: float | None, on_timeout: Callable[[float, str], None]
    ) -> None:
        self.started_s: float | None = None
        self._thread = thread
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._stopped = threading.Event()

    def start(self) -> None:
        if self._timeout_s is not None:
            args = (self._timeout_s,)
            threading.Thread(target=self._run, args=args, name="apt-jax-watchdog", daemon=True).start()

    def stop(self) -> None:
        """End the watch. From any thread, any number of times."""
        self._stopped.set()

    def restart(self) -> None:
        """Measure from now on."""
        self.started_s = time.monotonic()

    def pause(self) -> None:
        """Measure nothing: the thread is idle."""
        self.started_s = None

    def _run(self, timeout_s: float) -> None:
        pause_s = min(timeout_s / 4, 0.5)
        seen_s, spent_s, last_s = None, 0.0, time.monotonic()
        while not self._stopped.wait(pause_s):
            now_s, started_s = time.monotonic(), self.started_s
            # Counts pauses rather than clock time: a process that was suspended did no work meanwhile.
            spent_s = 0.0 if started_s != seen_s else spent_s + min(now_s - last_s, 2 * pause_s)
            seen_s, last_s = started_s, now_s
            if started_s is not None and spent_s > timeout_s:
                frame = sys._current_frames().get(self._thread.ident or 0)
                where = "nowhere" if frame is None else "".join(traceback.format_stack(frame))
                logger.critical("a step has not ended for %g s; it is at\n%s", timeout_s, where)
                self._on_timeout(started_s, f"a step has not ended for {timeout_s:g} s (--step-timeout)")

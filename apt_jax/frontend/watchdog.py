"""Detection of hung engine iterations."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

logger = logging.getLogger(__name__)

_TIMES_P99 = 20.0
"""Multiple of the larger of the recent 99th-percentile step time and the expected step time after which a step counts
as hung, unless `timeout_s` is longer."""
_NUM_STEPS = 512
"""Number of recent steps whose times are kept."""


class Watchdog:
    """Measures the iterations of a thread, and reports an iteration that takes too long.

    The limit grows with the step times, so a slow device (throttled, shared) does not count as hung.

    Args:
        thread: thread that runs the iterations; its stack is logged.
        timeout_s: minimum of the limit, in seconds; None: no limit, nothing is reported.
        on_timeout: called in the watchdog's thread with `started_s` and a message.
        expected_step_s: expected time of a full step in seconds, from step costs; 0: not known.

    Attributes:
        started_s: start of the current iteration on the monotonic clock, in seconds; None: the thread is idle.
        expected_step_s: see above; it may be set later, when costs are measured.
    """

    def __init__(
        self,
        thread: threading.Thread,
        timeout_s: float | None,
        on_timeout: Callable[[float, str], None],
        expected_step_s: float = 0.0,
    ) -> None:
        self.started_s: float | None = None
        self._thread = thread
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self.expected_step_s = expected_step_s
        self._stopped = threading.Event()
        self._steps_s: list[float] = []  # a ring: the watchdog reads it while the thread writes
        self._num_steps = 0

    @property
    def limit_s(self) -> float:
        """Time in seconds after which an iteration is reported; infinite without a timeout."""
        if self._timeout_s is None:
            return float("inf")
        steps_s = sorted(self._steps_s)
        # With fewer than a hundred steps this ignores the longest, which may be a single hiccup.
        p99_s = steps_s[int(0.99 * (len(steps_s) - 1))] if steps_s else 0.0
        return max(self._timeout_s, _TIMES_P99 * max(p99_s, self.expected_step_s))

    def start(self) -> None:
        if self._timeout_s is not None:
            args = (self._timeout_s,)
            threading.Thread(target=self._run, args=args, name="apt-jax-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop the watchdog. Thread-safe; repeated calls are harmless."""
        self._stopped.set()

    def restart(self) -> None:
        """Start measuring an iteration now."""
        self.started_s = time.monotonic()

    def end_step(self) -> None:
        """Store the time of the step that has just finished, and start measuring the next step."""
        now_s = time.monotonic()
        if self.started_s is not None:
            if len(self._steps_s) < _NUM_STEPS:
                self._steps_s.append(now_s - self.started_s)
            else:
                self._steps_s[self._num_steps % _NUM_STEPS] = now_s - self.started_s
            self._num_steps += 1
        self.started_s = now_s

    def pause(self) -> None:
        """Stop measuring because the thread is idle."""
        self.started_s = None

    def _run(self, timeout_s: float) -> None:
        pause_s = min(timeout_s / 4, 0.5)
        seen_s, spent_s, last_s = None, 0.0, time.monotonic()
        while not self._stopped.wait(pause_s):
            now_s, started_s = time.monotonic(), self.started_s
            # Add up pauses instead of clock time, because a suspended process does no work.
            spent_s = 0.0 if started_s != seen_s else spent_s + min(now_s - last_s, 2 * pause_s)
            seen_s, last_s = started_s, now_s
            if started_s is not None and spent_s > timeout_s and spent_s > self.limit_s:
                frame = sys._current_frames().get(self._thread.ident or 0)
                where = "nowhere" if frame is None else "".join(traceback.format_stack(frame))
                limit = f"a step has been running for {self.limit_s:.3g} s"
                logger.critical("%s; the engine thread is at\n%s", limit, where)
                self._on_timeout(started_s, f"{limit} (--set step_timeout)")

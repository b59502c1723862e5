"""Progress of a start: bars or lines while programs are compiled and steps calibrated, and never five seconds of silence."""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from tqdm import tqdm

from apt_jax.utils.activity import current_activity

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(stage, done, total), called after each part of a stage: "preparing" (programs: compiled, or loaded from disk),
"calibrating"."""


def of_stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    """`progress` bound to one stage."""
    return None if progress is None else lambda done, total: progress(stage, done, total)


class ProgressBars:
    """A `Progress` that draws one bar per stage where stderr is a terminal, and else reports its start, its end
    and, every four seconds, how far it is, as lines.

    Within one part of a stage, and between stages, nobody calls it: `keep_reporting` has a thread report meanwhile, on
    terminals too.

    Args:
        disable: True: draws and reports nothing.
        say: receives the lines where there is no terminal; None: they are logged.
    """

    _REPORT_EVERY_S: ClassVar = 4.0
    """Less than the five seconds that a reader has to wait at most, by what a busy machine may delay the thread."""
    _TICK_S: ClassVar = 0.5
    _DONE: ClassVar = {"preparing": ("program", "prepared"), "calibrating": ("step", "calibrated")}
    """By stage of the start: the unit counted, and the word that reports the end."""

    def __init__(self, *, disable: bool | None = None, say: Callable[[str], None] | None = None) -> None:
        self._disable, self._say = disable, say or logger.info
        self._lock = threading.RLock()
        self._bar: tqdm | None = None
        self._stage, self._count = "", (0, 0)
        self._begun = self._started = self._reported = time.monotonic()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        unit, ended = self._DONE.get(stage, ("step", None))
        with self._lock:
            if self._bar is None or stage != self._stage:
                self._close_bar()
                # disable=None: only where stderr is a terminal. Some terminals have no size (containers).
                columns, lines = shutil.get_terminal_size()
                self._bar = tqdm(total=total, desc=stage, unit=unit, disable=self._disable, ncols=columns, nrows=lines)
                self._stage, self._started = stage, time.monotonic()
                if ended:
                    self._report(f"{stage} {total} {unit}s")
            self._count = done, total
            self._bar.update(done - self._bar.n)
            if done >= total:
                if ended:
                    self._report(f"{ended} {total} {unit}s in {time.monotonic() - self._started:.1f} s")
                self._close_bar()
            else:
                self.tick()

    def keep_reporting(self) -> "ProgressBars":
        """Have a thread call `tick` until `close`; returns this object."""
        if not self._disable and self._thread is None:
            self._begun = self._reported = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="apt-jax-progress", daemon=True)
            self._thread.start()
        return self

    def _run(self) -> None:
        while not self._closed.wait(self._TICK_S):
            self.tick()

    def tick(self) -> None:
        """Report how far it is, if nothing has been reported for four seconds; draw the bar again if there is one."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._reported < self._REPORT_EVERY_S:
                return
            activity = current_activity()
            if activity is not None:
                self._report(f"{activity}: {now_s - self._begun:.0f} s since the start")
            elif self._bar is None:
                what = f"{self._DONE[self._stage][1]}, finishing the start" if self._stage in self._DONE else "starting"
                self._report(f"{what}: {now_s - self._begun:.0f} s since the start")
            elif not self._bar.disable:
                self._reported = now_s
                self._bar.refresh()  # its clock goes on
            elif self._stage in self._DONE:
                unit, (done, total) = self._DONE[self._stage][0], self._count
                self._report(f"{self._stage}: {done} of {total} {unit}s, {now_s - self._started:.0f} s")

    def _report(self, line: str) -> None:
        """Say a line, but not beside a bar that says the same."""
        self._reported = time.monotonic()
        if not self._disable and (self._bar is None or self._bar.disable):
            self._say(line)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """End the bar, and the reports of `keep_reporting`."""
        self._closed.set()
        with self._lock:
            self._close_bar()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

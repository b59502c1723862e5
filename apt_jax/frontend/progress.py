"""Startup progress: bars or lines, at least every five seconds, while the engine is prepared and calibrated."""

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

from tqdm import tqdm

from apt_jax.frontend.start_stages import KERNELS, LAYOUT, LOADING, StartStages
from apt_jax.utils.activity import current_activity

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Function of (stage, done, total), called when a stage begins and after each part of it. Stages: "loading", "kernels"
and "layout", which have one part, "preparing" (programs: compiled, or loaded from disk), "calibrating", and "sweeping" (runs
of the simulator)."""


def of_stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    """Return `progress` bound to one stage; None if `progress` is None."""
    return None if progress is None else lambda done, total: progress(stage, done, total)


@contextlib.contextmanager
def in_stage(progress: Progress | None, stage: str) -> Iterator[None]:
    """Report to `progress` that a one-part stage begins, and that it has ended when the context is left."""
    if progress is not None:
        progress(stage, 0, 1)
    yield
    if progress is not None:
        progress(stage, 1, 1)


class ProgressBars:
    """A `Progress` that draws one bar per stage if stderr is a terminal; otherwise it writes lines at the start and end
    of each stage and every four seconds.

    It is called only when a stage begins and after each part of it. `keep_reporting` starts a thread that also reports
    in between, on terminals too.

    Args:
        disable: True: draw and report nothing.
        say: receives the lines if stderr is not a terminal; None: they are logged.
        stages: also receives all progress, and provides the start's status; None: lines do not name the stage.
    """

    _REPORT_EVERY_S: ClassVar = 4.0
    """Time in seconds between reports: below the promised five seconds, with a margin for a busy machine."""
    _TICK_S: ClassVar = 0.5
    _DONE: ClassVar = {
        "preparing": ("program", "prepared"),
        "calibrating": ("step", "calibrated"),
        "sweeping": ("run", "simulated"),
    }
    """Keyed by stage: the unit that is counted, and the word that reports the end of the stage."""
    _WITHOUT_PARTS: ClassVar = (LOADING, KERNELS, LAYOUT)

    def __init__(
        self,
        *,
        disable: bool | None = None,
        say: Callable[[str], None] | None = None,
        stages: StartStages | None = None,
    ) -> None:
        self._disable, self._say, self._stages = disable, say or logger.info, stages
        self._lock = threading.RLock()
        self._bar: tqdm | None = None
        self._stage, self._count = "", (0, 0)
        self._begun = self._started = self._reported = time.monotonic()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._stages is not None:
            self._stages(stage, done, total)
        if stage in self._WITHOUT_PARTS:
            return
        unit, ended = self._DONE.get(stage, ("step", None))
        with self._lock:
            if self._bar is None or stage != self._stage:
                self._close_bar()
                # disable=None: only if stderr is a terminal. In containers some terminals report no size.
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
        """Start a thread that calls `tick` until `close`; returns this object."""
        if not self._disable and self._thread is None:
            self._begun = self._reported = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="apt-jax-progress", daemon=True)
            self._thread.start()
        return self

    def _run(self) -> None:
        while not self._closed.wait(self._TICK_S):
            self.tick()

    def tick(self) -> None:
        """Report the progress if four seconds have passed since the last report; redraw the bar if there is one."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._reported < self._REPORT_EVERY_S:
                return
            status = None if self._stages is None else self._stages.status()
            activity = current_activity()
            if status is not None and (self._bar is None or self._bar.disable):
                parts = ""
                if self._bar is not None and self._stage in self._DONE:
                    parts = f", {self._count[0]} of {self._count[1]}"
                left = f"; {status.rest}" if status.rest else ""
                self._report(
                    f"stage {status.number} of {status.total}, {status.stage}{parts}: {status.spent_s:.0f} s{left}"
                )
            elif activity is not None:
                self._report(f"{activity}: {now_s - self._begun:.0f} s since the start")
            elif self._bar is None:
                what = f"{self._DONE[self._stage][1]}, finishing the start" if self._stage in self._DONE else "starting"
                self._report(f"{what}: {now_s - self._begun:.0f} s since the start")
            elif not self._bar.disable:
                self._reported = now_s
                self._bar.refresh()  # updates its elapsed time
            elif self._stage in self._DONE:
                unit, (done, total) = self._DONE[self._stage][0], self._count
                self._report(f"{self._stage}: {done} of {total} {unit}s, {now_s - self._started:.0f} s")

    def _report(self, line: str) -> None:
        """Write a line, unless a bar shows the same progress."""
        self._reported = time.monotonic()
        if not self._disable and (self._bar is None or self._bar.disable):
            self._say(line)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Close the bar, and stop the reports of `keep_reporting`."""
        self._closed.set()
        with self._lock:
            self._close_bar()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

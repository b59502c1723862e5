"""Progress of long stages: compiling programs, calibrating."""

import logging
import shutil
import time
from collections.abc import Callable
from typing import ClassVar

from tqdm import tqdm

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(stage, done, total), called after each part of a stage: "preparing" (programs: compiled, or loaded from disk),
"calibrating"."""


def of_stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    """`progress` bound to one stage."""
    return None if progress is None else lambda done, total: progress(stage, done, total)


class ProgressBars:
    """A `Progress` that draws one bar per stage where stderr is a terminal, and else reports its start, its end
    and, every ten seconds, how far it is, as lines.

    Args:
        disable: True: draws and reports nothing.
        say: receives the lines where there is no terminal; None: they are logged.
    """

    _REPORT_EVERY_S: ClassVar = 10.0
    _DONE: ClassVar = {"preparing": ("program", "prepared"), "calibrating": ("step", "calibrated")}
    """By stage of the start: the unit counted, and the word that reports the end."""

    def __init__(self, *, disable: bool | None = None, say: Callable[[str], None] | None = None) -> None:
        self._disable, self._say = disable, say or logger.info
        self._bar: tqdm | None = None
        self._stage = ""
        self._started = self._reported = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        unit, ended = self._DONE.get(stage, ("step", None))
        if self._bar is None or stage != self._stage:
            self.close()
            # disable=None: only where stderr is a terminal. Some terminals have no size (containers).
            columns, lines = shutil.get_terminal_size()
            self._bar = tqdm(total=total, desc=stage, unit=unit, disable=self._disable, ncols=columns, nrows=lines)
            self._stage, self._started = stage, time.monotonic()
            self._reported = self._started
            self._report(ended, f"{stage} {total} {unit}s")
        self._bar.update(done - self._bar.n)
        if done >= total:
            seconds = time.monotonic() - self._started
            self._report(ended, f"{ended} {total} {unit}s in {seconds:.1f} s")
            self.close()
        elif time.monotonic() - self._reported >= self._REPORT_EVERY_S:
            self._reported = time.monotonic()
            self._report(ended, f"{stage}: {done} of {total} {unit}s")

    def _report(self, ended: str | None, line: str) -> None:
        if ended and not self._disable and self._bar is not None and self._bar.disable:
            self._say(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

"""Where a start is: which of its stages it is in, and how long that one will take.

A `StartStages` is a `Progress`. It estimates a stage by the parts of it that are done, by what knows better (the compiler of
the CPU kernels), or by how long the stage took when an engine was last started, which `keep` writes to the cache directory.
"""

import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from apt_jax.config import EngineConfig
from apt_jax.cpu import build
from apt_jax.utils.activity import current_activity
from apt_jax.utils.cache_dir import cache_dir, log_not_kept, read_verified, remove_least_recent, write_verified

LOADING, KERNELS, LAYOUT, PREPARING, CALIBRATING = "loading", "kernels", "layout", "preparing", "calibrating"
_TITLES = {
    LOADING: "loading the model",
    KERNELS: "compiling the CPU kernels",
    LAYOUT: "laying out weights and cache",
    PREPARING: "preparing programs",
    CALIBRATING: "measuring step costs",
}
_MOST_KEPT = 32
"""Files of times: one a configuration."""
_LEAST_SHARE = 0.25
"""Part of a counted stage that must be done before its pace is believed more than the last start: the first programs take
longest."""
_OVERDUE = 0.25
"""Remaining time of a stage that takes longer than expected, as a share of its time so far."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartStatus:
    """One moment of a start."""

    stage: str
    """Name of the awaited stage, such as "loading the model"."""
    number: int
    """Number of the stage, from 1."""
    total: int
    """Number of stages."""
    spent_s: float
    """Since the stage began."""
    left_s: float | None
    """Estimate until the end of the start; None: not known."""
    unknown: int = 0
    """Stages that are not in `left_s`, for want of an estimate."""

    @property
    def rest(self) -> str:
        """The estimate for people; empty: there is none."""
        if self.left_s is None:
            return ""
        more = f"about {max(1, round(self.left_s))} s more"
        stages = "1 stage" if self.unknown == 1 else f"{self.unknown} stages"
        return f"{more}, and then {stages}" if self.unknown else more

    def __str__(self) -> str:
        text = f"stage {self.number} of {self.total}, {self.stage}"
        return f"{text}; {self.rest}" if self.rest else text


class StartStages:
    """The stages of one start; from any thread.

    Args:
        names: of the stages, in their order; the first begins now. One that comes up beside them is put in its place.
        expected_s: how long each is likely to take, if known.
        estimates: by name what returns the seconds that are left of a stage, begun or not; it may go on beside others.
    """

    def __init__(
        self,
        names: Sequence[str],
        expected_s: Mapping[str, float] | None = None,
        estimates: Mapping[str, Callable[[], float | None]] | None = None,
    ) -> None:
        self.taken_s: dict[str, float] = {}
        """Seconds of the stages that have ended."""
        self._names, self._expected_s, self._estimates = list(names), dict(expected_s or {}), dict(estimates or {})
        self._lock = threading.Lock()
        self._now: str | None = names[0] if names else None
        self._count = (0, 1)
        self._begun = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See `Progress`."""
        with self._lock:
            if stage != self._now:
                self._end()
                if stage not in self._names:
                    at = 0 if self._now is None else self._names.index(self._now) + 1
                    self._names.insert(at, stage)
                self._now, self._begun = stage, time.monotonic()
            self._count = done, total

    def end(self) -> None:
        """Note that the last stage has ended."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._now is not None:
            self.taken_s[self._now] = time.monotonic() - self._begun

    def status(self) -> StartStatus | None:
        """Where the start is; None: there are no stages."""
        with self._lock:
            now = self._now
            if now is None:
                return None
            at, spent_s = self._names.index(now), time.monotonic() - self._begun
            left_s = self._left_s(now, spent_s)
            unknown, total_s = int(left_s is None), left_s or 0.0
            for name in self._names[at + 1 :]:
                estimate = self._estimates.get(name, lambda: None)()
                if estimate is not None:
                    total_s = max(total_s, estimate)  # it goes on already
                elif name in self._expected_s:
                    total_s += self._expected_s[name]
                else:
                    unknown += 1
            known = unknown < len(self._names) - at
            return StartStatus(
                stage=current_activity() or _TITLES.get(now, now),
                number=at + 1,
                total=len(self._names),
                spent_s=spent_s,
                left_s=total_s if known and (left_s is not None or total_s > 0) else None,
                unknown=unknown if known else 0,
            )

    def _left_s(self, name: str, spent_s: float) -> float | None:
        """Seconds that are left of the stage that has taken `spent_s` so far."""
        if name in self._estimates and (left_s := self._estimates[name]()) is not None:
            return left_s
        done, total = self._count
        expected_s = self._expected_s.get(name)
        by_pace_s = spent_s / done * (total - done) if total > 1 and done else None
        if expected_s is None:
            return by_pace_s
        by_last_s = max(expected_s - spent_s, _OVERDUE * spent_s)
        if by_pace_s is None:
            return by_last_s
        if spent_s > expected_s or done >= max(2, _LEAST_SHARE * total):
            return by_pace_s
        return min(by_pace_s, by_last_s)  # programs that are loaded now were compiled when it was last started


def planned(config: EngineConfig, *, calibration_s: float) -> StartStages:
    """The stages of a start of this configuration, with the times of its last start, or of any other start.

    Args:
        config: of the engine.
        calibration_s: how long step costs may be measured before it serves; 0: not at all.
    """
    expected_s = _kept(_path(config))
    names = [LOADING, *([KERNELS] if build.is_compiling() else []), LAYOUT, PREPARING]
    if calibration_s > 0 and (not expected_s or CALIBRATING in expected_s):
        names.append(CALIBRATING)
    likely_s = {CALIBRATING: calibration_s, **(expected_s or _kept(_latest()))}
    return StartStages(names, likely_s, {KERNELS: build.left_s})


def keep(stages: StartStages, config: EngineConfig) -> None:
    """Keep the times of a start that has succeeded for the next one, if the disk is writeable."""
    taken_s = {name: round(seconds, 3) for name, seconds in stages.taken_s.items() if name != KERNELS}
    try:
        _directory().mkdir(parents=True, exist_ok=True, mode=0o700)
        write_verified(_path(config), json.dumps(taken_s).encode())
        remove_least_recent(_directory(), "*.json", _MOST_KEPT)
    except OSError as error:
        log_not_kept(error)


def _directory() -> Path:
    return cache_dir() / "starts"


def _path(config: EngineConfig) -> Path:
    return _directory() / f"{hashlib.sha256(repr(config).encode()).hexdigest()[:24]}.json"


def _latest() -> Path | None:
    try:
        return max(_directory().glob("*.json"), key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None


def _kept(path: Path | None) -> dict[str, float]:
    stored = None if path is None else read_verified(path)
    try:
        values = json.loads(stored or b"{}")
        return {str(name): float(seconds) for name, seconds in values.items()}
    except (ValueError, TypeError, AttributeError):
        return {}

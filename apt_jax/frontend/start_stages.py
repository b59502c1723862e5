"""Status of a start: its current stage, and the estimated remaining time.

A `StartStages` is a `Progress`. It estimates the time of a stage from its completed parts, from the stage's own
estimate (compiling the CPU kernels), or from its duration in the last start, which `keep` writes to the cache
directory.
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
"""Maximum number of stored files with stage times; there is one per configuration."""
_LEAST_SHARE = 0.25
"""Share of a stage's parts that must be done before its pace replaces the time of the last start, because the first
programs take longest."""
_OVERDUE = 0.25
"""Estimated remaining time of a stage that takes longer than expected, as a share of its time so far."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartStatus:
    """Status of a start at one moment."""

    stage: str
    """Name of the current stage, such as "loading the model"."""
    number: int
    """Number of the current stage, from 1."""
    total: int
    """Number of stages."""
    spent_s: float
    """Seconds since the current stage began."""
    left_s: float | None
    """Estimated seconds until the end of the start; None: not known."""
    unknown: int = 0
    """Number of stages without an estimate, which `left_s` does not include."""

    @property
    def rest(self) -> str:
        """The estimate as text, such as "about 5 s more"; empty: no estimate."""
        if self.left_s is None:
            return ""
        more = f"about {max(1, round(self.left_s))} s more"
        stages = "1 stage" if self.unknown == 1 else f"{self.unknown} stages"
        return f"{more}, and then {stages}" if self.unknown else more

    def __str__(self) -> str:
        text = f"stage {self.number} of {self.total}, {self.stage}"
        return f"{text}; {self.rest}" if self.rest else text


class StartStages:
    """The stages of one start. Thread-safe.

    Args:
        names: names of the stages, in order; the first begins now. Other stages are added when they begin.
        expected_s: expected seconds, keyed by stage; a stage may be missing.
        estimates: functions, keyed by stage, that return the remaining seconds of a stage that may overlap others.
    """

    def __init__(
        self,
        names: Sequence[str],
        expected_s: Mapping[str, float] | None = None,
        estimates: Mapping[str, Callable[[], float | None]] | None = None,
    ) -> None:
        self.taken_s: dict[str, float] = {}
        """Duration in seconds of each stage that has ended."""
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
        """Record that the last stage has ended."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._now is not None:
            self.taken_s[self._now] = time.monotonic() - self._begun

    def status(self) -> StartStatus | None:
        """Return the current status; None: there are no stages."""
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
                    total_s = max(total_s, estimate)  # it is already running
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
        """Return the estimated remaining seconds of a stage that has taken `spent_s` so far; None: not known."""
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
        return min(by_pace_s, by_last_s)  # this start may load programs that the last start compiled


def planned(config: EngineConfig, *, calibration_s: float) -> StartStages:
    """Return the planned stages of a start.

    Their expected durations are those of the last start with this configuration or, if none is stored, of the last
    start with any configuration.

    Args:
        config: configuration of the engine.
        calibration_s: expected duration, in seconds, of the calibration before the engine serves; 0: no calibration.
    """
    expected_s = _kept(_path(config))
    names = [LOADING, *([KERNELS] if build.is_compiling() else []), LAYOUT, PREPARING]
    if calibration_s > 0 and (not expected_s or CALIBRATING in expected_s):
        names.append(CALIBRATING)
    likely_s = {CALIBRATING: calibration_s, **(expected_s or _kept(_latest()))}
    return StartStages(names, likely_s, {KERNELS: build.left_s})


def keep(stages: StartStages, config: EngineConfig) -> None:
    """Store the stage times of a successful start for the next start, if the disk is writeable."""
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

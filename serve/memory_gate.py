"""A soft memory limit: new calls are rejected while the process uses most of its available memory.

Without the limit, the system could kill the process and thereby end every stream. Memory use is read at most five times
per second.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from apt_jax.frontend.streams import EngineClosedError

logger = logging.getLogger(__name__)

DEFAULT_SHARE = 0.8
_PERIOD_S = 0.2
_LOG_PERIOD_S = 60.0


class MemoryGate:
    """Rejects calls while memory is short.

    Args:
        total_bytes: memory that the process may use; None: no call is rejected.
        share: share of `total_bytes` above which calls are rejected. If the process already uses more once the
            model is loaded, the limit is halfway between that use and `total_bytes`.
        used_bytes: returns the memory that the process uses, in bytes; None: its resident memory.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        total_bytes: int | None,
        share: float = DEFAULT_SHARE,
        *,
        used_bytes: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_rejected = 0
        """Number of rejected calls."""
        self._total_bytes, self._share = total_bytes, share
        self._used_bytes, self._clock = used_bytes or resident_bytes, clock
        self._limit_bytes = None if total_bytes is None else int(total_bytes * share)
        self._is_open = True
        self._read_s = self._logged_s = -_LOG_PERIOD_S

    def model_loaded(self) -> None:
        """Set the limit from the current memory use; call this once the model is loaded."""
        if self._total_bytes is not None:
            used = self._used_bytes()
            soft = int(self._total_bytes * self._share)
            self._limit_bytes = soft if used < soft else (used + self._total_bytes) // 2

    def check(self) -> None:
        """Check that memory is left for another call.

        Raises:
            EngineClosedError: memory is short.
        """
        if self._limit_bytes is None:
            return
        now_s = self._clock()
        if now_s - self._read_s >= _PERIOD_S:
            self._read_s = now_s
            used = self._used_bytes()
            self._is_open = used < self._limit_bytes
            if not self._is_open and now_s - self._logged_s >= _LOG_PERIOD_S:
                self._logged_s = now_s
                logger.error(
                    "memory is short: %d MiB are used and new requests are rejected above %d MiB (--set memory_soft_limit)",
                    used >> 20,
                    self._limit_bytes >> 20,
                )
        if not self._is_open:
            self.num_rejected += 1
            raise EngineClosedError("the server is short of memory", why="saturated")


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def cgroup_limit_bytes(root: Path = Path("/sys/fs/cgroup"), of: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the lowest memory limit among this process's control group and its parents, in bytes; None: no limit."""
    limits = []
    try:
        lines = of.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base, name = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
        directory = base / path.lstrip("/")
        for place in (directory, *directory.parents):
            if place != base and base not in place.parents:
                break
            try:
                limits.append(int((place / name).read_text()))
            except (OSError, ValueError):  # absent, or "max"
                continue
    found = min(limits, default=None)
    return None if found is None or found >= 1 << 60 else found

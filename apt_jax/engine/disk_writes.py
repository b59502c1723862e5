"""Writes cached prefixes to disk when an engine ends."""

import logging
import time
from collections.abc import Callable

from apt_jax.cache import HybridCache
from apt_jax.core.tiers import DiskStore, HostMemory

logger = logging.getLogger("apt_jax.engine")


def write_prefixes(
    cache: HybridCache,
    host: HostMemory | None,
    disk: DiskStore,
    timeout_s: float,
    is_hurried: Callable[[], bool],
) -> None:
    """Write cached prefixes to disk, and end its threads.

    Args:
        cache: in which nothing is held.
        host: through which all prefixes are written; None: only those already on their way are.
        disk: written to; closed afterwards.
        timeout_s: what has not been written by then is lost.
        is_hurried: asked meanwhile; True ends it at once.
    """
    until_s = time.perf_counter() + timeout_s

    def is_written() -> bool:
        while not disk.flush(0.1):
            if is_hurried() or time.perf_counter() > until_s:
                return False
        return not is_hurried()

    try:
        if host is not None:
            cache.groups.write_all(host.save_now, is_written)
        if not is_written():
            logger.warning("not all cached prefixes have been written to disk: the end was limited to %g s", timeout_s)
    except Exception as error:
        logger.error("cached prefixes could not be written to disk: %s", error)
    disk.close()

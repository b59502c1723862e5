"""Writes cached prefixes to disk when an engine closes."""

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
    """Write cached prefixes to disk, and close the `DiskStore`.

    Args:
        cache: the cache; no request may hold blocks of it.
        host: host memory through which prefixes are written; None: only complete writes that have already begun.
        disk: the store; closed afterwards.
        timeout_s: time limit, seconds; prefixes not written by then are lost.
        is_hurried: function called repeatedly while writing; writing stops when it returns True.
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
            logger.warning(
                "not all cached prefixes were written to disk: shutdown was urgent or took longer than %g s", timeout_s
            )
    except Exception as error:
        logger.error("cached prefixes could not be written to disk: %s", error)
    disk.close()

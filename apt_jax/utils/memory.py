"""Memory of this process."""

import contextlib
import ctypes
import os
import resource
import sys


def give_back_memory() -> None:
    """Make the C library return freed memory to the system instead of keeping it."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def spare_memory_bytes() -> int:
    """Return the bytes that this process may still allocate, given its address-space limit and the system's available
    memory; `sys.maxsize` if neither is known."""
    spare = sys.maxsize
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # not Linux
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        if limit != resource.RLIM_INFINITY:
            spare = limit - size
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        spare = min(spare, available)
    return spare

"""Settings of the C library's memory allocator."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEPT_BYTES = 512 << 20
_GROWTH_BYTES = 32 << 20


def keep_freed_memory() -> None:
    """Let this process keep up to 512 MiB of what it frees for what it allocates next.

    Every step on a CPU allocates its intermediate results again. The GNU C library takes blocks of their size from the
    system and gives them back, and the first touch of every page of them costs a fault: a third of the time of products
    of 512 rows. Other C libraries are left as they are.
    """
    if sys.platform != "linux":
        return
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - not glibc: AttributeError
        for name, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_TOP_PAD, _GROWTH_BYTES)):
            library.mallopt(name, value)
    except (OSError, AttributeError):
        return

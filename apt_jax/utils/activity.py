"""Names of long stages of a start that have no countable parts, for progress reports.

What goes on beside it in another thread has no name here: it is named where it is waited for.

with activity("compiling the CPU kernels"):
    ...
"""

import contextlib
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_current: list[str] = []
"""The innermost one last."""


@contextlib.contextmanager
def activity(what: str) -> Iterator[None]:
    """Name the activity of the process within a block; the latest one is reported."""
    with _lock:
        _current.append(what)
    try:
        yield
    finally:
        with _lock:
            del _current[len(_current) - 1 - _current[::-1].index(what)]


def current_activity() -> str | None:
    """Return the current activity; None: nothing named."""
    with _lock:
        return _current[-1] if _current else None

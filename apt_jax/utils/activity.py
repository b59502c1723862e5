"""Names of what a start waits for, for long and without parts that could be counted, for those who report it meanwhile.

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
    """Name what is done within, of the whole process: what begins last is what is reported."""
    with _lock:
        _current.append(what)
    try:
        yield
    finally:
        with _lock:
            del _current[len(_current) - 1 - _current[::-1].index(what)]


def current_activity() -> str | None:
    """Return what is done now; None: nothing that has a name."""
    with _lock:
        return _current[-1] if _current else None

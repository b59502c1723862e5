"""Names of long startup stages that have no countable parts, for progress reports.

Work in other threads is not named; instead, the code that waits for it names its wait.

with activity("compiling the CPU kernels"):
    ...
"""

import contextlib
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_current: list[str] = []
"""Names of the nested activities, the innermost last."""


@contextlib.contextmanager
def activity(what: str) -> Iterator[None]:
    """Name the process's activity within a `with` block; of nested or concurrent blocks, the one entered last is
    reported."""
    with _lock:
        _current.append(what)
    try:
        yield
    finally:
        with _lock:
            del _current[len(_current) - 1 - _current[::-1].index(what)]


def current_activity() -> str | None:
    """Return the name of the current activity; None: no activity is named."""
    with _lock:
        return _current[-1] if _current else None

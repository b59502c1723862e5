"""Speeds up the lowering of many programs: the garbage collector does not traverse half a gigabyte of objects
repeatedly, and the module of Triton's operations is not searched for at every use."""

import contextlib
import gc
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_LOOKED_FOR, _TRITON = "jaxlib.mlir.dialects.tt", "jaxlib.triton.dialect"
"""Name under which jaxlib's bindings search for the module of Triton's operations, for each operation until they find
it; and the actual name of the module."""
_NEW_OBJECTS = 100_000
"""Number of new objects that starts a garbage collection; most objects created for a program are freed earlier, without
a collection."""

_lock = threading.Lock()
_num_within = 0
_before: tuple[tuple[int, int, int], bool] = ((0, 0, 0), False)
"""Garbage collection thresholds before the first entry, and whether the heap was frozen."""


@contextlib.contextmanager
def quick_lowering() -> Iterator[None]:
    """Make garbage collections rare and let them skip existing objects. May be nested and used in several threads."""
    global _num_within, _before
    with _lock:
        if not _num_within:
            _name_triton()
            _before = gc.get_threshold(), gc.get_freeze_count() > 0
            if not _before[1]:
                gc.freeze()
            if 0 < _before[0][0] < _NEW_OBJECTS:
                gc.set_threshold(_NEW_OBJECTS, *_before[0][1:])
        _num_within += 1
    try:
        yield
    finally:
        with _lock:
            _num_within -= 1
            if not _num_within:
                gc.set_threshold(*_before[0])
                if not _before[1]:
                    gc.unfreeze()


def _name_triton() -> None:
    """Make the module of Triton's operations available under the name that jaxlib searches for."""
    if _LOOKED_FOR in sys.modules:
        return
    try:
        if importlib.util.find_spec(_LOOKED_FOR) is None:
            sys.modules[_LOOKED_FOR] = importlib.import_module(_TRITON)
    except ImportError as error:
        logger.info("programs with Triton kernels take longer to lower: %s", error)

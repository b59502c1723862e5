"""Lowers many programs in less time: half a gigabyte of objects is not collected again and again, and Triton's operations
are not looked for at every use."""

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
"""Where jaxlib's bindings look for Triton's operations, again at each of them until they find a module; and the module."""
_NEW_OBJECTS = 100_000
"""Objects that a collection waits for: most of a program's are gone by themselves by then."""

_lock = threading.Lock()
_num_within = 0
_before: tuple[tuple[int, int, int], bool] = ((0, 0, 0), False)
"""Thresholds of collections before the first came in, and whether the heap was frozen."""


@contextlib.contextmanager
def quick_lowering() -> Iterator[None]:
    """Within it, garbage collections are rare and skip the objects that existed before. It may be nested, and serve threads."""
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
    """Put the module of Triton's operations where it is looked for."""
    if _LOOKED_FOR in sys.modules:
        return
    try:
        if importlib.util.find_spec(_LOOKED_FOR) is None:
            sys.modules[_LOOKED_FOR] = importlib.import_module(_TRITON)
    except ImportError as error:
        logger.info("programs with Triton kernels take longer to lower: %s", error)

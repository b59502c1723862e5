"""Lowers many programs in less time: half a gigabyte of objects is not collected again and again, and modules that do not
exist are not looked for at every operation."""

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Iterator

_LOOKED_FOR = ("jaxlib.mlir.dialects", "jaxlib.mosaic.python", "jaxlib.thunky.python")
"""Where jaxlib's bindings look for the module of a dialect, for every operation of it."""
_DIALECT = "tt"
"""Names of Triton's modules, which jaxlib lacks."""


@contextlib.contextmanager
def quick_lowering() -> Iterator[None]:
    """Within it, garbage collections skip the objects that existed before. It may be nested, and serve threads."""
    for package in _LOOKED_FOR:
        name = f"{package}.{_DIALECT}"
        if name not in sys.modules and not _exists(name):
            sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails at once
    frozen_before = gc.get_freeze_count() > 0
    if not frozen_before:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # not even its package
        return False

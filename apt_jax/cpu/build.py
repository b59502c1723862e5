"""Loads the kernels of `kernels.cc`, compiled for this machine, and registers them with XLA.

The library is kept in the cache directory under a hash of everything that it depends on. A failed build is recorded
there too, for a day. `begin` compiles the library in a thread, before JAX is imported.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from apt_jax.cpu.compiler import (
    KernelBuildError,
    LastingBuildError,
    compile_library,
    find_compiler,
    left_s,
    library_name,
)
from apt_jax.errors import one_line
from apt_jax.utils.activity import activity
from apt_jax.utils.cache_dir import (
    log_not_kept,
    open_private,
    private_dir,
    read_private,
    remove_least_recent,
    remove_leftovers,
    write_verified,
)

__all__ = [
    "KernelBuildError",
    "begin",
    "has_tiles",
    "instructions",
    "is_compiling",
    "left_s",
    "load",
    "take_times",
    "wait",
]

logger = logging.getLogger(__name__)

_TARGETS = (
    "apt_dense",
    "apt_dense_argmax",
    "apt_gated",
    "apt_experts",
    "apt_head_products",
    "apt_add_norm",
    "apt_split_qkv",
    "apt_decode_kv",
    "apt_decode_absorbed",
    "apt_prefill",
    "apt_decode_layer",
    "apt_add_low_rank",
)
_MOST_KEPT = 12
"""Maximum number of libraries kept in the cache directory, for different versions, compilers and flags."""

_TRY_AGAIN_S = 86400.0
"""Time after which a failed build is tried again, seconds."""

_begun: "dict[str, concurrent.futures.Future[bytes | None]]" = {}
"""Builds started by `begin`, keyed by library name; their results are those of `_make`."""


def begin() -> None:
    """Start compiling missing kernels in a thread if JAX can use only the CPU, because compiling takes as long as the
    rest of a first start."""
    # Other platforms need a plugin package; if one is installed, the platform is not known before JAX starts.
    plugins = ("jax_plugins", "jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin", "libtpu")
    if os.environ.get("JAX_PLATFORMS", "cpu") != "cpu" or any(map(importlib.util.find_spec, plugins)):
        return
    compiler, directory = find_compiler(), private_dir("kernels")
    if compiler is None or directory is None:
        return
    name = library_name(compiler)
    if name in _begun or (directory / name).exists() or _failed_before(compiler, directory, name) is not None:
        return
    made: concurrent.futures.Future[bytes | None] = concurrent.futures.Future()

    def work() -> None:
        try:
            made.set_result(_make(compiler, directory, name))
        except BaseException as error:
            made.set_exception(error)

    _begun[name] = made
    threading.Thread(target=work, name="apt-jax-kernels", daemon=True).start()


def is_compiling() -> bool:
    """Return True while a build started by `begin` is running."""
    return any(not made.done() for made in _begun.values())


def wait() -> None:
    """Wait until the builds started by `begin` have finished; `load` raises their errors."""
    concurrent.futures.wait(list(_begun.values()))


def _make(compiler: list[str], directory: Path | None, name: str) -> bytes | None:
    """Compile the library and keep it in the cache directory; None: another process has done so in the meantime."""
    with _alone(directory):
        if directory is None:
            return compile_library(compiler)
        if (directory / name).exists():
            return None
        if failure := _failed_before(compiler, directory, name):
            raise failure
        try:
            made = compile_library(compiler)
        except LastingBuildError as error:
            raise _noted(error, compiler, directory, name) from None
        try:
            write_verified(directory / name, made)
        except OSError as error:
            log_not_kept(error)
        else:
            _failed_path(directory, name).unlink(missing_ok=True)
            remove_leftovers(directory)
            remove_least_recent(directory, "kernels-*.so", _MOST_KEPT)
        return made


def _failed_path(directory: Path, name: str) -> Path:
    """Return the path of the file that records a failed build of a library."""
    return (directory / name).with_suffix(".failed")


def _identity(compiler: list[str]) -> list[object]:
    """Return path and modification time of the compiler, which change when another version is installed."""
    path = os.path.realpath(shutil.which(compiler[0]) or compiler[0])
    try:
        return [path, os.stat(path).st_mtime_ns]
    except OSError:
        return [path, None]


def _noted(error: LastingBuildError, compiler: list[str], directory: Path, name: str) -> KernelBuildError:
    """Record a failure for later starts, and return the error to raise."""
    path = _failed_path(directory, name)
    note = {"time": time.time(), "compiler": _identity(compiler), "reason": str(error)}
    try:
        write_verified(path, json.dumps(note).encode())
    except OSError as problem:
        log_not_kept(problem)
        return error
    remove_least_recent(directory, "kernels-*.failed", _MOST_KEPT)
    return _repeated(str(error), path, _TRY_AGAIN_S)


def _failed_before(compiler: list[str], directory: Path, name: str) -> KernelBuildError | None:
    """Return the error of a build with this compiler that failed less than a day ago; None: no such build is
    recorded."""
    path = _failed_path(directory, name)
    try:
        note = json.loads(read_private(path) or b"{}")
        age_s = time.time() - note["time"]
        if note["compiler"] != _identity(compiler) or not 0 <= age_s < _TRY_AGAIN_S:
            return None
        return _repeated(str(note["reason"]), path, _TRY_AGAIN_S - age_s)
    except (ValueError, TypeError, KeyError):  # no record, or a damaged record
        return None


def _repeated(reason: str, path: Path, left_s: float) -> KernelBuildError:
    return KernelBuildError(
        f"{reason}; tried again in {left_s / 3600:.0f} h, or at the next start if you delete {path}; "
        "--attention-backend xla needs no compiler"
    )


@contextlib.contextmanager
def _alone(directory: Path | None) -> Iterator[None]:
    """Let only one process at a time compile for this directory, because compiling in parallel would not be faster."""
    if directory is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _kept(path: Path) -> ctypes.CDLL | None:
    """Load the cached library, if it is complete and only this user could have written it; None: it must be
    compiled."""
    descriptor = open_private(path)
    if descriptor is None:
        return None
    # Load the library through the descriptor, so that the loaded file is the verified file. The descriptor stays open,
    # because the loader identifies libraries by name, and another library must not get the same descriptor.
    name = f"/proc/self/fd/{descriptor}"
    try:
        library = ctypes.CDLL(name if os.path.exists(name) else str(path))
    except OSError as error:  # complete, but built, for example, for another C library
        logger.warning("%s: removed, because it cannot be loaded (%s)", path, error)
        os.close(descriptor)
        path.unlink(missing_ok=True)
        return None
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise KernelBuildError("no C++ compiler found (install one, or the Python package ziglang)")
    name = library_name(compiler)
    directory = private_dir("kernels")
    if directory is not None and (library := _kept(directory / name)) is not None:
        return library
    begun = _begun.pop(name, None)
    with activity("compiling the CPU kernels"):
        made = _make(compiler, directory, name) if begun is None else begun.result()
    if directory is not None and (library := _kept(directory / name)) is not None:
        return library
    if made is None:  # the library made by another process was damaged and has been removed
        made = compile_library(compiler)
    with tempfile.TemporaryDirectory(prefix="apt-jax-") as own:
        path = Path(own) / name
        try:
            path.write_bytes(made)
            return ctypes.CDLL(str(path))
        except OSError as error:
            reason = f"cannot load {path}: {one_line(str(error))}"
            if error.errno is not None or directory is None:  # the library cannot be written
                raise KernelBuildError(reason) from None
            raise _noted(LastingBuildError(reason), compiler, directory, name) from None


@functools.cache
def has_tiles() -> bool:
    """Return True if bfloat16 products use matrix tiles (AMX) on this machine; the kernels must be loaded."""
    return bool(_library().apt_has_tiles())


@functools.cache
def instructions() -> str:
    """Return the instruction sets used by the kernels on this machine, such as "AVX-512, BF16, VNNI"; the kernels must
    be loaded."""
    function = _library().apt_instructions
    function.restype = ctypes.c_char_p
    return function().decode() + (", AMX" if has_tiles() else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationTime:
    """Time and work of all calls of one operation."""

    calls: int
    seconds: float
    bytes: float
    """Bytes of weights and cache read; 0: not counted."""
    operations: float
    """Multiplications and additions; 0: not counted."""


def take_times() -> dict[str, OperationTime]:
    """Return the times of the kernels' operations since the last call of this function, keyed by operation.

    Raises:
        KernelBuildError: the kernels were not compiled with ``-DAPT_TIMES`` in $APT_JAX_KERNEL_FLAGS.
    """
    try:
        function = _library().apt_take_times
    except AttributeError:
        raise KernelBuildError("set APT_JAX_KERNEL_FLAGS=-DAPT_TIMES to time the kernels' operations") from None
    function.restype = ctypes.c_char_p
    found = {}
    for line in function().decode().splitlines():
        name, *values = line.split("\t")
        calls, seconds, read, operations = map(float, values)
        found[name] = OperationTime(calls=int(calls), seconds=seconds, bytes=read, operations=operations)
    return found


@functools.cache
def load() -> None:
    """Load and register the kernels once per process, after compiling them if necessary.

    Raises:
        KernelBuildError: the kernels cannot be compiled or loaded on this machine.
    """
    try:
        library = _library()
    except OSError as error:  # no temporary directory either
        raise KernelBuildError(f"no directory for the CPU kernels: {error.strerror}") from None
    import jax

    for name in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")

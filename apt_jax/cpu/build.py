"""Compile `kernels.cc` for this machine and register its functions with XLA.

Any C++17 compiler will do: $CXX, `c++`, `g++`, `clang++`, or the one in the Python package `ziglang`. The library is
kept in the cache directory under a hash of everything that it depends on.
"""

import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import jax

from apt_jax.utils.activity import activity
from apt_jax.utils.cache_dir import (
    log_not_kept,
    open_private,
    private_dir,
    remove_least_recent,
    remove_leftovers,
    write_verified,
)

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cc")
"""Includes the other files: one translation unit."""
_TARGETS = (
    "apt_dense",
    "apt_dense_argmax",
    "apt_gated",
    "apt_head_products",
    "apt_add_norm",
    "apt_split_qkv",
    "apt_decode_kv",
    "apt_decode_absorbed",
    "apt_prefill",
    "apt_decode_layer",
)
_FLAGS = ("-O3", "-std=c++17", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
_LIMIT_S = 300
_MOST_KEPT = 12
"""Libraries in the cache directory: of several versions, compilers and flags."""


def _flags() -> list[str]:
    """Flags of the compiler; those of $APT_JAX_KERNEL_FLAGS come last, such as `-march=x86-64-v3` or a sanitizer."""
    return [*_FLAGS, *shlex.split(os.environ.get("APT_JAX_KERNEL_FLAGS", ""))]


class KernelBuildError(Exception):
    """The kernels cannot be compiled or loaded on this machine; the message says why."""


def find_compiler() -> list[str] | None:
    """Command of a C++ compiler, or None."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def _cpu() -> str:
    """Description of the CPU, on which `-march=native` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: list[str]) -> bytes:
    """The library that the compiler makes of the kernels."""
    start = time.perf_counter()
    # A warning, as the start says nothing else for that long.
    logger.warning("compiling the CPU kernels, once; about half a minute")
    try:
        with activity("compiling the CPU kernels"), tempfile.TemporaryDirectory(prefix="apt-jax-") as own:
            target = Path(own) / "kernels.so"
            command = [*compiler, *_flags(), "-isystem", jax.ffi.include_dir(), str(_SOURCE), "-o", str(target)]
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False
            )
            if done.returncode != 0:
                lines = [line for line in done.stderr.splitlines() if "error" in line]
                raise KernelBuildError(f"{compiler[0]} failed: {(lines or [f'exit status {done.returncode}'])[0]}")
            library = target.read_bytes()
    except OSError as error:
        raise KernelBuildError(f"{compiler[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"{compiler[0]} took more than {_LIMIT_S} s") from None
    logger.info("CPU kernels compiled in %.1f s", time.perf_counter() - start)
    return library


def _kept(path: Path) -> ctypes.CDLL | None:
    """The library that is kept there, if it is whole and nobody else may have written it; None: compile it."""
    descriptor = open_private(path)
    if descriptor is None:
        return None
    # By the descriptor, so that it is the file that was verified. The loader knows libraries by their names: another
    # one must not get this descriptor's number, so it stays open.
    name = f"/proc/self/fd/{descriptor}"
    try:
        library = ctypes.CDLL(name if os.path.exists(name) else str(path))
    except OSError as error:  # whole, but made for another C library, say
        logger.warning("%s: removed, as it cannot be loaded (%s)", path, error)
        os.close(descriptor)
        path.unlink(missing_ok=True)
        return None
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise KernelBuildError("no C++ compiler found (install one, or the Python package ziglang)")
    sources = [path.read_text() for path in sorted(_SOURCE.parent.iterdir()) if path.suffix in (".cc", ".h")]
    parts = (*sources, metadata.version("jaxlib"), _cpu(), *compiler, *_flags())
    name = f"kernels-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}.so"
    directory = private_dir("kernels")
    if directory is not None and (library := _kept(directory / name)) is not None:
        return library
    made = _compile(compiler)
    if directory is not None:
        try:
            write_verified(directory / name, made)
        except OSError as error:
            log_not_kept(error)
        else:
            remove_leftovers(directory)
            remove_least_recent(directory, "kernels-*.so", _MOST_KEPT)
            if (library := _kept(directory / name)) is not None:
                return library
    with tempfile.TemporaryDirectory(prefix="apt-jax-") as own:
        path = Path(own) / name
        try:
            path.write_bytes(made)
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelBuildError(f"cannot load {path}: {error}") from None


@functools.cache
def has_tiles() -> bool:
    """True if products of bfloat16 use matrix tiles on this machine (AMX); the kernels must be loaded."""
    return bool(_library().apt_has_tiles())


@functools.cache
def instructions() -> str:
    """The instruction sets that the kernels use here, such as "AVX-512, BF16, VNNI"; the kernels must be loaded."""
    function = _library().apt_instructions
    function.restype = ctypes.c_char_p
    return function().decode() + (", AMX" if has_tiles() else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationTime:
    """Time and work of all calls of one name."""

    calls: int
    seconds: float
    bytes: float
    """Bytes of weights and cache that were read; 0: not counted."""
    operations: float
    """Products and sums; 0: not counted."""


def take_times() -> dict[str, OperationTime]:
    """Times of the kernels' operations since the last call of this, by name.

    Raises:
        KernelBuildError: the kernels were not compiled to keep them, with ``-DAPT_TIMES`` in $APT_JAX_KERNEL_FLAGS.
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
    """Compile if need be, load and register the kernels, once a process.

    Raises:
        KernelBuildError: they cannot be compiled or loaded on this machine.
    """
    try:
        library = _library()
    except OSError as error:  # no temporary directory either
        raise KernelBuildError(f"no directory for the CPU kernels: {error.strerror}") from None
    for name in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")

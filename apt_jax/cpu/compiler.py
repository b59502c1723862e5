"""The C++ compiler of the CPU kernels: which one, with what flags, and the library that it makes. Needs no JAX.

Any C++17 compiler will do: $CXX, `c++`, `g++`, `clang++`, or the one in the Python package `ziglang`. `kernels.cc` is
compiled in parts side by side, as one would take a single core half a minute.
"""

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
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from apt_jax.utils.activity import activity

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cc")
"""Includes the other files."""
_NUM_PARTS = 2
"""Parts that `kernels.cc` can be compiled in (APT_PART)."""
_FLAGS = ("-O3", "-std=c++17", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-fPIC")
_LIMIT_S = 300


class KernelBuildError(Exception):
    """The kernels cannot be compiled or loaded on this machine; the message says why."""


def _flags() -> list[str]:
    """Flags of the compiler; those of $APT_JAX_KERNEL_FLAGS come last, such as `-march=x86-64-v3` or a sanitizer."""
    return [*_FLAGS, *shlex.split(os.environ.get("APT_JAX_KERNEL_FLAGS", ""))]


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


def describe_cpu() -> str:
    """Description of the CPU, on which `-march=native` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def library_name(compiler: Sequence[str]) -> str:
    """Name of the library's file: a hash of everything that it depends on."""
    sources = [path.read_text() for path in sorted(_SOURCE.parent.iterdir()) if path.suffix in (".cc", ".h")]
    parts = (*sources, metadata.version("jaxlib"), describe_cpu(), *compiler, *_flags())
    return f"kernels-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}.so"


def _include_dir() -> str:
    """Headers of XLA's foreign function interface; `jax.ffi.include_dir` would import JAX."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise KernelBuildError("jaxlib is not installed")
    return str(Path(spec.submodule_search_locations[0]) / "include")


def compile_library(compiler: Sequence[str]) -> bytes:
    """The library that the compiler makes of the kernels.

    Raises:
        KernelBuildError: it makes none.
    """
    start = time.perf_counter()
    # A warning, as the start says nothing else for that long.
    logger.warning("compiling the CPU kernels, once; about half a minute")
    flags = [*_flags(), "-isystem", _include_dir()]
    try:
        with activity("compiling the CPU kernels"), tempfile.TemporaryDirectory(prefix="apt-jax-") as own:
            target = Path(own) / "kernels.so"
            if "-DAPT_TIMES" in flags:  # one list of times, so one part
                _run([[*compiler, *flags, "-shared", str(_SOURCE), "-o", str(target)]])
            else:
                objects = [Path(own) / f"part{number}.o" for number in range(1, _NUM_PARTS + 1)]
                _run(
                    [
                        [*compiler, *flags, f"-DAPT_PART={number}", "-c", str(_SOURCE), "-o", str(path)]
                        for number, path in enumerate(objects, 1)
                    ]
                )
                _run([[*compiler, *flags, "-shared", *map(str, objects), "-o", str(target)]])
            library = target.read_bytes()
    except OSError as error:
        raise KernelBuildError(f"{compiler[0]}: {error.strerror}") from None
    logger.info("CPU kernels compiled in %.1f s", time.perf_counter() - start)
    return library


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Run commands side by side; none is left when this returns."""
    processes: list[subprocess.Popen[str]] = []
    deadline_s = time.monotonic() + _LIMIT_S
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
                )
            )
        for process in processes:
            _, said = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
            if process.returncode != 0:
                lines = [line for line in said.splitlines() if "error" in line]
                reason = (lines or [f"exit status {process.returncode}"])[0]
                raise KernelBuildError(f"{commands[0][0]} failed: {reason}")
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"{commands[0][0]} took more than {_LIMIT_S} s") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

"""Compiles the CPU kernels: chooses the C++ compiler and its flags, and runs it. JAX is not imported.

Any C++17 compiler works: $CXX, `c++`, `g++`, `clang++`, or the compiler in the Python package `ziglang`. `kernels.cc`
is compiled in parallel parts, because it would take a single core half a minute.
"""

import contextlib
import hashlib
import importlib.util
import logging
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from apt_jax.errors import one_line
from apt_jax.utils.cache_dir import cache_dir

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cc")
"""Main source file, which includes the others."""
_NUM_PARTS = 2
"""Number of parts that `kernels.cc` is compiled in (APT_PART)."""
_FLAGS = ("-O3", "-std=c++17", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-fPIC")
_LIMIT_S = 300
_CPU_S = 30.0
"""Assumed processor time of the compiler, seconds, until a file in the cache directory has the measured time."""
_CPU_S_FILE = "kernels-cpu-seconds"
_WATCHER = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.stdin.buffer.read()
os.killpg(0, signal.SIGKILL)
"""
"""Program that kills its process group when its standard input is closed, that is, when the parent process exits."""
_PASSING = ("No space left", "No such file", "not found", "not find")
"""Strings in a compiler's error message that suggest a temporary cause: the same command may succeed later."""


class KernelBuildError(Exception):
    """The kernels cannot be compiled or loaded on this machine; the message has the reason."""


class LastingBuildError(KernelBuildError):
    """The kernels cannot be built, and the same build would fail again."""


class _Compilers:
    """The running compilers and their progress, measured in processor time, because that does not depend on other
    load."""

    def __init__(self) -> None:
        self._started_s: float | None = None
        self._pids: list[int] = []
        self._used_s: dict[int, float] = {}
        """Last known processor time of each process, in seconds, by process id."""

    def begin(self) -> None:
        self._started_s, self._pids, self._used_s = time.monotonic(), [], {}

    def add(self, pid: int) -> None:
        self._pids.append(pid)

    def end(self) -> None:
        self._started_s = None

    def left_s(self) -> float | None:
        """Estimate the seconds left; None: no compiler is running, or it is too early to estimate."""
        started_s = self._started_s
        if started_s is None:
            return None
        for pid in list(self._pids):
            _note_cpu_s(pid, self._used_s)
        used_s, spent_s = sum(self._used_s.values()), time.monotonic() - started_s
        if used_s < 0.5:
            return None
        return max(0.05 * spent_s, (_needed_cpu_s() - used_s) * spent_s / used_s)


_compilers = _Compilers()


def left_s() -> float | None:
    """Estimate the seconds until the kernels are compiled; None: no compiler is running, or it is too early to
    estimate."""
    return _compilers.left_s()


def _note_cpu_s(pid: int, used_s: dict[int, float]) -> None:
    """Record the processor seconds of a process and of its children, on Linux."""
    process = Path(f"/proc/{pid}")
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        used_s[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        children = (process / f"task/{pid}/children").read_text().split()
    except (OSError, ValueError, IndexError):  # it has exited, or this is not Linux
        return
    for child in children:
        _note_cpu_s(int(child), used_s)


def _reaped_cpu_s() -> float:
    """Return the processor seconds of this process's child processes that have exited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _needed_cpu_s() -> float:
    try:
        return min(1000.0, max(1.0, float((cache_dir() / _CPU_S_FILE).read_text())))
    except (OSError, ValueError):
        return _CPU_S


def _flags() -> list[str]:
    """Return the compiler's flags, with $APT_JAX_KERNEL_FLAGS, such as `-march=x86-64-v3` or a sanitizer, at the
    end."""
    return [*_FLAGS, *shlex.split(os.environ.get("APT_JAX_KERNEL_FLAGS", ""))]


def find_compiler() -> list[str] | None:
    """Return the command of a C++ compiler; None: no compiler was found."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def describe_cpu() -> str:
    """Return a description of the CPU, on which the result of `-march=native` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def library_name(compiler: Sequence[str]) -> str:
    """Return the file name of the library, with a hash of everything that the library depends on."""
    sources = [path.read_text() for path in sorted(_SOURCE.parent.iterdir()) if path.suffix in (".cc", ".h")]
    parts = (*sources, metadata.version("jaxlib"), describe_cpu(), *compiler, *_flags())
    return f"kernels-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}.so"


def _include_dir() -> str:
    """Return the directory with the headers of XLA's FFI, without importing JAX, unlike `jax.ffi.include_dir`."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise KernelBuildError("jaxlib is not installed")
    return str(Path(spec.submodule_search_locations[0]) / "include")


def compile_library(compiler: Sequence[str]) -> bytes:
    """Compile the kernels and return the contents of the library.

    Raises:
        KernelBuildError: the compilation fails.
        LastingBuildError: the compilation fails, and would fail again.
    """
    start, used_s = time.perf_counter(), _reaped_cpu_s()
    # At level warning, because nothing else is logged while the compilers run.
    logger.warning(
        "compiling the CPU kernels, once: %.0f s of processor time; --attention-backend xla does not need them",
        _needed_cpu_s(),
    )
    flags = [*_flags(), "-isystem", _include_dir()]
    _compilers.begin()
    try:
        with tempfile.TemporaryDirectory(prefix="apt-jax-") as own:
            target = Path(own) / "kernels.so"
            if "-DAPT_TIMES" in flags:  # there must be only one list of times, so only one part
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
    finally:
        _compilers.end()
    logger.info("CPU kernels compiled in %.1f s", time.perf_counter() - start)
    with contextlib.suppress(OSError):
        (cache_dir() / _CPU_S_FILE).write_text(f"{_reaped_cpu_s() - used_s:.1f}\n")
    return library


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Run commands in parallel, in a process group that is killed when this process exits, and wait for all of them.

    Raises:
        KernelBuildError: a command fails, or takes too long.
    """
    processes: list[subprocess.Popen[str]] = []
    deadline_s = time.monotonic() + _LIMIT_S
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        for command in commands:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=watcher.pid,
            )
            processes.append(process)
            _compilers.add(process.pid)
        for process in processes:
            _, said = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
            if process.returncode != 0:
                raise _failure(commands[0][0], process.returncode, said)
    except subprocess.TimeoutExpired:
        raise LastingBuildError(f"{commands[0][0]} took more than {_LIMIT_S} s") from None
    finally:
        os.killpg(watcher.pid, signal.SIGKILL)  # kills the child processes of the compilers too
        for process in (*processes, watcher):
            process.communicate()


def _failure(name: str, status: int, said: str) -> KernelBuildError:
    """Return the error for a compiler that exited with a status other than 0."""
    lines = [line for line in said.splitlines() if "error" in line]
    reason = f"{one_line((lines or [f'exit status {status}'])[0]):.300}"
    is_ended = status in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)
    # 126 and 127 are a shell's exit statuses for a command that cannot be run.
    is_missing = status in (126, 127) or any(words in reason for words in _PASSING)
    error = KernelBuildError if is_ended or is_missing else LastingBuildError
    return error(f"{name} failed: {reason}")

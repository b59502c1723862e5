"""Shared parts of the stages of `run.py`: rows that survive a crash, time budgets, and the facts of a run.

A stage is a list of cases. Each case adds a row to the run's file as soon as it is done, so that a run that is cut off
keeps what it has. Before a case starts, its name is written down: where a kernel takes the process with it, the next
process of the stage skips that case and says so. Processes of a run end with the one that started them, whatever ended
that.
"""

import collections
import contextlib
import ctypes
import dataclasses
import datetime
import itertools
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROWS = "rows.jsonl"
"""The file of all rows in the folder of a run."""
RESTART = 75
"""Exit status of a stage whose device no longer answers: the cases left need a fresh process."""
HUNG = 76
"""Exit status of a stage in which a case went on for longer than any should."""
_CASE_LIMIT_S = 60.0

_FATAL = ("illegal", "misaligned", "launch failure", "CUDA_ERROR", "device-side", "hardware")
"""In an error's text: the context is lost, and every later call would fail."""


_PARENT = "APT_JAX_GPU_PARENT"
"""Environment variable: the process that a process of a run must not outlive."""
_PR_SET_PDEATHSIG = 1


def spawn(command: Sequence[str], environment: Mapping[str, str], **more: Any) -> "subprocess.Popen[Any]":
    """Start a process of a run, which ends when this one does if it calls `end_with_parent`.

    Call it in a thread that lives as long as the process: the kernel takes the thread for the parent.
    """
    return subprocess.Popen(command, cwd=ROOT, env={**environment, _PARENT: str(os.getpid())}, **more)


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it by `spawn` ends, `kill -9` included."""
    parent = os.environ.pop(_PARENT, None)
    if parent is None:
        return
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it has ended already
        os._exit(1)


def environment_of(stage: str, work: Path) -> dict[str, str]:
    """Environment of the processes of a stage.

    Args:
        work: folder outside of the results for compiled programs, which the stages with an engine share.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_OURS}
    if stage in _MEMORY:
        environment["XLA_CLIENT_MEM_FRACTION"] = _MEMORY[stage]
    if stage in ("correctness", "sanitizer"):  # many processes share the card
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return environment | {
        "APT_JAX_CACHE_DIR": str(work / "engine"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }


_MEMORY = {"bandwidth": "0.5", "kernels": "0.85", "tune": "0.85", "peers": "0.3"}
"""Share of the card that JAX takes at once, by stage; an engine takes its own."""
_NOT_OURS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "JAX_COMPILATION_CACHE_DIR")
"""Settings of the user that would make a share of memory another one, or a first start a second one."""


class Table:
    """The rows of a stage in the file of the run, one a case.

    Args:
        path: the file, one JSON object a line; several stages write to it, one after another.
    """

    def __init__(self, path: Path, stage: str) -> None:
        self.path, self.stage = path, stage
        self.done = {row["case"] for row in self.rows()}
        if path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
            with path.open("a") as file:  # its writer was ended within a row
                file.write("\n")

    def add(self, case: str, status: str = "ok", **values: Any) -> None:
        """Append a row and flush it. Floats are rounded to five digits."""
        row = {"stage": self.stage, "case": case} | {k: _plain(v) for k, v in values.items()} | {"status": status}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.done.add(case)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of this stage."""
        return read_rows(self.path, self.stage)


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)


def read_rows(path: Path, stage: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file, or those of one stage; none if it does not exist. A row that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if stage is None or row["stage"] == stage:
                found.append(row)
    return found


def forget_rows(path: Path, stages: Iterable[str]) -> None:
    """Remove the rows of stages that begin again."""
    kept = [row for row in read_rows(path) if row["stage"] not in set(stages)]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


@dataclasses.dataclass(kw_only=True)
class Stage:
    """One stage in its process: where it writes, how long it may take."""

    name: str
    out: Path
    budget_s: float
    tiny: bool = False
    """Shapes for a CPU: shows that the code runs, measures nothing."""
    work: Path | None = None
    """Folder outside of `out`, for compiled programs and markers; None: `out`."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Flags of the run that single stages read."""
    careful: bool = False
    """Compile one program at a time, its name written down: after a process died, to find out of what."""
    only: str = ""
    """Part of the names of cases to run; empty: all."""
    num_skipped: int = 0
    """Number of cases skipped for lack of time."""
    started_s: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget_s - (time.monotonic() - self.started_s)

    @property
    def marker(self) -> Path:
        """Holds the name of the case that is running."""
        return (self.work or self.out) / f".{self.name}.case"

    def table(self) -> Table:
        """The stage's rows, those of an earlier run included."""
        return Table(self.out / ROWS, self.name)

    def wanted(self, table: Table, case: str, needs_s: float = 0.0) -> bool:
        """The case is asked for, not done, and there is time for it."""
        if case in table.done or self.only not in case:
            return False
        if self.left_s <= needs_s:
            self.num_skipped += 1
            return False
        return True

    def run(self, table: Table, case: str, work: Callable[[], dict[str, Any]], limit_s: float = _CASE_LIMIT_S) -> bool:
        """Run one case and write its row; an exception becomes its status. True where it went well.

        A case that takes longer than `limit_s` ends the process: nothing else stops a kernel that hangs.
        """
        self.marker.write_text(case)
        watch = threading.Timer(limit_s, os._exit, (HUNG,))
        watch.daemon = True
        if not self.tiny:
            watch.start()
        try:
            table.add(case, **work())
            return True
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            table.add(case, status=text[:300])
            print(f"  {case}: {text[:160]}", flush=True)
            if any(sign in str(error) for sign in _FATAL):
                raise SystemExit(RESTART) from None
            return False
        finally:
            watch.cancel()
            self.marker.unlink(missing_ok=True)

    def compiled(
        self,
        lowered: Iterable[tuple[Any, Any]],
        name: Callable[[Any], str],
        *,
        workers: int,
        together: int = 1,
        first: int = 0,
    ) -> Iterator[tuple[Any, Any]]:
        """Each label with its executable, or with the exception that lowering or compiling ended with.

        Args:
            lowered: labels, and `jax.stages.Lowered` or an exception. Lowering is Python and stays on this thread.
            name: of a label's case.
            workers: threads that compile.
            together: programs that are compiled before the first of them is given out. Compiling takes the processor,
                and tries variants of matrix products on the device: whoever times programs asks for many.
            first: programs of the first such group, where it should be ready sooner; 0: as many as of the others.
        """

        def settled(label: Any, program: Any) -> Any:
            if isinstance(program, Exception):
                return program
            try:
                if self.careful:
                    self.marker.write_text(name(label))
                return program.compile()
            except Exception as error:
                return error
            finally:
                if self.careful:
                    self.marker.unlink(missing_ok=True)

        source = iter(lowered)
        if self.careful:
            for label, program in source:
                yield label, settled(label, program)
            return
        with ThreadPoolExecutor(max(1, workers)) as pool:
            if together > 1:
                size = first or together
                while group := list(itertools.islice(source, size)):
                    size = together
                    futures = [(label, pool.submit(settled, label, p)) for label, p in group]
                    del group
                    wait([future for _, future in futures])
                    yield from ((label, future.result()) for label, future in futures)
                return
            waiting: collections.deque[tuple[Any, Future[Any]]] = collections.deque()
            more = True
            while waiting or more:
                # Lower further programs until enough are on their way or the next one can run.
                while more and len(waiting) < 2 * workers and not (waiting and waiting[0][1].done()):
                    label, program = next(source, (None, None))
                    more = program is not None
                    if more:
                        waiting.append((label, pool.submit(settled, label, program)))
                if waiting:
                    label, future = waiting.popleft()
                    yield label, future.result()


def time_call(call: Callable[[], Any], *, tiny: bool = False, seconds: float = 0.15) -> tuple[float, float]:
    """Seconds of an asynchronous call on the device: median and spread (largest less smallest) of five repeats.

    A repeat dispatches many calls and waits for the last, so that the host's time hides behind the device's.
    """
    import jax

    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    once = max(time.perf_counter() - begin, 1e-7)
    if tiny:
        return once, 0.0
    repeats = 5
    calls = int(min(500, max(2, seconds / repeats / once)))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls - 1):
            call()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - begin) / calls)
    times.sort()
    return times[len(times) // 2], times[-1] - times[0]


def ceilings(out: Path) -> dict[str, float]:
    """Rates that stage `bandwidth` measured: bytes/s and FLOP/s. Zeros where it has not run: then no floor is given."""
    rows = {row["case"]: row for row in read_rows(out / ROWS, "bandwidth") if row["status"] == "ok"}

    def rate(case: str, column: str, unit: float) -> float:
        return float(rows[case][column]) * unit if case in rows else 0.0

    return {
        "bytes_s": rate("stream", "gb_s", 1e9),
        "read_bytes_s": rate("read", "gb_s", 1e9),
        "flop_s": rate("matmul bfloat16", "tflop_s", 1e12),
    }


def floor_s(num_bytes: float, flop: float, rates: dict[str, float]) -> float:
    """The larger of the times that bytes and operations take at the measured rates; 0 where they were not measured."""
    times = [amount / rates[rate] for amount, rate in ((num_bytes, "bytes_s"), (flop, "flop_s")) if rates[rate]]
    return max(times, default=0.0)


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def facts(seed: int) -> dict[str, Any]:
    """Date, command, revision, versions and card, without touching the device through JAX."""

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    packages = (
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "numpy",
        "torch",
        "triton",
        "flash-attn3-jax",
    )
    query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "revision": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "versions": {name: found for name in packages if (found := version(name))},
        "card": _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "seed": seed,
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")

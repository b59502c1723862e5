"""Shared parts of the stages of `run.py`: tables that survive a crash, time budgets, and the facts of a run.

A stage is a list of cases. Each case adds one row to the stage's CSV as soon as it is done, so that a run that is cut
off keeps what it has. Before a case starts, its name is written down: where a kernel takes the process with it, the
next process of the stage skips that case and says so.
"""

import collections
import contextlib
import csv
import dataclasses
import datetime
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import metadata
from pathlib import Path
from typing import Any

RESTART = 75
"""Exit status of a stage whose device no longer answers: the cases left need a fresh process."""
HUNG = 76
"""Exit status of a stage in which a case went on for longer than any should."""
_CASE_LIMIT_S = 60.0

_FATAL = ("illegal", "misaligned", "launch failure", "CUDA_ERROR", "device-side", "hardware")
"""In an error's text: the context is lost, and every later call would fail."""


class Table:
    """A CSV file with one row per case.

    Args:
        path: the file; it is overwritten unless `resume`.
        columns: columns between `case` and `status`, which is "ok" or an error.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, resume: bool = False) -> None:
        self.path = path
        self.columns = ["case", *columns, "status"]
        if not (resume and path.is_file()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(",".join(self.columns) + "\n")
        self.done = {row["case"] for row in read_rows(path)}

    def add(self, case: str, status: str = "ok", **values: Any) -> None:
        """Append a row and flush it. Floats are rounded to five digits."""

        def text(value: Any) -> Any:
            return f"{value:.5g}" if isinstance(value, float) else value

        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns, restval="").writerow(
                {"case": case, "status": status} | {k: text(v) for k, v in values.items()}
            )
        self.done.add(case)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none if it does not exist."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@dataclasses.dataclass(kw_only=True)
class Stage:
    """One stage in its process: where it writes, how long it may take."""

    name: str
    out: Path
    budget_s: float
    tiny: bool = False
    """Shapes for a CPU: shows that the code runs, measures nothing."""
    resume: bool = False
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
        return self.out / f".{self.name}.case"

    def table(self, columns: Sequence[str], name: str | None = None) -> Table:
        return Table(self.out / f"{name or self.name}.csv", columns, resume=self.resume)

    def wanted(self, table: Table, case: str) -> bool:
        """The case is asked for, not done, and there is time."""
        if case in table.done or self.only not in case:
            return False
        if self.left_s <= 0:
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
    ) -> Iterator[tuple[Any, Any]]:
        """Each label with its executable, or with the exception that lowering or compiling ended with.

        Args:
            lowered: labels, and `jax.stages.Lowered` or an exception. Lowering is Python and stays on this thread.
            name: of a label's case.
            workers: threads that compile.
            together: programs that are compiled before the first of them is given out. Compiling takes the processor,
                and tries variants of matrix products on the device: whoever times programs asks for many.
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
                while group := list(itertools.islice(source, together)):
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
    rows = {row["case"]: row for row in read_rows(out / "bandwidth.csv") if row["status"] == "ok"}

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

    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "torch", "triton")
    query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"
    root = str(Path(__file__).parents[2])
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "revision": _output("git", "-C", root, "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "versions": {name: found for name in packages if (found := version(name))},
        "card": _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "seed": seed,
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")

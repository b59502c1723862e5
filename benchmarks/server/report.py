"""Report of a run: guarantees kept and broken, figures, on the terminal and as JSON."""

import argparse
import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

import apt_jax


class Run:
    """One run of one sub-command.

    Attributes:
        values: further entries of the JSON file.
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.values: dict[str, Any] = {}
        self._promises: list[tuple[str, bool, Any]] = []
        self._lines: list[str] = []
        self._args = args
        self._begun_s = time.monotonic()

    def promise(self, what: str, kept: bool, found: Any) -> None:
        """Add a guarantee that must hold."""
        self._promises.append((what, bool(kept), found))

    def say(self, line: str) -> None:
        """Add a line for information."""
        self._lines.append(line)

    @property
    def kept(self) -> bool:
        return all(kept for _, kept, _ in self._promises)

    def show(self) -> None:
        """Print the report."""
        table = Table(
            title=f"{self.name}: {time.monotonic() - self._begun_s:.0f} s",
            show_header=False,
            box=None,
            title_justify="left",
            title_style="bold",
        )
        for _ in range(3):
            table.add_column(overflow="fold")
        # Several checks of one guarantee are one line: the first that failed, else the last.
        for what in dict.fromkeys(what for what, _, _ in self._promises):
            tries = [(kept, found) for other, kept, found in self._promises if other == what]
            kept, found = next((t for t in tries if not t[0]), tries[-1])
            mark = Text("kept", "green") if kept else Text("BROKEN", "bold red")
            times = f" ({len(tries)} times)" if len(tries) > 1 else ""
            table.add_row(mark, Text(what + times), Text(str(found)))
        for line in self._lines:
            table.add_row("", Text(line), "")
        Console(highlight=False, emoji=False).print(table)

    def as_json(self) -> dict[str, Any]:
        root = Path(__file__).resolve().parents[2]
        revision = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=root
        )  # fmt: skip
        return {
            "run": self.name,
            "command": f"python -m benchmarks.server {shlex.join(sys.argv[1:])}",
            "options": {k: v for k, v in vars(self._args).items() if not callable(v) and k != "json"},
            "revision": revision.stdout.strip(),
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"apt-jax": apt_jax.__version__, "jax": jax.__version__, "python": platform.python_version()},
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "seconds": time.monotonic() - self._begun_s,
            "promises": [{"what": w, "kept": k, "found": f} for w, k, f in self._promises],
            **self.values,
        }  # fmt: skip

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps(self.as_json(), indent=1, default=str) + "\n")


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def progress(name: str, total: float, unit: str = "s") -> Iterator[Callable[[float], None]]:
    """Show a progress bar on terminals; yields a function that sets the progress."""
    with tqdm(total=round(total, 1), desc=name, unit=unit, disable=None, leave=False) as bar:

        def reach(value: float) -> None:
            bar.update(max(min(value, total) - bar.n, 0.0))

        yield reach

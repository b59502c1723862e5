"""Runs mutants: each patch in a copy of the tree, with its tests alone."""

import concurrent.futures
import contextlib
import dataclasses
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from tools.mutants.patch import Mutant

Outcome = Literal["killed", "survived", "does not apply", "no verdict", "not run"]

_PLUGINS = ("pytest_timeout", "jaxtyping._pytest_plugin", "_hypothesis_pytestplugin")
"""Plugins that tests need; to load all that are installed takes three seconds."""

_PYTEST_FAILED = 1
"""Exit code of pytest where tests ran and one failed; others are wrong names of tests and errors of collection."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of one mutant."""

    mutant: Mutant
    outcome: Outcome
    seconds: float
    says: str = ""
    """One line where there is something to say."""

    @property
    def is_expected(self) -> bool:
        expected = {"killed": "killed", "survives": "survived", "equivalent": "not run"}
        return self.outcome == expected[self.mutant.expected]


def copy_tree(root: Path, target: Path) -> None:
    """Copy the files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = root / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def run_tests(tree: Path, tests: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Run tests in a tree until one fails.

    Args:
        tree: its modules are imported.
        tests: node ids.
        timeout_s: for all of them; one that takes half of it has failed.

    Returns:
        The exit code of pytest, None: they took too long; and one line: the test that failed and the last line.
    """
    flags = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", f"--timeout={timeout_s / 2:g}"]  # a hang is a failure
    plugins = [flag for plugin in _PLUGINS for flag in ("-p", plugin)]
    command = [sys.executable, "-m", "pytest", *plugins, *flags, *tests]
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, f"no end within {timeout_s:g} s"
    lines = [line for line in output.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return process.returncode, " ".join([*failed[:1], *lines[-1:]])[:300]


def run_mutant(mutant: Mutant, tree: Path, timeout_s: float) -> Verdict:
    """Apply a mutant to a tree, run its tests, and take it back."""
    error = mutant.apply_error(tree)
    if error is not None:
        return Verdict(mutant, "does not apply", 0.0, error)
    started = time.monotonic()
    try:
        if mutant.expected == "equivalent":
            return Verdict(mutant, "not run", 0.0)
        code, says = run_tests(tree, mutant.tests, timeout_s)
    finally:
        mutant.revert(tree)
    outcomes: dict[int | None, Outcome] = {0: "survived", _PYTEST_FAILED: "killed"}
    return Verdict(mutant, outcomes.get(code, "no verdict"), time.monotonic() - started, says)


def run_all(
    mutants: Sequence[Mutant], trees: Sequence[Path], timeout_s: float, report: Callable[[Verdict], None]
) -> list[Verdict]:
    """Run mutants, as many at once as there are trees."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def run(mutant: Mutant) -> Verdict:
        with _borrowed(free) as tree:
            return run_mutant(mutant, tree, timeout_s)

    verdicts = []
    with concurrent.futures.ThreadPoolExecutor(len(trees)) as pool:
        for future in concurrent.futures.as_completed([pool.submit(run, mutant) for mutant in mutants]):
            verdicts.append(future.result())
            report(verdicts[-1])
    return sorted(verdicts, key=lambda verdict: verdict.mutant.name)


@contextlib.contextmanager
def _borrowed(free: "queue.SimpleQueue[Path]") -> Iterator[Path]:
    tree = free.get()
    try:
        yield tree
    finally:
        free.put(tree)

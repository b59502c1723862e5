"""Changed files of models, tokenizers, templates and caches: each loads, or is refused in one line by an error of ours.

They are loaded in a process of their own, which a crash ends. No file may be opened outside the directory, memory is
at most twice the size of the files and some MiB, and nothing takes longer than a bound.
"""

import collections
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.file_worker import make_case
from tests.support.cases import num_cases
from tests.support.fuzzing import FULL, SEED, Progress, cases, inputs_of, keep_input, replay_line

_CASE_S = 60.0
"""For one case, on a busy machine."""
_START_S = 400.0
"""For the start of the process."""
_CHUNK = 2000
_COUNTS = {
    "model": cases(num_cases(60, 300), 1000, 30_000),
    "shards": cases(num_cases(30, 200), 500, 15_000),
    "tokenizer": cases(num_cases(100, 400), 1000, 30_000),
    "gpt2-tokenizer": cases(num_cases(40, 150), 300, 10_000),
    "gguf": cases(num_cases(40, 200), 500, 20_000),
    "gguf-tokenizer": cases(num_cases(60, 200), 500, 20_000),
    "cache": cases(num_cases(30, 100), 300, 10_000),
    "template": cases(num_cases(5, 40), 500, 10_000),
}


def run_worker(*args: str, bound_s: float = _CASE_S) -> dict[str, str]:
    """Outcomes by case; that of the case at which the worker ended before its time says so."""
    command = [sys.executable, "-m", "tests.fuzz.file_worker", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        lines: queue.Queue[str] = queue.Queue()
        errors: list[str] = []
        readers = [
            threading.Thread(target=lambda: [lines.put(line) for line in worker.stdout or ()] + [lines.put("")]),
            threading.Thread(target=lambda: errors.extend(worker.stderr or ())),
        ]
        for reader in readers:
            reader.start()
        outcomes: dict[str, str] = {}
        case, how = None, None
        while line := _next(lines, bound_s if case is not None else _START_S):
            word, _, rest = line.rstrip("\n").partition(" ")
            if word == "case":
                case = rest
            elif word == "done":
                break
            elif case is not None:
                outcomes[case] = line.rstrip("\n")
        else:
            how = "hangs" if worker.poll() is None and line is None else "ended"
            worker.kill()
        worker.wait()
        for reader in readers:
            reader.join()
        if how is not None:
            said = "".join(errors)[-800:]
            outcomes[case or "start"] = f"FAILED: the process {how}, status {worker.returncode}: {said}"
    return outcomes


def _next(lines: "queue.Queue[str]", bound_s: float) -> str | None:
    try:
        return lines.get(timeout=bound_s)
    except queue.Empty:
        return None


def _check_kept() -> bool:
    """Check inputs that once failed, or the one in $APT_JAX_FUZZ_INPUT; returns whether it is that one alone."""
    only = os.environ.get("APT_JAX_FUZZ_INPUT")
    paths = [only] if only is not None else [str(path) for path, _ in inputs_of("files")]
    outcomes = run_worker(*paths) if paths else {}
    for path, outcome in outcomes.items():
        assert not outcome.startswith("FAILED"), f"{outcome}\n{replay_line(Path(path))}"
    assert len(outcomes) == len(paths)
    return only is not None


def _batches() -> Iterator[list[str]]:
    """Arguments of each worker: everything where that is little, as its start takes seconds; else a few cases."""
    if not FULL:
        yield [f"{kind}:0:{count}" for kind, count in _COUNTS.items()]
        return
    for first in range(0, max(_COUNTS.values()), _CHUNK):
        for kind, count in _COUNTS.items():
            if first < count:
                yield [f"{kind}:{first}:{min(_CHUNK, count - first)}"]


@pytest.mark.seeds
@pytest.mark.timeout(86400 if FULL else 600)
def test_F1_to_F7_changed_files_load_or_are_refused():
    if _check_kept():
        return
    progress = Progress("files", sum(_COUNTS.values()))
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for batch in _batches():
        if progress.is_over:
            break
        for case, outcome in run_worker(str(SEED), *batch).items():
            if outcome.startswith("FAILED"):
                assert case != "start", outcome
                kind, number = case.split(":")
                path = keep_input("files", {"kind": kind, "files": make_case(kind, SEED, int(number))})
                raise AssertionError(f"{case}: {outcome}\n{replay_line(path)}")
            counts[case.split(":")[0], outcome] += 1
            progress.note()
    progress.close()
    print(f"  {dict(counts)}")
    for kind, count in _COUNTS.items():
        few = count / 50 if count >= 100 else 0
        assert few <= min(counts[kind, "loaded"], counts[kind, "refused"]), counts


def test_a_worker_that_dies_or_hangs_is_a_failure(tmp_path, monkeypatch):
    """The test of the test: the worker is a script that does so."""
    for body, says in (("os.abort()", "the process ended, status -6"), ("time.sleep(60)", "the process hangs")):
        script = tmp_path / "worker.py"
        script.write_text(f"import os, time\nprint('case 7', flush=True)\n{body}\n")
        monkeypatch.setattr(subprocess, "Popen", _python(script, subprocess.Popen))
        outcomes = run_worker("0", bound_s=3.0)
        monkeypatch.undo()
        assert says in outcomes["7"]


def _python(script: Path, popen: type) -> object:
    return lambda _command, **kwargs: popen([sys.executable, str(script)], **kwargs)

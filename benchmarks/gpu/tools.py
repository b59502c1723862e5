"""Stages `sanitizer` and `autotune`: other people's tools over the same programs."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import ROOT, Stage, environment_of, spawn

_ONE_PASS = "decode_absorbed opt-13b bfloat16 by triton-onepass"
_CHECKS = (
    ("memcheck", "decode_kv opt-13b bfloat16"),
    ("memcheck", "decode_absorbed opt-13b bfloat16"),
    ("memcheck", "prefill opt-13b bfloat16"),
    ("memcheck", _ONE_PASS),
    ("racecheck", _ONE_PASS),
    ("synccheck", _ONE_PASS),
)
"""Tools of the sanitizer, and the checks of stage `correctness` that are run under them."""
_PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")


def _find_sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    return found or next((place for place in _PLACES if Path(place).is_file()), None)


def sanitizer(stage: Stage) -> None:
    """Run checks of `correctness` under `compute-sanitizer`: accesses out of bounds, misaligned or of nobody's memory; of
    the kernel that synchronises by itself also races and misused barriers."""
    table, tool = stage.table(), _find_sanitizer()
    if tool is None:
        if "memcheck" not in table.done:
            table.add("memcheck", status="skipped: compute-sanitizer is not on this machine")
        return

    def check(kind: str, case: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.gpu.correctness", case, *(["--tiny"] if stage.tiny else [])]
        limit = ["timeout", "-s", "KILL", f"{max(5.0, stage.left_s):.0f}"] if shutil.which("timeout") else []
        begin = time.monotonic()
        done = subprocess.run(
            [*limit, tool, "--tool", kind, "--target-processes", "all", *command], cwd=ROOT,
            env=environment_of("sanitizer", stage.work or stage.out), capture_output=True, text=True, check=False,
        )  # fmt: skip
        summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) ", done.stdout + done.stderr)
        if summary is None:
            raise RuntimeError(f"no summary; exit {done.returncode}: {(done.stdout + done.stderr).strip()[-160:]}")
        errors = int(summary[1])
        return {"errors": errors, "seconds": time.monotonic() - begin, "status": "ok" if not errors else "errors"}

    for kind, case in _CHECKS:
        name = f"{kind} {case}"
        if stage.wanted(table, name, needs_s=5.0):
            stage.run(table, name, lambda kind=kind, case=case: check(kind, case), limit_s=600.0)


_TUNED_MODELS = ("opt-13b", "llama-3-8b", "llama-2-7b", "opt-1.3b", "gemma-2b")
"""Models whose products are tried, the most important first."""


def autotune(stage: Stage) -> None:
    """Keep XLA's choices for this card as a file to ship, `autotune.json`: `benchmarks.gpu.autotune` makes it, model by
    model, and says in lines of JSON what it compiled."""
    table, work = stage.table(), (stage.work or stage.out) / "autotune"
    models = [model for model in ("opt-13b",) if stage.tiny] or list(_TUNED_MODELS)
    models = [model for model in models if stage.wanted(table, model, needs_s=0.0 if stage.tiny else 5.0)]
    if not models:
        return
    seconds = min(8.0, stage.left_s) if stage.tiny else max(1.0, stage.left_s - 5)
    command = [sys.executable, "-m", "benchmarks.gpu.autotune", "--out", str(work), "--models", ",".join(models)]
    command += ["--seconds", f"{seconds:.0f}"]
    environment = environment_of("autotune", stage.work or stage.out)
    flags = ["--tiny"] if stage.tiny else []
    programs, errors, begin = 0, 0, time.monotonic()
    with spawn([*command, *flags], environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            row = json.loads(line) if line.startswith("{") else {}
            programs += "program" in row
            errors += row.get("error") is not None
            if "results" in row:
                for path in work.rglob("*.json"):
                    shutil.copyfile(path, stage.out / "autotune.json")
                table.add(
                    row["model"], programs=programs, errors=errors, results=row["results"], seconds=time.monotonic() - begin,
                    file=str(Path(row["file"]).relative_to(work)), status="ok" if not errors else "some failed",
                )  # fmt: skip
        status = process.wait()
    if status:
        table.add("autotune", status=f"exit {status}; its own output is above")

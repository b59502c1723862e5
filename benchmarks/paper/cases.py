"""Measurements that need more than a configuration, in parallel processes and kept as they finish.

A case is a frozen dataclass with a `run() -> dict` of numbers. `run_cases` runs those that the store lacks, under a key
made of the case, the sources that its policy and the simulator come from, and the version of the package: an
interrupted command goes on where it was, and a changed policy is measured again.
"""

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from apt_jax import __version__
from apt_jax.sched import all_policies
from apt_jax.sim.sweep import Store, end_with_parent
from benchmarks.paper.common import compare, targets

ROOT = Path(__file__).resolve().parents[2]


class Case(Protocol):
    """One measurement."""

    def run(self) -> dict[str, Any]: ...


AnyCase = TypeVar("AnyCase", bound=Case)


def _sources(policy: str, *, has_host_memory: bool) -> str:
    """Return a digest of the modules that determine a policy's decisions, of the simulator and of the cost models, and
    with host memory of those that manage the cache."""
    files = set((ROOT / "apt_jax/sim/descriptions").glob("*.json"))
    files |= {ROOT / "apt_jax/sim" / name for name in ("simulator.py", "replica.py", "executor.py")}
    files |= {*(ROOT / "apt_jax/sched").glob("*.py"), *(ROOT / "apt_jax/costs").glob("*.py")}
    files |= {ROOT / "apt_jax/sched/policies" / name for name in ("fcfs.py", "unified.py")}
    files.add(ROOT / "benchmarks/paper/infermax_fig15.py")
    if has_host_memory:
        files |= {*(ROOT / "apt_jax/cache").rglob("*.py"), *(ROOT / "apt_jax/engine/batch").glob("*.py")}
        files |= {ROOT / "apt_jax/sim/host_link.py", ROOT / "apt_jax/engine/restore.py"}
    if policy in all_policies():
        made = all_policies()[policy](0)
        files.add(Path(str(sys.modules[type(made).__module__].__file__)))
    else:  # a variant that a script makes
        files |= {*(ROOT / "apt_jax/sched/policies").glob("*.py"), *(ROOT / "apt_jax/lab/policies").glob("*.py")}
        files.add(ROOT / "benchmarks/paper/longest_wait.py")
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run_cases(cases: Sequence[AnyCase], store: Store | Path | None, workers: int) -> dict[AnyCase, dict[str, Any]]:
    """Results by case; progress goes to stderr."""
    kept = store if isinstance(store, Store) else Store(store)
    sources: dict[tuple[str, bool], str] = {}

    def key(case: AnyCase) -> str:
        facts = dataclasses.asdict(case)  # pyright: ignore[reportArgumentType] - cases are dataclasses
        of = str(facts.get("policy", "")), bool(facts.get("swap_gib"))
        if of not in sources:
            sources[of] = _sources(of[0], has_host_memory=of[1])
        facts |= {"sources": sources[of], "case": type(case).__name__, "version": __version__}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]

    keys = {case: key(case) for case in cases}
    missing = [case for case, k in keys.items() if kept.get(k) is None]
    done = len(keys) - len(missing)

    def keep(case: AnyCase, result: dict[str, Any]) -> None:
        nonlocal done
        kept.put(keys[case], result)
        done += 1
        print(f"{done}/{len(keys)} {case}", file=sys.stderr, flush=True)

    if min(workers, len(missing)) <= 1:
        for case in missing:
            keep(case, case.run())
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(
            workers, context, initializer=end_with_parent, initargs=(os.getpid(),)
        ) as pool:
            futures = {pool.submit(case.run): case for case in missing}
            for future in concurrent.futures.as_completed(futures):
                keep(futures[future], future.result())
    return {case: kept.get(k) or {} for case, k in keys.items()}


def effect(target_id: str, ours: Sequence[float] | float, *, variant: str = "", where: str = "") -> dict[str, Any]:
    """A row of the table of targets for the effect of one system over another.

    The sign is the paper's where ours is at least 2 % of an effect: a factor of 1.02, or 2 of a percentage.

    Args:
        target_id: of a factor or a percentage.
        ours: as `common.compare`.
        variant: as `common.compare`.
        where: the point of a sweep at which the effect is largest; goes into the column of the data set.
    """
    least = 2.0 if "%" in targets()[target_id].unit else 1.02
    row = compare(target_id, ours, agrees=bool(np.mean(ours) >= least), variant=variant)
    return {**row, "dataset": where or row["dataset"]}


def largest(values: dict[str, float]) -> tuple[float, str]:
    """The largest and where it is; NaNs do not count."""
    finite = {k: v for k, v in values.items() if not math.isnan(v)}
    where = max(finite, key=finite.__getitem__)
    return finite[where], where


def print_facts(script: str, **more: Any) -> None:
    """The last line of a run: how it was made."""
    answer = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    facts = {
        "command": " ".join([f"benchmarks/paper/{script}", *sys.argv[1:]]),
        "revision": answer.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        **more,
    }
    print(json.dumps(facts))

"""Many runs in parallel processes, stored as they finish; effective throughput by bisection.

A store is a file of JSON lines. Each line holds a finished run and its key, a hash of everything that the run depends
on. An interrupted sweep that is started again with the same store runs only the missing runs.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apt_jax.errors import ConfigError
from apt_jax.sched import policy_digest
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.simulator import simulate
from apt_jax.version import __version__

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EffectiveRate:
    """The highest request rate that meets an attainment target, over seeds (docs/metrics.md, A run)."""

    target: float
    rates: tuple[float, ...]
    """Requests per second, one per seed, each found by bisection."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.rates))

    @property
    def std(self) -> float:
        """Sample standard deviation over the seeds; 0 with one seed."""
        return float(np.std(self.rates, ddof=1)) if len(self.rates) > 1 else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"target": self.target, "mean": self.mean, "std": self.std, "by_seed": self.rates}


def run_key(config: SimulationConfig, **more: Any) -> str:
    """Return the key of a run in a store.

    The key is a hash of the configuration, the contents of the files that it names, the source of a policy from outside
    this package, and the version of this package.

    Args:
        config: configuration of the run.
        more: further values that the result depends on.

    Raises:
        ConfigError: unknown policy.
    """
    facts: dict[str, Any] = {"version": __version__, **dataclasses.asdict(config), **more}
    for field in ("trace", "hardware", "beside"):
        path = str(facts[field])
        if field == "beside":
            path, _, facts["rate_beside"] = path.rpartition(":")
        if os.path.isfile(path):
            facts[field] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        elif os.path.isdir(path):
            of_files = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(Path(path).glob("*.json"))]
            facts[field] = of_files
    digest = policy_digest(config.policy)
    if digest is not None:
        facts["policy_source"] = digest
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class Store:
    """Finished runs, keyed by `run_key`, in a file or, without a path, only in memory; incomplete lines are ignored."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._runs: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        text = ""
        try:
            with contextlib.suppress(FileNotFoundError):
                text = path.read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines():
                self._keep(line)
            if text.strip() and not self._runs:
                raise ConfigError(f"{path}: holds no runs; name another file (--store)")
            path.parent.mkdir(parents=True, exist_ok=True)
            if text and not text.endswith("\n"):
                with path.open("a") as file:
                    file.write("\n")
        except (OSError, ValueError) as error:  # ValueError: not a path
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{path}: cannot be used to keep runs ({reason}) (--store)") from None

    def _keep(self, line: str) -> None:
        """Add the run of a line; an incomplete line is ignored, so its run is repeated."""
        try:
            entry = json.loads(line)
            if isinstance(entry["run"], dict):
                self._runs[entry["key"]] = entry["run"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return

    def get(self, key: str) -> dict[str, Any] | None:
        return self._runs.get(key)

    def put(self, key: str, run: dict[str, Any]) -> None:
        self._runs[key] = run
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "run": run}, default=str) + "\n")


def _simulate(config: SimulationConfig) -> dict[str, Any]:
    return simulate(config).as_dict()


def _find(task: tuple[SimulationConfig, float, float, float]) -> dict[str, Any]:
    config, target, guess, tolerance = task
    rate, runs = bisect_rate(
        lambda rate: simulate(dataclasses.replace(config, rate=rate)).summary.slo_attainment,
        target=target,
        guess=guess,
        tolerance=tolerance,
    )
    return {"rate": rate, "runs": runs}


def bisect_rate(
    attainment_at: Callable[[float], float],
    *,
    target: float,
    guess: float = 2.0,
    tolerance: float = 0.02,
) -> tuple[float, dict[str, float]]:
    """Find the highest rate whose attainment reaches `target`, assuming that attainment falls as the rate rises.

    The search multiplies or divides `guess` by 1.6 until the rate is bracketed, then bisects to a relative width of
    `tolerance`.

    Args:
        attainment_at: function that returns the attainment at a rate in requests per second.
        target: attainment to reach.
        guess: rate to try first, in requests per second.
        tolerance: relative width of the final interval.

    Returns:
        The rate in requests per second (0.0 if no rate down to about 0.01 reaches the target), and the attainment at
        each tried rate.
    """
    runs: dict[str, float] = {}

    def reaches(rate: float) -> bool:
        attained = runs[f"{rate:.6g}"] = attainment_at(rate)
        return attained >= target - 1e-12

    low, high = 0.0, guess
    if reaches(guess):
        low = guess
        for _ in range(16):
            high = low * 1.6
            if not reaches(high):
                break
            low = high
    else:
        while high > 0.01:
            low = high / 1.6
            if reaches(low):
                break
            high, low = low, 0.0
    while low > 0 and high - low > tolerance * low:
        middle = 0.5 * (low + high)
        if reaches(middle):
            low = middle
        else:
            high = middle
    return low, runs


def sweep(
    configs: Sequence[SimulationConfig],
    *,
    store: Store | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Run every configuration once; return the results (`SimulationResult.as_dict`) in the same order.

    Args:
        configs: configurations to run.
        store: finished runs; runs that it holds are not repeated, and new runs are added to it.
        workers: number of processes; None: one per CPU core; 1: this process.
        progress: called with (number of finished runs, number of runs).

    Raises:
        ConfigError: a configuration is invalid; runs that finished before are kept in the store.
    """
    store = Store() if store is None else store
    keys = [run_key(config) for config in configs]
    _map(_simulate, dict(zip(keys, configs, strict=True)), store, workers, progress)
    return [store.get(key) or {} for key in keys]


def find_rates(
    configs: Sequence[SimulationConfig],
    *,
    target: float = 0.9,
    seeds: Iterable[int] = (0, 1, 2),
    guesses: Sequence[float] | None = None,
    tolerance: float = 0.02,
    store: Store | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[EffectiveRate]:
    """Find the effective throughput of each configuration by bisection, once per seed.

    The fields `rate` and `seed` of the configurations are ignored.

    Args:
        configs: configurations to run.
        target: SLO attainment to reach, in (0, 1].
        seeds: random seeds.
        guesses: rate to try first for each configuration, in requests per second; None: 2 per replica.
        tolerance: relative precision of the rates.
        store: see `sweep`.
        workers: see `sweep`.
        progress: see `sweep`; it counts searches, one per configuration and seed.
    """
    store = Store() if store is None else store
    if not 0 < target <= 1:
        raise ConfigError(f"target attainment {target!r} must lie in (0, 1] (--find-rate)")
    seeds = tuple(seeds)
    tasks: dict[str, tuple[SimulationConfig, float, float, float]] = {}
    names: list[list[str]] = []
    for i, config in enumerate(configs):
        row = []
        for seed in seeds:
            one = dataclasses.replace(config, rate=1.0, seed=seed)
            key = run_key(one, target=target, tolerance=tolerance)
            tasks[key] = (
                one,
                target,
                guesses[i] if guesses is not None else 2.0 * config.replicas,
                tolerance,
            )
            row.append(key)
        names.append(row)
    _map(_find, tasks, store, workers, progress)
    return [
        EffectiveRate(target=target, rates=tuple(float((store.get(k) or {})["rate"]) for k in row)) for row in names
    ]


def _map(
    function: Callable[[Any], dict[str, Any]],
    tasks: dict[str, Any],
    store: Store,
    workers: int | None,
    progress: Progress | None,
) -> None:
    """Run the tasks that the store lacks, and store each result as soon as it is finished."""
    missing = {key: task for key, task in tasks.items() if store.get(key) is None}
    total, done = len(tasks), len(tasks) - len(missing)
    if progress is not None:
        progress(done, total)

    def keep(key: str, result: dict[str, Any]) -> None:
        nonlocal done
        store.put(key, result)
        done += 1
        if progress is not None:
            progress(done, total)

    workers = workers or os.cpu_count() or 1
    if min(workers, len(missing)) <= 1:
        for key, task in missing.items():
            keep(key, function(task))
        return
    # Not forked: the caller may have threads (JAX has).
    context = multiprocessing.get_context("spawn")
    others = {*multiprocessing.active_children()}
    pool = concurrent.futures.ProcessPoolExecutor(
        min(workers, len(missing)), context, initializer=end_with_parent, initargs=(os.getpid(),)
    )
    try:
        futures = {pool.submit(function, task): key for key, task in missing.items()}
        for future in concurrent.futures.as_completed(futures):
            keep(futures[future], future.result())
    except (KeyboardInterrupt, SystemExit):
        for process in {*multiprocessing.active_children()} - others:
            process.kill()  # a run may take hours
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent exits, even if the parent is killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent exited before the call
        os._exit(1)


def check_hardware(configs: Iterable[SimulationConfig]) -> None:
    """Raise `ConfigError` if a configuration names an unknown model or hardware."""
    for model, hardware, devices in sorted({(c.model, c.hardware, c.num_devices) for c in configs}, key=str):
        load_hardware(model, hardware, devices)

"""Routing over several replicas: attainment by routing policy, replicas and rate, with bursty arrivals and long-tailed
lengths.

    python -m benchmarks.scheduling.replica_routing                        2 and 4 replicas, 5 to 15 minutes of two cores
    python -m benchmarks.scheduling.replica_routing --replicas 8 --seeds 3

The runs are simulated, so only their duration depends on the machine. Every replica runs `apt` with the hybrid cache. A
third of the requests each has a TTFT objective of 0.5, 1 and 5 s, and a TBT objective of 0.5, 1 and 1 s. All policies
see the same requests at the same times. Writes JSON and a plot to benchmarks/results, and prints a table.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import apt_jax
from apt_jax.config import SLO
from apt_jax.frontend.progress import ProgressBars
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.routing import ROUTING_POLICIES
from apt_jax.sim.simulator import simulate
from apt_jax.sim.sweep import end_with_parent
from apt_jax.sim.trace import load_trace
from apt_jax.sim.workload import drop_oversized, sample_workload

RESULTS = Path(__file__).resolve().parents[1] / "results"
CLASSES = {
    "interactive": SLO(ttft_s=0.5, tbt_s=0.5),
    "standard": SLO(ttft_s=1.0, tbt_s=1.0),
    "relaxed": SLO(ttft_s=5.0, tbt_s=1.0),
}


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests, and what serves them."""

    trace: str
    cv: float
    model: str
    hardware: str
    rates: tuple[float, ...]
    """Requests/s for each replica."""


LOADS = {
    "sharegpt, CV 1": Load("sharegpt", 1.0, "opt-13b", "a100-40gb", (4.0, 6.0)),
    "sharegpt, CV 4": Load("sharegpt", 4.0, "opt-13b", "a100-40gb", (4.0, 6.0)),
    "azure-conv, CV 4": Load("azure-conv", 4.0, "llama-2-7b", "a100-80gb", (4.0, 6.0)),
}


@dataclasses.dataclass(frozen=True)
class Run:
    load: str
    replicas: int
    rate: float
    routing_policy: str
    seed: int
    num_requests: int


def measure(run: Run) -> dict[str, Any]:
    """One simulated run, and how it went for each class."""
    load = LOADS[run.load]
    config = SimulationConfig(
        model=load.model,
        hardware=load.hardware,
        trace=load.trace,
        cv=load.cv,
        rate=run.rate * run.replicas,
        num_requests=run.num_requests * run.replicas,
        replicas=run.replicas,
        routing_policy=run.routing_policy,
        seed=run.seed,
        drop_too_long=True,
    )
    hardware = load_hardware(config.model, config.hardware, None)
    workload = sample_workload(drop_oversized(load_trace(config.trace), hardware, config), config)
    names = list(CLASSES)
    drawn = np.random.default_rng([run.seed, 0xC1A]).integers(0, len(names), config.num_requests)
    slos = [CLASSES[names[i]] for i in drawn]
    result = simulate(config, hardware=hardware, workload=dataclasses.replace(workload, slos=slos))
    attained = np.array([m is not None and m.slo_attained is True for m in result.requests])
    summary = result.summary
    return {
        **dataclasses.asdict(run),
        "slo_attainment": summary.slo_attainment,
        "ttft_attainment": summary.ttft_attainment,
        "tbt_attainment": summary.tbt_attainment,
        "by_class": {name: float(attained[drawn == i].mean()) for i, name in enumerate(names)},
        "ttft_s": dataclasses.asdict(summary.ttft_s),
        "tbt_s": dataclasses.asdict(summary.tbt_s),
        "tokens_per_s": summary.tokens_per_s,
        "preemptions": result.preemptions,
        "requests_by_replica": [replica.num_sent for replica in result.replicas],
    }


def measure_all(runs: list[Run], workers: int) -> list[dict[str, Any]]:
    """In the order of the runs."""
    bars, done = ProgressBars(), 0
    found: dict[Run, dict[str, Any]] = {}
    context = multiprocessing.get_context("spawn")
    try:
        with concurrent.futures.ProcessPoolExecutor(
            workers, context, initializer=end_with_parent, initargs=(os.getpid(),)
        ) as pool:
            # The longest first, so that no core is left with one at the end.
            longest = sorted(runs, key=lambda run: -run.replicas)
            futures = {pool.submit(measure, run): run for run in longest}
            for future in concurrent.futures.as_completed(futures):
                found[futures[future]] = future.result()
                done += 1
                bars("runs", done, len(runs))
    finally:
        bars.close()
    return [found[run] for run in runs]


Cells = dict[tuple[str, int, float, str], list[dict[str, Any]]]


def cells_of(results: list[dict[str, Any]]) -> Cells:
    """Runs that differ in the seed alone, together."""
    cells: Cells = {}
    for result in results:
        key = (result["load"], result["replicas"], result["rate"], result["routing_policy"])
        cells.setdefault(key, []).append(result)
    return cells


def mean(runs: list[dict[str, Any]], *names: str) -> float:
    """Return the mean over several runs of the value at a path of keys."""
    values: list[Any] = list(runs)
    for name in names:
        values = [value[name] for value in values]
    return float(np.mean(values))


def report(cells: Cells) -> None:
    table = Table(title="attained (%), by class, TTFT p99 (s)", box=None, title_justify="left")
    for name in ("load", "replicas", "requests/s each", *ROUTING_POLICIES):
        table.add_column(name)
    for load, replicas, rate in dict.fromkeys(key[:3] for key in cells):
        texts = []
        for policy in ROUTING_POLICIES:
            runs = cells[load, replicas, rate, policy]
            by_class = " ".join(f"{100 * mean(runs, 'by_class', name):.0f}" for name in CLASSES)
            attained, p99 = 100 * mean(runs, "slo_attainment"), mean(runs, "ttft_s", "p99")
            texts.append(f"{attained:.1f} ({by_class}) {p99:.1f}")
        table.add_row(load, str(replicas), f"{rate:g}", *texts)
    Console(highlight=False, emoji=False, width=140).print(table)


def plot(cells: Cells, path: Path) -> None:
    loads = list(dict.fromkeys(key[0] for key in cells))
    counts = list(dict.fromkeys(key[1] for key in cells))
    figure = Figure(figsize=(4 * len(loads), 3 * len(counts)), layout="constrained")
    grid = figure.subplots(len(counts), len(loads), squeeze=False, sharey=True)
    for i, replicas in enumerate(counts):
        for j, load in enumerate(loads):
            axes = grid[i][j]
            for policy in ROUTING_POLICIES:
                rates = [key[2] for key in cells if key == (load, replicas, key[2], policy)]
                values = [[100 * r["slo_attainment"] for r in cells[load, replicas, rate, policy]] for rate in rates]
                axes.plot(rates, [np.mean(v) for v in values], marker="o", label=policy)
                axes.fill_between(rates, [min(v) for v in values], [max(v) for v in values], alpha=0.15)
            axes.set(title=f"{load}, {replicas} replicas", xlabel="requests/s for each replica")
            axes.grid(alpha=0.3)
    grid[0][0].legend()
    for row in grid:
        row[0].set_ylabel("SLO attainment (%)")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--requests", type=int, default=100, help="for each replica")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        metavar="R",
        help="requests/s for each replica, in place of 4 and 6",
    )
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    parser.add_argument(
        "--json",
        type=Path,
        default=RESULTS / f"{date}-replica-routing.json",
        help="the plot lies beside it",
    )
    args = parser.parse_args()
    for name in ("requests", "seeds", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"{getattr(args, name)} must be at least 1 (--{name})")
    if min(args.replicas) < 1:
        parser.error(f"{min(args.replicas)} must be at least 1 (--replicas)")
    started = time.perf_counter()
    results = measure_all(
        [
            Run(load, replicas, rate, policy, seed, args.requests)
            for load in LOADS
            for replicas in args.replicas
            for rate in args.rates or LOADS[load].rates
            for policy in ROUTING_POLICIES
            for seed in range(args.seeds)
        ],
        args.workers,
    )
    cells = cells_of(results)
    report(cells)
    path = args.json
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": " ".join(sys.argv),
        "date": date,
        "versions": {"apt_jax": apt_jax.__version__, "python": platform.python_version(), "numpy": np.__version__},
        "took_s": round(time.perf_counter() - started, 1),
        "loads": {name: dataclasses.asdict(load) for name, load in LOADS.items()},
        "classes": {name: {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s} for name, slo in CLASSES.items()},
        "runs": results,
    }  # fmt: skip
    path.write_text(json.dumps(facts, indent=1) + "\n")
    plot(cells, path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()

"""How much host time per step the papers' own engines had: one number for Apt-Serve's and BROS's.

    python -m benchmarks.paper.host_time [--quick] [--host-ms MS ...] [--seeds N] [--requests N] [--workers N]

The simulated engines have no host time; those of the papers, of 2023 and 2024, had a good deal: Apt-Serve reports 120 ms
for a decode step of 50 requests, where the cost model has 38. This measures eight of the papers' numbers that depend on
it, with host time from 0 to 100 ms a step, and fits one value to all: the one with the least mean distance, |ln(ours /
paper)|. The other commands of this folder take it as `--host-ms`. Writes host_time.csv and host_time.png.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from apt_jax.sim.config import SimulationConfig
from benchmarks.paper.apt_serve import (
    SYSTEMS,
    VLLM,
    decode_steps,
    details,
    falls_to,
    percent,
    seeded,
)
from benchmarks.paper.bros_runs import DATASETS, MODELS, Mixed
from benchmarks.paper.cases import run_cases
from benchmarks.paper.common import (
    Runs,
    add_options,
    half_width,
    mean,
    new_figure,
    paper_config,
    save_figure,
    targets,
    write_csv,
)

GRID_MS = (0.0, 20.0, 40.0, 60.0, 80.0, 100.0)
RATES = (1.5, 2.0, 2.3, 2.6, 3.0)
"""Requests per second of FCFS on ShareGPT; the paper's 90 % is at 2.6."""
LEAST = 1.0
"""Smallest share in per cent that a distance is computed with."""


def apt_serve_rows(runs: Runs, grid_ms: Sequence[float]) -> dict[float, dict[str, list[float]]]:
    """Return by host time the values of Apt-Serve's numbers, one a seed."""
    rates = RATES[-2:] if runs.quick else RATES
    base = paper_config("ShareGPT", num_requests=runs.num_requests, **SYSTEMS[VLLM])

    def config(ms: float, rate: float) -> SimulationConfig:
        return dataclasses.replace(base, rate=rate, host_s=ms / 1e3)

    tasks = [(c,) for ms in grid_ms for rate in rates for c in seeded(config(ms, rate), runs.seeds)]
    results = iter(runs.map("FCFS on ShareGPT", details, tasks))
    found = {ms: {rate: [next(results) for _ in runs.seeds] for rate in rates} for ms in grid_ms}
    _, step_s = decode_steps(50)[0]
    return {
        ms: {
            "S66-decode50": [1e3 * step_s + ms],
            "S31-eff": [falls_to(0.9, rates, [of[r][i]["slo"] for r in rates]) for i in range(len(runs.seeds))],
            "S31-att30": percent(of[3.0]),
            "S31-lim26": percent(of[2.6], "waiting"),
            "S31-lim30": percent(of[3.0], "waiting"),
        }
        for ms, of in found.items()
    }


def bros_rows(runs: Runs, grid_ms: Sequence[float]) -> dict[float, dict[str, list[float]]]:
    """Return by host time the values of BROS's numbers of its round-robin engine, one a seed: means over the models, at
    the middle one of their rates."""
    models = list(MODELS)[:1] if runs.quick else list(MODELS)

    def case(ms: float, model: str, dataset: str, seed: int) -> Mixed:
        return Mixed(
            policy="round-robin",
            model=model,
            dataset=dataset,
            rate=MODELS[model][2][2],
            duration_s=10.0 if runs.quick else 60.0,
            be_batch=64 if runs.quick else 256,
            seed=seed,
            overhead_s=ms / 1e3,
        )

    cases = [case(ms, m, d, s) for ms in grid_ms for m in models for d in DATASETS for s in runs.seeds]
    results = run_cases(cases, runs.store, runs.workers)

    def values(ms: float, metric: str, datasets: Sequence[str]) -> list[float]:
        return [
            100 * float(np.mean([results[case(ms, m, d, s)][metric] for m in models for d in datasets]))
            for s in runs.seeds
        ]

    return {
        ms: {
            "B-rr-ttft": values(ms, "ttft_attainment", list(DATASETS)),
            "B-rr-tpot-share": values(ms, "tpot_attainment", ["share"]),
            "B-rr-tpot-lmsys": values(ms, "tpot_attainment", ["lmsys"]),
        }
        for ms in grid_ms
    }


def distance(target: str, ours: Sequence[float]) -> float:
    """Return |ln(ours / paper)| of the mean over seeds."""
    return abs(math.log(max(mean(ours), LEAST) / targets()[target].number))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_options(parser, requests=500, seeds=3)
    parser.set_defaults(host_ms=0.0)
    parser.add_argument("--grid-ms", type=float, nargs="+", metavar="MS", help=f"default {GRID_MS}; quick: 0 60")
    args = parser.parse_args(argv)
    runs = Runs.from_args(args)
    grid_ms = tuple(args.grid_ms or ((0.0, 60.0) if runs.quick else GRID_MS))
    apt, bros = apt_serve_rows(runs, grid_ms), bros_rows(runs, grid_ms)
    table: list[dict[str, Any]] = []
    for ms in grid_ms:
        rows = apt[ms] | bros[ms]
        for target, ours in rows.items():
            of = targets()[target]
            table.append(
                {"host_ms": ms, "id": target, "metric": of.metric, "setting": of.setting, "paper": of.number, "ours": mean(ours),
                 "half_width": half_width(ours), "distance": distance(target, ours), "seeds": len(ours)}
            )  # fmt: skip
    write_csv(runs.out / "host_time.csv", table)
    means = {ms: {who: mean([distance(t, v) for t, v in of[ms].items()]) for who, of in (("Apt-Serve", apt), ("BROS", bros))} for ms in grid_ms}  # fmt: skip
    both = {ms: mean([distance(t, v) for t, v in (apt[ms] | bros[ms]).items()]) for ms in grid_ms}
    for ms in grid_ms:
        print(f"{ms:5.0f} ms: " + ", ".join(f"{who} {d:.2f}" for who, d in means[ms].items()) + f", all {both[ms]:.2f}")
    best = min(both, key=both.__getitem__)
    print(f"one value for both papers: {best:g} ms")
    figure, axes = new_figure(1, 1)
    for who in ("Apt-Serve", "BROS"):
        axes[0][0].plot(grid_ms, [means[ms][who] for ms in grid_ms], marker="o", label=who)
    axes[0][0].plot(grid_ms, [both[ms] for ms in grid_ms], color="black", lw=2, label="all eight numbers")
    axes[0][0].set(xlabel="host time of a step (ms)", ylabel="mean |ln(ours / paper)|")
    axes[0][0].grid(alpha=0.3)
    axes[0][0].legend()
    save_figure(figure, runs.out / "host_time.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

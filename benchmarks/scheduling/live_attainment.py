"""The same arrivals served and simulated: attainment of four policies at 0.7 and 1.2 of what this machine can do.

    python -m benchmarks.scheduling.live_attainment [--models tiny-opt opt-125m] [--policies NAMES] [--seeds N]
    [--requests N]

Each model is calibrated once, as a server does at its start; tiny-opt with its weights, any other shape with random
ones. Capacity is the rate at which the served `fcfs` ends requests that are all there at once. The same run, simulated,
takes less time where the host shares its cores with the device, as on a CPU, since a calibration times steps alone; all
its times are multiplied by that one ratio, which is printed. Then every policy serves Poisson arrivals in real time, on
the hybrid cache with a pool that a full batch does not fit, and the simulator runs the same arrivals. Objectives are
multiples of measured times: a first token within ten of the longest prefill steps, a gap within three steps of a full
batch with a chunk. One seed after another, policies in turn.

It writes `live-attainment.csv`: attainment, TTFT and TBT percentiles of both. Other work on the machine shows in the
served half.
"""

import argparse
import csv
import dataclasses
import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apt_jax.config import SLO, CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.core.kinds import KV
from apt_jax.costs.hardware import Hardware
from apt_jax.frontend.progress import ProgressBars
from apt_jax.metrics import Summary
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate
from apt_jax.sim.workload import Workload
from benchmarks.paper.common import half_width, mean
from benchmarks.scheduling.simulator_fidelity import calibrated, draw, percentiles, serve

RESULTS = Path(__file__).resolve().parents[1] / "results" / "simulator-fidelity"
LOADS = (0.7, 1.2)
SLOTS, STEP_TOKENS, POOL_BLOCKS = 16, 256, 160
TUNING_SEED = 1000
"""From which on runs are drawn that only say how long steps take in service."""


def outcome(summary: Summary) -> list[float]:
    """Attainment in %, then `percentiles` in ms."""
    return [100 * summary.slo_attainment, *percentiles(summary)]


COLUMNS = ("attainment", *(f"{what}_{q}_ms" for what in ("ttft", "tbt") for q in ("p50", "p90", "p99")))


def run_model(name: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """Rows of one model: a policy at a load, served and simulated, means over the seeds."""
    config = EngineConfig(
        model=name,
        load_format="auto" if name == "tiny-opt" else "dummy",
        max_model_len=512,
        # Prompts are random and all alike: nothing may be found of them.
        cache=CacheConfig(num_blocks_override=POOL_BLOCKS, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=STEP_TOKENS),
    )
    parts, executor, model, hardware = calibrated(config, args.seconds)

    full = [1] * SLOTS
    both_s = model.programs.step_s(
        np.array([*full[1:], 64], np.int32), np.array([100] * (SLOTS - 1) + [0], np.int32), np.full(SLOTS, KV, np.int8)
    )  # fmt: skip
    slo = SLO(ttft_s=10 * model.prefill_s([STEP_TOKENS], [0]), tbt_s=3 * both_s)
    common = SimulationConfig(
        cache="hybrid", slo=slo, max_num_seqs=SLOTS, max_num_batched_tokens=STEP_TOKENS, num_requests=args.requests
    )  # fmt: skip

    def workload(rate: float, seed: int) -> Workload:
        return draw(args.requests, rate, executor.max_model_len, seed)

    def served(policy: str, rate: float, seed: int) -> Summary:
        executor.reset()
        return serve(parts, dataclasses.replace(common, policy=policy), workload(rate, seed))

    def simulated(policy: str, rate: float, seed: int, description: Hardware) -> Summary:
        run = dataclasses.replace(common, policy=policy)
        found = simulate(run, hardware=description, workload=workload(rate, seed), can_convert=executor.can_convert)
        return found.summary

    at_once = 1e6
    took_s = np.mean([served("fcfs", at_once, TUNING_SEED + i).duration_s for i in range(2)])
    alone_s = np.mean([simulated("fcfs", at_once, TUNING_SEED + i, hardware).duration_s for i in range(2)])
    capacity, ratio = float(args.requests / took_s), float(took_s / alone_s)
    programs = dataclasses.replace(model.programs, coefficients=tuple(ratio * c for c in model.programs.coefficients))
    hardware = dataclasses.replace(hardware, programs=programs)
    print(
        f"{name}: {capacity:.2f} requests/s, objectives TTFT {slo.ttft_s:.3f} s, TBT {slo.tbt_s:.3f} s; "
        f"steps in service take {ratio:.2f} times as long as alone",
        flush=True,
    )
    found: dict[tuple[float, str], list[tuple[list[float], list[float]]]] = {}
    bars = ProgressBars()
    total = args.seeds * len(LOADS) * len(args.policies)
    for seed in range(args.seeds):
        for load in LOADS:
            for policy in args.policies:
                live = outcome(served(policy, load * capacity, seed))
                other = outcome(simulated(policy, load * capacity, seed, hardware))
                found.setdefault((load, policy), []).append((live, other))
                bars("serving", sum(map(len, found.values())), total)
    bars.close()
    rows = []
    for (load, policy), pairs in found.items():
        live, other = (np.array(side) for side in zip(*pairs, strict=True))
        rows.append(
            {"model": name, "load": load, "policy": policy, "requests_per_s": load * capacity, "service_ratio": ratio,
             **{f"served_{c}": float(v) for c, v in zip(COLUMNS, live.mean(axis=0), strict=True)},
             **{f"simulated_{c}": float(v) for c, v in zip(COLUMNS, other.mean(axis=0), strict=True)},
             "difference": mean((live - other)[:, 0].tolist()), "half_width": half_width((live - other)[:, 0].tolist()),
             "seeds": len(pairs), "requests": args.requests}
        )  # fmt: skip
        row = rows[-1]
        print(
            f"  {load} of capacity, {policy:10s} served {row['served_attainment']:5.1f} %, simulated {row['simulated_attainment']:5.1f} %, "
            f"TTFT p50 {row['served_ttft_p50_ms']:.0f} / {row['simulated_ttft_p50_ms']:.0f} ms, "
            f"p99 {row['served_ttft_p99_ms']:.0f} / {row['simulated_ttft_p99_ms']:.0f} ms",
            flush=True,
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-opt", "opt-125m"])
    parser.add_argument("--policies", nargs="+", default=["fcfs", "sarathi", "apt", "apt-plus"])
    parser.add_argument("--requests", type=int, default=200, help="of a run; default 200")
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    parser.add_argument("--seconds", type=float, default=30.0, help="for calibration; default 30")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args(argv)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.date.today()}")
    rows = [row for name in args.models for row in run_model(name, args)]
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "live-attainment.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


if __name__ == "__main__":
    main()

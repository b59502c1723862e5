"""Sessions of agents under each retention policy and order of calls, simulated.

    python -m benchmarks.scheduling.sessions --trace agents --seeds 4

Llama-3-8B on one H100 with 64 GiB of host memory; the sessions are recorded ones if `--trace` names a file, else
generated. Every seed draws the sessions and their beginnings for all policies alike. `--rates` are sessions per second.

One simulated token stands for `--unit` tokens, so that a run takes a minute: prompts and answers are scaled, and the
costs per token, per pair of tokens and per step grow by as much (`coarse`).

What of a prefix is computed again although an earlier call had computed it, and what is copied from host memory, is
compared with the least that any policy must spend on calls at the same times (`apt_jax.lab.optimal.retention`).

Writes sessions.csv (a row per run) and sessions-table.csv (means over seeds, and 95 % intervals of the ratio to lru in
the order of arrival on the same seeds), and prints the table.
"""

import argparse
import csv
import dataclasses
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apt_jax.config import SLO, SessionOrder
from apt_jax.costs.hardware import Hardware
from apt_jax.lab.optimal.retention import least_seconds, paths_of
from apt_jax.sched.retention.view import prefill_s
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware, save_hardware
from apt_jax.sim.host_link import num_host_blocks, with_transfers
from apt_jax.sim.simulator import SimulationResult, simulate
from apt_jax.sim.trace import load_trace
from apt_jax.sim.workload import Workload, drop_oversized, sample_workload
from benchmarks.paper.common import Runs, add_options, half_width

RESULTS = Path(__file__).parents[1] / "results" / "sessions"
MODEL, HARDWARE, HOST_GIB = "llama-3-8b", "h100-80gb", 64.0
LONGEST = {MODEL: 262_144, "qwen2.5-32b": 131_072}
"""Tokens of the longest prompts, by model."""
SYSTEMS: tuple[tuple[str, SessionOrder], ...] = (
    ("lru", "arrival"), ("lru", "program-fcfs"), ("lru", "plas"), ("lru", "hrrn"),
    ("ttl", "arrival"), ("cache-ttl", "program-fcfs"), ("progress-ttl", "arrival"), ("progress-ttl", "hrrn"),
    ("knapsack", "arrival"), ("knapsack", "hrrn"), ("knapsack?keeps=true", "hrrn"),
    ("clairvoyant", "arrival"), ("clairvoyant", "hrrn"),
)  # fmt: skip
MEASURES = (
    "completion_mean_s",
    "slowdown_mean",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_first_p90_s",
    "hit",
    "again_s",
    "least_again_s",
)


def coarse(hardware: Hardware, unit: int) -> Hardware:
    """The hardware in units of `unit` tokens, for prompts as long as `LONGEST`."""
    costs = {}
    for mode, of_mode in hardware.costs.items():
        one = with_transfers(of_mode, hardware)
        costs[mode] = dataclasses.replace(
            one,
            prefill_per_token_s=one.prefill_per_token_s * unit,
            prefill_per_pair_s=one.prefill_per_pair_s * unit**2,
            prefill_per_kv_prefix_s=one.prefill_per_kv_prefix_s * unit,
            decode_base_s=one.decode_base_s * unit,
            decode_per_request_s=one.decode_per_request_s * unit,
            decode_per_token_s=one.decode_per_token_s * unit**2,
            load_per_block_s=one.load_per_block_s * unit,
            save_per_block_s=one.save_per_block_s * unit,
        )
    return dataclasses.replace(
        hardware, costs=costs, max_model_len=LONGEST[hardware.model] // unit, num_blocks=hardware.num_blocks // unit
    )


def run(config: SimulationConfig) -> dict[str, Any]:
    """One run; `config.scale_tokens` tells the unit."""
    unit = round(1 / config.scale_tokens)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "coarse.json"
        hardware = coarse(load_hardware(config.model, HARDWARE), unit)
        save_hardware(hardware, path)  # as a file, so that its checks apply
        hardware = load_hardware(config.model, str(path))
    workload = sample_workload(drop_oversized(load_trace(config.trace), hardware, config), config)
    found = simulate(config, hardware=hardware, workload=workload)
    sessions = found.sessions
    assert sessions is not None
    assert not found.fallback_iterations
    return {
        "completion_mean_s": sessions.completion_mean_s,
        "slowdown_mean": sessions.slowdown_mean,
        "ttft_p50_s": sessions.ttft_later_s.p50,
        "ttft_p90_s": sessions.ttft_later_s.p90,
        "ttft_first_p90_s": sessions.ttft_first_s.p90,
        "hit": found.prefix_hit_fraction,
        **recomputed(found, workload, hardware),
        "busy_s": found.device_busy_fraction * found.duration_s,
        "num_calls": sessions.num_calls,
        "schedule_p50_ms": found.schedule_ms[0],
    }


def recomputed(found: SimulationResult, workload: Workload, hardware: Hardware) -> dict[str, float]:
    """Seconds of prefill that calls computed although an earlier call had computed it, and of copies from host memory;
    and the least that any policy spends on these calls at these times."""
    config, size, lengths = found.config, hardware.block_size, workload.prompt_tokens
    assert workload.calls is not None
    assert config.cache == "kv"
    costs = with_transfers(hardware.step_costs(config.hidden_attention), hardware)
    per_group = hardware.kinds(config.cache, config.hidden_attention)[0].blocks_per_group
    metrics = [one for one in found.requests if one is not None and one.first_scheduled_s is not None]
    assert len(metrics) == lengths.size
    shared = workload.shared_tokens(config)
    known = np.minimum(shared // size * size, lengths - 1)
    again_s = prefill_s(costs, known.astype(float)) - prefill_s(
        costs, np.array([one.num_cached_tokens for one in metrics], float)
    )
    least_s, _ = least_seconds(
        paths_of(workload.calls, lengths, shared, size), lengths,
        np.array([one.first_scheduled_s for one in metrics]),
        np.array([np.inf if one.num_preemptions else one.token_times_s[0] for one in metrics]),
        np.array([one.finished_s for one in metrics]), group_tokens=size, prefill_s=lambda t: prefill_s(costs, t),
        load_s=per_group * costs.load_per_block_s, device_groups=hardware.num_blocks // per_group,
        host_groups=num_host_blocks(hardware, config.swap_space) // per_group,
    )  # fmt: skip
    return {"again_s": float(again_s.sum()) + found.loaded_blocks * costs.load_per_block_s, "least_again_s": least_s}


def table_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, and how many times longer a session takes with lru in the order of arrival."""
    table = []
    by_cell: dict[tuple[str, str, float], dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault((row["retention"], row["order"], row["rate"]), {})[row["seed"]] = row
    for (retention, order, rate), cell in by_cell.items():
        base, best = by_cell["lru", "arrival", rate], by_cell["clairvoyant", "hrrn", rate]
        seconds = {s: (base[s]["completion_mean_s"], one["completion_mean_s"]) for s, one in cell.items()}
        ratios = [before / after for before, after in seconds.values()]
        gains = [(before - after) / (before - best[s]["completion_mean_s"]) for s, (before, after) in seconds.items()]
        means = {name: float(np.mean([one[name] for one in cell.values()])) for name in MEASURES}
        of_lru = by_cell.get(("lru", order, rate), {})  # in the same order of calls
        possible = [
            (of_lru[s]["again_s"] - one["again_s"]) / (of_lru[s]["again_s"] - one["least_again_s"])
            for s, one in cell.items()
            if s in of_lru
        ]
        table.append({
            "retention": retention, "order": order, "rate": rate, **means, "seeds": len(cell),
            "times_better": float(np.mean(ratios)), "half_width": half_width(ratios),
            "share_of_clairvoyant": float(np.mean(gains)),
            "share_of_possible": float(np.mean(possible)) if possible else math.nan,
        })  # fmt: skip
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_options(parser, requests=40, seeds=10, out=RESULTS)
    parser.add_argument("--trace", default="agents", help="recorded sessions, or generated ones (default: agents)")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.006, 0.012, 0.018], help="sessions per second")
    parser.add_argument("--model", choices=LONGEST, default=MODEL, help="on as few H100s as it is described for")
    parser.add_argument("--policy", default="vllm-v1")
    parser.add_argument("--unit", type=int, default=32, help="tokens that one simulated token stands for")
    names = [f"{retention}:{order}" for retention, order in SYSTEMS]
    parser.add_argument("--systems", nargs="+", choices=names, default=names, help="RETENTION:ORDER (default: all)")
    args = parser.parse_args(argv)
    runs = Runs.from_args(args)
    wanted = {*args.systems, "lru:arrival", "clairvoyant:hrrn"}  # what the others are compared with
    systems = [one for one, name in zip(SYSTEMS, names, strict=True) if name in wanted]
    cells: list[tuple[str, SessionOrder, float, int]] = [
        (retention, order, rate, seed) for seed in runs.seeds for rate in args.rates for retention, order in systems
    ]
    configs = [
        SimulationConfig(
            model=args.model, hardware=HARDWARE, cache="kv", trace=args.trace, drop_too_long=True, rate=rate, seed=seed,
            num_sessions=runs.num_requests, policy=args.policy, retention=retention, session_order=order,
            swap_space=HOST_GIB / args.unit, scale_tokens=1 / args.unit, max_think_s=3600.0, slo=SLO(),
            max_num_batched_tokens=8192 // args.unit,
        )
        for retention, order, rate, seed in cells
    ]  # fmt: skip
    results = runs.map("sessions", run, [(config,) for config in configs])
    rows = [
        {"retention": retention, "order": order, "rate": rate, "seed": seed, **result}
        for (retention, order, rate, seed), result in zip(cells, results, strict=True)
    ]
    table = table_of(rows)
    stem = "sessions" if args.model == MODEL else f"sessions-{args.model}"
    for name, content in ((stem, rows), (f"{stem}-table", table)):
        with (runs.out / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, content[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in content)
    for row in table:
        print(
            f"{row['rate']:<6g} {row['retention']:13} {row['order']:13} completion {row['completion_mean_s']:7.1f} s  "
            f"times better {row['times_better']:.2f} ± {row['half_width']:.2f}  TTFT p50 {row['ttft_p50_s']:.2f} "
            f"p90 {row['ttft_p90_s']:.2f} s  cached {row['hit']:.3f}  of clairvoyant {row['share_of_clairvoyant']:.2f}  "
            f"again {row['again_s']:.0f} s, {100 * row['share_of_possible']:.0f} % of what was possible"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

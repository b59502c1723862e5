"""InferMax §5.1 and Fig. 15: does an optimal schedule evict?

Four equal requests of I prompt and 4 output tokens, M = max(2 I, I + 3), C = 4096, the costs of Llama-2-7B on an A100.
For each I: the optimum with eviction allowed, the optimum without, and what first-come-first-served with eviction does.
Nothing is timed but the solver; latencies are those of the cost model.

Three cost models:

* `linear`: InferMax §3.2, one line for all layers but attention whatever the phase, one each for both attentions, each
  fitted by least squares to measured operators (Vidur's and aiconfigurator's profiles), as the paper's Fig. 3. Where a
  batch mixes the phases, the larger of both biases counts.
* `per-prefill`: the paper also calibrates a term a prefill request, and does not publish it. This is the bias of the
  layers alone with an assumed 1.5 ms a prefill request; with 0.5 ms or more, prompts of 64 tokens are no longer
  evicted.
* `measured`: the bundled hardware description, fitted to whole steps a phase. A prefill step has a smaller bias there
  than a decode step (an artefact of drop_oversized few tokens and thousands with one line), so it favours refills.

    python -m benchmarks.paper.infermax_fig15 [--quick] [--out DIRECTORY]
"""

import argparse
import csv
import dataclasses
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scipy

from apt_jax.lab.optimal.baselines import fcfs_schedule
from apt_jax.lab.optimal.check import check_schedule
from apt_jax.lab.optimal.problem import OptimalProblem, OptimalRequest, OptimalSchedule
from apt_jax.lab.optimal.solver import solve_optimal
from apt_jax.sched import StepCosts
from apt_jax.sim.hardware import load_hardware
from benchmarks.paper.cases import effect, largest
from benchmarks.paper.common import write_rows

_LAYERS = 32
_MS_PER_LAYER = {
    # Least squares over at most 4096 tokens (layers), 131072 tokens read (decode), 8 prompts of at most 4096 (prefill).
    "layer": (0.1323, 0.001959),  # bias, a token
    "decode attention": (0.0599, 1.070e-5),  # bias, a token read
    "prefill attention": (0.0702, 5.487e-8),  # bias, a pair of tokens
}


def linear_costs() -> StepCosts:
    """The paper's three lines, summed over the layers."""
    seconds = {k: (_LAYERS * b / 1e3, _LAYERS * s / 1e3) for k, (b, s) in _MS_PER_LAYER.items()}
    base_s, token_s = seconds["layer"]
    decode_s, read_s = seconds["decode attention"]
    prefill_s, pair_s = seconds["prefill attention"]
    return StepCosts(
        prefill_base_s=base_s + prefill_s,
        prefill_per_token_s=token_s,
        prefill_per_pair_s=pair_s,
        prefill_per_kv_prefix_s=read_s,
        decode_base_s=base_s + decode_s,
        decode_per_request_s=token_s,
        decode_per_token_s=read_s,
    )


def per_prefill_costs() -> StepCosts:
    """The bias of the layers alone, and 1.5 ms a prefill request: the paper has such a term and does not publish it."""
    layers_s = _LAYERS * _MS_PER_LAYER["layer"][0] / 1e3
    return dataclasses.replace(
        linear_costs(),
        prefill_base_s=layers_s,
        decode_base_s=layers_s,
        prefill_per_request_s=1.5e-3,
    )


def problem(prompt: int, costs: StepCosts, *, eviction: bool) -> OptimalProblem:
    return OptimalProblem(
        requests=(OptimalRequest(prompt_tokens=prompt, output_tokens=4),) * 4,
        capacity_blocks=max(2 * prompt, prompt + 3),
        max_num_batched_tokens=4096,
        eviction=eviction,
        costs=costs,
    )


def measure(name: str, prompt: int, costs: StepCosts, time_limit_s: float) -> tuple[dict[str, Any], OptimalSchedule]:
    start_s = time.perf_counter()
    free = solve_optimal(problem(prompt, costs, eviction=True), time_limit_s=time_limit_s)
    kept = solve_optimal(problem(prompt, costs, eviction=False), time_limit_s=time_limit_s)
    solve_s = time.perf_counter() - start_s
    fcfs = fcfs_schedule(problem(prompt, costs, eviction=True))
    return {
        "costs": name,
        "prompt_tokens": prompt,
        "optimum_ms": 1e3 * free.latency_s,
        "bound_ms": 1e3 * free.bound,
        "status": free.status,
        "evictions": free.num_evictions,
        "batches": len(free.batches),
        "no_eviction_ms": 1e3 * kept.latency_s,
        "saved_by_eviction": 1 - free.latency_s / kept.latency_s,
        "fcfs_ms": 1e3 * fcfs.latency_s,
        "fcfs_evictions": fcfs.num_evictions,
        "saved_over_fcfs": 1 - free.latency_s / fcfs.latency_s,
        "solve_s": solve_s,
    }, free


def target_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of the table of targets: what eviction saves at I of at most 32, and what the optimum, which evicts
    nobody, saves over FCFS with eviction at I of 64 or more. The paper does not name the second baseline."""
    found = []
    for costs in dict.fromkeys(row["costs"] for row in rows):
        own = [row for row in rows if row["costs"] == costs]
        short = {f"I={r['prompt_tokens']}": 100 * r["saved_by_eviction"] for r in own if r["prompt_tokens"] <= 32}
        long = {
            f"I={r['prompt_tokens']}": 100 * r["saved_over_fcfs"]
            for r in own
            if r["prompt_tokens"] >= 64 and r["evictions"] == 0
        }
        for target, values in (("I-51-short", short), ("I-51-long", long)):
            if values:
                most, where = largest(values)
                found.append(effect(target, most, variant=costs, where=where))
    return found


def draw(rows: list[dict[str, Any]], schedules: dict[int, OptimalSchedule], costs: StepCosts, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from apt_jax.lab.optimal.command import plot_schedule

    figure, axes = plt.subplots(1, len(schedules) + 1, figsize=(5 * len(schedules) + 5, 3), layout="constrained")
    for axis, (prompt, schedule) in zip(axes, schedules.items(), strict=False):
        of = problem(prompt, costs, eviction=True)
        plot_schedule(axis, of, schedule, check_schedule(of, schedule))
        axis.set_title(f"I = {prompt}: {schedule.num_evictions} evictions")
    axis = axes[-1]
    for name in dict.fromkeys(row["costs"] for row in rows):
        own = [row for row in rows if row["costs"] == name]
        axis.plot(
            [row["prompt_tokens"] for row in own],
            [100 * row["saved_by_eviction"] for row in own],
            marker=".",
            label=name,
        )
    axis.axvline(2**5.5, color="gray", ls=":", label="paper: evicts left of this")
    axis.set(xscale="log", xlabel="prompt tokens I", ylabel="latency saved by eviction (%)")
    axis.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def revision() -> str:
    answer = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="five prompt lengths, one cost model")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/paper"))
    parser.add_argument("--time-limit", type=float, default=120.0, help="of each solve, seconds")
    args = parser.parse_args(argv)
    models = {"linear": linear_costs()}
    prompts = [1, 8, 32, 64, 1024] if args.quick else [2**k for k in range(11)]
    if not args.quick:
        models["per-prefill"] = per_prefill_costs()
        models["measured"] = load_hardware("llama-2-7b", "a100-80gb").step_costs("reproject")
    rows: list[dict[str, Any]] = []
    shown: dict[int, OptimalSchedule] = {}
    print(
        f"{'costs':11} {'I':>5} {'optimum ms':>11} {'evictions':>9} {'batches':>7} {'none ms':>9} {'saved':>7} "
        f"{'fcfs ms':>9} {'saved':>7} {'solve s':>7}  proof"
    )
    for name, costs in models.items():
        for prompt in prompts:
            row, schedule = measure(name, prompt, costs, args.time_limit)
            rows.append(row)
            if name == "linear" and prompt in (32, 1024):
                shown[prompt] = schedule
            print(
                f"{name:11} {prompt:5d} {row['optimum_ms']:11.3f} {row['evictions']:9d} {row['batches']:7d} "
                f"{row['no_eviction_ms']:9.3f} {row['saved_by_eviction']:7.1%} {row['fcfs_ms']:9.3f} "
                f"{row['saved_over_fcfs']:7.1%} {row['solve_s']:7.2f}  {row['status']}",
                flush=True,
            )
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "infermax_fig15.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    write_rows(args.out / "infermax.csv", target_rows(rows))
    draw(rows, shown, models["linear"], args.out / "infermax_fig15.png")
    print(
        json.dumps(
            {
                "command": " ".join(["benchmarks/paper/infermax_fig15.py", *sys.argv[1:]]),
                "revision": revision(),
                "python": platform.python_version(),
                "scipy": scipy.__version__,
                "linear": dataclasses.asdict(models["linear"]),
                "not_proven": sum(row["status"] != "optimal" for row in rows),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

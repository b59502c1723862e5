"""The schedulers of 2023 to 2026 on one engine: attainment and goodput against the request rate.

    python -m benchmarks.scheduling.schedulers [--quick] [--policies vllm-v1,qoserve,...] [--datasets
    ShareGPT,LongBench] [--rates 2,4]
                                    [--seeds N] [--requests N] [--workers N] [--out DIR] [--store FILE]

Simulated OPT-13B on one A100 of 40 GB, with the requests, arrivals (Poisson) and objectives of Apt-Serve §6.2, each
with its TTFT and P99 TBT objective. All policies see the same requests and arrivals of a seed. They run on keys and
values alone, so that only scheduling differs; `apt`, `apt-s` and `apt-plus` are run on the hybrid cache as well: the
first two with the paper's reprojection, the last one with absorption. `vllm-v1-8192` may have 8,192 tokens in a step,
all others 2,048.

It writes `schedulers.csv` and `schedulers.png`. Columns are means over the seeds: attainment with the half width of its
95 % interval (Student's t), the same of the difference to `vllm-v1` with the same seeds, goodput (requests/s that
attain their objectives), output tokens/s, P99 of TTFT, recomputed tokens, time until the last request ends,
preemptions. Finished runs are kept in the store: an interrupted benchmark goes on where it was.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apt_jax.errors import ConfigError
from apt_jax.sched import check_policy
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate
from benchmarks.paper import common
from benchmarks.paper.common import (
    TRACES,
    Runs,
    add_options,
    mean,
    new_figure,
    paper_config,
    save_figure,
    write_csv,
)

RESULTS = Path(__file__).resolve().parents[1] / "results" / "schedulers"

COMPARED = (
    "fcfs",
    "sarathi",
    "fastgen",
    "infermax",
    "vllm-v1",
    "vllm-v1-8192",
    "least-computed",
    "hrrn",
    "vtc",
    "edf",
    "fairbatching",
    "qoserve",
    "apt",
    "apt-s",
    "apt-plus",
)
HYBRID = {"apt": "reproject", "apt-s": "reproject", "apt-plus": "absorb"}
"""Policies that choose between cache kinds, and how they attend to layer inputs."""

BASE = "vllm-v1"
"""Policy that the others are compared with, seed by seed."""

RATES = {"ShareGPT": (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), "LongBench": (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)}
QUICK_RATES = {"ShareGPT": (3.0, 6.0), "LongBench": (1.0, 2.0)}

Variant = tuple[str, str]
"""Policy and cache."""


def base_of(policy: str) -> str:
    """Return the name of a policy without its options."""
    return policy.partition("?")[0]


def variants(policies: Sequence[str]) -> list[Variant]:
    kinds = [(policy, "kv") for policy in policies]
    return kinds + [(policy, "hybrid") for policy in policies if base_of(policy) in HYBRID]


def config_of(dataset: str, variant: Variant, num_requests: int) -> SimulationConfig:
    policy, cache = variant
    attention = HYBRID[base_of(policy)] if cache == "hybrid" else "reproject"
    return paper_config(
        dataset,
        policy=policy,
        cache=cache,
        hidden_attention=attention,
        num_requests=num_requests,
        max_num_batched_tokens=8192 if policy == "vllm-v1-8192" else None,
    )


def run(config: SimulationConfig) -> dict[str, Any]:
    """Simulate one run; return the columns of the table."""
    result = simulate(config)
    summary = result.summary
    return {
        "attainment": summary.slo_attainment,
        "strict": 100 * summary.strict_attainment,
        "longest_gap_p99_s": summary.longest_gap_s.p99,
        "goodput": summary.goodput,
        "tokens_per_s": summary.tokens_per_s,
        "ttft_p99_s": summary.ttft_s.p99,
        "recomputed_tokens": result.recomputed_tokens,
        "makespan_s": summary.duration_s,
        "preemptions": result.preemptions,
    }


def half_width(values: Sequence[float]) -> float:
    """Return the half-width of the 95 % interval of the mean; NaN for one value."""
    return common.half_width(values) if len(values) > 1 else math.nan


def row_of(
    dataset: str,
    variant: Variant,
    rate: float,
    results: Sequence[dict[str, Any]],
    base: Sequence[dict[str, Any]] | None,
) -> dict[str, Any]:
    """A line of the table: means over seeds; attainment in percent. `base` has the same seeds of `BASE`."""
    percent = [100 * result["attainment"] for result in results]
    more = [p - 100 * b["attainment"] for p, b in zip(percent, base, strict=True)] if base else []
    return {
        "dataset": dataset,
        "policy": variant[0],
        "cache": variant[1],
        "rate": rate,
        "seeds": len(results),
        "attainment": mean(percent),
        "attainment_95": half_width(percent),
        "over_vllm_v1": mean(more) if more else math.nan,
        "over_vllm_v1_95": half_width(more) if more else math.nan,
        **{key: mean([r[key] for r in results]) for key in results[0] if key != "attainment"},
    }


def plot(path: Path, rows: Sequence[dict[str, Any]], datasets: Sequence[str]) -> None:
    """Attainment and goodput against the rate, a row of panels a data set."""
    import matplotlib as mpl

    figure, axes = new_figure(len(datasets), 2, width=5.5, height=4.2)
    shown = list(dict.fromkeys((row["policy"], row["cache"]) for row in rows))
    colors = mpl.colormaps["tab20"](range(20))
    policies = list(dict.fromkeys(policy for policy, _ in shown))
    for (left, right), dataset in zip(axes, datasets, strict=True):
        for variant in shown:
            mine = [row for row in rows if (row["policy"], row["cache"]) == variant and row["dataset"] == dataset]
            style = {
                "color": colors[policies.index(variant[0]) % len(colors)],
                "linestyle": "--" if variant[1] == "hybrid" else "-",
                "marker": "o" if base_of(variant[0]) in HYBRID else ".",
                "markersize": 4,
                "label": f"{variant[0]}, hybrid cache" if variant[1] == "hybrid" else variant[0],
            }
            rates = [row["rate"] for row in mine]
            widths = [0.0 if math.isnan(r["attainment_95"]) else r["attainment_95"] for r in mine]
            left.errorbar(rates, [row["attainment"] for row in mine], widths, **style)
            right.plot(rates, [row["goodput"] for row in mine], **style)
        left.set(title=dataset, xlabel="requests/s", ylabel="requests that attain both objectives, %")
        left.set_ylim(0, 102)
        right.set(title=dataset, xlabel="requests/s", ylabel="goodput, requests/s")
        for axis in (left, right):
            axis.grid(alpha=0.3)
    handles, labels = axes[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    save_figure(figure, path)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table on the terminal."""
    head = f"{'':<28}{'attainment %':>20}{'strict %':>10}{'goodput':>9}{'tokens/s':>10}{'TTFT p99':>10}{'recomputed':>12}{'makespan':>10}{'preempted':>11}"
    last = None
    for row in rows:
        if (row["dataset"], row["rate"]) != last:
            last = row["dataset"], row["rate"]
            print(f"\n{row['dataset']}, {row['rate']:g} requests/s, {row['seeds']} seeds\n{head}")
        name = row["policy"] + (", hybrid" if row["cache"] == "hybrid" else "")
        attained = f"{row['attainment']:.1f}"
        if not math.isnan(row["attainment_95"]):
            attained += f" ± {row['attainment_95']:.1f}"
        print(
            f"{name:<28}{attained:>20}{row['strict']:>10.1f}{row['goodput']:>9.2f}{row['tokens_per_s']:>10.0f}{row['ttft_p99_s']:>9.2f}s"
            f"{row['recomputed_tokens']:>12.0f}{row['makespan_s']:>9.0f}s{row['preemptions']:>11.0f}"
        )


def _policies(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    try:
        for name in names:
            check_policy(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _datasets(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(TRACES):
        raise argparse.ArgumentTypeError(f"{text!r}: data sets must be some of {', '.join(TRACES)}")
    return names


def _rates(text: str) -> list[float]:
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError:
        rates = [0.0]
    if min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive numbers with commas between")
    return rates


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_options(parser, requests=1000, seeds=5, out=RESULTS)
    parser.add_argument(
        "--policies",
        type=_policies,
        default=list(COMPARED),
        metavar="NAMES",
        help="with commas between, options too (vllm-v1?budget=512); default: those of the table",
    )
    parser.add_argument(
        "--datasets",
        type=_datasets,
        default=list(RATES),
        metavar="NAMES",
        help=f"default {','.join(RATES)}",
    )
    parser.add_argument("--rates", type=_rates, metavar="LIST", help="requests/s; default: by data set")
    args = parser.parse_args(argv)
    runs = Runs.from_args(args)
    default = QUICK_RATES if runs.quick else RATES
    cells = [
        (dataset, rate, variant)
        for dataset in args.datasets
        for rate in args.rates or default.get(dataset, (2.0, 4.0))
        for variant in variants(args.policies)
    ]
    configs = [config_of(dataset, variant, runs.num_requests) for dataset, _, variant in cells]
    tasks = [
        (dataclasses.replace(config, rate=rate, seed=seed),)
        for config, (_, rate, _) in zip(configs, cells, strict=True)
        for seed in runs.seeds
    ]
    found = iter(runs.map("runs", run, tasks))
    results = {cell: [next(found) for _ in runs.seeds] for cell in cells}
    rows = [
        row_of(dataset, variant, rate, one, results.get((dataset, rate, (BASE, "kv"))))
        for (dataset, rate, variant), one in results.items()
    ]
    name = "schedulers-quick" if runs.quick else "schedulers"
    write_csv(runs.out / f"{name}.csv", rows)
    show(rows)
    plot(runs.out / f"{name}.png", rows, args.datasets)


if __name__ == "__main__":
    main()

"""Simulate serving on hardware that is not here: the same scheduler, cache accounting and engine, on a cost model.

One run, or a sweep over rates, policies and seeds, or the effective throughput of policies by bisection.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from apt_jax.config import SLO, SchedulerConfig
from apt_jax.llm import ProgressBars
from apt_jax.sched import POLICIES
from apt_jax.sim.hardware import known_hardware
from apt_jax.sim.routing import ROUTING_POLICIES
from apt_jax.sim.simulate import SimulationConfig, simulate
from apt_jax.sim.sweep import EffectiveRate, Store, check_hardware, find_rates, sweep
from apt_jax.sim.trace import known_traces
from serve import options
from serve.errors import CommandError
from serve.output import print_table, write_json


def _list_of(kind: Any) -> Any:
    def convert(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",") if part]

    return convert


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} must be one of {', '.join(sorted(POLICIES))}{options.nearest(text, POLICIES)}"
        )
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = SimulationConfig()
    known = ", ".join(f"{model} on {name} x{n}" for model, name, n in known_hardware())
    group = parser.add_argument_group("what is simulated")
    group.add_argument("--model", metavar="MODEL", default=default.model, help=f"known: {known}")
    group.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        default=default.hardware,
        help="a known name, or a description file (.json; `apt-jax calibrate --describe` writes one)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        metavar="N",
        help="devices; without it the fewest that are described",
    )
    group.add_argument(
        "--trace",
        metavar="NAME|FILE",
        default=default.trace,
        help=f"CSV file with prompt_tokens,output_tokens[,arrival_s][,class], or one of {', '.join(known_traces())}",
    )
    group.add_argument(
        "--rate",
        type=options.positive(float),
        metavar="R",
        help="requests/s; needed unless the trace has arrivals, which it stretches, or --rates or --find-rate is given",
    )
    group.add_argument(
        "--cv",
        type=options.positive(float),
        metavar="CV",
        help="coefficient of variation of the gaps (Gamma; 1: Poisson); without it recorded arrivals, else 1",
    )
    group.add_argument(
        "--num-requests",
        type=options.positive(int),
        metavar="N",
        default=default.num_requests,
        help="drawn from the trace",
    )
    group.add_argument(
        "--seed", type=int, metavar="SEED", default=default.seed, help="draws requests and arrivals"
    )
    group.add_argument(
        "--output-scale",
        type=options.positive(float),
        metavar="FACTOR",
        default=1.0,
        help="factor on output lengths",
    )
    group.add_argument(
        "--drop-too-long",
        action="store_true",
        help="leave out requests that can never fit instead of refusing the trace",
    )
    group.add_argument(
        "--replicas",
        type=options.positive(int),
        metavar="N",
        default=default.replicas,
        help="engines that share the requests, each on such hardware of its own",
    )
    group.add_argument(
        "--routing-policy",
        choices=tuple(ROUTING_POLICIES),
        default=default.routing_policy,
        help="which replica a request goes to: in turn, the least loaded as the gateway smg reckons, or where most time is left to its TTFT objective; default round_robin",
    )
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--scheduling-policy",
        type=_list_of(_policy),
        metavar="P[,P...]",
        default=[default.policy],
        help=f"one or several of {', '.join(sorted(POLICIES))}; default apt",
    )
    group.add_argument(
        "--cache",
        choices=("kv", "hidden", "hybrid"),
        default=default.cache,
        help="cache kinds that the scheduler may use",
    )
    group.add_argument(
        "--hidden-attention",
        choices=("auto", "reproject", "absorb"),
        default=default.hidden_attention,
        help="cost of the hidden kind: the paper's (reproject) or ours (absorb)",
    )
    group.add_argument(
        "--violation-decay",
        type=float,
        metavar="FACTOR",
        default=SchedulerConfig().violation_decay,
        help="factor on the value of requests that have missed their objective; 0: near zero",
    )
    group.add_argument(
        "--max-num-seqs",
        type=options.positive(int),
        metavar="N",
        help="requests that hold cache at once; without it 256, or what a calibrated description was measured up to",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=options.positive(int),
        metavar="N",
        help="tokens a step; without it as many as the model has positions, 2,048 to 16,384",
    )
    group.add_argument(
        "--num-blocks-override",
        type=options.positive(int),
        metavar="BLOCKS",
        help="size of the pool",
    )
    group.add_argument(
        "--slo-ttft-ms",
        type=options.positive(float),
        default=1000.0,
        metavar="MS",
        help="objective of every request: arrival to first token, milliseconds",
    )
    group.add_argument(
        "--slo-tbt-ms",
        type=options.positive(float),
        default=1000.0,
        metavar="MS",
        help="objective of every request: P99 of the gaps between its tokens, milliseconds",
    )
    group = parser.add_argument_group("several runs")
    group.add_argument(
        "--rates", type=_list_of(options.positive(float)), metavar="R1,R2,...", help="a run at each"
    )
    group.add_argument(
        "--find-rate",
        type=options.positive(float),
        metavar="SHARE",
        help="the highest rate at which this share of the requests attains its objectives, e.g. 0.9",
    )
    group.add_argument(
        "--seeds",
        type=options.positive(int),
        metavar="N",
        help="N seeds from --seed on; without it 1, with --find-rate 3",
    )
    group.add_argument(
        "--workers",
        type=options.positive(int),
        metavar="N",
        help="processes; without it one a core",
    )
    group.add_argument(
        "--store",
        metavar="FILE",
        help="keep finished runs here, and do not run again what is in it",
    )
    group.add_argument(
        "--png", metavar="FILE", help="plot attainment against the rate (with --rates)"
    )
    options.add_json_argument(parser)


def config_of(args: argparse.Namespace) -> SimulationConfig:
    """The run that the flags describe, of the first policy."""
    return SimulationConfig(
        model=args.model,
        hardware=args.hardware,
        num_devices=args.tensor_parallel_size,
        trace=args.trace,
        rate=args.rate,
        cv=args.cv,
        num_requests=args.num_requests,
        seed=args.seed,
        policy=args.scheduling_policy[0],
        violation_decay=args.violation_decay,
        cache=args.cache,
        hidden_attention=args.hidden_attention,
        slo=SLO(ttft_s=args.slo_ttft_ms / 1e3, tbt_s=args.slo_tbt_ms / 1e3),
        output_scale=args.output_scale,
        drop_too_long=args.drop_too_long,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_blocks=args.num_blocks_override,
        replicas=args.replicas,
        routing_policy=args.routing_policy,
    )


def run(args: argparse.Namespace) -> int:
    base = config_of(args)
    policies: Sequence[str] = args.scheduling_policy
    num_seeds = args.seeds or (3 if args.find_rate is not None else 1)
    seeds = range(args.seed, args.seed + num_seeds)
    several = args.rates or args.find_rate is not None or num_seeds > 1 or len(policies) > 1
    check_hardware([base])
    bars = ProgressBars()
    try:
        if not several:
            result = simulate(base, progress=lambda done, total: bars("simulating", done, total))
            values = result.as_dict()
        else:
            store = Store(Path(args.store) if args.store else None)
            kept = {
                "store": store,
                "workers": args.workers,
                "progress": lambda done, total: bars("runs", done, total),
            }
            configs = [dataclasses.replace(base, policy=policy) for policy in policies]
            if args.find_rate is not None:
                rates = find_rates(configs, target=args.find_rate, seeds=seeds, **kept)
                return _report_rates(args, policies, rates)
            grid = [
                dataclasses.replace(config, rate=rate, seed=seed)
                for config in configs
                for rate in (args.rates or [args.rate])
                for seed in seeds
            ]
            runs = sweep(grid, **kept)
    finally:
        bars.close()
    if not several:
        _report_one(values)
        write_json(args.json, values)
        return 0
    return _report_sweep(args, grid, runs)


def _report_one(values: dict[str, Any]) -> None:
    def span(name: str) -> str:
        p = values[name]
        return " / ".join("-" if p[q] is None else f"{p[q]:.3f}" for q in ("p50", "p90", "p99"))

    config, replicas = values["config"], values["replicas"]
    where = f"{config['model']} on {config['hardware']}"
    if len(replicas) > 1:
        where += f", {len(replicas)} replicas by {config['routing_policy']}"
    print_table(
        f"{config['policy']}, {config['cache']} cache: {where}, {config['trace']}",
        [
            ("SLO attainment (%)", f"{100 * values['slo_attainment']:.1f}"),
            ("TTFT, TBT attainment (%)", f"{100 * values['ttft_attainment']:.1f}, {100 * values['tbt_attainment']:.1f}"),
            ("TTFT p50 / p90 / p99 (s)", span("ttft_s")),
            ("P99 TBT p50 / p90 / p99 (s)", span("tbt_s")),
            ("output tokens/s", f"{values['tokens_per_s']:.1f}"),
            ("goodput (requests/s)", f"{values['goodput']:.2f}"),
            ("preemptions, recomputed tokens", f"{values['preemptions']}, {values['recomputed_tokens']}"),
            ("tokens decoded from hidden cache (%)", f"{100 * values['hidden_token_fraction']:.1f}"),
            ("iterations", f"{values['iterations']} {values['iterations_by_type']}"),
            *([("requests by replica", ", ".join(str(r["num_sent"]) for r in replicas))] if len(replicas) > 1 else []),
            ("scheduling call p50, p99 (ms)", "{p50:.3f}, {p99:.3f}".format(**values["schedule_ms"])),
            ("simulated, took (s)", f"{values['duration_s']:.1f}, {values['sim_wall_s']:.1f}"),
        ],
    )  # fmt: skip


def _report_rates(
    args: argparse.Namespace, policies: Sequence[str], rates: Sequence[EffectiveRate]
) -> int:
    rows = [
        (p, f"{r.mean:.2f} ± {r.std:.2f} requests/s") for p, r in zip(policies, rates, strict=True)
    ]
    print_table(f"effective throughput at {100 * args.find_rate:g} % attainment", rows)
    found = {p: r.as_dict() for p, r in zip(policies, rates, strict=True)}
    values: dict[str, Any] = {"by_policy": found}
    if len(policies) == 1:
        values["effective_rate"] = rates[0].mean
    write_json(args.json, values)
    return 0


def _report_sweep(
    args: argparse.Namespace, grid: Sequence[SimulationConfig], runs: Sequence[dict[str, Any]]
) -> int:
    cells: dict[tuple[str, float | None], list[float]] = {}
    for config, values in zip(grid, runs, strict=True):
        cells.setdefault((config.policy, config.rate), []).append(100 * values["slo_attainment"])
    rates = list(dict.fromkeys(config.rate for config in grid))
    policies = list(dict.fromkeys(config.policy for config in grid))
    table = Table(title="SLO attainment (%)", box=None, title_justify="left", title_style="bold")
    table.add_column("requests/s")
    for rate in rates:
        table.add_column("as recorded" if rate is None else f"{rate:g}", justify="right")
    for policy in policies:
        texts = []
        for rate in rates:
            cell = cells[policy, rate]
            spread = f" ± {np.std(cell, ddof=1):.1f}" if len(cell) > 1 else ""
            texts.append(f"{np.mean(cell):.1f}{spread}")
        table.add_row(policy, *texts)
    Console(highlight=False, emoji=False).print(table)
    if args.png:
        _plot(args.png, args, policies, rates, cells)
    write_json(args.json, {"runs": list(runs)})
    return 0


def _plot(
    path: str,
    args: argparse.Namespace,
    policies: Sequence[str],
    rates: Sequence[float | None],
    cells: dict[tuple[str, float | None], list[float]],
) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandError("--png needs matplotlib: pip install 'apt-jax[demo]'") from None
    x = [rate or 0.0 for rate in rates]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for policy in policies:
        values = [cells[policy, rate] for rate in rates]
        axes.errorbar(
            x,
            [np.mean(v) for v in values],
            [np.std(v) for v in values],
            marker="o",
            label=policy,
            capsize=2,
        )
    axes.set(xlabel="request rate (requests/s)", ylabel="SLO attainment (%)", ylim=(0, 102))
    replicas = f"{args.replicas} replicas by {args.routing_policy}, " if args.replicas > 1 else ""
    axes.set_title(
        f"{args.model} on {args.hardware}, {replicas}{Path(args.trace).name}, cache {args.cache}"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot write {path} ({error}) (--png)") from None

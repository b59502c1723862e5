"""Simulate serving on hardware that is not here: the same scheduler, cache accounting and engine, on a cost model.

One run, or a sweep over rates, policies and seeds, or the effective throughput of policies by bisection.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from apt_jax.config import SLO, SchedulerConfig
from apt_jax.errors import ConfigError
from apt_jax.llm import ProgressBars
from apt_jax.sched import check_policy
from apt_jax.sim.hardware import known_hardware
from apt_jax.sim.routing import ROUTING_POLICIES
from apt_jax.sim.simulate import SimulationConfig, simulate
from apt_jax.sim.sweep import EffectiveRate, Store, check_hardware, find_rates, sweep
from apt_jax.sim.trace import known_traces
from serve import options
from serve.errors import CommandError
from serve.output import print_table, write_json

LEFT_OUT = "requests of the trace that can never fit, left out"
BURST_TTFTS = 10
"""A run whose requests all arrive within so many TTFT objectives is a burst: its rate says nothing of a load that lasts."""


def _list_of(kind: Any) -> Any:
    def convert(text: str) -> list[Any]:
        values = [kind(part) for part in text.split(",") if part]
        if not values:
            raise argparse.ArgumentTypeError(f"{text!r:.40} holds nothing")
        return values

    return convert


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
        help=f"CSV file with prompt_tokens,output_tokens[,arrival_s][,class][,hash_ids], or one of {', '.join(known_traces())}",
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
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="requests that begin alike share cache, by the column hash_ids of the trace; without it where the trace has one",
    )
    group.add_argument(
        "--hash-block-tokens",
        type=options.positive(int),
        metavar="N",
        default=default.hash_block_tokens,
        help="prompt tokens that one of the trace's hash_ids stands for; default 512, as in the traces of Mooncake",
    )
    group.add_argument(
        "--drop-too-long",
        action="store_true",
        help="leave out requests that can never fit instead of refusing the trace; bundled traces always do, and the result says how many",
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
    group.add_argument(
        "--tenants",
        type=options.positive(int),
        metavar="N",
        default=default.tenants,
        help="who sends the requests, for the policy vtc: of N tenants the first sends twice as many as the second, three times as many as the third, ...; default 1",
    )
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--scheduling-policy",
        type=_list_of(str),
        metavar="POLICY[,POLICY...]",
        default=[default.policy],
        help=f"one or several of {options.POLICY_HELP}; default {default.policy}",
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
        "--rho-us",
        type=float,
        metavar="US",
        help="microseconds a cached token that policies charge hidden cache with (rho of Apt-Serve Eq. 6), whatever it really costs: 70 is what the authors' probe most likely gave, 5 the same in float16; without it the true cost, 15.9 for OPT-13B reprojected on an A100",
    )
    group.add_argument(
        "--host-ms",
        type=float,
        metavar="MS",
        default=0.0,
        help="milliseconds of the host for every step, during which the device is idle unless steps overlap; default 0",
    )
    group.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="a step is decided and dispatched while the one before it runs, as `apt-jax serve` does; without it as the described engine does: yes for descriptions of `apt-jax calibrate`, no for the papers' engines",
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
        "--png", metavar="FILE", help="plot attainment against the rate (needs --rates)"
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
        rho_us=args.rho_us,
        host_s=args.host_ms / 1e3,
        overlap=args.overlap,
        enable_prefix_caching=args.enable_prefix_caching,
        hash_block_tokens=args.hash_block_tokens,
        slo=SLO(ttft_s=args.slo_ttft_ms / 1e3, tbt_s=args.slo_tbt_ms / 1e3),
        output_scale=args.output_scale,
        drop_too_long=args.drop_too_long,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_blocks=args.num_blocks_override,
        replicas=args.replicas,
        routing_policy=args.routing_policy,
        tenants=args.tenants,
    )


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse what would be ignored, or counted twice, and a picture that could not be written after all runs."""
    ways = {"--rate": args.rate, "--rates": args.rates, "--find-rate": args.find_rate}
    given = [flag for flag, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: leave one out")
    for flag, values in (("--scheduling-policy", args.scheduling_policy), ("--rates", args.rates)):
        twice = [value for value in values or () if values.count(value) > 1]
        if twice:
            raise ConfigError(f"{twice[0]} is there twice: name it once ({flag})")
    if args.png and not args.rates:
        raise ConfigError("--png plots attainment against the rate: give --rates R1,R2,...")
    if args.png and not Path(args.png).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {args.png} (no such directory) (--png)")


def run(args: argparse.Namespace) -> int:
    _check_flags(args)
    policies: Sequence[str] = args.scheduling_policy
    for policy in policies:
        check_policy(policy)
    base = config_of(args)
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

    config, replicas, bound = values["config"], values["replicas"], values["slo_attainment_bound"]
    where = f"{config['model']} on {config['hardware']}"
    if len(replicas) > 1:
        where += f", {len(replicas)} replicas by {config['routing_policy']}"
    print_table(
        f"{config['policy']}, {config['cache']} cache: {where}, {config['trace']}",
        [
            ("SLO attainment (%)", f"{100 * values['slo_attainment']:.1f}"),
            *([("of which no policy can exceed (%)", f"{100 * bound:.1f}")] if bound is not None and bound < 1 else []),
            ("TTFT, TBT attainment (%)", f"{100 * values['ttft_attainment']:.1f}, {100 * values['tbt_attainment']:.1f}"),
            ("TTFT p50 / p90 / p99 (s)", span("ttft_s")),
            ("P99 TBT p50 / p90 / p99 (s)", span("tbt_s")),
            ("output tokens/s", f"{values['tokens_per_s']:.1f}"),
            ("goodput (requests/s)", f"{values['goodput']:.2f}"),
            ("preemptions, recomputed tokens", f"{values['preemptions']}, {values['recomputed_tokens']}"),
            *([("iterations left to fcfs, as the policy failed", str(values["fallback_iterations"]))] if values["fallback_iterations"] else []),
            *([(LEFT_OUT, f"{values['num_left_out']:,}")] if values["num_left_out"] else []),
            *([("prompt tokens found cached (%)", f"{100 * values['prefix_hit_fraction']:.1f}")] if values["prefix_hit_fraction"] else []),
            ("tokens decoded from hidden cache (%)", f"{100 * values['hidden_token_fraction']:.1f}"),
            ("iterations", f"{values['iterations']} {values['iterations_by_type']}"),
            *([("requests by replica", ", ".join(str(r["num_sent"]) for r in replicas))] if len(replicas) > 1 else []),
            *[(f"tenant {i}: requests, attainment (%), tokens", f"{t['num_sent']}, {100 * t['slo_attainment']:.1f}, {t['output_tokens']}") for i, t in enumerate(values["tenants"])],
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
    console = Console(highlight=False, emoji=False)
    for policy, rate in zip(policies, rates, strict=True):
        lasts_s = args.num_requests / rate.mean if rate.mean else math.inf
        if lasts_s < BURST_TTFTS * args.slo_ttft_ms / 1e3:
            console.print(f"{policy}: all {args.num_requests:,} requests arrive within {lasts_s:.2g} s, a single burst; more --num-requests tell what rate lasts", markup=False)  # fmt: skip
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
    console = Console(highlight=False, emoji=False)
    console.print(table)
    for policy in policies:
        ours = [r for c, r in zip(grid, runs, strict=True) if c.policy == policy]
        left = sum(r.get("fallback_iterations", 0) for r in ours)
        if left:
            total = sum(r["iterations"] for r in ours)
            console.print(f"{policy} failed in {left:,} of {total:,} iterations, which fcfs scheduled", markup=False)  # fmt: skip
    left_out = max(r.get("num_left_out", 0) for r in runs)
    if left_out:
        console.print(f"{LEFT_OUT}: {left_out:,}", markup=False)
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

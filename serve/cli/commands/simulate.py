"""Simulate serving on other hardware: the real scheduler, cache accounting and engine run on a cost model.

Simulates one run or a sweep over rates, policies and seeds, or finds the effective throughput of policies by bisection.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from apt_jax.config import SLO, SchedulerConfig
from apt_jax.core.kinds import HIDDEN
from apt_jax.errors import ConfigError, counted
from apt_jax.frontend.progress import ProgressBars
from apt_jax.sched import all_policies, check_policy
from apt_jax.sim import sessions
from apt_jax.sim.catalog import OBJECTIVES
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import known_hardware, load_hardware
from apt_jax.sim.planning import BURST_TTFTS
from apt_jax.sim.routing import ROUTING_POLICIES
from apt_jax.sim.simulator import simulate
from apt_jax.sim.sweep import EffectiveRate, Store, check_hardware, find_rates, sweep
from apt_jax.sim.trace import known_traces, load_trace
from apt_jax.sim.workload import NUM_SESSIONS
from serve.cli import flags, options
from serve.cli.output import objectives, print_table, say_on_stderr, session_rows, write_json
from serve.errors import CommandError, require_matplotlib

LEFT_OUT = "requests of the trace left out because they can never fit"


def list_of(kind: Any) -> Any:
    """Return an argparse type for values of this kind, separated by commas."""

    def convert(text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise argparse.ArgumentTypeError(f"{text!r:.60} has an empty entry; separate values by single commas")
        return [kind(part) for part in parts]

    return convert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    positive = options.positive

    def add(*names: str, **given: Any) -> None:
        flags.add_options(group, SimulationConfig, names, **given)

    known = ", ".join(f"{model} on {name} x{n}" for model, name, n in known_hardware())
    columns = "prompt_tokens,output_tokens[,arrival_s][,class][,hash_ids]"
    of_sessions = ",".join(sessions.COLUMNS)
    group = parser.add_argument_group("simulated system and workload")
    add("model", "hardware", "num_devices", "trace", "rate", "cv", "num_requests", "num_sessions", "concurrent_sessions",
        "max_think_s", "beside", "seed", "output_scale", "scale_tokens", "max_tokens",
        "enable_prefix_caching", "hash_block_tokens", "drop_too_long", "replicas", "routing_policy", "tenants",
        model={"help": f"model; known: {known}"},
        scale_tokens={"type": options.factor},
        trace={"help": f"CSV file with {columns} (of sessions: {of_sessions} too), or one of {', '.join(known_traces())}"},
        drop_too_long={"action": "store_true"},
        routing_policy={"choices": tuple(ROUTING_POLICIES)})  # fmt: skip
    group = parser.add_argument_group("scheduling")
    default = SimulationConfig().policy
    add("policy", "cache", "hidden_attention", "rho_us", "overlap", "max_num_seqs",
        "max_num_batched_tokens", "max_model_len", "num_blocks", "swap_space", "retention", "session_order",
        policy={"type": list_of(str), "default": [default],
                "help": f"one or several of {options.POLICY_HELP} (default: {default}; of apt-jax serve: {SchedulerConfig().policy})"})  # fmt: skip
    group.add_argument(
        "--host-ms", type=float, metavar="MS", default=0.0,
        help="host time per step in milliseconds, during which the device is idle unless steps overlap",
    )  # fmt: skip
    for name in ("slo_ttft_ms", "slo_tbt_ms", "slo_e2e_ms"):
        end = f" (default: {'none' if name == 'slo_e2e_ms' else '1000'}, or the generated trace's objective)"
        flags.add_request_field(group, name, type=positive(float), default=None, metavar="MS", end=end)
    group = parser.add_argument_group("several runs")
    group.add_argument("--rates", type=list_of(positive(float)), metavar="R1,R2,...", help="one run at each rate")
    group.add_argument(
        "--find-rate", type=options.share, metavar="SHARE",
        help="find the highest rate at which this share of the requests attains its SLO, e.g. 0.9",
    )  # fmt: skip
    group.add_argument(
        "--seeds", type=positive(int), metavar="N",
        help="number of seeds, starting at --seed (default: 1; 3 with --find-rate)",
    )  # fmt: skip
    group.add_argument("--workers", type=positive(int), metavar="N", help="number of processes (default: one per core)")
    group.add_argument("--store", metavar="FILE", help="file that keeps finished runs, so that they are not run again")
    group.add_argument("--png", metavar="FILE", help="PNG plot of SLO attainment against request rate (needs --rates)")
    options.add_json_argument(parser)


def config_of(args: argparse.Namespace) -> SimulationConfig:
    """Return the configuration that the flags describe, with the first policy."""
    fields = flags.read_options(SimulationConfig, args)
    usual = OBJECTIVES.get(args.trace, SLO(ttft_s=1.0, tbt_s=1.0))
    return SimulationConfig(
        **fields | {"policy": args.scheduling_policy[0]},
        host_s=args.host_ms / 1e3,
        slo=SLO(
            ttft_s=usual.ttft_s if args.slo_ttft_ms is None else args.slo_ttft_ms / 1e3,
            tbt_s=usual.tbt_s if args.slo_tbt_ms is None else args.slo_tbt_ms / 1e3,
            e2e_s=usual.e2e_s if args.slo_e2e_ms is None else args.slo_e2e_ms / 1e3,
        ),
    )


def _check_flags(args: argparse.Namespace) -> None:
    """Reject arguments that contradict each other or are repeated, and a plot that could not be written."""
    ways = {"--rate": args.rate, "--rates": args.rates, "--find-rate": args.find_rate}
    given = [flag for flag, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} cannot be combined: give only one of them")
    for flag, values in (("--scheduling-policy", args.scheduling_policy), ("--rates", args.rates)):
        twice = [value for value in values or () if values.count(value) > 1]
        if twice:
            raise ConfigError(f"{twice[0]} is given twice: give it once ({flag})")
    if args.png and not args.rates:
        raise ConfigError("--png plots attainment against the rate: give --rates R1,R2,...")
    if args.png and not os.path.isdir(Path(args.png).absolute().parent):
        raise ConfigError(f"cannot write {args.png} (no such directory) (--png)")
    if args.png:
        require_matplotlib("--png")


def _unit(of_sessions: bool) -> str:
    """Return the unit of rates of a trace."""
    return "sessions/s" if of_sessions else "requests/s"


def _terminate(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Make SIGTERM end this process like an exception, so that it ends its workers first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(args: argparse.Namespace) -> int:
    with _ending_on_sigterm():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    _check_flags(args)
    policies: Sequence[str] = args.scheduling_policy
    for policy in policies:
        check_policy(policy)
    base = config_of(args)
    num_seeds = args.seeds or (3 if args.find_rate is not None else 1)
    seeds = range(args.seed, args.seed + num_seeds)
    several = args.rates or args.find_rate is not None or num_seeds > 1 or len(policies) > 1
    check_hardware([base])
    _hint(base, policies)
    bars = ProgressBars(say=say_on_stderr)
    try:
        if not several:
            result = simulate(base, progress=lambda done, total: bars("simulating", done, total))
            values = result.as_dict()
        else:
            store = Store(Path(args.store) if args.store else None)
            kept = {
                "store": store,
                "workers": args.workers,
                "progress": lambda done, total: bars("sweeping", done, total),
            }
            configs = [dataclasses.replace(base, policy=policy) for policy in policies]
            if args.find_rate is not None:
                rates = find_rates(configs, target=args.find_rate, seeds=seeds, **kept)
                of_sessions = load_trace(base.trace).calls is not None
                return _report_rates(args, _simulated(base, of_sessions, num_seeds), of_sessions, policies, rates)
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
        _report_one(base, values)
        write_json(args.json, values)
        return 0
    return _report_sweep(args, _simulated(base, "sessions" in runs[0], num_seeds), grid, runs)


def _hint(config: SimulationConfig, policies: Sequence[str]) -> None:
    """Say on stderr which policies assume another cost of the hidden cache than the simulated one."""
    hardware = load_hardware(config.model, config.hardware, config.num_devices)
    hidden = hardware.kinds(config.cache, config.hidden_attention)[HIDDEN]
    if not hidden.offered or hidden.reprojected:
        return
    makers = all_policies()
    for policy in policies:
        name = policy.partition("?")[0]
        if name in makers and makers[name].assumes_reprojection:
            say_on_stderr(
                f"apt-jax simulate: {name} assumes that hidden caches are reprojected, as in its paper: use --hidden-attention reproject"
            )


def _simulated(config: SimulationConfig, of_sessions: bool, num_seeds: int = 1) -> str:
    """Return the title of tables: what is simulated, apart from policies and rates."""
    num = (
        counted(config.num_sessions or NUM_SESSIONS, "session")
        if of_sessions
        else counted(config.num_requests, "request")
    )
    devices = f" x{config.num_devices}" if (config.num_devices or 1) > 1 else ""
    parts = [
        f"{config.model} on {config.hardware}{devices}",
        *([f"{config.replicas} replicas by {config.routing_policy}"] if config.replicas > 1 else []),
        Path(config.trace).name,
        num,
        *([f"{num_seeds} seeds"] if num_seeds > 1 else []),
        f"{config.cache} cache",
        objectives(config.slo),
    ]
    return ", ".join(parts)


def _report_one(config: SimulationConfig, values: dict[str, Any]) -> None:
    def span(name: str, values: dict[str, Any] = values) -> str:
        p = values[name]
        return " / ".join("-" if p[q] is None else f"{p[q]:.3f}" for q in ("p50", "p90", "p99"))

    replicas = values["replicas"]
    bound, strict = values["slo_attainment_bound"], values["strict_attainment_bound"]
    has_e2e = math.isfinite(config.slo.e2e_s)
    sources = values["prompt_tokens_by_source"]
    print_table(
        f"{config.policy}: {_simulated(config, 'sessions' in values)}",
        [
            ("SLO attainment (%)", f"{100 * values['slo_attainment']:.1f}"),
            *([("upper bound for any policy (%)", f"{100 * bound:.1f}")] if bound is not None and bound < 1 else []),
            ("TTFT, TBT attainment (%)", f"{100 * values['ttft_attainment']:.1f}, {100 * values['tbt_attainment']:.1f}"),
            *([("end-to-end attainment (%)", f"{100 * values['e2e_attainment']:.1f}")] if has_e2e else []),
            ("SLO attainment, every gap in time (%)", f"{100 * values['strict_attainment']:.1f}"),
            *([("upper bound for any policy, every gap (%)", f"{100 * strict:.1f}")] if strict is not None and strict < 1 else []),
            ("TTFT p50 / p90 / p99 (s)", span("ttft_s")),
            ("P99 TBT p50 / p90 / p99 (s)", span("tbt_s")),
            ("longest gap p50 / p90 / p99 (s)", span("longest_gap_s")),
            *([("end to end p50 / p90 / p99 (s)", span("e2e_s"))] if has_e2e else []),
            ("output tokens/s", f"{values['tokens_per_s']:.1f}"),
            ("goodput (requests/s)", f"{values['goodput']:.2f}"),
            ("preemptions, recomputed tokens", f"{values['preemptions']}, {values['recomputed_tokens']}"),
            *([("recomputed tokens by cause", ", ".join(f"{c.replace('_', ' ')} {n}" for c, n in values["recomputed_by_cause"].items() if n))] if values["recomputed_tokens"] else []),
            *([("iterations scheduled by fcfs because the policy failed", str(values["fallback_iterations"]))] if values["fallback_iterations"] else []),
            *([(LEFT_OUT, f"{values['num_left_out']:,}")] if values["num_left_out"] else []),
            *([("prompt tokens found cached (%)", f"{100 * values['prefix_hit_fraction']:.1f}")] if values["prefix_hit_fraction"] else []),
            *([("prompt tokens by source (%)", ", ".join(f"{source} {100 * n / sum(sources.values()):.1f}" for source, n in sources.items() if n))] if sources["new"] else []),
            ("tokens decoded from hidden cache (%)", f"{100 * values['hidden_token_fraction']:.1f}"),
            ("iterations", f"{values['iterations']:,}: {', '.join(f'{kind} {count:,}' for kind, count in values['iterations_by_type'].items())}"),
            *([("requests by replica", ", ".join(str(r["num_sent"]) for r in replicas))] if len(replicas) > 1 else []),
            *[(f"tenant {i}: requests, attainment (%), tokens", f"{t['num_sent']}, {100 * t['slo_attainment']:.1f}, {t['output_tokens']}") for i, t in enumerate(values["tenants"])],
            *[(f"{name}: requests, attainment (%), tokens/s", f"{one['num_sent']}, {100 * one['slo_attainment']:.1f}, {one['tokens_per_s']:.1f}") for name, one in values["by_class"].items()],
            *[(f"{name}: TTFT p50 / p90 / p99 (s)", span("ttft_s", one)) for name, one in values["by_class"].items()],
            *(session_rows(values["sessions"]) if "sessions" in values else []),
            ("scheduling call p50, p99 (ms)", "{p50:.3f}, {p99:.3f}".format(**values["schedule_ms"])),
            ("simulated time, run time (s)", f"{values['duration_s']:.1f}, {values['sim_wall_s']:.1f}"),
        ],
    )  # fmt: skip


def _report_rates(
    args: argparse.Namespace, simulated: str, of_sessions: bool, policies: Sequence[str], rates: Sequence[EffectiveRate]
) -> int:
    console = Console(highlight=False, emoji=False)
    console.print(simulated, markup=False, soft_wrap=True)
    unit = _unit(of_sessions)
    rows = [(p, f"{r.mean:.2f} ± {r.std:.2f} {unit}") for p, r in zip(policies, rates, strict=True)]
    print_table(f"effective throughput at {100 * args.find_rate:g} % attainment", rows)
    slo = config_of(args).slo
    # Without a TTFT objective the end-to-end objective takes its place.
    objective_s = slo.ttft_s if math.isfinite(slo.ttft_s) else slo.e2e_s
    for policy, rate in zip(policies, rates, strict=True):
        lasts_s = args.num_requests / rate.mean if rate.mean else math.inf
        if not of_sessions and lasts_s < BURST_TTFTS * objective_s:
            console.print(
                f"{policy}: all {args.num_requests:,} requests arrive within {lasts_s:.2g} s, in a single burst; raise --num-requests to find a rate that can be sustained",
                markup=False,
            )
    found = {p: r.as_dict() for p, r in zip(policies, rates, strict=True)}
    values: dict[str, Any] = {"by_policy": found}
    if len(policies) == 1:
        values["effective_rate"] = rates[0].mean
    write_json(args.json, values)
    return 0


def _report_sweep(
    args: argparse.Namespace, simulated: str, grid: Sequence[SimulationConfig], runs: Sequence[dict[str, Any]]
) -> int:
    cells: dict[tuple[str, float | None], list[float]] = {}
    strict: dict[tuple[str, float | None], list[float]] = {}
    for config, values in zip(grid, runs, strict=True):
        cells.setdefault((config.policy, config.rate), []).append(100 * values["slo_attainment"])
        if "strict_attainment" in values:  # absent in runs stored by earlier versions
            strict.setdefault((config.policy, config.rate), []).append(100 * values["strict_attainment"])
    rates = list(dict.fromkeys(config.rate for config in grid))
    policies = list(dict.fromkeys(config.policy for config in grid))
    console = Console(highlight=False, emoji=False)
    console.print(simulated, markup=False, soft_wrap=True)
    unit = _unit("sessions" in runs[0])
    _print_rates(console, "SLO attainment (%)", unit, policies, rates, cells)
    if strict:
        _print_rates(console, "SLO attainment, every gap in time (%)", unit, policies, rates, strict)
    for policy in policies:
        ours = [r for c, r in zip(grid, runs, strict=True) if c.policy == policy]
        left = sum(r.get("fallback_iterations", 0) for r in ours)
        if left:
            total = sum(r["iterations"] for r in ours)
            console.print(
                f"{policy} failed in {left:,} of {total:,} iterations, which fcfs scheduled instead", markup=False
            )
    left_out = max(r.get("num_left_out", 0) for r in runs)
    if left_out:
        console.print(f"{LEFT_OUT}: {left_out:,}", markup=False)
    if args.png:
        _plot(args.png, simulated, unit, policies, rates, cells)
    write_json(args.json, {"runs": list(runs)})
    return 0


def _print_rates(
    console: Console,
    title: str,
    unit: str,
    policies: Sequence[str],
    rates: Sequence[float | None],
    cells: dict[tuple[str, float | None], list[float]],
) -> None:
    """Print a table of means and standard deviations over seeds, with a row per policy and a column per rate."""
    table = Table(box=None)
    table.add_column(unit)
    for rate in rates:
        table.add_column("as recorded" if rate is None else f"{rate:g}", justify="right")
    for policy in policies:
        texts = []
        for rate in rates:
            cell = cells.get((policy, rate), [])
            spread = f" ± {np.std(cell, ddof=1):.1f}" if len(cell) > 1 else ""
            texts.append(f"{np.mean(cell):.1f}{spread}" if cell else "-")
        table.add_row(policy, *texts)
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)


def _plot(
    path: str,
    title: str,
    unit: str,
    policies: Sequence[str],
    rates: Sequence[float | None],
    cells: dict[tuple[str, float | None], list[float]],
) -> None:
    from matplotlib.figure import Figure

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
    axes.set(xlabel=f"rate ({unit})", ylabel="SLO attainment (%)", ylim=(0, 102))
    axes.set_title(title, fontsize="small", wrap=True)
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot write {path} ({error}) (--png)") from None

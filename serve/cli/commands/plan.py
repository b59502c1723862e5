"""Find how many devices keep latency objectives under a load, by simulation: the smallest number of each kind, the
settings, the cost in device hours, or what makes it impossible. With the usual sizes a question takes one to three
minutes on one core, with contexts of 100,000 tokens longer.
"""

import argparse
import dataclasses
import itertools
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from apt_jax.config import SLO, SchedulerConfig
from apt_jax.errors import ConfigError, counted
from apt_jax.options import options_of
from apt_jax.sched import check_policy
from apt_jax.sim import planning
from apt_jax.sim.catalog import OBJECTIVES
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import known_hardware
from apt_jax.sim.host_link import block_bytes
from apt_jax.sim.planning import Answer, Setting, Trial
from apt_jax.sim.routing import ROUTING_POLICIES
from apt_jax.sim.simulator import step_limits
from apt_jax.sim.trace import Trace, known_traces, load_trace
from serve.cli import flags, options
from serve.cli.commands.simulate import list_of
from serve.cli.output import objectives, print_table, say_on_stderr, write_json
from serve.errors import CommandError, require_matplotlib

_NO_OBJECTIVE_MS = 1e9
_GATEWAY = {"session": "cache_aware", "round_robin": "round_robin", "least_load": "least_load", "expected_slack": "least_load"}  # fmt: skip
"""Policy of the gateway that is closest to each of the simulator's."""


def parse_slo(text: str) -> SLO:
    """Parse ``ttft:MS,tbt:MS,e2e:MS``, each at most once; an argparse type."""
    given: dict[str, float] = {}
    for part in text.split(","):
        name, colon, value = part.strip().partition(":")
        if name not in ("ttft", "tbt", "e2e") or not colon or f"{name}_s" in given:
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r:.40} must be ttft:MS, tbt:MS or e2e:MS, each once, as in ttft:1000,tbt:100"
            )
        given[f"{name}_s"] = options.positive(float)(value) / 1e3
    return SLO(**given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    positive = options.positive

    def add(*names: str, **given: Any) -> None:
        flags.add_options(group, SimulationConfig, names, **given)

    known = ", ".join(sorted({f"{model} on {name}" for model, name, _ in known_hardware()}))
    group = parser.add_argument_group("question")
    add("model", model={"help": f"model; known: {known}", "required": True, "default": None})
    group.add_argument(
        "--hardware", type=list_of(str), required=True, metavar="NAME[,NAME...]",
        help="devices to choose from: names or their beginnings, as in a100,h100, or description files (.json)",
    )  # fmt: skip
    flags.add_field(
        group, SimulationConfig, "trace", "--workload", "--trace", dest="trace", required=True, default=None,
        help=f"file of a trace, as for apt-jax simulate, or one of {', '.join(known_traces())}",
    )  # fmt: skip
    group.add_argument(
        "--slo", type=parse_slo, metavar="ttft:MS,tbt:MS,e2e:MS",
        help="objectives of each request, in milliseconds; those left out are none (default: the workload's)",
    )  # fmt: skip
    group.add_argument(
        "--target-attainment", type=options.share, metavar="SHARE", default=0.9,
        help="share of the requests that must attain their objectives",
    )  # fmt: skip
    add("rate", "cv", "concurrent_sessions", "max_think_s", "output_scale", "scale_tokens", "max_tokens",
        "hash_block_tokens", "drop_too_long",
        rate={"help": "requests per second, or sessions per second of a workload of sessions (default: recorded arrivals)"},
        scale_tokens={"type": options.factor}, drop_too_long={"action": "store_true"})  # fmt: skip
    group = parser.add_argument_group("choice")
    each = "one or several, in order of preference: the first is chosen unless another needs fewer devices"
    group.add_argument(
        "--scheduling-policy", type=list_of(str), metavar="POLICY[,POLICY...]",
        help=f"{each} (default: {SchedulerConfig().policy})",
    )  # fmt: skip
    group.add_argument(
        "--retention", type=list_of(str), metavar="POLICY[,POLICY...]",
        help="which cached prefixes stay when blocks are needed; one or several (default: lru; of sessions lru, then knapsack with the order hrrn and host memory)",
    )  # fmt: skip
    group.add_argument(
        "--session-order", type=list_of(str), metavar="ORDER[,ORDER...]",
        help="order of requests, as in apt-jax serve; one or several (default: see --retention)",
    )  # fmt: skip
    group.add_argument(
        "--swap-space", type=list_of(options.not_negative), metavar="GIB[,GIB...]",
        help=f"host memory per replica in GiB; one or several (default: 0, and {planning.HOST_GIB:g} where --retention says)",
    )  # fmt: skip
    add("num_devices", "cache", "hidden_attention", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
        "num_blocks", "routing_policy",
        num_devices={"help": "number of devices per replica (default: every number that has a description)"},
        routing_policy={"choices": tuple(ROUTING_POLICIES), "default": None,
                        "help": "policy that chooses the replica of a request (default: session for sessions, else round_robin)"})  # fmt: skip
    group.add_argument(
        "--max-devices", type=positive(int), metavar="N", default=64, help="largest number of devices to consider"
    )
    group = parser.add_argument_group("precision")
    add("num_requests", "num_sessions", "seed",
        num_requests={"default": None, "help": f"number of requests per run (default: {planning.NUM_REQUESTS}, or more at high rates)"},
        num_sessions={"help": f"number of sessions per run (default: about {planning.NUM_CALLS} calls, at least 4 sessions)"})  # fmt: skip
    group.add_argument(
        "--seeds", type=positive(int), metavar="N", default=3, help="number of seeds, starting at --seed"
    )
    group.add_argument("--png", metavar="FILE", help="PNG plot of SLO attainment against the number of devices")
    options.add_json_argument(parser)


def _base(args: argparse.Namespace, trace: Trace) -> SimulationConfig:
    """Return the configuration of the question; the plan replaces the fields that it chooses."""
    slo = args.slo or OBJECTIVES.get(args.trace)
    if slo is None:
        raise ConfigError(
            f"workload {args.trace:.80} has no objectives; give them as in --slo ttft:1000,tbt:100 (--slo)"
        )
    if not any(map(math.isfinite, (slo.ttft_s, slo.tbt_s, slo.e2e_s))):
        raise ConfigError("give at least one objective (--slo)")
    of_sessions = trace.calls is not None
    if of_sessions and args.num_requests:
        raise ConfigError(f"workload {args.trace:.80} has sessions; give --num-sessions instead (--num-requests)")
    if args.rate is not None and args.concurrent_sessions is not None:
        raise ConfigError("--rate and --concurrent-sessions cannot be combined: give only one of them")
    if args.rate is None and args.concurrent_sessions is None and (of_sessions or trace.arrival_s is None):
        ways = "--rate or --concurrent-sessions" if of_sessions else "--rate"
        raise ConfigError(f"workload {args.trace:.80} has no arrivals; say how many there are ({ways})")
    lists = ("hardware", "policy", "retention", "session_order", "swap_space")
    fields: dict[str, Any] = {n: v for n, v in flags.read_options(SimulationConfig, args).items() if n not in lists}
    if not args.num_requests:
        fields["num_requests"] = planning.NUM_REQUESTS
    fields["routing_policy"] = args.routing_policy or ("session" if of_sessions else "round_robin")
    config = SimulationConfig(**fields, slo=slo)
    return config if args.num_sessions or args.num_requests else planning.sized(config, trace)


def _settings(args: argparse.Namespace) -> list[Setting] | None:
    """Return the settings that the flags list; None: the usual ones."""
    lists = (args.scheduling_policy, args.retention, args.session_order, args.swap_space)
    if not any(lists):
        return None
    usual = Setting(policy=SchedulerConfig().policy)
    values: list[list[Any]] = [
        given or [default] for given, default in zip(lists, dataclasses.astuple(usual), strict=True)
    ]
    settings = [Setting(policy=p, retention=r, session_order=o, swap_space=s) for p, r, o, s in itertools.product(*values)]  # fmt: skip
    for setting in settings:
        check_policy(setting.policy)
        SimulationConfig(**dataclasses.asdict(setting))  # a wrong name fails first
    return settings


def run(args: argparse.Namespace) -> int:
    if args.png and not os.path.isdir(Path(args.png).absolute().parent):
        raise ConfigError(f"cannot write {args.png} (no such directory) (--png)")
    if args.png:
        require_matplotlib("--png")
    for name in args.hardware:
        planning.hardware_named(args.model, name)
    trace = load_trace(args.trace)
    base, settings = _base(args, trace), _settings(args)
    seeds = range(args.seed, args.seed + args.seeds)
    _hint(base, trace)
    bar = tqdm(total=1.0, disable=None, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}", leave=False)
    said = ""

    def progress(share: float, what: str) -> None:
        nonlocal said
        if bar.disable and what != said:
            say_on_stderr(f"apt-jax plan: {what}")
        said = what
        bar.set_description_str(what, refresh=False)
        bar.update(max(share - bar.n, 0.0))

    try:
        answers = planning.plan(
            base, args.hardware, settings, target=args.target_attainment, seeds=seeds, max_devices=args.max_devices,
            progress=progress,
        )  # fmt: skip
    finally:
        bar.close()
    _report(args, base, answers, len(seeds))
    if args.png:
        _plot(args.png, _title(args, base, len(seeds)), args.target_attainment, answers)
    values = [{**answer.as_dict(), "commands": _commands(args, answer)} for answer in answers]
    write_json(args.json, {"target": args.target_attainment, "answers": values})
    return 0


def _hint(config: SimulationConfig, trace: Trace) -> None:
    """Say on stderr if a run is too short to reach the load."""
    if config.rate is None:
        return
    if trace.calls is None:
        lasts_s, ttft_s = config.num_requests / config.rate, config.slo.ttft_s
        if lasts_s < planning.BURST_TTFTS * ttft_s < math.inf:
            say_on_stderr(
                f"apt-jax plan: {config.num_requests:,} requests arrive within {lasts_s:.2g} s, in a burst; raise --num-requests"
            )
        return
    think_s = trace.calls.think_s if config.max_think_s is None else trace.calls.think_s.clip(max=config.max_think_s)
    at_once = config.rate * float(think_s.sum()) / trace.calls.num_sessions
    if config.num_sessions is not None and config.num_sessions < 2 * at_once:
        say_on_stderr(
            f"apt-jax plan: at this rate about {at_once:.0f} sessions are open at once, and a run has {config.num_sessions}; give --concurrent-sessions {math.ceil(at_once)}, or raise --num-sessions"
        )


def _title(args: argparse.Namespace, config: SimulationConfig, num_seeds: int) -> str:
    of_sessions = config.num_sessions is not None
    num = counted(config.num_sessions, "session") if config.num_sessions else counted(config.num_requests, "request")
    load = f"{config.concurrent_sessions} sessions at once" if config.concurrent_sessions else "recorded arrivals"
    if config.rate is not None:
        load = f"{config.rate:g} {'sessions' if of_sessions else 'requests'}/s"
    return f"{args.model}, {Path(args.trace).name}, {load}, {objectives(config.slo)}: {100 * args.target_attainment:g} % in time, {counted(num_seeds, 'seed')} of {num}"


def _percent(trial: Trial, *, seed: int = 0) -> str:
    if not trial.is_whole:
        return f"at most {100 * trial.attainments[-1]:.1f} with seed {seed + len(trial.attainments) - 1}"
    width = planning.half_width(trial.attainments)
    return f"{100 * trial.mean:.1f}" + (f" ± {100 * width:.1f}" if len(trial.attainments) > 1 else "")


def _report(args: argparse.Namespace, base: SimulationConfig, answers: Sequence[Answer], num_seeds: int) -> None:
    console = Console(highlight=False, emoji=False)
    console.print(Text(_title(args, base, num_seeds), style="bold"), soft_wrap=True)
    table = Table(box=None)
    for name in ("hardware", "-tp", "replicas", "devices", "in time (%)", "device hours / M tokens"):
        table.add_column(name, justify="left" if name == "hardware" else "right")
    for answer in answers:
        best, cost = answer.best, answer.device_hours_per_million
        cells = ["-"] * 4
        if best is not None:
            cells = [str(best.config.replicas), str(answer.num_devices), _percent(best), f"{cost:.2f}" if cost else "-"]
        table.add_row(Text(answer.hardware.name), str(answer.hardware.num_devices), *cells)
    console.print(table)
    for answer in answers:
        name = f"{answer.hardware.name} x{answer.hardware.num_devices}"
        if answer.best is None:
            console.print(f"{name}: {answer.constraint}", markup=False, soft_wrap=True)
            continue
        config, commands = answer.best.config, _commands(args, answer)
        print_table(
            f"{name}: {counted(answer.num_devices or 0, 'device')}",
            [
                ("policy, retention, order", f"{config.policy}, {config.retention}, {config.session_order}"),
                ("pool per replica", _pool(answer)),
                ("host memory per replica", f"{config.swap_space:g} GiB"),
                ("requests in time (%)", _percent(answer.best)),
                *([("one replica fewer (%)", f"{_percent(answer.fewer, seed=base.seed)}; {answer.fewer.limit}"), *_difference(answer)] if answer.fewer else []),
                ("device hours per day", f"{24 * (answer.num_devices or 0)}"),
                *([("requests left out as too long (%)", f"{100 * answer.share_left_out:.1f}")] if answer.share_left_out else []),
            ],
        )  # fmt: skip
        for command in commands.values():
            console.print(f"  {command}", markup=False, soft_wrap=True)


def _difference(answer: Answer) -> list[tuple[str, str]]:
    """Return the row of the paired difference to one replica fewer, if both have been simulated on every seed."""
    best, fewer = answer.best, answer.fewer
    if best is None or fewer is None or not fewer.is_whole or len(best.attainments) < 2:
        return []
    gains = [a - b for a, b in zip(best.attainments, fewer.attainments, strict=True)]
    mean = sum(gains) / len(gains)
    return [("the last replica adds (points)", f"{100 * mean:.1f} ± {100 * planning.half_width(gains):.1f}")]


def _pool(answer: Answer) -> str:
    hardware, config = answer.hardware, answer.best.config if answer.best else None
    num_blocks = (config.num_blocks if config else None) or hardware.num_blocks
    text = f"{num_blocks // 2 * hardware.block_size:,} tokens"
    try:
        return f"{text}, {num_blocks * block_bytes(hardware) / 2**30:.1f} GiB"
    except ConfigError:  # the size of the model is not known
        return text


def _commands(args: argparse.Namespace, answer: Answer) -> dict[str, str]:
    """Return the command lines of the answer: to simulate it, and to serve it. Empty: there is no answer."""
    if answer.best is None:
        return {}
    config = answer.best.config

    def text(value: Any) -> str:
        return f"{value:.10g}" if isinstance(value, float) else str(value)

    simulated = ["apt-jax", "simulate"]
    for name, (field, made) in options_of(SimulationConfig).items():
        value = getattr(config, name)
        if value == field.default and name not in ("model", "hardware", "trace", "policy", "num_requests"):
            continue
        if name == "num_requests" and config.num_sessions is not None:
            continue
        simulated += [made.flags[-1 if name == "num_devices" else 0]]
        simulated += [] if value is True else [text(value)]
    if not config.drop_too_long and answer.share_left_out:
        simulated.append("--drop-too-long")
    usual = OBJECTIVES.get(config.trace, SLO(ttft_s=1.0, tbt_s=1.0))
    served: list[str] = []
    for name in ("ttft", "tbt", "e2e"):
        objective_s = getattr(config.slo, f"{name}_s")
        if math.isfinite(objective_s):
            simulated += [f"--slo-{name}-ms", text(1e3 * objective_s)]
            served += [f"--default-slo-{name}-ms", text(1e3 * objective_s)]
        elif math.isfinite(getattr(usual, f"{name}_s")):
            simulated += [f"--slo-{name}-ms", f"{_NO_OBJECTIVE_MS:g}"]
    simulated += ["--seeds", str(args.seeds)]
    max_num_seqs, budget = step_limits(config, answer.hardware)
    command = ["apt-jax", "serve", "MODEL"]
    if config.replicas > 1:
        command = ["apt-jax", "launch", "MODEL", "--replicas", str(config.replicas), "--routing-policy", _GATEWAY[config.routing_policy]]  # fmt: skip
    if answer.hardware.num_devices > 1:
        command += ["-tp", str(answer.hardware.num_devices)]
    command += ["--scheduling-policy", config.policy, "--cache", config.cache]
    given = {"--retention": config.retention != "lru" and config.retention, "--swap-space": config.swap_space,
             "--max-model-len": config.max_model_len, "--num-blocks-override": config.num_blocks}  # fmt: skip
    command += [word for flag, value in given.items() if value for word in (flag, text(value))]
    if config.session_order != "arrival":
        command += ["--set", f"session_order={config.session_order}"]
    command += ["--max-num-seqs", str(max_num_seqs), "--max-num-batched-tokens", str(budget), *served]
    return {"simulate": shlex.join(simulated), "serve": shlex.join(command)}


def _plot(path: str, title: str, target: float, answers: Sequence[Answer]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for answer in answers:
        by_size: dict[int, Trial] = {}
        for trial in answer.trials:
            size = trial.config.replicas * answer.hardware.num_devices
            if size not in by_size or trial.mean > by_size[size].mean:
                by_size[size] = trial
        sizes = sorted(by_size)
        if not sizes:
            continue
        axes.errorbar(
            sizes,
            [100 * by_size[n].mean for n in sizes],
            [100 * planning.half_width(by_size[n].attainments) for n in sizes],
            marker="o",
            capsize=2,
            uplims=[not by_size[n].is_whole for n in sizes],
            label=f"{answer.hardware.name} x{answer.hardware.num_devices}",
        )
    axes.axhline(100 * target, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="devices", ylabel="SLO attainment (%)", ylim=(0, 102))
    axes.set_title(title, fontsize="small", wrap=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot write {path} ({error}) (--png)") from None

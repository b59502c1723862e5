"""Agents' sessions as closed loops under each retention policy, measured and simulated: completion time, TTFT by turn.

Sessions are recorded ones if `--trace` names a file, else generated; their first `--max-calls` calls, with prompts and
answers scaled by `--scale-tokens`. Every system gets the same sessions, beginnings and cache, and starts again for each
seed. `--peer` adds another server of OpenAI's completions, such as vLLM's:

    python -m benchmarks.server sessions --peer \\
      'vllm=vllm serve MODEL --port {port} --block-size 16 --num-gpu-blocks-override {blocks} --enable-prompt-tokens-details'

The simulator runs the same on step times that `apt-jax calibrate` measures before, times `--slowdown` where other work
takes the machine from the server while it serves. `--out` writes sessions.csv (a row per
run), turns.csv (TTFT by turn), sessions.json and sessions.png.
"""

import argparse
import csv
import dataclasses
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from apt_jax.config import SLO
from apt_jax.costs.hardware import Hardware
from apt_jax.metrics import RequestRecord
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.sessions import Calls
from apt_jax.sim.simulator import simulate
from apt_jax.sim.trace import Trace, load_trace
from apt_jax.sim.workload import drop_oversized, longest_request, sample_workload
from benchmarks.paper.common import half_width, mean
from benchmarks.server.goodput import run_command, running
from benchmarks.server.report import Run, progress
from benchmarks.server.server_process import Server
from serve.cli.options import factor

RETENTIONS = ("lru", "progress-ttl", "knapsack")
_BLOCK_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", default="agents", help="recorded sessions, or generated ones (default: agents)")
    parser.add_argument("--scale-tokens", type=factor, default=1 / 128, help="factor on lengths (default: 1/128)")
    parser.add_argument("--max-calls", type=int, default=12, metavar="N", help="calls of a session (default: 12)")
    parser.add_argument("--num-sessions", type=int, default=16, metavar="N", help="sessions of a run (default: 16)")
    parser.add_argument("--rate", type=float, default=1.0, metavar="R", help="sessions per second (default: 1)")
    parser.add_argument("--max-think-s", type=float, default=3.0, metavar="S", help="longest think time (default: 3)")
    parser.add_argument(
        "--cache-tokens", type=int, default=6144, metavar="N", help="size of the cache (default: 6,144)"
    )
    parser.add_argument("--retention", nargs="+", default=list(RETENTIONS), help=f"policies (default: {RETENTIONS})")
    parser.add_argument("--policy", default="vllm-v1", help="scheduling policy (default: vllm-v1)")
    parser.add_argument("--order", default="arrival", metavar="ORDER", help="session_order (default: arrival)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="rounds, from --seed on (default: 3)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL|COMMAND", help="another server: its address, or a command with {port} and {blocks} of 16 tokens")  # fmt: skip
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="kept description of apt-jax calibrate (default: it is measured, 30 s)")  # fmt: skip
    parser.add_argument("--slowdown", type=float, default=1.0, metavar="F", help="factor on the simulator's step times (default: 1)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results")


def write_trace(trace: Trace, max_calls: int, path: Path) -> None:
    """Write the first `max_calls` calls of each session, and what these need, as a CSV file."""
    assert trace.calls is not None
    calls = trace.calls
    at = np.arange(calls.session.size) - calls.begins()[calls.session]
    kept = trace.without(at >= max_calls)
    calls = kept.calls
    assert calls is not None
    first = calls.begins()[calls.session]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["session", "subagent", "parent", "shared_blocks", "think_s", "prompt_tokens", "output_tokens"])
        for i in range(kept.num_requests):
            parent = -1 if calls.parent[i] < 0 else calls.parent[i] - first[i]
            chain = calls.chain[i] or ""
            lengths = kept.prompt_tokens[i], kept.output_tokens[i]
            writer.writerow([calls.session[i], chain, parent, calls.shared_blocks[i], calls.think_s[i], *lengths])


def summarized(
    calls: Calls, records: Sequence[RequestRecord], cached: NDArray[np.int64], prompts: NDArray[np.int64]
) -> dict[str, Any]:
    """Figures of a run, measured or simulated.

    Args:
        calls: the sessions.
        records: times of each call.
        cached, prompts: prompt tokens of each call that were found cached, and all.
    """
    took_s = np.array([r.token_times_s[-1] - r.arrival_s if r.completed else np.nan for r in records])
    ttft_s = np.array([np.nan if r.ttft_s is None else r.ttft_s for r in records])
    completion_s = np.bincount(calls.session, took_s, calls.num_sessions)
    turn = np.arange(calls.session.size) - calls.begins()[calls.session]
    later = calls.parent >= 0
    return {
        "completion_mean_s": float(completion_s.mean()),
        "completion_p90_s": float(np.percentile(completion_s, 90)),
        "ttft_first_p50_s": float(np.percentile(ttft_s[~later], 50)),
        "ttft_later_p50_s": float(np.percentile(ttft_s[later], 50)),
        "ttft_later_p90_s": float(np.percentile(ttft_s[later], 90)),
        "computed_tokens": int((prompts - cached).sum()),
        "cached_share": float(cached.sum() / prompts.sum()),
        "by_turn": [float(np.median(ttft_s[turn == t])) for t in range(int(turn.max()) + 1)],
    }


def simulated(config: SimulationConfig, hardware: Hardware, slowdown: float = 1.0) -> tuple[Calls, dict[str, Any]]:
    """The sessions of a run, and what the simulator predicts for them if every step takes `slowdown` times as long."""
    workload = sample_workload(drop_oversized(load_trace(config.trace), hardware, config), config)
    assert workload.calls is not None
    # Completions do not tell who works next.
    calls = dataclasses.replace(workload.calls, works=("",) * workload.calls.session.size)
    steps = hardware.programs or hardware.step_costs(config.hidden_attention)
    found = simulate(
        config,
        hardware=hardware,
        workload=dataclasses.replace(workload, calls=calls),
        step_s=lambda batch: slowdown * steps.step_s(batch.num_tokens, batch.start, batch.kind),
    )
    metrics = [one for one in found.requests if one is not None]
    assert len(metrics) == calls.session.size
    records = [RequestRecord.from_metrics(one, ok=one.finished_s is not None) for one in metrics]
    cached = np.array([one.num_cached_tokens for one in metrics])
    return calls, summarized(calls, records, cached, workload.prompt_tokens.astype(np.int64))


def measured(address: str, calls: Calls, config: SimulationConfig, hardware: Hardware) -> dict[str, Any]:
    """Measure the sessions of a run with `apt-jax bench`; returns their figures.

    Raises:
        RuntimeError: it failed, or a call was not answered.
    """
    with tempfile.TemporaryDirectory() as directory:
        rows, result = Path(directory) / "run.csv", Path(directory) / "run.json"
        command = [
            sys.executable, "-m", "serve.cli", "bench", "--target", address, "--trace", config.trace,
            "--scale-tokens", str(config.scale_tokens), "--num-sessions", str(config.num_sessions),
            "--request-rate", str(config.rate), "--max-think-s", str(config.max_think_s), "--seed", str(config.seed),
            "--max-len", str(longest_request(hardware, config)), "--save-csv", str(rows), "--json", str(result),
        ]  # fmt: skip
        values = run_command(command, result)
        if values["num_completed"] < calls.session.size:
            raise RuntimeError(f"{address}: of {calls.session.size} calls {values['statuses']}")
        with rows.open(newline="") as file:
            by_call = {int(row["index"]): row for row in csv.DictReader(file)}
    records, cached, prompts = [], [], []
    for i in range(calls.session.size):
        row = by_call[i]
        sent_s = float(row["sent_s"])
        times_s = sent_s + np.cumsum([float(row["ttft_ms"]), *map(float, row["gaps_ms"].split())]) / 1e3
        records.append(RequestRecord(arrival_s=sent_s, token_times_s=times_s.tolist(), finished_s=float(times_s[-1])))
        cached.append(int(row["cached_tokens"] or 0))
        prompts.append(int(row["prompt_tokens"]))
    return summarized(calls, records, np.array(cached), np.array(prompts)) | {"warning": values["warning"] or ""}


def _calibrated(args: argparse.Namespace, directory: str) -> Hardware:
    path = args.hardware
    if path is None:
        path = Path(directory) / "here.json"
        command = [
            sys.executable,
            "-m",
            "serve.cli",
            "calibrate",
            args.model,
            "--describe",
            str(path),
            *args.engine_flags,
        ]
        run_command(command, path)
    return load_hardware(json.loads(path.read_text())["model"], str(path))


def _busy_s() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def _own_s() -> float:
    children, own = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    return sum(usage.ru_utime + usage.ru_stime for usage in (children, own))


def run(args: argparse.Namespace) -> Run:
    found = Run("sessions", args)
    args.engine_flags = ["--cache", "kv", *args.engine_flags]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        hardware = _calibrated(args, directory)
        trace = Path(directory) / "sessions.csv"
        write_trace(load_trace(args.trace), args.max_calls, trace)
        num_blocks = 2 * -(-args.cache_tokens // hardware.block_size)
        base = SimulationConfig(
            model=hardware.model, hardware=hardware.name, trace=str(trace), rate=args.rate, cache="kv", slo=SLO(),
            policy=args.policy, num_sessions=args.num_sessions, max_think_s=args.max_think_s, drop_too_long=True,
            scale_tokens=args.scale_tokens, num_blocks=num_blocks, session_order=args.order,
            hash_block_tokens=_BLOCK_TOKENS,
        )  # fmt: skip
        systems = [*args.retention, *args.peer]
        with progress("sessions", args.seeds * len(systems), "run") as reach:
            for seed in range(args.seed, args.seed + args.seeds):
                for system in systems:
                    config = dataclasses.replace(base, seed=seed)
                    if system in args.retention:
                        config = dataclasses.replace(config, retention=system)
                    rows.append(_one(system, config, hardware, args))
                    reach(len(rows))
    found.values = {"runs": rows, "hardware": hardware.name}
    _report(found, rows)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        _write(args.out, rows, str(args.model))
        found.write(args.out / "sessions.json")
    return found


def _one(system: str, config: SimulationConfig, hardware: Hardware, args: argparse.Namespace) -> dict[str, Any]:
    calls, predicted = simulated(config, hardware, args.slowdown)
    name, _, where = system.partition("=")
    values: dict[str, Any]
    facts: dict[str, Any] = {"preemptions": None, "foreign_cores": None}
    if system in args.retention:
        flags = [
            *args.engine_flags, *args.server_flags, "--num-blocks-override", str(config.num_blocks), "--retention", system,
            "--set", f"session_order={config.session_order}", "--scheduling-policy", config.policy,
        ]  # fmt: skip
        with Server(args.model, flags) as server:
            begun_s, before_s = time.monotonic(), _busy_s() - _own_s() - server.cpu_s()
            values = measured(f"http://{server.http}", calls, config, hardware)
            facts["foreign_cores"] = (_busy_s() - _own_s() - server.cpu_s() - before_s) / (time.monotonic() - begun_s)
            facts["preemptions"] = server.stats().num_preemptions
    elif "{port}" in where:
        where = where.replace("{blocks}", str(args.cache_tokens // 16))
        with running(name, where) as address:
            values = measured(address, calls, config, hardware)
    else:
        values = measured(where, calls, config, hardware)
    return {
        "system": name if where else system, "seed": config.seed, "num_calls": int(calls.session.size), **facts,
        "measured": values, "predicted": None if where else predicted,
    }  # fmt: skip


def _report(found: Run, rows: Sequence[dict[str, Any]]) -> None:
    by_system: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_system.setdefault(row["system"], []).append(row)
    for system, runs in by_system.items():
        taken = [row["measured"]["completion_mean_s"] for row in runs]
        line = f"{system}: completion {mean(taken):.2f} ± {half_width(taken):.2f} s"
        line += f", TTFT of later calls {mean([row['measured']['ttft_later_p50_s'] for row in runs]):.3f} s"
        line += f", {mean([100 * row['measured']['cached_share'] for row in runs]):.1f} % cached"
        if runs[0]["predicted"] is not None:
            expected = mean([row["predicted"]["completion_mean_s"] for row in runs])
            error = expected / mean(taken) - 1
            line += f"; predicted {expected:.2f} s ({100 * error:+.0f} %), "
            line += f"{mean([100 * row['predicted']['cached_share'] for row in runs]):.1f} % cached"
        line += f"; others took {max(row['foreign_cores'] or 0.0 for row in runs):.1f} cores"
        found.say(line)
    found.promise("every call is answered", True, f"{sum(row['num_calls'] for row in rows)} calls")


def _write(directory: Path, rows: Sequence[dict[str, Any]], model: str) -> None:
    names = [name for name in rows[0]["measured"] if name not in ("by_turn", "warning")]
    table, turns = [], []
    for row in rows:
        head = {"model": model, "system": row["system"], "seed": row["seed"]}
        expected = row["predicted"] or {}
        line = {**head, "num_calls": row["num_calls"], "foreign_cores": row["foreign_cores"]}
        for name in names:
            line |= {name: row["measured"][name], f"predicted_{name}": expected.get(name)}
        table.append(line)
        for turn, ttft_s in enumerate(row["measured"]["by_turn"]):
            predicted_s = expected["by_turn"][turn] if expected else None
            turns.append({**head, "turn": turn, "ttft_p50_s": ttft_s, "predicted_ttft_p50_s": predicted_s})
    for name, content in (("sessions", table), ("turns", turns)):
        with (directory / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, content[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in content)
    _plot(directory / "sessions.png", rows, model)


def _plot(path: Path, rows: Sequence[dict[str, Any]], model: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    systems = list(dict.fromkeys(row["system"] for row in rows))
    for i, system in enumerate(systems):
        runs = [row for row in rows if row["system"] == system]
        for key, shift, style in (("measured", -0.2, {}), ("predicted", 0.2, {"alpha": 0.5, "hatch": "//"})):
            of = [row[key] for row in runs if row[key] is not None]
            if not of:
                continue
            seconds = [one["completion_mean_s"] for one in of]
            left.bar(i + shift, mean(seconds), 0.4, yerr=half_width(seconds), color=f"C{i}", capsize=3, **style)
            curve = np.mean([one["by_turn"] for one in of], axis=0)
            line = {"measured": "o-", "predicted": "--"}[key]
            right.plot(curve, line, color=f"C{i}", label=system if key == "measured" else None)
    left.set_xticks(range(len(systems)), systems)
    left.set(ylabel="completion time of a session, mean (s)", ylim=(0, None))
    right.set(xlabel="turn", ylabel="median TTFT (s)", ylim=(0, None))
    right.legend(fontsize=8)
    figure.suptitle(f"{model}; hatched and dashed: simulated", fontsize=10)
    figure.savefig(path, dpi=130)

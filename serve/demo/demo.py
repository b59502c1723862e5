"""`apt-jax demo`: one bursty load, four schedulers, over gRPC, on the bundled model with a small pool.

The same arrivals of real prompts are replayed with first-come-first-served, with Apt-Serve's scheduling (with keys and
values only, and with the hybrid cache), and with apt-plus. Rate and objectives come from the calibration of this
machine, so a slower machine gives the same picture.
"""

import argparse
import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from apt_jax.assets import sonnet_prompts
from apt_jax.config import SLO, CacheConfig, CacheMode, EngineConfig, SchedulerConfig
from apt_jax.errors import counted
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.builder import build_engine, recalibrate
from apt_jax.frontend.components import EngineComponents, with_policy
from serve.cli.options import add_json_argument
from serve.cli.output import starting_bars, write_json
from serve.client import AsyncAptClient
from serve.demo.workload import (
    Answer,
    Arrival,
    Workload,
    derive_workload,
    plot_runs,
    replay,
    summary_of,
)
from serve.grpc_api.server import GrpcServer, ServerConfig
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from serve.protos.words import cache_kind_name

RUNS: tuple[tuple[str, str, CacheMode], ...] = (
    ("fcfs, KV cache", "fcfs", "kv"),
    ("apt, KV cache", "apt", "kv"),
    ("apt, hybrid cache", "apt", "hybrid"),
    ("apt-plus, hybrid", "apt-plus", "hybrid"),
)
"""Runs of the demo: (title, policy, cache mode)."""

MAX_MODEL_LEN = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--model", metavar="MODEL", default="tiny-opt", help="model to serve (default: tiny-opt)")
    parser.add_argument(
        "--num-blocks",
        type=int,
        metavar="BLOCKS",
        default=96,
        help="number of blocks in the pool, kept small so that requests compete for memory (default: 96)",
    )
    parser.add_argument(
        "--duration-s",
        type=float,
        metavar="S",
        default=20.0,
        help="duration of the load in seconds per run (default: 20)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="SEED",
        default=0,
        help="seed of prompts, arrivals and sampling (default: 0)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("demo-results"),
        help="folder for the plot and the numbers (default: demo-results)",
    )
    add_json_argument(parser)


def demo_config(model: str, num_blocks: int) -> EngineConfig:
    """Return a configuration with small steps and a pool of `num_blocks`; the default of 96 blocks holds the keys and
    values of about five requests."""
    return EngineConfig(
        model=model,
        max_model_len=MAX_MODEL_LEN,
        # The few prompts repeat, so prefix caching would make the load lower than calculated.
        cache=CacheConfig(num_blocks_override=num_blocks, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
    )


def make_workload(parts: EngineComponents, duration_s: float, seed: int) -> Workload:
    """Return the demo's arrivals for a calibrated engine."""
    assert parts.cost_model is not None
    assert parts.tokenizer is not None
    prompts = sonnet_prompts(64, seed)
    return derive_workload(
        parts.cost_model,
        prompts,
        [len(parts.tokenizer.encode(p)) for p in prompts],
        num_blocks=parts.executor.num_blocks,
        block_size=parts.executor.block_size,
        hidden_block_size=parts.executor.hidden_block_size,
        max_num_seqs=parts.config.scheduler.max_num_seqs,
        max_num_batched_tokens=parts.config.scheduler.max_num_batched_tokens,
        duration_s=duration_s,
        seed=seed,
    )


class DemoDisplay:
    """Live progress of one run: requests that are open, done, and within their SLOs."""

    def __init__(self, title: str, total: int, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description:18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task(title, total=total, state="")
        self._sent = self._met = self._done = 0
        self.live = Live(self._bar, console=console, refresh_per_second=4)

    def __call__(self, what: str, answer: Answer | None) -> None:
        self._sent += what == "sent"
        if answer is not None:
            self._done += 1
            self._met += answer.record.slo_attained
        state = f"{self._sent - self._done:3d} open, {self._met:3d} within objectives"
        self._bar.update(self._task, completed=self._done, state=state)


async def _run(
    parts: EngineComponents, workload: Workload, board: DemoDisplay
) -> tuple[list[Answer], pb.GetStatsResponse]:
    """Run the workload under one policy: start a gRPC server on an ephemeral port and send all requests to it."""
    engine = AsyncEngine(parts)
    server = GrpcServer(ServerConfig(port=0))
    await server.start()
    await server.serve(engine)
    try:
        async with AsyncAptClient(f"grpc://127.0.0.1:{server.port}") as client:

            async def send(arrival: Arrival, slo: SLO) -> AsyncIterator[tuple[int, str, dict[str, Any]]]:
                stream = client.generate(
                    arrival.prompt,
                    max_tokens=arrival.max_tokens,
                    temperature=0.7,
                    top_p=0.95,
                    seed=arrival.seed,
                    ignore_eos=True,
                    slo_ttft_ms=1e3 * slo.ttft_s,
                    slo_tbt_ms=1e3 * slo.tbt_s,
                )
                async for message in stream:
                    facts: dict[str, Any] = {}
                    if message.HasField("finish"):
                        facts = {
                            "cache_kind": cache_kind_name(message.finish.cache_kind),
                            "num_preemptions": message.finish.num_preemptions,
                        }
                    yield len(message.token_ids), message.text, facts

            with board.live:
                answers = await replay(workload, send, board)
            return answers, await client.stats()
    finally:
        await server.stop(1.0)


def _table(runs: dict[str, list[Answer]]) -> Table:
    table = Table(title="Share of all requests that met their objectives")
    table.add_column("", no_wrap=True)
    for name in ("TTFT", "TBT", "both"):
        table.add_column(name, justify="right", style="bold" if name == "both" else "")
    for name in ("TTFT p50", "p99", "tokens/s", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for title, answers in runs.items():
        s = summary_of(answers)
        hidden = sum(a.cache_kind == "hidden" for a in answers) / len(answers)
        table.add_row(
            title,
            *(f"{share:.0%}" for share in (s.ttft_attainment, s.tbt_attainment, s.slo_attainment)),
            *("-" if t is None else f"{t:.2f} s" for t in (s.ttft_s.p50, s.ttft_s.p99)),
            f"{s.tokens_per_s:.0f}",
            f"{hidden:.0%}",
        )
    return table


def _numbers(
    runs: dict[str, list[Answer]], stats: dict[str, pb.GetStatsResponse], workload: Workload
) -> dict[str, Any]:
    return {
        "rate": workload.rate,
        "num_requests": len(workload.arrivals),
        "slo": {"ttft_s": workload.slo.ttft_s, "tbt_s": workload.slo.tbt_s},
        "kv_capacity": workload.kv_capacity,
        "hybrid_capacity": workload.hybrid_capacity,
        "runs": {
            title: {
                **summary_of(answers).as_dict(),
                "preemptions": sum(a.num_preemptions for a in answers),
                "hidden_fraction": sum(a.cache_kind == "hidden" for a in answers) / len(answers),
                "errors": sum(a.error is not None for a in answers),
                "compilations": stats[title].compilations,
            }
            for title, answers in runs.items()
        },
    }


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns 0 if every request was served, else 1."""
    console = Console()
    started = time.monotonic()
    bars = starting_bars()
    try:
        parts = build_engine(demo_config(args.model, args.num_blocks), calibrate=False, progress=bars)
        # Measured again, not loaded from an earlier start, because the machine may now be faster or busier.
        parts = recalibrate(parts, 8.0, functools.partial(bars, "calibrating"))
    finally:
        bars.close()
    workload = make_workload(parts, args.duration_s, args.seed)
    pool, block = parts.executor.num_blocks, parts.executor.block_size
    pool_inputs = pool * parts.executor.hidden_block_size
    console.print(
        f"[bold]{parts.model_name}[/bold]: ready after {time.monotonic() - started:.0f} s. A pool of {pool} blocks holds {pool // 2 * block} tokens "
        f"as keys and values, {pool_inputs} as hidden cache.\n"
        f"{len(workload.arrivals)} requests at {workload.rate:.1f} per second in bursts; this machine sustains about {workload.kv_capacity:.1f} per second with keys and "
        f"values, {workload.hybrid_capacity:.1f} with hidden cache.\n"
        f"Objectives: first token within {workload.slo.ttft_s:.2f} s, gaps within {workload.slo.tbt_s:.2f} s (P99)."
    )
    runs: dict[str, list[Answer]] = {}
    stats: dict[str, pb.GetStatsResponse] = {}
    for title, policy, mode in RUNS:
        board = DemoDisplay(title, len(workload.arrivals), console)
        runs[title], stats[title] = asyncio.run(_run(with_policy(parts, policy, mode), workload, board))
    console.print(_table(runs))
    compiled = sum(s.compilations for s in stats.values())
    host = ", ".join(f"{s.host_p50_ms:.2f} ms p50, {s.host_p99_ms:.2f} ms p99" for s in list(stats.values())[-1:])
    console.print(f"Programs compiled while serving: {compiled}. Host work per iteration in the last run: {host}.")
    last = runs[RUNS[-1][0]]
    for answer in last[:2]:
        console.print(
            f"\n[bold]{answer.arrival.prompt.strip()}[/bold]\n{answer.text.strip()}",
            highlight=False,
        )
    picture = args.output / "attainment.png"
    plot_runs(runs, workload, picture)
    numbers = _numbers(runs, stats, workload)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(numbers, indent=1))
    write_json(args.json, numbers)
    console.print(
        f"\nPlot: {picture}   numbers: {args.output / 'results.json'}   {time.monotonic() - started:.0f} s in total"
    )
    failed = [a.error for answers in runs.values() for a in answers if a.error]
    if failed:
        console.print(f"{counted(len(failed), 'request')} failed, the first with: {failed[0]}")
    return 1 if failed else 0

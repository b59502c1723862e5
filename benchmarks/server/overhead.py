"""Overhead of the server: the same requests through every API and by the engine alone, 64 concurrent streams.

Timed are `LLM.generate`, `AsyncEngine` in the process of its reader, and each API with its clients in another process.
There are two ways of measuring, because clients and server share the machine:

* apart: the engine or the server has one core to itself, the clients have the others. Wall time is that of the server.
* shared: all use all cores. The CPU time of the server's process per token is the overhead; wall time includes that of
  the clients.

Both report the CPU time per token of the server's event loop too, which does not depend on the load of the machine.
"""

import argparse
import os
import statistics
import time
from typing import Any, NamedTuple

from benchmarks.server.clients import Clients, Load, random_requests
from benchmarks.server.offline import Offline, Speed
from benchmarks.server.protocols import NAMES, LoadRequest
from benchmarks.server.report import Run, progress
from benchmarks.server.server_process import Server

_BARE = ("LLM", "AsyncEngine")


class _Measured(NamedTuple):
    """Measurements of one batch."""

    speed: Speed
    client_s: float = 0.0
    loop_s: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams (default: 64)")
    parser.add_argument(
        "--batches", type=int, default=4, help="batches of as many requests in each repeat (default: 4)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="repeats, of which medians are taken (default: 3)")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens (default: 64)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens (default: 128)")
    parser.add_argument("--vocab-size", type=int, default=4000, help="prompts have token ids below it (default: 4000)")
    parser.add_argument("--ways", nargs="+", choices=("apart", "shared"), default=["apart", "shared"])
    parser.add_argument("--protocols", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--limit", type=float, default=0.1, help="maximum overhead (default: 0.1)")


def run(args: argparse.Namespace) -> Run:
    found = Run("overhead", args)
    count = args.streams * args.batches
    requests = random_requests(
        count, vocab_size=args.vocab_size, prompt_len=(args.prompt_len,) * 2, output_len=(args.output_len,) * 2, seed=args.seed, sampled_share=0.0
    )  # fmt: skip
    found.values["rows"] = []
    for way in args.ways:
        rows = _measure(args, way, requests)
        found.values["rows"] += rows
        bare = rows[0]
        found.say(
            f"{way}: bare engine {bare['tokens_per_s']:.0f} tokens/s, {bare['cpu_us_per_token']:.0f} us of CPU per token"
        )
        for row in rows[1:]:
            text = f"{row['tokens_per_s']:.0f} tokens/s ({row['wall_overhead']:+.1%}), {row['cpu_us_per_token']:.0f} us ({row['cpu_overhead']:+.1%})"
            if row["what"] in _BARE:
                found.say(f"{way}, {row['what']}: {text}")
                continue
            measured = row["wall_overhead"] if way == "apart" else row["cpu_overhead"]
            what = "wall time" if way == "apart" else "CPU time of the server"
            found.promise(
                f"{way}, {row['what']}: {what} per token under {args.limit:+.0%}",
                measured < args.limit,
                f"{text}; event loop {row['loop_us_per_token']:.0f} us ({row['loop_share']:.1%}), clients {row['client_us_per_token']:.0f} us",
            )
    return found


def _measure(args: argparse.Namespace, way: str, requests: list[LoadRequest]) -> list[dict[str, Any]]:
    """Return one row each for the bare engine and the APIs."""
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = (cores[:1], cores[1:]) if way == "apart" and len(cores) > 1 else (cores, cores)
    speeds: dict[str, list[_Measured]] = {name: [] for name in (*_BARE, *args.protocols)}
    flags = ["--max-num-seqs", str(args.streams), *args.engine_flags]
    total = args.repeats * len(speeds)
    with (
        Offline(args.model, flags, cores=ours) as offline,
        Server(args.model, [*flags, *args.server_flags], cores=ours) as server,
        progress(f"overhead, {way}", total, "run") as bar,
    ):
        offline.speed(requests[: args.streams])  # warm up both: touch memory, load kernels
        _through(args, server, args.protocols[0], requests[: args.streams], theirs)
        for _ in range(args.repeats):
            for name in speeds:
                if name == "LLM":
                    measured = _Measured(offline.speed(requests))
                elif name == "AsyncEngine":
                    measured = _Measured(offline.async_speed(requests, args.streams))
                else:
                    measured = _through(args, server, name, requests, theirs)
                speeds[name].append(measured)
                bar(sum(map(len, speeds.values())))
    rows = []
    for name, several in speeds.items():
        tokens = several[0].speed.tokens
        assert all(measured.speed.tokens == tokens for measured in several)
        wall_s, cpu_s, client_s, loop_s = (
            statistics.median(values)
            for values in zip(
                *((m.speed.wall_s, m.speed.cpu_s, m.client_s, m.loop_s) for m in several),
                strict=True,
            )
        )
        rows.append({
            "way": way, "what": name, "tokens": tokens, "tokens_per_s": tokens / wall_s, "cpu_us_per_token": 1e6 * cpu_s / tokens,
            "loop_us_per_token": 1e6 * loop_s / tokens, "client_us_per_token": 1e6 * client_s / tokens,
            "wall_s": [m.speed.wall_s for m in several], "cpu_s": [m.speed.cpu_s for m in several],
        })  # fmt: skip
    bare = rows[0]
    for row in rows:
        row["wall_overhead"] = bare["tokens_per_s"] / row["tokens_per_s"] - 1
        row["loop_share"] = row["loop_us_per_token"] / bare["cpu_us_per_token"]
        row["cpu_overhead"] = row["cpu_us_per_token"] / bare["cpu_us_per_token"] - 1
    return rows


def _through(
    args: argparse.Namespace, server: Server, protocol: str, requests: list[LoadRequest], cores: list[int]
) -> _Measured:
    """Send all requests through one API."""
    load = Load(
        http=server.http, grpc=server.grpc, requests=requests, protocols=(protocol,), streams=args.streams, in_order=True, token_ids=False, cores=cores
    )  # fmt: skip
    cpu_s, loop_s = server.cpu_s(), server.loop_cpu_s()
    with Clients([load]) as clients:
        report = clients.reports()[0]
    cpu_s, loop_s = server.cpu_s() - cpu_s, server.loop_cpu_s() - loop_s
    assert all(record.status == "complete" for record in report.records)
    first_s = min(record.started_s for record in report.records)
    wall_s = max(record.ended_s for record in report.records) - first_s
    # Without token ids HTTP counts pieces, not tokens; every request generates as many tokens as it asked for.
    tokens = sum(request.params["max_tokens"] for request in requests)
    time.sleep(0.2)
    return _Measured(Speed(tokens=tokens, wall_s=wall_s, cpu_s=cpu_s), report.cpu_s, loop_s)

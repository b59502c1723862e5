"""What the edge costs: the same requests through every door and by the engine alone, 64 streams at a time.

Timed are `LLM.generate`, which has no edge at all, `AsyncEngine` in the process of its reader, and each door with its clients in another
process. Two ways, because clients and server share the machine:

* apart: the engine, or the server, has one core alone, the clients have the other. Wall time then is that of the server.
* shared: all have all cores. Here the CPU time of the server's process, a token, says what the edge adds; wall time has the clients' in it.

Both say besides what the thread of the server's event loop takes a token, which does not depend on what else the machine does.
"""

import argparse
import os
import statistics
import time
from typing import Any, NamedTuple

from benchmarks.server.clients import Clients, Load, draw_asks
from benchmarks.server.offline import Offline, Speed
from benchmarks.server.protocols import NAMES, Ask
from benchmarks.server.report import Run, progress
from benchmarks.server.server_process import Server

_BARE = ("LLM", "AsyncEngine")


class _Measured(NamedTuple):
    """One batch."""

    speed: Speed
    client_s: float = 0.0
    loop_s: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=64, help="at a time (default: 64)")
    parser.add_argument("--batches", type=int, default=4, help="of so many requests, a repeat (default: 4)")
    parser.add_argument("--repeats", type=int, default=3, help="medians are taken of them (default: 3)")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens (default: 64)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens (default: 128)")
    parser.add_argument("--vocab-size", type=int, default=4000, help="prompts have token ids below it (default: 4000)")
    parser.add_argument("--ways", nargs="+", choices=("apart", "shared"), default=["apart", "shared"])
    parser.add_argument("--doors", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--limit", type=float, default=0.1, help="of the overhead (default: 0.1)")


def run(args: argparse.Namespace) -> Run:
    found = Run("overhead", args)
    count = args.streams * args.batches
    asks = draw_asks(
        count, vocab_size=args.vocab_size, prompt_len=(args.prompt_len,) * 2, output_len=(args.output_len,) * 2, seed=args.seed, sampled_share=0.0
    )  # fmt: skip
    found.values["rows"] = []
    for way in args.ways:
        rows = _measure(args, way, asks)
        found.values["rows"] += rows
        bare = rows[0]
        found.say(
            f"{way}: bare engine {bare['tokens_per_s']:.0f} tokens/s, {bare['cpu_us_per_token']:.0f} us of CPU a token"
        )
        for row in rows[1:]:
            text = f"{row['tokens_per_s']:.0f} tokens/s ({row['wall_overhead']:+.1%}), {row['cpu_us_per_token']:.0f} us ({row['cpu_overhead']:+.1%})"
            if row["what"] in _BARE:
                found.say(f"{way}, {row['what']}: {text}")
                continue
            measured = row["wall_overhead"] if way == "apart" else row["cpu_overhead"]
            what = "wall time" if way == "apart" else "CPU time of the server"
            found.promise(
                f"{way}, {row['what']}: {what} a token under {args.limit:+.0%}",
                measured < args.limit,
                f"{text}; event loop {row['loop_us_per_token']:.0f} us ({row['loop_share']:.1%}), clients {row['client_us_per_token']:.0f} us",
            )
    return found


def _measure(args: argparse.Namespace, way: str, asks: list[Ask]) -> list[dict[str, Any]]:
    """One row each for the bare engine and the doors."""
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = (cores[:1], cores[1:]) if way == "apart" and len(cores) > 1 else (cores, cores)
    speeds: dict[str, list[_Measured]] = {name: [] for name in (*_BARE, *args.doors)}
    flags = ["--max-num-seqs", str(args.streams), *args.engine_flags]
    total = args.repeats * len(speeds)
    with (
        Offline(args.model, flags, cores=ours) as offline,
        Server(args.model, [*flags, *args.server_flags], cores=ours) as server,
        progress(f"overhead, {way}", total, "run") as bar,
    ):
        offline.speed(asks[: args.streams])  # both are warm: memory is touched, kernels are loaded
        _through(args, server, args.doors[0], asks[: args.streams], theirs)
        for _ in range(args.repeats):
            for name in speeds:
                if name == "LLM":
                    measured = _Measured(offline.speed(asks))
                elif name == "AsyncEngine":
                    measured = _Measured(offline.async_speed(asks, args.streams))
                else:
                    measured = _through(args, server, name, asks, theirs)
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


def _through(args: argparse.Namespace, server: Server, door: str, asks: list[Ask], cores: list[int]) -> _Measured:
    """All requests through one door."""
    load = Load(
        http=server.http, grpc=server.grpc, asks=asks, doors=(door,), streams=args.streams, in_order=True, token_ids=False, cores=cores
    )  # fmt: skip
    cpu_s, loop_s = server.cpu_s(), server.loop_cpu_s()
    with Clients([load]) as clients:
        report = clients.reports()[0]
    cpu_s, loop_s = server.cpu_s() - cpu_s, server.loop_cpu_s() - loop_s
    assert all(record.status == "complete" for record in report.records)
    first_s = min(record.started_s for record in report.records)
    wall_s = max(record.ended_s for record in report.records) - first_s
    # Without ids HTTP tells pieces, not tokens; every request has as many as it asked for.
    tokens = sum(ask.params["max_tokens"] for ask in asks)
    time.sleep(0.2)
    return _Measured(Speed(tokens=tokens, wall_s=wall_s, cpu_s=cpu_s), report.cpu_s, loop_s)

"""Many streams over all APIs for a long time: each equals the offline answer, memory does not grow, nothing leaks.

Half of the requests are greedy, half have a seed; a tenth of the clients leave before the end; the pool is so small
that requests lose their cache and come back. Every delta, token, text and finish reason is compared.
"""

import argparse
import collections
import time
from typing import Any

import numpy as np

from benchmarks.server.clients import Clients, Load, add_request_arguments, build_requests
from benchmarks.server.offline import Offline
from benchmarks.server.report import Run, progress
from benchmarks.server.server_process import Server

_SAMPLE_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=200, help="concurrent streams (default: 200)")
    parser.add_argument("--duration", type=float, default=600.0, metavar="S", help="seconds (default: 600)")
    parser.add_argument(
        "--warm-up", type=float, default=120.0, metavar="S", help="seconds before memory counts (default: 120)"
    )
    parser.add_argument("--requests", type=int, default=300, help="number of different requests (default: 300)")
    parser.add_argument(
        "--leave-share", type=float, default=0.1, help="share of clients that disconnect early (default: 0.1)"
    )
    parser.add_argument(
        "--memory-share",
        type=float,
        default=0.05,
        help="maximum relative change of memory from its median (default: 0.05)",
    )
    add_request_arguments(parser, prompt_len=(16, 160), output_len=(8, 96))
    parser.add_argument("--num-blocks", type=int, default=640, help="blocks of the pool (default: 640)")


def run(args: argparse.Namespace) -> Run:
    found = Run("soak", args)
    requests = build_requests(args, args.requests)
    with Offline(args.model, args.engine_flags) as offline:
        requests, answers = offline.answers(requests)
    found.say(
        f"{len(requests)} of {args.requests} offline answers that do not depend on rounding, {sum(len(a.token_ids) for a in answers)} tokens"
    )
    flags = [*args.engine_flags, *args.server_flags, "--num-blocks-override", str(args.num_blocks)]
    memory: list[tuple[float, float]] = []
    with Server(args.model, flags) as server:
        before = server.stats()
        shares = [args.streams // args.processes + (i < args.streams % args.processes) for i in range(args.processes)]
        loads = [
            Load(
                http=server.http, grpc=server.grpc, requests=requests, answers=answers, streams=share, duration_s=args.duration,
                leave_share=args.leave_share, seed=args.seed + number,
            )
            for number, share in enumerate(shares) if share
        ]  # fmt: skip
        begun_s = time.monotonic()
        with Clients(loads) as clients, progress("soak", args.duration) as bar:
            for _ in clients.running():
                elapsed_s = time.monotonic() - begun_s
                bar(elapsed_s)
                if not memory or elapsed_s - memory[-1][0] >= _SAMPLE_S:
                    memory.append((elapsed_s, server.rss_mib()))
            reports = clients.reports()
        wall_s = time.monotonic() - begun_s
        cpu_s = server.cpu_s()
        after = server.until_idle()
        ready = server.get("/ready")
    records = [record for report in reports for record in report.records]
    statuses = collections.Counter(record.status for record in records)
    problems = collections.Counter(f"{record.protocol}: {record.problem}" for record in records if record.problem)
    tokens = sum(record.num_tokens for record in records)
    found.values |= {
        "requests": len(records),
        "by_protocol": dict(collections.Counter(record.protocol for record in records)),
        "statuses": dict(statuses),
        "problems": dict(problems),
        "tokens": tokens,
        "tokens_per_s": tokens / wall_s,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "kind_switches": dict(after.kind_switches),
        "recomputed_tokens": after.recomputed_tokens,
        "compilations": after.compilations,
        "finished": dict(after.finished),
        "free_blocks": [after.free_blocks, after.total_blocks],
        "server_cpu_s": cpu_s,
        "client_cpu_s": sum(report.cpu_s for report in reports),
        "memory_mib_every_10_s": [round(mib, 2) for _, mib in memory[::5]],
        **_memory(memory, args.warm_up),
    }
    found.promise("no errors", set(statuses) <= {"complete", "left"}, dict(statuses))
    found.promise(
        "every stream equals the offline answer",
        not problems,
        dict(problems) or f"{len(records)} streams, {tokens} tokens",
    )
    deviation = found.values["memory_deviation"]
    found.promise(
        f"memory within {args.memory_share:.0%} after {args.warm_up:g} s",
        deviation <= args.memory_share,
        f"{deviation:.2%} of {found.values['memory_median_mib']:.0f} MiB, {found.values['memory_slope_mib_per_min']:+.2f} MiB a minute",
    )
    left = after.num_waiting + after.num_running + after.num_ending
    found.promise(
        "all blocks free afterwards",
        not left and after.free_blocks == after.total_blocks,
        f"{after.free_blocks} of {after.total_blocks}",
    )
    found.promise(
        "ready afterwards, nothing compiled, no step failed",
        ready == 200 and not after.compilations and not after.step_failures,
        f"{after.num_preemptions} preemptions, {sum(after.kind_switches.values())} switches of kind",
    )
    found.say(
        f"{tokens / wall_s:.0f} tokens/s; server {cpu_s:.0f} s of CPU, clients {found.values['client_cpu_s']:.0f} s"
    )
    return found


def _memory(samples: list[tuple[float, float]], warm_up_s: float) -> dict[str, Any]:
    """How far memory went from its median after warm-up, and its slope."""
    after = np.array([s for s in samples if s[0] >= warm_up_s] or samples[-1:])
    median = float(np.median(after[:, 1]))
    slope = np.polyfit(after[:, 0], after[:, 1], 1)[0] * 60 if len(after) > 2 else 0.0
    return {
        "memory_median_mib": median,
        "memory_deviation": float(np.abs(after[:, 1] - median).max() / median),
        "memory_slope_mib_per_min": float(slope),
    }

"""Many requests over all APIs for a long time: each equals the offline answer, memory does not grow, nothing leaks.

Half of the requests are greedy, half have a seed, some have structured outputs; some clients leave before the end, some
read slowly, some call `/detokenize` and `/tokenize`. The pool is so small that requests lose their cache, come back,
and go from layer inputs to keys and values. Every delta, token, text and finish reason is compared.

After every round of requests all connections close, and the server must be as it was before: no block used, no request
left, no more descriptors and threads than after the first rounds. Memory is measured then.
"""

import argparse
import collections
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.server.clients import Clients, Load, add_request_arguments, build_requests
from benchmarks.server.offline import Offline
from benchmarks.server.report import Run, progress
from benchmarks.server.server_process import Server

_SETTLE_S = 10.0
"""Time for closed connections to be noticed."""
_SOME_THREADS = 2
"""gRPC's pool of threads is not of a fixed size."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=100, help="concurrent streams (default: 100)")
    parser.add_argument(
        "--duration", type=float, default=3600.0, metavar="S", help="no round begins after it, seconds (default: 3600)"
    )
    parser.add_argument("--round-size", type=int, default=500, help="requests between two drains (default: 500)")
    parser.add_argument(
        "--warm-up", type=int, default=2000, metavar="N", help="requests before memory counts (default: 2000)"
    )
    parser.add_argument("--requests", type=int, default=300, help="number of different requests (default: 300)")
    for name, default, what in (
        ("leave", 0.1, "clients that disconnect early"),
        ("slow", 0.05, "clients that read slowly"),
        ("structured", 0.15, "requests with structured outputs"),
        ("tokenize", 0.1, "clients that call /detokenize and /tokenize as well"),
    ):
        parser.add_argument(
            f"--{name}-share", type=float, default=default, help=f"share of {what} (default: {default:g})"
        )
    parser.add_argument(
        "--memory-growth",
        type=float,
        default=1.0,
        metavar="MIB",
        help="maximum growth of memory per 10,000 requests, upper end of the 95%% interval (default: 1)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory over requests (PNG or SVG)")
    add_request_arguments(parser, prompt_len=(8, 128), output_len=(4, 64))
    parser.add_argument(
        "--policy",
        default="apt?convert=true",
        help="scheduling policy of the server (default: apt?convert=true, so that caches are converted)",
    )
    parser.add_argument("--num-blocks", type=int, default=256, help="blocks of the pool (default: 256)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Drain:
    """State of the server after a round."""

    requests: int
    """Since the start."""
    elapsed_s: float
    rss_mib: float
    descriptors: int
    threads: int
    used_blocks: int
    left: int
    """Requests that the engine still has."""


def run(args: argparse.Namespace) -> Run:
    found = Run("soak", args)
    requests = build_requests(args, args.requests, args.structured_share)
    with Offline(args.model, args.engine_flags) as offline:
        requests, answers = offline.answers(requests)
    num_structured = sum("structured_outputs" in request.params for request in requests)
    found.say(
        f"{len(requests)} of {args.requests} offline answers that do not depend on rounding, {num_structured} of them structured, {sum(len(a.token_ids) for a in answers)} tokens"
    )
    flags = [*args.engine_flags, "--scheduling-policy", args.policy, "--num-blocks-override", str(args.num_blocks)]
    flags += args.server_flags
    drains: list[_Drain] = []
    with Server(args.model, flags) as server:
        before = server.stats()
        idle_descriptors = server.num_descriptors()
        processes = min(args.processes, args.streams, args.round_size)
        loads = [
            Load(
                http=server.http, grpc=server.grpc, requests=requests, answers=answers,
                streams=_part(args.streams, processes, i), round_size=_part(args.round_size, processes, i),
                leave_share=args.leave_share, slow_share=args.slow_share, tokenize_share=args.tokenize_share,
                seed=args.seed + i,
            )
            for i in range(processes)
        ]  # fmt: skip
        begun_s = time.monotonic()
        with Clients(loads) as clients, progress("soak", args.duration) as bar:
            ended = False
            clients.begin_round()
            for _ in clients.running(0.05):
                elapsed_s = time.monotonic() - begun_s
                bar(elapsed_s)
                if ended or not clients.drained:
                    continue
                drains.append(_drained(server, clients.num_done, elapsed_s, idle_descriptors))
                ended = elapsed_s >= args.duration
                if ended:
                    clients.end_rounds()
                else:
                    clients.begin_round()
            reports = clients.reports()
        wall_s = time.monotonic() - begun_s
        cpu_s = server.cpu_s()
        after = server.until_idle()
        ready = server.get("/ready")
        log = server.log()
    records = [record for report in reports for record in report.records]
    statuses = collections.Counter(record.status for record in records)
    problems = collections.Counter(f"{record.protocol}: {record.problem}" for record in records if record.problem)
    tokens = sum(record.num_tokens for record in records)
    growth = _growth(drains, args.warm_up)
    found.values |= {
        "requests": len(records),
        "by_protocol": dict(collections.Counter(record.protocol for record in records)),
        "statuses": dict(statuses),
        "problems": dict(problems),
        "tokens": tokens,
        "tokens_per_s": tokens / wall_s,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "conversions": after.num_conversions - before.num_conversions,
        "kind_switches": dict(after.kind_switches),
        "recomputed_tokens": after.recomputed_tokens,
        "compilations": after.compilations,
        "finished": dict(after.finished),
        "server_cpu_s": cpu_s,
        "client_cpu_s": sum(report.cpu_s for report in reports),
        "memory": growth,
        "drains": [dataclasses.astuple(drain) for drain in drains],
        "drain_fields": [field.name for field in dataclasses.fields(_Drain)],
        "server_log": log,
    }
    found.promise("no errors", set(statuses) <= {"complete", "left"}, dict(statuses))
    found.promise(
        "every stream equals the offline answer",
        not problems,
        dict(problems) or f"{len(records)} streams, {tokens} tokens",
    )
    leaks = [drain for drain in drains if drain.used_blocks or drain.left]
    found.promise(
        f"no block used at each drain, every {args.round_size} requests",
        not leaks,
        f"{len(drains)} drains" if not leaks else f"{len(leaks)} of {len(drains)} drains, the first: {leaks[0]}",
    )
    found.promise(
        f"memory grows by at most {args.memory_growth:g} MiB per 10,000 requests",
        growth["upper_mib_per_10k"] <= args.memory_growth,
        f"{growth['mib_per_10k']:+.2f} (95 %: at most {growth['upper_mib_per_10k']:+.2f}) in {growth['requests']} requests after the first {args.warm_up}, {drains[-1].rss_mib:.0f} MiB at the end",
    )
    for name, margin in (("descriptors", 0), ("threads", _SOME_THREADS)):
        early, late = _early_and_late(drains, args.warm_up, name)
        found.promise(f"{name} do not grow", late <= early + margin, f"{early} in the first rounds, {late} later")
    found.promise(
        "requests lost their cache",
        found.values["preemptions"] > 0,
        f"{found.values['preemptions']} preemptions, {found.values['conversions']} conversions, {sum(after.kind_switches.values())} switches of kind",
    )
    found.promise(
        "ready afterwards, nothing compiled, no step failed",
        ready == 200 and not after.compilations and not after.step_failures,
        f"/ready {ready}, {after.compilations} compilations, {after.step_failures} failures",
    )
    found.say(
        f"{len(records) / wall_s:.1f} requests/s, {tokens / wall_s:.0f} tokens/s; server {cpu_s:.0f} s of CPU, clients {found.values['client_cpu_s']:.0f} s"
    )
    if args.plot is not None:
        _plot(args.plot, drains, args.warm_up, growth)
    return found


def _part(total: int, parts: int, number: int) -> int:
    return total // parts + (number < total % parts)


def _drained(server: Server, requests: int, elapsed_s: float, idle_descriptors: int) -> _Drain:
    """Measure the server, once it has noticed that all connections are closed."""
    stats = server.until_idle()
    until_s = time.monotonic() + _SETTLE_S
    while server.num_descriptors() > idle_descriptors and time.monotonic() < until_s:
        time.sleep(0.02)
    return _Drain(
        requests=requests,
        elapsed_s=round(elapsed_s, 2),
        rss_mib=round(server.rss_mib(), 3),
        descriptors=server.num_descriptors(),
        threads=server.num_threads(),
        used_blocks=stats.total_blocks - stats.free_blocks,
        left=stats.num_waiting + stats.num_running + stats.num_ending,
    )


def _early_and_late(drains: list[_Drain], warm_up: int, name: str) -> tuple[int, int]:
    """Return the most of something until `warm_up` requests, in one drain at least, and after that."""
    early = max([getattr(d, name) for d in drains if d.requests <= warm_up] or [getattr(drains[0], name)])
    return early, max(getattr(d, name) for d in drains[len(drains) // 2 :])


def _growth(drains: list[_Drain], warm_up: int) -> dict[str, Any]:
    """Fit memory over requests by a line; the upper end of its slope's 95 % interval is one-sided.

    Successive measurements are alike, which would make that interval too narrow. So means of up to ten groups of them
    are fitted.
    """
    from scipy import stats

    after = [drain for drain in drains if drain.requests >= warm_up]
    groups = [group for group in np.array_split(np.array([(d.requests, d.rss_mib) for d in after]), 10) if len(group)]
    grown: dict[str, Any] = {"requests": 0, "mib_per_10k": 0.0, "upper_mib_per_10k": float("inf")}
    if len(groups) >= 3:
        points = np.array([group.mean(axis=0) for group in groups])
        fit: Any = stats.linregress(points[:, 0], points[:, 1])
        upper = fit.slope + stats.t.ppf(0.95, len(points) - 2) * fit.stderr
        grown = {
            "requests": after[-1].requests - after[0].requests,
            "mib_per_10k": float(fit.slope * 1e4),
            "upper_mib_per_10k": float(upper * 1e4),
            "intercept_mib": float(fit.intercept),
        }
    return grown


def _plot(path: Path, drains: list[_Drain], warm_up: int, growth: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    requests = np.array([drain.requests for drain in drains])
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(requests, [drain.rss_mib for drain in drains], ".-", markersize=3, linewidth=0.8, label="at each drain")
    if "intercept_mib" in growth:
        line = requests[requests >= warm_up]
        axes.plot(
            line,
            growth["intercept_mib"] + growth["mib_per_10k"] * line / 1e4,
            "--",
            label=f"{growth['mib_per_10k']:+.2f} MiB per 10,000 requests (95 %: at most {growth['upper_mib_per_10k']:+.2f})",
        )
    axes.set(xlabel="requests", ylabel="resident memory, MiB", title="Memory of the server while nothing runs")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)

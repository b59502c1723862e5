"""Ten times as many requests as the server can serve: it rejects fast, meets the SLOs of accepted requests, and stays
healthy.

1. Capacity: completed requests per second of a saturated closed loop.
2. Open loop: Poisson arrivals at ten times that rate over all APIs, each request with an SLO. The time to a rejection
   is measured at the client, from before it sends to the status; attainment by the server's verdict and by the client's
   clock, of all accepted requests.
3. `/health` is polled every half second; afterwards requests must be answered as offline.
"""

import argparse
import collections
import threading
import time
from typing import Any

import numpy as np

from benchmarks.server.clients import Clients, Load, Record, add_request_arguments, build_requests
from benchmarks.server.offline import Offline
from benchmarks.server.protocols import LoadRequest
from benchmarks.server.report import Run, progress
from benchmarks.server.server_process import Server

REFUSALS = ("429", "RESOURCE_EXHAUSTED")
_HEALTH_PERIOD_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--duration", type=float, default=120.0, metavar="S", help="duration of the overload in seconds (default: 120)"
    )
    parser.add_argument(
        "--capacity-duration",
        type=float,
        default=20.0,
        metavar="S",
        help="duration of the closed loop in seconds (default: 20)",
    )
    parser.add_argument("--requests", type=int, default=100, help="number of different requests (default: 100)")
    parser.add_argument(
        "--capacity-streams",
        type=int,
        help="concurrent streams of the closed loop (default: the default of --max-num-seqs plus half of --queued)",
    )
    parser.add_argument(
        "--times", type=float, default=10.0, help="offered load as a multiple of the capacity (default: 10)"
    )
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0, help="TTFT SLO (default: 1000)")
    parser.add_argument("--slo-tbt-ms", type=float, default=200.0, help="TBT SLO (default: 200)")
    parser.add_argument("--queued", type=int, default=64, help="--max-num-queued-reqs (default: 64)")
    parser.add_argument(
        "--refusal-ms", type=float, default=50.0, help="maximum P99 of the time to a rejection (default: 50)"
    )
    parser.add_argument(
        "--attainment", type=float, default=0.8, help="minimum SLO attainment of accepted requests (default: 0.8)"
    )
    add_request_arguments(parser, prompt_len=(16, 160), output_len=(96, 160))


def run(args: argparse.Namespace) -> Run:
    found = Run("overload", args)
    requests = build_requests(args, args.requests)
    with Offline(args.model, args.engine_flags) as offline:
        requests, answers = offline.answers(requests)
    found.say(f"{len(requests)} of {args.requests} offline answers do not depend on rounding")
    hurried = [
        LoadRequest(prompt_ids=a.prompt_ids, params=a.params, slo_ttft_ms=args.slo_ttft_ms, slo_tbt_ms=args.slo_tbt_ms)
        for a in requests
    ]  # fmt: skip
    flags = [
        *args.engine_flags,
        *args.server_flags,
        "--set",
        "slo_admission=on",
        "--max-num-queued-reqs",
        str(args.queued),
    ]
    with Server(args.model, flags) as server:
        where = {"http": server.http, "grpc": server.grpc, "answers": answers}
        capacity = _capacity(args, server, Load(requests=requests, **where))
        rate = args.times * capacity
        found.say(f"capacity {capacity:.1f} requests/s, offered {rate:.1f}")
        loads = [
            Load(requests=hurried, rate=rate / args.processes, duration_s=args.duration, seed=args.seed + number, **where)
            for number in range(args.processes)
        ]  # fmt: skip
        cpu_s, begun_s = server.cpu_s(), time.monotonic()
        with Clients(loads) as clients, _Health(server) as health, progress("overload", args.duration) as bar:
            for _ in clients.running():
                bar(time.monotonic() - begun_s)
            reports = clients.reports()
        wall_s, cpu_s = time.monotonic() - begun_s, server.cpu_s() - cpu_s
        after = server.until_idle()
        states = server.get("/health"), server.get("/ready"), server.grpc_serving()
        again = Load(requests=requests[:12], streams=2, in_order=True, **where)
        with Clients([again]) as clients:
            last = clients.reports()[0].records
    records = [record for report in reports for record in report.records]
    refused = [record for record in records if record.status in REFUSALS]
    accepted = [record for record in records if record.status not in REFUSALS]
    refusal_ms = _percentiles_ms(record.ended_s - record.started_s for record in refused)
    by_protocol = {
        protocol: _percentiles_ms(r.ended_s - r.started_s for r in refused if r.protocol == protocol)
        for protocol in sorted({r.protocol for r in refused})
    }
    judged = [record for record in accepted if record.protocol != "vllm"]  # which does not report it
    client_view = _share(_attained(record, args) for record in accepted)
    server_view = _share(record.attained is True for record in judged)
    problems = collections.Counter(record.problem for record in (*records, *last) if record.problem)
    lag_ms = _percentiles_ms(lag for report in reports for lag in report.lag_s)
    health_ms = _percentiles_ms(health.times_s)
    left = after.num_waiting + after.num_running + after.num_ending
    found.values |= {
        "capacity_per_s": capacity,
        "offered_per_s": len(records) / args.duration,
        "requests": len(records),
        "accepted": len(accepted),
        "accepted_per_s": len(accepted) / wall_s,
        "statuses": dict(collections.Counter(record.status for record in records)),
        "refusal_ms": refusal_ms,
        "refusal_ms_by_protocol": by_protocol,
        "refusals_later": sum(1e3 * (r.ended_s - r.started_s) > args.refusal_ms for r in refused),
        "attainment_client": client_view,
        "attainment_server": server_view,
        "ttft_ms": _percentiles_ms(r.first_s - r.started_s for r in accepted if r.first_s is not None),
        "p99_tbt_ms": _percentiles_ms(r.p99_gap_s for r in accepted),
        "client_lag_ms": lag_ms,
        "client_late_ms": 1e3 * max(report.late_s for report in reports),
        "health_ms": health_ms,
        "health_failures": health.failures,
        "server_cpu_s": cpu_s,
        "server_cores": cpu_s / wall_s,
        "client_cores": sum(report.cpu_s for report in reports) / wall_s,
        "problems": dict(problems),
    }  # fmt: skip
    found.promise(
        f"99 of 100 refusals within {args.refusal_ms:g} ms",
        bool(refused) and refusal_ms["p99"] <= args.refusal_ms,
        f"{len(refused)} refused: {_shown(refusal_ms)}",
    )
    found.promise(
        f"attainment of accepted requests above {args.attainment:.0%}",
        min(client_view, server_view) > args.attainment,
        f"{client_view:.1%} by the clients, {server_view:.1%} by the server, of {len(accepted)}",
    )
    found.promise("accepted requests complete", all(r.status == "complete" for r in accepted), found.values["statuses"])
    found.promise("what they say equals the offline answers", not problems, dict(problems) or "it does")
    found.promise(
        "/health is always 200", not health.failures, f"asked {len(health.times_s)} times: {_shown(health_ms)}"
    )
    well = states == (200, 200, True) and all(r.status == "complete" for r in last)
    found.promise(
        "healthy afterwards, all blocks free",
        well and not left and after.free_blocks == after.total_blocks,
        f"{after.free_blocks} of {after.total_blocks} blocks",
    )
    found.say(
        f"clients' event loops lagged {_shown(lag_ms)}; server {found.values['server_cores']:.2f} cores, clients {found.values['client_cores']:.2f}"
    )
    found.say(f"accepted {found.values['accepted_per_s']:.1f} requests/s: TTFT {_shown(found.values['ttft_ms'])}")
    return found


def _capacity(args: argparse.Namespace, server: Server, load: Load) -> float:
    """Return the completed requests per second of a saturated closed loop."""
    # No more than fit into the queue, so that none is rejected.
    streams, duration_s = args.capacity_streams or 64 + args.queued // 2, args.capacity_duration
    whole = Load(**{**vars(load), "streams": streams, "duration_s": duration_s})
    begun_s = time.monotonic()
    with Clients([whole]) as clients, progress("capacity", duration_s) as bar:
        for _ in clients.running():
            bar(time.monotonic() - begun_s)
        records = clients.reports()[0].records
    first_s = min(record.started_s for record in records)
    # From when the first requests have finished until no more arrive.
    since_s, until_s = first_s + duration_s / 4, first_s + duration_s
    ended = sum(since_s <= r.ended_s < until_s and r.status == "complete" for r in records)
    server.until_idle()
    return max(ended, 1) / (until_s - since_s)


def _attained(record: Record, args: argparse.Namespace) -> bool:
    """Return whether a request met its SLO by the client's clock: TTFT and the P99 of its token gaps."""
    if record.status != "complete" or record.first_s is None:
        return False
    ttft_ms = 1e3 * (record.first_s - record.started_s)
    return ttft_ms <= args.slo_ttft_ms and 1e3 * record.p99_gap_s <= args.slo_tbt_ms


def _share(verdicts: Any) -> float:
    verdicts = list(verdicts)
    return sum(verdicts) / len(verdicts) if verdicts else 0.0


def _percentiles_ms(seconds: Any) -> dict[str, float]:
    values = 1e3 * np.array([*seconds] or [0.0])
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"p50": p50, "p99": p99, "max": float(values.max())}


def _shown(ms: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in ms.items()) + " ms"


class _Health:
    """Poll `/health` every half second, over a new connection each time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.times_s: list[float] = []
        self.failures = 0

    def _ask(self) -> None:
        while not self._end.wait(_HEALTH_PERIOD_S):
            begun_s = time.monotonic()
            self.failures += self._server.get("/health") != 200
            self.times_s.append(time.monotonic() - begun_s)

    def __enter__(self) -> "_Health":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

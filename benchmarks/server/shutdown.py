"""Shutdown and death of the server under load: SIGTERM, kill -9, and the death of its engine thread.

* SIGTERM with time: every accepted request completes; with little time: it completes or ends with a clear status. Exit
  code 0 in time.
* kill -9: every stream ends with an error at its client, within 2 s.
* The engine's thread ends (`benchmarks.server.crash_on_signal`): health turns within 2 s, every stream ends with a
  clear status, exit code 1.
"""

import argparse
import collections
import signal
import time

from benchmarks.server.clients import Clients, Load, Record, add_request_arguments, build_requests
from benchmarks.server.offline import Offline
from benchmarks.server.report import Run, progress
from benchmarks.server.server_process import Server

CLEAR = ("503", "UNAVAILABLE", "error")
"""Statuses of requests that a shutdown ends; "error" is the error event of a stream that has started."""
_GONE = (*CLEAR, "connection", "cut off")
_ENDS = {
    "SIGTERM, 30 s": (signal.SIGTERM, 30.0),
    "SIGTERM, 0.5 s": (signal.SIGTERM, 0.5),
    "kill -9": (signal.SIGKILL, 0.0),
    "engine thread": (signal.SIGUSR1, 0.0),
}
"""Signal and timeout of open requests, seconds, by name of the case."""
_ACCEPTED_S = 0.5
"""Age of a request that a busy server has surely accepted."""
_HEALTH_S = 2.0
_EXIT_S = 10.0
"""Maximum time to exit after the timeout of in-flight requests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams (default: 64)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each case (default: 3)")
    parser.add_argument(
        "--load-time", type=float, default=3.0, metavar="S", help="seconds of load before each case (default: 3)"
    )
    parser.add_argument("--requests", type=int, default=100, help="number of different requests (default: 100)")
    parser.add_argument("--ends", nargs="+", choices=_ENDS, default=list(_ENDS), help="cases (default: all)")
    add_request_arguments(parser, prompt_len=(16, 160), output_len=(64, 512))


def run(args: argparse.Namespace) -> Run:
    found = Run("stop", args)
    requests = build_requests(args, args.requests)
    with Offline(args.model, args.engine_flags) as offline:
        requests, answers = offline.answers(requests)
    found.say(f"{len(requests)} of {args.requests} offline answers do not depend on rounding")
    found.values["ends"] = []
    with progress("stop", len(args.ends) * args.repeats, "end") as bar:
        for number in range(args.repeats):
            for name in args.ends:
                sent, timeout_s = _ENDS[name]
                load = Load(
                    http="", grpc="", requests=requests, answers=answers, streams=args.streams, seed=args.seed + number
                )
                _end(found, args, name, sent, timeout_s, load)
                bar(len(found.values["ends"]))
    return found


def _end(found: Run, args: argparse.Namespace, name: str, sent: signal.Signals, timeout_s: float, load: Load) -> None:
    """Put a server under load, end it, and check the guarantees."""
    flags = [*args.engine_flags, *args.server_flags, "--shutdown-timeout", f"{timeout_s:g}"]
    with Server(args.model, flags, crash_on_signal=sent is signal.SIGUSR1) as server:
        lasts_s = args.load_time + min(timeout_s, 1.0) + 1.0  # clients continue for a while
        load = Load(**{**vars(load), "http": server.http, "grpc": server.grpc, "duration_s": lasts_s})
        with Clients([load]) as clients:
            while not clients.num_done:  # until it has finished a request
                time.sleep(0.01)
            time.sleep(args.load_time)
            sent_s = time.monotonic()
            server.signal(sent)
            flipped_s = _flip(server, sent_s)
            code = server.wait(timeout_s + _EXIT_S)
            exit_s = time.monotonic() - sent_s
            records = clients.reports()[0].records
        log = "" if code in (0, 1, -9) else server.log()
    open_then = [r for r in records if _accepted(r, sent_s) and r.ended_s > sent_s]
    problems = [r.problem for r in records if r.problem]
    found.values["ends"].append({
        "end": name, "exit_code": code, "exit_s": exit_s, "health_flip_s": flipped_s, "open": len(open_then),
        "open_by_status": _counted(open_then), "statuses": _counted(records), "problems": problems, "log": log,
        "last_end_s": max((r.ended_s - sent_s for r in open_then), default=0.0),
    })  # fmt: skip
    summary = f"{len(open_then)} open: {_counted(open_then)}; exit code {code} after {exit_s:.1f} s"
    found.promise(f"{name}: what came equals the offline answers", not problems, problems[:3] or "it does")
    if sent is signal.SIGTERM:
        allowed = {"complete"} if timeout_s > _EXIT_S else {"complete", *CLEAR}
        found.promise(
            f"{name}: open requests {'complete' if len(allowed) == 1 else 'complete or end with a status'}",
            bool(open_then) and {r.status for r in open_then} <= allowed,
            summary,
        )
        found.promise(
            f"{name}: exit code 0 within the timeout", code == 0 and exit_s < timeout_s + _EXIT_S, f"{exit_s:.1f} s"
        )
        return
    allowed = set(_GONE) if sent is signal.SIGKILL else set(CLEAR)
    late_s = max((r.ended_s - sent_s for r in open_then), default=0.0)
    ended = {r.status for r in open_then if r.ended_s - sent_s > 0.05} <= {*allowed, "complete"}
    found.promise(
        f"{name}: streams end with an error within {_HEALTH_S:g} s",
        bool(open_then) and ended and late_s < _HEALTH_S,
        f"{summary}; the last after {late_s:.2f} s",
    )
    found.promise(
        f"{name}: health turns within {_HEALTH_S:g} s",
        flipped_s is not None and flipped_s < _HEALTH_S,
        f"{flipped_s} s",
    )
    if sent is signal.SIGUSR1:
        found.promise(f"{name}: exit code 1", code == 1, code)


def _accepted(record: Record, at_s: float) -> bool:
    """Return whether the server has accepted a request by this time: it has answered, or has had it for a while."""
    return record.started_s < at_s - _ACCEPTED_S or (record.first_s is not None and record.first_s < at_s)


def _flip(server: Server, sent_s: float) -> float | None:
    """Return the seconds until `/ready` and gRPC health both report failure; None: not within ten seconds."""
    while time.monotonic() - sent_s < _EXIT_S:
        if server.get("/ready", 2.0) != 200 and not server.grpc_serving(2.0):
            return round(time.monotonic() - sent_s, 3)
        time.sleep(0.01)
    return None


def _counted(records: list[Record]) -> dict[str, int]:
    return dict(collections.Counter(record.status for record in records))

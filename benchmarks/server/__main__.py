"""Long runs of the whole server with real processes: its guarantees under load, overload and signals, and its overhead.

    python -m benchmarks.server soak        an hour of requests: every token as offline, memory stays flat, all blocks are free after every 500
    python -m benchmarks.server overload    10 times its capacity for 2 minutes: fast rejections, accepted requests within their SLO
    python -m benchmarks.server stop        SIGTERM, kill -9 and the death of the engine thread, under load
    python -m benchmarks.server chaos       200 faults of links, replicas and the gateway, with a ledger of every request
    python -m benchmarks.server batch       1,000 requests of a batch beside interactive traffic: latency of the one, throughput of both
    python -m benchmarks.server overhead    overhead of each API over the bare engine, 64 streams
    python -m benchmarks.server hostile     bodies that are made to take long, beside another key's stream
    python -m benchmarks.server sessions    agents' sessions under each retention policy: completion time and TTFT by turn, and as predicted
    python -m benchmarks.server start       time to the first answer, from clean and from warm caches

Each starts the server itself, prints a summary, and writes JSON (`--json FILE`). Exit code 1: a guarantee was violated.
Clients and server share the cores of one machine, which limits the figures.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.server import batch, chaos, hostile_bodies, overhead, overload, sessions, soak, starts
from benchmarks.server import shutdown as stop

_RUNS = {
    "soak": soak,
    "overload": overload,
    "stop": stop,
    "chaos": chaos,
    "batch": batch,
    "overhead": overhead,
    "hostile": hostile_bodies,
    "sessions": sessions,
    "start": starts,
}


def main(arguments: list[str] | None = None) -> int:
    """Run one of them; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    runs = parser.add_subparsers(dest="run", required=True, metavar="RUN")
    for name, module in _RUNS.items():
        text = (module.__doc__ or "").strip()
        one = runs.add_parser(name, help=text.splitlines()[0], description=text)
        one.add_argument("--model", default="tiny-opt", help="as for apt-jax serve (default: tiny-opt)")
        one.add_argument(
            "--engine-flags",
            type=str.split,
            default=[],
            metavar="'FLAGS'",
            help="more flags of the engine, as one argument",
        )
        one.add_argument(
            "--server-flags",
            type=str.split,
            default=[],
            metavar="'FLAGS'",
            help="more flags of the server, as one argument",
        )
        one.add_argument("--processes", type=int, default=2, help="number of client processes (default: 2)")
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--json", type=Path, metavar="FILE")
        module.add_arguments(one)
    args = parser.parse_args(arguments)
    found = _RUNS[args.run].run(args)
    found.show()
    found.write(args.json)
    return 0 if found.kept else 1


if __name__ == "__main__":
    sys.exit(main())

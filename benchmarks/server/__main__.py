"""Long runs of the whole server, with real processes: what it promises under load, overload, signals, and what its edge costs.

    python -m benchmarks.edge soak        200 streams for 10 minutes: every token as offline, memory flat, all blocks free
    python -m benchmarks.edge overload    10 times what it can do, for 2 minutes: refusals at once, accepted requests in time
    python -m benchmarks.edge stop        SIGTERM, kill -9 and the end of the engine's thread, under load
    python -m benchmarks.edge overhead    what the doors cost beside the bare engine, 64 streams

Each starts the server itself, prints a screenful, and writes JSON (`--json FILE`). Exit code 1: a promise was broken. What limits the
figures: clients and server share the cores of one machine.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.server import overhead, overload, soak
from benchmarks.server import shutdown as stop

_RUNS = {"soak": soak, "overload": overload, "stop": stop, "overhead": overhead}


def main(arguments: list[str] | None = None) -> int:
    """Run one of them; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.edge",
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
            help="further flags of the engine, in one argument",
        )
        one.add_argument(
            "--server-flags",
            type=str.split,
            default=[],
            metavar="'FLAGS'",
            help="further flags of the server, likewise",
        )
        one.add_argument("--processes", type=int, default=2, help="of clients (default: 2)")
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

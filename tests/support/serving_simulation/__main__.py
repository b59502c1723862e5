"""Replay seeds: `python -m tests.support.serving_simulation SEED`, or `FIRST LAST`."""

import collections
import sys
from collections.abc import Callable

from tests.support.serving_simulation.simulation import simulate_serving


def main(write: Callable[[str], object] = sys.stdout.write) -> None:
    """Replay the seeds on the command line: `SEED` or `FIRST LAST`."""
    first, last = int(sys.argv[1]), int(sys.argv[-1])
    total: collections.Counter[str] = collections.Counter()
    for seed in range(first, last + 1):
        report = simulate_serving(seed)
        total += report.sometimes
        if first == last:
            write(f"seed {seed}: {report.num_steps} steps, {report.virtual_s:.1f} s, {report.digest}\n")
    for name, count in sorted(total.items()):
        write(f"{count:8d}  {name}\n")


if __name__ == "__main__":
    main()

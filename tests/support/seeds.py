"""Seeds of the simulations: a base that moves with the date, seeds that once failed, and how often rare states must occur.

$APT_JAX_SEED_BASE sets the base (`tests/conftest.py`: the date, so that every day has other seeds). A seed that fails is
written to `tests/dst/failed_seeds.txt`; committed with the fix, every run begins with it.
"""

import collections
import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol

from tests.support.serving_simulation import simulate_serving
from tests.support.simulation_harness import SimulationError, simulate

Layer = Literal["engine", "serving"]
LAYERS: tuple[Layer, ...] = ("engine", "serving")
FAILED_SEEDS = Path(__file__).parents[1] / "dst" / "failed_seeds.txt"
TWICE_EVERY = 50
"""One in so many seeds runs twice, the second time in another process with other hashes of strings."""


class Report(Protocol):
    """Report of a history, of either layer."""

    @property
    def digest(self) -> str: ...
    @property
    def sometimes(self) -> collections.Counter[str]: ...


SIMULATE: Mapping[Layer, Callable[[int], Report]] = {"engine": simulate, "serving": simulate_serving}


def seed_base() -> int:
    """Return the first seed of this run."""
    return int(os.environ["APT_JAX_SEED_BASE"])


def failed_seeds(layer: Layer) -> list[int]:
    """Return the seeds of a layer that once failed."""
    lines = [line.partition("#")[0].split() for line in FAILED_SEEDS.read_text().splitlines()]
    return [int(words[1]) for words in lines if words and words[0] == layer]


def keep_seed(layer: Layer, seed: int, message: str) -> None:
    """Write a seed that failed to where later runs find it."""
    if seed not in failed_seeds(layer):
        with FAILED_SEEDS.open("a") as file:
            file.write(f"{layer} {seed}  # {message.splitlines()[0][:160]}\n")


@dataclasses.dataclass
class Tally:
    """Results of many histories of a layer."""

    num_seeds: int = 0
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """How often each state, fault or outcome occurred."""
    seeds_with: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """In how many seeds."""
    digests: dict[int, str] = dataclasses.field(default_factory=dict)
    failures: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def add(self, seed: int, report: Report) -> None:
        """Count one history."""
        self.num_seeds += 1
        self.digests[seed] = report.digest
        occurred = collections.Counter({name: int(count) for name, count in report.sometimes.items() if count > 0})
        self.counts += occurred
        self.seeds_with.update(occurred.keys())

    def missing(self, shares: Mapping[str, float]) -> dict[str, str]:
        """Return the states that occurred in too few seeds: five standard deviations below what was measured.

        Args:
            shares: share of the seeds in which each state occurred when it was measured.
        """
        missing = {}
        for name, share in shares.items():
            mean = share * self.num_seeds
            least = mean - 5 * math.sqrt(mean)
            if self.seeds_with[name] < least:
                missing[name] = f"in {self.seeds_with[name]} of {self.num_seeds} seeds, expected in {mean:.0f}"
        return missing


def run_seeds(layer: Layer, seeds: Iterable[int], *, keep: bool = True) -> Tally:
    """Run histories, those that fail too.

    Args:
        layer: which simulation.
        seeds: of the histories.
        keep: write seeds that fail to `FAILED_SEEDS`.
    """
    tally = Tally()
    for seed in seeds:
        try:
            report = SIMULATE[layer](seed)
        except SimulationError as error:
            tally.num_seeds += 1
            tally.failures.append((seed, str(error)))
            if keep:
                keep_seed(layer, seed, str(error))
        else:
            tally.add(seed, report)
    return tally


def digests_elsewhere(layer: Layer, seeds: Iterable[int]) -> dict[int, str]:
    """Run histories in another process, with other hashes of strings; returns their digests."""
    command = [sys.executable, "-m", "tests.dst.run", "--digests", layer, *map(str, seeds)]
    other = {**os.environ, "PYTHONHASHSEED": "12345" if os.environ.get("PYTHONHASHSEED") != "12345" else "54321"}
    root = Path(__file__).parents[2]
    output = subprocess.run(command, env=other, cwd=root, check=True, capture_output=True, text=True).stdout
    return {int(seed): digest for seed, digest in (line.split() for line in output.splitlines())}

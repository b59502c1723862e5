"""Search for the highest request rate that meets an attainment target (effective throughput, docs/metrics.md)."""

import dataclasses
from collections.abc import Callable, Sequence

from apt_jax.sim.sweep import EffectiveRate, bisect_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """One run of a search."""

    rate: float
    seed: int
    attainment: float
    num_sent: int
    alone: bool
    """True if no two requests were in flight at once: lower rates would give the same result."""
    late: bool = False
    """True if the client could not keep up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Result for one target."""

    rate: EffectiveRate
    bounded: bool
    """True if a higher rate missed the target for every seed; otherwise the server may sustain more than was tried."""


def find_rates(
    measure: Callable[[float, int], Probe],
    *,
    targets: Sequence[float],
    seeds: Sequence[int],
    guess: float,
    tolerance: float,
) -> list[Found]:
    """Bisect the rate for every target and seed; runs are shared between targets.

    Args:
        measure: function that makes a run, given requests per second and a seed.
        targets: attainments in (0, 1].
        guess: first rate to try, in requests per second.
        tolerance: relative width of the bracket at which a search ends.

    Returns:
        One result for each of `targets`, in order.
    """
    known: dict[tuple[str, int], Probe] = {}
    alone: dict[int, Probe] = {}
    """For each seed, the run at the highest rate where no requests overlapped and every target was missed."""

    def attainment_at(rate: float, seed: int) -> float:
        lonely = alone.get(seed)
        if lonely is not None and rate <= lonely.rate:
            return lonely.attainment
        key = f"{rate:.6g}", seed
        if key not in known:
            probe = known[key] = measure(rate, seed)
            if probe.alone and probe.attainment < min(targets):
                alone[seed] = probe
        return known[key].attainment

    found: dict[float, Found] = {}
    begin = dict.fromkeys(seeds, guess)
    for target in sorted(set(targets), reverse=True):
        rates, bounded = [], True
        for seed in seeds:
            rate, runs = bisect_rate(
                lambda rate, seed=seed: attainment_at(rate, seed),
                target=target,
                guess=begin[seed],
                tolerance=tolerance,
            )
            bounded &= any(float(r) > rate and a < target for r, a in runs.items())
            rates.append(rate)
            begin[seed] = rate or guess
        found[target] = Found(rate=EffectiveRate(target=target, rates=tuple(rates)), bounded=bounded)
    return [found[target] for target in targets]

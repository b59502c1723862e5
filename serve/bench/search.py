"""The highest request rate that holds a target of attainment (effective throughput, docs/metrics.md)."""

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
    """No two requests were under way at once: lower rates would measure the same."""
    late: bool = False
    """The client did not keep up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Result for one target."""

    rate: EffectiveRate
    bounded: bool
    """True: for every seed a higher rate missed the target. False: the server may sustain more than was tried."""


def find_rates(
    measure: Callable[[float, int], Probe],
    *,
    targets: Sequence[float],
    seeds: Sequence[int],
    guess: float,
    tolerance: float,
) -> list[Found]:
    """Bisection for every target and seed; runs are shared between targets.

    Args:
        measure: makes a run at (requests a second, seed).
        targets: attainments in (0, 1].
        guess: where to begin, requests a second.
        tolerance: relative width of the bracket at which a search ends.

    Returns:
        One for each of `targets`, in their order.
    """
    known: dict[tuple[str, int], Probe] = {}
    alone: dict[int, Probe] = {}
    """By seed, the run at the highest rate at which requests never met."""

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

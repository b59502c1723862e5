"""Random knapsack problems and an independent exact answer, for the solver tests."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched import KnapsackProblem


def random_problem(
    rng: np.random.Generator, num_requests: int | None = None, num_kinds: int | None = None
) -> KnapsackProblem:
    """A problem of one of many flavours: block-granular or wild costs, penalties, ties, free and oversized options."""
    n = int(rng.integers(1, 13)) if num_requests is None else num_requests
    k = int(rng.choice([2, 2, 2, 3])) if num_kinds is None else num_kinds
    tokens = rng.integers(1, int(rng.choice([20, 200])), n)
    groups = -(-tokens // int(rng.choice([1, 4, 16])))
    # KV first, then the smaller kinds.
    cost = groups[:, None] * np.arange(k, 0, -1)
    pending = rng.exponential(1.0, n) if rng.random() < 0.7 else rng.integers(1, 4, n).astype(float)
    penalty = rng.choice([0.0, 0.001, 0.02, -0.01]) * rng.exponential(1.0, (n, k)) * tokens[:, None]
    penalty[:, 0] = 0.0
    value = pending[:, None] - penalty
    if rng.random() < 0.2:  # anything goes
        cost = rng.integers(0, int(rng.choice([3, 10, 30])), (n, k))
        value = rng.normal(0.5, 1.0, (n, k)) * np.maximum(cost, 1) ** rng.choice([0.0, 0.5, 1.0])
    if rng.random() < 0.1:  # as many ties as there can be
        value = np.round(value)
    if rng.random() < 0.2:
        cost = np.where(rng.random((n, k)) < 0.1, 0, cost)
    if rng.random() < 0.2:
        value = np.where(rng.random((n, k)) < 0.3, -np.inf, value)
    total = int(cost.max(axis=1).sum())
    capacity = int(rng.integers(0, total + 2)) if rng.random() < 0.8 else int(rng.integers(0, cost.max() + 1))
    return KnapsackProblem(value, cost, capacity)


def optimum(problem: KnapsackProblem) -> float:
    """The optimal value, by dynamic programming over requests and blocks: best[m] with at most m blocks."""
    best = np.zeros(problem.capacity + 1)
    for values, costs in zip(problem.value.tolist(), problem.cost.tolist(), strict=True):
        better = best.copy()
        for value, cost in zip(values, costs, strict=True):
            if value > 0 and cost <= problem.capacity:
                np.maximum(better[cost:], best[: best.size - cost] + value, out=better[cost:])
        best = better
    return float(best[-1])


def brute_force(problem: KnapsackProblem) -> float:
    """The optimal value, by trying every combination."""
    sums = np.zeros(1)
    costs = np.zeros(1, np.int64)
    for i in range(problem.num_requests):
        options: list[tuple[float, int]] = [(0.0, 0)]
        options += [(v, c) for v, c in zip(problem.value[i], problem.cost[i], strict=True) if v > 0]
        sums = np.concatenate([sums + v for v, _ in options])
        costs = np.concatenate([costs + c for _, c in options])
    return float(sums[costs <= problem.capacity].max())


def check_feasible(problem: KnapsackProblem, kind: NDArray[np.int64], value: float, cost: int) -> None:
    """The answer keeps to the capacity and to what is offered, and its sums are right."""
    chosen = np.flatnonzero(kind >= 0)
    assert kind.shape == (problem.num_requests,)
    assert (kind >= -1).all()
    assert (kind < problem.num_kinds).all()
    values, costs = problem.value[chosen, kind[chosen]], problem.cost[chosen, kind[chosen]]
    assert (values > 0).all()
    assert int(costs.sum()) == cost <= problem.capacity
    assert np.isclose(values.sum(), value, rtol=1e-12, atol=0)

"""The knapsack problem of one iteration: choose the requests that run and their cache kinds (Apt-Serve Definition 1).

It is a multiple-choice knapsack: every request has one option per cache kind, with a cost in whole blocks and a value,
and at most one option per request is chosen.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

NOT_CHOSEN = -1
"""`Schedule.kind` of a request that does not run."""


@dataclasses.dataclass(frozen=True, eq=False)
class KnapsackProblem:
    """Maximise the sum of values of the chosen options under a memory constraint (Apt-Serve Eq. 7 to 9).

    Row i of `value` and `cost` holds `g_i^c` and `m_i^c` of the paper, one column per cache kind c; any number of kinds
    works. Array-like arguments are converted to float64 and int64 arrays.

    Raises:
        ValueError: shapes differ or are not two-dimensional, a value is NaN or +inf, a cost is negative, too large or
            not an integer, or the capacity is negative or not an integer.
    """

    value: NDArray[np.float64]
    """(num_requests, num_kinds) value of running the request with this kind; -inf: the kind is not offered to it."""
    cost: NDArray[np.int64]
    """(num_requests, num_kinds) blocks that the request takes with this kind, at least 0."""
    capacity: int
    """Number of available blocks (M)."""

    def __init__(self, value: ArrayLike, cost: ArrayLike, capacity: Any) -> None:
        values, costs = np.asarray(value, np.float64), np.asarray(cost)
        if values.ndim != 2 or values.shape[1] < 1:
            raise ValueError(f"value.shape={values.shape} must be (num_requests, num_kinds)")
        if costs.shape != values.shape:
            raise ValueError(f"cost.shape={costs.shape} must equal value.shape={values.shape}")
        if costs.dtype.kind not in "iu":
            if costs.size:
                raise ValueError(f"cost.dtype={costs.dtype} must be an integer type: whole blocks")
            costs = costs.astype(np.int64)
        if values.size:
            highest = values.max()  # NaN if any value is NaN
            if not highest < np.inf:
                raise ValueError(f"value holds {highest}: it must be finite, or -inf where a kind is not offered")
            if costs.min() < 0:
                raise ValueError(f"cost holds {costs.min()}: blocks must be at least 0")
            if costs.max() > 2**53:
                raise ValueError(f"cost holds {costs.max()}: blocks must be at most 2**53")
        if not isinstance(capacity, (int, np.integer)) or isinstance(capacity, bool):
            raise ValueError(f"{capacity=} must be an integer number of blocks")
        if capacity < 0:
            raise ValueError(f"{capacity=} must be at least 0")
        object.__setattr__(self, "value", values)
        object.__setattr__(self, "cost", costs.astype(np.int64, copy=False))
        object.__setattr__(self, "capacity", int(capacity))

    @property
    def num_requests(self) -> int:
        return self.value.shape[0]

    @property
    def num_kinds(self) -> int:
        return self.value.shape[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A solution of a `KnapsackProblem`."""

    kind: NDArray[np.int64]
    """(num_requests,) column of the chosen option; `NOT_CHOSEN` (-1): no option."""
    value: float
    """Sum of the chosen values."""
    cost: int
    """Sum of the chosen blocks; at most the capacity."""

    @classmethod
    def of(cls, problem: KnapsackProblem, kind: NDArray[np.int64]) -> "Schedule":
        """Return the schedule that chooses `kind`, with the sums of its values and costs."""
        chosen = np.flatnonzero(kind >= 0)
        columns = kind[chosen]
        return cls(
            kind,
            float(problem.value[chosen, columns].sum()),
            int(problem.cost[chosen, columns].sum()),
        )

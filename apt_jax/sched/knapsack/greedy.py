"""Apt-Serve's greedy solver, for any number of cache kinds (Apt-Serve §5 and its appendix, Algorithm 1).

    options of a request            its upper hull and increments       over all requests
    value                           value
      |         x KV                  |        _x  theta_2              sort by theta, take while they fit;
      |    x hidden                   |    x'      theta_1 > theta_2    the first that does not fit: V' against V;
      |                               |   /                             then fill what is left
      +----------- blocks             +----------- blocks

An increment is an edge of the hull: it leads from one option of a request (or from not running) to the next, and its
efficiency is theta = (gain in value) / (added blocks). The paper avoids the hidden kind if KV is more efficient from
the start; here this follows from the hull, on which the hidden kind then does not lie.
"""

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.knapsack.problem import NOT_CHOSEN, KnapsackProblem, Schedule

_FILL_ROUNDS = 64
"""Maximum number of rounds of `_fill`; ordinary problems need fewer than ten."""

_CHUNK = 4096
"""Number of requests whose hulls are built together; their arrays fit the CPU cache, which is several times faster."""

_NO_VALUE = -1e300
"""Stands for -inf in subtractions, where -inf would give NaN."""


def solve_greedy(problem: KnapsackProblem, *, fill: bool = True) -> Schedule:
    """Solve within a factor of two of the optimum, in O(n log n) (Apt-Serve appendix, Theorem 1).

    1. Options that are larger than the whole capacity or have no positive value are dropped. Otherwise V' might belong
       to an option that can never run, and the bound would not hold.
    2. Free options (zero blocks) are taken. The upper hull of each request's remaining options gives its increments.
    3. Increments are taken in order of decreasing efficiency while they fit; the sum of their gains is V. Efficiency
       falls along a request's hull, so each increment comes after the increments that it builds on. If the first
       increment that does not fit leads to an option with a greater value V' than V, this option is the solution
       instead.
    4. The capacity left is filled with further moves that fit, most efficient first, which only increases the value.

    `fill=False` follows the appendix: step 4 is left out, and V' is only the gain of the increment. One thing differs:
    the alternative solution runs its request with the best option that fits, while the paper's listing always takes KV,
    which may exceed M if the increment leads to the hidden kind.

    Increments of equal efficiency are taken in the order of the requests (first increments before later increments), so
    the solution of a problem is unique.

    Differences from the appendix: any number of kinds and zero costs are supported; with `fill`, step 4 is added, and
    V' counts the value of the whole option (the increment may be an upgrade, and its option has a greater value).
    """
    kind, value, cost = _take_free_options(problem)
    capacity = problem.capacity
    theta, request, column, gain, blocks = increments(problem, value, cost)
    if blocks.sum() <= capacity:
        kind[request] = column  # NumPy assigns in order: the last increment of a request stays
        return Schedule.of(problem, kind)
    order = _falling_until(theta, blocks, capacity)
    request, column, gain, blocks = request[order], column[order], gain[order], blocks[order]
    num_taken = int(np.searchsorted(np.cumsum(blocks), capacity, side="right"))

    first_out, leads_to = request[num_taken], column[num_taken]
    if fill:
        alternative = problem.value[first_out, leads_to] - value[first_out]
    else:
        alternative = gain[num_taken]
        fits = problem.cost[first_out] <= capacity
        leads_to = np.where(fits, problem.value[first_out], -np.inf).argmax()
    if alternative > gain[:num_taken].sum():
        request, column = first_out[None], leads_to[None]
    else:
        request, column = request[:num_taken], column[:num_taken]
    kind[request] = column
    value[request] = problem.value[request, column]
    cost[request] = problem.cost[request, column]
    left = capacity - int(cost.sum())
    if fill and left > 0:
        _fill(problem, kind, value, cost, left)
    return Schedule.of(problem, kind)


def _take_free_options(
    problem: KnapsackProblem,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Return the starting points of the hulls: the kind, value and cost of each request's best free option.

    A free option takes zero blocks and has a positive value. A request without such an option starts at `NOT_CHOSEN`,
    with value and cost 0.
    """
    n = problem.num_requests
    kind = np.full(n, NOT_CHOSEN, np.int64)
    value = np.zeros(n)
    free = problem.cost == 0
    if free.any():
        worth = np.where(free, problem.value, -np.inf)
        best = worth.argmax(axis=1)
        top = worth[np.arange(n), best]
        has = top > 0
        kind[has] = best[has]
        value[has] = top[has]
    return kind, value, np.zeros(n, np.int64)


def increments(
    problem: KnapsackProblem, value: NDArray[np.float64], cost: NDArray[np.int64]
) -> tuple[
    NDArray[np.float64],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.float64],
    NDArray[np.float64],
]:
    """Return the edges of all hulls, the first edges of all requests before the second edges.

    Returns:
        Efficiency, request, column that the edge leads to, gain in value, and added blocks of each edge.
    """
    passes: list[list[tuple[NDArray, ...]]] = [[] for _ in range(problem.num_kinds)]
    hull_edges = _two_kind_edges if problem.num_kinds == 2 else _hull_edges
    for start in range(0, problem.num_requests, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        edges = hull_edges(problem.value[chunk], problem.cost[chunk], problem.capacity, value[chunk], cost[chunk])
        for corner, (theta, request, *rest) in enumerate(edges):
            passes[corner].append((theta, request + start if start else request, *rest))
    parts = [part for corner in passes for part in corner]
    if not parts:
        none = np.zeros(0, np.int64)
        return np.zeros(0), none, none, np.zeros(0), np.zeros(0)
    theta, request, column, gain, blocks = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return theta, request, column, gain, blocks


def _two_kind_edges(
    value: NDArray[np.float64],
    cost: NDArray[np.int64],
    capacity: int,
    from_value: NDArray[np.float64],
    from_cost: NDArray[np.int64],
) -> list[tuple[NDArray, ...]]:
    """Compute `_hull_edges` for two kinds, the common case: the steeper option first, then the other if it adds value.

    `from_cost` is zero, because hulls start at free options.
    """
    values = np.maximum(value.T, _NO_VALUE, order="C")
    costs = np.array(cost.T, np.float64, order="C")
    if costs.size and (costs.max() > capacity or costs.min() <= 0):
        costs[(costs > capacity) | (costs <= 0)] = np.inf
    slope = (values - from_value) / costs
    is_second = slope[1] > slope[0]
    is_second |= (slope[1] == slope[0]) & (costs[1] < costs[0])  # the smaller step first
    steepest = np.maximum(slope[0], slope[1])
    keep = steepest > 0
    rows = np.flatnonzero(keep)
    if not rows.size:
        return []
    if rows.size < keep.size:
        is_second, steepest = is_second[keep], steepest[keep]
        values, costs, from_value = values[:, keep], costs[:, keep], from_value[keep]
    first = is_second.astype(np.int64)
    here = first * rows.size + np.arange(rows.size)
    there = (1 - first) * rows.size + np.arange(rows.size)
    value_here, cost_here = values.ravel().take(here), costs.ravel().take(here)
    edges = [(steepest, rows, first, value_here - from_value, cost_here)]
    gain = values.ravel().take(there) - value_here
    blocks = costs.ravel().take(there) - cost_here
    more = np.flatnonzero((gain > 0) & (blocks > 0) & (blocks < np.inf))
    if more.size:
        gain, blocks = gain[more], blocks[more]
        # Rounding must not let a later edge overtake an earlier one.
        theta = np.minimum(gain / blocks, steepest[more])
        edges.append((theta, rows[more], 1 - first[more], gain, blocks))
    return edges


def _hull_edges(
    value: NDArray[np.float64],
    cost: NDArray[np.int64],
    capacity: int,
    from_value: NDArray[np.float64],
    from_cost: NDArray[np.int64] | NDArray[np.float64],
) -> list[tuple[NDArray, ...]]:
    """Return the first edges of all hulls, the second edges, and so on: (efficiency, request, column, gain, blocks).

    The algorithm is gift wrapping: the steepest option from a request's current corner is its next corner. Each pass
    finds one corner of every request, so the work is (number of kinds) passes over (kinds, requests).
    """
    # (num_kinds, n): every operation below then runs along contiguous memory.
    option_value = np.maximum(value.T, _NO_VALUE, order="C")
    option_cost = np.array(cost.T, np.float64, order="C")
    option_cost[option_cost > capacity] = np.inf
    rows = np.arange(value.shape[0])
    ceiling = np.full(rows.size, np.inf)
    edges: list[tuple[NDArray, ...]] = []
    for _ in range(value.shape[1]):
        rise = option_value - from_value
        run = option_cost - from_cost
        slope = rise / np.where(run > 0, run, np.inf)
        column, at, steepest = _steepest(slope)
        keep = np.flatnonzero(steepest > 0)
        if not keep.size:
            break
        if keep.size < rows.size:
            rows, column, at = rows[keep], column[keep], at[keep]
            steepest, ceiling = steepest[keep], ceiling[keep]
            option_value, option_cost = option_value[:, keep], option_cost[:, keep]
        gain, blocks = rise.ravel()[at], run.ravel()[at]
        # Rounding must not let a later edge overtake an earlier one.
        ceiling = np.minimum(steepest, ceiling)
        edges.append((ceiling, rows, column, gain, blocks))
        corner = column * rows.size + np.arange(rows.size)
        from_value, from_cost = option_value.ravel()[corner], option_cost.ravel()[corner]
    return edges


def _steepest(
    slope: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the row of the largest value in each column of a (num_kinds, n) matrix, its flat index, and the value.

    Among equal values, the first row is taken.
    """
    n = slope.shape[1]
    row = (slope[1] > slope[0]).astype(np.int64) if slope.shape[0] == 2 else slope.argmax(axis=0)
    at = row * n + np.arange(n)
    return row, at, slope.ravel()[at]


def _falling_until(theta: NDArray[np.float64], blocks: NDArray[np.float64], capacity: int) -> NDArray[np.int64]:
    """Return indices that sort theta in decreasing order, with equal values in their given order.

    The result may leave out the last indices if the increments before them already take more than `capacity` together.
    """
    num = theta.size
    guess = int(2.5 * num * capacity / blocks.sum()) + 64  # small requests come first
    while guess < num // 2:
        front = np.flatnonzero(theta >= np.partition(theta, num - guess)[num - guess])
        if blocks[front].sum() > capacity:
            return front[_falling(theta[front])]
        guess *= 2
    return _falling(theta)


def _falling(theta: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return indices that sort theta in decreasing order, with equal values in their given order.

    NumPy's default sort is several times faster than its stable sort, so runs of equal values are ordered afterwards,
    by sorting (run, index) as one integer.
    """
    order = np.argsort(-theta)
    ordered = theta[order]
    differs = ordered[1:] != ordered[:-1]
    if differs.all():
        return order
    key = np.zeros(order.size, np.int64)
    np.cumsum(differs, out=key[1:])
    key *= order.size
    key += order
    key.sort()
    return key % order.size


def _fill(
    problem: KnapsackProblem,
    kind: NDArray[np.int64],
    value: NDArray[np.float64],
    cost: NDArray[np.int64],
    left: int,
) -> None:
    """Move requests to better options that fit the `left` blocks, changing `kind`, `value` and `cost` in place.

    All options are candidates, because an option below the hull may fit if the next corner of the hull does not. Each
    round takes the steepest move of every request, most efficient first, as long as the moves fit together. Requests
    without a move that fits are not considered again.
    """
    room = cost + left
    movable = np.zeros(problem.num_requests, np.bool_)
    for column in range(problem.num_kinds):
        movable |= (problem.value[:, column] > value) & (problem.cost[:, column] <= room)
    rows = np.flatnonzero(movable)
    for _ in range(_FILL_ROUNDS):
        if not rows.size:
            return
        rise = np.subtract(problem.value.take(rows, axis=0).T, value[rows], order="C")
        run = np.subtract(problem.cost.take(rows, axis=0).T, cost[rows], order="C")
        # A move that costs nothing or frees blocks comes first.
        slope = np.where((rise > 0) & (run <= left), rise / np.maximum(run, 1e-9), -np.inf)
        column, at, steepest = _steepest(slope)
        keep = np.flatnonzero(steepest > 0)
        if not keep.size:
            return
        order = keep[_falling(steepest[keep])]
        used = np.cumsum(run.ravel()[at[order]])
        over = np.flatnonzero(used > left)
        taken = order[: over[0]] if over.size else order
        moved, columns = rows[taken], column[taken]
        kind[moved] = columns
        value[moved] = problem.value[moved, columns]
        cost[moved] = problem.cost[moved, columns]
        left -= int(used[taken.size - 1])
        if left == 0:
            return
        rows = rows[keep]

"""Exact knapsack solver, a reference for the greedy solver; too slow for scheduling."""

import numpy as np

from apt_jax.sched.knapsack.problem import NOT_CHOSEN, KnapsackProblem, Schedule


def solve_exact(problem: KnapsackProblem, *, time_limit_s: float | None = None) -> Schedule:
    """Solve the multiple-choice knapsack to optimality as a mixed-integer program (HiGHS, through SciPy).

        max  sum v_ic x_ic   s.t.  sum m_ic x_ic <= M,   sum_c x_ic <= 1 for each i,   x_ic in {0, 1}

    Args:
        problem: the problem.
        time_limit_s: time limit in seconds; None: no limit.

    Raises:
        ImportError: SciPy is not installed.
        TimeoutError: the optimum was not proven within `time_limit_s`.
        RuntimeError: the solver failed.
    """
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError as error:
        raise ImportError("solve_exact needs SciPy: pip install scipy (solve_greedy works without it)") from error

    kind = np.full(problem.num_requests, NOT_CHOSEN, np.int64)
    request, column = np.nonzero((problem.value > 0) & (problem.cost <= problem.capacity))
    if not request.size:
        return Schedule.of(problem, kind)
    value = problem.value[request, column]
    cost = problem.cost[request, column].astype(np.float64)
    _, group = np.unique(request, return_inverse=True)
    choose = scipy.sparse.csr_array((np.ones(request.size), (group, np.arange(request.size))))
    constraints = scipy.sparse.vstack([choose, scipy.sparse.csr_array(cost[None])], format="csr")
    limits = np.ones(group[-1] + 2)
    limits[-1] = problem.capacity
    # HiGHS works with absolute tolerances: bring the values near 1.
    options: dict[str, float] = {"mip_rel_gap": 0.0}
    if time_limit_s is not None:
        options["time_limit"] = time_limit_s
    answer = scipy.optimize.milp(
        -value / value.max(),
        integrality=np.ones(request.size),
        bounds=scipy.optimize.Bounds(0, 1),
        constraints=scipy.optimize.LinearConstraint(constraints, -np.inf, limits),  # pyright: ignore[reportArgumentType] - stub: float only
        options=options,
    )
    if answer.status == 1:
        raise TimeoutError(f"no proven optimum within {time_limit_s=}")
    if not answer.success:
        raise RuntimeError(f"HiGHS failed: {answer.message}")
    taken = answer.x > 0.5
    kind[request[taken]] = column[taken]
    schedule = Schedule.of(problem, kind)
    assert schedule.cost <= problem.capacity, f"{schedule.cost} blocks chosen, {problem.capacity} available"
    return schedule

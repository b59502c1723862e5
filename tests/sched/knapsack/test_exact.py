import itertools
import sys

import numpy as np
import pytest

from apt_jax.sched import KnapsackProblem, solve_exact, solve_greedy
from tests.support.cases import num_cases
from tests.support.sched_problems import brute_force, check_feasible, optimum, random_problem


@pytest.mark.seeds
def test_brute_force_dynamic_program_and_highs_agree():
    rng = np.random.default_rng(7)
    for _ in range(num_cases(80, 400)):
        problem = random_problem(rng, num_requests=int(rng.integers(1, 7)))
        schedule = solve_exact(problem)
        check_feasible(problem, schedule.kind, schedule.value, schedule.cost)
        assert schedule.value == pytest.approx(brute_force(problem), rel=1e-9)
        assert schedule.value == pytest.approx(optimum(problem), rel=1e-9)


@pytest.mark.seeds
def test_greedy_is_never_under_half_of_highs():
    rng = np.random.default_rng(8)
    ratios = []
    for i in range(num_cases(300, 3000)):
        problem = random_problem(rng, num_requests=60 if i % 100 == 0 else None)
        best = solve_exact(problem).value
        value = solve_greedy(problem).value
        assert best / 2 * (1 - 1e-9) <= value <= best * (1 + 1e-9)
        if best > 0:
            ratios.append(value / best)
    print(f"greedy / HiGHS over {len(ratios)} problems: mean {np.mean(ratios):.4f}, least {np.min(ratios):.4f}")
    assert np.mean(ratios) > 0.98


def test_nothing_that_could_be_chosen():
    schedule = solve_exact(KnapsackProblem([[1.0, -1.0]], [[5, 0]], 4))
    assert schedule.kind.tolist() == [-1]
    assert solve_exact(KnapsackProblem(np.zeros((0, 2)), np.zeros((0, 2), int), 4)).value == 0


def test_missing_scipy_is_said_clearly(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match="pip install scipy"):
        solve_exact(KnapsackProblem([[1.0]], [[1]], 1))


def test_every_problem_of_up_to_four_requests_is_solved():
    """All multisets of options from a small grid, with every capacity."""
    options = [(1.0, 2.0, 2, 1), (3.0, 1.0, 2, 1), (2.0, 2.0, 4, 2), (2.0, -1.0, 4, 2)]
    for n in range(1, 5):
        for chosen in itertools.combinations_with_replacement(options, n):
            value = [row[:2] for row in chosen]
            cost = [row[2:] for row in chosen]
            for capacity in range(0, sum(row[0] for row in cost) + 1, 2 if n == 4 else 1):
                problem = KnapsackProblem(value, cost, capacity)
                schedule = solve_exact(problem)
                check_feasible(problem, schedule.kind, schedule.value, schedule.cost)
                assert schedule.value == pytest.approx(brute_force(problem), rel=1e-9)

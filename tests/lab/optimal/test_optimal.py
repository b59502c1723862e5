"""The constraint program against exhaustive search, on every instance of small families and on random ones."""

import dataclasses
import heapq
import itertools
import math
import sys

import numpy as np
import pytest

from apt_jax.core.kinds import CacheKindSpec
from apt_jax.errors import ConfigError
from apt_jax.lab.optimal.baselines import fcfs_schedule, policy_schedule
from apt_jax.lab.optimal.check import check_schedule
from apt_jax.lab.optimal.problem import (
    OBJECTIVES,
    OptimalBatch,
    OptimalProblem,
    OptimalRequest,
    OptimalSchedule,
)
from apt_jax.lab.optimal.solver import find_better, solve_optimal
from apt_jax.sched import StepCosts, UnifiedPolicy, make_policy
from tests.support.cases import cover, num_cases

COSTS = StepCosts(
    prefill_base_s=4.0,
    prefill_per_token_s=0.31,
    prefill_per_pair_s=0.07,
    prefill_per_request_s=0.11,
    prefill_per_kv_prefix_s=0.05,
    prefill_per_hidden_prefix_s=0.09,
    decode_base_s=3.0,
    decode_per_request_s=0.13,
    decode_per_token_s=0.017,
    decode_per_hidden_request_s=0.4,
    decode_per_hidden_token_s=0.043,
)
CHEAP_STEPS = dataclasses.replace(COSTS, prefill_base_s=0.3, decode_base_s=0.9)
"""Long prefills cost more than steps: evictions rarely pay, and the maximum of a mixed step matters."""
BOTH_KINDS = (CacheKindSpec(name="kv", blocks_per_group=2), CacheKindSpec(name="hidden", blocks_per_group=1))


def exhaustive(problem: OptimalProblem) -> float:
    """The optimum, by uniform-cost search over everything that can be done: Eqs. 1 to 4 read word for word.

    A state is what each request has generated and cached, with which kind; equal requests are told apart by nothing, so
    their states are sorted.
    """
    requests, costs = problem.requests, problem.costs
    n = len(requests)
    kinds = [k for k, s in enumerate(problem.kinds) if s.offered]

    def moves(i, state, now_s):
        """(c, evicts, kind) of one request, running or not, at `now_s`."""
        generated, m, kind = state
        yield 0, False, kind
        if generated == requests[i].output_tokens or requests[i].arrival_s > now_s:
            return
        if m and problem.eviction:
            yield 0, True, -1
        left = requests[i].prompt_tokens + generated - m
        for c in [left] if problem.chunk is None else range(1, left + 1):
            for k in [kind] if m else kinds:
                yield c, False, k

    def canonical(states):
        groups = {}
        for request, state in zip(requests, states, strict=True):
            groups.setdefault(request, []).append(state)
        return tuple(groups[r].pop(0) for r in requests if [groups[r].sort() if len(groups[r]) > 1 else 0])

    def successors(states, now_s):
        for choice in itertools.product(*(moves(i, states[i], now_s) for i in range(n))):
            running = [i for i in range(n) if choice[i][0]]
            if not running:
                continue
            c = [choice[i][0] for i in running]
            m = [states[i][1] for i in running]
            decode = [x == 1 and y > 0 for x, y in zip(c, m, strict=True)]
            if sum(c) > problem.max_num_batched_tokens:
                continue
            prefill = sum(x for x, d in zip(c, decode, strict=True) if not d)
            if problem.chunk is not None and prefill > problem.chunk:
                continue
            if not problem.hybrid_batching and any(decode) and not all(decode):
                continue
            used, after, first, last = 0, [], [], []
            for i, ((generated, held, _), (tokens, evicts, k)) in enumerate(zip(states, choice, strict=True)):
                held = 0 if evicts else held + tokens
                if held:
                    sizes = (problem.block_size, problem.hidden_block_size or problem.block_size)
                    used += problem.kinds[k].blocks_per_group * math.ceil(held / sizes[k])
                if tokens and held == requests[i].prompt_tokens + generated:
                    generated += 1
                    if generated == 1:
                        first.append(i)
                    if generated == requests[i].output_tokens:
                        last.append(i)
                        held, k = 0, -1
                after.append((generated, held, k))
            if used > problem.capacity_blocks:
                continue
            time_s = costs.step_s(
                np.array(c, np.int32),
                np.array(m, np.int32),
                np.array([choice[i][2] for i in running], np.int8),
            )
            yield canonical(after), time_s, first, last

    def price(now_s, end_s, first, last):
        """Return what a batch adds to the objective."""
        if problem.objective == "latency":
            return end_s - now_s
        if problem.objective == "slo":
            return sum(end_s - requests[i].arrival_s > requests[i].slo_ttft_s for i in first)
        ended = last if problem.objective == "completion" else first
        return sum(end_s - requests[i].arrival_s for i in ended)

    # The same states both earlier and at a lower cost are never worse: one can wait.
    reached: dict[tuple, list[tuple[float, float]]] = {}
    heap = [(0.0, 0.0, canonical([(0, 0, -1)] * n))]
    while heap:
        cost, now_s, states = heapq.heappop(heap)
        if all(s[0] == r.output_tokens for s, r in zip(states, requests, strict=True)):
            return n - cost if problem.objective == "slo" else cost
        front = reached.setdefault(states, [])
        if any(c <= cost + 1e-12 and t <= now_s + 1e-12 for c, t in front):
            continue
        front.append((cost, now_s))
        for start_s in sorted({now_s, *(r.arrival_s for r in requests if r.arrival_s > now_s)}):
            for after, time_s, first, last in successors(states, start_s):
                end_s = start_s + time_s
                added = price(now_s, end_s, first, last)
                heapq.heappush(heap, (cost + added, end_s, after))
    raise AssertionError("no schedule")


def check_optimal(problem: OptimalProblem) -> float:
    schedule = solve_optimal(problem)
    replay = check_schedule(problem, schedule)
    assert schedule.status == "optimal"
    assert replay.objective == schedule.objective
    assert replay.latency_s == schedule.latency_s
    best = exhaustive(problem)
    assert schedule.objective == pytest.approx(best, rel=1e-6), problem
    return best


RANDOM = (0, 1, 2, 5, 6, 7, 8, 9, 11, 23, 26, 31, 36, 38)
TWO_PROGRAMS = (0, 2, 3, 4, 5, 10)
"""Seeds in `make test`: they have every objective and option, and are solved in less than half a second."""


def problem_of(*lengths, capacity, tokens=64, **fields) -> OptimalProblem:
    fields.setdefault("costs", COSTS)
    return OptimalProblem(
        requests=tuple(OptimalRequest(prompt_tokens=i, output_tokens=o) for i, o in lengths),
        capacity_blocks=capacity,
        max_num_batched_tokens=tokens,
        **fields,
    )


def family(num_requests, prompts, outputs):
    """Every multiset of requests, with every capacity from the least to the first that never binds."""
    shapes = list(itertools.product(prompts, outputs))
    for lengths in itertools.combinations_with_replacement(shapes, num_requests):
        ends = [i + o - 1 for i, o in lengths]
        for capacity in range(max(ends), sum(ends) + 1):
            yield lengths, capacity


def test_one_request_takes_a_prefill_and_its_decodes():
    problem = problem_of((3, 3), capacity=5)
    schedule = solve_optimal(problem)
    assert [(b.rows, b.num_tokens, b.start) for b in schedule.batches] == [
        ((0,), (3,), (0,)),
        ((0,), (1,), (3,)),
        ((0,), (1,), (4,)),
    ]
    assert check_schedule(problem, schedule).used_blocks == (3, 4, 5)
    assert schedule.latency_s == pytest.approx(4 + 0.11 + 0.31 * 3 + 0.07 * 9 + 2 * (3 + 0.13) + 0.017 * (4 + 5))
    assert schedule.status == "optimal"


def test_short_prompts_are_evicted_and_long_ones_are_not():
    for prompt, evicts in ((1, True), (30, False)):
        problem = problem_of((prompt, 4), (prompt, 4), capacity=max(2 * prompt, prompt + 3))
        assert (solve_optimal(problem).num_evictions > 0) == evicts


@pytest.mark.parametrize("eviction", [True, False])
@pytest.mark.parametrize("hybrid_batching", [True, False])
def test_every_instance_of_up_to_two_requests_is_solved(eviction, hybrid_batching):
    for n in (1, 2):
        for lengths, capacity in family(n, (1, 3), (1, 2, 3)):
            if capacity % 2 == hybrid_batching:  # the other half in the slow sweep
                continue
            check_optimal(problem_of(*lengths, capacity=capacity, eviction=eviction, hybrid_batching=hybrid_batching))


def test_every_equal_instance_of_three_and_four_requests_is_solved():
    for n, prompt, output in ((3, 1, 2), (3, 2, 2), (4, 1, 2), (4, 2, 2), (3, 1, 3)):
        least = prompt + output - 1
        for capacity in range(least, n * least + 1, 2):
            check_optimal(problem_of(*[(prompt, output)] * n, capacity=capacity))


def random_problem(rng: np.random.Generator, num_requests: int) -> OptimalProblem:
    """Return a random problem with any options, small enough for the search."""
    online = rng.random() < 0.4
    chunked = rng.random() < 0.4
    small = num_requests > 2
    objective = ("latency", *OBJECTIVES)[rng.integers(5)]
    timed = online or objective != "latency"
    most_outputs = 2 if num_requests == 4 or (small and (timed or chunked)) else 3
    hard = chunked and objective == "completion"
    most_prompt = 2 if hard or (small and chunked) else 4
    hard |= num_requests == 4 and (timed or chunked)
    kinds = BOTH_KINDS if rng.random() < 0.5 and not hard else None
    lengths = [
        (int(rng.integers(1, most_prompt + 1)), int(rng.integers(1, most_outputs + 1))) for _ in range(num_requests)
    ]
    block_size = int(rng.choice([1, 2]))
    a_block = 2 if kinds else 1
    ends = [a_block * -(-(i + o - 1) // block_size) for i, o in lengths]
    least_tokens = max(i for i, _ in lengths)
    tokens = int(rng.integers(least_tokens, 4 * least_tokens + 1))
    arrivals = np.sort(np.round(rng.uniform(0, 12, num_requests), 2)) if online else np.zeros(num_requests)
    return OptimalProblem(
        requests=tuple(
            OptimalRequest(
                prompt_tokens=i,
                output_tokens=o,
                arrival_s=float(t),
                slo_ttft_s=float(np.round(rng.uniform(3, 15), 1)),
            )
            for (i, o), t in zip(lengths, arrivals, strict=True)
        ),
        capacity_blocks=int(rng.integers(max(ends), sum(ends) + 1)),
        max_num_batched_tokens=tokens,
        chunk=int(rng.integers(1, tokens + 1)) if chunked else None,
        hybrid_batching=bool(rng.random() < 0.7),
        eviction=bool(rng.random() < 0.7),
        block_size=block_size,
        hidden_block_size=int(rng.choice([block_size, block_size + 1])) if kinds else None,
        costs=COSTS if rng.random() < 0.5 else CHEAP_STEPS,
        objective=objective,
        kinds=kinds or (CacheKindSpec(name="kv", blocks_per_group=1),),
    )


@pytest.mark.parametrize("seed", cover(range(40), RANDOM))
def test_random_instances_with_arrivals_chunks_kinds_and_objectives(seed):
    rng = np.random.default_rng([17, seed])
    check_optimal(random_problem(rng, int(rng.choice([1, 2, 2, 3, 3, 4]))))


@pytest.mark.parametrize("seed", cover(range(12), TWO_PROGRAMS))
def test_batches_of_two_programs_take_both_phases_one_after_another(seed):
    rng = np.random.default_rng([18, seed])
    problem = random_problem(rng, int(rng.choice([2, 2, 3])))
    costs = dataclasses.replace(problem.costs, one_program=False)
    check_optimal(dataclasses.replace(problem, costs=costs, hybrid_batching=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400))
def test_more_random_instances(seed):
    rng = np.random.default_rng([18, seed])
    check_optimal(random_problem(rng, int(rng.choice([2, 3, 4]))))


@pytest.mark.slow
def test_every_instance_of_three_and_four_requests_is_solved():
    for n, prompts, outputs in (
        (2, (1, 2, 3), (1, 2, 3)),
        (3, (1, 3), (1, 2)),
        (4, (1, 2), (1, 2)),
    ):
        for lengths, capacity in family(n, prompts, outputs):
            for eviction in (True, False):
                check_optimal(problem_of(*lengths, capacity=capacity, eviction=eviction))


def test_a_smaller_kind_is_chosen_where_memory_is_short_and_only_there():
    lengths = [(4, 3)] * 2
    roomy = solve_optimal(problem_of(*lengths, capacity=24, kinds=BOTH_KINDS))
    short = solve_optimal(problem_of(*lengths, capacity=12, kinds=BOTH_KINDS))
    assert {k for b in roomy.batches for k in b.kind} == {0}
    assert {k for b in short.batches for k in b.kind} == {1}
    only_kv = solve_optimal(problem_of(*lengths, capacity=12, kinds=BOTH_KINDS[:1]))
    assert roomy.latency_s < short.latency_s < only_kv.latency_s


def test_a_batch_waits_for_an_arrival_where_that_pays():
    requests = (
        OptimalRequest(prompt_tokens=2, output_tokens=1),
        OptimalRequest(prompt_tokens=2, output_tokens=1, arrival_s=0.5),
    )
    problem = OptimalProblem(requests=requests, capacity_blocks=10, max_num_batched_tokens=10, costs=COSTS)
    schedule = solve_optimal(problem)
    assert [b.start_s for b in schedule.batches] == [0.5]
    assert schedule.latency_s == pytest.approx(exhaustive(problem))


def test_a_time_limit_leaves_a_valid_schedule_and_a_bound():
    problem = problem_of(*[(i, 6) for i in (2, 3, 4, 5, 6, 7)], capacity=20)
    schedule = solve_optimal(problem, time_limit_s=0.05)
    check_schedule(problem, schedule)
    assert schedule.status == "feasible"
    assert 0 < schedule.bound < schedule.latency_s


def change(schedule, j, **fields):
    batches = list(schedule.batches)
    batches[j] = dataclasses.replace(batches[j], **fields)
    return dataclasses.replace(schedule, batches=tuple(batches))


def test_the_checker_finds_broken_rules():
    problem = problem_of((2, 2), (2, 2), capacity=6, tokens=4)
    schedule = solve_optimal(problem)
    assert [b.num_tokens for b in schedule.batches] == [(2, 2), (1, 1)]
    tight = dataclasses.replace(problem, capacity_blocks=5)
    for broken, of, rule in (
        (schedule, tight, "above M=5"),
        (schedule, dataclasses.replace(problem, max_num_batched_tokens=3), "above C=3"),
        (schedule, dataclasses.replace(problem, chunk=3), "above P=3"),
        (change(schedule, 0, num_tokens=(1, 2)), problem, "is split into chunks"),
        (change(schedule, 1, num_tokens=(2, 1)), problem, "has 1 tokens, not 2"),
        (change(schedule, 1, start=(1, 2)), problem, "holds 2 tokens, not 1"),
        (change(schedule, 1, preempt=(0,)), problem, "runs and is evicted"),
        (change(schedule, 1, end_s=1.0), problem, "wrong end_s"),
        (change(schedule, 1, start_s=0.0), problem, "starts at"),
        (change(schedule, 1, kind=(0, 1)), problem, "no kind 1"),
        (dataclasses.replace(schedule, batches=schedule.batches[:1]), problem, "ends with 1 of 2"),
        (
            schedule,
            dataclasses.replace(
                problem,
                requests=(
                    problem.requests[0],
                    dataclasses.replace(problem.requests[1], arrival_s=1.0),
                ),
            ),
            "has not arrived",
        ),
    ):
        with pytest.raises(ValueError, match=rule):
            check_schedule(of, broken)
    mixed = OptimalBatch(start_s=0, end_s=0, rows=(), num_tokens=(), start=(), kind=())
    with pytest.raises(ValueError, match="is empty"):
        check_schedule(problem, dataclasses.replace(schedule, batches=(mixed,)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"capacity": 3}, "request 1 needs 5 blocks at its end, but the pool has 3"),
        ({"capacity": 9, "tokens": 3}, "request 1 has 4 prompt tokens, but a batch holds 3"),
    ],
)
def test_a_request_that_never_fits_is_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        solve_optimal(problem_of((1, 2), (4, 2), **fields))


def test_a_program_that_is_too_large_is_refused():
    with pytest.raises(ConfigError, match="fewer or shorter requests"):
        solve_optimal(problem_of(*[(500, 500)] * 3, capacity=1200, chunk=64))


def test_bad_problems_are_refused():
    for fields in ({"chunk": 65}, {"chunk": 2, "chunk_step": 4}, {"kinds": ()}, {"objective": "x"}):
        with pytest.raises(ValueError, match="must be"):
            dataclasses.replace(problem_of((1, 1), capacity=1), **fields)
    with pytest.raises(ValueError, match="at least 0"):
        problem_of((1, 1), capacity=1, costs=StepCosts(decode_base_s=-1.0))
    with pytest.raises(ValueError, match="empty"):
        problem_of(capacity=1)


def test_missing_scipy_is_said_clearly(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match="pip install scipy"):
        solve_optimal(problem_of((1, 2), (1, 1), capacity=2))


# --- starts and the question for a better one -----------------------------------------------------------------------


def starts_of(problem: OptimalProblem) -> list[OptimalSchedule]:
    names = ("fcfs", "sarathi-nocp", "sarathi-nocp-ef", "rank-org")
    return [policy_schedule(problem, make_policy(name)) for name in names]


def test_policies_make_schedules_that_the_optimum_bounds():
    seen = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        lengths = [(int(rng.integers(1, 9)), int(rng.integers(1, 4))) for _ in range(3)]
        problem = problem_of(*lengths, capacity=int(rng.integers(12, 20)))
        starts = starts_of(problem)
        best = solve_optimal(problem, starts=starts)
        assert best.status == "optimal"
        assert best.latency_s == pytest.approx(solve_optimal(problem).latency_s)
        for start in starts:
            assert check_schedule(problem, start).latency_s == start.latency_s
            assert start.latency_s >= best.latency_s - 1e-9
            seen.add(round(start.latency_s / best.latency_s, 3) > 1)
    assert seen == {True, False}


def test_with_ample_memory_a_policy_is_what_the_paper_says_it_is():
    problem = problem_of((4, 3), (6, 2), capacity=100)
    start = policy_schedule(problem, make_policy("fcfs"))
    assert [b.rows for b in start.batches] == [(0, 1), (0, 1), (0,)]
    assert start.latency_s == pytest.approx(fcfs_schedule(problem).latency_s)


def test_arrivals_are_waited_for():
    requests = (
        OptimalRequest(prompt_tokens=2, output_tokens=1),
        OptimalRequest(prompt_tokens=2, output_tokens=2, arrival_s=50.0),
    )
    problem = OptimalProblem(requests=requests, capacity_blocks=10, max_num_batched_tokens=10, costs=COSTS)
    start = policy_schedule(problem, make_policy("fcfs"))
    assert [b.start_s for b in start.batches][:2] == [0.0, 50.0]


def test_a_start_is_the_answer_where_the_time_is_up():
    problem = problem_of(*[(2, 3)] * 4, capacity=6)
    best = solve_optimal(problem)
    alone = solve_optimal(problem, time_limit_s=1e-3)
    assert best.latency_s < alone.latency_s
    again = solve_optimal(problem, time_limit_s=1e-3, starts=[fcfs_schedule(problem), best])
    assert again.latency_s == pytest.approx(best.latency_s)
    assert again.batches == best.batches


def test_a_start_of_another_problem_is_refused():
    other = solve_optimal(problem_of((4, 3), (4, 3), capacity=100))
    with pytest.raises(ValueError, match="above M"):
        solve_optimal(problem_of((4, 3), (4, 3), capacity=7), starts=[other])


def test_a_policy_that_breaks_a_rule_is_refused():
    problem = problem_of((9, 3), (9, 3), capacity=40)
    with pytest.raises(ValueError, match="split into chunks"):
        policy_schedule(problem, UnifiedPolicy("pieces", prefill_tokens=12))


@pytest.mark.in_turn(1)
@pytest.mark.seeds
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_better_schedule_is_found_exactly_where_there_is_one(objective):
    said = []
    for seed in range(6 if objective in ("latency", "slo") else num_cases(3, 6)):
        rng = np.random.default_rng(seed)
        lengths = [(int(rng.integers(2, 9)), int(rng.integers(1, 4))) for _ in range(3)]
        problem = dataclasses.replace(problem_of(*lengths, capacity=int(rng.integers(12, 16))), objective=objective)
        if objective == "slo":
            requests = [dataclasses.replace(r, slo_ttft_s=14.0) for r in problem.requests]
            problem = dataclasses.replace(problem, requests=tuple(requests))
        start = fcfs_schedule(problem)
        best = solve_optimal(problem).objective
        for by in (0.02, 0.1, 0.3):
            answer, found = find_better(problem, start, by=by)
            wanted = start.objective * (1 + by if objective == "slo" else 1 - by)
            exists = best >= wanted if objective == "slo" else best <= wanted
            assert answer == ("yes" if exists else "no")
            said.append(answer)
            if found is not None:
                value = check_schedule(problem, found).objective
                assert value >= wanted if objective == "slo" else value <= wanted * (1 + 1e-6)
    assert "no" in said
    assert objective == "slo" or "yes" in said


def test_the_time_may_be_too_short_to_know():
    problem = problem_of(*[(i, 6) for i in (2, 3, 4, 5, 6, 7)], capacity=20)
    start = fcfs_schedule(problem)
    assert find_better(problem, start, by=0.6, time_limit_s=0.01) == ("unknown", None)

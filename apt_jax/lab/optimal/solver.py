"""Optimal schedules of small workloads: InferMax's constraint program (§5), with arrivals and cache kinds.

An optimal schedule requires every output length beforehand, so it is not a policy but a bound to compare policies with.

1. `OptimalProblem` defines the requests, limits, costs and objective.
2. `solve_optimal` states the problem as a mixed-integer linear program, solves it with HiGHS, and reads the schedule
   from the solution.
3. `check_schedule` replays any schedule by the rules of the paper and computes its times with `StepCosts.step_s`. It
   shares no code with 2, and all reported numbers come from it.

**The program.** InferMax has integers S, m, c, g, e for each request and batch, and writes Eqs. 1 to 3 with big-M terms
(Eq. 5). Here a request is a path through the graph of its states (tokens generated, tokens cached, kind), with one arc
per batch; each arc is a legal (c, g, e). Then S, m, c, g, e are sums over the arcs taken, and Eqs. 1 to 3 hold by
construction. Products such as c^2 + 2mc are constants of the arcs, so they are exact. The size of the program depends
on the number of states, not on the lengths of prompts: without chunks a request of O tokens has 2 O states for any I.
Equal requests share one graph with an integer flow instead of a path, which removes their symmetry from the program.
The remaining constraints span requests: Eq. 4 with C and M (in blocks), P, hybrid batching, and the time of each batch.
Its maximum over the two phases (`StepCosts`) becomes two inequalities, because shorter batches improve every objective
here.

**Number of batches.** The program needs an upper bound on the number of batches that still admits an optimal schedule.
The bound holds because without chunks every batch generates a token, and because a schedule need not take longer than
the best of a few simple schedules, which are tried first.

**Starts.** The paper initializes the program with the output of other schedulers. SciPy cannot pass an initial solution
to HiGHS, so given schedules (`starts`, made by `policy_schedule`) are used in other ways: the best of them bounds the
number of batches, excludes all worse schedules, and is the result if the time limit ends the search before a better
schedule is found. `find_better` answers the paper's other question: whether a schedule exists that is, for example, 10
% better than a given one. It returns the first such schedule, or proves that there is no such schedule, which is often
faster than finding the optimum.

**Differences from the paper.** A request's memory is free after its last batch (in the paper, only after an eviction).
An evicted request may run again from the next batch on, with either kind. A batch may wait for arrivals.

**Solver.** HiGHS comes with SciPy, which is already a dependency. With 4 equal requests of 4 tokens, whose optimum
takes 11 to 16 batches, it proves the optimum in 0.1 to 8 s on one core with the linear costs of InferMax §5.1, for any
prompt length. OR-Tools CP-SAT (9.15, one worker, Eqs. 1 to 4 as written) finds the same optima, but needs 9 s for the
proof with prompts of 1 token and more than 100 s with prompts of 32 and 128. Nor can it be installed together with this
package: it needs protobuf < 6.34, but the gRPC service needs protobuf >= 7.35.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from apt_jax.core.kinds import HIDDEN, NO_KIND
from apt_jax.costs.model import StepCosts
from apt_jax.errors import ConfigError
from apt_jax.lab.optimal.baselines import best_simple_schedule, schedule_of
from apt_jax.lab.optimal.check import check_schedule
from apt_jax.lab.optimal.linear_program import LinearProgram
from apt_jax.lab.optimal.problem import BatchRow, OptimalProblem, OptimalRequest, OptimalSchedule
from apt_jax.lab.optimal.request_graph import MAX_VARIABLES, Arc, State, arcs_of, distances


def _num_batches(problem: OptimalProblem, simple: OptimalSchedule) -> int:
    """Return an upper bound on the number of non-empty batches of at least one optimal schedule."""
    costs, requests = problem.costs, problem.requests
    outputs = sum(r.output_tokens for r in requests)
    limits = []
    if problem.chunk is None:
        limits.append(outputs)  # each batch generates a token
    elif problem.eviction:  # each residency in the cache generates a token, and takes at most its length in batches
        limits.append(sum(r.prompt_tokens + s for r in requests for s in range(r.output_tokens)))
    else:
        limits.append(sum(r.prompt_tokens + r.output_tokens - 1 for r in requests))
    base_s = _least_batch_s(problem)
    if base_s > 0:
        prompts_s = 0.0
        if problem.chunk is None:  # in chunks of one token a prompt costs as much as decodes
            prompts_s = sum(
                costs.prefill_per_token_s * r.prompt_tokens + costs.prefill_per_pair_s * r.prompt_tokens**2
                for r in requests
            )
        last_s = max(r.arrival_s for r in requests)
        # Time by which the objective is settled in any schedule at least as good as the simple one ...
        if problem.objective == "latency":
            settled_s = simple.latency_s
        elif problem.objective == "slo":
            settled_s = max((r.arrival_s + r.slo_ttft_s for r in requests if r.slo_ttft_s < math.inf), default=0)
        else:
            settled_s = simple.objective + last_s
        # ... and the batches that may come after it: at most those of each request once more from the start.
        tail = 0
        if problem.objective in ("slo", "ttft"):
            prompts_s = 0.0
            tail = outputs
            if problem.chunk is not None:
                tail = sum(r.prompt_tokens + r.output_tokens for r in requests)
        limits.append(math.floor((settled_s - prompts_s) / base_s * (1 + 1e-9)) + tail)
    return max(1, min(limits))


def _least_batch_s(problem: OptimalProblem) -> float:
    """Return a lower bound on the time of a batch in seconds."""
    costs = problem.costs
    return min(
        costs.prefill_base_s + costs.prefill_per_request_s,
        costs.decode_base_s
        + min(costs.decode_per_request_s, costs.decode_per_hidden_request_s)
        + 2 * min(costs.decode_per_token_s, costs.decode_per_hidden_token_s),
    )


def _simple_bound(problem: OptimalProblem) -> float:
    """Return a bound on the objective that needs no solver: each output token of a request takes at least one batch."""
    least_s, requests = _least_batch_s(problem), problem.requests
    if problem.objective == "slo":
        return float(len(requests))
    if problem.objective == "latency":
        return max(r.arrival_s + r.output_tokens * least_s for r in requests)
    if problem.objective == "ttft":
        return len(requests) * least_s
    return sum(r.output_tokens for r in requests) * least_s


def _longest_batch_s(problem: OptimalProblem) -> float:
    """Return an upper bound on the time of a batch in seconds."""
    costs, c = problem.costs, problem.max_num_batched_tokens
    rows = len(problem.requests)
    cached = sum(r.prompt_tokens + r.output_tokens for r in problem.requests)
    tokens = min(c, cached)
    return (
        costs.prefill_base_s
        + costs.decode_base_s
        + rows * (costs.prefill_per_request_s + costs.decode_per_request_s)
        + rows * costs.decode_per_hidden_request_s
        + tokens * costs.prefill_per_token_s
        + costs.prefill_per_pair_s * tokens * (tokens + 2 * cached)
        + cached * (costs.prefill_per_kv_prefix_s + costs.prefill_per_hidden_prefix_s)
        + cached * (costs.decode_per_token_s + costs.decode_per_hidden_token_s)
    )


def solve_optimal(
    problem: OptimalProblem,
    *,
    time_limit_s: float | None = None,
    starts: Sequence[OptimalSchedule] = (),
) -> OptimalSchedule:
    """Return an optimal schedule, or the best schedule found within the time limit, with a bound.

    Args:
        problem: the problem.
        time_limit_s: time limit of the search in seconds; None: no limit.
        starts: schedules of the problem made by other schedulers, which bound the search.

    Raises:
        ConfigError: a request can never run, or the program would be too large.
        ValueError: a start breaks a rule of the problem.
        ImportError: SciPy is not installed.
    """
    made = _make_program(problem, starts)
    simple, sign = made.simple, made.sign
    answer = made.program.solve(time_limit_s)
    if answer.status not in (0, 1):
        raise RuntimeError(f"HiGHS failed: {answer.message}")
    bound = -math.inf if answer.mip_dual_bound is None else float(answer.mip_dual_bound)
    bound = sign * bound / made.unit - made.offset
    bound = sign * max(sign * bound, sign * _simple_bound(problem))
    found = simple
    if answer.x is not None:
        solved = made.read(answer.x)
        if sign * solved.objective <= sign * simple.objective:
            found = solved
    gap = sign * (found.objective - bound)
    proven = answer.status == 0 or gap <= 1e-6 * abs(found.objective)
    if proven:
        assert abs(gap) <= 1e-5 * max(abs(found.objective), 1e-12), (
            f"the program's optimum is {bound}, its schedule has {found.objective}"
        )
    return dataclasses.replace(
        found,
        bound=found.objective if proven else bound,
        status="optimal" if proven else "feasible",
    )


def find_better(
    problem: OptimalProblem,
    than: OptimalSchedule,
    *,
    by: float = 0.1,
    time_limit_s: float | None = None,
) -> tuple[Literal["yes", "no", "unknown"], OptimalSchedule | None]:
    """Find a schedule whose objective is better than that of a given schedule by at least the fraction `by` (InferMax
    §5).

    Args:
        problem: the problem.
        than: schedule of the problem to compare with.
        by: required improvement. 0.1 means at most 0.9 times the latency or sum, or for "slo" at least 1.1 times as
            many first tokens on time.
        time_limit_s: time limit of the search in seconds; None: no limit.

    Returns:
        "yes" and such a schedule, "no" and None if there is no such schedule, or "unknown" and None after the time
        limit.

    Raises:
        ConfigError: a request can never run, or the program would be too large.
        ValueError: `by` is not in [0, 1), or `than` breaks a rule of the problem.
        ImportError: SciPy is not installed.
    """
    if not 0 <= by < 1:
        raise ValueError(f"{by=} must lie in [0, 1)")
    least = check_schedule(problem, than).objective
    made = _make_program(problem, (than,))
    wanted = least * (1 + by) if problem.objective == "slo" else least * (1 - by)
    if made.sign * made.simple.objective <= made.sign * wanted:
        return "yes", made.simple
    program = made.program
    terms = {i: cost for i, cost in enumerate(program.cost) if cost}
    program.at_most(terms, made.sign * (wanted + made.offset) * made.unit * (1 + 1e-9))
    program.cost = [0.0] * len(program.cost)
    answer = program.solve(time_limit_s)
    if answer.status not in (0, 1, 2):
        raise RuntimeError(f"HiGHS failed: {answer.message}")
    if answer.x is not None:
        return "yes", made.read(answer.x)
    return ("no" if answer.status == 2 else "unknown"), None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Made:
    """The program for a problem, and the meaning of its variables."""

    problem: OptimalProblem
    program: LinearProgram
    classes: dict[OptimalRequest, list[int]]
    flows: list[list[tuple[OptimalRequest, Arc, int]]]
    simple: OptimalSchedule
    """Best schedule known before solving."""
    sign: float
    """1 if the objective is minimized, -1 if it is maximized."""
    unit: float
    """Scale of the program: its objective is `sign * unit * (objective of the problem + offset)`."""
    offset: float

    def read(self, x: np.ndarray) -> OptimalSchedule:
        return schedule_of(self.problem, _read(self.classes, self.flows, x))


def _make_program(problem: OptimalProblem, starts: Sequence[OptimalSchedule]) -> _Made:
    if (misfit := problem.misfit()) is not None:
        raise ConfigError(f"request {misfit[0]} {misfit[1]}")
    classes: dict[OptimalRequest, list[int]] = {}
    for i, request in enumerate(problem.requests):
        classes.setdefault(request, []).append(i)
    graphs: dict[OptimalRequest, list[Arc]] = {}
    num_batches = max(r.output_tokens for r in classes)  # a lower bound
    for request in classes:
        graphs[request] = arcs_of(problem, request)
        _check_size(graphs, num_batches)
    sign, unit = (-1.0, 1.0) if problem.objective == "slo" else (1.0, 0.0)
    simple = best_simple_schedule(problem)
    for start in starts:
        replay = check_schedule(problem, start)
        if sign * replay.objective < sign * simple.objective:
            simple = dataclasses.replace(
                start,
                latency_s=replay.latency_s,
                objective=replay.objective,
                bound=math.nan,
                status="feasible",
            )
    num_batches = _num_batches(problem, simple)
    _check_size(graphs, num_batches)

    program = LinearProgram()
    # Times are scaled to about 100 in total: HiGHS works with absolute tolerances.
    span_s = max(simple.latency_s, 1e-12)
    scale = 100.0 / span_s
    costs = dataclasses.replace(
        problem.costs,
        **{
            f.name: scale * getattr(problem.costs, f.name)
            for f in dataclasses.fields(problem.costs)
            if f.name != "one_program"
        },
    )
    flows: list[list[tuple[OptimalRequest, Arc, int]]] = [[] for _ in range(num_batches)]
    for request, members in classes.items():
        _add_flow(program, problem, request, len(members), graphs[request], flows)
    times = [_add_batch(program, problem, costs, flow, len(problem.requests)) for flow in flows]
    _add_objective(program, problem, classes, flows, times, simple, scale)
    offset = 0.0
    if problem.objective in ("ttft", "completion"):
        offset = sum(r.arrival_s for r in problem.requests)
    return _Made(
        problem=problem,
        program=program,
        classes=classes,
        flows=flows,
        simple=simple,
        sign=sign,
        unit=unit or scale,
        offset=offset,
    )


def _check_size(graphs: dict[OptimalRequest, list[Arc]], num_batches: int) -> None:
    size = num_batches * sum(map(len, graphs.values()))
    if size > MAX_VARIABLES:
        raise ConfigError(
            f"the program needs {size:,} variables or more (over {num_batches} batches), but the limit is "
            f"{MAX_VARIABLES:,}: use fewer or shorter requests, or larger or no chunks"
        )


def _add_flow(
    program: LinearProgram,
    problem: OptimalProblem,
    request: OptimalRequest,
    count: int,
    arcs: list[Arc],
    flows: list[list[tuple[OptimalRequest, Arc, int]]],
) -> None:
    """Add the flow of `count` equal requests from their start to their end, one arc per request and batch."""
    start, done = (0, 0, NO_KIND), (request.output_tokens, 0, NO_KIND)
    ahead = distances(arcs, start, backwards=False)
    behind = distances(arcs, done, backwards=True)
    last = len(flows) - 1
    incoming: dict[State, dict[int, float]] = {}
    for j, flow in enumerate(flows):
        balance: dict[State, dict[int, float]] = collections.defaultdict(dict)
        arriving: dict[State, dict[int, float]] = collections.defaultdict(dict)
        for arc in arcs:
            if ahead.get(arc.source, math.inf) > j or behind.get(arc.target, math.inf) > last - j:
                continue
            column = program.column(count, integer=True)
            flow.append((request, arc, column))
            balance[arc.source][column] = 1.0
            arriving[arc.target][column] = 1.0
        for state in balance.keys() | incoming.keys():
            terms = dict(balance.get(state, {}))
            if j == 0 and state == start:
                program.equal(terms, count)
                continue
            for column in incoming.get(state, {}):
                terms[column] = -1.0
            program.equal(terms, 0)
        incoming = arriving


def _add_batch(
    program: LinearProgram,
    problem: OptimalProblem,
    costs: StepCosts,
    flow: list[tuple[OptimalRequest, Arc, int]],
    num_requests: int,
) -> tuple[int, int, int]:
    """Add the constraints of one batch: Eq. 4, P, its phases and its time.

    Returns:
        Columns of three variables: the time of the batch, whether it has prefills, and whether it has decodes.
    """
    time = program.column(np.inf, integer=False)
    has_prefill = program.column(1, integer=True)
    has_decode = program.column(1, integer=True)
    tokens: dict[int, float] = {}
    blocks: dict[int, float] = {}
    read: dict[int, float] = {}
    prefill: dict[int, float] = {}
    decode: dict[int, float] = {}
    prefills: dict[int, float] = {}
    decodes: dict[int, float] = {}
    shares: dict[tuple[OptimalRequest, int], dict[int, float]] = collections.defaultdict(dict)
    for request, arc, column in flow:
        m = arc.source[1]
        if arc.blocks:
            blocks[column] = arc.blocks
        if arc.phase == 0:
            continue
        tokens[column] = arc.c
        shares[request, arc.phase][column] = 1.0
        hidden = arc.kind == HIDDEN
        if arc.phase == 1:
            prefills[column] = arc.c
            read[column] = costs.prefill_per_pair_s * arc.c * (arc.c + 2 * m) + m * (
                costs.prefill_per_hidden_prefix_s if hidden else costs.prefill_per_kv_prefix_s
            )
            prefill[column] = costs.prefill_per_request_s + costs.prefill_per_token_s * arc.c
        else:
            decodes[column] = 1.0
            read[column] = (m + 1) * (costs.decode_per_hidden_token_s if hidden else costs.decode_per_token_s)
            decode[column] = costs.decode_per_hidden_request_s if hidden else costs.decode_per_request_s
    program.at_most(tokens, problem.max_num_batched_tokens)
    program.at_most(blocks, problem.capacity_blocks)
    if problem.chunk is not None:
        program.at_most(prefills, problem.chunk)
    if not problem.hybrid_batching:
        program.at_most({has_prefill: 1.0, has_decode: 1.0}, 1)
    for (request, phase), columns in shares.items():
        count = sum(1 for r in problem.requests if r == request)
        program.at_most({**columns, (has_prefill if phase == 1 else has_decode): -count}, 0)
    for has, active in ((has_prefill, prefills), (has_decode, decodes)):
        program.at_most({has: 1.0, **dict.fromkeys(active, -1.0)}, 0)
    bases = {has_decode: costs.decode_base_s, has_prefill: costs.prefill_base_s}
    if not costs.one_program:
        program.at_most({time: -1.0, **bases, **_sum(_sum(decode, prefill), read)}, 0)
        return time, has_prefill, has_decode
    # First the decode side of the maximum in `StepCosts`, then the prefill side, which also counts decode tokens.
    program.at_most({time: -1.0, has_decode: bases[has_decode], **_sum(decode, read)}, 0)
    side = {time: -1.0, has_prefill: bases[has_prefill], **_sum(prefill, read)}
    if problem.hybrid_batching and costs.prefill_per_token_s and decodes:
        beside = program.column(num_requests, integer=False)  # number of decodes if there are prefills, else 0
        program.at_most({**decodes, beside: -1.0, has_prefill: num_requests}, num_requests)
        side[beside] = costs.prefill_per_token_s
    program.at_most(side, 0)
    return time, has_prefill, has_decode


def _sum(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in a.keys() | b.keys()}


def _add_objective(
    program: LinearProgram,
    problem: OptimalProblem,
    classes: dict[OptimalRequest, list[int]],
    flows: list[list[tuple[OptimalRequest, Arc, int]]],
    times: list[tuple[int, int, int]],
    simple: OptimalSchedule,
    scale: float,
) -> None:
    """Add the order and end times of the batches, in the program's unit of time, and the objective."""
    # Empty batches come last.
    for (_, prefill, decode), (_, later_prefill, later_decode) in itertools.pairwise(times):
        for later in (later_prefill, later_decode):
            program.at_most({later: 1.0, prefill: -1.0, decode: -1.0}, 0)
    if problem.objective == "latency":
        # Exclude schedules that are worse than the simple schedule.
        program.at_most({t: 1.0 for t, *_ in times}, 100.0 * (1 + 1e-6))
    offline = all(r.arrival_s == 0 for r in classes)
    if problem.objective == "latency" and offline:
        for time, *_ in times:
            program.cost[time] = 1.0
        return
    # end_j: Acc_j of the paper, plus the waiting time before the batch.
    ends = [program.column(np.inf, integer=False) for _ in times]
    for j, (time, *_) in enumerate(times):
        program.at_most({ends[j]: -1.0, time: 1.0} | ({ends[j - 1]: 1.0} if j else {}), 0)
        for request, members in classes.items():
            if not request.arrival_s:
                continue
            waiting = {
                column: 1.0
                for r, arc, column in flows[j]
                if r == request and arc.source == (0, 0, NO_KIND) == arc.target
            }
            arrived = program.column(1, integer=True)
            program.at_most({arrived: -len(members), **{c: -1.0 for c in waiting}}, -len(members))
            # Empty batches after the last request's end have started too, which changes nothing.
            program.at_most({ends[j]: -1.0, time: 1.0, arrived: scale * request.arrival_s}, 0)
    if problem.objective == "latency":
        program.cost[ends[-1]] = 1.0
        program.at_most({ends[-1]: 1.0}, 100.0 * (1 + 1e-6))
        return
    # The k-th of a class's equal requests has passed batch j if k of them got their first (or last) token before it. It
    # waits during all batches that it has not passed.
    total: dict[int, float] = {}
    late_s = _latest_end_s(problem, simple, len(flows)) * scale
    longest_s = min(late_s, scale * (_longest_batch_s(problem) + max(r.arrival_s for r in classes)))
    least_s = scale * _least_batch_s(problem)
    for request, members in classes.items():
        columns = []
        for _ in members:
            if problem.objective == "slo":
                columns.append(program.column(1, integer=True, cost=-1.0))
            else:
                columns.append(-1)
        if problem.objective == "slo" and request.slo_ttft_s == math.inf:
            continue
        over: dict[int, float] = {}
        for j, flow in enumerate(flows):
            passed = [program.column(1, integer=True) for _ in members]
            program.at_most({**dict.fromkeys(passed, 1.0), **over}, 0)
            for k, column in enumerate(columns):
                if k:
                    program.at_most({passed[k]: 1.0, passed[k - 1]: -1.0}, 0)
                if problem.objective == "slo":
                    limit = scale * (request.arrival_s + request.slo_ttft_s)
                    program.at_most(
                        {ends[j]: 1.0, column: late_s, passed[k]: -late_s},
                        limit * (1 + 1e-12) + late_s,
                    )
                else:
                    wait = program.column(np.inf, integer=False, cost=1.0)
                    total[wait] = 1.0
                    since = {ends[j - 1]: -1.0} if j else {}
                    program.at_most({ends[j]: 1.0, wait: -1.0, passed[k]: -longest_s} | since, 0)
                    program.at_most({wait: -1.0, passed[k]: -least_s}, -least_s)
            over = dict(over)
            for r, arc, column in flow:
                event = (
                    arc.target == (request.output_tokens, 0, NO_KIND) != arc.source
                    if problem.objective == "completion"
                    else arc.generates and arc.source[0] == 0
                )
                if r == request and event:
                    over[column] = -1.0
    if total:
        offset_s = sum(r.arrival_s for r in problem.requests)
        program.at_most(total, scale * (simple.objective + offset_s) * (1 + 1e-6))


def _latest_end_s(problem: OptimalProblem, simple: OptimalSchedule, num_batches: int) -> float:
    """Return an upper bound on the end of the last batch in schedules worth considering, seconds."""
    last_s = max(r.arrival_s for r in problem.requests)
    if problem.objective == "completion":
        return simple.objective + last_s
    return last_s + num_batches * _longest_batch_s(problem)


def _read(
    classes: dict[OptimalRequest, list[int]],
    flows: list[list[tuple[OptimalRequest, Arc, int]]],
    x: np.ndarray,
) -> list[tuple[list[BatchRow], list[int]]]:
    """Return the batches of a solution, as (rows, preempted requests); the units of a flow are assigned to requests in
    order."""
    at = {i: (0, 0, NO_KIND) for members in classes.values() for i in members}
    steps: list[tuple[list[BatchRow], list[int]]] = []
    for flow in flows:
        rows: list[BatchRow] = []
        preempt: list[int] = []
        moved: set[int] = set()
        for request, arc, column in flow:
            for _ in range(round(x[column])):
                i = next(i for i in classes[request] if i not in moved and at[i] == arc.source)
                moved.add(i)
                if arc.phase:
                    rows.append((i, arc.c, arc.source[1], arc.kind))
                elif arc.evicts:
                    preempt.append(i)
                at[i] = arc.target
        if rows:
            steps.append((rows, preempt))
    # Equal requests are numbered in the order in which they start.
    starts = dict.fromkeys(at, -1)
    for j, (rows, _) in enumerate(steps):
        for i, *_ in rows:
            if starts[i] < 0:
                starts[i] = j
    new = {}
    for members in classes.values():
        new.update(zip(sorted(members, key=lambda i: (starts[i], i)), members, strict=True))
    return [([(new[i], c, m, kind) for i, c, m, kind in rows], [new[i] for i in gone]) for rows, gone in steps]

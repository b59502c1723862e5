"""Optimal schedules of small workloads: InferMax's constraint program (§5), with arrivals and cache kinds.

Knows every output length beforehand, so it is no policy but what policies are measured against.

1. `OptimalProblem` says what is to be scheduled, under which limits, at which costs, and what counts as good.
2. `solve_optimal` states it as a mixed-integer linear program, has HiGHS solve it, and reads the schedule off.
3. `check_schedule` replays any schedule by the rules of the paper and prices it with `StepCosts.step_s`. It shares no
   code with 2; every number that is reported comes from it.

**The program.** InferMax has integers S, m, c, g, e a request and batch, and writes Eqs. 1 to 3 with big-M terms (Eq. 5).
Here a request is a path through the graph of its states (tokens generated, tokens cached, kind): one step a batch, each
arc one legal (c, g, e). Then S, m, c, g, e are sums over the arcs taken, Eqs. 1 to 3 hold by construction, products such
as c^2 + 2mc are constants of the arcs, so they are exact, and the size depends on how many states there are, not on how
long prompts are: without chunks a request of O tokens has 2 O states, whatever I is. Equal requests share one graph
with an integer flow in place of a path, which leaves the solver none of their symmetry. Constraints over requests are
left: Eq. 4 with C and M (in blocks), P, hybrid batching, and the time of each batch, whose maximum over the two
phases (`StepCosts`) is two inequalities, as every objective here only gains from shorter batches.

**Number of batches.** The program needs it beforehand. It is bounded so that the optimum is not lost: without chunks every
batch generates a token, and no schedule may take longer than the best of a few simple ones that are tried first.

**Starts.** The paper initialises the program with the output of other schedulers. SciPy hands HiGHS no first solution, so schedules
that are given (`starts`, made by `policy_schedule`) do what can be done without: the best of them bounds the number of batches and
cuts off all that is worse, and is the answer where the time is up before a better one is found. `find_better` asks the paper's
other question, whether a schedule exists that is, say, 10 % better than a given one: the first such schedule is the answer, or the
proof that there is none, which is often quicker than the optimum.

**Where we differ from the paper.** A request's memory is free after its last batch (the paper leaves it to an eviction).
An evicted request may run again from the next batch on, with either kind. In-between arrivals a batch may wait.

**Solver.** HiGHS through SciPy, already a dependency: with 4 equal requests of 4 tokens, whose optimum takes 11 to 16
batches, it proves the optimum in 0.1 to 8 s on one core with the linear costs of InferMax §5.1, whatever the prompt. OR-Tools
CP-SAT (9.15, one worker, Eqs. 1 to 4 as written) finds the same optima, but proves one with prompts of 1 token in 9 s,
and none in 100 s with prompts of 32 and 128. It could not be installed beside this package either: it needs
protobuf < 6.34, the gRPC service needs protobuf >= 7.35.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from apt_jax.errors import ConfigError
from apt_jax.sched.check import checked_schedule
from apt_jax.sched.view import (
    HIDDEN,
    NO_KIND,
    NUM_KINDS,
    KindSpec,
    Policy,
    RequestTable,
    SchedulerView,
    StepCosts,
)

Objective = Literal["latency", "completion", "ttft", "slo"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "completion", "ttft", "slo")
"""End of the last batch; sum over requests of last token, or of first token, less arrival; first tokens in time."""

_KV_ONLY = (KindSpec(name="kv", blocks_per_group=1),)
_MAX_VARIABLES = 200_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalRequest:
    """A request with everything known about it."""

    prompt_tokens: int
    """I."""
    output_tokens: int
    """O, the last token included; it is generated but never cached."""
    arrival_s: float = 0.0
    """T: no batch with this request starts earlier."""
    slo_ttft_s: float = math.inf
    """Limit of first token less arrival; read by the objective "slo"."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"{self.prompt_tokens=} and {self.output_tokens=} must be at least 1")
        if not 0 <= self.arrival_s < math.inf:
            raise ValueError(f"{self.arrival_s=} must be at least 0 and finite")
        if not self.slo_ttft_s > 0:
            raise ValueError(f"{self.slo_ttft_s=} must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalProblem:
    """What `solve_optimal` solves."""

    requests: tuple[OptimalRequest, ...]
    capacity_blocks: int
    """M: blocks of the pool. With the defaults of `kinds` and `block_size` a block is a KV token."""
    max_num_batched_tokens: int
    """C: most tokens a batch, decodes included."""
    chunk: int | None = None
    """P: most prefill tokens a batch, prompts in pieces; None: prompts are computed whole."""
    chunk_step: int = 1
    """Pieces end at multiples of this or with the prompt. Above 1 the optimum is one over such pieces only."""
    hybrid_batching: bool = True
    """Prefill and decode in one batch."""
    eviction: bool = True
    """False: a request keeps its cache until it ends."""
    kinds: tuple[KindSpec, ...] = _KV_ONLY
    """Cache kinds, in the order `KV`, `HIDDEN`; one is chosen whenever a request starts from nothing. Their extra times
    are not read: `costs` has them."""
    block_size: int = 1
    """Token positions of a group with the KV kind."""
    hidden_block_size: int | None = None
    """Likewise with the hidden kind; None: `block_size`."""
    costs: StepCosts = dataclasses.field(default_factory=StepCosts)
    objective: Objective = "latency"

    def __post_init__(self) -> None:
        names = ("capacity_blocks", "max_num_batched_tokens", "block_size", "hidden_block_size", "chunk_step")  # fmt: skip
        for name in names:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.requests:
            raise ValueError("requests is empty")
        if self.chunk is not None and not 1 <= self.chunk <= self.max_num_batched_tokens:
            raise ValueError(f"{self.chunk=} must be in [1, {self.max_num_batched_tokens=}]")
        if self.chunk is not None and self.chunk < self.chunk_step:
            raise ValueError(f"{self.chunk=} must be at least {self.chunk_step=}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"{self.objective=} must be one of {', '.join(OBJECTIVES)}")
        if not 1 <= len(self.kinds) <= 2 or not any(k.offered for k in self.kinds):
            raise ValueError(f"{self.kinds=} must be one or two kinds, one of them offered")
        for field in dataclasses.fields(self.costs):
            if not 0 <= getattr(self.costs, field.name) < math.inf:
                raise ValueError(
                    f"costs.{field.name}={getattr(self.costs, field.name)} must be at least 0"
                )

    @property
    def direction(self) -> int:
        """1 where less of the objective is better, -1 where more is."""
        return -1 if self.objective == "slo" else 1

    def blocks(self, tokens: int, kind: int) -> int:
        """Blocks of `tokens` cached positions."""
        size = self.block_size
        if kind == HIDDEN and self.hidden_block_size is not None:
            size = self.hidden_block_size
        return self.kinds[kind].blocks_per_group * -(-tokens // size)

    def misfit(self) -> tuple[int, str] | None:
        """The first request that can never run, and why; None: each can run alone, so some schedule exists."""
        for i, request in enumerate(self.requests):
            tokens = request.prompt_tokens + request.output_tokens - 1
            least = min(self.blocks(tokens, k) for k, s in enumerate(self.kinds) if s.offered)
            if least > self.capacity_blocks:
                return i, f"needs {least} blocks at its end, the pool has {self.capacity_blocks}"
            if self.chunk is None and request.prompt_tokens > self.max_num_batched_tokens:
                return (
                    i,
                    f"has {request.prompt_tokens} prompt tokens, a batch holds "
                    f"{self.max_num_batched_tokens} and chunks are off",
                )
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalBatch:
    """One batch. Rows are positions in `OptimalProblem.requests`; times in seconds."""

    start_s: float
    end_s: float
    rows: tuple[int, ...]
    num_tokens: tuple[int, ...]
    """c of each row."""
    start: tuple[int, ...]
    """Positions cached before, m of each row."""
    kind: tuple[int, ...]
    preempt: tuple[int, ...] = ()
    """Requests evicted when this batch starts (e = 1); their memory counts as free in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalSchedule:
    """A schedule and what is known about it."""

    batches: tuple[OptimalBatch, ...]
    latency_s: float
    """End of the last batch."""
    objective: float
    """Value of the problem's objective; seconds, or requests for "slo"."""
    bound: float
    """No schedule is better than this."""
    status: Literal["optimal", "feasible"]
    """"feasible": the time ran out before the proof."""

    @property
    def num_evictions(self) -> int:
        return sum(len(batch.preempt) for batch in self.batches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """What `check_schedule` finds."""

    objective: float
    latency_s: float
    busy_s: float
    """Sum of the batches' times; less than the latency where batches wait for arrivals."""
    first_token_s: tuple[float, ...]
    finish_s: tuple[float, ...]
    used_blocks: tuple[int, ...]
    """Blocks held after each batch, those of requests that end with it included: what Eq. 4 limits."""


def check_schedule(problem: OptimalProblem, schedule: OptimalSchedule) -> Replay:
    """Replay a schedule batch by batch, by InferMax §5 alone, and price it.

    Raises:
        ValueError: a rule is broken; the message names batch, request and rule.
    """
    n = len(problem.requests)
    length = [r.prompt_tokens for r in problem.requests]  # S
    cached = [0] * n  # m
    kind = [NO_KIND] * n
    generated = [0] * n
    first, finish = [math.inf] * n, [math.inf] * n
    now_s = busy_s = 0.0
    used = []

    for j, batch in enumerate(schedule.batches):

        def require(holds: bool, rule: str, j: int = j) -> None:
            if not holds:
                raise ValueError(f"batch {j}: {rule}")

        require(bool(batch.rows), "is empty")
        require(len(set(batch.rows)) == len(batch.rows), "a request runs twice")
        require(not set(batch.rows) & set(batch.preempt), "a request runs and is evicted (Eq. 2)")
        require(problem.eviction or not batch.preempt, "evicts, which is not allowed")
        require(batch.start_s >= now_s - 1e-12, f"starts at {batch.start_s}, before {now_s}")
        for i in batch.preempt:
            require(cached[i] > 0, f"evicts request {i}, which holds nothing")
            cached[i], kind[i] = 0, NO_KIND
        decodes, prefill_tokens = 0, 0
        done = []
        for i, c, m, k in zip(batch.rows, batch.num_tokens, batch.start, batch.kind, strict=True):
            request = problem.requests[i]
            require(finish[i] == math.inf, f"request {i} has ended")
            require(
                request.arrival_s <= batch.start_s + 1e-12, f"request {i} has not arrived (T_i)"
            )
            require(m == cached[i], f"request {i} holds {cached[i]} tokens, not {m} (Eq. 1)")
            require(
                1 <= c <= length[i] - m, f"request {i} has {length[i] - m} tokens, not {c} (Eq. 2)"
            )
            require(0 <= k < len(problem.kinds) and problem.kinds[k].offered, f"no kind {k}")
            require(kind[i] in (NO_KIND, k), f"request {i} changes its kind while it holds cache")
            require(
                problem.chunk is not None or c == length[i] - m, f"request {i} runs a piece (Eq. 3)"
            )
            if c == 1 and m > 0:
                decodes += 1
            else:
                prefill_tokens += c
            cached[i], kind[i] = m + c, k
            if cached[i] == length[i]:  # Eq. 3: g = 1
                length[i] += 1
                generated[i] += 1
                done.append(i)
        require(
            decodes + prefill_tokens <= problem.max_num_batched_tokens,
            f"{decodes + prefill_tokens} tokens, above C={problem.max_num_batched_tokens} (Eq. 4)",
        )
        require(
            problem.chunk is None or prefill_tokens <= problem.chunk,
            f"{prefill_tokens} prefill tokens, above P={problem.chunk}",
        )
        require(
            problem.hybrid_batching or not decodes or not prefill_tokens,
            "mixes phases, which is not allowed",
        )
        used.append(sum(problem.blocks(cached[i], kind[i]) for i in range(n) if cached[i]))
        require(
            used[-1] <= problem.capacity_blocks,
            f"{used[-1]} blocks, above M={problem.capacity_blocks} (Eq. 4)",
        )
        time_s = problem.costs.step_s(
            np.array(batch.num_tokens, np.int32),
            np.array(batch.start, np.int32),
            np.array(batch.kind, np.int8),
        )
        now_s, busy_s = batch.start_s + time_s, busy_s + time_s
        require(math.isclose(now_s, batch.end_s, rel_tol=1e-9, abs_tol=1e-12), "wrong end_s")
        for i in done:
            first[i] = min(first[i], now_s)
            if generated[i] == problem.requests[i].output_tokens:
                finish[i] = now_s
                cached[i], kind[i] = 0, NO_KIND
    for i, request in enumerate(problem.requests):
        if generated[i] != request.output_tokens:
            raise ValueError(
                f"request {i} ends with {generated[i]} of {request.output_tokens} tokens"
            )
    if problem.objective == "latency":
        objective = now_s
    elif problem.objective == "slo":
        objective = float(
            sum(
                f - r.arrival_s <= r.slo_ttft_s + 1e-12
                for f, r in zip(first, problem.requests, strict=True)
            )
        )
    else:
        ends = finish if problem.objective == "completion" else first
        objective = sum(e - r.arrival_s for e, r in zip(ends, problem.requests, strict=True))
    return Replay(
        objective=objective,
        latency_s=now_s,
        busy_s=busy_s,
        first_token_s=tuple(first),
        finish_s=tuple(finish),
        used_blocks=tuple(used),
    )


# --- schedules from rows and tokens ----------------------------------------------------------------------------------

_Row = tuple[int, int, int, int]  # request, c, m, kind


def _timed(
    problem: OptimalProblem, steps: list[tuple[list[_Row], list[int]]], now_s: float = 0.0
) -> list[OptimalBatch]:
    """Batches as early as arrivals and the batches before allow, none before `now_s`."""
    batches = []
    for rows, preempt in steps:
        now_s = max(now_s, *(problem.requests[r[0]].arrival_s for r in rows))
        ids, tokens, start, kind = zip(*sorted(rows), strict=True)
        end_s = now_s + problem.costs.step_s(
            np.array(tokens, np.int32), np.array(start, np.int32), np.array(kind, np.int8)
        )
        batches.append(
            OptimalBatch(
                start_s=now_s,
                end_s=end_s,
                rows=ids,
                num_tokens=tokens,
                start=start,
                kind=kind,
                preempt=tuple(sorted(preempt)),
            )
        )
        now_s = end_s
    return batches


def _schedule(
    problem: OptimalProblem, steps: list[tuple[list[_Row], list[int]]], bound: float = math.nan
) -> OptimalSchedule:
    batches = tuple(_timed(problem, steps))
    draft = OptimalSchedule(
        batches=batches, latency_s=0.0, objective=0.0, bound=bound, status="feasible"
    )
    replay = check_schedule(problem, draft)
    return dataclasses.replace(draft, latency_s=replay.latency_s, objective=replay.objective)


def _simple_schedule(
    problem: OptimalProblem, kind: int | None, *, reserve: bool, decode_first: bool
) -> OptimalSchedule:
    """First come first served: whoever fits runs, the latest is evicted. Any valid schedule bounds the optimum.

    Args:
        problem: the problem; each request fits alone.
        kind: cache kind of all requests; None, or where it does not fit: the smallest.
        reserve: count a request at its final memory from its start, so that nothing is evicted.
        decode_first: decodes before prefills.
    """
    offered = [k for k, s in enumerate(problem.kinds) if s.offered]
    least = min(offered, key=lambda k: problem.kinds[k].blocks_per_group)
    n = len(problem.requests)
    total = [r.prompt_tokens + r.output_tokens - 1 for r in problem.requests]
    kinds = [
        least if kind is None or problem.blocks(t, kind) > problem.capacity_blocks else kind
        for t in total
    ]
    order = sorted(range(n), key=lambda i: (problem.requests[i].arrival_s, i))
    length = [r.prompt_tokens for r in problem.requests]
    cached, left = [0] * n, [r.output_tokens for r in problem.requests]
    steps: list[tuple[list[_Row], list[int]]] = []
    now_s = 0.0
    while any(left):
        arrived = [i for i in order if left[i] and problem.requests[i].arrival_s <= now_s]
        if not arrived:
            now_s = min(problem.requests[i].arrival_s for i in order if left[i])
            continue
        after = [
            problem.blocks(total[i] if reserve else m, kinds[i]) if m else 0
            for i, m in enumerate(cached)
        ]
        rows: list[_Row] = []
        preempt: list[int] = []
        decoding = [i for i in arrived if cached[i] and length[i] - cached[i] == 1]
        others = [i for i in arrived if i not in decoding]
        tokens = prefill = 0

        def add_prefills(
            rows: list[_Row] = rows, others: list[int] = others, after: list[int] = after
        ) -> None:
            nonlocal tokens, prefill
            for i in others:
                c = length[i] - cached[i]
                room = problem.max_num_batched_tokens - tokens
                if problem.chunk is not None:
                    room = min(room, problem.chunk - prefill)
                    if c > room:
                        end = (cached[i] + room) // problem.chunk_step * problem.chunk_step
                        c = end - cached[i]
                blocks = problem.blocks(total[i] if reserve else cached[i] + c, kinds[i])
                if c < 1 or c > room or sum(after) - after[i] + blocks > problem.capacity_blocks:
                    break
                rows.append((i, c, cached[i], kinds[i]))
                after[i] = blocks
                tokens, prefill = tokens + c, prefill + c

        if not decode_first:
            add_prefills()
        if problem.hybrid_batching or not rows:
            for i in decoding:
                if i in preempt or tokens >= problem.max_num_batched_tokens:
                    continue
                blocks = problem.blocks(total[i] if reserve else cached[i] + 1, kinds[i])
                busy = {r[0] for r in rows}
                for victim in reversed(order):
                    if sum(after) - after[i] + blocks <= problem.capacity_blocks:
                        break
                    if after[victim] and victim != i and victim not in busy and not reserve:
                        preempt.append(victim)
                        after[victim] = 0
                if sum(after) - after[i] + blocks <= problem.capacity_blocks:
                    rows.append((i, 1, cached[i], kinds[i]))
                    after[i] = blocks
                    tokens += 1
        if decode_first and (problem.hybrid_batching or not rows) and not preempt:
            add_prefills()
        if not rows:  # pieces of prompts block each other: all but the first go
            preempt = [i for i in order if cached[i]][1:]
            if reserve or not preempt:
                raise RuntimeError("no simple schedule")
            for i in preempt:
                cached[i] = 0
            first = next(i for i in order if cached[i])
            c = length[first] - cached[first]
            if problem.chunk is not None and c > 1:
                end = cached[first] + min(c, problem.chunk)
                if end < length[first]:
                    end = end // problem.chunk_step * problem.chunk_step
                c = end - cached[first]
            rows = [(first, c, cached[first], kinds[first])]
        for i in preempt:
            cached[i] = 0
        steps.append((rows, preempt))
        now_s = _timed(problem, steps[-1:], now_s)[-1].end_s
        for i, c, m, _ in rows:
            cached[i] = m + c
            if cached[i] == length[i]:
                length[i], left[i] = length[i] + 1, left[i] - 1
                if not left[i]:
                    cached[i] = 0
    return _schedule(problem, steps)


def fcfs_schedule(problem: OptimalProblem, *, eviction: bool = True) -> OptimalSchedule:
    """First come first served, prefill first: as vLLM does (InferMax Table 1) or, without eviction, its EF variant.

    Raises:
        RuntimeError: it ends in a state that it cannot leave, such as an evicted request that is longer than a batch.
    """
    kind = next(k for k, s in enumerate(problem.kinds) if s.offered)
    return _simple_schedule(problem, kind, reserve=not eviction, decode_first=False)


_MAX_IDLE = 4
"""Decisions in a row without any work after which a policy counts as stuck."""


def policy_schedule(problem: OptimalProblem, policy: Policy) -> OptimalSchedule:
    """What a policy makes of the problem, with as many seats as there are requests.

    Args:
        problem: the problem; each request fits alone.
        policy: a fresh one. It reads output lengths from `max_tokens` where it reads them at all, and no objectives.

    Raises:
        ValueError: the policy breaks a rule of the problem, such as a prompt in pieces where chunks are off.
        RuntimeError: it fails, breaks a promise of `Plan`, or leaves requests waiting for ever.
    """
    requests, n = problem.requests, len(problem.requests)
    order = sorted(range(n), key=lambda i: (requests[i].arrival_s, i))
    table = RequestTable(max(n, 1))
    request_of: dict[int, int] = {}
    kinds = list(problem.kinds)
    while len(kinds) < NUM_KINDS:
        kinds.append(KindSpec(name="none", blocks_per_group=1, offered=False))
    steps: list[tuple[list[_Row], list[int]]] = []
    preempt: list[int] = []
    now_s, sent, idle = 0.0, 0, 0
    while sent < n or request_of:
        while sent < n and requests[order[sent]].arrival_s <= now_s:
            i = order[sent]
            row = table.add(
                arrival_s=requests[i].arrival_s,
                rank=sent,
                prompt_len=requests[i].prompt_tokens,
                max_tokens=requests[i].output_tokens,
                slo_ttft_s=requests[i].slo_ttft_s,
                slo_tbt_s=math.inf,
            )
            request_of[row] = i
            sent += 1
        rows = np.array(sorted(request_of, key=lambda r: int(table.rank[r])), np.int32)
        holds = table.kind[rows] != NO_KIND
        view = SchedulerView(
            now_s=now_s,
            table=table,
            waiting=rows[~holds],
            running=rows[holds],
            free_blocks=problem.capacity_blocks - int(table.num_blocks[rows].sum()),
            total_blocks=problem.capacity_blocks,
            block_size=problem.block_size,
            hidden_block_size=problem.hidden_block_size,
            kinds=tuple(kinds),
            max_num_seqs=n,
            max_num_batched_tokens=problem.max_num_batched_tokens,
            costs=problem.costs,
        )
        try:
            plan = checked_schedule(policy, view)
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"{policy.name} failed: {type(error).__name__}: {error}") from error
        for row in plan.preempt.tolist():
            preempt.append(request_of[row])
            table.kind[row] = NO_KIND
            table.num_cached[row] = table.num_blocks[row] = table.tokens_since_preemption[row] = 0
            table.num_preemptions[row] += 1
        if not plan.rows.size:
            idle += 1
            if sent < n:
                now_s = max(now_s, requests[order[sent]].arrival_s)
            elif idle > _MAX_IDLE:
                raise RuntimeError(f"{policy.name} leaves {len(request_of)} requests waiting")
            continue
        idle = 0
        done = []
        batch: list[_Row] = []
        for row, c, kind in zip(
            plan.rows.tolist(), plan.num_tokens.tolist(), plan.kind.tolist(), strict=True
        ):
            batch.append((request_of[row], c, int(table.num_cached[row]), kind))
            table.num_cached[row] += c
            table.kind[row] = kind
            table.num_blocks[row] = problem.blocks(int(table.num_cached[row]), kind)
            if table.num_cached[row] == table.num_tokens[row]:
                done.append(row)
        steps.append((batch, preempt))
        preempt = []
        now_s = _timed(problem, steps[-1:], now_s)[-1].end_s
        table.note_tokens(np.array(done, np.int32), now_s)
        for row in done:
            table.num_tokens[row] += 1
            table.num_outputs[row] += 1
            table.tokens_since_preemption[row] += 1
            if table.num_tokens[row] == table.max_tokens_total[row]:
                table.note_length(int(table.num_outputs[row]))
                table.remove(row)
                del request_of[row]
    return _schedule(problem, steps)


def _best_simple(problem: OptimalProblem) -> OptimalSchedule:
    found = []
    for kind in [k for k, s in enumerate(problem.kinds) if s.offered]:
        for reserve in (True, False) if problem.eviction else (True,):
            for decode_first in (False, True):
                try:
                    found.append(
                        _simple_schedule(problem, kind, reserve=reserve, decode_first=decode_first)
                    )
                except (RuntimeError, ValueError):
                    # An evicted request that no batch can hold any more, or one that dropped what it needs.
                    if reserve:
                        raise
    sign = -1 if problem.objective == "slo" else 1
    return min(found, key=lambda s: sign * s.objective)


# --- the program -----------------------------------------------------------------------------------------------------

_State = tuple[int, int, int]  # tokens generated, m, kind


class _Arc(NamedTuple):
    """What a request may do in a batch, from a state to a state."""

    source: _State
    target: _State
    c: int
    blocks: int
    """Held after the batch."""
    phase: int
    """0: does not run; 1: prefill; 2: decode (as `StepCosts` tells them apart)."""
    generates: bool
    evicts: bool
    kind: int
    """Of the cache during the batch."""


def _arcs(problem: OptimalProblem, request: OptimalRequest) -> list[_Arc]:
    """The graph of a request's states (Eqs. 1 to 3)."""
    offered = [k for k, s in enumerate(problem.kinds) if s.offered]
    start, done = (0, 0, NO_KIND), (request.output_tokens, 0, NO_KIND)
    arcs = [_Arc(done, done, 0, 0, 0, False, False, NO_KIND)]
    seen, todo = {start, done}, [start]
    while todo:
        state = todo.pop()
        generated, m, kind = state
        length = request.prompt_tokens + generated
        held = problem.blocks(m, kind) if m else 0
        out = [_Arc(state, state, 0, held, 0, False, False, kind)]
        if m and problem.eviction and m >= request.prompt_tokens + max(generated - 1, 0):
            # Evicting a request before it has made use of its prefill never helps: that prefill could be left out.
            out.append(_Arc(state, (generated, 0, NO_KIND), 0, 0, 0, False, True, NO_KIND))
        for k in [kind] if m else offered:
            for c in _pieces(problem, m, length):
                blocks = problem.blocks(m + c, k)
                if blocks > problem.capacity_blocks or c > problem.max_num_batched_tokens:
                    continue
                phase = 2 if c == 1 and m else 1
                if phase == 1 and problem.chunk is not None and c > problem.chunk:
                    continue
                generates = m + c == length
                after: _State = (generated + generates, m + c, k)
                if after[0] == request.output_tokens:
                    after = done
                out.append(_Arc(state, after, c, blocks, phase, generates, False, k))
        arcs += out
        for arc in out:
            if arc.target not in seen:
                seen.add(arc.target)
                todo.append(arc.target)
        if len(arcs) > _MAX_VARIABLES:
            break
    return arcs


def _pieces(problem: OptimalProblem, m: int, length: int) -> list[int]:
    if problem.chunk is None or length - m == 1:
        return [length - m]
    step = problem.chunk_step
    ends = range((m // step + 1) * step, min(length - 1, m + problem.chunk) + 1, step)
    return [*(end - m for end in ends), *([length - m] if length - m <= problem.chunk else [])]


def _distances(arcs: list[_Arc], root: _State, *, backwards: bool) -> dict[_State, int]:
    """Fewest batches from `root` to each state, or from each state to it."""
    near = collections.defaultdict(list)
    for arc in arcs:
        a, b = (arc.target, arc.source) if backwards else (arc.source, arc.target)
        near[a].append(b)
    distance, queue = {root: 0}, collections.deque([root])
    while queue:
        a = queue.popleft()
        for b in near[a]:
            if b not in distance:
                distance[b] = distance[a] + 1
                queue.append(b)
    return distance


def _num_batches(problem: OptimalProblem, simple: OptimalSchedule) -> int:
    """A number of non-empty batches that some optimal schedule keeps to."""
    costs, requests = problem.costs, problem.requests
    outputs = sum(r.output_tokens for r in requests)
    limits = []
    if problem.chunk is None:
        limits.append(outputs)  # each batch generates a token
    elif problem.eviction:  # each residency generates one, and takes at most its length in batches
        limits.append(sum(r.prompt_tokens + s for r in requests for s in range(r.output_tokens)))
    else:
        limits.append(sum(r.prompt_tokens + r.output_tokens - 1 for r in requests))
    base_s = _least_batch_s(problem)
    if base_s > 0:
        prompts_s = 0.0
        if problem.chunk is None:  # in pieces of one token a prompt costs what decodes cost
            prompts_s = sum(
                costs.prefill_per_token_s * r.prompt_tokens
                + costs.prefill_per_pair_s * r.prompt_tokens**2
                for r in requests
            )
        last_s = max(r.arrival_s for r in requests)
        # Time by which the objective is settled in any schedule at least as good as the simple one ...
        if problem.objective == "latency":
            settled_s = simple.latency_s
        elif problem.objective == "slo":
            settled_s = max(
                (r.arrival_s + r.slo_ttft_s for r in requests if r.slo_ttft_s < math.inf), default=0
            )
        else:
            settled_s = simple.objective + last_s
        # ... and what may come after it: no more than each request once more from the start.
        tail = 0
        if problem.objective in ("slo", "ttft"):
            prompts_s = 0.0
            tail = outputs
            if problem.chunk is not None:
                tail = sum(r.prompt_tokens + r.output_tokens for r in requests)
        limits.append(math.floor((settled_s - prompts_s) / base_s * (1 + 1e-9)) + tail)
    return max(1, min(limits))


def _least_batch_s(problem: OptimalProblem) -> float:
    """No batch takes less."""
    costs = problem.costs
    return min(
        costs.prefill_base_s + costs.prefill_per_request_s,
        costs.decode_base_s
        + min(costs.decode_per_request_s, costs.decode_per_hidden_request_s)
        + 2 * min(costs.decode_per_token_s, costs.decode_per_hidden_token_s),
    )


def _simple_bound(problem: OptimalProblem) -> float:
    """A bound that needs no solver: each token of a request takes a batch."""
    least_s, requests = _least_batch_s(problem), problem.requests
    if problem.objective == "slo":
        return float(len(requests))
    if problem.objective == "latency":
        return max(r.arrival_s + r.output_tokens * least_s for r in requests)
    if problem.objective == "ttft":
        return len(requests) * least_s
    return sum(r.output_tokens for r in requests) * least_s


def _longest_batch_s(problem: OptimalProblem) -> float:
    """No batch takes more."""
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


class _Program:
    """Columns and rows of a mixed-integer linear program, collected one by one."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[dict[int, float]] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []

    def column(self, upper: float, *, integer: bool, cost: float = 0.0) -> int:
        self.cost.append(cost)
        self.lower.append(0.0)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def at_most(self, terms: dict[int, float], upper: float) -> None:
        self._row(terms, -np.inf, upper)

    def equal(self, terms: dict[int, float], value: float) -> None:
        self._row(terms, value, value)

    def _row(self, terms: dict[int, float], lower: float, upper: float) -> None:
        if terms:
            self.rows.append(terms)
            self.row_lower.append(lower)
            self.row_upper.append(upper)

    def solve(self, time_limit_s: float | None):
        try:
            import scipy.optimize
            import scipy.sparse
        except ImportError as error:
            raise ImportError("solve_optimal needs SciPy: pip install scipy") from error

        data = [v for row in self.rows for v in row.values()]
        columns = [c for row in self.rows for c in row]
        starts = np.concatenate([[0], np.cumsum([len(row) for row in self.rows])])
        matrix = scipy.sparse.csr_array(
            (data, columns, starts), shape=(len(self.rows), len(self.cost))
        )
        options: dict[str, float] = {"mip_rel_gap": 0.0}
        if time_limit_s is not None:
            options["time_limit"] = time_limit_s
        return scipy.optimize.milp(
            np.array(self.cost),
            integrality=np.array(self.integer, int),
            bounds=scipy.optimize.Bounds(np.array(self.lower), np.array(self.upper)),  # pyright: ignore[reportArgumentType] - stub: float only
            constraints=scipy.optimize.LinearConstraint(
                matrix,
                np.array(self.row_lower),  # pyright: ignore[reportArgumentType] - stub: float only
                np.array(self.row_upper),  # pyright: ignore[reportArgumentType] - stub: float only
            ),
            options=options,
        )


def solve_optimal(
    problem: OptimalProblem,
    *,
    time_limit_s: float | None = None,
    starts: Sequence[OptimalSchedule] = (),
) -> OptimalSchedule:
    """An optimal schedule, or the best found within the time limit with a bound on what is possible.

    Args:
        problem: the problem.
        time_limit_s: give up the proof after this time; None: never.
        starts: schedules of the problem to begin from, made by other schedulers.

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
    """Whether a schedule exists whose objective is at least a share `by` better than a given one's (InferMax §5).

    Args:
        problem: the problem.
        than: a schedule of it.
        by: 0.1: at most 0.9 times its latency (or sum), at least 1.1 times as many first tokens in time for "slo".
        time_limit_s: give up after this time; None: never.

    Returns:
        "yes" and such a schedule, "no" and None if there is none, "unknown" and None when the time is up.

    Raises:
        ConfigError, ValueError, ImportError: as `solve_optimal`.
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
    """The program of a problem and what its numbers mean."""

    problem: OptimalProblem
    program: _Program
    classes: dict[OptimalRequest, list[int]]
    flows: list[list[tuple[OptimalRequest, _Arc, int]]]
    simple: OptimalSchedule
    """The best schedule known beforehand."""
    sign: float
    """-1 where more is better."""
    unit: float
    """The program's objective is `sign * unit` times the problem's plus `offset`."""
    offset: float

    def read(self, x: np.ndarray) -> OptimalSchedule:
        return _schedule(self.problem, _read(self.classes, self.flows, x))


def _make_program(problem: OptimalProblem, starts: Sequence[OptimalSchedule]) -> _Made:
    if (misfit := problem.misfit()) is not None:
        raise ConfigError(f"request {misfit[0]} {misfit[1]}")
    classes: dict[OptimalRequest, list[int]] = {}
    for i, request in enumerate(problem.requests):
        classes.setdefault(request, []).append(i)
    graphs: dict[OptimalRequest, list[_Arc]] = {}
    num_batches = max(r.output_tokens for r in classes)  # at least
    for request in classes:
        graphs[request] = _arcs(problem, request)
        _check_size(graphs, num_batches)
    sign, unit = (-1.0, 1.0) if problem.objective == "slo" else (1.0, 0.0)
    simple = _best_simple(problem)
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

    program = _Program()
    # Times are scaled to around 100 in all: HiGHS works with absolute tolerances.
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
    flows: list[list[tuple[OptimalRequest, _Arc, int]]] = [[] for _ in range(num_batches)]
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


def _check_size(graphs: dict[OptimalRequest, list[_Arc]], num_batches: int) -> None:
    size = num_batches * sum(map(len, graphs.values()))
    if size > _MAX_VARIABLES:
        raise ConfigError(
            f"the program needs {size:,} variables or more (over {num_batches} batches), the limit is "
            f"{_MAX_VARIABLES:,}: fewer or shorter requests, or larger chunks or none"
        )


def _add_flow(
    program: _Program,
    problem: OptimalProblem,
    request: OptimalRequest,
    count: int,
    arcs: list[_Arc],
    flows: list[list[tuple[OptimalRequest, _Arc, int]]],
) -> None:
    """`count` equal requests from their start to their end, one arc a batch."""
    start, done = (0, 0, NO_KIND), (request.output_tokens, 0, NO_KIND)
    ahead = _distances(arcs, start, backwards=False)
    behind = _distances(arcs, done, backwards=True)
    last = len(flows) - 1
    incoming: dict[_State, dict[int, float]] = {}
    for j, flow in enumerate(flows):
        balance: dict[_State, dict[int, float]] = collections.defaultdict(dict)
        arriving: dict[_State, dict[int, float]] = collections.defaultdict(dict)
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
    program: _Program,
    problem: OptimalProblem,
    costs: StepCosts,
    flow: list[tuple[OptimalRequest, _Arc, int]],
    num_requests: int,
) -> tuple[int, int, int]:
    """One batch: Eq. 4, P, its phases and its time.

    Returns:
        Columns of its time, of whether it has prefills, of whether it has decodes.
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
            read[column] = (m + 1) * (
                costs.decode_per_hidden_token_s if hidden else costs.decode_per_token_s
            )
            decode[column] = (
                costs.decode_per_hidden_request_s if hidden else costs.decode_per_request_s
            )
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
    # The decode side of StepCosts' maximum, then the prefill side with all tokens counted to it.
    program.at_most({time: -1.0, has_decode: bases[has_decode], **_sum(decode, read)}, 0)
    side = {time: -1.0, has_prefill: bases[has_prefill], **_sum(prefill, read)}
    if problem.hybrid_batching and costs.prefill_per_token_s and decodes:
        beside = program.column(num_requests, integer=False)  # decodes, if there are prefills
        program.at_most({**decodes, beside: -1.0, has_prefill: num_requests}, num_requests)
        side[beside] = costs.prefill_per_token_s
    program.at_most(side, 0)
    return time, has_prefill, has_decode


def _sum(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in a.keys() | b.keys()}


def _add_objective(
    program: _Program,
    problem: OptimalProblem,
    classes: dict[OptimalRequest, list[int]],
    flows: list[list[tuple[OptimalRequest, _Arc, int]]],
    times: list[tuple[int, int, int]],
    simple: OptimalSchedule,
    scale: float,
) -> None:
    """Order and start times of the batches, and what is minimised. Times are in the program's unit."""
    # Empty batches come last.
    for (_, prefill, decode), (_, later_prefill, later_decode) in itertools.pairwise(times):
        for later in (later_prefill, later_decode):
            program.at_most({later: 1.0, prefill: -1.0, decode: -1.0}, 0)
    if problem.objective == "latency":
        # Nothing worse than the simple schedule.
        program.at_most({t: 1.0 for t, *_ in times}, 100.0 * (1 + 1e-6))
    offline = all(r.arrival_s == 0 for r in classes)
    if problem.objective == "latency" and offline:
        for time, *_ in times:
            program.cost[time] = 1.0
        return
    # end_j: Acc_j of the paper with the waiting before the batch in it.
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
    # The k-th of a class's equal requests has passed batch j if k of them had their first (or last) token before it. It
    # waits through all batches that it has not passed.
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
    """No batch of a sensible schedule ends later."""
    last_s = max(r.arrival_s for r in problem.requests)
    if problem.objective == "completion":
        return simple.objective + last_s
    return last_s + num_batches * _longest_batch_s(problem)


def _read(
    classes: dict[OptimalRequest, list[int]],
    flows: list[list[tuple[OptimalRequest, _Arc, int]]],
    x: np.ndarray,
) -> list[tuple[list[_Row], list[int]]]:
    """Batches from flows: units of a flow become requests, in their order."""
    at = {i: (0, 0, NO_KIND) for members in classes.values() for i in members}
    steps: list[tuple[list[_Row], list[int]]] = []
    for flow in flows:
        rows: list[_Row] = []
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
    # Equal requests are numbered as they start.
    starts = dict.fromkeys(at, -1)
    for j, (rows, _) in enumerate(steps):
        for i, *_ in rows:
            if starts[i] < 0:
                starts[i] = j
    new = {}
    for members in classes.values():
        new.update(zip(sorted(members, key=lambda i: (starts[i], i)), members, strict=True))
    return [
        ([(new[i], c, m, kind) for i, c, m, kind in rows], [new[i] for i in gone])
        for rows, gone in steps
    ]

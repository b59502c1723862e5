"""Replay of a schedule: checks every rule and computes the times."""

import dataclasses
import math

import numpy as np

from apt_jax.core.kinds import NO_KIND
from apt_jax.lab.optimal.problem import BatchRow, OptimalBatch, OptimalProblem, OptimalSchedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """Objective, times and memory of a replayed schedule."""

    objective: float
    latency_s: float
    busy_s: float
    """Sum of the times of all batches, seconds; less than `latency_s` if batches wait for arrivals."""
    first_token_s: tuple[float, ...]
    finish_s: tuple[float, ...]
    used_blocks: tuple[int, ...]
    """Number of blocks held after each batch, including blocks of requests that end with it: the quantity that Eq. 4
    limits."""


def check_schedule(problem: OptimalProblem, schedule: OptimalSchedule) -> Replay:
    """Replay a schedule batch by batch by the rules of InferMax §5, and compute its times and objective.

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
        require(problem.eviction or not batch.preempt, "evicts a request, which is not allowed")
        require(batch.start_s >= now_s - 1e-12, f"starts at {batch.start_s}, before {now_s}")
        for i in batch.preempt:
            require(cached[i] > 0, f"evicts request {i}, which holds nothing")
            cached[i], kind[i] = 0, NO_KIND
        decodes, prefill_tokens = 0, 0
        done = []
        for i, c, m, k in zip(batch.rows, batch.num_tokens, batch.start, batch.kind, strict=True):
            request = problem.requests[i]
            require(finish[i] == math.inf, f"request {i} has ended")
            require(request.arrival_s <= batch.start_s + 1e-12, f"request {i} has not arrived (T_i)")
            require(m == cached[i], f"request {i} holds {cached[i]} tokens, not {m} (Eq. 1)")
            require(1 <= c <= length[i] - m, f"request {i} has {length[i] - m} tokens, not {c} (Eq. 2)")
            require(0 <= k < len(problem.kinds) and problem.kinds[k].offered, f"no kind {k}")
            require(kind[i] in (NO_KIND, k), f"request {i} changes its kind while it holds a cache")
            require(
                problem.chunk is not None or c == length[i] - m,
                f"request {i} is split into chunks, which is not allowed (Eq. 3)",
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
            "mixes prefills and decodes, which is not allowed",
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
            raise ValueError(f"request {i} ends with {generated[i]} of {request.output_tokens} tokens")
    if problem.objective == "latency":
        objective = now_s
    elif problem.objective == "slo":
        objective = float(
            sum(f - r.arrival_s <= r.slo_ttft_s + 1e-12 for f, r in zip(first, problem.requests, strict=True))
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


def timed_batches(
    problem: OptimalProblem, steps: list[tuple[list[BatchRow], list[int]]], now_s: float = 0.0
) -> list[OptimalBatch]:
    """Return the steps as batches that start as early as arrivals and earlier batches allow, from `now_s` on.

    Args:
        problem: the problem.
        steps: (rows, preempted requests) of each batch.
        now_s: earliest start of the first batch, seconds.
    """
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

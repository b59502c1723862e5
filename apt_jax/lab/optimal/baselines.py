"""Schedules for comparison: first come first served, other simple schedules, and the schedule of any policy."""

import dataclasses
import math

import numpy as np

from apt_jax.core.kinds import NO_KIND, NUM_KINDS, CacheKindSpec
from apt_jax.lab.optimal.check import check_schedule, timed_batches
from apt_jax.lab.optimal.problem import BatchRow, OptimalProblem, OptimalSchedule
from apt_jax.sched.plan_check import checked_schedule
from apt_jax.sched.request_table import RequestTable
from apt_jax.sched.view import Policy, SchedulerView


def schedule_of(
    problem: OptimalProblem, steps: list[tuple[list[BatchRow], list[int]]], bound: float = math.nan
) -> OptimalSchedule:
    batches = tuple(timed_batches(problem, steps))
    draft = OptimalSchedule(batches=batches, latency_s=0.0, objective=0.0, bound=bound, status="feasible")
    replay = check_schedule(problem, draft)
    return dataclasses.replace(draft, latency_s=replay.latency_s, objective=replay.objective)


def _simple_schedule(
    problem: OptimalProblem, kind: int | None, *, reserve: bool, decode_first: bool
) -> OptimalSchedule:
    """Build a first-come-first-served schedule, whose objective bounds the optimum.

    All requests that fit run; if decodes run out of blocks, the latest arrivals are evicted.

    Args:
        problem: the problem; each request alone fits the pool.
        kind: cache kind of all requests; a request too long for the pool in this kind takes the smallest kind. None:
            the smallest kind.
        reserve: reserve a request's final memory from its start, so that no request is evicted.
        decode_first: schedule decodes before prefills.
    """
    offered = [k for k, s in enumerate(problem.kinds) if s.offered]
    least = min(offered, key=lambda k: problem.kinds[k].blocks_per_group)
    n = len(problem.requests)
    total = [r.prompt_tokens + r.output_tokens - 1 for r in problem.requests]
    kinds = [least if kind is None or problem.blocks(t, kind) > problem.capacity_blocks else kind for t in total]
    order = sorted(range(n), key=lambda i: (problem.requests[i].arrival_s, i))
    length = [r.prompt_tokens for r in problem.requests]
    cached, left = [0] * n, [r.output_tokens for r in problem.requests]
    steps: list[tuple[list[BatchRow], list[int]]] = []
    now_s = 0.0
    while any(left):
        arrived = [i for i in order if left[i] and problem.requests[i].arrival_s <= now_s]
        if not arrived:
            now_s = min(problem.requests[i].arrival_s for i in order if left[i])
            continue
        after = [problem.blocks(total[i] if reserve else m, kinds[i]) if m else 0 for i, m in enumerate(cached)]
        rows: list[BatchRow] = []
        preempt: list[int] = []
        decoding = [i for i in arrived if cached[i] and length[i] - cached[i] == 1]
        others = [i for i in arrived if i not in decoding]
        tokens = prefill = 0

        def add_prefills(rows: list[BatchRow] = rows, others: list[int] = others, after: list[int] = after) -> None:
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
        if not rows:  # partly computed prompts block each other: evict all but the first
            preempt = [i for i in order if cached[i]][1:]
            if reserve or not preempt:
                raise RuntimeError("there is no simple schedule")
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
        now_s = timed_batches(problem, steps[-1:], now_s)[-1].end_s
        for i, c, m, _ in rows:
            cached[i] = m + c
            if cached[i] == length[i]:
                length[i], left[i] = length[i] + 1, left[i] - 1
                if not left[i]:
                    cached[i] = 0
    return schedule_of(problem, steps)


def fcfs_schedule(problem: OptimalProblem, *, eviction: bool = True) -> OptimalSchedule:
    """Build a first-come-first-served schedule with prefills first, like vLLM's (InferMax Table 1).

    Args:
        problem: the problem; each request alone fits the pool.
        eviction: allow evictions; False: the eviction-free (EF) variant.

    Raises:
        RuntimeError: no further request can run, for example because an evicted request is longer than a batch.
    """
    kind = next(k for k, s in enumerate(problem.kinds) if s.offered)
    return _simple_schedule(problem, kind, reserve=not eviction, decode_first=False)


_MAX_IDLE = 4
"""Number of consecutive decisions without work after which a policy counts as stuck."""


def policy_schedule(problem: OptimalProblem, policy: Policy) -> OptimalSchedule:
    """Return the schedule that a policy produces if there is a slot for each request.

    Args:
        problem: the problem; each request alone fits the pool.
        policy: a new policy object. `max_tokens` of each request is its output length, and there are no TBT objectives.

    Raises:
        ValueError: the policy breaks a rule of the problem, for example by splitting a prompt if chunks are off.
        RuntimeError: the policy fails, violates the contract of `Plan`, or leaves requests waiting forever.
    """
    requests, n = problem.requests, len(problem.requests)
    order = sorted(range(n), key=lambda i: (requests[i].arrival_s, i))
    table = RequestTable(max(n, 1))
    request_of: dict[int, int] = {}
    kinds = list(problem.kinds)
    while len(kinds) < NUM_KINDS:
        kinds.append(CacheKindSpec(name="none", blocks_per_group=1, offered=False))
    steps: list[tuple[list[BatchRow], list[int]]] = []
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
        batch: list[BatchRow] = []
        for row, c, kind in zip(plan.rows.tolist(), plan.num_tokens.tolist(), plan.kind.tolist(), strict=True):
            batch.append((request_of[row], c, int(table.num_cached[row]), kind))
            table.num_cached[row] += c
            table.kind[row] = kind
            table.num_blocks[row] = problem.blocks(int(table.num_cached[row]), kind)
            if table.num_cached[row] == table.num_tokens[row]:
                done.append(row)
        steps.append((batch, preempt))
        preempt = []
        now_s = timed_batches(problem, steps[-1:], now_s)[-1].end_s
        table.record_tokens(np.array(done, np.int32), now_s)
        for row in done:
            table.num_tokens[row] += 1
            table.num_outputs[row] += 1
            table.tokens_since_preemption[row] += 1
            if table.num_tokens[row] == table.max_tokens_total[row]:
                table.record_output_length(int(table.num_outputs[row]))
                table.remove(row)
                del request_of[row]
    return schedule_of(problem, steps)


def best_simple_schedule(problem: OptimalProblem) -> OptimalSchedule:
    found = []
    for kind in [k for k, s in enumerate(problem.kinds) if s.offered]:
        for reserve in (True, False) if problem.eviction else (True,):
            for decode_first in (False, True):
                try:
                    found.append(_simple_schedule(problem, kind, reserve=reserve, decode_first=decode_first))
                except (RuntimeError, ValueError):
                    # Only with evictions: no request can run, or the schedule breaks a rule.
                    if reserve:
                        raise
    sign = -1 if problem.objective == "slo" else 1
    return min(found, key=lambda s: sign * s.objective)

"""Scheduling by earliest deadline first."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.policies.vllm_v1 import BUDGET
from apt_jax.sched.step_packer import (
    Rows,
    admissible,
    blocks_after,
    num_that_fit,
    share_tokens,
    step_plan,
)
from apt_jax.sched.view import Plan, SchedulerView


def next_deadline_s(view: SchedulerView, rows: Rows) -> NDArray[np.float64]:
    """Return the (n,) times in seconds at which the next token of each row is due.

    The first token is due at arrival + TTFT objective, a later token at the time of the last token + TBT objective. The
    deadline of a best-effort request is infinite.
    """
    table = view.table
    last_s, arrival_s = table.last_token_s.take(rows), table.arrival_s.take(rows)
    has_token = (table.num_delivered.take(rows) > 0) | (last_s > arrival_s)
    due_s = np.where(has_token, last_s + table.slo_tbt_s.take(rows), arrival_s + table.slo_ttft_s.take(rows))
    due_s[table.best_effort.take(rows)] = np.inf
    return due_s


def deadline_s(view: SchedulerView, rows: Rows) -> NDArray[np.float64]:
    """Return the (n,) times in seconds by which `EdfPolicy` orders `rows`.

    That is the earlier of `next_deadline_s` and arrival + end-to-end objective. An end-to-end deadline that has passed
    does not count, because no order can meet it any more.
    """
    table = view.table
    due_s = next_deadline_s(view, rows)
    end_s = table.arrival_s.take(rows) + table.slo_e2e_s.take(rows)
    return np.where((end_s < view.now_s) | table.best_effort.take(rows), due_s, np.minimum(due_s, end_s))


def in_order(view: SchedulerView, rows: Rows, key: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return indices that sort `rows` by ascending `key`, equal keys by arrival."""
    return np.lexsort((view.table.rank.take(rows), key))


class EdfPolicy:
    """Orders all requests by the deadline of their next token and serves the earliest deadline first.

    The first token is due TTFT after the arrival, each later token TBT after the previous token. With an end-to-end
    objective, all tokens are due that long after the arrival too, and the earlier deadline counts; once the end-to-end
    deadline has passed, only the others do. So an end-to-end objective can only move a request forward. In this order all
    requests, decodes as well as prompts (in chunks), take their tokens from the budget of a step. Memory:

    * A waiting request is admitted if the blocks of its whole prompt are free in addition to the blocks that running
      requests need in this step. The first request that does not fit ends the admission. No request is preempted for a
      waiting request: in an overload all waiting requests are overdue and would evict each other.
    * If running requests do not fit, the requests with the latest deadlines lose their cache (among equal deadlines,
      the latest arrivals), and no request is admitted in that step.

    Overdue requests come first by this rule, so in an overload all requests become late.

    Args:
        name: name of the policy.
        budget: maximum number of tokens per step, limited to `max_num_batched_tokens`.
    """

    def __init__(self, name: str = "edf", budget: int = BUDGET) -> None:
        self.name = name
        self.budget = budget

    def schedule(self, view: SchedulerView) -> Plan:
        table, running = view.table, view.running
        budget = min(self.budget, view.max_num_batched_tokens)
        due_s = deadline_s(view, running)
        order = in_order(view, running, due_s)
        running, due_s = running[order], due_s[order]
        wanted = view.remaining(running)
        num_tokens = share_tokens(wanted, budget)
        num = num_that_fit(view, running, num_tokens)
        if num < running.size:
            rows, preempt = running[:num], running[num:]
            return step_plan(view, rows, num_tokens[:num], table.kind[rows], preempt)
        kind = table.kind[running]
        if view.waiting.size and running.size < view.max_num_seqs:
            growth = blocks_after(view, running, num_tokens) - table.num_blocks[running]
            free = view.free_blocks - int(growth.sum())
            waiting_s = deadline_s(view, view.waiting)
            first = in_order(view, view.waiting, waiting_s)
            started, their_tokens, their_kind = admissible(view, view.waiting[first], free)
            running = np.concatenate([running, started])
            kind = np.concatenate([kind, their_kind])
            wanted = np.concatenate([wanted, their_tokens])
            due_s = np.concatenate([due_s, waiting_s[first[: started.size]]])
            order = in_order(view, running, due_s)
            running, kind = running[order], kind[order]
            num_tokens = share_tokens(wanted[order], budget)
        return step_plan(view, running, num_tokens, kind, view.running[:0])

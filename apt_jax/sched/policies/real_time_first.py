"""Wrapper that makes any policy run best-effort requests only in the capacity left by real-time requests."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import KV, NO_KIND
from apt_jax.sched.step_packer import Rows
from apt_jax.sched.view import Plan, Policy, SchedulerView, converts

MEMORY_S = 15.0
KEPT_SHARE = 0.9
LEAST_PIECE = 64
"""Minimum number of tokens of a best-effort prompt piece."""


class RealTimeFirst:
    """Serves two classes with a policy that does not distinguish them (BROS §2.2 shows the effect without a wrapper).

    1. The policy schedules the real-time requests as if there were no others. Blocks and slots that they lack are taken
       from best-effort requests, the latest arrivals first, which are recomputed later.
    2. A step that computes prompts of real-time requests holds no best-effort requests, so that first tokens do not
       wait for them.
    3. A second instance of the policy adds best-effort requests to any other step, within the tokens, blocks and slots
       left. No best-effort request starts while a real-time request waits.
    4. Prompts of best-effort requests are computed in short pieces while there are real-time requests and for
       `MEMORY_S` after the last of them, because the first token of a new request must wait for the running step. A
       piece is long enough to reach `KEPT_SHARE` of the throughput of full prefill steps, by the cost model.

    If all requests have the same class, it decides like the wrapped policy, except for rule 4.

    Args:
        first: policy that schedules real-time requests.
        rest: a second instance of the same policy, which schedules best-effort requests.
    """

    def __init__(self, first: Policy, rest: Policy) -> None:
        self.name = first.name
        self.first, self.rest = first, rest
        self.converts = converts(first)
        self._last_s = -np.inf
        """Time in seconds of the last decision with a real-time request."""

    def schedule(self, view: SchedulerView) -> Plan:
        best_effort = view.table.best_effort
        low_running, low_waiting = best_effort.take(view.running), best_effort.take(view.waiting)
        if low_running.all() and low_waiting.all():
            recent = view.now_s - self._last_s < MEMORY_S
            return self.rest.schedule(_in_short_steps(view) if recent else view)
        self._last_s = view.now_s
        if not low_running.any() and not low_waiting.any():
            return self.first.schedule(view)
        others = view.running[low_running]
        own = dataclasses.replace(
            view,
            running=view.running[~low_running],
            waiting=view.waiting[~low_waiting],
            max_num_seqs=view.max_num_seqs - others.size,
        )
        # The policy sees blocks of best-effort requests as free: it may require more blocks than its step takes.
        free_blocks = view.free_blocks + int(view.table.num_blocks.take(others).sum())
        plan = self.first.schedule(dataclasses.replace(own, free_blocks=free_blocks, max_num_seqs=view.max_num_seqs))
        victims = _needed(own, plan, others)
        plan = dataclasses.replace(plan, preempt=np.concatenate([plan.preempt, victims]))
        starts = view.table.kind.take(plan.rows) == NO_KIND
        if starts.any() or (view.remaining(plan.rows) > 1).any():
            return plan
        waiting = view.waiting[low_waiting] if not own.waiting.size else view.waiting[:0]
        return self._joined(view, plan, others[~np.isin(others, victims)], waiting)

    def _joined(self, view: SchedulerView, plan: Plan, running: Rows, waiting: Rows) -> Plan:
        """Return `plan`, a step of real-time decodes, with best-effort requests added."""
        tokens = view.max_num_batched_tokens - int(plan.num_tokens.sum())
        if tokens < 1 or not running.size + waiting.size:
            return plan
        kept = view.running.size - plan.preempt.size - running.size
        left = dataclasses.replace(
            view,
            running=running,
            waiting=waiting,
            free_blocks=max(_free_after(view, plan), 0),
            max_num_seqs=view.max_num_seqs - kept,
            max_num_batched_tokens=tokens,
        )
        more = _fitting(left, self.rest.schedule(_in_short_steps(left)))
        if not plan.rows.size:
            return dataclasses.replace(more, preempt=np.concatenate([plan.preempt, more.preempt]))
        if not more.rows.size:
            return dataclasses.replace(plan, preempt=np.concatenate([plan.preempt, more.preempt]))
        return Plan(
            rows=np.concatenate([plan.rows, more.rows]),
            num_tokens=np.concatenate([plan.num_tokens, more.num_tokens]),
            kind=np.concatenate([plan.kind, more.kind]),
            preempt=np.concatenate([plan.preempt, more.preempt]),
            iteration="decode" if more.iteration == "decode" else "mixed",
            convert=np.concatenate([plan.convert, more.convert]),
        )


def _in_short_steps(view: SchedulerView) -> SchedulerView:
    """Return the view with the tokens per step limited to one per running request plus a short piece of a prompt."""
    most, costs = view.max_num_batched_tokens, view.costs
    base_s, token_s = max(costs.prefill_base_s, 0.0), max(costs.prefill_per_token_s, 0.0)
    piece = most // 4  # if costs are unknown
    if base_s + token_s > 0:
        wanted = KEPT_SHARE * most / (base_s + most * token_s)  # tokens per second
        piece = int(np.ceil(wanted * base_s / (1 - wanted * token_s)))
    piece = max(piece, LEAST_PIECE) + view.running.size
    return view if piece >= most else dataclasses.replace(view, max_num_batched_tokens=piece)


def _needed(own: SchedulerView, plan: Plan, others: Rows) -> Rows:
    """Return the best-effort rows, the latest arrivals first, whose blocks and slots the real-time plan needs."""
    started = int(np.count_nonzero(own.table.kind.take(plan.rows) == NO_KIND))
    slots = own.running.size - plan.preempt.size + started - own.max_num_seqs if started else 0
    return _covering(own, others[::-1], -_free_after(own, plan), slots)


def _fitting(view: SchedulerView, plan: Plan) -> Plan:
    """Return the plan up to the first row that lacks blocks; a policy may have assumed that the whole pool is free."""
    have = view.free_blocks + int(view.table.num_blocks.take(plan.preempt).sum())
    fits = np.cumsum(_blocks_needed(view, plan)) <= have
    if fits.all():
        return plan
    num = int(np.argmin(fits))
    if not num:
        return Plan.idle(plan.preempt)
    rows = plan.rows[:num]
    return dataclasses.replace(
        plan,
        rows=rows,
        num_tokens=plan.num_tokens[:num],
        kind=plan.kind[:num],
        convert=plan.convert[np.isin(plan.convert, rows)],
    )


def _covering(view: SchedulerView, rows: Rows, blocks: int, slots: int) -> Rows:
    """Return the shortest prefix of `rows` that frees the given blocks and slots; all rows if that is not enough."""
    freed = np.cumsum(view.table.num_blocks.take(rows))
    num = int(np.searchsorted(freed, blocks)) + 1 if blocks > 0 else 0
    return rows[: max(num, slots, 0)]


def _free_after(view: SchedulerView, plan: Plan) -> int:
    """Return the number of free blocks after a plan; a negative number is the number of missing blocks."""
    freed = int(view.table.num_blocks.take(plan.preempt).sum())
    return view.free_blocks + freed - int(_blocks_needed(view, plan).sum())


def _blocks_needed(view: SchedulerView, plan: Plan) -> NDArray[np.int32]:
    """Return the (n,) number of additional blocks that the rows of a plan need."""
    table, rows = view.table, plan.rows
    kind = plan.kind.astype(np.intp)
    tokens = table.num_cached.take(rows) + table.cached_prefix_tokens[rows, kind] + plan.num_tokens
    held = table.num_blocks.take(rows) + table.num_shared.take(rows) + table.shared_prefix_blocks[rows, kind]
    if plan.convert.size:  # their hidden blocks become free only after the step
        converted = np.isin(rows, plan.convert)
        kind, held = np.where(converted, KV, kind), np.where(converted, 0, held)
    return view.blocks_for(tokens, kind) - held

"""Any policy, with best-effort requests only in the capacity left by real-time ones."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import KV, NO_KIND
from apt_jax.sched.step_packer import Rows
from apt_jax.sched.view import Plan, Policy, SchedulerView, converts

MEMORY_S = 15.0
KEPT_SHARE = 0.9
LEAST_PIECE = 64
"""Tokens."""


class RealTimeFirst:
    """Two classes under a policy that does not tell them apart (most do not; BROS §2.2 has what becomes of that).

    1. The policy decides for the real-time requests, as if there were no others. Blocks and slots that they lack are
       taken from best-effort requests, the latest arrived first; these are recomputed later.
    2. A step that computes prompts of real-time requests holds nothing else: their first tokens wait for nobody.
    3. To any other step a second instance of the policy adds best-effort requests, within the tokens, blocks and slots
       that are left. None begins while a real-time request waits.

    4. Prompts of best-effort requests are computed in short pieces while there are real-time requests, and for
       `MEMORY_S` after the last: a first token waits for the step that runs when its request comes. A piece has as many
       tokens as `KEPT_SHARE` of the throughput of full prefill steps needs, by the costs of steps.

    With requests of one class alone it decides as the policy does, but for rule 4.

    Args:
        first: decides for real-time requests.
        rest: a policy of the same kind, for best-effort requests.
    """

    def __init__(self, first: Policy, rest: Policy) -> None:
        self.name = first.name
        self.first, self.rest = first, rest
        self.converts = converts(first)
        self._last_s = -np.inf
        """When there was a real-time request."""

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
        # It sees all that best-effort requests hold as free: policies want more than the blocks of one step.
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
        """A step of decodes with best-effort requests added."""
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
    """The view with as many tokens of a step as its running requests decode, and a short piece of prompts."""
    most, costs = view.max_num_batched_tokens, view.costs
    base_s, token_s = max(costs.prefill_base_s, 0.0), max(costs.prefill_per_token_s, 0.0)
    piece = most // 4  # where costs are not known
    if base_s + token_s > 0:
        wanted = KEPT_SHARE * most / (base_s + most * token_s)  # tokens per second
        piece = int(np.ceil(wanted * base_s / (1 - wanted * token_s)))
    piece = max(piece, LEAST_PIECE) + view.running.size
    return view if piece >= most else dataclasses.replace(view, max_num_batched_tokens=piece)


def _needed(own: SchedulerView, plan: Plan, others: Rows) -> Rows:
    """As many of the best-effort rows, latest first, as the plan of real-time requests needs."""
    started = int(np.count_nonzero(own.table.kind.take(plan.rows) == NO_KIND))
    slots = own.running.size - plan.preempt.size + started - own.max_num_seqs if started else 0
    return _covering(own, others[::-1], -_free_after(own, plan), slots)


def _fitting(view: SchedulerView, plan: Plan) -> Plan:
    """The plan without its last rows that lack blocks: a policy may count on the whole pool."""
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
    """Shortest prefix of `rows` that frees the given blocks and slots; all rows if that is not enough."""
    freed = np.cumsum(view.table.num_blocks.take(rows))
    num = int(np.searchsorted(freed, blocks)) + 1 if blocks > 0 else 0
    return rows[: max(num, slots, 0)]


def _free_after(view: SchedulerView, plan: Plan) -> int:
    """Free blocks after a plan; below zero: it lacks as many."""
    freed = int(view.table.num_blocks.take(plan.preempt).sum())
    return view.free_blocks + freed - int(_blocks_needed(view, plan).sum())


def _blocks_needed(view: SchedulerView, plan: Plan) -> NDArray[np.int32]:
    """(n,) blocks that the rows of a plan lack."""
    table, rows = view.table, plan.rows
    kind = plan.kind.astype(np.intp)
    tokens = table.num_cached.take(rows) + table.cached_prefix_tokens[rows, kind] + plan.num_tokens
    held = table.num_blocks.take(rows) + table.num_shared.take(rows) + table.shared_prefix_blocks[rows, kind]
    if plan.convert.size:  # what they hold is free for the next step
        converted = np.isin(rows, plan.convert)
        kind, held = np.where(converted, KV, kind), np.where(converted, 0, held)
    return view.blocks_for(tokens, kind) - held

"""Rule for converting hidden requests to keys and values (`Plan.convert`), from measured costs.

Apt-Serve charges a hidden request its extra time t = c0 + c1 * tokens in every decode step (Eq. 6) for as long as it
runs, and changes the kind of a request by a preemption alone. With rotary embedding, where keys must be restored in
every step, that makes the small cache expensive in the long run. A conversion costs about one such step, and blocks:

    gain = t * (decode steps that are left) - conversion_s        seconds

Blocks that nobody needs are worth it wherever the gain is positive; those that the next admissions need are not.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.sched.step_packer import Rows, held_blocks_for, start_options
from apt_jax.sched.view import Plan, SchedulerView

FEW_OUTPUTS = 20
"""Ended requests with fewer longer outputs than this say nothing about how long a request goes on."""


def hidden_extra_s(view: SchedulerView, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Extra time of hidden requests of (n,) `tokens` over KV ones in a decode step, seconds; may be negative.

    By the measured `StepCosts`, whatever policies are told to charge (``--rho-us``); by `CacheKindSpec` where nothing
    is measured.
    """
    costs = view.costs
    base_s = costs.decode_per_hidden_request_s - costs.decode_per_request_s
    per_token_s = costs.decode_per_hidden_token_s - costs.decode_per_token_s
    if not (costs.decode_per_hidden_token_s or costs.decode_per_hidden_request_s):
        kv, hidden = view.kinds[KV], view.kinds[HIDDEN]
        base_s = hidden.extra_base_s - kv.extra_base_s
        per_token_s = hidden.extra_per_token_s - kv.extra_per_token_s
    return np.asarray(base_s + per_token_s * tokens, np.float64)


def steps_left(view: SchedulerView, rows: Rows) -> NDArray[np.float64]:
    """(n,) decode steps that `rows` are expected to take part in, the next one included.

    What ended requests with at least as many outputs had beyond them, on average; where too few are known, what the
    request allows itself. At least 1.
    """
    table = view.table
    most = (table.max_tokens_total.take(rows) - table.num_tokens.take(rows)).astype(np.float64)
    if table.num_output_lengths >= FEW_OUTPUTS:
        counts = table.output_lengths
        number = np.cumsum(counts[::-1])[::-1]  # with at least so many outputs
        total = np.cumsum((counts * np.arange(counts.size))[::-1])[::-1]
        had = table.num_outputs.take(rows)
        next_one = np.minimum(had + 1, counts.size - 1)
        known = (number[next_one] >= FEW_OUTPUTS) & (had + 1 < counts.size)
        mean = total[next_one] / np.maximum(number[next_one], 1) - had
        most = np.where(known, np.minimum(most, mean), most)
    return np.maximum(most, 1.0)


def spare_blocks(view: SchedulerView, free_blocks: int, waiting: Rows) -> int:
    """The part of `free_blocks` that the first `waiting` requests would not take if a step began as many as it has
    slots and tokens for (at least one), with the kind that takes fewest; at least 0."""
    slots = max(view.max_num_seqs - view.running.size, 0)
    next_ones = waiting[:slots]
    if not next_ones.size:
        return max(free_blocks, 0)
    tokens = view.table.num_tokens.take(next_ones)
    num = int(np.searchsorted(np.cumsum(tokens), view.max_num_batched_tokens, side="right"))
    next_ones, tokens = next_ones[: max(num, 1)], tokens[: max(num, 1)]
    offered = np.array([kind.offered for kind in view.kinds])
    blocks = start_options(view, next_ones, tokens)
    return max(free_blocks - int(blocks[:, offered].min(axis=1).sum()), 0)


def rows_to_convert(view: SchedulerView, rows: NDArray[np.int32], room: int) -> NDArray[np.int32]:
    """Rows worth converting in this step, most expensive decode steps first.

    Args:
        view: the state.
        rows: decoding rows of this step, of any kind.
        room: blocks that may be used for it, after what the rows of the step need (`spare_blocks` leaves the next
            admissions theirs). A row takes the KV blocks of all its positions; its hidden ones are free only
            afterwards.

    Returns:
        For `Plan.convert`; none where `view.can_convert` is False.
    """
    table = view.table
    if not view.can_convert or room < 1:
        return rows[:0]
    rows = rows[table.kind.take(rows) == HIDDEN]
    if not rows.size:
        return rows
    tokens = table.num_tokens.take(rows)
    step_s = hidden_extra_s(view, tokens)
    per_token_s = view.costs.convert_per_hidden_token_s
    once_s = per_token_s * tokens if per_token_s else step_s
    blocks = view.blocks_for(tokens, KV)
    pays = step_s * steps_left(view, rows) > once_s
    pays &= (step_s > 0) & (blocks <= room)
    pays &= view.blocks_for(table.max_tokens_total.take(rows), KV) <= view.total_blocks
    rows, blocks, step_s = rows[pays], blocks[pays], step_s[pays]
    if not rows.size:
        return rows
    order = np.argsort(-step_s, kind="stable")
    chosen, least = list[int](), int(blocks.min())
    for i, needed in zip(order.tolist(), blocks[order].tolist(), strict=True):
        if needed <= room:
            chosen.append(i)
            room -= needed
            if room < least:
                break
    return rows[chosen]


def with_conversions(view: SchedulerView, plan: Plan, rows: Rows, reserved: int = 0) -> Plan:
    """A decode plan that also converts the `rows` worth converting.

    Args:
        view: the state.
        plan: rows of one token each, all of which hold cache, and who is preempted.
        rows: some of the plan's.
        reserved: blocks that are promised to others, beside those of the next admissions (`spare_blocks`).
    """
    if not view.can_convert:
        return plan
    table = view.table
    grown = held_blocks_for(view, plan.rows, table.num_tokens[plan.rows]) - table.num_blocks[plan.rows]
    free = view.free_blocks + int(table.num_blocks[plan.preempt].sum()) - int(grown.sum())
    room = spare_blocks(view, free - reserved, view.waiting)
    return dataclasses.replace(plan, convert=rows_to_convert(view, rows, room))

"""Rule, based on measured costs, for converting requests from the hidden kind to keys and values (`Plan.convert`).

A hidden request costs the extra time t = c0 + c1 * tokens in every decode step (Apt-Serve Eq. 6) for as long as it
runs, and in Apt-Serve only a preemption changes the kind of a request. With rotary embedding, where keys must be
restored in every step, the hidden cache is therefore expensive for long outputs. A conversion takes about the extra
time of one step, once, and needs blocks:

    gain = t * (remaining decode steps) - conversion_s        seconds

Requests with a positive gain are converted while there are free blocks that the next admissions do not need.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.sched.step_packer import Rows, held_blocks_for, start_options
from apt_jax.sched.view import Plan, SchedulerView

FEW_OUTPUTS = 20
"""Minimum number of finished requests with longer outputs that is needed to estimate the remaining steps of a
request."""


def hidden_extra_s(view: SchedulerView, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the extra seconds that hidden requests take in a decode step compared with KV requests; may be negative.

    Uses the measured `StepCosts`, not the cost that policies assume (``--rho-us``). If hidden-cache costs were not
    measured, uses the values of `CacheKindSpec`.

    Args:
        view: the scheduler's view.
        tokens: (n,) cached tokens of each request.
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
    """Return the (n,) expected numbers of decode steps left for `rows`, including the next step; at least 1.

    The estimate is the mean number of further output tokens of finished requests that had more output tokens than the
    row has now, limited to the tokens left before `max_tokens`. If too few such requests have finished, it is this
    limit.
    """
    table = view.table
    most = (table.max_tokens_total.take(rows) - table.num_tokens.take(rows)).astype(np.float64)
    if table.num_output_lengths >= FEW_OUTPUTS:
        counts = table.output_lengths
        number = np.cumsum(counts[::-1])[::-1]  # requests with at least this many outputs
        total = np.cumsum((counts * np.arange(counts.size))[::-1])[::-1]
        had = table.num_outputs.take(rows)
        next_one = np.minimum(had + 1, counts.size - 1)
        known = (number[next_one] >= FEW_OUTPUTS) & (had + 1 < counts.size)
        mean = total[next_one] / np.maximum(number[next_one], 1) - had
        most = np.where(known, np.minimum(most, mean), most)
    return np.maximum(most, 1.0)


def spare_blocks(view: SchedulerView, free_blocks: int, waiting: Rows) -> int:
    """Return how many of `free_blocks` remain if the next step starts waiting requests, at least 0.

    The step is assumed to start the first `waiting` requests for which it has slots and tokens, but at least one if
    there is a slot, each with the offered kind that needs the fewest blocks.
    """
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
    """Return the rows worth converting in this step, in decreasing order of extra time per decode step.

    Args:
        view: the scheduler's view.
        rows: decoding rows of this step, of any kind.
        room: number of blocks that conversions may take, in addition to the blocks that the rows of the step need
            (`spare_blocks` also leaves blocks for the next admissions). A converted row takes KV blocks for all its
            positions; its hidden blocks become free only after the step.

    Returns:
        Rows for `Plan.convert`; empty if `view.can_convert` is False.
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
    """Return the decode plan with conversions of the `rows` that are worth converting.

    Args:
        view: the scheduler's view.
        plan: decode plan: one token for each of its rows, which all hold cache, and the preempted rows.
        rows: rows of the plan that may be converted.
        reserved: blocks reserved for other requests, in addition to those of the next admissions (`spare_blocks`).
    """
    if not view.can_convert:
        return plan
    table = view.table
    grown = held_blocks_for(view, plan.rows, table.num_tokens[plan.rows]) - table.num_blocks[plan.rows]
    free = view.free_blocks + int(table.num_blocks[plan.preempt].sum()) - int(grown.sum())
    room = spare_blocks(view, free - reserved, view.waiting)
    return dataclasses.replace(plan, convert=rows_to_convert(view, rows, room))

"""The greedy scheduler that Apt-Serve's authors released, which differs from the text of their paper.

Source: `_schedule_greedy` in the scheduler of github.com/eddiegaoo/Apt-Serve.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.sched.knapsack.greedy import increments
from apt_jax.sched.knapsack.problem import NOT_CHOSEN, KnapsackProblem
from apt_jax.sched.policies.apt import AptPolicy
from apt_jax.sched.step_packer import (
    RequestNotes,
    Rows,
    StepPacker,
    allowed_kinds,
    decode_plan,
    growth,
    may_start,
    resolve_prefill_deadlock,
    split_by_phase,
    start_options,
    target_tokens,
)
from apt_jax.sched.value import PendingValue, option_values, pending_value
from apt_jax.sched.view import Plan, SchedulerView

NEAR_ZERO_SHARE = 1e-4
"""A violated request's value per block is this share of the smallest pending time of the waiting requests, divided by
the number of blocks in the pool."""
NEAR_ZERO_GAIN = 1e-6
"""A violated request's value per group of KV blocks if no request waits, seconds."""
_CHUNK = 256
"""Number of options that are read together; a pass seldom takes more."""


class _Option(NamedTuple):
    """A request with a cache kind."""

    request: int
    """Index into the rows."""
    is_hidden: bool
    gain: float
    """Value per block, seconds."""
    only: bool
    """True if the request is offered only the hidden kind."""
    kv_blocks: int
    hidden_blocks: int


class AptReleasedPolicy:
    """Apt-Serve as its authors released it.

    As in the paper, the queue with the higher cumulative pending time decides the type of an iteration, and requests
    and kinds are taken greedily by value per block. These points differ from the text, and from `apt`:

    * |W| + |R| of Eq. 5 leaves out violated requests. A violated request is offered keys and values only.
    * Tokens and slots of a prefill iteration are limits of the greedy pass. The pass ends at the first option that
      exceeds the tokens, the slots or the memory, even if it only changes a chosen request to keys and values.
    * M of a prefill iteration is the number of free blocks.
    * If the option that ends the pass is worth more than all options before it, no request starts.
    * A waiting request that was once chosen with the hidden kind starts with it, even if it is chosen with keys and
      values when it starts.
    * In a decode iteration, requests that hold the hidden kind lose their cache, whichever kind is chosen, and so do
      requests chosen with the hidden kind. A change from the hidden kind to keys and values is charged all blocks of
      the keys and values.
    * A preempted request goes to the front of the waiting queue. Waiting requests that were chosen go to its end if the
      iteration decodes after all. The order matters only for equal gains, such as those of violated requests.
    * The extra time of the hidden kind is ρ times the positions of the request's blocks, without a constant part.

    The released code assumes that no prompt is longer than a step, and that every request fits into the pool with keys
    and values. Here a prompt longer than a step is computed in chunks, before other prompts, and starts only in a step
    of its own. A request too long for keys and values is offered the hidden kind only. If nothing runs, the option that
    ends the pass may start as in Algorithm 1, because the engine would be idle otherwise.
    """

    name = "apt-released"

    def __init__(self) -> None:
        self._places = RequestNotes(np.int64)  # order of the queues
        self._marks = RequestNotes(np.int64)  # 1: starts with the hidden kind
        self._first, self._last = 0, 0

    def schedule(self, view: SchedulerView) -> Plan:
        decoding, partial = split_by_phase(view)
        waiting, decoding = self._in_order(view, view.waiting), self._in_order(view, decoding)
        rows = np.concatenate([waiting, partial, decoding])
        if not rows.size:
            return Plan.idle()
        urgent = pending_value(view, rows)
        num_requests = rows.size - int(np.count_nonzero(urgent.violated))
        first_decoding = rows.size - decoding.size
        near_zero = NEAR_ZERO_GAIN / int(view.blocks_per_group[KV])
        if waiting.size:
            near_zero = float(urgent.pending_s[: waiting.size].min()) * NEAR_ZERO_SHARE / view.total_blocks
        urgent_waiting = urgent.part(slice(0, waiting.size))
        plan = self._prefill(view, waiting, urgent_waiting, num_requests, near_zero, partial, idle=not decoding.size)
        pending_s = urgent.pending_s
        if decoding.size and (
            pending_s[first_decoding:].sum() > pending_s[:first_decoding].sum() or not plan.rows.size
        ):
            self._to_the_end(plan.rows[np.isin(plan.rows, waiting)])
            running = urgent.part(slice(first_decoding, None))
            return self._decode(view, decoding, running, num_requests, near_zero, partial)
        if plan.rows.size:
            self._to_the_end(plan.rows)
            return plan
        return resolve_prefill_deadlock(view, partial) if partial.size else Plan.idle()

    # --- queues ----------------------------------------------------------------------------------------------------

    def _in_order(self, view: SchedulerView, rows: Rows) -> Rows:
        """Return `rows` in the order of their queue, with new requests last."""
        new = self._places.new(view.table, rows)
        self._marks.new(view.table, rows)
        self._to_the_end(rows[new])
        return rows[np.argsort(self._places.values.take(rows), kind="stable")]

    def _to_the_end(self, rows: Rows) -> None:
        self._places.values[rows] = np.arange(self._last, self._last + rows.size)
        self._last += rows.size

    def _to_the_front(self, rows: Rows) -> None:
        self._first -= rows.size
        self._places.values[rows] = np.arange(self._first, self._first + rows.size)

    # --- iterations ------------------------------------------------------------------------------------------------

    def _prefill(
        self,
        view: SchedulerView,
        waiting: Rows,
        urgent: PendingValue,
        num_requests: int,
        near_zero: float,
        partial: Rows,
        *,
        idle: bool,
    ) -> Plan:
        """Return the plan of a prefill iteration.

        Args:
            view: the scheduler's view.
            waiting: (n,) waiting rows in the order of their queue.
            urgent: pending times of these rows.
            num_requests: |W| + |R|.
            near_zero: value per block of a violated request.
            partial: rows with partly computed prompts.
            idle: True if no request decodes.
        """
        packer = StepPacker(view)
        if partial.size:
            packer.continue_prefill(partial)
        memory = view.free_blocks - growth(view, partial)
        if may_start(view, waiting, memory, ahead=0):
            shared = view.table.shared_prefix_blocks.take(waiting, axis=0)[:, [KV, HIDDEN]]
            cost = _cost(view, waiting, view.table.num_tokens.take(waiting), shared)
            options = _options(view, waiting, urgent, num_requests, near_zero, cost)
            lengths = np.minimum(view.remaining(waiting, KV), view.max_num_batched_tokens)
            alone = idle and packer.is_empty
            chosen = _take(options, lengths, packer.tokens_left, packer.slots_left, memory, alone=alone)
            if chosen:
                starts = waiting[sorted(chosen)]
                self._marks.values[waiting[[i for i, hidden in chosen.items() if hidden]]] = 1
                kind = np.where(self._marks.values.take(starts) > 0, HIDDEN, KV).astype(np.int8)
                packer.start(starts, kind, in_order=True)
        return packer.plan()

    def _decode(
        self,
        view: SchedulerView,
        decoding: Rows,
        urgent: PendingValue,
        num_requests: int,
        near_zero: float,
        partial: Rows,
    ) -> Plan:
        table = view.table
        memory = view.free_blocks + int(table.num_blocks[decoding].sum()) - growth(view, partial)
        holds_hidden = table.kind.take(decoding) == HIDDEN
        shared = table.num_shared.take(decoding)[:, None] * np.stack([~holds_hidden, holds_hidden], axis=1)
        cost = _cost(view, decoding, table.num_tokens.take(decoding) + 1, shared)
        options = _options(view, decoding, urgent, num_requests, near_zero, cost)
        changes = _changes(options, holds_hidden.tolist(), memory)
        stays = np.zeros(decoding.size, np.bool_)
        stays[[i for i, changed in changes.items() if not changed]] = True
        if partial.size and not stays.any():  # otherwise nothing would run
            packer = StepPacker(view, decoding)
            packer.continue_prefill(partial)
            plan = packer.plan()
        else:
            plan = decode_plan(view, decoding[stays], decoding[~stays])
        self._to_the_front(plan.preempt)
        self._marks.values[plan.preempt] = 0
        return plan


class AptInPassPolicy(AptPolicy):
    """`apt` whose prefill iterations apply the step's limits on tokens and slots within the greedy pass.

    The paper leaves open where these limits apply: `apt` chooses among the requests that can start in the step, but the
    authors' code ends the greedy pass at the first option that exceeds a limit.
    """

    name = "apt-in-pass"

    def _begin(
        self,
        view: SchedulerView,
        urgent: PendingValue,
        num_requests: int,
        memory: int,
        tokens: int,
        slots: int,
    ) -> tuple[Rows, NDArray[np.int8]]:
        rows = view.waiting
        value = option_values(view, rows, urgent, num_requests, self.violation_decay)
        problem = KnapsackProblem(value, start_options(view, rows, target_tokens(view, rows, 1)), memory)
        nothing = np.zeros(rows.size, np.int64)
        theta, request, column, gain, blocks = increments(problem, nothing.astype(np.float64), nothing)
        order = np.argsort(-theta, kind="stable")
        request, column, gain, blocks = request[order], column[order], gain[order], blocks[order]
        lengths = np.minimum(view.remaining(rows, KV), view.max_num_batched_tokens)[request]
        starts = np.zeros(request.size, np.int64)
        starts[np.unique(request, return_index=True)[1]] = 1
        num_before = np.cumsum(starts) - starts
        tokens_before = np.cumsum(starts * lengths) - starts * lengths
        is_full = (tokens_before + lengths > tokens) | (num_before >= slots)
        is_over = np.cumsum(blocks) > memory
        ends = np.flatnonzero(is_full | is_over)
        num = int(ends[0]) if ends.size else request.size
        if num < request.size and not is_full[num] and gain[num] > gain[:num].sum():  # the alternative of Algorithm 1
            first = request[num : num + 1]
            fits = np.where(problem.cost[first] <= memory, problem.value[first], -np.inf)
            return rows[first], fits.argmax(axis=1).astype(np.int8)
        kind = np.full(rows.size, NOT_CHOSEN, np.int8)
        kind[request[:num]] = column[:num]  # in order: the last increment of a request stays
        chosen = request[:num][starts[:num] > 0]
        return rows[chosen], kind[chosen]


def _cost(view: SchedulerView, rows: Rows, tokens: NDArray[np.int32], shared: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the (2, n) numbers of blocks for `tokens` positions: row 0 as keys and values, row 1 as the hidden kind.

    As in the released code, row 1 is half of row 0, rounded up to whole groups, but at least the real need. If the
    hidden kind is not allowed, row 1 repeats row 0; if only the hidden kind is allowed, row 1 is the real need. The
    (n, 2) blocks that a request shares with others are subtracted; at least one block remains.
    """
    kv, hidden = view.blocks_for(tokens, KV), view.blocks_for(tokens, HIDDEN)
    per_group = view.blocks_per_group[KV]
    allowed = allowed_kinds(view, rows)
    rounded = np.where(allowed[:, KV], np.maximum(-(-kv // per_group // 2) * per_group, hidden), hidden)
    return np.maximum(np.stack([kv, np.where(allowed[:, HIDDEN], rounded, kv)]) - shared.T, 1)


def _options(
    view: SchedulerView,
    rows: Rows,
    urgent: PendingValue,
    num_requests: int,
    near_zero: float,
    cost: NDArray[np.int32],
) -> Iterator[_Option]:
    """Yield the options of `rows` in decreasing order of gain.

    Args:
        view: the scheduler's view.
        rows: (n,) rows in the order of their queue.
        urgent: pending times of these rows.
        num_requests: |W| + |R|.
        near_zero: value per block of a violated request.
        cost: (2, n) numbers of blocks (`_cost`).
    """
    kv, hidden = cost
    groups = kv // view.blocks_per_group[KV]
    pending_s = urgent.pending_s
    hidden_value = pending_s - num_requests * (view.kinds[HIDDEN].extra_per_token_s * view.block_size) * groups
    allowed = allowed_kinds(view, rows)
    both = (
        allowed[:, [KV, HIDDEN]].all(axis=1)
        & ~urgent.violated
        & (groups > 1)
        & (kv > hidden)
        & (hidden_value >= pending_s / 2)
    )
    only_hidden = ~allowed[:, KV]
    with np.errstate(divide="ignore", invalid="ignore"):  # of rows without the option
        to_kv = np.where(
            both, (pending_s - hidden_value) / (kv - hidden), pending_s / np.where(only_hidden, hidden, kv)
        )
    gain = np.stack([np.where(urgent.violated, near_zero, to_kv), hidden_value / hidden], axis=1)
    request, second = np.nonzero(np.stack([np.ones_like(both), both], axis=1))
    gain = gain[request, second]
    order = np.argsort(-gain, kind="stable")
    for start in range(0, order.size, _CHUNK):
        part = order[start : start + _CHUNK]
        of = request[part]
        only = only_hidden[of]
        columns = (of, (second[part] > 0) | only, gain[part], only, kv[of], hidden[of])
        yield from map(_Option, *(column.tolist() for column in columns))


def _take(
    options: Iterable[_Option],
    lengths: NDArray[np.int32],
    tokens: int,
    slots: int,
    memory: int,
    *,
    alone: bool,
) -> dict[int, bool]:
    """Take options of waiting requests in order, until one exceeds the tokens, the slots or the memory.

    Args:
        options: the options in decreasing order of gain.
        lengths: (n,) numbers of tokens to compute.
        tokens: number of tokens left in the step.
        slots: number of requests that may still start.
        memory: number of free blocks.
        alone: if the option that exceeds the memory is worth more than all options before it, start only its request,
            as in Algorithm 1. False: start no request then.

    Returns:
        A map from the indices of the chosen requests to True for the hidden kind, or to False for keys and values.
    """
    left = memory
    chosen: dict[int, bool] = {}
    total = 0.0
    for i, is_hidden, gain, _, kv, hidden in options:
        length = int(lengths[i])
        if length > tokens or slots < 1:
            break
        blocks = hidden if is_hidden else kv - hidden if i in chosen else kv
        if blocks > left:
            if gain * blocks <= total:
                break
            if alone and hidden > memory:
                continue  # it could not start in an empty pool either
            return {i: is_hidden or kv > memory} if alone else {}
        if i not in chosen:
            tokens -= length
            slots -= 1
        chosen[i] = is_hidden
        total += gain * blocks
        left -= blocks
    return chosen


def _changes(options: Iterable[_Option], holds_hidden: list[bool], memory: int) -> dict[int, bool]:
    """Take options of running requests in order, until one exceeds the memory.

    Returns:
        A map from the indices of the chosen requests to True if the request must change its kind, and so loses its
        cache.
    """
    chosen: dict[int, bool] = {}
    num_changes = 0
    for i, is_hidden, _, only, kv, hidden in options:
        blocks = hidden if is_hidden else kv
        if i in chosen and not num_changes:
            blocks //= 2
        if blocks > memory:
            break
        memory -= blocks
        changes = not holds_hidden[i] if only else is_hidden or holds_hidden[i]
        num_changes += changes - chosen.get(i, False)
        chosen[i] = changes
    return chosen

"""Apt-Serve's adaptive scheduling: iteration type by pending value, batch by knapsack (Apt-Serve §4.2, §5)."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.sched.conversion import with_conversions
from apt_jax.sched.knapsack.greedy import solve_greedy
from apt_jax.sched.knapsack.problem import KnapsackProblem
from apt_jax.sched.step_packer import (
    Rows,
    StepPacker,
    decode_plan,
    growth,
    held_blocks_for,
    may_start,
    resolve_prefill_deadlock,
    split_by_phase,
    start_options,
    target_tokens,
)
from apt_jax.sched.value import PendingValue, check_decay, option_values, pending_value
from apt_jax.sched.view import Plan, SchedulerView


class AptPolicy:
    """The paper's policy: it chooses the iteration type, then requests and cache kinds that cut the most pending time.

    *Iteration type* (§5). It is prefill if the waiting queue W has the higher cumulative pending time, else decode over
    the running queue R.

    *Prefill.* The policy solves the knapsack of Definition 1 over W. The constraint M is the pool less the keys and
    values of all requests in R.

    *Decode.* The policy solves the same knapsack over R with the whole pool. It chooses requests and kinds again in
    every iteration. A request that is not chosen, or is chosen with a kind other than the one it holds, loses its cache
    and waits until a later prefill iteration recomputes it (§5, last paragraph).

    *Values and solver.* Values follow Eq. 8, with the SLO-aware fallback (`option_values`). The solver is Algorithm 1
    of the appendix, which stops at the first increment that does not fit.

    Rules for cases that the paper does not cover:

    * With equal pending times, or if no request can start in a prefill iteration, the iteration is decode, as in the
      authors' code. If no request decodes, it is prefill.
    * The candidates of a prefill iteration are the requests of W that can start in it: in decreasing order of marginal
      gain, up to the first that exceeds the tokens or slots of the step. Kinds are therefore chosen only for requests
      that start.
    * A prompt longer than a step is computed in chunks. It counts as part of W and continues before other prompts.
      Blocks for all its tokens are set aside in both constraints.
    * A request with a cached prefix costs only the blocks that must be free for it.

    Progress needs no further rule: a prefill iteration gives each of its requests a token, and a decode iteration
    either gives a request a token or empties the pool for a prefill. Requests that have violated their objectives only
    get the capacity left by other requests, so they may wait as long as the overload lasts (§6.6).

    Args:
        violation_decay: factor on the value of violated requests (§6.6 uses 0.4); 0: the near-zero constant (§4.2).
        prefill_memory: M of a prefill iteration. "kv", as in Eq. 7: the pool less the size of the keys and values of
            all requests in R, even if they hold the hidden kind. "held": the pool less the blocks that R holds. None:
            "held" if running requests keep their kinds, because they then never change to keys and values, else "kv".
        count_violated: whether |W| + |R| of Eq. 5 counts violated requests. True, the default: as in the paper. False:
            as in the authors' code, which makes the hidden kind cheaper under overload.
        keep_kind: whether a running request keeps its kind, so that the decode knapsack offers only that kind. Not in
            the paper. None, the default: True if attention works directly on the layer inputs, which the paper does not
            do (`CacheKindSpec.reprojected` is False). The hidden kind then costs so little that choosing kinds again in
            every iteration would only evict caches.
        convert: whether a running request that the decode knapsack moves from the hidden kind to keys and values gets
            them from its layer inputs in the same step (`Plan.convert`) instead of losing its cache. If the keys and
            values do not fit in addition to the layer inputs, it keeps the layer inputs. Not in the paper.
    """

    name = "apt"

    def __init__(
        self,
        violation_decay: float = 0.0,
        *,
        prefill_memory: Literal["kv", "held"] | None = None,
        count_violated: bool = True,
        keep_kind: bool | None = None,
        convert: bool = False,
    ) -> None:
        if prefill_memory not in ("kv", "held", None):
            raise ValueError(f"{prefill_memory=!r} must be 'kv' or 'held'")
        self.violation_decay = check_decay(violation_decay)
        self.prefill_memory = prefill_memory
        self.count_violated = count_violated
        self.keep_kind = keep_kind
        self.converts = convert

    def schedule(self, view: SchedulerView) -> Plan:
        decoding, partial = split_by_phase(view)
        rows = np.concatenate([view.waiting, partial, decoding])
        if not rows.size:
            return Plan.idle()
        urgent = pending_value(view, rows)
        num_requests = self._num_requests(urgent)
        first_decoding = rows.size - decoding.size
        pending_s = urgent.pending_s
        if first_decoding and (
            not decoding.size or pending_s[:first_decoding].sum() > pending_s[first_decoding:].sum()
        ):
            waiting = urgent.part(slice(0, view.waiting.size))
            plan = self._prefill(view, waiting, num_requests, decoding, partial)
            if plan.rows.size:
                return plan
        if decoding.size:
            running = urgent.part(slice(first_decoding, None))
            return self._decode(view, running, num_requests, decoding, partial)
        return resolve_prefill_deadlock(view, partial) if partial.size else Plan.idle()

    def _num_requests(self, urgent: PendingValue) -> int:
        """Return |W| + |R| of Eq. 5 and 8."""
        violated = 0 if self.count_violated else int(np.count_nonzero(urgent.violated))
        return urgent.pending_s.size - violated

    def _prefill(
        self,
        view: SchedulerView,
        urgent: PendingValue,
        num_requests: int,
        decoding: Rows,
        partial: Rows,
    ) -> Plan:
        packer = StepPacker(view)
        if partial.size:
            packer.continue_prefill(partial)
        if view.waiting.size and packer.slots_left > 0 and packer.tokens_left > 0:
            memory = view.free_blocks - growth(view, partial) - self._promised(view, decoding)
            if may_start(view, view.waiting, memory):
                chosen = self._begin(view, urgent, num_requests, memory, packer.tokens_left, packer.slots_left)
                packer.start(*chosen, in_order=True)
        return packer.plan()

    def _promised(self, view: SchedulerView, decoding: Rows) -> int:
        """Return the number of blocks that Eq. 7 sets aside for the running queue beyond the blocks it holds."""
        memory = self.prefill_memory
        if memory is None and keeps_kind(view, self.keep_kind):
            memory = "held"
        if memory == "held" or not decoding.size:
            return growth(view, decoding)
        table = view.table
        tokens = table.num_tokens.take(decoding)
        sizes = np.maximum(
            view.blocks_for(tokens, KV) - table.num_shared.take(decoding),
            held_blocks_for(view, decoding, tokens),
        )
        return int(sizes.sum() - table.num_blocks.take(decoding).sum())

    def _begin(
        self,
        view: SchedulerView,
        urgent: PendingValue,
        num_requests: int,
        memory: int,
        tokens: int,
        slots: int,
    ) -> tuple[Rows, NDArray[np.int8]]:
        """Return the waiting rows that the knapsack chooses, in decreasing order of marginal gain, and their kinds."""
        rows = view.waiting
        value = option_values(view, rows, urgent, num_requests, self.violation_decay)
        cost = start_options(view, rows, target_tokens(view, rows, 1))
        first = can_begin(view, rows, value, cost, tokens, slots)
        rows, value, cost = rows[first], value[first], cost[first]
        kind = solve_greedy(KnapsackProblem(value, cost, memory), fill=False).kind
        chosen = np.flatnonzero(kind >= 0)
        return rows[chosen], kind[chosen].astype(np.int8)

    def _decode(
        self,
        view: SchedulerView,
        urgent: PendingValue,
        num_requests: int,
        decoding: Rows,
        partial: Rows,
    ) -> Plan:
        table = view.table
        memory = view.free_blocks + int(table.num_blocks[decoding].sum()) - growth(view, partial)
        chosen, wants_kv = self._stay(view, urgent, num_requests, decoding, memory)
        if partial.size and not chosen.any():  # nothing else would run
            packer = StepPacker(view, decoding)
            packer.continue_prefill(partial)
            return packer.plan()
        plan = decode_plan(view, decoding[chosen], decoding[~chosen])
        rows = plan.rows[np.isin(plan.rows, decoding[wants_kv])]
        return with_conversions(view, plan, rows, growth(view, partial)) if rows.size else plan

    def _stay(
        self,
        view: SchedulerView,
        urgent: PendingValue,
        num_requests: int,
        decoding: Rows,
        memory: int,
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Choose the `decoding` rows that continue.

        Returns:
            The (n,) mask of the rows that continue, and the (n,) mask of those that change from the hidden kind to keys
            and values. A row continues if the knapsack chooses it with the kind that it holds or, with `convert`,
            changes its kind.
        """
        held = view.table.kind[decoding]
        needed = held_blocks_for(view, decoding, view.table.num_tokens[decoding])
        keep = keeps_kind(view, self.keep_kind)
        if keep and needed.sum() <= memory:
            return np.ones(decoding.size, np.bool_), np.zeros(decoding.size, np.bool_)
        value, cost = self._running_options(view, urgent, num_requests, decoding, keep)
        kind = solve_greedy(KnapsackProblem(value, cost, max(memory, 0)), fill=False).kind
        wants_kv = (held == HIDDEN) & (kind == KV) & (self.converts and view.can_convert)
        return (kind == held) | wants_kv, wants_kv

    def _running_options(
        self,
        view: SchedulerView,
        urgent: PendingValue,
        num_requests: int,
        decoding: Rows,
        keep: bool,
    ) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Return the values and the numbers of blocks of running requests, two arrays of shape (n, num_kinds).

        For the kind that a request holds, blocks of shared prefixes are not counted.
        """
        table = view.table
        held = table.kind[decoding]
        value = option_values(view, decoding, urgent, num_requests, self.violation_decay, held if keep else None)
        tokens = table.num_tokens[decoding]
        cost = view.block_options(tokens)
        cost[np.arange(decoding.size), held] -= table.num_shared[decoding]
        return value, cost


def keeps_kind(view: SchedulerView, keep_kind: bool | None) -> bool:
    """Return True if running requests keep their kinds (see `AptPolicy`); with a single offered kind they always do."""
    offered = [kind for kind in view.kinds if kind.offered]
    if keep_kind is not None and len(offered) > 1:
        return keep_kind
    return len(offered) == 1 or not view.kinds[HIDDEN].reprojected


def can_begin(
    view: SchedulerView,
    rows: Rows,
    value: NDArray[np.float64],
    cost: NDArray[np.int32],
    tokens: int,
    slots: int,
    *,
    split: bool = False,
) -> NDArray[np.intp]:
    """Return indices into waiting `rows` of the requests that can start in this step, in decreasing order of marginal
    gain.

    The gain of a request is the highest value per block among its options (Apt-Serve §5). The list ends before the
    first prompt that does not fit the rest of the step; a prompt longer than a whole step takes the rest and is the
    last.

    Args:
        view: the scheduler's view.
        rows: (n,) waiting rows.
        value: (n, num_kinds) values of their options.
        cost: (n, num_kinds) blocks of their options.
        tokens: number of tokens left in the step.
        slots: number of requests that may still start.
        split: whether any prompt may take the rest of the step, not only a prompt longer than a whole step.
    """
    gain = (value / np.maximum(cost, 1)).max(axis=1)
    order = np.argsort(-gain, kind="stable")
    order = order[gain[order] > 0]
    table = view.table
    lengths = table.num_tokens.take(rows[order])
    if table.cached_prefix_tokens.any():
        lengths = lengths - table.cached_prefix_tokens.take(rows[order], axis=0).min(axis=1)
    ends = np.cumsum(lengths)
    num = int(np.searchsorted(ends, tokens, side="right"))
    used = int(ends[num - 1]) if num else 0
    if num < order.size and used < tokens:
        num += split or lengths[num] > view.max_num_batched_tokens
    return order[: min(num, slots)]

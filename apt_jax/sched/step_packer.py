"""Helpers that policies share: the kinds that a request may take, its blocks, and packing rows into one step.

Speed: options are computed as (num_kinds, n) arrays, along contiguous memory, and returned transposed; gathers use
`take`, which is two to ten times faster than indexing with an array.
"""

import bisect

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import NO_KIND
from apt_jax.sched.request_table import RequestTable
from apt_jax.sched.view import Plan, SchedulerView

Rows = NDArray[np.int32]


def held_blocks_for(view: SchedulerView, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the (n,) numbers of blocks that `tokens` positions of running `rows` take, without shared blocks.

    Each row counts with the kind that it holds. Shared prefix blocks are full, so the number is at least 1 if a token
    is still to be computed. If two requests share a partly filled group, the running request may need a new group for
    its next token; this group is not counted, and the request waits for the next step if no group is free.
    """
    table = view.table
    blocks = view.blocks_for(tokens, table.kind.take(rows)) - table.num_shared.take(rows)
    if view.windows is not None:
        cached = table.num_cached.take(rows)
        extra = view.windows.extra_blocks(cached, tokens)
        blocks += np.where(table.num_tokens.take(rows) - cached > 1, extra, 0)
    return blocks


def start_blocks_for(
    view: SchedulerView, rows: Rows, tokens: NDArray[np.int32], kind: NDArray[np.integer]
) -> NDArray[np.int32]:
    """Return the (n,) numbers of free blocks, at least one group, that waiting `rows` need for `tokens` positions.

    Prefix blocks that other requests hold are subtracted. Blocks of cached prefixes that no request holds are not
    subtracted, because they count as free.
    """
    blocks = view.blocks_for(tokens, kind) - view.table.shared_prefix_blocks[rows, kind]
    if view.windows is not None:
        blocks += view.windows.most_blocks(tokens) - view.windows.num_blocks(tokens)
    return blocks


def start_options(view: SchedulerView, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the (n, num_kinds) results of `start_blocks_for` for each kind."""
    blocks = view.block_options(tokens)
    hits = view.table.shared_prefix_blocks
    if hits.any():
        blocks -= hits.take(rows, axis=0)
    return blocks


def may_start(view: SchedulerView, rows: Rows, blocks: int, ahead: int = 1) -> bool:
    """Return whether one of the waiting `rows` might fit `blocks` free blocks with `ahead` further tokens.

    False is certain, True is not. The check is fast: under overload it saves most knapsacks.
    """
    if not rows.size or blocks < 1 or view.table.shared_prefix_blocks.any():
        return rows.size > 0 and blocks > 0
    shortest = target_tokens(view, rows, ahead).min(keepdims=True)
    return int(view.block_options(shortest)[0][view.offered].min()) <= blocks


def allowed_kinds(view: SchedulerView, rows: Rows) -> NDArray[np.bool_]:
    """Return the (n, num_kinds) mask of offered kinds with which the request at its maximum length fits the whole pool.

    With any other kind the request would grow until the pool is full and could never finish. If no offered kind fits,
    the offered kind that takes the fewest blocks is allowed.
    """
    offered = view.offered
    tokens = view.table.max_tokens_total.take(rows)
    longest = view.block_options(tokens.max(initial=0, keepdims=True))[0]
    if offered.any() and (longest[offered] <= view.total_blocks).all():  # the ordinary case
        allowed = np.empty((offered.size, rows.size), np.bool_)
        allowed[:] = offered[:, None]
        return allowed.T
    blocks = view.block_options(tokens).T
    allowed = offered[:, None] & (blocks <= view.total_blocks)
    hopeless = ~allowed.any(axis=0)
    if hopeless.any():
        of_offered = np.where(offered[:, None], blocks[:, hopeless], np.iinfo(np.int32).max)
        allowed[of_offered.argmin(axis=0), np.flatnonzero(hopeless)] = True
    return allowed.T


def target_tokens(view: SchedulerView, rows: Rows, ahead: int) -> NDArray[np.int32]:
    """Return the (n,) lengths of `rows` in tokens after `ahead` more tokens, limited to their maximum lengths."""
    table = view.table
    return np.minimum(table.num_tokens.take(rows) + np.int32(ahead), table.max_tokens_total.take(rows))


def share_tokens(wanted: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
    """Return the (n,) tokens that each row gets: in order, its `wanted` tokens until `budget` is used up."""
    before = np.cumsum(wanted) - wanted
    return np.clip(budget - before, 0, wanted).astype(np.int32)


def blocks_after(view: SchedulerView, rows: Rows, num_tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the (n,) numbers of blocks that running `rows` hold after `num_tokens` more positions, without shared
    blocks."""
    table = view.table
    needed = held_blocks_for(view, rows, table.num_cached.take(rows) + num_tokens)
    return np.maximum(needed, table.num_blocks.take(rows))


def growth(view: SchedulerView, rows: Rows) -> int:
    """Return the number of additional blocks that running `rows` need for all their tokens.

    A decoding row needs blocks for its next token; a partly computed prompt, for its other tokens and one more.
    """
    if not rows.size:
        return 0
    tokens = view.table.num_tokens.take(rows)
    ahead = np.where(view.remaining(rows) > 1, target_tokens(view, rows, 1), tokens)
    lacking = held_blocks_for(view, rows, ahead) - view.table.num_blocks.take(rows)
    return int(np.maximum(lacking, 0).sum())


def num_that_fit(view: SchedulerView, rows: Rows, num_tokens: NDArray[np.int32]) -> int:
    """Return how many of the first `rows` can keep their cache and get the blocks for `num_tokens` more positions.

    The other rows must be preempted. A loop that takes the rows one by one, and preempts the last row while the next
    row does not fit, keeps the same rows.

    Args:
        view: the scheduler's view.
        rows: (n,) all running rows; the last is preempted first.
        num_tokens: (n,) number of tokens to compute for each row.
    """
    need = blocks_after(view, rows, num_tokens)
    capacity = view.free_blocks + int(view.table.num_blocks.take(rows).sum())
    return int(np.searchsorted(np.cumsum(need), capacity, side="right"))


def admissible(
    view: SchedulerView, waiting: Rows, free_blocks: int
) -> tuple[Rows, NDArray[np.int32], NDArray[np.int8]]:
    """Return the longest prefix of `waiting` for which slots, and blocks for the whole prompts, are free.

    Returns:
        The rows, the number of tokens left to compute for each, and the kind that each takes.
    """
    waiting = waiting[: max(view.max_num_seqs - view.running.size, 0)]
    if not waiting.size or free_blocks < 1:
        none = waiting[:0]
        return none, none, none.astype(np.int8)
    kind = allowed_kinds(view, waiting).argmax(axis=1)
    blocks = start_blocks_for(view, waiting, view.table.num_tokens.take(waiting), kind)
    num = int(np.searchsorted(np.cumsum(blocks), free_blocks, side="right"))
    waiting, kind = waiting[:num], kind[:num]
    return waiting, view.remaining(waiting, kind), kind.astype(np.int8)


def step_plan(
    view: SchedulerView,
    rows: Rows,
    num_tokens: NDArray[np.int32],
    kind: NDArray[np.int8],
    preempt: Rows,
) -> Plan:
    """Return a plan that runs the `rows` with at least one token; `iteration` follows from the phases of the rows."""
    runs = num_tokens > 0
    if not runs.all():
        rows, num_tokens, kind = rows[runs], num_tokens[runs], kind[runs]
    if not rows.size:
        return Plan.idle(preempt)
    holds = view.table.kind.take(rows) != NO_KIND
    decodes = int(np.count_nonzero(holds & (view.remaining(rows) == 1)))
    iteration = "mixed" if 0 < decodes < rows.size else "decode" if decodes else "prefill"
    return Plan(rows=rows, num_tokens=num_tokens, kind=kind, preempt=preempt, iteration=iteration)


class RequestNotes:
    """Keeps a number for each request between a policy's calls; the numbers are indexed by row.

    Rows are reused by later requests, but ranks are not, so a row holds a new request if its rank differs from the
    recorded rank.

    Args:
        dtype: dtype of the numbers.
    """

    def __init__(self, dtype: type) -> None:
        self._rank = np.full(0, -1, np.int64)
        self.values = np.zeros(0, dtype)
        """(capacity,) number of each row; valid for rows that were passed to `new`."""

    def new(self, table: RequestTable, rows: Rows) -> NDArray[np.bool_]:
        """Return the (n,) mask of `rows` that hold a different request than before, and set their numbers to 0."""
        if self._rank.size < table.capacity:
            more = table.capacity - self._rank.size
            self._rank = np.concatenate([self._rank, np.full(more, -1, np.int64)])
            self.values = np.concatenate([self.values, np.zeros(more, self.values.dtype)])
        rank = table.rank.take(rows)
        new = self._rank.take(rows) != rank
        if new.any():
            self._rank[rows[new]] = rank[new]
            self.values[rows[new]] = 0
        return new


def split_running(view: SchedulerView) -> tuple[Rows, Rows]:
    """Return the running rows that decode (one token left to compute) and the rows with partly computed prompts."""
    remaining = view.remaining(view.running)
    if (remaining == 1).all():
        return view.running, view.running[:0]
    return view.running[remaining == 1], view.running[remaining > 1]


def split_by_phase(view: SchedulerView) -> tuple[Rows, Rows]:
    """Return the running rows that have a token since they started, and the rows whose prompt is not yet computed.

    Unlike in `split_running`, a prompt of which chunks have left a single token does not count as decoding. A policy
    that chooses kinds again in decode steps could otherwise drop it before its first token, over and over.
    """
    decoding, partial = split_running(view)
    ends_prompt = view.table.tokens_since_preemption.take(decoding) == 0
    if not ends_prompt.any():
        return decoding, partial
    return decoding[~ends_prompt], np.concatenate([partial, decoding[ends_prompt]])


class StepPacker:
    """Collects the rows of one step within its limits of tokens, slots and blocks.

    Attributes:
        tokens_left: tokens left of `max_num_batched_tokens`.
        slots_left: slots left of `max_num_seqs`.
        blocks_left: free blocks that no row of the step has taken.
    """

    def __init__(self, view: SchedulerView, preempt: Rows | None = None) -> None:
        self.view = view
        self.preempt = view.running[:0] if preempt is None else preempt
        self.tokens_left = view.max_num_batched_tokens
        self.slots_left = view.max_num_seqs - (view.running.size - self.preempt.size)
        self.blocks_left = view.free_blocks
        if self.preempt.size:
            self.blocks_left += int(view.table.num_blocks[self.preempt].sum())
        self._decoding = view.running[:0]
        self._rows: list[int] = []
        self._num_tokens: list[int] = []
        self._kind: list[int] = []

    def decode(self, rows: Rows) -> None:
        """Add one decode token for each of `rows`, before any other row; their blocks must be free."""
        table = self.view.table
        self._decoding = rows
        self.tokens_left -= rows.size
        needed = held_blocks_for(self.view, rows, table.num_tokens[rows])
        self.blocks_left -= int((needed - table.num_blocks[rows]).sum())

    def _add(self, row: int, num_tokens: int, kind: int, blocks: int) -> None:
        self._rows.append(row)
        self._num_tokens.append(num_tokens)
        self._kind.append(kind)
        self.tokens_left -= num_tokens
        self.blocks_left -= blocks

    def continue_prefill(self, partial: Rows) -> bool:
        """Add the next chunks of partly computed prompts, in order; return True if any chunk was added."""
        table = self.view.table
        added = False
        for row in partial.tolist():
            kind, held, cached = (
                int(table.kind[row]),
                int(table.num_blocks[row]) + int(table.num_shared[row]),
                int(table.num_cached[row]),
            )
            most = min(int(table.num_tokens[row]) - cached, self.tokens_left)
            length, blocks = self._chunk(cached, most, kind, held)
            if length < 1:
                continue
            self._add(row, length, kind, blocks)
            added = True
        return added

    def _chunk(self, cached: int, most: int, kind: int, held: int) -> tuple[int, int]:
        """Return the length of the next chunk of a prompt that holds `held` blocks, at most `most`, for which there are
        blocks, and the blocks that it takes."""
        view, windows = self.view, self.view.windows
        if windows is None:
            length = min(most, view.most_tokens(held + self.blocks_left, kind) - cached)
            return length, view.blocks_of(cached + length, kind) - held

        def needed(length: int) -> int:
            return view.blocks_of(cached + length, kind) + windows.extra_blocks(cached, cached + length) - held

        length = bisect.bisect_right(range(1, most + 1), self.blocks_left, key=needed)
        return length, needed(length)

    def start(self, rows: Rows, kind: NDArray[np.int8], *, in_order: bool, split: bool = False) -> None:
        """Start waiting `rows` within the tokens and slots left; the caller ensures that their blocks are free.

        A prompt that has more tokens to compute than a whole step takes the rest of this step. Any other prompt is
        computed in one piece or not started, unless `split` is True.

        Args:
            rows: (n,) waiting rows, in order of priority.
            kind: (n,) cache kinds that they take.
            in_order: stop at the first prompt that cannot start; False: later prompts may still start.
            split: start any prompt with the tokens left in this step.
        """
        if not rows.size:
            return
        view, table = self.view, self.view.table
        found = table.cached_prefix_tokens[rows, kind]
        lengths = table.num_tokens.take(rows) - found
        shared = table.shared_prefix_blocks[rows, kind]
        whole = view.blocks_for(lengths + found, kind) - shared
        # First, all at once, the rows that fit one after another.
        num = int(np.searchsorted(np.cumsum(lengths), self.tokens_left, side="right"))
        num = max(min(num, self.slots_left), 0)
        self._rows += rows[:num].tolist()
        self._num_tokens += lengths[:num].tolist()
        self._kind += kind[:num].tolist()
        self.tokens_left -= int(lengths[:num].sum())
        self.blocks_left -= int(whole[:num].sum())
        self.slots_left -= num
        if in_order or split:
            rest = np.arange(num, rows.size)
        else:  # only those that can start at all
            left = lengths[num:]
            goes = (left <= self.tokens_left) | (left > view.max_num_batched_tokens)
            rest = num + np.flatnonzero(goes)
        for i in rest.tolist():
            if self.slots_left < 1 or self.tokens_left < 1:
                return
            length, blocks = int(lengths[i]), int(whole[i])
            if length > self.tokens_left:
                if length <= view.max_num_batched_tokens and not split:
                    if in_order:
                        return
                    continue
                length = self.tokens_left
                blocks = view.blocks_of(int(found[i]) + length, int(kind[i])) - int(shared[i])
            self._add(int(rows[i]), length, int(kind[i]), blocks)
            self.slots_left -= 1

    @property
    def is_empty(self) -> bool:
        return not self._rows and not self._decoding.size

    def plan(self) -> Plan:
        """Return the plan of the step; an idle plan if no rows were added."""
        if self.is_empty:
            return Plan.idle(self.preempt)
        decoding = self._decoding
        if not self._rows:
            return decode_plan(self.view, decoding, self.preempt)
        rows = np.array(self._rows, np.int32)
        num_tokens = np.array(self._num_tokens, np.int32)
        kind = np.array(self._kind, np.int8)
        if decoding.size:
            rows = np.concatenate([decoding, rows])
            num_tokens = np.concatenate([np.ones(decoding.size, np.int32), num_tokens])
            kind = np.concatenate([self.view.table.kind[decoding], kind])
        return Plan(
            rows=rows,
            num_tokens=num_tokens,
            kind=kind,
            preempt=self.preempt,
            iteration="mixed" if decoding.size else "prefill",
        )


def decode_plan(view: SchedulerView, rows: Rows, preempt: Rows) -> Plan:
    """Return a plan that preempts `preempt` and decodes one token for each of the first `rows` that fit a step."""
    rows = rows[: view.max_num_batched_tokens]
    if not rows.size:
        return Plan.idle(preempt)
    return Plan(
        rows=rows,
        num_tokens=np.ones(rows.size, np.int32),
        kind=view.table.kind[rows],
        preempt=preempt,
        iteration="decode",
    )


def resolve_prefill_deadlock(view: SchedulerView, partial: Rows) -> Plan:
    """Return a plan that preempts as many of the youngest `partial` prompts as needed for the oldest to continue.

    Used if only partly computed prompts hold cache and none of them can continue. Policies reserve the blocks of a
    prompt before they start it, so this happens only after an event outside their plans (a failed allocation or a
    change of policy). If the oldest prompt still cannot continue, all are preempted.
    """
    for num_kept in range(partial.size - 1, 0, -1):
        packer = StepPacker(view, partial[num_kept:])
        if packer.continue_prefill(partial[:1]):
            return packer.plan()
    return Plan.idle(partial)

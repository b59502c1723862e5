"""Groups of blocks of windowed layers, which a request releases when their positions have left its window.

Layers that attend to a window of W positions need only the last W - 1 cached positions of a request. They keep them in
groups of their own (`core.kinds.WindowSpec`), which come from the same pool and have block tables of their own:

    position        0 .................. s-W+1 ........... s ............ e-W+1 ......... e
    groups          released (NULL_BLOCK) | read by this step | not written | written      | next step
                                          first                                  end: ceil(e / C)

When a step that computes positions [s, e) has been dispatched, the groups that the token at e does not attend to are
released; steps run in order, so a later step may write to their blocks. Of a chunk longer than the window, only the
groups that the token at e needs are written.

Full groups are registered like all others, but each by itself: the digest of a group stands for all tokens up to its
end, so a group may be cached without the groups before it. A cached prefix of n tokens can be used if the groups that
the token at n attends to are cached (`PrefixTree.usable`). Released groups stay in the pool as idle groups until their
blocks are needed.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache.block_pool import NO_SLOT, require
from apt_jax.cache.group_pool import GroupPool
from apt_jax.cache.prefix_tree import Node
from apt_jax.core.kinds import WINDOWED, WindowSpec
from apt_jax.core.step import NULL_BLOCK, WindowBlocks
from apt_jax.sched.retention.sessions import NOBODY


class WindowTables:
    """Block tables of windowed layers. In the `GroupPool`, slot s holds these groups as slot `max_num_seqs` + s.

    Attributes (indexed by slot):
        tables: (max_num_seqs, blocks_per_group, J) block tables by group; `NULL_BLOCK` where no group is held.
        first: all groups before this one are released.
        end: one more than the last group.
        num_held: number of groups held.
        num_filled: number of groups, from the first position on, that have been filled and offered for registration.
    """

    def __init__(self, groups: GroupPool, spec: WindowSpec, max_num_seqs: int) -> None:
        self.spec = spec
        self._groups, self._num_slots = groups, max_num_seqs
        self.tables = np.full((max_num_seqs, spec.blocks_per_group, 64), NULL_BLOCK, np.int32)
        self.first = np.zeros(max_num_seqs, np.int32)
        self.end = np.zeros(max_num_seqs, np.int32)
        self.num_held = np.zeros(max_num_seqs, np.int32)
        self.num_filled = np.zeros(max_num_seqs, np.int32)

    def num_private_of(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the (n,) numbers of groups that only the slot itself holds."""
        return self._groups.num_private[self._num_slots + slots]

    # --- reserving and releasing -----------------------------------------------------------------------------------

    def must_grow(self, slots: NDArray[np.int32], ends: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return an (n,) mask of the slots that need more groups for positions up to `ends`."""
        return self.end[slots] * self.spec.block_size < ends

    def num_missing(self, slot: int, end: int) -> int:
        """Return the number of groups that `grow` needs; `NO_SLOT`: for a request without cache."""
        held = 0 if slot == NO_SLOT else int(self.end[slot])
        return max(-(-end // self.spec.block_size) - max(held, self.spec.first_group(end)), 0)

    def grow(self, slot: int, end: int, blocks: NDArray[np.int32]) -> None:
        """Give a slot the groups that positions up to `end` fill and that the token at `end` needs: newly allocated
        `blocks`, (`blocks_per_group` * n,)."""
        last = -(-end // self.spec.block_size)
        if blocks.size:
            ids = blocks.reshape(self.spec.blocks_per_group, -1)
            num = ids.shape[1]
            self._widen(last)
            self.tables[slot, :, last - num : last] = ids
            self._hold(slot, ids)
        self.end[slot] = max(int(self.end[slot]), last)

    def _hold(self, slot: int, ids: NDArray[np.int32]) -> None:
        groups, num = self._groups, ids.shape[1]
        groups.hold_new(ids[0], ids[1] if len(ids) > 1 else NULL_BLOCK, self._num_slots + slot)
        groups.rest[ids[0], : len(ids) - 1] = ids[1:].T
        groups.num_private[self._num_slots + slot] += num
        groups.in_use[WINDOWED] += num
        self.num_held[slot] += num

    def must_trim(self, slots: NDArray[np.int32], ends: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return an (n,) mask of the slots with groups that the tokens at `ends` do not attend to."""
        return self.spec.first_group(ends) > self.first[slots]

    def trim(self, slot: int, end: int, session: int = NOBODY) -> None:
        """Release the groups that the token at `end` does not attend to."""
        first = min(self.spec.first_group(end), int(self.end[slot]))
        if first > self.first[slot]:
            self._release(slot, int(self.first[slot]), first, session)
            self.first[slot] = first

    def release(self, slot: int, session: int = NOBODY) -> None:
        """Release all groups of a slot."""
        self._release(slot, int(self.first[slot]), int(self.end[slot]), session)
        self.first[slot] = self.end[slot] = self.num_filled[slot] = 0

    def _release(self, slot: int, begin: int, end: int, session: int) -> None:
        ids = self.tables[slot, :, begin:end]
        ids = ids[:, ids[0] != NULL_BLOCK]
        if ids.size:
            num = ids.shape[1]
            # Groups that others hold too are not private to this slot.
            own = int(np.count_nonzero(self._groups.num_refs[ids[0]] == 1))
            self._groups.release(ids.copy(), self._num_slots + slot, WINDOWED, session)
            self._groups.num_private[self._num_slots + slot] -= own
            self.num_held[slot] -= num
        self.tables[slot, :, begin:end] = NULL_BLOCK

    def _widen(self, groups: int) -> None:
        old = self.tables
        if groups > old.shape[2]:
            width = max(groups, 2 * old.shape[2])
            self.tables = np.full((*old.shape[:2], width), NULL_BLOCK, np.int32)
            self.tables[:, :, : old.shape[2]] = old

    # --- prefixes --------------------------------------------------------------------------------------------------

    def attach(self, slot: int, nodes: Sequence[Node], tokens: int) -> None:
        """Give a slot without groups the registered groups `nodes` of a prefix of `tokens` positions."""
        end, first = tokens // self.spec.block_size, self.spec.first_group(tokens)
        require(len(nodes) == end - first, "a window of a cached prefix is not cached")
        if nodes:
            firsts = self._groups.share(nodes, self._num_slots + slot)
            assert firsts is not None
            self._widen(end)
            self.tables[slot, 0, first:end] = firsts
            num_rest = self.spec.blocks_per_group - 1
            self.tables[slot, 1:, first:end] = self._groups.rest[firsts, :num_rest].T
        self.first[slot], self.end[slot], self.num_filled[slot] = first, end, end
        self.num_held[slot] = end - first

    def expect(self, slot: int, num_groups: int) -> tuple[int, NDArray[np.int32], NDArray[np.int64]] | None:
        """Mark the groups before `num_groups` that a step in flight fills; `register` or `GroupPool.discard` must
        follow.

        Returns:
            Index of the first of these groups, their first blocks, and the generations of these; None: no group.
        """
        begin = max(int(self.num_filled[slot]), int(self.first[slot]))
        self.num_filled[slot] = max(num_groups, int(self.num_filled[slot]))
        gaps = np.flatnonzero(self.tables[slot, 0, begin:num_groups] == NULL_BLOCK)
        begin += int(gaps[-1]) + 1 if gaps.size else 0
        firsts = self.tables[slot, 0, begin:num_groups].copy()
        if not firsts.size:
            return None
        self._groups.is_expected[firsts] = True
        return begin, firsts, self._groups.generation[firsts]

    # --- for a step ------------------------------------------------------------------------------------------------

    def blocks_of(self, slots: NDArray[np.int32]) -> WindowBlocks:
        """Return the blocks that `slots` hold.

        Raises:
            CacheIntegrityError: a block is not in [0, num_blocks], or not all groups that are held are in range.
        """
        first = self.first[slots]
        num = int((self.end[slots] - first).max(initial=0))
        self._widen(int(first.max(initial=0)) + num)
        column = first[:, None] + np.arange(num, dtype=np.int32)
        half = np.arange(self.spec.blocks_per_group, dtype=np.int32)
        blocks = self.tables[slots[:, None, None], half[None, :, None], column[:, None]]
        require(
            blocks.min(initial=0) >= 0
            and blocks.max(initial=0) <= self._groups.pool.num_blocks
            and int(np.count_nonzero(blocks[:, 0])) == int(self.num_held[slots].sum()),
            "a block table of windowed layers names blocks that its request does not hold",
        )
        return WindowBlocks(first=first, blocks=blocks)

    def check_writable(self, slots: NDArray[np.int32], starts: NDArray[np.int32]) -> None:
        """Check that no other request can read the groups that a step writes to, from position `starts` on.

        Raises:
            CacheIntegrityError: such a group is registered or has another holder.
        """
        begin = np.maximum(starts // self.spec.block_size, self.first[slots])
        num = int((self.end[slots] - begin).max(initial=0))
        self._widen(int(begin.max(initial=0)) + num)
        firsts = self.tables[slots[:, None], 0, begin[:, None] + np.arange(num, dtype=np.int32)]
        firsts = firsts[firsts != NULL_BLOCK]
        require(
            (self._groups.num_refs[firsts] == 1).all() and not self._groups.prefixes.is_registered[firsts].any(),
            "a step would write into a block of windowed layers that others may read",
        )

    def check_integrity(self, taken: NDArray[np.int32]) -> None:
        """Check the tables of the slots `taken`, which are in use; all others must be empty."""
        free = np.ones(self._num_slots, np.bool_)
        free[taken] = False
        require(not self.tables[free].any() and not self.num_held[free].any(), "a free slot holds windowed groups")
        held = self.tables[:, 0] != NULL_BLOCK
        require((np.count_nonzero(held, axis=1) == self.num_held).all(), "windowed groups are miscounted")
        column = np.arange(self.tables.shape[2])
        inside = (column >= self.first[:, None]) & (column < self.end[:, None])
        require(not (held & ~inside).any(), "a windowed group is held outside its slot's range")
        rest = self._groups.rest[self.tables[:, 0][held], : self.spec.blocks_per_group - 1]
        require((np.moveaxis(self.tables, 1, 0)[1:, held] == rest.T).all(), "a windowed group has other blocks")

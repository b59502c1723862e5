"""The second tier of the cache: copies of registered groups in host memory, and the transfers of a step.

A group without a holder stays on the device until its blocks are needed: then `GroupPool` evicts and *saves* it, and
its node stays in the tree. A request that finds the node gets new blocks, into which the group is *loaded*. The
copy in host memory is kept as long as there is space, so the group need not be saved again. Preempted requests are
restored in this way, and prefixes are kept longer than the device pool alone would allow.

    held ── last release ──► idle ── evicted: saved ──► only in host memory
      ▲                                                    │
      └───────── found: loaded into new blocks ◄───────────┘          dropped from there: removed from the tree

This module copies no data. It collects the transfers of the step being built, which become part of its `StepBatch`.

Groups dropped from host memory are written to disk, if there is a disk tier (`apt_jax.engine.disk_reads` reads them).

If host memory is full, groups are dropped one at a time, in this order:

1. copies of groups that are also on the device;
2. groups that no waiting request would use, least recently used first, later groups of a prefix before earlier groups;
   with a retention policy, groups of the session with the lowest value, unless the new group's session has less;
3. only to make space for a group that a waiting request would use: groups of waiting best-effort requests, then groups
   of waiting real-time requests; within each class, groups of the request with the most time left first.
"""

import collections
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache.block_pool import BlockPool, require
from apt_jax.cache.prefix_tree import Node, PrefixTree
from apt_jax.cache.session_groups import SessionGroups
from apt_jax.core.step import NULL_BLOCK
from apt_jax.core.tiers import DiskStore

_LOOKED_AT = 64
"""Maximum number of groups examined in the search for a group to drop."""


class _Waiting(Protocol):
    """The part of `PrefixHitTracker` used here: it finds the host-memory group needed by the least urgent waiting
    request."""

    def least_urgent(self, skip: set[Node]) -> Node | None: ...


class HostTier:
    """Groups in host memory, and the transfers of the step that is being built.

    Args:
        num_blocks: number of blocks of host memory, of the same size as device blocks.
        blocks_per_group: number of blocks of a group, by kind.

    Attributes:
        pool: the blocks, with ids in [1, num_blocks].
        only: groups that are only in host memory, least recently used first.
        copies: groups that are also on the device, least recently used first.
        pinned: groups that the step may load; they are not dropped before `take_transfers`.
        saves: device blocks of the groups that the step saves.
        loads: device blocks of the groups that the step loads.
        kept: groups in `loads` that the step reads although no request holds them.
        disk: store for groups dropped from host memory; None: dropped groups are lost.
        sessions: groups by session, which decide what is dropped; None: the least recently used is.
        num_saved_blocks, num_loaded_blocks: number of blocks moved in all steps so far.
        num_lent: number of blocks lent for checkpointed slots of requests (`LentBlocks`).
    """

    def __init__(self, num_blocks: int, blocks_per_group: Sequence[int]) -> None:
        self.pool = BlockPool(num_blocks)
        self.only: collections.OrderedDict[Node, None] = collections.OrderedDict()
        self.copies: collections.OrderedDict[Node, None] = collections.OrderedDict()
        self.pinned: set[Node] = set()
        self.saves: dict[Node, tuple[int, ...]] = {}
        self.loads: dict[Node, list[int]] = {}
        self.kept: set[Node] = set()
        self.num_saved_blocks = self.num_loaded_blocks = 0
        self.num_lent = 0
        self.disk: DiskStore | None = None
        self.sessions: SessionGroups | None = None
        self._blocks_per_group = tuple(blocks_per_group)
        self._copied: list[tuple[int, int]] = []

    # --- groups ----------------------------------------------------------------------------------------------------

    def save(self, node: Node, blocks: tuple[int, ...]) -> bool:
        """Add a group that is about to leave the device to the saves of the step, unless host memory has a copy.

        Args:
            node: the group.
            blocks: its blocks on the device.

        Returns:
            False: host memory has too few free blocks.
        """
        if not node.host:
            ids = self.pool.allocate(len(blocks))
            if ids is None:
                return False
            node.host = tuple(ids.tolist())
            self.copies[node] = None  # until it leaves the device
            self.saves[node] = blocks
        return True

    def load(self, node: Node, blocks: list[int]) -> None:
        """Add a group to the loads of the step; `blocks` are its device blocks from now on."""
        self.loads[node] = blocks
        self.note_place(node)

    def load_copy(self, node: Node, blocks: Sequence[int]) -> None:
        """Make the step load a copy of a group into `blocks`, which a request will write to."""
        self._copied += zip(node.host, blocks[: len(node.host)], strict=True)

    def note_place(self, node: Node) -> None:
        """Update `only` and `copies` after a group was copied to the device or evicted from it; this counts as a use of
        the group."""
        if node.host:
            here, there = (self.only, self.copies) if node.block == NULL_BLOCK else (self.copies, self.only)
            there.pop(node, None)
            here[node] = None
            here.move_to_end(node)
            if self.sessions is not None:
                self.sessions.comes_back(node)
                if here is self.only:
                    self.sessions.leaves(node, node.session)

    def forget(self, node: Node) -> None:
        """Free a group's blocks of host memory, if it has any."""
        if node.host:
            self.pool.free(np.array(node.host, np.int32))
            node.host = ()
            self.only.pop(node, None)
            self.copies.pop(node, None)
            self.saves.pop(node, None)
            self.loads.pop(node, None)
            self.pinned.discard(node)
            if self.sessions is not None:
                self.sessions.comes_back(node)

    def victim(self, node: Node, waiting: _Waiting | None) -> Node | None:
        """Return the group to drop from host memory to make space for `node`; None: no group may be dropped for it."""
        for copy in self.copies:
            if copy not in self.pinned and copy not in self.saves:
                return copy
        is_ranked = self.sessions is not None and self.sessions.is_ranked
        if self.sessions is not None and is_ranked:
            found = self.sessions.to_drop(node, self._may_drop)
            if found is not None:
                return found
        for _ in range(0 if is_ranked else min(len(self.only), _LOOKED_AT)):
            found = next(iter(self.only))
            if found in self.pinned or found.num_below or _is_above(found, node):
                self.only.move_to_end(found)
                continue
            return found
        if waiting is None or not node.num_below:
            return None
        found = waiting.least_urgent(self.pinned)
        return None if found is None or _is_above(found, node) else found

    def _may_drop(self, node: Node) -> bool:
        return not (node in self.pinned or node.num_below or node.children)

    def write_out(self, nodes: Sequence[Node], first: int | None = None) -> None:
        """Queue groups for writing to disk; groups whose contents are not in host memory are left out.

        Args:
            nodes: the groups.
            first: depth to record on disk for the first group; it increases by 1 per group. None: the nodes' own
                depths.
        """
        if self.disk is None:
            return
        for i, node in enumerate(nodes):
            if node.host and node not in self.saves:
                depth = node.depth if first is None else first + i
                self.disk.write(node.kind, node.digest, depth, node.host, node.host_is_downward)

    # --- transfers of a step ---------------------------------------------------------------------------------------

    def pin(self, nodes: Sequence[Node]) -> None:
        """Do not drop `nodes`, which have valid copies in host memory, until the step has been built."""
        self.pinned.update(nodes)

    def take_transfers(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the transfers of the step being built, as `StepBatch.saves` and `StepBatch.loads`, and clear them."""
        saves = [(b, h) for node, blocks in self.saves.items() for b, h in zip(blocks, node.host, strict=True)]
        loads = [(h, b) for node, blocks in self.loads.items() for h, b in zip(node.host, blocks, strict=True)]
        loads += self._copied
        self.saves.clear()
        self.loads.clear()
        self._copied.clear()
        self.kept.clear()
        self.pinned.clear()
        self.num_saved_blocks += len(saves)
        self.num_loaded_blocks += len(loads)
        return _pairs(saves), _pairs(loads)

    # --- integrity -------------------------------------------------------------------------------------------------

    def check_integrity(self, nodes: Sequence[Node], prefixes: PrefixTree) -> None:
        """Recount the blocks of host memory.

        Args:
            nodes: all registered groups.
            prefixes: tree of the groups.

        Raises:
            CacheIntegrityError: the blocks are inconsistent.
        """
        self.pool.check_integrity()
        hosted = [node for node in nodes if node.host]
        require(
            all(prefixes.find(node.kind, node.digest) is node for node in hosted),
            "a removed group still has host memory",
        )
        require(
            {node for node in hosted if node.block == NULL_BLOCK} == set(self.only),
            "the list of groups that are only in host memory is wrong",
        )
        require(
            {node for node in hosted if node.block != NULL_BLOCK} == set(self.copies),
            "the list of groups in both memories is wrong",
        )
        require(
            all(len(node.host) == self._blocks_per_group[node.kind] for node in hosted),
            "a group has the size of another kind",
        )
        used = np.array([block for node in hosted for block in node.host], np.int32)
        require(np.unique(used).size == used.size, "a host block is owned twice")
        require(not self.pool.is_free(used).any(), "a host block is both owned and free")
        lost = self.pool.num_used - self.num_lent - used.size
        require(lost == 0, f"{lost} host blocks are lost")
        require(
            not (self.saves or self.loads or self.pinned or self._copied), "some transfers were not taken by a step"
        )


def _pairs(pairs: list[tuple[int, int]]) -> NDArray[np.int32]:
    return np.array(pairs, np.int32).reshape(-1, 2)


def _is_above(ancestor: Node, node: Node) -> bool:
    at: Node | None = node
    while at is not None and at.depth > ancestor.depth:
        at = at.parent
    return at is ancestor

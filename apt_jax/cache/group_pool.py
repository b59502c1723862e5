"""Groups of blocks in one pool: their holders, their registration as cached prefixes, and idle groups.

A group is identified by its first block, its K or X block. With prefix caching, groups are shared: a full group with
valid contents is registered in the `PrefixTree`, where later requests with the same tokens find it:

    free ── reserve ──► held by one ── register ──► registered, held by n ── last release ──► idle ── attach ──► held
      ▲                      │ release                                                         │
      └──────────────────────┴──────────── evict: least recently used first, leaf first ◄──────┘
                                           or by session (`apt_jax.cache.session_groups`)

* Idle groups count as free: empty blocks are handed out first, then idle groups are evicted.
* A request that holds a registered group also holds all groups before it in the prefix. A new group whose tokens are
  already registered is replaced by the registered group, so this is true even if requests compute the same prefix at
  the same time.
* A group with two or more holders is charged to none of them: a request is charged only for groups that no other
  request holds, which are certain to become free when it ends. Charged, shared and free blocks add up to the pool.

With a `HostTier`, an evicted idle group is saved to host memory and stays registered; `share` loads it into new blocks.

Without prefix caching no group is ever registered or idle.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache.block_pool import BlockPool, require
from apt_jax.cache.host_tier import HostTier
from apt_jax.cache.placement import Placement
from apt_jax.cache.prefix_hits import PrefixHitTracker
from apt_jax.cache.prefix_tree import Node, PrefixTree
from apt_jax.cache.session_groups import SessionGroups
from apt_jax.core.kinds import WINDOWED
from apt_jax.core.step import NULL_BLOCK
from apt_jax.sched.retention.sessions import NOBODY

_WRITTEN_AT_ONCE = 8
"""Number of groups written to disk between two checks of the time limit."""


class CopySource(NamedTuple):
    """A registered group whose contents are copied into a new group."""

    group: NDArray[np.int32] | Node
    """(2,) first and second block of the group on the device, or its node if it is copied from host memory."""
    is_downward: bool
    """True: positions fill the group from the right end."""


class GroupPool:
    """Allocation, references and sharing of groups.

    Attributes (arrays are indexed by the first block of a group; change them only through the methods):
        pool: the blocks.
        blocks_per_group: number of blocks of a group, by kind.
        prefixes: registered and idle groups.
        tracker: prefix hits of waiting requests; None: not tracked.
        tier: groups in host memory; None: host memory is not used.
        num_refs: number of requests that hold the group.
        generation: incremented when the block is allocated as a first block, and when its group gets a second user
            (`apt_jax.cache.sharing`); distinguishes successive uses of the block.
        rest: (num_blocks + 1, n) further blocks of the group, padded with `NULL_BLOCK`.
        second: the first of `rest`: the V block, `NULL_BLOCK` for the hidden kind.
        slot_sum: sum of the slots that hold the group; equals the slot if there is only one holder.
        is_expected: True: a step in flight fills the group, which may be registered afterwards.
        num_private: for each slot, the number of groups that only this slot holds.
        ownership_changed: True: `num_private` of a slot has changed for a reason other than the slot's own allocations.
        in_use: number of groups with a holder, by kind.
        sessions: idle groups by session; None: they are evicted least recently used first.
        is_kept: True: the idle group is kept for a waiting request, and counts as held in `PrefixHitTracker`.
        placement: is notified of new groups; None: each group is filled from the left by one request at a time.
        num_idle_blocks: number of blocks of idle groups.
    """

    def __init__(
        self, *, num_blocks: int, max_num_seqs: int, blocks_per_group: Sequence[int], num_host_blocks: int = 0
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.blocks_per_group = tuple(blocks_per_group)
        self.prefixes = PrefixTree(num_blocks, len(self.blocks_per_group), num_host_blocks)
        self.tracker: PrefixHitTracker | None = None
        self.tier = HostTier(num_host_blocks, self.blocks_per_group) if num_host_blocks else None
        self.num_refs = np.zeros(num_blocks + 1, np.int32)
        self.generation = np.zeros(num_blocks + 1, np.int64)
        self.rest = np.zeros((num_blocks + 1, max(1, *(num - 1 for num in self.blocks_per_group))), np.int32)
        self.second = self.rest[:, 0]
        self.slot_sum = np.zeros(num_blocks + 1, np.int64)
        self.is_expected = np.zeros(num_blocks + 1, np.bool_)
        self.num_private = np.zeros(max_num_seqs, np.int32)
        self.ownership_changed = False
        self.in_use = [0] * len(self.blocks_per_group)
        self.num_idle_blocks = 0
        self.sessions: SessionGroups | None = None
        self.is_kept = np.zeros(num_blocks + 1, np.bool_)
        self.placement: Placement | None = None

    def use_sessions(self, sessions: SessionGroups) -> None:
        """Evict idle groups in the order of sessions; no group may be idle."""
        self.sessions = self.prefixes.idle = sessions
        if self.tier is not None:
            self.tier.sessions = sessions

    def keep(self, session: int, *, is_kept: bool) -> None:
        """Set whether the idle groups of a session count as held for the waiting requests that would use them."""
        assert self.sessions is not None
        firsts = self.sessions.of(session)
        self.is_kept[firsts] = is_kept
        if self.tracker is not None:
            same = set(firsts)
            for node in map(self.prefixes.node_of.get, firsts):
                if node is not None and node.num_below and node.parent is not None and node.parent.block not in same:
                    self.tracker.used(node)

    def unkeep(self, nodes: Sequence[Node]) -> None:
        """Count the idle groups of a path as free again."""
        blocks = [node.block for node in nodes]
        if self.is_kept[blocks].any():
            self.is_kept[blocks] = False
            if self.tracker is not None:
                self.tracker.used(nodes[0])

    def end_session(self, session: int) -> None:
        """Free the idle groups of a session that no other session's prefix needs, also in host memory."""
        assert self.sessions is not None
        before = -1
        while (left := self.sessions.num_groups(session)) != before:  # ends after its beginning, wherever both are
            before = left
            for node in self.sessions.in_host(session):
                if not node.children:
                    self.drop(node)
            for first in self.sessions.of(session):
                node = self.prefixes.node_of.get(first)
                if node is None:
                    self._discard(first)
                elif not node.children:
                    self.drop(node)

    # --- allocation ------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: empty and idle blocks."""
        return self.pool.num_free + self.num_idle_blocks

    def allocate(self, num: int) -> NDArray[np.int32] | None:
        """Allocate `num` blocks and return their ids: empty blocks first, then blocks of evicted idle groups; None: too
        few are free."""
        if num > self.pool.num_free:
            if num > self.num_free:
                return None
            with self._hits_together():
                while self.pool.num_free < num:
                    self._evict(self.prefixes.idle.victim())
        return self.pool.allocate(num)

    def _hits_together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.tracker is None else self.tracker.together()

    def hold_new(
        self,
        firsts: int | NDArray[np.int32],
        seconds: int | NDArray[np.int32],
        slots: int | NDArray[np.int32],
    ) -> None:
        """Record the only holder of each newly allocated group; the caller updates `in_use` and `num_private`."""
        self.num_refs[firsts] = 1
        self.generation[firsts] += 1
        self.slot_sum[firsts] = slots
        self.second[firsts] = seconds
        if self.rest.shape[1] > 1:
            self.rest[firsts, 1:] = NULL_BLOCK
        if self.placement is not None:
            self.placement.note_new(firsts, slots)

    def release(
        self, ids: NDArray[np.int32], slot: int, kind: int, session: int = NOBODY, *, is_read: bool = False
    ) -> None:
        """Drop a slot's references; groups without another holder become idle if registered or expected, and are freed
        otherwise.

        Args:
            ids: (halves, groups) blocks of all groups that the slot holds; the caller updates `num_private`.
            slot: slot that held the groups.
            kind: cache kind of the groups.
            session: session that idle groups belong to from now on.
            is_read: True: the step being built reads the groups, so their loads are kept.
        """
        firsts = ids[0]
        self.num_refs[firsts] -= 1
        self.slot_sum[firsts] -= slot
        left = self.num_refs[firsts]
        require(left.min(initial=0) >= 0, "a group was released more often than it was taken")
        self._mark_exclusive(firsts[left == 1])
        over = left == 0
        self.in_use[kind] -= int(np.count_nonzero(over))
        registered = self.prefixes.is_registered[firsts]
        kept = over & (registered | self.is_expected[firsts])
        self.pool.free(ids[:, over & ~kept].reshape(-1))
        idle = firsts[kept].tolist()
        self.num_idle_blocks += len(idle) * self.blocks_per_group[kind]
        for first in reversed(idle):  # later groups of a prefix are evicted first
            self.prefixes.idle.add(first, kind, session)
        if self.tier is not None and self.tier.loads:
            if is_read:
                self._keep_loads(firsts.tolist())
            else:
                self._cancel_loads(idle)
        changed = firsts[kept & self.prefixes.is_registered[firsts]]
        if changed.size and self.tracker is not None and kind != WINDOWED:
            self.tracker.used(self.prefixes.node_of[int(changed[0])])

    def _mark_exclusive(self, firsts: NDArray[np.int32]) -> None:
        """Charge groups to their only remaining holder."""
        if firsts.size:
            np.add.at(self.num_private, self.slot_sum[firsts], 1)
            self.ownership_changed = True

    # --- prefixes --------------------------------------------------------------------------------------------------

    def share(self, nodes: Sequence[Node], slot: int) -> NDArray[np.int32] | None:
        """Make a slot a holder of `nodes`, the first groups of a path from the root. Groups that are only in host
        memory get device blocks, and the step being built loads them.

        Returns:
            (n,) first blocks of the groups; None: groups in host memory cannot be loaded, and nothing has changed.
        """
        if self.tier is None or all(node.block != NULL_BLOCK for node in nodes):
            return self._share(nodes, slot)
        return self._load(self.tier, nodes, slot)

    def _load(self, tier: HostTier, nodes: Sequence[Node], slot: int) -> NDArray[np.int32] | None:
        """Implement `share` if some groups are only in host memory."""
        kind = nodes[0].kind
        present = [node for node in nodes if node.block != NULL_BLOCK]
        missing = [node for node in nodes if node.block == NULL_BLOCK]
        if any(node not in tier.pinned for node in missing):  # they were evicted just now
            return None
        if present:
            self._share(present, slot)
        halves, num = self.blocks_per_group[kind], len(missing)
        ids = self.allocate(num * halves)
        if ids is None:
            if present:
                firsts = np.array([node.block for node in present], np.int32)
                self.release(np.stack([firsts, self.second[firsts]])[:halves], slot, kind, missing[0].session)
                self.num_private[slot] = 0
            return None
        blocks = ids.reshape(halves, num)
        self.hold_new(blocks[0], NULL_BLOCK if halves == 1 else blocks[1], slot)
        self.in_use[kind] += num
        self.num_private[slot] = (self.num_private[slot] if present else 0) + num
        for node, own in zip(missing, blocks.T.tolist(), strict=True):
            self.prefixes.place(node, own[0])
            tier.load(node, own)
            if self.placement is not None:
                self.placement.is_downward[own[0]] = node.host_is_downward
        if self.tracker is not None:
            self.tracker.used(missing[0])
        return np.array([node.block for node in nodes], np.int32)

    def _cancel_loads(self, idle: list[int]) -> None:
        """Cancel the loads of idle groups, which are then only in host memory again."""
        assert self.tier is not None
        with self._hits_together():
            for first in idle:
                node = self.prefixes.node_of.get(first)
                if node is not None and node in self.tier.loads and node not in self.tier.kept:
                    del self.tier.loads[node]
                    self._leave_device(node)

    def _keep_loads(self, firsts: list[int]) -> None:
        """Keep the loads of groups that the step reads, even if no request holds these groups any more."""
        assert self.tier is not None
        nodes = (self.prefixes.node_of.get(first) for first in firsts)
        self.tier.kept.update(node for node in nodes if node is not None and node in self.tier.loads)

    def _leave_device(self, node: Node) -> None:
        """Free the device blocks of an idle group that is also in host memory."""
        first = node.block
        if self.sessions is not None and first in self.sessions:
            node.session = self.sessions.session_of(first)
        self.prefixes.displace(node)
        self._discard(first)
        if self.tier is not None:
            self.tier.note_place(node)
        if self.tracker is not None:
            self.tracker.used(node)

    def _share(self, nodes: Sequence[Node], slot: int) -> NDArray[np.int32]:
        """Implement `share` if all groups are on the device."""
        kind = nodes[0].kind
        firsts = np.array([node.block for node in nodes], np.int32)
        before = self.num_refs[firsts]
        lone = firsts[before == 1]
        if lone.size:
            np.subtract.at(self.num_private, self.slot_sum[lone], 1)
            self.ownership_changed = True
        idle = np.flatnonzero(before == 0)
        for first in firsts[idle].tolist():
            del self.prefixes.idle[first]
        if self.sessions is not None:
            self.is_kept[firsts] = False
        self.num_idle_blocks -= idle.size * self.blocks_per_group[kind]
        self.in_use[kind] += idle.size
        self.num_refs[firsts] += 1
        self.slot_sum[firsts] += slot
        self.num_private[slot] += idle.size
        if idle.size and self.tracker is not None and kind != WINDOWED:
            self.tracker.used(nodes[int(idle[0])])
        return firsts

    def copy_source(self, node: Node) -> CopySource | None:
        """Return the source for a copy of a registered group; None: the group was evicted while this step was built.

        The call counts as a use of the group.
        """
        if self.tier is not None and (node.block == NULL_BLOCK or node in self.tier.loads):
            return CopySource(node, node.host_is_downward) if node in self.tier.pinned else None
        if node.block in self.prefixes.idle:
            self.prefixes.idle.move_to_end(node.block)
        is_downward = self.placement is not None and bool(self.placement.is_downward[node.block])
        return CopySource(np.array([node.block, self.second[node.block]], np.int32), is_downward)

    def register(
        self,
        kind: int,
        digests: Sequence[bytes],
        begin: int,
        firsts: NDArray[np.int32],
        generations: NDArray[np.int64],
        slot: int,
        table: NDArray[np.int32] | None,
    ) -> None:
        """Register full groups for other requests to find; see `HybridCache.register` for the other arguments.

        Args:
            slot: slot of the request that filled the groups, if `table` is given.
            table: (2, J) block table of the request, changed if a group is replaced; None: it holds no cache.
        """
        prefixes = self.prefixes
        parent = prefixes.find(kind, digests[begin - 1]) if begin else prefixes.roots[kind]
        new: list[Node] = []
        blocks, stamps = firsts.tolist(), generations.tolist()
        with self._hits_together():
            for i, first in enumerate(blocks):
                if self.generation[first] != stamps[i]:
                    parent = None  # reallocated in the meantime
                    continue
                self.is_expected[first] = False
                at = begin + i
                holder = None
                if self.num_refs[first]:
                    if table is None or table[0, at] != first:
                        parent = None
                        continue
                    holder = table
                    # A holder of a registered group must also hold all groups before it.
                    if at and parent is not None and table[0, at - 1] != parent.block:
                        parent = None
                elif first not in prefixes.idle:
                    parent = None
                    continue
                if parent is None:
                    self._discard(first)
                    continue
                node = prefixes.find(kind, digests[at])
                if node is None:
                    node = prefixes.add(parent, digests[at], first)
                    new.append(node)
                elif node.block == NULL_BLOCK:  # only in host memory, and computed again
                    self._return_to_device(node, first)
                elif node.block != first:
                    if holder is not None:
                        self._deduplicate(slot, holder[:, at], node)
                    else:
                        self._discard(first)
                parent = node
        if new and self.tracker is not None:
            self.tracker.registered(new)

    def register_windowed(
        self, digests: Sequence[bytes], begin: int, firsts: NDArray[np.int32], generations: NDArray[np.int64]
    ) -> None:
        """Register full groups of windowed layers, each by itself; see `HybridCache.register` for the arguments."""
        prefixes = self.prefixes
        same = self.generation[firsts] == generations
        for at in np.flatnonzero(same).tolist():
            first, digest = int(firsts[at]), digests[begin + at]
            self.is_expected[first] = False
            if prefixes.find(WINDOWED, digest) is not None:
                self._discard(first)
            elif self.num_refs[first] or first in prefixes.idle:
                prefixes.add(prefixes.roots[WINDOWED], digest, first)
                if self.tracker is not None:
                    self.tracker.windows_changed = True

    def discard(self, firsts: NDArray[np.int32], generations: NDArray[np.int64]) -> None:
        """Cancel the registration of expected groups; groups that no request holds become free."""
        same = self.generation[firsts] == generations
        self.is_expected[firsts[same]] = False
        for first in firsts[same].tolist():
            self._discard(first)

    def drop(self, node: Node) -> None:
        """Unregister a node and its descendants; groups that no request holds become free."""
        nodes = self.prefixes.subtree(node)
        if self.tracker is not None:
            if node.kind == WINDOWED:
                self.tracker.windows_changed = True
            else:
                self.tracker.dropped(nodes)
        self.prefixes.remove(nodes)
        for each in nodes:
            if self.tier is not None:
                self.tier.forget(each)
            self._discard(each.block)

    def clear_prefixes(self) -> None:
        """Unregister all registered and expected groups, because their contents are lost. Held groups stay held."""
        self.is_expected[:] = False
        for root in self.prefixes.roots:
            for node in list(root.children):
                self.drop(node)
        for first in list(self.prefixes.idle):
            self._discard(first)

    def lose_device(self) -> None:
        """Keep only the registered groups that have a copy in host memory, after the device lost its contents.

        If a group has no copy, its descendants are forgotten too. No group may be held.
        """
        if self.tier is None:
            self.clear_prefixes()
            return
        self.is_expected[:] = False
        todo = [node for root in self.prefixes.roots for node in root.children]
        leaving: list[Node] = []
        while todo:
            node = todo.pop()
            if not node.host:
                self.drop(node)
                continue
            if node.block != NULL_BLOCK:
                leaving.append(node)
            todo.extend(node.children)
        with self._hits_together():
            for node in reversed(leaving):  # later groups of a prefix are dropped first
                self._leave_device(node)
        for first in list(self.prefixes.idle):
            self._discard(first)

    def _return_to_device(self, node: Node, first: int) -> None:
        """Record that a group in host memory is now also on the device because a request computed it again; its device
        blocks are held or idle."""
        self.prefixes.place(node, first)
        if self.tier is not None:
            self.tier.note_place(node)
        if self.tracker is not None:
            self.tracker.used(node)

    def _deduplicate(self, slot: int, column: NDArray[np.int32], node: Node) -> None:
        """Replace a slot's group by the registered group with the same tokens, and free the replaced group.

        A step in flight may still read the replaced group; the next holder of its blocks writes to them only in a later
        step.

        Args:
            slot: slot whose group is replaced.
            column: (2,) column of the slot's block table, changed in place.
            node: the registered group.
        """
        kind = node.kind
        old = column[: self.blocks_per_group[kind]].copy()
        refs = int(self.num_refs[node.block])
        require(self.num_refs[old[0]] == 1, "a group that others hold is registered again")
        if refs == 0:
            del self.prefixes.idle[node.block]
            self.is_kept[node.block] = False
            self.num_idle_blocks -= self.blocks_per_group[kind]
        else:
            self.num_private[slot] -= 1
            self.in_use[kind] -= 1
            if refs == 1:
                self.num_private[self.slot_sum[node.block]] -= 1
            self.ownership_changed = True
        self.num_refs[node.block] += 1
        self.slot_sum[node.block] += slot
        column[:] = node.block, self.second[node.block]
        self.num_refs[old[0]] = 0
        self.pool.free(old)
        if refs == 0 and self.tracker is not None:
            self.tracker.used(node)

    def _evict(self, first: int) -> None:
        node = self.prefixes.node_of.get(first)
        if node is None:
            self._discard(first)
        elif self.tier is None or not self._offload(self.tier, node):
            self.drop(node)

    def _offload(self, tier: HostTier, node: Node) -> bool:
        """Move an idle group to host memory; returns False if not enough host memory can be freed for it."""
        second = int(self.second[node.block])
        blocks = (node.block,) if second == NULL_BLOCK else (node.block, second)
        if self.placement is not None and not node.host:
            node.host_is_downward = bool(self.placement.is_downward[node.block])
        while (done := tier.save(node, blocks)) is False:
            if not self._make_host_room(tier, node):
                return False
        self._leave_device(node)
        return done

    def _make_host_room(self, tier: HostTier, node: Node) -> bool:
        """Drop one group from host memory to free blocks for `node`; returns False if no group can be dropped."""
        victim = tier.victim(node, self.tracker)
        if victim is None:
            return False
        if victim.block != NULL_BLOCK:
            tier.forget(victim)
        else:
            tier.write_out(self.prefixes.subtree(victim))
            self.drop(victim)
        return True

    # --- disk --------------------------------------------------------------------------------------------------------

    def place_in_host(self, parent: Node, digest: bytes, *, is_downward: bool) -> Node | None:
        """Register a group read from disk, allocate host blocks for it, and return its node; None: too few blocks can
        be freed."""
        tier = self.tier
        assert tier is not None
        node = Node(parent.kind, digest, parent, NULL_BLOCK)
        node.host_is_downward = is_downward
        while (ids := tier.pool.allocate(self.blocks_per_group[parent.kind])) is None:
            if not self._make_host_room(tier, node):
                return None
        node.host = tuple(ids.tolist())
        self.prefixes.add_node(node)
        tier.note_place(node)
        if self.tracker is not None:
            self.tracker.registered([node])
        return node

    def write_all(self, save: Callable[[NDArray[np.int32]], None], goes_on: Callable[[], bool]) -> None:
        """Write all registered groups to disk, most recently used first. No group may be held.

        Args:
            save: copies blocks to host memory; takes an array like `StepBatch.saves`.
            goes_on: called after every few groups; waits until they have been written, and returns False to stop.
        """
        tier = self.tier
        assert tier is not None
        if self.sessions is not None:
            self.sessions.drops_any = True  # what has been written may go
        nodes = [
            self.prefixes.node_of[first] for first in reversed(self.prefixes.idle) if first in self.prefixes.node_of
        ]
        nodes += reversed(tier.only)
        for at in range(0, len(nodes), _WRITTEN_AT_ONCE):
            part = nodes[at : at + _WRITTEN_AT_ONCE]
            for node in part:
                # It may have been dropped to free host memory for earlier groups.
                if not node.host and self.prefixes.find(node.kind, node.digest) is node:
                    self._offload(tier, node)
            saves = tier.take_transfers()[0]
            if len(saves):
                save(saves)
            tier.write_out(part, at)
            if not goes_on():
                return

    def lend_host(self, num: int) -> NDArray[np.int32] | None:
        """Lend `num` blocks of host memory for data other than groups, dropping groups if needed; None: too few blocks
        can be freed."""
        tier = self.tier
        assert tier is not None
        while (ids := tier.pool.allocate(num)) is None:
            if not self._make_host_room(tier, self.prefixes.roots[0]):
                return None
        tier.num_lent += num
        return ids

    def _discard(self, first: int) -> None:
        """Free a group if it is idle and not registered."""
        if first in self.prefixes.idle and not self.prefixes.is_registered[first]:
            del self.prefixes.idle[first]
            self.is_expected[first] = self.is_kept[first] = False
            rest = self.rest[first]
            ids = np.array([first, *rest[rest != NULL_BLOCK]], np.int32)
            self.num_idle_blocks -= ids.size
            self.pool.free(ids)

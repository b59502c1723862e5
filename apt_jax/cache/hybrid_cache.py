"""Host side of the unified block cache: the blocks that each request holds, without their contents.

One pool serves both cache kinds (Apt-Serve §4.3, Fig. 6): a block holds token positions of one request, for all
layers, either as K, as V, or as the layer input X. All blocks have the same size in bytes, so the number of positions C
per block depends on the kind: `block_size` keys or values, `hidden_block_size` layer inputs. A request's positions lie
in groups of C; a group takes two blocks of the KV kind or one block of the hidden kind:

    position      0 ......... C-1   C ........ 2C-1   2C .. n-1 | unused
    group         0                 1                 2
    KV     row 0  K block           K block           K block
           row 1  V block           V block           V block       2 * ceil(n / C) blocks, C = block_size
    HIDDEN row 0  X block           X block           X block           ceil(n / C) blocks, C = hidden_block_size
           row 1  NULL_BLOCK        NULL_BLOCK        NULL_BLOCK

Growing from m to n positions (`reserve`) adds the groups [ceil(m / C), ceil(n / C)); free positions of the last group
are used first:

    | cached [0, m)                     | new [m, n)              |
    | groups held          | rest of the last group  | new groups |
                                                     ^ blocks are allocated only here, all of them or none

Block 0 (`NULL_BLOCK`) is reserved: it pads block tables, and is never allocated or read.

With prefix caching, requests share groups (`apt_jax.cache.group_pool`); with a second tier, evicted groups go to host
memory (`apt_jax.cache.host_tier`). No request writes to a group that is registered or has two holders
(`check_writable`): a request that reuses all but the last position of such a group gets a copy to write to. Only the
two users of a group in `apt_jax.cache.sharing` write to the same group, each to its own token slots.

Layers, from the bottom: `BlockPool` allocates blocks; `GroupPool` shares groups of blocks; `HybridCache` gives groups
to requests and keeps their block tables, one row per slot. A slot is the index of a request that holds cache, in [0,
max_num_seqs). An owner is the number that identifies a request in the engine until it ends.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import integrity
from apt_jax.cache.block_pool import NO_OWNER, NO_SLOT, CacheIntegrityError, require
from apt_jax.cache.group_pool import CopySource, GroupPool
from apt_jax.cache.placement import Placement
from apt_jax.cache.prefix_hits import PrefixHitTracker
from apt_jax.cache.prefix_tree import Node
from apt_jax.cache.windows import WindowTables
from apt_jax.core.kinds import HIDDEN, KINDS, KV, NO_KIND, WINDOWED, WindowSpec, most_blocks
from apt_jax.core.step import NULL_BLOCK
from apt_jax.sched.request_table import RequestTable
from apt_jax.sched.retention.sessions import NOBODY


class HybridCache:
    """Block tables of the requests that hold cache, in one pool for both kinds.

    Attributes (arrays are indexed by slot; change them only through the methods):
        groups: the groups of blocks; `pool`, `num_refs` and `generation` belong to it.
        tables: (max_num_seqs, 2, J) int32 block tables as drawn above; J grows on demand.
        num_groups: number of groups held, ceil(num_tokens / block_sizes[kind]).
        num_tokens: number of positions reserved.
        num_private: number of groups that only this slot holds.
        kind: cache kind held; `NO_KIND` for free slots.
        block_sizes: number of positions of a group, by kind.
        blocks_per_group: number of blocks of a group, by kind.
        owner: owner of the slot; `NO_OWNER` for free slots.
        slot_by_owner: slot of each owner that holds cache.
        free_slots: free slots; the last is used next.
        prefixes: registered groups; None: prefix caching is off.
        tier: groups in host memory; None: host memory is not used.
        placement: placement of positions in groups; None: each group is filled from the left by one request at a time.
        session_of: session of each owner that belongs to one; its groups become idle as the session's.
        windows: groups of windowed layers; None: all layers keep all positions.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        hidden_block_size: int | None = None,
        blocks_per_group: Sequence[int] = (2, 1),
        prefix_caching: bool = False,
        num_host_blocks: int = 0,
        windows: WindowSpec | None = None,
    ) -> None:
        self.groups = GroupPool(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs if windows is None else 2 * max_num_seqs,
            blocks_per_group=[*blocks_per_group, *([] if windows is None else [windows.blocks_per_group])],
            num_host_blocks=num_host_blocks if prefix_caching else 0,
        )
        self.windows = None if windows is None else WindowTables(self.groups, windows, max_num_seqs)
        self.tier = self.groups.tier
        self.pool, self.num_private = self.groups.pool, self.groups.num_private[:max_num_seqs]
        self.num_refs, self.generation = self.groups.num_refs, self.groups.generation
        self.prefixes = self.groups.prefixes if prefix_caching else None
        self.block_sizes = (block_size, block_size if hidden_block_size is None else hidden_block_size)
        self.blocks_per_group = tuple(blocks_per_group)
        self.max_num_seqs = max_num_seqs
        self.tables = np.full((max_num_seqs, 2, min(num_blocks, 64)), NULL_BLOCK, np.int32)
        self.num_groups = np.zeros(max_num_seqs, np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.kind = np.full(max_num_seqs, NO_KIND, np.int8)
        self.owner = np.full(max_num_seqs, NO_OWNER, np.int64)
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.slot_by_owner: dict[int, int] = {}
        self.placement: Placement | None = None
        self.session_of: dict[int, int] = {}
        self._cost = np.asarray(self.blocks_per_group, np.int32)
        self._size = np.asarray(self.block_sizes, np.int32)

    def watch_hits(self, table: RequestTable) -> PrefixHitTracker:
        """Return a tracker that keeps prefix hits of waiting requests up to date in `table`; requires prefix
        caching."""
        groups = self.groups
        groups.tracker = PrefixHitTracker(
            groups.prefixes,
            table,
            groups.num_refs,
            groups.is_kept,
            self.block_sizes,
            self.blocks_per_group,
            None if self.windows is None else self.windows.spec,
        )
        return groups.tracker

    def use_placement(self, placement: Placement) -> None:
        """Set the placement of positions; no request may hold cache."""
        self.placement = self.groups.placement = placement

    @property
    def ownership_changed(self) -> bool:
        """True if a slot's `num_private` has changed other than by its own `reserve`; the reader must reset this
        flag."""
        return self.groups.ownership_changed

    @ownership_changed.setter
    def ownership_changed(self, value: bool) -> None:
        self.groups.ownership_changed = value

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: empty and idle blocks."""
        return self.groups.num_free

    @property
    def num_idle(self) -> int:
        """Number of idle blocks: cached blocks without a holder."""
        return self.groups.num_idle_blocks

    @property
    def num_shared(self) -> int:
        """Number of blocks with two or more holders."""
        taken = np.flatnonzero(self.owner != NO_OWNER).astype(np.int32)
        return sum(self.blocks_by_kind().values()) - int(self.num_private_blocks_of(taken).sum())

    def slot_of(self, owner: int) -> int:
        """Return the slot of an owner, or `NO_SLOT` if it holds no cache."""
        return self.slot_by_owner.get(owner, NO_SLOT)

    def blocks_needed(self, num_tokens: int, kind: int) -> int:
        """Return the largest number of blocks that a request of `num_tokens` positions holds at once
        (`core.kinds.most_blocks`)."""
        windows = None if self.windows is None else self.windows.spec
        return most_blocks(num_tokens, self.block_sizes[kind], self.blocks_per_group[kind], windows)

    def num_blocks_of(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the (n,) numbers of blocks held by `slots`, which must be in use."""
        held = self.num_groups[slots]
        if self.placement is not None:
            held = held - self.placement.num_holes[slots]
        blocks = held * self._cost[self.kind[slots]]
        if self.windows is not None:
            blocks += self.windows.num_held[slots] * self.windows.spec.blocks_per_group
        return blocks

    def num_private_blocks_of(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the (n,) numbers of blocks that only the slot itself holds; `slots` must be in use."""
        blocks = self.num_private[slots] * self._cost[self.kind[slots]]
        if self.windows is not None:
            blocks += self.windows.num_private_of(slots) * self.windows.spec.blocks_per_group
        return blocks

    def blocks_by_kind(self) -> dict[int, int]:
        """Return the number of blocks in use for each cache kind; shared blocks count once."""
        blocks = {kind: self.groups.in_use[kind] * self.blocks_per_group[kind] for kind in KINDS}
        if self.windows is not None:
            blocks[KV] += self.groups.in_use[WINDOWED] * self.windows.spec.blocks_per_group
        return blocks

    # --- reserving and releasing -----------------------------------------------------------------------------------

    def reserve(self, owner: int, num_tokens: int, kind: int) -> bool:
        """Allocate the missing blocks for an owner's positions [0, num_tokens); an owner without a slot gets one.

        Returns:
            False: too few blocks or no slot is free, and nothing has changed.

        Raises:
            CacheIntegrityError: the owner holds another kind or more positions, or has no slot and needs no block.
        """
        slot = self.slot_by_owner.get(owner, NO_SLOT)
        groups = -(-num_tokens // self.block_sizes[kind])
        if slot == NO_SLOT:
            if not self.free_slots:
                return False
            held = 0
        else:
            held = int(self.num_groups[slot])
            if self.kind[slot] != kind:
                raise CacheIntegrityError(f"owner {owner} holds kind {self.kind[slot]}, not {kind}")
            if num_tokens < self.num_tokens[slot]:
                raise CacheIntegrityError(f"owner {owner} would shrink to {num_tokens} positions")
        new = groups - held
        halves = self.blocks_per_group[kind]
        if new > 0:
            ids = self.groups.allocate(new * halves)
            if ids is None:
                return False
            if slot == NO_SLOT:
                slot = self.take_slot(owner, kind)
            self.widen_tables(groups)
            self.tables[slot, :halves, held:groups] = ids.reshape(halves, new)
            self.num_groups[slot] = groups
            firsts = int(ids[0]) if new == 1 else ids[:new]  # single numbers are faster
            self.groups.hold_new(firsts, NULL_BLOCK if halves == 1 else ids[1] if new == 1 else ids[new:], slot)
            self.num_private[slot] += new
            self.groups.in_use[kind] += new
        elif slot == NO_SLOT:
            raise CacheIntegrityError(f"owner {owner} holds no cache and reserves {num_tokens} positions")
        self.num_tokens[slot] = num_tokens
        return True

    def reserve_rows(
        self,
        owners: NDArray[np.int64],
        slots: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kinds: NDArray[np.int8],
    ) -> NDArray[np.bool_]:
        """Call `reserve` for many requests, in order; rows that need no new group are handled without a Python loop.

        Args:
            owners: (n,) owner of each row.
            slots: (n,) slot of each row; changed in place if a row takes one.
            num_tokens: (n,) total number of positions that each row needs.
            kinds: (n,) cache kind of each row.

        Returns:
            (n,) False: too few blocks or no slot was free; the row keeps the blocks that it had.
        """
        placed = slots != NO_SLOT
        roomy = placed & (num_tokens <= self.num_groups[slots] * self._size[kinds])
        require(
            (~roomy | (self.kind[slots] == kinds) & (self.owner[slots] == owners)).all(),
            "a row has a slot of another owner or kind",
        )
        if self.windows is not None:
            return self._reserve_windowed(self.windows, owners, slots, num_tokens, kinds, roomy)
        if roomy.all():
            self.num_tokens[slots] = num_tokens
            return roomy
        self.num_tokens[slots[roomy]] = num_tokens[roomy]
        ok = roomy
        rest = np.flatnonzero(~roomy)
        if (
            rest.size > 1
            and placed[rest].all()
            and self._grow_by_one(owners[rest], slots[rest], num_tokens[rest], kinds[rest])
        ):
            ok[rest] = True
            return ok
        for i in rest.tolist():
            owner = int(owners[i])
            if self.reserve(owner, int(num_tokens[i]), int(kinds[i])):
                ok[i] = True
                slots[i] = self.slot_by_owner[owner]
        return ok

    def _reserve_windowed(
        self,
        windows: WindowTables,
        owners: NDArray[np.int64],
        slots: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kinds: NDArray[np.int8],
        roomy: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Implement `reserve_rows` with windowed layers."""
        ok = roomy & ~windows.must_grow(slots, num_tokens)
        self.num_tokens[slots[ok]] = num_tokens[ok]
        for i in np.flatnonzero(~ok).tolist():
            owner, end, kind = int(owners[i]), int(num_tokens[i]), int(kinds[i])
            blocks = self.groups.allocate(windows.num_missing(int(slots[i]), end) * windows.spec.blocks_per_group)
            if blocks is None:
                continue
            if self.reserve(owner, end, kind):
                ok[i], slots[i] = True, self.slot_by_owner[owner]
                windows.grow(int(slots[i]), end, blocks)
            else:
                self.pool.free(blocks)
        return ok

    def leave_windows(self, slots: NDArray[np.int32], ends: NDArray[np.int32]) -> None:
        """Release the groups of windowed layers that no token of `slots` from `ends` on attends to."""
        if self.windows is not None:
            for i in np.flatnonzero(self.windows.must_trim(slots, ends)).tolist():
                self.windows.trim(int(slots[i]), int(ends[i]), self._session(int(slots[i])))

    def _session(self, slot: int) -> int:
        return self.session_of.get(int(self.owner[slot]), NOBODY) if self.session_of else NOBODY

    def _grow_by_one(
        self,
        owners: NDArray[np.int64],
        slots: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kinds: NDArray[np.int8],
    ) -> bool:
        """Do the work of `reserve` for several rows at once, if each has a slot and needs exactly one more group. The
        rows get the same blocks as from `reserve`.

        Returns:
            False: a row needs more groups or occurs twice, or too few blocks are empty; nothing has changed.
        """
        held = self.num_groups[slots]
        halves = self._cost[kinds]
        ends = np.cumsum(halves)
        total = int(ends[-1])
        fits = num_tokens <= (held + 1) * self._size[kinds]
        if total > self.pool.num_free or not fits.all() or len(set(slots.tolist())) < slots.size:
            return False
        require(
            ((self.kind[slots] == kinds) & (self.owner[slots] == owners)).all(),
            "a row has a slot of another owner or kind",
        )
        ids = self.pool.allocate(total)
        if ids is None:
            return False
        width = int(held.max()) + 1
        self.widen_tables(width)
        firsts, seconds = ids[ends - halves], np.where(halves == 2, ids[ends - 1], NULL_BLOCK)
        self.tables[slots, 0, held] = firsts
        self.tables[slots, 1, held] = seconds
        self.num_groups[slots] = held + 1
        self.groups.hold_new(firsts, seconds, slots)
        self.num_private[slots] += 1
        self.num_tokens[slots] = num_tokens
        num_hidden = int(np.count_nonzero(kinds))
        self.groups.in_use[KV] += kinds.size - num_hidden
        self.groups.in_use[HIDDEN] += num_hidden
        return True

    def convert_rows(
        self, owners: Sequence[int], num_tokens: Sequence[int]
    ) -> tuple[list[NDArray[np.int32] | None], list[bool]]:
        """Change requests from the hidden to the KV kind, and grow them to `num_tokens` positions.

        X blocks are freed only after all requests have got new blocks, so no new block is a former X block. A request
        for which too few blocks are free keeps the hidden kind and grows in it.

        Returns:
            For each owner, its freed X blocks, (groups,), or None if it was not converted; and for each owner, False if
            it could not grow in either kind and keeps the blocks that it had.

        Raises:
            CacheIntegrityError: an owner does not hold the hidden kind, or holds more positions.
        """
        new: list[NDArray[np.int32] | None] = []
        ok: list[bool] = []
        for owner, num in zip(owners, num_tokens, strict=True):
            slot = self.slot_by_owner.get(owner, NO_SLOT)
            require(slot != NO_SLOT and self.kind[slot] == HIDDEN, f"owner {owner} holds no layer inputs")
            require(num >= self.num_tokens[slot], f"owner {owner} would shrink to {num} positions")
            ids = self.groups.allocate(self.blocks_needed(num, KV))
            new.append(ids)
            ok.append(ids is not None or self.reserve(owner, num, HIDDEN))
        given_back: list[NDArray[np.int32] | None] = []
        for owner, num, ids in zip(owners, num_tokens, new, strict=True):
            if ids is None:
                given_back.append(None)
                continue
            slot = self.slot_by_owner[owner]
            given_back.append(self.tables[slot, 0, : int(self.num_groups[slot])].copy())
            self._empty(slot, is_read=True)
            groups = ids.size // 2
            self.widen_tables(groups)
            self.tables[slot, :, :groups] = ids.reshape(2, groups)
            self.groups.hold_new(ids[:groups], ids[groups:], slot)
            self.num_groups[slot] = self.num_private[slot] = groups
            self.num_tokens[slot] = num
            self.kind[slot] = KV
            self.groups.in_use[KV] += groups
        return given_back, ok

    def release(self, owner: int) -> int:
        """Free the slot and all groups of an owner; returns the number of blocks that it held.

        Registered groups and expected groups (`expect`) without another holder become idle.
        """
        slot = self.slot_by_owner.pop(owner, NO_SLOT)
        require(slot != NO_SLOT, f"owner {owner} holds no cache")
        num_blocks = self._empty(slot)
        self.kind[slot] = NO_KIND
        self.owner[slot] = NO_OWNER
        self.free_slots.append(slot)
        return num_blocks

    def _empty(self, slot: int, *, is_read: bool = False) -> int:
        """Release all groups of a slot, which stays in use; returns the number of their blocks. For `is_read` see
        `GroupPool.release`."""
        groups, kind = int(self.num_groups[slot]), int(self.kind[slot])
        if self.placement is not None:
            self.placement.release(slot)
        ids = self.tables[slot, : self.blocks_per_group[kind], :groups]
        if self.placement is not None:
            ids = ids[:, ids[0] != NULL_BLOCK]
        session = self._session(slot)
        if self.windows is not None:
            self.windows.release(slot, session)
        self.groups.release(ids.copy(), slot, kind, session, is_read=is_read)
        self.tables[slot, :, :groups] = NULL_BLOCK
        self.num_groups[slot] = 0
        self.num_private[slot] = 0
        self.num_tokens[slot] = 0
        return ids.size

    def take_slot(self, owner: int, kind: int) -> int:
        """Give an owner a free slot without blocks, and return the slot."""
        slot = self.free_slots.pop()
        self.slot_by_owner[owner] = slot
        self.owner[slot] = owner
        self.kind[slot] = kind
        if self.placement is not None:
            self.placement.begin(slot, owner)
        return slot

    def widen_tables(self, groups: int) -> None:
        """Widen `tables` to at least this number of groups per row."""
        old = self.tables
        if groups <= old.shape[2]:
            return
        width = min(max(groups, 2 * old.shape[2]), max(groups, self.pool.num_blocks))
        self.tables = np.full((self.max_num_seqs, 2, width), NULL_BLOCK, np.int32)
        self.tables[:, :, : old.shape[2]] = old

    # --- prefixes --------------------------------------------------------------------------------------------------

    def attach(self, owner: int, nodes: Sequence[Node], kind: int, windowed: Sequence[Node] = ()) -> bool:
        """Give an owner without cache a slot and the registered groups `nodes`, the first groups of a prefix, with the
        groups `windowed` of windowed layers.

        Returns:
            False: no slot is free, or groups in host memory cannot be loaded; nothing has changed.
        """
        require(owner not in self.slot_by_owner, f"owner {owner} already holds cache")
        if not self.free_slots:
            return False
        num = len(nodes)
        firsts = self.groups.share(nodes, self.free_slots[-1])
        if firsts is None:
            return False
        self.widen_tables(num)
        slot = self.take_slot(owner, kind)
        self.tables[slot, 0, :num] = firsts
        self.tables[slot, 1, :num] = self.groups.second[firsts]
        self.num_groups[slot] = num
        self.num_tokens[slot] = num * self.block_sizes[kind]
        if self.windows is not None:
            self.windows.attach(slot, windowed, int(self.num_tokens[slot]))
        return True

    def drop_lost(self, nodes: Sequence[Node]) -> None:
        """Drop groups whose copies in host memory are lost, and their descendants."""
        for node in nodes:
            if self.groups.prefixes.find(node.kind, node.digest) is node:  # not yet dropped with an ancestor
                self.groups.drop(node)

    def forget_saved(self, blocks: NDArray[np.int32]) -> None:
        """Drop the groups that a step was to save into these blocks of host memory, because the step was not
        dispatched."""
        if self.tier is not None and blocks.size:
            gone = set(blocks.tolist())
            self.drop_lost([node for node in self.tier.only if gone.intersection(node.host)])

    def cancel_saves(self) -> None:
        """Drop the groups that the step being built saves, because the step will not run."""
        if self.tier is not None and (self.tier.saves or self.tier.pinned):
            self.drop_lost(list(self.tier.saves))
            self.tier.take_transfers()

    def touch(self, nodes: Sequence[Node]) -> None:
        """Mark groups of one path as most recently used, so that other idle groups are evicted first."""
        for node in reversed(nodes):
            if node.block in self.groups.prefixes.idle:
                self.groups.prefixes.idle.move_to_end(node.block)

    def copy_source(self, node: Node) -> CopySource | None:
        """Return the source for a copy of a registered group; see `GroupPool.copy_source`."""
        return self.groups.copy_source(node)

    def begin_copy(self, slot: int, start: int, source: CopySource) -> NDArray[np.int32]:
        """Prepare the step being built to copy a registered group into the slot's new group, which holds position
        `start`.

        Returns:
            (m, 2) source and destination blocks that the step must copy; empty for a group in host memory, whose copy
            is queued here.
        """
        blocks = self.tables[slot, :, start // self.block_sizes[self.kind[slot]]]
        if self.placement is not None:
            self.placement.is_downward[blocks[0]] = source.is_downward
        if isinstance(source.group, Node):
            assert self.tier is not None
            self.tier.load_copy(source.group, blocks.tolist())
            return np.zeros((0, 2), np.int32)
        copies = np.stack([source.group, blocks], axis=1)
        return copies[blocks != NULL_BLOCK]

    def expect(self, slot: int, begin: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Mark groups [begin, end) of a slot as being filled by a step in flight; `register` or `discard` must follow.

        Returns:
            First blocks of the groups, and the generations of these blocks.
        """
        firsts = self.tables[slot, 0, begin:end].copy()
        self.groups.is_expected[firsts] = True
        return firsts, self.generation[firsts]

    def register(
        self,
        owner: int,
        kind: int,
        digests: Sequence[bytes],
        begin: int,
        firsts: NDArray[np.int32],
        generations: NDArray[np.int64],
    ) -> None:
        """Register groups [begin, begin + len(firsts)), which the request has filled, for other requests to find.

        Args:
            owner: owner of the request; it may have released the groups in the meantime, or hold other groups.
            kind: cache kind of the groups.
            digests: digests of all groups of the request, from the first group.
            begin: index of the first group to register.
            firsts: first blocks of the groups.
            generations: generations of these blocks when the groups were filled.
        """
        if kind == WINDOWED:
            self.groups.register_windowed(digests, begin, firsts, generations)
            return
        slot = self.slot_of(owner)
        table = None if slot == NO_SLOT else self.tables[slot]
        self.groups.register(kind, digests, begin, firsts, generations, slot, table)

    def discard(self, firsts: NDArray[np.int32], generations: NDArray[np.int64]) -> None:
        """Cancel the registration of expected groups; groups that no request holds become free."""
        self.groups.discard(firsts, generations)

    def drop_prefix(self, kind: int, digests: Sequence[bytes], begin: int) -> None:
        """Drop the groups of a prefix from index `begin` on, also from disk."""
        if kind == WINDOWED:
            found = (self.groups.prefixes.find(kind, digest) for digest in digests[begin:])
            for node in [node for node in found if node is not None]:
                self.groups.drop(node)
        elif begin < len(digests):
            if self.tier is not None and self.tier.disk is not None:
                self.tier.disk.remove(kind, digests[begin:])
            node = self.groups.prefixes.find(kind, digests[begin])
            if node is not None:
                self.groups.drop(node)

    def lose_device(self) -> None:
        """Keep only groups that have a copy in host memory, after the device lost its contents; see
        `GroupPool.lose_device`."""
        self.groups.lose_device()

    def clear_prefixes(self) -> None:
        """Unregister all registered and expected groups, because their contents are lost. Held groups stay held."""
        self.groups.clear_prefixes()

    # --- for a step ------------------------------------------------------------------------------------------------

    def block_tables(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return a copy of the block tables of `slots`, (n, 2, J); J is the largest number of groups that a slot holds.

        Raises:
            CacheIntegrityError: an entry in use is not in [1, num_blocks], or an unused entry is not `NULL_BLOCK`. JAX
                silently clamps or wraps a bad index, so this is checked before every step.
        """
        groups = self.num_groups[slots]
        width = int(groups.max(initial=0))
        tables = self.tables[:, :, :width][slots]
        used = np.arange(width, dtype=np.int32) < groups[:, None]
        both = used & (self._cost[self.kind[slots]] == 2)[:, None]
        require(
            tables.min(initial=0) >= 0
            and tables.max(initial=0) <= self.pool.num_blocks
            and ((tables[:, 0] != NULL_BLOCK) == used).all()
            and ((tables[:, 1] != NULL_BLOCK) == both).all(),
            "a block table names blocks that its request does not hold",
        )
        return tables

    def directed_tables(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return `block_tables` with negative ids for blocks filled from the right end (`StepBatch.block_tables`)."""
        tables = self.block_tables(slots)
        if self.placement is None:
            return tables
        return np.where(self.placement.downwards(slots, tables.shape[2])[:, None], -tables, tables)

    def check_writable(self, slots: NDArray[np.int32], start: NDArray[np.int32]) -> None:
        """Check that no other request can read the groups that a step writes to, from position `start` on. A group may
        have two holders if both are its users (`Placement.have_two_users`), because each writes only to its own token
        slots.

        Raises:
            CacheIntegrityError: another request may read such a group, because it is registered or has another holder.
        """
        if self.prefixes is None:
            return
        if self.windows is not None:
            self.windows.check_writable(slots, start)
        begin = start // self._size[self.kind[slots]]
        num = self.num_groups[slots] - begin
        if (num == 1).all():
            firsts = self.tables[slots, 0, begin]
        else:
            row = np.repeat(np.arange(slots.size), num)
            offset = np.arange(row.size) - np.repeat(np.cumsum(num) - num, num)
            firsts = self.tables[slots[row], 0, begin[row] + offset]
        alone = self.num_refs[firsts] == 1
        if self.placement is not None:
            alone |= self.placement.have_two_users(firsts)
        require(
            alone.all() and not self.prefixes.is_registered[firsts].any(),
            "a step would write into a block that others may read",
        )

    def check_integrity(self, alive: Iterable[int] | None = None) -> None:
        """Recount the cache; see `apt_jax.cache.integrity.check_integrity`."""
        integrity.check_integrity(self, alive)

"""Blocks shared by a real-time and a best-effort request, which fill them from opposite ends (BROS §5).

A group of C slots may have two users. A real-time request fills slots from the left, a best-effort request from the
right, each in the order of its positions:

    slot          0    1    2    3    4    5    6    7
    real-time     p0   p1   p2                          ->
    best-effort                      <- p3   p2   p1   p0

While both users together need at most C slots, neither affects the other. If a running request needs a slot of the
other user, which is not running, only that slot is saved to host memory first (*lazy checkpointing*). Such slots always
hold the other user's latest positions in the group. The other user is then incomplete, and the *preemption table*
records its missing slots. Before it runs again, these slots are loaded: in place, or into a new group, which begins as
a copy of the shared group if the request still has slots there.

A request gets blocks as follows:

* `FindBlock`: a best-effort request takes free groups. If it lacks one group and its last group is only partly filled,
  the positions of that group are placed at the right end of a real-time request's group: the group with the most empty
  slots.
* `FindPreemptBlock`: a real-time request takes free groups; if there are too few, it shares groups of best-effort
  requests that are not running, groups with the most empty slots first.

A shared group has two holders, so it is charged to neither (`GroupPool`). A request that has lost all of its slots in a
group leaves the group: its block table has a hole there until the request is restored.
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache.block_pool import NO_OWNER, NO_SLOT, require
from apt_jax.cache.hybrid_cache import HybridCache
from apt_jax.cache.placement import SlotTraffic
from apt_jax.cache.sharing.host_blocks import HostBlocks
from apt_jax.cache.sharing.preemption_table import Place, PreemptionTable, SlotTransfers
from apt_jax.core.step import NULL_BLOCK


@dataclasses.dataclass(eq=False)
class _Shared:
    """The two users of a group."""

    up: Place
    down: Place

    def sides(self, slot: int) -> tuple[Place, Place]:
        """Return the place of the request in `slot`, and the place of the other user."""
        return (self.up, self.down) if self.up[0] == slot else (self.down, self.up)


class BlockSharing:
    """Groups with two users, and the end from which each user fills them; a `Placement`.

    Args:
        cache: the cache; it uses this placement from now on.
        host: blocks of host memory, of the same size as device blocks.
        is_best_effort: returns True if an owner is a best-effort request.

    Attributes:
        grows_down: True: the request fills new groups from the right; indexed by slot.
        is_downward: True: the only user of a group fills it from the right; indexed by first block.
        shared: groups with two users, by first block.
        preempted: preemption table, which records the missing slots of requests.
        num_holes: number of block table entries without a group, by slot.
    """

    def __init__(self, cache: HybridCache, host: HostBlocks, is_best_effort: Callable[[int], bool]) -> None:
        self._cache, self._groups = cache, cache.groups
        self._is_best_effort = is_best_effort
        num_slots, num_blocks = cache.num_groups.size, cache.groups.num_refs.size
        self.grows_down = np.zeros(num_slots, np.bool_)
        self.is_downward = np.zeros(num_blocks, np.bool_)
        self.shared: dict[int, _Shared] = {}
        self.preempted = PreemptionTable(cache, host, self.grows_down)
        self.num_holes = np.zeros(num_slots, np.int32)
        self._shared_by: dict[int, set[int]] = {}
        cache.use_placement(self)

    # --- queries -----------------------------------------------------------------------------------------------------

    def have_two_users(self, firsts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return an (n,) mask: True if the group has two users."""
        return np.isin(firsts, np.fromiter(self.shared, np.int32)) if self.shared else np.zeros(firsts.size, np.bool_)

    def downwards(self, slots: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
        """Return an (n, width) mask: True if the request fills the group of the table entry from the right."""
        down = self.is_downward[self._cache.tables[slots, 0, :width]]
        if self.shared:
            row_of = self._rows_of(slots)
            for pair in self.shared.values():
                for slot, entry in (pair.up, pair.down):
                    if row_of[slot] >= 0 and entry < width:
                        down[row_of[slot], entry] = self.grows_down[slot]
        return down

    def _rows_of(self, slots: NDArray[np.integer]) -> NDArray[np.int32]:
        """Return the index in `slots` of every slot of the cache; -1: it is not in `slots`."""
        row_of = np.full(self.grows_down.size, -1, np.int32)
        row_of[slots] = np.arange(slots.size, dtype=np.int32)
        return row_of

    def preemptible(self, kind: int, running: set[int]) -> list[Place]:
        """Return the unshared groups of best-effort requests, most empty slots first (`FindPreemptBlock`).

        Args:
            kind: cache kind of the groups.
            running: slots of the requests in this step; their groups are left out.
        """
        slots, entries, _ = self.lone_groups(kind, down=True)
        return [place for place in zip(slots.tolist(), entries.tolist(), strict=True) if place[0] not in running]

    def lone_groups(self, kind: int, *, down: bool) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return unshared groups of requests of one class, most empty slots first. Ties: latest request first, then its
        last group first.

        Args:
            kind: cache kind of the groups.
            down: True: groups of best-effort requests; False: groups of real-time requests.

        Returns:
            (g,) slots, (g,) indexes of block table entries, and (g,) numbers of empty slots.
        """
        cache = self._cache
        size = cache.block_sizes[kind]
        theirs = np.flatnonzero((cache.owner != NO_OWNER) & (cache.kind == kind) & (self.grows_down == down))
        width = int(cache.num_groups[theirs].max(initial=0))
        firsts = cache.tables[theirs, 0, :width]
        alone = (firsts != NULL_BLOCK) & (self._groups.num_refs[firsts] == 1) & (self.is_downward[firsts] == down)
        used = np.clip(cache.num_tokens[theirs, None] - np.arange(width) * size, 0, size)
        row_of = self._rows_of(theirs)
        for slot, table in self.preempted.of_slot.items():
            if row_of[slot] >= 0:
                used[row_of[slot], list(table)] = [checkpoint.kept for checkpoint in table.values()]
        row, entry = np.nonzero(alone)
        empty = size - used[row, entry]
        order = np.lexsort((-entry, -cache.owner[theirs[row]], -empty))
        return theirs[row[order]].astype(np.int32), entry[order].astype(np.int32), empty[order].astype(np.int32)

    # --- getting blocks ----------------------------------------------------------------------------------------------

    def begin(self, slot: int, owner: int) -> None:
        """Set the direction in which the request of a newly taken slot fills groups."""
        self.grows_down[slot] = self._is_best_effort(owner)

    def note_new(self, firsts: int | NDArray[np.int32], slots: int | NDArray[np.int32]) -> None:
        """Set the direction in which new groups are filled by their only user."""
        self.is_downward[firsts] = self.grows_down[slots]

    def reserve_rows(
        self,
        owners: NDArray[np.int64],
        slots: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kinds: NDArray[np.int8],
        best_effort: NDArray[np.bool_],
        copies: NDArray[np.bool_] | None = None,
        *,
        running: Iterable[int] = (),
    ) -> NDArray[np.bool_]:
        """Call `reserve` for the requests of a step in order, real-time requests first. Rows without shared groups or
        checkpoints are handled together.

        Args:
            owners: (n,) owner of each row.
            slots: (n,) slot of each row; changed in place if a row takes one.
            num_tokens: (n,) total number of positions that each row needs.
            kinds: (n,) cache kind of each row.
            best_effort: (n,) True: best-effort request; False: real-time request.
            copies: (n,) True: the first new group of the row begins as a copy of a cached group; None: no row has such
                a group.
            running: slots of requests of the step whose blocks have been reserved in earlier calls.

        Returns:
            (n,) False: too few blocks or no slot was free; the row keeps the blocks that it had.
        """
        cache = self._cache
        sizes = np.asarray(cache.block_sizes, np.int32)[kinds]
        ok = np.zeros(owners.size, np.bool_)
        running = set(running)
        for rows in (np.flatnonzero(~best_effort), np.flatnonzero(best_effort)):
            involved = np.fromiter({*self.preempted.of_slot, *self._shared_by}, np.int32)
            held = slots[rows]
            plain = (held == NO_SLOT) | ~np.isin(held, involved)
            roomy = (held != NO_SLOT) & (num_tokens[rows] <= cache.num_groups[held] * sizes[rows])
            if not roomy[plain].all() and not self._fits(rows[plain], rows[~plain], slots, num_tokens, kinds):
                plain &= roomy  # the others compete for the blocks, in order
            index = rows[plain]
            if index.size:
                held = slots[index]
                ok[index] = cache.reserve_rows(owners[index], held, num_tokens[index], kinds[index])
                slots[index] = held
                running.update(held.tolist())
            for i in rows[~plain].tolist():
                owner = int(owners[i])
                copied = copies is not None and bool(copies[i])
                if self.reserve(owner, int(num_tokens[i]), int(kinds[i]), running, copied=copied):
                    ok[i] = True
                    slots[i] = cache.slot_of(owner)
        return ok

    def _fits(
        self,
        rows: NDArray[np.intp],
        others: NDArray[np.intp],
        slots: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kinds: NDArray[np.int8],
    ) -> bool:
        """Return True if slots and blocks suffice for `rows`, which share no groups, even if `others` take as many as
        they can possibly need."""
        cache = self._cache
        halves, sizes = np.asarray(cache.blocks_per_group, np.int32), np.asarray(cache.block_sizes, np.int32)

        def groups(index: NDArray[np.intp]) -> NDArray[np.int32]:
            held = np.where(slots[index] == NO_SLOT, 0, cache.num_groups[slots[index]])
            return np.maximum(-(-num_tokens[index] // sizes[kinds[index]]) - held, 0)

        need = int((groups(rows) * halves[kinds[rows]]).sum())
        if others.size:
            more = [
                len(self.preempted.of_slot.get(s, ())) + len(self._shared_by.get(s, ())) for s in slots[others].tolist()
            ]
            need += int(((groups(others) + more) * halves[kinds[others]]).sum())
        fresh = int(np.count_nonzero(slots[rows] == NO_SLOT))
        return need <= self._groups.num_free and fresh <= len(cache.free_slots)

    def reserve(self, owner: int, num_tokens: int, kind: int, running: set[int], *, copied: bool = False) -> bool:
        """Restore a request's missing positions, and reserve blocks for positions [0, num_tokens).

        Args:
            owner: owner of the request; it takes a slot at the first call.
            num_tokens: total number of positions, at least as many as it has.
            kind: cache kind; if the request holds cache, its present kind.
            running: slots of the requests of this step whose blocks have been reserved; their groups stay unchanged.
                The request's own slot is added.
            copied: True: the first new group begins as a copy of a cached group, so it must not be shared.

        Returns:
            False: too few blocks or no slot is free, and nothing has changed.
        """
        cache, groups = self._cache, self._groups
        slot = cache.slot_of(owner)
        fresh = slot == NO_SLOT
        if owner in self.preempted.transfers.lost or (fresh and not cache.free_slots):
            return False
        held = 0 if fresh else int(cache.num_groups[slot])
        require(fresh or cache.kind[slot] == kind, f"owner {owner} holds another kind than {kind}")
        require(fresh or num_tokens >= cache.num_tokens[slot], f"owner {owner} would shrink to {num_tokens} positions")
        down = self._is_best_effort(owner) if fresh else bool(self.grows_down[slot])
        total = -(-num_tokens // cache.block_sizes[kind])
        holes = (
            [] if fresh else [e for e in self.preempted.of_slot.get(slot, ()) if cache.tables[slot, 0, e] == NULL_BLOCK]
        )
        entries = [*holes, *range(held, total)]
        halves = cache.blocks_per_group[kind]
        room = groups.num_free // halves
        moves = [] if fresh else self._moves(slot, num_tokens, running, room - len(entries), down=down)
        lacking = max(len(entries) + len(moves) - room, 0)
        if lacking > len(entries) - copied:
            return False
        if not fresh and any(self.preempted.is_saved_now((slot, e)) for e in entries[len(entries) - lacking :]):
            return False  # this group is copied as a whole, so it cannot be shared
        found = self._find(kind, lacking, running | {slot}, num_tokens, entries, down=down) if lacking else []
        if len(found) < lacking:
            return False
        num_new = len(entries) - lacking
        ids = groups.allocate((num_new + len(moves)) * halves)
        if ids is None:
            return False
        if fresh:
            slot = cache.take_slot(owner, kind)
        running.add(slot)
        cache.widen_tables(total)
        new = ids.reshape(halves, -1).T
        for entry, place in zip(moves, new[num_new:], strict=True):
            self._move(slot, entry, place)
        for entry, place in zip(entries, new[:num_new], strict=False):
            self._hold(slot, entry, place)
        for entry, place in zip(entries[num_new:], found, strict=True):
            self._join(slot, entry, place, down=down)
        self.num_holes[slot] = 0
        cache.num_groups[slot] = total
        before = int(cache.num_tokens[slot])
        cache.num_tokens[slot] = num_tokens
        self._make_room(slot)
        self.preempted.load(slot, before)
        return True

    def _moves(self, slot: int, num_tokens: int, running: set[int], room: int, *, down: bool) -> list[int]:
        """Return the block table entries at which a request replaces a shared group with a new group.

        It leaves a shared group if it needs slots that hold the other user's positions, and the other user is running.
        If the other user is not running, a best-effort request leaves the group too, provided that enough groups are
        free to replace all such groups; otherwise the other user's slots are checkpointed.
        """
        must: list[int] = []
        may: list[int] = []
        for first in self._shared_by.get(slot, ()):
            own, other = self.shared[first].sides(slot)
            size = self._cache.block_sizes[self._cache.kind[slot]]
            if self.preempted.used(own, num_tokens) + self.preempted.on_device(other) > size:
                (must if other[0] in running else may).append(own[1])
        return must + may if down and len(must) + len(may) <= room else must

    def _find(
        self, kind: int, num: int, running: set[int], num_tokens: int, new: list[int], *, down: bool
    ) -> list[Place]:
        """Return up to `num` groups of other requests for a request to share, one for each of its last `num` new block
        table entries."""
        if not down:
            return self.preemptible(kind, running)[:num]
        size = self._cache.block_sizes[kind]
        rest = num_tokens - new[-1] * size
        if num > 1 or rest >= size:
            return []
        slots, entries, empty = self.lone_groups(kind, down=False)
        room = zip(slots[empty >= rest].tolist(), entries[empty >= rest].tolist(), strict=True)
        return [place for place in room if self._is_unregistered(place)][:1]

    def _is_unregistered(self, place: Place) -> bool:
        first = self._cache.tables[place[0], 0, place[1]]
        return not (self._groups.prefixes.is_registered[first] or self._groups.is_expected[first])

    def _hold(self, slot: int, entry: int, ids: NDArray[np.int32]) -> None:
        """Put a newly allocated group into a request's block table."""
        groups, halves = self._groups, ids.size
        self._cache.tables[slot, :halves, entry] = ids
        groups.hold_new(int(ids[0]), NULL_BLOCK if halves == 1 else int(ids[1]), slot)
        groups.num_private[slot] += 1
        groups.in_use[int(self._cache.kind[slot])] += 1

    def _join(self, slot: int, entry: int, place: Place, *, down: bool) -> None:
        """Make a request the second user of another request's group."""
        groups, tables = self._groups, self._cache.tables
        other, their_entry = place
        first = int(tables[other, 0, their_entry])
        node = groups.prefixes.node_of.get(first)
        if node is not None:  # its descendants can no longer be found either
            groups.drop(node)
        groups.is_expected[first] = False
        groups.generation[first] += 1
        groups.num_refs[first] += 1
        groups.slot_sum[first] += slot
        groups.num_private[other] -= 1
        groups.ownership_changed = True
        tables[slot, :, entry] = tables[other, :, their_entry]
        mine = (slot, entry)
        self.shared[first] = _Shared(*((place, mine) if down else (mine, place)))
        for each in (slot, other):
            self._shared_by.setdefault(each, set()).add(first)

    def _move(self, slot: int, entry: int, ids: NDArray[np.int32]) -> None:
        """Replace a shared group of a request with a new group, which begins as a copy of it."""
        old = self._cache.tables[slot, : ids.size, entry].copy()
        self._leave(slot, int(old[0]))
        self.preempted.transfers.copies += zip(old.tolist(), ids.tolist(), strict=True)
        self._hold(slot, entry, ids)

    def _leave(self, slot: int, first: int) -> None:
        """Remove a request from a shared group; the other user keeps the group."""
        groups = self._groups
        own, other = self.shared.pop(first).sides(slot)
        for each in (slot, other[0]):
            users = self._shared_by[each]
            users.discard(first)
            if not users:
                del self._shared_by[each]
        groups.num_refs[first] -= 1
        groups.slot_sum[first] -= slot
        groups.num_private[other[0]] += 1
        groups.ownership_changed = True
        self.is_downward[first] = self.grows_down[other[0]]
        self._cache.tables[slot, :, own[1]] = NULL_BLOCK

    # --- slots of others ---------------------------------------------------------------------------------------------

    def _make_room(self, slot: int) -> None:
        """Checkpoint slots of other requests that the request will overwrite with new or loaded positions."""
        size = self._cache.block_sizes[self._cache.kind[slot]]
        for first in list(self._shared_by.get(slot, ())):
            own, other = self.shared[first].sides(slot)
            kept = size - self.preempted.used(own)
            if self.preempted.on_device(other) > kept:
                self._checkpoint(other, kept)

    def _checkpoint(self, place: Place, kept: int) -> None:
        """Save a request's positions in a group, except the first `kept`; if `kept` is 0, the request leaves the
        group."""
        self.preempted.save(place, kept)
        if kept == 0:
            slot, entry = place
            self._leave(slot, int(self._cache.tables[slot, 0, entry]))
            self.num_holes[slot] += 1

    def release(self, slot: int) -> None:
        """Remove a request from its shared groups and drop its checkpoints, before it is released."""
        for first in list(self._shared_by.get(slot, ())):
            self._leave(slot, first)
        self.preempted.drop(slot)
        self.num_holes[slot] = 0

    def take_transfers(self) -> SlotTransfers:
        """Return the transfers of the step being built, and clear them."""
        return self.preempted.take_transfers()

    def traffic(self) -> SlotTraffic:
        """Return the number of slots saved and loaded so far."""
        return self.preempted.traffic()

    # --- integrity ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Recount shared groups and holes, and check the checkpoints.

        Raises:
            CacheIntegrityError: the accounting is inconsistent.
        """
        cache, tables = self._cache, self._cache.tables
        for first, pair in self.shared.items():
            (up, a), (down, b) = pair.up, pair.down
            require(tables[up, 0, a] == first == tables[down, 0, b], "a shared group is not in both tables")
            require(not self.grows_down[up] and self.grows_down[down], "two requests share a group from one end")
            size = cache.block_sizes[cache.kind[up]]
            require(cache.kind[up] == cache.kind[down], "requests of two kinds share a group")
            require(
                self.preempted.on_device(pair.up) + self.preempted.on_device(pair.down) <= size, "a slot has two owners"
            )
            require(self._groups.num_refs[first] == 2, "a shared group does not have two holders")
            require(not self._groups.prefixes.is_registered[first], "a shared group is registered")
        by_slot: dict[int, set[int]] = {}
        for first, pair in self.shared.items():
            for slot, _ in (pair.up, pair.down):
                by_slot.setdefault(slot, set()).add(first)
        require(by_slot == self._shared_by, "users of shared groups are miscounted")
        self.preempted.check_integrity()
        taken = np.flatnonzero(cache.owner != NO_OWNER)
        within = np.arange(tables.shape[2]) < cache.num_groups[taken, None]
        holes = np.count_nonzero((tables[taken, 0] == NULL_BLOCK) & within, axis=1)
        require((holes == self.num_holes[taken]).all(), "holes are miscounted")

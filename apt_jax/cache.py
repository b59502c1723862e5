"""The unified block pool, host side: who owns which block, and nothing about what is in it.

One pool serves both cache kinds (Apt-Serve §4.3, Fig. 6): a block holds token positions of one request, for all
layers, either as K, as V, or as the layer input X. All blocks have as many bytes, so it depends on the kind how many
positions C that is: `block_size` keys or values, `hidden_block_size` layer inputs. A request's positions lie in groups
of C; a group takes two blocks with the KV kind and one with the hidden kind:

    position      0 ......... C-1   C ........ 2C-1   2C .. n-1 | free slots
    group         0                 1                 2
    KV     row 0  K block           K block           K block
           row 1  V block           V block           V block       2 * ceil(n / C) blocks, C = block_size
    HIDDEN row 0  X block           X block           X block           ceil(n / C) blocks, C = hidden_block_size
           row 1  NULL_BLOCK        NULL_BLOCK        NULL_BLOCK

Growing from m to n positions (`reserve`) adds the groups [ceil(m / C), ceil(n / C)); slots of the last group are used
up first:

    | cached [0, m)                     | new [m, n)              |
    | groups held          | last group's free slots | new groups |
                                                     ^ blocks are allocated only here, all of them or none

Block 0 is reserved: `NULL_BLOCK` pads block tables, is never handed out and never read.

With prefix caching groups are shared. A group that is full and known to be good is registered in a `PrefixTree`
(`apt_jax.prefix`), where later requests with the same tokens find it:

    free ── reserve ──► held by one ── register ──► registered, held by n ── last release ──► idle ── attach ──► held
      ▲                      │ release                                                         │
      └──────────────────────┴──────────── evict: least recently used first, leaf first ◄──────┘

* Idle groups count as free: blocks that hold nothing are handed out first, then idle groups are evicted.
* Nobody writes into a group that is registered or held by two (`check_writable`). A request that needs all but the last
  position of one writes into a copy of it.
* Who holds a registered group holds those before it. A group that turns out to be registered already is exchanged for
  the registered one, so this also holds for requests that computed the same prefix at the same time.
* A group that two or more hold is charged to nobody: a request's charge is what it alone holds, the least that
  becomes free when it goes. Charges, shared blocks and free ones add up to the pool.

Objects: `BlockPool` counts blocks; `HybridCache` gives them to requests and keeps their block tables, one row a seat.
A seat is a request's place among those that hold cache, in [0, max_num_seqs). An owner is whatever number the engine
uses for a request for life.
"""

import enum
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.executor import NULL_BLOCK
from apt_jax.prefix import HitWatch, Node, PrefixTree
from apt_jax.sched.view import HIDDEN, KV, NO_KIND, RequestTable

NO_SEAT = -1
"""Seat of a request that holds no cache."""

NO_OWNER = -1
"""Owner of a seat that is free."""


class CacheKind(enum.IntEnum):
    """What of a request is cached; the numbers are the columns of `sched.view`."""

    KV = KV
    HIDDEN = HIDDEN


class CacheIntegrityError(AssertionError):
    """The accounting contradicts itself: going on could hand one request's memory to another.

    Raised rather than asserted, so that it is there under ``python -O`` as well.
    """


def _require(condition: object, message: str) -> None:
    if not condition:
        raise CacheIntegrityError(message)


class BlockPool:
    """Block ids [1, num_blocks] on a stack of free ones, with a bitmap that tells which are on it.

    The stack makes a block that was just freed the next one to be used; the bitmap finds double and foreign frees.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"{num_blocks=} must be at least 1")
        self.num_blocks = num_blocks
        self._stack = np.arange(num_blocks, 0, -1, dtype=np.int32)  # block 1 on top
        self._num_free = num_blocks
        self._is_free = np.ones(num_blocks + 1, np.bool_)
        self._is_free[NULL_BLOCK] = False

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    def allocate(self, num: int) -> NDArray[np.int32] | None:
        """Take `num` blocks: all of them, or None and nothing changes."""
        if num > self._num_free:
            return None
        self._num_free -= num
        ids = self._stack[self._num_free : self._num_free + num][::-1].copy()  # top first
        _require(self._is_free[ids].all(), "a block on the free list was in use")
        self._is_free[ids] = False
        return ids

    def free(self, ids: NDArray[np.int32]) -> None:
        """Give blocks back.

        Raises:
            CacheIntegrityError: an id is not one of the pool's, is free already, or is there twice.
        """
        num = ids.size
        if num <= 2:  # a group that is evicted: single numbers are faster
            for block in ids.tolist():
                _require(
                    NULL_BLOCK < block <= self.num_blocks,
                    f"freed ids outside [1, {self.num_blocks}]",
                )
                _require(not self._is_free[block], "a block was freed twice")
                self._stack[self._num_free] = block
                self._is_free[block] = True
                self._num_free += 1
            return
        _require(
            ids.min() > NULL_BLOCK and ids.max() <= self.num_blocks,
            f"freed ids outside [1, {self.num_blocks}]",
        )
        _require(not self._is_free[ids].any(), "a block was freed twice")
        _require(np.unique(ids).size == num, "one call frees a block twice")
        _require(self._num_free + num <= self.num_blocks, "more blocks freed than there are")
        self._stack[self._num_free : self._num_free + num] = ids
        self._is_free[ids] = True
        self._num_free += num

    def check_integrity(self) -> None:
        """The stack holds each free block once, and the bitmap says the same."""
        ids = self._stack[: self._num_free]
        _require(np.unique(ids).size == ids.size, "the free list has duplicates")
        _require(
            ids.size == 0 or (ids.min() > NULL_BLOCK and ids.max() <= self.num_blocks),
            "the free list has foreign ids",
        )
        _require(
            np.count_nonzero(self._is_free) == self._num_free and self._is_free[ids].all(),
            "free list and bitmap differ",
        )


class HybridCache:
    """Block tables of the requests that hold cache, over one pool for both kinds.

    Attributes (arrays are indexed by seat; read them, change them through the methods only):
        pool: the blocks.
        tables: (max_num_seqs, 2, J) int32 block tables as drawn above; J grows on demand.
        num_groups: groups held, ceil(num_tokens / block_sizes[kind]).
        num_tokens: positions reserved.
        num_private: groups that nobody else holds.
        kind: `CacheKind` held, `NO_KIND` on free seats.
        block_sizes: positions of a group, by kind.
        blocks_per_group: its blocks, by kind.
        owner: who holds the seat, `NO_OWNER` on free seats.
        num_refs: requests that hold a group, by its first block.
        generation: how often a block was handed out as the first of a group: tells whether it still is what it was.
        prefixes: registered groups; None: nothing is shared.
        watch: waiting requests that want to know what they would find; None: there are none.
        charges_changed: `num_private` of a seat has changed otherwise than by that seat's `reserve`; reset by the reader.
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
    ) -> None:
        self.pool = BlockPool(num_blocks)
        hidden = block_size if hidden_block_size is None else hidden_block_size
        self.block_sizes = (block_size, hidden)
        self.max_num_seqs = max_num_seqs
        self.blocks_per_group = tuple(blocks_per_group)
        self.tables = np.full((max_num_seqs, 2, min(num_blocks, 64)), NULL_BLOCK, np.int32)
        self.num_groups = np.zeros(max_num_seqs, np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.kind = np.full(max_num_seqs, NO_KIND, np.int8)
        self.owner = np.full(max_num_seqs, NO_OWNER, np.int64)
        self._cost = np.asarray(self.blocks_per_group, np.int32)
        self._size = np.asarray(self.block_sizes, np.int32)
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))
        self._seat_of: dict[int, int] = {}

        self.num_private = np.zeros(max_num_seqs, np.int32)
        self.num_refs = np.zeros(num_blocks + 1, np.int32)
        self.generation = np.zeros(num_blocks + 1, np.int64)
        self.prefixes = (
            PrefixTree(num_blocks, len(self.blocks_per_group)) if prefix_caching else None
        )
        self.watch: HitWatch | None = None
        self.charges_changed = False
        self._is_expected = np.zeros(num_blocks + 1, np.bool_)
        self._second = np.zeros(num_blocks + 1, np.int32)  # second block of a group, by its first
        self._seat_sum = np.zeros(
            num_blocks + 1, np.int64
        )  # seats that hold it: tells the last one
        self._groups_in_use = [0] * len(self.blocks_per_group)
        self._num_idle_blocks = 0

    def watch_hits(self, table: RequestTable) -> HitWatch:
        """Make the `watch` that writes into `table`; needs prefix caching."""
        assert self.prefixes is not None
        self.watch = HitWatch(
            self.prefixes, table, self.num_refs, self.block_sizes, self.blocks_per_group
        )
        return self.watch

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: those that hold nothing, and idle ones."""
        return self.pool.num_free + self._num_idle_blocks

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and that may be found again."""
        return self._num_idle_blocks

    @property
    def num_shared(self) -> int:
        """Blocks that two or more requests hold."""
        cost = self.blocks_per_group
        in_use = sum(n * c for n, c in zip(self._groups_in_use, cost, strict=True))
        taken = self.owner != NO_OWNER
        return in_use - int((self.num_private * self._cost[self.kind])[taken].sum())

    @property
    def num_free_seats(self) -> int:
        return len(self._free_seats)

    def seat_of(self, owner: int) -> int:
        """The owner's seat, `NO_SEAT` when it holds no cache."""
        return self._seat_of.get(owner, NO_SEAT)

    def blocks_needed(self, num_tokens: int, kind: int) -> int:
        """Blocks that `num_tokens` positions take: `blocks_per_group * ceil(num_tokens / block size)`."""
        return -(-num_tokens // self.block_sizes[kind]) * self.blocks_per_group[kind]

    def num_blocks_of(self, seats: NDArray[np.int32]) -> NDArray[np.int32]:
        """Blocks held by taken seats."""
        return self.num_groups[seats] * self._cost[self.kind[seats]]

    def num_private_blocks_of(self, seats: NDArray[np.int32]) -> NDArray[np.int32]:
        """Blocks that taken seats hold alone."""
        return self.num_private[seats] * self._cost[self.kind[seats]]

    def blocks_by_kind(self) -> dict[CacheKind, int]:
        """Blocks in use with each kind, shared ones counted once."""
        return {kind: self._groups_in_use[kind] * self.blocks_per_group[kind] for kind in CacheKind}

    # --- taking and giving back ------------------------------------------------------------------------------------

    def reserve(self, owner: int, num_tokens: int, kind: int) -> bool:
        """Make room for the owner's positions [0, num_tokens), keeping what it has; takes a seat at the first call.

        Returns:
            False when the blocks or a seat are not there; then nothing has changed.

        Raises:
            CacheIntegrityError: the owner holds the other kind, or would shrink.
        """
        seat = self._seat_of.get(owner, NO_SEAT)
        groups = -(-num_tokens // self.block_sizes[kind])
        if seat == NO_SEAT:
            if not self._free_seats:
                return False
            held = 0
        else:
            held = int(self.num_groups[seat])
            if self.kind[seat] != kind:
                raise CacheIntegrityError(f"owner {owner} holds kind {self.kind[seat]}, not {kind}")
            if num_tokens < self.num_tokens[seat]:
                raise CacheIntegrityError(f"owner {owner} would shrink to {num_tokens} positions")
        new = groups - held
        halves = self.blocks_per_group[kind]
        if new > 0:
            ids = self._allocate(new * halves)
            if ids is None:
                return False
            if seat == NO_SEAT:
                seat = self._take_seat(owner, kind)
            if groups > self.tables.shape[2]:
                self._grow_tables(groups)
            self.tables[seat, :halves, held:groups] = ids.reshape(halves, new)
            self.num_groups[seat] = groups
            firsts = int(ids[0]) if new == 1 else ids[:new]  # single numbers are faster
            self.num_refs[firsts] = 1
            self.generation[firsts] += 1
            self._seat_sum[firsts] = seat
            self._second[firsts] = NULL_BLOCK if halves == 1 else ids[1] if new == 1 else ids[new:]
            self.num_private[seat] += new
            self._groups_in_use[kind] += new
        elif seat == NO_SEAT:
            raise CacheIntegrityError(f"owner {owner} reserves {num_tokens} positions")
        self.num_tokens[seat] = num_tokens
        return True

    def reserve_rows(
        self,
        owners: NDArray[np.int64],
        seats: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kinds: NDArray[np.int8],
    ) -> NDArray[np.bool_]:
        """`reserve` for many requests, in order; those whose last group has room cost no Python.

        Args:
            owners: (n,) owner of each row.
            seats: (n,) their seats; changed in place where a row takes one.
            num_tokens: (n,) positions each shall have.
            kinds: (n,) cache kind of each.

        Returns:
            (n,) False where nothing was there to take; such a row keeps what it had.
        """
        seated = seats != NO_SEAT
        roomy = seated & (num_tokens <= self.num_groups[seats] * self._size[kinds])
        _require(
            (~roomy | (self.kind[seats] == kinds) & (self.owner[seats] == owners)).all(),
            "seat of another owner or kind",
        )
        if roomy.all():
            self.num_tokens[seats] = num_tokens
            return roomy
        self.num_tokens[seats[roomy]] = num_tokens[roomy]
        ok = roomy
        rest = np.flatnonzero(~roomy)
        if (
            rest.size > 1
            and seated[rest].all()
            and self._grow_by_one(owners[rest], seats[rest], num_tokens[rest], kinds[rest])
        ):
            ok[rest] = True
            return ok
        for i in rest.tolist():
            owner = int(owners[i])
            if self.reserve(owner, int(num_tokens[i]), int(kinds[i])):
                ok[i] = True
                seats[i] = self._seat_of[owner]
        return ok

    def _grow_by_one(
        self,
        owners: NDArray[np.int64],
        seats: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        kinds: NDArray[np.int8],
    ) -> bool:
        """`reserve` for seated rows that need one more group each, the same blocks in the same order, all at once.

        Returns:
            False where it is not as simple: a row needs more or is there twice, or blocks are short; then nothing has changed.
        """
        held = self.num_groups[seats]
        halves = self._cost[kinds]
        ends = np.cumsum(halves)
        total = int(ends[-1])
        fits = num_tokens <= (held + 1) * self._size[kinds]
        if total > self.pool.num_free or not fits.all() or len(set(seats.tolist())) < seats.size:
            return False
        _require(
            ((self.kind[seats] == kinds) & (self.owner[seats] == owners)).all(),
            "seat of another owner or kind",
        )
        ids = self.pool.allocate(total)
        if ids is None:
            return False
        width = int(held.max()) + 1
        if width > self.tables.shape[2]:
            self._grow_tables(width)
        firsts, seconds = ids[ends - halves], np.where(halves == 2, ids[ends - 1], NULL_BLOCK)
        self.tables[seats, 0, held] = firsts
        self.tables[seats, 1, held] = seconds
        self.num_groups[seats] = held + 1
        self.num_refs[firsts] = 1
        self.generation[firsts] += 1
        self._seat_sum[firsts] = seats
        self._second[firsts] = seconds
        self.num_private[seats] += 1
        self.num_tokens[seats] = num_tokens
        num_hidden = int(np.count_nonzero(kinds))
        self._groups_in_use[KV] += kinds.size - num_hidden
        self._groups_in_use[HIDDEN] += num_hidden
        return True

    def convert_rows(
        self, owners: Sequence[int], num_tokens: Sequence[int]
    ) -> tuple[list[NDArray[np.int32] | None], list[bool]]:
        """Requests of the hidden kind change to keys and values, and grow to `num_tokens` positions.

        Their X blocks are given back when all of them have got new ones: nothing that is handed out here was one of them. Who
        can have no new ones keeps its kind and grows with it.

        Returns:
            The X blocks that each gave back, (groups,), None where it kept them; and False for those that could not grow
            either and keep what they had.

        Raises:
            CacheIntegrityError: an owner does not hold the hidden kind, or would shrink.
        """
        new: list[NDArray[np.int32] | None] = []
        ok: list[bool] = []
        for owner, num in zip(owners, num_tokens, strict=True):
            seat = self._seat_of.get(owner, NO_SEAT)
            _require(
                seat != NO_SEAT and self.kind[seat] == HIDDEN,
                f"owner {owner} holds no layer inputs",
            )
            _require(num >= self.num_tokens[seat], f"owner {owner} would shrink to {num} positions")
            ids = self._allocate(self.blocks_needed(num, KV))
            new.append(ids)
            ok.append(ids is not None or self.reserve(owner, num, HIDDEN))
        given_back: list[NDArray[np.int32] | None] = []
        for owner, num, ids in zip(owners, num_tokens, new, strict=True):
            if ids is None:
                given_back.append(None)
                continue
            seat = self._seat_of[owner]
            held = int(self.num_groups[seat])
            given_back.append(self.tables[seat, 0, :held].copy())
            self._empty(seat)
            groups = ids.size // 2
            if groups > self.tables.shape[2]:
                self._grow_tables(groups)
            self.tables[seat, :, :groups] = ids.reshape(2, groups)
            firsts = ids[:groups]
            self.num_refs[firsts] = 1
            self.generation[firsts] += 1
            self._seat_sum[firsts] = seat
            self._second[firsts] = ids[groups:]
            self.num_groups[seat] = self.num_private[seat] = groups
            self.num_tokens[seat] = num
            self.kind[seat] = KV
            self._groups_in_use[KV] += groups
        return given_back, ok

    def release(self, owner: int) -> int:
        """Give back all that the owner holds, its seat as well; returns the number of blocks.

        Groups that are registered, or may be soon (`expect`), stay idle.
        """
        seat = self._seat_of.pop(owner, NO_SEAT)
        _require(seat != NO_SEAT, f"owner {owner} holds no cache")
        num_blocks = self._empty(seat)
        self.kind[seat] = NO_KIND
        self.owner[seat] = NO_OWNER
        self._free_seats.append(seat)
        return num_blocks

    def _empty(self, seat: int) -> int:
        """Give back all blocks of a seat, which stays taken; returns their number."""
        groups = int(self.num_groups[seat])
        kind = int(self.kind[seat])
        halves = self.blocks_per_group[kind]
        ids = self.tables[seat, :halves, :groups]
        num_blocks = ids.size
        if self.prefixes is None:
            self.num_refs[ids[0]] = 0
            self._groups_in_use[kind] -= groups
            self.pool.free(ids.reshape(-1))
        else:
            self._release_groups(self.prefixes, ids.copy(), seat, kind)
        self.tables[seat, :, :groups] = NULL_BLOCK
        self.num_groups[seat] = 0
        self.num_private[seat] = 0
        self.num_tokens[seat] = 0
        return num_blocks

    def _release_groups(
        self, prefixes: PrefixTree, ids: NDArray[np.int32], seat: int, kind: int
    ) -> None:
        firsts = ids[0]
        self.num_refs[firsts] -= 1
        self._seat_sum[firsts] -= seat
        left = self.num_refs[firsts]
        _require(left.min(initial=0) >= 0, "a group was released more often than it was taken")
        self._give_back_privacy(firsts[left == 1])
        over = left == 0
        self._groups_in_use[kind] -= int(np.count_nonzero(over))
        registered = prefixes.is_registered[firsts]
        kept = over & (registered | self._is_expected[firsts])
        self.pool.free(ids[:, over & ~kept].reshape(-1))
        idle = firsts[kept].tolist()
        self._num_idle_blocks += len(idle) * self.blocks_per_group[kind]
        for first in reversed(idle):  # the end of a prefix is evicted before what it builds on
            prefixes.idle[first] = None
        changed = firsts[over & registered]
        if changed.size and self.watch is not None:
            self.watch.used(prefixes.node_of[int(changed[0])])

    def _give_back_privacy(self, firsts: NDArray[np.int32]) -> None:
        """These groups have come down to one holder."""
        if firsts.size:
            np.add.at(self.num_private, self._seat_sum[firsts], 1)
            self.charges_changed = True

    def _allocate(self, num: int) -> NDArray[np.int32] | None:
        """Blocks that hold nothing, then those of idle groups; None where both together are too few."""
        lacking = num - self.pool.num_free
        if lacking > 0:
            if lacking > self._num_idle_blocks:
                return None
            assert self.prefixes is not None
            while self.pool.num_free < num:
                self._evict(self.prefixes, next(iter(self.prefixes.idle)))
        return self.pool.allocate(num)

    # --- prefixes --------------------------------------------------------------------------------------------------

    def attach(self, owner: int, nodes: Sequence[Node], kind: int) -> bool:
        """Begin with registered groups, the first ones of a path from the root; the owner holds nothing yet.

        Returns:
            False when there is no seat; then nothing has changed.
        """
        prefixes = self.prefixes
        assert prefixes is not None
        assert nodes
        _require(owner not in self._seat_of, f"owner {owner} holds cache")
        if not self._free_seats:
            return False
        num = len(nodes)
        if num > self.tables.shape[2]:
            self._grow_tables(num)
        firsts = np.array([node.block for node in nodes], np.int32)
        seat = self._take_seat(owner, kind)
        self.tables[seat, 0, :num] = firsts
        self.tables[seat, 1, :num] = self._second[firsts]
        before = self.num_refs[firsts]
        lone = firsts[before == 1]
        if lone.size:
            np.subtract.at(self.num_private, self._seat_sum[lone], 1)
            self.charges_changed = True
        idle = np.flatnonzero(before == 0)
        for first in firsts[idle].tolist():
            del prefixes.idle[first]
        self._num_idle_blocks -= idle.size * self.blocks_per_group[kind]
        self._groups_in_use[kind] += idle.size
        self.num_refs[firsts] += 1
        self._seat_sum[firsts] += seat
        self.num_private[seat] = idle.size
        self.num_groups[seat] = num
        self.num_tokens[seat] = num * self.block_sizes[kind]
        if idle.size and self.watch is not None:
            self.watch.used(nodes[int(idle[0])])
        return True

    def source_of(self, node: Node) -> NDArray[np.int32]:
        """Blocks of a registered group that is about to be copied: (2,), `NULL_BLOCK` for hidden. Counts as its use."""
        assert self.prefixes is not None
        if node.block in self.prefixes.idle:
            self.prefixes.idle.move_to_end(node.block)
        return np.array([node.block, self._second[node.block]], np.int32)

    def expect(
        self, seat: int, begin: int, end: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """A step in flight fills groups [begin, end) of the seat's request: `register` or `discard` will follow.

        Returns:
            Their first blocks, and the generations of these.
        """
        firsts = self.tables[seat, 0, begin:end].copy()
        self._is_expected[firsts] = True
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
        """Groups [begin, begin + len(firsts)) of a request are full and good: let others find them.

        Args:
            owner: of the request; it may have given the groups back meanwhile, or hold others.
            kind: of the groups.
            digests: of the request's groups from the first one.
            begin: index of the first of these groups.
            firsts: their first blocks.
            generations: of these blocks when the groups were filled.
        """
        prefixes = self.prefixes
        assert prefixes is not None
        parent = prefixes.find(kind, digests[begin - 1]) if begin else prefixes.roots[kind]
        seat = self._seat_of.get(owner, NO_SEAT)
        new: list[Node] = []
        blocks, stamps = firsts.tolist(), generations.tolist()
        for i, first in enumerate(blocks):
            if self.generation[first] != stamps[i]:
                parent = None  # given away meanwhile
                continue
            self._is_expected[first] = False
            at = begin + i
            held = bool(self.num_refs[first])
            if held:
                if seat == NO_SEAT or self.tables[seat, 0, at] != first:
                    parent = None
                    continue
                # Who holds a registered group holds those before it.
                if at and parent is not None and self.tables[seat, 0, at - 1] != parent.block:
                    parent = None
            elif first not in prefixes.idle:
                parent = None
                continue
            if parent is None:
                self._discard(prefixes, first)
                continue
            node = prefixes.find(kind, digests[at])
            if node is None:
                node = prefixes.add(parent, digests[at], first)
                new.append(node)
            elif node.block != first:
                if held:
                    self._exchange(prefixes, seat, at, node)
                else:
                    self._discard(prefixes, first)
            parent = node
        if new and self.watch is not None:
            self.watch.registered(new)

    def discard(self, firsts: NDArray[np.int32], generations: NDArray[np.int64]) -> None:
        """Groups that were to be registered will not be: if nobody holds them, they hold nothing of use."""
        prefixes = self.prefixes
        assert prefixes is not None
        same = self.generation[firsts] == generations
        self._is_expected[firsts[same]] = False
        for first in firsts[same].tolist():
            self._discard(prefixes, first)

    def drop_prefix(self, kind: int, digests: Sequence[bytes], begin: int) -> None:
        """Let nobody find what builds on the first `begin` groups of this path and goes along it."""
        assert self.prefixes is not None
        if begin < len(digests):
            node = self.prefixes.find(kind, digests[begin])
            if node is not None:
                self._drop(self.prefixes, node)

    def clear_prefixes(self) -> None:
        """Forget every registered or expected group: their contents are gone. Groups that are held stay held."""
        prefixes = self.prefixes
        assert prefixes is not None
        self._is_expected[:] = False
        for root in prefixes.roots:
            for node in list(root.children):
                self._drop(prefixes, node)
        for first in list(prefixes.idle):
            self._discard(prefixes, first)

    def _exchange(self, prefixes: PrefixTree, seat: int, at: int, node: Node) -> None:
        """The holder of a group takes the registered one with the same tokens instead, and its own becomes free.

        A step in flight may still read the old one; whoever gets its blocks writes them in a later step.
        """
        kind = node.kind
        old = self.tables[seat, : self.blocks_per_group[kind], at].copy()
        refs = int(self.num_refs[node.block])
        if refs == 0:
            del prefixes.idle[node.block]
            self._num_idle_blocks -= self.blocks_per_group[kind]
        else:
            self.num_private[seat] -= 1
            self._groups_in_use[kind] -= 1
            if refs == 1:
                self.num_private[self._seat_sum[node.block]] -= 1
            self.charges_changed = True
        self.num_refs[node.block] += 1
        self._seat_sum[node.block] += seat
        self.tables[seat, 0, at] = node.block
        self.tables[seat, 1, at] = self._second[node.block]
        self.num_refs[old[0]] = 0
        self.pool.free(old)
        if refs == 0 and self.watch is not None:
            self.watch.used(node)

    def _evict(self, prefixes: PrefixTree, first: int) -> None:
        node = prefixes.node_of.get(first)
        if node is not None:
            self._drop(prefixes, node)
        else:
            self._discard(prefixes, first)

    def _drop(self, prefixes: PrefixTree, node: Node) -> None:
        """Unregister a node and all below it; what nobody holds becomes free."""
        nodes = prefixes.subtree(node)
        if self.watch is not None:
            self.watch.dropped(nodes)
        prefixes.remove(nodes)
        for each in nodes:
            self._discard(prefixes, each.block)

    def _discard(self, prefixes: PrefixTree, first: int) -> None:
        """Free an idle group that is not registered; nothing otherwise."""
        if first in prefixes.idle and not prefixes.is_registered[first]:
            del prefixes.idle[first]
            self._is_expected[first] = False
            second = int(self._second[first])
            ids = np.array([first] if second == NULL_BLOCK else [first, second], np.int32)
            self._num_idle_blocks -= ids.size
            self.pool.free(ids)

    # --- for a step ------------------------------------------------------------------------------------------------

    def block_tables(self, seats: NDArray[np.int32]) -> NDArray[np.int32]:
        """Block tables of the seats, (n, 2, J) with J the most groups among them; a copy.

        Raises:
            CacheIntegrityError: an entry in use is not in [1, num_blocks], or one not in use is not `NULL_BLOCK`. JAX
                clamps or wraps a bad index without a word, so this is looked at before every launch.
        """
        groups = self.num_groups[seats]
        width = int(groups.max(initial=0))
        tables = self.tables[:, :, :width][seats]
        used = np.arange(width, dtype=np.int32) < groups[:, None]
        both = used & (self._cost[self.kind[seats]] == 2)[:, None]
        _require(
            tables.min(initial=0) >= 0
            and tables.max(initial=0) <= self.pool.num_blocks
            and ((tables[:, 0] != NULL_BLOCK) == used).all()
            and ((tables[:, 1] != NULL_BLOCK) == both).all(),
            "a block table names blocks that its request does not hold",
        )
        return tables

    def check_writable(self, seats: NDArray[np.int32], start: NDArray[np.int32]) -> None:
        """Nobody else reads the groups that positions from `start` on are written to.

        Raises:
            CacheIntegrityError: such a group is registered, or somebody else holds it as well.
        """
        if self.prefixes is None:
            return
        begin = start // self._size[self.kind[seats]]
        num = self.num_groups[seats] - begin
        if (num == 1).all():
            firsts = self.tables[seats, 0, begin]
        else:
            row = np.repeat(np.arange(seats.size), num)
            offset = np.arange(row.size) - np.repeat(np.cumsum(num) - num, num)
            firsts = self.tables[seats[row], 0, begin[row] + offset]
        _require(
            (self.num_refs[firsts] == 1).all() and not self.prefixes.is_registered[firsts].any(),
            "a step would write into a block that others may read",
        )

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_integrity(self, alive: Iterable[int] | None = None) -> None:
        """Recount everything: free + used = total, no block owned twice, every owner alive, tables as long as they must be.

        Args:
            alive: owners that may hold cache; None: do not look.
        """
        self.pool.check_integrity()
        taken = np.flatnonzero(self.owner != NO_OWNER)
        _require(
            self._seat_of == {int(self.owner[s]): int(s) for s in taken},
            "seat map and owners differ",
        )
        _require(
            sorted([*self._free_seats, *taken.tolist()]) == list(range(self.max_num_seqs)),
            "a seat is lost or held twice",
        )
        free = self.owner == NO_OWNER
        _require(
            not self.num_groups[free].any()
            and not self.tables[free].any()
            and (self.kind[free] == NO_KIND).all(),
            "a free seat holds blocks",
        )
        expected_groups = -(-self.num_tokens // self._size[self.kind])  # a free seat has no tokens
        _require(
            (self.num_groups == expected_groups).all(),
            "a block table is not ceil(tokens / block size) long",
        )
        _require((self.num_groups[taken] > 0).all(), "a seat is held without a block")
        if taken.size:
            self.block_tables(taken.astype(np.int32))
        listed = self.tables[self.tables != NULL_BLOCK]
        _require(
            listed.size == int(self.num_blocks_of(taken.astype(np.int32)).sum()),
            "table entries beyond what is held",
        )
        owned = self._check_sharing(taken)
        _require(not self.pool._is_free[owned].any(), "a block is both owned and free")
        lost = self.pool.num_blocks - owned.size - self._num_idle_blocks - self.pool.num_free
        _require(lost == 0, f"{lost} blocks are lost")
        if alive is not None:
            gone = set(self._seat_of) - set(alive)
            _require(not gone, f"owners {sorted(gone)} hold cache and are not alive")

    def _check_sharing(self, taken: NDArray[np.intp]) -> NDArray[np.int32]:
        """Recount references, and hold index, idle groups and seats against them; returns all blocks in use."""
        firsts = self.tables[:, 0][self.tables[:, 0] != NULL_BLOCK]
        refs = np.bincount(firsts, minlength=self.num_refs.size)
        _require((refs == self.num_refs).all(), "references are miscounted")
        held = np.flatnonzero(refs)
        first_of = {}
        for seat in taken.tolist():
            groups = int(self.num_groups[seat])
            ids = self.tables[seat, :, :groups]
            _require(
                np.unique(ids[0]).size == groups and (self._second[ids[0]] == ids[1]).all(),
                "a group is there twice, or in halves",
            )
            _require(
                int(np.count_nonzero(refs[ids[0]] == 1)) == self.num_private[seat],
                "private groups are miscounted",
            )
            for first in ids[0].tolist():
                _require(
                    first_of.setdefault(first, self.kind[seat]) == self.kind[seat],
                    "a group is held with two kinds",
                )
        for kind in CacheKind:
            _require(
                sum(k == kind for k in first_of.values()) == self._groups_in_use[kind],
                "groups in use are miscounted",
            )
        sums = np.zeros(refs.size, np.int64)
        for seat in taken.tolist():
            sums[self.tables[seat, 0, : int(self.num_groups[seat])]] += seat
        _require((sums[held] == self._seat_sum[held]).all(), "holders are miscounted")
        seconds = self._second[held]
        owned = np.concatenate([held, seconds[seconds != NULL_BLOCK]]).astype(np.int32)
        _require(np.unique(owned).size == owned.size, "a block is owned twice")
        prefixes = self.prefixes
        if prefixes is None:
            _require((refs <= 1).all() and not self._num_idle_blocks, "a block is owned twice")
            return owned
        idle = np.array(list(prefixes.idle), np.int32)
        _require(not refs[idle].any(), "a group is both held and idle")
        seconds = self._second[idle]
        unused = np.concatenate([idle, seconds[seconds != NULL_BLOCK]])
        _require(unused.size == self._num_idle_blocks, "idle blocks are miscounted")
        _require(
            not self.pool._is_free[unused].any() and np.unique(unused).size == unused.size,
            "an idle block is free as well",
        )
        _require(not np.isin(unused, owned).any(), "an idle block is owned as well")
        registered = np.flatnonzero(prefixes.is_registered).tolist()
        _require(registered == sorted(prefixes.node_of), "index and blocks differ")
        reached = [n for root in prefixes.roots for c in root.children for n in prefixes.subtree(c)]
        _require(
            len(reached) == len(registered) == sum(prefixes.num_nodes(k) for k in CacheKind),
            "index and tree differ",
        )
        order = {first: i for i, first in enumerate(prefixes.idle)}
        _require(
            (prefixes.is_registered[idle] | self._is_expected[idle]).all(),
            "a group is kept for nothing",
        )
        _require(
            not (prefixes.is_registered & self._is_expected).any(),
            "a group is registered before its time",
        )
        for node in reached:
            parent = node.parent
            _require(
                prefixes.node_of[node.block] is node
                and prefixes.find(node.kind, node.digest) is node
                and parent is not None
                and parent.kind == node.kind,
                "a node is not what the index says",
            )
            _require(refs[node.block] or node.block in order, "a registered group is nowhere")
            _require(
                not refs[node.block] or first_of[node.block] == node.kind,
                "a group is registered under another kind",
            )
            _require(
                (self._second[node.block] != NULL_BLOCK) == (self.blocks_per_group[node.kind] == 2),
                "a registered group of another kind",
            )
            _require(
                parent is None or not parent.depth or refs[parent.block] >= refs[node.block],
                "a group is held without those before it",
            )
        return owned

    def _take_seat(self, owner: int, kind: int) -> int:
        seat = self._free_seats.pop()
        self._seat_of[owner] = seat
        self.owner[seat] = owner
        self.kind[seat] = kind
        return seat

    def _grow_tables(self, groups: int) -> None:
        old = self.tables
        width = min(max(groups, 2 * old.shape[2]), max(groups, self.pool.num_blocks))
        self.tables = np.full((self.max_num_seqs, 2, width), NULL_BLOCK, np.int32)
        self.tables[:, :, : old.shape[2]] = old

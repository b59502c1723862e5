"""The unified block pool, host side: who owns which block, and nothing about what is in it.

One pool serves both cache kinds (Apt-Serve §4.3, Fig. 6): a block holds `block_size` (C) token positions of one
request, for all layers, either as K, as V, or as the layer input X. A request's positions lie in groups of C; a group
takes two blocks with the KV kind and one with the hidden kind:

    position      0 ......... C-1   C ........ 2C-1   2C .. n-1 | free slots
    group         0                 1                 2
    KV     row 0  K block           K block           K block
           row 1  V block           V block           V block       2 * ceil(n / C) blocks
    HIDDEN row 0  X block           X block           X block           ceil(n / C) blocks
           row 1  NULL_BLOCK        NULL_BLOCK        NULL_BLOCK

Growing from m to n positions (`reserve`) adds the groups [ceil(m / C), ceil(n / C)); slots of the last group are used
up first:

    | cached [0, m)                     | new [m, n)              |
    | groups held          | last group's free slots | new groups |
                                                     ^ blocks are allocated only here, all of them or none

Block 0 is reserved: `NULL_BLOCK` pads block tables, is never handed out and never read.

Objects: `BlockPool` counts blocks; `HybridCache` gives them to requests and keeps their block tables, one row a seat.
A seat is a request's place among those that hold cache, in [0, max_num_seqs). An owner is whatever number the engine
uses for a request for life.
"""

import enum
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.executor import NULL_BLOCK
from apt_jax.sched.view import HIDDEN, KV, NO_KIND

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
        if not num:
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
        num_groups: groups held, ceil(num_tokens / block_size).
        num_tokens: positions reserved.
        kind: `CacheKind` held, `NO_KIND` on free seats.
        owner: who holds the seat, `NO_OWNER` on free seats.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        blocks_per_group: Sequence[int] = (2, 1),
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.blocks_per_group = tuple(blocks_per_group)
        self.tables = np.full((max_num_seqs, 2, min(num_blocks, 64)), NULL_BLOCK, np.int32)
        self.num_groups = np.zeros(max_num_seqs, np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.kind = np.full(max_num_seqs, NO_KIND, np.int8)
        self.owner = np.full(max_num_seqs, NO_OWNER, np.int64)
        self._cost = np.asarray(self.blocks_per_group, np.int32)
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))
        self._seat_of: dict[int, int] = {}

    @property
    def num_free_seats(self) -> int:
        return len(self._free_seats)

    def seat_of(self, owner: int) -> int:
        """The owner's seat, `NO_SEAT` when it holds no cache."""
        return self._seat_of.get(owner, NO_SEAT)

    def blocks_needed(self, num_tokens: int, kind: int) -> int:
        """Blocks that `num_tokens` positions take: `blocks_per_group * ceil(num_tokens / block_size)`."""
        return -(-num_tokens // self.block_size) * self.blocks_per_group[kind]

    def num_blocks_of(self, seats: NDArray[np.int32]) -> NDArray[np.int32]:
        """Blocks held by taken seats."""
        return self.num_groups[seats] * self._cost[self.kind[seats]]

    def blocks_by_kind(self) -> dict[CacheKind, int]:
        """Blocks in use with each kind."""
        return {
            kind: int(self.num_groups[self.kind == kind].sum()) * self.blocks_per_group[kind]
            for kind in CacheKind
        }

    # --- taking and giving back ------------------------------------------------------------------------------------

    def reserve(self, owner: int, num_tokens: int, kind: int) -> bool:
        """Make room for the owner's positions [0, num_tokens), keeping what it has; takes a seat at the first call.

        Returns:
            False when the blocks or a seat are not there; then nothing has changed.

        Raises:
            CacheIntegrityError: the owner holds the other kind, or would shrink.
        """
        seat = self._seat_of.get(owner, NO_SEAT)
        groups = -(-num_tokens // self.block_size)
        if seat == NO_SEAT:
            if not self._free_seats:
                return False
            held = 0
        else:
            held = int(self.num_groups[seat])
            _require(
                self.kind[seat] == kind, f"owner {owner} holds kind {self.kind[seat]}, not {kind}"
            )
            _require(
                num_tokens >= self.num_tokens[seat],
                f"owner {owner} would shrink to {num_tokens} positions",
            )
        new = groups - held
        halves = self.blocks_per_group[kind]
        if new > 0:
            ids = self.pool.allocate(new * halves)
            if ids is None:
                return False
            if seat == NO_SEAT:
                seat = self._take_seat(owner, kind)
            if groups > self.tables.shape[2]:
                self._grow_tables(groups)
            self.tables[seat, :halves, held:groups] = ids.reshape(halves, new)
            self.num_groups[seat] = groups
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
        roomy = seated & (num_tokens <= self.num_groups[seats] * self.block_size)
        _require(
            (~roomy | (self.kind[seats] == kinds) & (self.owner[seats] == owners)).all(),
            "seat of another owner or kind",
        )
        self.num_tokens[seats[roomy]] = num_tokens[roomy]
        ok = roomy
        for i in np.flatnonzero(~roomy).tolist():
            owner = int(owners[i])
            if self.reserve(owner, int(num_tokens[i]), int(kinds[i])):
                ok[i] = True
                seats[i] = self._seat_of[owner]
        return ok

    def release(self, owner: int) -> int:
        """Give back all that the owner holds, its seat as well; returns the number of blocks."""
        seat = self._seat_of.pop(owner, NO_SEAT)
        _require(seat != NO_SEAT, f"owner {owner} holds no cache")
        groups = int(self.num_groups[seat])
        halves = self.blocks_per_group[self.kind[seat]]
        ids = self.tables[seat, :halves, :groups].reshape(-1)
        self.pool.free(ids)
        self.tables[seat, :, :groups] = NULL_BLOCK
        self.num_groups[seat] = 0
        self.num_tokens[seat] = 0
        self.kind[seat] = NO_KIND
        self.owner[seat] = NO_OWNER
        self._free_seats.append(seat)
        return ids.size

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
        expected_groups = -(-self.num_tokens // self.block_size)
        _require(
            (self.num_groups == expected_groups).all(),
            "a block table is not ceil(tokens / block_size) long",
        )
        _require((self.num_groups[taken] > 0).all(), "a seat is held without a block")
        if taken.size:
            self.block_tables(taken.astype(np.int32))
        owned = self.tables[self.tables != NULL_BLOCK]
        _require(
            owned.size == int(self.num_blocks_of(taken.astype(np.int32)).sum()),
            "table entries beyond what is held",
        )
        _require(np.unique(owned).size == owned.size, "a block is owned twice")
        _require(not self.pool._is_free[owned].any(), "a block is both owned and free")
        _require(
            owned.size + self.pool.num_free == self.pool.num_blocks,
            f"{self.pool.num_blocks - owned.size - self.pool.num_free} blocks are lost",
        )
        if alive is not None:
            gone = set(self._seat_of) - set(alive)
            _require(not gone, f"owners {sorted(gone)} hold cache and are not alive")

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

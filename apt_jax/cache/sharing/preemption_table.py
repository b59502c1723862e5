"""The preemption table (BROS §5.2): missing slots of requests, and transfers of slots to and from host memory.

Only slots that another request is about to overwrite are saved (*lazy checkpointing*). They always hold a request's
latest positions in a group, and have the same indices in a block of host memory.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache.block_pool import NO_OWNER, require
from apt_jax.cache.hybrid_cache import HybridCache
from apt_jax.cache.placement import SlotTraffic
from apt_jax.cache.sharing.host_blocks import HostBlocks
from apt_jax.core.step import NULL_BLOCK

Place = tuple[int, int]
"""A request's cache slot, and the index of an entry of its block table."""


@dataclasses.dataclass(eq=False)
class Checkpoint:
    """An entry of the preemption table: a request's positions in one group, some of which are in host memory."""

    kept: int
    """Number of the request's first positions in the group that are on the device; the others are in host memory."""
    host: NDArray[np.int32]
    """(blocks_per_group,) host blocks with the saved slots, at the same indices as on the device; empty: the slots are
    lost."""
    step: int = -1
    """Number of the step that last saved slots of the group."""
    kept_before: int = 0
    """Number of positions on the device before that step."""
    blocks: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """(blocks_per_group,) device blocks from which that step saves."""


@dataclasses.dataclass
class SlotTransfers:
    """Transfers of a step, in this order: all saves are read, all copies are made, all loads are written."""

    saves: list[tuple[int, int, int, int, int]] = dataclasses.field(default_factory=list)
    """Saves as (block on the device, host block, first slot, number of slots, kind)."""
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Copies of whole blocks on the device as (source, destination)."""
    loads: list[tuple[int, int, int, int, int]] = dataclasses.field(default_factory=list)
    """Loads as (host block, block on the device, first slot, number of slots, kind)."""
    lost: list[int] = dataclasses.field(default_factory=list)
    """Owners whose slots could not be saved because host memory was full; release their cache before the step runs."""


class PreemptionTable:
    """Checkpoints of groups, and the transfers of the step that is being built.

    Args:
        cache: the cache with the block tables.
        host: blocks of host memory, of the same size as device blocks.
        grows_down: True: the request fills new groups from the right; indexed by slot. The array is shared with the
            caller.

    Attributes:
        of_slot: checkpoints by slot and index of the block table entry.
        transfers: transfers of the step being built.
        saved_slots, loaded_slots: total number of slots moved, by kind.
    """

    def __init__(self, cache: HybridCache, host: HostBlocks, grows_down: NDArray[np.bool_]) -> None:
        self._cache, self._host, self._grows_down = cache, host, grows_down
        self.of_slot: dict[int, dict[int, Checkpoint]] = {}
        self.transfers = SlotTransfers()
        self.saved_slots, self.loaded_slots = [0, 0], [0, 0]
        self._step = 0
        self._unloaded: list[NDArray[np.int32]] = []
        """Host blocks that the step loads; freed after it has been built, so that its saves do not overwrite them."""

    # --- queries -----------------------------------------------------------------------------------------------------

    def used(self, place: Place, num_tokens: int | None = None) -> int:
        """Return the number of positions that a request has in a group, or will have with `num_tokens` in total."""
        slot, entry = place
        size = self._cache.block_sizes[self._cache.kind[slot]]
        tokens = int(self._cache.num_tokens[slot]) if num_tokens is None else num_tokens
        return min(max(tokens - entry * size, 0), size)

    def on_device(self, place: Place) -> int:
        """Return the number of a request's positions in a group that are on the device."""
        checkpoint = self.of_slot.get(place[0], {}).get(place[1])
        return self.used(place) if checkpoint is None else checkpoint.kept

    def is_saved_now(self, place: Place) -> bool:
        """Return True if the step being built saves positions of the group."""
        checkpoint = self.of_slot.get(place[0], {}).get(place[1])
        return checkpoint is not None and checkpoint.step == self._step

    def num_blocks_of(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return (n,): for the request in each cache slot, the number of its blocks with checkpointed positions in host
        memory (M^cpu of BROS, Table 1)."""
        blocks = np.zeros(self._grows_down.size, np.int32)
        for slot, table in self.of_slot.items():
            blocks[slot] = len(table) * self._cache.blocks_per_group[self._cache.kind[slot]]
        return blocks[slots]

    def lacking(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the slots that requests must load before they run.

        Returns:
            (m, 4) array of host block, first slot, number of slots and kind; and (m,) array of the requests' cache
            slots.
        """
        spans: list[tuple[int, int, int, int]] = []
        owners: list[int] = []
        for slot in slots.tolist():
            for entry, checkpoint in self.of_slot.get(slot, {}).items():
                first, num = self._slots(slot, checkpoint.kept, self.used((slot, entry)))
                spans += [(copy, first, num, int(self._cache.kind[slot])) for copy in checkpoint.host.tolist()]
                owners += [slot] * checkpoint.host.size
        return np.array(spans, np.int32).reshape(-1, 4), np.array(owners, np.int32)

    def traffic(self) -> SlotTraffic:
        """Return the number of slots saved and loaded so far."""
        sizes, halves = self._cache.block_sizes, self._cache.blocks_per_group
        saved, loaded = (
            sum(n * h / size for n, h, size in zip(slots, halves, sizes, strict=True))
            for slots in (self.saved_slots, self.loaded_slots)
        )
        return SlotTraffic(
            saved_slots=sum(self.saved_slots),
            loaded_slots=sum(self.loaded_slots),
            saved_blocks=saved,
            loaded_blocks=loaded,
        )

    # --- saving and loading ------------------------------------------------------------------------------------------

    def save(self, place: Place, kept: int) -> None:
        """Save a request's positions in a group that are on the device, except the first `kept`."""
        slot, entry = place
        there = self.on_device(place)
        ids = self._cache.tables[slot, : self._cache.blocks_per_group[self._cache.kind[slot]], entry]
        table = self.of_slot.setdefault(slot, {})
        checkpoint = table.get(entry)
        if checkpoint is None:
            host = self._host.allocate(ids.size)
            if host is None:
                owner = int(self._cache.owner[slot])
                if owner not in self.transfers.lost:
                    self.transfers.lost.append(owner)
                host = np.zeros(0, np.int32)
            table[entry] = checkpoint = Checkpoint(there, host)
        if checkpoint.step != self._step:
            checkpoint.step, checkpoint.kept_before, checkpoint.blocks = self._step, there, ids.copy()
        first, num = self._slots(slot, kept, there)
        for block, copy in zip(ids.tolist(), checkpoint.host.tolist(), strict=False):
            self.transfers.saves.append((block, copy, first, num, int(self._cache.kind[slot])))
        self.saved_slots[self._cache.kind[slot]] += num
        checkpoint.kept = kept

    def load(self, slot: int, num_tokens: int) -> None:
        """Load the missing positions of a request into its groups; it must hold groups for all `num_tokens`
        positions."""
        table = self.of_slot.pop(slot, {})
        for entry, checkpoint in table.items():
            require(checkpoint.host.size, "a request continues although its slots were lost")
            place, begin = (slot, entry), checkpoint.kept
            ids = self._cache.tables[slot, : checkpoint.host.size, entry]
            if checkpoint.step == self._step:  # slots that this step saves are still on the device
                if begin == 0:
                    self.transfers.copies += zip(checkpoint.blocks.tolist(), ids.tolist(), strict=True)
                begin = checkpoint.kept_before
                self._cancel_saves(slot, checkpoint)
            self._unloaded.append(checkpoint.host)
            first, num = self._slots(slot, begin, self.used(place, num_tokens))
            if not num:
                continue
            for copy, block in zip(checkpoint.host.tolist(), ids.tolist(), strict=True):
                self.transfers.loads.append((copy, block, first, num, int(self._cache.kind[slot])))
            self.loaded_slots[self._cache.kind[slot]] += num

    def drop(self, slot: int) -> None:
        """Drop all checkpoints of a request."""
        for checkpoint in self.of_slot.pop(slot, {}).values():
            if checkpoint.host.size:
                if checkpoint.step == self._step:  # these host blocks may be reused in the same step
                    self._cancel_saves(slot, checkpoint)
                self._host.free(checkpoint.host)

    def _cancel_saves(self, slot: int, checkpoint: Checkpoint) -> None:
        """Cancel the saves of a group in the step being built."""
        host = set(checkpoint.host.tolist())
        self.saved_slots[self._cache.kind[slot]] -= checkpoint.kept_before - checkpoint.kept
        self.transfers.saves = [each for each in self.transfers.saves if each[1] not in host]

    def _slots(self, slot: int, begin: int, end: int) -> tuple[int, int]:
        """Return the first slot and the number of slots of positions [begin, end) of a request's group."""
        size = self._cache.block_sizes[self._cache.kind[slot]]
        # Slots are saved only from groups that the request fills from its own end.
        return (size - end if self._grows_down[slot] else begin), end - begin

    def take_transfers(self) -> SlotTransfers:
        """Return the transfers of the step being built, and begin the next step."""
        taken, self.transfers = self.transfers, SlotTransfers()
        self._step += 1
        for host in self._unloaded:
            self._host.free(host)
        self._unloaded.clear()
        return taken

    # --- integrity ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check checkpoints against block tables and host memory.

        Raises:
            CacheIntegrityError: the accounting is inconsistent.
        """
        cache, tables = self._cache, self._cache.tables
        used: list[int] = [block for host in self._unloaded for block in host.tolist()]
        for slot, table in self.of_slot.items():
            require(
                table and cache.owner[slot] != NO_OWNER, "a free slot has checkpoints, or a slot has an empty table"
            )
            for entry, checkpoint in table.items():
                require(entry < cache.num_groups[slot], "a checkpoint of a group that is not held")
                require(checkpoint.kept < self.used((slot, entry)), "a checkpoint has no saved positions")
                require(
                    (tables[slot, 0, entry] == NULL_BLOCK) == (checkpoint.kept == 0), "holes and checkpoints differ"
                )
                used += checkpoint.host.tolist()
        require(len(set(used)) == len(used), "a host block is owned twice")
        require(not self._host.is_free(np.array(used, np.int32)).any(), "a host block is both owned and free")

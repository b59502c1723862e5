"""Host memory for blocks that leave the device's pool, and their transfers.

The host pool is one array, with one row per block over all layers and devices; all its pages are touched at start:

    saves   gather program ── copy to the host ── save thread: row of the host pool, checksum
    loads   check ── rows of the host pool as one array ── scatter program

A save does not stall its step: the program reads the blocks before the step writes them, and the save thread does the
rest. If four saved arrays wait for the thread, dispatch waits for the oldest, which bounds the device memory for them.
A load waits only for the save of its blocks, if that has not finished. All blocks of a step are moved together, by
programs of fixed sizes, which are compiled before any step needs them.

A block is valid after it has been saved completely, and only while the checksum matches its contents. The announcement
of a save invalidates the block, so after a failed transfer the old contents are not used either.
"""

import concurrent.futures
import functools
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.errors import ConfigError
from apt_jax.executor.compiling.buckets import bucket_for, power_of_two_buckets
from apt_jax.executor.compiling.ready_programs import Kind, ProgramName, ReadyPrograms
from apt_jax.executor.compiling.warm_up import Program
from apt_jax.executor.pool_memory import HostBlocks
from apt_jax.executor.programs.packing import Ints
from apt_jax.executor.programs.runner import ProgramRunner
from apt_jax.executor.transfers.host_saver import HostSaver
from apt_jax.executor.transfers.host_slots import HostSlots

logger = logging.getLogger("apt_jax.executor")

_TRANSFER_BYTES = 64 << 20
"""Maximum number of bytes that one program moves."""
_MAX_TRANSFER_BLOCKS = 256


class HostPool:
    """Implements `apt_jax.core.tiers.HostMemory` for the pools of a `ProgramRunner`.

    Args:
        runner: runner that calls the programs.
        ready: programs that steps may run.
        blocks: shape and dtype of one block.
        num_blocks: number of host blocks, with ids in [1, num_blocks].
        place: function that copies a host array to where the load program reads it.
        pinned: see `HostSaver`.

    Attributes:
        sizes: numbers of blocks that programs move, ascending.
        saved_bytes, loaded_bytes: number of bytes moved so far, without padding.
        slots: saves and loads single slots; None: not supported.

    Raises:
        ConfigError: the memory cannot be allocated.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        ready: ReadyPrograms,
        blocks: HostBlocks,
        num_blocks: int,
        place: Callable[[np.ndarray], Any],
        *,
        pinned: bool = False,
    ) -> None:
        self.runner, self._ready, self._blocks, self._place = runner, ready, blocks, place
        self._num_blocks = num_blocks
        most = max(1, min(_MAX_TRANSFER_BLOCKS, _TRANSFER_BYTES // blocks.block_bytes))
        self.sizes = power_of_two_buckets(1, most)
        self.saved_bytes = self.loaded_bytes = 0
        self.slots: HostSlots | None = None
        try:
            self._memory = np.empty((num_blocks, *blocks.shape), blocks.dtype)
            self._memory.reshape(-1).view(np.uint8)[:: os.sysconf("SC_PAGE_SIZE")] = 0  # commits the pages
        except MemoryError as error:
            raise ConfigError(
                f"not enough memory for swap_space, {num_blocks * blocks.block_bytes:,} bytes; lower it (--swap-space)"
            ) from error
        self._checksum = np.zeros(num_blocks + 1, np.uint32)
        # Generations: a block is valid if `_held`, the generation of its contents, equals `_announced`, the generation
        # announced last. The save thread writes `_held`, the engine's thread `_announced`.
        self._held = np.full(num_blocks + 1, -1, np.int64)
        self._announced = np.zeros(num_blocks + 1, np.int64)
        self._saving: dict[int, concurrent.futures.Future[None]] = {}
        self._saver = HostSaver(pinned=pinned)
        self._checkers = concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1), "apt-jax-checks")

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def add_slots(self, widths: tuple[int | None, int | None], place: Callable[[np.ndarray], Any]) -> None:
        """Enable saves and loads of single slots; see `HostSlots`."""
        self.slots = HostSlots(self.runner, self._ready, self._memory, self._saver, widths, place)

    def slots_ready(self, spans: Ints) -> NDArray[np.bool_]:
        """See `apt_jax.core.tiers.HostMemory`."""
        assert self.slots is not None
        return self.slots.are_ready(spans)

    @property
    def block_bytes(self) -> int:
        return self._blocks.block_bytes

    # --- programs --------------------------------------------------------------------------------------------------

    def programs(self) -> list[Program]:
        """Return the programs of all sizes, called on padding."""
        found = []
        for size in self.sizes:
            found.append(Program(ProgramName("save", size), lambda size=size: self._save_call(_NO_BLOCKS, size)))
            found.append(Program(ProgramName("load", size), lambda size=size: self._load_call(_NO_PAIRS, size)))
        return found if self.slots is None else [*found, *self.slots.programs()]

    def _save_call(self, blocks: Ints, size: int) -> Any:
        ids = np.zeros(size, np.int32)
        ids[: len(blocks)] = blocks
        return self.runner.save_call(ids)

    def _load_call(self, pairs: Ints, size: int) -> Any:
        ids = np.full(size, self.runner.step_format.num_blocks + 1, np.int32)
        ids[: len(pairs)] = pairs[:, 1]
        rows = np.zeros((size, *self._blocks.shape), self._blocks.dtype)  # not reused: the device may read it later
        for row, block in zip(rows, pairs[:, 0].tolist(), strict=False):
            row[:] = self._memory[block - 1]
        return self.runner.load_call(ids, self._place(rows))

    def _parts(self, pairs: Ints, kind: Kind) -> Iterator[tuple[Ints, int]]:
        sizes = self._ready.transfers(kind, self.sizes)
        for at in range(0, len(pairs), sizes[-1]):
            part = pairs[at : at + sizes[-1]]
            yield part, bucket_for(sizes, len(part))

    # --- transfers of a step ---------------------------------------------------------------------------------------

    def announce(self, saves: Ints) -> None:
        """Mark host blocks (second column) as about to be saved, which invalidates their contents."""
        for block in saves[:, 1].tolist():
            self._announced[block] += 1
            self._saving.pop(block, None)

    def save(self, saves: Ints) -> None:
        """Dispatch the saves of a step, given like `StepBatch.saves`, after `announce`."""
        for part, size in self._parts(saves, "save"):
            array = self._save_call(part[:, 0], size).run()
            blocks = part[:, 1].copy()
            store = functools.partial(self._store, blocks=blocks, generations=self._announced[blocks])
            future = self._saver.submit(array, f"{len(part)} cached blocks", store)
            self._saving.update(dict.fromkeys(blocks.tolist(), future))
            self.saved_bytes += len(part) * self._blocks.block_bytes

    def _store(self, rows: np.ndarray, blocks: Ints, generations: NDArray[np.int64]) -> None:
        """Copy the contents of blocks into host blocks; runs in the save thread."""
        for row, block, generation in zip(rows, blocks.tolist(), generations.tolist(), strict=False):
            if self._announced[block] == generation:  # else the block has been dropped and reused
                self._memory[block - 1] = row
                self._checksum[block] = self._sum(block)
                self._held[block] = generation

    def save_now(self, saves: Ints) -> None:
        """See `apt_jax.core.tiers.HostMemory`."""
        self.announce(saves)
        self.save(saves)

    def load(self, loads: Ints) -> None:
        """Dispatch the loads of a step, given like `StepBatch.loads`."""
        for part, size in self._parts(loads, "load"):
            self._load_call(part, size).run()
            self.loaded_bytes += len(part) * self._blocks.block_bytes

    def ready_to_load(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """See `apt_jax.core.tiers.HostMemory`."""
        ids = blocks.tolist()
        for block in ids:
            future = self._saving.pop(block, None)
            if future is not None:
                future.result()
        good = np.fromiter(self._checkers.map(self._is_good, ids), np.bool_, len(ids))
        if not good.all():
            logger.error("%d cached blocks in host memory are lost and will be computed again", np.count_nonzero(~good))
        return good

    # --- for files ---------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> HostBlocks:
        """Shape and dtype of one block."""
        return self._blocks

    def copy_out(self, blocks: Ints, receive: Callable[[NDArray[np.uint8] | None, tuple[int, ...]], None]) -> None:
        """Let the save thread copy blocks after the saves announced so far; later saves do not change the copy.

        Args:
            receive: called in that thread with the contents, (blocks, bytes), and their checksums; None instead of the
                contents: they are lost.
        """
        generations = self._announced[blocks]

        def copy() -> None:
            rows = None
            try:
                if (self._held[blocks] == generations).all():
                    rows = self._memory[blocks - 1].reshape(len(blocks), -1).view(np.uint8)
            finally:
                receive(rows, tuple(self._checksum[blocks].tolist()))

        self._saver.run(copy, f"{len(blocks)} cached blocks for a file")

    def copy_in(self, blocks: Ints, rows: NDArray[np.uint8], checksums: tuple[int, ...]) -> None:
        """Let the save thread write contents into blocks that have been allocated for them.

        Args:
            rows: (blocks, bytes) contents.
            checksums: checksum of each block.
        """
        generations = self._announced[blocks] + 1
        self._announced[blocks] = generations

        def copy() -> None:
            for block, row, checksum, generation in zip(
                blocks.tolist(), rows, checksums, generations.tolist(), strict=True
            ):
                if self._announced[block] == generation:
                    self._memory[block - 1].reshape(-1).view(np.uint8)[:] = row
                    self._checksum[block] = checksum
                    self._held[block] = generation

        future = self._saver.run(copy, f"{len(blocks)} cached blocks from a file")
        self._saving.update(dict.fromkeys(blocks.tolist(), future))

    def _is_good(self, block: int) -> bool:
        return bool(self._held[block] == self._announced[block]) and self._sum(block) == self._checksum[block]

    def _sum(self, block: int) -> int:
        return zlib.crc32(self._memory[block - 1].reshape(-1).view(np.uint8))


_NO_BLOCKS = np.zeros(0, np.int32)
_NO_PAIRS = np.zeros((0, 2), np.int32)

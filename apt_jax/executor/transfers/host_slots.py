"""Single slots of blocks in host memory, saved before another request that shares the block overwrites them (BROS
§5.2).

The slots are stored in blocks of a `HostPool`, at the same indices as on the device. All slots of a step and kind are
moved together, by programs of fixed sizes, like whole blocks (`apt_jax.executor.transfers.host_memory`).
"""

import concurrent.futures
import functools
import logging
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.errors import counted
from apt_jax.executor.compiling.buckets import bucket_for
from apt_jax.executor.compiling.ready_programs import Kind, ProgramName, ReadyPrograms
from apt_jax.executor.compiling.warm_up import Program
from apt_jax.executor.programs.packing import Ints
from apt_jax.executor.programs.runner import ProgramRunner
from apt_jax.executor.transfers.host_saver import HostSaver

logger = logging.getLogger("apt_jax.executor")

_SIZES = (8, 64, 512)
"""Numbers of slots that programs move at once."""
_NAMES: dict[int, tuple[Kind, Kind]] = {
    KV: ("save kv slots", "load kv slots"),
    HIDDEN: ("save hidden slots", "load hidden slots"),
}
_NOTHING = np.zeros((0, 2), np.int32)


class HostSlots:
    """Saves and loads slots.

    Args:
        runner: runner that calls the programs.
        ready: programs that steps may run.
        memory: (blocks, layers, C, E) host memory; block b is row b - 1.
        saver: saver of whole blocks, shared so that all saves to a block keep their order.
        widths: number of values in a slot, by cache kind; None: the kind is not offered.
        place: function that copies a host array (n, layers, values) to where the load program reads it.

    Attributes:
        saved_bytes, loaded_bytes: number of bytes moved so far, without padding.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        ready: ReadyPrograms,
        memory: np.ndarray,
        saver: HostSaver,
        widths: tuple[int | None, int | None],
        place: Callable[[np.ndarray], Any],
    ) -> None:
        self._runner, self._ready, self._widths, self._place = runner, ready, widths, place
        self._memory = memory.reshape(memory.shape[0], memory.shape[1], -1)
        self.saved_bytes = self.loaded_bytes = 0
        self._saver = saver
        slots = max(self._memory.shape[2] // width for width in widths if width is not None)
        shape = (memory.shape[0] + 1, slots)
        self._checksum = np.zeros(shape, np.uint32)
        # Generations, as for whole blocks: a slot is valid if `_held` equals `_announced`.
        self._held, self._announced = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
        self._saving: dict[tuple[int, ...], concurrent.futures.Future[None]] = {}

    def programs(self) -> list[Program]:
        """Return the programs of all sizes and kinds, called on padding."""
        found: list[Program] = []
        for kind in (KV, HIDDEN):
            save, load = _NAMES[kind]
            for size in _SIZES if self._widths[kind] is not None else ():
                found.append(Program(ProgramName(save, size), functools.partial(self._save_call, _NOTHING, size, kind)))
                empty = functools.partial(self._load_call, _NOTHING, _NOTHING, size, kind)
                found.append(Program(ProgramName(load, size), empty))
        return found

    def _save_call(self, places: Ints, size: int, kind: int) -> Any:
        padded = np.zeros((size, 2), np.int32)
        padded[: len(places)] = places
        return self._runner.save_slots_call(padded, self._width(kind))

    def _load_call(self, sources: Ints, places: Ints, size: int, kind: int) -> Any:
        width = self._width(kind)
        padded = np.zeros((size, 2), np.int32)
        padded[:, 0] = self._runner.step_format.num_blocks + 1
        padded[: len(places)] = places
        rows = np.zeros((size, self._memory.shape[1], width), self._memory.dtype)
        for row, (block, slot) in zip(rows, sources.tolist(), strict=False):
            row[:] = self._slot(block, slot, width)
        return self._runner.load_slots_call(padded, self._place(rows), width)

    def _width(self, kind: int) -> int:
        width = self._widths[kind]
        assert width is not None
        return width

    def _slot(self, block: int, slot: int, width: int) -> np.ndarray:
        return self._memory[block - 1, :, slot * width : (slot + 1) * width]

    # --- transfers of a step -----------------------------------------------------------------------------------------

    def announce(self, saves: Ints) -> None:
        """Mark host slots (`StepBatch.slot_saves`) as about to be saved, which invalidates their contents."""
        places = tuple(_slots(saves[:, 1], saves).T)
        self._announced[places] += 1

    def save(self, saves: Ints) -> None:
        """Dispatch the saves of a step, after `announce`."""
        for kind in (KV, HIDDEN):
            spans = saves[saves[:, 4] == kind]
            places, copies = _slots(spans[:, 0], spans), _slots(spans[:, 1], spans)
            if not len(places):
                continue
            sizes = self._ready.transfers(_NAMES[kind][0], _SIZES)
            for at in range(0, len(places), sizes[-1]):
                part, targets = places[at : at + sizes[-1]], copies[at : at + sizes[-1]]
                array = self._save_call(part, bucket_for(sizes, len(part)), kind).run()
                generations = self._announced[tuple(targets.T)]
                store = functools.partial(
                    self._store, targets=targets, generations=generations, width=self._width(kind)
                )
                future = self._saver.submit(array, f"{len(part)} slots of cached blocks", store)
                self._saving.update(dict.fromkeys(map(tuple, targets.tolist()), future))
                self.saved_bytes += len(part) * self._slot_bytes(kind)

    def _store(self, rows: np.ndarray, targets: Ints, generations: NDArray[np.int64], width: int) -> None:
        """Copy the contents of slots into host blocks; runs in the save thread."""
        for row, (block, slot), generation in zip(rows, targets.tolist(), generations.tolist(), strict=False):
            if self._announced[block, slot] == generation:
                self._slot(block, slot, width)[:] = row
                self._checksum[block, slot] = self._sum(block, slot, width)
                self._held[block, slot] = generation

    def load(self, loads: Ints) -> None:
        """Dispatch the loads of a step, given like `StepBatch.slot_loads`."""
        for kind in (KV, HIDDEN):
            spans = loads[loads[:, 4] == kind]
            sources, places = _slots(spans[:, 0], spans), _slots(spans[:, 1], spans)
            if not len(places):
                continue
            sizes = self._ready.transfers(_NAMES[kind][1], _SIZES)
            for at in range(0, len(places), sizes[-1]):
                part = slice(at, at + sizes[-1])
                self._load_call(sources[part], places[part], bucket_for(sizes, len(places[part])), kind).run()
                self.loaded_bytes += len(places[part]) * self._slot_bytes(kind)

    def are_ready(self, spans: Ints) -> NDArray[np.bool_]:
        """Wait until slots have been saved, and check their contents.

        Args:
            spans: (n, 4) host block, first slot, number of slots and kind.

        Returns:
            (n,) False: contents are lost, because a transfer failed or a checksum differs.
        """
        ready = np.ones(len(spans), np.bool_)
        for i, (block, first, num, kind) in enumerate(spans.tolist()):
            width = self._width(kind)
            for slot in range(first, first + num):
                future = self._saving.pop((block, slot), None)
                if future is not None:
                    future.result()
                held = self._held[block, slot] == self._announced[block, slot]
                ready[i] &= held and self._sum(block, slot, width) == self._checksum[block, slot]
        if not ready.all():
            logger.error(
                "slots of %s in host memory are lost and will be computed again", counted(int((~ready).sum()), "block")
            )
        return ready

    def _sum(self, block: int, slot: int, width: int) -> int:
        return zlib.crc32(np.ascontiguousarray(self._slot(block, slot, width)).view(np.uint8))

    def _slot_bytes(self, kind: int) -> int:
        return self._memory.shape[1] * self._width(kind) * self._memory.dtype.itemsize


def _slots(blocks: Ints, spans: Ints) -> Ints:
    """Return the block and index of every slot in `spans`, (m, 2); columns 2 and 3 of `spans` are first slots and
    numbers of slots."""
    num = spans[:, 3]
    within = np.arange(int(num.sum())) - np.repeat(np.cumsum(num) - num, num)
    return np.stack([np.repeat(blocks, num), np.repeat(spans[:, 2], num) + within], axis=1).astype(np.int32)

"""The host's record of the device's block tables, which lets a step send only new entries. Uses NumPy only."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.step import NULL_BLOCK, WindowBlocks

Changes = NDArray[np.int32]
"""Changes of an array, (2, m): indices into the flattened array, and new values or increments."""


class SentTables:
    """The block tables of all slots on the device, after all dispatched steps have run.

    The device's table of a slot equals the table here in all entries that have a block. Other entries may name blocks
    of an earlier request. They need not be erased, because a program reads only the entries that the row's positions
    need (`Programs.forward`).

    Attributes:
        blocks: (max_num_seqs, H, J) int32: keys, values, and tables of windowed layers. `NULL_BLOCK` after the blocks of
            keys and values of a slot's latest step.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        max_num_seqs = shape[0]
        self.blocks = np.zeros(shape, np.int32)
        self._widths = np.zeros(max_num_seqs, np.int32)

    def clear(self) -> None:
        """Record that the device's tables are empty."""
        self.blocks[:] = NULL_BLOCK
        self._widths[:] = 0

    def take_changes(
        self, slots: NDArray[np.int32], block_tables: NDArray[np.int32], windows: WindowBlocks | None = None
    ) -> Changes:
        """Return the changes that the device's tables need, and record them as sent.

        Args:
            slots: (n,) distinct slots of a step's rows.
            block_tables: (n, 2, j) block tables of the rows, j at most J, with `NULL_BLOCK` after a row's blocks.
            windows: blocks of windowed layers.

        Returns:
            Distinct indices into (max_num_seqs, H, J), and the new blocks.
        """
        width, (_, halves, length) = block_tables.shape[2], self.blocks.shape
        for slot in slots[self._widths[slots] > width].tolist():
            self.blocks[slot, :2, width : self._widths[slot]] = NULL_BLOCK
        self._widths[slots] = width
        changed = np.flatnonzero(self.blocks[:, :2, :width][slots] != block_tables)
        row_half, column = np.divmod(changed, max(width, 1))
        row, half = np.divmod(row_half, 2)
        places = (slots[row].astype(np.int64) * halves + half) * length + column
        blocks = block_tables.reshape(-1)[changed]
        if windows is not None:
            more, of_more = self._in_windows(slots, windows)
            places, blocks = np.concatenate([places, more]), np.concatenate([blocks, of_more])
        self.blocks.reshape(-1)[places] = blocks
        sent = blocks != NULL_BLOCK
        return np.stack([places[sent], blocks[sent]]).astype(np.int32)

    def _in_windows(
        self, slots: NDArray[np.int32], windows: WindowBlocks
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the indices of entries of windowed layers that change, and their blocks. Entries of groups that a request
        has released stay: no token reads them."""
        _, num, groups = windows.blocks.shape
        _, halves, length = self.blocks.shape
        column = np.minimum(windows.first[:, None] + np.arange(groups, dtype=np.int32), length - 1)
        half = 2 + np.arange(num, dtype=np.int32)
        old = self.blocks[slots[:, None, None], half[None, :, None], column[:, None]]
        row, at, group = np.nonzero((old != windows.blocks) & (windows.blocks != NULL_BLOCK))
        places = (slots[row].astype(np.int64) * halves + half[at]) * length + column[row, group]
        return places, windows.blocks[row, at, group]

    def check(self, on_device: NDArray[np.int32]) -> None:
        """Check the device's tables against this record.

        Raises:
            RuntimeError: they differ.
        """
        wrong = ((self.blocks != NULL_BLOCK) & (self.blocks != on_device)).any(axis=(1, 2))
        if wrong.any():
            raise RuntimeError(f"the block tables on the device are wrong in slots {np.flatnonzero(wrong).tolist()}")

"""Block tables that the device has, as the host knows them: a step sends only the new entries. NumPy only."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.step import NULL_BLOCK

Changes = NDArray[np.int32]
"""(2, m): places in an array as if it had one axis, and what is new there."""


class SentTables:
    """The block tables of all slots as the device has them once the steps that were dispatched have run.

    The device's table of a slot equals the one here wherever that has a block. Elsewhere it may name blocks of a
    request that had the slot before: a program reads as many entries as the row's positions need
    (`Programs.forward`), so that they need not be erased.

    Attributes:
        blocks: (max_num_seqs, 2, J) int32, `NULL_BLOCK` behind what a slot's last step had.
    """

    def __init__(self, max_num_seqs: int, table_len: int) -> None:
        self.blocks = np.zeros((max_num_seqs, 2, table_len), np.int32)
        self._widths = np.zeros(max_num_seqs, np.int32)

    def clear(self) -> None:
        """The device has empty tables."""
        self.blocks[:] = NULL_BLOCK
        self._widths[:] = 0

    def take_changes(self, slots: NDArray[np.int32], block_tables: NDArray[np.int32]) -> Changes:
        """Changes of the device's tables, which will be sent: from now on it has them.

        Args:
            slots: (n,) of the rows of a step; no two are the same.
            block_tables: (n, 2, j) of the rows, j at most J; `NULL_BLOCK` behind what a row has.

        Returns:
            Places among (max_num_seqs, 2, J), none twice, and the blocks there.
        """
        width = block_tables.shape[2]
        for slot in slots[self._widths[slots] > width].tolist():
            self.blocks[slot, :, width : self._widths[slot]] = NULL_BLOCK
        self._widths[slots] = width
        changed = np.flatnonzero(self.blocks[:, :, :width][slots] != block_tables)
        if not changed.size:
            return np.zeros((2, 0), np.int32)
        row_half, column = np.divmod(changed, width)
        row, half = np.divmod(row_half, 2)
        places = (slots[row].astype(np.int64) * 2 + half) * self.blocks.shape[2] + column
        blocks = block_tables.reshape(-1)[changed]
        self.blocks.reshape(-1)[places] = blocks
        sent = blocks != NULL_BLOCK
        return np.stack([places[sent], blocks[sent]]).astype(np.int32)

    def check(self, on_device: NDArray[np.int32]) -> None:
        """Check the device's tables.

        Raises:
            RuntimeError: they differ from the blocks here.
        """
        wrong = ((self.blocks != NULL_BLOCK) & (self.blocks != on_device)).any(axis=(1, 2))
        if wrong.any():
            raise RuntimeError(f"the device has other block tables in slots {np.flatnonzero(wrong).tolist()}")

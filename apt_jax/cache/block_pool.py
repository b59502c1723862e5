"""A pool of block ids with a free list, and definitions shared by the other cache modules."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.step import NULL_BLOCK

NO_SLOT = -1
"""Slot of a request that holds no cache."""

NO_OWNER = -1
"""Owner of a free slot."""


class CacheIntegrityError(AssertionError):
    """The accounting is inconsistent: if the engine continued, a request could read another request's memory.

    It is raised without an `assert` statement, so the checks also run under ``python -O``.
    """


def require(condition: object, message: str) -> None:
    """Raise `CacheIntegrityError` with a message if the condition is false."""
    if not condition:
        raise CacheIntegrityError(message)


class BlockPool:
    """Pool of block ids in [1, num_blocks]: a stack of the free ids, and a bitmap that marks them.

    The block freed last is reused first; the bitmap detects double frees.
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

    def is_free(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        return self._is_free[ids]

    def allocate(self, num: int) -> NDArray[np.int32] | None:
        """Take `num` blocks from the pool and return their ids; None: too few are free, and nothing has changed."""
        if num > self._num_free:
            return None
        self._num_free -= num
        ids = self._stack[self._num_free : self._num_free + num][::-1].copy()  # top first
        if num <= 2:  # usually one group
            for block in ids.tolist():
                require(self._is_free[block], "a block on the free list was in use")
                self._is_free[block] = False
            return ids
        require(self._is_free[ids].all(), "a block on the free list was in use")
        self._is_free[ids] = False
        return ids

    def free(self, ids: NDArray[np.int32]) -> None:
        """Return blocks to the pool.

        Raises:
            CacheIntegrityError: an id does not belong to the pool, is already free, or occurs twice.
        """
        num = ids.size
        if num <= 2:  # usually one evicted group: scalars are faster
            for block in ids.tolist():
                require(NULL_BLOCK < block <= self.num_blocks, "freed ids outside the pool")
                require(not self._is_free[block], "a block was freed twice")
                self._stack[self._num_free] = block
                self._is_free[block] = True
                self._num_free += 1
            return
        require(ids.min() > NULL_BLOCK and ids.max() <= self.num_blocks, "freed ids outside the pool")
        require(not self._is_free[ids].any(), "a block was freed twice")
        require(np.unique(ids).size == num, "one call frees a block twice")
        require(self._num_free + num <= self.num_blocks, "more blocks were freed than the pool has")
        self._stack[self._num_free : self._num_free + num] = ids
        self._is_free[ids] = True
        self._num_free += num

    def check_integrity(self) -> None:
        """Check that the stack holds each free block once and that the bitmap agrees."""
        ids = self._stack[: self._num_free]
        require(
            ids.size == 0 or (ids.min() > NULL_BLOCK and ids.max() <= self.num_blocks),
            "the free list has ids outside the pool",
        )
        listed = np.zeros_like(self._is_free)
        listed[ids] = True
        require(np.count_nonzero(listed) == ids.size, "the free list has duplicates")
        require((listed == self._is_free).all(), "free list and bitmap differ")

"""Blocks of host memory for checkpointed slots of requests."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache.group_pool import GroupPool


class HostBlocks(Protocol):
    """Protocol of a pool of blocks in host memory."""

    def allocate(self, num: int) -> NDArray[np.int32] | None: ...

    def free(self, ids: NDArray[np.int32]) -> None: ...

    def is_free(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]: ...


class LentBlocks:
    """`HostBlocks` lent by the cache's second tier, which drops groups to free them if needed."""

    def __init__(self, groups: GroupPool) -> None:
        assert groups.tier is not None
        self._groups, self._tier = groups, groups.tier

    def allocate(self, num: int) -> NDArray[np.int32] | None:
        return self._groups.lend_host(num)

    def free(self, ids: NDArray[np.int32]) -> None:
        self._tier.pool.free(ids)
        self._tier.num_lent -= ids.size

    def is_free(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        return self._tier.pool.is_free(ids)

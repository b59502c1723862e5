"""The contracts of the tiers below the device: blocks in host memory, and groups of blocks in files."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class HostMemory(Protocol):
    """Blocks of host memory beside the pool of an executor, for `StepBatch.saves` and `loads`."""

    @property
    def num_blocks(self) -> int:
        """Blocks as large as the executor's, with ids in [1, num_blocks]."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers and devices."""
        ...

    def save_now(self, saves: NDArray[np.int32]) -> None:
        """Save blocks between two steps, as `StepBatch.saves`."""
        ...

    def slots_ready(self, spans: NDArray[np.int32]) -> NDArray[np.bool_]:
        """The same of slots: (n, 4) host block, first slot, number of slots, and kind."""
        ...

    def ready_to_load(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Wait until these blocks have been saved, and check their contents.

        Returns:
            (n,) False: the contents are lost, by a transfer that failed or a checksum that differs.
        """
        ...


@dataclasses.dataclass(eq=False)
class DiskRead:
    """Groups that are being read, one after the other, in a thread of their own."""

    kind: int
    groups: "collections.deque[DiskGroup]" = dataclasses.field(default_factory=collections.deque)
    """Groups that have been read and not been taken from the left yet, in their order."""
    is_done: bool = False
    """No more will come: all have been read, or one could not be."""
    is_cancelled: bool = False
    """Cancel reads that have not begun."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskGroup:
    """A group that was read, for `DiskStore.place`."""

    contents: Any
    num_bytes: int
    read_s: float
    """Seconds that this took."""
    is_downward: bool
    """Its positions lie from the right end of the blocks (`apt_jax.cache.placement`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskCounts:
    """Counts of a `DiskStore` since it was made."""

    num_bytes: int = 0
    """Bytes of all its files, including known files of other servers."""
    read_bytes: int = 0
    written_bytes: int = 0
    num_dropped_files: int = 0
    """Files that were removed because they did not match."""
    num_unwritten: int = 0
    """Groups that were not written: the disk failed, was full or too slow."""


class DiskStore(Protocol):
    """Groups of blocks in files that outlive the process, by the digests of their prefixes. No method waits for a disk,
    but where it says so; none raises for one."""

    salt: bytes
    """Start of the digests, of all servers that shall find each other's groups."""

    def has(self, kind: int, digest: bytes) -> bool:
        """True if a group is likely to be found."""
        ...

    def group_bytes(self, kind: int) -> int:
        """Bytes that are read for a group."""
        ...

    def write(self, kind: int, digest: bytes, depth: int, blocks: Sequence[int], is_downward: bool) -> None:
        """Write a group from host memory, after the saves announced for its blocks. The blocks
        may be given to others at once. Where it is there already, that is noted as a use of it.

        Args:
            depth: of the group in its prefix, from 1; of those that are written at one time the deepest is removed first.
            blocks: of host memory.
            is_downward: see `DiskGroup`.
        """
        ...

    def read(self, kind: int, digests: Sequence[bytes], begin: int) -> DiskRead:
        """Read groups `[begin, len(digests))` of a prefix; those before are noted as used."""
        ...

    def place(self, group: DiskGroup, blocks: Sequence[int]) -> None:
        """Put a group that was read into blocks of host memory that have been allocated for it."""
        ...

    def remove(self, kind: int, digests: Sequence[bytes]) -> None:
        """Remove damaged groups."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until something has been read, at most for this time."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was to be written is; False: not within so long."""
        ...

    def close(self) -> None:
        """Read and write no more."""
        ...

    def counts(self) -> DiskCounts: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiers:
    """Where cached groups go that leave the pool."""

    host: HostMemory | None = None
    """Host memory of the executor; None: they are lost."""
    disk: DiskStore | None = None
    """Keeps groups that leave host memory, over restarts; needs `host`; None: they are lost."""

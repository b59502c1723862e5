"""The interfaces of the cache tiers below the device: blocks in host memory, and groups of blocks in files."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class HostMemory(Protocol):
    """Blocks of host memory in addition to an executor's pool, for `StepBatch.saves` and `loads`."""

    @property
    def num_blocks(self) -> int:
        """Number of host blocks, each as large as a block of the executor, with ids in [1, num_blocks]."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers and devices."""
        ...

    def save_now(self, saves: NDArray[np.int32]) -> None:
        """Save blocks between two steps; `saves` has the format of `StepBatch.saves`."""
        ...

    def slots_ready(self, spans: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Like `ready_to_load`, but for spans of slots, (n, 4): host block, first slot, number of slots, and cache
        kind."""
        ...

    def ready_to_load(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Wait until these blocks have been saved, and check their contents.

        Returns:
            (n,) bool; False if the contents are lost because a transfer failed or a checksum differs.
        """
        ...


@dataclasses.dataclass(eq=False)
class DiskRead:
    """A read from disk: groups of one prefix, which a separate thread reads one after another."""

    kind: int
    groups: "collections.deque[DiskGroup]" = dataclasses.field(default_factory=collections.deque)
    """Groups read so far, in order; the consumer pops them from the left."""
    is_done: bool = False
    """True if no more groups follow: all groups have been read, or a group could not be read."""
    is_cancelled: bool = False
    """Set to True to cancel the reads that have not started."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskGroup:
    """A group read from disk, for `DiskStore.place`."""

    contents: Any
    num_bytes: int
    read_s: float
    """Duration of the read, in seconds."""
    is_downward: bool
    """True if positions fill the blocks from their right end (`apt_jax.cache.placement`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskCounts:
    """Counts of a `DiskStore` since its creation."""

    num_bytes: int = 0
    """Bytes of all files in the directory, including known files of other servers."""
    read_bytes: int = 0
    written_bytes: int = 0
    num_dropped_files: int = 0
    """Number of files removed because they were damaged, or their headers did not match this model or their names."""
    num_unwritten: int = 0
    """Number of groups not written because the disk failed, was full or was too slow."""


class DiskStore(Protocol):
    """Stores groups of blocks, keyed by the digests of their prefixes, in files that outlive the process. Methods do
    not wait for the disk unless stated otherwise, and never raise disk errors."""

    salt: bytes
    """Salt of the root digests, the same on all servers that share groups."""

    def has(self, kind: int, digest: bytes) -> bool:
        """Return True if a group is probably stored and can be read."""
        ...

    def group_bytes(self, kind: int) -> int:
        """Return the size of a stored group in bytes, without headers."""
        ...

    def write(self, kind: int, digest: bytes, depth: int, blocks: Sequence[int], is_downward: bool) -> None:
        """Start writing a group from host memory; pending saves of its blocks finish first. The caller may reuse the
        blocks immediately. If the group is already stored, only its time of last use is updated.

        Args:
            depth: index of the group in its prefix, counted from 1; of groups written at the same time, the deepest is
                removed first.
            blocks: host blocks of the group.
            is_downward: see `DiskGroup.is_downward`.
        """
        ...

    def read(self, kind: int, digests: Sequence[bytes], begin: int) -> DiskRead:
        """Start reading groups `[begin, len(digests))` of a prefix; the groups before `begin` are marked as used."""
        ...

    def place(self, group: DiskGroup, blocks: Sequence[int]) -> None:
        """Copy the contents of a group that has been read to the host blocks allocated for it."""
        ...

    def remove(self, kind: int, digests: Sequence[bytes]) -> None:
        """Remove damaged groups."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until a group has been read or a read has finished, at most `timeout_s` seconds."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until all pending groups are written; return False if that takes more than `timeout_s` seconds."""
        ...

    def close(self) -> None:
        """Stop reading and writing."""
        ...

    def counts(self) -> DiskCounts: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiers:
    """Storage for cached groups that leave the pool."""

    host: HostMemory | None = None
    """Host memory of the executor; None: groups that leave the pool are lost."""
    disk: DiskStore | None = None
    """Keeps groups that leave host memory, also across restarts; needs `host`. None: these groups are lost."""

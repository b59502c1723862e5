"""A disk for `FakeExecutor`'s host memory: what is stored is looked at by nobody, so a wrong group changes the tokens."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.tiers import DiskCounts, DiskGroup, DiskRead
from tests.support.fake_executor import FakeHostMemory

GROUP_BYTES = 1000


class FakeDisk:
    """A `DiskStore` that outlives engines: `host` is that of the engine that uses it now.

    Args:
        host: memory of a `FakeExecutor`.
        latency: asked for each group how many looks at a read it takes until it is there; None: it is there at once.
        fails: asked for each group that is written or read whether that fails; None: none does.
        read_s: seconds that a group takes.

    Attributes:
        groups: contents by kind and digest.
    """

    def __init__(
        self,
        host: FakeHostMemory,
        *,
        latency: Callable[[], int] | None = None,
        fails: Callable[[], bool] | None = None,
        read_s: float = 1e-6,
    ) -> None:
        self.host, self.latency, self.fails, self.read_s = host, latency, fails, read_s
        self.salt = b"a disk's own"
        self.groups: dict[tuple[int, bytes], tuple[NDArray[np.int64], bool]] = {}
        self.num_read = self.num_written = self.num_failed = 0
        self.closed = False

    def has(self, kind: int, digest: bytes) -> bool:
        return (kind, digest) in self.groups

    def group_bytes(self, kind: int) -> int:
        return GROUP_BYTES if kind in (0, 1) else 0

    def write(self, kind: int, digest: bytes, depth: int, blocks: Sequence[int], is_downward: bool) -> None:
        assert depth >= 0
        ids = np.array(blocks)
        if not self.host.good[ids].all() or self._fails():
            return
        known = self.groups.get((kind, digest))
        if known is None:
            self.num_written += 1
            self.groups[kind, digest] = (self.host.memory[:, ids].copy(), is_downward)

    def read(self, kind: int, digests: Sequence[bytes], begin: int) -> DiskRead:
        return _FakeRead(self, kind, list(digests), begin)

    def place(self, group: DiskGroup, blocks: Sequence[int]) -> None:
        if blocks:
            ids = np.array(blocks)
            self.host.memory[:, ids] = group.contents
            self.host.good[ids] = True

    def remove(self, kind: int, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self.groups.pop((kind, digest), None)

    def wait(self, timeout_s: float) -> None:
        assert timeout_s >= 0

    def flush(self, timeout_s: float) -> bool:
        return timeout_s >= 0

    def close(self) -> None:
        self.closed = True

    def counts(self) -> DiskCounts:
        return DiskCounts(
            num_bytes=GROUP_BYTES * len(self.groups),
            read_bytes=GROUP_BYTES * self.num_read,
            written_bytes=GROUP_BYTES * self.num_written,
        )

    def _fails(self) -> bool:
        failed = self.fails is not None and self.fails()
        self.num_failed += failed
        return failed


class _FakeRead(DiskRead):
    """A read that goes on when it is looked at."""

    def __init__(self, disk: FakeDisk, kind: int, digests: list[bytes], begin: int) -> None:
        self._disk, self._digests, self._next, self._looks = disk, digests, begin, 0
        super().__init__(kind)

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        self._go_on()
        return self.is_cancelled or self._next == len(self._digests)

    @is_done.setter
    def is_done(self, value: bool) -> None:
        pass

    def _go_on(self) -> None:
        disk = self._disk
        while not self._looks and not self.is_cancelled and self._next < len(self._digests):
            found = disk.groups.get((self.kind, self._digests[self._next]))
            if found is None or disk._fails():
                self._next = len(self._digests)
                return
            disk.num_read += 1
            self._next += 1
            self._looks = 0 if disk.latency is None else disk.latency()
            contents, is_downward = found
            self.groups.append(
                DiskGroup(contents=contents, num_bytes=GROUP_BYTES, read_s=disk.read_s, is_downward=is_downward)
            )
        self._looks = max(0, self._looks - 1)

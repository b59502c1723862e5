"""Disk tier of the prefix cache: one thread writes groups dropped from host memory, another reads groups that requests
wait for.

    writes  save thread: copy of the host blocks ── write thread: `PrefixFiles`
    reads   read thread: `PrefixFiles` ── the engine takes the group ── save thread: host blocks

The engine never blocks on the disk, which may hang. Groups are dropped instead of written while more than 256 MiB wait
to be written. After an error the disk is not used for a minute; each distinct error is logged once.
"""

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.tiers import DiskCounts, DiskGroup, DiskRead
from apt_jax.executor.transfers.host_memory import HostPool
from apt_jax.executor.transfers.prefix_files import PrefixFiles, StoredGroup

logger = logging.getLogger("apt_jax.executor")

_MOST_BYTES = 256 << 20
"""Maximum number of bytes that wait to be written, and of bytes that were read but not yet taken."""
_RETRY_S = 60.0
"""Seconds without disk access after an error."""


class _Worker:
    """A daemon thread that calls functions one after the other."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], object]) -> None:
        self._queue.put(function)

    def end(self) -> None:
        """Stop the thread after all submitted calls."""
        self._queue.put(None)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            function()


class FileStore:
    """Implements `apt_jax.core.tiers.DiskStore` with files.

    Args:
        files: the files; one thread reads them, and another writes them.
        host: host memory, from which groups are written and into which they are read.
        clock: returns seconds.
    """

    def __init__(self, files: PrefixFiles, host: HostPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._host, self._clock = files, host, clock
        self.salt = files.salt
        self._changed = threading.Condition()
        """Guards the counts below, and is notified of each change."""
        self._num_writes = self._unwritten_bytes = self._untaken_bytes = 0
        self._news = threading.Event()
        """Set if a group has been read, or a read has finished, since the last `wait`."""
        self._read_bytes = self._written_bytes = self._num_unwritten = 0
        self._pending: dict[tuple[int, bytes], object] = {}
        """Groups to be written, each with a token that identifies the write."""
        self._off_until_s = float("-inf")
        self._said: set[str] = set()
        self._closed = False
        self._reader, self._writer = _Worker("apt-jax-disk-reads"), _Worker("apt-jax-disk-writes")

    # --- see `DiskStore` -------------------------------------------------------------------------------------------

    def has(self, kind: int, digest: bytes) -> bool:
        return self._files.has(kind, digest) and not self._closed and not self._is_off()

    def group_bytes(self, kind: int) -> int:
        return self._files.group_bytes(kind)

    def write(self, kind: int, digest: bytes, depth: int, blocks: Sequence[int], is_downward: bool) -> None:
        if self._closed or (kind, digest) in self._pending:
            return
        if self._files.has(kind, digest):
            if not self._is_off():
                touch = functools.partial(self._files.touch, kind, digest, depth)
                self._writer.submit(functools.partial(self._guarded, touch))
            return
        size = self._files.group_bytes(kind)
        with self._changed:
            if self._is_off() or (self._unwritten_bytes and self._unwritten_bytes + size > _MOST_BYTES):
                self._num_unwritten += 1
                return
            self._unwritten_bytes += size
            token = self._pending[kind, digest] = object()
            self._num_writes += 1

        def receive(rows: NDArray[np.uint8] | None, checksums: tuple[int, ...]) -> None:
            group = None if rows is None else StoredGroup(rows, checksums, is_downward)
            self._writer.submit(functools.partial(self._write, (kind, digest), token, depth, group))

        self._host.copy_out(np.array(blocks, np.int32), receive)

    def read(self, kind: int, digests: Sequence[bytes], begin: int) -> DiskRead:
        read = DiskRead(kind, is_done=self._closed)
        self._reader.submit(functools.partial(self._read, read, list(digests), begin))
        return read

    def place(self, group: DiskGroup, blocks: Sequence[int]) -> None:
        with self._changed:
            self._untaken_bytes -= group.num_bytes
            self._changed.notify_all()
        stored: StoredGroup = group.contents
        if blocks:
            self._host.copy_in(np.array(blocks, np.int32), stored.blocks, stored.checksums)

    def remove(self, kind: int, digests: Sequence[bytes]) -> None:
        for digest in digests:
            with self._changed:
                is_pending = self._pending.pop((kind, digest), None) is not None
            if not is_pending and not self._files.has(kind, digest):
                continue
            self._files.forget(kind, digest)
            self._writer.submit(functools.partial(self._guarded, functools.partial(self._files.remove, kind, digest)))

    def wait(self, timeout_s: float) -> None:
        self._news.wait(timeout_s)
        self._news.clear()

    def flush(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_writes, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._reader.end()
        self._writer.end()

    def counts(self) -> DiskCounts:
        return DiskCounts(
            num_bytes=self._files.num_bytes,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            num_dropped_files=self._files.num_dropped_files,
            num_unwritten=self._num_unwritten,
        )

    # --- in the threads --------------------------------------------------------------------------------------------

    def _is_off(self) -> bool:
        return self._clock() < self._off_until_s

    def _guarded(self, function: Callable[[], None]) -> bool:
        """Call a function that accesses files; returns False if it failed, after which the disk is not used for a
        while."""
        try:
            function()
        except Exception as error:
            self._off_until_s = self._clock() + _RETRY_S
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            if reason not in self._said:
                self._said.add(reason)
                logger.error(
                    "%s: cached prefixes are not stored there for now; serving continues (%s)",
                    self._files.directory,
                    reason,
                )
            return False
        return True

    def _write(self, key: tuple[int, bytes], token: object, depth: int, group: StoredGroup | None) -> None:
        size = 0

        def write() -> None:
            nonlocal size
            if group is not None:
                size = self._files.write(*key, depth, group)

        is_wanted = self._pending.get(key) is token  # else it has been removed
        if is_wanted and not self._closed and not self._is_off():
            self._guarded(write)
        with self._changed:
            self._written_bytes += size
            self._num_unwritten += is_wanted and not size
            self._unwritten_bytes -= self._files.group_bytes(key[0])
            self._num_writes -= 1
            if self._pending.get(key) is token:
                del self._pending[key]
            self._changed.notify_all()

    def _read(self, read: DiskRead, digests: list[bytes], begin: int) -> None:
        kind = read.kind
        try:
            for at in range(begin, len(digests)):
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._untaken_bytes < _MOST_BYTES or read.is_cancelled or self._closed
                    )
                if read.is_cancelled or self._closed or self._is_off():
                    break
                found: list[StoredGroup | None] = []
                started = time.perf_counter()
                self._guarded(lambda at=at, found=found: found.append(self._files.read(kind, digests[at], at + 1)))
                group = found[0] if found else None
                if group is None:
                    break
                with self._changed:
                    size = group.blocks.nbytes
                    self._read_bytes += size
                    self._untaken_bytes += size
                    read.groups.append(
                        DiskGroup(
                            contents=group,
                            num_bytes=size,
                            read_s=time.perf_counter() - started,
                            is_downward=group.is_downward,
                        )
                    )
                self._news.set()
        finally:
            read.is_done = True
            self._news.set()
        for at in range(begin):
            if not self._closed and not self._guarded(lambda at=at: self._files.touch(kind, digests[at], at + 1)):
                break

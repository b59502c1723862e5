"""Groups of cached blocks as files: their format, the checks when a file is read, and the size limit of the directory.

    DIR/              mode 0700
      salt            32 random bytes, generated once: the salt of the root digests of all servers that use DIR
      IDENTITY/       one for each model, dtype and block geometry (`apt_jax.executor.transfers.model_identity`)
        KIND-DIGEST   one group of blocks, mode 0600

A file consists of a header of fixed size, which has its own checksum and the checksums of the blocks, and the blocks as
they are in host memory. It is written under a temporary name and then renamed, without fsync: a file truncated by a
crash is detected by its size or its checksums. A file that fails a check is removed with a log message, and its group
is computed again.

Files are opened only relative to an open directory that was checked to be accessible to this user only, so renaming
directories above it has no effect.

Several servers may use one directory. Before a server removes files, it scans the whole directory, and then removes the
least recently used files, whichever server wrote them. The modification time of a file is the time of its last use,
slightly earlier for groups deeper in a prefix.
"""

import contextlib
import errno
import io
import itertools
import logging
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import KIND_NAMES
from apt_jax.errors import ConfigError

logger = logging.getLogger("apt_jax.executor")

FORMAT = 1
"""Version of header and contents; files of other versions are not read."""

_MAGIC = b"aptprefx"
_HEADER = struct.Struct("<8sIBBHQ32s16sII")
"""Magic, version, kind, whether blocks are filled from the end, number of blocks, bytes per block, identity, digest,
and checksum of each block (0: no second block); followed by a CRC-32 of all these fields."""
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_SALT_BYTES = 32
_LEFT_OVER_S = 3600.0
"""Age in seconds after which the writer of a temporary file is assumed to have crashed."""
_FILLED = 0.9
"""Share of the size limit that remains in use after files are removed."""
_RECOUNTED = 0.05
"""Share of the size limit that is written between two scans for other servers' files."""
_DEPTH_S = 1e-2
"""Seconds by which a group is dated earlier than its predecessor in the prefix, so that later groups are removed
first."""


class StoredGroup(NamedTuple):
    """Contents of a file with one group."""

    blocks: NDArray[np.uint8]
    """Bytes of the blocks, (blocks, bytes per block)."""
    checksums: tuple[int, ...]
    """CRC-32 checksum of each block."""
    is_downward: bool
    """True if positions fill the blocks from their right end (`apt_jax.cache.placement`)."""


class PrefixFiles:
    """Files of one model in a directory. Methods may be called from several threads, and raise `OSError`.

    Args:
        directory: directory of the files; created if it is missing.
        identity: 32 bytes (`model_identity`); groups of another identity are never found.
        block_bytes: bytes of one block.
        blocks_per_group: number of blocks per group, by cache kind.
        max_bytes: maximum size of all files in the directory.

    Attributes:
        salt: salt of the root digests.
        num_bytes: total bytes of the files in the directory: as of the last scan, plus this process's changes since
            then.
        num_dropped_files: number of files removed because they failed a check.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(
        self, directory: Path, identity: bytes, block_bytes: int, blocks_per_group: Sequence[int], max_bytes: int
    ) -> None:
        self.directory = directory
        self._identity, self._block_bytes, self._max_bytes = identity, block_bytes, max_bytes
        self._blocks_per_group = tuple(blocks_per_group)
        self.num_bytes = self.num_dropped_files = 0
        self._since_scan = 0
        self._known: set[tuple[int, bytes]] = set()
        self._lock = threading.Lock()
        """Guards the index of the files."""
        self._numbers = itertools.count()
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._root = _opened_directory(directory)
            self.salt = self._read_salt()
            self._name = identity.hex()[:32]
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._name, 0o700, dir_fd=self._root)
            self._own = _opened_directory(Path(self._name), self._root)
            self._scan(max_bytes)
        except OSError as error:
            raise ConfigError(
                f"{directory}: cannot be used for cached prefixes ({error.strerror}) (--prefix-cache-dir)"
            ) from error

    @property
    def num_groups(self) -> int:
        """Number of groups on disk that this model can use."""
        return len(self._known)

    def _read_salt(self) -> bytes:
        """Return the directory's salt; the first server to use the directory generates it."""
        with contextlib.suppress(FileNotFoundError):
            return self._whole_salt()
        name = f"salt.{os.getpid()}.tmp"
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600, dir_fd=self._root)
        try:
            with open(descriptor, "wb") as file:
                file.write(os.urandom(_SALT_BYTES))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(name, "salt", src_dir_fd=self._root, dst_dir_fd=self._root)
            except FileExistsError:
                pass  # another server was faster
            except OSError:  # a file system without links
                os.replace(name, "salt", src_dir_fd=self._root, dst_dir_fd=self._root)
        finally:
            _unlink(name, self._root)
        return self._whole_salt()

    def _whole_salt(self) -> bytes:
        with open(_opened_file("salt", self._root), "rb") as file:
            salt = file.read(_SALT_BYTES + 1)
        if len(salt) != _SALT_BYTES:
            raise ConfigError(f"{self.directory}/salt: damaged; empty the directory (--prefix-cache-dir)")
        return salt

    # --- index of files --------------------------------------------------------------------------------------------

    def has(self, kind: int, digest: bytes) -> bool:
        """Return True if this process knows of a file, which may be missing or damaged by now."""
        return (kind, digest) in self._known

    def group_bytes(self, kind: int) -> int:
        """Return the bytes of a group without its header."""
        return self._blocks_per_group[kind] * self._block_bytes

    def forget(self, kind: int, digest: bytes) -> None:
        """Mark a file as missing."""
        with self._lock:
            self._known.discard((kind, digest))

    def _scan(self, most: int) -> None:
        """Scan all files of the directory, whichever server wrote them. Remove the least recently used files if all
        files together take more than `most` bytes, and temporary files of writers that have crashed."""
        found: list[tuple[float, int, int, str]] = []
        known: set[tuple[int, bytes]] = set()
        with contextlib.ExitStack() as opened:
            for folder in self._folders(opened):
                for name, status in _files(folder):
                    if not name.endswith(".tmp"):
                        found.append((status.st_mtime, status.st_size, folder, name))
                        if folder == self._own and (key := _key_of(name)) is not None:
                            known.add(key)
                    elif time.time() - status.st_mtime > _LEFT_OVER_S:
                        _unlink(name, folder)
            total = sum(size for _, size, _, _ in found)
            if total > most:
                most = min(most, int(_FILLED * self._max_bytes))
                for _, size, folder, name in sorted(found):
                    if total <= most:
                        break
                    _unlink(name, folder)
                    total -= size
                    if folder == self._own and (key := _key_of(name)) is not None:
                        known.discard(key)
        with self._lock:
            self.num_bytes, self._since_scan, self._known = total, 0, known

    def _folders(self, opened: contextlib.ExitStack) -> Iterator[int]:
        """Yield the directories of all models, open until `opened` is closed."""
        yield self._own
        for name in os.listdir(self._root):
            if name != self._name:
                with contextlib.suppress(OSError, ConfigError):  # a file, or not accessible
                    folder = _opened_directory(Path(name), self._root)
                    opened.callback(os.close, folder)
                    yield folder

    def _make_room(self, size: int) -> bool:
        """Remove files if a new file of this size would exceed the size limit; returns False if that file alone exceeds
        it."""
        most = self._max_bytes - size
        if most < 0:
            return False
        if self.num_bytes > most or self._since_scan > _RECOUNTED * self._max_bytes:
            self._scan(most)
        return True

    # --- reading and writing ---------------------------------------------------------------------------------------

    def write(self, kind: int, digest: bytes, depth: int, group: StoredGroup) -> int:
        """Write a file and return its size in bytes; 0: it is larger than the size limit and was not written.

        Args:
            depth: depth of the group in its prefix, from 1.
        """
        num_blocks, data = len(group.checksums), group.blocks
        checksums = (*group.checksums, 0)[:2]
        head = _HEADER.pack(
            _MAGIC, FORMAT, kind, group.is_downward, num_blocks, self._block_bytes, self._identity, digest, *checksums
        )
        head += _CHECKSUM.pack(zlib.crc32(head))
        size = len(head) + data.nbytes
        if not self._make_room(size):
            return 0
        name = _name_of(kind, digest)
        temporary = f"{name}.{os.getpid()}-{next(self._numbers)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=self._own)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                for part in (memoryview(head), memoryview(data.reshape(-1))):
                    while part:
                        part = part[_write_part(file, part) :]
            self._stamp(temporary, depth)
            os.replace(temporary, name, src_dir_fd=self._own, dst_dir_fd=self._own)
        except BaseException:
            _unlink(temporary, self._own)
            raise
        with self._lock:
            if (kind, digest) not in self._known:  # else it replaced a file
                self._known.add((kind, digest))
                self.num_bytes += size
            self._since_scan += size
        return size

    def read(self, kind: int, digest: bytes, depth: int) -> StoredGroup | None:
        """Read and check a file; None: it is missing, or failed a check and was removed."""
        try:
            descriptor = _opened_file(_name_of(kind, digest), self._own)
        except FileNotFoundError:
            self.forget(kind, digest)
            return None
        shape = (self._blocks_per_group[kind], self._block_bytes)
        with open(descriptor, "rb", buffering=0) as file:
            size = os.fstat(descriptor).st_size
            wrong = f"it has {size:,} bytes" if size != _HEADER_BYTES + shape[0] * shape[1] else None
            head = file.read(_HEADER_BYTES) if wrong is None else b""
            group = None
            if wrong is None:
                wrong = self._wrong(head, kind, digest)
            if wrong is None:
                fields = _HEADER.unpack(head[: _HEADER.size])
                blocks = np.empty(shape, np.uint8)
                _read_into(file, blocks)
                group = StoredGroup(blocks, fields[-2:][: shape[0]], bool(fields[3]))
                if any(zlib.crc32(block) != crc for block, crc in zip(blocks, group.checksums, strict=True)):
                    wrong = "its checksum differs"
        if wrong is not None or group is None:
            self._refuse(kind, digest, wrong or "", size)
            return None
        self.touch(kind, digest, depth)
        return group

    def _wrong(self, head: bytes, kind: int, digest: bytes) -> str | None:
        """Return the reason why a header is invalid, for the log; None: it is valid."""
        if len(head) != _HEADER_BYTES or head[_HEADER.size :] != _CHECKSUM.pack(zlib.crc32(head[: _HEADER.size])):
            return "its header is damaged"
        magic, version, of_kind, _, num_blocks, block_bytes, identity, of_digest, _, _ = _HEADER.unpack(
            head[: _HEADER.size]
        )
        if (magic, version) != (_MAGIC, FORMAT):
            return "it has another format version"
        if identity != self._identity or (num_blocks, block_bytes) != (self._blocks_per_group[kind], self._block_bytes):
            return "it belongs to another model"
        return None if (of_kind, of_digest) == (kind, digest) else "its name does not match its header"

    def _refuse(self, kind: int, digest: bytes, why: str, size: int) -> None:
        logger.warning(
            "%s: a cached prefix was removed because %s; it will be computed again",
            self.directory / _name_of(kind, digest),
            why,
        )
        self.num_dropped_files += 1
        self.remove(kind, digest, size)

    def touch(self, kind: int, digest: bytes, depth: int) -> None:
        """Update a group's time of last use; does nothing if the file is missing."""
        try:
            self._stamp(_name_of(kind, digest), depth)
        except FileNotFoundError:
            self.forget(kind, digest)

    def _stamp(self, name: str, depth: int) -> None:
        used_s = time.time() - _DEPTH_S * depth
        os.utime(name, (used_s, used_s), dir_fd=self._own, follow_symlinks=False)

    def remove(self, kind: int, digest: bytes, size: int = 0) -> None:
        """Remove a file, if there is one."""
        with self._lock:
            self._known.discard((kind, digest))
            self.num_bytes -= size
        _unlink(_name_of(kind, digest), self._own)


def _name_of(kind: int, digest: bytes) -> str:
    return f"{KIND_NAMES[kind]}-{digest.hex()}"


def _key_of(name: str) -> tuple[int, bytes] | None:
    kind, _, digest = name.partition("-")
    try:
        return KIND_NAMES.index(kind), bytes.fromhex(digest)
    except ValueError:
        return None


def _files(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield names and attributes of the files in an open directory."""
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield name, status


def _opened_directory(path: Path, above: int | None = None) -> int:
    """Open a directory that only this user may access."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        os.close(descriptor)
        raise ConfigError(
            f"{path}: must belong to this user, without access for others; chmod 700 it (--prefix-cache-dir)"
        )
    return descriptor


def _opened_file(name: str, folder: int) -> int:
    """Open a file of this user for reading; links are not followed, and pipes do not block."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        os.close(descriptor)
        raise FileNotFoundError(name)
    return descriptor


def _write_part(file: io.RawIOBase, part: memoryview) -> int:
    """Write as much as the file accepts; return the number of bytes."""
    num = file.write(part)
    if not num:
        raise OSError(errno.EIO, "nothing could be written")
    return num


def _read_into(file: io.RawIOBase, blocks: NDArray[np.uint8]) -> None:
    """Read the rest of a file into an array. A truncated file is detected by its checksum."""
    left = memoryview(blocks.reshape(-1))
    while left:
        num = file.readinto(left)
        if not num:
            return
        left = left[num:]


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)

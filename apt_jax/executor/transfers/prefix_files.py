"""Groups of cached blocks as files: their format, what is checked when one is read, and the bound of the directory.

    DIR/              mode 0700
      salt            32 random bytes, drawn once: the digests of all servers on this directory begin with them
      IDENTITY/       one for each model, dtype and geometry of blocks (`apt_jax.executor.transfers.model_identity`)
        KIND-DIGEST   one group of blocks, mode 0600

A file has a header of fixed size, with a checksum of its own, and the blocks as they are in host memory, with the
checksums that they have there. It is written under another name and renamed, and not synced: one that a crash has cut
is found by its size or its checksum. What does not match is removed, said once, and computed again.

Files are only opened below a directory that is open itself and was checked: it belongs to this user and is nobody
else's to read or write, whoever renames what above it.

Several servers may use one directory. Each looks at all files before it removes any, and removes those that were used
least recently, whoever wrote them: the time of a file is that of its last use, a little earlier the deeper in a prefix.
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
"""Magic, version, kind, whether it fills blocks from the end, blocks, bytes of a block, identity, digest, checksum of
each block (0: no second block); all of it is followed by its own CRC-32."""
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_SALT_BYTES = 32
_LEFT_OVER_S = 3600.0
"""Age of a temporary file after which its writer must have died."""
_FILLED = 0.9
"""Share of the bound that is left when files have been removed."""
_RECOUNTED = 0.05
"""Share of the bound that is written between two scans for other servers' files."""
_DEPTH_S = 1e-2
"""Seconds by which a group is older than the one before it in the prefix: the end of a prefix leaves before what it builds on."""


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
        directory: created if it is missing.
        identity: 32 bytes; groups of another one are never found.
        block_bytes: bytes of one block.
        blocks_per_group: number of blocks per group, by cache kind.
        max_bytes: maximum size of all files in the directory.

    Attributes:
        salt: start of the digests.
        num_bytes: bytes of all files that this process knows of.
        num_dropped_files: number of files removed because they did not match.

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
        """Groups on disk that this model can use."""
        return len(self._known)

    def _read_salt(self) -> bytes:
        """The directory's salt; the first server draws it."""
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
                pass  # another server was quicker
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

    # --- what there is ---------------------------------------------------------------------------------------------

    def has(self, kind: int, digest: bytes) -> bool:
        """Return True if this process knows of a file; it may be gone, or be no good."""
        return (kind, digest) in self._known

    def group_bytes(self, kind: int) -> int:
        """Bytes of a group without its header."""
        return self._blocks_per_group[kind] * self._block_bytes

    def forget(self, kind: int, digest: bytes) -> None:
        """Mark a file as missing."""
        with self._lock:
            self._known.discard((kind, digest))

    def _scan(self, most: int) -> None:
        """Look at all files of the directory, whoever wrote them. Where they take more than `most` bytes, remove what was
        used least recently, and what writers have left that died."""
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
        """Directories of all models, open until `opened` is closed."""
        yield self._own
        for name in os.listdir(self._root):
            if name != self._name:
                with contextlib.suppress(OSError, ConfigError):  # a file, or not ours to look at
                    folder = _opened_directory(Path(name), self._root)
                    opened.callback(os.close, folder)
                    yield folder

    def _make_room(self, size: int) -> bool:
        """Keep the bound with one more file of this size; False: it is larger than the bound."""
        most = self._max_bytes - size
        if most < 0:
            return False
        if self.num_bytes > most or self._since_scan > _RECOUNTED * self._max_bytes:
            self._scan(most)
        return True

    # --- reading and writing ---------------------------------------------------------------------------------------

    def write(self, kind: int, digest: bytes, depth: int, group: StoredGroup) -> int:
        """Write a file and return its size in bytes; 0: it is larger than the bound and not written.

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
            if (kind, digest) not in self._known:  # else it took the place of one
                self._known.add((kind, digest))
                self.num_bytes += size
            self._since_scan += size
        return size

    def read(self, kind: int, digest: bytes, depth: int) -> StoredGroup | None:
        """Read and check a file; None: it is missing, or did not match and was removed."""
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
        """Return the fault of a header; None: there is none."""
        if len(head) != _HEADER_BYTES or head[_HEADER.size :] != _CHECKSUM.pack(zlib.crc32(head[: _HEADER.size])):
            return "its header is damaged"
        magic, version, of_kind, _, num_blocks, block_bytes, identity, of_digest, _, _ = _HEADER.unpack(
            head[: _HEADER.size]
        )
        if (magic, version) != (_MAGIC, FORMAT):
            return "it is of another version"
        if identity != self._identity or (num_blocks, block_bytes) != (self._blocks_per_group[kind], self._block_bytes):
            return "it is of another model"
        return None if (of_kind, of_digest) == (kind, digest) else "it has the name of another"

    def _refuse(self, kind: int, digest: bytes, why: str, size: int) -> None:
        logger.warning(
            "%s: a cached prefix was removed, as %s; it is computed again", self.directory / _name_of(kind, digest), why
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
    """Names and attributes of the files in an open directory."""
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
            f"{path}: must belong to this user and be nobody else's to read or write; chmod 700 it (--prefix-cache-dir)"
        )
    return descriptor


def _opened_file(name: str, folder: int) -> int:
    """Open a file of this user to read it; a link or a pipe is not followed or waited for."""
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
    """Read the rest of a file into an array. A short file is caught by its checksum."""
    left = memoryview(blocks.reshape(-1))
    while left:
        num = file.readinto(left)
        if not num:
            return
        left = left[num:]


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)

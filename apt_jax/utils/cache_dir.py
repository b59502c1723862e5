"""The cache directory, for files that can be created again: calibrations, compiled programs, compiled kernels.

A file is written under a temporary name, synced to disk and renamed. It ends with a digest of its content, so that
files damaged by a crash or by a full or faulty disk are detected, removed and created again.
"""

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_BEFORE_DIGEST = b"\nsha256 "
_DIGEST_BYTES = len(_BEFORE_DIGEST) + hashlib.sha256().digest_size * 2 + 1
_LEFT_OVER_S = 3600.0
"""Age in seconds from which a temporary file is considered left over by a process that died."""


def cache_dir() -> Path:
    """Return $APT_JAX_CACHE_DIR, else apt-jax in $XDG_CACHE_HOME, else ~/.cache/apt-jax."""
    ours, shared = os.environ.get("APT_JAX_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    if ours:
        return Path(ours)
    # The specification of XDG_CACHE_HOME declares a relative path invalid.
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "apt-jax"


@functools.cache
def _log_not_kept(directory: Path, reason: str | None) -> None:
    logger.warning("%s: cannot be written, so its files are created again at each start (%s)", directory, reason)


def log_not_kept(error: OSError) -> None:
    """Warn that the cache directory cannot be written, once per directory and reason. Serving continues with a full or
    read-only disk."""
    _log_not_kept(cache_dir(), error.strerror)


def private_dir(name: str) -> Path | None:
    """Return a directory in `cache_dir` for code that will be run; it is created if missing. None, after a warning: it
    cannot be created, or other users can write to it."""
    directory = cache_dir() / name
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(exist_ok=True, mode=0o700)
        refusal = _refusal(directory, directory.stat())
    except OSError as error:
        log_not_kept(error)
        return None
    if refusal is not None:
        logger.warning("%s: not used: %s", directory, refusal)
        return None
    return directory


def _refusal(directory: Path, status: os.stat_result) -> str | None:
    """Return the reason why other users could put code into a directory with this status; None: they cannot."""
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        return "it must belong to this user and be writeable by nobody else"
    # A user who can rename entries of the parent can replace this directory.
    above = directory.parent.stat()
    if above.st_uid not in (os.getuid(), 0):
        return f"{directory.parent} must belong to this user or to root, and be writeable by nobody else"
    if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
        return f"{directory.parent} must be writeable by nobody else, or sticky"
    return None


def write_verified(path: Path, data: bytes) -> None:
    """Write a file so that `read_verified` never returns only a part of it, even after a crash.

    Raises:
        OSError: the file cannot be written; an existing file with this name is kept.
    """
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data + _trailer(data))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        _remove(Path(name))
        raise
    with contextlib.suppress(OSError):  # some file systems cannot sync directories
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def read_verified(path: Path) -> bytes | None:
    """Return the content written by `write_verified`; None: the file is missing or damaged. A damaged file is removed,
    and the removal is logged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if not _is_whole(path, data):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # for `remove_beyond`
    return data[:-_DIGEST_BYTES]


def read_private(path: Path) -> bytes | None:
    """Return the content of a file after the checks of `open_private`; None: the file is missing or must not be run."""
    opened = _opened(path)
    if opened is None:
        return None
    os.close(opened[0])
    return opened[1][:-_DIGEST_BYTES]


def open_private(path: Path) -> int | None:
    """Open a file of code in a `private_dir` after checking the directory again, the file's owner and mode, and its
    digest. The checks apply to the opened file, even if files are renamed in between.

    Returns:
        A file descriptor, which the caller closes; None: the file is missing or must not be run.
    """
    opened = _opened(path)
    return None if opened is None else opened[0]


def _opened(path: Path) -> tuple[int, bytes] | None:
    """Return the result of `open_private` together with the file's content including its digest."""
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            refusal = _refusal(path.parent, os.fstat(directory))
            descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        finally:
            os.close(directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s: cannot be read (%s)", path, error.strerror)
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        refusal = "it must be a file of this user, writeable by nobody else"
    if refusal is not None:
        logger.warning("%s: not used: %s", path, refusal)
    elif _is_whole(path, content := _content(descriptor)):
        with contextlib.suppress(OSError):
            os.utime(descriptor)  # for `remove_least_recent`
        return descriptor, content
    os.close(descriptor)
    return None


def _content(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def remove_leftovers(directory: Path) -> None:
    """Remove temporary files of processes that died while writing."""
    for age_s, path in _by_age(directory, "*.tmp"):
        if age_s > _LEFT_OVER_S:
            _remove(path)


def remove_least_recent(directory: Path, pattern: str, keep: int) -> None:
    """Remove all files that match `pattern` except the `keep` files written or opened last."""
    for _, path in _by_age(directory, pattern)[keep:]:
        _remove(path)


def remove_beyond(directory: Path, keep_bytes: int) -> None:
    """Remove the least recently used files until the remaining files take at most `keep_bytes`."""
    total = 0
    for _, path in _by_age(directory, "*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
        if total > keep_bytes:
            _remove(path)


def _by_age(directory: Path, pattern: str) -> list[tuple[float, Path]]:
    """Return the files that match `pattern`, each with the seconds since it was written or opened, most recent
    first."""
    now_s, found = time.time(), []
    for path in directory.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            found.append((now_s - path.stat().st_mtime, path))
    return sorted(found)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _trailer(data: bytes) -> bytes:
    return _BEFORE_DIGEST + hashlib.sha256(data).hexdigest().encode() + b"\n"


def _is_whole(path: Path, data: bytes) -> bool:
    if len(data) >= _DIGEST_BYTES and data[-_DIGEST_BYTES:] == _trailer(data[:-_DIGEST_BYTES]):
        return True
    logger.warning("%s: damaged; removed, and made again", path)
    _remove(path)
    return False

"""The cache directory, for what can be made again: calibrations, compiled programs, compiled kernels."""

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """$APT_JAX_CACHE_DIR, else ~/.cache/apt-jax."""
    return Path(os.environ.get("APT_JAX_CACHE_DIR") or Path.home() / ".cache" / "apt-jax")


def private_dir(name: str) -> Path | None:
    """A directory of `cache_dir` for code that is run as it is found there, so it must be ours alone; None, and a log
    line that says why, where it cannot be."""
    parent = cache_dir()
    directory = parent / name
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(exist_ok=True, mode=0o700)
        above, status = parent.stat(), directory.stat()
    except OSError as error:
        logger.info("%s: not kept on disk (%s)", directory, error.strerror)
        return None
    # Whoever can rename entries of the parent can put a directory of another name in this one's place.
    replaceable = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or replaceable:
        logger.warning(
            "%s: not used, as it must belong to this user and be writeable by nobody else",
            directory,
        )
        return None
    return directory

"""JAX's persistent compilation cache, in files of `cache_dir`.

JAX writes entries in place: an entry truncated by a crash or a full disk stays, causes a warning at each start and is
never written again. `CompiledPrograms` therefore replaces JAX's own file cache.
"""

import dataclasses
import logging
import os
import threading
from pathlib import Path
from typing import Any

from apt_jax.utils import cache_dir

logger = logging.getLogger(__name__)

MOST_BYTES = 4 << 30
"""Maximum size of all compiled programs in bytes, over all models and versions; beyond it, the least recently used
programs are removed."""


@dataclasses.dataclass
class Lookup:
    """Outcome of JAX's cache lookup for the last program that it compiled in a thread."""

    key: str
    is_kept: bool
    """True if the cache has an entry for this key; False if compiling was too fast for JAX to keep the program."""


class CompiledPrograms:
    """Implements JAX's cache interface (`jax._src.compilation_cache_interface`); entries are compressed by JAX.

    Args:
        directory: a `private_dir`, since entries are code.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = self._path = directory  # JAX reads `_path`
        self._of_thread = threading.local()

    def _file(self, key: str) -> Path:
        return self._path / f"{key}.program"

    def get(self, key: str) -> bytes | None:
        """Return the entry; None: the program must be compiled."""
        value = cache_dir.read_private(self._file(key))
        self._of_thread.lookup = Lookup(key, is_kept=value is not None)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Store an entry; if the disk cannot be written, only log this."""
        try:
            cache_dir.write_verified(self._file(key), value)
        except OSError as error:
            cache_dir.log_not_kept(error)
        else:
            self._of_thread.lookup = Lookup(key, is_kept=True)

    def take_lookup(self) -> Lookup | None:
        """Return this thread's last lookup since the previous call; None: JAX compiled no program that can be kept."""
        found = getattr(self._of_thread, "lookup", None)
        self._of_thread.lookup = None
        return found

    def executable(self, key: str) -> bytes | None:
        """Return an entry in the format that the device's client deserialises; None: the entry is missing."""
        from jax._src import compilation_cache

        if os.path.basename(key) != key:
            return None
        kept = cache_dir.read_private(self._file(key))
        if kept is None:
            return None
        return compilation_cache.extract_executable_and_time(compilation_cache.decompress_executable(kept))[0]


_kept: CompiledPrograms | None = None


def kept_programs() -> CompiledPrograms | None:
    """Return the cache of compiled programs that `keep_programs` set; None: JAX uses another cache or no cache."""
    import jax

    if _kept is None or not jax.config.jax_enable_compilation_cache:
        return None
    return _kept if jax.config.jax_compilation_cache_dir == str(_kept.directory) else None


def keep_programs(directory: Path) -> bool:
    """Make JAX keep compiled programs in a directory, protected by digests; return False if this version of JAX does
    not support this."""
    import jax

    try:
        from jax._src import compilation_cache

        of_jax = compilation_cache.get_file_cache
    except (ImportError, AttributeError):
        logger.warning(
            "this version of JAX does not support the cache of compiled programs, so each start compiles them"
        )
        return False

    global _kept
    if _kept is None or _kept.directory != directory:
        _kept = CompiledPrograms(directory)
    kept = _kept

    def file_cache(path: str) -> tuple[Any, str] | None:
        return (kept, path) if path == str(directory) else of_jax(path)

    compilation_cache.get_file_cache = file_cache
    jax.config.update("jax_compilation_cache_dir", str(directory))
    cache_dir.remove_leftovers(directory)
    cache_dir.remove_least_recent(directory, "*-cache", 0)  # entries that JAX itself wrote, without a digest
    cache_dir.remove_beyond(directory, MOST_BYTES)
    return True

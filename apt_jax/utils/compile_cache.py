"""JAX's persistent compilation cache, in files of `cache_dir`.

JAX writes an entry in place: what a crash or a full disk leaves of one stays, is a warning at each start, and is never
written again. Its entries go through `CompiledPrograms` instead, which is put in where JAX makes its own.
"""

import logging
from pathlib import Path
from typing import Any

from apt_jax.utils import cache_dir

logger = logging.getLogger(__name__)


class CompiledPrograms:
    """Entries as JAX asks for them and hands them over, compressed (`jax._src.compilation_cache_interface`).

    Args:
        directory: a `private_dir`, since entries are code.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory  # under this name JAX looks for it

    def _file(self, key: str) -> Path:
        return self._path / f"{key}.program"

    def get(self, key: str) -> bytes | None:
        """The entry; None: compile it."""
        return cache_dir.read_verified(self._file(key))

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry, if the disk lets us."""
        try:
            cache_dir.write_verified(self._file(key), value)
        except OSError as error:
            cache_dir.log_not_kept(error)


def keep_programs(directory: Path) -> bool:
    """Have JAX keep compiled programs in a directory, verified; returns False where this JAX cannot be told to."""
    import jax

    try:
        from jax._src import compilation_cache

        of_jax = compilation_cache.get_file_cache
    except (ImportError, AttributeError):
        logger.warning("this version of JAX keeps compiled programs in another way; each start compiles them again")
        return False

    def file_cache(path: str) -> tuple[Any, str] | None:
        return (CompiledPrograms(directory), path) if path == str(directory) else of_jax(path)

    compilation_cache.get_file_cache = file_cache
    jax.config.update("jax_compilation_cache_dir", str(directory))
    cache_dir.remove_leftovers(directory)
    cache_dir.remove_least_recent(directory, "*-cache", 0)  # entries that JAX itself has written, without a digest
    return True

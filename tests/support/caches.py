"""Where tests keep what may be kept."""

from pathlib import Path

from apt_jax.utils.cache_dir import private_dir


def calibrations_apart(directory: Path) -> str:
    """A value for APT_JAX_CACHE_DIR: calibrations in `directory`, and the C++ kernels that others have compiled
    already."""
    shared = private_dir("kernels")
    directory.mkdir(exist_ok=True)
    if shared is not None:
        (directory / "kernels").symlink_to(shared)
    return str(directory)

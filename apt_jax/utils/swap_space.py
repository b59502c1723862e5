"""Number of host blocks for a value of `--swap-space`."""

from apt_jax.errors import ConfigError


def blocks_of(swap_space: float, block_bytes: int) -> int:
    """Return the number of blocks that fit in `swap_space` GiB of host memory.

    Args:
        swap_space: host memory in GiB.
        block_bytes: bytes of one block over all layers and devices.

    Raises:
        ConfigError: fewer than two blocks fit; one for keys and one for values are needed.
    """
    num_blocks = int(swap_space * 2**30) // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"swap_space={swap_space:g} GiB holds fewer than two blocks of {block_bytes:,} bytes; give more, or 0 for "
            "none (--swap-space)"
        )
    return num_blocks

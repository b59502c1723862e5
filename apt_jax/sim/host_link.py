"""Transfer times of blocks between host and device on simulated hardware."""

import dataclasses

from apt_jax.costs.hardware import Hardware
from apt_jax.costs.model import StepCosts
from apt_jax.errors import ConfigError
from apt_jax.utils.swap_space import blocks_of

_PCIE_BYTES_PER_S = {"a100": 32e9, "h100": 64e9, "h200": 64e9}
"""Bandwidth of one device in each direction: half of the 64 GB/s (PCIe 4.0 x16; A100) and 128 GB/s (PCIe 5.0 x16; H100,
H200) of NVIDIA's data sheets, which count both directions."""
_EFFICIENCY = 0.8
"""Share of the PCIe bandwidth that large copies reach (an assumption)."""


def block_bytes(hardware: Hardware, dtype_bytes: int = 2) -> int:
    """Return the size of one block in bytes, over all layers and devices; each element takes `dtype_bytes` bytes.

    Raises:
        ConfigError: the size of the model is not known.
    """
    from apt_jax.models.families.registry import PRESETS
    from apt_jax.models.loading.resolve import read_model_config

    fields = PRESETS.get(hardware.model)
    if fields is None:
        raise ConfigError(f"the block size in bytes of {hardware.model!r} is unknown; leave out --swap-space")
    config = read_model_config(fields)[1]
    return config.num_layers * hardware.block_size * config.lane * dtype_bytes


def num_host_blocks(hardware: Hardware, swap_space: float) -> int:
    """Return the number of blocks that fit in `swap_space` GiB of host memory.

    Raises:
        ConfigError: fewer than two blocks fit, or the size of the model is not known.
    """
    return blocks_of(swap_space, block_bytes(hardware))


def with_transfers(costs: StepCosts, hardware: Hardware) -> StepCosts:
    """Return the costs with transfer times, which are computed from the bandwidth between host and device if missing.

    Each device transfers its share of a block over its own link.

    Raises:
        ConfigError: the bandwidth of the link is not known.
    """
    if costs.load_per_block_s:
        return costs
    card = hardware.name.split("-")[0]
    if card not in _PCIE_BYTES_PER_S:
        raise ConfigError(
            f"the bandwidth between host and {hardware.name} is unknown; calibrate with --swap-space, or leave it out"
        )
    per_block_s = block_bytes(hardware) / hardware.num_devices / (_EFFICIENCY * _PCIE_BYTES_PER_S[card])
    return dataclasses.replace(costs, load_per_block_s=per_block_s, save_per_block_s=per_block_s)

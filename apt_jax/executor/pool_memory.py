"""Memory of the block pool: the number of blocks that fit, and the placement of its arrays."""

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from apt_jax.errors import ConfigError
from apt_jax.models import sharding as parallel
from apt_jax.models.config import ModelConfig
from apt_jax.models.layer_groups import LayerGroups
from apt_jax.models.loading.loader import free_memory_bytes

MAX_CPU_POOL_BYTES = 4 << 30
"""Maximum size in bytes of a pool in host memory if the number of blocks is not given."""


@dataclasses.dataclass(frozen=True)
class HostBlocks:
    """Shape and dtype of blocks in host memory."""

    shape: tuple[int, ...]
    """Shape of one block: (arrays of the pool, block_size, lane)."""
    dtype: Any

    @property
    def block_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def pool_dtype(dtype: Any, platform: str) -> Any:
    """Return the dtype of the pool. On CPUs JAX before 0.11 upcasts a whole bfloat16 pool at every cache write, so
    float32 is used there."""
    old = jax.__version_info__ < (0, 11)
    return jnp.float32 if old and platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16 else dtype


def rounded_down(num_blocks: int) -> int:
    """Round a number of blocks down by at most 1/64. The number is part of all program shapes and of the calibration's
    key, which must not change when free memory differs by a few bytes."""
    unit = 1 << max(0, num_blocks.bit_length() - 7)
    return num_blocks // unit * unit


class PoolMemory:
    """Memory of the pool on one device, or on all devices of a mesh.

    Args:
        config: configuration of the whole model.
        dtype: dtype of the weights.
        device: a device of this process, whose free memory is read.
        groups: groups of layers that share arrays; None: every layer has an array of its own.
        holds_keys: False if no request caches keys and values.
    """

    def __init__(
        self,
        config: ModelConfig,
        block_size: int,
        dtype: Any,
        device: Any,
        mesh: Mesh | None,
        groups: LayerGroups | None = None,
        *,
        holds_keys: bool = True,
    ) -> None:
        self._num_arrays = config.num_layers if groups is None else groups.num_arrays
        self._config, self._device, self._mesh = config, device, mesh
        self._block_shape = (block_size, config.pool_lane(kv=holds_keys))
        self._dtype = pool_dtype(dtype, device.platform)
        # Devices simulated on a CPU share its memory.
        self._num_memories = 1 if mesh is None or self._is_host else mesh.size

    @property
    def _is_host(self) -> bool:
        """True if the pool is in host memory."""
        return self._device.platform == "cpu"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all arrays of the pool and all devices."""
        return self._num_arrays * math.prod(self._block_shape) * jnp.dtype(self._dtype).itemsize

    def free_bytes(self) -> int:
        """Return the free memory of the device in bytes, or of the host if the device has no memory of its own or does
        not report it."""
        free = free_memory_bytes(self._device)
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if free is None else free

    @property
    def is_allocated_late(self) -> bool:
        """True if the pool is allocated only after the programs are compiled, because the compiler needs device memory
        for autotuning."""
        return not self._is_host

    def num_blocks_that_fit(
        self, utilization: float, *, most: int, least: int, slot_bytes: int = 0, temporary_bytes: int = 0
    ) -> int:
        """Return the number of blocks that fit in memory. If they are in host memory, or the device does not report its
        free memory, at most `most` blocks and `MAX_CPU_POOL_BYTES` bytes.

        Args:
            utilization: share of the free memory to use.
            slot_bytes: bytes of the per-slot arrays on each device.
            temporary_bytes: bytes of temporary memory of one step. Twice as much is kept free, because one step is
                dispatched while another runs.

        Raises:
            ConfigError: fewer than `least` blocks fit.
        """
        free = self.free_bytes()
        most_bytes = min(int(free * utilization), free - 2 * temporary_bytes) - slot_bytes
        budget = max(0, most_bytes) * self._num_memories
        if self._is_host or free_memory_bytes(self._device) is None:
            budget = min(budget, MAX_CPU_POOL_BYTES, most * self.block_bytes)
        blocks = budget // self.block_bytes
        if blocks != most:
            blocks = rounded_down(blocks)
        if self._mesh is not None:
            blocks = self._least(blocks, self._mesh)
        if blocks < least:
            raise self.shortage(least, free, slot_bytes, temporary_bytes)
        return blocks

    def _least(self, number: int, mesh: Mesh) -> int:
        """Return the minimum of `number` over the processes that have devices of the mesh."""
        own = np.full(1, min(number, 2**31 - 1), np.int32)
        all_said = jax.make_array_from_callback((mesh.size,), self.placed(P(parallel.AXIS)), lambda _: own)
        return int(jax.jit(jnp.min, out_shardings=self.placed(P()))(all_said))

    def shortage(self, num_blocks: int, free: int, slot_bytes: int = 0, temporary_bytes: int = 0) -> ConfigError:
        """Return the error for a pool that does not fit in memory."""
        needed = (num_blocks + 1) * self.block_bytes // self._num_memories
        others = {"two steps": 2 * temporary_bytes, "block tables and token counts": slot_bytes}
        said = " and ".join(f"{name} take {count:,}" for name, count in others.items() if count)
        steps = f", of which {said}" if said else ""
        smaller = "--max-num-batched-tokens, " * bool(temporary_bytes) + "--max-num-seqs, " * bool(slot_bytes)
        return ConfigError(
            f"the cache pool of {num_blocks} blocks takes {needed:,} bytes, but {free:,} bytes of memory are free{steps}; "
            f"lower {smaller}--num-blocks-override, --block-size or --device-memory-utilization, or choose a smaller model, "
            "--dtype or --quantization"
        )

    def placed(self, spec: P) -> Any:
        """Return where to place an array: the device without a mesh, otherwise the sharding over the mesh given by `spec`."""
        return self._device if self._mesh is None else NamedSharding(self._mesh, spec)

    def described(self, shape: tuple[int, ...], dtype: Any, spec: P | None = None) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and sharding of an array on the pool's devices, sharded by `spec`; None:
        replicated."""
        where = self.placed(spec or P())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where if self._mesh else SingleDeviceSharding(where))

    def described_pools(self, num_blocks: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the descriptions of the arrays that `new_pools` returns."""
        shape = (num_blocks + 1, *self._block_shape)
        return (self.described(shape, self._dtype, parallel.POOL_SPEC),) * self._num_arrays

    def new_pools(self, num_blocks: int) -> tuple[Array, ...]:
        """Return pools of zeros, including the reserved block."""
        shape, where = (num_blocks + 1, *self._block_shape), self.placed(parallel.POOL_SPEC)
        return tuple(jnp.zeros(shape, self._dtype, device=where) for _ in range(self._num_arrays))

    def host_blocks(self) -> HostBlocks:
        """Return the shape and dtype in host memory of one block over all arrays and devices."""
        return HostBlocks((self._num_arrays, *self._block_shape), self._dtype)

    def placed_rows(self, rows: np.ndarray) -> Array:
        """Copy contents of blocks from host memory to the devices."""
        return jax.device_put(rows, self.placed(parallel.HOST_SPEC))

    def placed_slots(self, slots: np.ndarray) -> Array:
        """Copy contents of slots from host memory to the devices."""
        return jax.device_put(slots, self.placed(parallel.HOST_SLOTS_SPEC))

    def states_shape(self, rows: int) -> tuple[int, int]:
        """Return the shape of the hidden states that a forward program returns."""
        return rows, self._config.hidden_size

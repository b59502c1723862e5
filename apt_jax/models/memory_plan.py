"""Memory that a model takes on each of several devices, computed from its configuration without allocating it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from apt_jax.config import CacheConfig
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.errors import ConfigError
from apt_jax.models import sharding as parallel
from apt_jax.models.config import ModelConfig
from apt_jax.models.layer_groups import layer_groups
from apt_jax.models.params import ModelParams, abstract_params, is_matrix, param_names
from apt_jax.utils.device_memory import MEMORY_FRACTION
from apt_jax.utils.swap_space import blocks_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the parameters."""

    name: str
    """Name in `params.param_names`, with ``*`` for the layer's number: one entry stands for all layers."""
    shape: tuple[int, ...]
    """Shape before sharding."""
    cut: str
    """Mesh axis that each axis of the array is sharded over, such as ``tensor, -, -`` (``-``: not sharded)."""
    device_bytes: int
    """Bytes on one device, over all layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a model takes on one device, and the tokens that fit in its pool and in host memory."""

    leaves: list[Leaf]
    weight_bytes: int
    pool_bytes: int
    """Bytes of the pool: `num_blocks_override` blocks or, if that is None, `device_memory_utilization` of the memory
    that weights and temporaries leave, in whole blocks."""
    num_blocks: int
    tokens: dict[str, int]
    """For each kind, the number of tokens that the pool holds if all are cached in that kind; if windowed layers keep their
    window alone (`models.layer_groups`), tokens of one request."""
    host_blocks: int
    """Blocks that fit in `swap_space` GiB of host memory, for all devices together."""
    host_tokens: dict[str, int]
    """For each kind, the number of tokens that `host_blocks` hold if all are cached in that kind."""
    step_bytes: int
    """Bytes of a step's temporaries (the widest activations, and every row's scores over the vocabulary) and of the
    arrays kept for each of `max_num_seqs` requests."""


class _NoRoomError(ConfigError):
    """The model does not fit in the devices' memory."""


def memory_plan(
    config: ModelConfig,
    dtype: Any,
    cache: CacheConfig,
    *,
    num_devices: int,
    device_bytes: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int | None = None,
    memory_fraction: float = 1.0,
    int8: bool = False,
) -> MemoryPlan:
    """Plan the memory of a model on `num_devices` devices of `device_bytes` bytes each, of which JAX uses
    `memory_fraction`.

    Args:
        max_model_len: longest context in tokens; None: the model's longest.
        int8: True if matrices are quantized to int8 after loading (`models.quantize`).

    Raises:
        ConfigError: the model cannot be sharded over the devices, or does not fit; then the message names flags that
            would help.
    """
    asked: dict[str, Any] = {
        "dtype": dtype,
        "cache": cache,
        "num_devices": num_devices,
        "device_bytes": int(device_bytes * memory_fraction),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len or config.max_position,
        "int8": int8,
    }

    def fits(**changes: Any) -> bool:
        try:
            _plan(config, **(asked | changes))
        except ConfigError:
            return False
        return True

    try:
        return _plan(config, **asked)
    except _NoRoomError as error:
        sizes = (t for t in parallel.sizes_that_fit(config) if t > num_devices)
        enough = next((t for t in sizes if fits(num_devices=t)), None)
        fewest = dataclasses.replace(cache, num_blocks_override=2)
        whole = dataclasses.replace(cache, device_memory_utilization=1.0)
        ways = {
            f"more devices (-tp {enough})": enough is not None,
            "a 16-bit --dtype": jnp.dtype(dtype).itemsize > 2 and fits(dtype="bfloat16"),
            "--quantization int8": not int8 and fits(int8=True),
            "a smaller --max-num-batched-tokens or --max-num-seqs": fits(max_num_seqs=1, max_num_batched_tokens=1),
            "a smaller --num-blocks-override": cache.num_blocks_override is not None and fits(cache=fewest),
            "a larger --device-memory-utilization": fits(cache=whole),
            f"a larger XLA_CLIENT_MEM_FRACTION than {memory_fraction:g}": memory_fraction < MEMORY_FRACTION
            and fits(device_bytes=int(device_bytes * MEMORY_FRACTION)),
        }  # fmt: skip
        helpful = [way for way, helps in ways.items() if helps]
        raise ConfigError(f"{error}; possible remedies: {', '.join(['devices with more memory', *helpful])}") from None


def _plan(
    config: ModelConfig,
    dtype: Any,
    cache: CacheConfig,
    *,
    num_devices: int,
    device_bytes: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    int8: bool,
) -> MemoryPlan:
    if int8 and config.experts is not None:
        raise ConfigError("mixtures of experts are not quantized; leave out --quantization")
    if int8 and config.latent is not None:
        raise ConfigError("latent attention is not quantized; leave out --quantization")
    parallel.check_size(config, num_devices)
    config = parallel.with_repeated_heads(config, num_devices)
    padded = -(-config.vocab_size // num_devices) * num_devices
    config = dataclasses.replace(config, vocab_size=padded)
    params = abstract_params(config, dtype)
    holds_keys, hidden = parallel.kinds_offered(config, cache, num_devices)
    by_feature = parallel.cuts_by_feature(config, cache, num_devices)
    leaves = _leaves(config, params, num_devices, by_feature=by_feature)
    if int8:
        loaded = sum(leaf.device_bytes for leaf in leaves)
        if loaded > device_bytes:
            raise _NoRoomError(
                f"the weights take {loaded / 2**30:.2f} GiB on each device ({num_devices}) before they are quantized, but JAX uses only "
                f"{device_bytes / 2**30:.2f} GiB"
            )
        kept = ("wk", "wv") if hidden else ()
        leaves = _leaves(config, params, num_devices, by_feature=by_feature, kept=kept)
    weights = sum(leaf.device_bytes for leaf in leaves)
    itemsize = jnp.dtype(dtype).itemsize
    step = 4 * max_num_seqs * config.vocab_size
    step += max_num_batched_tokens * (8 * config.hidden_size + 2 * itemsize * config.widest_ffn // num_devices)
    smallest = min(cache.block_size, config.hidden_block_size(cache.block_size)) if hidden else cache.block_size
    groups = layer_groups(config, cache, hidden=hidden, max_model_len=max_model_len)
    kv, kv_size = CacheKindSpec(name="kv", blocks_per_group=2), cache.block_size
    if groups is not None:
        kv = dataclasses.replace(kv, blocks_per_group=groups.blocks_per_group, windows=groups.windows)
        kv_size, smallest = groups.block_size, min(groups.block_size, groups.windows.block_size)
    tables = 2 if kv.windows is None else 2 + kv.windows.blocks_per_group
    # Last tokens, block tables and token counts of all slots: `StepFormat.slot_bytes`.
    step += 4 * max_num_seqs * (1 + tables * -(-max_model_len // smallest) + config.vocab_size)
    num_arrays = config.num_layers if groups is None else groups.num_arrays
    block = num_arrays * cache.block_size * config.pool_lane(kv=holds_keys) * itemsize // num_devices
    free = device_bytes - weights - step
    num_blocks = cache.num_blocks_override or int(max(0, free) * cache.device_memory_utilization) // block - 1
    least = tables if holds_keys else 1
    if (num_blocks + 1) * block > free or num_blocks < least:
        raise _NoRoomError(
            f"the weights take {weights / 2**30:.2f} GiB on each device ({num_devices}) and a step {step / 2**30:.2f} GiB: "
            f"the {device_bytes / 2**30:.2f} GiB that JAX uses do not suffice for {max(least, num_blocks)} blocks of cache as well"
        )

    def tokens(blocks: int) -> dict[str, int]:
        of_kv = {"kv": kv.tokens_in(blocks, kv_size)} if holds_keys else {}
        return of_kv | ({"hidden": blocks * config.hidden_block_size(cache.block_size)} if hidden else {})

    host_blocks = blocks_of(cache.swap_space, block * num_devices) if cache.swap_space else 0
    return MemoryPlan(
        leaves=leaves,
        weight_bytes=weights,
        pool_bytes=num_blocks * block,
        num_blocks=num_blocks,
        tokens=tokens(num_blocks),
        host_blocks=host_blocks,
        host_tokens=tokens(host_blocks),
        step_bytes=step,
    )


def _leaves(
    config: ModelConfig,
    params: ModelParams,
    num_devices: int,
    *,
    by_feature: bool,
    kept: tuple[str, ...] | None = None,
) -> list[Leaf]:
    """Return the leaves of one layer, which stands for all layers, and the leaves outside layers.

    Args:
        by_feature: see `sharding.leaf_spec`.
        kept: names of matrices that stay unquantized; all others are int8 with a float32 scale per output. None: all
            stay unquantized.
    """
    found: dict[str, Leaf] = {}
    names = jax.tree.leaves(param_names(config))
    for name, leaf in zip(names, jax.tree.leaves(params), strict=True):
        spec = parallel.leaf_spec(config, num_devices, name, by_feature=by_feature)
        shares = num_devices if parallel.AXIS in spec else 1
        count, field = math.prod(leaf.shape), name.rpartition(".")[2]
        if kept is None or not is_matrix(name) or field in kept:
            size = count * leaf.dtype.itemsize // shares
        else:
            outputs = math.prod(leaf.shape[:-1] if field in ("wq", "wk", "wv") else leaf.shape[:1])
            size = count // shares + 4 * outputs // (shares if tuple(spec)[:1] == (parallel.AXIS,) else 1)
        alike = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        if alike in found:
            size += found[alike].device_bytes
        cut = ", ".join(axis or "-" for axis in spec)
        found[alike] = Leaf(name=alike, shape=leaf.shape, cut=cut, device_bytes=size)
    return list(found.values())

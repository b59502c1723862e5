"""Tensor parallelism: one model sharded over several devices as in Megatron, and the collectives between them.

Every device runs the decoder of `apt_jax.models.decoder` on its share of the heads, of the feed-forward layer and of
the vocabulary, within one `jax.shard_map` per program. The collectives are methods of `TensorParallel`:

* a sum after attention's output product and after the feed-forward layer, because both are sharded by input;
* a sum of the token embeddings, of which every device has some rows, and a gather of the scores over the vocabulary;
* for layer inputs X, whose cache is sharded by feature so that it too takes 1/t of the memory on each of t devices:
  absorbed attention gathers the new queries, sums the scores between its two products, and sums and scatters its result
  over heads; if rotary keys must be computed from X, its features are gathered first.

If attention over layer inputs is absorbed, W_k and W_v are sharded by feature too (`cuts_by_feature`). Keys and values
of new tokens are then sums over devices, scattered over heads: this avoids a second copy of the weights, sharded by
head, of 2 D E / t elements per layer and device.

Every device computes the whole residual stream and runs the sampler.

If there are fewer key heads than devices, they are repeated: a device holds the key head of its query heads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from apt_jax.config import CacheConfig
from apt_jax.core.kinds import KindSet
from apt_jax.errors import ConfigError, counted
from apt_jax.models.checkpoint_map import split_leaf
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import ModelParams, abstract_params, param_axes, param_names
from apt_jax.ops.weights import QuantizedMatrix

AXIS = "tensor"
"""Name of the mesh axis."""
POOL_SPEC = P(None, None, AXIS)
"""Sharding of a pool (P, C, E): by lanes."""
HOST_SPEC = P(None, None, None, AXIS)
"""Sharding of the contents of blocks (n, L, C, E): by lanes."""
HOST_SLOTS_SPEC = P(None, None, AXIS)
"""Sharding of the contents of slots (n, L, values): by values."""

_CUT = frozenset({"heads", "kv_heads", "ffn", "vocab"})
"""Logical axes of parameters that are sharded; the others are replicated."""


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """Collectives of one program, to be called within `jax.shard_map` over `AXIS`."""

    size: int
    """t: number of devices."""
    config: ModelConfig
    """Configuration of the whole model; the decoder gets `own_config`."""

    @property
    def rank(self) -> Array:
        """Index of this device."""
        return lax.axis_index(AXIS)

    def own(self, x: Array, axis: int) -> Array:
        """Return this device's shard of a replicated array."""
        width = x.shape[axis] // self.size
        return lax.dynamic_slice_in_dim(x, self.rank * width, width, axis)

    def sum(self, x: Array) -> Array:
        """Return the sum over devices, on every device."""
        return lax.psum(x, AXIS)

    def scatter_sum(self, x: Array, axis: int) -> Array:
        """Return this device's shard, along an axis, of the sum over devices."""
        return lax.psum_scatter(x, AXIS, scatter_dimension=axis, tiled=True)

    def gather(self, x: Array, axis: int) -> Array:
        """Return the shards of all devices, concatenated."""
        return lax.all_gather(x, AXIS, axis=axis, tiled=True)


def sizes_that_fit(config: ModelConfig) -> list[int]:
    """Return the numbers of devices that the model can be sharded over."""
    key_heads, widths = _key_heads(config), config.ffn_sizes
    return [
        t
        for t in range(1, config.num_heads + 1)
        if config.num_heads % t == 0
        and all(k % t == 0 or t % k == 0 for k in key_heads)
        and all(f % t == 0 for f in widths)
    ]


def _key_heads(config: ModelConfig) -> list[int]:
    """Return the numbers of key heads that some layer has."""
    return sorted({config.attention_of(i).num_kv_heads for i in range(config.num_layers)})


def check_size(config: ModelConfig, size: int) -> None:
    """Raise ConfigError if the model cannot be sharded over `size` devices."""
    fit = sizes_that_fit(config)
    if size not in fit:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide this model ({config.num_heads} query heads, {' or '.join(map(str, _key_heads(config)))} key heads, "
            f"feed-forward width {', '.join(map(str, config.ffn_sizes))}); {', '.join(map(str, fit))} do (-tp)"
        )


def tensor_mesh(size: int, num_hosts: int = 1) -> Mesh:
    """Return a mesh of the first `size` devices, with equally many from each host.

    Raises:
        ConfigError: there are not enough devices.
    """
    devices = jax.devices()
    if num_hosts > 1:
        own = [[d for d in devices if d.process_index == rank] for rank in range(num_hosts)]
        each = size // num_hosts
        for rank, there in enumerate(own):
            if len(there) < each:
                raise ConfigError(
                    f"tensor_parallel_size={size} over {num_hosts} hosts needs {counted(each, 'device')} on each host, but rank {rank} has {len(there)} (-tp, --nnodes)"
                )
        return Mesh(np.array([d for there in own for d in there[:each]]), (AXIS,))
    if len(devices) < size:
        platform = devices[0].platform
        hint = f"; JAX_NUM_CPU_DEVICES={size} simulates them" if platform == "cpu" else ""
        raise ConfigError(
            f"tensor_parallel_size={size} needs {size} devices; JAX has {counted(len(devices), 'device')} ({platform}){hint} (-tp)"
        )
    return Mesh(np.array(devices[:size]), (AXIS,))


def hidden_refusal(config: ModelConfig, size: int) -> str | None:
    """Return the reason why layer inputs cannot be cached on this number of devices; None: they can."""
    if size == 1:
        return None
    if config.input_width % size:
        return f"its width of {config.input_width} cannot be divided over {size} devices"
    if config.qk_norm == "lane":
        return "its key norm spans the heads of all devices"
    return None


def kinds_offered(config: ModelConfig, cache: CacheConfig, num_devices: int) -> KindSet:
    """Return the cache kinds that requests may use. Raises ConfigError if the only kind of `cache` is not offered."""
    hidden = offers_hidden(config, cache, num_devices)
    return KindSet(kv=cache.mode != "hidden" and not (hidden and config.latent is not None), hidden=hidden)


def offers_hidden(config: ModelConfig, cache: CacheConfig, num_devices: int) -> bool:
    """True if requests may use the hidden kind. Raises ConfigError if it is the only kind of `cache` but is not
    offered."""
    refusal = config.hidden_refusal or hidden_refusal(config, num_devices)
    if cache.mode != "hidden":
        is_good = config.offers_hybrid or config.latent is not None
        return cache.mode == "hybrid" and is_good and refusal is None
    if refusal is not None:
        raise ConfigError(f"cache='hidden' is not offered for this model: {refusal}; use --cache kv")
    inputs = config.hidden_block_size(cache.block_size)
    if 2 * inputs <= cache.block_size:
        raise ConfigError(
            f"cache='hidden' saves nothing at block_size={cache.block_size}: such a block holds {inputs} of this model's "
            "layer inputs; use a larger --block-size or --cache kv"
        )
    return True


def cuts_by_feature(config: ModelConfig, cache: CacheConfig, num_devices: int) -> bool:
    """True if the devices shard W_k and W_v by feature: layer inputs can be cached, and attention over them absorbs
    both matrices. Raises ConfigError if the hidden kind is the only kind of `cache` but is not offered."""
    absorbs = cache.hidden_attention != "reproject" and config.hidden_mode == "absorb"
    return num_devices > 1 and absorbs and offers_hidden(with_repeated_heads(config, num_devices), cache, num_devices)


def with_repeated_heads(config: ModelConfig, size: int) -> ModelConfig:
    """Return the configuration with key heads repeated to one per device if the model, or some of its layers, have
    fewer."""
    return _with_key_heads(config, lambda heads: max(heads, size))


def _with_key_heads(config: ModelConfig, change: Callable[[int], int], **more: Any) -> ModelConfig:
    shape = config.global_attention
    if shape is not None:
        more["global_attention"] = dataclasses.replace(shape, num_kv_heads=change(shape.num_kv_heads))
    return dataclasses.replace(config, num_kv_heads=change(config.num_kv_heads), **more)


def own_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return the configuration of one device's shard of a model; `config` is a result of `with_repeated_heads`. The
    number of ALiBi slopes is right, but not their values, which differ between devices."""
    if size == 1:
        return config
    heads, experts = config.num_heads // size, config.experts
    if experts is not None:
        experts = dataclasses.replace(experts, size=experts.size // size, shared_size=experts.shared_size // size)
    return _with_key_heads(
        config,
        lambda key_heads: key_heads // size,
        experts=experts,
        num_heads=heads,
        ffn_size=config.ffn_size // size,
        vocab_size=-(-config.vocab_size // size),
        alibi_slopes=config.alibi_slopes[:heads],
    )


def _spec(shape: tuple[int, ...], axes: tuple[str, ...], size: int) -> P:
    """Return the partition of a leaf; an axis whose length is not divisible by `size` is not sharded."""
    return P(*(AXIS if axis in _CUT and length % size == 0 else None for length, axis in zip(shape, axes, strict=True)))


def _is_projection(name: str) -> bool:
    """True for W_k and W_v of a layer."""
    return name.rpartition(".")[2] in ("wk", "wv")


@functools.lru_cache(maxsize=8)
def _specs_by_name(config: ModelConfig, size: int, by_feature: bool) -> dict[str, P]:
    check_size(config, size)
    names = jax.tree.leaves(param_names(config))
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract_params(config, np.float32))]
    axes = jax.tree.leaves(
        param_axes(config), is_leaf=lambda x: isinstance(x, tuple) and all(isinstance(a, str) for a in x)
    )
    specs = {n: _spec(shape, axis, size) for n, shape, axis in zip(names, shapes, axes, strict=True)}
    return {n: P(None, None, AXIS) if by_feature and _is_projection(n) else spec for n, spec in specs.items()}


def leaf_spec(config: ModelConfig, size: int, name: str, *, by_feature: bool = False) -> P:
    """Return the partition of a leaf of `param_names` over the devices.

    Args:
        by_feature: result of `cuts_by_feature`.

    Raises:
        ConfigError: the model cannot be sharded.
    """
    return _specs_by_name(config, size, by_feature)[name] if size > 1 else P()


def leaf_sharding(mesh: Mesh, config: ModelConfig, name: str, *, cache: CacheConfig | None = None) -> NamedSharding:
    """Return the sharding in which a leaf of `param_names` is loaded; see `apt_jax.models.loading.loader.LeafSharding`.

    Args:
        cache: cache settings that the model is served with; None: only keys and values are cached.
    """
    by_feature = cache is not None and cuts_by_feature(config, cache, mesh.size)
    return NamedSharding(mesh, leaf_spec(config, mesh.size, name, by_feature=by_feature))


def shard_params(
    params: ModelParams, config: ModelConfig, mesh: Mesh, *, by_feature: bool, keep: bool = False
) -> tuple[ModelParams, ModelParams]:
    """Shard a model over a mesh; return it and the tree of its `PartitionSpec`s.

    Args:
        params: parameters as loaded or as `quantize_params` returns them, on any device. Leaves that are repeated or
            padded before they are sharded are deleted, unless `keep`.
        config: configuration of the loaded model.
        by_feature: result of `cuts_by_feature`.
        keep: do not delete leaves of `params`, because the caller still uses them.
    """
    size = mesh.size
    specs = _specs_by_name(with_repeated_heads(config, size), size, by_feature)

    def key_heads(name: str) -> int:
        layer = split_leaf(name)[1]
        return config.num_kv_heads if layer is None else config.attention_of(int(layer)).num_kv_heads

    def repeats(name: str) -> int:
        return max(1, size // key_heads(name))

    def put(leaf: Any, spec: P) -> Any:
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    def is_repeated(name: str) -> bool:
        of_keys = name.rpartition(".")[2] in ("wk", "bk", "wv", "bv")
        lanes = name.endswith("k_norm") and config.qk_norm == "lane"
        return (of_keys or lanes) and repeats(name) > 1

    def is_padded(name: str) -> bool:
        return name in ("embed", "head", "head_bias") and config.vocab_size % size > 0

    def placed_integers(name: str, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """Shard values like the matrix, and scales like its outputs."""
        values, scale = matrix.values, matrix.scale
        if is_repeated(name):
            heads, times = key_heads(name), repeats(name)
            by_head = values.reshape(heads, -1, values.shape[1])
            values = jnp.repeat(by_head, times, axis=0).reshape(-1, values.shape[1])
            scale = jnp.repeat(scale.reshape(heads, -1), times, axis=0).reshape(-1)
        outputs, *inputs = specs[name]
        if is_padded(name):
            outputs, more = AXIS, -values.shape[0] % size
            values, scale = jnp.pad(values, ((0, more), (0, 0))), jnp.pad(scale, (0, more))
        cut = P(outputs, AXIS if AXIS in inputs else None)
        return QuantizedMatrix(values=put(values, cut), scale=put(scale, P(outputs)))

    def placed(name: str, leaf: Any) -> Any:
        if isinstance(leaf, QuantizedMatrix):
            return placed_integers(name, leaf)
        if is_repeated(name):
            lanes = name.endswith("k_norm")
            heads = leaf.reshape(key_heads(name), -1) if lanes else leaf
            leaf = jnp.repeat(heads, repeats(name), axis=0)
            leaf = leaf.reshape(-1) if lanes else leaf
        if is_padded(name):
            rows = -leaf.shape[0] % size
            leaf = jnp.pad(leaf, ((0, rows),) + ((0, 0),) * (leaf.ndim - 1))
            return put(leaf, P(AXIS, *(None,) * (leaf.ndim - 1)))
        return put(leaf, specs[name])

    names = param_names(config)
    cut = jax.tree.map(placed, names, params)
    leaves = jax.tree.structure(names).flatten_up_to(params)
    for name, leaf in () if keep else zip(jax.tree.leaves(names), leaves, strict=True):
        if is_repeated(name) or is_padded(name):
            for array in jax.tree.leaves(leaf):
                array.delete()  # every device holds it whole
    return cut, jax.tree.map(lambda leaf: leaf.sharding.spec, cut)


def abstract_shards(
    config: ModelConfig, dtype: Any, mesh: Mesh, *, by_feature: bool
) -> tuple[ModelParams, ModelParams]:
    """Return the result of `shard_params` without arrays: shapes with their shardings, and the `PartitionSpec`s."""
    size = mesh.size
    padded = -(-config.vocab_size // size) * size
    config = dataclasses.replace(with_repeated_heads(config, size), vocab_size=padded)
    params = abstract_params(config, dtype)
    specs = jax.tree.map(functools.partial(leaf_spec, config, size, by_feature=by_feature), param_names(config))

    def placed(leaf: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, params, specs), specs

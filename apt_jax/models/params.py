"""Parameters of the decoder as a pytree, with a logical axis name for every dimension.

The abstract tree (shapes), the axes tree (names) and the tree of arrays have the same structure, so shapes and layouts
can be tested without allocating memory. `apt_jax.models.sharding` lists the logical axes that are sharded.

Matrices are stored as (outputs, inputs), as in checkpoints; CPU matrix products are fastest in this layout.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apt_jax.models.config import ModelConfig
from apt_jax.ops.weights import ExpertNorms, Experts, NormParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentParams:
    """Projections of a layer input to its latent, and to the vector that queries are computed from
    (`config.LatentConfig`)."""

    w: Any
    """(C + R, D): projections to c, before its norm, and to the shared key, before its rotation"""
    norm: NormParams
    """(C,)"""
    w_query: Any = None
    """(Q, D); None: queries are computed from the layer input"""
    query_norm: NormParams | None = None
    """(Q,)"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerParams:
    """One transformer layer. Parameters that the model does not have are None."""

    attn_norm: NormParams | None
    """Norm before attention; with "post" placement, after the residual addition that follows attention."""
    attn_out_norm: NormParams | None
    """Norm of the output of attention, before the residual."""
    wq: Any
    """(N, H, D), or (N, H, Q) with a latent of queries"""
    bq: Any
    """(N, H)"""
    wk: Any
    """(K, H, D), or (K, H, C + R) with latents: the first R lanes of every head are those of the shared key"""
    bk: Any
    wv: Any
    """(K, H, D), or (K, V, C + R) with latents, whose last R columns are zeros; None: values are the projection of
    keys"""
    bv: Any
    q_norm: Any
    """(H,) for each head, or (N * H,) over all heads"""
    k_norm: Any
    """(H,) for each head, or (K * H,) over all heads"""
    wo: Any
    """(D, N, H), or (D, N, V) with latents"""
    bo: Any
    """(D,)"""
    sinks: Any
    """(N,): score of each head in the softmax's denominator"""
    ffn_norm: NormParams | None
    ffn_out_norm: NormParams | None
    w_gate: Any
    """(F, D); with experts, gate, up and down are those of the expert that all tokens go to, or None"""
    b_gate: Any
    w_up: Any
    """(F, D)"""
    b_up: Any
    w_down: Any
    """(D, F)"""
    b_down: Any
    layer_scale: Any = None
    """(1,): factor on the layer's result, or None"""
    experts: Experts | None = None
    """Mixture of experts; None: the layer has none"""
    latent: LatentParams | None = None
    """Projections to latents; None: the model has none"""
    wqkv: Any = None
    """((N + 2K) * H, D): wq, wk and wv (if there is one) as one matrix; None: not fused. See `fuse_products`."""
    bqkv: Any = None
    """((N + 2K) * H,)"""
    w_gate_up: Any = None
    """(2F, D): w_gate and w_up as one matrix, in place of the two; None: not fused."""
    b_gate_up: Any = None
    adapters: Any = None
    """`apt_jax.models.lora.LayerAdapters`: LoRA weights for the matrices; None: no adapters"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParams:
    """Parameters of a whole model. `D'` is the width of the token embeddings (D unless the model projects them). A
    matrix may have one of the types `ops.weights.FLAT_MATRICES`, flattened to (outputs, inputs)."""

    embed: Any
    """(V, D')"""
    embed_norm: NormParams | None
    position: Any
    """(max_position + position_offset, D), or None"""
    project_in: Any
    """(D, D') or None"""
    project_out: Any
    """(D', D) or None"""
    final_norm: NormParams | None
    head: Any
    """(V, D'); None: the head is tied to `embed`"""
    head_bias: Any
    """(V,) or None"""
    layers: tuple[LayerParams, ...]

    @property
    def dtype(self) -> Any:
        """Dtype of activations and of weights that are not quantized."""
        if hasattr(self.embed, "dtype"):
            return self.embed.dtype
        norm = self.layers[0].attn_norm or self.layers[0].attn_out_norm
        assert norm is not None
        return norm.scale.dtype


def output_head(params: ModelParams) -> ModelParams:
    """Return a copy with only the parameters that compute logits from hidden states. The other arrays are left out
    because each array argument costs a call one to two microseconds."""
    return dataclasses.replace(params, layers=(), position=None, embed_norm=None, project_in=None, final_norm=None)


def _build(config: ModelConfig, leaf: Callable[[str, tuple[int, ...], tuple[str, ...]], Any]) -> ModelParams:
    d, n, v = config.hidden_size, config.num_heads, config.vocab_size
    e, inputs = config.embedding_size or d, config.input_width
    q_inputs = d if config.latent is None else config.latent.query_rank or d
    before = config.norm_placement in ("pre", "post", "sandwich")
    after = config.norm_placement in ("output", "sandwich")

    def only_if(wanted: bool, name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
        return leaf(name, shape, axes) if wanted else None

    def norm(name: str, wanted: bool = True) -> NormParams | None:
        if not wanted:
            return None
        return NormParams(
            scale=leaf(f"{name}.scale", (d,), ("embed",)),
            bias=only_if(config.norm_bias, f"{name}.bias", (d,), ("embed",)),
        )

    def latent_norm(name: str, width: int) -> NormParams:
        return NormParams(scale=leaf(f"{name}.scale", (width,), ("latent",)), bias=None)

    def latent(p: str) -> LatentParams | None:
        if config.latent is None:
            return None
        c, q = config.latent.rank, config.latent.query_rank
        return LatentParams(
            w=leaf(p + "w", (config.input_width, d), ("latent", "embed")),
            norm=latent_norm(p + "norm", c),
            w_query=None if q is None else leaf(p + "w_query", (q, d), ("latent", "embed")),
            query_norm=None if q is None else latent_norm(p + "query_norm", q),
        )

    def head_norm(name: str, heads: int, h: int, axis: str) -> Any:
        if config.qk_norm == "head":
            return leaf(name, (h,), ("head_dim",))
        return only_if(config.qk_norm == "lane", name, (heads * h,), (axis,))

    def expert_norms(p: str) -> ExpertNorms:
        found = {name: norm(f"{p}{name}_norm") for name in ("router", "before", "after", "shared")}
        return ExpertNorms(**found)  # pyright: ignore[reportArgumentType]  all are wanted

    def experts(i: int, p: str) -> Experts | None:
        e = config.experts_of(i)
        if e is None:
            return None
        inner = (e.num_experts, e.size, d)
        return Experts(
            router=leaf(p + "router", (e.num_experts, d), ("experts", "embed")),
            w_gate=leaf(p + "w_gate", inner, ("experts", "ffn", "embed")),
            w_up=leaf(p + "w_up", inner, ("experts", "ffn", "embed")),
            w_down=leaf(p + "w_down", (e.num_experts, d, e.size), ("experts", "embed", "ffn")),
            router_bias=only_if(e.bias or e.scoring == "sigmoid", p + "router_bias", (e.num_experts,), ("experts",)),
            shared_gate=only_if(e.shared_size > 0 and e.shared_gate, p + "shared_gate", (1, d), ("one", "embed")),
            b_gate=only_if(e.bias, p + "b_gate", inner[:2], ("experts", "ffn")),
            b_up=only_if(e.bias, p + "b_up", inner[:2], ("experts", "ffn")),
            b_down=only_if(e.bias, p + "b_down", (e.num_experts, d), ("experts", "embed")),
            scale=only_if(e.apart, p + "scale", (e.num_experts,), ("experts",)),
            norms=expert_norms(p) if e.apart else None,
        )

    def layer(i: int) -> LayerParams:
        p, f = f"layers.{i}.", config.dense_size(i)
        is_dense, has_bias = f > 0, f > 0 and config.ffn_bias
        shape = config.attention_of(i)
        k, h, has_values = shape.num_kv_heads, shape.head_dim, not shape.one_projection
        of_value = h if config.latent is None else config.value_dim
        return LayerParams(
            attn_norm=norm(p + "attn_norm", before),
            attn_out_norm=norm(p + "attn_out_norm", after),
            wq=leaf(p + "wq", (n, h, q_inputs), ("heads", "head_dim", "embed")),
            bq=only_if(config.qkv_bias, p + "bq", (n, h), ("heads", "head_dim")),
            wk=leaf(p + "wk", (k, h, inputs), ("kv_heads", "head_dim", "embed")),
            bk=only_if(config.qkv_bias, p + "bk", (k, h), ("kv_heads", "head_dim")),
            wv=only_if(has_values, p + "wv", (k, of_value, inputs), ("kv_heads", "head_dim", "embed")),
            bv=only_if(config.qkv_bias and has_values, p + "bv", (k, h), ("kv_heads", "head_dim")),
            q_norm=head_norm(p + "q_norm", n, h, "heads"),
            k_norm=head_norm(p + "k_norm", k, h, "kv_heads"),
            wo=leaf(p + "wo", (d, n, of_value), ("embed", "heads", "head_dim")),
            bo=only_if(config.out_bias, p + "bo", (d,), ("embed",)),
            sinks=only_if(config.attention_sinks, p + "sinks", (n,), ("heads",)),
            ffn_norm=norm(p + "ffn_norm", before),
            ffn_out_norm=norm(p + "ffn_out_norm", after),
            w_gate=only_if(is_dense and config.gated, p + "w_gate", (f, d), ("ffn", "embed")),
            b_gate=only_if(has_bias and config.gated, p + "b_gate", (f,), ("ffn",)),
            w_up=only_if(is_dense, p + "w_up", (f, d), ("ffn", "embed")),
            b_up=only_if(has_bias, p + "b_up", (f,), ("ffn",)),
            w_down=only_if(is_dense, p + "w_down", (d, f), ("embed", "ffn")),
            b_down=only_if(has_bias, p + "b_down", (d,), ("embed",)),
            layer_scale=only_if(config.layer_scale, p + "layer_scale", (1,), ("one",)),
            experts=experts(i, p + "experts."),
            latent=latent(p + "latent."),
        )

    positions = config.max_position + config.position_offset
    return ModelParams(
        embed=leaf("embed", (v, e), ("vocab", "token_embed")),
        embed_norm=norm("embed_norm", config.embedding_norm),
        position=only_if(config.position == "learned", "position", (positions, d), ("position", "embed")),
        project_in=only_if(e != d, "project_in", (d, e), ("embed", "token_embed")),
        project_out=only_if(e != d, "project_out", (e, d), ("token_embed", "embed")),
        final_norm=norm("final_norm", config.final_norm),
        head=only_if(not config.tie_embeddings, "head", (v, e), ("vocab", "token_embed")),
        head_bias=only_if(config.head_bias, "head_bias", (v,), ("vocab",)),
        layers=tuple(layer(i) for i in range(config.num_layers)),
    )  # fmt: skip


def abstract_params(config: ModelConfig, dtype: Any) -> ModelParams:
    """Return the parameters as `jax.ShapeDtypeStruct` leaves, without allocating memory."""
    return _build(config, lambda name, shape, _axes: jax.ShapeDtypeStruct(shape, leaf_dtype(name, dtype)))


def leaf_dtype(name: str, dtype: Any) -> Any:
    """Return the dtype of a leaf of `param_names` in a model of `dtype`: the biases that choose experts are float32,
    because they are large beside the differences between experts."""
    return jnp.dtype(jnp.float32 if name.endswith(".router_bias") else dtype)


def param_axes(config: ModelConfig) -> ModelParams:
    """Return the tree of logical axis names: a tuple of strings per leaf."""
    return _build(config, lambda _name, _shape, axes: axes)


def param_names(config: ModelConfig) -> ModelParams:
    """Return the tree of leaf names such as ``layers.3.wq``, for messages and checkpoints."""
    return _build(config, lambda name, _shape, _axes: name)


_MOST_ON_HOST = 1 << 28
"""Largest number of parameters that `dummy_params` generates on the host if the device is not a CPU; this takes two
seconds."""


def dummy_params(
    config: ModelConfig,
    dtype: Any,
    seed: int,
    sharding: Callable[[str], jax.sharding.Sharding | None] | None = None,
) -> ModelParams:
    """Return random weights of the model's shapes, biases included: normal with standard deviation 0.02 and mean 0, or
    mean 1 - `norm_offset` for norm scales.

    They are generated leaf by leaf with NumPy on the host, so temporaries take the memory of one leaf only, and a seed
    gives the same values on every platform. Large models are the exception: unless the device is a CPU, it generates
    their weights itself, with other values, because one host core would take minutes for OPT-13B.
    """
    num_values = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config, dtype)))
    if num_values > _MOST_ON_HOST and jax.default_backend() != "cpu":
        return _dummy_on_device(config, dtype, seed, sharding)
    rng = np.random.default_rng(seed)

    def leaf(name: str, shape: tuple[int, ...], _axes: tuple[str, ...]) -> Any:
        values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        if is_norm_scale(name):
            values += np.float32(1.0 - config.norm_offset)
        where = None if sharding is None else sharding(name)
        values = values.astype(leaf_dtype(name, dtype))
        if where is None:
            return jnp.asarray(values)
        return jax.make_array_from_callback(shape, where, values.__getitem__).block_until_ready()

    return _build(config, leaf)


def _dummy_on_device(
    config: ModelConfig, dtype: Any, seed: int, sharding: Callable[[str], jax.sharding.Sharding | None] | None
) -> ModelParams:
    """Return the weights of `dummy_params`, generated on the device by one compiled program per leaf shape and
    sharding."""
    key, count = jax.random.key(seed), iter(range(1 << 20))

    def leaf(name: str, shape: tuple[int, ...], _axes: tuple[str, ...]) -> Any:
        mean = 1.0 - config.norm_offset if is_norm_scale(name) else 0.0
        where = None if sharding is None else sharding(name)
        return _normal(jax.random.fold_in(key, next(count)), jnp.float32(mean), shape, leaf_dtype(name, dtype), where)

    return _build(config, leaf)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _normal(key: jax.Array, mean: jax.Array, shape: tuple[int, ...], dtype: Any, where: Any) -> jax.Array:
    values = (mean + 0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    return values if where is None else jax.lax.with_sharding_constraint(values, where)


def is_matrix(name: str) -> bool:
    """True if a leaf of `param_names` is a matrix that all activations are multiplied by, or the token embeddings; the
    matrices of experts are none."""
    if ".experts." in name:
        return False
    field = name.rsplit(".", 1)[-1]
    return field in ("embed", "head", "project_in", "project_out", "wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


def is_norm_scale(name: str) -> bool:
    """True if a leaf of `param_names` is the scale of a norm, of a layer's result or of experts."""
    return name.endswith(("norm.scale", "q_norm", "k_norm", "layer_scale", "experts.scale"))

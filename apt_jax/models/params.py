"""Parameters of the decoder as a pytree, with a logical axis name for every dimension.

The trio of an abstract tree (shapes), an axes tree (names) and the arrays have one structure, so that shapes and
layouts can be tested without memory. Sharding maps logical names to mesh axes in one table and changes nothing here.

Weights are stored (out, in), as checkpoints have them and as CPU matrix products like them best.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apt_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NormParams:
    """Layer norm: `(x - mean) / sqrt(var + eps) * scale + bias`."""

    scale: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerParams:
    """One transformer layer. Biases are None where the model has none."""

    attn_norm: NormParams
    wq: Any
    """(N, H, D)"""
    bq: Any
    """(N, H)"""
    wk: Any
    """(K, H, D)"""
    bk: Any
    wv: Any
    """(K, H, D)"""
    bv: Any
    wo: Any
    """(D, N, H)"""
    bo: Any
    """(D,)"""
    ffn_norm: NormParams
    w_up: Any
    """(F, D)"""
    b_up: Any
    w_down: Any
    """(D, F)"""
    b_down: Any
    wqkv: Any = None
    """((N + 2K) * H, D): a copy of wq, wk and wv as one matrix, or None. See `fuse_qkv`."""
    bqkv: Any = None
    """((N + 2K) * H,)"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParams:
    """A whole model. `D'` is the width of the token embeddings (D unless the model projects them)."""

    embed: Any
    """(V, D')"""
    position: Any
    """(max_position + position_offset, D)"""
    project_in: Any
    """(D, D') or None"""
    project_out: Any
    """(D', D) or None"""
    final_norm: NormParams | None
    head: Any
    """(V, D'); None: tied to `embed`"""
    layers: tuple[LayerParams, ...]


def _build(
    config: ModelConfig, leaf: Callable[[str, tuple[int, ...], tuple[str, ...]], Any]
) -> ModelParams:
    d, f, h = config.hidden_size, config.ffn_size, config.head_dim
    n, k, v = config.num_heads, config.num_kv_heads, config.vocab_size
    e = config.embedding_size or d

    def bias(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
        return leaf(name, shape, axes) if config.bias else None

    def norm(name: str) -> NormParams:
        return NormParams(
            scale=leaf(f"{name}.scale", (d,), ("embed",)),
            bias=leaf(f"{name}.bias", (d,), ("embed",)),
        )

    def layer(i: int) -> LayerParams:
        p = f"layers.{i}."
        return LayerParams(
            attn_norm=norm(p + "attn_norm"),
            wq=leaf(p + "wq", (n, h, d), ("heads", "head_dim", "embed")),
            bq=bias(p + "bq", (n, h), ("heads", "head_dim")),
            wk=leaf(p + "wk", (k, h, d), ("kv_heads", "head_dim", "embed")),
            bk=bias(p + "bk", (k, h), ("kv_heads", "head_dim")),
            wv=leaf(p + "wv", (k, h, d), ("kv_heads", "head_dim", "embed")),
            bv=bias(p + "bv", (k, h), ("kv_heads", "head_dim")),
            wo=leaf(p + "wo", (d, n, h), ("embed", "heads", "head_dim")),
            bo=bias(p + "bo", (d,), ("embed",)),
            ffn_norm=norm(p + "ffn_norm"),
            w_up=leaf(p + "w_up", (f, d), ("ffn", "embed")),
            b_up=bias(p + "b_up", (f,), ("ffn",)),
            w_down=leaf(p + "w_down", (d, f), ("embed", "ffn")),
            b_down=bias(p + "b_down", (d,), ("embed",)),
        )

    return ModelParams(
        embed=leaf("embed", (v, e), ("vocab", "token_embed")),
        position=leaf(
            "position", (config.max_position + config.position_offset, d), ("position", "embed")
        ),
        project_in=leaf("project_in", (d, e), ("embed", "token_embed")) if e != d else None,
        project_out=leaf("project_out", (e, d), ("token_embed", "embed")) if e != d else None,
        final_norm=norm("final_norm") if config.final_norm else None,
        head=None if config.tie_embeddings else leaf("head", (v, e), ("vocab", "token_embed")),
        layers=tuple(layer(i) for i in range(config.num_layers)),
    )


def abstract_params(config: ModelConfig, dtype: Any) -> ModelParams:
    """The tree of `jax.ShapeDtypeStruct`; allocates nothing."""
    return _build(config, lambda _name, shape, _axes: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


def param_axes(config: ModelConfig) -> ModelParams:
    """The tree of logical axis names, a tuple of strings a leaf."""
    return _build(config, lambda _name, _shape, axes: axes)


def param_names(config: ModelConfig) -> ModelParams:
    """The tree of names such as ``layers.3.wq``, for messages and checkpoints."""
    return _build(config, lambda name, _shape, _axes: name)


def dummy_params(config: ModelConfig, dtype: Any, seed: int) -> ModelParams:
    """Random weights of the right shapes: normal, std 0.02; norms near one; biases not zero.

    Made leaf by leaf with NumPy on the host, so that the largest temporary is one leaf.
    """
    rng = np.random.default_rng(seed)

    def leaf(name: str, shape: tuple[int, ...], _axes: tuple[str, ...]) -> Any:
        values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        if name.endswith("norm.scale"):
            values += 1.0
        return jnp.asarray(values).astype(dtype)

    return _build(config, leaf)


def fuse_qkv(params: ModelParams) -> ModelParams:
    """Add `wqkv` and `bqkv` to every layer: CPUs compute one wide product in less than half the time of three.

    The separate matrices stay: hidden rows need only q, and absorption needs wk and wv by themselves. The copies add a
    quarter to the layers' memory (less with grouped queries).
    """

    def fused(layer: LayerParams) -> LayerParams:
        wqkv = jnp.concatenate([w.reshape(-1, w.shape[2]) for w in (layer.wq, layer.wk, layer.wv)])
        biases = (layer.bq, layer.bk, layer.bv)
        bqkv = None if layer.bq is None else jnp.concatenate([b.reshape(-1) for b in biases])
        return dataclasses.replace(layer, wqkv=wqkv, bqkv=bqkv)

    return dataclasses.replace(params, layers=tuple(fused(layer) for layer in params.layers))

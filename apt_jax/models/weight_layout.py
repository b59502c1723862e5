"""Layouts of a model's weights that make products faster: fused projections, and tiles for CPUs."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from apt_jax.models.config import ModelConfig
from apt_jax.models.params import LayerParams, ModelParams
from apt_jax.ops.weights import (
    Experts,
    GroupedMatrix,
    IntegerTiles,
    JoinedMatrix,
    PreNormLayer,
    QuantizedMatrix,
    TiledMatrix,
    tile_integers,
)


def fuse_products(params: ModelParams, *, keep: bool) -> ModelParams:
    """Join q, k and v (if it has a matrix) of every layer into one matrix, and gate and up into another: CPUs compute one wide product in
    less than half the time of three. Integer matrices of different kinds are joined only for q, k and v, as a
    `JoinedMatrix`.

    Args:
        keep: also keep wq, wk and wv: hidden rows need only q, and absorption needs wk and wv separately. The copies
            add a quarter to the layers' memory (less with grouped queries).
    """

    def join(*leaves: Any) -> Any:
        if leaves[0] is None:
            return None
        if isinstance(leaves[0], GroupedMatrix):
            return join_groups(leaves)
        return jnp.concatenate(leaves)

    def join_heads(*leaves: Any) -> Any:
        if leaves[0] is None or isinstance(leaves[0], GroupedMatrix):
            return join(*leaves)
        return jnp.concatenate([w.reshape(-1, *w.shape[2:]) for w in leaves])

    def fused(layer: LayerParams) -> LayerParams:
        pairs = [(layer.wq, layer.bq), (layer.wk, layer.bk), (layer.wv, layer.bv)]
        matrices, biases = zip(*(pair for pair in pairs if pair[0] is not None), strict=True)
        if layer.latent is None and len({type(w) for w in matrices}) == 1:
            layer = dataclasses.replace(layer, wqkv=join_heads(*matrices), bqkv=join_heads(*biases))
            if not keep:
                layer = dataclasses.replace(layer, wq=None, wk=None, wv=None, bq=None, bk=None, bv=None)
        if layer.w_gate is None or len({getattr(w, "kind", None) for w in (layer.w_gate, layer.w_up)}) > 1:
            return layer
        biases = join(layer.b_gate, layer.b_up)
        return dataclasses.replace(
            layer,
            w_gate_up=join(layer.w_gate, layer.w_up),
            b_gate_up=biases,
            w_gate=None, w_up=None, b_gate=None, b_up=None,
        )  # fmt: skip

    return dataclasses.replace(params, layers=tuple(fused(layer) for layer in params.layers))


def join_groups(matrices: Sequence[GroupedMatrix]) -> GroupedMatrix | JoinedMatrix:
    """Join the outputs of several matrices into one matrix."""
    parts = []
    for kind, of_kind in itertools.groupby(matrices, lambda w: w.kind):
        blocks = jnp.concatenate([w.blocks for w in of_kind])
        parts.append(GroupedMatrix(blocks=blocks, kind=kind, shape=(blocks.shape[0], matrices[0].shape[-1])))
    return parts[0] if len(parts) == 1 else JoinedMatrix(parts=tuple(parts))


def map_matrices(
    params: ModelParams, change: Callable[[Any], Any], *, keep: Callable[[Any], Any] | None = None
) -> ModelParams:
    """Apply `change` to every matrix that activations are multiplied by, and to the token embeddings, each flattened to
    (outputs, inputs).

    Args:
        params: parameters as loaded, or as `fuse_products` returns them.
        keep: function to apply to wk and wv instead, in their own shape, because attention over layer inputs uses them
            separately.
    """

    def matrix(w: Any) -> Any:
        if isinstance(w, JoinedMatrix):
            return JoinedMatrix(parts=tuple(map(change, w.parts)))
        if w is None or not hasattr(w, "ndim"):
            return None if w is None else change(w)
        return change(w.reshape(-1, w.shape[-1]))

    def by_output(w: Any) -> Any:
        return matrix(w.reshape(w.shape[0], -1) if hasattr(w, "ndim") else w)

    def kept(w: Any) -> Any:
        if keep is None or w is None:
            return matrix(w)
        return keep(w)

    layers = [
        dataclasses.replace(
            layer,
            wq=matrix(layer.wq),
            wk=kept(layer.wk),
            wv=kept(layer.wv),
            wqkv=matrix(layer.wqkv),
            wo=by_output(layer.wo),
            w_gate=matrix(layer.w_gate),
            w_up=matrix(layer.w_up),
            w_gate_up=matrix(layer.w_gate_up),
            w_down=matrix(layer.w_down),
            latent=layer.latent
            and dataclasses.replace(layer.latent, w=matrix(layer.latent.w), w_query=matrix(layer.latent.w_query)),
        )
        for layer in params.layers
    ]
    return dataclasses.replace(
        params,
        embed=matrix(params.embed),
        project_in=matrix(params.project_in),
        project_out=matrix(params.project_out),
        head=matrix(params.head),
        layers=tuple(layers),
    )


def by_layers(params: ModelParams, change: Callable[[ModelParams], ModelParams]) -> ModelParams:
    """Return `change(params)`, computed one layer at a time so that temporaries take the memory of only one layer."""
    nothing = dataclasses.replace(
        params,
        **{field.name: None for field in dataclasses.fields(params) if field.name != "layers"},
        layers=(),
    )
    rest = change(dataclasses.replace(params, layers=()))
    layers = [change(dataclasses.replace(nothing, layers=(layer,))).layers[0] for layer in params.layers]
    return dataclasses.replace(rest, layers=tuple(layers))


def tile_params(params: ModelParams, *, keep: bool, integers: bool = False) -> ModelParams:
    """Tile all matrices that `map_matrices` visits; with `keep`, wk and wv are not tiled.

    Args:
        integers: lay out int8 matrices for integer products; matrices with a scale per group always get this layout.
    """

    def tiled(w: Any) -> TiledMatrix | IntegerTiles:
        if isinstance(w, GroupedMatrix) or (integers and isinstance(w, QuantizedMatrix)):
            return tile_integers(w)
        return tile_matrix(w)

    params = map_matrices(params, tiled, keep=(lambda w: w) if keep else None)
    layers = [dataclasses.replace(p, experts=p.experts and tile_experts(p.experts)) for p in params.layers]
    return dataclasses.replace(params, layers=tuple(layers))


def tile_experts(experts: Experts) -> Experts:
    """Tile the matrices of experts, with gate and up as one; widths that tiles do not divide stay as they are."""
    width, inner = experts.w_down.shape[1:]
    if width % 16 or inner % 16:
        return experts
    both = jnp.concatenate([experts.w_gate, experts.w_up], axis=1)
    biases = None
    if experts.b_gate is not None:
        biases = jnp.concatenate([experts.b_gate, experts.b_up], axis=1).astype(jnp.float32)
    return dataclasses.replace(
        experts,
        b_gate_up=biases,
        b_gate=None,
        b_up=None,
        w_gate_up=tile_matrix(both.reshape(-1, width)),
        w_down=tile_matrix(experts.w_down.reshape(-1, inner)),
        w_gate=None,
        w_up=None,
    )


def tile_matrix(w: Array | QuantizedMatrix) -> TiledMatrix:
    """Return the tiled layout of a matrix (outputs, inputs) for floating-point products; for integer products see
    `tile_integers`."""
    if isinstance(w, QuantizedMatrix):
        return TiledMatrix(values=_tiled(w.values), scale=w.scale, shape=(w.shape[0], w.shape[1]))
    return TiledMatrix(values=_tiled(w), scale=None, shape=(w.shape[0], w.shape[1]))


@jax.jit
def _tiled(w: Array) -> Array:
    outputs, inputs = w.shape
    w = jnp.pad(w, ((0, -outputs % 16), (0, -inputs % 32)))
    together = 1 if w.dtype == jnp.float32 else 2
    return w.reshape(w.shape[0] // 16, 16, w.shape[1] // 32, 32 // together, together).transpose(0, 2, 3, 1, 4)


def pre_norm_layer(p: LayerParams, config: ModelConfig) -> PreNormLayer | None:
    """Return the layer's parameters for ops that compute a whole layer; None: these ops do not support the layer (for
    example because it has adapters), or its projections are not fused."""
    is_plain = (
        config.norm_placement == "pre" and not config.parallel and config.clip_qkv is None
        and config.scale * config.head_dim**0.5 == 1.0 and config.query_growth is None
        and all(rope is None or rope.attention_factor == 1.0 for rope in (config.rope, config.local_rope))
    )  # fmt: skip
    others = (p.attn_out_norm, p.ffn_out_norm, p.q_norm, p.k_norm)
    up, bias = (p.w_gate_up, p.b_gate_up) if config.gated else (p.w_up, p.b_up)
    if not is_plain or any(n is not None for n in others) or p.wqkv is None or up is None:
        return None
    if p.attn_norm is None or p.ffn_norm is None or p.adapters is not None:
        return None
    return PreNormLayer(
        attn_norm=p.attn_norm, wqkv=p.wqkv, bqkv=p.bqkv, wo=p.wo, bo=p.bo,
        ffn_norm=p.ffn_norm, w_up=up, b_up=bias, w_down=p.w_down, b_down=p.b_down,
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, gated=config.gated,
        activation=config.activation, norm=config.norm, norm_eps=config.norm_eps, norm_offset=config.norm_offset,
    )  # fmt: skip

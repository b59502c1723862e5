"""The forward pass of whole sequences, for training: no cache, all positions at once, with gradients.

It takes parameters in the layout of `load_model` and rounds like the engine: products take the parameters' dtype and
accumulate in float32; the residual stream, norms and softmax are float32. Two things make it fast:

* Gradients are rounded to that dtype before they are multiplied. The automatic gradient of a product with a float32
  result would multiply in float32, which 16-bit matrix units cannot do.
* Attention is computed for one block of queries at a time, over only the keys up to the block's end and within the
  window. Attention weights are recomputed for the gradient instead of being kept.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from apt_jax.models.attention import grow_queries, head_norm_scale, latents, logit_modifiers
from apt_jax.models.config import ModelConfig, RopeConfig
from apt_jax.models.decoder import embed, expert_inputs, logits, mixed_biases, rotary_angles, route
from apt_jax.models.params import LayerParams, ModelParams
from apt_jax.models.step import apply_dense, apply_norm
from apt_jax.ops.calls import LogitModifiers
from apt_jax.ops.linear import activate, apply_rope, dot, experts, rms_norm_heads
from apt_jax.ops.weights import NormParams

_QUERY_BLOCK = 64
_MOST_BLOCKS = 8  # more blocks only make the program longer


@jax.custom_vjp
def _product(a: Float[Array, "*Z T I"], b: Float[Array, "*Z O I"]) -> Float[Array, "*Z T O"]:
    batch = tuple(range(a.ndim - 2))
    return dot(a, b, (a.ndim - 1, b.ndim - 1), (batch, batch))


def _product_forward(a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(a, b), (a, b)


def _product_backward(factors: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    a, b = factors
    batch, rows, last = tuple(range(a.ndim - 2)), a.ndim - 2, a.ndim - 1
    gradient = gradient.astype(a.dtype)
    of_a = dot(gradient, b, (last, rows), (batch, batch))
    of_b = dot(gradient, a, (rows, rows), (batch, batch))
    return of_a.astype(a.dtype), of_b.astype(b.dtype)


_product.defvjp(_product_forward, _product_backward)


def _dense(
    x: Float[Array, "T I"],
    w: Float[Array, "O I"],
    *,
    bias: Float[Array, " O"] | None = None,
    activation: str | None = None,
    dtype: Any = jnp.float32,
) -> Float[Array, "T O"]:
    """Compute `ops.linear.dense` for unquantized weights; its gradient is computed by `_product_backward`."""
    out = _product(x.astype(w.dtype), w)
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None, :]
    return (out if activation is None else activate(out, activation)).astype(dtype)


def _attend_block(
    q: Float[Array, "B K T G H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S V"],
    *,
    first_query: int,
    scale: float,
    rules: LogitModifiers,
) -> Float[Array, "B K T G V"]:
    """Compute attention of a block of queries; the first query is at position `first_query` of the keys. Attention
    weights are rounded to the dtype of the values."""
    rows = q.reshape(*q.shape[:2], -1, q.shape[-1])
    scores = _product(rows, k).reshape(*q.shape[:4], k.shape[2]) * scale
    if rules.softcap is not None:
        scores = rules.softcap * jnp.tanh(scores / rules.softcap)
    distance = jnp.arange(k.shape[2])[None, :] - (first_query + jnp.arange(q.shape[2]))[:, None]
    if rules.slopes is not None:
        slopes = rules.slopes.reshape(1, k.shape[1], 1, -1, 1)
        scores = scores + slopes * distance.astype(jnp.float32)[None, None, :, None]
    seen = distance <= 0
    if rules.window is not None:
        seen = seen & (distance > -rules.window)
    scores = jnp.where(seen[None, None, :, None], scores, -jnp.inf)
    if rules.sinks is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    else:
        sinks = rules.sinks.astype(jnp.float32).reshape(1, k.shape[1], 1, -1, 1)
        every = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
        weights = jax.nn.softmax(every, axis=-1)[..., :-1].astype(v.dtype)
    out = _product(weights.reshape(*rows.shape[:3], -1), v.swapaxes(2, 3))
    return out.astype(q.dtype).reshape(*q.shape[:4], -1)


def _attend(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K V"], scale: float, rules: Any
) -> Float[Array, "B T NV"]:
    """Compute causal attention of whole sequences; `rules`: the layer's `LogitModifiers`, or None."""
    batch, length, _, head_dim = q.shape
    rules = LogitModifiers() if rules is None else rules
    q = q.reshape(batch, length, k.shape[2], -1, head_dim).swapaxes(1, 2)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    size = max(_QUERY_BLOCK, -(-length // _MOST_BLOCKS))
    outs = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = 0 if rules.window is None else max(0, start - rules.window + 1)
        block = functools.partial(_attend_block, first_query=start - first, scale=scale, rules=rules)
        outs.append(jax.checkpoint(block)(q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop]))
    return jnp.concatenate(outs, axis=2).swapaxes(1, 2).reshape(batch, length, -1)


def _self_attention(
    x: Float[Array, "BT D"],
    p: LayerParams,
    cos_sin: tuple[Array, Array] | None,
    positions: Int32[Array, " BT"],
    config: ModelConfig,
    layer: int,
    length: int,
) -> Float[Array, "BT D"]:
    """Compute a layer's attention output in float32: each token attends to itself and to earlier tokens of its
    sequence, of `length` tokens."""

    def project(x: Array, w: Array, b: Array | None, norm: Array | None, *, turns: bool) -> Array:
        out = apply_dense(x, w.reshape(-1, w.shape[2]), None if b is None else b.reshape(-1), _dense)
        if config.clip_qkv is not None:
            out = jnp.clip(out, -config.clip_qkv, config.clip_qkv)
        out = out.reshape(-1, *w.shape[:2])
        if norm is not None:
            out = rms_norm_heads(out, norm, config.norm_eps)
        if turns and cos_sin is not None:
            out = apply_rope(out, *cos_sin)
        return out.astype(x.dtype).reshape(-1, length, *w.shape[:2])

    of_queries = inputs = x
    if p.latent is not None:
        assert cos_sin is not None
        of_queries, inputs = latents(x, p.latent, cos_sin, config, _dense)
    q = project(of_queries, p.wq, p.bq, head_norm_scale(p.q_norm, config), turns=True)
    k = project(inputs, p.wk, p.bk, head_norm_scale(p.k_norm, config), turns=p.latent is None)
    unit = jnp.ones(p.wk.shape[1], jnp.float32) if config.value_norm else None
    v = project(inputs, *((p.wk, p.bk) if p.wv is None else (p.wv, p.bv)), unit, turns=False)
    if config.query_growth is not None:
        q = grow_queries(q.reshape(x.shape[0], -1), positions, config.query_growth).reshape(q.shape)
    heads = _attend(q, k, v, config.scale, logit_modifiers(config, layer, sinks=p.sinks))
    return apply_dense(heads.reshape(x.shape[0], -1), p.wo.reshape(p.wo.shape[0], -1), p.bo, _dense)


def _feed_forward(
    x: Float[Array, "BT D"], h: Float[Array, "BT D"], p: LayerParams, config: ModelConfig
) -> Float[Array, "BT D"]:
    """`h` is the residual stream."""
    if p.experts is not None:
        assert config.experts is not None
        of_router, rows = expert_inputs(x, h, p.experts, config)
        ids, weights = route(of_router, p.experts, config)
        out = experts(rows, ids, weights, p.experts, config.activation, clamp=config.experts.clamp)
        if p.experts.b_down is not None:
            out = out + mixed_biases(ids, weights, p.experts.b_down)
        if p.w_down is None:
            return out
        shared, gate = _feed_forward(x, h, dataclasses.replace(p, experts=None), config), p.experts.shared_gate
        if (norms := p.experts.norms) is not None:
            return apply_norm(shared, norms.shared, config) + apply_norm(out, norms.after, config)
        return out + (shared if gate is None else jax.nn.sigmoid(_dense(x, gate)) * shared)
    if config.gated:
        gate = apply_dense(x, p.w_gate, p.b_gate, _dense, config.activation)
        up = (gate * apply_dense(x, p.w_up, p.b_up, _dense)).astype(x.dtype)
    else:
        up = apply_dense(x, p.w_up, p.b_up, _dense, config.activation, x.dtype)
    return apply_dense(up, p.w_down, p.b_down, _dense)


def _layer(
    h: Float[Array, "BT D"],
    p: LayerParams,
    cos_sin: tuple[Array, Array] | None,
    positions: Int32[Array, " BT"],
    config: ModelConfig,
    layer: int,
    length: int,
) -> Float[Array, "BT D"]:
    def normed(x: Array, norm: NormParams | None) -> Array:
        return x if norm is None else apply_norm(x, norm, config)

    dtype = p.wq.dtype

    def attention(x: Array) -> Array:
        return _self_attention(x.astype(dtype), p, cos_sin, positions, config, layer, length)

    def feed_forward(x: Array) -> Array:
        return _feed_forward(normed(x, p.ffn_norm).astype(dtype), x, p, config)

    if config.norm_placement == "post":
        h = normed(h + attention(h), p.attn_norm)
        return normed(h + _feed_forward(h.astype(dtype), h, p, config), p.ffn_norm)
    after = h + normed(attention(normed(h, p.attn_norm)), p.attn_out_norm) * config.residual_scale
    source = h if config.parallel else after
    after = after + normed(feed_forward(source), p.ffn_out_norm) * config.residual_scale
    return after if p.layer_scale is None else after * p.layer_scale.astype(jnp.float32)[None]


def _rotation(rope: RopeConfig | None, positions: Int32[Array, " BT"]) -> tuple[Array, Array] | None:
    """Return cosines and sines (BT, HALF) of the rotation of queries and keys, with `attention_factor`; None: no
    rotation."""
    angles = rotary_angles(rope, positions)
    if rope is None or angles is None:
        return None
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def training_logits(
    params: ModelParams,
    tokens: Int32[Array | np.ndarray, "B T"],
    config: ModelConfig,
    *,
    positions: Int32[Array | np.ndarray, "B T"] | None = None,
    dtype: Any = None,
    remat: bool = False,
) -> Float[Array, "B T V"]:
    """Return the scores of the next token after each position; differentiable with respect to the parameters.

    Args:
        params: parameters as `load_model` returns them, with no quantized matrices.
        tokens: token ids of sequences of equal length. Pad shorter sequences at their end, with any token: no position
            sees a later position. Leave the scores of padding out of the loss.
        positions: positions of the tokens, consecutive in each sequence; None: from 0 on.
        dtype: dtype to which the parameters are rounded first: bfloat16 with float32 parameters is mixed-precision
            training. None: no rounding.
        remat: keep only the inputs of layers for the gradient, and recompute the layers.

    Returns:
        float32 logits; row t depends on tokens [0, t] only. Ids and positions out of range are not detected.

    Raises:
        ValueError: `tokens` is not two-dimensional or has no integer dtype.
    """
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be an integer array of shape (sequences, tokens), not {tokens.dtype} of shape {list(tokens.shape)}"
        )
    if dtype is not None:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    tokens, positions = jnp.asarray(tokens).reshape(-1), jnp.asarray(positions).reshape(-1)
    ropes = [config.rope_of(i) for i in range(len(params.layers))]
    turns = {rope: _rotation(rope, positions) for rope in dict.fromkeys(ropes)}
    h = embed(params, tokens, positions, config, _dense)
    for i, p in enumerate(params.layers):
        layer = functools.partial(_layer, config=config, layer=i, length=length)
        with jax.named_scope(f"layer{i}"):
            h = (jax.checkpoint(layer) if remat else layer)(h, p, turns[ropes[i]], positions)
    if params.final_norm is not None:
        h = apply_norm(h, params.final_norm, config)
    return logits(params, h.astype(params.embed.dtype), config, _dense).reshape(batch, length, -1)


__all__ = ["training_logits"]

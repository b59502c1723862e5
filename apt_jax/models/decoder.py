"""The decoder: one functional step over the block pool, driven by `ModelConfig`, for every family.

A step works on T flat tokens: first `num_decode` rows of one token each, then the chunks of prefill rows, one after
another. The life of a token in one layer:

1. x = the layer's attention input (after the norm where the model is pre-norm): what the hidden kind caches.
2. q from x for all tokens; k and v from x for prefill tokens, and for decode rows if any of them has the KV kind.
3. Cache write: (k, v) or x, whichever the token's request caches, in one scatter into the donated pool.
4. Decode rows attend to the pool: KV, absorbed, or reprojected. Prefill chunks attend to themselves directly and to
   their cached prefix through the pool; a hidden request computes k and v on the fly and keeps only x.
5. Output projection, residual, feed-forward, residual.

Activations are in the parameters' dtype, every product accumulates in float32, the residual stream, norms and softmax
are float32. Layers are unrolled with one pool array each: a scan over stacked pools would copy the pool.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from apt_jax.config import ModelConfig
from apt_jax.models.params import LayerParams, ModelParams, NormParams
from apt_jax.pallas import AttentionOps
from apt_jax.pallas.xla import dot


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderBatch:
    """One step on the device. T flat tokens: B decode rows of one token, then the chunks of R prefill rows."""

    token_ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    """Position of each token in its request; padding tokens have 0."""
    first_slots: Int32[Array, " T"]
    """Pool slot for the token's k or x; out of range for padding, which is dropped."""
    second_slots: Int32[Array, " T"]
    """Pool slot for its v; out of range for hidden requests and padding."""
    token_hidden: Bool[Array, " T"]
    decode_tables: Int32[Array, "B 2 J"]
    decode_lens: Int32[Array, " B"]
    """Positions to attend to, the row's own included; 0 for padding rows."""
    num_kv_rows: Int32[Array, ""]
    """Decode rows [0, num_kv_rows) have the KV kind,"""
    num_decode_rows: Int32[Array, ""]
    """rows [num_kv_rows, num_decode_rows) the hidden kind."""
    prefill_tables: Int32[Array, "R 2 J"]
    prefill_offsets: Int32[Array, " R"]
    """Start of each chunk among the prefill tokens."""
    prefill_lens: Int32[Array, " R"]
    prefix_lens: Int32[Array, " R"]
    prefill_hidden: Bool[Array, " R"]
    num_prefill_rows: Int32[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What is fixed when a step is compiled."""

    num_decode: int
    """B: decode rows, padding included."""
    block_size: int
    absorb: bool
    """Hidden decode rows are absorbed (else reprojected)."""
    kinds: tuple[bool, bool]
    """Whether KV and hidden rows can occur in the step."""
    ops: AttentionOps
    """`ops.branches` says whether what no row needs is branched around on the device."""


def _dense(
    x: Float[Array, "T I"], w: Float[Array, "O I"], b: Float[Array, " O"] | None
) -> Float[Array, "T O"]:
    """`x @ w.T + b` in float32. One 16-bit row is padded to two: CPUs have a fast product, but no fast GEMV, for it."""
    rows = x.shape[0]
    if rows == 1 and w.dtype.itemsize == 2:
        x = jnp.pad(x, ((0, 1), (0, 0)))
    out = dot(x.astype(w.dtype), w, (1, 1))[:rows]
    return out if b is None else out + b.astype(jnp.float32)[None, :]


def _norm(x: Float[Array, "T D"], p: NormParams, eps: float) -> Float[Array, "T D"]:
    x = x.astype(jnp.float32)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    scaled = centred * lax.rsqrt(variance + eps)
    return scaled * p.scale.astype(jnp.float32)[None, :] + p.bias.astype(jnp.float32)[None, :]


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _hidden_decode(
    q: Array, pool: Array, batch: DecoderBatch, p: LayerParams, options: StepOptions
) -> Float[Array, "B N H"]:
    rows = (batch.num_kv_rows, batch.num_decode_rows)
    tables = batch.decode_tables[:, 0]
    if not options.absorb:
        return options.ops.decode_reprojected(
            q,
            pool,
            tables,
            batch.decode_lens,
            p.wk,
            p.bk,
            p.wv,
            p.bv,
            block_size=options.block_size,
            rows=rows,
        )
    # score = (W_k^T q) . x + q . b_k, and the softmax drops the second term; out = W_v (sum a x) + b_v as sum a = 1.
    scaled = q * jnp.asarray(q.shape[2] ** -0.5, q.dtype)
    # N times as wide as q: on GPUs its traffic counts, so it is not written in float32 first.
    product = None if options.ops.branches else q.dtype
    q_absorbed = dot(scaled, p.wk, (2, 1), ((1,), (0,)), product).transpose(1, 0, 2).astype(q.dtype)
    z = options.ops.decode_absorbed(
        q_absorbed, pool, tables, batch.decode_lens, block_size=options.block_size, rows=rows
    )
    out = dot(z.astype(p.wv.dtype), p.wv, (2, 2), ((1,), (0,))).transpose(1, 0, 2)
    if p.bv is None:
        return out
    mine = (jnp.arange(q.shape[0], dtype=jnp.int32) >= rows[0])[:, None, None]
    return out + jnp.where(mine, p.bv.astype(jnp.float32)[None], 0.0)


def _attention(
    x: Float[Array, "T D"], pool: Array, batch: DecoderBatch, p: LayerParams, options: StepOptions
) -> tuple[Float[Array, "T NH"], Array]:
    b, t = options.num_decode, x.shape[0]
    kv_rows, hidden_rows = options.kinds
    head_dim = p.wq.shape[1]
    dtype = x.dtype
    lanes = p.wk.shape[0] * head_dim
    q_width = p.wq.shape[0] * head_dim

    def project(tokens: Array, w: Array, b: Array | None) -> Array:
        out = _dense(tokens, w.reshape(-1, w.shape[-1]), None if b is None else b.reshape(-1))
        return out.astype(dtype)

    def q_alone(tokens: Array) -> tuple[Array, Array, Array]:
        nothing = jnp.zeros((tokens.shape[0], lanes), dtype)
        return project(tokens, p.wq, p.bq), nothing, nothing

    def qkv(tokens: Array) -> tuple[Array, Array, Array]:
        if p.wqkv is None:
            return (
                project(tokens, p.wq, p.bq),
                project(tokens, p.wk, p.bk),
                project(tokens, p.wv, p.bv),
            )
        out = project(tokens, p.wqkv, p.bqkv)
        return out[:, :q_width], out[:, q_width : q_width + lanes], out[:, q_width + lanes :]

    parts = []
    if b and not (kv_rows and hidden_rows and options.ops.branches):
        parts.append(qkv(x[:b]) if kv_rows else q_alone(x[:b]))
    elif b:
        parts.append(lax.cond(batch.num_kv_rows > 0, lambda: qkv(x[:b]), lambda: q_alone(x[:b])))
    if t > b:
        parts.append(qkv(x[b:]))
    q, k, v = (jnp.concatenate(pieces) for pieces in zip(*parts, strict=True))
    q = q.reshape(t, -1, head_dim)

    # What others may read stays finite by construction: 0 * NaN = NaN, so a NaN would pass the mask of a neighbour in
    # the same tile, or of a recycled block's next owner. The row that made it still fails, through its own residual.
    k, v = _finite(k), _finite(v)
    first = jnp.where(batch.token_hidden[:, None], _finite(x), k) if hidden_rows else k
    rows = jnp.concatenate([first, v]) if kv_rows else first
    slots = (
        jnp.concatenate([batch.first_slots, batch.second_slots]) if kv_rows else batch.first_slots
    )
    by_slot = pool.reshape(-1, lanes).at[slots].set(rows.astype(pool.dtype), mode="drop")
    pool = by_slot.reshape(pool.shape)

    outs = []
    if b:
        zeros = jnp.zeros((b, q.shape[1], head_dim), jnp.float32)

        def kv_attention() -> Array:
            rows = (jnp.int32(0), batch.num_kv_rows)
            return options.ops.decode_kv(
                q[:b],
                pool,
                batch.decode_tables,
                batch.decode_lens,
                block_size=options.block_size,
                rows=rows,
            )

        def hidden_attention() -> Array:
            return _hidden_decode(q[:b], pool, batch, p, options)

        if not hidden_rows:
            out = kv_attention()
        elif not kv_rows:
            out = hidden_attention()
        elif not options.ops.branches:
            out = kv_attention() + hidden_attention()
        else:
            out = kv_attention() + lax.cond(
                batch.num_decode_rows > batch.num_kv_rows, hidden_attention, lambda: zeros
            )
        outs.append(out.astype(dtype))
    if t > b:
        out = options.ops.prefill(
            q[b:],
            k[b:].reshape(t - b, -1, head_dim),
            v[b:].reshape(t - b, -1, head_dim),
            pool,
            batch.prefill_tables,
            batch.prefill_offsets,
            batch.prefill_lens,
            batch.prefix_lens,
            batch.prefill_hidden,
            batch.num_prefill_rows,
            p.wk,
            p.bk,
            p.wv,
            p.bv,
            block_size=options.block_size,
            with_hidden=hidden_rows,
        )
        outs.append(out.astype(dtype))
    return jnp.concatenate(outs).reshape(t, -1), pool


def decoder_step(
    params: ModelParams,
    pools: tuple[Array, ...],
    batch: DecoderBatch,
    config: ModelConfig,
    options: StepOptions,
) -> tuple[tuple[Array, ...], Float[Array, "T D"]]:
    """Compute all tokens of a step; returns the pools with their cache written and the last layer's output.

    Args:
        pools: one array a layer, (P, C * E). Meant to be donated: the caller rebinds them to the result.

    Returns:
        The pools, and hidden states (T, D) in the parameters' dtype, final norm applied where the model has one;
        `logits` turns rows of them into scores over the vocabulary.
    """
    dtype = params.embed.dtype
    with jax.named_scope("embed"):
        h = params.embed[batch.token_ids]
        if params.project_in is not None:
            h = _dense(h, params.project_in, None)
        h = h.astype(jnp.float32) + params.position[
            batch.positions + config.position_offset
        ].astype(jnp.float32)
    new_pools: list[Any] = []
    for i, p in enumerate(params.layers):
        with jax.named_scope(f"layer{i}/attention"):
            x = (_norm(h, p.attn_norm, config.norm_eps) if config.norm_before else h).astype(dtype)
            out, pool = _attention(x, pools[i], batch, p, options)
            new_pools.append(pool)
            h = h + _dense(out, p.wo.reshape(p.wo.shape[0], -1), p.bo)
            if not config.norm_before:
                h = _norm(h, p.attn_norm, config.norm_eps)
        with jax.named_scope(f"layer{i}/ffn"):
            x = (_norm(h, p.ffn_norm, config.norm_eps) if config.norm_before else h).astype(dtype)
            up = jax.nn.relu(_dense(x, p.w_up, p.b_up)).astype(dtype)
            h = h + _dense(up, p.w_down, p.b_down)
            if not config.norm_before:
                h = _norm(h, p.ffn_norm, config.norm_eps)
    if params.final_norm is not None:
        h = _norm(h, params.final_norm, config.norm_eps)
    return tuple(new_pools), h.astype(dtype)


def logits(params: ModelParams, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Scores over the vocabulary, float32."""
    if params.project_out is not None:
        hidden = _dense(hidden, params.project_out, None).astype(hidden.dtype)
    head = params.embed if params.head is None else params.head
    return _dense(hidden, head, None)


__all__ = ["DecoderBatch", "StepOptions", "decoder_step", "logits"]

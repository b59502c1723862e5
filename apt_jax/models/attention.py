"""Attention of one layer: project tokens to q, k and v, write their cache, and attend over the block pool.

Decode rows of the KV kind attend over keys and values. Decode rows of the hidden kind attend over cached layer inputs x
with the projections absorbed into the query and the result: score = (W_k^T q) . x + q . b_k, where the second term
cancels in the softmax, and out = W_v (sum a x) + b_v, because sum a = 1. Key lanes that are rotated or normed after
projection cannot be absorbed: they are computed from x.

In models with latent attention x is the latent (`config.LatentConfig`) in all of this.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

from apt_jax.models.config import AttentionShape, ModelConfig, QueryGrowth, RopeConfig
from apt_jax.models.lora import adapted, adapter_of
from apt_jax.models.params import LatentParams, LayerParams
from apt_jax.models.sharding import TensorParallel
from apt_jax.models.step import (
    DecoderBatch,
    Product,
    StepOptions,
    apply_dense,
    flatten_inputs,
    zero_non_finite,
)
from apt_jax.ops.calls import DecodeCall, HiddenPrefixes, KeyNorm, LogitModifiers, PrefillCall, Projection
from apt_jax.ops.linear import apply_rope, rms_norm_heads
from apt_jax.ops.low_rank import absorbed_low_rank
from apt_jax.ops.weights import KeyValueAdapters, LowRank, NormParams
from apt_jax.ops.xla_common import project_shards

_CosSin = tuple[Array, Array]
"""Cosine and sine (T, HALF) of each token's rotary angles."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Inputs of one layer's attention other than the activations and the cache pool."""

    params: LayerParams
    config: ModelConfig
    options: StepOptions
    batch: DecoderBatch
    rope: RopeConfig | None
    """Rotary embedding of this layer."""
    shape: AttentionShape
    """Key heads of this layer."""
    cos_sin: _CosSin | None
    """Cosines and sines of every token of the step; None: no rotary embedding."""
    all_angles: Float[Array, "S HALF"] | None
    """Rotary angles of every position, for keys computed from cached layer inputs; None: not needed."""
    rules: LogitModifiers | None
    rules_of_all_heads: LogitModifiers | None
    """Like `rules`, but for the heads of all devices instead of this device's heads."""

    @property
    def key_norm(self) -> KeyNorm | None:
        """Norm to apply to keys computed from cached layer inputs; None: the layer has no key norm."""
        return key_norm(self.params, self.config)


class _LayerCache(NamedTuple):
    """Place of a layer's keys and values in its pool."""

    decode_tables: Int32[Array, "B 2 J"]
    prefill_tables: Int32[Array, "R 2 J"]
    slots: tuple[Int32[Array, " T"], ...]
    """Slot of each token's key, and of its value if it is cached apart; out of range: not cached."""
    block_size: int
    """Positions in a block."""
    lane: int | None
    """E: elements of a slot; None: as many as in the pool, for two tensors."""


def _layer_cache(a: AttentionInputs) -> _LayerCache:
    """Return the place of the layer's keys and values: in two blocks, or in the first of them if they are one
    tensor."""
    batch, size, lane = a.batch, a.options.block_size, a.shape.lane
    decode, prefill = batch.decode_tables, batch.prefill_tables
    if a.shape.turned_lanes is None:
        slots = (batch.first_slots, batch.second_slots)
        return _LayerCache(decode, prefill, slots, size, None if lane == a.config.lane else lane)
    decode, prefill = (jnp.repeat(tables[:, :1], 2, axis=1) for tables in (decode, prefill))
    return _LayerCache(decode, prefill, (batch.first_slots,), size, lane)


def key_norm(params: LayerParams, config: ModelConfig) -> KeyNorm | None:
    """Return the norm that a layer applies to its keys between projection and rotation; None: it has no key norm."""
    scale = head_norm_scale(params.k_norm, config)
    return None if scale is None else KeyNorm(scale=scale, eps=config.norm_eps)


def head_norm_scale(stored: Array | None, config: ModelConfig) -> Array | None:
    """Return the scale of the query or key norm with the config's offset added. If there is an offset, the result is
    float32, because a 16-bit dtype would round it."""
    if stored is None or config.norm_offset == 0:
        return stored
    return stored.astype(jnp.float32) + config.norm_offset


def attend(a: AttentionInputs, x: Float[Array, "T D"], pool: Array) -> tuple[Float[Array, "T NV"], Array]:
    """Write the cache of all tokens of a step to the pool and compute their attention; return the attention output
    before the output projection, and the updated pool."""
    b, t, width = a.options.num_decode, x.shape[0], a.shape.row_width
    of_queries = inputs = x
    if a.params.latent is not None:
        assert a.cos_sin is not None
        of_queries, inputs = latents(x, a.params.latent, a.cos_sin, a.config, a.options.ops.dense)
    q, k, v = _project_step(a, of_queries, inputs)
    q = q.reshape(t, -1, width)
    pool = _write_cache(a, pool, inputs, k, v)
    outs = []
    if b:
        outs.append(_attend_decode(a, q[:b], pool).astype(x.dtype))
    if t > b:
        keys, values = (part[b:].reshape(t - b, -1, width) for part in (k, v))
        out = _attend_prefill(a, q[b:], keys, values, pool)
        outs.append(out.astype(x.dtype))
    width = a.shape.head_dim if a.config.latent is None else a.config.value_dim
    return jnp.concatenate([out[:, :, :width] for out in outs]).reshape(t, -1), pool


def logit_modifiers(
    config: ModelConfig, layer: int, tensor: TensorParallel | None = None, sinks: Float[Array, " N"] | None = None
) -> LogitModifiers | None:
    """Return the logit modifiers of a layer, for this device's heads if `tensor` is given; None: the layer has none.
    `sinks`: those of the layer's heads, or of this device's heads."""
    window = config.window(layer)
    if config.attention_softcap is None and not config.alibi_slopes and window is None and sinks is None:
        return None
    slopes = jnp.asarray(config.alibi_slopes, jnp.float32) if config.alibi_slopes else None
    if slopes is not None and tensor is not None:
        slopes = tensor.own(slopes, 0)
    return LogitModifiers(softcap=config.attention_softcap, slopes=slopes, window=window, sinks=sinks)


# ---- projection to q, k and v


def latents(
    x: Float[Array, "T D"], p: LatentParams, cos_sin: _CosSin, config: ModelConfig, product: Product
) -> tuple[Float[Array, "T Q"], Float[Array, "T I"]]:
    """Return the inputs of the projection to queries, and the latents [c; k_r], in the dtype of x."""
    assert config.latent is not None
    rank, eps, queries = config.latent.rank, config.latent.norm_eps, x

    def normed(out: Array, norm: NormParams) -> Array:
        return rms_norm_heads(out[:, None], norm.scale, eps)[:, 0].astype(x.dtype)

    if p.query_norm is not None:
        queries = normed(apply_dense(x, p.w_query, None, product), p.query_norm)
    out = apply_dense(x, p.w, None, product)
    key = apply_rope(out[:, None, rank:], *cos_sin)[:, 0].astype(x.dtype)
    return queries, jnp.concatenate([normed(out[:, :rank], p.norm), key], axis=1)


def _project_step(
    a: AttentionInputs, x: Float[Array, "T D"], inputs: Float[Array, "T I"]
) -> tuple[Array, Array, Array]:
    """Run `_project` on all tokens. If no decode row is of the KV kind, k and v of decode rows are zeros; backends
    without `branches` compute them anyway if `kinds` allows KV rows."""
    b, t = a.options.num_decode, x.shape[0]
    kv_rows, hidden_rows = a.options.kinds

    def project(start: int, stop: int, *, q_only: bool = False) -> tuple[Array, Array, Array]:
        cos_sin = None if a.cos_sin is None else (a.cos_sin[0][start:stop], a.cos_sin[1][start:stop])
        index = None if a.batch.adapters is None else a.batch.adapters[start:stop]
        q, k, v = _project(a, x[start:stop], inputs[start:stop], cos_sin, index, q_only=q_only)
        if a.config.query_growth is not None:
            q = grow_queries(q, a.batch.positions[start:stop], a.config.query_growth)
        return q, k, v

    parts = []
    if b and not (kv_rows and hidden_rows and a.options.ops.branches):
        parts.append(project(0, b, q_only=not kv_rows))
    elif b:
        has_kv = a.batch.num_kv_rows > 0
        parts.append(lax.cond(has_kv, lambda: project(0, b), lambda: project(0, b, q_only=True)))
    if t > b:
        parts.append(project(b, t))
    q, k, v = (jnp.concatenate(pieces) for pieces in zip(*parts, strict=True))
    return q, k, v


def _project(
    a: AttentionInputs, x: Array, inputs: Array, cos_sin: _CosSin | None, index: Array | None, *, q_only: bool = False
) -> tuple[Array, Array, Array]:
    """Return q (T, N * H), computed from x, and k and v (T, E), from `inputs`, in the dtype of x. Non-finite values of k
    and v become zero. With `q_only`, k and v are zeros. `index` is the adapter of each token. If a layer caches keys and
    values as one tensor, k and v are its rows, and q are queries for these rows, (T, N * (H + R))."""
    p, config, shape = a.params, a.config, a.shape
    lanes, q_width = shape.num_kv_heads * shape.head_dim, config.num_heads * shape.head_dim
    nothing = jnp.zeros((x.shape[0], lanes), x.dtype)

    widths = {"wq": q_width, "wk": lanes} | ({} if shape.one_projection else {"wv": lanes})

    def project(w: Any, b: Array | None, *fields: str) -> Array:
        bias = None if b is None else b.reshape(-1)
        rows = x if "wq" in fields else inputs
        out = apply_dense(rows, flatten_inputs(w, len(w.shape) - 1), bias, a.options.ops.dense)
        return adapted(out, rows, p, [(field, widths[field]) for field in fields], index, a.options.ops)

    if p.wqkv is not None and not (q_only and p.wq is not None):
        split = a.options.ops.split_qkv
        if split is not None and _only_bias_and_rope(a) and x.dtype in (jnp.float32, jnp.bfloat16):
            return split(project(p.wqkv, None, *widths), p.bqkv, cos_sin, config.head_dim, config.num_heads, x.dtype)
        out = project(p.wqkv, p.bqkv, *widths)
        q, k, v = out[:, :q_width], out[:, q_width : q_width + lanes], out[:, out.shape[1] - lanes :]
    elif q_only:
        q, k, v = project(p.wq, p.bq, "wq"), nothing, nothing
    elif a.options.cuts_by_feature:
        assert a.options.tensor is not None
        q, share = project(p.wq, p.bq, "wq"), a.options.tensor.own(inputs, 1)
        k, v = project_shards(share, p.wk, p.bk, _wide_values(a), p.bv, a.options.tensor)
    else:
        q, k = project(p.wq, p.bq, "wq"), project(p.wk, p.bk, "wk")
        v = k if shape.one_projection else project(p.wv, p.bv, "wv")
    if config.clip_qkv is not None:
        q, k, v = (jnp.clip(part, -config.clip_qkv, config.clip_qkv) for part in (q, k, v))
    if config.value_norm and not q_only:
        unit = jnp.ones((shape.head_dim,), jnp.float32)
        v = rms_norm_heads(v.reshape(v.shape[0], -1, shape.head_dim), unit, config.norm_eps).reshape(v.shape)
    if shape.turned_lanes is not None:
        q, row = _one_tensor(a, q, v, cos_sin)
        row = zero_non_finite(row.astype(x.dtype))
        return q.astype(x.dtype), row, row
    q = _norm_and_rotate(a, q, p.q_norm, cos_sin, are_queries=True)
    if config.latent is not None:
        v = v.reshape(v.shape[0], config.num_kv_heads, -1)
        v = jnp.pad(v, ((0, 0), (0, 0), (0, config.head_dim - v.shape[2]))).reshape(nothing.shape)
    k = k if q_only or config.latent is not None else _norm_and_rotate(a, k, p.k_norm, cos_sin, are_queries=False)
    return q.astype(x.dtype), zero_non_finite(k.astype(x.dtype)), zero_non_finite(v.astype(x.dtype))


def _wide_values(a: AttentionInputs) -> Array:
    """Return W_v, with zeros where a head's values are narrower than its keys."""
    wv, more = a.params.wv, a.config.head_dim - a.config.value_dim
    return jnp.pad(wv, ((0, 0), (0, more), (0, 0))) if more else wv


def _one_tensor(
    a: AttentionInputs, q: Float[Array, "T Q"], v: Float[Array, "T KH"], cos_sin: _CosSin | None
) -> tuple[Float[Array, "T NW"], Float[Array, "T E"]]:
    """Return queries and rows of a layer that caches keys and values as one tensor, with W = H + R.

    A key is `rotate(w * v)`, where w is the scale of the key norm. The row of a key head is [v; the R rotated lanes of
    the key], and a query is [w * q, with zeros in the R lanes; its R rotated lanes]: the product of the two is that of
    query and key.
    """
    shape = a.shape
    query_scale, scale = (head_norm_scale(norm, a.config) for norm in (a.params.q_norm, a.params.k_norm))
    assert cos_sin is not None
    assert scale is not None
    assert query_scale is not None
    assert shape.turned_lanes is not None
    half, r = cos_sin[0].shape[1], shape.turned_lanes // 2
    turned = jnp.concatenate([jnp.arange(r), half + jnp.arange(r)])
    cos, sin = (part[:, :r] for part in cos_sin)
    scale = scale.astype(jnp.float32)

    def rotated(heads: Float[Array, "T N H"]) -> Float[Array, "T N R"]:
        return apply_rope(heads[:, :, turned], cos, sin)

    queries = rms_norm_heads(q.reshape(q.shape[0], -1, shape.head_dim), query_scale, a.config.norm_eps)
    queries = queries * (a.config.scale * shape.row_width**0.5)
    on_values = scale.at[turned].set(0.0)[None, None]
    values = v.reshape(v.shape[0], -1, shape.head_dim)
    queries = jnp.concatenate([queries * on_values, rotated(queries)], axis=2)
    rows = jnp.concatenate([values, rotated(values * scale[None, None])], axis=2)
    return queries.reshape(q.shape[0], -1), rows.reshape(v.shape[0], -1)


def grow_queries(q: Float[Array, "T E"], positions: Int32[Array, " T"], growth: QueryGrowth) -> Array:
    """Return queries with the factor of their positions."""
    factor = 1.0 + growth.factor * jnp.log1p((positions // growth.length).astype(jnp.float32))
    return (q * factor[:, None]).astype(q.dtype)


def _only_bias_and_rope(a: AttentionInputs) -> bool:
    """True if at most a bias and a rotation are applied to q, k and v between their projection and attention."""
    config, p = a.config, a.params
    plain = config.scale * config.head_dim**0.5 == 1.0 and config.clip_qkv is None
    if a.rope is not None and a.rope.attention_factor != 1.0:
        return False
    return plain and p.q_norm is None and p.k_norm is None


def _norm_and_rotate(
    a: AttentionInputs,
    x: Float[Array, "T E"],
    norm: Array | None,
    cos_sin: _CosSin | None,
    *,
    are_queries: bool,
) -> Array:
    """Return queries or keys after norm and rotation. Queries are multiplied by all factors of the scores except 1 /
    sqrt(H), which the ops apply."""
    config, tensor, norm, head_dim = a.config, a.options.tensor, head_norm_scale(norm, a.config), a.shape.head_dim
    factor = config.scale * head_dim**0.5 if are_queries else 1.0
    if norm is None and cos_sin is None:
        return x if factor == 1.0 else x * factor
    heads = x.reshape(x.shape[0], -1, head_dim)
    if norm is not None and tensor is not None and config.qk_norm == "lane":
        square = tensor.sum(jnp.sum(x * x, axis=1, keepdims=True)) / (x.shape[1] * tensor.size)
        scaled = x * lax.rsqrt(square + config.norm_eps) * norm.astype(jnp.float32)[None]
        heads = scaled.reshape(heads.shape)
    elif norm is not None:
        heads = rms_norm_heads(heads, norm, config.norm_eps)
    if cos_sin is not None:
        heads = apply_rope(heads, *cos_sin)
    if a.rope is not None and are_queries and a.rope.attention_factor != 1.0:
        rotated = jnp.arange(head_dim) < a.rope.rotary_dim
        heads = heads * jnp.where(rotated, a.rope.attention_factor**2, 1.0)[None, None]
    return (heads if factor == 1.0 else heads * factor).reshape(x.shape)


# ---- cache writes


def _write_cache(a: AttentionInputs, pool: Array, x: Array, k: Array, v: Array) -> Array:
    """Write the cache of all tokens (k and v, or x) to the pool and return it.

    Only finite values are written. Other rows may read these values and mask them by a weight of 0, but 0 * NaN = NaN,
    so a NaN would reach rows in the same tile and the next owner of a recycled block. The row that computed a NaN still
    fails, through its own residual stream.
    """
    batch, (kv_rows, hidden_rows) = a.batch, a.options.kinds
    if a.options.tensor is not None and hidden_rows:
        x = a.options.tensor.own(x, 1)
    lanes, cache = pool.shape[2], _layer_cache(a)
    if cache.lane is not None:
        for slots, rows in zip(cache.slots, (k, v), strict=False):
            pool = _write_rows(pool, slots, rows, cache.block_size)
        return pool
    is_apart = hidden_rows and x.shape[1] != lanes
    if is_apart:
        inputs = a.options.hidden_block_size
        slots = jnp.where(batch.token_hidden, batch.first_slots, pool.shape[0] * inputs)
        pool = _write_rows(pool, slots, zero_non_finite(x), inputs)
        if not kv_rows:
            return pool
    first = k
    if not kv_rows:
        first = zero_non_finite(x)
    elif hidden_rows and not is_apart:
        first = jnp.where(batch.token_hidden[:, None], zero_non_finite(x), k)
    rows = jnp.concatenate([first, v]) if kv_rows else first
    first_slots = batch.first_slots
    if is_apart:
        first_slots = jnp.where(batch.token_hidden, pool.shape[0] * a.options.block_size, first_slots)
    slots = jnp.concatenate([first_slots, batch.second_slots]) if kv_rows else first_slots
    by_slot = pool.reshape(-1, lanes).at[slots].set(rows.astype(pool.dtype), mode="drop")
    return by_slot.reshape(pool.shape)


def _write_rows(pool: Array, slots: Int32[Array, " T"], rows: Float[Array, "T E"], block_size: int) -> Array:
    """Write rows whose width differs from that of the pool's slots. A block holds `block_size` of them, packed from its
    start."""
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    start = jnp.stack([slots // block_size, slots % block_size * rows.shape[1]], axis=1)
    by_element = pool.reshape(pool.shape[0], -1)
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(by_element, start, rows.astype(pool.dtype), dimensions, mode=drop).reshape(pool.shape)


# ---- attention


def _attend_decode(a: AttentionInputs, q: Float[Array, "B N H"], pool: Array) -> Float[Array, "B N V"]:
    """Compute attention of decode rows with the op of each row's kind; each op returns zeros for rows of the other
    kind. V is H or, after absorbed attention, the width of a head's values."""
    kv_rows, hidden_rows = a.options.kinds
    zeros = jnp.zeros(q.shape, jnp.float32)
    if not hidden_rows:
        return _attend_kv(a, q, pool)
    if not kv_rows:
        return _attend_hidden(a, q, pool)
    if not a.options.ops.branches:
        return _attend_kv(a, q, pool) + _attend_hidden(a, q, pool)
    out = _attend_kv(a, q, pool)
    has_hidden = a.batch.num_decode_rows > a.batch.num_kv_rows
    return out + lax.cond(has_hidden, lambda: _attend_hidden(a, q, pool), lambda: zeros)


def _attend_kv(a: AttentionInputs, q: Float[Array, "B N H"], pool: Array) -> Float[Array, "B N H"]:
    """Compute attention of decode rows of the KV kind; zeros for other rows."""
    batch, cache = a.batch, _layer_cache(a)
    call = DecodeCall(
        pool=pool,
        tables=cache.decode_tables,
        lens=batch.decode_lens,
        block_size=cache.block_size,
        lane=cache.lane,
        rows=(jnp.int32(0), batch.num_kv_rows),
        slot_ranges=batch.decode_ranges,
        rules=a.rules,
    )
    return a.options.ops.decode_kv(q, call)


def _hidden_call(a: AttentionInputs, pool: Array) -> DecodeCall:
    """Return the call that reads the cached layer inputs of decode rows of the hidden kind."""
    batch = a.batch
    return DecodeCall(
        pool=pool,
        tables=batch.decode_tables[:, 0],
        lens=batch.decode_lens,
        block_size=a.options.hidden_block_size,
        rows=(batch.num_kv_rows, batch.num_decode_rows),
        slot_ranges=batch.decode_ranges,
        rules=a.rules,
        tensor=a.options.tensor,
    )


def _attend_hidden(a: AttentionInputs, q: Float[Array, "B N H"], pool: Array) -> Float[Array, "B N V"]:
    """Compute attention of decode rows of the hidden kind; zeros for other rows."""
    p, options, batch, call = a.params, a.options, a.batch, _hidden_call(a, pool)
    if options.cuts_by_feature:
        assert options.tensor is not None
        return _attend_absorbed_shards(a, q, call, options.tensor)
    of_decode = None if batch.adapters is None else batch.adapters[: options.num_decode]
    if options.hidden_mode is None:
        return options.ops.decode_reprojected(q, dataclasses.replace(call, projection=_projection(a, of_decode)))
    scaled = q * jnp.asarray(q.shape[2] ** -0.5, q.dtype)
    if options.hidden_mode == "absorb":
        z = options.ops.decode_absorbed(_absorb_keys(a, scaled, p.wk, of_decode), call)
    else:
        r = q.shape[2]
        if options.hidden_mode == "partial":
            assert a.all_angles is not None
            r = 2 * a.all_angles.shape[1]
        absorbed = None if r == q.shape[2] else _absorb_keys(a, scaled[:, :, r:], p.wk[:, r:], of_decode, first_lane=r)
        call = dataclasses.replace(call, projection=_projection(a, of_decode, lanes=r))
        z = options.ops.decode_v_absorbed(scaled[:, :, :r], absorbed, call)
    out = _head_products(a, z, p.wv, onto_inputs=False)
    return _add_value_bias(a, _with_low_rank(a, out, z, adapter_of(p, "wv"), of_decode, onto_inputs=False))


def _attend_absorbed_shards(
    a: AttentionInputs, q: Float[Array, "B N H"], call: DecodeCall, tensor: TensorParallel
) -> Float[Array, "B N V"]:
    """Compute absorbed attention of this device's heads when layer inputs are sharded by feature. Each device then
    computes partial sums of the scores of all heads."""
    p = a.params
    call = dataclasses.replace(call, rules=a.rules_of_all_heads, room=a.options.hidden_room)
    every = tensor.gather(q * jnp.asarray(q.shape[2] ** -0.5, q.dtype), 1)
    z = a.options.ops.decode_absorbed(_absorb_keys(a, every, p.wk, None), call)
    return _add_value_bias(a, tensor.scatter_sum(_head_products(a, z, p.wv, onto_inputs=False), 1))


def _projection(a: AttentionInputs, index: Array | None, *, lanes: int | None = None) -> Projection:
    """Return the projection from cached layer inputs to keys and values, for rows with the adapters `index`. With
    `lanes`, it gives only the first `lanes` lanes of each key, and no values."""
    p, norm, adapters = a.params, a.key_norm, _key_adapters(a, index, lanes)
    angles = a.all_angles if a.config.latent is None else None  # the rotary lanes of a latent are rotated already
    if lanes is None:
        return Projection(
            wk=p.wk, bk=p.bk, wv=_wide_values(a), bv=p.bv, angles=angles, key_norm=norm, adapters=adapters
        )
    bias = None if p.bk is None else p.bk[:, :lanes]
    return Projection(wk=p.wk[:, :lanes], bk=bias, angles=angles, key_norm=norm, adapters=adapters)


def _attend_prefill(
    a: AttentionInputs, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pool: Array
) -> Float[Array, "T N H"]:
    """Compute attention of prompt chunks over their cached prefixes and themselves."""
    options, batch, cache = a.options, a.batch, _layer_cache(a)
    of_inputs = None
    if options.kinds[1] and options.prefix_room != 0:
        index = None
        if batch.adapters is not None:
            index = batch.adapters[options.num_decode + batch.prefill_offsets]
        of_inputs = HiddenPrefixes(
            projection=_projection(a, index),
            block_size=options.hidden_block_size,
            tensor=options.tensor,
            room=options.prefix_room,
        )
    call = PrefillCall(
        pool=pool,
        tables=cache.prefill_tables,
        offsets=batch.prefill_offsets,
        chunk_lens=batch.prefill_lens,
        prefix_lens=batch.prefix_lens,
        hidden=batch.prefill_hidden,
        num_rows=batch.num_prefill_rows,
        block_size=cache.block_size,
        lane=cache.lane,
        slot_ranges=batch.prefill_ranges,
        rules=a.rules,
        hidden_prefixes=of_inputs,
    )
    return options.ops.prefill(q, k, v, call)


# ---- absorption


def _absorb_keys(
    a: AttentionInputs,
    q: Float[Array, "B N R"],
    wk: Float[Array, "K R D"],
    index: Array | None,
    *,
    first_lane: int = 0,
) -> Float[Array, "B N D"]:
    """Return W_k^T q for every head, with the row's adapter added to W_k; `wk` has the lanes of W_k from `first_lane`
    on."""
    # The product is N times as wide as q: on GPUs its memory traffic matters, so it is not first written in float32.
    product = jnp.float32 if a.options.ops.branches else q.dtype
    out = _head_products(a, q, wk, onto_inputs=True, dtype=product)
    more = adapter_of(a.params, "wk")
    if more is not None and first_lane:
        more = more.lanes(wk.shape[0], first_lane)
    return _with_low_rank(a, out, q, more, index, onto_inputs=True).astype(q.dtype)


def _with_low_rank(
    a: AttentionInputs, out: Array, x: Array, more: LowRank | None, index: Array | None, *, onto_inputs: bool
) -> Array:
    """Add each row's LoRA term to `out`, the `_head_products` of x. Backends with `branches` skip this if no hidden row
    has an adapter."""
    if more is None or index is None:
        return out

    def added() -> Array:
        low = absorbed_low_rank(x, more, index, a.config.num_kv_heads, onto_inputs=onto_inputs)
        return (out.astype(jnp.float32) + low).astype(out.dtype)

    if not a.options.ops.branches:
        return added()
    row = jnp.arange(index.shape[0], dtype=jnp.int32)
    return lax.cond(jnp.any((index > 0) & (row >= a.batch.num_kv_rows)), added, lambda: out)


def _key_adapters(a: AttentionInputs, index: Array | None, lanes: int | None = None) -> KeyValueAdapters | None:
    """Return the adapters for keys and values computed from layer inputs; with `lanes`, only for the first lanes of
    each head's keys."""
    k, v = (adapter_of(a.params, field) for field in ("wk", "wv"))
    if index is None or (k is None and v is None):
        return None
    if k is not None and lanes is not None:
        k = k.lanes(a.config.num_kv_heads, 0, lanes)
    return KeyValueAdapters(k=k, v=v, index=index)


def _head_products(a: AttentionInputs, x: Array, w: Array, *, onto_inputs: bool, dtype: Any = jnp.float32) -> Array:
    """Compute `linear.head_products` for the hidden decode rows."""
    rows = (a.batch.num_kv_rows, a.batch.num_decode_rows)
    return a.options.ops.head_products(x, w, onto_inputs=onto_inputs, rows=rows, dtype=dtype)


def _add_value_bias(a: AttentionInputs, out: Float[Array, "B N H"]) -> Array:
    """Add the value bias to the results of absorbed attention, in hidden rows only."""
    bv = a.params.bv
    if bv is None:
        return out
    index = jnp.arange(out.shape[0], dtype=jnp.int32)
    is_hidden = (index >= a.batch.num_kv_rows)[:, None, None]
    bias = jnp.repeat(bv.astype(jnp.float32), out.shape[1] // bv.shape[0], axis=0)
    return out + jnp.where(is_hidden, bias[None], 0.0)

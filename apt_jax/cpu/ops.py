"""The kernels of `kernels.cc` as ops; `apt_jax.lab.reference` defines their results. `build.load` must be called first.

Cases that the kernels do not support (other dtypes, weights that are not laid out in tiles) are computed by XLA.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from apt_jax.cpu import build
from apt_jax.ops import linear, low_rank, sampling, xla_decode, xla_prefill
from apt_jax.ops.calls import DecodeCall, LogitModifiers, PrefillCall
from apt_jax.ops.weights import (
    Experts,
    IntegerTiles,
    JoinedMatrix,
    LowRank,
    NormParams,
    PreNormLayer,
    QuantizedMatrix,
    TiledMatrix,
    rows_of,
)

_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
_MOST_RANK = 512
_ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2, "relu": 3}


def dense(
    x: Float[Array, "T I"],
    w: Array | TiledMatrix | IntegerTiles,
    scale: Float[Array, " O"] | None = None,
    *,
    bias: Float[Array, " O"] | None = None,
    activation: str | None = None,
    dtype: Any = jnp.float32,
    live: Int32[Array, ""] | None = None,
) -> Float[Array, "T O"]:
    """See `linear.dense`. The kernel is used for matrices in tiles. With `live` it computes only the first `live` rows;
    the other rows are zeros."""
    if not isinstance(w, TiledMatrix | IntegerTiles):
        return linear.dense(x, w, scale, bias=bias, activation=activation, dtype=dtype)
    if activation not in _ACTIVATIONS or dtype not in _DTYPES:
        out = dense(x, w, bias=bias, live=live)
        return (out if activation is None else linear.activate(out, activation)).astype(dtype)
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), dtype)
    call = jax.ffi.ffi_call("apt_dense", out)
    if bias is not None and bias.dtype not in _DTYPES:
        bias = bias.astype(jnp.float32)
    return call(_live(live), *_product(x, w), _or_empty(bias), activation=np.int64(_ACTIVATIONS[activation]))


def dense_argmax(
    x: Float[Array, "T I"],
    w: Array | TiledMatrix | IntegerTiles,
    scale: Float[Array, " O"] | None = None,
    *,
    live: Int32[Array, ""] | None = None,
) -> tuple[Int32[Array, " T"], Bool[Array, " T"]]:
    """Compute `sampling.greedy(dense(x, w, scale))` without storing the products; with `live`, only for the first
    `live` rows."""
    if not isinstance(w, TiledMatrix | IntegerTiles):
        return sampling.greedy(linear.dense(x, w, scale))
    rows = (x.shape[0],)
    out = (jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.bool_))
    call = jax.ffi.ffi_call("apt_dense_argmax", out)
    tokens, trusted = call(_live(live), *_product(x, w), outputs=np.int64(w.shape[0]))
    return tokens, trusted


def _live(live: Array | None) -> Array:
    return jnp.zeros((0,), jnp.int32) if live is None else live.reshape(1)


def _product(x: Array, w: TiledMatrix | IntegerTiles) -> tuple[Array, Array, Array]:
    """Return the arguments of the kernels: rows in a dtype that they support, and values and scales of the weights."""
    if isinstance(w, TiledMatrix) and w.scale is None:
        x = x.astype(w.values.dtype)
    elif x.dtype not in _DTYPES:
        x = x.astype(jnp.float32)
    return x, w.values, _or_empty(w.scale)


def _or_empty(a: Array | None) -> Array:
    return jnp.zeros((0,), jnp.float32) if a is None else a


def gated(
    x: Float[Array, "T I"],
    w: Array | QuantizedMatrix | TiledMatrix | IntegerTiles,
    activation: str,
    *,
    live: Int32[Array, ""] | None = None,
) -> Float[Array, "T F"]:
    """Compute `activate(x @ gate.T) * (x @ up.T)` in the dtype of `x`; the rows of `w` (2 F, I) are gate, then up."""
    width = w.shape[0] // 2
    if isinstance(w, TiledMatrix | IntegerTiles) and width % 16 == 0 and activation in _ACTIVATIONS:
        x, values, scale = _product(x, w)
        call = jax.ffi.ffi_call("apt_gated", jax.ShapeDtypeStruct((x.shape[0], width), x.dtype))
        return call(_live(live), x, values, scale, activation=np.int64(_ACTIVATIONS[activation]))
    both = dense(x, w.values, w.scale) if isinstance(w, QuantizedMatrix) else dense(x, w, live=live)
    return (linear.activate(both[:, :width], activation) * both[:, width:]).astype(x.dtype)


def untile_experts(w: Experts) -> Experts:
    """Return the experts with their matrices as arrays again; see `weight_layout.tile_experts`."""
    num_experts = w.router.shape[0]
    both, down = (
        rows_of(m, jnp.arange(m.shape[0])).reshape(num_experts, -1, m.shape[1]) for m in (w.w_gate_up, w.w_down)
    )
    gate, up = jnp.split(both, 2, axis=1)
    biases = (None, None) if w.b_gate_up is None else jnp.split(w.b_gate_up, 2, axis=1)
    return dataclasses.replace(
        w, w_gate_up=None, w_gate=gate, w_up=up, w_down=down, b_gate_up=None, b_gate=biases[0], b_up=biases[1]
    )


def experts(
    x: Float[Array, "T D"],
    ids: Int32[Array, "T E"],
    weights: Float[Array, "T E"],
    w: Experts,
    activation: str,
    *,
    clamp: tuple[float, float] | None = None,
    live: Int32[Array, ""] | None = None,
) -> Float[Array, "T D"]:
    """See `linear.experts`. The kernel is used for matrices in tiles; it reads only the experts of the first `live`
    rows, and the other rows are zeros."""
    if w.w_gate_up is None:
        return linear.experts(x, ids, weights, w, activation, clamp=clamp)
    if activation not in _ACTIVATIONS:
        return linear.experts(x, ids, weights, untile_experts(w), activation, clamp=clamp)
    call = jax.ffi.ffi_call("apt_experts", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    x, up, _ = _product(x, w.w_gate_up)
    experts, (alpha, limit) = np.int64(w.router.shape[0]), clamp or (0.0, 0.0)
    return call(
        _live(live),
        x,
        ids,
        weights,
        up,
        _or_empty(w.b_gate_up),
        w.w_down.values,
        experts=experts,
        activation=np.int64(_ACTIVATIONS[activation]),
        alpha=np.float32(alpha),
        limit=np.float32(limit),
    )


def head_products(
    x: Float[Array, "B N R"],
    w: Float[Array, "K H D"],
    *,
    onto_inputs: bool,
    rows: tuple[Array, Array] | None = None,
    dtype: Any = jnp.float32,
) -> Array:
    """See `linear.head_products`. The kernel is used if the head width is even, except for bfloat16 on machines with
    matrix tiles; it computes only the rows in `rows`."""
    # XLA uses the matrix tiles, which are faster for bfloat16.
    if w.dtype not in _DTYPES or w.shape[1] % 2 or (w.dtype == jnp.bfloat16 and build.has_tiles()):
        return linear.head_products(x, w, onto_inputs=onto_inputs, rows=rows, dtype=dtype)
    width, result = (w.shape[2], w.dtype) if onto_inputs else (w.shape[1], jnp.float32)
    call = jax.ffi.ffi_call("apt_head_products", jax.ShapeDtypeStruct((*x.shape[:2], width), result))
    first, last = rows or (jnp.int32(0), jnp.int32(x.shape[0]))
    return call(x.astype(w.dtype), w, jnp.stack([first, last]), onto=np.int64(onto_inputs)).astype(dtype)


def add_norm(
    h: Float[Array, "T D"],
    delta: Float[Array, "T D"] | None,
    norm: NormParams,
    dtype: Any,
    *,
    eps: float,
    offset: float,
    layer: bool,
    live: Int32[Array, ""] | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Return `h + delta` in float32, and the norm of the sum in `dtype`."""
    out = (jax.ShapeDtypeStruct(h.shape, jnp.float32), jax.ShapeDtypeStruct(h.shape, dtype))
    total, x = jax.ffi.ffi_call("apt_add_norm", out)(
        _live(live),
        h,
        jnp.zeros((0, 0), jnp.float32) if delta is None else delta,
        norm.scale,
        _or_empty(norm.bias),
        eps=np.float32(eps),
        offset=np.float32(offset),
        layer=np.int64(layer),
    )
    return total, x


def split_qkv(
    sums: Float[Array, "T E"],
    bias: Float[Array, " E"] | None,
    turns: tuple[Array, Array] | None,
    head_dim: int,
    num_heads: int,
    dtype: Any,
    *,
    live: Int32[Array, ""] | None = None,
) -> tuple[Float[Array, "T Q"], Float[Array, "T KH"], Float[Array, "T KH"]]:
    """Split one product into q, k and v, with flattened heads, in `dtype`. The bias is added, and q and k are rotated;
    non-finite values of k and v become zero."""
    rows, queries = sums.shape[0], num_heads * head_dim
    keys = (sums.shape[1] - queries) // 2
    out = tuple(jax.ShapeDtypeStruct((rows, width), dtype) for width in (queries, keys, keys))
    no_turns = jnp.zeros((0, 0), jnp.float32)
    q, k, v = jax.ffi.ffi_call("apt_split_qkv", out)(
        _live(live), sums, _or_empty(bias), *(turns or (no_turns, no_turns)), head_dim=np.int64(head_dim)
    )
    return q, k, v


def add_low_rank(
    y: Float[Array, "T O"],
    x: Float[Array, "T I"],
    parts: Sequence[tuple[LowRank | None, int]],
    index: Int32[Array, " T"],
) -> Float[Array, "T O"]:
    """See `low_rank.add_low_rank`. Rows with the same adapter are computed together; rows without an adapter cost
    nothing."""
    given = [part for part, _ in parts if part is not None]
    dtype = given[0].a.dtype
    if len(parts) > 3 or dtype not in _DTYPES or given[0].a.shape[1] > _MOST_RANK:
        return low_rank.add_low_rank(y, x, parts, index)
    nothing = jnp.zeros((0,), dtype)
    filled = [*parts, *[(None, 0)] * (3 - len(parts))]
    matrices = [m for part, _ in filled for m in ((nothing, nothing) if part is None else (part.a, part.b))]
    widths = {f"width{i}": np.int64(width) for i, (_, width) in enumerate(filled)}
    call = jax.ffi.ffi_call("apt_add_low_rank", jax.ShapeDtypeStruct(y.shape, jnp.float32), input_output_aliases={2: 0})
    return call(index, x.astype(dtype), y.astype(jnp.float32), *matrices, **widths)


def decode_kv(q: Float[Array, "B N H"], call: DecodeCall) -> Float[Array, "B N H"]:
    """See `reference.decode_kv`; rows outside the call's row range give zeros and cost nothing."""
    if call.pool.dtype not in _DTYPES:
        return xla_decode.decode_kv(q, call)
    return _decode("apt_decode_kv", jnp.float32, q, call)


def decode_absorbed(q_absorbed: Float[Array, "B N D"], call: DecodeCall) -> Float[Array, "B N D"]:
    """See `reference.decode_absorbed`."""
    if call.pool.dtype not in _DTYPES:
        return xla_decode.decode_absorbed(q_absorbed, call)
    return _decode("apt_decode_absorbed", call.pool.dtype, q_absorbed, call)


def _decode(target: str, dtype: Any, q: Array, call: DecodeCall) -> Array:
    call = call.by_row()
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(q.shape, dtype))(
        q.astype(call.pool.dtype),
        call.pool,
        call.tables,
        call.lens,
        jnp.stack(call.row_range()),
        *_optional(call.slot_ranges, call.rules),
        **_attributes(call.block_size, call.rules),
        lanes=np.int64(call.width),
    )


def _optional(slot_ranges: Array | None, rules: LogitModifiers | None) -> tuple[Array, Array, Array]:
    """Return slot ranges, ALiBi slopes and sinks, with empty arrays for None."""
    return jnp.zeros((0, 0, 2), jnp.int32) if slot_ranges is None else slot_ranges, *_of_heads(rules)


def _of_heads(rules: LogitModifiers | None) -> tuple[Array, Array]:
    """Return ALiBi slopes and sinks in float32, with empty arrays for None."""
    slopes, sinks = (None, None) if rules is None else (rules.slopes, rules.sinks)
    return _or_empty(slopes).astype(jnp.float32), _or_empty(sinks).astype(jnp.float32)


def _attributes(block_size: int, rules: LogitModifiers | None) -> dict[str, Any]:
    rules = rules or LogitModifiers()
    return {
        "block_size": np.int64(block_size),
        "softcap": np.float32(rules.softcap or 0.0),
        "window": np.int64(rules.window or 0),
    }


def prefill(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], call: PrefillCall
) -> Float[Array, "T N H"]:
    """See `reference.prefill`. If a row has a hidden prefix, XLA computes all rows; otherwise the kernel does."""

    def of_xla() -> Array:
        return xla_prefill.prefill(q, k, v, call)

    def ours() -> Array:
        return jax.ffi.ffi_call("apt_prefill", jax.ShapeDtypeStruct(q.shape, q.dtype))(
            q,
            k,
            v,
            call.pool,
            call.tables,
            jnp.stack([call.offsets, call.chunk_lens, call.prefix_lens]),
            call.num_rows.reshape(1),
            *_optional(call.slot_ranges, call.rules),
            **_attributes(call.block_size, call.rules),
        )

    if not (q.dtype == k.dtype == call.pool.dtype) or q.dtype not in _DTYPES or q.shape[2] % 2:
        return of_xla()
    if call.hidden_prefixes is None:
        return ours()
    live = jnp.arange(call.hidden.shape[0]) < call.num_rows
    return lax.cond(jnp.any(call.hidden & (call.prefix_lens > 0) & live), of_xla, ours)


def _are_tiles(matrices: tuple[Any, ...]) -> bool:
    """Return True if all matrices are in tiles of the same type and dtype."""
    tiled = any(all(isinstance(w, kind) for w in matrices) for kind in (TiledMatrix, IntegerTiles))
    return tiled and len({w.values.dtype for w in matrices}) == 1


def takes_layer(layer: PreNormLayer, dtype: Any, pool_dtype: Any) -> bool:
    """Return True if `decode_layer` supports the layer for rows in `dtype` and a pool in `pool_dtype`. Among other
    conditions, the two dtypes must be equal, and all weights must be in tiles of the same type and dtype."""
    if dtype != pool_dtype:
        return False
    first, *more = layer.wqkv.parts if isinstance(layer.wqkv, JoinedMatrix) else (layer.wqkv,)
    if len(more) > 1:
        return False
    matrices = (first, *more, layer.wo, layer.w_up, layer.w_down)
    offered = dtype == jnp.float32 or (dtype == jnp.bfloat16 and not build.has_tiles())
    if not (offered and layer.activation in _ACTIVATIONS and _are_tiles(matrices)):
        return False
    if layer.gated and layer.b_up is not None:
        return False
    sizes = (layer.wo.shape[0], layer.num_heads * layer.head_dim, layer.w_down.shape[1])
    return all(n % 16 == 0 for n in sizes)


def decode_layer(
    h: Float[Array, "B D"],
    pool: Float[Array, "P C E"],
    layer: PreNormLayer,
    *,
    tables: Int32[Array, "B 2 J"],
    lens: Int32[Array, " B"],
    slots: tuple[Int32[Array, " B"], Int32[Array, " B"]],
    live: Int32[Array, ""],
    cos_sin: tuple[Array, Array] | None,
    rules: LogitModifiers | None,
    block_size: int,
) -> tuple[Float[Array, "B D"], Float[Array, "P C E"]]:
    """Compute a layer for decode rows of the KV kind in one call; return the residual stream after the layer, and the
    pool with the rows' new keys and values. `takes_layer` must be True for the layer.

    Args:
        h: residual stream before the layer, float32.
        slots: slots in the pool for the rows' keys, and for their values.
        live: number of rows to compute; later rows keep their `h`.
    """
    dtype = pool.dtype

    def given(a: Array | None) -> Array:
        return jnp.zeros((0,), dtype) if a is None else a.reshape(-1).astype(dtype)

    def norm(n: NormParams) -> tuple[Array, Array]:
        return given(n.scale), given(n.bias)

    def matrix(w: TiledMatrix | IntegerTiles) -> tuple[Array, Array]:
        return w.values, _or_empty(w.scale)

    no_turns = jnp.zeros((0, 0), jnp.float32)
    rules = rules or LogitModifiers()
    first, *more = layer.wqkv.parts if isinstance(layer.wqkv, JoinedMatrix) else (layer.wqkv,)
    out = (jax.ShapeDtypeStruct(h.shape, h.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype))
    h, pool = jax.ffi.ffi_call("apt_decode_layer", out, input_output_aliases={1: 0, 2: 1})(
        _live(live), h, pool, tables, lens, *slots, *(cos_sin or (no_turns, no_turns)), *_of_heads(rules),
        *norm(layer.attn_norm), *matrix(first), more[0].values if more else given(None), given(layer.bqkv),
        *matrix(layer.wo), given(layer.bo),
        *norm(layer.ffn_norm), *matrix(layer.w_up), given(layer.b_up), *matrix(layer.w_down), given(layer.b_down),
        heads=np.int64(layer.num_heads), key_heads=np.int64(layer.num_kv_heads), head_dim=np.int64(layer.head_dim),
        ffn=np.int64(layer.w_down.shape[1]), first_outputs=np.int64(first.shape[0]), eps=np.float32(layer.norm_eps), offset=np.float32(layer.norm_offset),
        layer_norm=np.int64(layer.norm == "layer"), gated=np.int64(layer.gated),
        activation=np.int64(_ACTIVATIONS[layer.activation]), **_attributes(block_size, rules),
    )  # fmt: skip
    return h, pool

"""The kernels of `kernels.cc` as ops; contracts: `apt_jax.ops.reference`. `build.load` must have been called.

What they do not do (other dtypes, products of many rows) XLA does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32

from apt_jax.cpu import build
from apt_jax.ops import linear, sampling, xla_decode, xla_prefill
from apt_jax.ops.reference import LogitModifiers
from apt_jax.ops.weights import NormParams, QuantizedMatrix, TiledMatrix

_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
_MAX_ROWS = 16
"""Rows of a product in vector registers up to which ours is the faster one, as measured on two cores."""


def dense(
    x: Float[Array, "T I"], w: Array | TiledMatrix, scale: Float[Array, " O"] | None = None
) -> Float[Array, "T O"]:
    """See `linear.dense`. A `TiledMatrix` is multiplied with on matrix tiles, in bfloat16."""
    x, arguments = _product(x, w, scale)
    if arguments is None:
        assert not isinstance(w, TiledMatrix)
        return linear.dense(x, w, scale)
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("apt_dense", out)(x, *arguments)


def dense_argmax(
    x: Float[Array, "T I"], w: Array | TiledMatrix, scale: Float[Array, " O"] | None = None
) -> tuple[Int32[Array, " T"], Bool[Array, " T"]]:
    """`sampling.greedy(dense(x, w, scale))`; the products are not written."""
    x, arguments = _product(x, w, scale)
    if arguments is None:
        return sampling.greedy(dense(x, w, scale))
    rows = (x.shape[0],)
    out = (jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.bool_))
    call = jax.ffi.ffi_call("apt_dense_argmax", out)
    tokens, trusted = call(x, *arguments, outputs=np.int64(w.shape[0]))
    return tokens, trusted


def _product(x: Array, w: Array | TiledMatrix, scale: Array | None) -> tuple[Array, tuple[Array, Array] | None]:
    """Rows in the dtype of the product, and the other arguments of ours; None where XLA's is the faster one."""
    if isinstance(w, TiledMatrix):
        return x.astype(jnp.bfloat16), (w.values, _or_empty(w.scale))
    if scale is None:
        x = x.astype(w.dtype)
    if x.dtype not in _DTYPES or x.shape[0] > _MAX_ROWS:
        return x, None
    return x, (w, _or_empty(scale))


def _or_empty(a: Array | None) -> Array:
    return jnp.zeros((0,), jnp.float32) if a is None else a


_ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}


def gated(x: Float[Array, "T I"], w: Array | QuantizedMatrix | TiledMatrix, activation: str) -> Float[Array, "T F"]:
    """`activate(x @ gate.T) * (x @ up.T)`, gate and up the halves of `w` (2 F, I), in the dtype of `x`."""
    width = w.shape[0] // 2
    if isinstance(w, TiledMatrix) and width % 16 == 0 and activation in _ACTIVATIONS:
        out = jax.ShapeDtypeStruct((x.shape[0], width), jnp.bfloat16)
        code = np.int64(_ACTIVATIONS[activation])
        call = jax.ffi.ffi_call("apt_gated", out)
        return call(x.astype(jnp.bfloat16), w.values, _or_empty(w.scale), activation=code)
    both = dense(x, w.values, w.scale) if isinstance(w, QuantizedMatrix) else dense(x, w)
    return (linear.activate(both[:, :width], activation) * both[:, width:]).astype(x.dtype)


def add_norm(
    h: Float[Array, "T D"],
    delta: Float[Array, "T D"] | None,
    norm: NormParams,
    dtype: Any,
    *,
    eps: float,
    offset: float,
    layer: bool,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """`h + delta` in float32, and its norm in `dtype`."""
    out = (jax.ShapeDtypeStruct(h.shape, jnp.float32), jax.ShapeDtypeStruct(h.shape, dtype))
    total, x = jax.ffi.ffi_call("apt_add_norm", out)(
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
) -> tuple[Float[Array, "T Q"], Float[Array, "T KH"], Float[Array, "T KH"]]:
    """q, k and v, flat, in `dtype` from one product for the three; q and k turned, k and v with zeros for what is not
    finite."""
    rows, queries = sums.shape[0], num_heads * head_dim
    keys = (sums.shape[1] - queries) // 2
    out = tuple(jax.ShapeDtypeStruct((rows, width), dtype) for width in (queries, keys, keys))
    no_turns = jnp.zeros((0, 0), jnp.float32)
    q, k, v = jax.ffi.ffi_call("apt_split_qkv", out)(
        sums, _or_empty(bias), *(turns or (no_turns, no_turns)), head_dim=np.int64(head_dim)
    )
    return q, k, v


def decode_kv(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P CE"],
    tables: Int32[Array, "B 2 J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    rules: LogitModifiers | None = None,
) -> Float[Array, "B N H"]:
    """See `reference.decode_kv`; rows outside the half-open range `rows` give zeros without work."""
    if pool.dtype not in _DTYPES:
        return xla_decode.decode_kv(
            q, pool, tables, lens, block_size=block_size, rows=rows, slot_ranges=slot_ranges, rules=rules
        )  # fmt: skip
    of_rows = (block_size, rows, slot_ranges, rules)
    return _decode("apt_decode_kv", jnp.float32, q, pool, tables, lens, *of_rows)


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    pool: Float[Array, "P CE"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    rules: LogitModifiers | None = None,
) -> Float[Array, "B N D"]:
    """See `reference.decode_absorbed`. Ours for float32, and for bfloat16 on matrix tiles; XLA's else."""
    if pool.dtype != jnp.float32 and not (pool.dtype == jnp.bfloat16 and build.has_tiles()):
        return xla_decode.decode_absorbed(
            q_absorbed, pool, tables, lens, block_size=block_size, rows=rows, slot_ranges=slot_ranges, rules=rules
        )  # fmt: skip
    of_rows = (block_size, rows, slot_ranges, rules)
    return _decode("apt_decode_absorbed", pool.dtype, q_absorbed, pool, tables, lens, *of_rows)


def _decode(
    target: str,
    dtype: Any,
    q: Array,
    pool: Array,
    tables: Array,
    lens: Array,
    block_size: int,
    rows: tuple[Array, Array] | None,
    slot_ranges: Array | None,
    rules: LogitModifiers | None,
) -> Array:
    first, last = rows or (jnp.int32(0), jnp.int32(q.shape[0]))
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(q.shape, dtype))(
        q.astype(pool.dtype),
        pool,
        tables,
        lens,
        jnp.stack([first, last]),
        *_optional(slot_ranges, rules),
        **_attributes(block_size, rules),
    )


def _optional(slot_ranges: Array | None, rules: LogitModifiers | None) -> tuple[Array, Array]:
    """Slot ranges and ALiBi's slopes, empty where there are none."""
    return (
        jnp.zeros((0, 0, 2), jnp.int32) if slot_ranges is None else slot_ranges,
        _or_empty(None if rules is None else rules.slopes),
    )


def _attributes(block_size: int, rules: LogitModifiers | None) -> dict[str, Any]:
    rules = rules or LogitModifiers()
    return {
        "block_size": np.int64(block_size),
        "softcap": np.float32(rules.softcap or 0.0),
        "window": np.int64(rules.window or 0),
    }


def prefill(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pool: Float[Array, "P CE"],
    tables: Int32[Array, "B 2 J"],
    offsets: Int32[Array, " B"],
    chunk_lens: Int32[Array, " B"],
    prefix_lens: Int32[Array, " B"],
    hidden: Bool[Array, " B"],
    num_rows: Int32[Array, ""],
    *weights: Array | None,
    block_size: int,
    with_hidden: bool,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    rules: LogitModifiers | None = None,
    **of_keys: Any,
) -> Float[Array, "T N H"]:
    """See `reference.prefill`. Ours for bfloat16 where no row may have a hidden prefix, on matrix tiles; XLA's else."""
    if with_hidden or not (q.dtype == k.dtype == pool.dtype == jnp.bfloat16):
        return xla_prefill.prefill(
            q, k, v, pool, tables, offsets, chunk_lens, prefix_lens, hidden, num_rows, *weights,
            block_size=block_size, with_hidden=with_hidden, slot_ranges=slot_ranges, rules=rules, **of_keys,
        )  # fmt: skip
    return jax.ffi.ffi_call("apt_prefill", jax.ShapeDtypeStruct(q.shape, q.dtype))(
        q,
        k,
        v,
        pool,
        tables,
        jnp.stack([offsets, chunk_lens, prefix_lens]),
        num_rows.reshape(1),
        *_optional(slot_ranges, rules),
        **_attributes(block_size, rules),
    )

"""Low-rank additions to weights, one of several a row: `y = x W^T + (x A^T) B` with the A and B of the row's adapter.

A row has the number of its adapter; 0: none, and then nothing is added. Everything here is plain XLA. Sums are float32.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from apt_jax.ops.linear import dot
from apt_jax.ops.weights import KeyValueAdapters, LowRank


def add_low_rank(
    y: Float[Array, "T O"],
    x: Float[Array, "T I"],
    parts: Sequence[tuple[LowRank | None, int]],
    index: Int32[Array, " T"],
) -> Float[Array, "T O"]:
    """`y` with the products of each row's adapter added, float32.

    Two products with the matrices of all adapters side by side, of which each row keeps its own: no gather.

    Args:
        parts: of the outputs, from the first on: what is added to them, or None, and how many they are.
    """
    added = []
    for part, width in parts:
        if part is None:
            added.append(jnp.zeros((x.shape[0], width), jnp.float32))
            continue
        s, r, inputs = part.a.shape
        inner = dot(x.astype(part.a.dtype), part.a.reshape(s * r, inputs), (1, 1))
        owner = jnp.arange(s * r, dtype=jnp.int32) // r + 1
        inner = jnp.where(index[:, None] == owner[None, :], inner, 0.0)
        added.append(dot(inner.astype(part.b.dtype), part.b.reshape(s * r, width), (1, 0)))
    return y.astype(jnp.float32) + (added[0] if len(added) == 1 else jnp.concatenate(added, axis=1))


def _of_rows(w: LowRank, index: Int32[Array, " B"]) -> tuple[Array, Array]:
    """A (B, R, I), zeros for rows without adapter, and B (B, R, O) of each row."""
    at = jnp.maximum(index - 1, 0)
    a = jnp.where((index > 0)[:, None, None], w.a[at], jnp.zeros((), w.a.dtype))
    return a, w.b[at]


def low_rank_of_rows(
    x: Float[Array, "B T I"], w: LowRank | None, index: Int32[Array, " B"]
) -> Float[Array, "B T O"] | None:
    """Compute the addition to products of several inputs of each row, float32; None: nothing."""
    if w is None:
        return None
    a, b = _of_rows(w, index)
    inner = dot(x.astype(a.dtype), a, (2, 2), ((0,), (0,)))
    return dot(inner.astype(b.dtype), b, (2, 1), ((0,), (0,)))


def additions(
    x: Float[Array, "R T D"], adapters: KeyValueAdapters | None, rows: Int32[Array, " R"]
) -> tuple[Array | None, Array | None]:
    """Compute the additions to keys and to values of layer inputs of some rows, (R * T, E); None: nothing."""
    if adapters is None:
        return None, None
    index = adapters.index[rows]
    added = (low_rank_of_rows(x, w, index) for w in (adapters.k, adapters.v))
    k, v = (None if more is None else more.reshape(-1, more.shape[2]) for more in added)
    return k, v


def absorbed_low_rank(
    x: Float[Array, "B N R"], w: LowRank, index: Int32[Array, " B"], num_kv_heads: int, *, onto_inputs: bool
) -> Array:
    """Compute the addition to `linear.head_products` of the heads of each row, float32.

    Of queries (B, N, H), with `onto_inputs`: `A^T (B_h q)` (B, N, I). Of sums of layer inputs (B, N, I): `B_h (A x)`
    (B, N, H).
    """
    batch, heads, _ = x.shape
    a, b = _of_rows(w, index)
    by_head = b.reshape(batch, b.shape[1], num_kv_heads, -1)
    group = heads // num_kv_heads
    both = ((0, 1), (0, 1))
    b_of_heads = jnp.repeat(by_head.transpose(0, 2, 1, 3), group, axis=1)  # (B, N, R, H)
    if onto_inputs:
        inner = dot(b_of_heads, x.astype(b.dtype), (3, 2), both)
        return dot(inner.astype(a.dtype), a, (2, 1), ((0,), (0,)))
    inner = dot(x.astype(a.dtype), a, (2, 2), ((0,), (0,)))
    return dot(inner.astype(b.dtype), b_of_heads, (2, 2), both)

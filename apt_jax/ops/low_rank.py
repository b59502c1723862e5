"""LoRA terms of products, with one of several adapters per row: `y = x W^T + (x A^T) B`, with A (R, I) and B (R, O) of
the row's adapter.

Each row has the index of its adapter; 0: no adapter and no LoRA term. All code here is plain XLA. Sums are float32.
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
    """Return `y` plus the LoRA term of each row's adapter, float32.

    Rows are multiplied by the matrices of all adapters, and the products of other adapters are masked, which avoids a
    gather.

    Args:
        y: products of `x` with the weights.
        x: inputs of the products.
        parts: for each of the consecutive ranges of outputs, the matrices of the adapters (None: no LoRA term) and the
            number of outputs.
        index: adapter of each row; 0: no adapter.
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
    """Return A (B, R, I) and B (B, R, O) of each row's adapter; A is zero for rows without an adapter."""
    at = jnp.maximum(index - 1, 0)
    a = jnp.where((index > 0)[:, None, None], w.a[at], jnp.zeros((), w.a.dtype))
    return a, w.b[at]


def low_rank_of_rows(
    x: Float[Array, "B T I"], w: LowRank | None, index: Int32[Array, " B"]
) -> Float[Array, "B T O"] | None:
    """Return the LoRA terms of each row's adapter for the row's T inputs, float32; None if `w` is None."""
    if w is None:
        return None
    a, b = _of_rows(w, index)
    inner = dot(x.astype(a.dtype), a, (2, 2), ((0,), (0,)))
    return dot(inner.astype(b.dtype), b, (2, 1), ((0,), (0,)))


def additions(
    x: Float[Array, "R T D"], adapters: KeyValueAdapters | None, rows: Int32[Array, " R"]
) -> tuple[Array | None, Array | None]:
    """Return the LoRA terms of keys and of values computed from the layer inputs of some rows, each an array of shape
    (R * T, E); None: adapters do not change the matrix."""
    if adapters is None:
        return None, None
    index = adapters.index[rows]
    added = (low_rank_of_rows(x, w, index) for w in (adapters.k, adapters.v))
    k, v = (None if more is None else more.reshape(-1, more.shape[2]) for more in added)
    return k, v


def absorbed_low_rank(
    x: Float[Array, "B N R"], w: LowRank, index: Int32[Array, " B"], num_kv_heads: int, *, onto_inputs: bool
) -> Array:
    """Return the LoRA term that each row's adapter adds to the result of `linear.head_products`, float32.

    With `onto_inputs` it is `A^T (B_h q)` (B, N, I) for queries (B, N, H), otherwise `B_h^T (A x)` (B, N, H) for sums
    of layer inputs (B, N, I). B_h (R, H) is the part of B that belongs to the key head of head h.
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

"""Readable references of the attention ops: the contract that every implementation is tested against.

All of them work on one layer's pool, `(P, C * E)`: P blocks of C slots of E elements. A block holds, for C positions
of one request, keys (K * H = E elements a slot), values, or layer inputs (D = E). Block tables map position t of a
request to slot `t % C` of block `table[t // C]`. Order inside a block does not matter to attention, padding entries of
a table are `0` and are never read as data.

Dimension key: B rows, T query tokens, N query heads, K key/value heads, H head width, D model width, E lane width,
P blocks, C slots a block, J table entries a row. Softmax and sums are float32 whatever the input dtype.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32


def gather_positions(
    pool: Float[Array, "P CE"], table: Int32[Array, " J"], block_size: int
) -> Float[Array, "S E"]:
    """The slots of one request in the order of its positions; S = J * C."""
    return pool[table].reshape(table.shape[0] * block_size, -1)


def _softmax(scores: Float[Array, "N S"], mask: Array) -> Float[Array, "N S"]:
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)


def decode_kv(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P CE"],
    tables: Int32[Array, "B 2 J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
) -> Float[Array, "B N H"]:
    """`softmax(q k^T / sqrt(H)) v` over positions [0, lens); rows of length 0 give zeros."""
    num_heads, head_dim = q.shape[1], q.shape[2]

    def row(q_row: Array, table: Array, length: Array) -> Array:
        k = (
            gather_positions(pool, table[0], block_size)
            .astype(jnp.float32)
            .reshape(-1, pool.shape[1] // block_size // head_dim, head_dim)
        )
        v = gather_positions(pool, table[1], block_size).astype(jnp.float32).reshape(k.shape)
        group = num_heads // k.shape[1]
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("nh,snh->ns", q_row.astype(jnp.float32), k) * head_dim**-0.5
        weights = _softmax(scores, (jnp.arange(k.shape[0]) < length)[None, :])
        return jnp.einsum("ns,snh->nh", weights, v)

    return jax.vmap(row)(q, tables, lens)


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    pool: Float[Array, "P CE"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
) -> Float[Array, "B N D"]:
    """`softmax(q~ x^T) x` over positions [0, lens), x shared by all heads (DESIGN.md §6); the scale is in q~."""

    def row(q_row: Array, table: Array, length: Array) -> Array:
        x = gather_positions(pool, table, block_size).astype(jnp.float32)
        scores = jnp.einsum("nd,sd->ns", q_row.astype(jnp.float32), x)
        weights = _softmax(scores, (jnp.arange(x.shape[0]) < length)[None, :])
        return jnp.einsum("ns,sd->nd", weights, x)

    return jax.vmap(row)(q_absorbed, tables, lens)


def decode_reprojected(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P CE"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    wk: Float[Array, "K H D"],
    bk: Float[Array, "K H"] | None,
    wv: Float[Array, "K H D"],
    bv: Float[Array, "K H"] | None,
    *,
    block_size: int,
) -> Float[Array, "B N H"]:
    """Attention over keys and values that are computed from the cached layer inputs (Apt-Serve §3.1, Fig. 3b)."""
    group, head_dim = q.shape[1] // wk.shape[0], q.shape[2]

    def project(x: Array, w: Array, b: Array | None) -> Array:
        out = jnp.einsum("sd,khd->skh", x, w.astype(jnp.float32))
        return out if b is None else out + b.astype(jnp.float32)[None]

    def row(q_row: Array, table: Array, length: Array) -> Array:
        x = gather_positions(pool, table, block_size).astype(jnp.float32)
        k = jnp.repeat(project(x, wk, bk), group, axis=1)
        v = jnp.repeat(project(x, wv, bv), group, axis=1)
        scores = jnp.einsum("nh,snh->ns", q_row.astype(jnp.float32), k) * head_dim**-0.5
        weights = _softmax(scores, (jnp.arange(x.shape[0]) < length)[None, :])
        return jnp.einsum("ns,snh->nh", weights, v)

    return jax.vmap(row)(q, tables, lens)


def causal_attention(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], v: Float[Array, "S K H"]
) -> Float[Array, "T N H"]:
    """Attention of the last T of S positions, each over itself and all before it: what a prefill chunk computes."""
    group, head_dim = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (
        jnp.repeat(k, group, axis=1).astype(jnp.float32),
        jnp.repeat(v, group, axis=1).astype(jnp.float32),
    )
    scores = jnp.einsum("tnh,snh->nts", q.astype(jnp.float32), k) * head_dim**-0.5
    t, s = q.shape[0], k.shape[0]
    mask = jnp.arange(s)[None, :] <= (jnp.arange(t) + (s - t))[:, None]
    weights = jax.vmap(_softmax, in_axes=(0, None))(scores, mask)
    return jnp.einsum("nts,snh->tnh", weights, v)

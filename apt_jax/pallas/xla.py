"""Attention over the block pool as plain XLA code, laid out for CPUs (contracts: `reference.py`).

How it is made fast, as measured on a 2-core machine with AMX:
  * Rows are taken R at a time and contexts T positions at a time, with a dynamic trip count: no padding to the longest
    context, no program per length. Callers sort rows by length, so that a tile wastes little.
  * A block's slots are token-major, so fetching T positions is a copy of whole blocks, and both products are batched
    matrix products of at least 64 positions: those run at memory speed, which per-head products of one query do not.
    For keys and values every head's query is spread over the E lanes with zeros elsewhere ("block-diagonal"): N times
    the multiplications, which the matrix units do for free, and no transposition of the cache. Absorbed attention needs
    no such trick: its queries are E wide by nature.
  * Products take the pool's dtype and accumulate in float32; the softmax is float32 (flash style: running maximum m,
    denominator l, accumulator acc).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

_MASKED = -1e30
"""Score of a masked position; finite, so that a fully masked tile cannot make NaN."""

TOKENS_PER_TILE = 64
"""T of decode attention: fewer make the products slow, more waste work on short contexts."""
ROWS_PER_TILE = 32
"""R of decode attention."""
PREFILL_QUERY_TILE = 128
PREFILL_KEY_TILE = 128

_FlashState = tuple[Array, Array, Array]
"""Running maximum, denominator and accumulator of flash attention."""


def dot(
    a: Array,
    b: Array,
    contract: tuple[int, int],
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> Array:
    """`lax.dot_general` over one axis of each side, accumulated and returned in float32."""
    return lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), batch), preferred_element_type=jnp.float32
    )


def _spread_heads(q: Float[Array, "B N H"], num_kv_heads: int) -> Float[Array, "B N E"]:
    """Head n's query in the lanes of its key/value head n // G, zeros elsewhere; scaled by 1 / sqrt(H)."""
    batch, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    own = (
        jnp.arange(num_heads, dtype=jnp.int32)[:, None] // group
        == jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :]
    )
    scaled = q * jnp.asarray(head_dim**-0.5, q.dtype)
    spread = jnp.where(own[None, :, :, None], scaled[:, :, None, :], jnp.zeros((), q.dtype))
    return spread.reshape(batch, num_heads, num_kv_heads * head_dim)


def _own_lanes(out: Float[Array, "R N E"], num_kv_heads: int) -> Float[Array, "R N H"]:
    """The inverse of `_spread_heads` for outputs: of every head's E lanes keep its own key/value head's."""
    rows, num_heads, lanes = out.shape
    group = num_heads // num_kv_heads
    own = (
        jnp.arange(num_heads, dtype=jnp.int32)[:, None] // group
        == jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :]
    )
    parts = out.reshape(rows, num_heads, num_kv_heads, lanes // num_kv_heads)
    return jnp.sum(jnp.where(own[None, :, :, None], parts, jnp.zeros((), out.dtype)), axis=2)


def _decode(
    q: Float[Array, "B N E"],
    fetch: Callable[[Int32[Array, "R A G"]], tuple[Array, Array]],
    tables: Int32[Array, "B A J"],
    lens: Int32[Array, " B"],
    rows: tuple[Array, Array],
    finish: Callable[[Float[Array, "R N E"]], Array],
    out_width: int,
    block_size: int,
) -> Float[Array, "B N W"]:
    """Flash attention of one query a row; `fetch` turns G table entries a row into keys and values (R, T, E).

    Only tiles that hold rows in the half-open range `rows` are visited; rows outside it give zeros.
    """
    batch, num_heads, _ = q.shape
    r = min(batch, ROWS_PER_TILE)
    if batch % r:
        raise ValueError(f"{batch=} must be at most {ROWS_PER_TILE} or a multiple of it")
    g = max(1, TOKENS_PER_TILE // block_size)
    t = g * block_size
    tables = jnp.pad(tables, ((0, 0), (0, 0), (0, -tables.shape[2] % g)))
    index = jnp.arange(batch, dtype=jnp.int32)
    lens = jnp.where((index >= rows[0]) & (index < rows[1]), lens, 0)

    def row_tile(i: Array, out: Array) -> Array:
        start = i * r
        q_tile = lax.dynamic_slice_in_dim(q, start, r)
        len_tile = lax.dynamic_slice_in_dim(lens, start, r)
        table_tile = lax.dynamic_slice_in_dim(tables, start, r)

        def body(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            j, m, l, acc = carry
            keys, values = fetch(lax.dynamic_slice_in_dim(table_tile, j * g, g, axis=2))
            s = dot(q_tile, keys, (2, 2), ((0,), (0,)))
            position = j * t + jnp.arange(t, dtype=jnp.int32)
            s = jnp.where(position[None, None, :] < len_tile[:, None, None], s, _MASKED)
            m_new = jnp.maximum(m, jnp.max(s, axis=-1))
            p = jnp.exp(s - m_new[:, :, None])
            rescale = jnp.exp(m - m_new)
            l = l * rescale + jnp.sum(p, axis=-1)
            acc = acc * rescale[:, :, None] + finish(
                dot(p.astype(values.dtype), values, (2, 1), ((0,), (0,)))
            )
            return j + 1, m_new, l, acc

        steps = (jnp.max(len_tile) + t - 1) // t
        init = (
            jnp.zeros((), jnp.int32),
            jnp.full((r, num_heads), _MASKED, jnp.float32),
            jnp.zeros((r, num_heads), jnp.float32),
            jnp.zeros((r, num_heads, out_width), jnp.float32),
        )
        _, _, l, acc = lax.while_loop(lambda c: c[0] < steps, body, init)
        # A masked tile of a shorter row adds exp(0) = 1 to its l when nothing was seen before; such rows have length 0.
        result = jnp.where(
            len_tile[:, None, None] > 0, acc / jnp.maximum(l, 1e-30)[:, :, None], 0.0
        )
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    first, last = rows[0] // r, (rows[1] + r - 1) // r
    return lax.fori_loop(
        first, last, row_tile, jnp.zeros((batch, num_heads, out_width), jnp.float32)
    )


def _fetch_blocks(pool: Array, ids: Int32[Array, "R G"], block_size: int) -> Float[Array, "R T E"]:
    r, g = ids.shape
    return pool[ids.reshape(-1)].reshape(r, g * block_size, pool.shape[1] // block_size)


def decode_kv(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P CE"],
    tables: Int32[Array, "B 2 J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
) -> Float[Array, "B N H"]:
    """See `reference.decode_kv`; rows outside the half-open range `rows` give zeros without work."""
    num_kv_heads = pool.shape[1] // block_size // q.shape[2]

    def fetch(ids: Array) -> tuple[Array, Array]:
        return _fetch_blocks(pool, ids[:, 0], block_size), _fetch_blocks(
            pool, ids[:, 1], block_size
        )

    return _decode(
        _spread_heads(q, num_kv_heads).astype(pool.dtype),
        fetch,
        tables,
        lens,
        rows or (jnp.int32(0), jnp.int32(q.shape[0])),
        lambda out: _own_lanes(out, num_kv_heads),
        q.shape[2],
        block_size,
    )


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    pool: Float[Array, "P CE"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
) -> Float[Array, "B N D"]:
    """See `reference.decode_absorbed`."""

    def fetch(ids: Array) -> tuple[Array, Array]:
        x = _fetch_blocks(pool, ids[:, 0], block_size)
        return x, x

    return _decode(
        q_absorbed.astype(pool.dtype),
        fetch,
        tables[:, None],
        lens,
        rows or (jnp.int32(0), jnp.int32(q_absorbed.shape[0])),
        lambda out: out,
        q_absorbed.shape[2],
        block_size,
    )


def project_kv(
    x: Float[Array, "T D"], w: Float[Array, "K H D"], b: Float[Array, "K H"] | None
) -> Float[Array, "T E"]:
    """Keys or values of layer inputs, in the dtype of `x`, lanes flattened."""
    out = dot(x.astype(w.dtype), w.reshape(-1, w.shape[2]), (1, 1))
    if b is not None:
        out = out + b.astype(jnp.float32).reshape(1, -1)
    return out.astype(x.dtype)


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
    rows: tuple[Array, Array] | None = None,
) -> Float[Array, "B N H"]:
    """See `reference.decode_reprojected`."""

    def fetch(ids: Array) -> tuple[Array, Array]:
        x = _fetch_blocks(pool, ids[:, 0], block_size)
        flat = x.reshape(-1, x.shape[2])
        return project_kv(flat, wk, bk).reshape(x.shape), project_kv(flat, wv, bv).reshape(x.shape)

    return _decode(
        _spread_heads(q, wk.shape[0]).astype(pool.dtype),
        fetch,
        tables[:, None],
        lens,
        rows or (jnp.int32(0), jnp.int32(q.shape[0])),
        lambda out: _own_lanes(out, wk.shape[0]),
        q.shape[2],
        block_size,
    )


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
    wk: Float[Array, "K H D"],
    bk: Float[Array, "K H"] | None,
    wv: Float[Array, "K H D"],
    bv: Float[Array, "K H"] | None,
    *,
    block_size: int,
    with_hidden: bool,
) -> Float[Array, "T N H"]:
    """Causal attention of prompt chunks that lie one after another in T, each over its cached prefix and itself.

    Row r is `q[offsets[r] : offsets[r] + chunk_lens[r]]`; its prefix is positions [0, prefix_lens[r]) of the pool, keys
    and values or (where `hidden[r]`) layer inputs that are projected first: above about H query tokens that costs
    less than absorbing (KERNELS: crossover at H * N / (N - 1)). Rows from `num_rows` on are not visited; tokens of no
    row give zeros.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    tq, tk = min(PREFILL_QUERY_TILE, num_tokens), min(PREFILL_KEY_TILE, num_tokens)
    g = max(1, PREFILL_KEY_TILE // block_size)
    tp = g * block_size
    pad = ((0, max(tq, tk)), (0, 0), (0, 0))
    q = jnp.pad(q * jnp.asarray(head_dim**-0.5, q.dtype), pad)
    k, v = jnp.pad(k, pad), jnp.pad(v, pad)
    tables = jnp.pad(tables, ((0, 0), (0, 0), (0, -tables.shape[2] % g)))

    def update(
        state: _FlashState, start: Array, keys: Array, values: Array, mask: Array
    ) -> _FlashState:
        """Fold keys and values (S, K, H) into the queries [start, start + tq); mask (tq, S)."""
        m, l, acc = (lax.dynamic_slice_in_dim(a, start, tq) for a in state)
        q_tile = lax.dynamic_slice_in_dim(q, start, tq).reshape(tq, num_kv_heads, group, head_dim)
        q_tile = q_tile.transpose(1, 0, 2, 3).reshape(num_kv_heads, tq * group, head_dim)
        s = dot(q_tile, keys, (2, 2), ((0,), (1,)))
        s = jnp.where(jnp.repeat(mask, group, axis=0)[None], s, _MASKED)
        s = s.reshape(num_kv_heads, tq, group, -1)
        m_old = m.reshape(tq, num_kv_heads, group).transpose(1, 0, 2)
        m_new = jnp.maximum(m_old, jnp.max(s, axis=-1))
        p = jnp.where(mask[None, :, None, :], jnp.exp(s - m_new[..., None]), 0.0)
        rescale = jnp.exp(m_old - m_new).transpose(1, 0, 2).reshape(tq, num_heads)
        l_add = jnp.sum(p, axis=-1).transpose(1, 0, 2).reshape(tq, num_heads)
        pv = dot(
            p.reshape(num_kv_heads, tq * group, -1).astype(values.dtype),
            values,
            (2, 0),
            ((0,), (1,)),
        )
        pv = (
            pv.reshape(num_kv_heads, tq, group, head_dim)
            .transpose(1, 0, 2, 3)
            .reshape(tq, num_heads, head_dim)
        )
        new = (
            m_new.transpose(1, 0, 2).reshape(tq, num_heads),
            l * rescale + l_add,
            acc * rescale[..., None] + pv,
        )
        return tuple(
            lax.dynamic_update_slice_in_dim(a, b, start, axis=0)
            for a, b in zip(state, new, strict=True)
        )  # pyright: ignore[reportReturnType]

    def row(r: Array, state: _FlashState) -> _FlashState:
        offset, length, prefix = offsets[r], chunk_lens[r], prefix_lens[r]
        q_tiles = (length + tq - 1) // tq
        query_index = jnp.arange(tq, dtype=jnp.int32)

        def prefix_tile(j: Array, state: _FlashState) -> _FlashState:
            ids = lax.dynamic_slice(tables, (r, jnp.int32(0), j * g), (1, 2, g))[0]
            first = pool[ids[0]].reshape(tp, -1)

            def from_kv() -> tuple[Array, Array]:
                return first, pool[ids[1]].reshape(tp, -1)

            def from_hidden() -> tuple[Array, Array]:
                return project_kv(first, wk, bk), project_kv(first, wv, bv)

            keys, values = lax.cond(hidden[r], from_hidden, from_kv) if with_hidden else from_kv()
            keys, values = (
                a.astype(k.dtype).reshape(tp, num_kv_heads, head_dim) for a in (keys, values)
            )
            position = j * tp + jnp.arange(tp, dtype=jnp.int32)

            def query_tile(i: Array, state: _FlashState) -> _FlashState:
                mask = (position < prefix)[None, :] & (i * tq + query_index < length)[:, None]
                return update(state, offset + i * tq, keys, values, mask)

            return lax.fori_loop(0, q_tiles, query_tile, state)

        def own_tile(i: Array, state: _FlashState) -> _FlashState:
            q_position = i * tq + query_index

            def key_tile(j: Array, state: _FlashState) -> _FlashState:
                keys = lax.dynamic_slice_in_dim(k, offset + j * tk, tk)
                values = lax.dynamic_slice_in_dim(v, offset + j * tk, tk)
                k_position = j * tk + jnp.arange(tk, dtype=jnp.int32)
                mask = (k_position[None, :] <= q_position[:, None]) & (q_position < length)[:, None]
                return update(state, offset + i * tq, keys, values, mask)

            return lax.fori_loop(
                0, (jnp.minimum((i + 1) * tq, length) + tk - 1) // tk, key_tile, state
            )

        state = lax.fori_loop(0, (prefix + tp - 1) // tp, prefix_tile, state)
        return lax.fori_loop(0, q_tiles, own_tile, state)

    padded = num_tokens + pad[0][1]
    init = (
        jnp.full((padded, num_heads), _MASKED, jnp.float32),
        jnp.zeros((padded, num_heads), jnp.float32),
        jnp.zeros((padded, num_heads, head_dim), jnp.float32),
    )
    _, l, acc = lax.fori_loop(0, num_rows, row, init)
    return (acc / jnp.maximum(l, 1e-30)[..., None])[:num_tokens]

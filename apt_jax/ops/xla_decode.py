"""Decode attention over the block pool as plain XLA code, laid out for CPUs (contracts: `reference.py`).

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
from jaxtyping import Float, Int32

from apt_jax.ops.linear import dot, project_kv
from apt_jax.ops.low_rank import KeyValueAdapters, additions
from apt_jax.ops.reference import KeyNorm, LogitModifiers
from apt_jax.ops.xla_common import MASKED, Fetch, Shards, apply_rules, fetch_blocks, own_slots_of

TOKENS_PER_TILE = 64
"""T of decode attention: fewer make the products slow, more waste work on short contexts."""
TOKENS_PER_SUM = 512
"""T where scores are summed over devices: each sum takes some time, however small."""
ROWS_PER_TILE = 32
"""R of decode attention."""


def _spread_heads(q: Float[Array, "B N H"], num_kv_heads: int, scale: float | None = None) -> Float[Array, "B N E"]:
    """Head n's query in the lanes of its key/value head n // G, zeros elsewhere; scaled by 1 / sqrt(H)."""
    batch, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    group = num_heads // num_kv_heads
    own = jnp.arange(num_heads, dtype=jnp.int32)[:, None] // group == jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :]
    scaled = q * jnp.asarray(scale, q.dtype)
    spread = jnp.where(own[None, :, :, None], scaled[:, :, None, :], jnp.zeros((), q.dtype))
    return spread.reshape(batch, num_heads, num_kv_heads * head_dim)


def _own_lanes(out: Float[Array, "R N E"], num_kv_heads: int) -> Float[Array, "R N H"]:
    """The inverse of `_spread_heads` for outputs: of every head's E lanes keep its own key/value head's."""
    rows, num_heads, lanes = out.shape
    group = num_heads // num_kv_heads
    own = jnp.arange(num_heads, dtype=jnp.int32)[:, None] // group == jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :]
    parts = out.reshape(rows, num_heads, num_kv_heads, lanes // num_kv_heads)
    return jnp.sum(jnp.where(own[None, :, :, None], parts, jnp.zeros((), out.dtype)), axis=2)


def _decode(
    q: Float[Array, "B N E"],
    fetch: Fetch,
    tables: Int32[Array, "B A J"],
    lens: Int32[Array, " B"],
    rows: tuple[Array, Array],
    finish: Callable[[Float[Array, "R N E"]], Array],
    out_width: int,
    block_size: int,
    slot_ranges: Int32[Array, "B J 2"] | None,
    rules: LogitModifiers | None = None,
    partly: Shards | None = None,
) -> Float[Array, "B N W"]:
    """Flash attention of one query a row over the keys and values (R, T, E) that `fetch` gives.

    Only tiles that hold rows in the half-open range `rows` are visited; rows outside it give zeros.

    Args:
        partly: `q` and `fetch` have one device's features: its products are a part of the scores.
    """
    batch, num_heads, _ = q.shape
    r = min(batch, ROWS_PER_TILE)
    if batch % r:
        raise ValueError(f"{batch=} must be at most {ROWS_PER_TILE} or a multiple of it")
    g = max(1, (TOKENS_PER_TILE if partly is None else TOKENS_PER_SUM) // block_size)
    t = g * block_size
    tables = jnp.pad(tables, ((0, 0), (0, 0), (0, -tables.shape[2] % g)))
    if slot_ranges is not None:
        slot_ranges = jnp.pad(slot_ranges, ((0, 0), (0, -slot_ranges.shape[1] % g), (0, 0)))
    index = jnp.arange(batch, dtype=jnp.int32)
    lens = jnp.where((index >= rows[0]) & (index < rows[1]), lens, 0)

    def row_tile(i: Array, out: Array) -> Array:
        start = i * r
        q_tile = lax.dynamic_slice_in_dim(q, start, r)
        len_tile = lax.dynamic_slice_in_dim(lens, start, r)
        table_tile = lax.dynamic_slice_in_dim(tables, start, r)

        def body(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            j, m, l, acc = carry
            own, position = own_slots_of(slot_ranges, len_tile, start, j * g, g, block_size)
            ids = lax.dynamic_slice_in_dim(table_tile, j * g, g, axis=2)
            keys, values = fetch(ids, own, position, start + jnp.arange(r, dtype=jnp.int32))
            s = dot(q_tile, keys, (2, 2), ((0,), (0,)))
            if partly is not None:
                s = partly.sum(s)
            if rules is not None:
                last = len_tile[:, None] - 1
                s, seen = apply_rules(s, (position - last)[:, None, :], rules, (1, -1, 1))
                own = own & seen[:, 0]
            s = jnp.where(own[:, None, :], s, MASKED)
            m_new = jnp.maximum(m, jnp.max(s, axis=-1))
            p = jnp.exp(s - m_new[:, :, None])
            rescale = jnp.exp(m - m_new)
            l = l * rescale + jnp.sum(p, axis=-1)
            acc = acc * rescale[:, :, None] + finish(dot(p.astype(values.dtype), values, (2, 1), ((0,), (0,))))
            return j + 1, m_new, l, acc

        steps = (jnp.max(len_tile) + t - 1) // t
        first_step = jnp.zeros((), jnp.int32)
        if rules is not None and rules.window is not None:
            starts = jnp.where(len_tile > 0, len_tile - rules.window, jnp.max(len_tile))
            first_step = jnp.maximum(jnp.min(starts), 0) // t
        init = (
            first_step,
            jnp.full((r, num_heads), MASKED, jnp.float32),
            jnp.zeros((r, num_heads), jnp.float32),
            jnp.zeros((r, num_heads, out_width), jnp.float32),
        )
        _, _, l, acc = lax.while_loop(lambda c: c[0] < steps, body, init)
        # A masked tile of a row adds exp(0) = 1 to its l when nothing was seen before: rows of length 0, or a window
        # that begins in a later tile, whose first score then scales it away.
        result = jnp.where(len_tile[:, None, None] > 0, acc / jnp.maximum(l, 1e-30)[:, :, None], 0.0)
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    first, last = rows[0] // r, (rows[1] + r - 1) // r
    return lax.fori_loop(first, last, row_tile, jnp.zeros((batch, num_heads, out_width), jnp.float32))


def decode_kv(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B 2 J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    rules: LogitModifiers | None = None,
) -> Float[Array, "B N H"]:
    """See `reference.decode_kv`; rows outside the half-open range `rows` give zeros without work."""
    num_kv_heads = pool.shape[2] // q.shape[2]

    def fetch(ids: Array, own: Array, position: Array, index: Array) -> tuple[Array, Array]:
        del position, index
        keys = fetch_blocks(pool, ids[:, 0], block_size, None)
        return keys, fetch_blocks(pool, ids[:, 1], block_size, own)

    return _decode(
        _spread_heads(q, num_kv_heads).astype(pool.dtype),
        fetch,
        tables,
        lens,
        rows or (jnp.int32(0), jnp.int32(q.shape[0])),
        lambda out: _own_lanes(out, num_kv_heads),
        q.shape[2],
        block_size,
        slot_ranges,
        rules,
    )


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    rules: LogitModifiers | None = None,
    tensor: Shards | None = None,
) -> Float[Array, "B N D"]:
    """See `reference.decode_absorbed`. With `tensor`, D counts the features that this device has of queries, pool and
    result."""

    def fetch(ids: Array, own: Array, position: Array, index: Array) -> tuple[Array, Array]:
        del position, index
        x = fetch_blocks(pool, ids[:, 0], block_size, own, q_absorbed.shape[2])
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
        slot_ranges,
        rules,
        tensor,
    )


def decode_reprojected(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    wk: Float[Array, "K H D"],
    bk: Float[Array, "K H"] | None,
    wv: Float[Array, "K H D"],
    bv: Float[Array, "K H"] | None,
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    angles: Float[Array, "S HALF"] | None = None,
    key_norm: KeyNorm | None = None,
    rules: LogitModifiers | None = None,
    tensor: Shards | None = None,
    adapters: KeyValueAdapters | None = None,
) -> Float[Array, "B N H"]:
    """See `reference.decode_reprojected`. `adapters` are added to W_k and W_v, by row."""

    num_kv_heads = wk.shape[0]

    def fetch(ids: Array, own: Array, position: Array, index: Array) -> tuple[Array, Array]:
        x = fetch_blocks(pool, ids[:, 0], block_size, own, wk.shape[2], tensor)
        flat = x.reshape(-1, x.shape[2])
        turns = None if angles is None else angles[position.reshape(-1)]
        more_k, more_v = additions(x, adapters, index)
        keys = project_kv(flat, wk, bk, turns, key_norm, more_k)
        values = project_kv(flat, wv, bv, more=more_v)
        return keys.reshape(*x.shape[:2], -1), values.reshape(*x.shape[:2], -1)

    return _decode(
        _spread_heads(q, num_kv_heads).astype(pool.dtype),
        fetch,
        tables[:, None],
        lens,
        rows or (jnp.int32(0), jnp.int32(q.shape[0])),
        lambda out: _own_lanes(out, num_kv_heads),
        q.shape[2],
        block_size,
        slot_ranges,
        rules,
    )


def decode_v_absorbed(
    q_rotary: Float[Array, "B N R"],
    q_absorbed: Float[Array, "B N D"] | None,
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    wk_rotary: Float[Array, "K R D"],
    bk_rotary: Float[Array, "K R"] | None,
    angles: Float[Array, "S HALF"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    key_norm: KeyNorm | None = None,
    rules: LogitModifiers | None = None,
    tensor: Shards | None = None,
    adapters: KeyValueAdapters | None = None,
) -> Float[Array, "B N D"]:
    """See `reference.decode_v_absorbed`: one product with the keys [k_r | x] gives both parts of the scores.
    `adapters` are added to the rotary lanes of W_k, by row."""
    num_kv_heads, _, width = wk_rotary.shape
    q = _spread_heads(q_rotary, num_kv_heads, scale=1.0).astype(pool.dtype)
    if q_absorbed is not None:
        q = jnp.concatenate([q, q_absorbed.astype(pool.dtype)], axis=2)

    def fetch(ids: Array, own: Array, position: Array, index: Array) -> tuple[Array, Array]:
        x = fetch_blocks(pool, ids[:, 0], block_size, own, width, tensor)
        turns = angles[position.reshape(-1)]
        more, _ = additions(x, adapters, index)
        keys = project_kv(x.reshape(-1, width), wk_rotary, bk_rotary, turns, key_norm, more)
        keys = keys.reshape(*x.shape[:2], -1)
        return keys if q_absorbed is None else jnp.concatenate([keys, x], axis=2), x

    return _decode(
        q,
        fetch,
        tables[:, None],
        lens,
        rows or (jnp.int32(0), jnp.int32(q_rotary.shape[0])),
        lambda out: out,
        width,
        block_size,
        slot_ranges,
        rules,
    )

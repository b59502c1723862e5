"""Decode attention over the block pool as plain XLA code, laid out for CPUs (contracts: `lab/reference.py`).

Why it is fast (measured on a 2-core machine with AMX):
  * Rows are processed R at a time and contexts T positions at a time, with a dynamic trip count: contexts are not
    padded to the longest context, and one program serves all lengths. Callers sort rows by length, so a tile has little
    padding.
  * A block's slots are token-major, so fetching T positions is a copy of whole blocks, and both products are batched
    matrix products of at least 64 positions: these run at memory speed, unlike per-head products of one query. For keys
    and values, every head's query is placed in its key head's part of the E lanes, with zeros elsewhere
    ("block-diagonal"): this needs N times as many multiplications, which cost no time on the matrix units, but no
    transposition of the cache. Absorbed attention does not need this, because its queries are E wide.
  * Products have operands of the pool's dtype and accumulate in float32; the softmax is float32 (flash style: running
    maximum m, denominator l, accumulator acc).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from apt_jax.ops.calls import DecodeCall
from apt_jax.ops.linear import dot, project_kv
from apt_jax.ops.low_rank import additions
from apt_jax.ops.xla_common import MASKED, Fetch, apply_rules, fetch_blocks, initial_softmax, own_slots_of

TOKENS_PER_TILE = 64
"""T of decode attention: fewer positions make the products slow, more waste work on short contexts."""
TOKENS_PER_SUM = 512
"""T if scores are summed over devices: each sum has a fixed cost."""
ROWS_PER_TILE = 32
"""R of decode attention."""


def _spread_heads(q: Float[Array, "B N H"], num_kv_heads: int, scale: float | None = None) -> Float[Array, "B N E"]:
    """Place head n's query in the lanes of its key/value head n // G, with zeros elsewhere, times `scale`; None: 1 /
    sqrt(H)."""
    batch, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    group = num_heads // num_kv_heads
    own = jnp.arange(num_heads, dtype=jnp.int32)[:, None] // group == jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :]
    scaled = q * jnp.asarray(scale, q.dtype)
    spread = jnp.where(own[None, :, :, None], scaled[:, :, None, :], jnp.zeros((), q.dtype))
    return spread.reshape(batch, num_heads, num_kv_heads * head_dim)


def _own_lanes(out: Float[Array, "R N E"], num_kv_heads: int) -> Float[Array, "R N H"]:
    """Select, from the E lanes of each head, the lanes of its key/value head: the inverse of `_spread_heads`."""
    rows, num_heads, lanes = out.shape
    group = num_heads // num_kv_heads
    own = jnp.arange(num_heads, dtype=jnp.int32)[:, None] // group == jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :]
    parts = out.reshape(rows, num_heads, num_kv_heads, lanes // num_kv_heads)
    return jnp.sum(jnp.where(own[None, :, :, None], parts, jnp.zeros((), out.dtype)), axis=2)


def _decode(
    q: Float[Array, "B N E"],
    fetch: Fetch,
    call: DecodeCall,
    finish: Callable[[Float[Array, "R N E"]], Array],
    out_width: int,
    *,
    partly: bool = False,
) -> Float[Array, "B N W"]:
    """Compute flash attention of one query per row over the keys and values (R, T, E) that `fetch` returns.

    Only tiles with rows in the call's row range are computed; rows outside the range give zeros.

    Args:
        partly: True: `q` and `fetch` have only one device's features, so their products are partial sums of the scores.
    """
    batch, num_heads, _ = q.shape
    r = min(batch, ROWS_PER_TILE)
    if batch % r:
        raise ValueError(f"{batch=} must be at most {ROWS_PER_TILE} or a multiple of it")
    call = call.by_row()
    block_size, rules, slot_ranges, rows = call.block_size, call.rules, call.slot_ranges, call.row_range()
    g = max(1, (TOKENS_PER_SUM if partly else TOKENS_PER_TILE) // block_size)
    t = g * block_size
    tables = call.tables.reshape(batch, -1, call.tables.shape[-1])
    tables = jnp.pad(tables, ((0, 0), (0, 0), (0, -tables.shape[2] % g)))
    if slot_ranges is not None:
        slot_ranges = jnp.pad(slot_ranges, ((0, 0), (0, -slot_ranges.shape[1] % g), (0, 0)))
    index = jnp.arange(batch, dtype=jnp.int32)
    lens = jnp.where((index >= rows[0]) & (index < rows[1]), call.lens, 0)

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
            if partly:
                assert call.tensor is not None
                s = call.tensor.sum(s)
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
            *initial_softmax((r, num_heads), rules, (1, -1)),
            jnp.zeros((r, num_heads, out_width), jnp.float32),
        )
        _, _, l, acc = lax.while_loop(lambda c: c[0] < steps, body, init)
        # A fully masked tile adds exp(0) = 1 per position to l if no key was seen before: in rows of length 0, or
        # before the start of a window, where the first visible score then rescales it to 0.
        result = jnp.where(len_tile[:, None, None] > 0, acc / jnp.maximum(l, 1e-30)[:, :, None], 0.0)
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    first, last = rows[0] // r, (rows[1] + r - 1) // r
    return lax.fori_loop(first, last, row_tile, jnp.zeros((batch, num_heads, out_width), jnp.float32))


def decode_kv(q: Float[Array, "B N H"], call: DecodeCall) -> Float[Array, "B N H"]:
    """See `reference.decode_kv`; rows outside the call's row range give zeros and cost nothing."""
    width = call.width
    num_kv_heads = width // q.shape[2]

    def fetch(ids: Array, own: Array, position: Array, index: Array) -> tuple[Array, Array]:
        del position, index
        keys = fetch_blocks(call.pool, ids[:, 0], call.block_size, None, width)
        return keys, fetch_blocks(call.pool, ids[:, 1], call.block_size, own, width)

    spread = _spread_heads(q, num_kv_heads).astype(call.pool.dtype)
    return _decode(spread, fetch, call, lambda out: _own_lanes(out, num_kv_heads), q.shape[2])


def decode_absorbed(q_absorbed: Float[Array, "B N D"], call: DecodeCall) -> Float[Array, "B N D"]:
    """See `reference.decode_absorbed`. With `tensor`, D counts this device's features in queries, pool and result."""
    width = q_absorbed.shape[2]

    def fetch(ids: Array, own: Array, position: Array, index: Array) -> tuple[Array, Array]:
        del position, index
        x = fetch_blocks(call.pool, ids[:, 0], call.block_size, own, width)
        return x, x

    query = q_absorbed.astype(call.pool.dtype)
    return _decode(query, fetch, call, lambda out: out, width, partly=call.tensor is not None)


def decode_reprojected(q: Float[Array, "B N H"], call: DecodeCall) -> Float[Array, "B N H"]:
    """See `reference.decode_reprojected`."""
    p = call.projected
    num_kv_heads, _, width = p.wk.shape

    def fetch(ids: Array, own: Array, position: Array, index: Array) -> tuple[Array, Array]:
        x = fetch_blocks(call.pool, ids[:, 0], call.block_size, own, width, call.tensor)
        flat = x.reshape(-1, width)
        turns = None if p.angles is None else p.angles[position.reshape(-1)]
        more_k, more_v = additions(x, p.adapters, index)
        keys = project_kv(flat, p.wk, p.bk, turns, p.key_norm, more_k)
        values = project_kv(flat, p.value_weights, p.bv, more=more_v)
        return keys.reshape(*x.shape[:2], -1), values.reshape(*x.shape[:2], -1)

    spread = _spread_heads(q, num_kv_heads).astype(call.pool.dtype)
    return _decode(spread, fetch, call, lambda out: _own_lanes(out, num_kv_heads), q.shape[2])


def decode_v_absorbed(
    q_rotary: Float[Array, "B N R"], q_absorbed: Float[Array, "B N D"] | None, call: DecodeCall
) -> Float[Array, "B N D"]:
    """See `reference.decode_v_absorbed`; one product with the keys [k_r | x] gives both parts of the scores."""
    p = call.projected
    num_kv_heads, _, width = p.wk.shape
    q = _spread_heads(q_rotary, num_kv_heads, scale=1.0).astype(call.pool.dtype)
    if q_absorbed is not None:
        q = jnp.concatenate([q, q_absorbed.astype(call.pool.dtype)], axis=2)

    def fetch(ids: Array, own: Array, position: Array, index: Array) -> tuple[Array, Array]:
        x = fetch_blocks(call.pool, ids[:, 0], call.block_size, own, width, call.tensor)
        turns = None if p.angles is None else p.angles[position.reshape(-1)]
        more, _ = additions(x, p.adapters, index)
        keys = project_kv(x.reshape(-1, width), p.wk, p.bk, turns, p.key_norm, more)
        keys = keys.reshape(*x.shape[:2], -1)
        return keys if q_absorbed is None else jnp.concatenate([keys, x], axis=2), x

    return _decode(q, fetch, call, lambda out: out, width)

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

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from apt_jax.ops.reference import KeyNorm, ScoreRules, own_slots, rms_norm_heads, rotate

_MASKED = -1e30
"""Score of a masked position; finite, so that a fully masked tile cannot make NaN."""

TOKENS_PER_TILE = 64
"""T of decode attention: fewer make the products slow, more waste work on short contexts."""
TOKENS_PER_SUM = 512
"""T where scores are summed over devices: each sum takes some time, however small."""
ROWS_PER_TILE = 32
"""R of decode attention."""
PREFILL_QUERY_TILE = 128
PREFILL_KEY_TILE = 128

_Fetch = Callable[[Array, Array, Array], tuple[Array, Array]]
"""From G table entries of each of R rows (R, A, G), whether each of their T slots is the row's own (R, T) and its
position (R, T), to the slots' keys and values (R, T, E). Values of slots that are not the row's own must be finite."""


@runtime_checkable
class Shards(Protocol):
    """Devices that layer inputs are spread over by feature: `apt_jax.models.sharding.TensorParallel`."""

    @property
    def size(self) -> int:
        """Their number."""
        ...

    def sum(self, x: Array) -> Array:
        """The sum over them."""
        ...

    def gather(self, x: Array, axis: int) -> Array:
        """The shares of all of them, one after another."""
        ...


_FlashState = tuple[Array, Array, Array]
"""Running maximum, denominator and accumulator of flash attention."""


def dot(
    a: Array,
    b: Array,
    contract: tuple[int, int],
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    dtype: Any = None,
) -> Array:
    """`lax.dot_general` over one axis of each side, returned in `dtype`, float32 unless told."""
    return lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), batch), preferred_element_type=dtype or jnp.float32
    )


def dense(
    x: Float[Array, "T I"], w: Array, scale: Float[Array, " O"] | None = None
) -> Float[Array, "T O"]:
    """`x @ w.T` in float32, w (O, I), int8 with a `scale`. One 16-bit row is padded to two: CPUs have a fast product, but no
    fast GEMV, for it."""
    rows = x.shape[0]
    w = w.astype(x.dtype) if scale is not None else w
    if rows == 1 and w.dtype.itemsize == 2:
        x = jnp.pad(x, ((0, 1), (0, 0)))
    out = dot(x.astype(w.dtype), w, (1, 1))[:rows]
    return out if scale is None else out * scale[None, :]


def activate(x: Float[Array, "T F"], name: str) -> Float[Array, "T F"]:
    """The activation that a `ModelConfig` names."""
    if name == "relu":
        return jax.nn.relu(x)
    if name == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")


def _spread_heads(
    q: Float[Array, "B N H"], num_kv_heads: int, scale: float | None = None
) -> Float[Array, "B N E"]:
    """Head n's query in the lanes of its key/value head n // G, zeros elsewhere; scaled by 1 / sqrt(H)."""
    batch, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    group = num_heads // num_kv_heads
    own = (
        jnp.arange(num_heads, dtype=jnp.int32)[:, None] // group
        == jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :]
    )
    scaled = q * jnp.asarray(scale, q.dtype)
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
    fetch: _Fetch,
    tables: Int32[Array, "B A J"],
    lens: Int32[Array, " B"],
    rows: tuple[Array, Array],
    finish: Callable[[Float[Array, "R N E"]], Array],
    out_width: int,
    block_size: int,
    slot_ranges: Int32[Array, "B J 2"] | None,
    rules: ScoreRules | None = None,
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
            own, position = _own_slots(slot_ranges, len_tile, start, j * g, g, block_size)
            ids = lax.dynamic_slice_in_dim(table_tile, j * g, g, axis=2)
            keys, values = fetch(ids, own, position)
            s = dot(q_tile, keys, (2, 2), ((0,), (0,)))
            if partly is not None:
                s = partly.sum(s)
            if rules is not None:
                last = len_tile[:, None] - 1
                s, seen = _ruled(s, (position - last)[:, None, :], rules, (1, -1, 1))
                own = own & seen[:, 0]
            s = jnp.where(own[:, None, :], s, _MASKED)
            m_new = jnp.maximum(m, jnp.max(s, axis=-1))
            p = jnp.exp(s - m_new[:, :, None])
            rescale = jnp.exp(m - m_new)
            l = l * rescale + jnp.sum(p, axis=-1)
            acc = acc * rescale[:, :, None] + finish(
                dot(p.astype(values.dtype), values, (2, 1), ((0,), (0,)))
            )
            return j + 1, m_new, l, acc

        steps = (jnp.max(len_tile) + t - 1) // t
        first_step = jnp.zeros((), jnp.int32)
        if rules is not None and rules.window is not None:
            starts = jnp.where(len_tile > 0, len_tile - rules.window, jnp.max(len_tile))
            first_step = jnp.maximum(jnp.min(starts), 0) // t
        init = (
            first_step,
            jnp.full((r, num_heads), _MASKED, jnp.float32),
            jnp.zeros((r, num_heads), jnp.float32),
            jnp.zeros((r, num_heads, out_width), jnp.float32),
        )
        _, _, l, acc = lax.while_loop(lambda c: c[0] < steps, body, init)
        # A masked tile of a row adds exp(0) = 1 to its l when nothing was seen before: rows of length 0, or a window that
        # begins in a later tile, whose first score then scales it away.
        result = jnp.where(
            len_tile[:, None, None] > 0, acc / jnp.maximum(l, 1e-30)[:, :, None], 0.0
        )
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    first, last = rows[0] // r, (rows[1] + r - 1) // r
    return lax.fori_loop(
        first, last, row_tile, jnp.zeros((batch, num_heads, out_width), jnp.float32)
    )


def _ruled(
    s: Float[Array, "*heads T"],
    distance: Int32[Array, "*one T"],
    rules: ScoreRules,
    slopes_shape: tuple[int, ...],
) -> tuple[Array, Array]:
    """Scores by the rules and what the window leaves of them, from key position less query position; see
    `reference.ruled_scores`. Distances and, in `slopes_shape`, slopes broadcast against the scores."""
    if rules.softcap is not None:
        s = rules.softcap * jnp.tanh(s / rules.softcap)
    if rules.slopes is not None:
        s = s + rules.slopes.reshape(slopes_shape) * distance.astype(jnp.float32)
    if rules.window is None:
        return s, distance <= 0
    return s, (distance <= 0) & (distance > -rules.window)


def _own_slots(
    slot_ranges: Int32[Array, "B J 2"] | None,
    lens: Int32[Array, " R"],
    first_row: Array,
    first_entry: Array,
    num_entries: int,
    block_size: int,
) -> tuple[Bool[Array, "R T"], Int32[Array, "R T"]]:
    """`reference.own_slots` of R rows from `first_row` on, of their table entries from `first_entry` on."""
    start = first_entry * block_size
    if slot_ranges is None:
        position = start + jnp.arange(num_entries * block_size, dtype=jnp.int32)[None, :]
        return position < lens[:, None], jnp.broadcast_to(
            position, (lens.shape[0], position.shape[1])
        )
    ranges = lax.dynamic_slice(
        slot_ranges, (first_row, first_entry, jnp.int32(0)), (lens.shape[0], num_entries, 2)
    )
    of_row = functools.partial(own_slots, num_entries=num_entries, block_size=block_size)
    own, position = jax.vmap(of_row)(ranges, lens - start)
    return own, start + position


def fetch_blocks(
    pool: Array,
    ids: Int32[Array, "R G"],
    block_size: int,
    own: Bool[Array, "R T"] | None,
    width: int | None = None,
    tensor: Shards | None = None,
) -> Float[Array, "R T E"]:
    """The slots of G blocks a row; where `own` is given, zeros for slots that are not the row's own.

    Args:
        width: of a slot, where `block_size` of them do not fill a block.
        tensor: the devices that the features of a slot are spread over; `width` is that of all.
    """
    if tensor is not None:
        assert width is not None
        share = fetch_blocks(pool, ids, block_size, own, width // tensor.size)
        return tensor.gather(share, 2)
    r, g = ids.shape
    blocks = pool[ids.reshape(-1)]
    if width is not None and block_size * width < pool.shape[1]:
        blocks = blocks[:, : block_size * width]
    slots = blocks.reshape(r, g * block_size, -1)
    if own is None:
        return slots
    return jnp.where(own[:, :, None], slots, jnp.zeros((), slots.dtype))


def decode_kv(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P CE"],
    tables: Int32[Array, "B 2 J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    rules: ScoreRules | None = None,
) -> Float[Array, "B N H"]:
    """See `reference.decode_kv`; rows outside the half-open range `rows` give zeros without work."""
    num_kv_heads = pool.shape[1] // block_size // q.shape[2]

    def fetch(ids: Array, own: Array, position: Array) -> tuple[Array, Array]:
        del position
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
    pool: Float[Array, "P CE"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    rules: ScoreRules | None = None,
    tensor: Shards | None = None,
) -> Float[Array, "B N D"]:
    """See `reference.decode_absorbed`. With `tensor`, D counts the features that this device has of queries, pool and result."""

    def fetch(ids: Array, own: Array, position: Array) -> tuple[Array, Array]:
        del position
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


def project_kv(
    x: Float[Array, "T D"],
    w: Float[Array, "K H D"],
    b: Float[Array, "K H"] | None,
    angles: Float[Array, "T HALF"] | None = None,
    norm: KeyNorm | None = None,
) -> Float[Array, "T E"]:
    """Keys or values of layer inputs, in the dtype of `x`, lanes flattened; rounded once, after `reference.rotate`."""
    out = dot(x.astype(w.dtype), w.reshape(-1, w.shape[2]), (1, 1))
    if b is not None:
        out = out + b.astype(jnp.float32).reshape(1, -1)
    if norm is not None:
        heads = out.reshape(x.shape[0], *w.shape[:2])
        out = rms_norm_heads(heads, norm.scale, norm.eps).reshape(out.shape)
    if angles is not None:
        out = rotate(out.reshape(x.shape[0], *w.shape[:2]), angles).reshape(out.shape)
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
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    angles: Float[Array, "S HALF"] | None = None,
    key_norm: KeyNorm | None = None,
    rules: ScoreRules | None = None,
    tensor: Shards | None = None,
) -> Float[Array, "B N H"]:
    """See `reference.decode_reprojected`."""

    num_kv_heads = wk.shape[0]

    def fetch(ids: Array, own: Array, position: Array) -> tuple[Array, Array]:
        x = fetch_blocks(pool, ids[:, 0], block_size, own, wk.shape[2], tensor)
        flat = x.reshape(-1, x.shape[2])
        turns = None if angles is None else angles[position.reshape(-1)]
        keys, values = project_kv(flat, wk, bk, turns, key_norm), project_kv(flat, wv, bv)
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
    pool: Float[Array, "P CE"],
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
    rules: ScoreRules | None = None,
    tensor: Shards | None = None,
) -> Float[Array, "B N D"]:
    """See `reference.decode_v_absorbed`: one product with the keys [k_r | x] gives both parts of the scores."""
    num_kv_heads, _, width = wk_rotary.shape
    q = _spread_heads(q_rotary, num_kv_heads, scale=1.0).astype(pool.dtype)
    if q_absorbed is not None:
        q = jnp.concatenate([q, q_absorbed.astype(pool.dtype)], axis=2)

    def fetch(ids: Array, own: Array, position: Array) -> tuple[Array, Array]:
        x = fetch_blocks(pool, ids[:, 0], block_size, own, width, tensor)
        turns = angles[position.reshape(-1)]
        keys = project_kv(x.reshape(-1, width), wk_rotary, bk_rotary, turns, key_norm)
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
    wk: Float[Array, "K H D"] | None,
    bk: Float[Array, "K H"] | None,
    wv: Float[Array, "K H D"] | None,
    bv: Float[Array, "K H"] | None,
    *,
    block_size: int,
    with_hidden: bool,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    angles: Float[Array, "S HALF"] | None = None,
    hidden_block_size: int | None = None,
    key_norm: KeyNorm | None = None,
    rules: ScoreRules | None = None,
    tensor: Shards | None = None,
) -> Float[Array, "T N H"]:
    """See `reference.prefill`. A hidden prefix is projected first: above about H query tokens that costs less than
    absorbing (crossover at H * N / (N - 1))."""
    num_tokens, num_heads, head_dim = q.shape
    hidden_slots = hidden_block_size or block_size
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    tq, tk = min(PREFILL_QUERY_TILE, num_tokens), min(PREFILL_KEY_TILE, num_tokens)
    g, hidden_g = (max(1, PREFILL_KEY_TILE // slots) for slots in (block_size, hidden_slots))
    padding = max(-tables.shape[2] % g, -tables.shape[2] % hidden_g if with_hidden else 0)
    # Heads first, so that tiles are slices along one axis and their products need no transposition.
    pad = ((0, 0), (0, max(tq, tk)), (0, 0))
    by_head = q.reshape(num_tokens, num_kv_heads, group * head_dim).transpose(1, 0, 2)
    q_by_head = jnp.pad(by_head * jnp.asarray(head_dim**-0.5, q.dtype), pad)
    k_by_head, v_by_head = (jnp.pad(a.transpose(1, 0, 2), pad) for a in (k, v))
    tables = jnp.pad(tables, ((0, 0), (0, 0), (0, padding)))
    if slot_ranges is not None:
        slot_ranges = jnp.pad(slot_ranges, ((0, 0), (0, padding), (0, 0)))

    def queries(start: Array) -> Array:
        tile = lax.dynamic_slice_in_dim(q_by_head, start, tq, axis=1)
        return tile.reshape(num_kv_heads, tq * group, head_dim)

    def load(state: _FlashState, start: Array) -> _FlashState:
        m, l, acc = (lax.dynamic_slice_in_dim(a, start, tq, axis=1) for a in state)
        return m, l, acc

    def store(state: _FlashState, tile: _FlashState, start: Array) -> _FlashState:
        m, l, acc = (
            lax.dynamic_update_slice_in_dim(a, b, start, axis=1)
            for a, b in zip(state, tile, strict=True)
        )
        return m, l, acc

    def fold(
        tile: _FlashState, q_tile: Array, keys: Array, values: Array, mask: Array, distance: Array
    ) -> _FlashState:
        """Fold keys and values (K, S, H) into the state of tq queries; mask and position of the key less that of the query
        (tq, S)."""
        m, l, acc = tile
        s = dot(q_tile, keys, (2, 2), ((0,), (0,))).reshape(num_kv_heads, tq, group, -1)
        if rules is not None:
            s, seen = _ruled(s, distance[None, :, None, :], rules, (num_kv_heads, 1, group, 1))
            mask = mask & seen[0, :, 0]
        s = jnp.where(mask[None, :, None, :], s, _MASKED)
        m_new = jnp.maximum(m, jnp.max(s, axis=-1))
        p = jnp.exp(s - m_new[..., None])
        rescale = jnp.exp(m - m_new)
        pv = dot(
            p.reshape(num_kv_heads, tq * group, -1).astype(values.dtype),
            values,
            (2, 1),
            ((0,), (0,)),
        ).reshape(acc.shape)
        # A query that has seen no key yet keeps the running maximum of none: what it adds to l here, the first key that it
        # sees scales away. Its acc must not even see 0 * NaN: the tile may hold tokens of another row.
        sees = jnp.any(mask, axis=1)[None, :, None, None]
        return (
            m_new,
            l * rescale + jnp.sum(p, axis=-1),
            jnp.where(sees, acc * rescale[..., None] + pv, acc),
        )

    def row(r: Array, carry: tuple[_FlashState, Array]) -> tuple[_FlashState, Array]:
        state, out = carry
        offset, length, prefix = offsets[r], chunk_lens[r], prefix_lens[r]
        q_tiles = (length + tq - 1) // tq
        query_index = jnp.arange(tq, dtype=jnp.int32)

        def prefix_tile(
            j: Array,
            state: _FlashState,
            g: int,
            slots: int,
            fetch: Callable[..., tuple[Array, Array]],
        ) -> _FlashState:
            ids = lax.dynamic_slice(tables, (r, jnp.int32(0), j * g), (1, 2, g))[0]
            own, position = _own_slots(slot_ranges, prefix[None], r, j * g, g, slots)
            keys, values = (
                a.astype(k.dtype).reshape(-1, num_kv_heads, head_dim).transpose(1, 0, 2)
                for a in fetch(ids, own, position)
            )

            def query_tile(i: Array, state: _FlashState) -> _FlashState:
                start = offset + i * tq
                mask = own & (i * tq + query_index < length)[:, None]
                distance = position - (prefix + i * tq + query_index)[:, None]
                tile = fold(load(state, start), queries(start), keys, values, mask, distance)
                return store(state, tile, start)

            return lax.fori_loop(0, q_tiles, query_tile, state)

        def from_kv(ids: Array, own: Array, position: Array) -> tuple[Array, Array]:
            del position
            both = fetch_blocks(pool, ids, block_size, jnp.broadcast_to(own, (2, own.shape[1])))
            return both[0], both[1]

        def from_hidden(ids: Array, own: Array, position: Array) -> tuple[Array, Array]:
            assert wk is not None
            assert wv is not None
            x = fetch_blocks(pool, ids[:1], hidden_slots, own, wk.shape[2], tensor)[0]
            turns = None if angles is None else angles[position[0]]
            return project_kv(x, wk, bk, turns, key_norm), project_kv(x, wv, bv)

        def prefix_tiles(
            g: int, slots: int, fetch: Callable[..., tuple[Array, Array]]
        ) -> Callable[..., _FlashState]:
            tile = functools.partial(prefix_tile, g=g, slots=slots, fetch=fetch)
            size = g * slots
            first = jnp.int32(0)
            if rules is not None and rules.window is not None:
                first = jnp.maximum(prefix + 1 - rules.window, 0) // size
            return lambda state: lax.fori_loop(first, (prefix + size - 1) // size, tile, state)

        def own_tile(i: Array, out: Array) -> Array:
            start, q_position = offset + i * tq, i * tq + query_index
            q_tile = queries(start)

            def key_tile(j: Array, tile: _FlashState) -> _FlashState:
                keys, values = (
                    lax.dynamic_slice_in_dim(a, offset + j * tk, tk, axis=1)
                    for a in (k_by_head, v_by_head)
                )
                k_position = j * tk + jnp.arange(tk, dtype=jnp.int32)
                distance = k_position[None, :] - q_position[:, None]
                mask = (distance <= 0) & (q_position < length)[:, None]
                return fold(tile, q_tile, keys, values, mask, distance)

            first = jnp.int32(0)
            if rules is not None and rules.window is not None:
                first = jnp.maximum(i * tq + 1 - rules.window, 0) // tk
            last = (jnp.minimum((i + 1) * tq, length) + tk - 1) // tk
            _, l, acc = lax.fori_loop(first, last, key_tile, load(state, start))
            tile = (acc / jnp.maximum(l, 1e-30)[..., None]).astype(q.dtype).transpose(1, 0, 2, 3)
            return lax.dynamic_update_slice_in_dim(out, tile, start, axis=0)

        if with_hidden:
            state = lax.cond(
                hidden[r],
                prefix_tiles(hidden_g, hidden_slots, from_hidden),
                prefix_tiles(g, block_size, from_kv),
                state,
            )
        else:
            state = prefix_tiles(g, block_size, from_kv)(state)
        # Tokens of the next row in the last tile get zeros here, and their values when it is their turn.
        return state, lax.fori_loop(0, q_tiles, own_tile, out)

    padded = num_tokens + pad[1][1]
    init = (
        jnp.full((num_kv_heads, padded, group), _MASKED, jnp.float32),
        jnp.zeros((num_kv_heads, padded, group), jnp.float32),
        jnp.zeros((num_kv_heads, padded, group, head_dim), jnp.float32),
    )
    out = jnp.zeros((padded, num_kv_heads, group, head_dim), q.dtype)
    _, out = lax.fori_loop(0, num_rows, row, (init, out))
    return out[:num_tokens].reshape(num_tokens, num_heads, head_dim)

"""Absorbed decode attention over cached layer inputs as Pallas kernels on the Triton backend (contracts:
`reference.py`).

* `decode_absorbed`: the output of a head is as wide as the model, too wide for one program, while each score needs the
  full width. So there are two kernels. `absorbed_scores` takes a tile of positions and all heads: P = exp(S - m) in
  the pool's dtype, with m and l of every tile. `absorbed_output` takes a row and 128 lanes: sum of
  exp(m_tile - m) P x. It walks rows in the opposite order, to meet layer inputs that are still in the L2 cache.
* `decode_v_absorbed`: another first kernel, which computes and rotates the rotary lanes of the keys, and the same
  second.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int32

from apt_jax.pallas.triton_common import (
    MASKED,
    check_pool,
    cos_sin_tables,
    dot,
    lanes_of_step,
    launch,
    load,
    locate,
    own_lens,
    rotate_pair,
    slots_of,
    softmax_step,
    swizzle,
    swizzle_group,
    table_row_of,
)
from apt_jax.pallas.triton_tiles import MIN_SIDE, Tile, head_splits, padded, tile_for

Scores = tuple[Float[Array, "B N PADDED"], Float[Array, "B TILES N"], Float[Array, "B TILES N"]]
"""P = exp(S - m) in the pool's dtype, m and l = sum(P) in float32, of tiles of PADDED // TILES positions; tiles from
the end of a row on are not written."""


def _scores_shape(batch: int, heads: int, tiles: int, tokens: int, dtype: Any) -> Any:
    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    p = jax.ShapeDtypeStruct((batch, heads, tiles * tokens), dtype)
    return [p, shape(batch, tiles, heads), shape(batch, tiles, heads)]


def _store_scores(outs: tuple[Any, ...], s: Any, own: Any, row: Any, index: Any, heads: Any, head_ok: Any) -> None:
    """Write P, m and l of scores (heads, tokens) of tile `index`."""
    p_out, m_out, l_out = outs
    zeros = jnp.zeros(heads.shape, jnp.float32)
    m, l, p, _ = softmax_step((zeros + MASKED, zeros), s, own)
    column = index * own.size + jnp.arange(own.size)
    plt.store(
        p_out.at[row, heads[:, None], column[None, :]],
        p.astype(p_out.dtype),
        mask=jnp.broadcast_to(head_ok[:, None], p.shape),
    )
    plt.store(m_out.at[row, index, heads], m, mask=head_ok)
    plt.store(l_out.at[row, index, heads], l, mask=head_ok)


def _scores_kernel(
    table_of_row: Any,
    slots: Any,
    lens: Any,
    q_ref: Any,
    pool: Any,
    *outs: Any,
    tile: Tile,
    num_heads: int,
    width: int,
    holes: bool,
) -> None:
    index, row = pl.program_id(0), pl.program_id(1)
    length = plt.load(lens.at[row])

    @pl.when(index * tile.tokens < length)
    def _() -> None:
        table_row = table_row_of(table_of_row, row)
        position = index * tile.tokens + jnp.arange(tile.tokens)
        slot, own = locate(slots, table_row, 0, position, length, holes)
        parts = [start + jnp.arange(size) for start, size in head_splits(num_heads)]

        def step(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            lane, lane_ok = lanes_of_step(i, tile.lanes, width)
            lane_ok = None if lane_ok is None else lane_ok[None, :]
            shape = (tile.tokens, tile.lanes)
            x = load(pool, (slot[:, None], lane[None, :]), shape, own[:, None], lane_ok)

            def onto(total: Any, heads: Any) -> Any:
                q_index = (row, heads[:, None], lane[None, :])
                head_ok = (heads < num_heads)[:, None]
                q = load(q_ref, q_index, (heads.size, tile.lanes), head_ok, lane_ok)
                return total + dot(q, x, (1, 1))

            return tuple(onto(total, heads) for total, heads in zip(sums, parts, strict=True))

        init = tuple(jnp.zeros((heads.size, tile.tokens), jnp.float32) for heads in parts)
        sums = lax.fori_loop(0, -(-width // tile.lanes), step, init)
        for s, heads in zip(sums, parts, strict=True):
            _store_scores(outs, s, own, row, index, heads, heads < num_heads)


def absorbed_scores(
    q_absorbed: Float[Array, "B N D"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "R J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    slot_ranges: Int32[Array, "R J 2"] | None = None,
    table_of_row: Int32[Array, " B"] | None = None,
    interpret: bool = False,
    chip: str | None = None,
) -> Scores:
    """P, m, l of q~ x^T over positions [0, lens) of every query row: the first half of absorbed attention.

    Arguments as in `absorbed_attention`; `lens` is at most J * block_size.
    """
    check_pool(pool, block_size)
    batch, heads, width = q_absorbed.shape
    tile = tile_for("scores", chip, heads, width, pool.dtype.itemsize)
    tiles = -(-tables.shape[1] * block_size // tile.tokens)
    kernel = functools.partial(_scores_kernel, tile=tile, num_heads=heads, width=width, holes=slot_ranges is not None)
    outs = launch(
        kernel,
        (
            table_of_row,
            slots_of(tables[:, None], slot_ranges, block_size),
            lens,
            q_absorbed.astype(pool.dtype),
            pool.reshape(-1, width),
        ),
        _scores_shape(batch, heads, tiles, tile.tokens, pool.dtype),
        grid=(tiles, batch),
        warps=tile.warps,
        stages=tile.stages,
        name="absorbed_scores",
        interpret=interpret,
    )
    return tuple(outs)


def _output_kernel(
    table_of_row: Any,
    slots: Any,
    lens: Any,
    p_ref: Any,
    m_ref: Any,
    l_ref: Any,
    pool: Any,
    z_out: Any,
    m_out: Any,
    l_out: Any,
    *,
    tile: Tile,
    scores_tokens: int,
    batch: int,
    num_heads: int,
    width: int,
    holes: bool,
) -> None:
    part, row = pl.program_id(0), batch - 1 - pl.program_id(1)
    table_row, length = table_row_of(table_of_row, row), plt.load(lens.at[row])
    lane, lane_ok = lanes_of_step(part, tile.lanes, width)
    lane_mask = None if lane_ok is None else lane_ok[None, :]
    parts = [start + jnp.arange(size) for start, size in head_splits(num_heads)]
    tiles = (length + scores_tokens - 1) // scores_tokens

    def total_of(heads: Any) -> tuple[Any, Any]:
        """m and l of the whole row, from those of its tiles, 16 at a time."""

        def step(i: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
            m, l = state
            index = i * MIN_SIDE + jnp.arange(MIN_SIDE)
            there = (index < tiles)[:, None] & (heads < num_heads)[None, :]
            at = (row, index[:, None], heads[None, :])
            m_tile = plt.load(m_ref.at[at], mask=there, other=MASKED)
            l_tile = plt.load(l_ref.at[at], mask=there, other=0)
            m_new = jnp.maximum(m, jnp.max(m_tile, axis=0))
            l = l * jnp.exp(m - m_new) + jnp.sum(l_tile * jnp.exp(m_tile - m_new[None, :]), axis=0)
            return m_new, l

        init = jnp.full(heads.shape, MASKED, jnp.float32), jnp.zeros(heads.shape, jnp.float32)
        return lax.fori_loop(0, (tiles + MIN_SIDE - 1) // MIN_SIDE, step, init)

    totals = [total_of(heads) for heads in parts]

    def step(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        position = i * tile.tokens + jnp.arange(tile.tokens)
        slot, own = locate(slots, table_row, 0, position, length, holes)
        shape = (tile.tokens, tile.lanes)
        x = load(pool, (slot[:, None], lane[None, :]), shape, own[:, None], lane_mask)

        def onto(z: Any, heads: Any, m: Any) -> Any:
            head_ok = heads < num_heads
            index = i // (scores_tokens // tile.tokens)
            m_tile = plt.load(m_ref.at[row, index, heads], mask=head_ok, other=MASKED)
            at = (row, heads[:, None], position[None, :])
            p = load(p_ref, at, (heads.size, tile.tokens), head_ok[:, None])
            return z + dot(p, x, (1, 0)) * jnp.exp(m_tile - m)[:, None]

        return tuple(onto(z, heads, m) for z, heads, (m, _) in zip(sums, parts, totals, strict=True))

    init = tuple(jnp.zeros((heads.size, tile.lanes), jnp.float32) for heads in parts)
    sums = lax.fori_loop(0, (length + tile.tokens - 1) // tile.tokens, step, init)
    for z, heads, (m, l) in zip(sums, parts, totals, strict=True):
        head_ok = heads < num_heads
        ok = head_ok[:, None] if lane_mask is None else head_ok[:, None] & lane_mask
        z = z / jnp.maximum(l, 1e-30)[:, None]
        at = (row, heads[:, None], lane[None, :])
        plt.store(z_out.at[at], z.astype(z_out.dtype), mask=jnp.broadcast_to(ok, z.shape))
        plt.store(m_out.at[row, heads], m, mask=head_ok & (part == 0))
        plt.store(l_out.at[row, heads], l, mask=head_ok & (part == 0))


def absorbed_output(
    scores: Scores,
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "R J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    slot_ranges: Int32[Array, "R J 2"] | None = None,
    table_of_row: Int32[Array, " B"] | None = None,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
    chip: str | None = None,
) -> tuple[Float[Array, "B N D"], Float[Array, "B N"], Float[Array, "B N"]]:
    """(z, m, l) of what `absorbed_scores` wrote: the second half of absorbed attention.

    Arguments other than `scores` are the same as were given for them, results as in `absorbed_attention`.
    """
    check_pool(pool, block_size)
    p, m, l = scores
    batch, heads, width = p.shape[0], p.shape[1], pool.shape[2]
    tile = tile_for("output", chip, heads, width, pool.dtype.itemsize)
    scores_tokens = p.shape[2] // m.shape[1]
    kernel = functools.partial(
        _output_kernel,
        tile=tile,
        scores_tokens=scores_tokens,
        batch=batch,
        num_heads=heads,
        width=width,
        holes=slot_ranges is not None,
    )
    if scores_tokens % tile.tokens:
        raise ValueError(f"{tile.tokens=} of `output` must divide {scores_tokens=}")
    state = jax.ShapeDtypeStruct((batch, heads), jnp.float32)
    outs = launch(
        kernel,
        (
            table_of_row,
            slots_of(tables[:, None], slot_ranges, block_size),
            lens,
            p,
            m,
            l,
            pool.reshape(-1, width),
        ),
        [jax.ShapeDtypeStruct((batch, heads, width), out_dtype), state, state],
        grid=(-(-width // tile.lanes), batch),
        warps=tile.warps,
        stages=tile.stages,
        name="absorbed_output",
        interpret=interpret,
    )
    return tuple(outs)


def absorbed_attention(
    q_absorbed: Float[Array, "B N D"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "R J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    slot_ranges: Int32[Array, "R J 2"] | None = None,
    table_of_row: Int32[Array, " B"] | None = None,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
    chip: str | None = None,
) -> tuple[Float[Array, "B N D"], Float[Array, "B N"], Float[Array, "B N"]]:
    """z = softmax(S) x with S = q~ x^T over positions [0, lens), m = max(S), l = sum(exp(S - m)).

    Two parts of one attention join as (l_1 e^(m_1 - m) z_1 + l_2 e^(m_2 - m) z_2) / (l_1 e^(m_1 - m) + l_2 e^(m_2 - m))
    with m = max(m_1, m_2). A row of length 0 gives z = 0, m = -1e30, l = 0. m and l are float32.

    Args:
        lens: positions that each query row attends to, at most J * block_size.
        table_of_row: row of `tables` and `slot_ranges` of each query row; None: its own (R = B).
        out_dtype: of z, which is N times as wide as a layer input: 16 bits save a good part of the traffic.
        interpret: run in Pallas' interpreter, on any platform.
        chip: what tiles are chosen for (`triton_tiles.CHIPS`).
    """
    more: dict[str, Any] = {
        "block_size": block_size,
        "slot_ranges": slot_ranges,
        "table_of_row": table_of_row,
        "interpret": interpret,
        "chip": chip,
    }
    scores = absorbed_scores(q_absorbed, pool, tables, lens, **more)
    return absorbed_output(scores, pool, tables, lens, out_dtype=out_dtype, **more)


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "R J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "R J 2"] | None = None,
    table_of_row: Int32[Array, " B"] | None = None,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
    chip: str | None = None,
) -> Float[Array, "B N D"]:
    """`softmax(q~ x^T) x` over positions [0, lens); see `reference.decode_absorbed` and `absorbed_attention`."""
    z, _, _ = absorbed_attention(
        q_absorbed,
        pool,
        tables,
        own_lens(lens, rows, tables.shape[1] * block_size),
        block_size=block_size,
        slot_ranges=slot_ranges,
        table_of_row=table_of_row,
        out_dtype=out_dtype,
        interpret=interpret,
        chip=chip,
    )
    return z


def _rotary_scores_kernel(
    table_of_row: Any,
    slots: Any,
    lens: Any,
    q_rotary: Any,
    q_absorbed: Any,
    pool: Any,
    wk: Any,
    bk: Any,
    cos: Any,
    sin: Any,
    *outs: Any,
    tile: Tile,
    tiles: int,
    neighbours: int,
    row_programs: int,
    num_heads: int,
    half: int,
    width: int,
    holes: bool,
) -> None:
    """Scores of one tile of positions and the heads whose half turns fill `tile.columns` lanes side by side."""
    group, index = swizzle(pl.program_id(0), neighbours, row_programs)
    row, index = index // tiles, index % tiles
    length = plt.load(lens.at[row])

    @pl.when(index * tile.tokens < length)
    def _() -> None:
        table_row = table_row_of(table_of_row, row)
        position = index * tile.tokens + jnp.arange(tile.tokens)
        slot, own = locate(slots, table_row, 0, position, length, holes)
        half_padded = padded(half)
        together = _heads_together(tile, half, num_heads)
        columns = jnp.arange(together * half_padded)
        head, lane = group * together + columns // half_padded, columns % half_padded
        column_ok = (lane < half) & (head < num_heads)
        member = jnp.arange(MIN_SIDE)
        heads = group * together + member
        head_ok = (member < together) & (heads < num_heads)

        def project(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            feature, feature_ok = lanes_of_step(i, tile.lanes, width)
            feature_ok = None if feature_ok is None else feature_ok[None, :]
            shape = (tile.tokens, tile.lanes)
            x = load(pool, (slot[:, None], feature[None, :]), shape, own[:, None], feature_ok)
            totals = []
            for total, offset in zip(sums[:2], (0, half), strict=True):
                at = (head[:, None], (offset + lane)[:, None], feature[None, :])
                shape = (columns.size, tile.lanes)
                weights = load(wk, at, shape, column_ok[:, None], feature_ok)
                totals.append(total + dot(weights, x, (1, 1)))
            if q_absorbed is not None:
                at = (row, heads[:, None], feature[None, :])
                shape = (MIN_SIDE, tile.lanes)
                q = load(q_absorbed, at, shape, head_ok[:, None], feature_ok)
                totals.append(sums[2] + dot(q, x, (1, 1)))
            return tuple(totals)

        zeros = jnp.zeros((columns.size, tile.tokens), jnp.float32)
        init = (zeros, zeros)
        if q_absorbed is not None:
            init = (*init, jnp.zeros((MIN_SIDE, tile.tokens), jnp.float32))
        a, b, *rest = lax.fori_loop(0, -(-width // tile.lanes), project, init)
        if bk is not None:
            biases = (load(bk, (head, offset + lane), columns.shape, column_ok) for offset in (0, half))
            a, b = (key + bias.astype(jnp.float32)[:, None] for key, bias in zip((a, b), biases, strict=True))
        at = (lane[:, None], position[None, :])
        masks = (own[None, :], column_ok[:, None])
        a, b = rotate_pair(a, b, *(load(table, at, a.shape, *masks) for table in (cos, sin)))
        # Every head's query in its own columns, zeros elsewhere: one product sums each head's columns apart.
        s = rest[0] if rest else 0.0
        mask = head_ok[:, None] & column_ok[None, :] & (heads[:, None] == head[None, :])
        for key, offset in ((a, 0), (b, half)):
            at = (row, heads[:, None], (offset + lane)[None, :])
            q = load(q_rotary, at, (MIN_SIDE, columns.size), mask)
            s = s + dot(q, key.astype(q.dtype), (1, 0))
        _store_scores(outs, s, own, row, index, heads, head_ok)


def _heads_together(tile: Tile, half: int, num_heads: int) -> int:
    """Heads of one program of `_rotary_scores_kernel`, a power of two."""
    return max(1, min(tile.columns // padded(half), MIN_SIDE, padded(num_heads)))


def rotary_scores(
    q_rotary: Float[Array, "B N R"],
    q_absorbed: Float[Array, "B N D"] | None,
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "RT J"],
    lens: Int32[Array, " B"],
    wk_rotary: Float[Array, "N R D"],
    bk_rotary: Float[Array, "N R"] | None,
    angles: Float[Array, "S HALF"],
    *,
    block_size: int,
    slot_ranges: Int32[Array, "RT J 2"] | None = None,
    table_of_row: Int32[Array, " B"] | None = None,
    interpret: bool = False,
    chip: str | None = None,
) -> Scores:
    """P, m, l of q_r k_r^T + q~ x^T over positions [0, lens) of every query row: what `absorbed_output` takes.

    Arguments as in `decode_v_absorbed`; `lens` is at most J * block_size.
    """
    check_pool(pool, block_size)
    batch, heads, rotary_dim = q_rotary.shape
    width = wk_rotary.shape[2]
    if pool.shape[2] != width or rotary_dim != 2 * angles.shape[1]:
        raise ValueError(f"{pool.shape=}, {wk_rotary.shape=} and {angles.shape=} do not fit")
    tile = tile_for("rotary_scores", chip, heads, width, pool.dtype.itemsize)
    tiles = -(-tables.shape[1] * block_size // tile.tokens)
    groups = -(-heads // _heads_together(tile, rotary_dim // 2, heads))
    kernel = functools.partial(
        _rotary_scores_kernel,
        tile=tile,
        tiles=tiles,
        neighbours=swizzle_group(groups),
        row_programs=batch * tiles,
        num_heads=heads,
        half=rotary_dim // 2,
        width=width,
        holes=slot_ranges is not None,
    )

    def cast(a: Array | None) -> Array | None:
        return None if a is None else a.astype(pool.dtype)

    outs = launch(
        kernel,
        (
            table_of_row,
            slots_of(tables[:, None], slot_ranges, block_size),
            lens,
            cast(q_rotary),
            cast(q_absorbed),
            pool.reshape(-1, width),
            cast(wk_rotary),
            cast(bk_rotary),
            *cos_sin_tables(angles),
        ),
        _scores_shape(batch, heads, tiles, tile.tokens, pool.dtype),
        grid=(groups * batch * tiles,),
        warps=tile.warps,
        stages=tile.stages,
        name="rotary_scores",
        interpret=interpret,
    )
    return tuple(outs)


def decode_v_absorbed(
    q_rotary: Float[Array, "B N R"],
    q_absorbed: Float[Array, "B N D"] | None,
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "RT J"],
    lens: Int32[Array, " B"],
    wk_rotary: Float[Array, "N R D"],
    bk_rotary: Float[Array, "N R"] | None,
    angles: Float[Array, "S HALF"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "RT J 2"] | None = None,
    table_of_row: Int32[Array, " B"] | None = None,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
    chip: str | None = None,
) -> Float[Array, "B N D"]:
    """`softmax(q_r k_r^T + q~ x^T) x`, k_r computed and turned tile by tile; see `reference.decode_v_absorbed`.

    Keys are accumulated in float32, turned, and rounded to the pool's dtype. Other arguments as in
    `absorbed_attention`.
    """
    lens = own_lens(lens, rows, tables.shape[1] * block_size)
    more: dict[str, Any] = {
        "block_size": block_size,
        "slot_ranges": slot_ranges,
        "table_of_row": table_of_row,
        "interpret": interpret,
        "chip": chip,
    }
    scores = rotary_scores(q_rotary, q_absorbed, pool, tables, lens, wk_rotary, bk_rotary, angles, **more)
    z, _, _ = absorbed_output(scores, pool, tables, lens, out_dtype=out_dtype, **more)
    return z

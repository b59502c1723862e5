"""Decode attention with absorbed values and reprojected rotary keys, as Pallas kernels on the Triton backend (contract:
`reference.decode_v_absorbed`).

`rotary_scores` computes and rotates the rotary lanes of a tile's keys and adds the absorbed part of the scores.
`triton_decode_absorbed.absorbed_output` computes the weighted sum of layer inputs, as for fully absorbed keys.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from apt_jax.ops.calls import DecodeCall
from apt_jax.pallas.triton_common import (
    cos_sin_tables,
    dot,
    lanes_of_step,
    launch,
    load,
    rotate_pair,
    swizzle,
    swizzle_group,
)
from apt_jax.pallas.triton_decode_absorbed import (
    Output,
    Scores,
    Wave,
    absorbed_output,
    scores_shape,
    store_scores,
    waves_of,
)
from apt_jax.pallas.triton_decode_common import (
    ScoreModifiers,
    by_block,
    check_inputs,
    check_key_norm,
    find_slots,
    lane_scale,
    scale_of,
    slopes_of,
)
from apt_jax.pallas.triton_tiles import MIN_SIDE, Tile, padded, tile_for
from apt_jax.pallas.triton_work_list import pieces_for, read_item, rows_of_call, work_list

PROGRAMS_PER_PROCESSOR = 4
"""Number of programs per processor, which runs one at a time."""


class _Operands(NamedTuple):
    """Arrays that the kernel reads."""

    items: Any
    tables: Any
    slot_ranges: Any
    slopes: Any
    q_rotary: Any
    q_absorbed: Any
    pool: Any
    wk: Any
    bk: Any
    scale: Any
    cos: Any
    sin: Any


def _rotary_scores_kernel(
    refs: _Operands,
    *outs: Any,
    tile: Tile,
    rules: ScoreModifiers,
    norm_eps: float,
    block_size: int,
    neighbours: int,
    num_items: int,
    num_heads: int,
    num_kv_heads: int,
    half: int,
    turned: int,
    width: int,
) -> None:
    """Compute the scores of a piece, for as many key heads as fit `tile.columns` with one half of their rotary
    lanes."""
    items, tables, slot_ranges, slopes, q_rotary, q_absorbed, pool, wk, bk, scale, cos, sin = refs
    program, index = swizzle(pl.program_id(0), neighbours, num_items)
    item = read_item(items, index)
    half_padded, group = padded(half), num_heads // num_kv_heads
    together = _heads_together(tile, half, num_kv_heads, scale is not None)
    columns = jnp.arange(together * half_padded)
    kv_head, lane = program * together + columns // half_padded, columns % half_padded
    column_ok = (lane < half) & (kv_head < num_kv_heads)
    # The lanes of a head as two arrays, in which lanes that are rotated together have the same index; lanes that are
    # not rotated come last.
    halves = (lane, half + lane)
    if turned < half:
        halves = (jnp.where(lane < turned, lane, turned + lane), jnp.where(lane < turned, turned, half) + lane)
    member = jnp.arange(padded(together * group))
    heads = program * together * group + member
    head_ok = (member < together * group) & (heads < num_heads)

    def one_tile(index: Any, done: Any) -> Any:
        position = index * tile.tokens + jnp.arange(tile.tokens)
        sees = rules.sees(position, item.length)
        block, slot, own = find_slots(tables, slot_ranges, item.table, 0, position, sees, block_size)

        def project(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            feature, feature_ok = lanes_of_step(i, tile.lanes, width)
            feature_ok = None if feature_ok is None else feature_ok[None, :]
            shape = (tile.tokens, tile.lanes)
            at = (block[:, None], (slot * width)[:, None] + feature[None, :])
            x = load(pool, at, shape, own[:, None], feature_ok)
            totals = []
            for total, lanes in zip(sums[:2], halves, strict=True):
                at = (kv_head[:, None], lanes[:, None], feature[None, :])
                shape = (columns.size, tile.lanes)
                weights = load(wk, at, shape, column_ok[:, None], feature_ok)
                totals.append(total + dot(weights, x, (1, 1)))
            if q_absorbed is not None:
                at = (item.row, heads[:, None], feature[None, :])
                shape = (heads.size, tile.lanes)
                q = load(q_absorbed, at, shape, head_ok[:, None], feature_ok)
                totals.append(sums[2] + dot(q, x, (1, 1)))
            return tuple(totals)

        zeros = jnp.zeros((columns.size, tile.tokens), jnp.float32)
        init = (zeros, zeros)
        if q_absorbed is not None:
            init = (*init, jnp.zeros((heads.size, tile.tokens), jnp.float32))
        a, b, *rest = lax.fori_loop(0, -(-width // tile.lanes), project, init)
        if bk is not None:
            biases = (load(bk, (kv_head, lanes), columns.shape, column_ok) for lanes in halves)
            a, b = (key + bias.astype(jnp.float32)[:, None] for key, bias in zip((a, b), biases, strict=True))
        # Each head's query is placed in the columns of its key head, with zeros elsewhere: one product then sums each
        # head's columns separately.
        mask = head_ok[:, None] & column_ok[None, :] & ((heads // group)[:, None] == kv_head[None, :])
        factor = None
        if scale is not None:
            factor = lax.rsqrt(jnp.sum(a * a + b * b, axis=0) * (1 / (2 * half)) + norm_eps)[None, :]
            scales = (lane_scale(scale, lanes, column_ok)[:, None] for lanes in halves)
            a, b = (key * lanes for key, lanes in zip((a, b), scales, strict=True))
        at = (lane[:, None], position[None, :])
        masks = (own[None, :], column_ok[:, None], (lane < turned)[:, None] if turned < half else None)
        c, d = (load(table, at, a.shape, *masks) for table in (cos, sin))
        a, b = rotate_pair(a, b, c if turned == half else jnp.where((lane < turned)[:, None], c, 1.0), d)
        s = rest[0] if rest else 0.0
        for key, lanes in zip((a, b), halves, strict=True):
            at = (item.row, heads[:, None], lanes[None, :])
            q = load(q_rotary, at, (heads.size, columns.size), mask)
            s = s + dot(q, key.astype(q.dtype), (1, 0))
        s = s if factor is None else s * factor
        s = rules(s, position, item.length, slopes, heads, head_ok)
        store_scores(outs, s, own, item.packed + (index - item.first), heads, head_ok)
        return done

    @pl.when(item.row >= 0)
    def _() -> None:
        lax.fori_loop(item.first, item.last, one_tile, jnp.int32(0))


def _heads_together(tile: Tile, half: int, num_kv_heads: int, normed: bool) -> int:
    """Return the number of key heads per program of `_rotary_scores_kernel`: a power of two; 1 if keys are normed."""
    return 1 if normed else max(1, min(tile.columns // padded(half), MIN_SIDE, padded(num_kv_heads)))


def rotary_scores(
    q_rotary: Float[Array, "B N R"],
    q_absorbed: Float[Array, "B N D"] | None,
    call: DecodeCall,
    wave: Wave,
    *,
    interpret: bool = False,
    chip: str | None = None,
) -> Scores:
    """Return P, m and l of q_r k_r^T + q~ x^T for the rows of a wave, as input for `absorbed_output`.

    For the other arguments see `decode_v_absorbed`.
    """
    pool, p = call.pool, call.projected
    assert p.angles is not None
    heads, rotary_dim = q_rotary.shape[1:]
    kv_heads, _, width = p.wk.shape
    tile = tile_for("rotary_scores", chip, heads, width, pool.dtype.itemsize, rotary_dim)
    groups = -(-kv_heads // _heads_together(tile, rotary_dim // 2, kv_heads, p.key_norm is not None))
    work = work_list(wave.rows, pieces_for(chip, groups, PROGRAMS_PER_PROCESSOR), wave.most_tiles, wave.active)
    num_items = work.items.shape[0]
    kernel = functools.partial(
        _rotary_scores_kernel,
        tile=tile,
        rules=ScoreModifiers.of(call.rules),
        norm_eps=0.0 if p.key_norm is None else p.key_norm.eps,
        block_size=call.block_size,
        neighbours=swizzle_group(groups),
        num_items=num_items,
        num_heads=heads,
        num_kv_heads=kv_heads,
        half=rotary_dim // 2,
        turned=p.angles.shape[1],
        width=width,
    )

    def cast(a: Array | None) -> Array | None:
        return None if a is None else a.astype(pool.dtype)

    outs = launch(
        kernel,
        _Operands(
            work.items,
            call.tables[:, None],
            call.slot_ranges,
            slopes_of(call.rules),
            cast(q_rotary),
            cast(q_absorbed),
            by_block(pool),
            cast(p.wk),
            cast(p.bk),
            scale_of(p.key_norm),
            *cos_sin_tables(p.angles),
        ),
        scores_shape(wave, heads, tile.tokens, pool.dtype),
        grid=(groups * num_items,),
        warps=tile.warps,
        stages=tile.stages,
        name="rotary_scores",
        interpret=interpret,
    )
    return tuple(outs)


def decode_v_absorbed(
    q_rotary: Float[Array, "B N R"],
    q_absorbed: Float[Array, "B N D"] | None,
    call: DecodeCall,
    *,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
    chip: str | None = None,
) -> Float[Array, "B N D"]:
    """Return `softmax(q_r k_r^T + q~ x^T) x`, with k_r computed and rotated tile by tile; see
    `reference.decode_v_absorbed`.

    Keys are accumulated in float32, normed per head, rotated, and rounded to the pool's dtype.

    Args:
        q_rotary: queries q_r for the rotary lanes.
        q_absorbed: absorbed queries q~ for the other lanes; None: all lanes are rotary.
        call: pool, tables, lengths, projections and logit modifiers.
        out_dtype: see `triton_decode_absorbed.absorbed_attention`.
        interpret: see `triton_decode_absorbed.absorbed_attention`.
        chip: see `triton_decode_absorbed.absorbed_attention`.

    Raises:
        ValueError: the kernels do not support the block size, dtype, heads, norm, angles or chip.
    """
    heads, rotary_dim = q_rotary.shape[1:]
    p, itemsize = call.projected, call.pool.dtype.itemsize
    assert p.angles is not None
    kv_heads, _, width = p.wk.shape
    check_inputs(call.pool, call.block_size, width)
    check_key_norm(p.key_norm, rotary_dim)
    if heads % kv_heads or rotary_dim % 2 or rotary_dim < 2 * p.angles.shape[1]:
        raise ValueError(f"{q_rotary.shape=}, {p.wk.shape=} and {p.angles.shape=} do not match")
    tile = tile_for("rotary_scores", chip, heads, width, itemsize, rotary_dim)
    visible = rows_of_call(call, tile.tokens)
    on: dict[str, Any] = {"interpret": interpret, "chip": chip}
    out: Output | None = None
    for wave in waves_of(visible, -(-call.capacity // tile.tokens), heads * tile.tokens * itemsize):
        scores = rotary_scores(q_rotary, q_absorbed, call, wave, **on)
        out = absorbed_output(scores, call, wave, out, width=width, out_dtype=out_dtype, **on)
    assert out is not None
    return out[0]

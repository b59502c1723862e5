"""Absorbed decode attention over cached layer inputs as Pallas kernels on the Triton backend (contract:
`reference.decode_absorbed`).

The output of a head is as wide as the model, too wide for one program, while each score needs the full width. So there
are two kernels, both over the pieces of a work list (`triton_work_list.py`). A program of `absorbed_scores` takes tiles
of positions and all heads, and computes P = exp(S - m) in the pool's dtype, with m and l of every tile. A program of
`absorbed_output` takes 128 lanes of a piece, and computes the sum of exp(m_tile - m) P x. It takes rows in the opposite
order, because layer inputs that were read last are still in the L2 cache.

P is stored tile after tile for all rows, so its memory depends on the actual lengths of the rows, not on their maximum
lengths. Rows whose tiles do not fit `_SCORE_BYTES` together are processed in waves, which reuse the same memory.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Bool, Float

from apt_jax.ops.calls import DecodeCall
from apt_jax.pallas.triton_common import MASKED, dot, lanes_of_step, launch, load
from apt_jax.pallas.triton_decode_common import (
    ScoreModifiers,
    by_block,
    check_inputs,
    find_slots,
    sinks_of,
    slopes_of,
    softmax_step,
)
from apt_jax.pallas.triton_tiles import Tile, head_splits, tile_for
from apt_jax.pallas.triton_work_list import (
    Rows,
    WorkList,
    join_pieces,
    partial_shapes,
    pieces_for,
    read_item,
    rows_of_call,
    store_piece,
    work_list,
)

SCORES_PER_PROCESSOR = 8
"""Number of programs of `absorbed_scores` per processor: twice as many as it runs at once."""
OUTPUTS_PER_PROCESSOR = 4
"""Number of programs of `absorbed_output` per processor: two to four times as many as it runs at once."""

_SCORE_BYTES = 128 << 20
"""Maximum memory of P in bytes, unless a single row needs more."""

Scores = tuple[Float[Array, "TILES N T"], Float[Array, "TILES N"], Float[Array, "TILES N"]]
"""P = exp(S - m) in the pool's dtype, m and l = sum(P) in float32, of the visible tiles of all rows, in the order of
`Rows.packed`."""

Output = tuple[Float[Array, "B N D"], Float[Array, "B N"], Float[Array, "B N"]]
"""z, m and l of each row; see `absorbed_attention`."""


class Wave(NamedTuple):
    """Rows whose tiles are in memory together."""

    rows: Rows
    active: Bool[Array, " B"] | None
    """Mask of the rows in this wave; None: all rows."""
    num_tiles: int
    """Number of tiles that fit in memory."""
    most_tiles: int
    """Maximum number of tiles per row."""


def waves_of(rows: Rows, most_tiles: int, tile_bytes: int, every: int | None = None) -> Iterator[Wave]:
    """Split the rows into waves; there is a single wave if the maximum number of tiles fits `_SCORE_BYTES`.

    A row belongs to the wave in which its first tile lies, so the tiles of a wave extend at most `most_tiles` beyond
    its end.

    Args:
        rows: visible tiles of each row.
        most_tiles: maximum number of tiles per row.
        tile_bytes: bytes of P per tile.
        every: maximum number of tiles of all rows together; None: `most_tiles` per row.
    """
    every = rows.length.shape[0] * most_tiles if every is None else every
    fit = _SCORE_BYTES // tile_bytes
    if every <= fit:
        yield Wave(rows, None, every, most_tiles)
        return
    step = max(most_tiles, fit - most_tiles)
    count = -(-every // step)
    number = jnp.minimum(rows.packed // step, count - 1)
    for wave in range(count):
        moved = rows._replace(packed=rows.packed - wave * step)
        yield Wave(moved, number == wave, step + most_tiles, most_tiles)


def scores_shape(wave: Wave, heads: int, tokens: int, dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of `Scores` for a wave."""
    state = jax.ShapeDtypeStruct((wave.num_tiles, heads), jnp.float32)
    return [jax.ShapeDtypeStruct((wave.num_tiles, heads, tokens), dtype), state, state]


def store_scores(outs: tuple[Any, ...], s: Any, own: Any, tile: Any, heads: Any, head_ok: Any) -> None:
    """Compute and store P, m and l of the scores (heads, tokens) of the tile with packed index `tile`."""
    p_out, m_out, l_out = outs
    zeros = jnp.zeros(heads.shape, jnp.float32)
    m, l, p, _ = softmax_step((zeros + MASKED, zeros), s, own)
    at = (tile, heads[:, None], jnp.arange(own.size)[None, :])
    plt.store(p_out.at[at], p.astype(p_out.dtype), mask=jnp.broadcast_to(head_ok[:, None], p.shape))
    plt.store(m_out.at[tile, heads], m, mask=head_ok)
    plt.store(l_out.at[tile, heads], l, mask=head_ok)


def _scores_kernel(
    items: Any,
    tables: Any,
    slot_ranges: Any,
    slopes: Any,
    q_ref: Any,
    pool: Any,
    *outs: Any,
    tile: Tile,
    rules: ScoreModifiers,
    block_size: int,
    num_heads: int,
    width: int,
    sums_only: bool,
) -> None:
    item = read_item(items, pl.program_id(1))
    turn, turns = pl.program_id(0), pl.num_programs(0)
    parts = [start + jnp.arange(size) for start, size in head_splits(num_heads)]

    def one_tile(i: Any, done: Any) -> Any:
        index = item.first + turn + i * turns
        position = index * tile.tokens + jnp.arange(tile.tokens)
        sees = rules.sees(position, item.length)
        block, slot, own = find_slots(tables, slot_ranges, item.table, 0, position, sees, block_size)

        def step(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            lane, lane_ok = lanes_of_step(i, tile.lanes, width)
            lane_ok = None if lane_ok is None else lane_ok[None, :]
            shape = (tile.tokens, tile.lanes)
            at = (block[:, None], (slot * width)[:, None] + lane[None, :])
            x = load(pool, at, shape, own[:, None], lane_ok)

            def onto(total: Any, heads: Any) -> Any:
                q_index = (item.row, heads[:, None], lane[None, :])
                head_ok = (heads < num_heads)[:, None]
                q = load(q_ref, q_index, (heads.size, tile.lanes), head_ok, lane_ok)
                return total + dot(q, x, (1, 1))

            return tuple(onto(total, heads) for total, heads in zip(sums, parts, strict=True))

        init = tuple(jnp.zeros((heads.size, tile.tokens), jnp.float32) for heads in parts)
        sums = lax.fori_loop(0, -(-width // tile.lanes), step, init)
        for s, heads in zip(sums, parts, strict=True):
            head_ok, packed = heads < num_heads, item.packed + (index - item.first)
            if sums_only:
                at = (packed, heads[:, None], jnp.arange(tile.tokens)[None, :])
                plt.store(outs[0].at[at], s, mask=jnp.broadcast_to(head_ok[:, None], s.shape))
            else:
                s = rules(s, position, item.length, slopes, heads, head_ok)
                store_scores(outs, s, own, packed, heads, head_ok)
        return done

    @pl.when(item.row >= 0)
    def _() -> None:
        lax.fori_loop(0, lax.div(item.last - item.first - turn + turns - 1, turns), one_tile, jnp.int32(0))


def _pieces_of(wave: Wave, chip: str | None, heads: int, width: int, itemsize: int) -> WorkList:
    """Return the work list of a wave; both kernels share it, so it is made once."""
    programs = -(-width // tile_for("output", chip, heads, width, itemsize).lanes)
    return work_list(wave.rows, pieces_for(chip, programs, OUTPUTS_PER_PROCESSOR), wave.most_tiles, wave.active)


def _absorbed_scores(
    q_absorbed: Float[Array, "B N D"],
    call: DecodeCall,
    wave: Wave,
    *,
    interpret: bool,
    chip: str | None,
    sums_only: bool,
) -> tuple[Array, ...]:
    """Compute `absorbed_scores`, or with `sums_only` the single result of `score_sums`."""
    pool, slopes = call.pool, None if sums_only else slopes_of(call.rules)
    heads, width = q_absorbed.shape[1:]
    tile = tile_for("scores", chip, heads, width, pool.dtype.itemsize)
    work = _pieces_of(wave, chip, heads, width, pool.dtype.itemsize)
    num_items = work.items.shape[0]
    turns = min(wave.most_tiles, pieces_for(chip, num_items, SCORES_PER_PROCESSOR))
    kernel = functools.partial(
        _scores_kernel,
        tile=tile,
        rules=ScoreModifiers.of(call.rules),
        block_size=call.block_size,
        num_heads=heads,
        width=width,
        sums_only=sums_only,
    )
    shapes = scores_shape(wave, heads, tile.tokens, pool.dtype)
    if sums_only:
        shapes = [jax.ShapeDtypeStruct(shapes[0].shape, jnp.float32)]
    outs = launch(
        kernel,
        (work.items, call.tables[:, None], call.slot_ranges, slopes, q_absorbed.astype(pool.dtype), by_block(pool)),
        shapes,
        grid=(turns, num_items),
        warps=tile.warps,
        stages=tile.stages,
        name="score_sums" if sums_only else "absorbed_scores",
        interpret=interpret,
    )
    return tuple(outs)


def absorbed_scores(
    q_absorbed: Float[Array, "B N D"],
    call: DecodeCall,
    wave: Wave,
    *,
    interpret: bool = False,
    chip: str | None = None,
) -> Scores:
    """Return P, m and l of S = q~ x^T for the rows of a wave: the first half of absorbed attention.

    For the other arguments see `absorbed_attention`.
    """
    p, m, l = _absorbed_scores(q_absorbed, call, wave, interpret=interpret, chip=chip, sums_only=False)
    return p, m, l


def score_sums(
    q_absorbed: Float[Array, "B N D"],
    call: DecodeCall,
    wave: Wave,
    *,
    interpret: bool = False,
    chip: str | None = None,
) -> Float[Array, "TILES N T"]:
    """Return q~ x^T over the D features of this device in float32, tile after tile like P of `Scores`.

    Values are undefined beyond the tiles of the wave's rows, and 0 for slots outside the row. Of the logit modifiers
    only the window is applied. For the other arguments see `absorbed_attention`.
    """
    (sums,) = _absorbed_scores(q_absorbed, call, wave, interpret=interpret, chip=chip, sums_only=True)
    return sums


def _output_kernel(
    *refs: Any,
    tile: Tile,
    rules: ScoreModifiers,
    block_size: int,
    num_items: int,
    num_heads: int,
    width: int,
) -> None:
    items, tables, slot_ranges, sinks, p_ref, m_ref, l_ref, pool = refs[:8]
    results, partial = refs[-6:-3], refs[-3:]  # between them: results of earlier waves, in the same memory
    part, index = pl.program_id(0), num_items - 1 - pl.program_id(1)
    item = read_item(items, index)
    lane, lane_ok = lanes_of_step(part, tile.lanes, width)
    lane_mask = None if lane_ok is None else lane_ok[None, :]
    parts = [start + jnp.arange(size) for start, size in head_splits(num_heads)]
    ratio = p_ref.shape[2] // tile.tokens

    @pl.when(item.row >= 0)
    def _() -> None:
        def state_of(i: Any) -> list[tuple[Any, Any]]:
            """Load m and l of the tile of scores that step i is in; l is 0 except at the first step of the tile."""
            scores_tile = item.packed + (lax.div(i, jnp.int32(ratio)) - item.first)
            found = []
            for heads in parts:
                there = (heads < num_heads) & (i < last)
                m_tile = plt.load(m_ref.at[scores_tile, heads], mask=there, other=MASKED)
                begins = lax.rem(i, jnp.int32(ratio)) == 0
                found.append((m_tile, plt.load(l_ref.at[scores_tile, heads], mask=there & begins, other=0)))
            return found

        def place_of(i: Any) -> tuple[Any, Any, Any]:
            position = i * tile.tokens + jnp.arange(tile.tokens)
            sees = rules.sees(position, item.length)
            return find_slots(tables, slot_ranges, item.table, 0, position, sees, block_size)

        def step(i: Any, carry: Any) -> Any:
            states, of_tile, (block, slot, own) = carry
            shape = (tile.tokens, tile.lanes)
            at = (block[:, None], (slot * width)[:, None] + lane[None, :])
            x = load(pool, at, shape, own[:, None], lane_mask)
            scores_tile = item.packed + (lax.div(i, jnp.int32(ratio)) - item.first)
            column = lax.rem(i, jnp.int32(ratio)) * tile.tokens + jnp.arange(tile.tokens)

            def onto(state: Any, heads: Any, m_tile: Any, l_tile: Any) -> Any:
                m, l, z = state
                at = (scores_tile, heads[:, None], column[None, :])
                p = load(p_ref, at, (heads.size, tile.tokens), (heads < num_heads)[:, None])
                m_new = jnp.maximum(m, m_tile)
                before, factor = jnp.exp(m - m_new), jnp.exp(m_tile - m_new)
                return m_new, l * before + l_tile * factor, z * before[:, None] + dot(p, x, (1, 0)) * factor[:, None]

            # The compiler prefetches only operands of products, so the next step's values are loaded now.
            following = state_of(i + 1), place_of(i + 1)
            states = [onto(*both, *tile_) for *both, tile_ in zip(states, parts, of_tile, strict=True)]
            return states, *following

        zeros = [jnp.zeros(heads.shape, jnp.float32) for heads in parts]
        init = [(zero + MASKED, zero, jnp.zeros((zero.size, tile.lanes), jnp.float32)) for zero in zeros]
        first = item.first * ratio
        last = jnp.minimum(item.last * ratio, (item.length + tile.tokens - 1) // tile.tokens)
        states, *_ = lax.fori_loop(first, last, step, (init, state_of(first), place_of(first)))
        for state, heads in zip(states, parts, strict=True):
            mask = heads < num_heads, lane_ok
            store_piece(state, results, partial, (items, index), heads, lane, mask, sinks, part == 0)


def absorbed_output(
    scores: Scores,
    call: DecodeCall,
    wave: Wave,
    before: Output | None = None,
    *,
    width: int,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
    chip: str | None = None,
) -> Output:
    """Return z, m and l for the rows of a wave: the second half of absorbed attention.

    The logit modifiers of the call have already been applied, except its sinks. For the other arguments see `absorbed_attention`.

    Args:
        scores: results of `absorbed_scores`.
        call: see `absorbed_attention`.
        wave: the rows.
        before: results of earlier waves; this wave writes the results of its rows into the same arrays.
        width: D.
        out_dtype: see `absorbed_attention`.
        interpret: see `absorbed_attention`.
        chip: see `absorbed_attention`.

    Raises:
        ValueError: the tile sizes of the two kernels do not match, or the chip is unknown.
    """
    pool = call.pool
    p, m, l = scores
    heads, scores_tokens, batch = p.shape[1], p.shape[2], wave.rows.length.shape[0]
    tile = tile_for("output", chip, heads, width, pool.dtype.itemsize)
    if scores_tokens % tile.tokens:
        raise ValueError(f"{tile.tokens=} of `output` must divide {scores_tokens=}")
    programs = -(-width // tile.lanes)
    work = _pieces_of(wave, chip, heads, width, pool.dtype.itemsize)
    num_items = work.items.shape[0]
    kernel = functools.partial(
        _output_kernel,
        tile=tile,
        rules=ScoreModifiers.of(call.rules),
        block_size=call.block_size,
        num_items=num_items,
        num_heads=heads,
        width=width,
    )
    state = jax.ShapeDtypeStruct((batch, heads), jnp.float32)
    results = [jax.ShapeDtypeStruct((batch, heads, width), out_dtype), state, state]
    sinks = sinks_of(call.rules)
    operands = (work.items, call.tables[:, None], call.slot_ranges, sinks, p, m, l, by_block(pool))
    outs = launch(
        kernel,
        (*operands, *(before or ())),
        [*results, *partial_shapes(work, heads, width)],
        grid=(programs, num_items),
        warps=tile.warps,
        stages=tile.stages,
        name="absorbed_output",
        interpret=interpret,
        in_place={len(operands) + i: i for i in range(3)} if before else None,
    )
    z, m, l = join_pieces(work, outs[:3], outs[3:], sinks, interpret=interpret)
    return z, m, l


def absorbed_attention(
    q_absorbed: Float[Array, "B N D"],
    call: DecodeCall,
    *,
    most_positions: int | None = None,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
    chip: str | None = None,
) -> Output:
    """Return z = softmax(S) x with S = q~ x^T over positions [0, lens), m = max(S) and l = sum(exp(S - m)).

    Two parts of one attention are joined as (l_1 e^(m_1 - m) z_1 + l_2 e^(m_2 - m) z_2) / (l_1 e^(m_1 - m) +
    l_2 e^(m_2 - m)) with m = max(m_1, m_2). A row of length 0 gives z = 0, m = -1e30, l = 0. m and l are float32. The
    logit modifiers of the call apply to queries at the last position of their rows.

    Args:
        q_absorbed: queries q~.
        call: pool, tables, lengths and logit modifiers.
        most_positions: maximum number of positions per row; None: the capacity of a row of `tables`.
        out_dtype: dtype of z, which is N times as wide as a layer input; 16-bit dtypes save memory traffic.
        interpret: run in Pallas' interpreter, on any platform.
        chip: class of chips to choose tiles for (`triton_tiles.CHIPS`); None: as for sm_80.

    Raises:
        ValueError: the kernels do not support the block size, dtype or chip.
    """
    heads, width = q_absorbed.shape[1:]
    itemsize = call.pool.dtype.itemsize
    check_inputs(call.pool, call.block_size, width)
    tile = tile_for("scores", chip, heads, width, itemsize)
    visible = rows_of_call(call, tile.tokens)
    most_tiles = -(-min(call.capacity, most_positions or call.capacity) // tile.tokens)
    on: dict[str, Any] = {"interpret": interpret, "chip": chip}
    out: Output | None = None
    for wave in waves_of(visible, most_tiles, heads * tile.tokens * itemsize):
        scores = absorbed_scores(q_absorbed, call, wave, **on)
        out = absorbed_output(scores, call, wave, out, width=width, out_dtype=out_dtype, **on)
    assert out is not None
    return out


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    call: DecodeCall,
    *,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
    chip: str | None = None,
) -> Float[Array, "B N D"]:
    """Return `softmax(q~ x^T) x` over positions [0, lens); see `reference.decode_absorbed` and `absorbed_attention`."""
    return absorbed_attention(q_absorbed, call, out_dtype=out_dtype, interpret=interpret, chip=chip)[0]

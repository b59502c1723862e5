"""Decode attention over keys and values of the block pool as a Pallas kernel on the Triton backend (contract:
`lab/reference.py`).

A program computes one key/value head for one piece of a row (`triton_work_list.py`), with a running maximum m,
denominator l and accumulator (flash attention). Tiles hidden by a sliding window are neither read nor computed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from apt_jax.ops.calls import DecodeCall
from apt_jax.pallas.triton_common import MASKED, below, check_pool, dot, launch, load
from apt_jax.pallas.triton_decode_common import ScoreModifiers, by_block, find_slots, sinks_of, slopes_of, softmax_step
from apt_jax.pallas.triton_tiles import Tile, padded, tile_for
from apt_jax.pallas.triton_work_list import (
    join_pieces,
    partial_shapes,
    pieces_for,
    read_item,
    rows_of_call,
    store_piece,
    work_list,
)

PROGRAMS_PER_PROCESSOR = 8
"""Number of programs per processor: twice as many as it runs at once."""


class _Operands(NamedTuple):
    """Arrays that the kernel reads."""

    items: Any
    tables: Any
    slot_ranges: Any
    slopes: Any
    sinks: Any
    q_ref: Any
    pool: Any


def _kv_kernel(
    refs: _Operands,
    out: Any,
    *partial: Any,
    tile: Tile,
    rules: ScoreModifiers,
    block_size: int,
    group: int,
    head_dim: int,
    lane_width: int,
) -> None:
    items, tables, slot_ranges, slopes, sinks, q_ref, pool = refs
    kv_head, index = pl.program_id(0), pl.program_id(1)
    item = read_item(items, index)
    group_padded, width = padded(group), padded(head_dim)
    member, lane = jnp.arange(group_padded), jnp.arange(width)
    heads, head_ok = kv_head * group + member, member < group
    lane_ok = below(lane, head_dim, width)
    lane_mask = None if lane_ok is None else lane_ok[None, :]

    @pl.when(item.row >= 0)
    def _() -> None:
        q = load(
            q_ref,
            (item.row, heads[:, None], lane[None, :]),
            (group_padded, width),
            head_ok[:, None],
            lane_mask,
        )

        def step(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            m, l, acc = state
            position = i * tile.tokens + jnp.arange(tile.tokens)
            sees = rules.sees(position, item.length)

            def fetch(half: int) -> tuple[Any, Any]:
                block, slot, own = find_slots(tables, slot_ranges, item.table, half, position, sees, block_size)
                at = (block[:, None], (slot * lane_width)[:, None] + (kv_head * head_dim + lane)[None, :])
                return load(pool, at, (tile.tokens, width), own[:, None], lane_mask), own

            k, own = fetch(0)
            s = dot(q, k, (1, 1)) * head_dim**-0.5
            s = rules(s, position, item.length, slopes, heads, head_ok)
            m, l, p, before = softmax_step((m, l), s, own)
            v, _ = fetch(1)
            return m, l, acc * before[:, None] + dot(p.astype(v.dtype), v, (1, 0))

        init = (
            jnp.full((group_padded,), MASKED, jnp.float32),
            jnp.zeros((group_padded,), jnp.float32),
            jnp.zeros((group_padded, width), jnp.float32),
        )
        state = lax.fori_loop(item.first, item.last, step, init)
        store_piece(state, (out,), partial, (items, index), heads, lane, (head_ok, lane_ok), sinks)


def decode_kv(
    q: Float[Array, "B N H"], call: DecodeCall, *, interpret: bool = False, chip: str | None = None
) -> Float[Array, "B N H"]:
    """Return `softmax(q k^T / sqrt(H)) v` over positions [0, lens) in float32; see `reference.decode_kv`.

    Args:
        q: queries.
        call: pool, tables, lengths and logit modifiers.
        interpret: run in Pallas' interpreter, on any platform.
        chip: class of chips to choose tiles for (`triton_tiles.CHIPS`); None: as for sm_80.

    Raises:
        ValueError: the kernel does not support the block size, dtype, heads or chip.
    """
    pool, block_size = call.pool, call.block_size
    check_pool(pool, block_size)
    heads, head_dim = q.shape[1:]
    lane_width = pool.shape[2]
    kv_heads = lane_width // head_dim
    if kv_heads * head_dim != lane_width or heads % kv_heads:
        raise ValueError(f"slots of {lane_width} elements do not hold heads for {q.shape=}")
    tile = tile_for("kv", chip, heads, head_dim, pool.dtype.itemsize)
    visible = rows_of_call(call, tile.tokens)
    pieces = pieces_for(chip, kv_heads, PROGRAMS_PER_PROCESSOR)
    work = work_list(visible, pieces, -(-call.capacity // tile.tokens))
    kernel = functools.partial(
        _kv_kernel,
        tile=tile,
        rules=ScoreModifiers.of(call.rules),
        block_size=block_size,
        group=heads // kv_heads,
        head_dim=head_dim,
        lane_width=lane_width,
    )
    sinks = sinks_of(call.rules)
    out, *partial = launch(
        kernel,
        _Operands(
            work.items,
            call.tables,
            call.slot_ranges,
            slopes_of(call.rules),
            sinks,
            q.astype(pool.dtype),
            by_block(pool),
        ),
        [jax.ShapeDtypeStruct(q.shape, jnp.float32), *partial_shapes(work, heads, head_dim)],
        grid=(kv_heads, work.items.shape[0]),
        warps=tile.warps,
        stages=tile.stages,
        name="decode_kv",
        interpret=interpret,
    )
    return join_pieces(work, (out,), partial, sinks, interpret=interpret)[0]

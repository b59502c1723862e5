"""Decode attention over keys and values of the block pool as a Pallas kernel on the Triton backend (contract:
`reference.py`).

A program takes one key/value head of one row and a split of its context, with running maximum m, denominator l and
accumulator (flash attention); `combine_splits` joins the splits where a small batch is cut in several.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int32

from apt_jax.pallas.triton_common import (
    MASKED,
    below,
    check_pool,
    combine_splits,
    dot,
    launch,
    load,
    locate,
    own_lens,
    slots_of,
    softmax_step,
    split_bounds,
    split_shapes,
    store_split,
    table_row_of,
)
from apt_jax.pallas.triton_tiles import Tile, num_splits, padded, tile_for


def _kv_kernel(
    table_of_row: Any,
    slots: Any,
    lens: Any,
    q_ref: Any,
    pool: Any,
    *outs: Any,
    tile: Tile,
    splits: int,
    group: int,
    head_dim: int,
    holes: bool,
) -> None:
    kv_head, row, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    table_row, length = table_row_of(table_of_row, row), plt.load(lens.at[row])
    group_padded, width = padded(group), padded(head_dim)
    member, lane = jnp.arange(group_padded), jnp.arange(width)
    heads, head_ok = kv_head * group + member, member < group
    lane_ok = below(lane, head_dim, width)
    lane_mask = None if lane_ok is None else lane_ok[None, :]
    q = load(
        q_ref,
        (row, heads[:, None], lane[None, :]),
        (group_padded, width),
        head_ok[:, None],
        lane_mask,
    )

    def step(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        m, l, acc = state
        position = i * tile.tokens + jnp.arange(tile.tokens)

        def fetch(half: int) -> tuple[Any, Any]:
            slot, own = locate(slots, table_row, half, position, length, holes)
            at = (slot[:, None], (kv_head * head_dim + lane)[None, :])
            return load(pool, at, (tile.tokens, width), own[:, None], lane_mask), own

        k, own = fetch(0)
        s = dot(q, k, (1, 1)) * head_dim**-0.5
        m, l, p, before = softmax_step((m, l), s, own)
        v, _ = fetch(1)
        return m, l, acc * before[:, None] + dot(p.astype(v.dtype), v, (1, 0))

    init = (
        jnp.full((group_padded,), MASKED, jnp.float32),
        jnp.zeros((group_padded,), jnp.float32),
        jnp.zeros((group_padded, width), jnp.float32),
    )
    first, last = split_bounds(length, tile.tokens, split, splits)
    state = lax.fori_loop(first, last, step, init)
    store_split(state, outs, row, heads, lane, (head_ok, lane_ok), split)


def decode_kv(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "R 2 J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "R J 2"] | None = None,
    table_of_row: Int32[Array, " B"] | None = None,
    interpret: bool = False,
    chip: str | None = None,
) -> Float[Array, "B N H"]:
    """`softmax(q k^T / sqrt(H)) v` over positions [0, lens) in float32; see `reference.decode_kv`.

    Args:
        table_of_row: row of `tables` and `slot_ranges` that each row of `q` attends to; None: its own (R = B).
        interpret: run in Pallas' interpreter, on any platform.
        chip: what tiles are chosen for (`triton_tiles.CHIPS`).

    Raises:
        ValueError: block size, dtype, heads or chip that the kernel does not take.
    """
    check_pool(pool, block_size)
    batch, heads, head_dim = q.shape
    lane_width = pool.shape[2]
    kv_heads = lane_width // head_dim
    if kv_heads * head_dim != lane_width or heads % kv_heads:
        raise ValueError(f"slots of {lane_width} elements do not hold heads for {q.shape=}")
    tile = tile_for("kv", chip, heads, head_dim, pool.dtype.itemsize)
    capacity = tables.shape[2] * block_size
    splits = num_splits(chip, batch * kv_heads, -(-capacity // tile.tokens))
    kernel = functools.partial(
        _kv_kernel,
        tile=tile,
        splits=splits,
        group=heads // kv_heads,
        head_dim=head_dim,
        holes=slot_ranges is not None,
    )
    outs = launch(
        kernel,
        (
            table_of_row,
            slots_of(tables, slot_ranges, block_size),
            own_lens(lens, rows, capacity),
            q.astype(pool.dtype),
            pool.reshape(-1, lane_width),
        ),
        split_shapes(batch, splits, heads, head_dim),
        grid=(kv_heads, batch, splits),
        warps=tile.warps,
        stages=tile.stages,
        name="decode_kv",
        interpret=interpret,
    )
    return combine_splits(outs, interpret=interpret)

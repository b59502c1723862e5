"""Decode attention over keys and values computed from cached layer inputs, as a Pallas kernel on the Triton backend.

The same as `triton_decode_kv` over tiles of 128 positions whose keys and values of one head are computed on the spot
from layer inputs; neither reaches memory. Programs of eight heads run side by side: they share layer inputs, and
programs of the next rows share their weights, so both mostly come from the L2 cache. Contract:
`reference.decode_reprojected`.
"""

import functools
import itertools
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
    split_bounds,
    split_shapes,
    store_split,
    swizzle,
    swizzle_group,
    table_row_of,
)
from apt_jax.pallas.triton_tiles import Tile, num_splits, padded, tile_for


def _reprojected_kernel(
    table_of_row: Any,
    slots: Any,
    lens: Any,
    q_ref: Any,
    pool: Any,
    wk: Any,
    bk: Any,
    wv: Any,
    bv: Any,
    cos: Any,
    sin: Any,
    *outs: Any,
    tile: Tile,
    splits: int,
    neighbours: int,
    row_programs: int,
    group: int,
    head_dim: int,
    half: int,
    width: int,
    holes: bool,
) -> None:
    kv_head, row = swizzle(pl.program_id(0), neighbours, row_programs)
    row, split = (row, 0) if splits == 1 else (row // splits, row % splits)
    table_row, length = table_row_of(table_of_row, row), plt.load(lens.at[row])
    group_padded = padded(group)
    member = jnp.arange(group_padded)
    heads, head_ok = kv_head * group + member, member < group
    value_lane = jnp.arange(padded(head_dim))
    value_ok = below(value_lane, head_dim, value_lane.size)
    passes = 2 if half else tile.passes

    # A key's lanes, where rotary: both sides of the turn apart, as a tile in registers cannot be cut; then the rest.
    cuts = (0, half, 2 * half, head_dim) if half else (0, head_dim)
    key_lanes = []
    for start, end in itertools.pairwise(cuts):
        if start < end:
            lane = jnp.arange(padded(end - start))
            key_lanes.append((start + lane, below(lane, end - start, lane.size)))
    queries = [
        load(
            q_ref,
            (row, heads[:, None], lane[None, :]),
            (group_padded, lane.size),
            head_ok[:, None],
            None if ok is None else ok[None, :],
        )
        for lane, ok in key_lanes
    ]

    def bias(b: Any, lane: Any, ok: Any) -> Any:
        return load(b, (kv_head, lane), lane.shape, ok).astype(jnp.float32)

    def step(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        m, l, acc = state
        position = i * tile.tokens + jnp.arange(tile.tokens)
        slot, own = locate(slots, table_row, 0, position, length, holes)

        def project(targets: list[tuple[Any, Any, Any]]) -> Any:
            """W x of tiles (lanes, tokens): the warps share layer inputs and split the weights."""

            def one_slice(j: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
                feature, feature_ok = lanes_of_step(j, tile.lanes, width)
                feature_ok = None if feature_ok is None else feature_ok[None, :]
                at = (slot[:, None], feature[None, :])
                x = load(pool, at, (tile.tokens, tile.lanes), own[:, None], feature_ok)

                def onto(total: Any, w: Any, lane: Any, ok: Any) -> Any:
                    at = (kv_head, lane[:, None], feature[None, :])
                    lane_ok = None if ok is None else ok[:, None]
                    weights = load(w, at, (lane.size, tile.lanes), lane_ok, feature_ok)
                    return total + dot(weights, x, (1, 1))

                return tuple(onto(total, *target) for total, target in zip(sums, targets, strict=True))

            init = tuple(jnp.zeros((lane.size, tile.tokens), jnp.float32) for _, lane, _ in targets)
            return lax.fori_loop(0, -(-width // tile.lanes), one_slice, init)

        for_keys, for_values = [(wk, *part) for part in key_lanes], (wv, value_lane, value_ok)
        keys = list(project(for_keys if passes == 2 else [*for_keys, for_values]))
        values = [] if passes == 2 else [keys.pop()]
        if half:
            if bk is not None:
                turned = zip(keys[:2], key_lanes[:2], strict=True)
                keys[:2] = [key + bias(bk, *part)[:, None] for key, part in turned]
            lane, ok = key_lanes[0]
            at, shape = (lane[:, None], position[None, :]), keys[0].shape
            masks = (own[None, :], None if ok is None else ok[:, None])
            turn = (load(table, at, shape, *masks) for table in (cos, sin))
            keys[:2] = rotate_pair(keys[0], keys[1], *turn)
        s = sum(dot(query, key.astype(query.dtype), (1, 0)) for query, key in zip(queries, keys, strict=True))
        m, l, p, before = softmax_step((m, l), s * head_dim**-0.5, own)
        (v,) = values or project([for_values])
        p, v = p.astype(pool.dtype), v.astype(pool.dtype)
        return m, l, acc * before[:, None] + dot(p, v, (1, 1))

    init = (
        jnp.full((group_padded,), MASKED, jnp.float32),
        jnp.zeros((group_padded,), jnp.float32),
        jnp.zeros((group_padded, value_lane.size), jnp.float32),
    )
    first, last = split_bounds(length, tile.tokens, split, splits)
    m, l, acc = lax.fori_loop(first, last, step, init)
    if bv is not None:  # added to every value, and weights sum to l
        acc = acc + l[:, None] * bias(bv, value_lane, value_ok)[None, :]
    store_split((m, l, acc), outs, row, heads, value_lane, (head_ok, value_ok), split)


def decode_reprojected(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "R J"],
    lens: Int32[Array, " B"],
    wk: Float[Array, "K H D"],
    bk: Float[Array, "K H"] | None,
    wv: Float[Array, "K H D"],
    bv: Float[Array, "K H"] | None,
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "R J 2"] | None = None,
    angles: Float[Array, "S HALF"] | None = None,
    table_of_row: Int32[Array, " B"] | None = None,
    interpret: bool = False,
    chip: str | None = None,
) -> Float[Array, "B N H"]:
    """Attention over keys and values computed from cached layer inputs, float32; see `reference.decode_reprojected`.

    Projections are accumulated in float32, turned by `angles` if given, and rounded to the pool's dtype like a cache's
    keys and values. Other arguments as in `decode_kv`.

    Raises:
        ValueError: block size, dtype, heads or chip that the kernel does not take.
    """
    check_pool(pool, block_size)
    batch, heads, head_dim = q.shape
    kv_heads, _, width = wk.shape
    if pool.shape[2] != width or heads % kv_heads:
        raise ValueError(f"{pool.shape=} and {wk.shape=} do not fit {q.shape=}, {block_size=}")
    tile = tile_for("reprojected", chip, heads, width, pool.dtype.itemsize)
    capacity = tables.shape[1] * block_size
    splits = num_splits(chip, batch * kv_heads, -(-capacity // tile.tokens))
    neighbours = swizzle_group(kv_heads)
    kernel = functools.partial(
        _reprojected_kernel,
        tile=tile,
        splits=splits,
        neighbours=neighbours,
        row_programs=batch * splits,
        group=heads // kv_heads,
        head_dim=head_dim,
        half=0 if angles is None else angles.shape[1],
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
            own_lens(lens, rows, capacity),
            cast(q),
            pool.reshape(-1, width),
            *map(cast, (wk, bk, wv, bv)),
            *cos_sin_tables(angles),
        ),
        split_shapes(batch, splits, heads, head_dim),
        grid=(kv_heads * batch * splits,),
        warps=tile.warps,
        stages=tile.stages,
        name="decode_reprojected",
        interpret=interpret,
    )
    return combine_splits(outs, interpret=interpret)

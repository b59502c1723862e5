"""Decode attention over keys and values computed from cached layer inputs, as a Pallas kernel on the Triton backend.

The kernel works like `triton_decode_kv`, but computes the keys and values of one head from layer inputs, one tile of
positions at a time, without writing them to memory. The programs of up to eight heads of a row are adjacent and share
its layer inputs; the programs of the same heads of the next rows follow and share their weights. So both mostly come
from the L2 cache. Contract: `reference.decode_reprojected`.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from apt_jax.ops.calls import DecodeCall
from apt_jax.pallas.triton_common import (
    MASKED,
    below,
    cos_sin_tables,
    dot,
    lanes_of_step,
    launch,
    load,
    rotate_pair,
    swizzle,
    swizzle_group,
)
from apt_jax.pallas.triton_decode_common import (
    ScoreModifiers,
    by_block,
    check_inputs,
    check_key_norm,
    find_slots,
    lane_scale,
    scale_of,
    sinks_of,
    slopes_of,
    softmax_step,
)
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

PROGRAMS_PER_PROCESSOR = 2
"""Number of programs per processor, which runs one at a time."""


class _Operands(NamedTuple):
    """Arrays that the kernel reads."""

    items: Any
    tables: Any
    slot_ranges: Any
    slopes: Any
    sinks: Any
    q_ref: Any
    pool: Any
    wk: Any
    bk: Any
    wv: Any
    bv: Any
    scale: Any
    cos: Any
    sin: Any


def _reprojected_kernel(
    refs: _Operands,
    out: Any,
    *partial: Any,
    tile: Tile,
    rules: ScoreModifiers,
    norm_eps: float,
    block_size: int,
    neighbours: int,
    num_items: int,
    group: int,
    head_dim: int,
    half: int,
    width: int,
) -> None:
    items, tables, slot_ranges, slopes, sinks, q_ref, pool, wk, bk, wv, bv, scale, cos, sin = refs
    kv_head, index = swizzle(pl.program_id(0), neighbours, num_items)
    item = read_item(items, index)
    group_padded = padded(group)
    member = jnp.arange(group_padded)
    heads, head_ok = kv_head * group + member, member < group
    value_lane = jnp.arange(padded(head_dim))
    value_ok = below(value_lane, head_dim, value_lane.size)
    passes = 2 if half else tile.passes

    # Lanes of a key: the two halves of the rotary lanes separately, because a tile in registers cannot be split,
    # followed by the other lanes.
    cuts = (0, half, 2 * half, head_dim) if half else (0, head_dim)
    key_lanes = []
    for start, end in itertools.pairwise(cuts):
        if start < end:
            lane = jnp.arange(padded(end - start))
            key_lanes.append((start + lane, below(lane, end - start, lane.size)))

    def bias(b: Any, lane: Any, ok: Any) -> Any:
        return load(b, (kv_head, lane), lane.shape, ok).astype(jnp.float32)

    # A bias of the keys changes all scores of a query equally, which does not affect the softmax, unless the keys are
    # rotated or normed, or the scores are capped or joined by a sink.
    every = scale is not None or rules.softcap is not None or sinks is not None
    biased = 0 if bk is None else len(key_lanes) if every else 2 * bool(half)

    @pl.when(item.row >= 0)
    def _() -> None:
        queries = [
            load(
                q_ref,
                (item.row, heads[:, None], lane[None, :]),
                (group_padded, lane.size),
                head_ok[:, None],
                None if ok is None else ok[None, :],
            )
            for lane, ok in key_lanes
        ]

        def step(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            m, l, acc = state
            position = i * tile.tokens + jnp.arange(tile.tokens)
            sees = rules.sees(position, item.length)
            block, slot, own = find_slots(tables, slot_ranges, item.table, 0, position, sees, block_size)

            def project(targets: list[tuple[Any, Any, Any]]) -> Any:
                """Return W x for each target, as (lanes, tokens); warps share layer inputs and split the weights."""

                def one_slice(j: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
                    feature, feature_ok = lanes_of_step(j, tile.lanes, width)
                    feature_ok = None if feature_ok is None else feature_ok[None, :]
                    at = (block[:, None], (slot * width)[:, None] + feature[None, :])
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
            if biased:
                parts = zip(keys[:biased], key_lanes[:biased], strict=True)
                keys[:biased] = [key + bias(bk, *part)[:, None] for key, part in parts]
            if scale is not None:
                square = sum(jnp.sum(key * key, axis=0) for key in keys)
                factor = lax.rsqrt(square * (1 / head_dim) + norm_eps)[None, :]
                scales = (lane_scale(scale, *part)[:, None] for part in key_lanes)
                keys = [key * factor * lane for key, lane in zip(keys, scales, strict=True)]
            if half:
                lane, ok = key_lanes[0]
                at, shape = (lane[:, None], position[None, :]), keys[0].shape
                masks = (own[None, :], None if ok is None else ok[:, None])
                turn = (load(table, at, shape, *masks) for table in (cos, sin))
                keys[:2] = rotate_pair(keys[0], keys[1], *turn)
            s = sum(dot(query, key.astype(query.dtype), (1, 0)) for query, key in zip(queries, keys, strict=True))
            s = rules(s * head_dim**-0.5, position, item.length, slopes, heads, head_ok)
            m, l, p, before = softmax_step((m, l), s, own)
            (v,) = values or project([for_values])
            p, v = p.astype(pool.dtype), v.astype(pool.dtype)
            return m, l, acc * before[:, None] + dot(p, v, (1, 1))

        init = (
            jnp.full((group_padded,), MASKED, jnp.float32),
            jnp.zeros((group_padded,), jnp.float32),
            jnp.zeros((group_padded, value_lane.size), jnp.float32),
        )
        m, l, acc = lax.fori_loop(item.first, item.last, step, init)
        if bv is not None:  # the bias is added to every value, and the weights sum to l
            acc = acc + l[:, None] * bias(bv, value_lane, value_ok)[None, :]
        store_piece((m, l, acc), (out,), partial, (items, index), heads, value_lane, (head_ok, value_ok), sinks)


def decode_reprojected(
    q: Float[Array, "B N H"], call: DecodeCall, *, interpret: bool = False, chip: str | None = None
) -> Float[Array, "B N H"]:
    """Return attention over keys and values computed from cached layer inputs, in float32; see
    `reference.decode_reprojected`.

    Projections are accumulated in float32, normed per head and rotated if the call requires it, and rounded to the
    pool's dtype like cached keys and values.

    Args:
        q: queries.
        call: pool, tables, lengths, projections and logit modifiers.
        interpret: see `triton_decode_kv.decode_kv`.
        chip: see `triton_decode_kv.decode_kv`.

    Raises:
        ValueError: the kernel does not support the block size, dtype, heads, norm or chip.
    """
    pool, p = call.pool, call.projected
    heads, head_dim = q.shape[1:]
    kv_heads, _, width = p.wk.shape
    check_inputs(pool, call.block_size, width)
    check_key_norm(p.key_norm, head_dim)
    if heads % kv_heads:
        raise ValueError(f"{p.wk.shape=} does not fit {q.shape=}")
    tile = tile_for("reprojected", chip, heads, width, pool.dtype.itemsize)
    visible = rows_of_call(call, tile.tokens)
    pieces = pieces_for(chip, kv_heads, PROGRAMS_PER_PROCESSOR)
    work = work_list(visible, pieces, -(-call.capacity // tile.tokens))
    num_items = work.items.shape[0]
    kernel = functools.partial(
        _reprojected_kernel,
        tile=tile,
        rules=ScoreModifiers.of(call.rules),
        norm_eps=0.0 if p.key_norm is None else p.key_norm.eps,
        block_size=call.block_size,
        neighbours=swizzle_group(kv_heads),
        num_items=num_items,
        group=heads // kv_heads,
        head_dim=head_dim,
        half=0 if p.angles is None else p.angles.shape[1],
        width=width,
    )

    def cast(a: Array | None) -> Array | None:
        return None if a is None else a.astype(pool.dtype)

    sinks = sinks_of(call.rules)
    out, *partial = launch(
        kernel,
        _Operands._make(
            (
                work.items,
                call.tables[:, None],
                call.slot_ranges,
                slopes_of(call.rules),
                sinks,
                cast(q),
                by_block(pool),
                *map(cast, (p.wk, p.bk, p.value_weights, p.bv)),
                scale_of(p.key_norm),
                *cos_sin_tables(p.angles),
            )
        ),
        [jax.ShapeDtypeStruct(q.shape, jnp.float32), *partial_shapes(work, heads, head_dim)],
        grid=(kv_heads * num_items,),
        warps=tile.warps,
        stages=tile.stages,
        name="decode_reprojected",
        interpret=interpret,
    )
    return join_pieces(work, (out,), partial, sinks, interpret=interpret)[0]

"""Decode attention over the block pool as Pallas kernels on the Triton backend, for NVIDIA GPUs (contracts: `reference.py`).

Every kernel walks positions. `slots_of` gives the slot of each: position t is in entry t // C of a row's table, at slot
t % C or where `slot_ranges` says. Loads outside a row's own slots are masked and give 0: whatever else lies in a block,
NaN included, is neither used nor read.

  * `decode_kv`: a program takes one key/value head of one row and a piece of its context, with running maximum m,
    denominator l and accumulator (flash attention); `_combine` joins the pieces where a small batch is cut in several.
  * `decode_reprojected`: the same over tiles of 128 positions whose keys and values of one head are computed on the
    spot from layer inputs; neither reaches memory. Programs of eight heads are neighbours: they share layer inputs, and
    programs of the next rows share their weights, so both mostly come from the L2 cache.
  * `decode_absorbed`: the output of a head is as wide as the model, too wide for one program, while each score needs the
    full width. So there are two kernels. `absorbed_scores` takes a tile of positions and all heads: P = exp(S - m) in
    the pool's dtype, with m and l of every tile. `absorbed_output` takes a row and 128 lanes: sum of
    exp(m_tile - m) P x. It walks rows in the opposite order, to meet layer inputs that are still in the L2 cache.
  * `decode_v_absorbed`: another first kernel, which computes and turns the rotary lanes of the keys, and the same second.

Shapes inside a kernel are powers of two: head counts and lanes are padded and masked. Every axis is indexed by an
integer array, which the interpreter does fast and the compiler turns into asynchronous copies. Nothing is summed by
atomics, so equal inputs give equal bits.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int32

from apt_jax.pallas.triton_tiles import MIN_SIDE, Tile, num_splits, padded, parts_of, tile_for

_MASKED = -1e30
"""Score of a masked position; finite, so that a fully masked tile cannot make NaN."""

_NEIGHBOURS = 8
"""Heads whose programs run side by side in the kernels that reproject."""


def _launch(
    kernel: Callable[..., None],
    operands: Sequence[Array | None],
    out_shape: Any,
    *,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    name: str,
    interpret: bool,
) -> Any:
    """`kernel` over a grid; it gets a ref, or None, for every operand, then a ref for every output."""
    given = [operand is not None for operand in operands]

    def body(*refs: Any) -> None:
        rest = iter(refs)
        inputs = [next(rest) if there else None for there in given]
        kernel(*inputs, *rest)

    present = [operand for operand in operands if operand is not None]
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[pl.no_block_spec] * len(present),
        out_specs=jax.tree.map(lambda _: pl.no_block_spec, out_shape),
        out_shape=out_shape,
        interpret=interpret,
        name=name,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
    )(*present)


def _dot(a: Any, b: Any, contract: tuple[int, int]) -> Any:
    """Matrix product over one axis of each side in float32; float32 operands are not rounded to TF32."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _load(ref: Any, index: tuple[Any, ...], shape: tuple[int, ...], *masks: Any) -> Any:
    """`ref[index]`, 0 and not read where any of `masks` is False; a mask of None is True."""
    mask = None
    for more in masks:
        if more is not None:
            mask = more if mask is None else mask & more
    if mask is None:
        return plt.load(ref.at[index])
    return plt.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=0)


def _below(index: Any, size: int, padded_size: int) -> Any:
    """The mask `index < size`, or None where nothing is padded."""
    return None if size == padded_size else index < size


def _lanes(step: Any, lanes: int, width: int) -> tuple[Any, Any]:
    """Lanes of one step of a loop over a width, and their mask."""
    lane = step * lanes + jnp.arange(lanes)
    return lane, _below(lane, width, width - width % lanes)


def slots_of(
    tables: Int32[Array, "R A J"],
    slot_ranges: Int32[Array, "R J 2"] | None,
    block_size: int,
) -> Int32[Array, "R A S"]:
    """The slot of every position of every table, counted from the start of the pool; -1 where a range leaves none.

    The same in every layer, so the compiler makes one small array a step, and kernels need not know blocks or ranges.
    """
    order = jnp.arange(block_size, dtype=jnp.int32)[None, None, None, :]
    if slot_ranges is None:
        slots = tables[..., None] * block_size + order
    else:
        first, last = slot_ranges[:, None, :, :1], slot_ranges[:, None, :, 1:]
        slot = jnp.where(first <= last, first + order, first - 1 - order)
        own = order < jnp.abs(last - first)
        slots = jnp.where(own, tables[..., None] * block_size + slot, -1)
    return slots.reshape(*tables.shape[:2], -1)


def _locate(slots: Any, row: Any, half: int, position: Any, length: Any, holes: bool) -> Any:
    """Slot and "is the row's own" of positions; the slot means nothing where it is not."""
    own = position < length
    slot = plt.load(slots.at[row, half, position], mask=own, other=0)
    return slot, own & (slot >= 0) if holes else own


def _table_row(table_of_row: Any, row: Any) -> Any:
    return row if table_of_row is None else plt.load(table_of_row.at[row])


def _softmax_step(state: tuple[Any, Any], s: Any, own: Any) -> tuple[Any, Any, Any, Any]:
    """Fold scores (heads, tokens) into m and l; also returns the weights p and the factor of what came before."""
    m, l = state
    s = jnp.where(own[None, :], s, _MASKED)
    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    p = jnp.where(own[None, :], jnp.exp(s - m_new[:, None]), 0.0)
    before = jnp.exp(m - m_new)
    return m_new, l * before + jnp.sum(p, axis=1), p, before


def _piece(length: Any, tokens: int, split: Any, splits: int) -> tuple[Any, Any]:
    """Tiles [first, last) of a row's context that belong to a split."""
    tiles = (length + tokens - 1) // tokens
    if splits == 1:
        return 0, tiles
    each = (tiles + splits - 1) // splits
    first = jnp.minimum(split * each, tiles)
    return first, jnp.minimum(first + each, tiles)


def _check(pool: Array, block_size: int) -> None:
    if block_size < 4 or block_size & (block_size - 1):
        raise ValueError(f"{block_size=} must be a power of two, at least 4")
    if pool.shape[1] % block_size:
        raise ValueError(f"blocks of {pool.shape[1]} elements do not hold {block_size=} slots")
    if pool.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise ValueError(f"{pool.dtype=} must be float16, bfloat16 or float32")


def _own_lens(
    lens: Int32[Array, " B"], rows: tuple[Array, Array] | None, capacity: int
) -> Int32[Array, " B"]:
    """Lengths with rows outside `rows` empty. The same in every layer, so the compiler computes them once a step."""
    lens = jnp.minimum(lens, capacity)
    if rows is None:
        return lens
    index = jnp.arange(lens.shape[0], dtype=jnp.int32)
    return jnp.where((index >= rows[0]) & (index < rows[1]), lens, 0)


def _finish_pieces(
    state: tuple[Any, Any, Any],
    outs: tuple[Any, ...],
    row: Any,
    heads: Any,
    lane: Any,
    mask: tuple[Any, Any],
    split: Any,
) -> None:
    """Store a program's output: normalised where it saw the whole row, else the flash state of its piece."""
    m, l, acc = state
    head_ok, lane_ok = mask
    ok = head_ok[:, None] if lane_ok is None else head_ok[:, None] & lane_ok[None, :]
    ok = jnp.broadcast_to(ok, acc.shape)
    if len(outs) == 1:
        acc = acc / jnp.maximum(l, 1e-30)[:, None]
        plt.store(outs[0].at[row, heads[:, None], lane[None, :]], acc, mask=ok)
    else:
        out, m_out, l_out = outs
        plt.store(out.at[row, split, heads[:, None], lane[None, :]], acc, mask=ok)
        plt.store(m_out.at[row, split, heads], m, mask=head_ok)
        plt.store(l_out.at[row, split, heads], l, mask=head_ok)


def _pieces_shape(batch: int, splits: int, heads: int, width: int) -> Any:
    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    if splits == 1:
        return [shape(batch, heads, width)]
    pieces = (batch, splits, heads)
    return [shape(*pieces, width), shape(*pieces), shape(*pieces)]


def _combine(outs: Sequence[Array], *, interpret: bool) -> Float[Array, "B N H"]:
    """Join the flash states of a row's pieces; a program takes one head of one row."""
    if len(outs) == 1:
        return outs[0]
    batch, splits, heads, width = outs[0].shape
    splits_padded, width_padded = 1 << (splits - 1).bit_length(), padded(width)

    def kernel(acc_ref: Any, m_ref: Any, l_ref: Any, out_ref: Any) -> None:
        head, row = pl.program_id(0), pl.program_id(1)
        split, lane = jnp.arange(splits_padded), jnp.arange(width_padded)
        there, lane_ok = split < splits, lane < width
        m = plt.load(m_ref.at[row, split, head], mask=there, other=_MASKED)
        l = plt.load(l_ref.at[row, split, head], mask=there, other=0)
        factor = jnp.exp(m - jnp.max(m, axis=0))
        acc = _load(
            acc_ref,
            (row, split[:, None], head, lane[None, :]),
            (splits_padded, width_padded),
            there[:, None] & lane_ok[None, :],
        )
        total = jnp.maximum(jnp.sum(l * factor, axis=0), 1e-30)
        out = jnp.sum(acc * factor[:, None], axis=0) / total
        plt.store(out_ref.at[row, head, lane], out, mask=lane_ok)

    return _launch(
        kernel,
        outs,
        jax.ShapeDtypeStruct((batch, heads, width), jnp.float32),
        grid=(heads, batch),
        warps=4,
        stages=1,
        name="decode_combine",
        interpret=interpret,
    )


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
    table_row, length = _table_row(table_of_row, row), plt.load(lens.at[row])
    group_padded, width = padded(group), padded(head_dim)
    member, lane = jnp.arange(group_padded), jnp.arange(width)
    heads, head_ok = kv_head * group + member, member < group
    lane_ok = _below(lane, head_dim, width)
    lane_mask = None if lane_ok is None else lane_ok[None, :]
    q = _load(
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
            slot, own = _locate(slots, table_row, half, position, length, holes)
            at = (slot[:, None], (kv_head * head_dim + lane)[None, :])
            return _load(pool, at, (tile.tokens, width), own[:, None], lane_mask), own

        k, own = fetch(0)
        s = _dot(q, k, (1, 1)) * head_dim**-0.5
        m, l, p, before = _softmax_step((m, l), s, own)
        v, _ = fetch(1)
        return m, l, acc * before[:, None] + _dot(p.astype(v.dtype), v, (1, 0))

    init = (
        jnp.full((group_padded,), _MASKED, jnp.float32),
        jnp.zeros((group_padded,), jnp.float32),
        jnp.zeros((group_padded, width), jnp.float32),
    )
    first, last = _piece(length, tile.tokens, split, splits)
    state = lax.fori_loop(first, last, step, init)
    _finish_pieces(state, outs, row, heads, lane, (head_ok, lane_ok), split)


def decode_kv(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P CE"],
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
        chip: what tiles are chosen for (`tiles.CHIPS`).

    Raises:
        ValueError: block size, dtype, heads or chip that the kernel does not take.
    """
    _check(pool, block_size)
    batch, heads, head_dim = q.shape
    lane_width = pool.shape[1] // block_size
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
    outs = _launch(
        kernel,
        (
            table_of_row,
            slots_of(tables, slot_ranges, block_size),
            _own_lens(lens, rows, capacity),
            q.astype(pool.dtype),
            pool.reshape(-1, lane_width),
        ),
        _pieces_shape(batch, splits, heads, head_dim),
        grid=(kv_heads, batch, splits),
        warps=tile.warps,
        stages=tile.stages,
        name="decode_kv",
        interpret=interpret,
    )
    return _combine(outs, interpret=interpret)


def _neighbours(programs: int) -> int:
    """Of the programs of one row, how many run side by side: a divisor of their number."""
    return math.gcd(programs, _NEIGHBOURS)


def _neighbour_order(index: Any, inner: int, outer: int) -> tuple[Any, Any]:
    """(head program, row program) of a program when `inner` head programs run side by side, then `outer` rows."""
    group, rest = index // (inner * outer), index % (inner * outer)
    return group * inner + rest % inner, rest // inner


def _turn_tables(
    angles: Float[Array, "S HALF"] | None,
) -> tuple[Float[Array, "HALF S"] | None, Float[Array, "HALF S"] | None]:
    """Cosines and sines, which the kernels read: computed once a step for all layers."""
    return (None, None) if angles is None else (jnp.cos(angles).T, jnp.sin(angles).T)


def _turn(a: Any, b: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    return a * cos - b * sin, b * cos + a * sin


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
    kv_head, row = _neighbour_order(pl.program_id(0), neighbours, row_programs)
    row, split = (row, 0) if splits == 1 else (row // splits, row % splits)
    table_row, length = _table_row(table_of_row, row), plt.load(lens.at[row])
    group_padded = padded(group)
    member = jnp.arange(group_padded)
    heads, head_ok = kv_head * group + member, member < group
    value_lane = jnp.arange(padded(head_dim))
    value_ok = _below(value_lane, head_dim, value_lane.size)
    passes = 2 if half else tile.passes

    # A key's lanes, where rotary: both sides of the turn apart, as a tile in registers cannot be cut; then the rest.
    cuts = (0, half, 2 * half, head_dim) if half else (0, head_dim)
    key_lanes = []
    for start, end in itertools.pairwise(cuts):
        if start < end:
            lane = jnp.arange(padded(end - start))
            key_lanes.append((start + lane, _below(lane, end - start, lane.size)))
    queries = [
        _load(
            q_ref,
            (row, heads[:, None], lane[None, :]),
            (group_padded, lane.size),
            head_ok[:, None],
            None if ok is None else ok[None, :],
        )
        for lane, ok in key_lanes
    ]

    def bias(b: Any, lane: Any, ok: Any) -> Any:
        return _load(b, (kv_head, lane), lane.shape, ok).astype(jnp.float32)

    def step(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        m, l, acc = state
        position = i * tile.tokens + jnp.arange(tile.tokens)
        slot, own = _locate(slots, table_row, 0, position, length, holes)

        def project(targets: list[tuple[Any, Any, Any]]) -> Any:
            """W x of tiles (lanes, tokens): the warps share layer inputs and split the weights."""

            def one_slice(j: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
                feature, feature_ok = _lanes(j, tile.lanes, width)
                feature_ok = None if feature_ok is None else feature_ok[None, :]
                at = (slot[:, None], feature[None, :])
                x = _load(pool, at, (tile.tokens, tile.lanes), own[:, None], feature_ok)

                def onto(total: Any, w: Any, lane: Any, ok: Any) -> Any:
                    at = (kv_head, lane[:, None], feature[None, :])
                    lane_ok = None if ok is None else ok[:, None]
                    weights = _load(w, at, (lane.size, tile.lanes), lane_ok, feature_ok)
                    return total + _dot(weights, x, (1, 1))

                return tuple(
                    onto(total, *target) for total, target in zip(sums, targets, strict=True)
                )

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
            turn = (_load(table, at, shape, *masks) for table in (cos, sin))
            keys[:2] = _turn(keys[0], keys[1], *turn)
        s = sum(
            _dot(query, key.astype(query.dtype), (1, 0))
            for query, key in zip(queries, keys, strict=True)
        )
        m, l, p, before = _softmax_step((m, l), s * head_dim**-0.5, own)
        (v,) = values or project([for_values])
        p, v = p.astype(pool.dtype), v.astype(pool.dtype)
        return m, l, acc * before[:, None] + _dot(p, v, (1, 1))

    init = (
        jnp.full((group_padded,), _MASKED, jnp.float32),
        jnp.zeros((group_padded,), jnp.float32),
        jnp.zeros((group_padded, value_lane.size), jnp.float32),
    )
    first, last = _piece(length, tile.tokens, split, splits)
    m, l, acc = lax.fori_loop(first, last, step, init)
    if bv is not None:  # added to every value, and weights sum to l
        acc = acc + l[:, None] * bias(bv, value_lane, value_ok)[None, :]
    _finish_pieces((m, l, acc), outs, row, heads, value_lane, (head_ok, value_ok), split)


def decode_reprojected(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P CE"],
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
    _check(pool, block_size)
    batch, heads, head_dim = q.shape
    kv_heads, _, width = wk.shape
    if pool.shape[1] != block_size * width or heads % kv_heads:
        raise ValueError(f"{pool.shape=} and {wk.shape=} do not fit {q.shape=}, {block_size=}")
    tile = tile_for("reprojected", chip, heads, width, pool.dtype.itemsize)
    capacity = tables.shape[1] * block_size
    splits = num_splits(chip, batch * kv_heads, -(-capacity // tile.tokens))
    neighbours = _neighbours(kv_heads)
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

    outs = _launch(
        kernel,
        (
            table_of_row,
            slots_of(tables[:, None], slot_ranges, block_size),
            _own_lens(lens, rows, capacity),
            cast(q),
            pool.reshape(-1, width),
            *map(cast, (wk, bk, wv, bv)),
            *_turn_tables(angles),
        ),
        _pieces_shape(batch, splits, heads, head_dim),
        grid=(kv_heads * batch * splits,),
        warps=tile.warps,
        stages=tile.stages,
        name="decode_reprojected",
        interpret=interpret,
    )
    return _combine(outs, interpret=interpret)


Scores = tuple[Float[Array, "B N PADDED"], Float[Array, "B TILES N"], Float[Array, "B TILES N"]]
"""P = exp(S - m) in the pool's dtype, m and l = sum(P) in float32, of tiles of PADDED // TILES positions; tiles from the end
of a row on are not written."""


def _scores_shape(batch: int, heads: int, tiles: int, tokens: int, dtype: Any) -> Any:
    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    p = jax.ShapeDtypeStruct((batch, heads, tiles * tokens), dtype)
    return [p, shape(batch, tiles, heads), shape(batch, tiles, heads)]


def _store_scores(
    outs: tuple[Any, ...], s: Any, own: Any, row: Any, index: Any, heads: Any, head_ok: Any
) -> None:
    """Write P, m and l of scores (heads, tokens) of tile `index`."""
    p_out, m_out, l_out = outs
    zeros = jnp.zeros(heads.shape, jnp.float32)
    m, l, p, _ = _softmax_step((zeros + _MASKED, zeros), s, own)
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
        table_row = _table_row(table_of_row, row)
        position = index * tile.tokens + jnp.arange(tile.tokens)
        slot, own = _locate(slots, table_row, 0, position, length, holes)
        parts = [start + jnp.arange(size) for start, size in parts_of(num_heads)]

        def step(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            lane, lane_ok = _lanes(i, tile.lanes, width)
            lane_ok = None if lane_ok is None else lane_ok[None, :]
            shape = (tile.tokens, tile.lanes)
            x = _load(pool, (slot[:, None], lane[None, :]), shape, own[:, None], lane_ok)

            def onto(total: Any, heads: Any) -> Any:
                q_index = (row, heads[:, None], lane[None, :])
                head_ok = (heads < num_heads)[:, None]
                q = _load(q_ref, q_index, (heads.size, tile.lanes), head_ok, lane_ok)
                return total + _dot(q, x, (1, 1))

            return tuple(onto(total, heads) for total, heads in zip(sums, parts, strict=True))

        init = tuple(jnp.zeros((heads.size, tile.tokens), jnp.float32) for heads in parts)
        sums = lax.fori_loop(0, -(-width // tile.lanes), step, init)
        for s, heads in zip(sums, parts, strict=True):
            _store_scores(outs, s, own, row, index, heads, heads < num_heads)


def absorbed_scores(
    q_absorbed: Float[Array, "B N D"],
    pool: Float[Array, "P CE"],
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
    _check(pool, block_size)
    batch, heads, width = q_absorbed.shape
    tile = tile_for("scores", chip, heads, width, pool.dtype.itemsize)
    tiles = -(-tables.shape[1] * block_size // tile.tokens)
    kernel = functools.partial(
        _scores_kernel, tile=tile, num_heads=heads, width=width, holes=slot_ranges is not None
    )
    outs = _launch(
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
    table_row, length = _table_row(table_of_row, row), plt.load(lens.at[row])
    lane, lane_ok = _lanes(part, tile.lanes, width)
    lane_mask = None if lane_ok is None else lane_ok[None, :]
    parts = [start + jnp.arange(size) for start, size in parts_of(num_heads)]
    tiles = (length + scores_tokens - 1) // scores_tokens

    def total_of(heads: Any) -> tuple[Any, Any]:
        """m and l of the whole row, from those of its tiles, 16 at a time."""

        def step(i: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
            m, l = state
            index = i * MIN_SIDE + jnp.arange(MIN_SIDE)
            there = (index < tiles)[:, None] & (heads < num_heads)[None, :]
            at = (row, index[:, None], heads[None, :])
            m_tile = plt.load(m_ref.at[at], mask=there, other=_MASKED)
            l_tile = plt.load(l_ref.at[at], mask=there, other=0)
            m_new = jnp.maximum(m, jnp.max(m_tile, axis=0))
            l = l * jnp.exp(m - m_new) + jnp.sum(l_tile * jnp.exp(m_tile - m_new[None, :]), axis=0)
            return m_new, l

        init = jnp.full(heads.shape, _MASKED, jnp.float32), jnp.zeros(heads.shape, jnp.float32)
        return lax.fori_loop(0, (tiles + MIN_SIDE - 1) // MIN_SIDE, step, init)

    totals = [total_of(heads) for heads in parts]

    def step(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        position = i * tile.tokens + jnp.arange(tile.tokens)
        slot, own = _locate(slots, table_row, 0, position, length, holes)
        shape = (tile.tokens, tile.lanes)
        x = _load(pool, (slot[:, None], lane[None, :]), shape, own[:, None], lane_mask)

        def onto(z: Any, heads: Any, m: Any) -> Any:
            head_ok = heads < num_heads
            index = i // (scores_tokens // tile.tokens)
            m_tile = plt.load(m_ref.at[row, index, heads], mask=head_ok, other=_MASKED)
            at = (row, heads[:, None], position[None, :])
            p = _load(p_ref, at, (heads.size, tile.tokens), head_ok[:, None])
            return z + _dot(p, x, (1, 0)) * jnp.exp(m_tile - m)[:, None]

        return tuple(
            onto(z, heads, m) for z, heads, (m, _) in zip(sums, parts, totals, strict=True)
        )

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
    pool: Float[Array, "P CE"],
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
    _check(pool, block_size)
    p, m, l = scores
    batch, heads, width = p.shape[0], p.shape[1], pool.shape[1] // block_size
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
    outs = _launch(
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
    pool: Float[Array, "P CE"],
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
        chip: what tiles are chosen for (`tiles.CHIPS`).
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
    pool: Float[Array, "P CE"],
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
        _own_lens(lens, rows, tables.shape[1] * block_size),
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
    group, index = _neighbour_order(pl.program_id(0), neighbours, row_programs)
    row, index = index // tiles, index % tiles
    length = plt.load(lens.at[row])

    @pl.when(index * tile.tokens < length)
    def _() -> None:
        table_row = _table_row(table_of_row, row)
        position = index * tile.tokens + jnp.arange(tile.tokens)
        slot, own = _locate(slots, table_row, 0, position, length, holes)
        half_padded = padded(half)
        together = _heads_together(tile, half, num_heads)
        columns = jnp.arange(together * half_padded)
        head, lane = group * together + columns // half_padded, columns % half_padded
        column_ok = (lane < half) & (head < num_heads)
        member = jnp.arange(MIN_SIDE)
        heads = group * together + member
        head_ok = (member < together) & (heads < num_heads)

        def project(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            feature, feature_ok = _lanes(i, tile.lanes, width)
            feature_ok = None if feature_ok is None else feature_ok[None, :]
            shape = (tile.tokens, tile.lanes)
            x = _load(pool, (slot[:, None], feature[None, :]), shape, own[:, None], feature_ok)
            totals = []
            for total, offset in zip(sums[:2], (0, half), strict=True):
                at = (head[:, None], (offset + lane)[:, None], feature[None, :])
                shape = (columns.size, tile.lanes)
                weights = _load(wk, at, shape, column_ok[:, None], feature_ok)
                totals.append(total + _dot(weights, x, (1, 1)))
            if q_absorbed is not None:
                at = (row, heads[:, None], feature[None, :])
                shape = (MIN_SIDE, tile.lanes)
                q = _load(q_absorbed, at, shape, head_ok[:, None], feature_ok)
                totals.append(sums[2] + _dot(q, x, (1, 1)))
            return tuple(totals)

        zeros = jnp.zeros((columns.size, tile.tokens), jnp.float32)
        init = (zeros, zeros)
        if q_absorbed is not None:
            init = (*init, jnp.zeros((MIN_SIDE, tile.tokens), jnp.float32))
        a, b, *rest = lax.fori_loop(0, -(-width // tile.lanes), project, init)
        if bk is not None:
            biases = (
                _load(bk, (head, offset + lane), columns.shape, column_ok) for offset in (0, half)
            )
            a, b = (
                key + bias.astype(jnp.float32)[:, None]
                for key, bias in zip((a, b), biases, strict=True)
            )
        at = (lane[:, None], position[None, :])
        masks = (own[None, :], column_ok[:, None])
        a, b = _turn(a, b, *(_load(table, at, a.shape, *masks) for table in (cos, sin)))
        # Every head's query in its own columns, zeros elsewhere: one product sums each head's columns apart.
        s = rest[0] if rest else 0.0
        mask = head_ok[:, None] & column_ok[None, :] & (heads[:, None] == head[None, :])
        for key, offset in ((a, 0), (b, half)):
            at = (row, heads[:, None], (offset + lane)[None, :])
            q = _load(q_rotary, at, (MIN_SIDE, columns.size), mask)
            s = s + _dot(q, key.astype(q.dtype), (1, 0))
        _store_scores(outs, s, own, row, index, heads, head_ok)


def _heads_together(tile: Tile, half: int, num_heads: int) -> int:
    """Heads of one program of `_rotary_scores_kernel`, a power of two."""
    return max(1, min(tile.columns // padded(half), MIN_SIDE, padded(num_heads)))


def rotary_scores(
    q_rotary: Float[Array, "B N R"],
    q_absorbed: Float[Array, "B N D"] | None,
    pool: Float[Array, "P CE"],
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
    _check(pool, block_size)
    batch, heads, rotary_dim = q_rotary.shape
    width = wk_rotary.shape[2]
    if pool.shape[1] != block_size * width or rotary_dim != 2 * angles.shape[1]:
        raise ValueError(f"{pool.shape=}, {wk_rotary.shape=} and {angles.shape=} do not fit")
    tile = tile_for("rotary_scores", chip, heads, width, pool.dtype.itemsize)
    tiles = -(-tables.shape[1] * block_size // tile.tokens)
    groups = -(-heads // _heads_together(tile, rotary_dim // 2, heads))
    kernel = functools.partial(
        _rotary_scores_kernel,
        tile=tile,
        tiles=tiles,
        neighbours=_neighbours(groups),
        row_programs=batch * tiles,
        num_heads=heads,
        half=rotary_dim // 2,
        width=width,
        holes=slot_ranges is not None,
    )

    def cast(a: Array | None) -> Array | None:
        return None if a is None else a.astype(pool.dtype)

    outs = _launch(
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
            *_turn_tables(angles),
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
    pool: Float[Array, "P CE"],
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

    Keys are accumulated in float32, turned, and rounded to the pool's dtype. Other arguments as in `absorbed_attention`.
    """
    lens = _own_lens(lens, rows, tables.shape[1] * block_size)
    more: dict[str, Any] = {
        "block_size": block_size,
        "slot_ranges": slot_ranges,
        "table_of_row": table_of_row,
        "interpret": interpret,
        "chip": chip,
    }
    scores = rotary_scores(
        q_rotary, q_absorbed, pool, tables, lens, wk_rotary, bk_rotary, angles, **more
    )
    z, _, _ = absorbed_output(scores, pool, tables, lens, out_dtype=out_dtype, **more)
    return z

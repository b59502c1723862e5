"""Prefill attention over the block pool as Pallas kernels on the Triton backend, for NVIDIA GPUs (`reference.prefill`).

A program takes a tile of query tokens of one chunk and the query heads of one key/value head, side by side as the rows
of its products. Which chunk a tile belongs to is computed on the device, from the chunks' lengths: a grid of as many
tiles as any division into chunks can need, of which the last ones have nothing to do.

  * `prefill_chunk`: flash attention over the cached keys and values of the chunk's request, then over the chunk itself.
    Where the request has a hidden prefix it starts from the flash state (m, l, acc) of one of the next two.
  * `prefill_hidden`: a program computes a tile of keys and values of one head from layer inputs and folds them into
    the states of several query tiles before it computes the next ones, so that the projection, which costs many times
    more than attention, is repeated once per `span` query tokens and not once per tile. Keys and values never reach
    memory; the states do, in between, where one program reads and writes its own tiles only.
  * For few query tokens, absorbed attention of `triton_decode_absorbed`, each token a row of its own: up to H tokens it
    multiplies less than the projection of the prefix.

Loads outside a request's own slots and outside a chunk's tokens are masked and give 0. Shapes inside a kernel are
powers of two. Nothing is summed by atomics, so equal inputs give equal bits.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Bool, Float, Int32

from apt_jax.pallas.triton_common import (
    MASKED,
    below,
    check_pool,
    dot,
    lanes_of_step,
    launch,
    load,
    locate,
    slots_of,
    swizzle,
    swizzle_group,
)
from apt_jax.pallas.triton_decode_absorbed import absorbed_attention
from apt_jax.pallas.triton_tiles import CHIPS, MIN_SIDE, padded

_LOG2_E = math.log2(math.e)
"""Scores are in units of log 2: the chip has an exponential of base 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTile:
    """Problem size that one program takes at a time; sizes are powers of two."""

    queries: int
    """Rows of a product: query tokens times query heads of a key/value head."""
    keys: int
    """Positions, cached or of the chunk."""
    lanes: int = 0
    """`prefill_hidden`: elements of a layer input, the step of the loop over D."""
    span: int = 0
    """`prefill_hidden`: rows of all query tiles of a program."""
    warps: int
    stages: int
    """Depth of the pipeline that copies from device memory."""


_TILES = {
    ("chunk", "sm_80"): PrefillTile(queries=128, keys=64, warps=8, stages=3),
    ("chunk", "sm_90"): PrefillTile(queries=128, keys=64, warps=8, stages=3),
    ("hidden", "sm_80"): PrefillTile(queries=32, keys=64, lanes=16, span=512, warps=8, stages=6),
    ("hidden", "sm_90"): PrefillTile(queries=32, keys=64, lanes=64, span=512, warps=8, stages=3),
}
"""By kernel and chip; chosen so that nothing spills at the widths of OPT-13B, 30B, 66B, Llama-2-7B and GPT-NeoX-20B.
`prefill_hidden` is at the limit on sm_80: with 128 keys or 32 lanes per step it spills."""


def _tile_for(kernel: str, chip: str | None, itemsize: int, num_tokens: int, group: int) -> PrefillTile:
    """The tile of a kernel; 4-byte elements get half of it and two stages, a short batch a smaller query tile.

    A tile holds all of the `group` query heads of a key/value head, a power of two, for at least one token.
    """
    chip = chip or CHIPS[0]
    if chip not in CHIPS:
        raise ValueError(f"no tiles for {chip=}; known: {CHIPS}, or None")
    tile = _TILES[kernel, chip]
    if itemsize > 2:
        tile = dataclasses.replace(
            tile,
            queries=tile.queries // 2,
            keys=tile.keys // 2,
            lanes=max(MIN_SIDE, tile.lanes // 2),
            stages=2,
        )
    queries = max(min(tile.queries, padded(num_tokens * group)), group)
    return dataclasses.replace(tile, queries=queries, span=max(tile.span, queries))


_TILE_FIELDS = 6
"""Fields of a query tile: row of the tables, first token of its chunk, its first query within the chunk, the chunk's
length, cached keys and values, cached layer inputs."""


def _query_tiles(
    offsets: Int32[Array, " B"],
    chunk_lens: Int32[Array, " B"],
    kv_lens: Int32[Array, " B"],
    hidden_lens: Int32[Array, " B"],
    num_tokens: int,
    per_tile: int,
) -> Int32[Array, "TILES 12"]:
    """`_TILE_FIELDS` of every query tile, twice; tiles beyond the last chunk have only zeros.

    The same in every layer, so the compiler computes it once a step.
    """
    batch = offsets.shape[0]
    counts = (chunk_lens + per_tile - 1) // per_tile
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    tile = jnp.arange(min(num_tokens // per_tile + batch, num_tokens), dtype=jnp.int32)
    row = jnp.sum(tile[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    there, row = row < batch, jnp.minimum(row, batch - 1)
    first = (tile - (ends - counts)[row]) * per_tile
    fields = (row, offsets[row], first, chunk_lens[row], kv_lens[row], hidden_lens[row])
    return jnp.where(there[:, None], jnp.stack((*fields, *fields), axis=1), 0)


def _read_tile(query_tiles: Any, index: Any, copy: int = 0) -> tuple[Any, ...]:
    start = copy * _TILE_FIELDS
    return tuple(plt.load(query_tiles.at[index, jnp.int32(start + i)]) for i in range(_TILE_FIELDS))


@dataclasses.dataclass(frozen=True)
class _Queries:
    """Index arrays of a tile's rows: tokens outer, the query heads of one key/value head inner."""

    position: Any
    """Within the chunk."""
    token: Any
    """In the batch's tokens."""
    head: Any
    ok: Any

    def load(self, ref: Any, lane: Any, lane_ok: Any, *masks: Any) -> Any:
        index = (self.token[:, None], self.head[:, None], lane[None, :])
        shape = (self.token.size, lane.size)
        lane_ok = None if lane_ok is None else lane_ok[None, :]
        return load(ref, index, shape, self.ok[:, None], lane_ok, *masks)

    def store(self, ref: Any, lane: Any, lane_ok: Any, value: Any) -> None:
        ok = self.ok[:, None] if lane_ok is None else self.ok[:, None] & lane_ok[None, :]
        index = (self.token[:, None], self.head[:, None], lane[None, :])
        plt.store(ref.at[index], value, mask=jnp.broadcast_to(ok, value.shape))


def _queries_of(rows: int, group: int, kv_head: Any, offset: Any, first: Any, length: Any) -> _Queries:
    """Row i is token i // G' of the tile and head i % G' of the group, G' the power of two that holds G."""
    bits = (group - 1).bit_length()
    index = jnp.arange(rows)
    position, member = first + (index >> bits), index & ((1 << bits) - 1)
    ok = position < length
    if group != 1 << bits:
        ok = ok & (member < group)
    return _Queries(position, offset + position, kv_head * group + member, ok)


def _fold(state: tuple[Any, Any, Any], s: Any, v: Any, mask: Any, scale: float) -> tuple[Any, Any, Any]:
    """Fold scores (queries, keys) and values (keys, lanes) into a flash state."""
    m, l, acc = state
    s = jnp.where(mask, s * (scale * _LOG2_E), MASKED)
    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    p = jnp.where(mask, jnp.exp2(s - m_new[:, None]), 0.0)
    before = jnp.exp2(m - m_new)
    acc = acc * before[:, None] + dot(p.astype(v.dtype), v, (1, 0))
    return m_new, l * before + jnp.sum(p, axis=1), acc


def _chunk_kernel(
    query_tiles: Any,
    slots: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    pool: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
    out_ref: Any,
    *,
    tile: PrefillTile,
    num_tiles: int,
    group: int,
    head_dim: int,
) -> None:
    # Later tiles of a chunk have more keys before them: they start first.
    index, kv_head = num_tiles - 1 - pl.program_id(0), pl.program_id(1)
    row, offset, first, length, kv_len, hidden_len = _read_tile(query_tiles, index)
    lane = jnp.arange(padded(head_dim))
    lane_ok = below(lane, head_dim, lane.size)
    lane_mask = None if lane_ok is None else lane_ok[None, :]
    shape = (tile.keys, lane.size)

    @pl.when(length > 0)
    def _() -> None:
        queries = _queries_of(tile.queries, group, kv_head, offset, first, length)
        q = queries.load(q_ref, lane, lane_ok)
        if m_ref is None:
            state = (
                jnp.full((tile.queries,), MASKED, jnp.float32),
                jnp.zeros((tile.queries,), jnp.float32),
                jnp.zeros((tile.queries, lane.size), jnp.float32),
            )
        else:
            seen = queries.ok & (hidden_len > 0)
            at = (queries.token, queries.head)
            state = (
                plt.load(m_ref.at[at], mask=seen, other=MASKED),
                plt.load(l_ref.at[at], mask=seen, other=0),
                queries.load(acc_ref, lane, lane_ok, seen[:, None]),
            )

        def cached(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            position = i * tile.keys + jnp.arange(tile.keys)
            column = kv_head * head_dim + lane

            def fetch(half: int) -> tuple[Any, Any]:
                slot, own = locate(slots, row, half, position, kv_len, False)
                at = (slot[:, None], column[None, :])
                return load(pool, at, shape, own[:, None], lane_mask), own

            k, own = fetch(0)
            mask = jnp.broadcast_to(own[None, :], (tile.queries, tile.keys))
            return _fold(state, dot(q, k, (1, 1)), fetch(1)[0], mask, head_dim**-0.5)

        def of_chunk(j: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            position = j * tile.keys + jnp.arange(tile.keys)
            at = ((offset + position)[:, None], kv_head, lane[None, :])
            there = (position < length)[:, None]
            k, v = (load(ref, at, shape, there, lane_mask) for ref in (k_ref, v_ref))
            mask = position[None, :] <= queries.position[:, None]
            return _fold(state, dot(q, k, (1, 1)), v, mask, head_dim**-0.5)

        state = lax.fori_loop(0, (kv_len + tile.keys - 1) // tile.keys, cached, state)
        per_tile = tile.queries >> (group - 1).bit_length()
        last = jnp.minimum(first + per_tile, length)
        _, l, acc = lax.fori_loop(0, (last + tile.keys - 1) // tile.keys, of_chunk, state)
        # From the second copy of the fields: indices of the output would else lie in registers all along.
        _, offset_, first_, length_, _, _ = _read_tile(query_tiles, index, copy=1)
        queries = _queries_of(tile.queries, group, kv_head, offset_, first_, length_)
        queries.store(out_ref, lane, lane_ok, acc / jnp.maximum(l, 1e-30)[:, None])


def _hidden_kernel(
    query_tiles: Any,
    slots: Any,
    q_ref: Any,
    pool: Any,
    wk: Any,
    bk: Any,
    wv: Any,
    bv: Any,
    cos: Any,
    sin: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
    *,
    tile: PrefillTile,
    num_tiles: int,
    neighbours: int,
    group: int,
    head_dim: int,
    half: int,
    width: int,
    barrier: bool,
) -> None:
    kv_head, index = swizzle(pl.program_id(0), neighbours, num_tiles)
    row, _, _, _, _, hidden_len = _read_tile(query_tiles, index)
    value_lane = jnp.arange(padded(head_dim))
    value_ok = below(value_lane, head_dim, value_lane.size)

    # A key's lanes, where rotary: both sides of the turn apart, as a tile in registers cannot be cut; then the rest.
    cuts = (0, half, 2 * half, head_dim) if half else (0, head_dim)
    key_lanes = []
    for start, end in itertools.pairwise(cuts):
        if start < end:
            lane = jnp.arange(padded(end - start))
            key_lanes.append((start + lane, below(lane, end - start, lane.size)))

    def bias(b: Any, lane: Any, ok: Any) -> Any:
        return load(b, (kv_head, lane), lane.shape, ok).astype(jnp.float32)

    def keys_and_values(position: Any, slot: Any, own: Any) -> tuple[list[Any], Any]:
        """Keys (keys, lanes), in the pieces of `key_lanes`, and values (lanes, keys), in the pool's dtype."""

        def project(j: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            feature, feature_ok = lanes_of_step(j, tile.lanes, width)
            feature_ok = None if feature_ok is None else feature_ok[None, :]
            at = (slot[:, None], feature[None, :])
            x = load(pool, at, (tile.keys, tile.lanes), own[:, None], feature_ok)

            def weights(w: Any, lane: Any, ok: Any) -> Any:
                at = (kv_head, lane[:, None], feature[None, :])
                shape = (lane.size, tile.lanes)
                return load(w, at, shape, None if ok is None else ok[:, None], feature_ok)

            *keys, v = sums
            keys = [key + dot(x, weights(wk, *part), (1, 1)) for key, part in zip(keys, key_lanes, strict=True)]
            return (*keys, v + dot(weights(wv, value_lane, value_ok), x, (1, 1)))

        init = (
            *(jnp.zeros((tile.keys, lane.size), jnp.float32) for lane, _ in key_lanes),
            jnp.zeros((value_lane.size, tile.keys), jnp.float32),
        )
        *keys, v = lax.fori_loop(0, -(-width // tile.lanes), project, init)
        if bv is not None:
            v = v + bias(bv, value_lane, value_ok)[:, None]
        v = v.astype(pool.dtype)
        if bk is not None:
            biases = [bias(bk, *part)[None, :] for part in key_lanes]
            keys = [key + b for key, b in zip(keys, biases, strict=True)]
        if half:
            lane, ok = key_lanes[0]
            at = (position[:, None], lane[None, :])
            masks = (own[:, None], None if ok is None else ok[None, :])
            c, s = (load(table, at, keys[0].shape, *masks) for table in (cos, sin))
            keys[:2] = keys[0] * c - keys[1] * s, keys[1] * c + keys[0] * s
        return [key.astype(pool.dtype) for key in keys], v

    per_tile = tile.queries >> (group - 1).bit_length()
    span = tile.span >> (group - 1).bit_length()

    @pl.when(hidden_len > 0)
    def _() -> None:
        def cached(i: Any, carry: Any) -> Any:
            position = i * tile.keys + jnp.arange(tile.keys)
            slot, own = locate(slots, row, 0, position, hidden_len, False)
            keys, v = keys_and_values(position, slot, own)
            own = own[:, None]
            # Read again in every iteration: what is computed from them would else lie in registers all along.
            _, offset, first, length, _, _ = _read_tile(query_tiles, index, copy=1)

            def query_tile(u: Any) -> Any:
                begin = first + u * per_tile
                queries = _queries_of(tile.queries, group, kv_head, offset, begin, length)
                at, seen = (queries.token, queries.head), queries.ok & (i > 0)
                m = plt.load(m_ref.at[at], mask=seen, other=MASKED)
                l = plt.load(l_ref.at[at], mask=seen, other=0)
                s = sum(dot(key, queries.load(q_ref, *part), (1, 1)) for key, part in zip(keys, key_lanes, strict=True))
                s = jnp.where(own, s * (head_dim**-0.5 * _LOG2_E), MASKED)
                m_new = jnp.maximum(m, jnp.max(s, axis=0))
                p = jnp.where(own, jnp.exp2(s - m_new[None, :]), 0.0)
                before = jnp.exp2(m - m_new)
                acc_at = (queries.token[None, :], queries.head[None, :], value_lane[:, None])
                shape = (value_lane.size, tile.queries)
                lane_ok = None if value_ok is None else value_ok[:, None]
                acc = load(acc_ref, acc_at, shape, seen[None, :], lane_ok)
                acc = acc * before[None, :] + dot(v, p.astype(v.dtype), (1, 0))
                plt.store(m_ref.at[at], m_new, mask=queries.ok)
                plt.store(l_ref.at[at], l * before + jnp.sum(p, axis=0), mask=queries.ok)
                ok = queries.ok[None, :] if lane_ok is None else queries.ok[None, :] & lane_ok
                plt.store(acc_ref.at[acc_at], acc, mask=jnp.broadcast_to(ok, shape))
                return u + 1

            tiles = (jnp.minimum(length - first, span) + per_tile - 1) // per_tile
            # Not a `fori_loop`, which the compiler would pipeline: that takes more registers than there are.
            lax.while_loop(lambda u: u < tiles, query_tile, jnp.int32(0))
            if barrier:  # what one thread stored another one may load in the next iteration
                plt.debug_barrier()
            return carry

        lax.fori_loop(0, (hidden_len + tile.keys - 1) // tile.keys, cached, jnp.int32(0))


_State = tuple[Float[Array, "T N"], Float[Array, "T N"], Float[Array, "T N H"]]
"""m, l and acc of the hidden prefixes; not defined for tokens of rows that have none."""


def _reprojected_prefix(
    q: Float[Array, "T N H"],
    pool: Float[Array, "SLOTS D"],
    slots: Int32[Array, "B 2 S"],
    fields: tuple[Array, Array, Array, Array],
    weights: tuple[Array | None, ...],
    angles: Float[Array, "POSITIONS HALF"] | None,
    *,
    num_kv_heads: int,
    interpret: bool,
    chip: str | None,
) -> _State:
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    group_bits = (group - 1).bit_length()
    tile = _tile_for("hidden", chip, pool.dtype.itemsize, num_tokens, 1 << group_bits)
    query_tiles = _query_tiles(*fields, num_tokens, tile.span >> group_bits)
    kernel = functools.partial(
        _hidden_kernel,
        tile=tile,
        num_tiles=query_tiles.shape[0],
        neighbours=swizzle_group(num_kv_heads),
        group=group,
        head_dim=head_dim,
        half=0 if angles is None else angles.shape[1],
        width=pool.shape[1],
        barrier=not interpret,
    )
    turns = (None, None) if angles is None else (jnp.cos(angles), jnp.sin(angles))
    of_head = jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32)
    m, l, acc = launch(
        kernel,
        (query_tiles, slots, q, pool, *weights, *turns),
        [of_head, of_head, jax.ShapeDtypeStruct(q.shape, jnp.float32)],
        grid=(num_kv_heads * query_tiles.shape[0],),
        warps=tile.warps,
        stages=tile.stages,
        name="prefill_hidden",
        interpret=interpret,
    )
    return m, l, acc


def _absorbed_prefix(
    q: Float[Array, "T N H"],
    pool: Float[Array, "P C D"],
    tables: Int32[Array, "B J"],
    row_of_token: Int32[Array, " T"],
    lens: Int32[Array, " T"],
    wk: Float[Array, "K H D"],
    bk: Float[Array, "K H"] | None,
    wv: Float[Array, "K H D"],
    bv: Float[Array, "K H"] | None,
    **more: Any,
) -> _State:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, _, width = wk.shape
    grouped = (q * jnp.asarray(head_dim**-0.5, q.dtype)).reshape(num_tokens, num_kv_heads, -1, head_dim)
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    q_absorbed = jnp.einsum("tkgh,khd->tkgd", grouped, wk, precision=exact).astype(q.dtype)
    z, m, l = absorbed_attention(
        q_absorbed.reshape(num_tokens, num_heads, width),
        pool,
        tables,
        lens,
        table_of_row=row_of_token,
        out_dtype=q.dtype,
        **more,
    )
    if bk is not None:  # the same for the whole prefix, but not for the chunk, which it is joined with
        m = m + jnp.sum(grouped.astype(jnp.float32) * bk.astype(jnp.float32)[None, :, None, :], axis=3).reshape(m.shape)
    z = z.reshape(num_tokens, num_kv_heads, -1, width)
    out = jnp.einsum("tkgd,khd->tkgh", z, wv, precision=exact).astype(jnp.float32)
    if bv is not None:
        out = out + bv.astype(jnp.float32)[None, :, None, :]
    return m * _LOG2_E, l, out.reshape(q.shape) * l[:, :, None]


def prefill(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B 2 J"],
    offsets: Int32[Array, " B"],
    chunk_lens: Int32[Array, " B"],
    prefix_lens: Int32[Array, " B"],
    hidden: Bool[Array, " B"],
    num_rows: Int32[Array, ""],
    wk: Float[Array, "K H D"],
    bk: Float[Array, "K H"] | None,
    wv: Float[Array, "K H D"],
    bv: Float[Array, "K H"] | None,
    *,
    block_size: int,
    with_hidden: bool,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    angles: Float[Array, "S HALF"] | None = None,
    interpret: bool = False,
    chip: str | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of prompt chunks over cached prefixes and themselves, float32; see `reference.prefill`.

    Keys and values of a hidden prefix are accumulated in float32, turned by `angles` if given, and rounded to the
    pool's dtype. Batches of at most H tokens absorb the projections instead where keys are not turned.

    Args:
        with_hidden: some row may have a hidden prefix; static, without it no kernel for one is launched.
        interpret: run in Pallas' interpreter, on any platform.
        chip: what tiles are chosen for (`triton_tiles.CHIPS`).

    Raises:
        ValueError: block size, dtype, heads or chip that the kernels do not take.
    """
    check_pool(pool, block_size)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    lane_width = num_kv_heads * head_dim
    if pool.shape[2] != lane_width or num_heads % num_kv_heads:
        raise ValueError(f"{pool.shape=} does not hold heads of {q.shape=}, {k.shape=}")
    if with_hidden and wk.shape[2] != lane_width:
        raise ValueError(f"slots of {lane_width} elements do not hold layer inputs of {wk.shape=}")
    group_bits = (num_heads // num_kv_heads - 1).bit_length()

    def cast(a: Array | None) -> Array | None:
        return None if a is None else a.astype(pool.dtype)

    q, k, v = q.astype(pool.dtype), k.astype(pool.dtype), v.astype(pool.dtype)
    row = jnp.arange(offsets.shape[0], dtype=jnp.int32)
    chunk_lens = jnp.where(row < num_rows, chunk_lens, 0)
    prefix_lens = jnp.minimum(prefix_lens, tables.shape[2] * block_size)
    hidden_lens = jnp.where(hidden, prefix_lens, 0) if with_hidden else jnp.zeros_like(prefix_lens)
    fields = (offsets, chunk_lens, prefix_lens - hidden_lens, hidden_lens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    inside = (token >= offsets[None, :]) & (token < (offsets + chunk_lens)[None, :])
    owned = jnp.any(inside, axis=1)
    # Every position below a row's length has a slot; -1 elsewhere would be a mask more for the kernels.
    slots = jnp.maximum(slots_of(tables, slot_ranges, block_size), 0)
    more: dict[str, Any] = {"interpret": interpret, "chip": chip}

    state: tuple[Array | None, ...] = (None, None, None)
    if with_hidden and angles is None and num_tokens <= head_dim:
        row_of_token = jnp.argmax(inside, axis=1).astype(jnp.int32)
        state = _absorbed_prefix(
            q,
            pool,
            tables[:, 0],
            row_of_token,
            jnp.where(owned, hidden_lens[row_of_token], 0),
            wk.astype(pool.dtype),
            bk,
            wv.astype(pool.dtype),
            bv,
            block_size=block_size,
            slot_ranges=slot_ranges,
            **more,
        )
    elif with_hidden:
        state = _reprojected_prefix(
            q,
            pool.reshape(-1, lane_width),
            slots,
            fields,
            (cast(wk), cast(bk), cast(wv), cast(bv)),
            angles,
            num_kv_heads=num_kv_heads,
            **more,
        )
    tile = _tile_for("chunk", chip, pool.dtype.itemsize, num_tokens, 1 << group_bits)
    query_tiles = _query_tiles(*fields, num_tokens, tile.queries >> group_bits)
    kernel = functools.partial(
        _chunk_kernel,
        tile=tile,
        num_tiles=query_tiles.shape[0],
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
    )
    out = launch(
        kernel,
        (query_tiles, slots, q, k, v, pool.reshape(-1, lane_width), *state),
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid=(query_tiles.shape[0], num_kv_heads),
        warps=tile.warps,
        stages=tile.stages,
        name="prefill_chunk",
        interpret=interpret,
    )
    return jnp.where(owned[:, None, None], out, 0.0)

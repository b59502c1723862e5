"""Hidden prefixes of prompt chunks on NVIDIA GPUs: keys and values from cached layer inputs, then flash attention.

The prefixes of all rows are laid out one after another, each starting at a tile boundary, and processed in pieces:

  * `prefix_project` gathers the layer inputs of a piece and multiplies them by W_k and W_v, once for any number of
    query tokens. Each processor of the chip runs one program, which takes (tile of positions, head) items in turn, up
    to the end of the prefixes; a piece without positions costs only a launch.
  * `prefix_attend` folds the keys and values of the piece into the flash states (m, l, acc) of the query tiles. A
    program reads and writes the states of its own tiles.

The host, which knows the prefixes, sets the number of launched pieces (`room`): 0, 1 or a few. All launches are in one
CUDA graph, and an unneeded launch is cheap compared with the products of a piece, which take some milliseconds per
layer. If there may be more pieces than `_MOST_LAUNCHED`, the device counts them, and a loop runs only over the existing
pieces; the host drives the loop, with two graphs per layer. In both cases only one piece is in memory, however many and
long the prefixes are. A single launch for all pieces would need a barrier over the whole chip between the projection of
a piece and its use, which cannot be tested without a chip.

For few query tokens `absorbed_prefix` is cheaper: absorbed attention in which each token is a row of its own. Up to H
tokens, it takes fewer multiplications than projecting the prefix.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int32

from apt_jax.ops.calls import DecodeCall, PrefillCall
from apt_jax.pallas.triton_common import below, dot, lanes_of_step, launch, load, slot_of
from apt_jax.pallas.triton_decode_absorbed import absorbed_attention
from apt_jax.pallas.triton_queries import (
    LOG2_E,
    FlashState,
    QueryTiles,
    Scores,
    attend,
    each_tile,
    no_state,
    queries_of,
    read_state,
    read_tile,
)
from apt_jax.pallas.triton_tiles import NUM_PROCESSORS, PrefillTile, Tile, check_chip, padded, tile_for

_PIECE_POSITIONS = 8192
_MOST_LAUNCHED = 4
"""Maximum number of pieces for which kernels are launched in every step, even if the pieces are empty."""

_SIDE_BY_SIDE = 8
"""Number of tiles of positions that programs process at the same time, for all heads, so that their layer inputs fit
the L2 cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixPlan:
    """The layout of the prefixes; it is the same in all layers and computed once per step."""

    begins: Int32[Array, " B"]
    """First position of each row that any of its queries sees, rounded down to a whole tile."""
    starts: Int32[Array, " B"]
    """Offset of that position among the laid-out positions of all rows."""
    tiles: Int32[Array, "TILES 3"]
    """For each tile of positions: its row, its first position, and the length of the row's prefix. Length 0: unused
    entry."""
    count: Int32[Array, " 1"]
    """Number of existing tiles."""
    per_piece: int
    """Number of tiles per piece."""


def plan_prefixes(
    hidden_lens: Int32[Array, " B"],
    scores: Scores,
    capacity: int,
    positions: int,
    piece_positions: int,
    room: int | None = None,
) -> PrefixPlan:
    """Lay out prefixes of layer inputs.

    Args:
        hidden_lens: length of each prefix.
        scores: logit modifiers, whose window hides the start of a prefix.
        capacity: maximum length of a prefix.
        positions: number of positions per tile.
        piece_positions: number of positions per piece, rounded up to whole tiles.
        room: maximum total length of all prefixes, in positions, where the length of each prefix is rounded up to whole
            tiles; None: `capacity` for each row.
    """
    batch = hidden_lens.shape[0]
    begins = scores.first_seen(hidden_lens) // positions * positions + jnp.zeros_like(hidden_lens)
    counts = (hidden_lens - begins + positions - 1) // positions
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    longest = capacity if scores.window is None else min(capacity, scores.window + positions)
    total = batch * -(-longest // positions)
    if room is not None:
        total = min(total, room // positions)
    tile = jnp.arange(total, dtype=jnp.int32)
    row = jnp.sum(tile[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    there, row = row < batch, jnp.minimum(row, batch - 1)
    first = begins[row] + (tile - (ends - counts)[row]) * positions
    fields = jnp.where(there[:, None], jnp.stack((row, first, hidden_lens[row]), axis=1), 0)
    return PrefixPlan(
        begins=begins,
        starts=(ends - counts) * positions,
        tiles=fields,
        count=ends[-1:],
        per_piece=min(-(-piece_positions // positions), total),
    )


class _Projected(NamedTuple):
    """Arrays that `prefix_project` reads."""

    piece: Any
    tiles: Any
    count: Any
    tables: Any
    ranges: Any
    pool: Any
    wk: Any
    bk: Any
    wv: Any
    bv: Any
    norm: Any
    cos: Any
    sin: Any
    after: Any


def _project_kernel(
    refs: _Projected,
    out: Any,
    *,
    tile: Tile,
    per_piece: int,
    programs: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    half: int,
    width: int,
    eps: float,
) -> None:
    piece, tiles, count, tables, ranges, pool, wk, bk, wv, bv, norm, cos, sin, after = refs
    del after  # only a dependency: the previous piece must have been read before it is overwritten
    first_tile = plt.load(piece.at[jnp.int32(0)]) * per_piece
    active = jnp.clip(plt.load(count.at[jnp.int32(0)]) - first_tile, 0, per_piece)
    whole = (0, head_dim)
    # Lanes of a key: the two halves of the rotary lanes separately, because a tile in registers cannot be split, then
    # the other lanes.
    cuts = (0, half, 2 * half, head_dim) if half else whole

    def project(index: Any, kv_head: Any, *, of_keys: bool) -> None:
        row, first, length = (plt.load(tiles.at[first_tile + index, jnp.int32(i)]) for i in range(3))
        position = first + jnp.arange(tile.tokens)
        own = position < length
        block, slot = slot_of(tables, ranges, row, 0, position, own, block_size)
        w, b = (wk, bk) if of_keys else (wv, bv)
        parts = []
        for start, end in itertools.pairwise(cuts if of_keys else whole):
            if start < end:
                lane = jnp.arange(padded(end - start))
                parts.append((start + lane, below(lane, end - start, lane.size)))

        def multiply(j: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            feature, feature_ok = lanes_of_step(j, tile.lanes, width)
            feature_ok = None if feature_ok is None else feature_ok[None, :]
            at = (block[:, None], (slot * width)[:, None] + feature[None, :])
            x = load(pool, at, (tile.tokens, tile.lanes), own[:, None], feature_ok)
            new = []
            for total, (lane, ok) in zip(sums, parts, strict=True):
                at = (kv_head, lane[:, None], feature[None, :])
                of_part = load(w, at, (lane.size, tile.lanes), None if ok is None else ok[:, None], feature_ok)
                new.append(total + dot(x, of_part, (1, 1)))
            return tuple(new)

        init = tuple(jnp.zeros((tile.tokens, lane.size), jnp.float32) for lane, _ in parts)
        sums = list(lax.fori_loop(0, -(-width // tile.lanes), multiply, init))

        def per_lane(ref: Any, *at: Any) -> list[Any]:
            return [load(ref, (*at, lane), lane.shape, ok).astype(jnp.float32)[None, :] for lane, ok in parts]

        if b is not None:
            sums = [total + of_part for total, of_part in zip(sums, per_lane(b, kv_head), strict=True)]
        if of_keys and norm is not None:
            square = sum(jnp.sum(total * total, axis=1) for total in sums)
            factor = lax.rsqrt(square * (1.0 / head_dim) + eps)[:, None]
            sums = [total * factor * of_part for total, of_part in zip(sums, per_lane(norm), strict=True)]
        if of_keys and half:
            lane, ok = parts[0]
            at = (position[:, None], lane[None, :])
            masks = (own[:, None], None if ok is None else ok[None, :])
            c, s = (load(table, at, sums[0].shape, *masks) for table in (cos, sin))
            sums[:2] = sums[0] * c - sums[1] * s, sums[1] * c + sums[0] * s
        place = index * tile.tokens + jnp.arange(tile.tokens)
        for total, (lane, ok) in zip(sums, parts, strict=True):
            mask = own[:, None] if ok is None else own[:, None] & ok[None, :]
            at = (jnp.int32(not of_keys), place[:, None], kv_head, lane[None, :])
            plt.store(out.at[at], total.astype(out.dtype), mask=jnp.broadcast_to(mask, total.shape))

    def item(i: Any) -> Any:
        band = _SIDE_BY_SIDE * 2 * num_kv_heads
        first = i // band * _SIDE_BY_SIDE
        high = jnp.minimum(active - first, _SIDE_BY_SIDE)
        index, column = first + i % band % high, i % band // high
        kv_head = column >> 1
        pl.when(column & 1 == 0)(lambda: project(index, kv_head, of_keys=True))
        pl.when(column & 1 == 1)(lambda: project(index, kv_head, of_keys=False))
        return i + programs

    # Not a `fori_loop`, which the compiler would pipeline.
    lax.while_loop(lambda i: i < active * (2 * num_kv_heads), item, pl.program_id(0))


class _Attended(NamedTuple):
    """Arrays that `prefix_attend` reads."""

    piece: Any
    query_tiles: Any
    count: Any
    begins: Any
    starts: Any
    q_ref: Any
    kv: Any
    slopes: Any
    m_in: Any
    l_in: Any
    acc_in: Any


def _attend_kernel(
    refs: _Attended,
    m_out: Any,
    l_out: Any,
    acc_out: Any,
    *,
    tile: PrefillTile,
    scores: Scores,
    programs: int,
    piece_positions: int,
    group: int,
    head_dim: int,
    barrier: bool,
) -> None:
    piece, query_tiles, count, begins, starts, q_ref, kv, slopes, m_in, l_in, acc_in = refs
    kv_head = pl.program_id(1)
    lane = jnp.arange(padded(head_dim))
    lane_ok = below(lane, head_dim, lane.size)

    def one_tile(index: Any) -> None:
        row, offset, first, length, _, hidden_len = read_tile(query_tiles, index)
        begin, start = plt.load(begins.at[row]), plt.load(starts.at[row])
        # Difference between a position and its place in the piece, and the range of the row's positions in the piece.
        place = plt.load(piece.at[jnp.int32(0)]) * piece_positions
        less = begin - start + place
        low = jnp.maximum(begin, less)
        high = jnp.minimum(hidden_len, less + piece_positions)

        @pl.when(low < high)
        def _() -> None:
            queries = queries_of(tile.queries, group, kv_head, offset, first, length)
            q = queries.load(q_ref, lane, lane_ok)
            slope = None if slopes is None else plt.load(slopes.at[queries.head], mask=queries.ok, other=0)
            if m_in is None:
                state = no_state(tile.queries, lane.size)
            else:  # the first piece of a row has no earlier state
                state = read_state((m_in, l_in, acc_in), queries, lane, lane_ok, start < place)

            def fetch(position: Any, is_open: bool) -> Any:
                own = None if is_open else position < high

                def half(which: int) -> Any:
                    at = (jnp.int32(which), (position - less)[:, None], kv_head, lane[None, :])
                    masks = (None if own is None else own[:, None], None if lane_ok is None else lane_ok[None, :])
                    return load(kv, at, (tile.keys, lane.size), *masks)

                return half(0), lambda: half(1), None if own is None else own[None, :]

            last_query = first + ((tile.queries >> (group - 1).bit_length()) - 1)
            m, l, acc = attend(
                state,
                q,
                fetch,
                scores,
                hidden_len + queries.position,
                slope,
                keys=tile.keys,
                first=jnp.maximum(low, scores.first_seen(hidden_len + first)),
                last=high,
                open_from=jnp.maximum(low, scores.first_seen(hidden_len + last_query)),
                open_to=high,
            )
            if barrier and m_in is not None:
                # The outputs are the memory of the inputs, which other threads may still read.
                plt.debug_barrier()
            _, offset_, first_, length_, _, _ = read_tile(query_tiles, index, copy=1)
            queries = queries_of(tile.queries, group, kv_head, offset_, first_, length_)
            at = (queries.token, queries.head)
            plt.store(m_out.at[at], m, mask=queries.ok)
            plt.store(l_out.at[at], l, mask=queries.ok)
            queries.store(acc_out, lane, lane_ok, acc)

    each_tile(count, programs, one_tile)


def attend_to_piece(
    piece: Int32[Array, " 1"],
    q: Float[Array, "T N H"],
    kv: Float[Array, "2 S K H"],
    plan: PrefixPlan,
    query_tiles: QueryTiles,
    slopes: Float[Array, " N"] | None,
    state: FlashState,
    *,
    tile: PrefillTile,
    scores: Scores,
    interpret: bool,
) -> FlashState:
    """Fold the keys and values of a piece into the flash states of all query tokens, and return the states.

    The states of rows without positions in the piece stay unchanged. The result reuses the memory of `state`.

    Args:
        piece: number of the piece.
        q: queries.
        kv: keys and values of the piece.
        plan: layout of the prefixes.
        query_tiles: tiles of the query tokens.
        slopes: ALiBi slopes, or None.
        state: m, l and acc of all query tokens; (None, None, None): the queries have seen no key.
        tile: tile of the prefill kernels.
        scores: logit modifiers.
        interpret: run in Pallas' interpreter.
    """
    num_heads, (_, positions, num_kv_heads, head_dim) = q.shape[1], kv.shape
    of_head = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
    kernel = functools.partial(
        _attend_kernel,
        tile=tile,
        scores=scores,
        programs=query_tiles.programs,
        piece_positions=positions,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        barrier=not interpret,
    )
    m, l, acc = launch(
        kernel,
        _Attended(piece, query_tiles.fields, query_tiles.count, plan.begins, plan.starts, q, kv, slopes, *state),
        (of_head, of_head, jax.ShapeDtypeStruct(q.shape, jnp.float32)),
        grid=(query_tiles.programs, num_kv_heads),
        warps=tile.warps,
        stages=tile.stages,
        name="prefix_attend",
        interpret=interpret,
        in_place={} if state[0] is None else {8: 0, 9: 1, 10: 2},
    )
    return m, l, acc


def weights_of(call: PrefillCall) -> tuple[Array | None, ...]:
    """Return W_k, b_k, W_v and b_v of hidden prefixes in the dtype of the pool; a missing bias is None."""
    assert call.hidden_prefixes is not None
    p = call.hidden_prefixes.projection
    return tuple(None if a is None else a.astype(call.pool.dtype) for a in (p.wk, p.bk, p.value_weights, p.bv))


def slopes_of(call: PrefillCall) -> Float[Array, " N"] | None:
    """Return the ALiBi slopes; None without slopes."""
    return None if call.rules is None else call.rules.slopes


def projected_prefix(
    q: Float[Array, "T N H"],
    call: PrefillCall,
    hidden_lens: Int32[Array, " B"],
    query_tiles: QueryTiles,
    *,
    tile: PrefillTile,
    scores: Scores,
    interpret: bool,
    chip: str | None,
    piece_positions: int = _PIECE_POSITIONS,
) -> FlashState:
    """Return the online-softmax state m, l (T, N) and acc (T, N, H) of attention over the hidden prefixes; undefined
    for tokens of rows without a prefix.

    Args:
        q: queries.
        call: pool, tables, hidden prefixes and logit modifiers.
        hidden_lens: (B,) length of each hidden prefix; 0: no prefix.
        query_tiles: tiles of the query tokens.
        tile: tile of the prefill kernels.
        scores: logit modifiers.
        interpret: run in Pallas' interpreter.
        chip: class of chips to choose tiles for (`triton_tiles.CHIPS`); None: as for sm_80.
        piece_positions: number of positions per piece; smaller in tests.
    """
    of_inputs, pool = call.hidden_prefixes, call.pool
    assert of_inputs is not None
    p, block_size = of_inputs.projection, of_inputs.block_size
    num_kv_heads, head_dim, width = p.wk.shape
    num_heads = q.shape[1]
    kernel = "project" if p.angles is None and p.key_norm is None else "project_turned"
    project = tile_for(kernel, chip, num_heads, width, pool.dtype.itemsize, head_dim)
    capacity = call.tables.shape[2] * block_size
    plan = plan_prefixes(hidden_lens, scores, capacity, project.tokens, piece_positions, of_inputs.room)
    most = plan.per_piece * project.tokens
    programs = 2 if interpret else NUM_PROCESSORS[check_chip(chip, head_dim)]
    turns = (None, None) if p.angles is None else (jnp.cos(p.angles), jnp.sin(p.angles))
    project_piece = functools.partial(
        launch,
        functools.partial(
            _project_kernel,
            tile=project,
            per_piece=plan.per_piece,
            programs=programs,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            half=0 if p.angles is None else p.angles.shape[1],
            width=width,
            eps=0.0 if p.key_norm is None else p.key_norm.eps,
        ),
        out_shape=jax.ShapeDtypeStruct((2, most, num_kv_heads, head_dim), pool.dtype),
        grid=(programs,),
        warps=project.warps,
        stages=project.stages,
        name="prefix_project",
        interpret=interpret,
    )
    inputs = (call.tables, call.slot_ranges, pool.reshape(pool.shape[0], -1), *weights_of(call))
    scale, slopes = None if p.key_norm is None else p.key_norm.scale, slopes_of(call)

    # Lowered once for all pieces, except for a first piece, which has no earlier state.
    @jax.jit
    def attend_to(piece: Array, state: FlashState) -> FlashState:
        kv = project_piece(_Projected._make((piece, plan.tiles, plan.count, *inputs, scale, *turns, state[0])))
        more: dict[str, Any] = {"tile": tile, "scores": scores, "interpret": interpret}
        return attend_to_piece(piece, q, kv, plan, query_tiles, slopes, state, **more)

    state: FlashState = (None, None, None)
    most_pieces = -(-plan.tiles.shape[0] // plan.per_piece)
    if most_pieces <= _MOST_LAUNCHED:
        for piece in range(most_pieces):
            state = attend_to(jnp.full(1, piece, jnp.int32), state)
        return state
    of_head = jnp.zeros(q.shape[:2], jnp.float32)
    pieces = (plan.count[0] + plan.per_piece - 1) // plan.per_piece
    state = (of_head, of_head, jnp.zeros(q.shape, jnp.float32))
    return lax.fori_loop(0, pieces, lambda piece, state: attend_to(piece[None], state), state)


def absorbed_prefix(
    q: Float[Array, "T N H"], call: DecodeCall, *, most_positions: int | None, interpret: bool, chip: str | None
) -> FlashState:
    """Return the state that `projected_prefix` returns, computed with absorbed projections.

    Args:
        q: queries.
        call: a decode call over the hidden prefixes, with a row for each token.
        most_positions: maximum number of positions per row; None: the capacity of a row of the tables.
        interpret: run in Pallas' interpreter.
        chip: class of chips to choose tiles for (`triton_tiles.CHIPS`); None: as for sm_80.
    """
    p = call.projected
    wk, wv = (w.astype(call.pool.dtype) for w in (p.wk, p.value_weights))
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, _, width = wk.shape
    grouped = (q * jnp.asarray(head_dim**-0.5, q.dtype)).reshape(num_tokens, num_kv_heads, -1, head_dim)
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    q_absorbed = jnp.einsum("tkgh,khd->tkgd", grouped, wk, precision=exact).astype(q.dtype)
    z, m, l = absorbed_attention(
        q_absorbed.reshape(num_tokens, num_heads, width),
        call,
        most_positions=most_positions,
        out_dtype=q.dtype,
        interpret=interpret,
        chip=chip,
    )
    if p.bk is not None:  # it shifts the scores of the prefix, but not those of the chunk, with which they are joined
        m = m + jnp.sum(grouped.astype(jnp.float32) * p.bk.astype(jnp.float32)[None, :, None, :], axis=3).reshape(
            m.shape
        )
    z = z.reshape(num_tokens, num_kv_heads, -1, width)
    out = jnp.einsum("tkgd,khd->tkgh", z, wv, precision=exact).astype(jnp.float32)
    if p.bv is not None:
        out = out + p.bv.astype(jnp.float32)[None, :, None, :]
    return m * LOG2_E, l, out.reshape(q.shape) * l[:, :, None]

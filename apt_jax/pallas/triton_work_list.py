"""Work lists of the decode kernels: which tiles of which row a program takes, and how the pieces of a row are joined.

Rows of a step differ in length by up to the longest context, so programs are not given out by row. All visible tiles of
all rows are cut into pieces of equal length, as many as fill the chip a few times; a row that is no longer than a piece
is one piece. A long row among many is so spread over the whole chip, and a short one costs one short program.

The list is made from the lengths on the device. It is the same in every layer with the same window, so that the
compiler makes it once a step, and its size is static: rows plus the number of pieces. Items that are not needed are at
the end and do nothing.

The only piece of a row writes the row's result. Pieces of others write the state of flash attention (m, l and
accumulator) to a place of their own, and `join_pieces` sums them in the order of the row: equal inputs give equal bits.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Bool, Int32

from apt_jax.ops.calls import DecodeCall
from apt_jax.pallas.triton_common import MASKED, below, launch, load
from apt_jax.pallas.triton_tiles import CHIPS, NUM_PROCESSORS, padded

_JOINED_LANES, _JOINED_HEADS = 128, 8
"""Lanes and heads of a program of `join_pieces`. A step without rows of several pieces launches it all the same: with a
head a program OPT-13B had 22,400 programs that ended at once."""
_PIECES_AT_ONCE = 4
"""Pieces of a row that it joins at a time."""


class Rows(NamedTuple):
    """Visible tiles of positions of each query row; int32."""

    table: Int32[Array, " B"]
    """Row of the tables."""
    length: Int32[Array, " B"]
    """Positions; its query is at the last of them."""
    first: Int32[Array, " B"]
    """The first tile that it sees."""
    last: Int32[Array, " B"]
    """The end of its tiles."""
    packed: Int32[Array, " B"]
    """Visible tiles of all rows before: where its own begin in an array that has the tiles of all rows, packed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkList:
    """Pieces of a step, one program (or one a head) each."""

    items: Int32[Array, "M 8"]
    """The fields of `Item`, row by row, then its row and place again; row -1: nothing to do."""
    joins: Int32[Array, "S 3"]
    """Rows of several pieces: row, first place, number of pieces; 0 pieces: none."""
    num_places: int
    """Places for results of pieces."""


class Item(NamedTuple):
    """A piece of a row, as scalars of a kernel."""

    row: Any
    table: Any
    length: Any
    first: Any
    """First tile, counted from the start of the row."""
    last: Any
    """End of the tiles."""
    packed: Any
    """Where the first tile of the piece is among the packed tiles of all rows."""


def _running_sum(x: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """Inclusive; one small kernel, which a scan would not be."""
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(index[:, None] >= index[None, :], x[None, :], 0), axis=1, dtype=jnp.int32)


def rows_of(
    lens: Int32[Array, " B"],
    table_of_row: Int32[Array, " B"] | None,
    *,
    tokens: int,
    window: int | None = None,
) -> Rows:
    """The visible tiles of `tokens` positions of rows with these lengths.

    Args:
        table_of_row: None: each row has its own.
        window: positions that a query sees, its own among them; None: all.
    """
    lens = lens.astype(jnp.int32)
    seen_from = jnp.zeros_like(lens) if window is None else jnp.maximum(lens - window, 0)
    first, last = seen_from // tokens, (lens + tokens - 1) // tokens
    table = jnp.arange(lens.shape[0], dtype=jnp.int32) if table_of_row is None else table_of_row.astype(jnp.int32)
    return Rows(table=table, length=lens, first=first, last=last, packed=_running_sum(last - first) - (last - first))


def rows_of_call(call: DecodeCall, tokens: int) -> Rows:
    """`rows_of` the rows of a call, others empty. The same in every layer, so the compiler computes it once a step."""
    (first, last), index = call.row_range(), jnp.arange(call.lens.shape[0], dtype=jnp.int32)
    lens = jnp.where((index >= first) & (index < last), jnp.minimum(call.lens, call.capacity), 0)
    window = None if call.rules is None else call.rules.window
    return rows_of(lens, call.table_of_row, tokens=tokens, window=window)


def pieces_for(chip: str | None, programs: int, per_processor: int) -> int:
    """Pieces that all visible tiles are cut into, beside one a row.

    Args:
        programs: of one piece.
        per_processor: programs that each processor is to get: a few times what it runs at once.
    """
    return max(1, -(-per_processor * NUM_PROCESSORS[chip or CHIPS[0]] // programs))


def work_list(rows: Rows, pieces: int, most_tiles: int, active: Bool[Array, " B"] | None = None) -> WorkList:
    """Cut the tiles of rows into at most `pieces` pieces of equal length, and one shorter piece a row.

    Args:
        most_tiles: of a row; static.
        active: rows to list; None: all. An active row without tiles has an item, which writes zeros.
    """
    batch = rows.length.shape[0]
    num_items = min(batch + pieces, batch * most_tiles)
    tiles = rows.last - rows.first
    if active is not None:
        tiles = jnp.where(active, tiles, 0)
    piece = jnp.maximum((jnp.sum(tiles, dtype=jnp.int32) + pieces - 1) // pieces, 1)
    counts = jnp.maximum((tiles + piece - 1) // piece, 1)
    if active is not None:
        counts = jnp.where(active, counts, 0)
    ends = _running_sum(counts)
    index = jnp.arange(num_items, dtype=jnp.int32)
    row = jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    there, row = row < batch, jnp.minimum(row, batch - 1)
    before = (index - (ends - counts)[row]) * piece
    first = rows.first[row] + before
    # A row of several pieces has more tiles than one of them: there are fewer such rows than pieces.
    is_cut = counts > 1
    places = jnp.where(is_cut, counts, 0)
    first_place = _running_sum(places) - places
    place = jnp.where(is_cut[row], first_place[row] + index - (ends - counts)[row], -1)
    items = jnp.stack(
        (
            jnp.where(there, row, -1),
            rows.table[row],
            rows.length[row],
            first,
            jnp.minimum(first + piece, rows.last[row]),
            rows.packed[row] + before,
            row,
            place,
        ),
        axis=1,
    )
    num_joins = min(batch, pieces) if most_tiles > 1 else 0
    cut_before = _running_sum(is_cut.astype(jnp.int32))
    number = jnp.arange(num_joins, dtype=jnp.int32)
    cut = jnp.sum(number[:, None] >= cut_before[None, :], axis=1, dtype=jnp.int32)
    there, cut = cut < batch, jnp.minimum(cut, batch - 1)
    joins = jnp.stack((cut, first_place[cut], jnp.where(there, counts[cut], 0)), axis=1)
    return WorkList(items=items, joins=joins, num_places=min(2 * pieces, num_items))


def read_item(items: Any, index: Any) -> Item:
    """The item of a program."""
    return Item(*(plt.load(items.at[index, jnp.int32(i)]) for i in range(len(Item._fields))))


def _read_goal(items: Any, index: Any) -> tuple[Any, Any]:
    """Row and place of an item, where its result goes; -1: the piece is the whole row. From fields of their own, as what
    is read before the loop would lie in registers all along."""
    row, place = (plt.load(items.at[index, jnp.int32(len(Item._fields) + i)]) for i in range(2))
    return row, place


def partial_shapes(work: WorkList, heads: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Accumulators, m and l of pieces."""
    places = (work.num_places, heads)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*places, width), places, places)]


def store_piece(
    state: tuple[Any, Any, Any],
    results: Sequence[Any],
    partial: Sequence[Any],
    goal: tuple[Any, Any],
    heads: Any,
    lane: Any,
    mask: tuple[Any, Any],
    once: Any = None,
) -> None:
    """Store (m, l, accumulator) of a piece: normalised as the result of its row, or at its place.

    Args:
        results: refs (B, N, W), and (B, N) of m and l where they are wanted.
        partial: refs of `partial_shapes`.
        goal: the work list's items and the number of this one.
        mask: heads that there are, and lanes or None.
        once: True in one of the programs that share m and l; None: there is one.
    """
    m, l, acc = state
    row, place = _read_goal(*goal)
    head_ok, lane_ok = mask
    ok = head_ok[:, None] if lane_ok is None else head_ok[:, None] & lane_ok[None, :]
    ok = jnp.broadcast_to(ok, acc.shape)
    head_ok = head_ok if once is None else head_ok & once
    is_whole = place < 0
    out, *more = results
    value = (acc / jnp.maximum(l, 1e-30)[:, None]).astype(out.dtype)
    plt.store(out.at[row, heads[:, None], lane[None, :]], value, mask=ok & is_whole)
    for ref, value in zip(more, (m, l), strict=False):
        plt.store(ref.at[row, heads], value, mask=head_ok & is_whole)
    place = jnp.maximum(place, 0)
    plt.store(partial[0].at[place, heads[:, None], lane[None, :]], acc, mask=ok & ~is_whole)
    for ref, value in zip(partial[1:], (m, l), strict=True):
        plt.store(ref.at[place, heads], value, mask=head_ok & ~is_whole)


def join_pieces(
    work: WorkList, results: Sequence[Array], partial: Sequence[Array], *, interpret: bool
) -> tuple[Array, ...]:
    """The results with rows of several pieces filled in, in place; a program takes some lanes of some heads."""
    if not work.joins.shape[0]:
        return tuple(results)
    _, num_heads, width = results[0].shape
    lanes, together = min(_JOINED_LANES, padded(width)), min(_JOINED_HEADS, 1 << (num_heads - 1).bit_length())
    num_results = len(results)

    def kernel(joins: Any, acc_ref: Any, m_ref: Any, l_ref: Any, *refs: Any) -> None:
        out_ref, *more = refs[num_results:]
        part, group, index = (pl.program_id(axis) for axis in range(3))
        row, place, count = (plt.load(joins.at[index, jnp.int32(i)]) for i in range(3))

        @pl.when(count > 0)
        def _() -> None:
            lane = part * lanes + jnp.arange(lanes)
            lane_ok = below(lane, width, width - width % lanes)
            head = group * together + jnp.arange(together)
            head_ok = head < num_heads
            ok = head_ok[:, None] if lane_ok is None else head_ok[:, None] & lane_ok[None, :]
            ok = jnp.broadcast_to(ok, (together, lanes))

            def some(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                m, l, acc = state
                number = i * _PIECES_AT_ONCE + jnp.arange(_PIECES_AT_ONCE)
                there = (number < count)[:, None] & head_ok[None, :]
                at = ((place + number)[:, None], head[None, :])
                m_piece = plt.load(m_ref.at[at], mask=there, other=MASKED)
                l_piece = plt.load(l_ref.at[at], mask=there, other=0)
                at = ((place + number)[:, None, None], head[None, :, None], lane[None, None, :])
                acc_piece = load(acc_ref, at, (_PIECES_AT_ONCE, together, lanes), there[:, :, None], ok[None])
                m_new = jnp.maximum(m, jnp.max(m_piece, axis=0))
                factor, before = jnp.exp(m_piece - m_new[None, :]), jnp.exp(m - m_new)
                l = l * before + jnp.sum(l_piece * factor, axis=0)
                return m_new, l, acc * before[:, None] + jnp.sum(acc_piece * factor[:, :, None], axis=0)

            init = (
                jnp.full((together,), MASKED, jnp.float32),
                jnp.zeros((together,), jnp.float32),
                jnp.zeros((together, lanes), jnp.float32),
            )
            m, l, acc = jax.lax.fori_loop(0, (count + _PIECES_AT_ONCE - 1) // _PIECES_AT_ONCE, some, init)
            value = (acc / jnp.maximum(l, 1e-30)[:, None]).astype(out_ref.dtype)
            plt.store(out_ref.at[row, head[:, None], lane[None, :]], value, mask=ok)
            for ref, value in zip(more, (m, l), strict=False):
                plt.store(ref.at[row, head], value, mask=head_ok & (part == 0))

    return tuple(
        launch(
            kernel,
            (work.joins, *partial, *results),
            [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results],
            grid=(-(-width // lanes), -(-num_heads // together), work.joins.shape[0]),
            warps=4,
            stages=1,
            name="decode_join",
            interpret=interpret,
            in_place={4 + i: i for i in range(num_results)},
        )
    )


def longest_chain(lens: Sequence[int], *, tokens: int, pieces: int) -> int:
    """Tiles of the longest piece of rows with these lengths: what one program does one after another."""
    tiles = [-(-n // tokens) for n in lens]
    piece = max(1, -(-sum(tiles) // pieces))
    return min(piece, max(tiles, default=0))

"""Work lists of the decode kernels, which assign tiles to programs, and the joining of the pieces of a row.

The rows of a step can have very different lengths, so a program does not simply process one row. Instead, the visible
tiles of all rows are cut into pieces of equal length, enough pieces to fill the chip a few times; a row that is not
longer than a piece is a single piece. Thus a long row among many rows is spread over the whole chip, and a short row
costs one short program.

The device makes the list from the lengths. It is the same in all layers with the same window, so it is made once per
step. Its size is static: the number of rows plus the number of pieces. Unused items are at the end and do nothing.

If a row is a single piece, the piece writes the row's result. Other pieces write their flash state (m, l and
accumulator) to separate places, and `join_pieces` adds these in the order of the row, so equal inputs give equal bits.
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
"""Number of lanes and heads per program of `join_pieces`. The kernel is launched even if all rows are single pieces;
with one head per program, OPT-13B would have 22,400 programs without work."""
_PIECES_AT_ONCE = 4
"""Number of pieces of a row that a program of `join_pieces` reads at a time."""


class Rows(NamedTuple):
    """Visible tiles of positions of each query row."""

    table: Int32[Array, " B"]
    """Row of the tables for each query row."""
    length: Int32[Array, " B"]
    """Number of positions of each row; its query is at the last position."""
    first: Int32[Array, " B"]
    """First tile that each row's query attends to."""
    last: Int32[Array, " B"]
    """End of each row's tiles."""
    packed: Int32[Array, " B"]
    """Index of each row's first visible tile among the visible tiles of all rows, in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkList:
    """The pieces of a step, each for one program (or one per head)."""

    items: Int32[Array, "M 8"]
    """For each item, row by row: the fields of `Item`, the row again, and the place of the piece's result (-1: the
    piece is the whole row). An `Item.row` of -1 marks an unused item."""
    joins: Int32[Array, "S 3"]
    """Row, first place and number of pieces of each row with several pieces; 0 pieces: unused entry."""
    num_places: int
    """Number of places for results of pieces."""


class Item(NamedTuple):
    """A piece of a row, as scalars of a kernel."""

    row: Any
    table: Any
    length: Any
    first: Any
    """First tile of the piece, counted from the start of the row."""
    last: Any
    """End of the piece's tiles."""
    packed: Any
    """Index of the piece's first tile among the packed tiles of all rows."""


def _running_sum(x: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """Return the inclusive running sum, computed as a single small kernel, unlike a scan."""
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(index[:, None] >= index[None, :], x[None, :], 0), axis=1, dtype=jnp.int32)


def rows_of(
    lens: Int32[Array, " B"],
    table_of_row: Int32[Array, " B"] | None,
    *,
    tokens: int,
    window: int | None = None,
) -> Rows:
    """Return the visible tiles of rows with these lengths, in tiles of `tokens` positions.

    Args:
        lens: length of each row.
        table_of_row: row of the tables for each row; None: each row has its own.
        tokens: number of positions per tile.
        window: number of positions that a query attends to, including its own; None: all.
    """
    lens = lens.astype(jnp.int32)
    seen_from = jnp.zeros_like(lens) if window is None else jnp.maximum(lens - window, 0)
    first, last = seen_from // tokens, (lens + tokens - 1) // tokens
    table = jnp.arange(lens.shape[0], dtype=jnp.int32) if table_of_row is None else table_of_row.astype(jnp.int32)
    return Rows(table=table, length=lens, first=first, last=last, packed=_running_sum(last - first) - (last - first))


def rows_of_call(call: DecodeCall, tokens: int) -> Rows:
    """Return `rows_of` for a call; rows outside its row range are empty.

    The result is the same in all layers and computed once per step.
    """
    (first, last), index = call.row_range(), jnp.arange(call.lens.shape[0], dtype=jnp.int32)
    lens = jnp.where((index >= first) & (index < last), jnp.minimum(call.lens, call.capacity), 0)
    window = None if call.rules is None else call.rules.window
    return rows_of(lens, call.table_of_row, tokens=tokens, window=window)


def pieces_for(chip: str | None, programs: int, per_processor: int) -> int:
    """Return the number of pieces that all visible tiles are cut into, in addition to one piece per row.

    Args:
        chip: class of chips, one of `triton_tiles.CHIPS`; None: as for sm_80.
        programs: number of programs per piece.
        per_processor: desired number of programs per processor: a few times as many as it runs at once.
    """
    return max(1, -(-per_processor * NUM_PROCESSORS[chip or CHIPS[0]] // programs))


def work_list(rows: Rows, pieces: int, most_tiles: int, active: Bool[Array, " B"] | None = None) -> WorkList:
    """Cut the tiles of rows into at most `pieces` pieces of equal length, plus one shorter piece per row.

    Args:
        rows: visible tiles of each row.
        pieces: maximum number of pieces of full length.
        most_tiles: maximum number of tiles per row; static.
        active: mask of the rows to list; None: all rows. An active row without tiles has an item, which writes zeros.
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
    # A row with several pieces has more tiles than a piece, so there are fewer such rows than pieces.
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
    """Load the item of a program."""
    return Item(*(plt.load(items.at[index, jnp.int32(i)]) for i in range(len(Item._fields))))


def _read_goal(items: Any, index: Any) -> tuple[Any, Any]:
    """Load the row of an item and the place for its result; place -1: the piece is the whole row.

    These are separate fields of the list, because reusing values read before the loop would keep them in registers.
    """
    row, place = (plt.load(items.at[index, jnp.int32(len(Item._fields) + i)]) for i in range(2))
    return row, place


def partial_shapes(work: WorkList, heads: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the pieces' accumulators, m and l, all float32."""
    places = (work.num_places, heads)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*places, width), places, places)]


def add_sinks(state: tuple[Any, Any, Any], sinks: Any, heads: Any, head_ok: Any) -> tuple[Any, Any, Any]:
    """Return m, l and accumulator of whole rows with the sinks of their heads; `sinks`: ref of (N,), or None."""
    if sinks is None:
        return state
    m, l, acc = state
    sink = plt.load(sinks.at[heads], mask=head_ok, other=MASKED)
    top = jnp.maximum(m, sink)
    before = jnp.exp(m - top)
    return top, l * before + jnp.exp(sink - top), acc * before[:, None]


def store_piece(
    state: tuple[Any, Any, Any],
    results: Sequence[Any],
    partial: Sequence[Any],
    goal: tuple[Any, Any],
    heads: Any,
    lane: Any,
    mask: tuple[Any, Any],
    sinks: Any,
    once: Any = None,
) -> None:
    """Store the state of a piece: as the normalized result of its row if the piece is the whole row, else unchanged at
    the piece's place.

    Args:
        state: m, l and accumulator.
        results: ref of the results (B, N, W), optionally followed by refs of m and l (B, N).
        partial: refs of arrays with the shapes of `partial_shapes`.
        goal: ref of the work list's items and the index of this item.
        heads: head numbers.
        lane: lane numbers.
        mask: mask of existing heads, and mask of existing lanes or None.
        sinks: ref of (N,) sinks, which are added to whole rows, or None.
        once: True in the one program that stores m and l for a piece and its heads; None: there is only one program.
    """
    m, l, acc = state
    row, place = _read_goal(*goal)
    head_ok, lane_ok = mask
    ok = head_ok[:, None] if lane_ok is None else head_ok[:, None] & lane_ok[None, :]
    ok = jnp.broadcast_to(ok, acc.shape)
    head_ok = head_ok if once is None else head_ok & once
    is_whole = place < 0
    out, *more = results
    whole = add_sinks(state, sinks, heads, mask[0])
    value = (whole[2] / jnp.maximum(whole[1], 1e-30)[:, None]).astype(out.dtype)
    plt.store(out.at[row, heads[:, None], lane[None, :]], value, mask=ok & is_whole)
    for ref, value in zip(more, whole, strict=False):
        plt.store(ref.at[row, heads], value, mask=head_ok & is_whole)
    place = jnp.maximum(place, 0)
    plt.store(partial[0].at[place, heads[:, None], lane[None, :]], acc, mask=ok & ~is_whole)
    for ref, value in zip(partial[1:], (m, l), strict=True):
        plt.store(ref.at[place, heads], value, mask=head_ok & ~is_whole)


def join_pieces(
    work: WorkList, results: Sequence[Array], partial: Sequence[Array], sinks: Array | None, *, interpret: bool
) -> tuple[Array, ...]:
    """Fill in the results of rows with several pieces, in place, and return all results.

    Args:
        work: the work list.
        results: arrays that `store_piece` has written.
        partial: states of the pieces, with the shapes of `partial_shapes`.
        sinks: (N,) sinks in float32, or None.
        interpret: run in Pallas' interpreter.
    """
    if not work.joins.shape[0]:
        return tuple(results)
    _, num_heads, width = results[0].shape
    lanes, together = min(_JOINED_LANES, padded(width)), min(_JOINED_HEADS, 1 << (num_heads - 1).bit_length())
    num_results = len(results)

    def kernel(joins: Any, sinks_ref: Any, acc_ref: Any, m_ref: Any, l_ref: Any, *refs: Any) -> None:
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
            state = jax.lax.fori_loop(0, (count + _PIECES_AT_ONCE - 1) // _PIECES_AT_ONCE, some, init)
            m, l, acc = add_sinks(state, sinks_ref, head, head_ok)
            value = (acc / jnp.maximum(l, 1e-30)[:, None]).astype(out_ref.dtype)
            plt.store(out_ref.at[row, head[:, None], lane[None, :]], value, mask=ok)
            for ref, value in zip(more, (m, l), strict=False):
                plt.store(ref.at[row, head], value, mask=head_ok & (part == 0))

    return tuple(
        launch(
            kernel,
            (work.joins, sinks, *partial, *results),
            [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results],
            grid=(-(-width // lanes), -(-num_heads // together), work.joins.shape[0]),
            warps=4,
            stages=1,
            name="decode_join",
            interpret=interpret,
            in_place={5 + i: i for i in range(num_results)},
        )
    )


def longest_chain(lens: Sequence[int], *, tokens: int, pieces: int) -> int:
    """Return the number of tiles of the longest piece, which one program computes in sequence.

    Args:
        lens: length of each row.
        tokens: number of positions per tile.
        pieces: see `work_list`.
    """
    tiles = [-(-n // tokens) for n in lens]
    piece = max(1, -(-sum(tiles) // pieces))
    return min(piece, max(tiles, default=0))

"""Tiles of query tokens, and flash attention of a tile over keys and values, for the prefill kernels.

A program processes tiles of query tokens of a chunk, for the query heads of one key/value head; the rows of its matrix
products are these tokens and heads. The device finds the chunk of each tile from the lengths of the chunks. There are
enough programs for the tiles of a few chunks; if there are many short chunks, each program processes several tiles in
turn.
"""

import dataclasses
import functools
import math
import struct
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Int32

from apt_jax.ops.calls import LogitModifiers
from apt_jax.pallas.triton_common import MASKED, dot, load

LOG2_E = math.log2(math.e)
"""Factor that converts scores to base 2, because the chip has an instruction for powers of 2."""

TILE_FIELDS = 6
"""Number of fields of a query tile: row of the tables, first token of its chunk, first query of the tile within the
chunk, length of the chunk, number of cached keys and values, number of cached layer inputs."""

_MORE_TILES = 8
"""Number of additional programs, for tiles that are only partly filled, such as the last tile of a chunk."""

FlashState = tuple[Any, Any, Any]
"""m and l (queries,) and acc (queries, lanes)."""


@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """The tiles of query tokens of a step; they are the same in all layers and computed once per step."""

    fields: Int32[Array, "TILES 12"]
    """The `TILE_FIELDS` fields of each tile, twice; zeros after the last tile."""
    count: Int32[Array, " 1"]
    """Number of tiles."""
    programs: int
    """Number of programs per key/value head, which process the tiles in turn."""


def query_tiles(
    offsets: Int32[Array, " B"],
    chunk_lens: Int32[Array, " B"],
    kv_lens: Int32[Array, " B"],
    hidden_lens: Int32[Array, " B"],
    num_tokens: int,
    per_tile: int,
) -> QueryTiles:
    """Return the tiles of `per_tile` tokens of all chunks, which have at most `num_tokens` tokens together."""
    batch = offsets.shape[0]
    counts = (chunk_lens + per_tile - 1) // per_tile
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    tile = jnp.arange(min(num_tokens // per_tile + batch, num_tokens), dtype=jnp.int32)
    row = jnp.sum(tile[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    there, row = row < batch, jnp.minimum(row, batch - 1)
    first = (tile - (ends - counts)[row]) * per_tile
    fields = (row, offsets[row], first, chunk_lens[row], kv_lens[row], hidden_lens[row])
    return QueryTiles(
        fields=jnp.where(there[:, None], jnp.stack((*fields, *fields), axis=1), 0),
        count=ends[-1:],
        programs=min(tile.shape[0], num_tokens // per_tile + _MORE_TILES),
    )


def each_tile(count: Any, programs: int, do: Callable[[Any], None], *, axis: int = 0) -> None:
    """Call `do` with the index of each tile of this program, the last tile first, because later tiles of a chunk see
    more keys.

    Args:
        count: ref of the number of tiles.
        programs: number of programs along `axis`.
        do: function of the index of a tile.
        axis: axis of the grid that counts the programs.
    """
    last = plt.load(count.at[jnp.int32(0)]) - 1

    def step(i: Any) -> Any:
        do(last - i)
        return i + programs

    # Not a `fori_loop`, which the compiler would pipeline.
    lax.while_loop(lambda i: i <= last, step, pl.program_id(axis))


def read_tile(tiles: Any, index: Any, copy: int = 0) -> tuple[Any, ...]:
    """Load the fields of a query tile.

    The second copy is for the indices of the output: reusing the first copy would keep its fields in registers.
    """
    start = copy * TILE_FIELDS
    return tuple(plt.load(tiles.at[index, jnp.int32(start + i)]) for i in range(TILE_FIELDS))


@dataclasses.dataclass(frozen=True)
class Queries:
    """Index arrays of a tile's rows, ordered by token and then by query head of one key/value head."""

    position: Any
    """Position within the chunk."""
    token: Any
    """Index among the tokens of the batch."""
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


def queries_of(rows: int, group: int, kv_head: Any, offset: Any, first: Any, length: Any) -> Queries:
    """Return the index arrays of a tile: row i is token i // G' of the tile and head i % G' of the group, where G' is G
    rounded up to a power of two."""
    bits = (group - 1).bit_length()
    index = jnp.arange(rows)
    position, member = first + (index >> bits), index & ((1 << bits) - 1)
    ok = position < length
    if group != 1 << bits:
        ok = ok & (member < group)
    return Queries(position, offset + position, kv_head * group + member, ok)


def no_state(queries: int, lanes: int) -> FlashState:
    """Return the flash state of queries that have seen no key."""
    return (
        jnp.full((queries,), MASKED, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
        jnp.zeros((queries, lanes), jnp.float32),
    )


def read_state(refs: tuple[Any, Any, Any], queries: Queries, lane: Any, lane_ok: Any, seen: Any) -> FlashState:
    """Load the flash state that an earlier kernel wrote if `seen`, else the state of queries that have seen no key."""
    m_ref, l_ref, acc_ref = refs
    seen = queries.ok & seen
    at = (queries.token, queries.head)
    return (
        plt.load(m_ref.at[at], mask=seen, other=MASKED),
        plt.load(l_ref.at[at], mask=seen, other=0),
        queries.load(acc_ref, lane, lane_ok, seen[:, None]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores from products of queries and keys: scale, soft cap, slopes and window (`calls.LogitModifiers`)."""

    scale: float
    softcap: float | None
    window: int | None
    on_chip: bool = False
    """True: exponentials use the chip's own instruction, which the interpreter does not support."""

    @classmethod
    def of(cls, rules: LogitModifiers | None, head_dim: int, *, on_chip: bool = False) -> "Scores":
        return cls(
            scale=head_dim**-0.5,
            softcap=None if rules is None else rules.softcap,
            window=None if rules is None else rules.window,
            on_chip=on_chip,
        )

    def first_seen(self, query: Any) -> Any:
        """Return the first position that the query at position `query` attends to."""
        return jnp.int32(0) if self.window is None else jnp.maximum(query + 1 - self.window, 0)

    def __call__(self, s: Any, distance: Any, slope: Any) -> tuple[Any, float]:
        """Return scores (queries, keys), and the positive factor that converts them to base 2.

        Scores without soft cap and slopes are returned unscaled: the factor is then applied to the maxima per row and,
        at no cost, in the exponential.

        Args:
            s: (queries, keys) products of queries and keys.
            distance: position of the key minus position of the query.
            slope: (queries,) ALiBi slope of each query's head, or None.
        """
        if self.softcap is not None:
            # tanh x = 1 - 2 / (1 + exp 2x) is exact at both ends, where exp2 goes to 0 or infinity.
            exponential = self.exp2(s, 2 * LOG2_E * self.scale / self.softcap)
            s = (self.softcap * LOG2_E) * (1 - 2 / (1 + exponential))
        elif slope is None:
            return s, self.scale * LOG2_E
        else:
            s = s * (self.scale * LOG2_E)
        if slope is not None:
            s = s + (slope * LOG2_E)[:, None] * distance.astype(jnp.float32)
        return s, 1.0

    def hides(self, distance: Any) -> Any:
        """Return the mask of keys that the window hides; None without a window."""
        return None if self.window is None else distance <= -self.window

    def exp2(self, x: Any, factor: float = 1.0, less: Any = None) -> Any:
        """Return 2 ** (x * factor - less).

        On the chip this takes two instructions in assembly; XLA would need five, because it neither fuses products with
        sums nor rounds results below 2 ** -126 to 0.
        """
        if not self.on_chip:
            x = x if factor == 1.0 else x * factor
            return jnp.exp2(x if less is None else x - less)
        if less is None:
            less = jnp.zeros_like(x)
        (literal,) = struct.unpack("<I", struct.pack("<f", factor))
        multiply_add = f"fma.rn.f32 t, $1, 0f{literal:08X}, $2;"
        (out,) = plt.elementwise_inline_asm(
            f"{{ .reg .f32 t; {multiply_add} ex2.approx.ftz.f32 $0, t; }}",
            args=[x, jnp.broadcast_to(-less, x.shape)],
            constraints="=f,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
        )
        return out


def attend(
    state: FlashState,
    q: Any,
    fetch: Callable[[Any, bool], tuple[Any, Callable[[], Any], Any]],
    scores: Scores,
    query_position: Any,
    slope: Any,
    *,
    keys: int,
    first: Any,
    last: Any,
    open_from: Any,
    open_to: Any,
) -> FlashState:
    """Fold positions [first, last) into the flash state of a tile of queries, and return the new state.

    Whole tiles of keys within [open_from, open_to) are folded first, without a mask; then the tiles before and after
    them, with a mask. The first tile is the tile of `keys` positions that holds `first`.

    Args:
        state: flash state of the queries.
        q: (queries, lanes) queries.
        fetch: function of positions (keys,) and a flag that returns their keys (keys, lanes), a function that returns
            their values, and a mask that broadcasts to (queries, keys). If the flag is True, all queries see all
            positions, and the mask is None; else positions may be beyond `last`.
        scores: logit modifiers.
        query_position: (queries,) positions of the queries, counted like those of the keys.
        slope: (queries,) ALiBi slopes, or None.
        keys: number of positions per tile.
        first: first position.
        last: end of the positions.
        open_from: start of the positions that every query sees.
        open_to: end of the positions that every query sees.
    """
    begin, end = first // keys, (last + keys - 1) // keys
    low = jnp.clip((open_from + keys - 1) // keys, begin, end)
    high = jnp.clip(open_to // keys, low, end)

    def fold(tile: Any, state: FlashState, *, is_open: bool) -> FlashState:
        m, l, acc = state
        position = tile * keys + jnp.arange(keys)
        k, values, mask = fetch(position, is_open)
        distance = position[None, :] - query_position[:, None]
        s, factor = scores(dot(q, k, (1, 1)), distance, slope)
        if not is_open:
            hidden = scores.hides(distance)
            mask = mask if hidden is None else mask & ~hidden
            s = jnp.where(jnp.broadcast_to(mask, s.shape), s, -jnp.inf)  # m is finite, so nothing becomes NaN
        largest = jnp.max(s, axis=1)
        m_new = jnp.maximum(m, largest if factor == 1.0 else largest * factor)
        p = scores.exp2(s, factor, m_new[:, None])
        before = scores.exp2(m, 1.0, m_new)
        v = values()
        acc = acc * before[:, None] + dot(p.astype(v.dtype), v, (1, 0))
        return m_new, l * before + jnp.sum(p, axis=1), acc

    def masked(i: Any, state: FlashState) -> FlashState:
        return fold(jnp.where(i < low, i, i + high - low), state, is_open=False)

    state = lax.fori_loop(low, high, functools.partial(fold, is_open=True), state)
    return lax.fori_loop(begin, end - (high - low), masked, state)

"""Tiles of query tokens, and flash attention of a tile over keys and values, for the prefill kernels.

A program takes tiles of query tokens of one chunk and the query heads of one key/value head, side by side as the rows
of its products. Which chunk a tile belongs to is computed on the device, from the chunks' lengths. There are programs
for the tiles of few chunks; where chunks are many and short they take several tiles in turn.
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
"""Scores are in units of log 2: the chip has an exponential of base 2."""

TILE_FIELDS = 6
"""Fields of a query tile: row of the tables, first token of its chunk, its first query within the chunk, the chunk's
length, cached keys and values, cached layer inputs."""

_MORE_TILES = 8
"""Programs for tiles that are not full, as the last one of each chunk."""

FlashState = tuple[Any, Any, Any]
"""m and l (queries,) and acc (queries, lanes)."""


@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """The tiles of query tokens of a step, the same in every layer: the compiler computes them once a step."""

    fields: Int32[Array, "TILES 12"]
    """`TILE_FIELDS` of every tile, twice; zeros beyond the last tile."""
    count: Int32[Array, " 1"]
    """Number of tiles."""
    programs: int
    """Programs of a kernel that take them in turn, for each key/value head."""


def query_tiles(
    offsets: Int32[Array, " B"],
    chunk_lens: Int32[Array, " B"],
    kv_lens: Int32[Array, " B"],
    hidden_lens: Int32[Array, " B"],
    num_tokens: int,
    per_tile: int,
) -> QueryTiles:
    """The tiles of `per_tile` tokens of chunks of at most `num_tokens` tokens together."""
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
    """Call `do` with the index of every tile of this program, the last ones first: later tiles of a chunk have more keys
    before them. `axis` of the grid counts the programs."""
    last = plt.load(count.at[jnp.int32(0)]) - 1

    def step(i: Any) -> Any:
        do(last - i)
        return i + programs

    # Not a `fori_loop`, which the compiler would pipeline.
    lax.while_loop(lambda i: i <= last, step, pl.program_id(axis))


def read_tile(tiles: Any, index: Any, copy: int = 0) -> tuple[Any, ...]:
    """The fields of a query tile. The second copy is for indices of the output, which would else lie in registers all
    along."""
    start = copy * TILE_FIELDS
    return tuple(plt.load(tiles.at[index, jnp.int32(start + i)]) for i in range(TILE_FIELDS))


@dataclasses.dataclass(frozen=True)
class Queries:
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


def queries_of(rows: int, group: int, kv_head: Any, offset: Any, first: Any, length: Any) -> Queries:
    """Row i is token i // G' of the tile and head i % G' of the group, G' the power of two that holds G."""
    bits = (group - 1).bit_length()
    index = jnp.arange(rows)
    position, member = first + (index >> bits), index & ((1 << bits) - 1)
    ok = position < length
    if group != 1 << bits:
        ok = ok & (member < group)
    return Queries(position, offset + position, kv_head * group + member, ok)


def no_state(queries: int, lanes: int) -> FlashState:
    """The state of queries that have seen no key."""
    return (
        jnp.full((queries,), MASKED, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
        jnp.zeros((queries, lanes), jnp.float32),
    )


def read_state(refs: tuple[Any, Any, Any], queries: Queries, lane: Any, lane_ok: Any, seen: Any) -> FlashState:
    """The state that an earlier kernel left, where `seen`; else that of no key."""
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
    """Exponentials are the chip's own instruction, which the interpreter does not have."""

    @classmethod
    def of(cls, rules: LogitModifiers | None, head_dim: int, *, on_chip: bool = False) -> "Scores":
        return cls(
            scale=head_dim**-0.5,
            softcap=None if rules is None else rules.softcap,
            window=None if rules is None else rules.window,
            on_chip=on_chip,
        )

    def first_seen(self, query: Any) -> Any:
        """The first position that the query at a position may see."""
        return jnp.int32(0) if self.window is None else jnp.maximum(query + 1 - self.window, 0)

    def __call__(self, s: Any, distance: Any, slope: Any) -> tuple[Any, float]:
        """Scores (queries, keys) and the factor, more than 0, that makes their unit log 2.

        A product as it comes keeps its factor: maxima are turned row by row, and the exponential multiplies for nothing.

        Args:
            distance: position of the key less that of the query.
            slope: of the head of each query, or None.
        """
        if self.softcap is not None:
            # tanh x = 1 - 2 / (1 + exp 2x): exact at both ends, as exp2 goes to 0 or infinity.
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
        """Where the window hides a key, or None without one."""
        return None if self.window is None else distance <= -self.window

    def exp2(self, x: Any, factor: float = 1.0, less: Any = None) -> Any:
        """2 ** (x * factor - less).

        XLA forbids its compiler to fuse products and sums, and to take results below 2 ** -126 for 0, which makes five
        instructions of what are two here.
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
    """Fold positions [first, last) into the state of a tile of queries, from the tile of `keys` that holds `first` on.

    Tiles of keys within [open_from, open_to) come first, without a mask; then those before and after them, with one.

    Args:
        fetch: from positions (keys,) to their keys (keys, lanes), a function for their values, and a mask that broadcasts
            to (queries, keys). Where its second argument is True all positions are open: there is no mask. Else they may
            reach beyond `last`.
        query_position: (queries,), counted as the positions of the keys are.
        open_from, open_to: every query sees the positions between.
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

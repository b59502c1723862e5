"""Prefill attention over the block pool as plain XLA code; see `reference.prefill`.

Chunks are processed row by row. A row's queries attend to its cached prefix first, one tile of keys at a time, then to
the tokens of their own chunk, one tile of queries at a time. The flash state of all queries of a row is kept between
the two.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from apt_jax.ops.calls import LogitModifiers, PrefillCall
from apt_jax.ops.linear import dot, project_kv
from apt_jax.ops.low_rank import additions
from apt_jax.ops.xla_common import (
    MASKED,
    Fetch,
    apply_rules,
    fetch_blocks,
    initial_softmax,
    own_slots_of,
    project_shards,
)

PREFILL_QUERY_TILE = 128
PREFILL_KEY_TILE = 128

_FlashState = tuple[Array, Array, Array]
"""Running maximum and denominator (K, T, G) and accumulator (K, T, G, H) of flash attention."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunks:
    """The tokens of all chunks with heads as the first axis, so tiles are slices along one axis and their products need
    no transposition."""

    q: Array
    """(K, T, G * H), with the scale applied; q, k and v are padded by a tile"""
    k: Array
    """(K, T, H)"""
    v: Array
    """(K, T, H)"""
    query_tile: int
    key_tile: int
    rules: LogitModifiers | None

    @property
    def group(self) -> int:
        """G: query heads per key head."""
        return self.q.shape[2] // self.k.shape[2]

    def queries(self, start: Array) -> Array:
        """Return a tile of queries (K, query_tile * G, H)."""
        tile = lax.dynamic_slice_in_dim(self.q, start, self.query_tile, axis=1)
        return tile.reshape(self.k.shape[0], self.query_tile * self.group, self.k.shape[2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """One chunk; fields are scalars on the device, except `query_index`."""

    index: Array
    offset: Array
    """Index of the chunk's first token in the concatenated tokens of all chunks."""
    length: Array
    prefix_len: Array
    query_tiles: Array
    query_index: Array
    """(query_tile,) 0, 1, ..."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PrefixReader:
    """Reads cached prefixes, a few table entries at a time."""

    tables: Array
    slot_ranges: Array | None
    entries: int
    """Table entries per tile of keys."""
    slots: int
    """Positions per table entry."""
    fetch: Fetch


def prefill(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], call: PrefillCall
) -> Float[Array, "T N H"]:
    """See `reference.prefill`. Hidden prefixes are projected, which costs less than absorption from about H query
    tokens on (exactly H * N / (N - 1)). With `tensor`, W_k and W_v have this device's heads, or this device's features
    of all heads (`xla_common.project_shards`). `room` has no effect: all prefixes are computed."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    pool, block_size, slot_ranges, of_inputs = call.pool, call.block_size, call.slot_ranges, call.hidden_prefixes
    hidden_slots = block_size if of_inputs is None else of_inputs.block_size
    tq, tk = min(PREFILL_QUERY_TILE, num_tokens), min(PREFILL_KEY_TILE, num_tokens)
    kv_entries, hidden_entries = (max(1, PREFILL_KEY_TILE // slots) for slots in (block_size, hidden_slots))

    entries = call.tables.shape[2]
    padding = max(-entries % kv_entries, 0 if of_inputs is None else -entries % hidden_entries)
    pad = ((0, 0), (0, max(tq, tk)), (0, 0))
    by_head = q.reshape(num_tokens, num_kv_heads, group * head_dim).transpose(1, 0, 2)
    q_by_head = jnp.pad(by_head * jnp.asarray(head_dim**-0.5, q.dtype), pad)
    k_by_head, v_by_head = (jnp.pad(a.transpose(1, 0, 2), pad) for a in (k, v))
    chunks = _Chunks(q=q_by_head, k=k_by_head, v=v_by_head, query_tile=tq, key_tile=tk, rules=call.rules)
    tables = jnp.pad(call.tables, ((0, 0), (0, 0), (0, padding)))
    if slot_ranges is not None:
        slot_ranges = jnp.pad(slot_ranges, ((0, 0), (0, padding), (0, 0)))

    def fetch_kv(ids: Array, own: Array, position: Array, index: Array) -> tuple[Array, Array]:
        del position, index
        both = fetch_blocks(pool, ids, block_size, jnp.broadcast_to(own, (2, own.shape[1])), call.lane)
        return both[0], both[1]

    def fetch_hidden(ids: Array, own: Array, position: Array, index: Array) -> tuple[Array, Array]:
        assert of_inputs is not None
        p, tensor = of_inputs.projection, of_inputs.tensor
        width, wv = p.wk.shape[2], p.value_weights
        if tensor is not None and p.wk.shape[0] > num_kv_heads:
            share = fetch_blocks(pool, ids[:1], hidden_slots, own, width)[0]
            keys, values = project_shards(share, p.wk, p.bk, wv, p.bv, tensor)
            return keys.astype(share.dtype), values.astype(share.dtype)
        x = fetch_blocks(pool, ids[:1], hidden_slots, own, width, tensor)
        turns = None if p.angles is None else p.angles[position[0]]
        more_k, more_v = additions(x, p.adapters, index)
        return project_kv(x[0], p.wk, p.bk, turns, p.key_norm, more_k), project_kv(x[0], wv, p.bv, more=more_v)

    reader = functools.partial(_PrefixReader, tables=tables, slot_ranges=slot_ranges)
    # False: no row caches keys and values.
    holds_keys = (pool.shape[2] if call.lane is None else call.lane) == num_kv_heads * head_dim
    kv = reader(entries=kv_entries, slots=block_size, fetch=fetch_kv)
    inputs = reader(entries=hidden_entries, slots=hidden_slots, fetch=fetch_hidden)

    def attend_row(r: Array, carry: tuple[_FlashState, Array]) -> tuple[_FlashState, Array]:
        state, out = carry
        length = call.chunk_lens[r]
        row = _Row(
            index=r,
            offset=call.offsets[r],
            length=length,
            prefix_len=call.prefix_lens[r],
            query_tiles=(length + tq - 1) // tq,
            query_index=jnp.arange(tq, dtype=jnp.int32),
        )
        over_kv = functools.partial(_attend_prefix, chunks, row, kv) if holds_keys else lambda state: state
        if of_inputs is not None:
            over_inputs = functools.partial(_attend_prefix, chunks, row, inputs)
            state = lax.cond(call.hidden[r], over_inputs, over_kv, state)
        else:
            state = over_kv(state)
        return state, _attend_chunk(chunks, row, state, out)

    padded = num_tokens + pad[1][1]
    init = (
        *initial_softmax((num_kv_heads, padded, group), call.rules, (num_kv_heads, 1, group)),
        jnp.zeros((num_kv_heads, padded, group, head_dim), jnp.float32),
    )
    out = jnp.zeros((padded, num_kv_heads, group, head_dim), q.dtype)
    _, out = lax.fori_loop(0, call.num_rows, attend_row, (init, out))
    return out[:num_tokens].reshape(num_tokens, num_heads, head_dim)


def _attend_prefix(chunks: _Chunks, row: _Row, reader: _PrefixReader, state: _FlashState) -> _FlashState:
    """Fold the cached prefix of a row into the state of its queries."""
    num_kv_heads, _, head_dim = chunks.k.shape
    tq, size = chunks.query_tile, reader.entries * reader.slots

    def key_tile(j: Array, state: _FlashState) -> _FlashState:
        entry = j * reader.entries
        ids = lax.dynamic_slice(reader.tables, (row.index, jnp.int32(0), entry), (1, 2, reader.entries))[0]
        own, position = own_slots_of(
            reader.slot_ranges, row.prefix_len[None], row.index, entry, reader.entries, reader.slots
        )
        keys, values = (
            a.astype(chunks.k.dtype).reshape(-1, num_kv_heads, head_dim).transpose(1, 0, 2)
            for a in reader.fetch(ids, own, position, row.index[None])
        )

        def query_tile(i: Array, state: _FlashState) -> _FlashState:
            start = row.offset + i * tq
            mask = own & (i * tq + row.query_index < row.length)[:, None]
            distance = position - (row.prefix_len + i * tq + row.query_index)[:, None]
            tile = _fold(chunks, _load(state, start, tq), chunks.queries(start), keys, values, mask, distance)
            return _store(state, tile, start)

        return lax.fori_loop(0, row.query_tiles, query_tile, state)

    first = jnp.int32(0)
    if chunks.rules is not None and chunks.rules.window is not None:
        first = jnp.maximum(row.prefix_len + 1 - chunks.rules.window, 0) // size
    return lax.fori_loop(first, (row.prefix_len + size - 1) // size, key_tile, state)


def _attend_chunk(chunks: _Chunks, row: _Row, state: _FlashState, out: Array) -> Array:
    """Write one row's outputs into `out`: fold the row's own tokens into `state`, which already includes the prefix.

    The last tile may include tokens of the next row: they get zeros, which the call for the next row overwrites.
    """
    tq, tk, rules = chunks.query_tile, chunks.key_tile, chunks.rules

    def query_tile(i: Array, out: Array) -> Array:
        start, q_position = row.offset + i * tq, i * tq + row.query_index
        q_tile = chunks.queries(start)

        def key_tile(j: Array, tile: _FlashState) -> _FlashState:
            keys, values = (lax.dynamic_slice_in_dim(a, row.offset + j * tk, tk, axis=1) for a in (chunks.k, chunks.v))
            k_position = j * tk + jnp.arange(tk, dtype=jnp.int32)
            distance = k_position[None, :] - q_position[:, None]
            mask = (distance <= 0) & (q_position < row.length)[:, None]
            return _fold(chunks, tile, q_tile, keys, values, mask, distance)

        first = jnp.int32(0)
        if rules is not None and rules.window is not None:
            first = jnp.maximum(i * tq + 1 - rules.window, 0) // tk
        last = (jnp.minimum((i + 1) * tq, row.length) + tk - 1) // tk
        _, l, acc = lax.fori_loop(first, last, key_tile, _load(state, start, tq))
        tile = (acc / jnp.maximum(l, 1e-30)[..., None]).astype(out.dtype).transpose(1, 0, 2, 3)
        return lax.dynamic_update_slice_in_dim(out, tile, start, axis=0)

    return lax.fori_loop(0, row.query_tiles, query_tile, out)


def _load(state: _FlashState, start: Array, size: int) -> _FlashState:
    m, l, acc = (lax.dynamic_slice_in_dim(a, start, size, axis=1) for a in state)
    return m, l, acc


def _store(state: _FlashState, tile: _FlashState, start: Array) -> _FlashState:
    m, l, acc = (lax.dynamic_update_slice_in_dim(a, b, start, axis=1) for a, b in zip(state, tile, strict=True))
    return m, l, acc


def _fold(
    chunks: _Chunks,
    tile: _FlashState,
    q_tile: Float[Array, "K QG H"],
    keys: Float[Array, "K S H"],
    values: Float[Array, "K S H"],
    mask: Bool[Array, "Q S"],
    distance: Int32[Array, "Q S"],
) -> _FlashState:
    """Fold keys and values into the state of a tile of queries.

    Args:
        distance: position of the key minus position of the query.
    """
    m, l, acc = tile
    heads = q_tile.shape[0]
    s = dot(q_tile, keys, (2, 2), ((0,), (0,))).reshape(heads, chunks.query_tile, chunks.group, -1)
    if chunks.rules is not None:
        s, seen = apply_rules(s, distance[None, :, None, :], chunks.rules, (heads, 1, chunks.group, 1))
        mask = mask & seen[0, :, 0]
    s = jnp.where(mask[None, :, None, :], s, MASKED)
    m_new = jnp.maximum(m, jnp.max(s, axis=-1))
    p = jnp.exp(s - m_new[..., None])
    rescale = jnp.exp(m - m_new)
    p_tile = p.reshape(heads, chunks.query_tile * chunks.group, -1).astype(values.dtype)
    pv = dot(p_tile, values, (2, 1), ((0,), (0,))).reshape(acc.shape)
    # A query that has seen no key yet keeps the initial maximum; when it sees its first key, the sums that are added to
    # its l here are rescaled to 0. Its acc must not get 0 * NaN either, because the tile may hold tokens of another
    # row.
    sees = jnp.any(mask, axis=1)[None, :, None, None]
    return (
        m_new,
        l * rescale + jnp.sum(p, axis=-1),
        jnp.where(sees, acc * rescale[..., None] + pv, acc),
    )

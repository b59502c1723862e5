"""Prefill attention over the block pool as Pallas kernels on the Triton backend, for NVIDIA GPUs (`reference.prefill`).

`prefill_chunk` is flash attention over the cached keys and values of the chunk's request, then over the chunk itself.
For a request with a hidden prefix it starts from the flash state that `triton_hidden_prefix` has computed. Tiles of
keys that a sliding window hides from all queries of a tile are neither read nor computed.

Loads outside a request's own slots and outside a chunk's tokens are masked and give 0. Shapes inside a kernel are
powers of two. Sums use no atomics, so equal inputs give equal bits.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float

from apt_jax.ops.calls import DecodeCall, HiddenPrefixes, PrefillCall
from apt_jax.pallas.triton_common import below, check_pool, launch, load, slot_of
from apt_jax.pallas.triton_decode_common import check_key_norm, sinks_of
from apt_jax.pallas.triton_hidden_prefix import absorbed_prefix, projected_prefix, slopes_of
from apt_jax.pallas.triton_prefix_shards import sharded_prefix
from apt_jax.pallas.triton_queries import (
    LOG2_E,
    Scores,
    attend,
    each_tile,
    no_state,
    queries_of,
    query_tiles,
    read_state,
    read_tile,
)
from apt_jax.pallas.triton_tiles import PrefillTile, padded, prefill_tile

_FEWER_KEYS = 64


class _Operands(NamedTuple):
    """Arrays that the kernel reads."""

    tiles: Any
    count: Any
    tables: Any
    ranges: Any
    q_ref: Any
    k_ref: Any
    v_ref: Any
    pool: Any
    slopes: Any
    sinks: Any
    end: Any
    m_ref: Any
    l_ref: Any
    acc_ref: Any


def _chunk_kernel(
    refs: _Operands,
    out_ref: Any,
    *,
    tile: PrefillTile,
    scores: Scores,
    programs: int,
    block_size: int,
    group: int,
    head_dim: int,
) -> None:
    tiles, count, tables, ranges, q_ref, k_ref, v_ref, pool, slopes, sinks, end, m_ref, l_ref, acc_ref = refs
    # Heads are the inner axis, so the tiles with the most keys start first, for all heads.
    kv_head, place = pl.program_id(0), pl.program_id(1)
    per_tile = tile.queries >> (group - 1).bit_length()
    lane = jnp.arange(padded(head_dim))
    lane_ok = below(lane, head_dim, lane.size)
    lane_mask = None if lane_ok is None else lane_ok[None, :]
    shape = (tile.keys, lane.size)

    def one_tile(index: Any) -> None:
        row, offset, first, length, kv_len, hidden_len = read_tile(tiles, index)
        queries = queries_of(tile.queries, group, kv_head, offset, first, length)
        q = queries.load(q_ref, lane, lane_ok)
        slope = None if slopes is None else plt.load(slopes.at[queries.head], mask=queries.ok, other=0)
        if m_ref is None:
            state = no_state(tile.queries, lane.size)
        else:
            state = read_state((m_ref, l_ref, acc_ref), queries, lane, lane_ok, hidden_len > 0)

        def cached(position: Any, is_open: bool) -> Any:
            own = None if is_open else position < kv_len

            def half(which: int) -> Any:
                block, slot = slot_of(tables, ranges, row, which, position, own, block_size)
                at = ((block * block_size + slot)[:, None], (kv_head * head_dim + lane)[None, :])
                return load(pool, at, shape, None if own is None else own[:, None], lane_mask)

            return half(0), lambda: half(1), None if own is None else own[None, :]

        def of_chunk(position: Any, is_open: bool) -> Any:
            at = ((offset + position)[:, None], kv_head, lane[None, :])
            there = None if is_open else (position < length)[:, None]
            k, v = (load(ref, at, shape, there, lane_mask) for ref in (k_ref, v_ref))
            return k, lambda: v, None if is_open else position[None, :] <= queries.position[:, None]

        last_query = first + (per_tile - 1)
        common = {"slope": slope, "keys": tile.keys}
        state = attend(
            state, q, cached, scores, kv_len + queries.position, **common,
            first=scores.first_seen(kv_len + first), last=kv_len,
            open_from=scores.first_seen(kv_len + last_query), open_to=kv_len,
        )  # fmt: skip
        m, l, acc = attend(
            state, q, of_chunk, scores, queries.position, **common,
            first=scores.first_seen(first), last=jnp.minimum(first + per_tile, length),
            open_from=scores.first_seen(last_query), open_to=first + 1,
        )  # fmt: skip
        if sinks is not None:  # counted once, for the prefix and the chunk together
            sink = LOG2_E * plt.load(sinks.at[queries.head], mask=queries.ok, other=0)
            top = jnp.maximum(m, sink)
            before = scores.exp2(m, 1.0, top)
            l, acc = l * before + scores.exp2(sink, 1.0, top), acc * before[:, None]
        _, offset_, first_, length_, _, _ = read_tile(tiles, index, copy=1)
        queries = queries_of(tile.queries, group, kv_head, offset_, first_, length_)
        out = acc * (1 / jnp.maximum(l, 1e-30))[:, None]
        queries.store(out_ref, lane, lane_ok, out.astype(out_ref.dtype))

    # Tokens that belong to no chunk come last: every program writes zeros for its share of them.
    first_free, num_tokens = plt.load(end.at[jnp.int32(0)]), q_ref.shape[0]

    @pl.when(((place + 1) * per_tile > first_free) & (place * per_tile < num_tokens))
    def _() -> None:
        rest = queries_of(tile.queries, group, kv_head, jnp.int32(0), place * per_tile, jnp.int32(num_tokens))
        rest = dataclasses.replace(rest, ok=rest.ok & (rest.token >= first_free))
        rest.store(out_ref, lane, lane_ok, jnp.zeros((tile.queries, lane.size), out_ref.dtype))

    each_tile(count, programs, one_tile, axis=1)


def prefill(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    call: PrefillCall,
    *,
    interpret: bool = False,
    chip: str | None = None,
    **more: Any,
) -> Float[Array, "T N H"]:
    """Return causal attention of prompt chunks over cached prefixes and themselves, in the dtype of `q`.

    The contract is `reference.prefill`. Keys and values of a hidden prefix are accumulated in float32, normed per head
    and rotated if the call requires it, and rounded to the pool's dtype. For at most H tokens the projections are
    absorbed instead, if possible (`_absorbs`). The `room` of the call determines how many kernels are launched for
    hidden prefixes; on several devices a loop runs only over the existing positions (`sharded_prefix`).

    Args:
        q: queries.
        k: keys of the chunks.
        v: values of the chunks.
        call: pool, tables, chunks, hidden prefixes and logit modifiers.
        interpret: run in Pallas' interpreter, on any platform.
        chip: class of chips to choose tiles for (`triton_tiles.CHIPS`); None: as for sm_80.
        more: further arguments of `projected_prefix` or `sharded_prefix`.

    Raises:
        ValueError: the kernels do not support the block size, dtype, heads, norm or chip.
    """
    pool, block_size, tables, of_inputs = call.pool, call.block_size, call.tables, call.hidden_prefixes
    check_pool(pool, block_size)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    lane_width = num_kv_heads * head_dim
    holds_keys = pool.shape[2] == lane_width  # False: no row caches keys and values (latents)
    if num_heads % num_kv_heads:
        raise ValueError(f"{q.shape=} has no multiple of the heads of {k.shape=}")
    if of_inputs is not None:
        _check_prefixes(of_inputs, pool, num_kv_heads, head_dim)
    group_bits = (num_heads // num_kv_heads - 1).bit_length()
    tile = prefill_tile(chip, head_dim, pool.dtype.itemsize, num_tokens << group_bits, 1 << group_bits)
    scores = Scores.of(call.rules, head_dim, on_chip=not interpret)
    out_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    q, k, v = q.astype(pool.dtype), k.astype(pool.dtype), v.astype(pool.dtype)
    row, offsets = jnp.arange(call.offsets.shape[0], dtype=jnp.int32), call.offsets
    chunk_lens = jnp.where(row < call.num_rows, call.chunk_lens, 0)
    kv_lens = jnp.minimum(call.prefix_lens, tables.shape[2] * block_size)
    hidden_lens = jnp.zeros_like(kv_lens)
    if of_inputs is not None:
        hidden_lens = jnp.where(call.hidden & (chunk_lens > 0), call.prefix_lens, 0)
        hidden_lens = jnp.minimum(hidden_lens, tables.shape[2] * of_inputs.block_size)
        kv_lens = jnp.where(call.hidden, 0, kv_lens)
    if not holds_keys:
        kv_lens = jnp.zeros_like(kv_lens)
    tiles = query_tiles(offsets, chunk_lens, kv_lens, hidden_lens, num_tokens, tile.queries >> group_bits)

    state: tuple[Array | None, ...] = (None, None, None)
    if of_inputs is not None and num_tokens <= head_dim and _absorbs(call, lane_width):
        rows = _token_rows(call, offsets, chunk_lens, hidden_lens, num_tokens)
        state = absorbed_prefix(q, rows, most_positions=of_inputs.room, interpret=interpret, chip=chip)
    elif of_inputs is not None:
        attend_prefix = functools.partial(projected_prefix, chip=chip)
        if of_inputs.tensor is not None:
            attend_prefix = functools.partial(sharded_prefix, num_kv_heads=num_kv_heads)
        state = attend_prefix(q, call, hidden_lens, tiles, tile=tile, scores=scores, interpret=interpret, **more)
    if (
        state[0] is not None or call.slot_ranges is not None
    ):  # both need registers, of which the largest tile leaves few
        tile = dataclasses.replace(tile, keys=min(tile.keys, _FEWER_KEYS))
    kernel = functools.partial(
        _chunk_kernel,
        tile=tile,
        scores=scores,
        programs=tiles.programs,
        block_size=block_size,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
    )
    end = jnp.max(jnp.where(chunk_lens > 0, offsets + chunk_lens, 0), keepdims=True)
    by_slot = pool.reshape(-1, lane_width) if holds_keys else jnp.zeros((1, lane_width), pool.dtype)
    return launch(
        kernel,
        _Operands(
            tiles.fields,
            tiles.count,
            tables,
            call.slot_ranges,
            q,
            k,
            v,
            by_slot,
            slopes_of(call),
            sinks_of(call.rules),
            end,
            *state,
        ),
        out_shape,
        grid=(num_kv_heads, tiles.programs),
        warps=tile.warps,
        stages=tile.stages,
        name="prefill_chunk",
        interpret=interpret,
    )


def _check_prefixes(of_inputs: HiddenPrefixes, pool: Array, num_kv_heads: int, head_dim: int) -> None:
    """Check the pool and the norm of hidden prefixes.

    Raises:
        ValueError: the blocks are too small for the layer inputs, or the kernels do not support the norm.
    """
    wk, tensor = of_inputs.projection.wk, of_inputs.tensor
    shards = 1 if tensor is None or wk.shape[0] > num_kv_heads else tensor.size
    if of_inputs.block_size * wk.shape[2] > pool.shape[1] * pool.shape[2] * shards:
        raise ValueError(f"blocks of {pool.shape=} do not hold {of_inputs.block_size} layer inputs of {wk.shape=}")
    check_key_norm(of_inputs.projection.key_norm, head_dim)


def _absorbs(call: PrefillCall, lane_width: int) -> bool:
    """Return True if the projections of hidden prefixes can be absorbed.

    There must be a single device and no logit modifiers, keys must be neither normed nor rotated, and layer inputs must
    be as wide as the keys of all heads.
    """
    of_inputs = call.hidden_prefixes
    if of_inputs is None or of_inputs.tensor is not None or call.rules is not None:
        return False
    p = of_inputs.projection
    plain = p.key_norm is None and p.angles is None
    return plain and of_inputs.block_size == call.block_size and p.wk.shape[2] == lane_width


def _token_rows(
    call: PrefillCall, offsets: Array, chunk_lens: Array, hidden_lens: Array, num_tokens: int
) -> DecodeCall:
    """Return a decode call over the hidden prefixes, with a row for each token of a chunk."""
    assert call.hidden_prefixes is not None
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    inside = (token >= offsets[None, :]) & (token < (offsets + chunk_lens)[None, :])
    row_of_token = jnp.argmax(inside, axis=1).astype(jnp.int32)
    return DecodeCall(
        pool=call.pool,
        tables=call.tables[:, 0],
        lens=jnp.where(jnp.any(inside, axis=1), hidden_lens[row_of_token], 0),
        block_size=call.block_size,
        slot_ranges=call.slot_ranges,
        table_of_row=row_of_token,
        projection=call.hidden_prefixes.projection,
    )

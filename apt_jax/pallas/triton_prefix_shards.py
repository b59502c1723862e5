"""Hidden prefixes of prompt chunks on several GPUs, each of which holds some features of the layer inputs.

As in `triton_hidden_prefix`, the prefixes are laid out one after another and processed in pieces: keys and values of a
piece are computed once, for this device's heads, then `prefix_attend` folds them into the states of all query tokens.

If W_k and W_v are split by feature, the devices exchange partial sums of the products with them; if they are split by
head, the devices exchange features (`apt_jax.models.sharding`). In both cases the devices exchange data for every
position of a piece, used or not. So a loop runs only over the pieces that the prefixes need; the host drives the loop,
with two CUDA graphs per layer.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from apt_jax.ops.calls import PrefillCall
from apt_jax.ops.linear import project_kv
from apt_jax.ops.xla_common import project_shards
from apt_jax.pallas.triton_hidden_prefix import PrefixPlan, attend_to_piece, plan_prefixes, slopes_of, weights_of
from apt_jax.pallas.triton_queries import FlashState, QueryTiles, Scores
from apt_jax.pallas.triton_tiles import PrefillTile

_PIECE_POSITIONS = 2048
"""Number of positions per piece; the last piece is also computed in full."""
_TILE_POSITIONS = 128
"""Number of positions per tile: a multiple of `PrefillTile.keys` of every tile. Each prefix starts at a tile
boundary."""


def _read_positions(
    plan: PrefixPlan, piece: Array, tables: Array, slot_ranges: Array | None, block_size: int
) -> tuple[Int32[Array, " S"], Bool[Array, " S"], Int32[Array, " S"], Int32[Array, " S"]]:
    """Return the positions of a piece within their rows, a mask of existing positions, and their blocks and slots."""
    index = piece * plan.per_piece + jnp.arange(plan.per_piece, dtype=jnp.int32)
    fields = plan.tiles.at[index].get(mode="fill", fill_value=0)
    row, first, length = (jnp.repeat(fields[:, i], _TILE_POSITIONS) for i in range(3))
    position = first + jnp.tile(jnp.arange(_TILE_POSITIONS, dtype=jnp.int32), plan.per_piece)
    own = position < length
    entry, slot = jnp.where(own, position // block_size, 0), position % block_size
    block = jnp.where(own, tables[row, 0, entry], 0)
    if slot_ranges is not None:
        low, high = slot_ranges[row, entry, 0], slot_ranges[row, entry, 1]
        slot = jnp.where(low <= high, low + slot, low - 1 - slot)
    return position, own, block, jnp.where(own, slot, 0)


def sharded_prefix(
    q: Float[Array, "T N H"],
    call: PrefillCall,
    hidden_lens: Int32[Array, " B"],
    query_tiles: QueryTiles,
    *,
    num_kv_heads: int,
    tile: PrefillTile,
    scores: Scores,
    interpret: bool,
    piece_positions: int = _PIECE_POSITIONS,
) -> FlashState:
    """Return the online-softmax state m, l (T, N) and acc (T, N, H) of attention over the hidden prefixes; undefined
    for tokens of rows without a prefix.

    W_k and W_v of the call have either this device's heads and all features, or all heads and this device's features.

    Args:
        q: queries.
        call: pool, tables, hidden prefixes and logit modifiers.
        hidden_lens: (B,) length of each hidden prefix; 0: no prefix.
        query_tiles: tiles of the query tokens.
        num_kv_heads: number of key/value heads of this device.
        tile: tile of the prefill kernels.
        scores: logit modifiers.
        interpret: run in Pallas' interpreter.
        piece_positions: number of positions per piece; smaller in tests.
    """
    of_inputs, pool, slopes = call.hidden_prefixes, call.pool, slopes_of(call)
    assert of_inputs is not None
    assert of_inputs.tensor is not None
    tensor, p, block_size = of_inputs.tensor, of_inputs.projection, of_inputs.block_size
    wk, bk, wv, bv = weights_of(call)
    assert wk is not None
    assert wv is not None
    by_feature = wk.shape[0] > num_kv_heads
    width = wk.shape[2] if by_feature else wk.shape[2] // tensor.size
    capacity = call.tables.shape[2] * block_size
    plan = plan_prefixes(hidden_lens, scores, capacity, _TILE_POSITIONS, piece_positions)
    by_block = pool.reshape(pool.shape[0], -1)
    lane = jnp.arange(width, dtype=jnp.int32)

    def keys_and_values(piece: Array) -> Float[Array, "2 S K H"]:
        position, own, block, slot = _read_positions(plan, piece, call.tables, call.slot_ranges, block_size)
        if block_size * width == by_block.shape[1]:
            x = pool.reshape(-1, width)[block * block_size + slot]
        else:
            x = by_block[block[:, None], slot[:, None] * width + lane[None, :]]
        x = jnp.where(own[:, None], x, jnp.zeros((), x.dtype))
        if by_feature:
            k, v = project_shards(x, wk, bk, wv, bv, tensor)
        else:
            x = tensor.gather(x, 1)
            turns = None if p.angles is None else p.angles[jnp.where(own, position, 0)]
            k, v = project_kv(x, wk, bk, turns, p.key_norm), project_kv(x, wv, bv)
        return jnp.stack([k, v]).astype(pool.dtype).reshape(2, x.shape[0], num_kv_heads, -1)

    def one_piece(piece: Array, state: FlashState) -> FlashState:
        kv = keys_and_values(piece)
        more: dict[str, Any] = {"tile": tile, "scores": scores, "interpret": interpret}
        return attend_to_piece(piece[None], q, kv, plan, query_tiles, slopes, state, **more)

    of_head = jnp.zeros(q.shape[:2], jnp.float32)
    pieces = (plan.count[0] + plan.per_piece - 1) // plan.per_piece
    return lax.fori_loop(0, pieces, one_piece, (of_head, of_head, jnp.zeros(q.shape, jnp.float32)))

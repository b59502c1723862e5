"""Absorbed decode attention with layer inputs split over devices by feature, as Pallas kernels on the Triton backend
(contract: `reference.decode_absorbed`).

Each device has some features of x and of q~, so its products are partial sums of the scores of all heads:

1. `triton_decode_absorbed.score_sums` writes the partial sums of all visible tiles of all rows, packed.
2. An all-reduce adds them over the devices. Its size is fixed, as required by a CUDA graph: it covers the maximum
   lengths of all rows, or fewer positions if the host knows that the rows are shorter (`room`).
3. `softmax_tiles` applies the logit modifiers and computes P, m and l, as `absorbed_scores` returns them.
4. `triton_decode_absorbed.absorbed_output` computes the sum of P x for this device's features.

Partial sums are added in float32. In bfloat16, a score of 20 could be off by up to 0.06, and its weight by 6 %; partial
sums, which can be much larger than their total, could be off by more.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from apt_jax.ops.calls import DecodeCall
from apt_jax.ops.xla_common import ROOM_STEP
from apt_jax.pallas.triton_common import launch, load
from apt_jax.pallas.triton_decode_absorbed import (
    SCORES_PER_PROCESSOR,
    Output,
    Scores,
    Wave,
    absorbed_output,
    score_sums,
    scores_shape,
    store_scores,
    waves_of,
)
from apt_jax.pallas.triton_decode_common import ScoreModifiers, check_inputs, find_slots, slopes_of
from apt_jax.pallas.triton_tiles import head_splits, tile_for
from apt_jax.pallas.triton_work_list import pieces_for, read_item, rows_of_call, work_list

_SUM_BYTES = 4
"""Bytes of a partial sum of a score (float32)."""


def _softmax_kernel(
    items: Any,
    tables: Any,
    slot_ranges: Any,
    slopes: Any,
    sums: Any,
    *outs: Any,
    rules: ScoreModifiers,
    block_size: int,
    num_heads: int,
    tokens: int,
) -> None:
    item = read_item(items, pl.program_id(0))

    def one_tile(index: Any, done: Any) -> Any:
        position = index * tokens + jnp.arange(tokens)
        sees = rules.sees(position, item.length)
        _, _, own = find_slots(tables, slot_ranges, item.table, 0, position, sees, block_size)
        packed = item.packed + (index - item.first)
        for start, size in head_splits(num_heads):
            heads = start + jnp.arange(size)
            head_ok = heads < num_heads
            at = (packed, heads[:, None], jnp.arange(tokens)[None, :])
            s = load(sums, at, (size, tokens), head_ok[:, None])
            s = rules(s, position, item.length, slopes, heads, head_ok)
            store_scores(outs, s, own, packed, heads, head_ok)
        return done

    @pl.when(item.row >= 0)
    def _() -> None:
        lax.fori_loop(item.first, item.last, one_tile, jnp.int32(0))


def softmax_tiles(
    sums: Float[Array, "TILES N T"], call: DecodeCall, wave: Wave, *, warps: int, interpret: bool, chip: str | None
) -> Scores:
    """Return P (in the pool's dtype), m and l of scores that have been summed over devices.

    Args:
        sums: scores of the packed tiles of the wave.
        call: see `triton_decode_absorbed.absorbed_attention`.
        wave: the rows.
        warps: number of warps per program.
        interpret: see `triton_decode_absorbed.absorbed_attention`.
        chip: see `triton_decode_absorbed.absorbed_attention`.
    """
    _, heads, tokens = sums.shape
    work = work_list(wave.rows, pieces_for(chip, 1, SCORES_PER_PROCESSOR), wave.most_tiles, wave.active)
    rules, size = ScoreModifiers.of(call.rules), call.block_size
    kernel = functools.partial(_softmax_kernel, rules=rules, block_size=size, num_heads=heads, tokens=tokens)
    p, m, l = launch(
        kernel,
        (work.items, call.tables[:, None], call.slot_ranges, slopes_of(call.rules), sums),
        scores_shape(wave, heads, tokens, call.pool.dtype),
        grid=(work.items.shape[0],),
        warps=warps,
        stages=1,
        name="softmax_tiles",
        interpret=interpret,
    )
    return p, m, l


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    call: DecodeCall,
    *,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
    chip: str | None = None,
) -> Float[Array, "B N D"]:
    """Return `softmax(q~ x^T) x` over positions [0, lens), with scores summed over the devices of `call.tensor`.

    The contract is `reference.decode_absorbed`. Queries have all N heads; queries and pool have only the D features of
    this device; all other inputs are equal on all devices. For the arguments see
    `triton_decode_absorbed.absorbed_attention`.

    Raises:
        ValueError: the kernels do not support the block size, dtype or chip.
    """
    assert call.tensor is not None
    heads, width = q_absorbed.shape[1:]
    check_inputs(call.pool, call.block_size, width)
    tile = tile_for("scores", chip, heads, width, call.pool.dtype.itemsize)
    visible = rows_of_call(call, tile.tokens)
    most_tiles, every = -(-call.capacity // tile.tokens), None
    if call.room is not None:
        every = min(call.lens.shape[0] * most_tiles, -(-call.room // ROOM_STEP) * (ROOM_STEP // tile.tokens))
        fits = visible.packed + (visible.last - visible.first) <= every
        visible = visible._replace(last=jnp.where(fits, visible.last, visible.first))
    on: dict[str, Any] = {"interpret": interpret, "chip": chip}
    out: Output | None = None
    for wave in waves_of(visible, most_tiles, heads * tile.tokens * _SUM_BYTES, every):
        sums = call.tensor.sum(score_sums(q_absorbed, call, wave, **on))
        scores = softmax_tiles(sums, call, wave, warps=tile.warps, **on)
        out = absorbed_output(scores, call, wave, out, width=width, out_dtype=out_dtype, **on)
    assert out is not None
    return out[0]

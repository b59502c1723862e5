"""Helpers that the Triton kernels share: launching, masked loads, flash-attention steps, splits of a context, program
order.

Every kernel walks positions. `slots_of` gives the slot of each: position t is in entry t // C of a row's table, at slot
t % C or where `slot_ranges` says. Loads outside a row's own slots are masked and give 0: whatever else lies in a block,
NaN included, is neither used nor read.

Shapes inside a kernel are powers of two: head counts and lanes are padded and masked. Every axis is indexed by an
integer array, which the interpreter does fast and the compiler turns into asynchronous copies. Nothing is summed by
atomics, so equal inputs give equal bits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int32

from apt_jax.pallas.triton_tiles import padded

MASKED = -1e30
"""Score of a masked position; finite, so that a fully masked tile cannot make NaN."""

SWIZZLE_HEADS = 8
"""Heads whose programs run side by side in the kernels that reproject."""


def launch(
    kernel: Callable[..., None],
    operands: Sequence[Array | None],
    out_shape: Any,
    *,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    name: str,
    interpret: bool,
    in_place: dict[int, int] | None = None,
) -> Any:
    """`kernel` over a grid; it gets a ref, or None, for every operand, then a ref for every output.

    Args:
        in_place: operands, by index, whose memory becomes that of an output.

    Raises:
        ValueError: an operand that the compiler would address wrongly.
    """
    given = [operand is not None for operand in operands]
    for operand in operands:
        if operand is not None and operand.dtype.itemsize == 1 and operand.size >= 1 << 31:
            raise ValueError(
                f"{name}: {operand.shape} elements of one byte are 2 GiB or more, which 32-bit offsets do not reach"
            )

    def body(*refs: Any) -> None:
        rest = iter(refs)
        inputs = [next(rest) if there else None for there in given]
        kernel(*inputs, *rest)

    present = [operand for operand in operands if operand is not None]
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[pl.no_block_spec] * len(present),
        out_specs=jax.tree.map(lambda _: pl.no_block_spec, out_shape),
        out_shape=out_shape,
        interpret=interpret,
        name=name,
        input_output_aliases={sum(given[:i]): out for i, out in (in_place or {}).items()},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
    )(*present)


def dot(a: Any, b: Any, contract: tuple[int, int]) -> Any:
    """Matrix product over one axis of each side in float32; float32 operands are not rounded to TF32."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def load(ref: Any, index: tuple[Any, ...], shape: tuple[int, ...], *masks: Any) -> Any:
    """`ref[index]`, 0 and not read where any of `masks` is False; a mask of None is True."""
    mask = None
    for more in masks:
        if more is not None:
            mask = more if mask is None else mask & more
    if mask is None:
        return plt.load(ref.at[index])
    return plt.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=0)


def below(index: Any, size: int, padded_size: int) -> Any:
    """The mask `index < size`, or None where nothing is padded."""
    return None if size == padded_size else index < size


def lanes_of_step(step: Any, lanes: int, width: int) -> tuple[Any, Any]:
    """Lanes of one step of a loop over a width, and their mask."""
    lane = step * lanes + jnp.arange(lanes)
    return lane, below(lane, width, width - width % lanes)


def slots_of(
    tables: Int32[Array, "R A J"],
    slot_ranges: Int32[Array, "R J 2"] | None,
    block_size: int,
) -> Int32[Array, "R A S"]:
    """The slot of every position of every table, counted from the start of the pool; -1 where a range leaves none.

    The same in every layer, so the compiler makes one small array a step, and kernels need not know blocks or ranges.
    """
    order = jnp.arange(block_size, dtype=jnp.int32)[None, None, None, :]
    if slot_ranges is None:
        slots = tables[..., None] * block_size + order
    else:
        first, last = slot_ranges[:, None, :, :1], slot_ranges[:, None, :, 1:]
        slot = jnp.where(first <= last, first + order, first - 1 - order)
        own = order < jnp.abs(last - first)
        slots = jnp.where(own, tables[..., None] * block_size + slot, -1)
    return slots.reshape(*tables.shape[:2], -1)


def locate(slots: Any, row: Any, half: int, position: Any, length: Any, holes: bool) -> Any:
    """Slot and "is the row's own" of positions; the slot means nothing where it is not."""
    own = position < length
    slot = plt.load(slots.at[row, half, position], mask=own, other=0)
    return slot, own & (slot >= 0) if holes else own


def slot_of(
    tables: Any, slot_ranges: Any, row: Any, half: int, position: Any, own: Any, block_size: int
) -> tuple[Any, Any]:
    """Block and slot of positions of a row; neither means anything where they are not `own`."""
    entry, order = lax.div(position, jnp.int32(block_size)), lax.rem(position, jnp.int32(block_size))
    block = plt.load(tables.at[row, half, entry], mask=own, other=0)
    if slot_ranges is None:
        return block, order
    first, last = (plt.load(slot_ranges.at[row, entry, jnp.int32(i)], mask=own, other=0) for i in range(2))
    return block, jnp.where(first <= last, first + order, first - 1 - order)


def table_row_of(table_of_row: Any, row: Any) -> Any:
    return row if table_of_row is None else plt.load(table_of_row.at[row])


def softmax_step(state: tuple[Any, Any], s: Any, own: Any) -> tuple[Any, Any, Any, Any]:
    """Fold scores (heads, tokens) into m and l; also returns the weights p and the factor of what came before."""
    m, l = state
    s = jnp.where(own[None, :], s, MASKED)
    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    p = jnp.where(own[None, :], jnp.exp(s - m_new[:, None]), 0.0)
    before = jnp.exp(m - m_new)
    return m_new, l * before + jnp.sum(p, axis=1), p, before


def split_bounds(length: Any, tokens: int, split: Any, splits: int) -> tuple[Any, Any]:
    """Tiles [first, last) of a row's context that belong to a split."""
    tiles = (length + tokens - 1) // tokens
    if splits == 1:
        return 0, tiles
    each = (tiles + splits - 1) // splits
    first = jnp.minimum(split * each, tiles)
    return first, jnp.minimum(first + each, tiles)


def check_pool(pool: Array, block_size: int) -> None:
    if block_size < 4 or block_size & (block_size - 1):
        raise ValueError(f"{block_size=} must be a power of two, at least 4")
    if pool.shape[1] != block_size:
        raise ValueError(f"blocks of {pool.shape[1]} slots do not hold {block_size=} slots")
    if pool.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise ValueError(f"{pool.dtype=} must be float16, bfloat16 or float32")


def own_lens(lens: Int32[Array, " B"], rows: tuple[Array, Array] | None, capacity: int) -> Int32[Array, " B"]:
    """Lengths with rows outside `rows` empty. The same in every layer, so the compiler computes them once a step."""
    lens = jnp.minimum(lens, capacity)
    if rows is None:
        return lens
    index = jnp.arange(lens.shape[0], dtype=jnp.int32)
    return jnp.where((index >= rows[0]) & (index < rows[1]), lens, 0)


def store_split(
    state: tuple[Any, Any, Any],
    outs: tuple[Any, ...],
    row: Any,
    heads: Any,
    lane: Any,
    mask: tuple[Any, Any],
    split: Any,
) -> None:
    """Store a program's output: normalised where it saw the whole row, else the flash state of its piece."""
    m, l, acc = state
    head_ok, lane_ok = mask
    ok = head_ok[:, None] if lane_ok is None else head_ok[:, None] & lane_ok[None, :]
    ok = jnp.broadcast_to(ok, acc.shape)
    if len(outs) == 1:
        acc = acc / jnp.maximum(l, 1e-30)[:, None]
        plt.store(outs[0].at[row, heads[:, None], lane[None, :]], acc, mask=ok)
    else:
        out, m_out, l_out = outs
        plt.store(out.at[row, split, heads[:, None], lane[None, :]], acc, mask=ok)
        plt.store(m_out.at[row, split, heads], m, mask=head_ok)
        plt.store(l_out.at[row, split, heads], l, mask=head_ok)


def split_shapes(batch: int, splits: int, heads: int, width: int) -> Any:
    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    if splits == 1:
        return [shape(batch, heads, width)]
    pieces = (batch, splits, heads)
    return [shape(*pieces, width), shape(*pieces), shape(*pieces)]


def combine_splits(outs: Sequence[Array], *, interpret: bool) -> Float[Array, "B N H"]:
    """Join the flash states of a row's pieces; a program takes one head of one row."""
    if len(outs) == 1:
        return outs[0]
    batch, splits, heads, width = outs[0].shape
    splits_padded, width_padded = 1 << (splits - 1).bit_length(), padded(width)

    def kernel(acc_ref: Any, m_ref: Any, l_ref: Any, out_ref: Any) -> None:
        head, row = pl.program_id(0), pl.program_id(1)
        split, lane = jnp.arange(splits_padded), jnp.arange(width_padded)
        there, lane_ok = split < splits, lane < width
        m = plt.load(m_ref.at[row, split, head], mask=there, other=MASKED)
        l = plt.load(l_ref.at[row, split, head], mask=there, other=0)
        factor = jnp.exp(m - jnp.max(m, axis=0))
        acc = load(
            acc_ref,
            (row, split[:, None], head, lane[None, :]),
            (splits_padded, width_padded),
            there[:, None] & lane_ok[None, :],
        )
        total = jnp.maximum(jnp.sum(l * factor, axis=0), 1e-30)
        out = jnp.sum(acc * factor[:, None], axis=0) / total
        plt.store(out_ref.at[row, head, lane], out, mask=lane_ok)

    return launch(
        kernel,
        outs,
        jax.ShapeDtypeStruct((batch, heads, width), jnp.float32),
        grid=(heads, batch),
        warps=4,
        stages=1,
        name="decode_combine",
        interpret=interpret,
    )


def swizzle_group(programs: int) -> int:
    """Number of programs of one row that run side by side, a divisor of all of them."""
    return math.gcd(programs, SWIZZLE_HEADS)


def swizzle(index: Any, inner: int, outer: int) -> tuple[Any, Any]:
    """(head program, row program) of a program when `inner` head programs run side by side, then `outer` rows."""
    group, rest = index // (inner * outer), index % (inner * outer)
    return group * inner + rest % inner, rest // inner


def cos_sin_tables(
    angles: Float[Array, "S HALF"] | None,
) -> tuple[Float[Array, "HALF S"] | None, Float[Array, "HALF S"] | None]:
    """Cosines and sines, which the kernels read: computed once a step for all layers."""
    return (None, None) if angles is None else (jnp.cos(angles).T, jnp.sin(angles).T)


def rotate_pair(a: Any, b: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    return a * cos - b * sin, b * cos + a * sin

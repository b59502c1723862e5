"""Helpers that the Triton kernels share: launching, masked loads, where positions lie, program order.

Every kernel walks positions. Position t is in entry t // C of a row's table, at slot t % C or where `slot_ranges` says
(`slot_of`). Loads outside a row's own slots are masked and give 0: whatever else lies in a block,
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
from jaxtyping import Float

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
    """`kernel` over a grid; it gets a ref, or None, for every operand, then a ref for every output. Operands that are a
    named tuple it gets as one argument.

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
        kernel(*([type(operands)(*inputs)] if hasattr(operands, "_fields") else inputs), *rest)

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


def slot_of(
    tables: Any, slot_ranges: Any, row: Any, half: int, position: Any, own: Any, block_size: int
) -> tuple[Any, Any]:
    """Block and slot of positions of a row; neither means anything where they are not `own` (None: all are)."""
    entry, order = lax.div(position, jnp.int32(block_size)), lax.rem(position, jnp.int32(block_size))
    block = load(tables, (row, half, entry), position.shape, own)
    if slot_ranges is None:
        return block, order
    first, last = (load(slot_ranges, (row, entry, jnp.int32(i)), position.shape, own) for i in range(2))
    return block, jnp.where(first <= last, first + order, first - 1 - order)


def check_pool(pool: Array, block_size: int) -> None:
    if block_size < 4 or block_size & (block_size - 1):
        raise ValueError(f"{block_size=} must be a power of two, at least 4")
    if pool.shape[1] != block_size:
        raise ValueError(f"blocks of {pool.shape[1]} slots do not hold {block_size=} slots")
    if pool.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise ValueError(f"{pool.dtype=} must be float16, bfloat16 or float32")


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

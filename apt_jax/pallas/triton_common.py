"""Helpers shared by the Triton kernels: launches, masked loads, slots of positions, program order.

Every kernel loops over positions. Position t is in entry t // C of a row's table, at slot t % C or at the slot that
`slot_ranges` gives (`slot_of`). Loads outside a row's own slots are masked and give 0: other contents of a block,
including NaN, are neither read nor used.

Shapes inside a kernel are powers of two: head counts and lanes are padded and masked. Every axis is indexed by an
integer array: this is fast in the interpreter, and the compiler turns it into asynchronous copies. Sums use no atomics,
so equal inputs give equal bits.
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
"""Score of a masked position; finite, so a fully masked tile cannot give NaN."""

SWIZZLE_HEADS = 8
"""Maximum number of heads whose programs are adjacent in kernels that compute keys and values from layer inputs."""


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
    """Run `kernel` over a grid and return its outputs.

    The kernel gets a ref (or None) per operand, then a ref per output. If the operands are a named tuple, it gets their
    refs as one argument of that type.

    Args:
        kernel: function of the refs.
        operands: input arrays; None: the operand is missing.
        out_shape: shapes and dtypes of the outputs.
        grid: number of programs along each axis.
        warps: number of warps per program.
        stages: depth of the compiler's pipelines.
        name: name of the kernel in profiles.
        interpret: run in Pallas' interpreter.
        in_place: map from the index of an operand to the index of the output that reuses its memory.

    Raises:
        ValueError: an operand of one-byte elements has 2 GiB or more, which the compiler would address wrongly.
    """
    given = [operand is not None for operand in operands]
    for operand in operands:
        if operand is not None and operand.dtype.itemsize == 1 and operand.size >= 1 << 31:
            raise ValueError(
                f"{name}: {operand.shape} elements of one byte are 2 GiB or more, which 32-bit offsets cannot address"
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
    """Return the matrix product over one axis of each operand, in float32; float32 operands are not rounded to TF32."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def load(ref: Any, index: tuple[Any, ...], shape: tuple[int, ...], *masks: Any) -> Any:
    """Load `ref[index]`; elements for which any of `masks` is False are 0 and not read. A mask of None is all True."""
    mask = None
    for more in masks:
        if more is not None:
            mask = more if mask is None else mask & more
    if mask is None:
        return plt.load(ref.at[index])
    return plt.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=0)


def below(index: Any, size: int, padded_size: int) -> Any:
    """Return the mask `index < size`, or None if the size needs no padding."""
    return None if size == padded_size else index < size


def lanes_of_step(step: Any, lanes: int, width: int) -> tuple[Any, Any]:
    """Return the lanes of one step of a loop over `width`, and a mask of existing lanes (None: all exist)."""
    lane = step * lanes + jnp.arange(lanes)
    return lane, below(lane, width, width - width % lanes)


def slot_of(
    tables: Any, slot_ranges: Any, row: Any, half: int, position: Any, own: Any, block_size: int
) -> tuple[Any, Any]:
    """Return the blocks and slots of a row's positions; they are valid only for `own` positions (None: all)."""
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
    """Return the number of adjacent programs of one row; it divides `programs`."""
    return math.gcd(programs, SWIZZLE_HEADS)


def swizzle(index: Any, inner: int, outer: int) -> tuple[Any, Any]:
    """Return the head and row numbers of a program, if programs are ordered by `inner` heads first, then by `outer`
    rows."""
    group, rest = index // (inner * outer), index % (inner * outer)
    return group * inner + rest % inner, rest // inner


def cos_sin_tables(
    angles: Float[Array, "S HALF"] | None,
) -> tuple[Float[Array, "HALF S"] | None, Float[Array, "HALF S"] | None]:
    """Return the cosines and sines that the kernels read; they are computed once per step for all layers."""
    return (None, None) if angles is None else (jnp.cos(angles).T, jnp.sin(angles).T)


def rotate_pair(a: Any, b: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    return a * cos - b * sin, b * cos + a * sin

"""Blocks of GGUF files and their quantization types: the numbers in a block, and tiles of them for products on CPUs.

A block holds consecutive weights of one output, as unsigned integers. A weight is `(integer - zero) * scale`, or
`integer * scale + minimum` if the type has minima. In types for 32 inputs scale and minimum are float16. In K-quants,
for 256 inputs, each group of 32 inputs multiplies them by integers of its own: one for the scale and one for the
minimum, or in Q6_K two for the scales of its first and its last 16 inputs.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float16, Float32, Int8, Int32, UInt8

GROUP = 32
"""Number of inputs that are rounded together."""
_OUTPUTS = 16


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """A quantization type: bits of an integer, and the parts of blocks and of tiles (16 outputs of a block each)."""

    bits: int
    zero: int
    has_minimum: bool
    groups: int
    """Number of groups of 32 inputs in a block"""
    num_bytes: int
    """Bytes of a block; 0: not a type of files"""
    floats_at: int = 0
    """Offset of the float16 scale in a block; the minimum follows it."""

    @property
    def inputs(self) -> int:
        return self.groups * GROUP

    @property
    def floats(self) -> int:
        """Number of float16 numbers of a block."""
        return 0 if self.num_bytes == 0 else 1 + self.has_minimum

    @property
    def factors(self) -> int:
        """Number of integers of a block that multiply its scale or its minimum."""
        return 2 * self.groups if self.groups > 1 else 0

    @property
    def head_bytes(self) -> int:
        """Bytes of a tile before its words; with factors, a multiple of 64."""
        size = _OUTPUTS * (2 * self.floats + self.factors)
        return -(-size // 64) * 64 if self.factors else size


BLOCK_KINDS = {
    "Q4_0": BlockKind(4, 8, False, 1, 18),
    "Q4_1": BlockKind(4, 0, True, 1, 20),
    "Q5_0": BlockKind(5, 16, False, 1, 22),
    "Q5_1": BlockKind(5, 0, True, 1, 24),
    "Q8_0": BlockKind(8, 128, False, 1, 34),
    "Q4_K": BlockKind(4, 0, True, 8, 144),
    "Q5_K": BlockKind(5, 0, True, 8, 176),
    "Q6_K": BlockKind(6, 32, False, 8, 210, floats_at=208),
}
"""Quantization types that can stay as they are, keyed by the name that the `gguf` library gives them."""
INT8 = BlockKind(8, 128, False, 1, 0)
"""Groups of int8 values without a scale of their own."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The parts of blocks (..., S) of a kind."""

    kind: BlockKind
    floats: Float16[Array, "*B S F"]
    """Scale, and minimum if the kind has one"""
    factors: Int8[Array, "*B S G two"] | None
    values: UInt8[Array, "*B S G 32"]
    """Integers as stored"""

    def numbers(self) -> Float32[Array, "*B I"]:
        """Return the weights of all inputs."""
        kind = self.kind
        values = self.values.astype(jnp.float32) - kind.zero
        if kind.floats:
            floats = self.floats.astype(jnp.float32)[..., None, None]
            scale, minimum = floats[..., 0, :, :], floats[..., -1, :, :]
            if self.factors is not None:
                factors = self.factors.astype(jnp.float32)
                if kind.has_minimum:
                    scale, minimum = scale * factors[..., :1], minimum * factors[..., 1:]
                else:
                    scale = jnp.repeat(scale * factors, GROUP // 2, axis=-1)
            values = values * scale
            if kind.has_minimum:
                values = values + minimum
        return values.reshape(*values.shape[:-3], -1)


def _fields(packed: Array, width: int) -> Array:
    """Return the fields of bytes (..., n) that have `width` bits, lowest first, (..., 8 / width, n)."""
    return jnp.stack([packed >> shift & (2**width - 1) for shift in range(0, 8, width)], axis=-2)


def unpack(name: str, blocks: UInt8[Array, "*B S N"]) -> Blocks:
    """Return the parts of blocks as a file stores them; `name` is a key of `BLOCK_KINDS`."""
    kind = BLOCK_KINDS[name]

    where = slice(kind.floats_at, kind.floats_at + 2 * kind.floats)
    pairs = blocks[..., where].reshape(*blocks.shape[:-1], kind.floats, 2)
    floats, factors = lax.bitcast_convert_type(pairs, jnp.float16), None
    shape = (*blocks.shape[:-1], kind.groups, GROUP)
    rest = blocks[..., 2 * kind.floats :]
    if name == "Q8_0":
        values = rest ^ 128
    elif kind.groups == 1:
        values = _fields(rest[..., -16:], 4).reshape(shape)
        if kind.bits == 5:
            values |= _fields(rest[..., :4], 1).swapaxes(-1, -2).reshape(shape) << 4
    elif name == "Q6_K":
        values = _fields(blocks[..., :128].reshape(*shape[:-2], 2, 64), 4).reshape(shape)
        values |= _fields(blocks[..., 128:192].reshape(*shape[:-2], 2, 32), 2).reshape(shape) << 4
        factors = lax.bitcast_convert_type(blocks[..., 192:208], jnp.int8)
    else:
        values = _fields(rest[..., -128:].reshape(*shape[:-2], 4, 32), 4).reshape(shape)
        if kind.bits == 5:
            values |= _fields(rest[..., 12:44], 1) << 4
        # Six bits of each: the first four groups' in whole bytes, whose highest bits belong to the others.
        low, middle, high = rest[..., :4], rest[..., 4:8], rest[..., 8:12]
        scales = jnp.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=-1)
        minima = jnp.concatenate([middle & 63, high >> 4 | middle >> 2 & 48], axis=-1)
        factors = jnp.stack([scales, minima], axis=-1).astype(jnp.int8)
        floats = jnp.stack([floats[..., 0], -floats[..., 1]], axis=-1)  # files hold how much is subtracted
    if factors is not None:
        factors = factors.reshape(*shape[:-1], 2)
    return Blocks(kind, floats, factors, values.reshape(shape))


def tiles_of(blocks: Blocks) -> UInt8[Array, "T S N"]:
    """Return tiles of 16 outputs each from blocks (O, S), padded with zeros; see `IntegerTiles`."""
    kind, (outputs, steps) = blocks.kind, blocks.values.shape[:2]
    count = -(-outputs // _OUTPUTS)

    def interleaved(parts: Array, together: int) -> Array:
        """Return bytes (O, S, n) as (T, S, 16 n), `together` of an output next to each other."""
        parts = jnp.pad(parts, ((0, count * _OUTPUTS - outputs), (0, 0), (0, 0)))
        return parts.reshape(count, _OUTPUTS, steps, -1, together).transpose(0, 2, 3, 1, 4).reshape(count, steps, -1)

    parts = []
    if kind.floats:
        parts.append(interleaved(lax.bitcast_convert_type(blocks.floats, jnp.uint8).reshape(outputs, steps, -1), 2))
    if blocks.factors is not None:
        factors = lax.bitcast_convert_type(blocks.factors, jnp.uint8)
        parts.append(interleaved(factors.reshape(outputs, steps, -1), 1))
        used = sum(part.shape[-1] for part in parts)
        parts.append(jnp.zeros((count, steps, kind.head_bytes - used), jnp.uint8))
    words = blocks.values.reshape(outputs, steps, kind.groups, 8, 4)
    if kind.bits < 8:
        low, fields = words & 15, 8 // (kind.bits - 4) if kind.bits > 4 else 8
        packed = [low[..., :4, :] | low[..., 4:, :] << 4]
        for first in range(0, 8 if kind.bits > 4 else 0, fields):
            of_word = [words[..., first + i, :] >> 4 << i * (kind.bits - 4) for i in range(fields)]
            packed.append(sum(of_word[1:], of_word[0])[..., None, :])
        words = jnp.concatenate(packed, axis=-2)
    parts.append(interleaved(words.reshape(outputs, steps, -1), 4))
    return jnp.concatenate(parts, axis=-1)


def rows_of_tiles(kind: BlockKind, tiles: UInt8[Array, "T S N"], rows: Int32[Array, " R"]) -> Blocks:
    """Return the blocks (R, S) of some outputs."""
    words = kind.groups * kind.bits
    # Of each byte of a block: its place in the tile for the first output, and the distance to the next output's.
    sizes = [(2 * kind.floats, 2), (kind.factors, 1), (4 * words, 4)]
    starts = (0, 2 * kind.floats * _OUTPUTS, kind.head_bytes)
    places = [start + np.arange(n) // size * size * _OUTPUTS + np.arange(n) % size for start, (n, size) in zip(starts, sizes, strict=True)]  # fmt: skip
    first, apart = np.concatenate(places), np.repeat([size for _, size in sizes], [n for n, _ in sizes])
    at = jnp.asarray(first, jnp.int32)[None] + (rows % _OUTPUTS)[:, None] * jnp.asarray(apart, jnp.int32)[None]
    steps = jnp.arange(tiles.shape[1])[None, :, None]
    taken = tiles[(rows // _OUTPUTS)[:, None, None], steps, at[:, None, :]]
    floats, factors, packed = jnp.split(taken, np.cumsum([n for n, _ in sizes[:2]]), axis=-1)
    shape = taken.shape[:2]
    packed = packed.reshape(*shape, kind.groups, kind.bits, 4)
    if kind.bits < 8:
        values: Any = jnp.concatenate([packed[..., :4, :] & 15, packed[..., :4, :] >> 4], axis=-2)
        if kind.bits > 4:
            values |= _fields(packed[..., 4:, :], kind.bits - 4).reshape(values.shape) << 4
        packed = values
    return Blocks(
        kind,
        lax.bitcast_convert_type(floats.reshape(*shape, kind.floats, 2), jnp.float16),
        lax.bitcast_convert_type(factors, jnp.int8).reshape(*shape, kind.groups, 2) if kind.factors else None,
        packed.reshape(*shape, kind.groups, GROUP),
    )

"""Weights in the form that ops take: norms, and matrices that are quantized or laid out in tiles."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NormParams:
    """Layer norm, `(x - mean) / sqrt(var + eps) * scale + bias`, or RMS norm, `x / sqrt(mean(x^2) + eps) * scale`."""

    scale: Any
    bias: Any
    """Bias of the norm; None: no bias."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts of a layer. Matrices are arrays, or a `TiledMatrix` of the experts' matrices one after
    another."""

    router: Any
    """(X, D)"""
    w_gate: Any
    """(X, F, D)"""
    w_up: Any
    """(X, F, D)"""
    w_down: Any
    """(X, D, F)"""
    shared_gate: Any = None
    """(1, D): gate of the expert that all tokens go to; None: there is no such expert"""
    w_gate_up: Any = None
    """(X * 2F, D): for each expert w_gate, then w_up, in place of the two if they are tiled; otherwise None"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
    """LoRA matrices of S adapters for one weight matrix (O, I); adapters with a lower rank than R, or without this
    matrix, are padded with zeros."""

    a: Any
    """(S, R, I)"""
    b: Any
    """(S, R, O), with the adapter's scale included"""

    def lanes(self, heads: int, start: int, stop: int | None = None) -> "LowRank":
        """Return a copy with only lanes [start, stop) of every head; the outputs must consist of `heads` heads."""
        s, r, width = self.b.shape
        of_heads = self.b.reshape(s, r, heads, width // heads)[:, :, :, start:stop]
        return LowRank(a=self.a, b=of_heads.reshape(s, r, -1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyValueAdapters:
    """LoRA matrices of adapters for W_k and W_v, used where keys and values are computed from cached layer inputs."""

    k: LowRank | None
    v: LowRank | None
    index: Int32[Array, " B"]
    """Adapter of each row; 0: no adapter."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """A matrix stored as integers: `values * scale[:, None]`; see `apt_jax.models.quantize`."""

    values: Any
    """(O, I) int8"""
    scale: Any
    """(O,) float32"""

    @property
    def shape(self) -> tuple[int, ...]:
        """(O, I)"""
        return self.values.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledMatrix:
    """A matrix laid out in tiles for CPUs; see `apt_jax.models.weight_layout`."""

    values: Any
    """Tiles of 16 outputs and 32 inputs, padded with zeros. A tile holds, for every input or pair of inputs, the values
    of each output: (O / 16, I / 32, 32, 16, 1) float32, or (O / 16, I / 32, 16, 16, 2) bfloat16 or int8"""
    scale: Any
    """(O,) float32 scale of int8 values, otherwise None"""
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    """(O, I)"""


GROUP = 32
"""Number of inputs that share a scale in a `GroupedMatrix`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatrix:
    """A matrix of integers with a scale for every 32 inputs of an output, as in GGUF files. A weight is `values * scale
    + minimum` if there are minima, otherwise `(values - 8) * scale` for four-bit values and `values * scale` for
    eight-bit values."""

    values: Any
    """(O, I / 32, 32) int8, or (O, I / 32, 16) uint8 with two four-bit values per byte: inputs 0 to 15 of a group in
    the low halves and 16 to 31 in the high halves"""
    scale: Any
    """(O, I / 32) float16"""
    minimum: Any
    """(O, I / 32) float16 or None"""
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """(O, I), or (..., I) with leading axes whose product is O"""

    @property
    def kind(self) -> tuple[int, bool]:
        """Number of bits of a value, and True if there are minima; matrices of the same kind can be joined."""
        return 8 if self.values.shape[-1] == GROUP else 4, self.minimum is not None

    def dequantized(self, dtype: Any) -> Float[Array, "O I"]:
        """Return the weights that the integers represent, in `dtype`."""
        return _grouped_rows(self.values, self.scale, self.minimum).astype(dtype)

    def rows(self, rows: Int32[Array, " T"]) -> Float[Array, "T I"]:
        """Return rows of the dequantized matrix, float32."""
        return _grouped_rows(self.values[rows], self.scale[rows], None if self.minimum is None else self.minimum[rows])


def _grouped_rows(values: Array, scale: Array, minimum: Array | None) -> Array:
    """Dequantize groups (T, I / 32, 16 or 32) to rows (T, I) of float32."""
    if values.shape[-1] != GROUP:
        values = jnp.concatenate([values & 15, values >> 4], axis=-1)
    numbers = values.astype(jnp.float32)
    if values.dtype == jnp.uint8 and minimum is None:
        numbers = numbers - 8
    out = numbers * scale.astype(jnp.float32)[..., None]
    if minimum is not None:
        out = out + minimum.astype(jnp.float32)[..., None]
    return out.reshape(values.shape[0], -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegerTiles:
    """A `GroupedMatrix` or `QuantizedMatrix` laid out in tiles for integer products on CPUs."""

    values: Any
    """(O / 16, I / 32, B) uint8: tiles of 16 outputs and 32 inputs in `B` bytes. In grouped matrices a tile begins with
    the scales of its outputs, followed by their minima if there are any, in float16. Then 64-byte words follow, each
    with four inputs of all 16 outputs as unsigned values. For 4-bit values, the low nibbles of word i hold inputs 4 i
    to 4 i + 3 and the high nibbles hold inputs 4 i + 16 to 4 i + 19. int8 values are stored with 128 added."""
    scale: Any
    """(O,) float32 scale of a `QuantizedMatrix`, otherwise None"""
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    """(O, I)"""

    def rows(self, rows: Int32[Array, " T"]) -> Float[Array, "T I"]:
        """Return rows of the matrix, float32."""
        count = rows.shape[0]
        _, steps, size = self.values.shape
        head = 64 if size == _BYTES_WITH_MINIMA else size % 64
        words = (size - head) // 64

        def bytes_at(places: Array) -> Array:
            """Return the bytes (T, steps, n) at offsets `places` (T, n) in the tiles of every row."""
            return self.values[(rows // 16)[:, None, None], jnp.arange(steps)[None, :, None], places[:, None, :]]

        def halves(start: int) -> Array:
            two = bytes_at(start + (rows % 16)[:, None] * 2 + jnp.arange(2)[None])
            return lax.bitcast_convert_type(two, jnp.float16)

        byte = jnp.arange(words * 4)[None]
        values = bytes_at(head + (rows % 16)[:, None] * 4 + byte // 4 * 64 + byte % 4)
        if words == 8:
            values = lax.bitcast_convert_type(values ^ 128, jnp.int8)
        if self.scale is None:
            minimum = halves(32) if head == 64 else None
            return _grouped_rows(values, halves(0), minimum)[:count, : self.shape[1]]
        out = values.astype(jnp.float32) * self.scale[rows].astype(jnp.float32)[:, None, None]
        return out.reshape(count, -1)[:, : self.shape[1]]


_BYTES_WITH_MINIMA = 64 + 256


def tile_integers(w: GroupedMatrix | QuantizedMatrix) -> IntegerTiles:
    """Return an integer matrix in the tiled layout."""
    if isinstance(w, QuantizedMatrix):
        groups = jnp.pad(w.values, ((0, 0), (0, -w.values.shape[1] % GROUP)))
        tiles = _tiles(groups.reshape(groups.shape[0], -1, GROUP), None, None)
        return IntegerTiles(values=tiles, scale=w.scale, shape=(w.shape[0], w.shape[1]))
    shape = (math.prod(w.shape[:-1]), w.shape[-1])
    return IntegerTiles(values=_tiles(w.values, w.scale, w.minimum), scale=None, shape=shape)


@jax.jit
def _tiles(values: Array, scale: Array | None, minimum: Array | None) -> Array:
    outputs, steps, size = values.shape
    blocks = -(-outputs // 16)

    def padded(a: Array) -> Array:
        a = jnp.pad(a, ((0, blocks * 16 - outputs), *([(0, 0)] * (a.ndim - 1))))
        return a.reshape(blocks, 16, *a.shape[1:])

    if values.dtype == jnp.int8:
        values = lax.bitcast_convert_type(values, jnp.uint8) ^ 128
    words = padded(values).reshape(blocks, 16, steps, size // 4, 4).transpose(0, 2, 3, 1, 4)
    parts = [words.reshape(blocks, steps, -1)]
    for halves in (minimum, scale):
        if halves is not None:
            two = lax.bitcast_convert_type(padded(halves).transpose(0, 2, 1), jnp.uint8)
            parts.insert(0, two.reshape(blocks, steps, 32))
    return jnp.concatenate(parts, axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PreNormLayer:
    """A decoder layer with norms only before attention and before its feed-forward layer; besides attention and
    products it has only biases, rotation and an activation. Matrices may be `QuantizedMatrix`, `TiledMatrix` or
    `IntegerTiles`."""

    attn_norm: NormParams
    wqkv: Any
    """((N + 2K) * H, D): q, k and v as one matrix"""
    bqkv: Any
    """((N + 2K) * H,) or None"""
    wo: Any
    """(D, N * H)"""
    bo: Any
    ffn_norm: NormParams
    w_up: Any
    """(F, D), or (2F, D): first gate, then up"""
    b_up: Any
    w_down: Any
    """(D, F)"""
    b_down: Any
    num_heads: int = dataclasses.field(metadata={"static": True})
    num_kv_heads: int = dataclasses.field(metadata={"static": True})
    head_dim: int = dataclasses.field(metadata={"static": True})
    gated: bool = dataclasses.field(metadata={"static": True})
    activation: str = dataclasses.field(metadata={"static": True})
    norm: str = dataclasses.field(metadata={"static": True})
    """Kind of norm: "layer" or "rms"."""
    norm_eps: float = dataclasses.field(metadata={"static": True})
    norm_offset: float = dataclasses.field(metadata={"static": True})


FLAT_MATRICES = (QuantizedMatrix, GroupedMatrix, TiledMatrix, IntegerTiles)
"""Types of matrices that are not arrays. Their shape is (outputs, inputs), even if the outputs had several axes."""


def rows_of(w: TiledMatrix, rows: Int32[Array, " T"]) -> Shaped[Array, "T I"]:
    """Return rows of a tiled matrix, without its scale."""
    values = w.values[rows // 16, :, :, rows % 16]
    return values.reshape(rows.shape[0], -1)[:, : w.shape[1]]

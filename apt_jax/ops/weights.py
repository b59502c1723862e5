"""Weights in the form that ops take: norms, and matrices that are quantized or laid out in tiles."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32, Shaped

from apt_jax.ops.blocks import BLOCK_KINDS, GROUP, INT8, BlockKind, Blocks, rows_of_tiles, tiles_of, unpack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NormParams:
    """Layer norm, `(x - mean) / sqrt(var + eps) * scale + bias`, or RMS norm, `x / sqrt(mean(x^2) + eps) * scale`."""

    scale: Any
    bias: Any
    """Bias of the norm; None: no bias."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertNorms:
    """Norms of a mixture of experts that reads the residual stream beside a feed-forward layer (Gemma 4)."""

    router: NormParams
    """(D,): of the router's input"""
    before: NormParams
    """(D,): of the experts' input"""
    after: NormParams
    """(D,): of the experts' sum"""
    shared: NormParams
    """(D,): of the output of the feed-forward layer that all tokens go to"""


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
    """(1, D): gate of the expert that all tokens go to; None: there is no such expert, or its output has no gate"""
    w_gate_up: Any = None
    """(X * 2F, D): for each expert w_gate, then w_up, in place of the two if they are tiled; otherwise None"""
    router_bias: Any = None
    """(X,): added to products with the router or, with sigmoid scores, to scores where experts are chosen, but not to their
    weights; None: no bias, as for all biases"""
    b_gate: Any = None
    """(X, F)"""
    b_up: Any = None
    """(X, F)"""
    b_down: Any = None
    """(X, D)"""
    b_gate_up: Any = None
    """(X, 2F) float32: for each expert b_gate, then b_up, in place of the two beside `w_gate_up`"""
    scale: Any = None
    """(X,): factor on the weights of each expert, or None"""
    norms: ExpertNorms | None = None
    """Norms of its own; None: router and experts read what the feed-forward layer reads"""


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatrix:
    """A matrix of integers in blocks of inputs with scales of their own, as in GGUF files; see `ops.blocks`."""

    blocks: Any
    """(O, blocks of a row, bytes of a block) uint8, as in the file"""
    kind: str = dataclasses.field(metadata={"static": True})
    """Quantization type, a key of `BLOCK_KINDS`"""
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """(O, I), or (..., I) with leading axes whose product is O"""

    def dequantized(self, dtype: Any) -> Float[Array, "O I"]:
        """Return the weights that the integers represent, in `dtype`."""
        return unpack(self.kind, self.blocks).numbers().astype(dtype)

    def rows(self, rows: Int32[Array, " T"]) -> Float[Array, "T I"]:
        """Return rows of the dequantized matrix, float32."""
        return unpack(self.kind, self.blocks[rows]).numbers()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegerTiles:
    """A `GroupedMatrix` or `QuantizedMatrix` laid out in tiles for integer products on CPUs."""

    values: Any
    """(O / 16, blocks of a row, bytes of a tile) uint8: tiles of 16 outputs and the inputs of a block. Scales of the
    outputs come first, then their minima if there are any, in float16. In K-quants the integers that multiply them
    follow, 16 bytes for one of a group, then zeros up to a multiple of 64 bytes. Then 64-byte words follow, each with
    four inputs of all 16 outputs: eight words for a group of 8-bit values, to which 128 was added if they had signs.
    With fewer bits, the low nibbles of a group's word i hold inputs 4 i to 4 i + 3 and the high nibbles hold inputs
    4 i + 16 to 4 i + 19. One more word has the fifth bits, in the order of the words for 8 bits: bit i of its bytes is
    of word i; two more words have the fifth and sixth bits, two bits for each word."""
    scale: Any
    """(O,) float32 scale of a `QuantizedMatrix`, otherwise None"""
    kind: BlockKind = dataclasses.field(metadata={"static": True})
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    """(O, I)"""

    def rows(self, rows: Int32[Array, " T"]) -> Float[Array, "T I"]:
        """Return rows of the matrix, float32."""
        out = rows_of_tiles(self.kind, self.values, rows).numbers()[:, : self.shape[1]]
        return out if self.scale is None else out * self.scale[rows].astype(jnp.float32)[:, None]


def tile_integers(w: GroupedMatrix | QuantizedMatrix) -> IntegerTiles:
    """Return an integer matrix in the tiled layout."""
    if isinstance(w, QuantizedMatrix):
        return IntegerTiles(values=_tiles_of_int8(w.values), scale=w.scale, kind=INT8, shape=(w.shape[0], w.shape[1]))
    shape = (math.prod(w.shape[:-1]), w.shape[-1])
    return IntegerTiles(values=_tiles(w.kind, w.blocks), scale=None, kind=BLOCK_KINDS[w.kind], shape=shape)


@functools.partial(jax.jit, static_argnums=0)
def _tiles(kind: str, blocks: Array) -> Array:
    return tiles_of(unpack(kind, blocks))


@jax.jit
def _tiles_of_int8(values: Array) -> Array:
    outputs, inputs = values.shape
    values = jnp.pad(
        lax.bitcast_convert_type(values, jnp.uint8) ^ 128, ((0, 0), (0, -inputs % GROUP)), constant_values=128
    )
    groups = values.reshape(outputs, -1, 1, GROUP)
    return tiles_of(Blocks(INT8, jnp.zeros((*groups.shape[:2], 0), jnp.float16), None, groups))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedMatrix:
    """The outputs of several integer matrices of different kinds, one after another."""

    parts: tuple[Any, ...]
    """`GroupedMatrix` or `IntegerTiles`, two or more"""

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)"""
        return sum(w.shape[0] for w in self.parts), self.parts[0].shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PreNormLayer:
    """A decoder layer with norms only before attention and before its feed-forward layer; besides attention and
    products it has only biases, rotation and an activation. Matrices may be `QuantizedMatrix`, `TiledMatrix` or
    `IntegerTiles`."""

    attn_norm: NormParams
    wqkv: Any
    """((N + 2K) * H, D): q, k and v as one matrix, or a `JoinedMatrix`"""
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


FLAT_MATRICES = (QuantizedMatrix, GroupedMatrix, TiledMatrix, IntegerTiles, JoinedMatrix)
"""Types of matrices that are not arrays. Their shape is (outputs, inputs), even if the outputs had several axes."""


def rows_of(w: TiledMatrix, rows: Int32[Array, " T"]) -> Shaped[Array, "T I"]:
    """Return rows of a tiled matrix, without its scale."""
    values = w.values[rows // 16, :, :, rows % 16]
    return values.reshape(rows.shape[0], -1)[:, : w.shape[1]]

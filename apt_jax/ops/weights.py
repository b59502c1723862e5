"""Weights as the ops take them: norms, and matrices that are quantized or laid out in tiles."""

import dataclasses
from typing import Any

import jax
from jax import Array
from jaxtyping import Int32, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NormParams:
    """Layer norm, `(x - mean) / sqrt(var + eps) * scale + bias`, or RMS norm, `x / sqrt(mean(x^2) + eps) * scale`."""

    scale: Any
    bias: Any
    """None: adds nothing."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """A matrix as `values * scale[:, None]`; see `quantize`."""

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
    """Tiles of 16 outputs and 32 inputs: every input, or pair of inputs, of each output, padded with zeros;
    (O / 16, I / 32, 32, 16, 1) float32, (O / 16, I / 32, 16, 16, 2) bfloat16 or int8"""
    scale: Any
    """(O,) float32 of int8, else None"""
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    """(O, I)"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PreNormLayer:
    """A decoder layer that norms before attention and before its feed-forward, with nothing between them and their
    products but biases, rotation and an activation. Matrices may be `QuantizedMatrix` or `TiledMatrix`."""

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
    """(F, D), or (2F, D) of gate and then of up"""
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
    """"layer" or "rms"."""
    norm_eps: float = dataclasses.field(metadata={"static": True})
    norm_offset: float = dataclasses.field(metadata={"static": True})


def rows_of(w: TiledMatrix, rows: Int32[Array, " T"]) -> Shaped[Array, "T I"]:
    """Rows of the matrix, without the scale."""
    values = w.values[rows // 16, :, :, rows % 16]
    return values.reshape(rows.shape[0], -1)[:, : w.shape[1]]

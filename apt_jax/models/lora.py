"""LoRA adapters in the decoder (Hu et al., 2021): `W + scale B A` with each row's own adapter.

The adapters of a server are stacked layer by layer (`LayerAdapters`) and are part of the parameters; the inputs of a
step give the adapter of each token. The model's weights, quantized or not, stay unchanged: an adapter's LoRA term is
computed separately from the product, in the dtype of activations.

* Products of a step (`adapted`): `x W^T + (x A^T) B` for each row's own A (r, inputs) and B, stored as (r, outputs).
* Cached layer inputs are computed with the request's adapter, and keys and values are computed from them with the
  adapter's W_k and W_v. If attention absorbs the projections, it absorbs the LoRA terms too: the query of head h
  becomes `W_k^T q + A^T (B_h q)`, and its output `W_v z + B_h^T (A z)`, where B_h has the head's columns of B
  (`ops.low_rank.absorbed_low_rank`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from apt_jax.models.config import ModelConfig
from apt_jax.models.params import LayerParams, ModelParams
from apt_jax.ops.backend import KernelBackend
from apt_jax.ops.weights import LowRank

TARGETS = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
"""Matrices of a layer that adapters can change, as fields of `LayerParams`."""

NO_ADAPTER = 0
"""Adapter index of a row without an adapter."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoraAdapter:
    """One adapter, in host memory."""

    name: str
    matrices: Mapping[tuple[int, str], tuple[np.ndarray, np.ndarray]]
    """A (r, I) and B (O, r) in float32 for each changed matrix, keyed by (layer, field of `TARGETS`); B includes the
    scale."""

    @property
    def rank(self) -> int:
        """Largest rank of the adapter's matrices."""
        return max(a.shape[0] for a, _ in self.matrices.values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerAdapters:
    """LoRA weights of all adapters for each matrix of one layer; None: no adapter changes the matrix."""

    wq: LowRank | None = None
    wk: LowRank | None = None
    wv: LowRank | None = None
    wo: LowRank | None = None
    w_gate: LowRank | None = None
    w_up: LowRank | None = None
    w_down: LowRank | None = None


def target_shape(field: str, config: ModelConfig, layer: int) -> tuple[int, int] | None:
    """Return (outputs, inputs) of a matrix of `TARGETS` in a layer; None: the layer has no such matrix."""
    shape, latent = config.attention_of(layer), config.latent
    heads = config.num_heads * shape.head_dim
    keys = None if latent is not None else (shape.num_kv_heads * shape.head_dim, config.hidden_size)
    d, f = config.hidden_size, config.ffn_size
    if config.experts is not None and field in ("w_gate", "w_up", "w_down"):
        return None
    return {
        "wq": (heads, d if latent is None else latent.query_rank or d),
        "wk": keys,
        "wv": None if shape.one_projection else keys,
        "wo": (d, heads if latent is None else config.num_heads * config.value_dim),
        "w_gate": (f, d) if config.gated else None,
        "w_up": (f, d),
        "w_down": (d, f),
    }[field]


def with_adapters(params: ModelParams, config: ModelConfig, adapters: Sequence[LoraAdapter]) -> ModelParams:
    """Return the parameters with all adapters stacked in `LayerParams.adapters`, in the dtype of activations."""
    if not adapters:
        return params
    dtype = np.dtype(params.dtype)

    def stacked(layer: int, field: str) -> LowRank | None:
        pairs = [adapter.matrices.get((layer, field)) for adapter in adapters]
        rank = max((pair[0].shape[0] for pair in pairs if pair is not None), default=0)
        shape = target_shape(field, config, layer)
        if not rank or shape is None:
            return None
        a, b = (np.zeros((len(adapters), rank, width), dtype) for width in reversed(shape))
        for i, pair in enumerate(pairs):
            if pair is not None:
                r = pair[0].shape[0]
                a[i, :r], b[i, :r] = pair[0].astype(dtype), pair[1].T.astype(dtype)
        return LowRank(a=jnp.asarray(a), b=jnp.asarray(b))

    def layer(i: int, p: LayerParams) -> LayerParams:
        return dataclasses.replace(p, adapters=LayerAdapters(**{field: stacked(i, field) for field in TARGETS}))

    return dataclasses.replace(params, layers=tuple(layer(i, p) for i, p in enumerate(params.layers)))


def adapt_keys(adapters: Sequence[LoraAdapter]) -> bool:
    """True if any adapter changes W_k or W_v."""
    return any(field in ("wk", "wv") for adapter in adapters for _, field in adapter.matrices)


def adapted(
    y: Float[Array, "T O"],
    x: Float[Array, "T I"],
    p: LayerParams,
    parts: Sequence[tuple[str, int]],
    index: Int32[Array, " T"] | None,
    ops: KernelBackend,
) -> Array:
    """Add each row's LoRA term to the output of a linear layer; return `y` unchanged without adapters.

    Args:
        y: the product with the layer's own matrices, without activation.
        x: input of the layer.
        p: parameters of the layer, with its adapters.
        parts: (field of `TARGETS`, number of outputs) for each consecutive range of outputs.
        index: adapter of each row; None: unchanged.
    """
    if p.adapters is None or index is None:
        return y
    found = [(getattr(p.adapters, field), width) for field, width in parts]
    return y if all(part is None for part, _ in found) else ops.add_low_rank(y, x, found, index)


def addition(
    x: Float[Array, "T I"],
    p: LayerParams,
    field: str,
    width: int,
    index: Int32[Array, " T"] | None,
    ops: KernelBackend,
) -> Float[Array, "T O"] | None:
    """Compute each row's LoRA term for the product with one matrix, float32; None: no adapter changes the matrix."""
    part = adapter_of(p, field)
    if part is None or index is None:
        return None
    return ops.add_low_rank(jnp.zeros((x.shape[0], width), jnp.float32), x, [(part, width)], index)


def adapter_of(params: LayerParams, field: str) -> Any:
    """Return the adapters of a layer's matrix as a `LowRank`; None: no adapter changes it."""
    return None if params.adapters is None else getattr(params.adapters, field)

"""Quantization of weights to int8 with a scale per output, and dequantization of integer matrices where floating-point
values are needed.

Every decode step reads all weights, and int8 takes half the bytes of bfloat16.
Norms, biases, position tables and the cache are not quantized. Scales and rounding are qwix's (symmetric; the largest
weight of an output corresponds to 127.5 steps). Products read the integers directly and scale the results; on CPUs they
round activations too (`ops.weights.IntegerTiles`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from apt_jax.errors import ConfigError
from apt_jax.models.params import ModelParams
from apt_jax.models.weight_layout import map_matrices
from apt_jax.ops.weights import GroupedMatrix, QuantizedMatrix


@jax.jit
def _quantize(w: Float[Array, "O I"]) -> QuantizedMatrix:
    import qwix

    q = qwix.quantize(w.astype(jnp.float32), jnp.int8, channelwise_axes=(0,))
    return QuantizedMatrix(values=q.qvalue, scale=q.scale[:, 0])


def dequantize(w: QuantizedMatrix, dtype: Any) -> Float[Array, "O I"]:
    """Return the weights that the integers represent, in `dtype`."""
    return (w.values.astype(jnp.float32) * w.scale[:, None]).astype(dtype)


def quantize_params(params: ModelParams, *, keep: bool) -> ModelParams:
    """Quantize all matrices that activations are multiplied by, and the token embeddings.

    Args:
        params: parameters as loaded, or as `fuse_products` returns them.
        keep: do not store wk and wv as integers, because attention over layer inputs uses them separately. They are
            rounded to the values that the integers represent, so that both kinds of cache use the same weights.

    Raises:
        ConfigError: qwix is not installed.
    """
    try:
        import qwix  # noqa: F401
    except ImportError:
        raise ConfigError("quantization='int8' needs qwix: pip install 'apt-jax[int8]' (--quantization)") from None

    def effective(w: Any) -> Any:
        return dequantize(_quantize(w.reshape(-1, w.shape[-1])), w.dtype).reshape(w.shape)

    return map_matrices(params, _quantize, keep=effective if keep else None)


def delete_replaced(before: ModelParams, after: ModelParams) -> None:
    """Delete the arrays of a model that its quantized form does not share."""
    kept = {id(leaf) for leaf in jax.tree.leaves(after)}
    for leaf in jax.tree.leaves(before):
        if id(leaf) not in kept:
            leaf.delete()


def widen_keys(params: ModelParams, dtype: Any) -> ModelParams:
    """Dequantize wk and wv of type `GroupedMatrix` to `dtype`, because attention over layer inputs uses each of them
    separately."""

    def widened(w: Any) -> Any:
        return w.dequantized(dtype).reshape(w.shape) if isinstance(w, GroupedMatrix) else w

    layers = [dataclasses.replace(layer, wk=widened(layer.wk), wv=widened(layer.wv)) for layer in params.layers]
    return dataclasses.replace(params, layers=tuple(layers))

"""Weights laid out once as the matrix tiles (AMX) of `kernels.cc` take them: what they multiply with is read from end to end."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from apt_jax.models.params import ModelParams, QuantizedMatrix, TiledMatrix, map_matrices


def tile_params(params: ModelParams, *, keep: bool) -> ModelParams:
    """All matrices of a bfloat16 model, as `map_matrices` names them; `keep`: wk and wv stay as they are."""
    return map_matrices(params, tile_matrix, keep=(lambda w: w) if keep else None)


def tile_matrix(w: Array | QuantizedMatrix) -> TiledMatrix:
    """Of (outputs, inputs)."""
    if isinstance(w, QuantizedMatrix):
        return TiledMatrix(values=_tiled(w.values), scale=w.scale, shape=(w.shape[0], w.shape[1]))
    return TiledMatrix(values=_tiled(w), scale=None, shape=(w.shape[0], w.shape[1]))


@jax.jit
def _tiled(w: Array) -> Array:
    outputs, inputs = w.shape
    w = jnp.pad(w, ((0, -outputs % 16), (0, -inputs % 32)))
    return w.reshape(w.shape[0] // 16, 16, w.shape[1] // 32, 16, 2).transpose(0, 2, 3, 1, 4)


def rows_of(w: TiledMatrix, rows: Int32[Array, " T"]) -> Float[Array, "T I"]:
    """Rows of the matrix, without the scale."""
    values = w.values[rows // 16, :, :, rows % 16]
    return values.reshape(rows.shape[0], -1)[:, : w.shape[1]]

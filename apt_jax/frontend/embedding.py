"""Embeddings from pooled hidden states."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.errors import InvalidRequestError
from apt_jax.validation.values import shown


def check_dimensions(dimensions: object, size: int) -> None:
    """Check the requested number of dimensions of an embedding of `size` dimensions.

    Raises:
        InvalidRequestError: `dimensions` is not an integer from 1 to `size`.
    """
    if dimensions is None:
        return
    if not isinstance(dimensions, int) or isinstance(dimensions, bool) or not 1 <= dimensions <= size:
        raise InvalidRequestError("dimensions", f"{shown(dimensions)} is not an integer from 1 to {size}")


def embedding(pooled: NDArray[np.float32], *, dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """Return the first `dimensions` of (D,) pooled states, scaled to length 1 if `normalize`."""
    cut = pooled[:dimensions]
    if not normalize:
        return cut.copy()
    return cut / max(np.linalg.norm(cut), np.float32(1e-12))

"""Embeddings from pooled hidden states."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.errors import InvalidRequestError
from apt_jax.validation.values import shown


def check_dimensions(dimensions: object, size: int) -> None:
    """Check how many dimensions of a model's `size` are asked for.

    Raises:
        InvalidRequestError: not an integer from 1 to `size`.
    """
    if dimensions is None:
        return
    if not isinstance(dimensions, int) or isinstance(dimensions, bool) or not 1 <= dimensions <= size:
        raise InvalidRequestError("dimensions", f"{shown(dimensions)} is not an integer from 1 to {size}")


def embedding(pooled: NDArray[np.float32], *, dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """Cut (D,) pooled states to their first `dimensions`, and scale them to length 1 on request."""
    cut = pooled[:dimensions]
    if not normalize:
        return cut.copy()
    return cut / max(np.linalg.norm(cut), np.float32(1e-12))

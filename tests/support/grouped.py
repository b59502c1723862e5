"""Matrices of integers in groups of 32 inputs, for tests."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from apt_jax.ops.weights import GroupedMatrix


def in_groups(w: jax.Array, *, kind: str) -> GroupedMatrix:
    """A matrix (outputs, inputs) as the `gguf` library rounds it to ``Q4_0``, ``Q4_1`` or ``Q8_0``."""
    number = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quants.quantize(np.asarray(w, np.float32), number).reshape(w.shape[0], w.shape[1] // 32, -1)
    head = 4 if kind == "Q4_1" else 2
    halves = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    values = np.ascontiguousarray(blocks[..., head:]).view(np.int8 if kind == "Q8_0" else np.uint8)
    minimum = jnp.asarray(halves[..., 1]) if kind == "Q4_1" else None
    shape = (w.shape[0], w.shape[1])
    return GroupedMatrix(values=jnp.asarray(values), scale=jnp.asarray(halves[..., 0]), minimum=minimum, shape=shape)

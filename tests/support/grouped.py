"""Matrices of integers in blocks of GGUF files, for tests."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from apt_jax.ops.blocks import BLOCK_KINDS
from apt_jax.ops.weights import GroupedMatrix

SMALL_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Kinds whose blocks hold 32 inputs; the `gguf` library rounds weights to them."""
K_KINDS = ("Q4_K", "Q5_K", "Q6_K")
"""Kinds whose blocks hold 256 inputs; the `gguf` library only reads them."""


def random_blocks(shape: tuple[int, int], kind: str, seed: int = 0) -> np.ndarray:
    """Valid blocks (outputs, blocks of a row, bytes) with any integers, scales up to 1/30 in either direction, and a
    few of them below the normal numbers of float16."""
    rng, of = np.random.default_rng(seed), BLOCK_KINDS[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // of.inputs, of.num_bytes), np.uint8)
    floats = rng.uniform(-1, 1, (*blocks.shape[:2], of.floats)) / (30 if of.groups == 1 else 1000)
    floats.flat[::7] *= 2.0**-12
    blocks[..., of.floats_at : of.floats_at + 2 * of.floats] = floats.astype(np.float16).view(np.uint8)
    return blocks


def dequantized(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Weights (outputs, inputs) that the `gguf` library reads from blocks, float32."""
    return gguf.quants.dequantize(blocks.reshape(blocks.shape[0], -1), gguf.GGMLQuantizationType[kind])


def quantized(values: np.ndarray, kind: str) -> np.ndarray:
    """Weights (outputs, inputs) rounded to blocks (outputs, bytes), by the `gguf` library if it can do so. In K-quants
    all groups of a block share one scale and one minimum, so weights should be of one size."""
    if kind not in K_KINDS:
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    of = BLOCK_KINDS[kind]
    wide = values.reshape(-1, 256).astype(np.float64)
    blocks = np.zeros((len(wide), of.num_bytes), np.uint8)
    top = 2**of.bits - 1
    if kind == "Q6_K":
        d = (np.abs(wide).max(axis=1) / 31 / 100).astype(np.float16)
        integers = np.rint(wide / (d.astype(np.float64)[:, None] * 100)) + 32
        blocks[:, 192:208] = 100
        blocks[:, 208:] = d[:, None].view(np.uint8)
    else:
        low = np.minimum(wide.min(axis=1), 0)
        d = ((wide.max(axis=1) - low) / top / 50).astype(np.float16)
        dmin = (-low / 40).astype(np.float16)
        integers = np.rint((wide + dmin.astype(np.float64)[:, None] * 40) / (d.astype(np.float64)[:, None] * 50))
        blocks[:, :4] = np.stack([d, dmin], axis=1).view(np.uint8)
        blocks[:, 4:8], blocks[:, 8:12] = 50, 40
        blocks[:, 12:16] = 50 & 15 | (40 & 15) << 4
        blocks[:, 4:8] |= 50 >> 4 << 6
        blocks[:, 8:12] |= 40 >> 4 << 6
    q = np.clip(integers, 0, top).astype(np.uint8)
    if kind == "Q6_K":
        q = q.reshape(-1, 2, 2, 2, 32)  # 128 inputs, low or high halves, pair, inputs
        blocks[:, :128] = (q[:, :, 0] & 15 | (q[:, :, 1] & 15) << 4).reshape(-1, 128)
        high = q.reshape(-1, 2, 4, 32) >> 4
        blocks[:, 128:192] = np.bitwise_or.reduce([high[:, :, i] << 2 * i for i in range(4)]).reshape(-1, 64)
    else:
        pairs = q.reshape(-1, 4, 2, 32)
        blocks[:, -128:] = (pairs[:, :, 0] & 15 | (pairs[:, :, 1] & 15) << 4).reshape(-1, 128)
        if kind == "Q5_K":
            blocks[:, 16:48] = np.bitwise_or.reduce([(q.reshape(-1, 8, 32)[:, i] >> 4) << i for i in range(8)])
    return blocks.reshape(values.shape[0], -1)


def in_groups(w: jax.Array, *, kind: str) -> GroupedMatrix:
    """A matrix (outputs, inputs) rounded to a quantization type."""
    blocks = quantized(np.asarray(w, np.float32), kind).reshape(w.shape[0], -1, BLOCK_KINDS[kind].num_bytes)
    return GroupedMatrix(blocks=jnp.asarray(blocks), kind=kind, shape=(w.shape[0], w.shape[1]))

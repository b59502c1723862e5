"""MXFP4 tensors of safetensors checkpoints, widened while they are read.

A tensor NAME (X, I, O) is stored transposed as two: NAME_blocks (X, O, I / 32, 16) uint8, two values of E2M1 in a byte, low
nibble first, and NAME_scales (X, O, I / 32) uint8, the exponent, biased by 127, of each 32 values (OCP Microscaling
Formats, 2023).
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from apt_jax.errors import ModelLoadError
from apt_jax.models.loading.checkpoint import Checkpoint, TensorInfo, join_chunks

_BLOCKS, _SCALES = "_blocks", "_scales"
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1).view(np.uint64)[:, 0]
"""The two values of each byte, as one number of 64 bits."""


class Mxfp4Checkpoint:
    """A checkpoint with its MXFP4 tensors under their names without ``_blocks`` and ``_scales``.

    Raises:
        ModelLoadError: one of the two is missing or has another shape or dtype.
    """

    def __init__(self, stored: Checkpoint, path: Path) -> None:
        self._stored = stored
        self.tensors: dict[str, TensorInfo] = {}
        infos = stored.tensors
        for name, info in infos.items():
            base, is_blocks = name.removesuffix(_BLOCKS), name.endswith(_BLOCKS)
            if name.endswith(_SCALES) and (missing := name.removesuffix(_SCALES) + _BLOCKS) not in infos:
                raise ModelLoadError(f"{path}: tensor {name!r} has no {missing!r}; download the checkpoint again")
            if name.endswith(_SCALES):
                continue
            if not is_blocks:
                self.tensors[name] = info
                continue
            scales = infos.get(base + _SCALES)
            if scales is None:
                raise ModelLoadError(
                    f"{path}: tensor {name!r} has no {base + _SCALES!r}; download the checkpoint again"
                )
            is_packed = len(info.shape) == 4 and info.shape[-1] == 16 and scales.shape == info.shape[:-1]
            if not is_packed or {info.dtype, scales.dtype} != {"U8"}:
                raise ModelLoadError(
                    f"{path}: tensors {base!r:.80}: {_BLOCKS} {list(info.shape)} {info.dtype} and {_SCALES} "
                    f"{list(scales.shape)} {scales.dtype} are not MXFP4, U8 of [experts, outputs, blocks, 16] and "
                    "[experts, outputs, blocks]; use a checkpoint in bfloat16"
                )
            if base in infos:
                raise ModelLoadError(f"{path}: {name!r} and {base!r} are the same tensor")
            experts, outputs, blocks = scales.shape
            self.tensors[base] = dataclasses.replace(
                info, dtype="MXFP4", shape=(experts, 32 * blocks, outputs), num_bytes=info.num_bytes + scales.num_bytes
            )

    def read(self, name: str) -> np.ndarray:
        return join_chunks(self, name)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        if self.tensors[name].dtype != "MXFP4":
            yield from self._stored.chunks(name)
            return
        exponents = self._stored.read(name + _SCALES).reshape(-1)
        done = 0
        for codes in self._stored.chunks(name + _BLOCKS):  # whole blocks
            values = _PAIRS[codes].view(np.float32).reshape(-1, 32)
            own = exponents[done : done + len(values)]
            scales = np.ldexp(np.float32(1), np.minimum(own, 254).astype(np.int32) - 127)
            scales[own == 255] = np.nan  # E8M0 has no infinity
            with np.errstate(over="ignore"):  # infinite values are refused by the loader
                values *= scales[:, None]
            done += len(values)
            yield values.reshape(-1)

    def arrange(self, name: str, values: np.ndarray) -> np.ndarray:
        info = self.tensors[name]
        if info.dtype != "MXFP4":
            return self._stored.arrange(name, values)
        experts, inputs, outputs = info.shape
        return values.reshape(experts, outputs, inputs).swapaxes(1, 2)

    def close(self) -> None:
        self._stored.close()

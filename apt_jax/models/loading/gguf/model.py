"""Adapter that presents a GGUF file as the Hugging Face checkpoint that it was converted from: configuration, tensor
names, tensor layout.

llama.cpp's converter renames tensors (`names`) and changes some: it interleaves the rotary halves of q and k (llama),
adds one to norm weights (gemma), transposes matrices (gpt2) and stores fused q, k and v one after another instead of
head by head (gptneox, bloom). `GgufCheckpoint` undoes all of these and presents Hugging Face's names and values.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from apt_jax.errors import ModelLoadError
from apt_jax.models.loading.checkpoint import TensorInfo, join_chunks
from apt_jax.models.loading.gguf.fields import architecture_of, gguf_fields
from apt_jax.models.loading.gguf.file import GgufFile
from apt_jax.models.loading.gguf.names import ROPE_TENSORS, hf_name
from apt_jax.ops.blocks import BLOCK_KINDS


def _split_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of rotary rows: its pairs are neighbouring rows, Hugging Face's are half a head apart."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _by_head(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows from all q, all k, all v to q, k and v of each head in turn."""
    kinds = values.reshape(3, heads, -1, *values.shape[1:])
    return kinds.swapaxes(0, 1).reshape(values.shape)


class GgufCheckpoint:
    """The tensors of a GGUF file under Hugging Face's names and in Hugging Face's layout; see `checkpoint.Checkpoint`.

    Args:
        file: the open file; `close` closes it.
        fields: result of `gguf_fields`.
    """

    def __init__(self, file: GgufFile, fields: Mapping[str, Any]) -> None:
        self._file = file
        self._arch = architecture_of(file)
        self._heads = int(fields.get("num_attention_heads", fields.get("n_head", 1)))
        self._kv_heads = int(fields.get("num_key_value_heads", self._heads))
        self._inner: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in file.tensors.items():
            if name in ROPE_TENSORS:
                continue
            hf = hf_name(self._arch, name)
            if hf is None:
                raise ModelLoadError(
                    f"{file.path}: tensor {name!r:.80} does not belong to a model of architecture {self._arch}"
                )
            if hf in self._inner:
                raise ModelLoadError(f"{file.path}: {name!r:.80} and {self._inner[hf]!r:.80} are the same tensor")
            shape = tuple(reversed(info.shape)) if self._transposed(name) else info.shape
            self._inner[hf] = name
            self.tensors[hf] = dataclasses.replace(info, shape=shape)

    def _transposed(self, name: str) -> bool:
        """True for GPT-2's matrices, which are (in, out) in Hugging Face's files and (out, in) in GGUF files."""
        return self._arch == "gpt2" and bool(
            re.fullmatch(r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", name)
        )

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        inner = self._inner[name]
        add_one = self._arch in ("gemma", "gemma2", "gemma3") and inner.endswith("norm.weight")
        for chunk in self._file.chunks(inner):
            yield chunk - np.asarray(1, chunk.dtype) if add_one else chunk

    def is_grouped(self, name: str) -> bool:
        """True if `blocks` can return the tensor."""
        info = self.tensors[name]
        return info.dtype in BLOCK_KINDS and len(info.shape) == 2 and not self._transposed(self._inner[name])

    def blocks(self, name: str) -> np.ndarray:
        """Return the blocks of a matrix in the layout of `ops.weights.GroupedMatrix`, with outputs in Hugging Face's
        order.

        Raises:
            ModelLoadError: the file cannot be read, was truncated, or holds scales that are not finite.
        """
        blocks = self._file.blocks(self._inner[name])
        kind = BLOCK_KINDS[self.tensors[name].dtype]
        floats = blocks[..., kind.floats_at : kind.floats_at + 2 * kind.floats]
        if not np.isfinite(np.ascontiguousarray(floats).view(np.dtype("<f2"))).all():
            raise ModelLoadError(
                f"{self._file.path}: tensor {name!r} holds NaN or infinite values; the file is damaged"
            )
        return blocks[self._in_order(name, np.arange(blocks.shape[0]))]

    def arrange(self, name: str, values: np.ndarray) -> np.ndarray:
        inner = self._inner[name]
        values = self._in_order(name, values.reshape(self._file.tensors[inner].shape))
        return values.T if self._transposed(inner) else values

    def _in_order(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return the tensor with its rows in Hugging Face's order."""
        inner = self._inner[name]
        heads = 0
        if self._arch == "llama" and ".attn_q." in inner:
            heads = self._heads
        elif self._arch == "llama" and ".attn_k." in inner:
            heads = self._kv_heads
        if heads:
            self._divisible(name, values, 2 * heads)
            return _split_halves(values, heads)
        if self._arch in ("gptneox", "bloom") and ".attn_qkv." in inner:
            self._divisible(name, values, 3 * self._heads)
            return _by_head(values, self._heads)
        return values

    def _divisible(self, name: str, values: np.ndarray, parts: int) -> None:
        if values.shape[0] % parts:
            raise ModelLoadError(
                f"{self._file.path}: tensor {name!r:.80} has {values.shape[0]} rows, not a multiple of {parts}"
            )

    def read(self, name: str) -> np.ndarray:
        return join_chunks(self, name)

    def close(self) -> None:
        self._file.close()


def open_gguf(path: Path) -> tuple[GgufCheckpoint, dict[str, Any]]:
    """Open a GGUF file; return its checkpoint and its configuration fields.

    Raises:
        ModelLoadError: one line that names the file and its defect.
    """
    file = GgufFile(path)
    try:
        fields = gguf_fields(file)
        return GgufCheckpoint(file, fields), fields
    except BaseException:
        file.close()
        raise


__all__ = ["GgufCheckpoint", "open_gguf"]

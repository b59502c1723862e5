"""Models in Orbax format: tensors can be restored onto any devices, and each process reads only its shards.

    DIR/config.json, tokenizer files ...   as in Hugging Face format
    DIR/orbax.json                         manifest: tensors with their shapes and groups; marks the format
    DIR/weights/00000, 00001, ...          one Orbax checkpoint per group of at most about 1 GiB

Tensors keep the names and shapes of Hugging Face's files, so directories stay valid when the layout of parameters
changes. Groups limit the memory needed for writing, because Orbax writes a whole tree of arrays at once.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from apt_jax.errors import ModelLoadError, one_line
from apt_jax.models.loading.checkpoint import TensorInfo, read_json

MANIFEST = "orbax.json"
_WEIGHTS = "weights"
_VERSION = 1
DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""JAX's name of each dtype, keyed by its name in safetensors files."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_ELEMENTS = 2**21
_MAX_ELEMENTS = 2**40
_PIECE_BYTES = 2**24
"""Chunk size of a stored tensor in bytes: a device that needs a part of a chunk reads all of it."""


def _orbax(where: Path) -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ModelLoadError(
            f"{where}: Orbax directories need the extra 'orbax' (pip install 'apt-jax[orbax]')"
        ) from error
    return ocp


class OrbaxWriter:
    """Writer of groups of tensors to a directory; `finish` writes the manifest, without which the directory is not a
    valid model.

    Args:
        directory: existing directory; it may hold other files of the model.
    """

    def __init__(self, directory: Path) -> None:
        self._ocp = _orbax(directory)
        self._directory = directory
        self._groups: dict[str, dict[str, Any]] = {}

    def write(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Write one group."""
        group = f"{len(self._groups):05}"
        how = self._ocp.SaveArgs(chunk_byte_size=_PIECE_BYTES)
        with self._ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(
                self._directory.absolute() / _WEIGHTS / group,
                dict(tensors),
                save_args=dict.fromkeys(tensors, how),
            )
        self._groups[group] = {
            name: {"dtype": _NAMES[values.dtype.name], "shape": list(values.shape)} for name, values in tensors.items()
        }

    def finish(self) -> None:
        manifest = {"format": "apt-jax-orbax", "version": _VERSION, "groups": self._groups}
        (self._directory / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


class OrbaxCheckpoint:
    """The tensors of a directory in Orbax format; see `checkpoint.Checkpoint`.

    Raises:
        ModelLoadError: the manifest is damaged, a group is missing, or Orbax cannot read a tensor.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        manifest = read_json(path, MANIFEST)
        where = f"{path / MANIFEST}"
        if manifest.get("format") != "apt-jax-orbax" or manifest.get("version") != _VERSION:
            raise ModelLoadError(f"{where}: is not a manifest of version {_VERSION}")
        groups = manifest.get("groups")
        if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
            raise ModelLoadError(f"{where}: groups must map group names to tensors")
        self._ocp = _orbax(path)
        self.tensors: dict[str, TensorInfo] = {}
        for group, entries in groups.items():
            if not re.fullmatch(r"\d{5}", group) or not self._group(group).is_dir():
                raise ModelLoadError(f"{where}: group {group!r:.40} is missing in {_WEIGHTS}/")
            if self._group(group).resolve().parent.parent != path.resolve():
                raise ModelLoadError(f"{where}: group {group!r:.40} is a link out of the directory")
            for index, (name, entry) in enumerate(entries.items()):
                if name in self.tensors:
                    raise ModelLoadError(f"{where}: tensor {name!r:.80} is in two groups")
                self.tensors[name] = _info(name, entry, group, index, where)
        self._checkpointer = self._ocp.PyTreeCheckpointer()

    def _group(self, group: str) -> Path:
        return self._path / _WEIGHTS / group

    def _restore(self, name: str, how: Any, **kwargs: Any) -> Any:
        info = self.tensors[name]
        try:
            restored = self._checkpointer.restore(
                self._group(info.file).absolute(),
                args=self._ocp.args.PyTreeRestore(
                    item={name: 0}, restore_args={name: how(**kwargs)}, partial_restore=True
                ),
            )[name]
        except Exception as error:  # of Orbax, TensorStore, the operating system
            raise ModelLoadError(
                f"{self._path}: tensor {name!r:.80} cannot be restored ({type(error).__name__}: {one_line(str(error)):.120})"
            ) from None
        if restored.shape != info.shape or restored.dtype.name != DTYPES[info.dtype]:
            raise ModelLoadError(
                f"{self._path}: tensor {name!r:.80} is {restored.dtype} {list(restored.shape)}, not as {MANIFEST} says"
            )
        return restored

    def read(self, name: str) -> np.ndarray:
        return self._restore(name, self._ocp.RestoreArgs, restore_type=np.ndarray)

    def read_sharded(self, name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        """Restore a tensor in its stored dtype onto `sharding`; each process reads only its shards."""
        return self._restore(
            name,
            self._ocp.ArrayRestoreArgs,
            sharding=sharding,
            global_shape=self.tensors[name].shape,
        )

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        values = self.read(name).reshape(-1)
        for start in range(0, values.size, _CHUNK_ELEMENTS):
            yield values[start : start + _CHUNK_ELEMENTS]

    def arrange(self, name: str, values: np.ndarray) -> np.ndarray:
        return values.reshape(self.tensors[name].shape)

    def close(self) -> None:
        self._checkpointer.close()


def _info(name: str, entry: Any, group: str, index: int, where: str) -> TensorInfo:
    dtype, shape = (entry.get(k) for k in ("dtype", "shape")) if isinstance(entry, dict) else (None, None)
    if (
        not isinstance(dtype, str)
        or dtype not in DTYPES
        or not isinstance(shape, list)
        or len(shape) > 8
        or not all(type(n) is int and 0 <= n < _MAX_ELEMENTS for n in shape)
        or math.prod(shape) > _MAX_ELEMENTS
    ):
        raise ModelLoadError(f"{where}: tensor {name!r:.80} has an impossible dtype or shape")
    num_bytes = math.prod(shape) * (4 if dtype == "F32" else 2)
    return TensorInfo(group, dtype, tuple(shape), index, num_bytes)


__all__ = ["DTYPES", "MANIFEST", "OrbaxCheckpoint", "OrbaxWriter"]

"""Conversion of a model's files from any readable format to Orbax or safetensors.

The new directory is written under a temporary name next to its final path and renamed when it is complete, so that an
incomplete model never appears under the final name.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

from apt_jax.errors import ModelLoadError
from apt_jax.models.loading.checkpoint import Checkpoint
from apt_jax.models.loading.loader import open_weights, read_cast
from apt_jax.models.loading.orbax_format import OrbaxWriter
from apt_jax.models.loading.resolve import resolve_model

ConvertFormat = Literal["orbax", "safetensors"]

_GROUP_BYTES = 2**30
_COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_NAMES = {
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float32): "F32",
}
_STORED = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}


@runtime_checkable  # the suite checks annotations at run time
class _Writer(Protocol):
    def write(self, tensors: Mapping[str, np.ndarray]) -> None: ...

    def finish(self) -> None: ...


class _SafetensorsWriter:
    """Writer of one safetensors file per group, and of an index if there are several."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._groups: list[tuple[Path, list[str], int]] = []

    def write(self, tensors: Mapping[str, np.ndarray]) -> None:
        path = self._directory / f"{len(self._groups):05}.part"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, values in tensors.items():
            header[name] = {
                "dtype": _NAMES[values.dtype],
                "shape": list(values.shape),
                "data_offsets": [end, end + values.nbytes],
            }
            end += values.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for values in tensors.values():
                file.write(memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8)))
            file.flush()
            os.fsync(file.fileno())
        self._groups.append((path, list(tensors), end))

    def finish(self) -> None:
        count = len(self._groups)
        if count == 1:
            self._groups[0][0].rename(self._directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, (path, names, _) in enumerate(self._groups, 1):
            file = f"model-{number:05}-of-{count:05}.safetensors"
            path.rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        total = sum(size for *_, size in self._groups)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(index))


_WRITERS: dict[str, Callable[[Path], _Writer]] = {
    "orbax": OrbaxWriter,
    "safetensors": _SafetensorsWriter,
}


def convert_model(
    source: str,
    target: Path,
    *,
    format: ConvertFormat = "orbax",
    dtype: str | None = None,
    load_format: str = "auto",
    use_tqdm: bool = True,
) -> dict[str, Any]:
    """Write the model `source` to the new directory `target`.

    Args:
        source: name of the model, for `resolve_model`.
        target: directory to create; it must not exist.
        format: format to write.
        dtype: dtype of the written weights; None: the stored dtype, or bfloat16 for quantized weights.
        load_format: format of the source; see `EngineConfig`.
        use_tqdm: show a progress bar on terminals.

    Returns:
        The path, the format, and the numbers of tensors and bytes written, as a dictionary.

    Raises:
        ModelLoadError: the source cannot be read, or the target exists or cannot be written.
    """
    resolved = resolve_model(source, offer_preset=False)
    if os.path.lexists(target):
        raise ModelLoadError(f"{target}: exists already; nothing is overwritten")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise ModelLoadError(f"{target}: cannot be written ({error.strerror or error})") from error
    try:
        with open_weights(resolved, load_format) as checkpoint:
            writer = _WRITERS[format](work)
            tensors, written = _write(checkpoint, writer, dtype, resolved.path or target, use_tqdm)
        _write_json(work / "config.json", _fields(resolved.fields, dtype))
        _copy_files(resolved.path, work)
        writer.finish()
        work.chmod(0o755)
        if os.path.lexists(target):  # rename would replace an empty directory
            raise ModelLoadError(f"{target}: exists already; nothing is overwritten")
        work.rename(target)
    except OSError as error:
        raise ModelLoadError(f"{target}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)  # already renamed if all went well
    return {"path": str(target), "format": format, "tensors": tensors, "bytes": written}


def _write(checkpoint: Checkpoint, writer: _Writer, dtype: str | None, path: Path, use_tqdm: bool) -> tuple[int, int]:
    """Write all tensors; return the number of tensors and the number of bytes."""
    names = sorted(checkpoint.tensors, key=lambda n: (checkpoint.tensors[n].file, checkpoint.tensors[n].start))
    total = sum(info.num_bytes for info in checkpoint.tensors.values())
    written = 0
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="converting",
        disable=None if use_tqdm else True,
    ) as bar:
        for group in _groups(checkpoint, names, dtype):
            tensors = {}
            for name, wanted in group.items():
                tensors[name] = np.ascontiguousarray(read_cast(checkpoint, name, wanted, path))
                written += tensors[name].nbytes
                bar.update(checkpoint.tensors[name].num_bytes)
            writer.write(tensors)
    return len(names), written


def _groups(checkpoint: Checkpoint, names: list[str], dtype: str | None) -> Iterator[dict[str, np.dtype[Any]]]:
    """Yield groups of tensors with their dtypes, at most about 1 GiB per group; at least one group."""
    group: dict[str, np.dtype[Any]] = {}
    size = 0
    for name in names:
        info = checkpoint.tensors[name]
        stored = info.dtype
        default = jnp.float32 if stored in ("F32", "F64") else _STORED.get(stored, ml_dtypes.bfloat16)
        wanted = np.dtype(jnp.dtype(dtype or default))
        num_bytes = int(np.prod(info.shape)) * wanted.itemsize
        if group and size + num_bytes > _GROUP_BYTES:
            yield group
            group, size = {}, 0
        group[name] = wanted
        size += num_bytes
    yield group


def _fields(fields: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    kept = {name: value for name, value in fields.items() if name != "quantization_config"}
    return kept if dtype is None else kept | {"torch_dtype": dtype}


def _copy_files(source: Path | None, target: Path) -> None:
    """Copy tokenizer, chat template and generation settings, if the source has them."""
    if source is None:
        return
    if source.is_file():
        from apt_jax.models.loading.gguf.file import GgufFile
        from apt_jax.models.loading.gguf.tokenizer import gguf_tokenizer_files

        with contextlib.closing(GgufFile(source)) as file:
            for name, text in gguf_tokenizer_files(file).items():
                (target / name).write_text(text, encoding="utf-8")
        return
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


__all__ = ["ConvertFormat", "convert_model"]

"""Checkpoint files on disk: which tensors they hold, and the values of one tensor at a time.

`open_checkpoint` finds the files of a model directory and checks everything that can be checked without reading
weights: names, sizes, offsets, duplicates. `Checkpoint.read` then returns one tensor.

The safetensors format is read here rather than through its library for two reasons: the library maps files into memory,
where truncating a file during a read kills the process (SIGBUS), and it accepts a header that names a tensor twice. The
format: 8 bytes little-endian header length, a JSON header of dtype, shape and byte range per tensor, then the data,
which the ranges must cover without gap or overlap.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from apt_jax.errors import ModelLoadError, counted, json_kind, one_line
from apt_jax.utils.json_memory import MAX_JSON_BYTES, check_json_memory

_MAX_ELEMENTS = 2**48
_CHUNK_BYTES = 4 * 2**20  # a multiple of every element size

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PT_SINGLE_FILE = "pytorch_model.bin"
PT_INDEX_FILE = "pytorch_model.bin.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

_BYTES_PER_ELEMENT = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_WEIGHT_DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_QUANTISED = re.compile(r"(I?Q|TQ|MXFP|NVFP)\d\w*")  # block types of GGUF files


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Metadata of one stored tensor."""

    file: str
    """File name inside the model directory."""
    dtype: str
    """Dtype name of the safetensors format (``F32``, ``BF16``, ...), or the quantization type of a GGUF file
    (``Q4_K``)."""
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file, or index of the tensor if the format has no offsets; tensors are read in this order."""
    num_bytes: int


@runtime_checkable  # the suite checks annotations at run time
class Checkpoint(Protocol):
    """The tensors of a model directory."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by their names in the file."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as a new array, in the stored dtype or, if the values are quantized, in float32.

        Raises:
            ModelLoadError: the file cannot be read or was truncated.
        """
        ...

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Yield the values of a tensor in the order of the file, as flat arrays of a few MiB (PyTorch files: as one
        array).

        Raises:
            ModelLoadError: see `read`.
        """
        ...

    def arrange(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return `values`, the joined pieces of `chunks` in any dtype, in the tensor's order and shape; possibly as a
        view."""
        ...

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        ...


def join_chunks(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Implement `Checkpoint.read`: concatenate the pieces from `Checkpoint.chunks`, then shape them with `arrange`."""
    values, done = np.empty(0, np.float32), 0
    for chunk in checkpoint.chunks(name):
        if not done:
            values = np.empty(math.prod(checkpoint.tensors[name].shape), chunk.dtype.newbyteorder("="))
        values[done : done + chunk.size] = chunk
        done += chunk.size
    return checkpoint.arrange(name, values)


def format_names(names: Iterable[str], most: int = 3) -> str:
    """Format the first `most` names and the number of further names."""
    names = list(names)
    shown = ", ".join(f"{one_line(name):.80}" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def is_weight_dtype(info: TensorInfo) -> bool:
    """True if weights can have the stored dtype: floating point, or quantized blocks."""
    return info.dtype in _WEIGHT_DTYPES or _QUANTISED.fullmatch(info.dtype) is not None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ModelLoadError(f"the key {twice!r:.80} occurs twice")
    return result


def _parse_json(text: bytes, where: str, allowance: int = 0) -> dict[str, Any]:
    check_json_memory(text, where, allowance=allowance)

    def refuse_constant(token: str) -> float:
        raise ValueError(f"{token} is not JSON")

    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_refuse_duplicates,
            parse_constant=refuse_constant,
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{where}: {error}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # undecodable bytes, bad syntax, huge integers, deep nesting
        raise ModelLoadError(f"{where}: not valid JSON ({type(error).__name__}: {one_line(str(error)):.120})") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{where}: must hold a JSON object, not {json_kind(value)}")
    return value


def file_inside(directory: Path, name: str, named_by: str = "") -> Path:
    """Return the path of a file that must lie directly in `directory`; `named_by` is the source of the name, for error
    messages.

    Raises:
        ModelLoadError: the path would be outside `directory` or in a subdirectory.
    """
    # A file cannot have half a surrogate pair in its name, nor more than 255 bytes.
    wrong = not name or name in (".", "..") or any(c in "/\\\0" or "\ud800" <= c <= "\udfff" for c in name)
    if wrong or len(name.encode()) > 255:
        raise ModelLoadError(f"{named_by or directory}: {name!r:.80} must be the name of a file in the same directory")
    path = directory / name
    try:
        home, target = directory.resolve(strict=True), path.resolve()
    except (
        OSError,
        RuntimeError,
    ) as error:  # RuntimeError: a loop of symlinks, in older versions of Python
        raise ModelLoadError(f"{path}: cannot be resolved ({error})") from error
    # The Hugging Face cache keeps snapshots/<revision>/<file> as links to blobs/<hash>.
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if target.parent not in allowed:
        raise ModelLoadError(f"{path}: is a link out of the model directory, which is refused")
    return path


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file of the model directory.

    Raises:
        ModelLoadError: the file is missing, unreadable, larger than 32 MiB, too large in memory, or not a JSON object,
            or a key occurs twice.
    """
    path = file_inside(directory, name, str(directory))
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(text) > MAX_JSON_BYTES:
        raise ModelLoadError(f"{path}: larger than {MAX_JSON_BYTES} bytes, the limit for a JSON file")
    return _parse_json(text, str(path), allowance=len(text))


def _tensor_info(name: str, entry: Any, path: Path) -> TensorInfo:
    where = f"{path}: tensor {name!r:.80}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelLoadError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BYTES_PER_ELEMENT:
        raise ModelLoadError(f"{where} has the unknown dtype {dtype!r:.40}")
    if (
        not isinstance(shape, list)
        or len(shape) > 16
        or not all(type(n) is int and 0 <= n < _MAX_ELEMENTS for n in shape)
    ):
        raise ModelLoadError(f"{where} has the shape {shape!r:.80}, which is not a list of sizes")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(n) is int and 0 <= n < 2**63 for n in offsets)
    ):
        raise ModelLoadError(f"{where} has data_offsets {offsets!r:.80}, which are not two byte offsets")
    start, end = offsets
    num_bytes = math.prod(shape) * _BYTES_PER_ELEMENT[dtype]
    if end - start != num_bytes:
        raise ModelLoadError(f"{where} spans {end - start} bytes, but {dtype} of shape {shape!r:.80} takes {num_bytes}")
    return TensorInfo(path.name, dtype, tuple(shape), start, num_bytes)


def _read_header(file: io.FileIO, path: Path) -> dict[str, TensorInfo]:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ModelLoadError(f"{path}: a file of {size} bytes is too short for a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > MAX_JSON_BYTES:
        raise ModelLoadError(
            f"{path}: claims a header of {length} bytes, more than {MAX_JSON_BYTES}; not a safetensors file"
        )
    if 8 + length > size:
        raise ModelLoadError(f"{path}: cut off within its header ({size} bytes of at least {8 + length})")
    header = _parse_json(file.read(length), f"{path}: header", allowance=2 * (size - length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelLoadError(f"{path}: __metadata__ must map strings to strings")
    infos = {name: _tensor_info(name, entry, path) for name, entry in header.items()}
    end = 0
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if info.start != end:
            kind = "leaves a gap before" if info.start > end else "overlaps with"
            raise ModelLoadError(
                f"{path}: the data of another tensor {kind} {name!r:.80} (at byte {info.start}, not {end})"
            )
        end = info.start + info.num_bytes
    expected = 8 + length + end
    if expected != size:
        state = "cut off" if size < expected else "followed by bytes that belong to no tensor"
        raise ModelLoadError(f"{path}: {state} ({size} bytes, its header describes {expected})")
    return {name: dataclasses.replace(info, start=8 + length + info.start) for name, info in infos.items()}


def open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe of this name would block until somebody writes to it


def read_bytes(file: io.FileIO, start: int, count: int) -> np.ndarray | None:
    """Read exactly `count` bytes from offset `start`; None: the file is shorter."""
    data = np.empty(count, np.uint8)
    file.seek(start)
    done = 0
    while done < count:
        got = file.readinto(memoryview(data)[done:])
        if not got:
            return None
        done += got
    return data


class SafetensorsCheckpoint:
    """One or several safetensors files, read without mapping them into memory."""

    def __init__(self, paths: list[Path]) -> None:
        self._files: dict[str, io.FileIO] = {}
        self._paths = {path.name: path for path in paths}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            for path in paths:
                self._add(path)
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path) -> None:
        try:
            # Unbuffered: a tensor goes straight into its array.
            file = open(path, "rb", buffering=0, opener=open_without_waiting)  # noqa: SIM115  # closed by close()
            self._files[path.name] = file
            infos = _read_header(file, path)
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read ({error.strerror or error})") from error
        for name, info in infos.items():
            if name in self.tensors:
                raise ModelLoadError(f"{path}: tensor {name!r:.80} is in {self.tensors[name].file} too")
            self.tensors[name] = info

    def read(self, name: str) -> np.ndarray:
        return join_chunks(self, name)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        info = self.tensors[name]
        file, path = self._files[info.file], self._paths[info.file]
        done = 0
        try:
            while done < info.num_bytes:
                piece = read_bytes(file, info.start + done, min(_CHUNK_BYTES, info.num_bytes - done))
                if piece is None:
                    raise ModelLoadError(f"{path}: was truncated while it was being read (at {name!r:.80})")
                done += piece.size
                yield piece if info.dtype == "U8" else piece.view(_WEIGHT_DTYPES[info.dtype])
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read ({error.strerror or error})") from error

    def arrange(self, name: str, values: np.ndarray) -> np.ndarray:
        return values.reshape(self.tensors[name].shape)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class TorchCheckpoint:
    """PyTorch's pickled files, loaded with `weights_only`, which allows only tensors. All of them are held in host
    memory."""

    def __init__(self, paths: list[Path]) -> None:
        try:
            import torch  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ModelLoadError(
                "load_format 'pt' needs PyTorch (pip install torch), or convert the model to safetensors"
            ) from error
        self._torch = torch
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for path in paths:
            self._add(path)

    def _add(self, path: Path) -> None:
        torch = self._torch
        names = {
            torch.float16: "F16",
            torch.bfloat16: "BF16",
            torch.float32: "F32",
            torch.float64: "F64",
        }
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle may raise anything
            raise ModelLoadError(
                f"{path}: not a PyTorch weights file ({type(error).__name__}: {one_line(str(error)):.120})"
            ) from error
        if not isinstance(state, dict):
            raise ModelLoadError(f"{path}: holds {type(state).__name__}, not a dictionary of tensors")
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise ModelLoadError(f"{path}: the entry {name!r:.80} is not a tensor")
            if name in self.tensors:
                raise ModelLoadError(f"{path}: tensor {name!r:.80} is in {self.tensors[name].file} too")
            num_bytes = value.numel() * value.element_size()
            dtype = names.get(value.dtype, str(value.dtype))
            self.tensors[name] = TensorInfo(path.name, dtype, tuple(value.shape), len(self.tensors), num_bytes)
            self._values[name] = value

    def read(self, name: str) -> np.ndarray:
        value = self._values[name].contiguous()
        if self.tensors[name].dtype == "BF16":  # NumPy itself has no such dtype
            return value.view(self._torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
        return value.numpy().copy()

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        yield self.read(name).reshape(-1)

    def arrange(self, name: str, values: np.ndarray) -> np.ndarray:
        return values.reshape(self.tensors[name].shape)

    def close(self) -> None:
        self._values.clear()


def _shards(directory: Path, index_name: str) -> list[Path]:
    index = read_json(directory, index_name)
    weight_map = index.get("weight_map")
    where = directory / index_name
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{where}: weight_map must map tensor names to files")
    names = list(weight_map.values())
    if not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"{where}: weight_map must map tensor names to files")
    paths = [file_inside(directory, name, str(where)) for name in sorted(set(names))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise ModelLoadError(
            f"{where}: of {counted(len(paths), 'shard')} {len(missing)} {are} missing: {format_names(missing)}"
        )
    return paths


def _check_index(directory: Path, index_name: str, checkpoint: Checkpoint) -> None:
    weight_map: dict[str, str] = read_json(directory, index_name)["weight_map"]
    stored = {name: info.file for name, info in checkpoint.tensors.items()}
    if weight_map != stored:
        wrong = sorted(name for name in weight_map.keys() | stored.keys() if weight_map.get(name) != stored.get(name))
        raise ModelLoadError(
            f"{directory / index_name}: has no file or a wrong file for these tensors: {format_names(wrong)}"
        )


@contextlib.contextmanager
def open_checkpoint(directory: Path, *, allow_pickle: bool, offer_dummy: bool = False) -> Iterator[Checkpoint]:
    """Open the weights of a model directory, after all checks that need only the files' headers.

    Args:
        allow_pickle: open PyTorch's files, and only these. If false, they are never opened, even if the directory has
            no other weights.
        offer_dummy: let the message about missing weights suggest random ones.

    Raises:
        ModelLoadError: there are no weights, shards are missing, or a file is damaged or contradicts the index.
    """
    single, index = (PT_SINGLE_FILE, PT_INDEX_FILE) if allow_pickle else (SINGLE_FILE, INDEX_FILE)
    try:
        present = sorted(os.listdir(directory))
    except OSError as error:
        raise ModelLoadError(f"{directory}: cannot be read ({error.strerror or error})") from error
    if single in present:
        paths, index_name = [file_inside(directory, single, str(directory))], None
    elif index in present:
        paths, index_name = _shards(directory, index), index
    else:
        pickles = [name for name in present if name.endswith(_PICKLE_SUFFIXES)]
        if pickles and not allow_pickle:
            raise ModelLoadError(
                f"{directory}: has only pickled weights ({format_names(pickles)}), which can run code when opened; convert them to "
                f"safetensors, or pass --load-format pt to load tensors from {PT_SINGLE_FILE}"
            )
        hint = "; give a directory with weights, or run with random ones (--load-format dummy)" if offer_dummy else ""
        raise ModelLoadError(f"{directory}: has neither {single} nor {index}{hint}")
    checkpoint = TorchCheckpoint(paths) if allow_pickle else SafetensorsCheckpoint(paths)
    try:
        if index_name is not None:
            _check_index(directory, index_name, checkpoint)
        yield checkpoint
    finally:
        checkpoint.close()


__all__ = [
    "Checkpoint",
    "SafetensorsCheckpoint",
    "TensorInfo",
    "TorchCheckpoint",
    "file_inside",
    "format_names",
    "is_weight_dtype",
    "join_chunks",
    "open_checkpoint",
    "open_without_waiting",
    "read_bytes",
    "read_json",
]

"""The GGUF container: metadata and tensors of one file, read without mapping it into memory, with every field checked
before it is used.

    header      magic "GGUF", version, number of tensors, number of metadata entries
    metadata    key, type, value; arrays and strings carry their lengths
    tensors     name, sizes (fastest first), quantization type, offset into the data
    data        aligned blocks

The `gguf` library defines the quantization types and dequantizes blocks. Its reader is not used: it trusts every count
in the file, and it maps the file into memory, where truncating the file during a read kills the process.
"""

import dataclasses
import io
import math
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from apt_jax.errors import ModelLoadError, one_line
from apt_jax.models.loading.checkpoint import TensorInfo, open_without_waiting, read_bytes

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_METADATA_BYTES = 256 * 2**20  # the largest vocabularies take 20 MiB
_TEXT_BYTES = 40 * 2**20
"""Bytes of memory allowed for names and strings, in addition to twice the size of the file."""
_TEXT_OVERHEAD = 32
"""Bytes of memory per string in a list, in addition to its `sys.getsizeof`."""
_MOST_TEXT_BYTES = 512 * 2**20
_MAX_ENTRIES = 2**16
_MAX_TENSORS = 2**17
_MAX_ARRAY = 2**22  # the largest vocabularies have under a million tokens and merges
_MAX_NAME_BYTES = 2**16
_MAX_DIMS = 4
_MAX_ELEMENTS = 2**40
_CHUNK_BYTES = 2 * 2**20  # of float32 values made at a time

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Stored:
    """One tensor as described by the file."""

    info: TensorInfo
    """Metadata of the tensor, with the slowest axis of the shape first."""
    quant: int
    block_elements: int
    block_bytes: int


class _Cursor:
    """Reader of the metadata part of a file, front to back; every length is checked against the bytes left."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self._file, self._left, self._where = file, size, where
        self.offset = 0
        self._text_bytes, self._most_text_bytes = 0, min(_TEXT_BYTES + 2 * size, _MOST_TEXT_BYTES)

    def bytes(self, count: int, what: str) -> bytes:
        if count > min(self._left, _MAX_METADATA_BYTES - self.offset):
            state = "cut off" if count > self._left else "too large for a header"
            raise ModelLoadError(f"{self._where}: {state} at {what}")
        data = self._file.read(count)
        if len(data) != count:
            raise ModelLoadError(f"{self._where}: was truncated while it was being read (at {what})")
        self.offset += count
        self._left -= count
        return data

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code), what))[0]

    def text(self, what: str, most: int = _MAX_METADATA_BYTES) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > most:
            raise ModelLoadError(f"{self._where}: {what} claims {length} bytes")
        try:
            text = self.bytes(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise ModelLoadError(f"{self._where}: {what} is not UTF-8") from None
        self._text_bytes += sys.getsizeof(text) + _TEXT_OVERHEAD
        if self._text_bytes > self._most_text_bytes:
            raise ModelLoadError(
                f"{self._where}: its strings take more than {self._most_text_bytes >> 20} MiB of memory (at {what})"
            )
        return text

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind in _SCALARS:
            value = self.number(_SCALARS[kind], what)
            return bool(value) if kind == _BOOL else value
        if kind != _ARRAY:
            raise ModelLoadError(f"{self._where}: {what} has the unknown type {kind}")
        inner = self.number("I", f"the type of {what}")
        count = self.number("Q", f"the length of {what}")
        if inner not in _SCALARS and inner != _STRING:
            raise ModelLoadError(f"{self._where}: {what} is an array of the unknown type {inner}")
        if count > _MAX_ARRAY:
            raise ModelLoadError(f"{self._where}: {what} claims {count} values")
        if inner == _STRING:
            return self._strings(count, what)
        size = struct.calcsize("<" + _SCALARS[inner])
        values = np.frombuffer(self.bytes(count * size, what), np.dtype("<" + _SCALARS[inner]))
        return values.astype(np.bool_) if inner == _BOOL else values

    def _strings(self, count: int, what: str) -> list[str]:
        if count * 8 > self._left:
            raise ModelLoadError(f"{self._where}: cut off at {what}")
        return [self.text(f"{what}[{index}]", _MAX_NAME_BYTES) for index in range(count)]


class GgufFile:
    """One open GGUF file.

    Attributes:
        path: path of the file.
        metadata: metadata values (numbers, strings, lists of strings, NumPy arrays), keyed by name.
        tensors: metadata of each tensor by its name in the file; shapes have the slowest axis first, and `dtype` is the
            quantization, such as ``Q4_K``.

    Raises:
        ModelLoadError: one line that names the file and the key or tensor that is wrong.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ModelLoadError(f"{path}: GGUF files need the package gguf (pip install gguf)") from error
        self._gguf = gguf
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._stored: dict[str, _Stored] = {}
        self._file: io.FileIO | None = None
        try:
            # Unbuffered: a piece of a tensor goes straight into its array.
            self._file = open(path, "rb", buffering=0, opener=open_without_waiting)  # noqa: SIM115  # closed by close()
            self._read_header(self._file)
        except OSError as error:
            self.close()
            raise ModelLoadError(f"{path}: cannot be read ({error.strerror or error})") from error
        except BaseException:
            self.close()
            raise

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: stored.info for name, stored in self._stored.items()}

    def _read_header(self, file: io.FileIO) -> None:
        size = os.fstat(file.fileno()).st_size
        buffered = io.BufferedReader(file, 2**20)
        try:
            self._parse(_Cursor(buffered, size, str(self.path)), size)
        finally:
            buffered.detach()  # the file itself stays open

    def _parse(self, cursor: _Cursor, size: int) -> None:
        if size < 24 or cursor.bytes(4, "the magic") != _MAGIC:
            raise ModelLoadError(f"{self.path}: is not a GGUF file ({size} bytes)")
        version = cursor.number("I", "the version")
        if version not in _VERSIONS:
            swapped = version and version & 0xFFFF == 0
            raise ModelLoadError(
                f"{self.path}: big-endian GGUF files are not supported"
                if swapped
                else f"{self.path}: GGUF version {version}; versions 2 and 3 are supported"
            )
        num_tensors = cursor.number("Q", "the number of tensors")
        num_entries = cursor.number("Q", "the number of metadata entries")
        if num_tensors > _MAX_TENSORS or num_entries > _MAX_ENTRIES:
            raise ModelLoadError(f"{self.path}: claims {num_tensors} tensors and {num_entries} metadata entries")
        for _ in range(num_entries):
            key = cursor.text("a metadata key", _MAX_NAME_BYTES)
            what = f"metadata {one_line(key):.80}"
            if key in self.metadata:
                raise ModelLoadError(f"{self.path}: {what} occurs twice")
            self.metadata[key] = cursor.value(cursor.number("I", f"the type of {what}"), what)
        described = [self._describe(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise ModelLoadError(f"{self.path}: metadata general.alignment={alignment!r:.40} must be a power of two")
        start = -(-cursor.offset // alignment) * alignment
        end, last = start, ""
        for name, stored in sorted(described, key=lambda item: (item[1].info.start, item[1].info.num_bytes)):
            where = f"{self.path}: tensor {name!r:.80}"
            info = dataclasses.replace(stored.info, start=start + stored.info.start)
            if info.start % alignment:
                raise ModelLoadError(f"{where} does not begin at a multiple of {alignment} bytes")
            if info.start < end:
                raise ModelLoadError(f"{where} overlaps with {last!r:.80}")
            end, last = info.start + info.num_bytes, name
            if end > size:
                raise ModelLoadError(f"{where} ends at byte {end}, but the file has {size}; it is cut off")
            self._stored[name] = dataclasses.replace(stored, info=info)

    def _describe(self, cursor: _Cursor) -> tuple[str, _Stored]:
        name = cursor.text("a tensor's name", _MAX_NAME_BYTES)
        where = f"tensor {one_line(name)!r:.80}"
        if name in self._stored:
            raise ModelLoadError(f"{self.path}: {where} occurs twice")
        num_dims = cursor.number("I", f"the sizes of {where}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ModelLoadError(f"{self.path}: {where} has {num_dims} dimensions")
        sizes = [cursor.number("Q", f"the sizes of {where}") for _ in range(num_dims)]
        quant = cursor.number("I", f"the type of {where}")
        offset = cursor.number("Q", f"the offset of {where}")
        if math.prod(sizes) > _MAX_ELEMENTS or 0 in sizes:
            raise ModelLoadError(f"{self.path}: {where} has the impossible sizes {sizes}")
        known = {int(kind): kind for kind in self._gguf.GGML_QUANT_SIZES}
        if quant not in known:
            raise ModelLoadError(f"{self.path}: {where} has the unknown quantisation type {quant}")
        block_elements, block_bytes = self._gguf.GGML_QUANT_SIZES[known[quant]]
        if sizes[0] % block_elements:
            raise ModelLoadError(
                f"{self.path}: {where} has rows of {sizes[0]}, which {known[quant].name} cannot hold in blocks of {block_elements}"
            )
        num_bytes = math.prod(sizes) // block_elements * block_bytes
        info = TensorInfo(self.path.name, known[quant].name, tuple(reversed(sizes)), offset, num_bytes)
        stored = _Stored(info, quant, block_elements, block_bytes)
        self._stored[name] = stored  # to find duplicates; set again when the offset in the file is known
        return name, stored

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Yield the values of a tensor as consecutive flat pieces, in float32 if it is quantized, otherwise in the
        stored dtype.

        Raises:
            ModelLoadError: the file cannot be read or was truncated, or its quantization is not supported.
        """
        stored = self._stored[name]
        info, kind = stored.info, self._gguf.GGMLQuantizationType(stored.quant)
        plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(info.dtype)
        num_blocks = info.num_bytes // stored.block_bytes
        step = max(1, _CHUNK_BYTES // (4 * stored.block_elements))
        try:
            for first in range(0, num_blocks, step):
                count = min(step, num_blocks - first)
                assert self._file is not None
                data = read_bytes(self._file, info.start + first * stored.block_bytes, count * stored.block_bytes)
                if data is None:
                    raise ModelLoadError(f"{self.path}: was truncated while it was being read (at {name!r:.80})")
                if plain is not None:
                    yield data.view(np.dtype(plain).newbyteorder("<"))
                else:
                    # As one row: with a row per block, gguf computes sixteen blocks at a time, which takes ten times as
                    # long. Damaged blocks may hold infinite scales; the loader checks the resulting values.
                    with np.errstate(all="ignore"):
                        yield self._gguf.quants.dequantize(data.reshape(1, -1), kind).reshape(-1)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        except NotImplementedError:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r:.80} is quantised as {info.dtype}, which is not supported"
            ) from None

    def blocks(self, name: str) -> np.ndarray:
        """Return the stored bytes of a quantized matrix, (rows, blocks per row, bytes per block).

        Raises:
            ModelLoadError: the file cannot be read or was truncated.
        """
        stored = self._stored[name]
        info = stored.info
        try:
            assert self._file is not None
            data = read_bytes(self._file, info.start, info.num_bytes)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        if data is None:
            raise ModelLoadError(f"{self.path}: was truncated while it was being read (at {name!r:.80})")
        return data.reshape(info.shape[0], -1, stored.block_bytes)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


__all__ = ["GgufFile"]

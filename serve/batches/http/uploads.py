"""Uploads of files as ``multipart/form-data``, written to disk as they arrive.

An upload holds at most one received piece and one write buffer in memory. There are also limits on the size of the
file, of each other field and of the whole form, on the number of fields and on the time.
"""

import asyncio
import dataclasses
import tempfile
from pathlib import Path
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from apt_jax.errors import InvalidRequestError
from serve.batches.config import FLAG, MAX_FILENAME_CHARS, BatchConfig
from serve.http_api.calls import CLOSE_HEADERS
from serve.http_api.errors import BadCallError

_MAX_FIELDS = 8
_MAX_FIELD_BYTES = 1024
_MAX_HEADER_BYTES = 4096
"""Maximum size of the headers of one part."""
_OVERHEAD_BYTES = 64 << 10
"""Maximum size of a form without its file."""
_WRITE_BYTES = 256 << 10


@dataclasses.dataclass(kw_only=True)
class Form:
    """The fields of an upload."""

    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    filename: str = ""
    path: Path | None = None
    """Path of the written file content; None if the form has no file."""
    num_bytes: int = 0


async def read_form(request: Request, directory: Path, config: BatchConfig, timeout_s: float) -> Form:
    """Read a form and write its field `file` to a new file in `directory`, which the caller must move or remove.

    Args:
        request: the HTTP request.
        directory: where the new file is created.
        config: limits of uploads.
        timeout_s: time limit in seconds, extended by the time that the bytes received so far would take at
            `BatchConfig.upload_bytes_per_s`.

    Raises:
        BadCallError: the content type is not multipart/form-data, or the form is too large or arrives too slowly.
        InvalidRequestError: the form is malformed or has no file.
        OSError: the content cannot be written.
        ClientDisconnect: the client has disconnected.
    """
    media, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if media != b"multipart/form-data" or not boundary:
        raise BadCallError(415, "unsupported_media_type", "the body must be a form: send multipart/form-data")
    length = request.headers.get("content-length", "0")
    most = config.max_file_bytes + _OVERHEAD_BYTES
    if length.isdecimal() and int(length[:20]) > most:
        raise _too_large(config)
    loop = asyncio.get_running_loop()
    started_s, num_bytes = loop.time(), 0
    descriptor, name = await asyncio.to_thread(tempfile.mkstemp, prefix="new-", dir=directory)
    path = Path(name)
    parser: _Parser | None = None
    try:
        with open(descriptor, "wb") as file:
            parser = _Parser(boundary, config, file)
            async with asyncio.timeout(timeout_s) as limit:
                async for piece in request.stream():
                    num_bytes += len(piece)
                    if num_bytes > most:
                        raise _too_large(config)
                    parser.write(piece)
                    if len(parser.content) >= _WRITE_BYTES:
                        await asyncio.to_thread(parser.flush)
                    limit.reschedule(started_s + timeout_s + num_bytes / config.upload_bytes_per_s)
            parser.end()
            await asyncio.to_thread(parser.flush)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, TimeoutError):
            late = f"a file must arrive within {timeout_s:g} s, plus 1 s per {config.upload_bytes_per_s >> 10} KiB"
            raise BadCallError(408, "body_timeout", late, CLOSE_HEADERS) from None
        if isinstance(error, FormParserError):
            raise InvalidRequestError("body", "is not a well-formed form (multipart/form-data)") from None
        raise
    form = parser.form
    if form.path is None:
        path.unlink(missing_ok=True)
        raise InvalidRequestError("file", "missing; send the file as a part with a filename")
    return dataclasses.replace(form, path=path)


def _too_large(config: BatchConfig) -> BadCallError:
    most = config.max_file_bytes
    shown = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
    return BadCallError(413, "file_too_large", f"a file must not exceed {shown} (--set batch_max_file; {FLAG})")


class _Parser:
    """Collects the fields of a form and the content of its part `file`."""

    def __init__(self, boundary: bytes, config: BatchConfig, file: IO[bytes]) -> None:
        self.form = Form()
        self.content = bytearray()
        """Content of the file that has not been written yet."""
        self._config, self._file = config, file
        self._has_ended = False
        self._header, self._value = bytearray(), bytearray()
        self._num_header_bytes = self._num_parts = 0
        self._name: str | None = None
        self._field = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
                "on_header_field": lambda data, start, end: self._add(self._header, data[start:end]),
                "on_header_value": lambda data, start, end: self._add(self._value, data[start:end]),
                "on_header_end": self._end_header,
                "on_end": self._end,
            },
        )

    def write(self, piece: bytes) -> None:
        self._parser.write(piece)

    def end(self) -> None:
        if not self._has_ended:
            raise InvalidRequestError("body", "ends in the middle of the form")

    def flush(self) -> None:
        self._file.write(self.content)
        self._file.flush()
        self.content.clear()

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_FIELDS:
            raise InvalidRequestError("body", f"has more than {_MAX_FIELDS} fields")
        self._name, self._num_header_bytes = None, 0
        self._field.clear()

    def _add(self, to: bytearray, data: bytes) -> None:
        self._num_header_bytes += len(data)
        if self._num_header_bytes > _MAX_HEADER_BYTES:
            raise InvalidRequestError("body", f"has a part whose headers exceed {_MAX_HEADER_BYTES} bytes")
        to += data

    def _end_header(self) -> None:
        name, value = bytes(self._header).lower(), bytes(self._value)
        self._header.clear()
        self._value.clear()
        if name != b"content-disposition":
            return
        _, options = parse_options_header(value)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name != "file":
            return
        if self.form.path is not None:
            raise InvalidRequestError("file", "is sent twice")
        filename = options.get(b"filename")
        if filename is None:
            raise InvalidRequestError("file", "must be a file: send it with a filename")
        self.form.path = Path(self._file.name) if isinstance(self._file.name, str) else Path()
        self.form.filename = filename.decode("utf-8", "replace")[:MAX_FILENAME_CHARS]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            raise InvalidRequestError("body", "has a part without a name")
        if self._name == "file":
            self.form.num_bytes += end - start
            if self.form.num_bytes > self._config.max_file_bytes:
                raise _too_large(self._config)
            self.content += data[start:end]
            return
        if len(self._field) + end - start > _MAX_FIELD_BYTES:
            raise InvalidRequestError(self._name[:80], f"must not exceed {_MAX_FIELD_BYTES} bytes")
        self._field += data[start:end]

    def _end_part(self) -> None:
        if self._name not in (None, "file"):
            self.form.fields[self._name] = self._field.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True

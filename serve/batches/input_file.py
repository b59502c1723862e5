"""Reads the input file of a batch: one request per line, each with a unique `custom_id`."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from apt_jax.errors import InvalidRequestError
from serve.batches.config import MAX_CUSTOM_ID_CHARS, MAX_ERRORS, BatchConfig
from serve.batches.records import RequestLine
from serve.errors import UnknownModelError
from serve.http_api.openai_request import parse_json

_SURROGATE = re.compile("[\ud800-\udfff]")
_PAUSE_EVERY_BYTES = 64 << 10
_PAUSE_S = 1e-3
"""Pause in seconds after every `_PAUSE_EVERY_BYTES`: parsing holds the GIL, which threads of interactive calls need."""


class InputRead(NamedTuple):
    """The requests of an input file, or its errors."""

    lines: list[RequestLine]
    """Requests of the file; empty if there are errors."""
    errors: list[dict[str, Any]]
    """At most `MAX_ERRORS` errors in OpenAI's format."""
    model: str | None
    """The model that all requests name; None if they name no model or different models."""


class _LineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def read_input(
    path: Path,
    endpoint: str,
    config: BatchConfig,
    check_model: Callable[[Any], None],
    is_over: Callable[[], bool] = lambda: False,
) -> InputRead | None:
    """Read and check the whole file. Blocks, and sleeps briefly at intervals: call it in a thread.

    Args:
        path: path of the input file.
        endpoint: endpoint of the batch, which must be the `url` of every line.
        config: limits of files and batches.
        check_model: called with the `body` of each request; raises `UnknownModelError` or `InvalidRequestError`.
        is_over: called before each line; reading stops when it returns True.

    Returns:
        The requests or errors; None if `is_over` returned True before the end of the file.

    Raises:
        OSError: the file cannot be read.
    """
    lines: list[RequestLine] = []
    errors: list[dict[str, Any]] = []
    first_by_id: dict[str, int] = {}
    models: set[str | None] = set()
    num_blank = paused_at = 0
    for number, offset, data in _lines_of(path, config.max_line_bytes):
        if is_over():
            return None
        if offset - paused_at >= _PAUSE_EVERY_BYTES:
            paused_at = offset
            time.sleep(_PAUSE_S)
        try:
            if not data.strip():
                num_blank += 1
                if num_blank > config.max_requests:
                    message = f"A file can have at most {config.max_requests} blank lines (--set batch_max_requests)."
                    raise _LineError("too_many_blank_lines", message)
                continue
            if len(lines) >= config.max_requests:
                message = f"A batch can have at most {config.max_requests} requests (--set batch_max_requests)."
                raise _LineError("too_many_requests", message)
            custom_id, body = _checked(data, endpoint, config.max_line_bytes)
            if custom_id in first_by_id:
                message = f"The custom_id {custom_id[:80]!r} is already used in line {first_by_id[custom_id]}; it must be unique in a batch."
                raise _LineError("duplicate_custom_id", message, "custom_id")
            try:
                check_model(body)
            except (UnknownModelError, InvalidRequestError) as error:
                raise _LineError("model_not_found", str(error), "body.model") from None
        except _LineError as error:
            errors.append({"code": error.code, "line": number, "message": str(error), "param": error.param})
            if len(errors) >= MAX_ERRORS or error.code in ("too_many_requests", "too_many_blank_lines"):
                break
            continue
        first_by_id[custom_id] = number
        models.add(body.get("model") or None)
        lines.append(RequestLine(number=number, custom_id=custom_id, offset=offset, size=len(data)))
    if not lines and not errors:
        errors.append(
            {"code": "empty_file", "line": None, "message": "The input file contains no requests.", "param": None}
        )
    return InputRead([] if errors else lines, errors, models.pop() if len(models) == 1 else None)


def parse_line(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        InvalidRequestError: the line is not a JSON object.
    """
    return parse_json(data)


def _checked(data: bytes, endpoint: str, max_bytes: int) -> tuple[str, Mapping[str, Any]]:
    """Return `custom_id` and `body` of a line."""
    if len(data) > max_bytes:
        raise _LineError("line_too_long", f"A line can have at most {max_bytes} bytes.")
    try:
        value = parse_line(data)
    except InvalidRequestError as error:
        reason = str(error).removeprefix("body: ")
        raise _LineError("invalid_json_line", f"This line is not a JSON object: it {reason}.") from None
    for name in ("custom_id", "method", "url", "body"):
        if value.get(name) is None:
            raise _LineError("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    custom_id, body = value["custom_id"], value["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS or _SURROGATE.search(custom_id):
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        raise _LineError("invalid_custom_id", message, "custom_id")
    if value["method"] != "POST":
        raise _LineError("invalid_method", f"Invalid method: {_shown(value['method'])}; it must be 'POST'.", "method")
    if value["url"] != endpoint:
        message = f"Invalid URL: {_shown(value['url'])}; it must be the endpoint of the batch, {endpoint!r}."
        raise _LineError("invalid_url", message, "url")
    if not isinstance(body, dict):
        raise _LineError("invalid_body", "body must be an object, the request body for the endpoint.", "body")
    return custom_id, body


def _shown(value: object) -> str:
    return json.dumps(value)[:80]


def _lines_of(path: Path, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, byte offset and bytes of each line, without line ending and cut after about `max_bytes` bytes."""
    offset = number = 0
    with path.open("rb") as file:
        while data := file.readline(max_bytes + 2):
            number += 1
            first, offset = offset, offset + len(data)
            if not data.endswith(b"\n"):
                while rest := file.readline(1 << 20):  # skip the rest of a line that is too long
                    offset += len(rest)
                    if rest.endswith(b"\n"):
                        break
            if number == 1 and data.startswith(b"\xef\xbb\xbf"):  # the byte order mark that some editors write
                first, data = 3, data[3:]
            yield number, first, data.rstrip(b"\r\n")

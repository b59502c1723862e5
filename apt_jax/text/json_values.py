"""Conversion of clients' JSON values to plain Python types."""

import math
from collections.abc import Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError

MAX_DEPTH = 64


def plain_json(field: str, value: Any, depth: int = 0) -> Any:
    """Return a copy of a JSON value that consists of plain Python types.

    Raises:
        InvalidRequestError: the value is not JSON, or is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise InvalidRequestError(field, f"nested more deeply than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequestError(field, "contains text that is not Unicode") from None
        return str(value)
    if isinstance(value, int) and abs(value) < 10**20:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {plain_json(field, k, depth + 1): plain_json(field, v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(field, item, depth + 1) for item in value]
    raise InvalidRequestError(field, f"contains a value of type {type(value).__name__} that is not JSON")

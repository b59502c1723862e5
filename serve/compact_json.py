"""Compact JSON, as bytes."""

import json
from typing import Any

# Made once: `json.dumps` with options makes one a call, which for a token's chunk is a third of the time.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_bytes(value: Any) -> bytes:
    """Encode a value; lone surrogates become question marks."""
    return _encode(value).encode("utf-8", "replace")

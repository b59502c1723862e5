"""Reads `cache_control` of Anthropic's Messages API, by which clients mark the ends of prefixes to cache.

Every prefix is cached here, so the marks are advice: the longest time to live that they ask for is passed to the
retention policy (`EngineRequest.retain_s`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError
from apt_jax.validation import check_mapping
from serve.http_api.json_schemas import Schema, object_of, or_null
from serve.http_api.records import quoted

TTLS = ("5m", "1h")
"""Times to live, shortest first; the first is the default."""
MAX_BREAKPOINTS = 4
_NAME = "cache_control"


def mark_schema() -> Schema:
    return or_null(object_of({"type": {"const": "ephemeral"}, "ttl": {"enum": [*TTLS, None]}}, required=("type",)))


def longest_ttl(whole: object, tools: object, system: object, messages: object) -> str | None:
    """Return the longest time to live of a body's marks; None: it has no mark.

    Args:
        whole: `cache_control` of the body itself.
        tools, system, messages: fields of the body that may hold marks; malformed parts are ignored.

    Raises:
        InvalidRequestError: a mark is malformed, or there are more than `MAX_BREAKPOINTS`.
    """
    found = [] if whole is None else [_ttl(_NAME, whole)]
    blocks = (*_items("tools", tools), *_items("system", system), *_blocks(messages))
    found += [_ttl(f"{field}.{_NAME}", block[_NAME]) for field, block in blocks if block.get(_NAME) is not None]
    if len(found) > MAX_BREAKPOINTS:
        raise InvalidRequestError(_NAME, f"{len(found)} blocks have it; at most {MAX_BREAKPOINTS} may")
    return max(found, key=TTLS.index, default=None)


def _ttl(field: str, value: object) -> str:
    mark = check_mapping(field, value)
    if mark.get("type") != "ephemeral":
        raise InvalidRequestError(field, f"type {quoted(mark.get('type'))} must be 'ephemeral'")
    ttl = TTLS[0] if mark.get("ttl") is None else mark["ttl"]
    if ttl not in TTLS:
        raise InvalidRequestError(field, f"ttl {quoted(ttl)} must be one of {', '.join(TTLS)}")
    return ttl


def _items(field: str, value: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects of a list, each with its field."""
    for number, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, Mapping):
            yield f"{field}[{number}]", item


def _blocks(messages: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the content blocks of messages, including blocks in tool results."""
    for at, message in _items("messages", messages):
        for field, block in _items(f"{at}.content", message.get("content")):
            yield field, block
            yield from _items(f"{field}.content", block.get("content"))

"""Converts enum values of `aptjax.v1` to the names used elsewhere in the program (``CACHE_KIND_KV``: "kv") and back."""

from apt_jax.core.kinds import KIND_NAMES

from serve.protos.aptjax.v1 import apt_serve_pb2 as pb

_CACHE_KINDS: dict[str, pb.CacheKind] = dict(zip(KIND_NAMES, (pb.CACHE_KIND_KV, pb.CACHE_KIND_HIDDEN), strict=True))
_FINISH_REASONS: dict[str, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}


def cache_kind(name: str | None) -> pb.CacheKind:
    """Return the enum value of a cache kind; ``CACHE_KIND_UNSPECIFIED`` for any other name."""
    return _CACHE_KINDS.get(name or "", pb.CACHE_KIND_UNSPECIFIED)


def cache_kind_name(value: int) -> str | None:
    """Return the name of a cache kind; None for ``CACHE_KIND_UNSPECIFIED``."""
    return pb.CacheKind.Name(pb.CacheKind.ValueType(value)).removeprefix("CACHE_KIND_").lower() if value else None


def finish_reason(name: str | None) -> pb.FinishReason:
    """Return the enum value of a finish reason; ``FINISH_REASON_UNSPECIFIED`` for any other name."""
    return _FINISH_REASONS.get(name or "", pb.FINISH_REASON_UNSPECIFIED)


def finish_reason_name(value: int) -> str:
    """Return the name of a finish reason; "unspecified" for ``FINISH_REASON_UNSPECIFIED``."""
    return pb.FinishReason.Name(value).removeprefix("FINISH_REASON_").lower()

"""Retention: which ended requests' blocks stay in the cache for the next call of their session."""

from apt_jax.errors import ConfigError, nearest
from apt_jax.sched.registry import PolicyMaker, read_options
from apt_jax.sched.retention.knapsack import KnapsackRetention
from apt_jax.sched.retention.sessions import SessionTable
from apt_jax.sched.retention.time_to_live import CacheTtlRetention, ProgressTtlRetention, TtlRetention
from apt_jax.sched.retention.view import LruRetention, Retention, RetentionView

__all__ = [
    "RETENTIONS",
    "LruRetention",
    "Retention",
    "RetentionView",
    "SessionTable",
    "make_retention",
]

RETENTIONS: dict[str, PolicyMaker] = {
    "lru": PolicyMaker(LruRetention, source="vLLM, SGLang", summary="least recently used first"),
    "ttl": PolicyMaker(TtlRetention, source="vllm-project/vllm, issue 52113", summary="a fixed time after each call"),
    "cache-ttl": PolicyMaker(
        CacheTtlRetention, source="Continuum, arXiv 2511.02230", summary="a time by the kind of work and observed gaps"
    ),
    "progress-ttl": PolicyMaker(
        ProgressTtlRetention, source="vllm-project/router, issue 285", summary="a time by a fit to observed gaps"
    ),
    "knapsack": PolicyMaker(
        KnapsackRetention, source="ours", summary="by saved prefill and rate of returns, against waiting requests"
    ),
}
"""Retention policies, keyed by their names for `--retention`."""

_FLAG = "(--retention)"


def make_retention(text: str) -> Retention | None:
    """Build the retention policy that `text` names, as in `ttl?ttl_s=30`.

    Returns:
        None for `lru`, which needs no table of sessions.

    Raises:
        ConfigError: no policy has this name, or it has no such option; the message is one line.
    """
    name, mark, query = text.partition("?")
    maker = RETENTIONS.get(name)
    if maker is None:
        raise ConfigError(
            f"retention={name!r:.40} must be one of {', '.join(RETENTIONS)}{nearest(name, RETENTIONS)} {_FLAG}"
        )
    options = read_options(text, maker, query, what="retention", flag=_FLAG) if mark else {}
    if maker.cls is LruRetention:
        return None
    try:
        return maker.cls(**options)
    except ConfigError as error:
        raise ConfigError(f"retention={text!r:.200}: {error} {_FLAG}") from None

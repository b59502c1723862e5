"""Reads SLOs and queueing time limits from the HTTP headers or gRPC metadata that routers use."""

import re
from collections.abc import Iterable, Mapping

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.validation import is_session_id

# The first name that is present wins.
TTFT_KEYS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TBT_KEYS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
E2E_KEYS = ("x-slo-e2e-ms",)
OBJECTIVE_KEYS = {"ttft_ms": TTFT_KEYS, "tbt_ms": TBT_KEYS, "e2e_ms": E2E_KEYS}
"""Headers for each latency objective, keyed by its field of `slo`."""
TIER_KEY = "service_tier"
QUEUE_TTL_KEY = "x-llm-d-inference-ttl"
"""Header with the maximum time in the queue, as a duration in Go's format."""

TIERS = {"flex": "be", "priority": "rt", "auto": None, "default": None}
"""SLO class of each service tier of OpenAI; None: the server's default class."""
TIER_OF_CLASS = {"rt": "priority", "be": "flex"}
"""Service tier that selects each SLO class."""
USED_TIERS = ("default", "flex", "priority")
"""Service tiers that responses may name."""
SESSION_KEYS = ("x-session-id", "x-claude-code-session-id", "session-id", "session_id")
"""Headers with the session of the call."""
DECIMAL_PATTERN = r"[0-9]{1,12}(\.[0-9]{1,12})?"
"""Pattern of header values in milliseconds."""
_DECIMAL = re.compile(DECIMAL_PATTERN)

DURATION_PATTERN = r"([0-9]{1,9}(\.[0-9]{1,9})?(ns|us|µs|ms|s|m|h)){1,6}"
_DURATION = re.compile(DURATION_PATTERN)
_DURATION_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ns|us|µs|ms|s|m|h)")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

Headers = Mapping[str, str | bytes]


def milliseconds(headers: Headers, keys: Iterable[str]) -> float | None:
    """Parse the value of the first of `keys` that is present, in milliseconds; None: no key is present.

    Raises:
        InvalidRequestError: the value is not a number.
    """
    for key in keys:
        value = headers.get(key)
        if value is None:
            continue
        text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        if not _DECIMAL.fullmatch(text.strip()):
            raise InvalidRequestError(key, f"{text[:40]!r} is not a number of milliseconds such as 250 or 12.5")
        return float(text)
    return None


def session_id(headers: Headers) -> str | None:
    """Return the session that the headers name; None: they name none, or no valid one.

    The headers come from clients that do not know this server, so one that is too long or not text is ignored.
    """
    for key in SESSION_KEYS:
        value = headers.get(key)
        if value is not None:
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
            return text.strip() if is_session_id(text.strip()) else None
    return None


def max_queue_s(headers: Headers) -> float | None:
    """Parse the maximum time that the request may wait in the queue, in seconds; None: the header is absent.

    Raises:
        InvalidRequestError: the value is not a positive duration such as 1500ms, 2s or 1m30s.
    """
    value = headers.get(QUEUE_TTL_KEY)
    if value is None:
        return None
    text = (value.decode("utf-8", "replace") if isinstance(value, bytes) else value).strip()
    seconds = 0.0
    if _DURATION.fullmatch(text):
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _DURATION_PART.findall(text))
    if seconds <= 0.0:
        raise InvalidRequestError(
            QUEUE_TTL_KEY, f"{text[:40]!r} is not a positive duration such as 1500ms, 2s or 1m30s"
        )
    return seconds


def class_of_tier(tier: object) -> str | None:
    """Map OpenAI's `service_tier` to an SLO class; None: the server's default class.

    Raises:
        InvalidRequestError: the tier is unknown.
    """
    if tier is None:
        return None
    text = tier.decode("ascii", "replace") if isinstance(tier, bytes) else tier
    if not isinstance(text, str) or text not in TIERS:
        shown = repr(text[:40]) if isinstance(text, str) else json_kind(text)
        raise InvalidRequestError(TIER_KEY, f"{shown} must be one of {', '.join(sorted(TIERS))}")
    return TIERS[text]


def used_tier(slo_class: str, asked: object) -> str:
    """Return the service tier of a served request: `flex` for best effort, `priority` if `asked` is that tier, else
    `default`."""
    if slo_class == "be":
        return "flex"
    return "priority" if asked in ("priority", b"priority") else "default"

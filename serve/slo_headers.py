"""SLOs in HTTP headers or gRPC metadata, under the names that routers use."""

import re
from collections.abc import Iterable, Mapping

from apt_jax.errors import InvalidRequestError

# The first name that is present wins.
TTFT_KEYS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TBT_KEYS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
TIER_KEY = "service_tier"

TIERS = {"flex": "be", "priority": "rt", "auto": None, "default": None}
DECIMAL_PATTERN = r"[0-9]{1,12}(\.[0-9]{1,12})?"
"""Milliseconds in headers."""
_DECIMAL = re.compile(DECIMAL_PATTERN)

Headers = Mapping[str, str | bytes]


def milliseconds(headers: Headers, keys: Iterable[str]) -> float | None:
    """Parse the first of `keys` that is present; None: none is.

    Raises:
        InvalidRequestError: it is not a number.
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


def class_of_tier(tier: object) -> str | None:
    """Map OpenAI's `service_tier` to a class; None: the default one.

    Raises:
        InvalidRequestError: the tier is unknown.
    """
    if tier is None:
        return None
    text = tier.decode("ascii", "replace") if isinstance(tier, bytes) else tier
    if not isinstance(text, str) or text not in TIERS:
        shown = repr(text[:40]) if isinstance(text, str) else f"a {type(text).__name__}"
        raise InvalidRequestError(TIER_KEY, f"{shown} must be one of {', '.join(sorted(TIERS))}")
    return TIERS[text]

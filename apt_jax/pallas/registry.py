"""Which implementation of an attention op runs where. Selection is explicit; a missing one is an error."""

import dataclasses
from collections.abc import Callable
from typing import Any

from apt_jax.pallas import xla


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOps:
    """One implementation of the family; contracts in `reference.py` (and `xla.prefill` for prompt chunks)."""

    name: str
    decode_kv: Callable[..., Any]
    decode_absorbed: Callable[..., Any]
    decode_reprojected: Callable[..., Any]
    prefill: Callable[..., Any]


_IMPLEMENTATIONS = {
    "xla": AttentionOps(
        name="xla",
        decode_kv=xla.decode_kv,
        decode_absorbed=xla.decode_absorbed,
        decode_reprojected=xla.decode_reprojected,
        prefill=xla.prefill,
    ),
}

_PLATFORM_DEFAULT = {"cpu": "xla", "gpu": "xla", "cuda": "xla", "tpu": "xla"}


def attention_ops(platform: str, name: str | None = None) -> AttentionOps:
    """The implementation called `name`, or the default of a JAX platform.

    Raises:
        ValueError: no such implementation, or a platform that none was chosen for.
    """
    chosen = name or _PLATFORM_DEFAULT.get(platform)
    if chosen not in _IMPLEMENTATIONS:
        raise ValueError(
            f"no attention implementation {chosen!r} for platform {platform!r}; known: {sorted(_IMPLEMENTATIONS)}"
        )
    return _IMPLEMENTATIONS[chosen]

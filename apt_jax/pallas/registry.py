"""Which implementation of the attention ops runs where. Selection is explicit and logged; a missing one is an error.

name            runs on             made for
xla             every platform      CPUs; the fallback that one asks for by name elsewhere
triton          NVIDIA GPUs         Pallas kernels on the Triton backend
triton-interpret  every platform    the same kernels in Pallas' interpreter: slow, for tests
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from apt_jax.pallas import xla

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOps:
    """One implementation of the family; contracts in `reference.py`."""

    name: str
    decode_kv: Callable[..., Any]
    decode_absorbed: Callable[..., Any]
    decode_reprojected: Callable[..., Any]
    decode_v_absorbed: Callable[..., Any] | None
    prefill: Callable[..., Any]
    branches: bool
    """The decoder may branch around ops that have no rows. False: ops are called for every step and must cost little
    where they have none, as a branch on the device would break up a CUDA graph."""


def _xla(chip: str | None) -> AttentionOps:
    del chip
    return AttentionOps(
        name="xla",
        decode_kv=xla.decode_kv,
        decode_absorbed=xla.decode_absorbed,
        decode_reprojected=xla.decode_reprojected,
        decode_v_absorbed=getattr(xla, "decode_v_absorbed", None),
        prefill=xla.prefill,
        branches=True,
    )


_IMPLEMENTATIONS: dict[str, Callable[[str | None], AttentionOps]] = {"xla": _xla}

_PLATFORM_DEFAULT = {"cpu": "xla", "gpu": "xla", "cuda": "xla", "tpu": "xla"}


def known_attention_ops() -> list[str]:
    """Names that `attention_ops` takes."""
    return sorted(_IMPLEMENTATIONS)


@functools.cache
def attention_ops(platform: str, name: str | None = None, chip: str | None = None) -> AttentionOps:
    """The implementation called `name`, or the default of a JAX platform.

    Args:
        chip: device kind that tiles are chosen for; None: one that any chip takes.

    Raises:
        ValueError: no such implementation, or a platform that none was chosen for.
    """
    chosen = name or _PLATFORM_DEFAULT.get(platform)
    if chosen not in _IMPLEMENTATIONS:
        raise ValueError(
            f"no attention implementation {chosen!r} for platform {platform!r}; known: {known_attention_ops()}"
        )
    logger.info("attention kernels: %s on %s (%s)", chosen, platform, chip or "any chip")
    return _IMPLEMENTATIONS[chosen](chip)

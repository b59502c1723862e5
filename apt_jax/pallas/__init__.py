"""Attention kernels: references, XLA code, and the registry that picks one per platform."""

from apt_jax.pallas import reference
from apt_jax.pallas.registry import (
    AttentionOps,
    attention_ops,
    known_attention_ops,
    over_devices,
)

__all__ = ["AttentionOps", "attention_ops", "known_attention_ops", "over_devices", "reference"]

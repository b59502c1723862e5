"""Attention kernels in Pallas, and one pair of Triton kernels; `apt_jax.backends` picks one per platform."""

from apt_jax.backends import AttentionOps, attention_ops, known_attention_ops, over_devices
from apt_jax.ops import reference

__all__ = ["AttentionOps", "attention_ops", "known_attention_ops", "over_devices", "reference"]

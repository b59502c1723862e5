"""Blocks shared by a real-time and a best-effort request, which fill them from opposite ends (BROS §5)."""

from apt_jax.cache.sharing.block_sharing import BlockSharing
from apt_jax.cache.sharing.host_blocks import HostBlocks, LentBlocks
from apt_jax.cache.sharing.preemption_table import Place, PreemptionTable, SlotTransfers

__all__ = ["BlockSharing", "HostBlocks", "LentBlocks", "Place", "PreemptionTable", "SlotTransfers"]

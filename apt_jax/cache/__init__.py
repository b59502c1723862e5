"""The unified block cache: block tables of requests (`hybrid_cache`), shared groups and cached prefixes."""

from apt_jax.cache.block_pool import NO_OWNER, NO_SLOT, BlockPool, CacheIntegrityError
from apt_jax.cache.hybrid_cache import HybridCache

__all__ = ["NO_OWNER", "NO_SLOT", "BlockPool", "CacheIntegrityError", "HybridCache"]

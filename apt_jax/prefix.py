"""Re-exports `apt_jax.cache.prefix_tree`."""

from apt_jax.cache.prefix_tree import extend_digests, root_digest

__all__ = ["extend_digests", "root_digest"]

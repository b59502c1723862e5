"""Re-exports `apt_jax.executor.jax_executor`."""

from apt_jax.executor.buckets import power_of_two_buckets
from apt_jax.executor.jax_executor import JaxExecutor

__all__ = ["JaxExecutor", "power_of_two_buckets"]

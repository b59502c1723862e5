"""Builds a `StepBatch` from a plan: filters its rows (`plan_filter`), attaches cached prefixes (`cached_prefixes`),
reserves blocks (`reserver`), and fills the arrays of the step (`builder`)."""

from apt_jax.config import CacheConfig
from apt_jax.engine.batch.reserver import PlainReserver, Reserver
from apt_jax.engine.batch.shared_reserver import SharedReserver
from apt_jax.sched.view import Policy, takes_groups

__all__ = ["PlainReserver", "Reserver", "SharedReserver", "reserver_for"]


def reserver_for(policy: Policy, cache: CacheConfig) -> type[Reserver]:
    """Return the `Reserver` class for a policy: requests share blocks if policy and configuration allow it and there is
    host memory."""
    if takes_groups(policy) and cache.share_blocks and cache.swap_space > 0:
        return SharedReserver
    return PlainReserver

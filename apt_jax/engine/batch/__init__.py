"""From a plan to a `StepBatch`: which rows run (`plan_filter`), what they have cached already (`cached_prefixes`), how they
get blocks (`reserver`), and the arrays of the step (`builder`)."""

from apt_jax.config import CacheConfig
from apt_jax.engine.batch.reserver import PlainReserver, Reserver
from apt_jax.engine.batch.shared_reserver import SharedReserver
from apt_jax.sched.view import Policy, takes_groups

__all__ = ["PlainReserver", "Reserver", "SharedReserver", "reserver_for"]


def reserver_for(policy: Policy, cache: CacheConfig) -> type[Reserver]:
    """Return how requests get blocks under a policy: they share blocks where it says so, and the configuration lets
    them."""
    if takes_groups(policy) and cache.share_blocks and cache.swap_space > 0:
        return SharedReserver
    return PlainReserver

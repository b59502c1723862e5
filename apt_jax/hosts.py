"""Names of `apt_jax.distributed` at their old place."""

from apt_jax.distributed.hosts import Follower, HostError, Hosts, Leader
from apt_jax.distributed.messages import Plan
from apt_jax.distributed.rendezvous import join
from apt_jax.distributed.worker import StepError, follow

__all__ = ["Follower", "HostError", "Hosts", "Leader", "Plan", "StepError", "follow", "join"]

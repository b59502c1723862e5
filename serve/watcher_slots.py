"""Limits on the number of clients that watch the scheduler, because each costs engine time in every iteration."""

import collections

from apt_jax.errors import QueueFullError
from serve.security.api_keys import Caller

MAX_WATCHERS = 16
MAX_OF_TENANT = 4
_RETRY_AFTER_S = 30.0


class WatcherSlots:
    """Slots for the watchers of one kind. Each tenant can take a few slots, and some are reserved for operators.

    Args:
        what: words after the number of watchers in error messages, such as "dashboards are open".
        total: number of slots.
        of_tenant: maximum number of slots per tenant; the same number is reserved for operators.
    """

    def __init__(self, what: str, total: int = MAX_WATCHERS, of_tenant: int = MAX_OF_TENANT) -> None:
        self._what, self._total, self._of_tenant = what, total, of_tenant
        self._taken: collections.Counter[Caller] = collections.Counter()

    def take(self, caller: Caller) -> None:
        """Take a slot; release it with `free`.

        Raises:
            QueueFullError: no slot is left for this caller.
        """
        if not caller.is_operator and self._taken[caller] >= self._of_tenant:
            raise QueueFullError(f"{self._of_tenant} {self._what} with this API key already", _RETRY_AFTER_S)
        total = self._total if caller.is_operator else self._total - self._of_tenant
        if self._taken.total() >= total:
            raise QueueFullError(f"{total} {self._what} already", _RETRY_AFTER_S)
        self._taken[caller] += 1

    def free(self, caller: Caller) -> None:
        self._taken[caller] -= 1
        self._taken += collections.Counter()  # drops zero counts

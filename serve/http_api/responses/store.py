"""Stored responses, which later calls continue by `previous_response_id`.

They are kept in memory and are lost when the server stops. Each tenant has its own: an id of another tenant is unknown.
A record holds its whole conversation as JSON, so each record can be continued whatever has been removed before it.
Per tenant, the least recently used records are removed first: above `max_responses`, above `max_bytes`, and after
`LIFETIME_S` without use; above `max_total_bytes` the tenant that uses the most loses records.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable

from serve.http_api.errors import BadCallError

LIFETIME_S = 86_400.0
MAX_BYTES = 64 << 20
MAX_TOTAL_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """A finished response, with its conversation."""

    body: bytes
    """The response as JSON."""
    items: bytes
    """JSON list of the input items and output items of the whole conversation."""
    session_id: str | None
    """Session that the call named."""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.items)


@dataclasses.dataclass(kw_only=True)
class _OfTenant:
    records: collections.OrderedDict[str, tuple[float, StoredResponse]] = dataclasses.field(
        default_factory=collections.OrderedDict
    )
    """Time of the last use and record, least recently used first."""
    num_bytes: int = 0


class ResponseStore:
    """Stored responses of all tenants. Thread-safe.

    Args:
        max_responses: maximum number of records of a tenant.
        max_bytes: maximum size of a tenant's records.
        max_total_bytes: maximum size of all records.
        now_s: the current time in seconds.
    """

    def __init__(
        self,
        max_responses: int,
        *,
        max_bytes: int = MAX_BYTES,
        max_total_bytes: int = MAX_TOTAL_BYTES,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses, self._max_bytes, self._max_total_bytes = max_responses, max_bytes, max_total_bytes
        self._now_s = now_s
        self._tenants: dict[str | None, _OfTenant] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, tenant: str | None, response_id: str, field: str = "") -> StoredResponse:
        """Return a record, which becomes the most recently used one.

        Args:
            tenant: owner of the record.
            response_id: the response's id.
            field: field of the body that names the id, for the error; empty: the path names it.

        Raises:
            BadCallError: the tenant has no such record (404).
        """
        with self._lock:
            self._expire()
            mine = self._tenants.get(tenant)
            if mine is None or response_id not in mine.records:
                raise _unknown(response_id, field)
            _, found = mine.records.pop(response_id)
            mine.records[response_id] = (self._now_s(), found)
            return found

    def put(self, tenant: str | None, response_id: str, record: StoredResponse) -> None:
        """Store a record, and remove others that exceed the limits. A record of the same id is replaced."""
        with self._lock:
            self._expire()
            mine = self._tenants.setdefault(tenant, _OfTenant())
            if response_id in mine.records:
                self._remove(mine, response_id)
            mine.records[response_id] = (self._now_s(), record)
            mine.num_bytes += record.num_bytes
            self._num_bytes += record.num_bytes
            while len(mine.records) > self._max_responses or mine.num_bytes > self._max_bytes:
                self._remove(mine, next(iter(mine.records)))
            while self._num_bytes > self._max_total_bytes:
                largest = max(self._tenants.values(), key=lambda one: one.num_bytes)
                self._remove(largest, next(iter(largest.records)))

    def delete(self, tenant: str | None, response_id: str) -> None:
        """Remove a record.

        Raises:
            BadCallError: the tenant has no such record (404).
        """
        with self._lock:
            mine = self._tenants.get(tenant)
            if mine is None or response_id not in mine.records:
                raise _unknown(response_id, "")
            self._remove(mine, response_id)

    def _expire(self) -> None:
        before_s = self._now_s() - LIFETIME_S
        for mine in self._tenants.values():
            while mine.records and next(iter(mine.records.values()))[0] < before_s:
                self._remove(mine, next(iter(mine.records)))

    def _remove(self, mine: _OfTenant, response_id: str) -> None:
        _, record = mine.records.pop(response_id)
        mine.num_bytes -= record.num_bytes
        self._num_bytes -= record.num_bytes


def _unknown(response_id: str, field: str) -> BadCallError:
    if not field:
        return BadCallError(404, "response_not_found", f"no stored response has the id {response_id[:140]!r}")
    text = f"{field}: no stored response has the id {response_id[:140]!r}; send the whole conversation as input"
    return BadCallError(404, "previous_response_not_found", text)

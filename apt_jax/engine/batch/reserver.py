"""Reservation of blocks for the rows of a step: the protocol, and the implementation without shared blocks."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import NO_SLOT, HybridCache
from apt_jax.cache.group_pool import CopySource
from apt_jax.core.step import StepBatch
from apt_jax.core.tiers import HostMemory
from apt_jax.engine.request_states import RequestStates
from apt_jax.sched.request_table import RequestTable
from apt_jax.sched.view import TakeableGroups


@dataclasses.dataclass(kw_only=True, slots=True)
class Demand:
    """Rows to run, in order, and the positions that they need blocks for; arrays are (n,) unless noted."""

    rows: NDArray[np.int32]
    slots: NDArray[np.int32]
    """Slots of the rows; changed in place if a row takes or returns a slot."""
    num_tokens: NDArray[np.int32]
    kind: NDArray[np.int8]
    found: NDArray[np.int32]
    """Numbers of cached positions attached to rows that start to run; 0 for running rows."""
    sources: Mapping[int, CopySource]
    """For some rows, the group to copy into the row's first new group."""
    first: NDArray[np.int32]
    """(m,) rows that get blocks before best-effort rows, together with real-time rows in plan order
    (`Plan.num_first`)."""

    def part(self, index: NDArray[np.intp]) -> "Demand":
        """Return the demand of some rows, with a copy of their slots."""
        return Demand(
            rows=self.rows[index],
            slots=self.slots[index],
            num_tokens=self.num_tokens[index],
            kind=self.kind[index],
            found=self.found[index],
            sources=self.sources,
            first=self.first,
        )


class Reserver(Protocol):
    """Reserves blocks for the rows of a step.

    Args:
        states: the requests and their cache; the reserver may set the cache's `Placement`.
        host_memory: host memory of the executor; None: it has none.
    """

    fills_both_ends: bool
    """True: requests may fill blocks from the right end. The executor must support such block tables
    (`StepBatch.block_tables`), and no request is converted."""

    def __init__(self, states: RequestStates, host_memory: HostMemory | None) -> None: ...

    def reserve(self, demand: Demand) -> NDArray[np.bool_]:
        """Reserve blocks for rows, in order. Rows that must wait release their cached prefixes, so that other rows can
        use the blocks.

        Returns:
            (n,) True: the row can run; False: it must wait.
        """
        ...

    def finish(self, batch: StepBatch) -> StepBatch:
        """Return the batch with the transfers that its reservations require."""
        ...

    def takeable(self) -> TakeableGroups | None:
        """Return the value of `SchedulerView.takeable`."""
        ...


class PlainReserver:
    """A `Reserver` that uses only free blocks."""

    fills_both_ends = False

    def __init__(self, states: RequestStates, host_memory: HostMemory | None = None) -> None:
        self._cache, self._table = states.cache, states.table

    def reserve(self, demand: Demand) -> NDArray[np.bool_]:
        """See `Reserver`."""
        cache, rows, slots = self._cache, demand.rows, demand.slots
        owners, kind = self._table.rank[rows], demand.kind
        num_positions = self._table.num_cached[rows] + demand.found + demand.num_tokens
        ok = cache.reserve_rows(owners, slots, num_positions, kind)
        if not ok.all() and give_back_prefixes(cache, self._table, demand, ok):
            again = np.flatnonzero(~ok & (demand.found == 0))
            their_slots = slots[again]
            ok[again] = cache.reserve_rows(owners[again], their_slots, num_positions[again], kind[again])
            slots[again] = their_slots
        return ok

    def finish(self, batch: StepBatch) -> StepBatch:
        """See `Reserver`."""
        return batch

    def takeable(self) -> None:
        """See `Reserver`."""
        return


def give_back_prefixes(cache: HybridCache, table: RequestTable, demand: Demand, ok: NDArray[np.bool_]) -> bool:
    """Release the cached prefixes of the rows that must wait, and return True if there were any.

    Args:
        cache: the cache that holds the prefixes.
        table: request table of the rows.
        demand: the rows; its `slots` change in place.
        ok: (n,) False: the row must wait.
    """
    gave_back = False
    for i in np.flatnonzero(~ok & (demand.found > 0)).tolist():
        owner = int(table.rank[demand.rows[i]])
        if cache.slot_of(owner) != NO_SLOT:
            cache.release(owner)
            demand.slots[i] = NO_SLOT
            gave_back = True
    return gave_back

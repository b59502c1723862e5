"""How the rows of a step get blocks: the contract, and the plain way."""

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
    """Rows that want to run, in order, and the positions that they need blocks for. Arrays are (n,)."""

    rows: NDArray[np.int32]
    slots: NDArray[np.int32]
    """Their slots; changed in place where a row takes or gives back one."""
    num_tokens: NDArray[np.int32]
    kind: NDArray[np.int8]
    found: NDArray[np.int32]
    """Positions that rows which begin have found cached, and hold."""
    sources: Mapping[int, CopySource]
    """By row, the group that its first new one begins as a copy of."""
    first: NDArray[np.int32]
    """Rows that get their blocks in order with real-time ones (`Plan.num_first`)."""

    def part(self, index: NDArray[np.intp]) -> "Demand":
        """Return some of the rows, with slots of their own."""
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
    """Gives blocks to the rows of a step.

    Args:
        states: the requests and their cache, which the reserver may tell where positions lie.
        host_memory: of the executor; None: there is none.
    """

    fills_both_ends: bool
    """True: requests may have positions from the right end of a block. The executor must take such block tables
    (`StepBatch.block_tables`), and nothing is converted."""

    def __init__(self, states: RequestStates, host_memory: HostMemory | None) -> None: ...

    def reserve(self, demand: Demand) -> NDArray[np.bool_]:
        """Reserve blocks for rows, in order. Rows that must wait give back the prefix that they have found, which may
        help others.

        Returns:
            (n,) False: the row must wait.
        """
        ...

    def finish(self, batch: StepBatch) -> StepBatch:
        """Return the batch with the transfers that its reservations need."""
        ...

    def takeable(self) -> TakeableGroups | None:
        """Return `SchedulerView.takeable`."""
        ...


class PlainReserver:
    """A `Reserver` that gives free blocks only."""

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
    """Give back the prefixes that rows that must wait have found; returns True if there were any.

    Args:
        cache: that holds them.
        table: of the rows.
        demand: its `slots` change in place.
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

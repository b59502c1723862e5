"""Reservation of blocks that real-time and best-effort requests share (`apt_jax.cache.sharing`)."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import NO_SLOT
from apt_jax.cache.sharing import BlockSharing, LentBlocks
from apt_jax.core.step import StepBatch
from apt_jax.core.tiers import HostMemory
from apt_jax.engine.batch.reserver import Demand, give_back_prefixes
from apt_jax.engine.counters import RecomputeCause
from apt_jax.engine.request_states import RUNNING, RequestStates
from apt_jax.sched.view import TakeableGroups


class SharedReserver:
    """A `Reserver` that gives real-time requests free blocks first, then slots of best-effort requests. The contents of
    these slots are saved to host memory, and loaded again before the best-effort request runs.

    Args:
        states: the requests; a request whose slots are lost is preempted.
        host_memory: host memory of the executor.
    """

    fills_both_ends = True

    def __init__(self, states: RequestStates, host_memory: HostMemory | None) -> None:
        assert host_memory is not None
        self._states, self._table, self._cache = states, states.table, states.cache
        self._host_memory = host_memory
        self._sharing = BlockSharing(self._cache, LentBlocks(self._cache.groups), self._is_best_effort)

    def _is_best_effort(self, owner: int) -> bool:
        return bool(self._table.best_effort[self._row_of(owner)])

    def _row_of(self, owner: int) -> int:
        return int(np.flatnonzero((self._table.rank == owner) & self._table.live)[0])

    def reserve(self, demand: Demand) -> NDArray[np.bool_]:
        """See `Reserver`; the rows' slots that were saved to host memory are restored."""
        table, rows, slots, found = self._table, demand.rows, demand.slots, demand.found
        best_effort = table.best_effort[rows]
        if demand.first.size:  # these rows get blocks together with real-time rows
            best_effort &= ~np.isin(rows, demand.first)
        copied = np.isin(rows, list(demand.sources))
        is_lost, ok = self._lost_slots(slots), np.zeros(rows.size, np.bool_)

        def reserve(index: NDArray[np.intp]) -> None:
            of_rows, their_slots = rows[index], slots[index]
            ok[index] = self._sharing.reserve_rows(
                table.rank[of_rows],
                their_slots,
                table.num_cached[of_rows] + found[index] + demand.num_tokens[index],
                demand.kind[index],
                best_effort[index],
                copied[index],
                running=slots[ok | (found > 0)].tolist(),  # keeps their cached prefixes
            )
            slots[index] = their_slots

        reserve(np.flatnonzero(~is_lost))
        if not ok.all() and give_back_prefixes(self._cache, table, demand, ok):
            reserve(np.flatnonzero(~ok & ~is_lost & (found == 0)))
        for row in rows[is_lost].tolist():
            self._states.preempt(row, RecomputeCause.PREFIX_LOST)
        for owner in self._sharing.preempted.transfers.lost:
            if self._cache.slot_of(owner) != NO_SLOT:  # its cache has not been released yet
                self._states.preempt(self._row_of(owner), RecomputeCause.MEMORY)
        return ok

    def _lost_slots(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return an (n,) mask of the requests whose cache in host memory is lost."""
        preempted = self._sharing.preempted
        if not preempted.of_slot:
            return np.zeros(slots.size, np.bool_)
        spans, owners = preempted.lacking(slots)
        if not len(spans):
            return np.zeros(slots.size, np.bool_)
        return np.isin(slots, owners[~self._host_memory.slots_ready(spans)])

    def finish(self, batch: StepBatch) -> StepBatch:
        """See `Reserver`."""
        transfers = self._sharing.take_transfers()
        running = self._states.rows(RUNNING)
        self._table.checkpointed_blocks[running] = self._sharing.preempted.num_blocks_of(self._states.slot[running])
        if not (transfers.saves or transfers.copies or transfers.loads):
            return batch
        copies = np.array(transfers.copies, np.int32).reshape(-1, 2)
        return dataclasses.replace(
            batch,
            slot_saves=np.array(transfers.saves, np.int32).reshape(-1, 5),
            slot_loads=np.array(transfers.loads, np.int32).reshape(-1, 5),
            copies=np.concatenate([batch.copies, copies]),
        )

    def takeable(self) -> TakeableGroups:
        """See `Reserver`."""
        running = self._states.by_rank()[1]

        def rows_of(kind: int) -> NDArray[np.int32]:
            row_of = np.zeros(self._cache.owner.size, np.int32)
            row_of[self._states.slot[running]] = running
            return row_of[self._sharing.lone_groups(kind, down=True)[0]]

        return TakeableGroups(rows_of)

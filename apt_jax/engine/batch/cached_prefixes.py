"""Attaches groups cached on the device or in host memory to requests that start to run."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import HybridCache
from apt_jax.cache.group_pool import CopySource
from apt_jax.cache.prefix_tree import Node
from apt_jax.core.kinds import HIDDEN, KIND_NAMES
from apt_jax.core.step import NULL_BLOCK
from apt_jax.core.tiers import HostMemory
from apt_jax.engine.counters import EngineCounters
from apt_jax.engine.request_states import RequestStates


class CachedPrefixes:
    """Attaches cached prefixes to the requests that start to run in a step.

    Args:
        states: the requests.
        cache: holds the prefixes.
        counters: counts how prefixes in host memory are used.
        host_memory: host memory of the executor; required if the cache has a second tier.
    """

    def __init__(
        self, states: RequestStates, cache: HybridCache, counters: EngineCounters, host_memory: HostMemory | None
    ) -> None:
        self._states, self._table = states, states.table
        self._cache, self._counters, self._host_memory = cache, counters, host_memory
        self._from_host: dict[int, int] = {}
        """Number of positions of each row that the step being built copies from host memory."""

    def attach(
        self,
        rows: NDArray[np.int32],
        slots: NDArray[np.int32],
        kind: NDArray[np.int8],
        begins: NDArray[np.bool_] | None,
    ) -> tuple[NDArray[np.int32], dict[int, CopySource]]:
        """Attach the cached prefixes of all requests that start to run; called before any request gets new blocks.

        Args:
            rows, kind: (n,) rows of the plan and their cache kinds.
            slots: (n,) slots of the rows; changed in place if a row takes one.
            begins: (n,) True: the row reuses cached layer inputs, which are converted in this step; None: no row does.

        Returns:
            An (n,) array with the number of cached positions attached to each row, and a map from rows to the group to
            copy into the row's first new group.
        """
        found = np.zeros(rows.size, np.int32)
        sources: dict[int, CopySource] = {}
        hits, cache = self._states.prefixes.hits, self._cache
        if hits is None:
            return found, sources
        loads = cache.tier is not None and bool(self._table.host_prefix_tokens[rows, kind].any())
        self._from_host.clear()
        if loads:
            self._prepare_loads(rows, kind)
        found += self._table.cached_prefix_tokens[rows, kind]  # 0 for running rows
        for i in np.flatnonzero(found).tolist():
            row, owner = int(rows[i]), int(self._table.rank[rows[i]])
            of_kind, is_converted = int(kind[i]), begins is not None and bool(begins[i])
            if loads:  # earlier rows may have evicted or loaded groups of its prefix
                found[i] = min(found[i], self._table.cached_prefix_tokens[row, of_kind])
                self._from_host[row] = min(int(self._table.host_prefix_tokens[row, of_kind]), int(found[i]))
            if hits.is_converted(row, of_kind) != is_converted:
                found[i] = 0
                continue
            if is_converted:
                if found[i] and cache.attach(owner, hits.found_nodes(row, of_kind), HIDDEN):
                    slots[i] = cache.slot_of(owner)
                else:
                    found[i] = 0
                continue
            num_groups, rest = divmod(int(found[i]), cache.block_sizes[of_kind])
            node = hits.node(row, of_kind)
            windowed = hits.windowed_nodes(row, int(found[i]))
            if num_groups and cache.attach(owner, node.path(num_groups), of_kind, windowed):
                slots[i] = cache.slot_of(owner)
            elif num_groups:
                found[i] = rest = 0
            if rest:
                source = cache.copy_source(node)
                if source is None:
                    found[i] -= rest
                else:
                    sources[row] = source
        return found, sources

    def count_restore(self, row: int, kind: int, found: int) -> int:
        """Update the counters of restored prefixes for a request that starts to run; returns how many of the `found`
        positions are copied from host memory."""
        copied, hits = self._from_host.pop(row, 0), self._states.prefixes.hits
        assert hits is not None
        copied = copied if found else 0
        self._counters.host_hit_tokens += copied
        if hits.is_converted(row, kind) and found:
            self._counters.restores["converted"] += 1
        elif copied:
            self._counters.restores[KIND_NAMES[kind]] += 1
        elif hits.node(row, kind).depth > -(-found // self._cache.block_sizes[kind]):
            self._counters.restores["recomputed"] += 1
        return copied

    def _prepare_loads(self, rows: NDArray[np.int32], kind: NDArray[np.int8]) -> None:
        """Check the copies of the rows' prefixes in host memory, drop lost copies from the cache, and pin the
        others."""
        hits, cache, table = self._states.prefixes.hits, self._cache, self._table
        assert hits is not None
        assert cache.tier is not None
        assert self._host_memory is not None
        nodes: dict[Node, None] = {}
        for i in np.flatnonzero(table.cached_prefix_tokens[rows, kind]).tolist():
            path = hits.found_nodes(int(rows[i]), int(kind[i]))
            cache.touch(path)
            nodes.update(dict.fromkeys(node for node in path if node.block == NULL_BLOCK))
        wanted = list(nodes)
        ready = self._host_memory.ready_to_load(np.array([block for node in wanted for block in node.host], np.int32))
        ends = np.cumsum([len(node.host) for node in wanted])
        lost = [node for node, end in zip(wanted, ends, strict=True) if not ready[end - len(node.host) : end].all()]
        self._counters.num_lost_groups += len(lost)
        cache.drop_lost(lost)
        cache.tier.pin([node for node in wanted if node.host])

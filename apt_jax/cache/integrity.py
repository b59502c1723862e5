"""Recounts the whole cache, and compares counters, block tables and the prefix index with the count."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache.block_pool import NO_OWNER, require
from apt_jax.cache.group_pool import GroupPool
from apt_jax.cache.placement import Placement
from apt_jax.cache.prefix_tree import Node, PrefixTree
from apt_jax.cache.windows import WindowTables
from apt_jax.core.kinds import NO_KIND, WINDOWED
from apt_jax.core.step import NULL_BLOCK


class CheckedCache(Protocol):
    """The part of `HybridCache` that `check_integrity` uses."""

    groups: GroupPool
    owner: NDArray[np.int64]
    kind: NDArray[np.int8]
    tables: NDArray[np.int32]
    num_groups: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    slot_by_owner: dict[int, int]
    free_slots: list[int]
    max_num_seqs: int
    block_sizes: tuple[int, int]
    prefixes: PrefixTree | None
    placement: Placement | None
    windows: WindowTables | None

    def num_blocks_of(self, slots: NDArray[np.int32]) -> NDArray[np.int32]: ...

    def block_tables(self, slots: NDArray[np.int32]) -> NDArray[np.int32]: ...


def check_integrity(cache: CheckedCache, alive: Iterable[int] | None = None) -> None:
    """Check that free and used blocks add up, holders are counted correctly, every owner is alive, and tables are
    valid.

    Args:
        cache: the cache to check.
        alive: owners that may hold cache; None: do not check the owners.

    Raises:
        CacheIntegrityError: the cache is inconsistent.
    """
    groups = cache.groups
    groups.pool.check_integrity()
    taken = np.flatnonzero(cache.owner != NO_OWNER).astype(np.int32)
    require(cache.slot_by_owner == {int(cache.owner[s]): int(s) for s in taken}, "slot map and owners differ")
    require(
        sorted([*cache.free_slots, *taken.tolist()]) == list(range(cache.max_num_seqs)), "a slot is lost or held twice"
    )
    free = cache.owner == NO_OWNER
    require(
        not cache.num_groups[free].any() and not cache.tables[free].any() and (cache.kind[free] == NO_KIND).all(),
        "a free slot holds blocks",
    )
    sizes = np.asarray(cache.block_sizes, np.int32)
    expected_groups = -(-cache.num_tokens // sizes[cache.kind])  # a free slot has no tokens
    require((cache.num_groups == expected_groups).all(), "a block table is not ceil(tokens / block size) long")
    require((cache.num_groups[taken] > 0).all(), "a slot is held without a block")
    whole = taken if cache.placement is None else taken[cache.placement.num_holes[taken] == 0]
    if whole.size:
        cache.block_tables(whole)
    if cache.placement is not None:
        cache.placement.check_integrity()
    num_listed = int(np.count_nonzero(cache.tables))
    if cache.windows is not None:
        cache.windows.check_integrity(taken)
        num_listed += int(np.count_nonzero(cache.windows.tables))
    require(num_listed == int(cache.num_blocks_of(taken).sum()), "a block table has entries beyond its groups")
    owned = _check_holders(cache, taken)
    most = 1 if cache.placement is None else 2
    require(cache.prefixes is not None or (groups.num_refs <= most).all(), "a block is owned twice")
    _check_prefixes(groups, owned)
    require(not groups.pool.is_free(owned).any(), "a block is both owned and free")
    lost = groups.pool.num_blocks - owned.size - groups.num_free
    require(lost == 0, f"{lost} blocks are lost")
    if alive is not None:
        gone = set(cache.slot_by_owner) - set(alive)
        require(not gone, f"owners {sorted(gone)} hold cache but are not alive")


def _check_holders(cache: CheckedCache, taken: NDArray[np.int32]) -> NDArray[np.int32]:
    """Recount the holders of every group; returns the ids of all blocks in use."""
    groups = cache.groups
    num_groups = cache.num_groups[taken]
    within = (np.arange(cache.tables.shape[2]) < num_groups[:, None]) & (cache.tables[taken, 0] != NULL_BLOCK)
    firsts, seconds = cache.tables[taken, 0][within], cache.tables[taken, 1][within]
    slots = np.repeat(taken, np.count_nonzero(within, axis=1))
    require((groups.second[firsts] == seconds).all(), "a slot holds a group with a wrong second block")
    kinds = cache.kind[slots]
    if cache.windows is not None:
        held_at = cache.windows.tables[taken, 0] != NULL_BLOCK
        windowed = cache.windows.tables[taken, 0][held_at]
        firsts, kinds = np.append(firsts, windowed), np.append(kinds, np.full(windowed.size, WINDOWED, np.int8))
        slots = np.append(slots, np.repeat(taken, np.count_nonzero(held_at, axis=1)) + cache.max_num_seqs)
    refs = np.bincount(firsts, minlength=groups.num_refs.size)
    require((refs == groups.num_refs).all(), "references are miscounted")
    held = np.flatnonzero(refs)
    require(_are_distinct(slots * np.int64(refs.size) + firsts), "a slot holds a group twice")
    private = np.bincount(slots[refs[firsts] == 1], minlength=groups.num_private.size)
    require((private == groups.num_private).all(), "private groups are miscounted")
    kind_of = np.full(refs.size, NO_KIND, np.int8)
    kind_of[firsts] = kinds
    require((kind_of[firsts] == kinds).all(), "a group is held with two kinds")
    for first in held[groups.prefixes.is_registered[held]].tolist():
        node = groups.prefixes.node_of.get(first)
        require(node is None or node.kind == kind_of[first], "a group is registered under another kind")
    in_use = [int(np.count_nonzero(kind_of[held] == kind)) for kind in range(len(groups.in_use))]
    require(in_use == groups.in_use, "groups in use are miscounted")
    sums = np.zeros(refs.size, np.int64)
    np.add.at(sums, firsts, slots)
    require((sums[held] == groups.slot_sum[held]).all(), "holders are miscounted")
    owned = _blocks_of(groups, held)
    require(_are_distinct(owned), "a block is owned twice")
    return owned


def _are_distinct(values: NDArray[np.integer]) -> bool:
    ordered = np.sort(values)
    return not (ordered[1:] == ordered[:-1]).any()


def _blocks_of(groups: GroupPool, firsts: NDArray[np.integer]) -> NDArray[np.int32]:
    rest = groups.rest[firsts]
    return np.concatenate([firsts, rest[rest != NULL_BLOCK]]).astype(np.int32)


def _check_prefixes(groups: GroupPool, owned: NDArray[np.int32]) -> None:
    """Check idle and registered groups against the blocks in use, and the index of prefixes against their tree."""
    prefixes, refs = groups.prefixes, groups.num_refs
    idle = np.array(list(prefixes.idle), np.int32)
    nowhere = groups.tier is None or not groups.tier.pool.num_used
    if not (idle.size or prefixes.node_of or prefixes.is_registered.any()) and nowhere:  # nothing is cached
        require(groups.num_idle_blocks == 0, "idle blocks are miscounted")
        require(
            not any(root.children or prefixes.num_nodes(root.kind) for root in prefixes.roots), "index and tree differ"
        )
        return
    require(not refs[idle].any(), "a group is both held and idle")
    unused = _blocks_of(groups, idle)
    require(unused.size == groups.num_idle_blocks, "idle blocks are miscounted")
    require(not groups.pool.is_free(unused).any(), "an idle block is free as well")
    require(_are_distinct(np.concatenate([owned, unused])), "an idle block is owned as well, or idle twice")
    registered = np.flatnonzero(prefixes.is_registered).tolist()
    require(registered == sorted(prefixes.node_of), "index and blocks differ")
    reached = [n for root in prefixes.roots for c in root.children for n in prefixes.subtree(c)]
    resident = [node for node in reached if node.block != NULL_BLOCK]
    require(len(resident) == len(registered), "blocks and tree differ")
    require(len(reached) == sum(prefixes.num_nodes(root.kind) for root in prefixes.roots), "index and tree differ")
    if groups.tier is None:
        require(len(resident) == len(reached), "a registered group is not on the device")
    else:
        groups.tier.check_integrity(reached, prefixes)
    require(
        (prefixes.is_registered[idle] | groups.is_expected[idle]).all(),
        "an idle group is neither registered nor expected",
    )
    require(not (prefixes.is_registered & groups.is_expected).any(), "a group is both registered and expected")
    for node in resident:
        _check_node(groups, node)


def _check_node(groups: GroupPool, node: Node) -> None:
    prefixes, refs, parent = groups.prefixes, groups.num_refs, node.parent
    require(
        prefixes.node_of[node.block] is node
        and prefixes.find(node.kind, node.digest) is node
        and parent is not None
        and parent.kind == node.kind,
        "a node and its index entry differ",
    )
    require(refs[node.block] or node.block in prefixes.idle, "a registered group is neither held nor idle")
    require(
        np.count_nonzero(groups.rest[node.block]) == groups.blocks_per_group[node.kind] - 1,
        "a registered group has the blocks of another kind",
    )
    require(
        parent is None or not parent.depth or refs[parent.block] >= refs[node.block],  # block 0 is never held
        "a group is held without the groups before it",
    )

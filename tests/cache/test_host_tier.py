"""Which groups may leave host memory, and which may be loaded."""

import numpy as np

from apt_jax.cache.group_pool import GroupPool
from apt_jax.cache.host_tier import HostTier
from apt_jax.cache.prefix_tree import Node, PrefixTree
from apt_jax.core.step import NULL_BLOCK


class _Waiting:
    """The least urgent of these groups that is not to be skipped."""

    def __init__(self, *nodes: Node) -> None:
        self._nodes = nodes

    def least_urgent(self, skip: set[Node]) -> Node | None:
        return next((node for node in self._nodes if node not in skip), None)


def full_tier(num: int) -> tuple[HostTier, PrefixTree, list[Node]]:
    """A tier of `num` blocks with a chain of as many groups of one block, the first of which is the root's child. All of
    them are in host memory alone, the beginning used least recently."""
    tier, tree = HostTier(num, (2, 1)), PrefixTree(num, 2)
    chain: list[Node] = []
    for number in range(num):
        node = Node(1, bytes([number]), chain[-1] if chain else tree.roots[1], NULL_BLOCK)
        tree.add_node(node)
        ids = tier.pool.allocate(1)
        assert ids is not None
        node.host = tuple(ids.tolist())
        tier.note_place(node)
        chain.append(node)
    return tier, tree, chain


def test_what_a_group_builds_on_is_not_dropped_for_it():
    tier, _, (first, second, third) = full_tier(3)
    new = Node(1, b"new", second, NULL_BLOCK)  # read from disk, below the second
    assert tier.victim(new, None) is third
    tier.forget(third)
    assert tier.victim(new, None) is None
    new.num_below = 1
    assert tier.victim(new, _Waiting(second)) is None
    assert tier.victim(new, _Waiting(third)) is third
    assert tier.victim(Node(1, b"other", first, NULL_BLOCK), None) is second


def test_copies_that_the_step_loads_or_saves_are_not_dropped():
    tier, tree, (first, second, third) = full_tier(3)
    new = Node(1, b"new", third, NULL_BLOCK)
    for node, block in ((first, 1), (second, 2)):
        tier.pin([node])
        tree.place(node, block)
        tier.load(node, [block])  # it is on the device too
    assert tier.victim(new, None) is None
    tier.take_transfers()
    assert tier.victim(new, None) is first
    tier.saves[first] = (1,)
    assert tier.victim(new, None) is second


def test_groups_evicted_by_the_step_that_is_built_are_not_loaded_by_it():
    """Saves and loads of a step run at the same time."""
    groups = GroupPool(num_blocks=1, max_num_seqs=2, blocks_per_group=(2, 1), num_host_blocks=2)
    tier = groups.tier
    assert tier is not None
    ids = groups.allocate(1)
    assert ids is not None
    groups.hold_new(ids, NULL_BLOCK, 0)
    groups.in_use[1] += 1
    node = groups.prefixes.add(groups.prefixes.roots[1], b"a", int(ids[0]))
    groups.release(ids.reshape(1, 1), 0, 1)
    taken = groups.allocate(1)  # the group is saved
    assert taken is not None
    assert (node.block, list(tier.saves)) == (NULL_BLOCK, [node])
    groups.pool.free(taken)
    assert groups.copy_source(node) is None
    assert groups.share([node], 0) is None
    assert groups.pool.num_free == 1
    saves, loads = tier.take_transfers()
    assert (len(saves), len(loads)) == (1, 0)
    tier.pin([node])  # in the next step
    source = groups.copy_source(node)
    assert source is not None
    assert source.group is node
    firsts = groups.share([node], 0)
    assert firsts is not None
    assert np.array_equal(firsts, [node.block])


def test_a_group_is_saved_once():
    tier, _, (node,) = full_tier(1)
    before = node.host
    assert tier.save(node, (5,))
    assert (node.host, tier.saves) == (before, {})
    other = Node(1, b"other", node, 5)
    assert tier.save(other, (5,)) is False
    tier.forget(node)
    assert tier.save(other, (5,))
    assert tier.saves == {other: (5,)}

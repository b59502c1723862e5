"""The longest cached prefix of each waiting request, kept up to date by events.

`PrefixHitTracker` keeps, for each waiting request and kind, the deepest node of its tokens, and writes what it would
find cached into the `RequestTable` that policies read. A request awaits the digest of its first missing group and is
listed in the node that it has reached, so that an event costs what it concerns, and an iteration without events costs
nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache.prefix_tree import Node, PrefixTree
from apt_jax.sched.request_table import RequestTable


class PrefixHitTracker:
    """Prefix hits of waiting requests, kept up to date in `RequestTable.cached_prefix_tokens` and `shared_prefix_blocks`.

    Args:
        tree: registered groups.
        table: written to.
        num_refs: (num_blocks + 1,) requests that hold a group, by its first block; read only, changed by its owner.
        block_sizes: positions of a group, by kind.
        blocks_per_group: by kind.
    """

    def __init__(
        self,
        tree: PrefixTree,
        table: RequestTable,
        num_refs: NDArray[np.int32],
        block_sizes: Sequence[int],
        blocks_per_group: Sequence[int],
    ) -> None:
        self._tree = tree
        self._table = table
        self._num_refs = num_refs
        self._block_sizes = tuple(block_sizes)
        self._per_group = tuple(blocks_per_group)
        self._place: dict[int, dict[int, Node]] = {}
        self._digests: dict[int, Sequence[list[bytes]]] = {}
        self._awaited: list[dict[bytes, set[int]]] = [{} for _ in self._per_group]

    # --- requests --------------------------------------------------------------------------------------------------

    def begin(self, row: int, digests: Sequence[list[bytes]], kinds: Sequence[int]) -> None:
        """Track a request that waits for one of `kinds`; `digests` are those of all its full groups, by kind."""
        if row in self._place:
            self.end(row)
        self._digests[row] = digests
        self._place[row] = {}
        for kind in kinds:
            self._enter(row, self._deepest(self._tree.roots[kind], digests[kind]))

    def end(self, row: int) -> None:
        """Stop tracking a request."""
        places = self._place.pop(row, None)
        if places is None:
            return
        for node in places.values():
            self._leave(row, node)
        del self._digests[row]
        self._table.cached_prefix_tokens[row] = 0
        self._table.shared_prefix_blocks[row] = 0

    def node(self, row: int, kind: int) -> Node:
        """The node where the longest cached prefix of a waiting request ends."""
        return self._place[row][kind]

    def _deepest(self, node: Node, digests: list[bytes]) -> Node:
        find, kind = self._tree.find, node.kind
        for digest in digests[node.depth :]:
            below = find(kind, digest)
            if below is None:
                break
            node = below
        return node

    def _enter(self, row: int, node: Node) -> None:
        self._place[row][node.kind] = node
        node.rows.add(row)
        digests = self._digests[row][node.kind]
        if node.depth < len(digests):
            self._awaited[node.kind].setdefault(digests[node.depth], set()).add(row)
        used, at = 0, node
        while at.depth:
            if not used and self._num_refs[at.block]:
                used = at.depth  # who holds a node holds its ancestors
            at.num_below += 1
            assert at.parent is not None
            at = at.parent
        self._write(row, node, used)

    def _leave(self, row: int, node: Node) -> None:
        node.rows.discard(row)
        digests = self._digests[row][node.kind]
        if node.depth < len(digests):
            awaited = self._awaited[node.kind]
            rows = awaited[digests[node.depth]]
            rows.discard(row)
            if not rows:
                del awaited[digests[node.depth]]
        at = node
        while at.depth:
            at.num_below -= 1
            assert at.parent is not None
            at = at.parent

    def _write(self, row: int, node: Node, used: int) -> None:
        """Write the hit; the last token is always computed, as its logits are not cached."""
        table, kind = self._table, node.kind
        size = self._block_sizes[kind]
        tokens = min(node.depth * size, int(table.num_tokens[row]) - 1)
        table.cached_prefix_tokens[row, kind] = tokens
        table.shared_prefix_blocks[row, kind] = min(used, tokens // size) * self._per_group[kind]

    # --- events ----------------------------------------------------------------------------------------------------

    def registered(self, nodes: Sequence[Node]) -> None:
        """Note that these nodes are new."""
        for new in nodes:
            for row in sorted(self._awaited[new.kind].get(new.digest, ())):
                self._leave(row, self._place[row][new.kind])
                self._enter(row, self._deepest(new, self._digests[row][new.kind]))

    def dropped(self, nodes: Sequence[Node]) -> None:
        """Note that this subtree, parents first, is about to be removed."""
        top = nodes[0]
        if not top.num_below:
            return
        assert top.parent is not None
        for node in nodes:
            for row in sorted(node.rows):
                self._leave(row, node)
                self._enter(row, top.parent)

    def used(self, node: Node) -> None:
        """Note that the node, and nodes below it, have got their first holder or lost their last."""
        if not node.num_below:
            return
        above = node.parent
        assert above is not None
        todo = [(node, above.depth)]
        while todo:
            node, used = todo.pop()
            if used == node.depth - 1 and self._num_refs[node.block]:
                used = node.depth
            for row in node.rows:
                self._write(row, node, used)
            todo.extend((below, used) for below in node.children if below.num_below)

"""The longest cached prefix of each waiting request, kept up to date by events.

`PrefixHitTracker` keeps, for each waiting request and kind, the deepest node of its tokens, and writes what it would
find cached into the `RequestTable` that policies read. A request awaits the digest of its first missing group and is
listed in the node that it has reached, so that an event costs what it concerns, and an iteration without events costs
nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache.prefix_tree import Node, PrefixTree
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import NULL_BLOCK
from apt_jax.sched.request_table import RequestTable


class _Placed(NamedTuple):
    """Where the groups of a path are."""

    held: int
    """Groups from the root that requests hold."""
    resident: int
    """Groups before the first one that is only in host memory."""
    num_host: int
    """Groups that are only in host memory."""


class Hit(NamedTuple):
    """Cached prefix of a waiting request, with one kind."""

    tokens: int
    """Positions that need no computing."""
    host: int
    """Positions that are copied from host memory, a part of the cached ones."""
    held_blocks: int
    """Blocks that requests hold already."""


class PrefixHitTracker:
    """Prefix hits of waiting requests, kept up to date in `RequestTable.cached_prefix_tokens`, `host_prefix_tokens` and
    `shared_prefix_blocks`.

    Args:
        tree: registered groups.
        table: written to.
        num_refs: (num_blocks + 1,) requests that hold a group, by its first block; read only, changed by its owner.
        block_sizes: positions of a group, by kind.
        blocks_per_group: by kind.

    Attributes:
        converts: tells whether a request had better begin with keys and values computed from cached layer inputs: asked
            with what it would so begin with, what it finds as keys and values, and all its positions; None: it never
            does.
        restores: tells whether groups in host memory are worth copying: asked with the kind, the cached positions, how
            many of them precede the first in host memory, how many are in host memory, and all positions; None: they
            always are.
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
        self.restores: Callable[[int, int, int, int, int], bool] | None = None
        self.converts: Callable[[Hit, Hit, int], bool] | None = None
        self._own: dict[tuple[int, int], Hit] = {}
        """Cached prefixes of waiting requests without conversion, by row and kind; kept where they may convert."""
        self._converted: set[int] = set()
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
        for kind in places:
            self._own.pop((row, kind), None)
        self._converted.discard(row)
        self._table.cached_prefix_tokens[row] = 0
        self._table.host_prefix_tokens[row] = 0
        self._table.shared_prefix_blocks[row] = 0

    @property
    def any_converted(self) -> bool:
        """True if any waiting request would so begin."""
        return bool(self._converted)

    def is_converted(self, row: int, kind: int) -> bool:
        """True if a waiting request that begins with this kind begins with layer inputs that are converted."""
        return kind == KV and row in self._converted

    def kinds_of(self, row: int) -> list[int]:
        """The kinds that a waiting request may begin with."""
        return list(self._place[row])

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
        at = node
        while at.depth:
            at.num_below += 1
            assert at.parent is not None
            at = at.parent
        self._write(row, node, self._placed(node))

    def _placed(self, node: Node) -> "_Placed":
        """Where the groups of the path to a node are."""
        held = resident = num_host = 0
        at = node
        while at.depth:
            if at.block == NULL_BLOCK:
                num_host += 1
                held = resident = 0
            else:
                resident = resident or at.depth
                if not held and self._num_refs[at.block]:
                    held = at.depth  # who holds a node holds its ancestors
            assert at.parent is not None
            at = at.parent
        return _Placed(held, resident, num_host)

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

    def _write(self, row: int, node: Node, placed: "_Placed") -> None:
        """Write the hit; the last token is always computed, as its logits are not cached."""
        table, kind = self._table, node.kind
        size = self._block_sizes[kind]
        tokens, host = self.usable(kind, node.depth, placed.resident, placed.num_host, int(table.num_tokens[row]) - 1)
        shared = min(placed.held, tokens // size) * self._per_group[kind]
        hit = Hit(tokens, host, shared)
        self._show(row, kind, hit)
        if self.converts is not None:
            self._own[row, kind] = hit
            kv, inputs = self._own.get((row, KV)), self._own.get((row, HIDDEN))
            converted = self.by_conversion(kv, inputs, int(table.num_tokens[row]))
            if converted is not None:
                self._converted.add(row)
                self._show(row, KV, converted)
            elif row in self._converted:
                self._converted.remove(row)
                if kv is not None:
                    self._show(row, KV, kv)

    def _show(self, row: int, kind: int, hit: "Hit") -> None:
        table = self._table
        table.cached_prefix_tokens[row, kind], table.host_prefix_tokens[row, kind] = hit.tokens, hit.host
        table.shared_prefix_blocks[row, kind] = hit.held_blocks

    def by_conversion(self, kv: "Hit | None", inputs: "Hit | None", total: int) -> "Hit | None":
        """The hit of a request that begins with keys and values computed from cached layer inputs; None: it had better
        begin with cached keys and values, or with nothing.

        Args:
            kv, inputs: what it finds as keys and values, and as layer inputs; None: that is not on offer.
            total: its positions.
        """
        if self.converts is None or kv is None or inputs is None:
            return None
        size = self._block_sizes[HIDDEN]
        tokens = inputs.tokens // size * size  # whole groups: nothing is copied
        host = min(inputs.host, tokens)
        if not tokens or not self.converts(Hit(tokens, host, 0), kv, total):
            return None
        return Hit(tokens, host, 0)

    def usable(self, kind: int, num_groups: int, resident: int, num_host: int, most: int) -> tuple[int, int]:
        """Positions of a cached path that need no computing, and how many of them are copied from host memory.

        Args:
            num_groups: of the path.
            resident: those before the first that is in host memory alone.
            num_host: those that are in host memory alone.
            most: positions that may be cached at all.
        """
        size = self._block_sizes[kind]
        tokens = min(num_groups * size, most)
        if not num_host:
            return tokens, 0
        host = min(num_host * size, tokens)
        if self.restores is not None and not self.restores(kind, tokens, min(resident * size, tokens), host, most + 1):
            return min(resident * size, most), 0
        return tokens, host

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
        """Note that the node, and nodes below it, have got their first holder or lost their last, or that the node has
        come to the device or left it."""
        if not node.num_below:
            return
        assert node.parent is not None
        todo = [(node, self._placed(node.parent))]
        while todo:
            node, above = todo.pop()
            held, resident, num_host = above
            if node.block == NULL_BLOCK:
                num_host += 1
            elif not num_host:
                resident = node.depth
                if held == node.depth - 1 and self._num_refs[node.block]:
                    held = node.depth
            placed = _Placed(held, resident, num_host)
            for row in node.rows:
                self._write(row, node, placed)
            todo.extend((below, placed) for below in node.children if below.num_below)

    def refresh(self) -> None:
        """Write all hits again, after `restores` has changed its mind."""
        for row, places in self._place.items():
            for node in places.values():
                self._write(row, node, self._placed(node))

    # --- host memory -----------------------------------------------------------------------------------------------

    def found_nodes(self, row: int, kind: int) -> list[Node]:
        """Groups that a waiting request would begin with, or with a copy of the last of them."""
        if kind == KV and row in self._converted:
            tokens = int(self._table.cached_prefix_tokens[row, KV])
            return self._place[row][HIDDEN].path(tokens // self._block_sizes[HIDDEN])
        tokens = int(self._table.cached_prefix_tokens[row, kind])
        return self._place[row][kind].path(-(-tokens // self._block_sizes[kind]))

    def least_urgent(self, skip: set[Node]) -> Node | None:
        """The last group in host memory of the request that can best do without: a best-effort one, else the one that
        has most time left; none of `skip`."""
        table = self._table
        rows = np.flatnonzero(table.host_prefix_tokens.any(axis=1))
        first = table.num_delivered[rows] == 0
        deadline_s = table.last_token_s[rows] + np.where(first, table.slo_ttft_s[rows], table.slo_tbt_s[rows])
        for i in np.lexsort((-table.rank[rows], -deadline_s, ~table.best_effort[rows])).tolist():
            for kind in self._place[int(rows[i])]:
                for node in reversed(self.found_nodes(int(rows[i]), kind)):
                    if node.block == NULL_BLOCK and node not in skip:
                        return node
        return None

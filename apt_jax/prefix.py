"""Which cached prefixes there are, and which of them the waiting requests could use; knows no device.

A *group* (`apt_jax.cache`: positions of one kind that share blocks) that is full and whose contents are known to be good may
be registered under the digest of all tokens up to its end. Registered groups form a tree a kind:

    root ── A ── B ── C        a node is a group: node.block is its K or X block
             └── D ── E        a path from the root is a prefix that need not be computed again

    digest of a node = blake2b-128(digest of its parent, tokens of the group); that of the root holds a salt

The digest of a root is drawn by the engine and never leaves it, so nobody can name another's prefix; kinds have trees of
their own, so a group is never found under the wrong one. A node is there only as long as its parent is.

`HitWatch` keeps, for each waiting request and kind, the deepest node of its tokens, and writes into the `RequestTable` what
policies reckon with. It is told what changes: a request awaits the digest of its first group that is missing, and sits in
the node that it has reached, so that an event costs what it concerns and an iteration without events nothing.
"""

import collections
import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.executor import NULL_BLOCK
from apt_jax.sched.view import RequestTable

DIGEST_BYTES = 16


def root_digest(salt: bytes, tenant_salt: bytes = b"") -> bytes:
    """Where the prefixes of an engine (and of a tenant, if they shall be kept apart) begin."""
    return hashlib.blake2b(tenant_salt, digest_size=DIGEST_BYTES, key=salt).digest()


def extend_digests(
    digests: list[bytes], root: bytes, tokens: NDArray[np.int32], block_size: int
) -> None:
    """Append the digests of the full groups, of `block_size` tokens, of `tokens` that `digests` does not have yet."""
    num = len(digests)
    full = tokens.size // block_size
    if num >= full:
        return
    data = tokens[num * block_size : full * block_size].astype("<i4").tobytes()
    step = 4 * block_size
    parent = digests[-1] if digests else root
    for at in range(0, len(data), step):
        parent = hashlib.blake2b(parent + data[at : at + step], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


class Node:
    """A registered group, or a root (depth 0, no block)."""

    __slots__ = ("block", "children", "depth", "digest", "kind", "num_below", "parent", "rows")

    def __init__(self, kind: int, digest: bytes, parent: "Node | None", block: int) -> None:
        self.kind = kind
        self.digest = digest
        self.parent = parent
        self.block = block
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: set[Node] = set()
        self.rows: set[int] = set()
        """Waiting requests whose longest cached prefix ends here."""
        self.num_below = 0
        """Those that end here or in a descendant; not counted in a root."""

    def path(self, num: int) -> list["Node"]:
        """The first `num` nodes of the path from the root, which is left out."""
        node, nodes = self, []
        while node.depth:
            if node.depth <= num:
                nodes.append(node)
            assert node.parent is not None
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """Registered groups by digest, and groups that nobody holds, least recently used first.

    Attributes:
        idle: first blocks of groups that no request holds and that may be found again: registered ones, and those of
            a step in flight that will be. They count as free, and are given away from the front.
        node_of: nodes by first block.
        is_registered: (num_blocks + 1,) whether a first block has a node.
    """

    def __init__(self, num_blocks: int, num_kinds: int) -> None:
        self.roots = [Node(kind, b"", None, NULL_BLOCK) for kind in range(num_kinds)]
        self._by_digest: list[dict[bytes, Node]] = [{} for _ in range(num_kinds)]
        self.node_of: dict[int, Node] = {}
        self.is_registered = np.zeros(num_blocks + 1, np.bool_)
        self.idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    def find(self, kind: int, digest: bytes) -> Node | None:
        return self._by_digest[kind].get(digest)

    def add(self, parent: Node, digest: bytes, block: int) -> Node:
        node = Node(parent.kind, digest, parent, block)
        parent.children.add(node)
        self._by_digest[parent.kind][digest] = node
        self.node_of[block] = node
        self.is_registered[block] = True
        return node

    def subtree(self, node: Node) -> list[Node]:
        """The node and all below it, parents first."""
        nodes = [node]
        for each in nodes:
            nodes.extend(each.children)
        return nodes

    def remove(self, nodes: Sequence[Node]) -> None:
        """Forget a whole subtree, parents first; blocks are the caller's business."""
        top = nodes[0]
        assert top.parent is not None
        top.parent.children.discard(top)
        for node in nodes:
            del self._by_digest[node.kind][node.digest]
            del self.node_of[node.block]
            self.is_registered[node.block] = False

    def num_nodes(self, kind: int) -> int:
        return len(self._by_digest[kind])


class HitWatch:
    """What waiting requests would find cached, kept up to date in `RequestTable.hit_tokens` and `hit_blocks`.

    Args:
        tree: registered groups.
        table: written to.
        num_refs: (num_blocks + 1,) requests that hold a group, by its first block; read only, may change under it.
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
        """A request waits, with one of `kinds`; `digests` are those of all its full groups, by kind."""
        if row in self._place:
            self.end(row)
        self._digests[row] = digests
        self._place[row] = {}
        for kind in kinds:
            self._enter(row, self._deepest(self._tree.roots[kind], digests[kind]))

    def end(self, row: int) -> None:
        """The request waits no more."""
        places = self._place.pop(row, None)
        if places is None:
            return
        for node in places.values():
            self._leave(row, node)
        del self._digests[row]
        self._table.hit_tokens[row] = 0
        self._table.hit_blocks[row] = 0

    def node(self, row: int, kind: int) -> Node:
        """Where the longest cached prefix of a waiting request ends."""
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
        """The last token is computed in any case: its logits are not cached."""
        table, kind = self._table, node.kind
        size = self._block_sizes[kind]
        tokens = min(node.depth * size, int(table.num_tokens[row]) - 1)
        table.hit_tokens[row, kind] = tokens
        table.hit_blocks[row, kind] = min(used, tokens // size) * self._per_group[kind]

    # --- events ----------------------------------------------------------------------------------------------------

    def registered(self, nodes: Sequence[Node]) -> None:
        """These nodes are new."""
        for new in nodes:
            for row in sorted(self._awaited[new.kind].get(new.digest, ())):
                self._leave(row, self._place[row][new.kind])
                self._enter(row, self._deepest(new, self._digests[row][new.kind]))

    def dropped(self, nodes: Sequence[Node]) -> None:
        """This subtree, parents first, is about to go."""
        top = nodes[0]
        if not top.num_below:
            return
        assert top.parent is not None
        for node in nodes:
            for row in sorted(node.rows):
                self._leave(row, node)
                self._enter(row, top.parent)

    def used(self, node: Node) -> None:
        """The node, and nodes below it, are held by somebody now or by nobody any more."""
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

    def clear(self) -> None:
        """Every node is about to go."""
        for row, places in list(self._place.items()):
            for kind, node in list(places.items()):
                self._leave(row, node)
                self._enter(row, self._tree.roots[kind])

"""The tree of registered groups: the index of cached prefixes.

A *group* is a range of positions of one kind that lie in the same blocks (`apt_jax.cache.hybrid_cache`). A full group
with valid contents may be registered under the digest of all tokens up to its end. Registered groups form one tree per
kind:

    root ── A ── B ── C        a node is a group: node.block is its K or X block
             └── D ── E        a path from the root is a prefix that need not be computed again

    digest of a node = blake2b-128(digest of its parent, tokens of the group); the root digest depends on a salt

A group may lie in blocks of the device (`Node.block`), in blocks of host memory (`Node.host`,
`apt_jax.cache.host_tier`), or in both: contents of registered groups never change, so the copies are equal. A node
whose group is in neither is removed.

The root digest depends on a salt that is never sent to clients, so they cannot guess the digest of a prefix. Each kind
has its own tree, so a group is never found under the wrong kind. A node exists only as long as its parent does.
"""

import array
import collections
import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import WINDOWED, WindowSpec
from apt_jax.core.step import NULL_BLOCK

DIGEST_BYTES = 16
_WAYS = 4
"""Number of former groups remembered for the same bits of their digests."""


def root_digest(salt: bytes, tenant_salt: bytes = b"") -> bytes:
    """Return the root digest of an engine's prefixes, or of a tenant's prefixes if tenants do not share them."""
    return hashlib.blake2b(tenant_salt, digest_size=DIGEST_BYTES, key=salt).digest()


def extend_digests(digests: list[bytes], root: bytes, tokens: NDArray[np.int32], block_size: int) -> None:
    """Append to `digests` the missing digests of the full groups of `tokens`, with `block_size` tokens per group."""
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

    __slots__ = (
        "block",
        "children",
        "depth",
        "digest",
        "host",
        "host_is_downward",
        "kind",
        "num_below",
        "parent",
        "rows",
        "session",
    )

    def __init__(self, kind: int, digest: bytes, parent: "Node | None", block: int) -> None:
        self.kind = kind
        self.digest = digest
        self.parent = parent
        self.block = block
        """First block on the device; `NULL_BLOCK`: the group is only in host memory."""
        self.host: tuple[int, ...] = ()
        """Blocks in host memory, as many as on the device; empty: the group is only on the device."""
        self.host_is_downward = False
        """True: positions fill the blocks in host memory from the right end (`Placement`)."""
        self.session = 0
        """Session of a group that is only in host memory (`apt_jax.cache.session_groups`)."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: set[Node] = set()
        self.rows: set[int] = set()
        """Rows of waiting requests whose longest cached prefix ends here."""
        self.num_below = 0
        """Number of waiting requests whose prefix ends here or in a descendant; not counted in a root."""

    def path(self, num: int) -> list["Node"]:
        """Return the first `num` nodes of the path from the root to this node, without the root."""
        node, nodes = self, []
        while node.depth:
            if node.depth <= num:
                nodes.append(node)
            assert node.parent is not None
            node = node.parent
        return nodes[::-1]


class IdleGroups(collections.OrderedDict[int, None]):
    """First blocks of idle groups, least recently used first."""

    def add(self, first: int, kind: int, session: int) -> None:
        """Add the most recently used group."""
        self[first] = None

    def victim(self) -> int:
        """Return the group to evict next."""
        return next(iter(self))


class FormerGroups:
    """Digests of groups that were registered and are not any more. Later ones replace earlier ones.

    Args:
        num_groups: most groups that are registered at once; four times as many are remembered, 8 bytes each.
    """

    def __init__(self, num_groups: int) -> None:
        sets = 1 << min(max(num_groups, 256), 1 << 18).bit_length()
        self._keys = array.array("Q", bytes(8 * _WAYS * sets))
        self._sets = np.frombuffer(self._keys, np.uint64).reshape(sets, _WAYS)

    def add(self, digest: bytes) -> None:
        key = int.from_bytes(digest[:8], "little")
        first = _WAYS * (key & (len(self._sets) - 1))
        held = self._keys[first : first + _WAYS]
        if key not in held:  # the set's latest comes first
            held.pop()
            held.insert(0, key)
            self._keys[first : first + _WAYS] = held

    def count(self, digests: Sequence[bytes]) -> int:
        """Return how many of these digests of unregistered groups are remembered."""
        if not digests:
            return 0
        parts = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), -1)[:, :8]
        keys = np.zeros((len(digests), 8), np.uint8)
        keys[:, : parts.shape[1]] = parts
        keys = keys.view("<u8")
        held = self._sets[keys[:, 0] & np.uint64(len(self._sets) - 1)]
        return int(np.count_nonzero((held == keys).any(axis=1)))


class PrefixTree:
    """Registered groups by digest, and idle groups, least recently used first.

    Attributes:
        idle: first blocks of groups without a holder that are registered or filled by a step in flight. They count as
            free, and are evicted from the front.
        node_of: nodes by first block.
        is_registered: (num_blocks + 1,) True for first blocks that have a node.
        former: groups that were registered.
    """

    def __init__(self, num_blocks: int, num_kinds: int, num_host_blocks: int = 0) -> None:
        self.roots = [Node(kind, b"", None, NULL_BLOCK) for kind in range(num_kinds)]
        self._by_digest: list[dict[bytes, Node]] = [{} for _ in range(num_kinds)]
        self.node_of: dict[int, Node] = {}
        self.is_registered = np.zeros(num_blocks + 1, np.bool_)
        self.idle = IdleGroups()
        self.former = FormerGroups(num_blocks + num_host_blocks)

    def find(self, kind: int, digest: bytes) -> Node | None:
        return self._by_digest[kind].get(digest)

    def add(self, parent: Node, digest: bytes, block: int) -> Node:
        node = Node(parent.kind, digest, parent, block)
        self.add_node(node)
        self.place(node, block)
        return node

    def add_node(self, node: Node) -> None:
        """Register a node that is not on the device and whose parent is set."""
        assert node.parent is not None
        node.parent.children.add(node)
        self._by_digest[node.kind][node.digest] = node

    def place(self, node: Node, block: int) -> None:
        """Record that the group of a node is now on the device, with this first block."""
        node.block = block
        self.node_of[block] = node
        self.is_registered[block] = True

    def displace(self, node: Node) -> None:
        """Record that a group that is also in host memory leaves the device; the caller frees its device blocks."""
        del self.node_of[node.block]
        self.is_registered[node.block] = False
        node.block = NULL_BLOCK

    def subtree(self, node: Node) -> list[Node]:
        """Return a node and its descendants, parents first."""
        nodes = [node]
        for each in nodes:
            nodes.extend(each.children)
        return nodes

    def remove(self, nodes: Sequence[Node]) -> None:
        """Unregister the nodes of a whole subtree, listed parents first; the caller frees the blocks."""
        top = nodes[0]
        assert top.parent is not None
        top.parent.children.discard(top)
        for node in nodes:
            del self._by_digest[node.kind][node.digest]
            self.former.add(node.digest)
            if node.block != NULL_BLOCK:
                del self.node_of[node.block]
                self.is_registered[node.block] = False

    def usable(self, windows: WindowSpec, digests: Sequence[bytes], tokens: int, step: int) -> int:
        """Return the largest multiple of `step`, at most `tokens`, at which all groups of windowed layers that the next
        token attends to are registered.

        Args:
            digests: digests of a request's full groups of windowed layers.
            step: a multiple of `windows.block_size`.
        """
        size = windows.block_size
        tokens = min(tokens, len(digests) * size) // step * step
        while tokens > 0:
            first, at = windows.first_group(tokens), tokens // size - 1
            while at >= first and self.find(WINDOWED, digests[at]) is not None:
                at -= 1
            if at < first:
                return tokens
            tokens = at * size // step * step  # a window that ends before the missing group
        return 0

    def windowed_nodes(self, windows: WindowSpec, digests: Sequence[bytes], tokens: int) -> list[Node]:
        """Return the registered groups of windowed layers that the token after `tokens` positions attends to."""
        span = range(windows.first_group(tokens), tokens // windows.block_size)
        found = (self.find(WINDOWED, digests[at]) for at in span)
        return [node for node in found if node is not None]

    def num_nodes(self, kind: int) -> int:
        return len(self._by_digest[kind])

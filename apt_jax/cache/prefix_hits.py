"""The longest cached prefix of each waiting request, kept up to date by events.

`PrefixHitTracker` keeps, for each waiting request and kind, the deepest registered node of its tokens, and writes the
cached prefix length into the `RequestTable` that policies read. A request is listed in the last node of its cached
prefix, and under the digest of its first missing group, so an event touches only the requests that it affects, and an
iteration without events has no cost.

A path may have thousands of groups, which are evicted one by one from its end. So a hit that becomes shorter is updated
without a walk along the path, and several groups that move between device and host memory share one (`together`).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache.prefix_tree import Node, PrefixTree
from apt_jax.core.kinds import HIDDEN, KV, WINDOWED, WindowSpec
from apt_jax.core.step import NULL_BLOCK
from apt_jax.sched.request_table import RequestTable


class _Placed(NamedTuple):
    """Numbers of groups on a path from the root, by location."""

    held: int
    """Number of consecutive groups from the root that requests hold, or that are kept."""
    resident: int
    """Number of groups before the first group that is only in host memory."""
    num_host: int
    """Number of groups that are only in host memory."""


class Hit(NamedTuple):
    """Cached prefix of a waiting request for one cache kind."""

    tokens: int
    """Number of positions that need not be computed."""
    host: int
    """Number of positions copied from host memory; part of `tokens`."""
    held_blocks: int
    """Number of blocks of the prefix that other requests already hold."""


class PrefixHitTracker:
    """Prefix hits of waiting requests, kept up to date in `RequestTable.cached_prefix_tokens`, `host_prefix_tokens` and
    `shared_prefix_blocks`.

    Args:
        tree: registered groups.
        table: request table to update.
        num_refs: (num_blocks + 1,) number of holders of a group, indexed by first block; never written here.
        is_kept: (num_blocks + 1,) True: the idle group does not count as free (`GroupPool.keep`); never written here.
        block_sizes: number of positions of a group, by kind.
        blocks_per_group: number of blocks of a group, by kind.
        windows: groups of windowed layers; None: all layers keep all positions.

    Attributes:
        windows_changed: True: groups of windowed layers were registered or dropped; `check_windows` updates the hits.
        converts: returns True if a request should reuse cached layer inputs by converting them to keys and values.
            Arguments: the hit with conversion, the hit of keys and values, and the request's number of positions. None:
            layer inputs are never converted.
        restores: returns True if groups should be copied from host memory. Arguments: cache kind, number of cached
            positions, how many of these precede the first group that is only in host memory, how many are only in host
            memory, and the request's number of positions. None: groups are always copied.
    """

    def __init__(
        self,
        tree: PrefixTree,
        table: RequestTable,
        num_refs: NDArray[np.int32],
        is_kept: NDArray[np.bool_],
        block_sizes: Sequence[int],
        blocks_per_group: Sequence[int],
        windows: WindowSpec | None = None,
    ) -> None:
        self._windows = windows
        self.windows_changed = False
        self._tree = tree
        self._table = table
        self._num_refs, self._is_kept = num_refs, is_kept
        self._block_sizes = tuple(block_sizes)
        self._per_group = tuple(blocks_per_group)
        self.restores: Callable[[int, int, int, int, int], bool] | None = None
        self.converts: Callable[[Hit, Hit, int], bool] | None = None
        self._own: dict[tuple[int, int], Hit] = {}
        """Hits of waiting requests without conversion, by row and kind; recorded only if `converts` is set."""
        self._converted: set[int] = set()
        self._place: dict[int, dict[int, Node]] = {}
        self._placed: dict[int, dict[int, _Placed]] = {}
        """Locations of the groups on the path to each node of `_place`."""
        self._used: set[Node] | None = None
        """Arguments of `used` that `together` delays; None: nothing is delayed."""
        self._digests: dict[int, Sequence[list[bytes]]] = {}
        self._awaited: list[dict[bytes, set[int]]] = [{} for _ in self._per_group]

    # --- requests --------------------------------------------------------------------------------------------------

    def begin(self, row: int, digests: Sequence[list[bytes]], kinds: Sequence[int]) -> None:
        """Track a waiting request that may be scheduled with any of `kinds`; `digests` holds, for each kind, the
        digests of its full groups."""
        if row in self._place:
            self.end(row)
        self._digests[row] = digests
        self._place[row] = {}
        self._placed[row] = {}
        for kind in kinds:
            self._enter(row, self._deepest(self._tree.roots[kind], digests[kind]))

    def end(self, row: int) -> None:
        """Stop tracking a request."""
        places = self._place.pop(row, None)
        if places is None:
            return
        for node in places.values():
            self._unlist(row, node)
            at = node
            while at.depth:
                at.num_below -= 1
                assert at.parent is not None
                at = at.parent
        del self._digests[row], self._placed[row]
        for kind in places:
            self._own.pop((row, kind), None)
        self._converted.discard(row)
        self._table.cached_prefix_tokens[row] = 0
        self._table.host_prefix_tokens[row] = 0
        self._table.shared_prefix_blocks[row] = 0

    def is_tracked(self, row: int) -> bool:
        """Return True if the cached prefix of a request is tracked."""
        return row in self._place

    @property
    def any_converted(self) -> bool:
        """True if any waiting request would reuse cached layer inputs by converting them to keys and values."""
        return bool(self._converted)

    def is_converted(self, row: int, kind: int) -> bool:
        """Return True if a waiting request, when scheduled with this kind, would reuse cached layer inputs by
        converting them."""
        return kind == KV and row in self._converted

    def kinds_of(self, row: int) -> list[int]:
        """Return the cache kinds that a waiting request may be scheduled with."""
        return list(self._place[row])

    def node(self, row: int, kind: int) -> Node:
        """Return the last node of the longest cached prefix of a waiting request."""
        return self._place[row][kind]

    def num_known(self, row: int) -> int:
        """Return the number of positions of a waiting request that are cached or were once, with the kind that has most
        of them."""
        count = self._tree.former.count
        return max(
            (
                (node.depth + count(self._digests[row][kind][node.depth :])) * self._block_sizes[kind]
                for kind, node in self._place.get(row, {}).items()
            ),
            default=0,
        )

    def _deepest(self, node: Node, digests: list[bytes]) -> Node:
        """Return the last registered node of the path with these digests, below `node`, a node of the path.

        A registered node has a registered parent, so the number of registered nodes is found by bisection, after
        steps that double from the beginning.
        """
        find, kind = self._tree.find, node.kind
        known, most, step = node.depth, len(digests), 1
        while known + step <= most and (below := find(kind, digests[known + step - 1])) is not None:
            node, known, step = below, known + step, 2 * step
        most = min(most, known + step - 1)
        while known < most:
            middle = (known + most + 1) // 2
            below = find(kind, digests[middle - 1])
            if below is None:
                most = middle - 1
            else:
                node, known = below, middle
        return node

    def _enter(self, row: int, node: Node) -> None:
        """Record where the cached prefix of a request ends that was not tracked with this kind, and write its hit."""
        self._list(row, node)
        at = node
        while at.depth:
            at.num_below += 1
            assert at.parent is not None
            at = at.parent
        self._write(row, node, self._locate(node))

    def _list(self, row: int, node: Node) -> None:
        """List a request in the last node of its cached prefix, and under the digest of its first missing group."""
        self._place[row][node.kind] = node
        node.rows.add(row)
        digests = self._digests[row][node.kind]
        if node.depth < len(digests):
            self._awaited[node.kind].setdefault(digests[node.depth], set()).add(row)

    def _unlist(self, row: int, node: Node) -> None:
        node.rows.discard(row)
        digests = self._digests[row][node.kind]
        if node.depth < len(digests):
            awaited = self._awaited[node.kind]
            rows = awaited[digests[node.depth]]
            rows.discard(row)
            if not rows:
                del awaited[digests[node.depth]]

    def _locate(self, node: Node) -> "_Placed":
        """Return the numbers of groups on the path to a node, by location."""
        held = resident = num_host = 0
        at = node
        while at.depth:
            if at.block == NULL_BLOCK:
                num_host += 1
                held = resident = 0
            else:
                resident = resident or at.depth
                if not (self._num_refs[at.block] or self._is_kept[at.block]):
                    held = 0
                elif not held:
                    held = at.depth
            assert at.parent is not None
            at = at.parent
        return _Placed(held, resident, num_host)

    def _write(self, row: int, node: Node, placed: "_Placed") -> None:
        """Write the hit of a request to the table; the hit excludes the request's last token, whose logits are not
        cached."""
        table, kind = self._table, node.kind
        self._placed[row][kind] = placed
        size = self._block_sizes[kind]
        tokens, host = self.usable(kind, node.depth, placed.resident, placed.num_host, int(table.num_tokens[row]) - 1)
        if self._windows is not None:
            step = math.lcm(size, self._windows.block_size)
            tokens = self._tree.usable(self._windows, self._digests[row][WINDOWED], tokens, step)
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
        """Return the hit that a request gets if its keys and values are computed from cached layer inputs. None: this
        is disabled, impossible or not worthwhile.

        Args:
            kv, inputs: hits of cached keys and values and of cached layer inputs; None: the request may not use the
                kind.
            total: number of positions of the request.
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
        """Return the number of positions of a cached path that need not be computed, and how many of them are copied
        from host memory.

        Args:
            kind: cache kind of the path.
            num_groups: number of groups of the path.
            resident: number of groups before the first group that is only in host memory.
            num_host: number of groups that are only in host memory.
            most: maximum number of cached positions that the request can use.
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

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Delay the updates of `used` to the end of the block, where groups whose paths share nodes share their cost."""
        if self._used is not None:
            yield
            return
        self._used = set()
        try:
            yield
        finally:
            self._catch_up()
            self._used = None

    def _catch_up(self) -> None:
        """Make the delayed updates."""
        if not self._used:
            return
        left = set(self._used)
        for node in sorted(self._used, key=lambda node: node.depth):
            if node in left:
                self._update(node, left)
        self._used.clear()

    def registered(self, nodes: Sequence[Node]) -> None:
        """Update the hits of requests after these nodes have been registered."""
        located: dict[Node, _Placed] = {}
        for new in nodes:
            for row in sorted(self._awaited[new.kind].get(new.digest, ())):
                above = self._place[row][new.kind]
                self._unlist(row, above)
                node = self._deepest(new, self._digests[row][new.kind])
                self._list(row, node)
                at = node
                while at is not above:
                    at.num_below += 1
                    assert at.parent is not None
                    at = at.parent
                if node not in located:
                    located[node] = self._locate(node)
                self._write(row, node, located[node])

    def dropped(self, nodes: Sequence[Node]) -> None:
        """Update the hits of requests before a subtree is removed; `nodes` lists parents first."""
        top = nodes[0]
        if not top.num_below:
            return
        end = top.parent
        assert end is not None
        if self._used and (gone := self._used.intersection(nodes)):
            self._used -= gone
            if end.depth:
                self._used.add(end)
        for node in nodes:
            for row in sorted(node.rows):
                self._unlist(row, node)
                self._list(row, end)
                held, resident, num_host = self._placed[row][node.kind]
                at = node
                while num_host and at is not end:
                    num_host -= at.block == NULL_BLOCK
                    assert at.parent is not None
                    at = at.parent
                placed = _Placed(min(held, end.depth), min(resident, end.depth), num_host)
                self._write(row, end, placed if end.depth else _Placed(0, 0, 0))

    def used(self, node: Node) -> None:
        """Update the hits of requests after a node and its descendants gained their first holder or lost their last, or
        after the node was copied to the device or evicted from it."""
        if not node.num_below:
            return
        if self._used is not None:
            self._used.add(node)
        else:
            self._update(node, set())

    def _update(self, node: Node, left: set[Node]) -> None:
        """Update the hits of requests whose prefix ends in a node or below it, and remove the nodes on the way from
        `left`."""
        assert node.parent is not None
        todo = [(node, *self._locate(node.parent))]
        num_refs, is_kept = self._num_refs, self._is_kept
        while todo:
            node, held, resident, num_host = todo.pop()
            while True:
                left.discard(node)
                block = node.block
                if block == NULL_BLOCK:
                    num_host += 1
                elif not num_host:
                    resident = node.depth
                    if held == resident - 1 and (num_refs[block] or is_kept[block]):
                        held = resident
                for row in node.rows:
                    self._write(row, node, _Placed(held, resident, num_host))
                below = [child for child in node.children if child.num_below]
                if len(below) != 1:  # a chain, the ordinary case, needs no stack
                    break
                node = below[0]
            todo.extend((child, held, resident, num_host) for child in below)

    def refresh(self) -> None:
        """Write all hits again, because the results of `restores` or `converts` may have changed."""
        for row, places in self._place.items():
            for kind, node in places.items():
                self._write(row, node, self._placed[row][kind])

    def check_windows(self) -> None:
        """Write the hits of requests with cached prefixes again if groups of windowed layers have changed."""
        if self.windows_changed:
            self.windows_changed = False
            for row, places in self._place.items():
                for kind, node in places.items():
                    if node.depth:
                        self._write(row, node, self._placed[row][kind])

    def windowed_nodes(self, row: int, tokens: int) -> list[Node]:
        """Return the cached groups of windowed layers that a waiting request needs after `tokens` cached positions."""
        if self._windows is None:
            return []
        return self._tree.windowed_nodes(self._windows, self._digests[row][WINDOWED], tokens)

    # --- host memory -----------------------------------------------------------------------------------------------

    def found_nodes(self, row: int, kind: int) -> list[Node]:
        """Return the cached groups that hold a waiting request's prefix. If only part of the last group is used, the
        request gets a copy of it."""
        if kind == KV and row in self._converted:
            tokens = int(self._table.cached_prefix_tokens[row, KV])
            return self._place[row][HIDDEN].path(tokens // self._block_sizes[HIDDEN])
        tokens = int(self._table.cached_prefix_tokens[row, kind])
        return self._place[row][kind].path(-(-tokens // self._block_sizes[kind]))

    def least_urgent(self, skip: set[Node]) -> Node | None:
        """For the least urgent waiting request, return the last of its cached groups that is only in host memory and
        not in `skip`. If it has no such group, the next more urgent request is tried. Best-effort requests are the
        least urgent, then requests with the most time left. None: there is no such group."""
        self._catch_up()
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

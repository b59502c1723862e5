"""Idle groups by session, in the order in which a retention policy evicts them.

Each session has a list of least recent use, as `IdleGroups` is for all. A retention policy orders the sessions
(`apt_jax.sched.retention`), and a session loses the end of its least recently used prefix first:

    value   session   idle groups, the next to evict in front
    0.1     7         E D C B A
    0.8     3         H G          F is held: a call of the session runs
    20      12        ...
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from apt_jax.cache.block_pool import require
from apt_jax.cache.prefix_tree import IdleGroups, Node
from apt_jax.core.kinds import WINDOWED
from apt_jax.core.step import NULL_BLOCK
from apt_jax.sched.retention.sessions import NOBODY, SessionTable

_LOOKED_AT = 64
"""Maximum number of sessions, and of groups of each, examined in the search for a group to drop."""


class SessionGroups(IdleGroups):
    """First blocks of idle groups by session, and groups in host memory by session.

    Args:
        sessions: table whose columns `device_groups` and `host_groups` are kept up to date.
        node_of: nodes by first block.
        ranked: function that returns all sessions with idle groups or groups in host memory, lowest value first; None:
            groups are evicted least recently used first, whatever their sessions.
    """

    def __init__(
        self, sessions: SessionTable, node_of: dict[int, Node], ranked: Callable[[], list[int]] | None
    ) -> None:
        super().__init__()
        self._sessions, self._node_of, self._ranked = sessions, node_of, ranked
        self._of: dict[int, collections.OrderedDict[int, None]] = {}
        self._place: dict[int, tuple[int, int]] = {}
        self._in_host: dict[int, collections.OrderedDict[Node, None]] = {}
        self._order: list[int] | None = None
        self._at = self._host_at = 0
        self.drops_any = False
        """True: any group may be dropped from host memory for any other."""
        self._rank: dict[int, int] = {}

    @property
    def is_ranked(self) -> bool:
        """True if sessions have an order; False: groups are evicted least recently used first."""
        return self._ranked is not None

    # --- on the device ---------------------------------------------------------------------------------------------

    def add(self, first: int, kind: int, session: int) -> None:
        self[first] = None
        self._place[first] = session, kind
        of = self._of.get(session)
        if of is None:
            of = self._of[session] = collections.OrderedDict()
        of[first] = None
        if kind != WINDOWED:
            self._sessions.device_groups[session, kind] += 1

    def __delitem__(self, first: int) -> None:
        super().__delitem__(first)
        session, kind = self._place.pop(first)
        of = self._of[session]
        del of[first]
        if not of:
            del self._of[session]
        if kind != WINDOWED:
            self._sessions.device_groups[session, kind] -= 1

    def move_to_end(self, first: int, last: bool = True) -> None:
        super().move_to_end(first, last)
        self._of[self._place[first][0]].move_to_end(first, last)

    def session_of(self, first: int) -> int:
        """Return the session of an idle group."""
        return self._place[first][0]

    def claim(self, nodes: Sequence[Node], session: int) -> None:
        """Move the idle groups of a path to a session that is about to use them; `nodes` lists parents first."""
        for node in reversed(nodes):
            if node.block in self._place:
                kind = self._place[node.block][1]
                del self[node.block]
                self.add(node.block, kind, session)
            elif node.block == NULL_BLOCK and node.session != session:
                self.comes_back(node)
                self.leaves(node, session)

    def leave_behind(self, paths: Sequence[Sequence[Node]], session: int) -> None:
        """Move the groups of a session that are not on these paths to `NOBODY`: the session has gone on without them."""
        kept = {node for path in paths for node in path}
        blocks = {node.block for node in kept}
        for first in [first for first in self.of(session) if first not in blocks]:
            kind = self._place[first][1]
            del self[first]
            self.add(first, kind, NOBODY)
        for node in [node for node in self.in_host(session) if node not in kept]:
            self.comes_back(node)
            self.leaves(node, NOBODY)

    def of(self, session: int) -> list[int]:
        """Return the idle groups of a session, the next to evict first."""
        return list(self._of.get(session, ()))

    def num_groups(self, session: int) -> int:
        """Return the number of a session's idle groups and groups in host memory."""
        return len(self._of.get(session, ())) + len(self._in_host.get(session, ()))

    def has(self, session: int) -> bool:
        """Return True if a session has idle groups or groups in host memory."""
        return session in self._of or session in self._in_host

    def victim(self) -> int:
        if self._ranked is None:
            return super().victim()
        order = self._ranking()
        while self._at < len(order) and order[self._at] not in self._of:
            self._at += 1
        if self._at == len(order):  # groups have become idle since the sessions were ranked
            self.rank_again()
            order = self._ranking()
            while order[self._at] not in self._of:
                self._at += 1
        session = order[self._at]
        first = next(iter(self._of[session]))
        # A prefix leaves after all that follows it; if another session's groups do, it belongs to that session.
        while (node := self._node_of.get(first)) is not None:
            below = next((child.block for child in node.children if child.block in self), NULL_BLOCK)
            if below == NULL_BLOCK:
                break
            if self._place[below][0] != session:
                kind = self._place[first][1]
                owner = self._place[below][0]
                del self[first]
                self.add(first, kind, owner)
                return self.victim()
            first = below
        return first

    # --- in host memory ----------------------------------------------------------------------------------------------

    def leaves(self, node: Node, session: int) -> None:
        """Record that a group of a session is only in host memory from now on."""
        node.session = session
        self._in_host.setdefault(session, collections.OrderedDict())[node] = None
        self._host_at = min(self._host_at, self._rank.get(session, 0))
        self._sessions.host_groups[session, node.kind] += 1

    def comes_back(self, node: Node) -> None:
        """Record that a group that was only in host memory is on the device again, or nowhere."""
        of = self._in_host.get(node.session)
        if of is not None and node in of:
            del of[node]
            if not of:
                del self._in_host[node.session]
            self._sessions.host_groups[node.session, node.kind] -= 1

    def in_host(self, session: int) -> list[Node]:
        """Return the groups of a session that are only in host memory, the next to drop first."""
        return list(self._in_host.get(session, ()))

    def to_drop(self, node: Node, may_drop: Callable[[Node], bool]) -> Node | None:
        """Return the group to drop from host memory to make space for `node`; None: all that were looked at may not be
        dropped, or are worth more.

        Any group may be dropped for one that others build on, and for one that is not on the device.
        """
        order = self._ranking()
        if not self._rank:
            self._rank.update((session, rank) for rank, session in enumerate(order))
        own = len(order)
        if node.block in self._place and not node.children and not self.drops_any:
            own = self._rank.get(self._place[node.block][0], own)
        while self._host_at < len(order) and order[self._host_at] not in self._in_host:
            self._host_at += 1
        looked_at = 0
        for each in itertools.islice(order, self._host_at, own + 1):
            for found in itertools.islice(self._in_host.get(each, ()), _LOOKED_AT):
                if found is not node.parent and may_drop(found):
                    return found
            looked_at += each in self._in_host
            if looked_at == _LOOKED_AT:
                break
        return None

    # --- order -----------------------------------------------------------------------------------------------------

    def rank_again(self) -> None:
        """Forget the order of the sessions; it is asked for again when it is needed."""
        self._order = None

    def _ranking(self) -> list[int]:
        if self._order is None:
            assert self._ranked is not None
            self._order = self._ranked()
            self._at = self._host_at = 0
            self._rank.clear()
        return self._order

    def rows(self) -> Iterator[int]:
        """Iterate over the sessions that have idle groups or groups in host memory."""
        yield from self._of
        yield from (session for session in self._in_host if session not in self._of)

    def check_integrity(self) -> None:
        """Recount the groups of every session.

        Raises:
            CacheIntegrityError: a group is lost or counted twice.
        """
        of = {first: session for session, firsts in self._of.items() for first in firsts}
        require(
            set(of) == set(self) and all(self._place[first][0] == session for first, session in of.items()),
            "an idle group belongs to no session, or to two",
        )
        counted = np.zeros_like(self._sessions.device_groups)
        for session, kind in self._place.values():
            if kind != WINDOWED:
                counted[session, kind] += 1
        require((counted == self._sessions.device_groups).all(), "idle groups of sessions are miscounted")
        counted[:] = 0
        for session, nodes in self._in_host.items():
            for node in nodes:
                require(node.session == session and node.block == NULL_BLOCK, "a group in host memory has moved")
                counted[session, node.kind] += 1
        require((counted == self._sessions.host_groups).all(), "groups of sessions in host memory are miscounted")

"""The sessions that an engine remembers, and its retention policy at work.

A session is a chain of calls whose prompts begin alike (docs/sessions.md). A call names its session
(`EngineRequest.session_id`), or belongs to the session whose idle groups hold most of its prompt, if these are at least
half of the session's last call. Sessions of different tenants are different, whatever their names.

Memory. Rows without groups and live calls are forgotten, the least recently used first, once there are more than
`MAX_IDLE_SESSIONS`; a row takes about 150 bytes and its name. Sessions with groups are at most as many as groups.
"""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import HybridCache
from apt_jax.cache.block_pool import require
from apt_jax.cache.session_groups import SessionGroups
from apt_jax.config import SessionOrder
from apt_jax.core.step import NULL_BLOCK
from apt_jax.costs.model import StepCosts
from apt_jax.request import EngineRequest
from apt_jax.sched.request_table import RequestTable
from apt_jax.sched.retention import LruRetention, Retention, RetentionView
from apt_jax.sched.retention.sessions import NOBODY, WORKS, SessionTable
from apt_jax.sched.retention.view import prefill_s
from apt_jax.sched.step_packer import growth
from apt_jax.sched.view import SchedulerView
from apt_jax.utils.clock import Clock

SESSION_STATES = ("running", "device", "host", "uncached")
"""States of a remembered session: a call waits or runs; else some of its cache is on the device; only in host memory;
none is left."""
MAX_IDLE_SESSIONS = 16_384
"""Number of remembered sessions without groups and live calls."""
PLAS_LEVELS = 4096 * 2 ** np.arange(0, 20, 2)
"""Tokens computed for a session at which its calls fall to the next level of `plas`, a factor of 4 apart."""
_SWEEP = 256
"""Number of new sessions, at least, between two searches for sessions to forget."""
_RANK_S = 0.05
"""Sessions are ranked again after this many seconds, and when a call arrives."""
_MAX_ANSWERS = 1024
"""Number of ended calls whose answers may still be told (`Sessions.note_answer`)."""
_WATERMARK = 0.01
"""Share of the pool that running requests may grow into, whatever is kept."""


class Sessions:
    """Assigns requests to sessions, ranks sessions for eviction, and keeps blocks from waiting requests.

    Args:
        cache: the cache, with prefix caching and without idle groups.
        requests: table of the live requests.
        retention: the policy; None: the least recently used groups are evicted first.
        order: order of the waiting requests.
        clock: the current time.
        costs: function that returns the current cost model.

    Attributes:
        table: the sessions.
        of: row of each live request's session, keyed by the request's row.
    """

    def __init__(
        self,
        cache: HybridCache,
        requests: RequestTable,
        retention: Retention | None,
        order: SessionOrder,
        clock: Clock,
        costs: Callable[[], StepCosts],
    ) -> None:
        self.table = SessionTable()
        self.retention: Retention = LruRetention() if retention is None else retention
        self._order = order
        self.of: dict[int, int] = {}
        self._cache, self._requests, self._clock, self._costs = cache, requests, clock, costs
        self._groups = SessionGroups(
            self.table, cache.groups.prefixes.node_of, None if retention is None else self._ranked
        )
        cache.groups.use_sessions(self._groups)
        self._named: collections.OrderedDict[tuple[int, str], list[int]] = collections.OrderedDict()
        self._name_of: dict[int, tuple[int, str]] = {}
        self._unnamed: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._sweep_unnamed_at, self._sweep_named_at = _SWEEP, MAX_IDLE_SESSIONS + _SWEEP
        self._answers = collections.deque[tuple[str, str]](maxlen=_MAX_ANSWERS)
        self._may_call: collections.OrderedDict[str, tuple[int, float]] = collections.OrderedDict()
        self._kept: dict[int, int] = {}
        self._rank_at_s = 0.0
        self._num_released = 0

    # --- calls -----------------------------------------------------------------------------------------------------

    def arrived(self, row: int, name: str | None, hint_s: float | None) -> float:
        """Assign a new, tracked request to its session; returns its `RequestStates.order`."""
        now_s, requests, table = self._clock.now_s(), self._requests, self.table
        tenant = int(requests.tenant[row])
        key = None if name is None else (tenant, name)
        session = self._continued(row, tenant, key)
        if session == NOBODY:
            session = self._new(tenant, key, float(requests.arrival_s[row]))
        elif key is not None:
            self._named.move_to_end(key)
        self._apply_answers()
        self.retention.returned(table, session, now_s)
        if table.num_calls[session]:
            table.last_gap_s[session] = max(now_s - float(table.ended_s[session]), 0.0)
        table.num_live[session] += 1
        table.is_over[session] = False
        table.hint_s[session] = hint_s or 0.0
        self.of[row] = session
        self._rank_at_s = 0.0
        self._cache.session_of[int(requests.rank[row])] = session
        hits = self._cache.groups.tracker
        if hits is not None and hits.is_tracked(row):
            nodes = [hits.node(row, kind) for kind in hits.kinds_of(row)]
            paths = [node.path(node.depth) for node in nodes]
            for path in filter(None, paths):
                self._cache.groups.unkeep(path)
                self._groups.claim(path, session)
            if table.num_live[session] == 1 and session not in self._kept:
                self._groups.leave_behind(paths, session)
        if self._order == "program-fcfs":
            return float(table.begun_s[session])
        if self._order == "plas":
            return float(np.searchsorted(PLAS_LEVELS, table.attained[session], side="right"))
        return 0.0

    def ordered(self, waiting: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the waiting requests in the order in which policies see them."""
        if self._order != "hrrn" or waiting.size < 2:
            return waiting
        requests, costs = self._requests, self._costs()
        total = requests.num_tokens[waiting].astype(np.float64)
        cached = requests.cached_prefix_tokens[waiting].max(axis=1).astype(np.float64)
        service_s = np.maximum(prefill_s(costs, total) - prefill_s(costs, cached), 1e-3)
        waited_s = self._clock.now_s() - requests.arrival_s[waiting]
        return waiting[np.argsort(-waited_s / service_s - 1.0 / service_s, kind="stable")]

    def _continued(self, row: int, tenant: int, key: tuple[int, str] | None) -> int:
        """Return the session that a request continues; `NOBODY`: none.

        It is the session of the same name and tenant whose groups hold most of its last call. A name may stand for
        several chains of calls, such as those of subagents. If none is found, it is one that has lost its cache.
        """
        hits, table, of_name = self._cache.groups.tracker, self.table, self._named.get(key, []) if key else None
        for kind in hits.kinds_of(row) if hits is not None and hits.is_tracked(row) else ():
            assert hits is not None
            node = hits.node(row, kind)
            if node.block in self._groups:
                session = self._groups.session_of(node.block)
            elif node.block == NULL_BLOCK and node.depth:
                session = node.session
            else:  # a root, or another call holds it
                continue
            is_same = session in of_name if of_name is not None else session in self._unnamed
            is_most = node.depth * self._cache.block_sizes[kind] * 2 >= table.num_tokens[session] > 0
            if is_same and is_most and table.tenant[session] == tenant:
                return session
        bare = (r for r in reversed(of_name or ()) if not self._groups.has(r) and not table.num_live[r])
        return next(bare, NOBODY)

    def _new(self, tenant: int, key: tuple[int, str] | None, now_s: float) -> int:
        self._forget_some()
        session = self.table.add()
        self.table.tenant[session] = tenant
        self.table.begun_s[session] = now_s
        if key is None:
            self._unnamed[session] = None
            return session
        chains = self._named.setdefault(key, [])
        if chains:
            self.table.begun_s[session] = self.table.begun_s[chains[0]]
            self.table.attained[session] = self.table.attained[chains[-1]]
        chains.append(session)
        self._name_of[session] = key
        return session

    def started(self, row: int, num_found: int) -> None:
        """Record that a call starts to run for the first time."""
        waited_s = self._clock.now_s() - float(self._requests.arrival_s[row])
        self.retention.started(self.table, self.of[row], waited_s, num_found)

    def ended(self, request: EngineRequest, row: int, num_tokens: int, num_computed: int, *, has_run: bool) -> None:
        """Record that a call has ended, whose groups have been released.

        Args:
            request: the request.
            row: its row.
            num_tokens: length of its prompt and output.
            num_computed: number of positions computed for it.
            has_run: False: it never ran, so it left nothing in the cache.
        """
        session = self.of.pop(row)
        self._cache.session_of.pop(int(self._requests.rank[row]), None)
        table = self.table
        table.num_live[session] -= 1
        if not has_run:
            return
        table.ended_s[session] = self._clock.now_s()
        table.num_calls[session] += 1
        table.num_tokens[session] = num_tokens
        table.attained[session] += num_computed
        table.work[session] = WORKS[request.work]
        self.retention.ended(self._view(np.array([session], np.int32)))
        if request.work == "tool":  # a person works if the answer calls none, which the front end tells later
            self._may_call[request.request_id] = session, float(table.ended_s[session])
            if len(self._may_call) > _MAX_ANSWERS:
                self._may_call.popitem(last=False)

    def note_answer(self, request_id: str, work: str) -> None:
        """Note the kind of work that the answer of an ended request asks for, instead of `EngineRequest.work`.
        Thread-safe: it is applied before the next decision."""
        self._answers.append((request_id, work))

    def _apply_answers(self) -> None:
        while self._answers:
            request_id, work = self._answers.popleft()
            session, ended_s = self._may_call.pop(request_id, (NOBODY, 0.0))
            is_last = session != NOBODY and self.table.live[session] and self.table.ended_s[session] == ended_s
            if is_last and self.table.work[session] != WORKS[work]:
                self.table.work[session] = WORKS[work]
                self.retention.ended(self._view(np.array([session], np.int32)))

    def end(self, tenant: int, name: str) -> bool:
        """End a session and free the blocks that only it needs; returns False if it is not known or has ended."""
        chains, table = self._named.get((tenant, name), []), self.table
        is_new = any(not table.is_over[session] for session in chains)
        for session in chains:
            if not table.is_over[session]:
                table.is_over[session] = True
                self.retention.forgotten(table, session, self._clock.now_s())
            self._release(session)
            self._cache.groups.end_session(session)
        return is_new

    def _forget_some(self) -> None:
        """Forget sessions without groups and live calls if there are too many."""
        if len(self._unnamed) >= self._sweep_unnamed_at:
            for session in list(self._unnamed):
                self._forget(session)
            self._sweep_unnamed_at = 2 * len(self._unnamed) + _SWEEP
        if len(self._name_of) >= self._sweep_named_at:
            for session in [session for chains in self._named.values() for session in chains]:
                if len(self._name_of) <= MAX_IDLE_SESSIONS:  # the least recently used names first
                    break
                self._forget(session)
            self._sweep_named_at = max(len(self._name_of), MAX_IDLE_SESSIONS) + _SWEEP

    def _forget(self, session: int) -> None:
        if self._groups.has(session) or self.table.num_live[session]:
            return
        if not self.table.is_over[session]:
            self.retention.forgotten(self.table, session, self._clock.now_s())
        name = self._name_of.pop(session, None)
        if name is None:
            del self._unnamed[session]
        else:
            self._named[name].remove(session)
            if not self._named[name]:
                del self._named[name]
        self.table.remove(session)

    # --- retention -------------------------------------------------------------------------------------------------

    def retain(self, view: SchedulerView, *, is_stuck: bool) -> SchedulerView:
        """Return the view in which kept blocks are not free, and let sessions be ranked again.

        Args:
            view: the view with all idle blocks free.
            is_stuck: True: nothing ran in the last iteration, and nothing is in flight; fewer blocks are kept each time.
        """
        self._apply_answers()
        if view.now_s >= self._rank_at_s:
            self._rank_at_s = view.now_s + _RANK_S
            self._groups.rank_again()
        self._num_released = 2 * self._num_released + 1 if is_stuck else 0
        if not self.retention.keeps:
            return view
        kept, num_blocks = self._choose(view)
        for session in self._kept.keys() - kept:
            self._release(session)
        for session in kept:
            num = self._groups.num_groups(session)
            if self._kept.get(session) != num:
                self._kept[session] = num
                self._cache.groups.keep(session, is_kept=True)
        if not num_blocks:
            return view
        return dataclasses.replace(
            view, free_blocks=view.free_blocks - num_blocks, shared_blocks=view.shared_blocks + num_blocks
        )

    def _release(self, session: int) -> None:
        if session in self._kept:
            del self._kept[session]
            self._cache.groups.keep(session, is_kept=False)

    def _choose(self, view: SchedulerView) -> tuple[set[int], int]:
        """Return the kept sessions that waiting calls would use, and the number of blocks of all kept sessions."""
        if not view.waiting.size:
            return set(), 0
        of_device = self._view(self._rows())
        rows = self.retention.kept(of_device, view)[self._num_released :]
        held = self.table.device_groups[rows] @ np.array(self._cache.blocks_per_group, np.int64)
        if not rows.size:
            return set(), 0
        # Running requests come first: they would lose their cache otherwise.
        spare = growth(view, view.running) + int(_WATERMARK * view.total_blocks)
        room = view.free_blocks - spare
        total = int(held.sum())
        if total > room:
            num = int(np.searchsorted(np.cumsum(held), total - room)) + 1
            rows, total = rows[num:], total - int(held[:num].sum())
        awaited = of_device.rows[of_device.awaited]
        return set(rows[np.isin(rows, awaited)].tolist()), total

    def _ranked(self) -> list[int]:
        view = self._view(self._rows())
        return view.rows[np.argsort(self.retention.values(view))].tolist()

    def _rows(self) -> NDArray[np.int32]:
        table = self.table
        return np.flatnonzero(table.device_groups.any(axis=1) | table.host_groups.any(axis=1)).astype(np.int32)

    def _view(self, rows: NDArray[np.int32]) -> RetentionView:
        table, requests = self.table, self._requests
        awaited, waits = np.zeros((2, table.capacity), np.bool_)
        live = np.fromiter(self.of, np.int32, len(self.of))
        for row in live[requests.kind[live] < 0].tolist():
            waits[self.of[row]] = True
            awaited[self.of[row]] |= requests.num_preemptions[row] == 0
        return RetentionView(
            now_s=self._clock.now_s(),
            sessions=table,
            rows=rows,
            awaited=awaited[rows],
            waits=waits[rows],
            costs=self._costs(),
            block_sizes=self._cache.block_sizes,
            blocks_per_group=self._cache.blocks_per_group,
            has_host=self._cache.tier is not None,
            free_host_blocks=0 if self._cache.tier is None else self._cache.tier.pool.num_free,
        )

    def counts(self) -> dict[str, int]:
        """Return the number of remembered sessions in each of `SESSION_STATES`."""
        table = self.table
        known = table.live.copy()
        known[NOBODY] = False
        counts = []
        for is_so in (table.num_live > 0, table.device_groups.any(axis=1), table.host_groups.any(axis=1), known):
            counts.append(int(np.count_nonzero(known & is_so)))
            known &= ~is_so
        return dict(zip(SESSION_STATES, counts, strict=True))

    # --- integrity -------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check the books against the requests and the cache.

        Raises:
            CacheIntegrityError: they differ.
        """
        table = self.table
        live = np.zeros(table.capacity, np.int32)
        for session in self.of.values():
            live[session] += 1
        require((live == table.num_live).all(), "live calls of sessions are miscounted")
        require(set(self.of) == set(np.flatnonzero(self._requests.live).tolist()), "a request has no session")
        self._groups.check_integrity()
        known = {NOBODY, *self._name_of, *self._unnamed}
        require(known == set(np.flatnonzero(table.live).tolist()), "a session is lost")
        require(set(self._groups.rows()) <= known, "groups belong to a forgotten session")
        kept = self._cache.groups.is_kept
        flagged = {self._groups.session_of(int(first)) for first in np.flatnonzero(kept)}
        require(flagged <= self._kept.keys(), "groups are kept for a session that is not")

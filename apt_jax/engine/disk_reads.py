"""Prefixes of waiting requests that are on disk: which are read, and where they go.

1. A request that begins to wait is looked up: which of its groups are on disk, behind those that the cache has.
2. Where reading and copying them takes less time than computing, by the cost model and the speed of the last reads, they
   are read in a thread of the `DiskStore`, and policies do not see the request until that has ended (*held*).
3. Between two steps, what has been read gets blocks of host memory and a node in the tree of prefixes, as if it had never
   left. From there it is copied to the device like everything else (`apt_jax.engine.restore` may still think better).

A read that fails or stalls is ended: the request computes what is missing.
"""

import dataclasses

from apt_jax.cache import HybridCache
from apt_jax.cache.prefix_hits import PrefixHitTracker
from apt_jax.core.tiers import DiskRead, DiskStore
from apt_jax.engine.counters import EngineCounters
from apt_jax.engine.request_state import RequestState
from apt_jax.engine.request_states import WAITING, RequestStates
from apt_jax.engine.restore import RestoreChoice
from apt_jax.utils.clock import Clock

_STALLED_S = 2.0
"""Seconds after which a read without a result is cancelled."""
_NEWEST = 0.1
"""Weight of the last read in the speed of reads."""
_FORGOTTEN = 0.05
"""How much of the time of reads is forgotten each time that it decides against one: they may have become quicker."""
_IDLE_WAIT_S = 0.005
"""Most that the engine waits for the disk when it has nothing else to do."""


@dataclasses.dataclass(eq=False)
class _Read:
    """A read, and the requests that wait for it."""

    of_disk: DiskRead
    digests: list[bytes]
    next: int
    """Place among the digests of the group that comes next."""
    owner: int
    """Row of the request that it was begun for."""
    rows: set[int] = dataclasses.field(default_factory=set)


class DiskReads:
    """Reads prefixes of waiting requests from disk.

    Args:
        states: the requests.
        cache: has a tier of host memory.
        hits: tracks the waiting requests.
        disk: has the groups.
        choice: estimates copies and computation.
        counters: positions that were read are counted there.
        clock: the current time.
    """

    def __init__(
        self,
        states: RequestStates,
        cache: HybridCache,
        hits: PrefixHitTracker,
        disk: DiskStore,
        choice: RestoreChoice,
        counters: EngineCounters,
        clock: Clock,
    ) -> None:
        self._states, self._cache, self._hits, self._disk, self._choice = states, cache, hits, disk, choice
        self._counters, self._clock = counters, clock
        self._reads: list[_Read] = []
        self._of_row: dict[int, _Read] = {}
        self._progress_s = 0.0
        """When something was last read, or began to be."""
        self._byte_s: float | None = None
        """Seconds that a byte takes; None: nothing has been read yet."""

    @property
    def is_reading(self) -> bool:
        """True while any request is held."""
        return bool(self._of_row)

    # --- requests --------------------------------------------------------------------------------------------------

    def begin(self, state: RequestState) -> None:
        """A request waits from now on, and is tracked: hold it if what is on disk is worth reading."""
        row = state.row
        if row in self._of_row or state.needs_all_states:
            return
        best, found = 0.0, None
        for kind in self._hits.kinds_of(row):
            first = self._hits.node(row, kind).depth
            digests = state.digests[kind]
            end = first
            while end < len(digests) and self._disk.has(kind, digests[end]):
                end += 1
            if end > first:
                saved_s = self._saved_s(row, kind, end, end - first)
                if saved_s >= best and (found is None or saved_s > best):
                    best, found = saved_s, (kind, first, digests[:end])
        if found is not None:
            self._hold(row, *found)

    def end(self, row: int) -> None:
        """The request of a row has ended."""
        read = self._of_row.pop(row, None)
        if read is not None:
            self._states.held[row] = False
            read.rows.discard(row)
            if not read.rows:
                read.of_disk.is_cancelled = True

    def _saved_s(self, row: int, kind: int, end: int, num_groups: int) -> float:
        """Seconds that are saved by reading the last `num_groups` of the first `end` groups; negative: it takes longer than
        to compute them. 0 where nothing is known of costs."""
        table, choice = self._states.table, self._choice
        total = int(table.num_tokens[row])
        tokens, host = int(table.cached_prefix_tokens[row, kind]), int(table.host_prefix_tokens[row, kind])
        without_s = choice.copy_s(kind, host) + choice.compute_s(kind, total - tokens, tokens)
        most = min(end * self._cache.block_sizes[kind], total - 1)
        if most <= tokens:
            return -1.0
        computed_s = choice.compute_s(kind, total - most, most)
        if not without_s and not computed_s:
            return 0.0
        waiting = sum(len(read.digests) - read.next for read in self._reads if not read.of_disk.is_cancelled)
        read_s = (self._byte_s or 0.0) * self._disk.group_bytes(kind) * (num_groups + waiting)
        saved_s = without_s - read_s - choice.copy_s(kind, host + most - tokens) - computed_s
        if saved_s < 0 and self._byte_s is not None:
            self._byte_s *= 1 - _FORGOTTEN
        return saved_s

    def _hold(self, row: int, kind: int, first: int, digests: list[bytes]) -> None:
        """Have a request wait for groups `[first, len(digests))`, which may be under way for another one."""
        for read in self._reads:
            of_disk = read.of_disk
            if not of_disk.is_cancelled and of_disk.kind == kind and digests[first] in read.digests[read.next :]:
                break
        else:
            if not self._reads:
                self._progress_s = self._clock.now_s()
            read = _Read(self._disk.read(kind, digests, first), digests, first, row)
            self._reads.append(read)
        read.rows.add(row)
        self._of_row[row] = read
        self._states.held[row] = True

    # --- between two steps -----------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait a little for something to be read: there is nothing else to do."""
        self._disk.wait(_IDLE_WAIT_S)

    def take(self) -> None:
        """Register groups that have been read in host memory, and show policies the requests whose reads are complete."""
        for read in self._reads.copy():
            of_disk = read.of_disk
            is_done = of_disk.is_done  # before the last look at what there is
            while of_disk.groups:
                self._take_group(read)
            if is_done:
                self._reads.remove(read)
                self._progress_s = self._clock.now_s()
            elif self._clock.now_s() - self._progress_s > _STALLED_S:
                of_disk.is_cancelled = True
            if is_done or of_disk.is_cancelled:
                self._release(read)

    def _take_group(self, read: _Read) -> None:
        of_disk, prefixes, kind = read.of_disk, self._cache.groups.prefixes, read.of_disk.kind
        group = of_disk.groups.popleft()
        byte_s = group.read_s / group.num_bytes
        self._byte_s = byte_s if self._byte_s is None else self._byte_s + _NEWEST * (byte_s - self._byte_s)
        self._progress_s = self._clock.now_s()
        at = read.next
        read.next += 1
        parent = prefixes.find(kind, read.digests[at - 1]) if at else prefixes.roots[kind]
        node = None
        if parent is not None and not of_disk.is_cancelled and prefixes.find(kind, read.digests[at]) is None:
            node = self._cache.groups.place_in_host(parent, read.digests[at], is_downward=group.is_downward)
            of_disk.is_cancelled |= node is None  # no room for the rest either
        self._disk.place(group, () if node is None else node.host)
        if node is not None:
            self._counters.disk_hit_tokens += self._cache.block_sizes[kind]

    def _release(self, read: _Read) -> None:
        """Show policies the requests that waited for a read. Those that joined it may find more."""
        rows, read.rows = sorted(read.rows), set()
        for row in rows:
            del self._of_row[row]
            self._states.held[row] = False
        for row in rows:
            if row != read.owner and not read.of_disk.is_cancelled:
                self.begin(self._states.state(row))

    def check_integrity(self) -> None:
        """Check that exactly the requests that wait for a read are held."""
        held = self._states.held.nonzero()[0].tolist()
        assert sorted(self._of_row) == held, "requests are held that wait for nothing"
        assert all(row in read.rows for row, read in self._of_row.items()), "a read without its request"
        assert all(self._states.status[row] == WAITING for row in held), "a request is held that does not wait"

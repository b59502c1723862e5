"""Reads cached prefixes of waiting requests from disk.

1. When a request begins to wait, the groups that follow its cached prefix are looked up on disk.
2. If reading and copying them takes less time than computing them, according to the cost model and the speed of recent
   reads, a thread of the `DiskStore` reads them. Until the read is complete, policies do not see the request (it is
   *held*).
3. Between two steps, groups that have been read get blocks of host memory and nodes in the prefix tree. From host
   memory they are copied to the device like other groups, unless computing them is cheaper (`apt_jax.engine.restore`).

If a read fails or stalls, it is cancelled, and the request computes the missing positions.
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
"""Time without progress after which a read is cancelled, seconds."""
_NEWEST = 0.1
"""Weight of the newest read in the moving average of the time per byte."""
_FORGOTTEN = 0.05
"""Fraction by which the estimated read time shrinks each time it rules out a read, because the disk may have become
faster."""
_IDLE_WAIT_S = 0.005
"""Maximum time that an idle engine waits for the disk, seconds."""


@dataclasses.dataclass(eq=False)
class _Read:
    """A read from disk, and the requests that wait for it."""

    of_disk: DiskRead
    digests: list[bytes]
    next: int
    """Index in `digests` of the next group to arrive."""
    owner: int
    """Row of the request that started the read."""
    rows: set[int] = dataclasses.field(default_factory=set)


class DiskReads:
    """Reads prefixes of waiting requests from disk.

    Args:
        states: the requests.
        cache: the cache; it must have a tier of host memory.
        hits: tracks the cached prefixes of waiting requests.
        disk: stores the groups.
        choice: estimates the times to copy and to compute positions.
        counters: counts the positions that were read.
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
        """Time on the engine's clock at which a read last made progress, seconds."""
        self._byte_s: float | None = None
        """Time per byte of recent reads, seconds; None: no read yet."""

    @property
    def is_reading(self) -> bool:
        """True while any request is held."""
        return bool(self._of_row)

    # --- requests --------------------------------------------------------------------------------------------------

    def begin(self, state: RequestState) -> None:
        """Hold a request that has begun to wait, if reading its groups from disk saves time or the costs are not known;
        `hits` must already track the request."""
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
        """Forget the request of a row after it has ended."""
        read = self._of_row.pop(row, None)
        if read is not None:
            self._states.held[row] = False
            read.rows.discard(row)
            if not read.rows:
                read.of_disk.is_cancelled = True

    def _saved_s(self, row: int, kind: int, end: int, num_groups: int) -> float:
        """Estimate the time saved by reading the last `num_groups` of the first `end` groups, seconds; negative:
        computing is faster; 0: the costs are not known."""
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
        """Hold a request until groups `[first, len(digests))` are read. If another request is already reading the first
        of these groups, this request joins that read."""
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
        """Wait a few milliseconds for a read; called when the engine has nothing else to do."""
        self._disk.wait(_IDLE_WAIT_S)

    def take(self) -> None:
        """Register groups that have been read into host memory, and release requests whose reads are complete or
        cancelled."""
        for read in self._reads.copy():
            of_disk = read.of_disk
            is_done = of_disk.is_done  # read before the last check for groups
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
            of_disk.is_cancelled |= node is None  # host memory has no space for the remaining groups either
        self._disk.place(group, () if node is None else node.host)
        if node is not None:
            self._counters.disk_hit_tokens += self._cache.block_sizes[kind]
            self._states.read[list(read.rows)] += self._cache.block_sizes[kind]

    def _release(self, read: _Read) -> None:
        """Make the requests that waited for a read visible to policies; requests that joined it may start another
        read."""
        rows, read.rows = sorted(read.rows), set()
        for row in rows:
            del self._of_row[row]
            self._states.held[row] = False
        for row in rows:
            if row != read.owner and not read.of_disk.is_cancelled:
                self.begin(self._states.state(row))

    def check_integrity(self) -> None:
        """Check that the held requests are exactly the requests that wait for a read."""
        held = self._states.held.nonzero()[0].tolist()
        assert sorted(self._of_row) == held, "held requests differ from the requests that wait for a read"
        assert all(row in read.rows for row, read in self._of_row.items()), (
            "a request is missing from the read that it waits for"
        )
        assert all(self._states.status[row] == WAITING for row in held), "a held request is not waiting"

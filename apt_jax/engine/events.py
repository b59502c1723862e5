"""Events of the engine: the scheduler's decisions, iteration by iteration, and subscriptions to them.

While a listener is attached, the engine makes an `Iteration` for each decision and reports it when the step has ended.
An `IterationSubscription` keeps the last few hundred iterations for a reader in an event loop. A reader that is too
slow loses the oldest iterations, and is given the number of lost iterations.
"""

import asyncio
import collections
import dataclasses
import threading
from collections.abc import Callable

from apt_jax.core.kinds import CacheKindName


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRow:
    """The part of a step that belongs to one request."""

    request_id: str
    num_tokens: int
    """Number of tokens computed: one in decode; a prompt or a chunk of it in prefill."""
    start: int
    """Number of positions cached before the step."""
    kind: CacheKindName

    @property
    def decodes(self) -> bool:
        """True: the row computes one token, and earlier positions are cached."""
        return self.num_tokens == 1 and self.start > 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreemptedRow:
    """A preempted request."""

    request_id: str
    num_tokens: int
    """Number of positions lost from the cache; the prefix cache may still hold some of them."""
    kind: CacheKindName


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KindSwitch:
    """A preempted request scheduled again with another cache kind."""

    request_id: str
    old: CacheKindName
    new: CacheKindName


@dataclasses.dataclass(kw_only=True, slots=True)
class Iteration:
    """One decision of the scheduler and its outcome."""

    number: int
    """Index of the decision, from 0, among decisions that run or preempt a request; counted even without a listener."""
    at_s: float
    """Time of the decision on the engine's clock, seconds."""
    type: str
    """Value of `Plan.iteration`: "prefill", "decode", "mixed", or "idle" if no row runs."""
    scheduled: tuple[ScheduledRow, ...] = ()
    preempted: list[PreemptedRow] = dataclasses.field(default_factory=list)
    switched: list[KindSwitch] = dataclasses.field(default_factory=list)
    converted: list[str] = dataclasses.field(default_factory=list)
    """Ids of requests converted from layer inputs to keys and values."""
    deferred: tuple[str, ...] = ()
    """Ids of scheduled requests that did not run because too few blocks were free."""
    num_waiting: int = 0
    """Requests without cache after this decision."""
    num_running: int = 0
    """Requests that hold cache after this decision."""
    free_blocks: int = 0
    """Free blocks after this decision."""
    schedule_s: float = 0.0
    """Host time of the decision, seconds."""
    step_s: float | None = None
    """Duration of the step, seconds: from its dispatch, or the end of the step before it if later, until its tokens
    arrived. None: no step ran, or it failed."""
    failed: bool = False
    """True: the step raised, or was in flight when another step raised; its results are lost."""
    lost: tuple[str, ...] = ()
    """Ids of all requests, in this step or not, whose cache or last token was lost because a step raised."""

    @property
    def prefill_tokens(self) -> int:
        return sum(row.num_tokens for row in self.scheduled if not row.decodes)

    @property
    def decode_tokens(self) -> int:
        return sum(row.decodes for row in self.scheduled)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IterationBatch:
    """Iterations that a subscriber has not read yet."""

    num_dropped: int
    """Number of earlier iterations dropped because the subscriber was too slow."""
    iterations: list[Iteration]


class IterationSubscription:
    """Asynchronous iterator over `IterationBatch`es for one reader, created by `AsyncEngine.watch`.

    Raises:
        EngineDeadError: the engine has stopped or is closed.
    """

    def __init__(self, capacity: int, leave: Callable[["IterationSubscription"], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._leave = leave
        self._has_unread = asyncio.Event()
        self._lock = threading.Lock()
        self._unread: collections.deque[Iteration] = collections.deque(maxlen=capacity)
        self._num_dropped = 0
        self._error: Exception | None = None

    def __aiter__(self) -> "IterationSubscription":
        return self

    async def __anext__(self) -> IterationBatch:
        while True:
            self._has_unread.clear()
            error = self._error  # read first, so that earlier iterations are delivered before it
            batch = self.take()
            if batch.iterations:
                return batch
            if error is not None:
                raise error
            await self._has_unread.wait()

    def take(self) -> IterationBatch:
        """Return unread iterations without waiting; callable from any thread."""
        with self._lock:
            batch = IterationBatch(num_dropped=self._num_dropped, iterations=list(self._unread))
            self._unread.clear()
            self._num_dropped = 0
        return batch

    def close(self) -> None:
        """End the subscription; may be called more than once."""
        self._leave(self)

    # Called by the engine's thread.

    def _push(self, iteration: Iteration) -> None:
        with self._lock:
            self._num_dropped += len(self._unread) == self._unread.maxlen
            self._unread.append(iteration)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = error

    def _wake(self) -> bool:
        """Wake the reader; returns False if its event loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._has_unread.set)
        except RuntimeError:  # the event loop is closed
            return False
        return True

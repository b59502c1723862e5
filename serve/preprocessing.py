"""Work on calls before they reach the engine: reading bodies, parsing, tokenizing, compiling constraints.

One `Preprocessing` serves all protocols of a server. No call may hold up the calls of another owner:

* Work runs in a few threads (`FairQueue`). Each waiting call has an owner: the owner of its API key, or the client's
  address if the server has no keys. Owners take turns, each has a bounded share of the queue, and a call whose client
  has disconnected leaves the queue at once.
* Long texts are handled in a separate thread, and tokenized in a child process (`apt_jax.text.long_texts`).
* New constraints are compiled one at a time; constraints that have been compiled before do not wait for them.
* All bodies that are being read or processed share one memory budget (`BodyBudget`); an owner can take at most half.
* Memory freed by a large call is returned to the system.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from apt_jax.errors import QueueFullError
from apt_jax.request import EngineRequest
from apt_jax.structured.compiler import PendingGrammar
from apt_jax.utils.memory import give_back_memory

LONG_BYTES = 64 << 10
"""Size in bytes above which a text counts as long: handling it takes tens of milliseconds to minutes."""
_FREE_BYTES = 16 << 10
"""Number of bytes of each body that do not count, so that small calls are served even when the budget is used up."""
_TRIM_DELAY_S = 1.0

Owner = Hashable
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessingLimits:
    """Limits on preprocessing."""

    body_memory_bytes: int = 64 << 20
    """Memory budget in bytes for bodies that are being read or processed; the first 16 KiB of each are not counted."""
    max_waiting: int = 2048
    """Maximum number of calls that wait for a thread, over all owners."""
    max_waiting_per_owner: int = 1024
    max_waiting_long: int = 512
    """Maximum number of calls that wait for the thread for long texts, over all owners."""
    max_waiting_long_per_owner: int = 256
    max_waiting_grammars: int = 256
    """Maximum number of calls that wait for the compilation of a new constraint, over all owners."""
    max_waiting_grammars_per_owner: int = 128
    grammar_wait_s: float = 10.0
    """Maximum time in seconds that a call waits for the compilation of its constraint to start."""


class FairQueue:
    """Threads for short work, with a bounded queue in which owners take turns. Used from one event loop only.

    Args:
        name: name prefix of the threads.
        num_threads: number of threads.
        max_waiting: maximum number of jobs in the queue.
        max_waiting_per_owner: maximum number of jobs of one owner in the queue.
        full: error message for clients if the queue is full.
    """

    def __init__(self, name: str, num_threads: int, *, max_waiting: int, max_waiting_per_owner: int, full: str) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._free = num_threads
        self._max_waiting, self._max_per_owner, self._full = max_waiting, max_waiting_per_owner, full
        self._waiting: collections.OrderedDict[Owner, collections.deque[asyncio.Future[None]]]
        self._waiting = collections.OrderedDict()
        """Waiting jobs of each owner, the owner whose turn is next first. Owners without waiting jobs are removed."""
        self.num_waiting = 0

    async def run(self, function: Callable[[], T], owner: Owner, *, wait_s: float | None = None) -> T:
        """Call `function` in a thread when it is this owner's turn.

        If the caller is cancelled, its job leaves the queue. A function that has already started continues and
        occupies its thread until it returns.

        Args:
            function: function to call.
            owner: owner of the job; owners take turns.
            wait_s: maximum wait in seconds; None: no limit.

        Raises:
            QueueFullError: too many jobs are waiting, or the wait was too long.
        """
        if self._free:
            self._free -= 1
        else:
            await self._turn(owner, wait_s)
        loop = asyncio.get_running_loop()
        try:
            job = self._threads.submit(function)
        except BaseException:
            self._release()
            raise

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release)

        job.add_done_callback(ended)
        return await asyncio.wrap_future(job)

    def start(self, function: Callable[[], object]) -> None:
        """Schedule `function` in a thread without waiting for a turn; for the server's own work."""
        with contextlib.suppress(RuntimeError):  # closed
            self._threads.submit(function)

    def close(self) -> None:
        """Start no further jobs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, owner: Owner, wait_s: float | None) -> None:
        queue = self._waiting.get(owner, ())
        if self.num_waiting >= self._max_waiting or len(queue) >= self._max_per_owner:
            raise QueueFullError(self._full, 2.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, collections.deque()).append(turn)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException as error:
            if turn.cancelled():
                self._leave(owner, turn)
            else:  # the turn came at the same moment
                self._release()
            if isinstance(error, TimeoutError):
                raise QueueFullError(self._full, 2.0) from None
            raise

    def _leave(self, owner: Owner, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(owner)
        if queue is not None and turn in queue:
            queue.remove(turn)
            self.num_waiting -= 1
            if not queue:
                del self._waiting[owner]

    def _release(self) -> None:
        """Give a free thread to the next owner."""
        while self._waiting:
            owner, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            self.num_waiting -= 1
            if queue:
                self._waiting[owner] = queue  # behind the others
            if not turn.done():  # else its task has just been cancelled
                turn.set_result(None)
                return
        self._free += 1


class BodyBudget:
    """Memory budget for bodies that are being read or processed. Used from one event loop only.

    Args:
        max_bytes: size of the budget in bytes; an owner can take at most half of it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._by_owner: collections.Counter[Owner] = collections.Counter()

    @contextlib.contextmanager
    def lease(self, owner: Owner) -> "Iterator[BodyLease]":
        """Yield the lease of one body; its bytes are returned to the budget at the end of the context."""
        lease = BodyLease(self, owner)
        try:
            yield lease
        finally:
            self._add(owner, -lease.num_counted)

    def take(self, owner: Owner, num_bytes: int) -> None:
        """Take bytes from the budget.

        Raises:
            QueueFullError: the budget does not have that many bytes left.
        """
        most = self.max_bytes
        if self.used_bytes + num_bytes > most or self._by_owner[owner] + num_bytes > most // 2:
            raise QueueFullError(
                f"request bodies fill their memory budget ({most >> 20} MiB, half of it per client); send this request again later",
                1.0,
            )
        self._add(owner, num_bytes)

    def _add(self, owner: Owner, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        self._by_owner[owner] += num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]


class BodyLease:
    """The bytes of one body, counted in a `BodyBudget`."""

    def __init__(self, budget: BodyBudget, owner: Owner) -> None:
        self._budget, self._owner = budget, owner
        self._num_bytes = 0
        self.num_counted = 0

    def grow(self, num_bytes: int) -> None:
        """Count bytes that have been received.

        Raises:
            QueueFullError: the budget does not have that many bytes left.
        """
        self._num_bytes += num_bytes
        more = max(0, self._num_bytes - _FREE_BYTES) - self.num_counted
        if more > 0:
            self._budget.take(self._owner, more)
            self.num_counted += more


class Preprocessing:
    """Preprocessing queues and budgets of a server. Used from one event loop only.

    Args:
        limits: limits on the queues and the budget; None: the defaults.
    """

    def __init__(self, limits: PreprocessingLimits | None = None) -> None:
        self.limits = limits = PreprocessingLimits() if limits is None else limits
        self.bodies = BodyBudget(limits.body_memory_bytes)
        self._short = FairQueue(
            "apt-jax-requests", 4,
            max_waiting=limits.max_waiting, max_waiting_per_owner=limits.max_waiting_per_owner,
            full="too many requests are being prepared; send fewer at once",
        )  # fmt: skip
        self._long = FairQueue(
            "apt-jax-long-requests", 1,
            max_waiting=limits.max_waiting_long, max_waiting_per_owner=limits.max_waiting_long_per_owner,
            full="too many long requests are being prepared; send fewer at once",
        )  # fmt: skip
        self._grammars = FairQueue(
            "apt-jax-grammars", 1,
            max_waiting=limits.max_waiting_grammars, max_waiting_per_owner=limits.max_waiting_grammars_per_owner,
            full="too many new constraints are being compiled (structured_outputs); send fewer at once",
        )  # fmt: skip
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[[], T], owner: Owner, *, num_bytes: int) -> T:
        """Call `function` in a thread for short or for long texts, depending on `num_bytes`.

        Raises:
            QueueFullError: too many calls are waiting.
        """
        if num_bytes <= LONG_BYTES:
            return await self._short.run(function, owner)
        try:
            return await self._long.run(function, owner)
        finally:
            self._trim_later()

    async def compile_grammars(self, requests: Sequence[EngineRequest], owner: Owner) -> list[EngineRequest]:
        """Return the requests with compiled constraints. Those that have been compiled before do not wait for others.

        Raises:
            InvalidRequestError: a constraint cannot be used.
            QueueFullError: too many calls are waiting, or the wait was too long.
        """
        made = []
        for request in requests:
            grammar = request.grammar
            if isinstance(grammar, PendingGrammar):
                known = grammar.known()
                if known is None:
                    queue = self._short if grammar.was_tried else self._grammars
                    known = await queue.run(grammar.compile, owner, wait_s=self.limits.grammar_wait_s)
                request = dataclasses.replace(request, grammar=known)
            made.append(request)
        return made

    def close(self) -> None:
        """Start no further jobs."""
        for queue in (self._short, self._long, self._grammars):
            queue.close()

    def _trim_later(self) -> None:
        """Return memory freed by large calls to the system, once for all calls that end in the next second."""
        if self._trim is not None:
            return

        def trim() -> None:
            self._trim = None
            self._short.start(give_back_memory)

        self._trim = asyncio.get_running_loop().call_later(_TRIM_DELAY_S, trim)

"""Delivery of the scheduler's iterations to the decision log and to subscribers."""

from collections.abc import Callable

from apt_jax.engine import Engine
from apt_jax.engine.events import Iteration, IterationSubscription
from apt_jax.engine.timeline import TimelineLog


class IterationFeed:
    """Delivers iterations; the engine reports them only while there is a receiver. Used in the engine thread only.

    Args:
        engine: engine that reports iterations; this object sets its `after_step`.
        log: receives every iteration; None: no log.
    """

    def __init__(self, engine: Engine, log: TimelineLog | None) -> None:
        self._engine = engine
        self._log = log
        self._watches: list[IterationSubscription] = []
        self._listener: Callable[[Iteration], None] | None = None
        self._has_unread = False
        self._connect()

    def __len__(self) -> int:
        """Number of subscribers."""
        return len(self._watches)

    def subscribe(self, watch: IterationSubscription) -> None:
        self._watches.append(watch)
        self._connect()

    def unsubscribe(self, watch: IterationSubscription) -> None:
        self._watches = [other for other in self._watches if other is not watch]
        self._connect()

    def listen(self, listener: Callable[[Iteration], None] | None) -> None:
        """Set the function that is called with every iteration; it must not raise. None: no function."""
        self._listener = listener
        self._connect()

    def wake(self) -> None:
        """Wake the subscribers with unread iterations; removes subscribers whose event loop is closed."""
        if self._has_unread:
            self._has_unread = False
            for watch in [watch for watch in self._watches if not watch._wake()]:
                self.unsubscribe(watch)

    def fail(self, error: Exception) -> None:
        """End every subscription with an error; `wake` then wakes the subscribers."""
        for watch in self._watches:
            watch._fail(error)
        self._has_unread = True

    def _connect(self) -> None:
        has_receiver = self._log is not None or self._listener is not None or bool(self._watches)
        self._engine.after_step = self._push if has_receiver else None

    def _push(self, iteration: Iteration) -> None:
        if self._log is not None:
            self._log.note(iteration)
        if self._listener is not None:
            self._listener(iteration)
        self._has_unread = bool(self._watches)
        for watch in self._watches:
            watch._push(iteration)

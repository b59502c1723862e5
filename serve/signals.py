"""Termination and reload signals of a process with an event loop."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_interrupt(call: Callable[[], object]) -> Iterator[None]:
    """Make the first Ctrl-C call a function; a second Ctrl-C raises KeyboardInterrupt. Afterwards Ctrl-C does what it
    did before. Outside of the main thread, which alone can handle signals, nothing changes."""
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)

    def first() -> None:
        call()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, first)
    except (NotImplementedError, RuntimeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


class Signals:
    """Sets events on the first and second SIGTERM or SIGINT, and calls `reload` on SIGHUP."""

    def __init__(self, reload: Callable[[], None]) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.last = 0
        self._was_told = False
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._note, number)
        self._loop.add_signal_handler(signal.SIGHUP, reload)

    def _note(self, number: int) -> None:
        self.last = int(number)
        (self.second if self._was_told else self.first).set()
        self._was_told = True

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.remove_signal_handler(number)

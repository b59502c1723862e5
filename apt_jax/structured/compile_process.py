"""The child process of `apt_jax.structured.compile_worker`, as seen from the server."""

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apt_jax.utils.worker_process import (
    ChildDiedError,
    ChildGoneError,
    ChildProcess,
    ChildTimeoutError,
)

_START_LIMIT_S = 60.0  # importing llguidance and reading a large tokenizer on a busy machine


class TrialLostError(Exception):
    """The child was killed or has died; the message is for users.

    Args:
        message: text for users.
        keep: True if the grammar may be the cause; then the error is cached for a while.
    """

    def __init__(self, message: str, *, keep: bool = True) -> None:
        super().__init__(message)
        self.keep = keep


class TrialWorker:
    """The child process of `apt_jax.structured.compile_worker`; for one thread at a time."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._child = ChildProcess(Path(__file__).with_name("compile_worker.py"))
        try:
            answer = self._child.ask(setup, _START_LIMIT_S)
        except (ChildTimeoutError, ChildDiedError):
            raise RuntimeError("the grammar compiler process did not start") from None
        if answer["error"] is not None:
            self.kill()
            raise RuntimeError(f"grammar compiler process: {answer['error']}")

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    def attempt(self, grammar: str, limit_s: float) -> tuple[str | None, int]:
        """Compile a grammar in the child; return its error, if any, and its approximate size in memory, in bytes."""
        try:
            answer = self._child.ask({"grammar": grammar}, limit_s)
        except ChildTimeoutError:
            raise TrialLostError(
                f"compiling it takes more than {limit_s:g} s; make it smaller, with fewer alternatives and smaller counts"
            ) from None
        except ChildGoneError:
            raise TrialLostError("it could not be tested; send it again", keep=False) from None
        except ChildDiedError:
            raise TrialLostError("compiling it takes too much memory or nests too deeply; make it smaller") from None
        return answer["error"], answer["bytes"]

    def kill(self) -> None:
        self._child.close()


class StandbyWorker:
    """A child that is started in a background thread."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._made: list[TrialWorker] = []
        self._thread = threading.Thread(target=self._start, args=[setup], name="apt-jax-standby", daemon=True)
        self._thread.start()

    def _start(self, setup: Mapping[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the caller that needs a child starts one and reports the error
            self._made.append(TrialWorker(setup))

    def take(self) -> TrialWorker | None:
        """Wait until the child has started, and return it; None: it failed to start, or has exited since."""
        self._thread.join()
        worker = self._made.pop() if self._made else None
        if worker is not None and not worker.is_alive:
            worker.kill()
            return None
        return worker

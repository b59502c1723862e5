"""A child process that answers one JSON line at a time. It handles untrusted programs and texts, whose processing may
never finish.

The child runs a script that limits its own memory and imports little. Messages are JSON over pipes, not pickle; an
answer with `payload_bytes` is followed by this number of raw bytes.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ChildTimeoutError(Exception):
    """The child did not answer in time."""


class ChildDiedError(Exception):
    """The child exited before it answered."""


class ChildGoneError(ChildDiedError):
    """The child had exited before the question was sent, so the question is not the cause."""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


class ChildProcess:
    """A process `python -P FILE`, for use by one thread at a time. It is killed when this object is closed or
    garbage-collected, and after any question that it did not answer.

    Args:
        script: file that reads questions and writes answers, one JSON object per line.
    """

    def __init__(self, script: Path) -> None:
        # -P: modules are not imported from the file's directory.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal signals the whole group, and the parent may go on
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Kill the child; a second call does nothing."""
        self._finalizer()

    def ask(self, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a question and return the answer. Bytes that follow the answer are stored in it as `payload`.

        Raises:
            ChildTimeoutError: no answer within `limit_s` seconds of wall time.
            ChildGoneError: the child had exited before the question.
            ChildDiedError: the child exited while answering, or its answer is not JSON.
        """
        try:
            return self._ask(question, limit_s)
        except BaseException:  # interruptions too: a late answer must not be read as the answer to the next question
            self.close()
            raise

    def _ask(self, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        until, data = time.monotonic() + limit_s, bytearray()
        left = memoryview(json.dumps(question, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        with selectors.DefaultSelector() as selector:

            def wait() -> None:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise ChildTimeoutError

            def read() -> None:
                wait()
                piece = os.read(stdout.fileno(), 1 << 20)
                if not piece:
                    raise ChildDiedError
                data.extend(piece)

            try:  # a full pipe accepts more only as the child reads
                selector.register(stdin, selectors.EVENT_WRITE)
                while left:
                    wait()
                    left = left[os.write(stdin.fileno(), left) :]
                selector.unregister(stdin)
            except (OSError, ValueError):  # ValueError: closed
                raise ChildGoneError from None
            selector.register(stdout, selectors.EVENT_READ)
            while (end := data.find(b"\n", max(0, len(data) - (1 << 20)))) < 0:
                read()
            try:
                answer = json.loads(bytes(data[:end]))
                num_bytes = answer.get("payload_bytes", 0)
            except (ValueError, AttributeError):
                raise ChildDiedError from None
            del data[: end + 1]
            if num_bytes:
                while len(data) < num_bytes:
                    read()
                answer["payload"] = bytes(data)
        return answer


__all__ = ["ChildDiedError", "ChildGoneError", "ChildProcess", "ChildTimeoutError"]

"""Tokenization of long texts in a child process (`apt_jax.text.tokenize_worker`).

Tokenizing megabytes of text takes seconds and hundreds of megabytes of memory. In a child process, this neither blocks
the server's threads nor kills the server if memory runs out, and the memory is returned to the system.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apt_jax.errors import InvalidRequestError
from apt_jax.utils.worker_process import ChildDiedError, ChildGoneError, ChildProcess, ChildTimeoutError

LONG_CHARS = 32 << 10
"""Length in characters above which a text is tokenized in the child."""
MEMORY_BYTES = 1 << 30
"""Memory in bytes that the child may use for one text."""
TIME_LIMIT_S = 60.0
"""Wall-clock limit for one text in seconds, generous enough for a busy machine."""
_START_LIMIT_S = 60.0
_NICE = 5
"""Niceness of the child, so that the engine's threads take precedence."""


class LongTextTokenizer:
    """A child process with a copy of a tokenizer. It handles one text at a time and is started at the first use.

    Args:
        tokenizer_json: text of tokenizer.json.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._json = tokenizer_json
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See `Tokenizer.encode`. Raises InvalidRequestError if the text takes too much time or memory."""
        return self._ask({"encode": text, "add_special_tokens": add_special_tokens})

    def encode_continuation(self, text: str) -> list[int]:
        """See `Tokenizer.encode_continuation`. Raises: see `encode`."""
        return self._ask({"continuation": text})

    def encode_template(self, text: str, written: Sequence[Sequence[int]]) -> list[int]:
        """See `Tokenizer.encode_template`. Raises: see `encode`."""
        return self._ask({"template": text, "written": written})

    def close(self) -> None:
        """Stop the child. The next call starts it again."""
        with self._lock:
            self._end()

    def _ask(self, job: Mapping[str, Any]) -> list[int]:
        with self._lock:
            try:
                try:
                    return self._tokenize(job)
                except ChildGoneError:  # it had exited before this job: try a new child
                    self._end()
                    return self._tokenize(job)
            except ChildTimeoutError:
                problem = f"tokenizing it takes more than {TIME_LIMIT_S:g} s"
            except ChildDiedError:
                problem = "tokenizing it takes too much memory"
            self._end()
        raise InvalidRequestError("prompt", f"{problem}; shorten it")

    def _tokenize(self, job: Mapping[str, Any]) -> list[int]:
        if self._child is None:
            self._child = ChildProcess(Path(__file__).with_name("tokenize_worker.py"))
            setup = {
                "tokenizer": self._json,
                "memory_bytes": MEMORY_BYTES,
                "nice": _NICE,
                "alarm_s": round(2 * TIME_LIMIT_S),
            }
            self._child.ask(setup, _START_LIMIT_S)
        return np.frombuffer(self._child.ask(job, TIME_LIMIT_S)["payload"], np.int32).tolist()

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None

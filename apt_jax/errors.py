"""Errors that cross a public boundary.

    AptJaxError
     +- ConfigError (ValueError)        a flag or configuration value; the message names the flag
     +- InvalidRequestError (ValueError)  a request that can never be served; `.field` names the input
     |   +- DuplicateRequestError       the request id is alive already
     +- ModelLoadError (ValueError)     unknown model, damaged or mismatching checkpoint
     +- UnknownRequestError (KeyError)  abort of an id that is not alive
     +- QueueFullError                  admission limit reached; try again later
     +- EngineDeadError                 the engine stopped after an error that it could not survive
     +- HostError                       ranks of a replica do not meet, do not fit together, or one is gone

Ordinary outcomes inside the engine (no free block, nothing to schedule) are return values, not errors.
"""

import difflib
from collections.abc import Iterable, Mapping


class AptJaxError(Exception):
    """Base of every error that apt-jax raises on purpose."""


class ConfigError(AptJaxError, ValueError):
    """A configuration value that cannot be used; one line that names the flag and the rule."""


EXCLUDED = "excluded: "
"""Begins the text of an error of an output that its own request has left no token; a field and why follow."""


class InvalidRequestError(AptJaxError, ValueError):
    """A request that can never be served as it stands.

    Attributes:
        field: the input that is wrong, as the user typed it (``"prompt"``, ``"temperature"``, ...).
        code: a word for programs, where the kind of mistake has one: ``"context_length_exceeded"``, ``"duplicate_id"``.
    """

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.code = code

    def renamed(self, field: str) -> "InvalidRequestError":
        """The same error under another name of its field."""
        return InvalidRequestError(field, str(self).removeprefix(f"{self.field}: "), code=self.code)


class DuplicateRequestError(InvalidRequestError):
    """A request with the same id is alive."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            "request_id",
            f"{request_id!r} is already in use by a live request",
            code="duplicate_id",
        )


class ModelLoadError(AptJaxError, ValueError):
    """A model that cannot be found or whose files are damaged or contradict each other."""


class HostError(AptJaxError):
    """Ranks of one replica have not met, do not fit together, or one of them is gone; a new start may help.

    What another host says is this error and never a `ConfigError`, after which a supervisor starts nothing again.
    """


class UnknownRequestError(AptJaxError, KeyError):
    """Raised where no live request has the id."""

    def __str__(self) -> str:
        return f"no live request has the id {self.args[0]!r}"


class QueueFullError(AptJaxError):
    """There is too much to do for the request to wait (`apt_jax.engine.admission`), or it has waited too long.

    Attributes:
        retry_after_s: an estimate of when it would be admitted, in seconds.
        has_waited: it was in the queue, for as long as it may be.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0, *, has_waited: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.has_waited = has_waited


class EngineDeadError(AptJaxError):
    """The engine loop has ended after an error; every open request ends with this error."""


def one_line(text: str) -> str:
    """`text` as it can stand in a message: other people's names and errors may hold newlines and control characters."""
    text = " ".join(text.split())
    return text if text.isprintable() else repr(text)


def json_kind(value: object) -> str:
    """Name the kind of a value as JSON does: ``"null"``, ``"an object"``. Other objects keep the name of their class."""
    if value is None:
        return "null"
    kinds = (
        (bool, "a boolean"),
        (int | float, "a number"),
        (str, "a string"),
        (list | tuple, "an array"),
        (Mapping, "an object"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), f"a {type(value).__name__}")


def counted(number: int, noun: str, nouns: str = "") -> str:
    """``"1 request"``, ``"2 requests"``; `nouns` is a plural that is not made by an s."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"``, or nothing where nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""

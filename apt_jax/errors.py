"""Errors that cross a public boundary.

    AptJaxError
     +- ConfigError (ValueError)        a flag or configuration value; the message names the flag
     +- InvalidRequestError (ValueError)  a request that can never be served; `.field` names the input
     |   +- DuplicateRequestError       a live request already has the id
     +- ModelLoadError (ValueError)     unknown model, or a damaged or mismatched checkpoint
     +- UnknownRequestError (KeyError)  no live request has the id
     +- QueueFullError                  admission limit reached; try again later
     +- EngineDeadError                 the engine stopped after a fatal error
     +- HostError                       ranks of a replica did not connect, do not match, or one was lost

Ordinary outcomes inside the engine (no free block, nothing to schedule) are return values, not errors.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast


class AptJaxError(Exception):
    """Base class of all errors that apt-jax raises deliberately."""


class ConfigError(AptJaxError, ValueError):
    """A configuration value is invalid. The message is one line that names the flag and the rule."""


EXCLUDED = "excluded: "
"""Start of an output's error message if the request's own rules exclude every token; the field and the reason
follow."""


class InvalidRequestError(AptJaxError, ValueError):
    """A request is invalid and can never be served unchanged.

    Attributes:
        field: name of the invalid input, as the user wrote it (``"prompt"``, ``"temperature"``, ...).
        code: machine-readable code such as ``"context_length_exceeded"`` or ``"duplicate_id"``; None: this kind of
            error has no code.
    """

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.code = code

    def renamed(self, field: str) -> "InvalidRequestError":
        """Return the same error with another field name."""
        return InvalidRequestError(field, str(self).removeprefix(f"{self.field}: "), code=self.code)


class DuplicateRequestError(InvalidRequestError):
    """Another live request has the same id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            "request_id",
            f"{request_id!r} is already in use by a live request",
            code="duplicate_id",
        )


class ModelLoadError(AptJaxError, ValueError):
    """A model cannot be found, or its files are damaged or contradict each other."""


class HostError(AptJaxError):
    """The ranks of a replica did not connect or do not match, or one of them was lost; restarting may help.

    Problems reported by another host are raised as this error and never as a `ConfigError`, because a supervisor does
    not restart a process that exits with a `ConfigError`.
    """


class UnknownRequestError(AptJaxError, KeyError):
    """No live request has the given id."""

    def __str__(self) -> str:
        return f"no live request has the id {self.args[0]!r}"


class QueueFullError(AptJaxError):
    """The queue is too full to admit the request (`apt_jax.engine.admission`), or the request has waited too long.

    Attributes:
        retry_after_s: estimated seconds until the request would be admitted.
        has_waited: True if the request was queued and reached the maximum queueing time.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0, *, has_waited: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.has_waited = has_waited


class EngineDeadError(AptJaxError):
    """The engine loop stopped after an error; every live request fails with this error."""


def one_line(text: str) -> str:
    """Return `text` on one line, escaped if needed: names and errors from outside may contain newlines and control
    characters."""
    text = " ".join(text.split())
    return text if text.isprintable() else repr(text)


def json_kind(value: object) -> str:
    """Return the JSON name of a value's type, such as ``"null"`` or ``"an object"``; for other types, the name of the
    class."""
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
    """Return a number with its noun, such as ``"1 request"`` or ``"2 requests"``; `nouns` is an irregular plural."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``"; did you mean X?"`` for the known word closest to `word`, or an empty string if none has at least the
    similarity `cutoff`, in [0, 1]."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


_Call = TypeVar("_Call", bound=Callable[..., Any])


def explained(ways_out: Mapping[str, str]) -> Callable[[_Call], _Call]:
    """Decorate a function so that its `TypeError` about an unknown keyword argument names the way out.

    Args:
        ways_out: way out, keyed by names that other engines accept; other names get the most similar parameter.
    """

    def decorate(call: _Call) -> _Call:
        owner = call.__qualname__.removesuffix(".__init__")
        names = [name for name in inspect.signature(call).parameters if name != "self"]

        @functools.wraps(call)
        def checked(*args: Any, **given: Any) -> Any:
            try:
                return call(*args, **given)
            except TypeError:
                unknown = next((name for name in given if name not in names), None)
                if unknown is None:
                    raise
                hint = f"; {ways_out[unknown]}" if unknown in ways_out else nearest(unknown, names)
                raise TypeError(f"{owner} has no parameter {unknown!r:.80}{hint}") from None

        return cast("_Call", checked)

    return decorate

"""From errors to gRPC statuses: the only place where the two meet.

Clients see the texts of our own errors, which are written for them, and never that of any other exception.
`grpc-retry-pushback-ms` tells clients and proxies when to try again; -1 says not to (gRPC proposal A6).
"""

import asyncio
import dataclasses
import math

import grpc

from apt_jax.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    UnknownRequestError,
)

PUSHBACK_KEY = "grpc-retry-pushback-ms"
RETRY_AFTER_KEY = "retry-after"


class UnknownModelError(Exception):
    """A request names a model that is not served here."""


class SlowReaderError(Exception):
    """The client has not read for too long."""


class NoTokenizerError(Exception):
    """Somebody asks for the tokenizer of a model that has none."""


class ProfilerStateError(Exception):
    """A profile is to begin while one is being taken, or to end while none is."""


class RequestFailedError(Exception):
    """The engine ended this request for its own sake."""


def reason_for_client(error: str | None) -> str:
    """From a fixed catalogue: texts of the engine that begin so are written for users, others may hold anything."""
    if error is not None and error.startswith(("numeric:", "grammar:")):
        return error
    return "the request failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """How an RPC ends."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str], ...] = ()


def status_of(error: BaseException, request_id: str) -> Status:
    """The status that an error becomes.

    Args:
        error: whatever ended the RPC.
        request_id: shown where nothing else may be.
    """
    match error:
        case DuplicateRequestError():
            return _final(grpc.StatusCode.ALREADY_EXISTS, str(error))
        case InvalidRequestError():
            return _final(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        case UnknownModelError():
            return _final(grpc.StatusCode.NOT_FOUND, str(error))
        case UnknownRequestError():
            return _final(grpc.StatusCode.NOT_FOUND, str(error))
        case NoTokenizerError() | ProfilerStateError():
            return _final(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        case QueueFullError():
            return _retry(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), error.retry_after_s)
        case SlowReaderError():
            return _final(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        case EngineDeadError():
            return _retry(grpc.StatusCode.UNAVAILABLE, str(error), 1.0)
        case TimeoutError():
            return _final(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
        case asyncio.CancelledError():
            return Status(code=grpc.StatusCode.CANCELLED, message="cancelled")
        case RequestFailedError():
            return _final(grpc.StatusCode.INTERNAL, f"{error} (request {request_id})")
    return _final(grpc.StatusCode.INTERNAL, f"internal error (request {request_id})")


def _final(code: grpc.StatusCode, message: str) -> Status:
    return Status(code=code, message=message, trailers=((PUSHBACK_KEY, "-1"),))


def _retry(code: grpc.StatusCode, message: str, after_s: float) -> Status:
    return Status(
        code=code,
        message=message,
        trailers=(
            (PUSHBACK_KEY, str(math.ceil(after_s * 1e3))),
            (RETRY_AFTER_KEY, str(math.ceil(after_s))),
        ),
    )

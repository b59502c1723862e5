"""The only mapping from errors to gRPC statuses; `serve.http_api.errors` is its counterpart for HTTP.

Clients see the messages of the project's own errors, which are written for clients, but not the messages of other
exceptions. The trailer `grpc-retry-pushback-ms` has the time after which clients and proxies may retry; -1 means never
(gRPC proposal A6).
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
from apt_jax.frontend.streams import EngineStartingError
from serve.errors import (
    MissingKeyError,
    NoTokenizerError,
    OperatorKeyError,
    ProfilerStateError,
    ProfileWriteError,
    RequestFailedError,
    SlowReaderError,
    UnknownModelError,
)

PUSHBACK_KEY = "grpc-retry-pushback-ms"
RETRY_AFTER_KEY = "retry-after"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """Final status of an RPC."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str], ...] = ()


def to_grpc_status(error: BaseException, request_id: str) -> Status:
    """Map an error to the status of its RPC.

    Args:
        error: the exception that ended the RPC.
        request_id: id shown to the client in place of the text of an internal error.
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
        case MissingKeyError():
            return _final(grpc.StatusCode.UNAUTHENTICATED, "no valid API key; send 'authorization: Bearer KEY'")
        case OperatorKeyError():
            return _final(grpc.StatusCode.PERMISSION_DENIED, str(error))
        case NoTokenizerError() | ProfilerStateError():
            return _final(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        case QueueFullError():
            return _retry(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), error.retry_after_s)
        case SlowReaderError():
            return _final(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        case MemoryError():
            return _retry(grpc.StatusCode.RESOURCE_EXHAUSTED, "the server is short of memory", 5.0)
        case EngineStartingError():
            return _retry(grpc.StatusCode.UNAVAILABLE, str(error), error.retry_after_s)
        case EngineDeadError():
            return _retry(grpc.StatusCode.UNAVAILABLE, str(error), 1.0)
        case TimeoutError():
            return _final(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
        case asyncio.CancelledError():
            return Status(code=grpc.StatusCode.CANCELLED, message="cancelled")
        case ProfileWriteError():
            return _final(grpc.StatusCode.INTERNAL, str(error))
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

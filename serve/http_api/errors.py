"""The only mapping from errors to HTTP responses, in the formats of OpenAI, Anthropic and Ollama; its counterpart for
gRPC is `serve.grpc_api.errors`.

Clients see the messages of the project's own errors, which are written for them, but not of any other exception.
Responses to requests that would fail again have `x-should-retry: false`, which clients respect regardless of the status;
responses to requests that may succeed later or elsewhere have `retry-after`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

from apt_jax.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    UnknownRequestError,
)
from apt_jax.frontend.start_stages import StartStatus
from apt_jax.frontend.streams import EngineClosedError, EngineStartingError
from serve.errors import (
    OperatorKeyError,
    ProfilerStateError,
    ProfileWriteError,
    RequestFailedError,
    UnknownModelError,
)

DROPPED_REASON_KEYS = ("x-llm-d-request-dropped-reason", "x-request-dropped-reason")
"""Headers of responses to requests rejected because of the server's state: they give the reason in llm-d's words."""


class Renamer(Protocol):
    """Replaces the engine's name for the field of an error with the field's name in the body."""

    def __call__(self, error: InvalidRequestError, /) -> InvalidRequestError: ...


class BadCallError(Exception):
    """A call is rejected because of its path, size, API key, speed or another property of the HTTP request.

    Args:
        status: HTTP status of the response.
        code: machine-readable error code.
        message: one line for users.
        headers: additional headers of the response.
    """

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpError:
    """An error response."""

    status: int
    message: str
    kind: str
    """OpenAI's `type`."""
    code: str | None = None
    param: str | None = None
    """Name of the invalid field, if any."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    starting: StartStatus | None = None
    """Progress of the server's start, if the request arrived before the server was ready."""

    def body(self) -> dict[str, Any]:
        """Return the body in OpenAI's format."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        if self.starting is not None:
            error["starting"] = start_json(self.starting)
        return {"error": error}


def start_json(status: StartStatus) -> dict[str, Any]:
    """Return the progress of a server's start as a JSON object."""
    left_s = None if status.left_s is None else round(status.left_s, 1)
    return {"stage": status.stage, "number": status.number, "of": status.total, "estimated_seconds": left_s}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_body(error: HttpError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's format."""
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, usual)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def ollama_body(error: HttpError) -> dict[str, Any]:
    """Return the body of an error in Ollama's format."""
    return {"error": error.message}


def error_body(error: HttpError, path: str) -> dict[str, Any]:
    """Return the body of an error in the format of the path's API."""
    if path.startswith("/api/"):
        return ollama_body(error)
    return anthropic_body(error) if path.startswith("/v1/messages") else error.body()


def to_http_error(error: BaseException, request_id: str) -> HttpError:
    """Map an error to its response.

    Args:
        error: the exception that ended the request.
        request_id: id of the request for error messages; it is shown instead of the text of an internal error.
    """
    match error:
        case BadCallError():
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            return _final(error.status, str(error), kind, error.code, headers=error.headers)
        case InvalidRequestError():
            return _final(400, str(error), "invalid_request_error", error.code, error.field)
        case UnknownModelError():
            return _final(404, str(error), "invalid_request_error", "model_not_found", "model")
        case UnknownRequestError():
            return _final(404, str(error), "invalid_request_error", "request_not_found")
        case OperatorKeyError():
            return _final(403, str(error), "invalid_request_error", "operator_key_required")
        case ProfilerStateError():  # not 409, which clients retry
            return _final(400, str(error), "invalid_request_error", "profiler_state")
        case ProfileWriteError():
            return _final(500, str(error), "server_error", "profile_not_written")
        case QueueFullError():
            why = "ttl-expired" if error.has_waited else "saturated"
            return _later(429, str(error), "rate_limit_error", "queue_full", error.retry_after_s, why)
        case MemoryError():
            return _later(503, "the server is short of memory", "server_error", "out_of_memory", 5.0, "saturated")
        case EngineStartingError():
            made = _later(503, str(error), "server_error", "unavailable", error.retry_after_s, error.why)
            return dataclasses.replace(made, starting=error.status)
        case EngineDeadError():
            why = error.why if isinstance(error, EngineClosedError) else "no-endpoints"
            return _later(503, str(error), "server_error", "unavailable", 1.0, why)
        case TimeoutError():
            return _final(408, "the deadline has passed", "timeout_error", "deadline_exceeded")
        case RequestFailedError():
            message = f"{error} (request {request_id})"
            return _final(500, message, "server_error", "request_failed")
    message = f"internal error (request {request_id})"
    return _final(500, message, "server_error", "internal_error")


def _final(
    status: int,
    message: str,
    kind: str,
    code: str | None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpError:
    return HttpError(
        status=status,
        message=message,
        kind=kind,
        code=code,
        param=param,
        headers={"x-should-retry": "false", **(headers or {})},
    )


def _later(status: int, message: str, kind: str, code: str, after_s: float, why: str) -> HttpError:
    """Return the response to a request that may be retried after `after_s` seconds; `why` is the reason for llm-d's
    router, without its prefix ``rejected-``."""
    return HttpError(
        status=status,
        message=message,
        kind=kind,
        code=code,
        headers={
            "retry-after": str(max(1, math.ceil(after_s))),
            **dict.fromkeys(DROPPED_REASON_KEYS, f"rejected-{why}"),
        },
    )

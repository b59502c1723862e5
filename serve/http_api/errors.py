"""From errors to HTTP answers in OpenAI's shape: the only place where the two meet; `serve.grpc_api.errors` is the same for gRPC.

Clients see the texts of our own errors, which are written for them, and never that of any other exception. A request that was
refused or failed for its own sake says `x-should-retry: false`, which clients obey before they look at the status; what may
work later or elsewhere says `retry-after`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from apt_jax.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    UnknownRequestError,
)
from serve.grpc_api.errors import ProfilerStateError, RequestFailedError, UnknownModelError


class RefusedError(Exception):
    """The call cannot be taken, for a reason of HTTP: its path, size, key or speed.

    Args:
        status: to answer with.
        code: a word for programs.
        message: one line for people.
        headers: of the answer.
    """

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """An answer that is an error."""

    status: int
    message: str
    kind: str
    """OpenAI's `type`."""
    code: str | None = None
    param: str | None = None
    """The field that is wrong."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def failure_of(error: BaseException, request_id: str) -> Failure:
    """The answer that an error becomes.

    Args:
        error: whatever ended the request.
        request_id: shown where nothing else may be.
    """
    match error:
        case RefusedError():
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            return _final(error.status, str(error), kind, error.code, headers=error.headers)
        case InvalidRequestError():
            return _final(400, str(error), "invalid_request_error", error.code, error.field)
        case UnknownModelError():
            return _final(404, str(error), "invalid_request_error", "model_not_found", "model")
        case UnknownRequestError():
            return _final(404, str(error), "invalid_request_error", "request_not_found")
        case ProfilerStateError():  # not 409, which clients try again
            return _final(400, str(error), "invalid_request_error", "profiler_state")
        case QueueFullError():
            return _later(429, str(error), "rate_limit_error", "queue_full", error.retry_after_s)
        case EngineDeadError():
            return _later(503, str(error), "server_error", "unavailable", 1.0)
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
) -> Failure:
    return Failure(
        status=status,
        message=message,
        kind=kind,
        code=code,
        param=param,
        headers={"x-should-retry": "false", **(headers or {})},
    )


def _later(status: int, message: str, kind: str, code: str, after_s: float) -> Failure:
    return Failure(
        status=status,
        message=message,
        kind=kind,
        code=code,
        headers={"retry-after": str(max(1, math.ceil(after_s)))},
    )


# Made once: `json.dumps` with options makes one a call, which for a token's chunk is a third of the time.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_bytes(value: Any) -> bytes:
    """Compact JSON."""
    return _encode(value).encode("utf-8", "replace")

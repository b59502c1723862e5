"""The record of one call, of any protocol, from which its log line (`serve.observability.call_log`) and its trace
(`serve.observability.tracing`) are made. It contains no prompt, output or key.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from apt_jax.errors import EngineDeadError, InvalidRequestError
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.streams import EngineClosedError, EngineStartingError, RequestStreamGroup
from apt_jax.request import EngineRequest, RequestMetrics
from serve.errors import RequestFailedError

NO_ID = "unnamed"
"""Id of calls that were rejected before their id was known."""

_TRACE_HEADERS = ("traceparent", "tracestate")


@dataclasses.dataclass(kw_only=True)
class CallRecord:
    """Record of one call; the call's endpoint fills it in and closes it."""

    protocol: Literal["http", "grpc", "batch"]
    method: str
    """Path or gRPC method: a name that the server defines, never text from a client."""
    http_method: str | None = None
    """HTTP method; None: the call is not an HTTP call, or its method is unknown."""
    request_id: str = NO_ID
    tenant: str | None = None
    """Owner of the call's API key (`serve.security.api_keys`); None: no owner."""
    reason: str = "error"
    """Finish reason of the output, or the status of a call that has no output."""
    code: str | None = None
    """Machine-readable error code; None: no error code."""
    param: str | None = None
    """Name of the invalid field, for rejected requests."""
    outcome: Literal["succeeded", "cancelled", "rejected", "failed"] = "failed"
    """Outcome of the call. "rejected": the client can correct the request, or send it again later."""
    before_start: bool = False
    """True if the call was rejected because the server was starting."""
    error: BaseException | None = None
    """Unexpected exception that ended the call."""
    num_output_tokens: int = 0
    """Number of output tokens of all requests of the call."""
    parent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """W3C trace context of the call, keyed by header name."""
    model: str | None = None
    requests: Sequence[EngineRequest] = ()
    """Engine requests of the call."""
    metrics: Sequence[RequestMetrics | None] = ()
    """Metrics of each of `requests`; None: the engine did not accept the request."""
    started_s: float = dataclasses.field(default_factory=time.monotonic)
    ended_s: float = 0.0
    """End of the call on the machine's monotonic clock, in seconds, like `started_s`."""
    ended_engine_s: float = 0.0
    """End of the call on the engine's clock, in seconds."""
    ended_unix_ns: int = 0
    """End of the call on the wall clock, in nanoseconds since the epoch."""

    def set_trace_parent(self, headers: Mapping[str, str | bytes]) -> None:
        """Record the trace that the call belongs to.

        Args:
            headers: HTTP headers or gRPC metadata; names in lower case.
        """
        found = {name: headers.get(name) for name in _TRACE_HEADERS}
        self.parent = {name: value for name, value in found.items() if isinstance(value, str)}

    def succeeded(self, reason: str) -> None:
        """Record that the call succeeded, with `reason` as its finish reason."""
        self.reason, self.outcome = reason, "succeeded"

    def cancelled(self, reason: str) -> None:
        """Record that the call was cancelled, usually by its client; `reason` goes to the log."""
        self.reason, self.outcome = reason, "cancelled"

    def failed(self, error: BaseException, reason: str, code: str | None = None, *, internal: bool) -> None:
        """Record that the call ends with an error.

        Args:
            error: exception that ended the call.
            reason, code: status and error code that are sent to the client.
            internal: True if the server caused the error.
        """
        self.reason, self.code = reason, code
        self.before_start = isinstance(error, EngineStartingError)
        if isinstance(error, InvalidRequestError):
            self.param = error.field  # the server's name for the field; the message may quote the client
            self.code = error.code
        failed = internal and not isinstance(error, EngineClosedError)
        self.outcome = "failed" if failed else "rejected"
        if failed and not isinstance(error, RequestFailedError | EngineDeadError):
            self.error = error

    def close(self, engine: AsyncEngine | None, group: RequestStreamGroup | None) -> None:
        """Record that the call ends now.

        Args:
            engine: engine that served the call; None: no engine exists yet.
            group: streams of the call's requests; None: no requests were submitted.
        """
        self.ended_s = self.ended_engine_s = time.monotonic()
        self.ended_unix_ns = time.time_ns()
        if engine is not None:
            self.ended_engine_s = engine.parts.clock.now_s()
            self.model = engine.parts.model_name
        if group is not None:
            self.requests = [stream.request for stream in group.streams]
            self.model = self.requests[0].adapter or self.model
            self.metrics = [stream.metrics for stream in group.streams]

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def slo_class(self) -> str | None:
        """SLO class of the call's requests; None: it has no requests."""
        return self.requests[0].slo_class if self.requests else None

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens of all requests of the call."""
        return sum(int(request.prompt_token_ids.size) for request in self.requests)

    @property
    def num_blocks(self) -> int | None:
        """Number of cache blocks freed by the call's requests; None: not known, such as right after a cancellation."""
        known = [m.num_blocks for m in self.metrics if m is not None and m.num_blocks is not None]
        return sum(known) if known else None

    @property
    def queue_s(self) -> float | None:
        """Shortest time from arrival to first step among the call's requests, in seconds; None: no request has run."""
        return min(
            (
                m.first_scheduled_s - m.arrival_s
                for m in self.metrics
                if m is not None and m.first_scheduled_s is not None
            ),
            default=None,
        )

    @property
    def ttft_s(self) -> float | None:
        """Shortest TTFT among the call's requests, in seconds; None: no token was generated."""
        times_s = [m.ttft_s for m in self.metrics if m is not None]
        return min((s for s in times_s if s is not None), default=None)

    def unix_ns(self, engine_s: float) -> int:
        """Convert a time on the engine's clock to nanoseconds since the epoch, relative to the call's end."""
        return self.ended_unix_ns - int(1e9 * (self.ended_engine_s - engine_s))

    @property
    def started_unix_ns(self) -> int:
        return self.ended_unix_ns - int(1e9 * self.duration_s)

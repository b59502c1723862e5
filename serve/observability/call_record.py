"""The record of one call, of any protocol: for its line in the log (`serve.observability.call_log`) and its trace
(`serve.observability.tracing`). It holds no prompt, output or key.
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
"""Id of a call that was rejected before its own was known."""

_TRACE_HEADERS = ("traceparent", "tracestate")


@dataclasses.dataclass(kw_only=True)
class CallRecord:
    """One call; its endpoint fills it in and closes it."""

    protocol: Literal["http", "grpc", "batch"]
    method: str
    """The path or the gRPC method; one of ours, never what a client wrote."""
    http_method: str | None = None
    """The HTTP method, if it is a known one; None for gRPC."""
    request_id: str = NO_ID
    tenant: str | None = None
    """Owner of its API key (`serve.security.api_keys`)."""
    reason: str = "error"
    """The finish reason of its output, or the status that it got instead."""
    code: str | None = None
    """Machine-readable error code."""
    param: str | None = None
    """The invalid field."""
    outcome: Literal["succeeded", "cancelled", "rejected", "failed"] = "failed"
    """Rejected: the client can send a better request, or the same one later."""
    before_start: bool = False
    """Rejected because the server is starting."""
    error: BaseException | None = None
    """An unexpected exception."""
    num_output_tokens: int = 0
    """Output tokens of all its requests."""
    parent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """W3C trace context that it came with, by header."""
    model: str | None = None
    requests: Sequence[EngineRequest] = ()
    """Its requests to the engine."""
    metrics: Sequence[RequestMetrics | None] = ()
    """Theirs; None: the engine did not accept the request."""
    started_s: float = dataclasses.field(default_factory=time.monotonic)
    ended_s: float = 0.0
    """On the machine's monotonic clock, as `started_s`."""
    ended_engine_s: float = 0.0
    """The same moment on the engine's clock."""
    ended_unix_ns: int = 0
    """The same moment on the wall clock."""

    def set_trace_parent(self, headers: Mapping[str, str | bytes]) -> None:
        """Note the trace that the call belongs to.

        Args:
            headers: HTTP headers or gRPC metadata; names in lower case.
        """
        found = {name: headers.get(name) for name in _TRACE_HEADERS}
        self.parent = {name: value for name, value in found.items() if isinstance(value, str)}

    def succeeded(self, reason: str) -> None:
        """Note that it has its whole output."""
        self.reason, self.outcome = reason, "succeeded"

    def cancelled(self, reason: str) -> None:
        """Note that its client has disconnected."""
        self.reason, self.outcome = reason, "cancelled"

    def failed(self, error: BaseException, reason: str, code: str | None = None, *, internal: bool) -> None:
        """Note that it ends with an error.

        Args:
            error: what ended it.
            reason, code: as the client is told.
            internal: the fault is the server's.
        """
        self.reason, self.code = reason, code
        self.before_start = isinstance(error, EngineStartingError)
        if isinstance(error, InvalidRequestError):
            self.param = error.field  # a name of ours; its message may quote the client
            self.code = error.code
        failed = internal and not isinstance(error, EngineClosedError)
        self.outcome = "failed" if failed else "rejected"
        if failed and not isinstance(error, RequestFailedError | EngineDeadError):
            self.error = error

    def close(self, engine: AsyncEngine | None, group: RequestStreamGroup | None) -> None:
        """End the call now.

        Args:
            engine: that served it; None: there is none yet.
            group: of its requests, if they were submitted.
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
        """Class of its requests; None: it has none."""
        return self.requests[0].slo_class if self.requests else None

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all its requests."""
        return sum(int(request.prompt_token_ids.size) for request in self.requests)

    @property
    def num_blocks(self) -> int | None:
        """Cache blocks that its requests freed; None: not known, as for a request that was cancelled just now."""
        known = [m.num_blocks for m in self.metrics if m is not None and m.num_blocks is not None]
        return sum(known) if known else None

    @property
    def queue_s(self) -> float | None:
        """Arrival to the first step of any of its requests, seconds; None: there was none."""
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
        """Arrival to the first token of any of its requests, seconds; None: there was none."""
        times_s = [m.ttft_s for m in self.metrics if m is not None]
        return min((s for s in times_s if s is not None), default=None)

    def unix_ns(self, engine_s: float) -> int:
        """Convert a time of the engine's clock to nanoseconds since the epoch, by both clocks at the call's end."""
        return self.ended_unix_ns - int(1e9 * (self.ended_engine_s - engine_s))

    @property
    def started_unix_ns(self) -> int:
        return self.ended_unix_ns - int(1e9 * self.duration_s)

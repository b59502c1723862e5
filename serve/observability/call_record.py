"""What is known of one call when it has ended, at either door: for its line in the log (`serve.observability.call_log`) and its trace
(`serve.observability.tracing`). Nothing of what it says: no text, no tokens, no key.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from apt_jax.async_engine import AsyncEngine, EngineClosedError, StreamGroup
from apt_jax.errors import EngineDeadError, InvalidRequestError
from apt_jax.request import EngineRequest, RequestMetrics
from serve.grpc_api.errors import RequestFailedError

NO_ID = "unnamed"
"""Of a call that was refused before its id was known."""

_TRACE_HEADERS = ("traceparent", "tracestate")


@dataclasses.dataclass(kw_only=True)
class CallRecord:
    """One call; its door fills it in and closes it."""

    door: Literal["http", "grpc"]
    method: str
    """The path or the gRPC method; one of ours, never what a client wrote."""
    verb: str | None = None
    """HTTP's method, likewise; None: at the other door, or not one that we know."""
    request_id: str = NO_ID
    tenant: str | None = None
    """Whose key it came with (`serve.security.api_keys`)."""
    reason: str = "error"
    """The finish reason of its answer, or the status that it got instead."""
    code: str | None = None
    """More exactly, in a word for programs."""
    param: str | None = None
    """The field that is wrong."""
    verdict: Literal["served", "gone", "refused", "failed"] = "failed"
    """What became of it: "gone" is the client, "refused" what a client can be told to do better or later."""
    error: BaseException | None = None
    """That nobody expected."""
    num_output_tokens: int = 0
    """Of all its answers, sent or on their way."""
    parent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """W3C trace context that it came with, by header."""
    model: str | None = None
    requests: Sequence[EngineRequest] = ()
    """That it was made into."""
    metrics: Sequence[RequestMetrics | None] = ()
    """Theirs; None: the engine did not take it."""
    started_s: float = dataclasses.field(default_factory=time.monotonic)
    ended_s: float = 0.0
    """On the machine's monotonic clock, as `started_s`; likewise:"""
    ended_engine_s: float = 0.0
    """on the engine's clock, and"""
    ended_unix_ns: int = 0
    """on the wall's."""

    def comes_from(self, headers: Mapping[str, str | bytes]) -> None:
        """Note the trace that the call belongs to.

        Args:
            headers: of HTTP, or gRPC's metadata; names in lower case.
        """
        found = {name: headers.get(name) for name in _TRACE_HEADERS}
        self.parent = {name: value for name, value in found.items() if isinstance(value, str)}

    def serve(self, reason: str) -> None:
        """It has its whole answer."""
        self.reason, self.verdict = reason, "served"

    def leave(self, reason: str) -> None:
        """Nobody hears an answer any more."""
        self.reason, self.verdict = reason, "gone"

    def fail(
        self, error: BaseException, reason: str, code: str | None = None, *, internal: bool
    ) -> None:
        """It ends with an error.

        Args:
            error: what ended it.
            reason, code: as the client is told.
            internal: the client cannot help it.
        """
        self.reason, self.code = reason, code
        if isinstance(error, InvalidRequestError):
            self.param = error.field  # a name of ours; its message may quote the client
            self.code = error.code
        failed = internal and not isinstance(error, EngineClosedError)
        self.verdict = "failed" if failed else "refused"
        if failed and not isinstance(error, RequestFailedError | EngineDeadError):
            self.error = error

    def close(self, engine: AsyncEngine | None, group: StreamGroup | None) -> None:
        """It ends now.

        Args:
            engine: that answered; None: there is none yet.
            group: of its requests, where they were handed to the engine.
        """
        self.ended_s = self.ended_engine_s = time.monotonic()
        self.ended_unix_ns = time.time_ns()
        if engine is not None:
            self.ended_engine_s = engine.parts.clock.now_s()
            self.model = engine.parts.model_name
        if group is not None:
            self.requests = [stream.request for stream in group.streams]
            self.metrics = [stream.metrics for stream in group.streams]

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def num_prompt_tokens(self) -> int:
        """Of all its requests."""
        return sum(int(request.prompt_token_ids.size) for request in self.requests)

    @property
    def num_blocks(self) -> int | None:
        """Of cache that its requests gave back; None: not known, as for one that was broken off just now."""
        known = [m.num_blocks for m in self.metrics if m is not None and m.num_blocks is not None]
        return sum(known) if known else None

    @property
    def queue_s(self) -> float | None:
        """Arrival to the first step of any of its requests; None: there was none."""
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
        """Arrival to the first token of any of its answers; None: there was none."""
        times_s = [m.ttft_s for m in self.metrics if m is not None]
        return min((s for s in times_s if s is not None), default=None)

    def unix_ns(self, engine_s: float) -> int:
        """The time of the engine's clock on the wall's, nanoseconds since the epoch, by where both stood at the end."""
        return self.ended_unix_ns - int(1e9 * (self.ended_engine_s - engine_s))

    @property
    def started_unix_ns(self) -> int:
        return self.ended_unix_ns - int(1e9 * self.duration_s)

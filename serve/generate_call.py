"""The life of a Generate call, the same for every protocol.

1. `CallService.admit` rejects the call while the server starts, drains or is short of memory.
2. The `Transport` reads the request and builds the engine's requests, in a thread if that may take long
   (`serve.preprocessing`).
3. `run_generate` submits them to the engine, which decides when they run.
4. The transport writes the output until every request has finished. If the client disconnects, its requests are
   cancelled at once, whether they stream or not.
5. However the call ends, its `CallRecord` becomes a log line and, if tracing is on, a trace.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from apt_jax.errors import EXCLUDED, InvalidRequestError
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.frontend.start_stages import StartStatus
from apt_jax.frontend.streams import EngineClosedError, EngineStartingError, RequestStreamGroup
from apt_jax.request import EngineRequest
from serve.errors import RequestFailedError, UnknownModelError
from serve.memory_gate import MemoryGate
from serve.observability.call_log import CallLog
from serve.observability.call_record import CallRecord
from serve.preprocessing import Preprocessing

if TYPE_CHECKING:  # requires the extra `otel`
    from serve.observability.tracing import Tracer

LONG_PROMPT_CHARS = 4096
"""Number of characters above which a prompt is tokenized in a thread, to keep the event loop responsive."""


class EngineCall(NamedTuple):
    """Requests of one call, ready for the engine."""

    call_id: str
    requests: Sequence[EngineRequest]
    deadline_s: float | None
    """Time on the engine's clock, in seconds, after which unfinished requests are ended; None: no deadline."""


class Transport(Protocol):
    """One Generate call over a particular protocol."""

    record: CallRecord

    async def read(self, engine: AsyncEngine) -> EngineCall:
        """Read the call and build its requests.

        Raises:
            Exception: the call is invalid, or its client has disconnected.
        """
        ...

    def on_disconnect(self, cancel: Callable[[], None]) -> None:
        """Call `cancel` when the client disconnects."""
        ...

    async def write(self, index: int, delta: OutputDelta, group: RequestStreamGroup) -> None:
        """Send new output of request `index`, or collect it until the end."""
        ...

    async def finish(self) -> None:
        """Send the end of the response, after the output of all requests."""
        ...

    def disconnect_reason(self, error: Exception) -> str | None:
        """Return the reason to log if the client had disconnected when `error` ended the call, else None."""
        ...

    async def fail(self, error: Exception) -> None:
        """Send an error in the protocol's format, and store it in the record."""
        ...

    def close(self) -> None:
        """Release the call's resources."""
        ...


class CallService:
    """The engine behind one protocol's endpoints, and the state that their calls share. Used from one event loop only.

    Args:
        logger: logger of the protocol.
        tracer: traces ended calls; None: no traces.
        work: preprocessing threads and budgets, shared with other protocols; None: this service has its own.
        memory: rejects calls while memory is short; None: no limit.
        starting: returns the server's startup progress while there is no engine.
    """

    def __init__(
        self,
        logger: logging.Logger,
        tracer: "Tracer | None",
        work: Preprocessing | None = None,
        memory: MemoryGate | None = None,
        starting: Callable[[], StartStatus | None] = lambda: None,
    ) -> None:
        self.work = Preprocessing() if work is None else work
        """Threads and budgets for preprocessing."""
        self.log = CallLog(logger)
        """Log with one line for each call that has ended."""
        self.num_open = 0
        """Number of in-flight Generate calls."""
        self.attached: AsyncEngine | None = None
        """The engine, even while draining; None: the model is still loading."""
        self.starting = starting
        self._tracer, self._memory = tracer, memory
        self._draining = False
        self._serving_since_s = 0.0

    def attach_engine(self, engine: AsyncEngine) -> None:
        """Serve calls with this engine from now on; it must be ready to run requests."""
        if engine.parts.tokenizer is not None:
            engine.parts.tokenizer.use_child_for_long_texts()
        self.attached, self._serving_since_s = engine, time.monotonic()

    def drain(self) -> None:
        """Reject new calls."""
        self._draining = True

    def close(self) -> None:
        self.work.close()
        self.log.close()

    @property
    def uptime_s(self) -> float:
        """Seconds since the engine was attached."""
        return 0.0 if self.attached is None else time.monotonic() - self._serving_since_s

    @property
    def is_ready(self) -> bool:
        """True while new calls are accepted."""
        return self.attached is not None and self.attached.is_serving and not self._draining

    def engine(self, *, even_draining: bool = False) -> AsyncEngine:
        """Return the engine.

        Raises:
            EngineStartingError: there is no engine yet.
            EngineClosedError: the server is shutting down.
        """
        if self._draining and not even_draining:
            raise EngineClosedError("the server is shutting down", why="shutting-down")
        if self.attached is None:
            raise EngineStartingError(self.starting())
        return self.attached

    def admit(self) -> AsyncEngine:
        """Return the engine for a call that submits requests, if memory allows.

        Raises:
            EngineStartingError: there is no engine yet.
            EngineClosedError: the server is shutting down or short of memory.
        """
        engine = self.engine()
        if self._memory is not None:
            self._memory.check()
        return engine

    def end(self, record: CallRecord, engine: AsyncEngine | None, group: RequestStreamGroup | None) -> None:
        """Log and trace a call that has ended."""
        record.close(engine, group)
        self.log.write(record)
        if self._tracer is not None:
            self._tracer.send(record)


async def run_generate(transport: Transport, service: CallService) -> None:
    """Serve a Generate call to its end."""
    record, engine, group = transport.record, None, None
    service.num_open += 1
    try:
        engine = service.admit()
        call = await transport.read(engine)
        record.request_id = call.call_id
        await engine.prepare(call.requests)
        group = engine.submit_batch(call.requests, deadline_s=call.deadline_s)
        transport.on_disconnect(group.cancel)
        reasons: set[str] = set()
        try:
            async for index, delta in group:
                record.num_output_tokens += len(delta.token_ids)
                if delta.finish_reason == "error":
                    raise _failure(delta.error)
                if delta.finish_reason is not None:
                    reasons.add(delta.finish_reason)
                await transport.write(index, delta, group)
            await transport.finish()
        finally:
            group.cancel()
        record.succeeded(", ".join(sorted(reasons)))
    except asyncio.CancelledError:
        record.cancelled("cancelled")
        raise
    except Exception as error:
        reason = transport.disconnect_reason(error)
        if reason is not None:
            record.cancelled(reason)
        else:
            await transport.fail(error)
    finally:
        transport.close()
        service.num_open -= 1
        service.end(record, engine, group)


def require_served_model(parts: EngineComponents, name: str) -> None:
    """Check that `name` is the model of this server or one of its LoRA adapters.

    Raises:
        UnknownModelError: `name` is neither.
    """
    if name not in (*parts.model_names, parts.config.model, *parts.limits.adapters):
        names = " and ".join(repr(known) for known in parts.model_names)
        raise UnknownModelError(f"model {name[:80]!r} is not served here; this server has {names}")


def _failure(error: str | None) -> Exception:
    """Return the exception for an output that ended with this error text from the engine."""
    if error is not None and error.startswith(EXCLUDED):
        field, _, message = error.removeprefix(EXCLUDED).partition(": ")
        return InvalidRequestError(field, message, code="no_token_left")
    return RequestFailedError(_client_text(error))


def _client_text(error: str | None) -> str:
    """Return the engine's error text if its prefix marks it as safe for clients, else a general text."""
    if error is not None and error.startswith(("numeric:", "grammar:")):
        return error
    return "the request failed"

"""The life of a Generate call, the same for every protocol.

1. `CallService.engine` rejects the call while the server starts or drains.
2. The `Transport` reads the request and builds the engine's requests, in a thread if that may take long
   (`serve.preprocessing`).
3. `run_generate` submits them to the engine, which alone decides what runs.
4. The transport writes the output until every request has finished. A client that disconnects cancels them at once,
   whether it streams or not.
5. However the call ends, its `CallRecord` becomes a line of the log and, if tracing is on, a trace.
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

if TYPE_CHECKING:  # it needs the extra `otel`
    from serve.observability.tracing import Tracer

LONG_PROMPT_CHARS = 4096
"""Longer prompts are tokenized in a thread, so that the event loop stays responsive."""


class EngineCall(NamedTuple):
    """Requests of one call to the engine."""

    call_id: str
    requests: Sequence[EngineRequest]
    deadline_s: float | None
    """On the engine's clock."""


class Transport(Protocol):
    """One Generate call as its protocol carries it."""

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
        """Send, or collect, new output of request `index`."""
        ...

    async def finish(self) -> None:
        """Send the end of the answer, after the output of all requests."""
        ...

    def disconnect_reason(self, error: Exception) -> str | None:
        """The log's reason if `error` ended a call whose client has disconnected, else None."""
        ...

    async def fail(self, error: Exception) -> None:
        """Send an error in the protocol's form and note it in the record."""
        ...

    def close(self) -> None:
        """Release the call's resources."""
        ...


class CallService:
    """The engine behind one protocol's endpoints, and the state that their calls share; one event loop.

    Args:
        logger: of the protocol.
        tracer: None: no traces.
        work: shared with other protocols; None: its own.
        memory: None: no limit.
        starting: tells how far the start is, while there is no engine.
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
        """Threads and budgets for work before the engine."""
        self.log = CallLog(logger)
        """A line for each call that has ended."""
        self.num_open = 0
        """Number of in-flight Generate calls."""
        self.attached: AsyncEngine | None = None
        """The engine, even while draining; None: the model is still loading."""
        self.starting = starting
        self._tracer, self._memory = tracer, memory
        self._draining = False
        self._serving_since_s = 0.0

    def attach_engine(self, engine: AsyncEngine) -> None:
        """Serve with this warm engine from now on."""
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
        """The engine.

        Raises:
            EngineStartingError: there is none yet.
            EngineClosedError: the server is shutting down.
        """
        if self._draining and not even_draining:
            raise EngineClosedError("the server is shutting down", why="shutting-down")
        if self.attached is None:
            raise EngineStartingError(self.starting())
        return self.attached

    def admit(self) -> AsyncEngine:
        """The engine, for a call that makes work.

        Raises:
            EngineClosedError: as for `engine`, or memory is short.
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
    """Check that a call names the model of this server, or one of its LoRA adapters.

    Raises:
        UnknownModelError: it names another one.
    """
    if name not in (*parts.model_names, parts.config.model, *parts.limits.adapters):
        names = " and ".join(repr(known) for known in parts.model_names)
        raise UnknownModelError(f"model {name[:80]!r} is not served here; this server has {names}")


def _failure(error: str | None) -> Exception:
    """The error that ended an output, from the engine's text, which is for clients where its prefix says so."""
    if error is not None and error.startswith(EXCLUDED):
        field, _, message = error.removeprefix(EXCLUDED).partition(": ")
        return InvalidRequestError(field, message, code="no_token_left")
    return RequestFailedError(_client_text(error))


def _client_text(error: str | None) -> str:
    """The engine's text if it is written for clients; others may hold anything."""
    if error is not None and error.startswith(("numeric:", "grammar:")):
        return error
    return "the request failed"

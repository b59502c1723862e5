"""What the gRPC services of a port share: the engine that answers, and the life of a call.

A Generate call of any service is an `Exchange`: it says what is asked for and what the answers look like. `Calls` does the rest, once
for all of them:

1. Refuse while the server is starting or draining. Build the requests; nothing else reaches the engine.
2. Submit them and write what they have until the last message. A client that does not read for too long loses its requests.
3. However the RPC ends, `finally` and a done-callback end the requests: a cancellation that arrives during a write is not a
   CancelledError in grpc.aio. Its `CallRecord` becomes a line of the log and, where that is asked for, a trace.
"""

import asyncio
import concurrent.futures
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from apt_jax.async_engine import AsyncEngine, EngineClosedError, StreamGroup
from apt_jax.errors import DuplicateRequestError, InvalidRequestError, UnknownRequestError
from apt_jax.llm import EngineParts, OutputDelta
from apt_jax.request import EngineRequest
from serve.grpc_api.errors import (
    RequestFailedError,
    SlowReaderError,
    Status,
    reason_for_client,
    status_of,
)
from serve.observability.call_log import CallLog, log_failure
from serve.observability.call_record import CallRecord
from serve.security.api_keys import ApiKeys

if TYPE_CHECKING:  # it needs the extra `otel`
    from serve.observability.tracing import Tracer

logger = logging.getLogger(__name__)

_LONG_PROMPT_CHARS = 4096
"""Prompts longer than this are tokenised in a thread, so that the event loop goes on."""
_FORM_THREADS = 4
"""Requests with structured outputs are built in threads of their own: a new form is compiled, which may take seconds."""
_NEWS_S = 1.0
_INTERNAL = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)

T = TypeVar("T")


class Exchange(Protocol):
    """One Generate call of one service."""

    def fields(self, parts: EngineParts) -> dict[str, Any]:
        """Arguments for `EngineParts.build_requests`.

        Raises:
            InvalidRequestError, UnknownModelError: the message cannot be read, or is not for this server.
        """
        ...

    def deadline_s(self) -> float | None:
        """Seconds that the request gives itself; None: no limit of its own. Raises InvalidRequestError."""
        ...

    def messages(self, index: int, delta: OutputDelta) -> Iterable[Message]:
        """What to write for news of output `index`."""
        ...


class _ClientGoneError(Exception):
    """A write failed."""


def decoder(message_type: Any) -> Callable[[bytes], Any]:
    """Bytes that are no message (invalid UTF-8, cut off) become None, for the handler to refuse with the right status."""

    def decode(data: bytes) -> Any:
        try:
            return message_type.FromString(data)
        except DecodeError:
            return None

    return decode


def metadata_of(context: grpc.aio.ServicerContext) -> list[tuple[str, str | bytes]]:
    """The metadata that an RPC came with."""
    return [(key, value) for key, value in context.invocation_metadata() or ()]


def readable(request: T | None) -> T:
    """The message, if there is one.

    Raises:
        InvalidRequestError: it could not be read.
    """
    if request is None:
        raise InvalidRequestError("request", "the message cannot be read; text must be valid UTF-8")
    return request


class Calls:
    """The open calls of a port and the engine that answers them; one event loop.

    Args:
        write_stall_s: a client that has not read for this long loses its requests.
        keys: which tell whose call it is; None: nobody's in particular.
        tracer: None: no traces.
    """

    def __init__(
        self,
        write_stall_s: float,
        keys: ApiKeys | None = None,
        tracer: "Tracer | None" = None,
    ) -> None:
        self._keys, self._tracer = keys, tracer
        self.log = CallLog(logger)
        """A line for each call that has ended."""
        self._write_stall_s = write_stall_s
        self._engine: AsyncEngine | None = None
        self._served_since_s = 0.0
        self._draining = False
        self._live: dict[str, tuple[EngineRequest, ...]] = {}
        """Requests that may not have ended, by the id of their call."""
        self._forms = concurrent.futures.ThreadPoolExecutor(
            _FORM_THREADS, thread_name_prefix="apt-jax-forms"
        )
        self.num_open = 0
        """Generate calls in progress."""
        self.last_arrival_s: float | None = None
        """When the last Generate call came, seconds since the epoch."""

    def use(self, engine: AsyncEngine) -> None:
        """Answer with this engine from now on."""
        self._engine, self._served_since_s = engine, time.monotonic()

    def drain(self) -> None:
        """Refuse new requests."""
        self._draining = True

    def close(self) -> None:
        self._forms.shutdown(wait=False, cancel_futures=True)
        self.log.close()

    @property
    def uptime_s(self) -> float:
        """Seconds since there is an engine."""
        return 0.0 if self._engine is None else time.monotonic() - self._served_since_s

    def engine(self, *, even_draining: bool = False) -> AsyncEngine:
        """The engine.

        Raises:
            EngineClosedError: there is none yet, or the server is shutting down.
        """
        if self._draining and not even_draining:
            raise EngineClosedError("the server is shutting down")
        if self._engine is None:
            raise EngineClosedError("the server is starting: the model is not ready yet")
        return self._engine

    async def generate(
        self, exchange: Exchange, context: grpc.aio.ServicerContext, service: str
    ) -> None:
        """Serve a Generate call to its end.

        Args:
            service: that it was made to.
        """
        metadata, engine, group = dict(metadata_of(context)), None, None
        record = CallRecord(door="grpc", method=f"{service}/Generate")
        record.comes_from(metadata)
        if self._keys is not None:
            record.tenant = self._keys.tenant_of(metadata.get("authorization"))
        self.last_arrival_s = time.time()
        self.num_open += 1
        try:
            engine = self.engine()
            deadline_s = _deadline_s(engine, exchange, context)
            requests = await self._build(engine.parts, exchange, record.tenant)
            request_id = record.request_id = requests[0].request_id
            if request_id in self._live:
                raise DuplicateRequestError(request_id)
            group = engine.submit_all(requests, deadline_s=deadline_s)
            self._live[request_id] = tuple(requests)
            cancel = group.cancel
            context.add_done_callback(lambda _: cancel())  # type: ignore[arg-type]  # the stubs want a class
            reason = "error"
            try:
                async for index, delta in group:
                    record.num_output_tokens += len(delta.token_ids)
                    if delta.finish_reason == "error":
                        raise RequestFailedError(reason_for_client(delta.error))
                    if group.ended:  # before the client knows: it may use the id again
                        self._forget(request_id, requests)
                    for message in exchange.messages(index, delta):
                        await self._write(context, message, group)
                    reason = delta.finish_reason or reason
                record.serve(reason)
            finally:
                group.cancel()
                self._forget(request_id, requests)
        except asyncio.CancelledError:
            record.leave("cancelled")
            raise
        except (
            _ClientGoneError
        ):  # or its deadline has passed, during a write: nobody hears a status any more
            record.leave("cancelled")
            # The news of its leaving comes after the failed write; gRPC must have them before the handler returns, or
            # it tries to send a status and logs that it cannot. It then cancels this task.
            await asyncio.sleep(_NEWS_S)
        except Exception as error:
            if context.done():
                record.leave("cancelled")
                return
            status = status_of(error, record.request_id)
            record.fail(error, status.code.name.lower(), internal=status.code in _INTERNAL)
            await _end(context, status)
        finally:
            self.num_open -= 1
            record.close(engine, group)
            self.log.write(record)
            if self._tracer is not None:
                self._tracer.send(record)

    def abort(self, call_ids: Iterable[str]) -> None:
        """End the requests of these calls; their streams end with the finish reason "abort".

        Raises:
            UnknownRequestError: some of them are not live; the others are ended all the same.
        """
        unknown = None
        for call_id in call_ids:
            requests = self._live.get(call_id)
            if requests is None:
                unknown = call_id if unknown is None else unknown
            elif self._engine is not None:
                for request in requests:
                    self._engine.abort(request.request_id)
        if unknown is not None:
            raise UnknownRequestError(unknown[:80])

    async def refuse(
        self, context: grpc.aio.ServicerContext, error: Exception, what: str
    ) -> NoReturn:
        """End an RPC that is no Generate call with the status that an error becomes.

        Args:
            what: the method, for the log.
        """
        status = status_of(error, what)
        if status.code is grpc.StatusCode.INTERNAL:
            log_failure(logger, what, error)
        await _end(context, status)

    def _forget(self, call_id: str, requests: list[EngineRequest]) -> None:
        """The id is free; it may have another owner already."""
        if self._live.get(call_id, (None,))[0] is requests[0]:
            del self._live[call_id]

    async def _build(
        self, parts: EngineParts, exchange: Exchange, tenant: str | None
    ) -> list[EngineRequest]:
        fields = exchange.fields(parts)
        fields["tenant"] = tenant
        fields["arrival_s"] = parts.clock.now_s()
        build = functools.partial(parts.build_requests, **fields)
        params: Mapping[str, Any] = fields["params"]
        if params.get("structured_outputs") is not None:
            return await asyncio.get_running_loop().run_in_executor(self._forms, build)
        if len(fields.get("prompt") or "") <= _LONG_PROMPT_CHARS:
            return build()
        return await asyncio.to_thread(build)

    async def _write(
        self, context: grpc.aio.ServicerContext, message: Message, group: StreamGroup
    ) -> None:
        """Write one message. A client that does not read for too long loses its requests, and with them the cache blocks.

        A write that has begun cannot be taken back in gRPC, and no status can be sent before it has ended. So the status
        waits until the client reads again or goes away; what waits is one message, and the place among the RPCs.
        """
        stall_s = self._write_stall_s
        slow = False

        def note() -> None:
            nonlocal slow
            slow = not group.ended  # what has ended is delivered whole, however slowly
            group.cancel()

        timer = asyncio.get_running_loop().call_later(stall_s, note)
        try:
            await context.write(message)
        except Exception as error:  # gRPC's type for it is not public
            raise _ClientGoneError from error
        finally:
            timer.cancel()
        if slow:
            raise SlowReaderError(
                f"the client did not read for {stall_s:.0f} s; read faster or ask for less"
            )


async def _end(context: grpc.aio.ServicerContext, status: Status) -> NoReturn:
    # Before the first message this goes out as trailers only: the client may then retry elsewhere.
    await context.abort(status.code, status.message, status.trailers)
    raise AssertionError("not reached: abort raises")


def _deadline_s(
    engine: AsyncEngine, exchange: Exchange, context: grpc.aio.ServicerContext
) -> float | None:
    """The sooner one of the RPC's deadline and the request's own, on the engine's clock."""
    now_s = engine.parts.clock.now_s()
    limits = [s for s in (context.time_remaining(), exchange.deadline_s()) if s is not None]
    if not limits:
        return None
    if min(limits) <= 0.0:
        raise TimeoutError
    return now_s + min(limits)

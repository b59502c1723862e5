"""The Generate calls of the gRPC services on one port.

A `GenerateCodec` converts the messages of one service; `GrpcCalls` serves each call with
`serve.generate_call.run_generate`:

* If a client stops reading for too long, its requests are cancelled.
* A failed write cancels the call's requests, because grpc.aio raises no CancelledError for a disconnect during a write.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from apt_jax.errors import DuplicateRequestError, InvalidRequestError, UnknownRequestError
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.frontend.start_stages import StartStatus
from apt_jax.frontend.streams import RequestStreamGroup
from apt_jax.request import EngineRequest
from serve.errors import MissingKeyError, SlowReaderError
from serve.generate_call import LONG_PROMPT_CHARS, CallService, EngineCall, run_generate
from serve.grpc_api.errors import Status, to_grpc_status
from serve.grpc_api.key_interceptor import caller_of
from serve.memory_gate import MemoryGate
from serve.observability.call_log import log_failure
from serve.observability.call_record import CallRecord
from serve.preprocessing import Owner, Preprocessing
from serve.security.api_keys import ANYBODY, ApiKeys, Caller, may_see_totals, require_operator
from serve.slo_headers import max_queue_s

if TYPE_CHECKING:  # requires the extra `otel`
    from serve.observability.tracing import Tracer

logger = logging.getLogger(__name__)

_DISCONNECT_GRACE_S = 1.0
_INTERNAL = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)

T = TypeVar("T")


class GenerateCodec(Protocol):
    """Converts between the messages of one Generate call, defined by its service, and the engine's types."""

    def fields(self, parts: EngineComponents) -> dict[str, Any]:
        """Return the arguments for `EngineComponents.build_requests`.

        Raises:
            InvalidRequestError: the message cannot be decoded, or requests an unsupported feature.
            UnknownModelError: the message names a model that the server does not serve.
        """
        ...

    def objective_names(self) -> Mapping[str, str]:
        """Return a map from each latency objective's name in `build_requests` to the name that the client used."""
        ...

    def deadline_s(self) -> float | None:
        """Return the time limit in the request message, in seconds; None if it gives no limit.

        Raises:
            InvalidRequestError: the limit is invalid.
        """
        ...

    def messages(self, index: int, delta: OutputDelta) -> Iterable[Message]:
        """Encode new output of request `index` of the call."""
        ...


class _ClientDisconnectedError(Exception):
    """A write failed because the client has disconnected or the RPC's deadline has passed."""


def decoder(message_type: Any) -> Callable[[bytes], Any]:
    """Return a decoder that returns None for invalid bytes; the handler then rejects them with the right status."""

    def decode(data: bytes) -> Any:
        try:
            return message_type.FromString(data)
        except DecodeError:
            return None

    return decode


def metadata_of(context: grpc.aio.ServicerContext) -> list[tuple[str, str | bytes]]:
    """Return the metadata of an RPC as (key, value) pairs."""
    return [(key, value) for key, value in context.invocation_metadata() or ()]


def require_decoded(request: T | None) -> T:
    """Check that a request message was decoded, and return it.

    Raises:
        InvalidRequestError: the message is None, that is, its bytes were invalid.
    """
    if request is None:
        raise InvalidRequestError("request", "the message cannot be read; text must be valid UTF-8")
    return request


class GrpcCalls:
    """The in-flight Generate calls of a port. Used from one event loop only.

    Args:
        write_stall_s: seconds after which the requests of a client that does not read are cancelled.
        keys: API keys, which determine the tenant of a call; None: there are no tenants.
        tracer: traces the calls; None: no traces.
        work: preprocessing queues, shared with other servers; None: the port has its own.
        memory, starting: see `CallService`.
    """

    def __init__(
        self,
        write_stall_s: float,
        keys: ApiKeys | None = None,
        tracer: "Tracer | None" = None,
        work: Preprocessing | None = None,
        memory: MemoryGate | None = None,
        starting: Callable[[], StartStatus | None] = lambda: None,
    ) -> None:
        self.service = CallService(logger, tracer, work, memory, starting)
        self.write_stall_s = write_stall_s
        self.last_arrival_s: float | None = None
        """Arrival time of the last Generate call, in seconds since the epoch; None: no call yet."""
        self._keys = keys
        self._live: dict[str, tuple[EngineRequest, ...]] = {}
        """Requests of each call in flight, keyed by the engine's id of the call's first request."""

    async def generate(self, codec: GenerateCodec, context: grpc.aio.ServicerContext, service: str) -> None:
        """Serve a Generate call of `service` to its end."""
        record = CallRecord(protocol="grpc", method=f"{service}/Generate")
        record.set_trace_parent(dict(metadata_of(context)))
        try:
            record.tenant = self.caller(context).tenant
        except MissingKeyError as error:
            await self.reject(context, error, "Generate")
        self.last_arrival_s = time.time()
        await run_generate(_GrpcCall(self, codec, context, record), self.service)

    def caller(self, context: grpc.aio.ServicerContext) -> Caller:
        """Return the caller of an RPC.

        Raises:
            MissingKeyError: its key has been revoked since the RPC began.
        """
        if self._keys is None:
            return ANYBODY
        caller = caller_of(self._keys, metadata_of(context))
        if caller is None:
            raise MissingKeyError
        return caller

    def require_operator(self, context: grpc.aio.ServicerContext, *, totals: bool = False) -> None:
        """See `serve.security.api_keys.require_operator`."""
        require_operator(self._keys, self.caller(context), totals=totals)

    def sees_totals(self, context: grpc.aio.ServicerContext) -> bool:
        """See `serve.security.api_keys.may_see_totals`."""
        return may_see_totals(self._keys, self.caller(context))

    def register(self, requests: tuple[EngineRequest, ...]) -> None:
        """Record the requests of a call for `abort`.

        Raises:
            DuplicateRequestError: a call in flight of the same tenant has the same id.
        """
        first = requests[0]
        if first.request_id in self._live:
            raise DuplicateRequestError(first.label)
        self._live[first.request_id] = requests

    def release(self, requests: tuple[EngineRequest, ...]) -> None:
        """Free the id of a call, unless a newer call already uses it."""
        if requests and self._live.get(requests[0].request_id) is requests:
            del self._live[requests[0].request_id]

    async def abort(self, call_ids: Iterable[str], caller: Caller) -> None:
        """Abort the requests of these calls, of any protocol; their streams end with the finish reason "abort".

        Args:
            call_ids: ids of the calls, as the caller knows them.
            caller: the client; only calls of its tenant are found.

        Raises:
            UnknownRequestError: at least one call is not in flight; the other calls are aborted anyway.
        """
        unknown = None
        for call_id in call_ids:
            if not await self._abort(caller.engine_id(call_id)):
                unknown = call_id if unknown is None else unknown
        if unknown is not None:
            raise UnknownRequestError(unknown[:80])

    async def _abort(self, request_id: str) -> bool:
        engine, requests = self.service.attached, self._live.get(request_id)
        if engine is None or "#" in request_id:  # the id of a single request of a call
            return False
        if requests is not None:
            for request in requests:
                engine.abort(request.request_id)
            return True
        # It may be a call of another protocol, which is not recorded here.
        parts = (request_id, *(f"{request_id}#{i}" for i in range(1, engine.parts.limits.max_sequences)))
        found = engine.call(lambda: [engine.parts.engine.abort(part) for part in parts])
        return any(await asyncio.wrap_future(found))

    async def reject(self, context: grpc.aio.ServicerContext, error: Exception, method: str) -> NoReturn:
        """End an RPC other than Generate with the status of an error."""
        status = to_grpc_status(error, method)
        if status.code is grpc.StatusCode.INTERNAL:
            log_failure(logger, method, error)
        await _end(context, status)


class _GrpcCall:
    """One Generate call, a `serve.generate_call.Transport`."""

    def __init__(
        self,
        calls: GrpcCalls,
        codec: GenerateCodec,
        context: grpc.aio.ServicerContext,
        record: CallRecord,
    ) -> None:
        self.record = record
        self._calls, self._codec, self._context = calls, codec, context
        self._requests: tuple[EngineRequest, ...] = ()

    async def read(self, engine: AsyncEngine) -> EngineCall:
        deadline_s = self._deadline_s(engine)
        requests = await self._build(engine.parts)
        call_id = self.record.request_id = requests[0].label
        self._calls.register(requests)
        self._requests = requests
        return EngineCall(call_id, requests, deadline_s)

    def on_disconnect(self, cancel: Callable[[], None]) -> None:
        """Do nothing: gRPC cancels the coroutine of the call, and runs callbacks of the context only after the call."""

    async def write(self, index: int, delta: OutputDelta, group: RequestStreamGroup) -> None:
        if group.ended:  # before the client sees the end and may use the id again
            self.close()
        encoded = self._codec.messages(index, delta)
        if delta.prompt_logprobs is not None:  # there may be many messages
            encoded = await asyncio.to_thread(list, encoded)
        for message in encoded:
            await self._send(message, group)

    async def finish(self) -> None:
        pass

    def disconnect_reason(self, error: Exception) -> str | None:
        gone = isinstance(error, _ClientDisconnectedError) or self._context.done()
        return "cancelled" if gone else None

    async def fail(self, error: Exception) -> None:
        self.close()  # also before the client sees the error
        status = to_grpc_status(error, self.record.request_id)
        internal = status.code in _INTERNAL
        self.record.failed(error, status.code.name.lower(), internal=internal)
        await _end(self._context, status)

    def close(self) -> None:
        self._calls.release(self._requests)

    def _deadline_s(self, engine: AsyncEngine) -> float | None:
        """Return the earlier of the deadlines of the RPC and the request message, on the engine's clock; None if there
        is no deadline."""
        now_s = engine.parts.clock.now_s()
        limits = [self._context.time_remaining(), self._codec.deadline_s()]
        known = [s for s in limits if s is not None]
        if not known:
            return None
        if min(known) <= 0.0:
            raise TimeoutError
        return now_s + min(known)

    async def _build(self, parts: EngineComponents) -> tuple[EngineRequest, ...]:
        work, owner = self._calls.service.work, self._owner()
        fields = self._codec.fields(parts)
        fields["tenant"] = self.record.tenant
        fields["arrival_s"] = parts.clock.now_s()
        fields["grammars"] = parts.pending_grammars
        fields["max_queue_s"] = max_queue_s(dict(self._context.invocation_metadata() or ()))
        build = functools.partial(self._checked, parts, fields)
        num_chars = len(fields.get("prompt") or "")
        with work.bodies.lease(owner) as lease:
            lease.grow(num_chars + 4 * len(fields.get("prompt_token_ids") or ()))
            if num_chars <= LONG_PROMPT_CHARS:
                requests = build()
            else:
                requests = await work.run(build, owner, num_bytes=num_chars)
            return tuple(await work.compile_grammars(requests, owner))

    def _checked(self, parts: EngineComponents, fields: dict[str, Any]) -> list[EngineRequest]:
        try:
            return parts.build_requests(**fields)
        except InvalidRequestError as error:
            name = self._codec.objective_names().get(error.field)
            raise (error if name is None else error.renamed(name)) from None

    def _owner(self) -> Owner:
        """Return the owner of the call for preprocessing, as `serve.http_api.calls.owner_of` does for HTTP."""
        tenant = self.record.tenant
        return ("address", self._context.peer().rpartition(":")[0]) if tenant is None else ("key", tenant)

    async def _send(self, message: Message, group: RequestStreamGroup) -> None:
        """Write one message. If the client does not read it in time, the call's requests are cancelled, which frees
        their cache blocks.

        gRPC cannot cancel a write that has started, and sends no status before the write has ended. So the status is
        sent only when the client reads again or disconnects. Until then the message stays in memory, and the RPC counts
        as one of the concurrent RPCs.

        Raises:
            SlowReaderError: the client did not read for `write_stall_s` seconds.
            _ClientDisconnectedError: the write failed.
        """
        stall_s = self._calls.write_stall_s
        slow = False

        def cancel() -> None:
            nonlocal slow
            slow = not group.ended  # finished output is delivered completely, even to a slow client
            group.cancel()

        timer = asyncio.get_running_loop().call_later(stall_s, cancel)
        try:
            await self._context.write(message)
        except Exception as error:  # gRPC's exception type is not public
            group.cancel()
            self.close()
            # gRPC notices the disconnect, or the deadline, after the failed write, and then cancels this task. If the
            # handler returned earlier, gRPC would try to send a status and log that it cannot.
            await asyncio.sleep(_DISCONNECT_GRACE_S)
            raise _ClientDisconnectedError from error
        finally:
            timer.cancel()
        if slow:
            raise SlowReaderError(f"the client did not read for {stall_s:.0f} s; read faster or request less output")


async def _end(context: grpc.aio.ServicerContext, status: Status) -> NoReturn:
    # Before the first message the status is sent as trailers only, so that the client may retry elsewhere.
    await context.abort(status.code, status.message, status.trailers)
    raise AssertionError("not reached: abort raises")

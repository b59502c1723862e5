"""Calls that generate text over HTTP: limits, reading bodies, writing responses and detecting disconnects.

The status of a stream is sent with its first output, so a call that is rejected or fails before that gets an error
status. A later error is sent as an event, and the stream ends without the end marker of a successful stream.
The differences between the endpoints are in `serve.http_api.endpoints`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.frontend.streams import RequestStreamGroup
from serve.compact_json import json_bytes
from serve.generate_call import LONG_PROMPT_CHARS, CallService, EngineCall
from serve.http_api.app_config import AppConfig
from serve.http_api.endpoints import Endpoint, ResponseBuilder, TextCall
from serve.http_api.errors import BadCallError, HttpError, error_body, to_http_error
from serve.http_api.openai_request import Body, parse_json
from serve.observability.call_record import CallRecord
from serve.preprocessing import BodyLease, Owner
from serve.security.api_keys import Caller

if TYPE_CHECKING:  # it needs the extra `otel`
    pass

CALLER_KEY = "aptjax.caller"
"""Key in the ASGI scope of a call; the value is a `serve.security.api_keys.Caller`."""
CLOSE_HEADERS = {"connection": "close"}
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

T = TypeVar("T")


def require_json(headers: Headers) -> None:
    """Check that the content type is JSON, which pages of other sites cannot send without a CORS preflight.

    Raises:
        BadCallError: the content type is not JSON.
    """
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise BadCallError(
            415, "unsupported_media_type", "the body must be JSON: send 'content-type: application/json'"
        )


def owner_of(scope: Scope) -> Owner:
    """Return the owner under which a call is queued: the API key's owner or, without keys, the client's address."""
    caller: Caller = scope[CALLER_KEY]
    tenant, client = caller.tenant, scope.get("client")
    return ("address", None if client is None else client[0]) if tenant is None else ("key", tenant)


async def read_body(config: AppConfig, request: Request, lease: BodyLease) -> bytes:
    """Read the whole body.

    Args:
        config: limits on calls.
        request: the HTTP request.
        lease: share of the memory budget for bodies; the caller must hold it until the body has been processed.

    Raises:
        QueueFullError: the memory budget for bodies is used up.
        BadCallError: the body is not JSON, is compressed, is too large or arrives too slowly.
        ClientDisconnect: the client has disconnected.
    """
    headers = request.headers
    require_json(headers)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise BadCallError(415, "unsupported_encoding", "the body must not be compressed")
    # The connection stays open, because closing it while the client still sends would lose the response. The rest of
    # the body is discarded, for a limited time (`serve.http_api.protocol`).
    too_large = BadCallError(413, "body_too_large", f"the body must not exceed {config.max_body_bytes} bytes")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > config.max_body_bytes:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for piece in request.stream():
                if len(data) + len(piece) > config.max_body_bytes:
                    raise too_large
                lease.grow(len(piece))
                data += piece
    except TimeoutError:
        late = f"the body must arrive within {config.body_timeout_s:g} s"
        raise BadCallError(408, "body_timeout", late, CLOSE_HEADERS) from None
    return bytes(data)


class DisconnectWatcher:
    """Waits for the client to disconnect.

    Args:
        receive: ASGI `receive` of the call; the body must already have been read.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._action: Callable[[], object] | None = None
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._wait())
        self.happened = False

    def on_disconnect(self, action: Callable[[], object]) -> None:
        """Call `action` when the client disconnects, or at once if it already has."""
        self._action = action
        if self.happened:
            action()

    async def watch(self, work: Awaitable[T]) -> T:
        """Await `work`, and cancel it when the client disconnects.

        Raises:
            ClientDisconnect: the client has disconnected.
        """
        task = asyncio.ensure_future(work)
        self.on_disconnect(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            if self.happened:
                raise ClientDisconnect from None
            raise
        finally:
            task.cancel()
            self._action = None
            del task  # no reference cycle through the traceback of its error

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None  # no reference cycle through the traceback of its cancellation

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.happened = True
        if self._action is not None:
            self._action()


class ResponseWriter:
    """Sends the response to one call."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        """HTTP status that has been sent; 0: none yet."""

    async def start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        raw = [(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def body(self, data: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def json(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete response with the JSON text `data`."""
        fixed = {"content-type": "application/json", "content-length": str(len(data))}
        await self.start(status, {**fixed, **(headers or {})})
        await self.body(data)

    async def fail(self, error: HttpError, path: str) -> None:
        """Send an error as the complete response, in the error format of the path's API."""
        await self.json(error.status, json_bytes(error_body(error, path)), error.headers)


class HttpCall:
    """One call to an endpoint that generates text; implements `serve.generate_call.Transport`."""

    def __init__(
        self, endpoint: Endpoint, config: AppConfig, service: CallService, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._endpoint = endpoint
        self._config, self._service = config, service
        self._request, self._writer = Request(scope, receive), ResponseWriter(send)
        caller: Caller = scope[CALLER_KEY]
        self._tenant = caller.tenant
        self._owner = owner_of(scope)
        self.record = CallRecord(protocol="http", method=endpoint.path, http_method="POST", tenant=self._tenant)
        self.record.set_trace_parent(self._request.headers)
        self._watcher: DisconnectWatcher | None = None
        self._call: TextCall
        self._response: ResponseBuilder
        self._collected: dict[int, list[OutputDelta]] = {}
        """Output of each request of the call, if the call does not stream."""

    async def read(self, engine: AsyncEngine) -> EngineCall:
        with self._service.work.bodies.lease(self._owner) as lease:
            data = await read_body(self._config, self._request, lease)
            self._watcher = DisconnectWatcher(self._request.receive)
            self._call = call = await self._watcher.watch(self._build(engine, data))
        self._response = self._endpoint.respond(engine.parts, call)
        return EngineCall(call.call_id, call.requests, call.deadline_s)

    def on_disconnect(self, cancel: Callable[[], None]) -> None:
        assert self._watcher is not None
        self._watcher.on_disconnect(cancel)

    async def write(self, index: int, delta: OutputDelta, group: RequestStreamGroup) -> None:
        if self._call.stream:
            if delta.prompt_logprobs is None:
                events = self._response.events(index, delta)
            else:  # they may be large
                events = await asyncio.to_thread(self._response.events, index, delta)
            if not self._writer.status:
                headers = {**STREAM_HEADERS, "content-type": self._endpoint.stream_type, **self._headers()}
                await self._writer.start(200, headers)
            if events:
                await self._writer.body(events, more=True)
        elif index in self._collected and not self._endpoint.piecewise:
            self._collected[index][0].merge(delta)
        else:
            self._collected.setdefault(index, []).append(delta)

    async def finish(self) -> None:
        if self._call.stream:
            await self._writer.body(self._response.end())
            return
        ordered = [delta for index in range(len(self._call.requests)) for delta in self._collected[index]]
        if all(delta.prompt_logprobs is None and delta.pooled is None for delta in ordered):
            data = self._response.whole(ordered)
        else:  # it may be large
            data = await asyncio.to_thread(self._response.whole, ordered)
        await self._writer.json(200, data, self._headers())

    def disconnect_reason(self, error: Exception) -> str | None:
        happened = self._watcher is not None and self._watcher.happened
        return "499" if happened or isinstance(error, ClientDisconnect) else None

    async def fail(self, error: Exception) -> None:
        self.close()
        failure = to_http_error(error, self.record.request_id)
        internal = failure.status >= 500
        self.record.failed(error, str(failure.status), failure.code, internal=internal)
        if self._writer.status:
            await self._writer.body(self._response.failure(failure))
        else:
            await self._writer.fail(failure, self._endpoint.path)

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()

    def _headers(self) -> dict[str, str]:
        return {"x-request-id": self._call.call_id}

    async def _build(self, engine: AsyncEngine, data: bytes) -> TextCall:
        parts, work, endpoint = engine.parts, self._service.work, self._endpoint
        arrival_s = parts.clock.now_s()
        headers = dict(self._request.headers)

        def read(body: Body) -> TextCall:
            return endpoint.read(parts, body, headers, arrival_s, self._tenant)

        if len(data) > LONG_PROMPT_CHARS:
            call = await work.run(lambda: read(parse_json(data)), self._owner, num_bytes=len(data))
        else:
            body = parse_json(data)
            if endpoint.is_slow(body):
                call = await work.run(lambda: read(body), self._owner, num_bytes=len(data))
            else:
                call = read(body)
        try:
            requests = await work.compile_grammars(call.requests, self._owner)
        except InvalidRequestError as error:
            raise call.renamed(error) from None
        return call.with_requests(requests)

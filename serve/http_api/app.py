"""The HTTP application: who may ask, bodies within limits, the life of one call, and the small endpoints.

1. Every call passes `HttpApp.__call__`: size of its head, and its key, decided by its path as it was sent.
2. A completion reads its body, builds its requests (`serve.http_api.openai_request`; in a thread where that waits or takes long) and submits
   them to the engine, which alone decides what runs.
3. While it is served, somebody waits for the client to leave: from then on nothing of the call is left in the engine, whether
   it streams or not. A client that does not read is made to leave (`serve.http_api.protocol`).
4. The status is sent with the first token, so that a call that is refused, or fails while it waits, has the right one. After
   it an error is an event of its own, and the stream ends without `[DONE]`.
5. However a call ends, its `CallRecord` becomes a line of the log and, where that is asked for, a trace.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPMethod
from types import TracebackType
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from apt_jax.async_engine import AsyncEngine, EngineClosedError, StreamGroup
from apt_jax.errors import QueueFullError
from apt_jax.llm import OutputDelta
from apt_jax.validation import RequestLimits
from serve.dashboard import page as dashboard_page
from serve.dashboard.feed import DashboardFeed
from serve.grpc_api.errors import RequestFailedError, UnknownModelError, reason_for_client
from serve.http_api import openai_request as openai_api
from serve.http_api import openapi
from serve.http_api.errors import Failure, RefusedError, failure_of, json_bytes
from serve.http_api.openai_request import Answers, Call, Kind
from serve.observability.call_log import CallLog, log_failure
from serve.observability.call_record import NO_ID, CallRecord
from serve.observability.profiler import Profiler
from serve.observability.prometheus import ServerMetrics
from serve.security.api_keys import ApiKeys

if TYPE_CHECKING:  # it needs the extra `otel`
    from serve.observability.tracing import Tracer

logger = logging.getLogger(__name__)

OPEN_PATHS = (b"/health", b"/ready", *(path.encode() for path in dashboard_page.FILES))
"""What needs no key; exactly so. Of the dashboard that is the page without any data."""
_TENANT = "aptjax.tenant"
"""Of a call's scope: whose key came with it."""

_LONG_PROMPT_CHARS = 4096
"""Longer prompts are tokenised in a thread, so that the event loop goes on."""
_LONG_BODY_BYTES = 128 << 10
"""Longer bodies are parsed in one, too."""
_THREADS = 4
_FORM_THREADS = 4
"""Calls with structured outputs are read in threads of their own: a new form is compiled, which may take seconds."""
_SCRAPE_TIMEOUT_S = 10.0
_PATHS: dict[Kind, str] = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
_CLOSE = {"connection": "close"}
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppConfig:
    """Limits of calls."""

    max_body_bytes: int = 2 << 20
    body_timeout_s: float = 30.0
    """For the whole body."""
    max_header_bytes: int = 16 << 10
    """Of one call's head."""
    max_headers: int = 100
    keys: ApiKeys | None = None
    """None: no call needs one."""
    tracer: "Tracer | None" = None
    """None: no traces."""
    profiler: Profiler | None = None
    """None: there are no paths for it."""
    dashboard: bool = True
    """Whether there is one, at `/dashboard`."""


class _Departure:
    """Waits for the client to leave.

    Args:
        receive: of the call, after its body has been read.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._end: Callable[[], None] | None = None
        self.happened = False

    async def __aenter__(self) -> "_Departure":
        self._task = asyncio.create_task(self._wait())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()

    def ends(self, end: Callable[[], None]) -> None:
        """Call this when it happens."""
        self._end = end

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.happened = True
        if self._end is not None:
            self._end()


class _ClientGoneError(Exception):
    """Nobody hears an answer any more."""


class _Answer:
    """What has been sent of the answer to one call."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        """0: nothing has been sent."""

    async def start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        raw = [(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def body(self, data: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = json_bytes(value)
        fixed = {"content-type": "application/json", "content-length": str(len(data))}
        await self.start(status, {**fixed, **(headers or {})})
        await self.body(data)

    async def event(self, data: bytes) -> None:
        await self.body(b"data: " + data + b"\n\n", more=True)

    async def fail(self, failure: Failure) -> None:
        """Say so in whatever way is left; after a stream has begun that is an event, and its end."""
        if not self.status:
            await self.json(failure.status, failure.body(), dict(failure.headers))
        else:
            await self.event(json_bytes(failure.body()))
            await self.body(b"")


class HttpApp:
    """An ASGI application.

    Args:
        config: limits.
    """

    def __init__(self, config: AppConfig) -> None:
        self._config = config
        self._engine: AsyncEngine | None = None
        self._metrics: ServerMetrics | None = None
        self._draining = False
        self._created_s = int(time.time())
        self.num_open = 0
        """Completions in progress."""
        self._threads = _pool(_THREADS, "apt-jax-http")
        self._forms = _pool(_FORM_THREADS, "apt-jax-http-forms")
        self._log = CallLog(logger)
        profiling = [] if config.profiler is None else _profiling(config.profiler)
        self._dashboard = DashboardFeed()
        dashboard = [
            *(Route(path, _safely(self._page), methods=["GET"]) for path in dashboard_page.FILES),
            Route("/dashboard/events", self._events, methods=["GET"]),
        ]
        self._routes = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", _safely(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", _safely(self._model), methods=["GET"]),
                Route(
                    "/v1/requests/{request_id}/decisions", _safely(self._decisions), methods=["GET"]
                ),
                Route("/tokenize", _safely(self._tokenize), methods=["POST"]),
                Route("/detokenize", _safely(self._detokenize), methods=["POST"]),
                Route("/health", _safely(self._health), methods=["GET"]),
                Route("/ready", _safely(self._ready), methods=["GET"]),
                Route("/metrics", _safely(self._scrape), methods=["GET"]),
                Route("/openapi.json", _safely(self._openapi), methods=["GET"]),
                *profiling,
                *(dashboard if config.dashboard else ()),
            ],
            exception_handlers={HTTPException: _of_starlette},
        )
        self._routes.router.redirect_slashes = False
        self._describe()

    @property
    def paths(self) -> list[tuple[str, str]]:
        """(method, path) of every endpoint."""
        routes = [route for route in self._routes.routes if isinstance(route, Route)]
        return [(method, r.path) for r in routes for method in sorted(r.methods or ())]

    def use(self, engine: AsyncEngine, metrics: ServerMetrics | None) -> None:
        """Serve with a warm engine."""
        self._engine, self._metrics = engine, metrics
        self._dashboard.use(engine, metrics)
        parts = engine.parts
        self._describe(parts.limits, (parts.model_name, parts.config.model))

    def _describe(self, limits: RequestLimits | None = None, models: Sequence[str] = ()) -> None:
        has_keys, profiles = self._config.keys is not None, self._config.profiler is not None
        made = openapi.document(limits, models, has_keys=has_keys, profiles=profiles)
        self._document = json_bytes(made)

    def drain(self) -> None:
        """Take no new calls."""
        self._draining = True
        self._dashboard.drain()

    async def end_views(self) -> None:
        """End what goes on as long as somebody watches."""
        await self._dashboard.close()

    def close(self) -> None:
        for pool in (self._threads, self._forms):
            pool.shutdown(wait=False, cancel_futures=True)
        self._log.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        assert scope["type"] == "http"
        try:
            self._admit(scope)
        except RefusedError as error:
            record = CallRecord(door="http", method=self._path_of(scope), verb=_verb_of(scope))
            record.fail(error, str(error.status), error.code, internal=False)
            record.close(None, None)
            self._log.write(record)
            await _Answer(send).fail(failure_of(error, NO_ID))
            return
        await self._routes(scope, receive, send)

    def _path_of(self, scope: Scope) -> str:
        """Which of our paths a call is for, as it is written in `_routes`."""
        for route in self._routes.routes:
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
                return route.path
        return "any"

    def _admit(self, scope: Scope) -> None:
        config, headers = self._config, scope["headers"]
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        if size > config.max_header_bytes or len(headers) > config.max_headers:
            raise RefusedError(
                431,
                "headers_too_large",
                f"the head of a request must fit {config.max_header_bytes >> 10} KiB and {config.max_headers} fields",
                _CLOSE,
            )
        if config.keys is None or scope["raw_path"] in OPEN_PATHS:
            return
        tenant = _tenant_of(config.keys, scope)
        if tenant is None:
            raise RefusedError(
                401,
                "invalid_api_key",
                "no valid API key; send 'authorization: Bearer KEY'",
                {"www-authenticate": "Bearer"},
            )
        scope[_TENANT] = tenant

    def _ready_engine(self) -> AsyncEngine:
        if self._draining:
            raise EngineClosedError("the server is shutting down")
        if self._engine is None:
            raise EngineClosedError("the server is starting: the model is not ready yet")
        return self._engine

    # --- completions -----------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> ASGIApp:
        return functools.partial(self._generate, "completion")

    async def _chat(self, request: Request) -> ASGIApp:
        return functools.partial(self._generate, "chat")

    async def _generate(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        request, answer, answers = Request(scope, receive), _Answer(send), None
        engine = group = None
        record = CallRecord(
            door="http", method=_PATHS[kind], verb="POST", tenant=scope.get(_TENANT)
        )
        record.comes_from(request.headers)
        departure = _Departure(request.receive)
        self.num_open += 1
        try:
            engine = self._ready_engine()
            data = await self._read(request)
            async with departure:
                call = await self._call(engine, kind, data, request)
                if departure.happened:
                    raise _ClientGoneError
                record.request_id = call.call_id
                answers = Answers(engine.parts, call)
                group = engine.submit_all(call.requests, deadline_s=call.deadline_s)
                departure.ends(group.cancel)
                try:
                    record.serve(await self._answer(answer, answers, call, group))
                finally:
                    group.cancel()
        except asyncio.CancelledError:
            record.leave("cancelled")
            raise
        except Exception as error:
            if departure.happened or isinstance(error, ClientDisconnect | _ClientGoneError):
                record.leave("499")
                return
            failure = failure_of(error, record.request_id)
            record.fail(error, str(failure.status), failure.code, internal=failure.status >= 500)
            await answer.fail(failure)
        finally:
            self.num_open -= 1
            record.num_output_tokens = 0 if answers is None else answers.num_tokens
            record.close(engine, group)
            self._log.write(record)
            if self._config.tracer is not None:
                self._config.tracer.send(record)

    async def _read(self, request: Request) -> bytes:
        """The body.

        Raises:
            RefusedError: it is not JSON by its type, too large or too slow.
            ClientDisconnect: the client has gone.
        """
        config, headers = self._config, request.headers
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise RefusedError(415, "unsupported_media_type", "the body must be JSON: send 'content-type: application/json'")  # fmt: skip
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise RefusedError(415, "unsupported_encoding", "the body must not be compressed")
        # The connection stays: one that is closed while the client still sends takes the answer with it. What comes is thrown
        # away, and not for long (`serve.http_api.protocol`).
        too_large = RefusedError(413, "body_too_large", f"the body must not exceed {config.max_body_bytes} bytes")  # fmt: skip
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > config.max_body_bytes:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(config.body_timeout_s):
                async for piece in request.stream():
                    data += piece
                    if len(data) > config.max_body_bytes:
                        raise too_large
        except TimeoutError:
            raise RefusedError(
                408,
                "body_timeout",
                f"the body must come within {config.body_timeout_s:g} s",
                _CLOSE,
            ) from None
        return bytes(data)

    async def _call(self, engine: AsyncEngine, kind: Kind, data: bytes, request: Request) -> Call:
        arrival_s = engine.parts.clock.now_s()
        headers = dict(request.headers)
        body = await self._parsed(data)

        def read() -> Call:
            tenant = request.scope.get(_TENANT)
            return openai_api.read_call(engine.parts, kind, body, headers, arrival_s, tenant)

        if not openai_api.is_slow(kind, body, _LONG_PROMPT_CHARS):
            return read()
        pool = self._forms if openai_api.is_formed(body) else self._threads
        return await asyncio.get_running_loop().run_in_executor(pool, read)

    async def _parsed(self, data: bytes) -> dict[str, Any]:
        if len(data) <= _LONG_BODY_BYTES:
            return openai_api.parse_json(data)
        return await self._in_thread(lambda: openai_api.parse_json(data))

    async def _answer(
        self, answer: _Answer, answers: Answers, call: Call, group: StreamGroup
    ) -> str:
        """Send everything; returns how it ended.

        Raises:
            RequestFailedError: the engine ended a request for its own sake.
            Exception: what a stream raises.
        """
        headers = {"x-request-id": call.call_id}
        whole: dict[int, OutputDelta] = {}
        reasons: set[str] = set()
        async for index, delta in group:
            if delta.finish_reason == "error":
                raise RequestFailedError(reason_for_client(delta.error))
            if delta.finish_reason is not None:
                reasons.add(delta.finish_reason)
            if call.stream:
                if not answer.status:
                    await answer.start(200, {**_STREAM_HEADERS, **headers})
                await answer.event(answers.event(index, delta))
            elif index in whole:
                whole[index].merge(delta)
            else:
                whole[index] = delta
        if not call.stream:
            ordered = [whole[index] for index in range(len(call.requests))]
            await answer.json(200, answers.whole(ordered), headers)
        else:
            last = answers.last_chunk()
            if last is not None:
                await answer.event(json_bytes(last))
            await answer.body(b"data: [DONE]\n\n")
        return ", ".join(sorted(reasons))

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    # --- models and tokens -----------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        card = openai_api.model_card(self._ready_engine().parts, self._created_s)
        return _json({"object": "list", "data": [card]})

    async def _model(self, request: Request) -> Response:
        parts = self._ready_engine().parts
        name = request.path_params["name"]
        if name not in (parts.model_name, parts.config.model):
            raise UnknownModelError(f"model {name[:80]!r} is not served here; this server has {parts.model_name!r}")  # fmt: skip
        return _json(openai_api.model_card(parts, self._created_s))

    async def _tokenize(self, request: Request) -> Response:
        parts = self._ready_engine().parts
        body = await self._parsed(await self._read(request))
        return _json(await self._in_thread(lambda: openai_api.tokenize(parts, body)))

    async def _detokenize(self, request: Request) -> Response:
        parts = self._ready_engine().parts
        body = await self._parsed(await self._read(request))
        return _json(await self._in_thread(lambda: openai_api.detokenize(parts, body)))

    async def _decisions(self, request: Request) -> Response:
        """What became of a request and why; to whoever's key it came with."""
        given = request.path_params["request_id"]
        bare = given.removeprefix("chatcmpl-" if given.startswith("chatcmpl-") else "cmpl-")
        engine, found = self._ready_engine(), None
        for request_id in (given, bare, f"{bare}-0"):  # the first of several prompts
            found = found or await engine.decisions(request_id)
        if found is None or found.tenant != request.scope.get(_TENANT):
            raise RefusedError(
                404, "request_not_found", f"no request {given[:140]!r} is remembered here"
            )
        return _json(found.as_json())

    # --- the dashboard -----------------------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        return dashboard_page.file(request.scope["path"])

    async def _events(self, request: Request) -> ASGIApp:
        return self._view

    async def _view(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Snapshots as events until the client leaves, its key is taken out of use, or the server stops."""
        answer, keys = _Answer(send), self._config.keys
        if scope["method"] == "HEAD":
            await answer.start(200, _STREAM_HEADERS)
            await answer.body(b"")
            return
        try:
            viewer = self._dashboard.join(scope.get(_TENANT))
        except QueueFullError as error:
            await answer.fail(failure_of(error, NO_ID))
            return
        try:
            async with _Departure(receive) as departure:
                departure.ends(viewer.close)
                await answer.start(200, _STREAM_HEADERS)
                async for event in viewer:
                    if keys is not None and _tenant_of(keys, scope) is None:
                        break
                    await answer.body(event, more=True)
                await answer.body(b"")
        finally:
            viewer.close()

    # --- for operators ---------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        """Whether the process is of use, loading and draining included."""
        dead = self._engine is not None and self._engine.dead_reason is not None
        return Response(status_code=503 if dead else 200)

    async def _ready(self, request: Request) -> Response:
        """Whether new calls are taken."""
        engine = self._engine
        ready = engine is not None and engine.is_serving and not self._draining
        return Response(status_code=200 if ready else 503)

    async def _openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def _scrape(self, request: Request) -> Response:
        if self._engine is None or self._metrics is None:
            return Response(b"", media_type="text/plain; version=0.0.4")
        accept = request.headers.get("accept", "")
        try:
            async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
                data, content_type = await self._metrics.scrape(self._engine, accept)
        except TimeoutError:
            raise EngineClosedError("the engine does not answer") from None
        return Response(data, headers={"content-type": content_type})


def _verb_of(scope: Scope) -> str | None:
    return scope["method"] if scope["method"] in HTTPMethod.__members__ else None


def _tenant_of(keys: ApiKeys, scope: Scope) -> str | None:
    """Whose key the call has, if it has one."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    return keys.tenant_of(given[0]) if len(given) == 1 else None


def _safely(
    method: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose errors are answers."""

    async def endpoint(request: Request) -> Response:
        try:
            return await method(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody hears it
        except Exception as error:
            failure = failure_of(error, NO_ID)
            if failure.status == 500:
                log_failure(logger, method.__name__.strip("_"), error)
            return _failure(failure)

    return endpoint


def _json(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")


def _failure(failure: Failure) -> Response:
    return Response(
        json_bytes(failure.body()),
        status_code=failure.status,
        headers=dict(failure.headers),
        media_type="application/json",
    )


async def _of_starlette(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: ("not_found", "there is nothing at this path"), 405: ("method_not_allowed", "this path does not take this method")}  # fmt: skip
    code, message = codes.get(error.status_code, ("refused", "the request cannot be taken"))
    refused = RefusedError(error.status_code, code, message, error.headers)
    return _failure(failure_of(refused, NO_ID))


def _profiling(profiler: Profiler) -> list[Route]:
    async def start(request: Request) -> Response:
        directory = await profiler.start()
        return _json({"directory": str(directory), "ends_after_s": profiler.max_s})

    async def stop(request: Request) -> Response:
        return _json({"directory": str(await profiler.stop())})

    return [
        Route("/start_profile", _safely(start), methods=["POST"]),
        Route("/stop_profile", _safely(stop), methods=["POST"]),
    ]


def _pool(threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix=name)

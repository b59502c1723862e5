"""The HTTP application: authentication, limits on request heads, and the endpoints.

`HttpApp.__call__` checks every call before routing: it rejects calls from web pages of other sites, then checks the
size of the head and, unless the raw path is in `OPEN_PATHS`, the API key.
Calls that generate text are served by `serve.generate_call`, through `serve.http_api.calls`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPMethod
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from apt_jax.errors import QueueFullError
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.streams import EngineClosedError
from apt_jax.validation import MAX_SESSION_ID_CHARS, RequestLimits
from apt_jax.version import __version__
from serve.compact_json import json_bytes
from serve.dashboard import page
from serve.dashboard.feed import DashboardFeed
from serve.generate_call import CallService, require_served_model, run_generate
from serve.http_api import openapi
from serve.http_api.app_config import AppConfig
from serve.http_api.calls import (
    CALLER_KEY,
    CLOSE_HEADERS,
    STREAM_HEADERS,
    DisconnectWatcher,
    HttpCall,
    ResponseWriter,
    owner_of,
    read_body,
    require_json,
)
from serve.http_api.endpoints import Endpoint, endpoints, request_id_of
from serve.http_api.errors import DROPPED_REASON_KEYS, BadCallError, HttpError, error_body, to_http_error
from serve.http_api.messages.request import count_tokens
from serve.http_api.ollama import models as ollama
from serve.http_api.openai_request import Body, parse_json
from serve.http_api.openai_response import adapter_cards, model_card
from serve.http_api.other_paths import hint
from serve.http_api.responses.store import ResponseStore
from serve.http_api.tokenization import detokenize, tokenize, tokenizer_info
from serve.observability.arrivals import BLOCK_TOKENS, description, running_settings
from serve.observability.call_log import log_failure
from serve.observability.call_record import NO_ID, CallRecord
from serve.observability.profiler import Profiler
from serve.observability.prometheus import ServerMetrics
from serve.preprocessing import Preprocessing
from serve.security.api_keys import ANYBODY, ApiKeys, Caller, may_see_totals, require_operator

logger = logging.getLogger(__name__)

OPEN_PATHS = (b"/", b"/health", b"/ping", b"/ready", *(path.encode() for path in page.FILES))
"""Paths that need no API key, matched exactly: health checks, and the dashboard and chat pages, which have no data."""

_SCRAPE_TIMEOUT_S = 10.0


class HttpApp:
    """The ASGI application of the HTTP server.

    Args:
        config: limits and optional features.
        work: queues for preprocessing, shared with other servers; None: the application has its own.
    """

    def __init__(self, config: AppConfig, work: Preprocessing | None = None) -> None:
        self._config = config
        self._service = CallService(logger, config.tracer, work, config.memory, config.starting)
        self._metrics: ServerMetrics | None = None
        self._created_s = int(time.time())
        profiling = [] if config.profiler is None else self._profiling(config.profiler)
        batches = [] if config.batches is None else config.batches.routes(config, self._service, _safely)
        keys = config.keys
        store = ResponseStore(config.store_responses) if config.store_responses else None
        self._dashboard = DashboardFeed(sees_totals=lambda caller: may_see_totals(keys, caller))
        self._dashboard.starting = config.starting
        dashboard = [
            *(Route(path, _safely(self._page), methods=["GET"]) for path in page.FILES),
            Route("/dashboard/events", self._events, methods=["GET"]),
        ]
        self._routes = Starlette(
            routes=[
                *(Route(e.path, self._generate(e), methods=["POST"]) for e in endpoints(store)),
                *([] if store is None else self._stored(store)),
                Route("/v1/messages/count_tokens", _safely(self._count_tokens), methods=["POST"]),
                Route("/v1/models", _safely(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", _safely(self._model), methods=["GET"]),
                Route("/v1/requests/{request_id}/decisions", _safely(self._decisions), methods=["GET"]),
                Route("/v1/sessions/{session_id:path}", _safely(self._end_session), methods=["DELETE"]),
                Route("/tokenize", _safely(self._tokenize), methods=["POST"]),
                Route("/detokenize", _safely(self._detokenize), methods=["POST"]),
                Route("/tokenizer_info", _safely(self._tokenizer_info), methods=["GET"]),
                Route("/", _safely(self._index), methods=["GET"]),
                Route("/api/tags", _safely(self._ollama_tags), methods=["GET"]),
                Route("/api/ps", _safely(self._ollama_ps), methods=["GET"]),
                Route("/api/version", _safely(self._ollama_version), methods=["GET"]),
                Route("/api/show", _safely(self._ollama_show), methods=["POST"]),
                Route("/health", _safely(self._health), methods=["GET"]),
                Route("/ping", _safely(self._health), methods=["GET", "POST"]),
                Route("/load", _safely(self._load), methods=["GET"]),
                Route("/server_info", _safely(self._server_info), methods=["GET"]),
                Route("/version", _safely(self._version), methods=["GET"]),
                Route("/ready", _safely(self._ready), methods=["GET"]),
                Route("/metrics", _safely(self._scrape), methods=["GET"]),
                Route("/arrivals", _safely(self._arrivals), methods=["GET"]),
                Route("/openapi.json", _safely(self._openapi), methods=["GET"]),
                *batches,
                *profiling,
                *(dashboard if config.dashboard else ()),
            ],
            exception_handlers={HTTPException: self._on_routing_error},
        )
        self._routes.router.redirect_slashes = False
        self._checked: ASGIApp = self._answer
        if config.browsers.origins:  # answers preflights, which have no key
            self._checked = CORSMiddleware(
                self._answer,
                allow_origins=sorted(config.browsers.origins),
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "x-should-retry", "retry-after", *DROPPED_REASON_KEYS),
            )
        self._describe()

    @property
    def num_open(self) -> int:
        """Number of in-flight completions."""
        return self._service.num_open

    @property
    def paths(self) -> list[tuple[str, str]]:
        """(method, path) of every endpoint."""
        routes = [route for route in self._routes.routes if isinstance(route, Route)]
        return [(method, r.path) for r in routes for method in sorted(r.methods or ())]

    def use(self, engine: AsyncEngine, metrics: ServerMetrics | None) -> None:
        """Attach an engine that is ready, and its metrics."""
        self._service.attach_engine(engine)
        self._metrics = metrics
        if self._config.dashboard:
            self._dashboard.use(engine, metrics)
        if self._config.batches is not None:
            self._config.batches.use(engine, metrics)
        parts = engine.parts
        self._describe(parts.limits, (*parts.model_names, parts.config.model, *parts.limits.adapters))

    def _describe(self, limits: RequestLimits | None = None, models: Sequence[str] = ()) -> None:
        has_keys, profiles = self._config.keys is not None, self._config.profiler is not None
        batches = None if self._config.batches is None else self._config.batches.description
        stores = self._config.store_responses > 0
        made = openapi.document(
            limits, models, has_keys=has_keys, profiles=profiles, stores_responses=stores, batches=batches
        )
        if self._config.root_path:
            made["servers"] = [{"url": self._config.root_path}]
        self._document = json_bytes(made)

    def drain(self) -> None:
        """Reject new calls."""
        self._service.drain()
        self._dashboard.drain()

    async def stop_batches(self) -> None:
        """Stop the requests of all batches. Unfinished batches resume when the server is started again."""
        if self._config.batches is not None:
            await self._config.batches.stop()

    async def close_event_streams(self) -> None:
        """End the event streams of the dashboard."""
        await self._dashboard.close()

    def close(self) -> None:
        self._dashboard.stop_recording()
        self._service.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, as the entry point of the ASGI application."""
        assert scope["type"] == "http"
        scope = _below(self._config.root_path, scope)
        try:
            self._config.browsers.check(scope)
        except BadCallError as error:
            await self._reject(scope, send, error)
            return
        await self._checked(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_head(scope)
        except BadCallError as error:
            await self._reject(scope, send, error)
            return
        await self._routes(scope, receive, send)

    async def _reject(self, scope: Scope, send: Send, error: BadCallError) -> None:
        record = CallRecord(protocol="http", method=self._path_of(scope), http_method=_http_method_of(scope))
        record.failed(error, str(error.status), error.code, internal=False)
        record.close(None, None)
        self._service.log.write(record)
        await ResponseWriter(send).fail(to_http_error(error, NO_ID), scope["path"])

    def _path_of(self, scope: Scope) -> str:
        """Return the path pattern of the call's route; "any" if no route matches."""
        for route in self._routes.routes:
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
                return route.path
        return "any"

    def _check_head(self, scope: Scope) -> None:
        config, headers = self._config, scope["headers"]
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        if size > config.max_header_bytes or len(headers) > config.max_headers:
            raise BadCallError(
                431,
                "headers_too_large",
                f"a request head may have at most {config.max_header_bytes >> 10} KiB and {config.max_headers} fields",
                CLOSE_HEADERS,
            )
        scope[CALLER_KEY] = ANYBODY
        if config.keys is None or scope["raw_path"] in OPEN_PATHS:
            return
        caller = _caller_of(config.keys, scope)
        if caller is None:
            raise BadCallError(
                401,
                "invalid_api_key",
                "no valid API key; send 'authorization: Bearer KEY' or 'x-api-key: KEY'",
                {"www-authenticate": "Bearer"},
            )
        scope[CALLER_KEY] = caller

    def _generate(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[ASGIApp]]:
        async def generate(scope: Scope, receive: Receive, send: Send) -> None:
            call = HttpCall(endpoint, self._config, self._service, scope, receive, send)
            await run_generate(call, self._service)

        async def serve(request: Request) -> ASGIApp:
            return generate

        return serve

    def _stored(self, store: ResponseStore) -> list[Route]:
        """Return the routes of stored responses."""

        async def get(request: Request) -> Response:
            found = store.get(_caller(request).tenant, request.path_params["response_id"])
            return Response(found.body, media_type="application/json")

        async def delete(request: Request) -> Response:
            response_id = request.path_params["response_id"]
            store.delete(_caller(request).tenant, response_id)
            return _json({"id": response_id, "object": "response", "deleted": True})

        path = "/v1/responses/{response_id}"
        return [Route(path, _safely(get), methods=["GET"]), Route(path, _safely(delete), methods=["DELETE"])]

    # --- models and tokens -----------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        parts = self._service.engine().parts
        cards = [model_card(parts, self._created_s, name) for name in parts.model_names]
        cards += adapter_cards(parts, self._created_s)
        return _json({"object": "list", "data": cards})

    async def _model(self, request: Request) -> Response:
        parts = self._service.engine().parts
        name = request.path_params["name"]
        require_served_model(parts, name)
        of_adapter = [card for card in adapter_cards(parts, self._created_s) if card["id"] == name]
        own = name if name in parts.model_names else parts.model_name
        return _json(of_adapter[0] if of_adapter else model_card(parts, self._created_s, own))

    async def _tokenize(self, request: Request) -> Response:
        return await self._with_body(request, tokenize)

    async def _detokenize(self, request: Request) -> Response:
        return await self._with_body(request, detokenize)

    async def _count_tokens(self, request: Request) -> Response:
        return await self._with_body(request, count_tokens)

    async def _ollama_tags(self, request: Request) -> Response:
        return _json_of(ollama.tags(self._service.engine().parts, self._created_s))

    async def _ollama_ps(self, request: Request) -> Response:
        return _json_of(ollama.running(self._service.engine().parts, self._created_s))

    async def _ollama_version(self, request: Request) -> Response:
        return _json_of(ollama.version())

    async def _ollama_show(self, request: Request) -> Response:
        return await self._with_body(request, ollama.show)

    async def _tokenizer_info(self, request: Request) -> Response:
        body = await asyncio.to_thread(tokenizer_info, self._service.engine().parts)  # it reads files
        return Response(body, media_type="application/json")

    async def _with_body(self, request: Request, function: Callable[[EngineComponents, Body], bytes]) -> Response:
        parts, work, owner = self._service.admit().parts, self._service.work, owner_of(request.scope)
        with work.bodies.lease(owner) as lease:
            data = await read_body(self._config, request, lease)
            watcher = DisconnectWatcher(request.receive)
            try:
                answer = work.run(lambda: function(parts, parse_json(data)), owner, num_bytes=len(data))
                return Response(await watcher.watch(answer), media_type="application/json")
            finally:
                watcher.close()

    async def _decisions(self, request: Request) -> Response:
        """Return the scheduler's decisions about one of the caller's requests; operators may name any request."""
        given, caller = request.path_params["request_id"], _caller(request)
        bare = request_id_of(given)
        engine, found = self._service.engine(), None
        for request_id in (given, bare, f"{bare}-0"):  # the first of several prompts
            found = found or await engine.decisions(caller.engine_id(request_id))
        if found is None:
            raise BadCallError(404, "request_not_found", f"no recent request has the id {given[:140]!r}")
        others = may_see_totals(self._config.keys, caller)
        return _json(found.as_json(others=others) | {"request_id": caller.shown_id(found.request_id)})

    async def _end_session(self, request: Request) -> Response:
        """End a session of the caller: cached prefixes that only it needs are freed."""
        session, engine = request.path_params["session_id"], self._service.engine()
        core, tenant = engine.parts.engine, _caller(request).tenant
        ended = await asyncio.wrap_future(engine.call(lambda: core.end_session(session, tenant)))
        return _json({"id": session[:MAX_SESSION_ID_CHARS], "object": "session.deleted", "deleted": ended})

    # --- the dashboard -----------------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        """Redirect browsers to the chat page; answer other clients with a list of paths."""
        pages = {"chat": "/chat", "dashboard": "/dashboard"} if self._config.dashboard else {}
        if pages and "text/html" in request.headers.get("accept", ""):
            return Response(status_code=307, headers={"location": "chat", "vary": "accept"})
        links = {**pages, "openai": "/v1", "models": "/v1/models", "openapi": "/openapi.json", "health": "/health"}
        return Response(
            json_bytes({"name": "apt-jax", "links": links}), media_type="application/json", headers={"vary": "accept"}
        )

    async def _page(self, request: Request) -> Response:
        return page.file(request.scope["path"])

    async def _events(self, request: Request) -> ASGIApp:
        return self._view

    async def _view(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream snapshots until the client disconnects, its key is revoked, or the server stops."""
        writer, keys = ResponseWriter(send), self._config.keys
        if scope["method"] == "HEAD":
            await writer.start(200, STREAM_HEADERS)
            await writer.body(b"")
            return
        try:
            viewer = self._dashboard.join(scope[CALLER_KEY])
        except QueueFullError as error:
            await writer.fail(to_http_error(error, NO_ID), scope["path"])
            return
        watcher = DisconnectWatcher(receive)
        try:
            watcher.on_disconnect(viewer.close)
            await writer.start(200, STREAM_HEADERS)
            async for event in viewer:
                if keys is not None and _caller_of(keys, scope) != viewer.caller:
                    break
                await writer.body(event, more=True)
            await writer.body(b"")
        finally:
            watcher.close()
            viewer.close()

    # --- for operators ---------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        """Answer 200 unless the engine has died, even while loading or draining."""
        engine = self._service.attached
        dead = engine is not None and engine.dead_reason is not None
        return Response(status_code=503 if dead else 200)

    async def _ready(self, request: Request) -> Response:
        """Answer 200 while new calls are accepted, else 503."""
        return Response(status_code=200 if self._service.is_ready else 503)

    async def _version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def _load(self, request: Request) -> Response:
        """Return the number of calls in flight, in vLLM's format."""
        return _json({"server_load": self._service.num_open})

    async def _server_info(self, request: Request) -> Response:
        parts = self._service.engine().parts
        facts = {"model": parts.model_name, "dtype": parts.config.dtype, "max_model_len": parts.limits.max_model_len}
        return _json({"version": __version__, **facts, "scheduling_policy": parts.config.scheduler.policy})

    async def _openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def _scrape(self, request: Request) -> Response:
        require_operator(self._config.keys, _caller(request), totals=True)
        engine = self._service.attached
        if engine is None or self._metrics is None:
            return Response(b"", media_type="text/plain; version=0.0.4")
        accept = request.headers.get("accept", "")
        try:
            async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
                data, content_type = await self._metrics.scrape(engine, accept)
        except TimeoutError:
            raise EngineClosedError("the engine does not respond") from None
        return Response(data, headers={"content-type": content_type})

    async def _arrivals(self, request: Request) -> Response:
        """Return recent arrivals for `apt-jax whatif`; the first question also gets the engine's settings and costs."""
        require_operator(self._config.keys, _caller(request))
        given = request.query_params.get("after")
        if given is not None and not (given.isascii() and given.isdecimal() and len(given) < 20):
            raise BadCallError(400, "invalid_after", "after must be the `number` of an earlier answer")
        parts = self._service.engine().parts
        if self._metrics is None:
            raise EngineClosedError("the engine has no metrics, which record arrivals")
        found = self._metrics.arrivals.read(None if given is None else int(given))
        answer = {"block_tokens": BLOCK_TOKENS, "now_s": parts.clock.now_s(), **found}
        if given is None:
            answer |= {
                "running": running_settings(parts),
                "hardware": await asyncio.to_thread(description, parts),
            }
        return Response(await asyncio.to_thread(json_bytes, answer), media_type="application/json")

    async def _on_routing_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        codes = {
            404: (
                "not_found",
                f"there is nothing at {path!r:.200}{hint(path, {known for _, known in self.paths if '{' not in known})}",
            ),
            405: ("method_not_allowed", f"{path!r:.200} does not accept this method"),
        }
        code, message = codes.get(error.status_code, ("refused", "the request cannot be handled"))
        if error.status_code == 404 and self._config.batches is None and path.startswith(("/v1/files", "/v1/batches")):
            message = "files and batches are disabled; start the server with --batch-dir DIR"
        headers = error.headers
        if error.status_code == 405:  # the router reports only the methods of the path's first route
            routes = [
                r for r in self._routes.routes if isinstance(r, Route) and r.matches(request.scope)[0] != Match.NONE
            ]
            headers = {"allow": ", ".join(sorted({method for r in routes for method in r.methods or ()}))}
        rejected = BadCallError(error.status_code, code, message, headers)
        return _error_response(to_http_error(rejected, NO_ID), request)

    def _profiling(self, profiler: Profiler) -> list[Route]:
        def check(request: Request) -> None:
            require_operator(self._config.keys, _caller(request))
            require_json(request.headers)

        async def start(request: Request) -> Response:
            check(request)
            directory = await profiler.start()
            return _json({"directory": str(directory), "ends_after_s": profiler.max_s})

        async def stop(request: Request) -> Response:
            check(request)
            return _json({"directory": str(await profiler.stop())})

        return [
            Route("/start_profile", _safely(start), methods=["POST"]),
            Route("/stop_profile", _safely(stop), methods=["POST"]),
        ]


def _below(root: str, scope: Scope) -> Scope:
    """Return the call with the prefix `root` removed from its path, or unchanged if its path is not below `root`."""
    raw = root.encode()
    if not root or not scope["path"].startswith(f"{root}/") or not scope["raw_path"].startswith(raw + b"/"):
        return scope
    return {**scope, "path": scope["path"][len(root) :], "raw_path": scope["raw_path"][len(raw) :]}


def _http_method_of(scope: Scope) -> str | None:
    return scope["method"] if scope["method"] in HTTPMethod.__members__ else None


def _caller_of(keys: ApiKeys, scope: Scope) -> Caller | None:
    """Return the owner of the call's API key; None if the key is missing or invalid. If both key headers are present,
    their keys must have the same owner."""
    bearers = [value for name, value in scope["headers"] if name == b"authorization"]
    bare = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(bearers) > 1 or len(bare) > 1:
        return None
    owners = {keys.caller_of(value) for value in (*bearers, *bare)}
    return owners.pop() if len(owners) == 1 else None


def _caller(request: Request) -> Caller:
    return request.scope[CALLER_KEY]


def _safely(
    method: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that calls `method` and turns its errors into responses."""

    async def endpoint(request: Request) -> Response:
        try:
            return await method(request)
        except ClientDisconnect:
            return Response(status_code=499)  # never sent
        except Exception as error:
            failure = to_http_error(error, NO_ID)
            if failure.status == 500:
                log_failure(logger, method.__name__.strip("_"), error)
            return _error_response(failure, request)

    return endpoint


def _json(value: Any) -> Response:
    return _json_of(json_bytes(value))


def _json_of(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _error_response(error: HttpError, request: Request) -> Response:
    return Response(
        json_bytes(error_body(error, request.scope["path"])),
        status_code=error.status,
        headers=dict(error.headers),
        media_type="application/json",
    )

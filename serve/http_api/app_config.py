"""Settings of the HTTP application, and the protocol of extensions that add paths to it, such as files and batches
(`serve.batches.http`)."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.start_stages import StartStatus
from serve.generate_call import CallService
from serve.http_api.browsers import BrowserRules
from serve.http_api.json_schemas import Schema
from serve.memory_gate import MemoryGate
from serve.observability.profiler import Profiler
from serve.security.api_keys import ApiKeys

if TYPE_CHECKING:
    from serve.observability.prometheus import ServerMetrics
    from serve.observability.tracing import Tracer  # it needs the extra `otel`

Endpoint = Callable[[Request], Awaitable[Response]]


class Description(Protocol):
    """The part of the OpenAPI document that describes an extension's paths."""

    @property
    def examples(self) -> Schema:
        """Examples of request bodies, keyed by schema name without the suffix ``Request``."""
        ...

    def paths(
        self, operation: Callable[..., Schema], get: Callable[..., Schema], post: Callable[..., Schema]
    ) -> Schema:
        """Return the OpenAPI path items, keyed by path.

        Args:
            operation: creates an operation from a name, a summary, the successful response and the statuses of errors.
            get, post: create a path item with one operation, as in `serve.http_api.openapi`.
        """
        ...

    def schemas(self) -> Schema:
        """Return the schemas of request bodies and responses, keyed by name."""
        ...


class Extension(Protocol):
    """Additional paths of the HTTP application, and the background work behind them."""

    @property
    def description(self) -> Description: ...

    def routes(self, config: "AppConfig", service: CallService, safely: Callable[[Endpoint], Endpoint]) -> list[Route]:
        """Return the routes of the extension. Called once, before the other methods.

        Args:
            config: limits on calls, and optional features.
            service: the engine and the queues of the application.
            safely: wraps an endpoint so that its errors become responses.
        """
        ...

    def use(self, engine: AsyncEngine, metrics: "ServerMetrics | None") -> None:
        """Attach an engine that is ready, and its metrics."""
        ...

    async def stop(self) -> None:
        """Stop all work. Called before the engine stops."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppConfig:
    """Limits on calls, and optional features."""

    max_body_bytes: int = 2 << 20
    body_timeout_s: float = 30.0
    """Time limit in seconds for receiving the whole body."""
    max_header_bytes: int = 16 << 10
    """Maximum total size of a call's path, query and headers in bytes."""
    max_headers: int = 100
    keys: ApiKeys | None = None
    """Accepted API keys; None: calls need no key."""
    tracer: "Tracer | None" = None
    """Creates traces of calls; None: no traces."""
    memory: MemoryGate | None = None
    """Rejects new calls while memory is short; None: no limit."""
    profiler: Profiler | None = None
    """Profiler that the profiling paths start and stop; None: these paths do not exist."""
    root_path: str = ""
    """Prefix that paths of calls may have, for proxies that do not strip it; empty: no prefix."""
    dashboard: bool = True
    """Serve the pages at `/dashboard` and `/chat`."""
    browsers: BrowserRules = BrowserRules()  # noqa: RUF009 - frozen
    store_responses: int = 0
    """Maximum number of stored responses of the Responses API per tenant; 0: none are stored."""
    batches: Extension | None = None
    """Extension that serves files and batches; None: these paths do not exist."""
    starting: Callable[[], StartStatus | None] = lambda: None
    """Returns the progress of the server's start while the model loads; None if it is not known."""

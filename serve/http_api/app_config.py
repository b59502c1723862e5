"""Settings of the HTTP application, and the contract of paths that are added to it: files and batches
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
    """Part of the OpenAPI document about further paths."""

    @property
    def examples(self) -> Schema:
        """Examples of bodies, by the name of their schema without ``Request``."""
        ...

    def paths(
        self, operation: Callable[..., Schema], get: Callable[..., Schema], post: Callable[..., Schema]
    ) -> Schema:
        """The paths.

        Args:
            operation: makes an operation, of a name, a summary, a good response and more statuses.
            get, post: make an item of a path, as `serve.http_api.openapi` does.
        """
        ...

    def schemas(self) -> Schema:
        """The schemas of bodies and answers."""
        ...


class Extension(Protocol):
    """Further paths of one application."""

    @property
    def description(self) -> Description: ...

    def routes(self, config: "AppConfig", service: CallService, safely: Callable[[Endpoint], Endpoint]) -> list[Route]:
        """The routes; called once, before everything else.

        Args:
            config: limits of calls.
            service: of the application.
            safely: turns errors of an endpoint into responses.
        """
        ...

    def use(self, engine: AsyncEngine, metrics: "ServerMetrics | None") -> None:
        """Serve with a warm engine."""
        ...

    async def stop(self) -> None:
        """Stop running work, before the engine stops."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppConfig:
    """Limits of calls, and optional features."""

    max_body_bytes: int = 2 << 20
    body_timeout_s: float = 30.0
    """Time limit for the whole body."""
    max_header_bytes: int = 16 << 10
    """Limit of the head of one call."""
    max_headers: int = 100
    keys: ApiKeys | None = None
    """None: no call needs one."""
    tracer: "Tracer | None" = None
    """None: no traces."""
    memory: MemoryGate | None = None
    """None: no limit."""
    profiler: Profiler | None = None
    """None: there are no paths for it."""
    root_path: str = ""
    """Prefix that paths may have, for proxies that do not strip it."""
    dashboard: bool = True
    """Serve the pages at `/dashboard` and `/chat`."""
    browsers: BrowserRules = BrowserRules()  # noqa: RUF009 - frozen
    batches: Extension | None = None
    """None: there are no paths for files and batches."""
    starting: Callable[[], StartStatus | None] = lambda: None
    """How far the start is."""

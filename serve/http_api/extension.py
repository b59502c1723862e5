"""Paths that are given to the HTTP application from above: files and batches (`serve.batches.http`)."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from apt_jax.frontend.async_engine import AsyncEngine
from serve.generate_call import CallService
from serve.http_api.json_schemas import Schema

if TYPE_CHECKING:
    from serve.http_api.calls import AppConfig
    from serve.observability.prometheus import ServerMetrics

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
        """Stop what runs, before the engine stops."""
        ...

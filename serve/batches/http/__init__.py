"""Files and batches over HTTP: an extension of the application (`serve.http_api.app_config.Extension`)."""

import logging
from collections.abc import Callable

from starlette.routing import Route

from apt_jax.frontend.async_engine import AsyncEngine
from serve.batches.http.openapi import BatchDescription
from serve.batches.http.routes import BatchEndpoints, Endpoint
from serve.batches.metrics import batch_metrics
from serve.batches.runner import BatchRunner
from serve.batches.store import BatchStore
from serve.generate_call import CallService
from serve.http_api.app_config import AppConfig
from serve.observability.prometheus import ServerMetrics


class Batches:
    """Paths for files and batches, and the runner of the batches; a `serve.http_api.app_config.Extension`.

    Args:
        store: stored files and batches; closed by `stop`.
    """

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self.description = BatchDescription(store.config)
        self.runner: BatchRunner

    def routes(self, config: AppConfig, service: CallService, safely: Callable[[Endpoint], Endpoint]) -> list[Route]:
        """See `Extension`."""
        self._service = CallService(logging.getLogger("serve.batches"), config.tracer, service.work, config.memory)
        self.runner = BatchRunner(self._store, self._service)
        return BatchEndpoints(config, service, self.runner).routes(safely)

    def use(self, engine: AsyncEngine, metrics: ServerMetrics | None) -> None:
        """See `Extension`."""
        self._service.attach_engine(engine)
        self.runner.start()
        if metrics is not None:
            metrics.others = lambda families: batch_metrics(families, self.runner.counters())

    async def stop(self) -> None:
        """See `Extension`. Unfinished batches resume at the next start of the server."""
        await self.runner.stop()

"""A gRPC server in the test's own process and event loop, over an engine without a model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from apt_jax.frontend.async_engine import AsyncEngine
from serve.client import AsyncAptClient
from serve.grpc_api.server import GrpcServer, ServerConfig
from tests.support.toy_serving import EngineComponents, assert_clean, executor_of, toy_parts


class Served:
    """A running server, its parts and a client."""

    def __init__(self, parts: EngineComponents, engine: AsyncEngine, server: GrpcServer) -> None:
        self.parts, self.engine, self.server = parts, engine, server
        self.executor = executor_of(parts)
        self.target = f"127.0.0.1:{server.port}"
        self.client = AsyncAptClient(self.target)

    async def until(self, condition, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.002)

    async def idle(self) -> None:
        """No request is left anywhere."""
        await self.until(lambda: self.parts.engine.num_live == 0 and self.server.num_open == 0)


@contextlib.asynccontextmanager
async def serving(server: dict | None = None, **toy) -> AsyncIterator[Served]:
    parts = toy_parts(**toy)
    grpc_server = GrpcServer(ServerConfig(port=0, **(server or {})))
    await grpc_server.start()
    engine = AsyncEngine(parts)
    await grpc_server.serve(engine)
    served = Served(parts, engine, grpc_server)
    try:
        yield served
    finally:
        served.executor.gate.set()
        await served.client.close()
        await grpc_server.stop(0)
    if engine.dead_reason is None:
        assert_clean(parts)


@pytest.fixture
def serve_toy():
    """`serve_toy(scenario, **toy)` runs a coroutine function with a `Served`; blocks must all be free afterwards."""

    def run(scenario, **toy) -> None:
        async def whole() -> None:
            async with serving(**toy) as served:
                await asyncio.wait_for(scenario(served), 60)

        asyncio.run(whole())

    return run

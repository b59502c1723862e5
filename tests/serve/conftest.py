"""A gRPC server in the test's own process and event loop, over an engine without a model; and a browser."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator
from typing import Any

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


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Any]:
    """Headless Chromium; skipped where there is none."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path_factory.mktemp('browser') / 'profile'}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield made
    finally:
        made.quit()


@pytest.fixture
def browser(chromium) -> Iterator[Any]:
    """Chromium with an empty page and an empty log; what a page has stored is of its origin alone."""
    chromium.get_log("browser")
    yield chromium
    chromium.get("about:blank")

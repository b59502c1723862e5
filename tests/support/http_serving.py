"""An HTTP and a gRPC server in the test's own process and event loop, over one engine."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import openai

from apt_jax.frontend.async_engine import AsyncEngine
from serve.batches.http import Batches
from serve.client import AsyncAptClient
from serve.grpc_api.server import GrpcServer, ServerConfig
from serve.http_api.app_config import AppConfig
from serve.http_api.protocol import ConnectionLimits
from serve.http_api.server import HttpConfig, HttpServer
from serve.observability.prometheus import ServerMetrics
from tests.support.fake_executor import FakeExecutor
from tests.support.toy_serving import EngineComponents, assert_clean, executor_of, toy_parts


class HttpServed:
    """Running servers, their parts and clients.

    Attributes:
        http: a plain client; its base is the server's address.
        openai: the official one.
        grpc: ours.
    """

    def __init__(
        self,
        parts: EngineComponents,
        engine: AsyncEngine,
        server: HttpServer,
        grpc_server: GrpcServer,
        base: str,
        verify: Any,
    ) -> None:
        self.parts, self.engine, self.server, self.grpc_server = parts, engine, server, grpc_server
        self.http = httpx2.AsyncClient(base_url=base, verify=verify, timeout=30)
        self.openai = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, http_client=self.http)
        self.grpc = AsyncAptClient(f"127.0.0.1:{grpc_server.port}")

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx2.Response:
        return await self.http.post(path, json=body, **kwargs)

    async def ask(self, prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
        """A completion, greedy and without an end."""
        body = {"prompt": prompt, "temperature": 0.0, "ignore_eos": True, **fields}
        response = await self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    async def raw(self, data: bytes, *, to_end: bool = True) -> "RawConnection":
        """A connection of its own with something written to it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(data)
        await writer.drain()
        return RawConnection(reader, writer)

    async def until(self, condition, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.002)

    async def idle(self, timeout_s: float = 20.0) -> None:
        """No request is left anywhere."""
        await self.until(lambda: self.parts.engine.num_live == 0 and self.server.num_open == 0, timeout_s)


class RawConnection:
    """A connection that a test writes bytes to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self, timeout_s: float = 20.0) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer that ends with the connection, or with its length."""
        async with asyncio.timeout(timeout_s):
            head = await self.reader.readuntil(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            data = await self.reader.readexactly(int(headers["content-length"]))
        return int(lines[0].split()[1]), json.loads(data) if data else {}

    async def at_end(self, timeout_s: float = 20.0) -> bool:
        """Return whether the server closes the connection."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self.reader.read(65536):
                    pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def post_head(path: str, length: int, **headers: str) -> bytes:
    """The head of a request with a JSON body."""
    fields = {
        "host": "x",
        "content-type": "application/json",
        "content-length": str(length),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def completion(**fields: Any) -> bytes:
    """A whole request."""
    body = json.dumps({"prompt": "hello", "ignore_eos": True, **fields}).encode()
    return post_head("/v1/completions", len(body)) + body


@contextlib.asynccontextmanager
async def http_serving(
    parts: EngineComponents | None = None,
    *,
    app: dict | None = None,
    connections: dict | None = None,
    http: dict | None = None,
    grpc: dict | None = None,
    base: str | None = None,
    verify: Any = True,
    **toy: Any,
) -> AsyncIterator[HttpServed]:
    """Servers over `parts`, or over a toy engine of these fields; blocks must all be free afterwards. `batches` of `app` is
    a store."""
    parts = toy_parts(**toy) if parts is None else parts
    app = dict(app or {})
    if "batches" in app:
        app["batches"] = Batches(app["batches"])
    server = HttpServer(
        HttpConfig(
            port=0,
            app=AppConfig(**app),
            connections=ConnectionLimits(**(connections or {})),
            **(http or {}),
        )
    )
    await server.start()
    grpc_server = GrpcServer(ServerConfig(port=0, **(grpc or {})))
    await grpc_server.start()
    metrics = ServerMetrics(parts)
    engine = AsyncEngine(parts, metrics)
    await grpc_server.serve(engine)
    await server.serve(engine, metrics)
    where = (base or "http://127.0.0.1:{port}").format(port=server.port)
    served = HttpServed(parts, engine, server, grpc_server, where, verify)
    try:
        yield served
    finally:
        if isinstance(parts.executor, FakeExecutor):
            executor_of(parts).gate.set()
        await served.http.aclose()
        await served.grpc.close()
        await asyncio.gather(server.stop(0), grpc_server.stop(0))
    if engine.dead_reason is None:
        assert_clean(parts)


def bearer(key: str) -> dict[str, str]:
    """The header of a key."""
    return {"authorization": f"Bearer {key}"}


def run(scenario: Callable[[HttpServed], Awaitable[None]], *, limit_s: float = 60, **kwargs: Any) -> None:
    """Run `scenario(served)` within a minute; nothing may be left. Further arguments are those of `http_serving`."""

    async def whole() -> None:
        async with http_serving(**kwargs) as served:
            await asyncio.wait_for(scenario(served), limit_s)

    asyncio.run(whole())

"""Connections that reach their greatest age."""

import asyncio

from benchmarks.server.faulty_proxy import FaultyProxy
from serve.client import AsyncAptClient
from tests.serve.conftest import serving
from tests.serve.grpc_api.test_grpc_server import GREEDY, expected


def test_N10_a_stream_outlives_the_greatest_age_of_its_connection():
    async def scenario() -> None:
        async with serving({"max_connection_age_s": 0.3}, step_s=0.01, max_model_len=256) as served:
            with FaultyProxy(served.server.port) as proxy:
                client = AsyncAptClient(f"127.0.0.1:{proxy.port}")
                tokens: list[int] = []
                started_s = asyncio.get_running_loop().time()
                others = 0
                async for chunk in client.generate("hello", max_tokens=150, **GREEDY):
                    tokens += chunk.token_ids
                    age_s = asyncio.get_running_loop().time() - started_s
                    if age_s > 0.8 and not others:  # after GOAWAY: over a new connection
                        other = [c async for c in client.generate("hello", max_tokens=2, **GREEDY)]
                        assert [t for c in other for t in c.token_ids] == expected(served, "hello", 2)
                        others = proxy.num_open
                assert others == 2
                assert tokens == expected(served, "hello", 150)
                await served.until(lambda: proxy.num_open == 0, 5)
                await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_connections_have_no_greatest_age_unless_one_is_set():
    from serve.grpc_api.server import ServerConfig

    assert "grpc.max_connection_age_ms" not in dict(ServerConfig().options())
    assert dict(ServerConfig(max_connection_age_s=600.0).options())["grpc.max_connection_age_ms"] == 600_000

"""Connections to the gRPC port: their number, silent and slow ones, floods of streams."""

import asyncio
import contextlib
import struct
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.http_serving import HttpServed, http_serving

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">HBBBL", 0, 0, 4, 0, 0)
"""Start of a client's side, with its empty SETTINGS."""
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def run(scenario, *, step_s: float = 0.0, **grpc_config) -> None:
    async def whole() -> None:
        async with http_serving(step_s=step_s, grpc=grpc_config) as served:
            await asyncio.wait_for(scenario(served), 100)
            await served.idle()

    asyncio.run(whole())


async def seconds_until_closed(served: HttpServed, data: bytes) -> float:
    """How long a connection lives that sends `data` and then nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.grpc_server.port)
    began_s = time.monotonic()
    writer.write(data)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            while await reader.read(1 << 16):
                pass
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return time.monotonic() - began_s


@pytest.mark.parametrize("data", [b"", PREFACE[:10], PREFACE], ids=["nothing", "half a preface", "a preface"])
def test_C14_silent_connections_are_cut(data):
    async def scenario(served):
        assert await seconds_until_closed(served, data) < 20

    run(scenario, keepalive_time_s=0.3, keepalive_timeout_s=0.5)


def test_C14_rpcs_without_a_request_are_ended():
    async def scenario(served):
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_server.port}", options=own) as channel:
            raw: dict = {"request_serializer": bytes, "response_deserializer": bytes}
            for method in ("/aptjax.v1.AptServe/Generate", "/aptjax.v1.AptServe/GetStats"):
                calls = [channel.stream_stream(method, **raw)() for _ in range(4)]
                async with asyncio.timeout(20):
                    codes = {await call.code() for call in calls}
                assert grpc.StatusCode.DEADLINE_EXCEEDED in codes
                # Streams beyond the limit of the connection, or RPCs beyond that of the server, are refused.
                refused = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
                assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED, *refused}
                empty = channel.stream_stream(method, **raw)()
                await empty.done_writing()
                assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT
        await served.grpc.stats(20.0)

    run(scenario, max_concurrent_rpcs=2, request_timeout_s=0.5)


def test_connections_are_bounded():
    async def scenario(served):
        def connect() -> grpc.aio.Channel:
            own = [("grpc.use_local_subchannel_pool", 1)]  # else channels to one server share a connection
            return grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_server.port}", options=own)

        async def check(channel: grpc.aio.Channel) -> int:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)).status

        async with contextlib.AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(connect()) for _ in range(4)]
            for channel in channels[:3]:
                assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(channels[3])
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await check(channels[0]) == health_pb2.HealthCheckResponse.SERVING
            await channels[1].close()
            async with asyncio.timeout(20):
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        assert await check(channels[3]) == health_pb2.HealthCheckResponse.SERVING
                        break
                    await asyncio.sleep(0.1)

    run(scenario, max_connections=3)


def test_C13_ten_thousand_streams_opened_and_cancelled_leave_nothing():
    async def scenario(served):
        async def one(number: int) -> None:
            call = served.grpc.generate(f"r{number}", max_tokens=100, **GREEDY)
            if number % 100 == 0:
                await anext(call)
                await call.aclose()
            else:
                task = asyncio.ensure_future(anext(call))
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    await task

        for start in range(0, 10_000, 100):
            await asyncio.gather(*(one(n) for n in range(start, start + 100)))
        await served.idle()
        assert len([c async for c in served.grpc.generate("hello", max_tokens=3, **GREEDY)]) >= 1

    run(scenario)

"""A call that has ended leaves nothing for the garbage collector.

Cycles keep requests, connections and their buffers until a full collection, which may be minutes away; the process
then holds the memory of thousands of calls, and the collection stalls every stream.
"""

import gc
from collections.abc import Awaitable, Callable

import httpx2
import pytest

from tests.support.http_serving import HttpServed, completion, run

COUNT = 5
LONG = 5000
CALLS: dict[str, Callable[[HttpServed], Awaitable[object]]] = {}


def call(function: Callable[[HttpServed], Awaitable[object]]) -> Callable[[HttpServed], Awaitable[object]]:
    CALLS[function.__name__] = function
    return function


@call
async def http_whole(served: HttpServed) -> None:
    await served.ask(max_tokens=8)


@call
async def http_stream(served: HttpServed) -> None:
    connection = await served.raw(
        completion(max_tokens=8, stream=True).replace(b"host: x", b"host: x\r\nconnection: close")
    )
    assert await connection.at_end()
    await connection.close()


@call
async def http_left(served: HttpServed) -> None:
    connection = await served.raw(completion(max_tokens=LONG, stream=True))
    await connection.reader.readuntil(b"data: ")
    await connection.close()
    await served.idle()


@call
async def http_refused(served: HttpServed) -> None:
    response = await served.post("/v1/completions", {"prompt": "hello", "max_tokens": -1})
    assert response.status_code == 400


@call
async def http_tokenize(served: HttpServed) -> None:
    assert (await served.post("/tokenize", {"prompt": "hello"})).status_code == 200


@call
async def http_timeout(served: HttpServed) -> None:
    body = {"prompt": "hello", "max_tokens": LONG, "ignore_eos": True, "deadline_ms": 50}
    response: httpx2.Response = await served.post("/v1/completions", body)
    assert response.status_code == 408


@call
async def grpc_stream(served: HttpServed) -> None:
    async for _ in served.grpc.generate("hello", max_tokens=8, ignore_eos=True):
        pass


@call
async def grpc_left(served: HttpServed) -> None:
    outputs = served.grpc.generate("hello", max_tokens=LONG, ignore_eos=True)
    async for _ in outputs:
        break
    await outputs.aclose()
    await served.idle()


def ours(found: list[object]) -> list[str]:
    """Names of what the server has made among these objects."""
    names = [f"{type(x).__module__}.{type(x).__qualname__}" for x in found]
    return sorted({name for name in names if name.startswith(("serve.", "apt_jax.")) and ".client." not in name})


@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_no_reference_cycle(name):
    async def scenario(served: HttpServed) -> None:
        await CALLS[name](served)  # what the first call alone makes
        await served.idle()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(COUNT):
                await CALLS[name](served)
            await served.idle()
            await served.ask(max_tokens=1)  # the engine's thread has let go of the others
            gc.collect()
            assert ours(gc.garbage) == []
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    run(scenario, max_model_len=20_000, num_blocks=2000, step_s=0.001)

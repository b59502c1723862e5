"""A server of OpenAI's completions with delays that are known, in a thread of its own."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from aiohttp import web

Delays = Callable[[int], list[float] | int]
"""From the number of a request to the seconds before each of its tokens, or to the status that it is refused with."""


class ToyOpenAI:
    """A toy OpenAI server that records its requests and writes.

    Attributes:
        bodies, headers: those of the requests, in the order of arrival.
        written_s: times (`time.perf_counter`) at which tokens were written, a list a request.
    """

    def __init__(self, delays: Delays, *, service_s: float | None = None, usage: str = "each") -> None:
        """Usage in "each" chunk, with two tokens a chunk in the "last" one, or "never". With `service_s` requests are
        served one after another, each for so long, before their first token."""
        self._delays, self._service_s, self._usage = delays, service_s, usage
        self._free_s = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.came_s: list[float] = []
        self.written_s: list[list[float]] = []
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "toy", "max_model_len": 64}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        self.came_s.append(time.perf_counter())
        self.bodies.append(await request.json())
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        written: list[float] = []
        self.written_s.append(written)
        delays = self._delays(number)
        if isinstance(delays, int):
            return web.json_response({"error": {"message": "no room"}}, status=delays)
        if self._service_s is not None:
            # By the schedule, so that late timers do not add up.
            self._free_s = max(self._free_s, time.perf_counter()) + self._service_s
            await asyncio.sleep(max(0.0, self._free_s - time.perf_counter()))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for i, delay_s in enumerate(delays):
            if delay_s:
                await asyncio.sleep(delay_s)
            last = i + 1 == len(delays)
            chunk: dict[str, Any] = {
                "choices": [{"index": 0, "text": "x", "finish_reason": "length" if last else None}]
            }
            if self._usage == "each":
                chunk["usage"] = {"prompt_tokens": 5, "completion_tokens": i + 1}
            written.append(time.perf_counter())
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if self._usage == "last":
            counts = {"prompt_tokens": 5, "completion_tokens": 2 * len(delays)}
            chunk = {"choices": [], "usage": counts}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        runner = web.AppRunner(self.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()


@contextlib.contextmanager
def in_thread(
    context: Callable[[], contextlib.AbstractAsyncContextManager[Any]],
) -> Iterator[Any]:
    """Open an asynchronous context in the event loop of another thread; yield its value."""
    ready, results = threading.Event(), []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def stay() -> None:
        end = asyncio.Event()
        loops.append((asyncio.get_running_loop(), end))
        async with context() as value:
            results.append(value)
            ready.set()
            await end.wait()

    failures: list[BaseException] = []

    def work(coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            asyncio.run(coroutine)
        except BaseException as failure:
            failures.append(failure)
        finally:
            ready.set()

    thread = threading.Thread(target=work, args=(stay(),))
    thread.start()
    try:
        assert ready.wait(120)
        if not results:
            raise failures[0]
        yield results[0]
    finally:
        loop, end = loops[0]
        if not failures:
            loop.call_soon_threadsafe(end.set)
        thread.join(60)
    if failures:
        raise failures[0]

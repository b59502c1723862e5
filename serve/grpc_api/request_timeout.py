"""A time limit for the request message of an RPC. gRPC has no such limit, so a client could occupy all concurrent RPCs
of the server by opening them without sending a request."""

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

_MISSING = object()


class RequestTimeout(grpc.aio.ServerInterceptor):
    """Ends RPCs whose request does not arrive in time. It must be the first interceptor, so that it also limits RPCs
    that later interceptors reject.

    Unary requests are received as a stream, so that this class and not gRPC waits for the request.

    Args:
        limit_s: time limit for the request, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        if handler.response_streaming:
            make, serve = grpc.stream_stream_rpc_method_handler, handler.unary_stream
        else:
            make, serve = grpc.stream_unary_rpc_method_handler, handler.unary_unary
        limited: Any = self._generating(serve) if inspect.isasyncgenfunction(serve) else self._answering(serve)
        return make(limited, handler.request_deserializer, handler.response_serializer)

    def _answering(self, serve: Any) -> Any:
        async def answer(requests: AsyncIterable[Any], context: grpc.aio.ServicerContext) -> Any:
            return await serve(await self._request(requests, context), context)

        return answer

    def _generating(self, serve: Any) -> Any:
        async def generate(requests: AsyncIterable[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async for response in serve(await self._request(requests, context), context):
                yield response

        return generate

    async def _request(self, requests: AsyncIterable[Any], context: grpc.aio.ServicerContext) -> Any:
        """Return the request, or end the RPC if it does not arrive in time or at all."""

        async def first() -> Any:
            return await anext(aiter(requests), _MISSING)

        task = asyncio.ensure_future(first())
        try:
            # gRPC's receive operation must not be cancelled; it ends with the RPC.
            await asyncio.wait({task}, timeout=self._limit_s)
            if not task.done():
                limit = f"the request must arrive within {self._limit_s:g} s"
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, limit)
            request = task.result()
            if request is _MISSING:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the RPC has no request")
            return request
        finally:
            task.add_done_callback(_ignore)


def _ignore(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()

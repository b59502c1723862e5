"""API key authentication of gRPC calls."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc

from serve.errors import MissingKeyError
from serve.grpc_api.errors import to_grpc_status
from serve.observability.call_log import CallLog
from serve.observability.call_record import CallRecord
from serve.security.api_keys import ApiKeys, Caller

_OPEN_METHODS = frozenset(("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"))


def caller_of(keys: ApiKeys, metadata: Iterable[tuple[str, str | bytes]]) -> Caller | None:
    """Return the caller of an RPC; None if its metadata has no valid key, or more than one key."""
    given = [value for name, value in metadata if name == "authorization"]
    return keys.caller_of(given[0]) if len(given) == 1 else None


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Rejects calls without a valid key, except calls to the health service.

    Args:
        keys: the accepted API keys.
        log: log for rejected calls.
    """

    def __init__(self, keys: ApiKeys, log: CallLog) -> None:
        self._keys, self._log = keys, log

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        if handler_call_details.method in _OPEN_METHODS:
            return handler
        metadata: Any = handler_call_details.invocation_metadata or ()
        if caller_of(self._keys, metadata) is not None:
            return handler
        if handler is None:
            return grpc.unary_unary_rpc_method_handler(self._rejecting("any"))
        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(self._rejecting(handler_call_details.method.removeprefix("/")))

    def _rejecting(self, method: str) -> Any:
        async def reject(request: Any, context: grpc.aio.ServicerContext) -> None:
            record = CallRecord(protocol="grpc", method=method, reason="unauthenticated", outcome="rejected")
            record.close(None, None)
            self._log.write(record)
            status = to_grpc_status(MissingKeyError(), method)
            await context.abort(status.code, status.message, status.trailers)

        return reject

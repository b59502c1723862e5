"""The gRPC service `aptjax.v1.AptServe`."""

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import grpc

from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.validation import check_deadline_ms, check_watch_capacity
from serve.generate_call import require_served_model
from serve.grpc_api import messages
from serve.grpc_api.calls import GrpcCalls, decoder, metadata_of, require_decoded
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from serve.watcher_slots import WatcherSlots

SERVICE = pb.DESCRIPTOR.services_by_name["AptServe"].full_name

_WATCH_CAPACITY = 256


class AptGenerateCodec:
    """Converts the messages of a Generate call; a `serve.grpc_api.calls.GenerateCodec`.

    Args:
        request: the request message; None if it could not be decoded.
        metadata: metadata of the RPC.
    """

    def __init__(self, request: pb.GenerateRequest | None, metadata: messages.Metadata) -> None:
        self._request = request
        self._metadata = metadata
        self._num_messages = 0
        self._num_tokens = 0

    def fields(self, parts: EngineComponents) -> dict[str, Any]:
        request = require_decoded(self._request)
        if request.model:
            require_served_model(parts, request.model)
        self._tokenizer = parts.tokenizer
        fields = messages.request_fields(request, self._metadata)
        return fields | {"adapter": parts.adapter_named(request.model)}

    def objective_names(self) -> Mapping[str, str]:
        return messages.objective_names(self._metadata, None if self._request is None else self._request.slo)

    def deadline_s(self) -> float | None:
        if self._request is None or not self._request.HasField("deadline_ms"):
            return None
        return check_deadline_ms(self._request.deadline_ms)

    def messages(self, index: int, delta: OutputDelta) -> Iterable[pb.GenerateResponse]:
        self._num_tokens += len(delta.token_ids)
        for message in messages.prompt_responses(delta, self._num_messages, self._tokenizer):
            self._num_messages += 1
            yield message
        yield messages.response(delta, self._num_messages, self._num_tokens)
        self._num_messages += 1


class AptServe:
    """The methods of `aptjax.v1.AptServe`."""

    def __init__(self, calls: GrpcCalls) -> None:
        self._calls = calls
        self._slots = WatcherSlots("clients watch the scheduler")

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of the service's methods, for `Server.add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.Generate,
                    request_deserializer=decoder(pb.GenerateRequest),
                    response_serializer=pb.GenerateResponse.SerializeToString,
                ),
                "WatchScheduler": grpc.unary_stream_rpc_method_handler(
                    self.WatchScheduler,
                    request_deserializer=decoder(pb.WatchSchedulerRequest),
                    response_serializer=pb.WatchSchedulerResponse.SerializeToString,
                ),
                "GetStats": grpc.unary_unary_rpc_method_handler(
                    self.GetStats,
                    request_deserializer=decoder(pb.GetStatsRequest),
                    response_serializer=pb.GetStatsResponse.SerializeToString,
                ),
            },
        )

    async def Generate(self, request: pb.GenerateRequest | None, context: grpc.aio.ServicerContext) -> None:
        await self._calls.generate(AptGenerateCodec(request, metadata_of(context)), context, SERVICE)

    async def WatchScheduler(
        self, request: pb.WatchSchedulerRequest | None, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchSchedulerResponse]:
        try:
            given = require_decoded(request)
            capacity = _WATCH_CAPACITY
            if given.HasField("capacity"):
                capacity = check_watch_capacity(given.capacity)
            engine = self._calls.service.engine()
            served_since_s = engine.parts.clock.now_s() - self._calls.service.uptime_s
            caller = self._calls.caller(context)
            self._slots.take(caller)
            watch = engine.watch(capacity)

            def leave(_: object) -> None:
                watch.close()
                self._slots.free(caller)

            # Not in a `finally`: if a client disconnects during a write, this generator is never resumed.
            context.add_done_callback(leave)  # type: ignore[arg-type]  # as for Generate
            await context.send_initial_metadata(())  # shows the client that watching has begun
            num_own = 0
            async for batch in watch:
                shown_id = self._calls.caller(context).shown_id  # its key may have been revoked
                if not self._calls.sees_totals(context):
                    batch = messages.own_iterations(batch, shown_id, num_own)
                    num_own += len(batch.iterations)
                    if not batch.iterations:
                        continue
                yield messages.watch_response(batch, served_since_s, shown_id)
        except Exception as error:
            await self._calls.reject(context, error, "WatchScheduler")

    async def GetStats(
        self, request: pb.GetStatsRequest | None, context: grpc.aio.ServicerContext
    ) -> pb.GetStatsResponse:
        try:
            require_decoded(request)
            self._calls.require_operator(context, totals=True)
            engine = self._calls.service.engine(even_draining=True)
            parts = engine.parts
            return messages.stats_response(
                await engine.stats(),
                model=parts.model_name,
                scheduling_policy=parts.policy.name,
                cache=parts.config.cache.mode,
                uptime_s=self._calls.service.uptime_s,
                max_model_len=parts.limits.max_model_len,
                block_size=parts.executor.block_size,
            )
        except Exception as error:
            await self._calls.reject(context, error, "GetStats")

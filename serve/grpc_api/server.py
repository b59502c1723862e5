"""The gRPC server: `aptjax.v1.AptServe`, `vllm.grpc.engine.VllmEngine`, health and reflection on one port.

1. `GrpcServer.start` binds and answers at once: health is NOT_SERVING and Generate is UNAVAILABLE while a model loads.
2. `GrpcServer.serve` takes a warm engine; health turns SERVING.
3. `Calls` carries each Generate to its end.
4. `GrpcServer.stop` turns health to NOT_SERVING, refuses new requests, lets open ones go on for a while, cuts the rest.
"""

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from apt_jax.async_engine import AsyncEngine
from apt_jax.errors import QueueFullError
from apt_jax.validation import check_watch_capacity
from apt_jax.watch import SchedulerWatch
from serve.errors import PortInUseError
from serve.grpc_api import messages, vllm_service
from serve.grpc_api.calls import Calls, decoder, metadata_of, readable
from serve.observability.profiler import Profiler
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from serve.security.api_keys import ApiKeys, KeyInterceptor
from serve.security.tls import Tls

if TYPE_CHECKING:  # it needs the extra `otel`
    from serve.observability.tracing import Tracer

SERVICE = pb.DESCRIPTOR.services_by_name["AptServe"].full_name
# No health service of other engines is ever registered beside them: gateways ask for those first and would take us for them.
_SERVICES = (SERVICE, vllm_service.SERVICE)


_WATCH_CAPACITY = 256
_MAX_WATCHES = 16
"""Each costs the engine's thread some time an iteration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Limits of the server; INTERFACES of the wire are in the .proto file."""

    host: str = "127.0.0.1"
    port: int = 50051
    """0: any free one."""
    max_concurrent_rpcs: int = 1024 + 64 + 64
    """RPCs at once, and streams a connection; a proxy may bring all of them over one."""
    max_message_bytes: int = 4 << 20
    keepalive_time_s: float = 1.5
    """A silent connection is probed after this time,"""
    keepalive_timeout_s: float = 2.5
    """and cut this much later: a peer that vanished or was stopped holds its cache blocks no longer."""
    write_stall_s: float = 30.0
    """A client that has not read for this long loses its request."""
    reflection: bool = True
    """Tell clients about the services; for addresses that strangers can reach, better not."""
    keys: ApiKeys | None = None
    """None: no call needs one."""
    tls: Tls | None = None
    """None: plaintext."""
    tracer: "Tracer | None" = None
    """None: no traces."""
    profiler: Profiler | None = None
    """None: its methods are not offered."""

    def options(self) -> list[tuple[str, int]]:
        """gRPC channel arguments."""
        timeout_ms = int(self.keepalive_timeout_s * 1e3)
        return [
            ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind it
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", int(self.keepalive_time_s * 1e3)),
            ("grpc.keepalive_timeout_ms", timeout_ms),
            # What counts where the peer's kernel still acknowledges.
            ("grpc.http2.ping_timeout_ms", timeout_ms),
            ("grpc.max_concurrent_streams", self.max_concurrent_rpcs),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_metadata_size", 16 << 10),
        ]


class AptServe:
    """The methods of `aptjax.v1.AptServe`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._watches: set[SchedulerWatch] = set()

    def handler(self) -> grpc.GenericRpcHandler:
        """For `Server.add_generic_rpc_handlers`."""
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

    async def Generate(
        self, request: pb.GenerateRequest | None, context: grpc.aio.ServicerContext
    ) -> None:
        await self._calls.generate(
            messages.GenerateExchange(request, metadata_of(context)), context, SERVICE
        )

    async def WatchScheduler(
        self, request: pb.WatchSchedulerRequest | None, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchSchedulerResponse]:
        try:
            given = readable(request)
            capacity = _WATCH_CAPACITY
            if given.HasField("capacity"):
                capacity = check_watch_capacity(given.capacity)
            engine = self._calls.engine()
            if len(self._watches) >= _MAX_WATCHES:
                raise QueueFullError(f"{_MAX_WATCHES} clients watch the scheduler already", 30.0)
            served_since_s = engine.parts.clock.now_s() - self._calls.uptime_s
            watch = engine.watch(capacity)
            self._watches.add(watch)
            # Also a client that leaves while it is written to: then nothing comes back to this generator.
            context.add_done_callback(lambda _: self._leave(watch))  # type: ignore[arg-type]  # as in `Calls`
            try:
                await context.send_initial_metadata(())  # so that the client knows from when on
                async for news in watch:
                    yield messages.watch_response(news, served_since_s)
            finally:
                self._leave(watch)
        except Exception as error:
            await self._calls.refuse(context, error, "WatchScheduler")

    def _leave(self, watch: SchedulerWatch) -> None:
        self._watches.discard(watch)
        watch.close()

    async def GetStats(
        self, request: pb.GetStatsRequest | None, context: grpc.aio.ServicerContext
    ) -> pb.GetStatsResponse:
        try:
            readable(request)
            engine = self._calls.engine(even_draining=True)
            parts = engine.parts
            return messages.stats_response(
                await engine.stats(),
                model=parts.model_name,
                scheduling_policy=parts.policy.name,
                cache=parts.config.cache.mode,
                uptime_s=self._calls.uptime_s,
                max_model_len=parts.limits.max_model_len,
                block_size=parts.executor.block_size,
            )
        except Exception as error:
            await self._calls.refuse(context, error, "GetStats")


def _probe(host: str, port: int) -> None:
    """Bind once ourselves: gRPC's own attempt prints its failure in a format of its own."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise PortInUseError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another address (--grpc-port, --host)"
        ) from None


class GrpcServer:
    """Life of the server; one event loop.

    Args:
        config: address and limits.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.port = 0
        """The bound port, after `start`."""
        self._calls = Calls(config.write_stall_s, config.keys, config.tracer)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        self._server: grpc.aio.Server | None = None
        self._engine: AsyncEngine | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Generate calls in progress."""
        return self._calls.num_open

    async def start(self) -> None:
        """Bind and answer; not SERVING yet.

        Raises:
            PortInUseError: the address cannot be bound.
        """
        config = self.config
        self._server = server = grpc.aio.server(
            options=config.options(),
            maximum_concurrent_rpcs=config.max_concurrent_rpcs,
            interceptors=[]
            if config.keys is None
            else [KeyInterceptor(config.keys, self._calls.log)],
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        _probe(config.host, config.port)
        try:
            address = f"{host}:{config.port}"
            if config.tls is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, config.tls.grpc_credentials())
        except RuntimeError:
            raise PortInUseError(
                f"cannot listen on {host}:{config.port}; choose another address (--grpc-port, --host)"
            ) from None
        vllm = vllm_service.VllmEngine(self._calls, config.profiler)
        server.add_generic_rpc_handlers((AptServe(self._calls).handler(), vllm.handler()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if config.reflection:
            reflection.enable_server_reflection(
                (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
            )
        await self._set_health(serving=False)
        await server.start()

    async def serve(self, engine: AsyncEngine) -> None:
        """Take a warm engine and become SERVING."""
        self._engine = engine
        self._calls.use(engine)
        await self._set_health(serving=True)

    async def engine_lost(self) -> None:
        """Say that nothing is served any more, after the engine's death."""
        await self._set_health(serving=False)

    async def stop(self, drain_s: float) -> None:
        """NOT_SERVING at once, refuse new requests, end open ones within `drain_s`, close. A second call hurries."""
        self._calls.drain()
        await self._health.enter_graceful_shutdown()
        if self._engine is not None:
            await self._engine.shutdown(drain_s)
        if self._server is not None:
            # The streams have their last message or their status: time to send it.
            await self._server.stop(grace=min(2.0, max(drain_s, 0.2)))
        self._calls.close()

    async def _set_health(self, *, serving: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", *_SERVICES):
            await self._health.set(service, status)

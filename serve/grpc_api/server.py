"""The gRPC server: `aptjax.v1.AptServe`, `vllm.grpc.engine.VllmEngine`, health and reflection on one port.

1. `GrpcServer.start` binds and answers at once: health is NOT_SERVING and Generate is UNAVAILABLE while a model loads.
2. `GrpcServer.serve` takes a warm engine; health turns SERVING.
3. `GrpcCalls` carries each Generate to its end.
4. `GrpcServer.stop` turns health to NOT_SERVING, rejects new requests, waits for in-flight ones for a while, cancels
   the rest.
"""

import asyncio
import dataclasses
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.start_stages import StartStatus
from serve.errors import PortInUseError
from serve.grpc_api.calls import GrpcCalls
from serve.grpc_api.key_interceptor import KeyInterceptor
from serve.grpc_api.request_timeout import RequestTimeout
from serve.grpc_api.service import SERVICE, AptServe
from serve.grpc_api.vllm_service import SERVICE as VLLM_SERVICE
from serve.grpc_api.vllm_service import VllmEngine
from serve.memory_gate import MemoryGate
from serve.observability.profiler import Profiler
from serve.preprocessing import Preprocessing, PreprocessingLimits
from serve.security.api_keys import ApiKeys
from serve.security.tls import Tls

if TYPE_CHECKING:  # it needs the extra `otel`
    from serve.observability.tracing import Tracer

# No health service of other engines is ever registered beside them: gateways probe those first and would mistake us for
# one.
_SERVICES = (SERVICE, VLLM_SERVICE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Address and limits of the server."""

    host: str = "127.0.0.1"
    port: int = 50051
    """0: any free one."""
    max_concurrent_rpcs: int = 1024 + 64 + 64
    """RPCs at once, and streams a connection; a proxy may bring all of them over one."""
    max_connections: int = 1024 + 64 + 64
    """Further connections are closed at once."""
    max_message_bytes: int = 4 << 20
    request_timeout_s: float = 30.0
    """Time for the whole request of an RPC."""
    keepalive_time_s: float = 1.5
    """A silent connection is probed after this time."""
    keepalive_timeout_s: float = 2.5
    """An unanswered probe closes the connection after this time, which frees the cache blocks of a vanished peer."""
    max_connection_age_s: float | None = None
    """A connection of this age, give or take a tenth, takes no new calls; its open ones end. None: there is no limit."""
    write_stall_s: float = 30.0
    """A client that has not read for this long loses its request."""
    reflection: bool = True
    """Offer gRPC reflection; better off on public addresses."""
    keys: ApiKeys | None = None
    """None: no call needs one."""
    tls: Tls | None = None
    """None: plaintext."""
    tracer: "Tracer | None" = None
    """None: no traces."""
    memory: MemoryGate | None = None
    """None: no limit."""
    profiler: Profiler | None = None
    """None: the methods for profiles are not offered."""
    starting: Callable[[], StartStatus | None] = lambda: None
    """How far the start is."""
    preprocessing: PreprocessingLimits = dataclasses.field(default_factory=PreprocessingLimits)
    """Bounds of the work before the engine, of this server and of those beside it."""

    def options(self) -> list[tuple[str, int]]:
        """gRPC channel arguments."""
        timeout_ms = int(self.keepalive_timeout_s * 1e3)
        age_s = self.max_connection_age_s
        return [
            *([] if age_s is None else [("grpc.max_connection_age_ms", int(age_s * 1e3))]),
            ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind it
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", int(self.keepalive_time_s * 1e3)),
            ("grpc.keepalive_timeout_ms", timeout_ms),
            # What counts where the peer's kernel still acknowledges.
            ("grpc.http2.ping_timeout_ms", timeout_ms),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_concurrent_rpcs),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_metadata_size", 16 << 10),
        ]


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
            f"cannot listen on {host}:{port} for gRPC ({error.strerror}); choose another address (--grpc-port, 0 for any free one; --host): a second server needs a gRPC port of its own"
        ) from None


class GrpcServer:
    """Life of the server; one event loop.

    Args:
        config: address and limits.
        work: shared with other servers; None: its own.
    """

    def __init__(self, config: ServerConfig, work: Preprocessing | None = None) -> None:
        self.config = config
        self.port = 0
        """The bound port, after `start`."""
        self._calls = GrpcCalls(config.write_stall_s, config.keys, config.tracer, work, config.memory, config.starting)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        self._server: grpc.aio.Server | None = None
        self._engine: AsyncEngine | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Number of in-flight Generate calls."""
        return self._calls.service.num_open

    async def start(self) -> None:
        """Bind and answer; not SERVING yet.

        Raises:
            PortInUseError: the address cannot be bound.
        """
        config = self.config
        self._server = server = grpc.aio.server(
            options=config.options(),
            maximum_concurrent_rpcs=config.max_concurrent_rpcs,
            interceptors=[
                RequestTimeout(config.request_timeout_s),
                *([] if config.keys is None else [KeyInterceptor(config.keys, self._calls.service.log)]),
            ],
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
        vllm = VllmEngine(self._calls, config.profiler)
        server.add_generic_rpc_handlers((AptServe(self._calls).handler(), vllm.handler()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if config.reflection:
            reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await self._set_health(serving=False)
        await server.start()

    async def serve(self, engine: AsyncEngine) -> None:
        """Take a warm engine and become SERVING."""
        self._engine = engine
        self._calls.service.attach_engine(engine)
        await self._set_health(serving=True)

    async def engine_lost(self) -> None:
        """Turn NOT_SERVING after the engine's death."""
        await self._set_health(serving=False)

    async def stop(self, drain_s: float) -> None:
        """Turn NOT_SERVING, reject new requests, end in-flight ones within `drain_s`, close. A second call may shorten
        the time."""
        self._calls.service.drain()
        await self._health.enter_graceful_shutdown()
        if self._engine is not None:
            await self._engine.shutdown(drain_s)
        if self._server is not None:
            # The streams have their last message or their status: time to send it.
            await self._server.stop(grace=min(2.0, max(drain_s, 0.2)))
        self._calls.service.close()

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *_SERVICES):
            await self._health.set(service, status)

"""The gRPC server: `aptjax.v1.AptServe`, `vllm.grpc.engine.VllmEngine`, health and reflection on one port.

1. `GrpcServer.start` binds the port and answers at once: health is NOT_SERVING and Generate is UNAVAILABLE while the
   model loads.
2. `GrpcServer.serve` attaches the engine when it is ready; health becomes SERVING.
3. `GrpcCalls` serves each Generate call to its end.
4. `GrpcServer.stop` sets health to NOT_SERVING, rejects new requests, waits for requests in flight for a limited time
   and cancels the rest.
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

if TYPE_CHECKING:  # requires the extra `otel`
    from serve.observability.tracing import Tracer

# Health services of other engines are never registered: gateways probe them first and would mistake this server for such
# an engine.
_SERVICES = (SERVICE, VLLM_SERVICE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Address and limits of the server."""

    host: str = "127.0.0.1"
    port: int = 50051
    """Port to listen on; 0: any free port."""
    max_concurrent_rpcs: int = 1024 + 64 + 64
    """Maximum number of concurrent RPCs, in total and per connection: a proxy may send all RPCs over one connection."""
    max_connections: int = 1024 + 64 + 64
    """Maximum number of connections; further connections are closed at once."""
    max_message_bytes: int = 4 << 20
    request_timeout_s: float = 30.0
    """Time limit in seconds for receiving the request of an RPC."""
    keepalive_time_s: float = 1.5
    """Seconds of silence after which a connection is probed."""
    keepalive_timeout_s: float = 2.5
    """Seconds after which an unanswered probe closes the connection, which frees the cache blocks of its requests."""
    max_connection_age_s: float | None = None
    """Age in seconds (+-10 %, random) at which a connection stops accepting calls; its open calls continue. None: no
    limit."""
    write_stall_s: float = 30.0
    """Seconds after which the requests of a client that does not read are cancelled."""
    reflection: bool = True
    """Offer gRPC reflection; turn it off on public addresses."""
    keys: ApiKeys | None = None
    """Accepted API keys; None: calls need no key."""
    tls: Tls | None = None
    """Certificate and key for TLS; None: plaintext."""
    tracer: "Tracer | None" = None
    """Traces the calls; None: no traces."""
    memory: MemoryGate | None = None
    """Rejects new calls while memory is short; None: no limit."""
    profiler: Profiler | None = None
    """Serves the profiling methods; None: they are not offered."""
    starting: Callable[[], StartStatus | None] = lambda: None
    """Returns the server's startup progress while the model loads; None if it is not known."""
    preprocessing: PreprocessingLimits = dataclasses.field(default_factory=PreprocessingLimits)
    """Limits on preprocessing, shared by all servers of the process."""

    def options(self) -> list[tuple[str, int]]:
        """Return the gRPC channel arguments."""
        timeout_ms = int(self.keepalive_timeout_s * 1e3)
        age_s = self.max_connection_age_s
        return [
            *([] if age_s is None else [("grpc.max_connection_age_ms", int(age_s * 1e3))]),
            ("grpc.so_reuseport", 0),  # if the port is in use, fail instead of sharing it
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", int(self.keepalive_time_s * 1e3)),
            ("grpc.keepalive_timeout_ms", timeout_ms),
            # The timeout that applies if the peer's kernel still acknowledges packets.
            ("grpc.http2.ping_timeout_ms", timeout_ms),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_concurrent_rpcs),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_metadata_size", 16 << 10),
        ]


def _probe(host: str, port: int) -> None:
    """Check that the address can be bound, because gRPC prints its own error message if it cannot.

    Raises:
        PortInUseError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise PortInUseError(
            f"cannot listen on {host}:{port} for gRPC ({error.strerror}); choose another address (--grpc-port, 0 for any free port; --host): a second server needs its own gRPC port"
        ) from None


class GrpcServer:
    """The gRPC server, from start to stop. Used from one event loop only.

    Args:
        config: address and limits.
        work: preprocessing queues, shared with other servers; None: the server has its own.
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
        """Bind the port and start to answer RPCs, with health NOT_SERVING.

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
        """Attach an engine that is ready, and set health to SERVING."""
        self._engine = engine
        self._calls.service.attach_engine(engine)
        await self._set_health(serving=True)

    async def engine_lost(self) -> None:
        """Set health to NOT_SERVING after the engine has failed."""
        await self._set_health(serving=False)

    async def stop(self, drain_s: float) -> None:
        """Set health to NOT_SERVING, reject new requests, wait at most `drain_s` seconds for requests in flight, then
        close the server. A second call may shorten the wait."""
        self._calls.service.drain()
        await self._health.enter_graceful_shutdown()
        if self._engine is not None:
            await self._engine.shutdown(drain_s)
        if self._server is not None:
            # The last message or status of each stream still has to be sent.
            await self._server.stop(grace=min(2.0, max(drain_s, 0.2)))
        self._calls.service.close()

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *_SERVICES):
            await self._health.set(service, status)

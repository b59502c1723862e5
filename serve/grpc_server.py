"""The gRPC server: `aptjax.v1.AptServe`, health and reflection on one port.

1. `GrpcServer.start` binds and answers at once: health is NOT_SERVING and Generate is UNAVAILABLE while a model loads.
2. `GrpcServer.serve` takes a warm engine; health turns SERVING.
3. Each Generate builds an `EngineRequest` (nothing else reaches the engine), submits it, and writes what the stream
   has until the last message. However the RPC ends, `finally` and a done-callback end the request: a cancellation that
   arrives during a write is not a CancelledError in grpc.aio.
4. `GrpcServer.stop` turns health to NOT_SERVING, refuses new requests, lets open ones go on for a while, cuts the rest.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import logging
import math
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from apt_jax.async_engine import AsyncEngine, EngineClosedError, RequestStream
from apt_jax.errors import InvalidRequestError
from apt_jax.request import EngineRequest
from serve import messages
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from serve.status import (
    RequestFailedError,
    SlowReaderError,
    UnknownModelError,
    status_of,
)

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["AptServe"].full_name

_LONG_PROMPT_CHARS = 4096
"""Prompts longer than this are tokenised in a thread, so that the event loop goes on."""
_FORM_THREADS = 4
"""Requests with structured outputs are built in threads of their own: a new form is compiled, which may take seconds."""
_MAX_DEADLINE_S = 86_400.0
_NEWS_S = 1.0
_NO_ID = "unnamed"

Message = TypeVar("Message")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Limits of the server; INTERFACES of the wire are in the .proto file."""

    host: str = "127.0.0.1"
    port: int = 50051
    """0: any free one."""
    max_concurrent_rpcs: int = 1024 + 64 + 64
    """RPCs at once, and streams a connection; a proxy may bring all of them over one."""
    max_message_bytes: int = 4 << 20
    keepalive_time_s: float = 20.0
    """A silent connection is probed after this time,"""
    keepalive_timeout_s: float = 10.0
    """and cut this much later: a peer that vanished holds its cache blocks no longer."""
    write_stall_s: float = 30.0
    """A client that has not read for this long loses its request."""
    reflection: bool = True
    """Tell clients about the services; for addresses that strangers can reach, better not."""

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


class PortInUseError(Exception):
    """The address cannot be bound."""


class _ClientGoneError(Exception):
    """A write failed."""


def _decoder(message_type: Any) -> Callable[[bytes], Any]:
    """Bytes that are no message (invalid UTF-8, cut off) become None, for the handler to refuse with the right status."""

    def decode(data: bytes) -> Any:
        try:
            return message_type.FromString(data)
        except DecodeError:
            return None

    return decode


class AptServe:
    """The service's methods."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._engine: AsyncEngine | None = None
        self._served_since_s = 0.0
        self._draining = False
        self.num_open = 0
        """Generate calls in progress."""
        self._forms = concurrent.futures.ThreadPoolExecutor(
            _FORM_THREADS, thread_name_prefix="apt-jax-forms"
        )

    def close(self) -> None:
        self._forms.shutdown(wait=False, cancel_futures=True)

    def use(self, engine: AsyncEngine) -> None:
        self._engine, self._served_since_s = engine, time.monotonic()

    def drain(self) -> None:
        self._draining = True

    def handler(self) -> grpc.GenericRpcHandler:
        """For `Server.add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.Generate,
                    request_deserializer=_decoder(pb.GenerateRequest),
                    response_serializer=pb.GenerateResponse.SerializeToString,
                ),
                "GetStats": grpc.unary_unary_rpc_method_handler(
                    self.GetStats,
                    request_deserializer=_decoder(pb.GetStatsRequest),
                    response_serializer=pb.GetStatsResponse.SerializeToString,
                ),
            },
        )

    async def Generate(
        self, request: pb.GenerateRequest | None, context: grpc.aio.ServicerContext
    ) -> None:
        request_id = _NO_ID
        started_s = time.monotonic()
        num_tokens, reason = 0, "error"
        self.num_open += 1
        try:
            engine = self._ready_engine()
            deadline_s = self._deadline_s(engine, request, context)
            engine_request = await self._build(engine, request, context)
            request_id = engine_request.request_id
            stream = engine.submit(engine_request, deadline_s=deadline_s)
            context.add_done_callback(lambda _: stream.cancel())  # type: ignore[arg-type]  # the stubs want a class
            try:
                sequence = 0
                async for delta in stream:
                    num_tokens += len(delta.token_ids)
                    if delta.finish_reason == "error":
                        raise RequestFailedError(_reason_for_client(delta.error))
                    message = messages.response(delta, sequence, num_tokens)
                    await self._write(context, message, stream)
                    sequence += 1
                    reason = delta.finish_reason or reason
            finally:
                stream.cancel()
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        except (
            _ClientGoneError
        ):  # or its deadline has passed, during a write: nobody hears a status any more
            reason = "cancelled"
            # The news of its leaving comes after the failed write; gRPC must have them before the handler returns, or
            # it tries to send a status and logs that it cannot. It then cancels this task.
            await asyncio.sleep(_NEWS_S)
        except Exception as error:
            if context.done():
                reason = "cancelled"
                return
            status = status_of(error, request_id)
            reason = status.code.name.lower()
            if status.code is grpc.StatusCode.INTERNAL:
                known = isinstance(error, RequestFailedError)
                logger.error("request %s failed", request_id, exc_info=None if known else error)
            # Before the first message this goes out as trailers only: the client may then retry elsewhere.
            await context.abort(status.code, status.message, status.trailers)
        finally:
            self.num_open -= 1
            logger.info(
                "request %s: %s, %d tokens, %.0f ms",
                request_id,
                reason,
                num_tokens,
                1e3 * (time.monotonic() - started_s),
            )

    async def GetStats(
        self, request: pb.GetStatsRequest | None, context: grpc.aio.ServicerContext
    ) -> pb.GetStatsResponse:
        try:
            if request is None:
                raise InvalidRequestError("request", "the message cannot be read")
            engine = self._ready_engine(even_draining=True)
            parts = engine.parts
            return messages.stats_response(
                await engine.stats(),
                model=parts.model_name,
                scheduling_policy=parts.policy.name,
                cache=parts.config.cache.mode,
                uptime_s=time.monotonic() - self._served_since_s,
                max_model_len=parts.limits.max_model_len,
                block_size=parts.executor.block_size,
            )
        except asyncio.CancelledError:
            raise
        except Exception as error:
            status = status_of(error, "GetStats")
            if status.code is grpc.StatusCode.INTERNAL:
                logger.error("GetStats failed", exc_info=error)
            await context.abort(status.code, status.message, status.trailers)
            raise  # not reached: abort raises

    def _ready_engine(self, *, even_draining: bool = False) -> AsyncEngine:
        if self._draining and not even_draining:
            raise EngineClosedError("the server is shutting down")
        if self._engine is None:
            raise EngineClosedError("the server is starting: the model is not ready yet")
        return self._engine

    def _deadline_s(
        self,
        engine: AsyncEngine,
        request: pb.GenerateRequest | None,
        context: grpc.aio.ServicerContext,
    ) -> float | None:
        """The sooner one of the RPC's deadline and the request's own, on the engine's clock."""
        now_s = engine.parts.clock.now_s()
        remaining_s = context.time_remaining()
        limits = [] if remaining_s is None else [remaining_s]
        if request is not None and request.HasField("deadline_ms"):
            own_s = request.deadline_ms / 1e3
            if not math.isfinite(own_s) or not 0.0 < own_s <= _MAX_DEADLINE_S:
                raise InvalidRequestError(
                    "deadline_ms",
                    f"{request.deadline_ms} must be a positive number of milliseconds, a day at most",
                )
            limits.append(own_s)
        if not limits:
            return None
        if min(limits) <= 0.0:
            raise TimeoutError
        return now_s + min(limits)

    async def _build(
        self,
        engine: AsyncEngine,
        request: pb.GenerateRequest | None,
        context: grpc.aio.ServicerContext,
    ) -> EngineRequest:
        if request is None:
            raise InvalidRequestError(
                "request", "the message cannot be read; text must be valid UTF-8"
            )
        parts = engine.parts
        if request.model not in ("", parts.model_name, parts.config.model):
            raise UnknownModelError(
                f"model {request.model[:80]!r} is not served here; this server has {parts.model_name!r}"
            )
        metadata = context.invocation_metadata() or ()
        fields = messages.request_fields(request, [(k, v) for k, v in metadata])
        fields["arrival_s"] = parts.clock.now_s()
        if request.sampling.HasField("structured_outputs"):
            build = functools.partial(parts.build_request, **fields)
            return await asyncio.get_running_loop().run_in_executor(self._forms, build)
        if len(request.text) <= _LONG_PROMPT_CHARS:
            return parts.build_request(**fields)
        return await asyncio.to_thread(parts.build_request, **fields)

    async def _write(
        self,
        context: grpc.aio.ServicerContext,
        message: pb.GenerateResponse,
        stream: RequestStream,
    ) -> None:
        """Write one message. A client that does not read for too long loses its request, and with it the cache blocks.

        A write that has begun cannot be taken back in gRPC, and no status can be sent before it has ended. So the status
        waits until the client reads again or goes away; what waits is one message, and the place among the RPCs.
        """
        stall_s = self._config.write_stall_s
        slow = False

        def note() -> None:
            nonlocal slow
            slow = True
            stream.cancel()

        timer = asyncio.get_running_loop().call_later(stall_s, note)
        try:
            await context.write(message)
        except Exception as error:  # gRPC's type for it is not public
            raise _ClientGoneError from error
        finally:
            timer.cancel()
        if slow and not message.HasField("finish"):
            raise SlowReaderError(
                f"the client did not read for {stall_s:.0f} s; read faster or ask for less"
            )


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


def _reason_for_client(error: str | None) -> str:
    """From a fixed catalogue: texts of the engine that begin so are written for users, others may hold anything."""
    if error is not None and error.startswith(("numeric:", "grammar:")):
        return error
    return "the request failed"


class GrpcServer:
    """Life of the server; one event loop.

    Args:
        config: address and limits.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.port = 0
        """The bound port, after `start`."""
        self._service = AptServe(config)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        self._server: grpc.aio.Server | None = None
        self._engine: AsyncEngine | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Generate calls in progress."""
        return self._service.num_open

    async def start(self) -> None:
        """Bind and answer; not SERVING yet.

        Raises:
            PortInUseError: the address cannot be bound.
        """
        config = self.config
        self._server = server = grpc.aio.server(
            options=config.options(), maximum_concurrent_rpcs=config.max_concurrent_rpcs
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        _probe(config.host, config.port)
        try:
            self.port = server.add_insecure_port(f"{host}:{config.port}")
        except RuntimeError:
            raise PortInUseError(
                f"cannot listen on {host}:{config.port}; choose another address (--grpc-port, --host)"
            ) from None
        server.add_generic_rpc_handlers((self._service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if config.reflection:
            reflection.enable_server_reflection(
                (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
            )
        await self._set_health(serving=False)
        await server.start()

    async def serve(self, engine: AsyncEngine) -> None:
        """Take a warm engine and become SERVING."""
        self._engine = engine
        self._service.use(engine)
        await self._set_health(serving=True)

    async def engine_lost(self) -> None:
        """Say that nothing is served any more, after the engine's death."""
        await self._set_health(serving=False)

    async def stop(self, drain_s: float) -> None:
        """NOT_SERVING at once, refuse new requests, end open ones within `drain_s`, close. A second call hurries."""
        self._service.drain()
        await self._health.enter_graceful_shutdown()
        if self._engine is not None:
            await self._engine.shutdown(drain_s)
        if self._server is not None:
            # The streams have their last message or their status: time to send it.
            await self._server.stop(grace=min(2.0, max(drain_s, 0.2)))
        self._service.close()

    async def _set_health(self, *, serving: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", SERVICE):
            await self._health.set(service, status)

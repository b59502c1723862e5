"""A small client of `aptjax.v1.AptServe`, blocking and asynchronous.

    with AptClient("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", max_tokens=32, temperature=0.0, slo_ttft_ms=500):
            print(chunk.text, end="", flush=True)

Errors are `grpc.RpcError`s, with the status codes that the .proto file lists.
"""

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from serve.grpc_api.messages import structured_outputs
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb

_GENERATE = "/aptjax.v1.AptServe/Generate"
_GET_STATS = "/aptjax.v1.AptServe/GetStats"
_WATCH = "/aptjax.v1.AptServe/WatchScheduler"
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_OPTIONS = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 16 << 20),
]
_CLASSES = {None: pb.SLO_CLASS_UNSPECIFIED, "rt": pb.SLO_CLASS_RT, "be": pb.SLO_CLASS_BE}


def address(target: str) -> str:
    """``grpc://HOST:PORT`` or ``HOST:PORT`` as gRPC wants it.

    Raises:
        ValueError: anything else.
    """
    bare = target.removeprefix("grpc://")
    host, colon, port = bare.rpartition(":")
    if not colon or not host or not port.isdecimal() or "//" in bare:
        raise ValueError(f"{target!r} must be grpc://HOST:PORT")
    return bare


def make_request(
    prompt: str | Sequence[int],
    *,
    request_id: str = "",
    model: str = "",
    slo_ttft_ms: float | None = None,
    slo_tbt_ms: float | None = None,
    slo_class: str | None = None,
    deadline_ms: float | None = None,
    **sampling: Any,
) -> pb.GenerateRequest:
    """A request message; `sampling` are the fields of the message SamplingParams, absent or None: the default.

    `structured_outputs` is a mapping of the fields of `apt_jax.StructuredOutputsParams`.

    Raises:
        ValueError: a field or value that the message cannot hold.
    """
    form = sampling.get("structured_outputs")
    if isinstance(form, Mapping):
        sampling["structured_outputs"] = structured_outputs(form)
    request = pb.GenerateRequest(
        request_id=request_id,
        model=model,
        sampling=pb.SamplingParams(**{k: v for k, v in sampling.items() if v is not None}),
        slo=pb.Slo(ttft_ms=slo_ttft_ms, tbt_ms=slo_tbt_ms),
        slo_class=_CLASSES[slo_class],
        deadline_ms=deadline_ms,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


class AptClient:
    """Blocking client.

    Args:
        target: ``grpc://HOST:PORT`` or ``HOST:PORT``.
        api_key: sent with every call.
        credentials: for a server with TLS, from `grpc.ssl_channel_credentials`; None: plaintext.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._metadata = _metadata(api_key)
        if credentials is None:
            self._channel = grpc.insecure_channel(address(target), options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address(target), credentials, options=_OPTIONS)
        self._generate = self._channel.unary_stream(
            _GENERATE,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        self._get_stats = self._channel.unary_unary(
            _GET_STATS,
            request_serializer=pb.GetStatsRequest.SerializeToString,
            response_deserializer=pb.GetStatsResponse.FromString,
        )
        self._watch = self._channel.unary_stream(
            _WATCH,
            request_serializer=pb.WatchSchedulerRequest.SerializeToString,
            response_deserializer=pb.WatchSchedulerResponse.FromString,
        )
        self._check = self._channel.unary_unary(
            _HEALTH_CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Generator[pb.GenerateResponse]:
        """Messages as they come; see `make_request` for the fields. Closing the iterator ends the request."""
        call = self._generate(
            make_request(prompt, **fields),
            timeout=timeout_s,
            metadata=(*(metadata or {}).items(), *self._metadata),
        )
        try:
            yield from call
        finally:
            call.cancel()

    def stats(self, timeout_s: float = 10.0) -> pb.GetStatsResponse:
        return self._get_stats(pb.GetStatsRequest(), timeout=timeout_s, metadata=self._metadata)

    def watch_scheduler(self, capacity: int | None = None) -> Generator[pb.WatchSchedulerResponse]:
        """What the scheduler decides from now on; see the .proto file. Close the iterator to leave."""
        call = self._watch(pb.WatchSchedulerRequest(capacity=capacity), metadata=self._metadata)
        try:
            yield from call
        finally:
            call.cancel()

    def is_serving(self, service: str = "", timeout_s: float = 10.0) -> bool:
        """What the server's health service says."""
        answer = self._check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "AptClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncAptClient:
    """As `AptClient`, for asyncio code."""

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._metadata = _metadata(api_key)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address(target), options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address(target), credentials, options=_OPTIONS)
        self._generate = self._channel.unary_stream(
            _GENERATE,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        self._get_stats = self._channel.unary_unary(
            _GET_STATS,
            request_serializer=pb.GetStatsRequest.SerializeToString,
            response_deserializer=pb.GetStatsResponse.FromString,
        )
        self._watch = self._channel.unary_stream(
            _WATCH,
            request_serializer=pb.WatchSchedulerRequest.SerializeToString,
            response_deserializer=pb.WatchSchedulerResponse.FromString,
        )
        self._check = self._channel.unary_unary(
            _HEALTH_CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    @property
    def channel(self) -> grpc.aio.Channel:
        return self._channel

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Messages as they come; see `make_request` for the fields. Closing the iterator ends the request."""
        call = self._generate(
            make_request(prompt, **fields),
            timeout=timeout_s,
            metadata=(*(metadata or {}).items(), *self._metadata),
        )
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    async def stats(self, timeout_s: float = 10.0) -> pb.GetStatsResponse:
        return await self._get_stats(
            pb.GetStatsRequest(), timeout=timeout_s, metadata=self._metadata
        )

    async def watch_scheduler(
        self, capacity: int | None = None
    ) -> AsyncGenerator[pb.WatchSchedulerResponse]:
        """What the scheduler decides from now on; see the .proto file. Close the iterator to leave."""
        call = self._watch(pb.WatchSchedulerRequest(capacity=capacity), metadata=self._metadata)
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    async def is_serving(self, service: str = "", timeout_s: float = 10.0) -> bool:
        """What the server's health service says."""
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await self._check(request, timeout=timeout_s)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> "AsyncAptClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

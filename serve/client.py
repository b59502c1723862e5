"""Clients of `aptjax.v1.AptServe`, blocking and asynchronous.

    with AptClient("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", max_tokens=32, temperature=0.0, slo_ttft_ms=500):
            print(chunk.text, end="", flush=True)

Errors are `grpc.RpcError`s, with the status codes that the .proto file lists.
"""

import types
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from apt_jax.errors import ConfigError, one_line
from serve.grpc_api.messages import structured_outputs
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from serve.security.single_key import KEY_VARIABLE

_SERVICE = pb.DESCRIPTOR.services_by_name["AptServe"]
_OPTIONS = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 16 << 20),
]
_CLASSES = {None: pb.SLO_CLASS_UNSPECIFIED, "rt": pb.SLO_CLASS_RT, "be": pb.SLO_CLASS_BE}


HTTP_SCHEMES = ("http://", "https://")
NO_KEY = f"no valid API key; give one with --api-key-file FILE or in {KEY_VARIABLE}"
"""Message of commands whose call a server rejects for want of an API key."""


def address(target: str) -> str:
    """Return the ``HOST:PORT`` in ``grpc://HOST:PORT`` or ``HOST:PORT``.

    Raises:
        ValueError: `target` has neither format.
    """
    if target.startswith(HTTP_SCHEMES):
        raise ValueError(
            f"{target!r:.80} is an HTTP address, but this command uses gRPC: give grpc://HOST:PORT (default port: "
            "50051; `apt-jax serve` prints both addresses)"
        )
    bare = target.removeprefix("grpc://")
    host, colon, port = bare.rpartition(":")
    if not colon or not host or not port.isdecimal() or "//" in bare:
        raise ValueError(f"{target!r:.80} must be grpc://HOST:PORT")
    return bare


def is_http_port(details: str | None) -> bool:
    """Return True if the details of a failed call show that the port speaks HTTP/1 instead of gRPC."""
    return details is not None and ("http1.x server" in details or "Failed parsing HTTP/2" in details)


def status_text(error: "grpc.Call | grpc.aio.AioRpcError") -> str:
    """Return the status of a failed call in one line, for the users of a command."""
    code, details = error.code(), one_line(error.details() or "")
    return f"{code.name}: {NO_KEY if code is grpc.StatusCode.UNAUTHENTICATED else details}"


def channel_credentials(tls_ca: str | None) -> grpc.ChannelCredentials | None:
    """Return TLS credentials from a PEM file of CAs, or None (plaintext) if `tls_ca` is None. Raises ConfigError: the
    file cannot be read."""
    if tls_ca is None:
        return None
    try:
        return grpc.ssl_channel_credentials(Path(tls_ca).read_bytes())
    except OSError as error:
        raise ConfigError(f"{tls_ca}: cannot be read ({error.strerror}) (--tls-ca)") from None


def make_request(
    prompt: str | Sequence[int],
    *,
    request_id: str = "",
    model: str = "",
    slo_ttft_ms: float | None = None,
    slo_tbt_ms: float | None = None,
    slo_e2e_ms: float | None = None,
    slo_class: str | None = None,
    deadline_ms: float | None = None,
    retain_s: float | None = None,
    **sampling: Any,
) -> pb.GenerateRequest:
    """Return a `GenerateRequest` message; `sampling` are fields of its `SamplingParams`. A value of None selects the
    server's default.

    `structured_outputs` is a mapping of the fields of `apt_jax.StructuredOutputsParams`.

    Raises:
        ValueError: a field does not exist, or cannot hold its value.
    """
    if slo_class not in tuple(_CLASSES):
        raise ValueError(f"slo_class: {slo_class!r:.60} must be 'rt' (real time) or 'be' (best effort)")
    constraint = sampling.get("structured_outputs")
    if isinstance(constraint, Mapping):
        sampling["structured_outputs"] = structured_outputs(constraint)
    request = pb.GenerateRequest(
        request_id=request_id,
        model=model,
        sampling=pb.SamplingParams(**{k: v for k, v in sampling.items() if v is not None}),
        slo=pb.Slo(ttft_ms=slo_ttft_ms, tbt_ms=slo_tbt_ms, e2e_ms=slo_e2e_ms),
        slo_class=_CLASSES[slo_class],
        deadline_ms=deadline_ms,
        retain_s=retain_s,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request


class _Client:
    """Base of both clients: opens the channel and makes the calls.

    Args:
        grpc_module: `grpc` or `grpc.aio`.
        target, api_key, credentials: see `AptClient`.
    """

    def __init__(
        self,
        grpc_module: Any,
        target: str,
        api_key: str | None,
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        if credentials is None:
            channel = grpc_module.insecure_channel(address(target), options=_OPTIONS)
        else:
            channel = grpc_module.secure_channel(address(target), credentials, options=_OPTIONS)
        self._channel: Any = channel
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        methods = {name: _method(channel, name) for name in _SERVICE.methods_by_name}
        self._stub: Any = types.SimpleNamespace(**methods)
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    def _generate(
        self,
        prompt: str | Sequence[int],
        timeout_s: float | None,
        metadata: Mapping[str, str] | None,
        fields: Mapping[str, Any],
    ) -> Any:
        sent = (*(metadata or {}).items(), *self._metadata)
        return self._stub.Generate(make_request(prompt, **fields), timeout=timeout_s, metadata=sent)

    def _stats(self, timeout_s: float) -> Any:
        return self._stub.GetStats(pb.GetStatsRequest(), timeout=timeout_s, metadata=self._metadata)

    def _watch(self, capacity: int | None) -> Any:
        return self._stub.WatchScheduler(pb.WatchSchedulerRequest(capacity=capacity), metadata=self._metadata)

    def _check(self, service: str, timeout_s: float) -> Any:
        return self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)


def _method(channel: Any, name: str) -> Any:
    """Return the stub of a method of AptServe, built from the method's descriptor.

    A generated `_pb2_grpc` module would reject every grpcio that is older than the generator.
    """
    method = _SERVICE.methods_by_name[name]
    kind = channel.unary_stream if method.server_streaming else channel.unary_unary
    return kind(
        f"/{_SERVICE.full_name}/{name}",
        request_serializer=GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )


def _is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    return response.status == health_pb2.HealthCheckResponse.SERVING


class AptClient(_Client):
    """Blocking client of `aptjax.v1.AptServe`.

    Args:
        target: ``grpc://HOST:PORT`` or ``HOST:PORT``.
        api_key: API key to send with every call; None: no key.
        credentials: for a server with TLS, from `grpc.ssl_channel_credentials`; None: plaintext.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        super().__init__(grpc, target, api_key, credentials)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Generator[pb.GenerateResponse]:
        """Stream the response messages; see `make_request` for the fields. Closing the iterator cancels the request."""
        call = self._generate(prompt, timeout_s, metadata, fields)
        try:
            yield from call
        finally:
            call.cancel()

    def stats(self, timeout_s: float = 10.0) -> pb.GetStatsResponse:
        return self._stats(timeout_s)

    def watch_scheduler(self, capacity: int | None = None) -> Generator[pb.WatchSchedulerResponse]:
        """Stream the scheduler's decisions from now on; see the .proto file. Close the iterator to stop."""
        call = self._watch(capacity)
        try:
            yield from call
        finally:
            call.cancel()

    def is_serving(self, service: str = "", timeout_s: float = 10.0) -> bool:
        """Ask the server's health service whether `service` is serving."""
        return _is_serving(self._check(service, timeout_s))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "AptClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncAptClient(_Client):
    """Like `AptClient`, but for asyncio code."""

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        super().__init__(grpc.aio, target, api_key, credentials)

    @property
    def channel(self) -> grpc.aio.Channel:
        return self._channel

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that is sent with every call: the API key, if there is one."""
        return self._metadata

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """See `AptClient.generate`."""
        call = self._generate(prompt, timeout_s, metadata, fields)
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    async def stats(self, timeout_s: float = 10.0) -> pb.GetStatsResponse:
        return await self._stats(timeout_s)

    async def watch_scheduler(self, capacity: int | None = None) -> AsyncGenerator[pb.WatchSchedulerResponse]:
        """See `AptClient.watch_scheduler`."""
        call = self._watch(capacity)
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    async def is_serving(self, service: str = "", timeout_s: float = 10.0) -> bool:
        """See `AptClient.is_serving`."""
        return _is_serving(await self._check(service, timeout_s))

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> "AsyncAptClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

"""Backends for the two services on apt-jax's gRPC port; vLLM servers with gRPC also offer the second."""

import uuid
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2

from apt_jax.errors import ConfigError, one_line
from serve.bench.backends import Backend, RequestFailed, StreamEvent, Target, random_token_ids
from serve.bench.load import BenchRequest
from serve.client import AsyncAptClient, channel_credentials, is_http_port, status_text
from serve.errors import CommandError
from serve.protos.words import cache_kind_name, finish_reason_name
from serve.slo_headers import SESSION_KEYS, TIER_KEY, TIER_OF_CLASS

vllm: Any = vllm_engine_pb2  # generated without types that checkers can follow
_OPEN_TIMEOUT_S = 10.0


async def open_grpc(name: str, target: Target) -> Backend:
    """See `serve.bench.registry.open_backend`."""
    try:
        client = AsyncAptClient(target.address, api_key=target.api_key, credentials=channel_credentials(target.tls_ca))
    except ValueError as error:
        raise ConfigError(f"{error} (--target)") from None
    auth = () if target.api_key is None else (("authorization", f"Bearer {target.api_key}"),)
    stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(client.channel)
    served, vocab_size, max_len = target.model, target.vocab_size, None
    try:
        if name == "aptjax-grpc":
            stats = await client.stats(_OPEN_TIMEOUT_S)
            served, max_len = served or stats.model, stats.max_model_len
        if vocab_size is None or name == "vllm-grpc":
            info = await stub.GetModelInfo(vllm.GetModelInfoRequest(), timeout=_OPEN_TIMEOUT_S, metadata=auth)
            vocab_size, max_len = vocab_size or info.vocab_size, max_len or info.max_context_length
            served = served or info.served_model_name
    except grpc.aio.AioRpcError as error:
        await client.close()
        if is_http_port(error.details()):
            raise ConfigError(
                f"{target.address} speaks HTTP: give the gRPC port, or use --backend openai --target http://{target.address}"
            ) from None
        raise CommandError(f"{target.address}: {status_text(error)} (--target, --backend {name})") from None
    if not vocab_size:
        await client.close()
        raise ConfigError("the server does not report the size of its vocabulary (--vocab-size)")
    if name == "aptjax-grpc":
        backend = AptBackend(client, target, vocab_size)
    else:
        backend = VllmBackend(client, stub, auth, target, vocab_size)
    backend.model, backend.max_model_len = served or "", max_len or None
    return backend


def _failed(error: grpc.aio.AioRpcError) -> RequestFailed:
    return RequestFailed(error.code().name, one_line(error.details() or ""))


def _prompt(request: BenchRequest, vocab_size: int) -> str | list[int]:
    prompt = request.prompt
    if prompt is None:
        return random_token_ids(request, vocab_size)
    if isinstance(prompt, str):
        return prompt
    ids = [token for token in prompt if type(token) is int and 0 <= token < 2**32]
    if len(ids) < len(prompt):
        raise ConfigError("messages need --backend openai-chat (--prompts)")
    return ids


def _session(request: BenchRequest) -> dict[str, str]:
    return {} if request.session is None else {SESSION_KEYS[0]: request.session}


class AptBackend:
    """Backend for `aptjax.v1.AptServe`."""

    model = ""
    max_model_len: int | None = None

    def __init__(self, client: AsyncAptClient, target: Target, vocab_size: int) -> None:
        self._client, self._target, self._vocab_size = client, target, vocab_size

    def prepare(self, request: BenchRequest) -> dict[str, Any]:
        return {
            "prompt": _prompt(request, self._vocab_size),
            "model": self._target.model or "",
            "max_tokens": request.max_tokens,
            "temperature": self._target.temperature,
            "ignore_eos": self._target.ignore_eos,
            "slo_class": request.slo_class,
            "metadata": _session(request),
            **self._target.slo_ms(),
        }

    async def send(self, prepared: dict[str, Any]) -> AsyncGenerator[StreamEvent]:
        call = self._client.generate(**prepared)
        try:
            async for message in call:
                event = StreamEvent(num_tokens=len(message.token_ids))
                if message.HasField("finish"):
                    finish = message.finish
                    event.finish_reason = finish_reason_name(finish.reason)
                    event.prompt_tokens = finish.usage.prompt_tokens
                    event.cached_tokens = finish.usage.cached_prompt_tokens
                    event.num_preemptions = finish.num_preemptions
                    event.recomputed_tokens = finish.recomputed_tokens
                    event.cache_kind = cache_kind_name(finish.cache_kind)
                yield event
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        finally:
            await call.aclose()

    async def close(self) -> None:
        await self._client.close()


class VllmBackend:
    """Backend for `vllm.grpc.engine.VllmEngine`."""

    model = ""
    max_model_len: int | None = None

    def __init__(self, client: AsyncAptClient, stub: Any, auth: Any, target: Target, vocab_size: int) -> None:
        self._client, self._stub, self._target = client, stub, target
        self._metadata = (*auth, *target.slo_headers().items())
        self._vocab_size = vocab_size

    def prepare(self, request: BenchRequest) -> tuple[Any, Any]:
        message = vllm.GenerateRequest(
            request_id=f"bench-{uuid.uuid4().hex}",
            stream=True,
            sampling_params=vllm.SamplingParams(
                max_tokens=request.max_tokens,
                temperature=self._target.temperature,
                top_p=1.0,
                ignore_eos=self._target.ignore_eos,
                n=1,
            ),
        )
        prompt = _prompt(request, self._vocab_size)
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.tokenized.input_ids.extend(prompt)
        of_class = request.slo_class
        tier = () if of_class is None else ((TIER_KEY, TIER_OF_CLASS[of_class]),)
        return message, (*self._metadata, *tier, *_session(request).items())

    async def send(self, prepared: tuple[Any, Any]) -> AsyncGenerator[StreamEvent]:
        message, metadata = prepared
        call = self._stub.Generate(message, metadata=metadata)
        seen = 0
        try:
            async for answer in call:
                if answer.HasField("chunk"):
                    seen += len(answer.chunk.token_ids)
                    yield StreamEvent(num_tokens=len(answer.chunk.token_ids))
                    continue
                complete = answer.complete
                yield StreamEvent(
                    num_tokens=max(0, complete.completion_tokens - seen),
                    finish_reason=complete.finish_reason,
                    prompt_tokens=complete.prompt_tokens,
                    cached_tokens=complete.cached_tokens,
                )
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._client.close()

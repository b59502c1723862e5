"""`vllm.grpc.engine.VllmEngine`: the service that gateways for vLLM workers, such as `smg`, call. It outputs token ids,
not text.

The messages are defined by the package smg-grpc-proto and have the same meaning as in vLLM:

* An unset temperature is 1. An unset `max_tokens` means as many tokens as fit. A `top_p` or `repetition_penalty` of 0
  counts as unset. 32-bit numbers are rounded to their shortest decimals (0.7, not 0.699999988).
* A streamed call gets a `chunk` for each update of each of its `n` outputs, and a `complete` message at the end of each
  output. A chunk holds the new token ids, their count and log probabilities; `complete` repeats all token ids of the
  output. A call that does not stream gets only `complete` messages.
* Stop strings are matched by this server. The output includes the token ids of the stop string; the gateway,
  which detokenizes them, must cut the text off where the stop string begins.
* Unsupported features are rejected with INVALID_ARGUMENT and the reason: structural tags, inputs other than text and
  token ids, cache transfer, data-parallel ranks other than 0. `spaces_between_special_tokens` and
  `grammar_from_first_token` are ignored.

Embed, FlushCache and SubscribeKvEvents are UNIMPLEMENTED; so are StartProfile and StopProfile without `--set profiler_dir`.
"""

import asyncio
import collections
import datetime
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

import apt_jax
from apt_jax.engine import EngineStats
from apt_jax.errors import EngineDeadError, InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.metrics import TokenRate
from apt_jax.request import Logprob, PromptLogprobs
from apt_jax.validation import unsupported
from serve.errors import NoTokenizerError
from serve.grpc_api.calls import GrpcCalls, decoder, metadata_of, require_decoded
from serve.grpc_api.gateway_calls import bounded_calls
from serve.grpc_api.messages import Metadata, objective_names, slo_fields
from serve.grpc_api.tokenizer_bundle import tokenizer_bundle
from serve.observability.profiler import Profiler

pb: Any = vllm_engine_pb2  # generated without types that checkers can follow
common: Any = common_pb2

SERVICE: str = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name

_NOT_OFFERED = "this server only generates text; it offers Generate, Abort, HealthCheck, GetModelInfo, GetServerInfo, GetLoads and GetTokenizer"
_CHUNK_BYTES = 64 << 10

_OPTIONAL = ("temperature", "logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens")
_UNSET_IF_ZERO = ("top_p", "repetition_penalty")
_PLAIN = (
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "skip_special_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
)
_CONSTRAINTS = {
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
}
_NOT_TAKEN = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
)


class VllmGenerateCodec:
    """Converts the messages of a Generate call; a `serve.grpc_api.calls.GenerateCodec`.

    Args:
        request: the request message; None if it could not be decoded.
        metadata: metadata of the RPC.
    """

    def __init__(self, request: Any, metadata: Metadata) -> None:
        self._request = request
        self._metadata = metadata
        self._outputs: collections.defaultdict[int, _Output] = collections.defaultdict(_Output)

    def fields(self, parts: EngineComponents) -> dict[str, Any]:
        request = require_decoded(self._request)
        given = {field.name for field, _ in request.ListFields()}
        for name in _NOT_TAKEN:
            if name in given:
                raise unsupported(name)
        if request.data_parallel_rank != 0:
            raise unsupported("data_parallel_rank")
        params = request.sampling_params
        fields: dict[str, Any] = {"params": sampling_fields(params), "n": params.n or 1}
        if request.request_id:
            fields["request_id"] = request.request_id
        match request.WhichOneof("input"):
            case "text":
                fields["prompt"] = request.text
            case "tokenized":
                fields["prompt_token_ids"] = list(request.tokenized.input_ids)
        return fields | slo_fields(self._metadata)

    def objective_names(self) -> Mapping[str, str]:
        return objective_names(self._metadata)

    def deadline_s(self) -> float | None:
        return None

    def messages(self, index: int, delta: OutputDelta) -> Iterable[Message]:
        output, stream = self._outputs[index], self._request.stream
        counts = {
            "index": index,
            "prompt_tokens": int(delta.request.prompt_token_ids.size),
            "cached_tokens": delta.metrics.num_cached_tokens,
        }
        output.token_ids += delta.token_ids
        if delta.prompt_logprobs is not None:
            output.input_logprobs = _input_logprobs(delta.request.prompt_token_ids.tolist(), delta.prompt_logprobs)
        if stream and delta.token_ids:
            chunk = pb.GenerateStreamChunk(
                token_ids=delta.token_ids,
                completion_tokens=len(delta.token_ids),
                output_logprobs=_output_logprobs(delta, delta.token_ids, delta.logprobs),
                input_logprobs=output.input_logprobs,
                **counts,
            )
            output.input_logprobs = None
            yield pb.GenerateResponse(chunk=chunk)
        elif delta.logprobs is not None:
            output.logprobs += delta.logprobs
        if not delta.finished:
            return
        complete = pb.GenerateComplete(
            output_ids=output.token_ids,
            finish_reason=delta.finish_reason,
            completion_tokens=len(output.token_ids),
            output_logprobs=_output_logprobs(delta, output.token_ids, output.logprobs),
            input_logprobs=output.input_logprobs,
            **counts,
        )
        if isinstance(delta.stop_reason, str):
            complete.matched_stop_str = delta.stop_reason
        elif delta.stop_reason is not None:
            complete.matched_token_id = delta.stop_reason
        yield pb.GenerateResponse(complete=complete)


class _Output:
    """One output of a call so far: all its token ids, and the log probabilities that have not been sent."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.input_logprobs: Any = None


def sampling_fields(params: Any) -> dict[str, Any]:
    """Convert a SamplingParams message to fields of `apt_jax.SamplingParams`, unchecked and without `n`."""
    names = [*_PLAIN, *(name for name in _OPTIONAL if params.HasField(name))]
    names += [name for name in _UNSET_IF_ZERO if getattr(params, name) != 0.0]
    fields = {name: _decimal(getattr(params, name)) for name in names}
    fields["max_tokens"] = params.max_tokens if params.HasField("max_tokens") else None
    fields["stop"] = list(params.stop)
    fields["stop_token_ids"] = list(params.stop_token_ids)
    fields["logit_bias"] = {token: _decimal(bias) for token, bias in params.logit_bias.items()}
    constraint = params.WhichOneof("constraint")
    if constraint == "choice":
        fields["structured_outputs"] = {"choice": list(params.choice.choices)}
    elif constraint == "json_schema":
        fields["structured_outputs"] = {"json": bounded_calls(params.json_schema)}
    elif constraint is not None:
        fields["structured_outputs"] = {_CONSTRAINTS[constraint]: getattr(params, constraint)}
    return fields


def _decimal(value: Any) -> Any:
    """Round a 32-bit number to its shortest decimal, the value that the user typed and that validation checks."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _input_logprobs(token_ids: list[int], found: PromptLogprobs) -> Any:
    """Encode the log probabilities of a prompt; its first token has no log probability."""
    message = pb.InputLogProbs(token_ids=token_ids, token_logprobs=[pb.InputTokenLogProb()])
    message.token_logprobs.extend(pb.InputTokenLogProb(value=value) for value in found.logprob.tolist())
    if found.top_ids.shape[1]:
        message.top_logprobs.add()
        for ids, values in zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True):
            message.top_logprobs.add(token_ids=ids, values=values)
    return message


def _output_logprobs(
    delta: OutputDelta, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]] | None
) -> Any:
    """Encode the log probabilities of output tokens; None if the output has none."""
    if not entries:
        return None
    message = pb.OutputLogProbs(
        token_ids=token_ids,
        token_logprobs=[entry[token].logprob for token, entry in zip(token_ids, entries, strict=True)],
    )
    for entry in entries if delta.request.params.logprobs else ():
        ranked = sorted((e.rank, t) for t, e in entry.items() if e.rank is not None)
        message.top_logprobs.add(token_ids=[t for _, t in ranked], values=[entry[t].logprob for _, t in ranked])
    return message


class VllmEngine:
    """The methods of `vllm.grpc.engine.VllmEngine`.

    Args:
        calls: in-flight calls, shared with the other services of the port.
        profiler: serves StartProfile and StopProfile; None: they are not offered.
    """

    def __init__(self, calls: GrpcCalls, profiler: Profiler | None = None) -> None:
        self._calls, self._profiler = calls, profiler
        self._rate = TokenRate()
        self._bundle: bytes | None = None

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of the service's methods, for `Server.add_generic_rpc_handlers`."""

        def unary(name: str, request: Any, answer: Callable[[Any, Any], Awaitable[Message]]) -> Any:
            async def method(message: Any, context: grpc.aio.ServicerContext) -> Message:
                try:
                    return await answer(require_decoded(message), context)
                except Exception as error:
                    await self._calls.reject(context, error, name)

            return grpc.unary_unary_rpc_method_handler(
                method,
                request_deserializer=decoder(request),
                response_serializer=_encoded,
            )

        def stream(method: Any, request: Any) -> Any:
            return grpc.unary_stream_rpc_method_handler(
                method,
                request_deserializer=decoder(request),
                response_serializer=_encoded,
            )

        async def unimplemented(request: bytes, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, _NOT_OFFERED)

        profiling = {
            "StartProfile": unary("StartProfile", common.StartProfileRequest, self._start_profile),
            "StopProfile": unary("StopProfile", common.StopProfileRequest, self._stop_profile),
        }
        rest = pb.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {name: grpc.unary_stream_rpc_method_handler(unimplemented) for name in rest}
            | {
                "Generate": stream(self.Generate, pb.GenerateRequest),
                "GetTokenizer": stream(self.GetTokenizer, common.GetTokenizerRequest),
                "HealthCheck": unary("HealthCheck", pb.HealthCheckRequest, self._health),
                "Abort": unary("Abort", pb.AbortRequest, self._abort),
                "GetModelInfo": unary("GetModelInfo", pb.GetModelInfoRequest, self._model_info),
                "GetServerInfo": unary("GetServerInfo", pb.GetServerInfoRequest, self._server_info),
                "GetLoads": unary("GetLoads", pb.GetLoadsRequest, self._loads),
            }
            | (profiling if self._profiler is not None else {}),
        )

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        await self._calls.generate(VllmGenerateCodec(request, metadata_of(context)), context, SERVICE)

    async def GetTokenizer(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Stream the ZIP archive of the tokenizer in chunks; the last chunk has its SHA-256."""
        try:
            require_decoded(request)
            parts = self._calls.service.engine(even_draining=True).parts
            data = self._bundle or await asyncio.to_thread(tokenizer_bundle, parts)
            self._bundle = data
            if data is None:
                raise NoTokenizerError(
                    f"model {parts.model_name!r:.80} has no tokenizer; start the server with one (--tokenizer DIR)"
                )
        except Exception as error:
            await self._calls.reject(context, error, "GetTokenizer")
        digest = hashlib.sha256(data).hexdigest()
        for start in range(0, len(data), _CHUNK_BYTES):
            piece = data[start : start + _CHUNK_BYTES]
            last = start + _CHUNK_BYTES >= len(data)
            yield common.GetTokenizerChunk(data=piece, sha256=digest if last else "")

    async def _health(self, request: Any, context: grpc.aio.ServicerContext) -> Message:
        """Succeed only while requests are accepted, because gateways send requests after any successful response."""
        engine = self._calls.service.engine()
        if not engine.is_serving:
            raise EngineDeadError(engine.dead_reason or "the engine is shutting down")
        return pb.HealthCheckResponse(healthy=True, message="serving")

    async def _abort(self, request: Any, context: grpc.aio.ServicerContext) -> Message:
        await self._calls.abort(request.request_ids, self._calls.caller(context))
        return pb.AbortResponse()

    async def _start_profile(self, request: Any, context: grpc.aio.ServicerContext) -> Message:
        assert self._profiler is not None
        self._calls.require_operator(context)
        for field, _ in request.ListFields():
            raise InvalidRequestError(field.name, "cannot be set by the client")
        directory = await self._profiler.start()
        return common.ProfileResponse(success=True, message=str(directory))

    async def _stop_profile(self, request: Any, context: grpc.aio.ServicerContext) -> Message:
        assert self._profiler is not None
        self._calls.require_operator(context)
        return common.ProfileResponse(success=True, message=str(await self._profiler.stop()))

    async def _model_info(self, request: Any, context: grpc.aio.ServicerContext) -> Message:
        parts = self._calls.service.engine(even_draining=True).parts
        model, limits = parts.model_config, parts.limits
        hf_config = parts.hf_config
        return pb.GetModelInfoResponse(
            model_path=parts.config.model,
            is_generation=True,
            max_context_length=limits.max_model_len,
            vocab_size=limits.vocab_size,
            served_model_name=parts.model_name,
            tokenizer_path=_tokenizer_path(parts),
            model_type=str(hf_config.get("model_type") or ""),
            architectures=[str(name) for name in hf_config.get("architectures") or ()],
            eos_token_ids=limits.eos_token_ids,
            pad_token_id=(model and model.pad_token_id) or 0,
            bos_token_id=(model and model.bos_token_id) or 0,
            max_req_input_len=limits.max_model_len - 1,
        )

    async def _server_info(self, request: Any, context: grpc.aio.ServicerContext) -> Message:
        parts = self._calls.service.engine(even_draining=True).parts
        return pb.GetServerInfoResponse(
            active_requests=self._calls.service.num_open,
            last_receive_timestamp=self._calls.last_arrival_s or 0.0,
            uptime_seconds=self._calls.service.uptime_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype=parts.config.dtype,
            block_size=parts.executor.block_size,
            attention_backend=parts.config.attention_backend or "",
            model_dtype=parts.config.dtype,
            max_num_seqs=parts.engine.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def _loads(self, request: Any, context: grpc.aio.ServicerContext) -> Message:
        self._calls.require_operator(context, totals=True)
        if request.dp_rank != 0:
            raise unsupported("dp_rank")
        engine = self._calls.service.engine(even_draining=True)
        stats = await engine.stats()
        rate = self._rate.update(time.monotonic(), stats.generation_tokens, stats.busy_s)
        return pb.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=apt_jax.__version__,
            dp_rank_count=1,
            loads=[_load(engine.parts, stats, rate)],
        )


def _tokenizer_path(parts: EngineComponents) -> str:
    """Return the path of the tokenizer's directory for gateways.

    Gateways read the directory if it exists, and call GetTokenizer otherwise. If the chat template comes from elsewhere,
    they must call GetTokenizer, so the returned path is one that does not exist.
    """
    if parts.tokenizer is None or parts.tokenizer.path is None:
        return ""
    path, template = str(parts.tokenizer.path), parts.config.chat_template
    return path if template is None else f"{path} with chat template {template}"


def _load(parts: EngineComponents, stats: EngineStats, tokens_per_s: float) -> Any:
    running = stats.num_running + stats.num_ending
    most_tokens = parts.limits.max_pool_tokens or 0
    if any(kind.windows is not None for kind in parts.engine.kinds):
        # Blocks of windowed layers hold no further tokens: the share of the pool stands for them.
        held_tokens = most_tokens * stats.used_blocks // stats.total_blocks
    else:
        held_tokens = sum(
            stats.blocks_by_kind.get(kind.name, 0) // kind.blocks_per_group * block_size
            for kind, block_size in zip(parts.engine.kinds, parts.engine.cache.block_sizes, strict=True)
        )
    queries = stats.prefix_cache_queries
    return pb.SchedulerLoad(
        dp_rank=0,
        num_running_reqs=running,
        num_waiting_reqs=stats.num_waiting,
        num_total_reqs=running + stats.num_waiting,
        num_used_tokens=held_tokens,
        max_total_num_tokens=most_tokens,
        token_usage=stats.used_blocks / stats.total_blocks,
        gen_throughput=tokens_per_s,
        cache_hit_rate=stats.prefix_cache_hits / queries if queries else 0.0,
        utilization=running / parts.engine.max_num_seqs,
        max_running_requests=parts.engine.max_num_seqs,
        num_waiting_uncached_tokens=stats.waiting_uncached_tokens,
    )


def _encoded(message: Message) -> bytes:
    return message.SerializeToString()

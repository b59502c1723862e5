"""Clients of the three APIs of the server: each sends the same request and yields the answer as the same pieces."""

import dataclasses
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import aiohttp
import grpc
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2

from serve.client import AsyncAptClient
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb

vllm: Any = vllm_engine_pb2  # generated without types that checkers can follow

NAMES = ("http", "grpc", "vllm")
"""OpenAI's completions as server-sent events, aptjax.v1.AptServe, vllm.grpc.engine.VllmEngine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """A request of the load."""

    prompt_ids: tuple[int, ...]
    params: Mapping[str, Any]
    """Fields of `apt_jax.SamplingParams`."""
    slo_ttft_ms: float | None = None
    slo_tbt_ms: float | None = None


@dataclasses.dataclass(slots=True)
class TextChunk:
    """Content of one message of a stream."""

    num_tokens: int = 0
    token_ids: list[int] | None = None
    """None: not asked for."""
    text: str | None = None
    """None: the API returns no text."""
    finish_reason: str | None = None
    attained: bool | None = None
    """SLO verdict of the server; None: not reported."""


class Refused(Exception):
    """The server answered, or ended the stream, with an error status.

    Attributes:
        status: an HTTP status, the name of a gRPC status, "error" for an event of an error, "connection", or "cut off"
            for a stream that ended without a last message.
    """

    def __init__(self, status: str, message: str = "") -> None:
        super().__init__(f"{status}: {message}"[:200])
        self.status = status


class Endpoint(Protocol):
    """One API of the server."""

    def stream(self, request: LoadRequest, *, token_ids: bool = True) -> AsyncGenerator[TextChunk]:
        """Yield the answer piece by piece. Closing the generator disconnects the client.

        Raises:
            Refused: the request was rejected, or ended with an error.
        """
        ...


class PromptText(NamedTuple):
    """Text of a prompt, and the tokens of that text."""

    text: str
    token_ids: tuple[int, ...]


class HttpEndpoint:
    """`POST /v1/completions`, streamed."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session, self._base = session, f"http://{address}"

    async def stream(self, request: LoadRequest, *, token_ids: bool = True) -> AsyncGenerator[TextChunk]:
        body = {
            "prompt": list(request.prompt_ids),
            "stream": True,
            **request.params,
            "aptjax_timings": request.slo_ttft_ms is not None,
            "return_token_ids": token_ids,
        }
        body |= {
            k: v for k, v in (("slo_ttft_ms", request.slo_ttft_ms), ("slo_tbt_ms", request.slo_tbt_ms)) if v is not None
        }
        done = False
        try:
            async with self._session.post(self._base + "/v1/completions", json=body) as response:
                if response.status != 200:
                    raise Refused(str(response.status), (await response.text())[:200])
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    if line == b"data: [DONE]\n":
                        done = True
                        continue
                    yield self._chunk(json.loads(line[5:]), token_ids)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Refused("connection", type(error).__name__) from None
        if not done:
            raise Refused("cut off")

    async def round_trip(self, prompt_ids: Sequence[int]) -> PromptText:
        """Return what `/detokenize` makes of a prompt, and `/tokenize` of that.

        Raises:
            Refused: one of them answered with an error.
        """
        text = (await self._post("/detokenize", {"tokens": list(prompt_ids)}))["prompt"]
        return PromptText(text, tuple((await self._post("/tokenize", {"prompt": text}))["tokens"]))

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            async with self._session.post(self._base + path, json=body) as response:
                if response.status != 200:
                    raise Refused(str(response.status), (await response.text())[:200])
                return await response.json()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Refused("connection", type(error).__name__) from None

    @staticmethod
    def _chunk(event: Any, token_ids: bool) -> TextChunk:
        if "error" in event:
            raise Refused("error", str(event["error"].get("code")))
        choice = event["choices"][0]
        piece = TextChunk(text=choice["text"], finish_reason=choice["finish_reason"])
        if token_ids:
            piece.token_ids = choice["token_ids"]
        # Without ids every event is one token, or several that came together.
        piece.num_tokens = len(choice["token_ids"]) if token_ids else 1
        if "aptjax" in choice:
            piece.attained = choice["aptjax"]["slo"]["attained"]
        return piece


class GrpcEndpoint:
    """`aptjax.v1.AptServe`."""

    def __init__(self, client: AsyncAptClient) -> None:
        self._client = client

    async def stream(self, request: LoadRequest, *, token_ids: bool = True) -> AsyncGenerator[TextChunk]:
        call = self._client.generate(
            request.prompt_ids, slo_ttft_ms=request.slo_ttft_ms, slo_tbt_ms=request.slo_tbt_ms, **request.params
        )
        ended = False
        try:
            async for message in call:
                piece = TextChunk(
                    num_tokens=len(message.token_ids),
                    token_ids=list(message.token_ids),
                    text=message.text,
                )
                if message.HasField("finish"):
                    ended = True
                    reason = pb.FinishReason.Name(message.finish.reason)
                    piece.finish_reason = reason.removeprefix("FINISH_REASON_").lower()
                    piece.attained = message.finish.slo.attained
                yield piece
        except grpc.aio.AioRpcError as error:
            raise Refused(error.code().name, error.details() or "") from None
        finally:
            await call.aclose()
        if not ended:
            raise Refused("cut off")


class VllmEndpoint:
    """`vllm.grpc.engine.VllmEngine`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        self._num_sent = 0

    async def stream(self, request: LoadRequest, *, token_ids: bool = True) -> AsyncGenerator[TextChunk]:
        message = vllm.GenerateRequest(stream=True, sampling_params=_vllm_params(request.params))
        message.tokenized.input_ids.extend(request.prompt_ids)
        objectives = (("x-slo-ttft-ms", request.slo_ttft_ms), ("x-slo-tpot-ms", request.slo_tbt_ms))
        call = self._stub.Generate(message, metadata=[(k, f"{v:g}") for k, v in objectives if v is not None])
        seen: list[int] = []
        ended = False
        try:
            async for answer in call:
                if answer.HasField("chunk"):
                    ids = list(answer.chunk.token_ids)
                    seen += ids
                    yield TextChunk(num_tokens=len(ids), token_ids=ids)
                    continue
                complete = answer.complete
                if list(complete.output_ids) != seen:
                    raise Refused("broken", "the last message repeats other tokens")
                ended = True
                yield TextChunk(token_ids=[], finish_reason=complete.finish_reason)
        except grpc.aio.AioRpcError as error:
            raise Refused(error.code().name, error.details() or "") from None
        finally:
            call.cancel()
        if not ended:
            raise Refused("cut off")


def _vllm_params(params: Mapping[str, Any]) -> Any:
    fields = dict(params)
    for name, value in fields.pop("structured_outputs", {}).items():
        if name == "choice":
            fields["choice"] = vllm.ChoiceConstraint(choices=value)
        else:
            fields["json_schema" if name == "json" else name] = value
    return vllm.SamplingParams(n=1, **fields)


class Endpoints:
    """Connections to all APIs of one server; an asynchronous context."""

    def __init__(self, http: str, grpc_address: str) -> None:
        self._http, self._grpc = http, grpc_address

    async def __aenter__(self) -> Mapping[str, Endpoint]:
        # Idle connections are closed before the server closes them.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=20)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._client = AsyncAptClient(self._grpc)
        return {
            "http": HttpEndpoint(self._session, self._http),
            "grpc": GrpcEndpoint(self._client),
            "vllm": VllmEndpoint(self._client.channel),
        }

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._client.close()

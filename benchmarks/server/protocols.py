"""The three doors of the server, for one client: the same request through each, and what comes back as the same pieces."""

import dataclasses
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

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
class Ask:
    """A request."""

    prompt_ids: tuple[int, ...]
    params: Mapping[str, Any]
    """Fields of `apt_jax.SamplingParams`."""
    slo_ttft_ms: float | None = None
    slo_tbt_ms: float | None = None


@dataclasses.dataclass(slots=True)
class Piece:
    """What one message of a stream says."""

    num_tokens: int = 0
    token_ids: list[int] | None = None
    """None: not asked for."""
    text: str | None = None
    """None: the door has no text."""
    finish_reason: str | None = None
    attained: bool | None = None
    """The server's verdict on the objectives; None: it does not say."""


class Refused(Exception):
    """A status in place of an answer, or of the rest of it.

    Attributes:
        status: an HTTP status, the name of a gRPC status, "error" for an event of an error, "connection", or "cut off" for a
            stream that ended without its end.
    """

    def __init__(self, status: str, message: str = "") -> None:
        super().__init__(f"{status}: {message}"[:200])
        self.status = status


class Door(Protocol):
    """A way to ask."""

    def ask(self, ask: Ask, *, token_ids: bool = True) -> AsyncGenerator[Piece]:
        """The answer, piece by piece. Closing the generator makes the client leave.

        Raises:
            Refused: refused, or ended by an error.
        """
        ...


class HttpDoor:
    """`POST /v1/completions`, streamed."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session, self._url = session, f"http://{address}/v1/completions"

    async def ask(self, ask: Ask, *, token_ids: bool = True) -> AsyncGenerator[Piece]:
        body = {
            "prompt": list(ask.prompt_ids),
            "stream": True,
            **ask.params,
            "aptjax_timings": ask.slo_ttft_ms is not None,
            "return_token_ids": token_ids,
        }
        body |= {k: v for k, v in (("slo_ttft_ms", ask.slo_ttft_ms), ("slo_tbt_ms", ask.slo_tbt_ms)) if v is not None}
        done = False
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    raise Refused(str(response.status), (await response.text())[:200])
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    if line == b"data: [DONE]\n":
                        done = True
                        continue
                    yield self._piece(json.loads(line[5:]), token_ids)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Refused("connection", type(error).__name__) from None
        if not done:
            raise Refused("cut off")

    @staticmethod
    def _piece(event: Any, token_ids: bool) -> Piece:
        if "error" in event:
            raise Refused("error", str(event["error"].get("code")))
        choice = event["choices"][0]
        piece = Piece(text=choice["text"], finish_reason=choice["finish_reason"])
        if token_ids:
            piece.token_ids = choice["token_ids"]
        # Without ids every event is one token, or several that came together.
        piece.num_tokens = len(choice["token_ids"]) if token_ids else 1
        if "aptjax" in choice:
            piece.attained = choice["aptjax"]["slo"]["attained"]
        return piece


class GrpcDoor:
    """`aptjax.v1.AptServe`."""

    def __init__(self, client: AsyncAptClient) -> None:
        self._client = client

    async def ask(self, ask: Ask, *, token_ids: bool = True) -> AsyncGenerator[Piece]:
        call = self._client.generate(
            ask.prompt_ids, slo_ttft_ms=ask.slo_ttft_ms, slo_tbt_ms=ask.slo_tbt_ms, **ask.params
        )
        ended = False
        try:
            async for message in call:
                piece = Piece(
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


class VllmDoor:
    """`vllm.grpc.engine.VllmEngine`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        self._num_asked = 0

    async def ask(self, ask: Ask, *, token_ids: bool = True) -> AsyncGenerator[Piece]:
        message = vllm.GenerateRequest(stream=True, sampling_params=vllm.SamplingParams(n=1, **ask.params))
        message.tokenized.input_ids.extend(ask.prompt_ids)
        objectives = (("x-slo-ttft-ms", ask.slo_ttft_ms), ("x-slo-tpot-ms", ask.slo_tbt_ms))
        call = self._stub.Generate(message, metadata=[(k, f"{v:g}") for k, v in objectives if v is not None])
        seen: list[int] = []
        ended = False
        try:
            async for answer in call:
                if answer.HasField("chunk"):
                    ids = list(answer.chunk.token_ids)
                    seen += ids
                    yield Piece(num_tokens=len(ids), token_ids=ids)
                    continue
                complete = answer.complete
                if list(complete.output_ids) != seen:
                    raise Refused("broken", "the last message repeats other tokens")
                ended = True
                yield Piece(token_ids=[], finish_reason=complete.finish_reason)
        except grpc.aio.AioRpcError as error:
            raise Refused(error.code().name, error.details() or "") from None
        finally:
            call.cancel()
        if not ended:
            raise Refused("cut off")


class Doors:
    """All doors of one server, opened; an asynchronous context."""

    def __init__(self, http: str, grpc_address: str) -> None:
        self._http, self._grpc = http, grpc_address

    async def __aenter__(self) -> Mapping[str, Door]:
        # Idle connections are given up before the server does it.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=20)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._client = AsyncAptClient(self._grpc)
        return {
            "http": HttpDoor(self._session, self._http),
            "grpc": GrpcDoor(self._client),
            "vllm": VllmDoor(self._client.channel),
        }

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._client.close()

"""Completes prompts with an engine in this process or with a server."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import grpc

from apt_jax.config import EngineConfig
from apt_jax.errors import InvalidRequestError, counted
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.builder import build_engine
from apt_jax.frontend.components import EngineComponents
from apt_jax.text.chat import Message
from serve.cli.completer import Completer, TextChunk, without_slo
from serve.cli.http_completer import open_http
from serve.cli.options import access, engine_config, read_api_key
from serve.cli.output import starting_bars
from serve.cli.server_chat import ServerChat, fetch_chat
from serve.client import HTTP_SCHEMES, AsyncAptClient
from serve.grpc_api import messages
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from serve.protos.words import cache_kind_name, finish_reason_name


class LocalCompleter:
    """Completes prompts with an engine in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @property
    def has_chat(self) -> bool:
        return self._engine.parts.chat_template is not None

    async def stream(self, prompt: str | Sequence[Message], **fields: Any) -> AsyncGenerator[TextChunk]:
        parts, given = self._engine.parts, {"prompt": prompt}
        if not isinstance(prompt, str):
            given = {"prompt_token_ids": await asyncio.to_thread(parts.chat_prompt, prompt)}
        sampling, slo = without_slo(fields)
        stream = self._engine.submit(parts.build_request(**given, params=sampling, **slo))
        num_tokens = 0
        try:
            async for delta in stream:
                num_tokens += len(delta.token_ids)
                message = messages.response(delta, 0, num_tokens)
                yield TextChunk(text=delta.text, finish=message.finish if delta.finished else None)
        finally:
            stream.cancel()

    async def max_model_len(self) -> int:
        return self._engine.parts.limits.max_model_len


class RemoteCompleter:
    """Completes prompts with a running server, over gRPC.

    Args:
        client: client of the server.
        chat: tokenizer and chat template of the server; None: only text prompts can be completed.
    """

    def __init__(self, client: AsyncAptClient, chat: ServerChat | None = None) -> None:
        self._client, self._chat = client, chat

    @property
    def has_chat(self) -> bool:
        return self._chat is not None

    async def stream(self, prompt: str | Sequence[Message], **fields: Any) -> AsyncGenerator[TextChunk]:
        given: str | list[int]
        if isinstance(prompt, str):
            given = prompt
        else:
            assert self._chat is not None
            given = await asyncio.to_thread(self._chat.prompt, prompt)
        call = self._client.generate(given, **fields)
        try:
            async with contextlib.aclosing(call):
                async for message in call:
                    finish = message.finish if message.HasField("finish") else None
                    yield TextChunk(text=message.text, finish=finish)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            field, _, message = (error.details() or "").partition(": ")
            raise InvalidRequestError(field, message) from None

    async def max_model_len(self) -> int:
        return (await self._client.stats()).max_model_len


@contextlib.asynccontextmanager
async def open_completer(args: Any, *, chat: bool = False) -> AsyncIterator[Completer]:
    """Open a completer for the server given by `--target`, or else for an engine built from the engine flags.

    Args:
        args: arguments of the command.
        chat: True to also fetch the chat template of a gRPC server.
    """
    if args.target is not None and args.target.startswith(HTTP_SCHEMES):
        key = read_api_key(args.api_key_file)
        async with open_http(args.target, model=args.model, api_key=key, tls_ca=args.tls_ca) as completer:
            yield completer
        return
    if args.target is not None:
        async with AsyncAptClient(args.target, **access(args)) as client:
            template = await fetch_chat(client) if chat else None
            try:
                yield RemoteCompleter(client, template)
            finally:
                if template is not None:
                    template.close()
        return
    quiet = getattr(args, "quiet", False)
    engine = AsyncEngine(_build(engine_config(args), warm_up=not args.no_warm_up, quiet=quiet))
    try:
        yield LocalCompleter(engine)
    finally:
        await engine.shutdown()


def _build(config: EngineConfig, *, warm_up: bool, quiet: bool) -> EngineComponents:
    """Build an engine in this thread, so that Ctrl-C interrupts the build; the event loop has no other work yet."""
    bars = starting_bars(quiet=quiet)
    try:
        return build_engine(config, warm_up=warm_up, calibrate=False, progress=bars)
    finally:
        bars.close()


def verdict(finish: pb.Finish) -> str:
    """Summarize a completion in one line."""
    usage, timings, slo = finish.usage, finish.timings, finish.slo
    parts = [
        f"{usage.prompt_tokens} prompt and {usage.completion_tokens} output tokens",
        f"ended by {finish_reason_name(finish.reason)}",
    ]
    if timings.HasField("ttft_ms"):
        parts.append(f"TTFT {timings.ttft_ms:.1f} ms")
    if timings.HasField("p99_tbt_ms"):
        parts.append(f"P99 TBT {timings.p99_tbt_ms:.1f} ms")
    if any(map(slo.HasField, ("ttft_ms", "tbt_ms", "e2e_ms"))):
        parts.append(f"objectives {'attained' if slo.attained else 'missed'}")
    if kind := cache_kind_name(finish.cache_kind):
        parts.append(f"{kind} cache")
    if finish.num_preemptions:
        parts.append(f"preempted {counted(finish.num_preemptions, 'time')}")
    return ", ".join(parts)

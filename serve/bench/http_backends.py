"""Backend for streamed completions and chat completions of any OpenAI-compatible server.

Tokens are counted from the usage in every chunk, which servers send on request (vLLM's `continuous_usage_stats`).
Without it, a chunk with text counts as one token, and the remaining tokens of the final usage are added to the last
chunk.
"""

import contextlib
import json
import ssl
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from apt_jax.errors import ConfigError, one_line
from serve.bench.backends import RequestFailed, StreamEvent, Target, random_token_ids
from serve.bench.load import BenchRequest
from serve.client import NO_KEY
from serve.errors import CommandError
from serve.slo_headers import TIER_OF_CLASS

_OPEN_TIMEOUT = aiohttp.ClientTimeout(total=10)
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)
_WORDS = _TEXT.split()


class HttpBackend:
    """See `serve.bench.backends.Backend`; created by `open`."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, chat: bool) -> None:
        self._session, self._target, self._chat = session, target, chat
        self._base = target.address.rstrip("/").removesuffix("/v1")
        self._tokens: list[int] = []
        self._tokens_per_word, self._extra_tokens = 1.0, 0
        self.model, self.max_model_len = target.model or "", None

    @classmethod
    async def open(cls, target: Target, *, chat: bool) -> "HttpBackend":
        headers = {} if target.api_key is None else {"authorization": f"Bearer {target.api_key}"}
        # Drop idle connections before servers do (uvicorn: after 5 s), because that could lose a request.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4, ssl=_tls(target))
        session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None))
        backend = cls(session, target, chat)
        try:
            await backend._ask_model()
            await backend._measure_words()
        except BaseException as error:
            await session.close()
            if isinstance(error, aiohttp.ClientError | TimeoutError | ValueError):
                why = one_line(str(getattr(error, "os_error", error))) or "no answer"
                raise CommandError(f"{target.address}: {why} (--target)") from None
            raise
        return backend

    async def _ask_model(self) -> None:
        """Ask the server for the model's name and maximum length.

        If `model` is set, a server that does not list its models is accepted.

        Raises:
            CommandError: the server lists no models, and `model` is not set.
        """
        async with self._session.get(f"{self._base}/v1/models", timeout=_OPEN_TIMEOUT) as response:
            answer = await _json(response)
        models = answer.get("data") if isinstance(answer, dict) else None
        if response.status != 200 or not models:
            if self.model:
                return
            if response.status == 401:
                raise CommandError(f"{self._base}: 401: {NO_KEY}")
            why = f"{response.status} {_error_text(answer)}"
            raise CommandError(f"{self._base}/v1/models names no model: {why} (--target, --model)")
        entry = next((m for m in models if m.get("id") == self.model), models[0])
        self.model = self.model or str(entry["id"])
        longest = entry.get("max_model_len")
        self.max_model_len = longest if isinstance(longest, int) else None

    async def _measure_words(self) -> None:
        """Measure tokens per word with the server's `/tokenize` (vLLM and apt-jax have it); otherwise a word counts as
        one token."""
        tokens = await self._tokenize({"prompt": _TEXT, "add_special_tokens": False})
        if not tokens:
            return
        self._tokens = sorted(set(tokens))
        self._tokens_per_word = len(tokens) / len(_WORDS)
        if self._chat:
            messages = [{"role": "user", "content": _TEXT}]
            self._extra_tokens = max(0, len(await self._tokenize({"messages": messages})) - len(tokens))

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        body = {"model": self.model, **body}
        url = f"{self._base}/tokenize"
        async with self._session.post(url, json=body, timeout=_OPEN_TIMEOUT) as response:
            answer = await _json(response)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tokens if isinstance(tokens, list) else []

    def _prompt(self, request: BenchRequest) -> Any:
        """Return the prompt as text, token ids or messages."""
        prompt = request.prompt
        if prompt is None and not self._chat and self._target.vocab_size is not None:
            return random_token_ids(request, self._target.vocab_size)
        if prompt is None:
            if self._tokens and not self._chat:
                return [self._tokens[i] for i in request.picks(request.prompt_tokens, len(self._tokens))]
            wanted = (request.prompt_tokens - self._extra_tokens) / self._tokens_per_word
            picks = request.picks(max(1, round(wanted)), len(_WORDS), self._tokens_per_word)
            prompt = " ".join(_WORDS[i] for i in picks)
        is_messages = not isinstance(prompt, str) and isinstance(prompt[0], dict)
        if is_messages and not self._chat:
            raise ConfigError("messages need --backend openai-chat (--prompts)")
        if self._chat and not is_messages:
            if not isinstance(prompt, str):
                raise ConfigError("token ids cannot be sent as chat (--prompts, --backend)")
            return [{"role": "user", "content": prompt}]
        return prompt

    def prepare(self, request: BenchRequest) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "messages" if self._chat else "prompt": self._prompt(request),
            "max_tokens": request.max_tokens,
            "temperature": self._target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if self._target.ignore_eos:
            body["ignore_eos"] = True
        if request.slo_class is not None:
            body["service_tier"] = TIER_OF_CLASS[request.slo_class]
        if request.session is not None:
            body["prompt_cache_key"] = request.session
        return json.dumps(body).encode()

    async def send(self, prepared: bytes) -> AsyncGenerator[StreamEvent]:
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        headers = {"content-type": "application/json", **self._target.slo_headers()}
        seen, done = 0, False
        try:
            async with self._session.post(self._base + path, data=prepared, headers=headers) as response:
                if response.status != 200:
                    text = NO_KEY if response.status == 401 else _error_text(await _json(response))
                    raise RequestFailed(str(response.status), text)
                # Read to the end, so that the connection can be used again.
                async with contextlib.aclosing(_events(response)) as events:
                    async for data in events:
                        if data == b"[DONE]":
                            done = True
                            continue
                        event = _stream_event(data, seen)
                        seen += event.num_tokens
                        yield event
        except (aiohttp.ClientError, ConnectionError) as error:
            raise RequestFailed("connection", one_line(str(error)) or "lost") from None
        if not done:
            raise RequestFailed("broken", "the stream ended before data: [DONE]")

    async def close(self) -> None:
        await self._session.close()


def _tls(target: Target) -> ssl.SSLContext | bool:
    if target.tls_ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=target.tls_ca)
    except OSError as error:  # also for files without a certificate
        why = error.strerror or "no PEM certificate"
        raise ConfigError(f"{target.tls_ca}: cannot be used ({why}) (--tls-ca)") from None


async def _json(response: aiohttp.ClientResponse) -> Any:
    """Return the parsed body, or its text if it is not JSON."""
    text = await response.text(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _error_text(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return one_line(str(message))[:300]


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yield the data of each server-sent event; in OpenAI's streams it is one line."""
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _stream_event(data: bytes, seen: int) -> StreamEvent:
    """Parse a chunk that arrives after `seen` tokens.

    Raises:
        RequestFailed: the chunk is not JSON, or has an error.
    """
    try:
        chunk = json.loads(data)
    except ValueError:
        raise RequestFailed("broken", f"not JSON: {data[:60]!r}") from None
    if not isinstance(chunk, dict) or "error" in chunk:
        raise RequestFailed("error", _error_text(chunk))
    event = StreamEvent()
    text = None
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text = text or choice.get("text") or delta.get("content")
        text = text or delta.get("reasoning_content") or delta.get("reasoning")
        event.finish_reason = choice.get("finish_reason") or event.finish_reason
    usage = chunk.get("usage")
    if usage:
        event.num_tokens = max(0, (usage.get("completion_tokens") or 0) - seen)
        event.prompt_tokens = usage.get("prompt_tokens")
        event.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    elif text:
        event.num_tokens = 1
    return event

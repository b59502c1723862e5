"""Completes prompts with any server that offers OpenAI's HTTP API."""

import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import aiohttp

from apt_jax.errors import ConfigError, InvalidRequestError, one_line
from apt_jax.text.chat import Message
from serve.cli.completer import TextChunk, without_slo
from serve.client import NO_KEY
from serve.errors import CommandError
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from serve.protos.words import cache_kind, finish_reason

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)
_DEFAULT_LEN = 4096
"""Assumed context length, in tokens, of servers that do not report one."""


class HttpCompleter:
    """Completes prompts with a running server, over HTTP; created by `open_http`."""

    def __init__(self, session: aiohttp.ClientSession, base: str, model: dict[str, Any]) -> None:
        self._session, self._base = session, base
        self._model, self._max_len = str(model["id"]), model.get("max_model_len")
        self.has_chat = False

    async def find_template(self) -> None:
        """Set `has_chat`: False if the server reports that the model has no chat template, else True."""
        probe = {"model": self._model, "messages": [{"role": "user", "content": "Hi"}]}
        async with self._session.post(f"{self._base}/tokenize", json=probe) as response:
            text = await response.text(errors="replace")
        self.has_chat = not (response.status == 400 and "chat template" in text)

    async def stream(self, prompt: str | Sequence[Message], **fields: Any) -> AsyncGenerator[TextChunk]:
        is_chat = not isinstance(prompt, str)
        sampling, slo = without_slo(fields)
        body = {
            "model": self._model,
            "messages" if is_chat else "prompt": prompt,
            **sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
            "aptjax_timings": True,
        }
        if given := {name.removeprefix("slo_"): value for name, value in slo.items() if value is not None}:
            body["slo"] = given
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        finish = pb.Finish()
        try:
            async with self._session.post(self._base + path, json=body) as response:
                if response.status != 200:
                    raise refused(response.status, await response.text(errors="replace"))
                async with contextlib.aclosing(_events(response)) as events:
                    async for event in events:
                        for choice in event.get("choices") or ():
                            text = (choice.get("delta") or {}).get("content") if is_chat else choice.get("text")
                            if choice.get("finish_reason"):
                                _note(finish, choice)
                            if text:
                                yield TextChunk(text=text)
                        if usage := event.get("usage"):
                            finish.usage.prompt_tokens = usage["prompt_tokens"]
                            finish.usage.completion_tokens = usage["completion_tokens"]
        except (aiohttp.ClientError, ConnectionError) as error:
            raise CommandError(f"{self._base}: {one_line(str(error)) or 'the connection was lost'}") from None
        yield TextChunk(text="", finish=finish)

    async def max_model_len(self) -> int:
        return self._max_len if isinstance(self._max_len, int) else _DEFAULT_LEN


@contextlib.asynccontextmanager
async def open_http(
    url: str, *, model: str | None, api_key: str | None, tls_ca: str | None
) -> AsyncIterator[HttpCompleter]:
    """Connect to a server.

    Args:
        url: address of the server, with or without ``/v1``.
        model: name of one of its models; None: the first.
        api_key: API key that is sent with every call; None: no key.
        tls_ca: PEM file of the CAs that verify the server's certificate; None: the system's CAs.

    Raises:
        CommandError: the server does not respond, or does not list its models.
        ConfigError: the server does not have this model, or `tls_ca` cannot be used.
    """
    base = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    connector = aiohttp.TCPConnector(ssl=tls(tls_ca))
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=_TIMEOUT) as session:
        try:
            async with session.get(f"{base}/v1/models") as response:
                text = await response.text(errors="replace")
            if response.status != 200:
                raise refused(response.status, text)
            models = json.loads(text)["data"]
            chosen = next((m for m in models if model in (None, m["id"])), None)
            if chosen is None:
                names = ", ".join(str(m["id"]) for m in models)
                raise ConfigError(f"model {model!r:.80} is not served at {base}; it has {names:.300} (--model)")
            completer = HttpCompleter(session, base, chosen)
            await completer.find_template()
        except (aiohttp.ClientError, ConnectionError) as error:
            why = one_line(str(getattr(error, "os_error", error))) or "no answer"
            raise CommandError(f"{base}: {why} (--target)") from None
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError):
            raise CommandError(f"{base}/v1/models lists no models: this is not OpenAI's API (--target)") from None
        yield completer


async def speaks_openai(url: str) -> bool:
    """Return whether a server at this address answers like OpenAI's API, be it only with an error. Sends no key."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            answer = json.loads(await response.text(errors="replace"))
    except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
        return False
    return isinstance(answer, dict) and bool({"data", "error"} & answer.keys())


def tls(tls_ca: str | None) -> ssl.SSLContext | bool:
    if tls_ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=tls_ca)
    except OSError as error:  # also raised if the file is not a certificate
        raise ConfigError(f"{tls_ca}: cannot be used ({error.strerror or 'no PEM certificate'}) (--tls-ca)") from None


def refused(status: int, text: str) -> Exception:
    """Return the exception for an HTTP error response."""
    try:
        error = json.loads(text)["error"]
        message, field = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, field = text, None
    if status == 401:
        return CommandError(f"401: {NO_KEY}")
    if status == 400 and isinstance(field, str):
        return InvalidRequestError(field, message.removeprefix(f"{field}: "))
    return CommandError(f"{status}: {one_line(message):.300}")


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any]]:
    """Yield the JSON objects of server-sent events until `[DONE]`; in OpenAI's streams each event is one line.

    Raises:
        CommandError: the server sends an error or data that is not JSON, or ends the stream early.
    """
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise CommandError(f"the server sent data that is not JSON: {data[:60]!r}") from None
        if "error" in event:
            raise refused(0, data.decode(errors="replace"))
        yield event
    raise CommandError("the server ended the response early")


def _note(finish: pb.Finish, choice: dict[str, Any]) -> None:
    """Record how an output ended, and the timings if the server is apt-jax."""
    finish.reason = finish_reason(choice["finish_reason"])
    told = choice.get("aptjax")
    if not told:
        return
    for message, name in ((finish.timings, "timings"), (finish.slo, "slo")):
        for field in message.DESCRIPTOR.fields:
            if (value := told[name].get(field.name)) is not None:
                setattr(message, field.name, value)
    finish.cache_kind = cache_kind(told["cache_kind"])
    finish.num_preemptions = told["num_preemptions"]

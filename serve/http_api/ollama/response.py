"""Responses of Ollama's API, streamed as one JSON object per line or sent as a single object."""

import datetime
from collections.abc import Sequence
from typing import Any

from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.embedding import embedding
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.request import RequestMetrics
from serve.compact_json import json_bytes
from serve.errors import RequestFailedError
from serve.http_api.embeddings import EmbeddingsResponse
from serve.http_api.errors import HttpError, ollama_body
from serve.http_api.messages.response import object_of_arguments
from serve.http_api.ollama.request import OllamaCall
from serve.http_api.openai_response import CompletionResponseBuilder
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, ReasoningText

STREAM_TYPE = "application/x-ndjson"

Json = dict[str, Any]


class OllamaResponse:
    """Builds the response to one call; implements `serve.http_api.endpoints.ResponseBuilder`.

    Args:
        parts: the engine's components.
        call: the call from `serve.http_api.ollama.request`.
    """

    def __init__(self, parts: EngineComponents, call: OllamaCall) -> None:
        self._call = call
        self._chat = CompletionResponseBuilder(parts, call.chat)
        self._parser = call.chat.output.parser()
        self._open: tuple[CallStart, list[str]] | None = None
        """The tool call whose arguments are not complete yet, and the pieces of its arguments."""
        self._num_tokens = 0
        self._logprobs: list[Json] = []
        """Log probabilities of tokens that have not been sent yet."""
        self._last: OutputDelta | None = None

    def events(self, index: int, delta: OutputDelta) -> bytes:
        del index  # there is one request
        said = self._push(delta)
        return _line({**self._head(), **said, "done": False}) if said else b""

    def end(self) -> bytes:
        return _line({**self._head(), **self._said("", "", []), **self._rest(), **self._ending()})

    def failure(self, error: HttpError) -> bytes:
        return _line(ollama_body(error))

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        (delta,) = deltas
        said = self._push(delta, whole=True)
        return json_bytes({**self._head(), **said, **self._rest(), **self._ending()})

    # --- output

    def _push(self, delta: OutputDelta, *, whole: bool = False) -> Json:
        """Process new output. Returns the response fields for it; empty if it has no new text or call and `whole` is
        false."""
        if delta.finish_reason not in (None, "stop", "length"):
            raise RequestFailedError("the request was aborted")
        self._last = delta
        self._num_tokens += len(delta.token_ids)
        if delta.logprobs is not None and not self._call.loads:
            self._logprobs += self._chat.chat_logprobs(0, delta.token_ids, delta.logprobs)
        content, thinking, calls = [], [], []
        for event in () if self._call.loads else self._parser.push(delta.text, delta.finished):
            match event:
                case ContentText(text):
                    content.append(text)
                case ReasoningText(text):
                    thinking.append(text)
                case CallStart():
                    calls += self._closed()
                    self._open = event, []
                case CallArguments(_, text):
                    assert self._open is not None
                    self._open[1].append(text)
        if delta.finished:
            calls += self._closed()
        if not (content or thinking or calls or whole):
            return {}
        return self._said("".join(content), "".join(thinking), calls) | self._rest()

    def _closed(self) -> list[Json]:
        """End the open tool call. Returns a list of that call; empty if no call is open."""
        if self._open is None:
            return []
        (start, pieces), self._open = self._open, None
        arguments = object_of_arguments("".join(pieces))
        return [{"id": start.id, "function": {"index": start.index, "name": start.name, "arguments": arguments}}]

    def _said(self, content: str, thinking: str, calls: list[Json]) -> Json:
        thought = {"thinking": thinking} if thinking else {}
        if self._call.shape == "generate":
            return {"response": content, **thought}
        message = {"role": "assistant", "content": content, **thought}
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def _rest(self) -> Json:
        """Return the field with the log probabilities that have not been sent yet; empty if all have been sent."""
        logprobs, self._logprobs = self._logprobs, []
        return {"logprobs": logprobs} if logprobs else {}

    # --- the rest

    def _head(self) -> Json:
        now = datetime.datetime.now(datetime.UTC)
        return {"model": self._call.model, "created_at": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}

    def _ending(self) -> Json:
        if self._call.loads:
            return {"done": True, "done_reason": "load"}
        last = self._last
        assert last is not None
        return {
            "done": True,
            "done_reason": last.finish_reason,
            **durations(last.metrics),
            "prompt_eval_count": int(self._call.requests[0].prompt_token_ids.size),
            "eval_count": self._num_tokens,
        }


class EmbedResponse(EmbeddingsResponse):
    """Builds the response of ``/api/embed``, which is never streamed."""

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        """See `serve.http_api.endpoints.ResponseBuilder`."""
        return json_bytes(
            {
                "model": self._call.model,
                "embeddings": [self._vector(delta) for delta in deltas],
                "total_duration": max(durations(delta.metrics)["total_duration"] for delta in deltas),
                "load_duration": 0,
                "prompt_eval_count": sum(request.prompt_token_ids.size for request in self._call.requests),
            }
        )

    def _vector(self, delta: OutputDelta) -> list[float]:
        if delta.pooled is None:
            raise RequestFailedError(delta.error or "the request was aborted")
        return embedding(delta.pooled, dimensions=self._call.dimensions, normalize=True).tolist()


class OldEmbedResponse(EmbedResponse):
    """Builds the response of ``/api/embeddings``, which has the embedding of one text."""

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        """See `serve.http_api.endpoints.ResponseBuilder`."""
        return json_bytes({"embedding": self._vector(deltas[0])})


def durations(metrics: RequestMetrics) -> dict[str, int]:
    """Return the durations of a finished request in nanoseconds: in total, for its prompt and for its output."""
    begun, ended = metrics.arrival_s, metrics.finished_s
    times = metrics.token_times_s
    scheduled = begun if metrics.first_scheduled_s is None else metrics.first_scheduled_s
    first = times[0] if times else scheduled
    last = first if ended is None else ended
    return {
        "total_duration": _ns(last - begun),
        "load_duration": 0,
        "prompt_eval_duration": _ns(first - scheduled),
        "eval_duration": _ns(last - first),
    }


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _line(value: Json) -> bytes:
    return json_bytes(value) + b"\n"

"""Responses of Anthropic's Messages API, streamed as events or sent as one body.

A response is a list of blocks: reasoning (`thinking`), text (`text`) and tool calls (`tool_use`). At most one block is
open at a time.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from serve.compact_json import json_bytes
from serve.http_api.errors import HttpError, anthropic_body
from serve.http_api.item_stream import ItemStream, check_end, num_written
from serve.http_api.messages.request import USED_TIERS, MessagesCall
from serve.http_api.openai_response import timings_payload
from serve.http_api.tool_calls.events import CallStart, OutputEvent, ReasoningText

Json = dict[str, Any]


class MessagesResponse:
    """Builds the response to one call; implements `serve.http_api.endpoints.ResponseBuilder`.

    Args:
        parts: the engine's components.
        call: the call from `serve.http_api.messages.request.read_call`.
    """

    def __init__(self, parts: EngineComponents, call: MessagesCall) -> None:
        self._parts, self._call = parts, call
        self._stream = ItemStream(call.chat, lambda event, index: _Block(event, index, call.hides_thinking))

    def events(self, index: int, delta: OutputDelta) -> bytes:
        del index  # there is one request
        self._push(delta)
        return self._stream.taken()

    def end(self) -> bytes:
        end: Json = {"delta": self._stop(), "usage": self._usage()}
        if self._call.chat.timings and self._stream.last is not None:
            end["aptjax"] = timings_payload(self._stream.last)
        self._stream.emit("message_delta", **end)
        self._stream.emit("message_stop")
        return self._stream.taken()

    def failure(self, error: HttpError) -> bytes:
        return b"event: error\ndata: %s\n\n" % json_bytes(anthropic_body(error))

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        (delta,) = deltas
        self._push(delta)
        made = {**self._message(), "content": self._stream.items, **self._stop(), "usage": self._usage()}
        if self._call.chat.timings:
            made["aptjax"] = timings_payload(delta)
        return json_bytes(made)

    def _push(self, delta: OutputDelta) -> None:
        """Process new output."""
        check_end(delta)
        self._stream.num_cached = delta.metrics.num_cached_tokens
        if self._stream.last is None:
            self._stream.last = delta
            begun = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
            self._stream.emit("message_start", message={**begun, "usage": self._usage()})
        self._stream.take(delta)
        if delta.finished:
            self._stream.end()

    def _message(self) -> Json:
        call = self._call
        return {"id": call.call_id, "type": "message", "role": "assistant", "model": call.chat.model}

    def _stop(self) -> Json:
        """Return the fields `stop_reason` and `stop_sequence` of the response."""
        last = self._stream.last
        assert last is not None
        if last.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if any(block["type"] == "tool_use" for block in self._stream.items):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> Json:
        """Return the token counts. As in Anthropic's API, `input_tokens` includes neither tokens found in the cache nor,
        if the body has `cache_control`, tokens written to it."""
        prompt, last = int(self._call.requests[0].prompt_token_ids.size), self._stream.last
        written = num_written(self._parts, prompt, last.metrics) if self._call.marks_cache and last is not None else 0
        return {
            "input_tokens": prompt - self._stream.num_cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": self._stream.num_cached,
            "output_tokens": self._stream.num_tokens,
            "service_tier": USED_TIERS[self._call.chat.service_tier],
        }


class _Block:
    """A content block of the response; implements `serve.http_api.item_stream.Item`."""

    def __init__(self, event: OutputEvent, index: int, hides_thinking: bool) -> None:
        self._index, self._pieces = index, []
        self._hides = hides_thinking and isinstance(event, ReasoningText)
        match event:
            case CallStart(_, call_id, name):
                self._block: Json = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                self._delta = ("input_json_delta", "partial_json")
            case ReasoningText():
                self._block = {"type": "thinking", "thinking": "", "signature": ""}
                self._delta = ("thinking_delta", "thinking")
            case _:
                self._block = {"type": "text", "text": ""}
                self._delta = ("text_delta", "text")

    def begin(self) -> Iterator[Json]:
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(self._block)}
        if self._index == 0:
            yield {"type": "ping"}

    def grow(self, text: str) -> Iterator[Json]:
        if not self._hides:
            self._pieces.append(text)
            yield self._grown(*self._delta, text)

    def end(self, cut: bool) -> Iterator[Json]:
        if self._block["type"] == "thinking":
            yield self._grown("signature_delta", "signature", "")
        yield {"type": "content_block_stop", "index": self._index}

    def whole(self) -> Json:
        text, kind = "".join(self._pieces), self._block["type"]
        return self._block | ({"input": object_of_arguments(text)} if kind == "tool_use" else {kind: text})

    def _grown(self, kind: str, name: str, text: str) -> Json:
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def object_of_arguments(arguments: str) -> Json:
    """Return the arguments of a tool call as an object; empty if they are not a valid JSON object, for example because
    the output was cut off at its maximum length."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

"""Answers of Anthropic's Messages API: events of a stream, or the whole.

An answer is a list of blocks: what the model thought (`thinking`), what it says (`text`), the tools it uses
(`tool_use`). One block is open at a time.
"""

import json
from collections.abc import Sequence
from typing import Any

from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from serve.compact_json import json_bytes
from serve.errors import RequestFailedError
from serve.http_api.errors import HttpError, anthropic_body
from serve.http_api.messages.request import USED_TIERS, MessagesCall
from serve.http_api.openai_response import timings_payload
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, OutputEvent, ReasoningText

Json = dict[str, Any]


class MessagesResponse:
    """Builds the answer to one call, a `serve.http_api.endpoints.ResponseBuilder`.

    Args:
        parts: of the engine.
        call: from `serve.http_api.messages.request.read_call`.
    """

    def __init__(self, parts: EngineComponents, call: MessagesCall) -> None:
        del parts
        self._call = call
        self._parser = call.chat.output.parser()
        self._events: list[bytes] = []
        """Not taken yet."""
        self._blocks: list[Json] = []
        """The last one is open if `_is_open`; its text is in `_pieces`."""
        self._is_open = False
        self._pieces: list[str] = []
        self._uses_tools = False
        self._num_tokens = self._num_cached = 0
        self._last: OutputDelta | None = None

    def events(self, index: int, delta: OutputDelta) -> bytes:
        del index  # there is one request
        self._push(delta)
        return self._taken()

    def end(self) -> bytes:
        end: Json = {"delta": self._stop(), "usage": self._usage()}
        if self._call.chat.timings and self._last is not None:
            end["aptjax"] = timings_payload(self._last)
        self._emit("message_delta", **end)
        self._emit("message_stop")
        return self._taken()

    def failure(self, error: HttpError) -> bytes:
        return _event("error", anthropic_body(error))

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        (delta,) = deltas
        self._push(delta)
        made = {**self._message(), "content": self._blocks, **self._stop(), "usage": self._usage()}
        if self._call.chat.timings:
            made["aptjax"] = timings_payload(delta)
        return json_bytes(made)

    # --- output

    def _push(self, delta: OutputDelta) -> None:
        """Take new output."""
        if delta.finish_reason not in (None, "stop", "length"):
            raise RequestFailedError("the request was aborted")
        first, self._last = self._last is None, delta
        self._num_cached = delta.metrics.num_cached_tokens
        if first:
            begun = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
            self._emit("message_start", message={**begun, "usage": self._usage()})
        self._num_tokens += len(delta.token_ids)
        for event in self._parser.push(delta.text, delta.finished):
            self._take(event)
        if delta.finished:
            self._close()

    def _take(self, event: OutputEvent) -> None:
        match event:
            case ContentText(text):
                self._grow({"type": "text", "text": ""}, text, {"type": "text_delta", "text": text})
            case ReasoningText(text):
                shown = "" if self._call.hides_thinking else text
                delta = {"type": "thinking_delta", "thinking": shown} if shown else None
                self._grow({"type": "thinking", "thinking": "", "signature": ""}, shown, delta)
            case CallStart(_, call_id, name):
                self._uses_tools = True
                self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                self._pieces.append(text)
                self._delta({"type": "input_json_delta", "partial_json": text})

    def _grow(self, block: Json, text: str, delta: Json | None) -> None:
        """Add to the open block if it has this type, else to a new one."""
        if not self._is_open or self._blocks[-1]["type"] != block["type"]:
            self._begin(block)
        self._pieces.append(text)
        if delta is not None:
            self._delta(delta)

    def _delta(self, delta: Json) -> None:
        """Tell of more of the open block."""
        self._emit("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _begin(self, block: Json) -> None:
        self._close()
        self._is_open = True
        self._blocks.append(block)
        self._emit("content_block_start", index=len(self._blocks) - 1, content_block=dict(block))
        if len(self._blocks) == 1:
            self._emit("ping")

    def _close(self) -> None:
        """End the open block, if there is one."""
        if not self._is_open:
            return
        text, self._pieces, self._is_open = "".join(self._pieces), [], False
        block = self._blocks[-1]
        match block["type"]:
            case "tool_use":
                block["input"] = object_of_arguments(text)
            case "thinking":
                block["thinking"] = text
                self._delta({"type": "signature_delta", "signature": ""})
            case _:
                block["text"] = text
        self._emit("content_block_stop", index=len(self._blocks) - 1)

    # --- events

    def _emit(self, event: str, **fields: Any) -> None:
        if self._call.stream:
            self._events.append(_event(event, {"type": event, **fields}))

    def _taken(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events

    # --- the message

    def _message(self) -> Json:
        call = self._call
        return {"id": call.call_id, "type": "message", "role": "assistant", "model": call.chat.model}

    def _stop(self) -> Json:
        """Why the answer has ended."""
        last = self._last
        assert last is not None
        if last.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._uses_tools:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> Json:
        """Anthropic counts what came from the cache apart from the input."""
        prompt = int(self._call.requests[0].prompt_token_ids.size)
        return {
            "input_tokens": prompt - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_tokens,
            "service_tier": USED_TIERS[self._call.chat.service_tier],
        }


def _event(event: str, value: Json) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), json_bytes(value))


def object_of_arguments(arguments: str) -> Json:
    """The arguments of a call as an object; they are cut off where the answer has reached its longest."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

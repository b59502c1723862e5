"""Responses of the Responses API, streamed as events or sent as one body.

A response is a list of items: reasoning (`reasoning`), text (`message`) and tool calls (`function_call`,
`custom_tool_call`). At most one item is open at a time; deltas add to it, and the complete item is sent when it ends.
"""

import time
from collections.abc import Sequence
from typing import Any

from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from serve.compact_json import json_bytes
from serve.http_api.errors import HttpError
from serve.http_api.item_stream import ItemStream, check_end, num_written
from serve.http_api.openai_response import CompletionResponseBuilder, timings_payload
from serve.http_api.responses.request import ResponsesCall
from serve.http_api.responses.store import StoredResponse
from serve.http_api.tool_calls.events import CallStart, ContentText, OutputEvent, ReasoningText
from serve.http_api.tool_calls.other_forms import input_of

Json = dict[str, Any]


class ResponsesResponse:
    """Builds the response to one call; implements `serve.http_api.endpoints.ResponseBuilder`.

    Args:
        parts: the engine's components.
        call: the call from `serve.http_api.responses.request.read_call`.
    """

    def __init__(self, parts: EngineComponents, call: ResponsesCall) -> None:
        self._parts, self._call = parts, call
        self._chat = CompletionResponseBuilder(parts, call.chat)
        self._stream = ItemStream(call.chat, self._item, numbered=True)
        self._logprobs: list[Json] = []
        """Log probabilities of tokens that have not been sent yet; they are sent with the message's next text."""
        self._num_reasoning = 0

    def events(self, index: int, delta: OutputDelta) -> bytes:
        del index  # there is one request
        self._push(delta)
        return self._stream.taken()

    def end(self) -> bytes:
        status = self._status()
        self._stream.emit(f"response.{status}", ("response", self._ended(status)))
        return self._stream.taken()

    def failure(self, error: HttpError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        # `error` is for clients that look for OpenAI's usual error body in events, such as OpenAI's own clients.
        self._stream.emit("error", code=code, message=error.message, param=error.param, **error.body())
        self._emit_response("response.failed", "failed", {"code": code, "message": error.message})
        return self._stream.taken()

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        for delta in deltas:  # one output in pieces, so that tokens are counted for the right items
            self._push(delta)
        return self._ended(self._status())

    def _push(self, delta: OutputDelta) -> None:
        """Process new output."""
        check_end(delta)
        stream = self._stream
        if stream.last is None:
            self._emit_response("response.created", "in_progress")
            self._emit_response("response.in_progress", "in_progress")
        stream.num_cached = delta.metrics.num_cached_tokens
        if delta.logprobs is not None:
            self._logprobs += self._chat.chat_logprobs(0, delta.token_ids, delta.logprobs)

        def count(events: list[OutputEvent]) -> None:
            kinds = set(map(type, events))
            if kinds and ContentText not in kinds:  # only tokens of messages have log probabilities in a response
                self._logprobs.clear()
            if kinds == {ReasoningText}:
                self._num_reasoning += len(delta.token_ids)

        stream.take(delta, count)
        if delta.finished:
            if not stream.has_items:  # an empty output becomes a message without text
                stream.begin(ContentText(""))
            stream.end(cut=delta.finish_reason == "length")

    def _item(self, event: OutputEvent, at: int) -> "_Item":
        base_id = self._call.base_id
        match event:
            case CallStart(_, call_id, name):
                is_custom = name in self._call.chat.output.custom_tools
                item_id = f"{'ctc' if is_custom else 'fc'}_{base_id}-{at}"
                return (_CustomCall if is_custom else _FunctionCall)(item_id, at, call_id, name)
            case ReasoningText():
                return _Reasoning(f"rs_{base_id}-{at}", at)
        return _Message(f"msg_{base_id}-{at}", at, self._logprobs)

    def _emit_response(self, event: str, status: str, error: Json | None = None) -> None:
        if self._call.stream:
            self._stream.emit(event, ("response", self._response(status, error)))

    # --- the response object

    def _status(self) -> str:
        """Return the status of a finished response."""
        return (
            "incomplete"
            if self._stream.last is not None and self._stream.last.finish_reason == "length"
            else "completed"
        )

    def _ended(self, status: str) -> bytes:
        """Return the finished response, which is stored if the call asks for it."""
        body, call = self._response(status), self._call
        if call.store is not None:
            request, output = call.requests[0], [_without_logprobs(item) for item in self._stream.items]
            items = b"%s,%s" % (call.items[:-1], json_bytes(output)[1:])
            record = StoredResponse(body=body, items=items, session_id=request.session_id)
            call.store.put(request.tenant, call.call_id, record)
        return body

    def _response(self, status: str, error: Json | None = None) -> bytes:
        call, ended = self._call, status != "in_progress"
        made: Json = {
            "id": call.call_id,
            "object": "response",
            "created_at": call.chat.created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": call.chat.model,
            "output": self._stream.items,
            "usage": self._usage() if ended else None,
        }
        if call.chat.timings and self._stream.last is not None and self._stream.last.finished:
            made["aptjax"] = timings_payload(self._stream.last)
        return b"%s,%s" % (json_bytes(made)[:-1], call.facts[1:])

    def _usage(self) -> Json:
        prompt, last = int(self._call.requests[0].prompt_token_ids.size), self._stream.last
        written = 0 if last is None else num_written(self._parts, prompt, last.metrics)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._stream.num_cached, "cache_write_tokens": written},
            "output_tokens": self._stream.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": prompt + self._stream.num_tokens,
        }


def _without_logprobs(item: Json) -> Json:
    """Return an output item as an input item."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{"type": part["type"], "text": part["text"]} for part in item["content"]]}


class _Item:
    """An item of the response; implements `serve.http_api.item_stream.Item`."""

    kind = ""

    def __init__(self, item_id: str, number: int) -> None:
        self.id, self.at = item_id, {"item_id": item_id, "output_index": number}
        self.pieces: list[str] = []
        self.status = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begin(self) -> list[Json]:
        return [self._shown("added", self._fields(is_new=True))]

    def grow(self, text: str) -> list[Json]:
        self.pieces.append(text)
        return self._grown(text)

    def end(self, cut: bool) -> list[Json]:
        self.status = "incomplete" if cut else "completed"
        return [*self._ended(), self._shown("done", self._fields())]

    def whole(self) -> Json:
        return {"id": self.id, "type": self.kind, "status": self.status, **self._fields()}

    def _fields(self, *, is_new: bool = False) -> Json:
        """Return the item's fields other than id, type and status; `is_new` is true if the item has just begun."""
        raise NotImplementedError

    def _grown(self, text: str) -> list[Json]:
        """Return the events for new text."""
        raise NotImplementedError

    def _ended(self) -> list[Json]:
        """Return the closing events that precede the event with the complete item."""
        raise NotImplementedError

    def _shown(self, what: str, fields: Json) -> Json:
        item = {"id": self.id, "type": self.kind, "status": self.status, **fields}
        return {"type": f"response.output_item.{what}", "output_index": self.at["output_index"], "item": item}


class _WithPart(_Item):
    """An item with one content part."""

    event = ""

    def begin(self) -> list[Json]:
        part = {"type": "response.content_part.added", **self.at, "content_index": 0, "part": self._part()}
        return [*super().begin(), part]

    def _part(self) -> Json:
        raise NotImplementedError

    def _text_event(self, what: str, **fields: Any) -> Json:
        return {"type": f"response.{self.event}.{what}", **self.at, "content_index": 0, **fields}

    def _ended(self) -> list[Json]:
        part = self._part()
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        return [
            self._text_event("done", text=part["text"], **more),
            {"type": "response.content_part.done", **self.at, "content_index": 0, "part": part},
        ]


class _Message(_WithPart):
    kind, event = "message", "output_text"

    def __init__(self, item_id: str, number: int, waiting: list[Json]) -> None:
        super().__init__(item_id, number)
        self._logprobs: list[Json] = []
        self._waiting = waiting
        """Log probabilities to send with the next text; the list is shared with `ResponsesResponse`."""

    def _take(self) -> list[Json]:
        taken = self._waiting[:]
        self._waiting.clear()
        self._logprobs += taken
        return taken

    def _part(self) -> Json:
        logprobs = self._logprobs[:]
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}

    def _fields(self, *, is_new: bool = False) -> Json:
        return {"role": "assistant", "content": [] if is_new else [self._part()]}

    def _grown(self, text: str) -> list[Json]:
        return [self._text_event("delta", delta=text, logprobs=self._take())]

    def _ended(self) -> list[Json]:
        self._take()  # log probabilities of tokens without text, such as the last token
        return super()._ended()


class _Reasoning(_WithPart):
    kind, event = "reasoning", "reasoning_text"

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def _fields(self, *, is_new: bool = False) -> Json:
        return {"summary": [], "content": [] if is_new else [self._part()], "encrypted_content": None}

    def _grown(self, text: str) -> list[Json]:
        return [self._text_event("delta", delta=text)]


class _FunctionCall(_Item):
    kind = "function_call"

    def __init__(self, item_id: str, number: int, call_id: str, name: str) -> None:
        super().__init__(item_id, number)
        self.named = {"call_id": call_id, "name": name}

    def _fields(self, *, is_new: bool = False) -> Json:
        return {**self.named, "arguments": self.text}

    def _grown(self, text: str) -> list[Json]:
        return [{"type": "response.function_call_arguments.delta", **self.at, "delta": text}]

    def _ended(self) -> list[Json]:
        fields = {"name": self.named["name"], "arguments": self.text}
        return [{"type": "response.function_call_arguments.done", **self.at, **fields}]


class _CustomCall(_FunctionCall):
    """A call of a custom tool; its input is sent only when it is complete."""

    kind = "custom_tool_call"

    def _fields(self, *, is_new: bool = False) -> Json:
        return {**self.named, "input": "" if is_new else input_of(self.text)}

    def _grown(self, text: str) -> list[Json]:
        return []

    def _ended(self) -> list[Json]:
        event, text = "response.custom_tool_call_input", input_of(self.text)
        return [
            {"type": f"{event}.delta", **self.at, "delta": text},
            {"type": f"{event}.done", **self.at, "input": text},
        ]

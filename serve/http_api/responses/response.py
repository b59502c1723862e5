"""Answers of the Responses API: events of a stream, or the whole.

An answer is a list of items: what the model thought (`reasoning`), what it says (`message`), the functions it calls
(`function_call`). One item is open at a time; it grows by deltas, and is shown whole when the next one begins.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from serve.compact_json import json_bytes
from serve.errors import RequestFailedError
from serve.http_api.errors import HttpError
from serve.http_api.openai_response import CompletionResponseBuilder, timings_payload
from serve.http_api.responses.request import ResponsesCall
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, OutputEvent, ReasoningText
from serve.http_api.tool_calls.other_forms import input_of

Json = dict[str, Any]


class ResponsesResponse:
    """Builds the answer to one call, a `serve.http_api.endpoints.ResponseBuilder`.

    Args:
        parts: of the engine.
        call: from `serve.http_api.responses.request.read_call`.
    """

    def __init__(self, parts: EngineComponents, call: ResponsesCall) -> None:
        self._call = call
        self._chat = CompletionResponseBuilder(parts, call.chat)
        self._parser = call.chat.output.parser()
        self._events: list[bytes] = []
        """Not taken yet."""
        self._sequence_number = 0
        self._items: list[Json] = []
        self._open: _Item | None = None
        """The item that grows."""
        self._logprobs: list[Json] = []
        """Log probabilities of tokens whose text is still to come."""
        self._num_tokens = self._num_reasoning = self._num_cached = 0
        self._last: OutputDelta | None = None

    def events(self, index: int, delta: OutputDelta) -> bytes:
        del index  # there is one request
        self._push(delta)
        return self._taken()

    def end(self) -> bytes:
        status = self._status()
        self._emit_response(f"response.{status}", status)
        return self._taken()

    def failure(self, error: HttpError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        # `error` is for clients that look for OpenAI's usual body of an error in events, as the official ones do.
        self._emit("error", code=code, message=error.message, param=error.param, **error.body())
        self._emit_response("response.failed", "failed", {"code": code, "message": error.message})
        return self._taken()

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        for delta in deltas:  # of one output, as they came: each says whose its tokens are
            self._push(delta)
        return self._response(self._status())

    # --- output

    def _push(self, delta: OutputDelta) -> None:
        """Take new output."""
        if delta.finish_reason not in (None, "stop", "length"):
            raise RequestFailedError("the request was aborted")
        if self._last is None:
            self._emit_response("response.created", "in_progress")
            self._emit_response("response.in_progress", "in_progress")
        self._last = delta
        self._num_tokens += len(delta.token_ids)
        self._num_cached = delta.metrics.num_cached_tokens
        if delta.logprobs is not None:
            self._logprobs += self._chat.chat_logprobs(0, delta.token_ids, delta.logprobs)
        events = list(self._parser.push(delta.text, delta.finished))
        kinds = set(map(type, events))
        if kinds and ContentText not in kinds:  # tokens of reasoning and calls have none in an answer
            self._logprobs = []
        for event in events:
            self._take(event)
        if kinds == {ReasoningText}:
            self._num_reasoning += len(delta.token_ids)
        if delta.finished:
            if not self._items and self._open is None:  # an answer without text is a message without text
                self._begin(_Message(self._id("msg", 0), 0))
            self._close(cut=delta.finish_reason == "length")

    def _take(self, event: OutputEvent) -> None:
        match event:
            case ContentText(text):
                self._text("message", text)
            case ReasoningText(text):
                self._text("reasoning", text)
            case CallStart(_, call_id, name):
                self._close()
                at = len(self._items)
                if name in self._call.chat.output.custom_tools:
                    self._begin(_CustomCall(self._id("ctc", at), at, call_id, name))
                else:
                    self._begin(_FunctionCall(self._id("fc", at), at, call_id, name))
            case CallArguments(_, text):
                self._grow(text)

    def _text(self, kind: str, text: str) -> None:
        """Text of a message or of reasoning: of the open item, or of a new one."""
        if self._open is None or self._open.kind != kind:
            self._close()
            at = len(self._items)
            self._begin(_Message(self._id("msg", at), at) if kind == "message" else _Reasoning(self._id("rs", at), at))
        self._grow(text)

    def _begin(self, item: "_Item") -> None:
        self._open = item
        self._emit_all(item.begin())

    def _grow(self, text: str) -> None:
        assert self._open is not None
        logprobs: list[Json] = []
        if self._open.kind == "message":
            logprobs, self._logprobs = self._logprobs, []
        self._emit_all(self._open.grow(text, logprobs))

    def _close(self, *, cut: bool = False) -> None:
        """End the open item, if there is one.

        Args:
            cut: the output has reached its longest within it.
        """
        item, self._open = self._open, None
        if item is None:
            return
        if item.kind == "message" and self._logprobs:  # of tokens without text, such as the last one
            item.logprobs += self._logprobs
            self._logprobs = []
        whole = item.whole("incomplete" if cut else "completed")
        self._emit_all(item.end(whole))
        self._items.append(whole)

    def _id(self, prefix: str, number: int) -> str:
        return f"{prefix}_{self._call.base_id}-{number}"

    # --- events

    def _emit_all(self, events: Iterable[Json]) -> None:
        for event in events:
            self._emit(event.pop("type"), **event)

    def _emit(self, event: str, **fields: Any) -> None:
        if self._call.stream:
            self._send(event, json_bytes({"type": event, "sequence_number": self._sequence_number, **fields}))

    def _emit_response(self, event: str, status: str, error: Json | None = None) -> None:
        if self._call.stream:
            head = json_bytes({"type": event, "sequence_number": self._sequence_number})
            self._send(event, b'%s,"response":%s}' % (head[:-1], self._response(status, error)))

    def _send(self, event: str, data: bytes) -> None:
        self._events.append(b"event: %s\ndata: %s\n\n" % (event.encode(), data))
        self._sequence_number += 1

    def _taken(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events

    # --- the response object

    def _status(self) -> str:
        """Status of a response that has ended."""
        return "incomplete" if self._last is not None and self._last.finish_reason == "length" else "completed"

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
            "output": self._items,
            "usage": self._usage() if ended else None,
        }
        if call.chat.timings and self._last is not None and self._last.finished:
            made["aptjax"] = timings_payload(self._last)
        return b"%s,%s" % (json_bytes(made)[:-1], call.facts[1:])

    def _usage(self) -> Json:
        prompt = int(self._call.requests[0].prompt_token_ids.size)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": prompt + self._num_tokens,
        }


class _Item:
    """An item that grows."""

    kind = ""

    def __init__(self, item_id: str, number: int) -> None:
        self.id, self.at = item_id, {"item_id": item_id, "output_index": number}
        self.pieces: list[str] = []
        self.logprobs: list[Json] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begin(self) -> list[Json]:
        """Events of its beginning."""
        raise NotImplementedError

    def grow(self, text: str, logprobs: list[Json]) -> list[Json]:
        """Events of new text."""
        raise NotImplementedError

    def end(self, whole: Json) -> list[Json]:
        """Events of its end."""
        raise NotImplementedError

    def whole(self, status: str) -> Json:
        """The item as it stands in the answer."""
        raise NotImplementedError

    def _added(self, **fields: Any) -> Json:
        item = {"id": self.id, "type": self.kind, "status": "in_progress", **fields}
        return {"type": "response.output_item.added", "output_index": self.at["output_index"], "item": item}

    def _done(self, whole: Json) -> Json:
        return {"type": "response.output_item.done", "output_index": self.at["output_index"], "item": whole}


class _Message(_Item):
    kind = "message"

    def begin(self) -> list[Json]:
        part = {"type": "response.content_part.added", **self.at, "content_index": 0, "part": _output_text("", [])}
        return [self._added(role="assistant", content=[]), part]

    def grow(self, text: str, logprobs: list[Json]) -> list[Json]:
        self.pieces.append(text)
        self.logprobs += logprobs
        return [
            {"type": "response.output_text.delta", **self.at, "content_index": 0, "delta": text, "logprobs": logprobs}
        ]

    def end(self, whole: Json) -> list[Json]:
        (part,) = whole["content"]
        at = {**self.at, "content_index": 0}
        return [
            {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": self.logprobs},
            {"type": "response.content_part.done", **at, "part": part},
            self._done(whole),
        ]

    def whole(self, status: str) -> Json:
        content = [_output_text(self.text, self.logprobs)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Reasoning(_Item):
    kind = "reasoning"

    def begin(self) -> list[Json]:
        part = {"type": "reasoning_text", "text": ""}
        return [
            self._added(summary=[], content=[], encrypted_content=None),
            {"type": "response.content_part.added", **self.at, "content_index": 0, "part": part},
        ]

    def grow(self, text: str, logprobs: list[Json]) -> list[Json]:
        del logprobs
        self.pieces.append(text)
        return [{"type": "response.reasoning_text.delta", **self.at, "content_index": 0, "delta": text}]

    def end(self, whole: Json) -> list[Json]:
        (part,) = whole["content"]
        at = {**self.at, "content_index": 0}
        return [
            {"type": "response.reasoning_text.done", **at, "text": part["text"]},
            {"type": "response.content_part.done", **at, "part": part},
            self._done(whole),
        ]

    def whole(self, status: str) -> Json:
        content = [{"type": "reasoning_text", "text": self.text}]
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
            "encrypted_content": None,
        }


class _FunctionCall(_Item):
    kind = "function_call"

    def __init__(self, item_id: str, number: int, call_id: str, name: str) -> None:
        super().__init__(item_id, number)
        self._named = {"call_id": call_id, "name": name}

    def begin(self) -> list[Json]:
        return [self._added(**self._named, arguments="")]

    def grow(self, text: str, logprobs: list[Json]) -> list[Json]:
        del logprobs
        self.pieces.append(text)
        return [{"type": "response.function_call_arguments.delta", **self.at, "delta": text}]

    def end(self, whole: Json) -> list[Json]:
        fields = {"name": whole["name"], "arguments": whole["arguments"]}
        return [{"type": "response.function_call_arguments.done", **self.at, **fields}, self._done(whole)]

    def whole(self, status: str) -> Json:
        return {"id": self.id, "type": "function_call", "status": status, **self._named, "arguments": self.text}


class _CustomCall(_Item):
    """A call of a custom tool: its input comes when it is whole."""

    kind = "custom_tool_call"

    def __init__(self, item_id: str, number: int, call_id: str, name: str) -> None:
        super().__init__(item_id, number)
        self._named = {"call_id": call_id, "name": name}

    def begin(self) -> list[Json]:
        return [self._added(**self._named, input="")]

    def grow(self, text: str, logprobs: list[Json]) -> list[Json]:
        del logprobs
        self.pieces.append(text)
        return []

    def end(self, whole: Json) -> list[Json]:
        event = "response.custom_tool_call_input"
        return [
            {"type": f"{event}.delta", **self.at, "delta": whole["input"]},
            {"type": f"{event}.done", **self.at, "input": whole["input"]},
            self._done(whole),
        ]

    def whole(self, status: str) -> Json:
        return {"id": self.id, "type": self.kind, "status": status, **self._named, "input": input_of(self.text)}


def _output_text(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

"""Splits a model's output into items (text, reasoning, tool calls) for the Responses and Messages APIs.

At most one item is open at a time. An item begins with the first event of its kind, grows, and ends when an event of
another kind or the start of another tool call follows. Each of these changes produces events, which are sent if the
call streams.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from apt_jax.core.kinds import KIND_NAMES
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.request import RequestMetrics
from serve.compact_json import json_bytes
from serve.errors import RequestFailedError
from serve.http_api.openai_request import CompletionCall
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, OutputEvent, ReasoningText

Json = dict[str, Any]


class Item(Protocol):
    """An item of a response that is being generated. Its events are JSON objects with a `type`."""

    def begin(self) -> Iterable[Json]:
        """Return the events that open the item."""
        ...

    def grow(self, text: str) -> Iterable[Json]:
        """Add new text and return its events."""
        ...

    def end(self, cut: bool) -> Iterable[Json]:
        """Return the events that close the item; `cut` is true if the output reached its maximum length within it."""
        ...

    def whole(self) -> Json:
        """Return the complete item for the response. Call it after `end`."""
        ...


class ItemStream:
    """Collects the items of one output and queues their events.

    Args:
        call: the call that the output answers.
        make: creates an item from its first event, which is never a `CallArguments`, and its index in the response.
        numbered: whether events have a `sequence_number`.
    """

    def __init__(
        self, call: CompletionCall, make: Callable[[OutputEvent, int], Item], *, numbered: bool = False
    ) -> None:
        self.items: list[Json] = []
        """Items that have ended."""
        self.num_tokens = self.num_cached = 0
        self.last: OutputDelta | None = None
        """The newest output; None before the first output."""
        self._streams, self._make, self._numbered = call.stream, make, numbered
        self._parser = call.output.parser()
        self._open: Item | None = None
        self._kind: type[OutputEvent] = ContentText
        """Type of the open item's first event."""
        self._events: list[bytes] = []
        self._number = 0

    @property
    def has_items(self) -> bool:
        """True if an item has begun."""
        return bool(self.items) or self._open is not None

    def take(self, delta: OutputDelta, before: Callable[[list[OutputEvent]], object] = lambda events: None) -> None:
        """Process new output; `before` is called with its events before they are added to items."""
        self.last = delta
        self.num_tokens += len(delta.token_ids)
        events = list(self._parser.push(delta.text, delta.finished))
        before(events)
        for event in events:
            match event:
                case CallStart():
                    self.begin(event)
                case CallArguments(_, text):
                    self._grow(text)
                case ContentText(text) | ReasoningText(text):
                    if self._open is None or self._kind is not type(event):
                        self.begin(event)
                    self._grow(text)

    def begin(self, event: OutputEvent) -> None:
        """End the open item, and begin a new item with this event."""
        self.end()
        self._open, self._kind = self._make(event, len(self.items)), type(event)
        self.emit_all(self._open.begin())

    def end(self, *, cut: bool = False) -> None:
        """End the open item, if any; see `Item.end`."""
        item, self._open = self._open, None
        if item is not None:
            self.emit_all(item.end(cut))
            self.items.append(item.whole())

    def emit_all(self, events: Iterable[Json]) -> None:
        for event in events:
            self.emit(**event)

    def emit(self, type: str, raw: tuple[str, bytes] | None = None, **fields: Any) -> None:
        """Queue an event if the call streams.

        Args:
            type: type of the event.
            raw: name and encoded JSON value of a further field, which is put last.
            fields: the other fields of the event.
        """
        if not self._streams:
            return
        number = {"sequence_number": self._number} if self._numbered else {}
        data = json_bytes({"type": type, **number, **fields})
        if raw is not None:
            data = b'%s,"%s":%s}' % (data[:-1], raw[0].encode(), raw[1])
        self._events.append(b"event: %s\ndata: %s\n\n" % (type.encode(), data))
        self._number += 1

    def taken(self) -> bytes:
        """Return the encoded events that have been queued since the last call."""
        events, self._events = b"".join(self._events), []
        return events

    def _grow(self, text: str) -> None:
        assert self._open is not None
        self.emit_all(self._open.grow(text))


def check_end(delta: OutputDelta) -> None:
    """Check that output is unfinished, or has the finish reason "stop" or "length".

    Raises:
        RequestFailedError: the request was aborted.
    """
    if delta.finish_reason not in (None, "stop", "length"):
        raise RequestFailedError("the request was aborted")


def num_written(parts: EngineComponents, prompt_len: int, metrics: RequestMetrics) -> int:
    """Return the number of prompt tokens that a request has added to the prefix cache: whole groups not found there."""
    cache, kind = parts.engine.cache, metrics.cache_kind
    if cache.prefixes is None or kind is None:
        return 0
    size = cache.block_sizes[KIND_NAMES.index(kind)]
    return max(prompt_len // size * size - metrics.num_cached_tokens, 0)

"""Output of a model as a list of items of which one is open at a time, for answers of the Responses and Messages APIs.

An item begins with the first event of its kind, grows, and is whole when an event of another kind, or another call, comes.
Items say which events they make; they are sent if the call streams.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from apt_jax.frontend.outputs import OutputDelta
from serve.compact_json import json_bytes
from serve.errors import RequestFailedError
from serve.http_api.openai_request import CompletionCall
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, OutputEvent, ReasoningText

Json = dict[str, Any]


class Item(Protocol):
    """An item that grows. Events are objects with their `type`."""

    def begin(self) -> Iterable[Json]:
        """Events of its beginning."""
        ...

    def grow(self, text: str) -> Iterable[Json]:
        """Events of new text."""
        ...

    def end(self, cut: bool) -> Iterable[Json]:
        """Events of its end; `cut`: the output has reached its longest within it."""
        ...

    def whole(self) -> Json:
        """The item as it stands in the answer, once it has ended."""
        ...


class ItemStream:
    """The items of one output, and the events of their stream.

    Args:
        call: whose output it is.
        make: makes the item that begins with an event, which is no `CallArguments`, of its number in the answer.
        numbered: events have a `sequence_number`.
    """

    def __init__(
        self, call: CompletionCall, make: Callable[[OutputEvent, int], Item], *, numbered: bool = False
    ) -> None:
        self.items: list[Json] = []
        """Items that have ended."""
        self.num_tokens = self.num_cached = 0
        self.last: OutputDelta | None = None
        """The newest output; None: there is none."""
        self._streams, self._make, self._numbered = call.stream, make, numbered
        self._parser = call.output.parser()
        self._open: Item | None = None
        self._kind: type[OutputEvent] = ContentText
        """Kind of the events that make the open item grow."""
        self._events: list[bytes] = []
        self._number = 0

    @property
    def has_items(self) -> bool:
        """An item has begun."""
        return bool(self.items) or self._open is not None

    def take(self, delta: OutputDelta, before: Callable[[list[OutputEvent]], object] = lambda events: None) -> None:
        """Take new output; `before` is called with its events before they reach the items."""
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
        """End the open item, and begin the one of this event."""
        self.end()
        self._open, self._kind = self._make(event, len(self.items)), type(event)
        self.emit_all(self._open.begin())

    def end(self, *, cut: bool = False) -> None:
        """End the open item, if there is one; see `Item.end`."""
        item, self._open = self._open, None
        if item is not None:
            self.emit_all(item.end(cut))
            self.items.append(item.whole())

    def emit_all(self, events: Iterable[Json]) -> None:
        for event in events:
            self.emit(**event)

    def emit(self, type: str, raw: tuple[str, bytes] | None = None, **fields: Any) -> None:
        """Send an event; `raw`: name and JSON of a further field."""
        if not self._streams:
            return
        number = {"sequence_number": self._number} if self._numbered else {}
        data = json_bytes({"type": type, **number, **fields})
        if raw is not None:
            data = b'%s,"%s":%s}' % (data[:-1], raw[0].encode(), raw[1])
        self._events.append(b"event: %s\ndata: %s\n\n" % (type.encode(), data))
        self._number += 1

    def taken(self) -> bytes:
        """The events since the last time, ready to send."""
        events, self._events = b"".join(self._events), []
        return events

    def _grow(self, text: str) -> None:
        assert self._open is not None
        self.emit_all(self._open.grow(text))


def check_end(delta: OutputDelta) -> None:
    """Check that output goes on, or has ended in a way that an answer can tell.

    Raises:
        RequestFailedError: it was aborted.
    """
    if delta.finish_reason not in (None, "stop", "length"):
        raise RequestFailedError("the request was aborted")

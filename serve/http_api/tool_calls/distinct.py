"""Removes repeated calls from an output.

A grammar for calls allows the output to continue until the model ends it, and small models often repeat the same call
many times. A call that equals an earlier call in the output is dropped. Arguments are returned in pieces
as soon as they differ from the arguments of all earlier calls of the same function.
"""

from serve.http_api.tool_calls.events import CallArguments, CallStart, OutputEvent, OutputParser


class DistinctCalls:
    """A parser that drops calls that equal an earlier call, or that are cut off while they might still equal one.

    Args:
        parser: parser of the output; it must return the arguments of a call before the next call starts.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._said: list[tuple[str, str]] = []
        """Name and arguments of each complete call that has been returned."""
        self._start: CallStart | None = None
        """Start of the current call while it may still equal an earlier call; None once it has been returned."""
        self._arguments: list[str] = []
        """Pieces of the arguments of the current call."""
        self._others: list[str] = []
        """Arguments of the earlier calls that the current call may still equal."""
        self._name, self._held_len = "", 0

    def push(self, text: str, finished: bool) -> list[OutputEvent]:
        """See `OutputParser`."""
        events: list[OutputEvent] = []
        for event in self._parser.push(text, finished):
            if isinstance(event, CallStart):
                self._end_call()
                self._begin_call(event, events)
            elif isinstance(event, CallArguments):
                self._add(event.text, events)
            else:
                events.append(event)
        if finished:
            self._end_call()
        return events

    def _begin_call(self, event: CallStart, events: list[OutputEvent]) -> None:
        self._name, self._arguments, self._held_len = event.name, [], 0
        self._others = [arguments for name, arguments in self._said if name == event.name]
        self._start = event
        if not self._others:
            self._release(events)

    def _add(self, piece: str, events: list[OutputEvent]) -> None:
        self._arguments.append(piece)
        if self._start is None:
            events.append(CallArguments(len(self._said), piece))
            return
        self._others = [other for other in self._others if other.startswith(piece, self._held_len)]
        self._held_len += len(piece)
        if not self._others:
            self._release(events)
            events.append(CallArguments(len(self._said), "".join(self._arguments)))

    def _release(self, events: list[OutputEvent]) -> None:
        assert self._start is not None
        events.append(CallStart(len(self._said), self._start.id, self._start.name))
        self._start = None

    def _end_call(self) -> None:
        if self._name and self._start is None:
            self._said.append((self._name, "".join(self._arguments)))
        self._name, self._start = "", None

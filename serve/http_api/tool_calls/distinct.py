"""Calls of one output, each once.

A constraint on calls goes on until the model ends it, and small models write one call again and again. What equals an
earlier call of the output is left out. Arguments come out as they are generated from where they differ from those of
every earlier call of the function.
"""

from serve.http_api.tool_calls.events import CallArguments, CallStart, OutputEvent, OutputParser


class DistinctCalls:
    """A parser without the calls that equal an earlier one, whole or as far as the output goes.

    Args:
        parser: of the output; it gives calls one by one, each with all of its arguments.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._said: list[tuple[str, str]] = []
        """Names and arguments of the calls that have come out whole."""
        self._start: CallStart | None = None
        """The call that is being read, not yet told from an earlier one."""
        self._arguments: list[str] = []
        """Arguments of the call that is being read."""
        self._others: list[str] = []
        """Arguments of earlier calls that it may still equal."""
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

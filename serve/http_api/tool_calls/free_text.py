"""Parser of tool calls in unconstrained output. Calls are returned when complete and valid; other text is content."""

import abc
import dataclasses
import re

from serve.http_api.tool_calls.call_ids import new_call_id
from serve.http_api.tool_calls.definitions import NAME_PATTERN
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, OutputEvent
from serve.http_api.tool_calls.json_text import JsonEnd, ParsedCall

MAX_CALL_CHARS = 2**16
"""Maximum length of the text of a call in characters; longer text is content."""
MAX_FAILED = 64
"""Maximum number of marks without a valid call; beyond it, all further text is content."""
MAX_SPACE_CHARS = 64
"""Maximum number of whitespace characters that are dropped between a call and content; the rest is content."""
_NAME = re.compile(NAME_PATTERN)
SLICE_CHARS = 1024
"""Number of characters of a text that are processed at a time."""
_MARKS_CHARS = 256
"""Maximum length in characters of the text around the JSON of a call."""


def held_len(text: str, mark: str) -> int:
    """Return the number of characters at the end of `text` that may be the start of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def space_len(text: str) -> int:
    """Return the number of whitespace characters at the end of `text`, at most `MAX_SPACE_CHARS`."""
    end = text[-MAX_SPACE_CHARS:]
    return len(end) - len(end.rstrip())


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of parsing text for calls."""

    end: int
    """Offset after the calls, or after text that is not a call."""
    calls: list[ParsedCall]
    """The calls; empty if the text is content."""


class CallsInText(abc.ABC):
    """A parser of content and calls; subclasses parse the calls.

    Args:
        names: names of the functions.
        max_calls: maximum number of calls; further calls are content.
    """

    mark = ""
    """Text before a call; empty if calls are possible only at the start of the output."""
    alphanumeric_ids = False

    def __init__(self, names: frozenset[str], max_calls: int) -> None:
        self._names, self._max_calls = names, max_calls
        self._text = ""
        """Text that has not been returned in events yet."""
        self._call_at: int | None = None
        """Offset in `_text` of a possible call, which only whitespace precedes; None if no call is being parsed."""
        self._is_over = False
        """True if all further text is content."""
        self._num_calls = self._num_failed = 0
        self._after_call = False
        """True if the last event belongs to a call, in which case whitespace after it is dropped."""
        self._end = JsonEnd()

    def push(self, text: str, finished: bool) -> list[OutputEvent]:
        """See `OutputParser`. Long text is processed in slices, because the rest is copied after each call or mark."""
        events: list[OutputEvent] = []
        for start in range(0, max(len(text), 1), SLICE_CHARS):
            self._text += text[start : start + SLICE_CHARS]
            while self._step(events, finished and start + SLICE_CHARS >= len(text)):
                pass
        return events

    @abc.abstractmethod
    def _read(self, text: str, finished: bool) -> Found | None:
        """Parse the calls at the start of `text`, which begins after the mark. Returns None if the text is incomplete.

        `_json_end` finds the end of the first JSON value in the text.
        """

    def _json_end(self, text: str, start: int) -> int | None:
        return self._end.find(text, start)

    def _step(self, events: list[OutputEvent], finished: bool) -> bool:
        """Process the next complete part of the text. Returns whether another step may follow."""
        if self._call_at is not None:
            return self._call(events, finished)
        if self._is_over:
            self._content(events, len(self._text))
            return False
        if self.mark:
            return self._find_mark(events, finished)
        return self._find_start(events, finished)

    def _find_mark(self, events: list[OutputEvent], finished: bool) -> bool:
        text, at = self._text, self._text.find(self.mark)
        if at < 0:
            if finished:
                self._content(events, len(text))
                return False
            held = held_len(text, self.mark)
            self._content(events, len(text) - held - space_len(text[: len(text) - held]))
            return False
        before = at - space_len(text[:at])
        self._content(events, before)
        self._begin_call(at - before)
        return True

    def _find_start(self, events: list[OutputEvent], finished: bool) -> bool:
        """Look for a call at the beginning of the output or after another call."""
        stripped = self._text.lstrip()
        at = len(self._text) - len(stripped)
        if not stripped and not finished and at <= MAX_SPACE_CHARS:
            return False
        if stripped and at <= MAX_SPACE_CHARS:
            self._begin_call(at)
            return True
        self._is_over = True
        return True

    def _begin_call(self, at: int) -> None:
        self._call_at, self._end = at, JsonEnd()

    def _call(self, events: list[OutputEvent], finished: bool) -> bool:
        assert self._call_at is not None
        start = self._call_at + len(self.mark)
        body = self._text[start:]
        found = self._read(body, finished)
        if found is None and not finished and len(body) <= MAX_CALL_CHARS + _MARKS_CHARS:
            return False
        self._call_at = None
        if found is None or found.end > MAX_CALL_CHARS:  # no text is parsed twice, so the rest is also content
            self._is_over = True
            return True
        is_call = (
            bool(found.calls)
            and self._num_calls + len(found.calls) <= self._max_calls
            and all(self._is_name(call.name) for call in found.calls)
        )
        if not is_call:
            self._content(events, start + found.end)
            self._num_failed += 1
            self._is_over = not self.mark or self._num_failed > MAX_FAILED
            return True
        for call in found.calls:
            events.append(CallStart(self._num_calls, new_call_id(self.alphanumeric_ids), call.name))
            events.append(CallArguments(self._num_calls, call.arguments))
            self._num_calls += 1
        self._text, self._after_call = self._text[start + found.end :], True
        return True

    def _is_name(self, name: str) -> bool:
        """Return whether a name is accepted as a function name.

        After a mark, any well-formed name is accepted, so that clients can report an unknown name to the model. Without
        a mark, only names of the functions are accepted, because an answer in JSON could look like a call.
        """
        return _NAME.fullmatch(name) is not None if self.mark else name in self._names

    def _content(self, events: list[OutputEvent], size: int) -> None:
        """Move the first `size` characters of the text to `events` as content; drop whitespace that follows a call."""
        text, self._text = self._text[:size], self._text[size:]
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            events.append(ContentText(text))

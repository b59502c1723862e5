"""Parser of harmony, the format of gpt-oss: messages in channels, of which some are reasoning or calls.

A prompt ends with ``<|start|>assistant``. Each message is a header, ``<|message|>``, the text, and a mark that ends it:

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>arguments<|call|>
    <|channel|>final<|message|>answer<|return|>
"""

import re

from serve.http_api.tool_calls.call_ids import new_call_id
from serve.http_api.tool_calls.definitions import NAME_PATTERN
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, OutputEvent, ReasoningText
from serve.http_api.tool_calls.free_text import MAX_CALL_CHARS, SLICE_CHARS, held_len
from serve.http_api.tool_calls.json_text import is_object

MESSAGE = "<|message|>"
ANALYSIS = f"<|channel|>analysis{MESSAGE}"
AFTER_ANALYSIS = "<|end|><|start|>assistant"
FINAL = f"<|channel|>final{MESSAGE}"
CALL = "<|channel|>commentary to=functions."
ARGUMENTS = f" <|constrain|>json{MESSAGE}"

_STARTS = ("<|channel|>", "<|start|>", "to=")
"""Text that a header may begin with."""
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
"""Marks that end the text of a message; the last two begin the next header."""
_END = re.compile(r"<\|(?:end|call|return|start|channel)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(rf"\bto=functions\.({NAME_PATTERN})(?![^\s<])")
_MAX_HEADER_CHARS = 256


class HarmonyOutput:
    """A parser of messages in channels. Messages without a channel or recipient of their own are content, and so is
    text without a header. Messages of one kind are separated by a line break.

    Args:
        max_calls: maximum number of calls; further calls are content.
        constrained: arguments are returned as they are generated. Otherwise a call is returned when its arguments are
            complete, and it is content if they are not a JSON object.
        in_content: the output begins within the text of an answer.
    """

    def __init__(self, max_calls: int, *, constrained: bool = False, in_content: bool = False) -> None:
        self._max_calls, self._constrained = max_calls, constrained
        self._kind = "content" if in_content else "header"
        self._text = ""
        """Text that has not been returned in events yet."""
        self._searched = 0
        """Number of characters of `_text` that no mark begins in."""
        self._name, self._num_calls = "", 0
        self._said: set[str] = set()
        """Kinds of messages that have been returned."""
        self._separator = ""
        """Text before the next piece of the current message."""

    def push(self, text: str, finished: bool) -> list[OutputEvent]:
        """See `OutputParser`. Long text is processed in slices, because the rest is copied after each mark."""
        events: list[OutputEvent] = []
        for start in range(0, max(len(text), 1), SLICE_CHARS):
            self._text += text[start : start + SLICE_CHARS]
            is_last = finished and start + SLICE_CHARS >= len(text)
            while (self._header if self._kind == "header" else self._message)(events, is_last):
                pass
        return events

    def _header(self, events: list[OutputEvent], finished: bool) -> bool:
        """Read a header. Like all steps, returns whether another step may follow."""
        header = self._text.lstrip()
        if not header and (finished or len(self._text) <= _MAX_HEADER_CHARS):
            self._text = "" if finished else self._text
            return False
        is_header = bool(header) and any(header.startswith(start[: len(header)]) for start in _STARTS)
        at = header.find(MESSAGE, 0, _MAX_HEADER_CHARS)
        if not is_header or (at < 0 and len(header) >= _MAX_HEADER_CHARS):
            self._begin("content")
            self._searched = len(self._text) - len(header) + is_header  # a mark that begins no header is content
            return True
        if at < 0:
            if finished:  # cut off within the header
                self._text = ""
            return False
        self._text, header = header[at + len(MESSAGE) :], header[:at]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and self._num_calls < self._max_calls:
            self._begin("call")
            self._name = recipient[1]
            if self._constrained:
                self._start_call(events)
        else:
            self._begin("reasoning" if channel is not None and channel[1] == "analysis" else "content")
        return True

    def _begin(self, kind: str) -> None:
        self._kind, self._searched = kind, 0
        self._separator = "\n" if kind in self._said else ""

    def _message(self, events: list[OutputEvent], finished: bool) -> bool:
        """Process the text of a message up to the mark that ends it."""
        found = _END.search(self._text, self._searched)
        size = len(self._text)
        if found is not None:
            size = found.start()
        elif not finished:
            size -= max(held_len(self._text, end) for end in _ENDS)
        if self._kind == "call" and not self._constrained:
            if size > MAX_CALL_CHARS:
                self._begin("content")
                return True
            if found is None and not finished:
                self._searched = size
                return False
            self._whole_call(events, self._text[:size])
        else:
            self._piece(events, self._text[:size])
        self._searched = 0
        if found is None:
            self._text = self._text[size:]
            return False
        self._text = self._text[found.start() if found[0] in _STARTS else found.end() :]
        self._kind = "header"
        return True

    def _piece(self, events: list[OutputEvent], text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            events.append(CallArguments(self._num_calls - 1, text))
            return
        self._said.add(self._kind)
        text, self._separator = self._separator + text, ""
        events.append(ReasoningText(text) if self._kind == "reasoning" else ContentText(text))

    def _whole_call(self, events: list[OutputEvent], text: str) -> None:
        if is_object(text):
            self._start_call(events)
            events.append(CallArguments(self._num_calls - 1, text.strip()))
        else:
            self._begin("content")
            self._piece(events, text)

    def _start_call(self, events: list[OutputEvent]) -> None:
        events.append(CallStart(self._num_calls, new_call_id(), self._name))
        self._num_calls += 1

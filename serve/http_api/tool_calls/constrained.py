"""Parser of tool calls in output that a grammar constrains (`serve.http_api.tool_calls.grammar`). The exact text around
arguments is known, so pieces of arguments are returned as soon as they are generated."""

from serve.http_api.tool_calls.call_ids import new_call_id
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, OutputEvent
from serve.http_api.tool_calls.forms import CallForm
from serve.http_api.tool_calls.free_text import SLICE_CHARS, held_len, space_len
from serve.http_api.tool_calls.json_text import JsonEnd


class ConstrainedCalls:
    """A parser of tool calls in one format.

    Args:
        form: format of the calls.
        names: names of the functions.
        single: there is at most one call, without the format's prefix and suffix.
        free_text: the output may have content: around calls, or instead of calls if the format has no mark.
        only_calls: the output has no content, so an incomplete call at the end of a cut-off output is dropped.
    """

    def __init__(
        self, form: CallForm, names: frozenset[str], *, single: bool, free_text: bool, only_calls: bool = False
    ) -> None:
        self._only_calls = only_calls
        self._form, self._names = form, sorted(names)
        self._prefix, self._suffix = ("", "") if single else (form.prefix, form.suffix)
        self._has_text = free_text and bool(form.mark)
        self._text = ""
        """Text that has not been returned in events yet."""
        self._space = ""
        """Whitespace before `_text`, which is dropped if a call follows; otherwise it is content."""
        self._state = "text" if self._has_text else "head"
        self._num_calls = 0
        self._end = JsonEnd()
        self._value_len = 0
        """Number of characters of the current arguments that have been returned in events."""

    def push(self, text: str, finished: bool) -> list[OutputEvent]:
        """See `OutputParser`. Long text is processed in slices, because the rest is copied after each call or mark."""
        events: list[OutputEvent] = []
        steps = {"text": self._free, "head": self._head, "value": self._value, "close": self._close, "over": self._over}
        for start in range(0, max(len(text), 1), SLICE_CHARS):
            self._text += text[start : start + SLICE_CHARS]
            while steps[self._state](events, finished and start + SLICE_CHARS >= len(text)):
                pass
        return events

    def _free(self, events: list[OutputEvent], finished: bool) -> bool:
        """Process content up to the mark of a call. Like all steps, returns whether another step may follow."""
        at = self._text.find(self._form.mark)
        if at < 0:
            size = len(self._text)
            if not finished:
                size -= held_len(self._text, self._form.mark)
                size -= space_len(self._text[:size])
            self._content(events, size)
            return False
        before = at - space_len(self._text[:at])
        self._content(events, before)
        self._space, self._text = self._text[: at - before], self._text[at - before :]
        self._state = "head"
        return True

    def _head(self, events: list[OutputEvent], finished: bool) -> bool:
        """Process the text before the arguments of a call, or the text that ends the calls."""
        form, text = self._form, self._text
        lead = self._prefix if not self._num_calls else form.separator
        if self._has_text:  # calls have no prefix or separator
            lead = ""
        heads = {name: f"{lead}{form.opening}{name}{form.middle}" for name in self._names}
        for name, head in heads.items():
            if text.startswith(head):
                call_id = new_call_id(form.alphanumeric_ids)
                events.append(CallStart(self._num_calls, call_id, name))
                self._num_calls += 1
                self._space = ""
                self._text, self._state = text[len(head) :], "value"
                self._end, self._value_len = JsonEnd(), 0
                return True
        if self._num_calls and self._suffix and self._suffix.startswith(text):
            if text == self._suffix or finished:
                self._text = ""
            return False
        if any(head.startswith(text) for head in heads.values()):
            if finished and (self._num_calls or self._has_text):  # a call cut off before its name is dropped
                self._text = self._space = ""
            if not finished or not self._text:
                return False
        self._state = "over"
        return True

    def _value(self, events: list[OutputEvent], finished: bool) -> bool:
        """Process the arguments of a call."""
        del finished
        text = self._text
        end = self._end.find(text, -self._value_len)
        size = len(text) if end is None else end
        if size:
            events.append(CallArguments(self._num_calls - 1, text[:size]))
            self._value_len += size
            self._text = text[size:]
        if end is None:
            return False
        self._state = "close"
        return True

    def _close(self, events: list[OutputEvent], finished: bool) -> bool:
        """Process the text after the arguments of a call."""
        del events
        closing = self._form.closing
        if self._text.startswith(closing):
            self._text = self._text[len(closing) :]
            self._state = "text" if self._has_text else "head"
            return True
        if closing.startswith(self._text):
            if finished:  # the output was cut off after complete arguments
                self._text = ""
            return False
        self._state = "over"
        return True

    def _over(self, events: list[OutputEvent], finished: bool) -> bool:
        """Process text that is not a call, and all text after it, as content."""
        del finished
        if self._only_calls:
            self._text = self._space = ""
        self._text, self._space = self._space + self._text, ""
        self._content(events, len(self._text))
        return False

    def _content(self, events: list[OutputEvent], size: int) -> None:
        text, self._text = self._text[:size], self._text[size:]
        if text:
            events.append(ContentText(text))

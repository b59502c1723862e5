"""Parser of tool calls in Hermes' and Qwen's format: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from serve.http_api.tool_calls.free_text import MAX_SPACE_CHARS, CallsInText, Found
from serve.http_api.tool_calls.json_text import calls_in, skip_space

_CLOSING = "</tool_call>"


class HermesCalls(CallsInText):
    """Parses JSON between ``<tool_call>`` and ``</tool_call>`` anywhere in the output; the closing tag is optional."""

    mark = "<tool_call>"

    def _read(self, text: str, finished: bool) -> Found | None:
        start = skip_space(text)
        if start > MAX_SPACE_CHARS:
            return Found(start, [])
        if start == len(text):
            return None
        if text[start] != "{":
            return Found(start, [])
        end = self._json_end(text, start)
        if end is None:
            return None
        after = skip_space(text, end)
        if after - end <= MAX_SPACE_CHARS:
            rest = text[after : after + len(_CLOSING)]
            if rest == _CLOSING:
                return Found(after + len(_CLOSING), calls_in(text[start:end]) or [])
            if _CLOSING.startswith(rest) and not finished:
                return None
        return Found(end, calls_in(text[start:end]) or [])

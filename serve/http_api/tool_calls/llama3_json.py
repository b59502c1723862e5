"""Parser of calls in Llama 3's format: the output begins with ``{"name": ..., "parameters": {...}}``, possibly after
``<|python_tag|>``, and further calls may follow after semicolons."""

from serve.http_api.tool_calls.free_text import MAX_SPACE_CHARS, CallsInText, Found
from serve.http_api.tool_calls.json_text import calls_in, skip_space

PYTHON_TAG = "<|python_tag|>"


class LeadingCalls(CallsInText):
    """Parses calls in JSON at the start of the output, and directly after another call."""

    prefixes: tuple[str, ...] = ()
    """Strings that may come before the JSON."""
    brackets = "{"
    """Characters with which the JSON may begin."""

    def _read(self, text: str, finished: bool) -> Found | None:
        at = skip_space(text, 1) if self._num_calls and text[0] in ";," else 0
        for prefix in self.prefixes:
            rest = text[at : at + len(prefix)]
            if rest == prefix:
                at = skip_space(text, at + len(prefix))
            elif prefix.startswith(rest) and not finished:
                return None
        if at > MAX_SPACE_CHARS + 1 + max(map(len, self.prefixes), default=0):
            return Found(at, [])
        if at == len(text):
            return None
        if text[at] not in self.brackets:
            return Found(at, [])
        end = self._json_end(text, at)
        return None if end is None else Found(end, calls_in(text[at:end]) or [])


class Llama3Calls(LeadingCalls):
    """Parses calls in Llama 3's format."""

    prefixes = (PYTHON_TAG,)

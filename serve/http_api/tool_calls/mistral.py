"""Parser of tool calls in the format of Mistral's models: ``[TOOL_CALLS]``, followed by an array of objects with
``name`` and ``arguments`` or, since version 11 of their tokenizer, by ``name[ARGS]{...}``."""

import re

from serve.http_api.tool_calls.definitions import NAME_PATTERN
from serve.http_api.tool_calls.free_text import MAX_SPACE_CHARS, CallsInText, Found
from serve.http_api.tool_calls.json_text import ParsedCall, calls_in, is_object, skip_space

_NAME = re.compile(NAME_PATTERN)
_ID = re.compile(r"[a-zA-Z0-9_-]{0,64}")


class MistralCalls(CallsInText):
    """Parses the calls after ``[TOOL_CALLS]``."""

    mark = "[TOOL_CALLS]"
    alphanumeric_ids = True

    def _read(self, text: str, finished: bool) -> Found | None:
        start = skip_space(text)
        if start > MAX_SPACE_CHARS:
            return Found(start, [])
        if start == len(text):
            return None
        if text[start] in "[{":
            end = self._json_end(text, start)
            return None if end is None else Found(end, calls_in(text[start:end]) or [])
        return self._named(text, start)

    def _named(self, text: str, start: int) -> Found | None:
        name = _NAME.match(text, start)
        if name is None:
            return Found(start, [])
        at = name.end()
        for tag in ("[CALL_ID]", "[ARGS]"):
            rest = text[at : at + len(tag)]
            if rest == tag:
                at += len(tag)
                given = _ID.match(text, at) if tag == "[CALL_ID]" else None
                at = at if given is None else given.end()
            elif tag.startswith(rest):  # the tag, or more of the name, may still come
                return None
        at = skip_space(text, at)
        if at - name.end() > 2 * MAX_SPACE_CHARS + 32:
            return Found(at, [])
        if at == len(text):
            return None
        if text[at] != "{":
            return Found(at, [])
        end = self._json_end(text, at)
        if end is None:
            return None
        arguments = text[at:end]
        return Found(end, [ParsedCall(name[0], arguments)] if is_object(arguments) else [])

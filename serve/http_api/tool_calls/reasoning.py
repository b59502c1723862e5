"""Parser that separates a model's reasoning, ``<think>...</think>`` before the answer, from the content."""

from serve.http_api.tool_calls.events import OutputEvent, OutputParser, ReasoningText
from serve.http_api.tool_calls.free_text import MAX_SPACE_CHARS, held_len, space_len

PARSERS = ("think", "deepseek_r1", "harmony")
"""Values of `--reasoning-parser` that name a parser. The other values are ``auto`` and ``none``."""
ALIASES = {
    "qwen3": "think",
    "glm45": "think",
    "deepseek_v3": "think",
    "deepseek-v3": "think",
    "deepseek-r1": "deepseek_r1",
    "qwen3-thinking": "deepseek_r1",
    "openai_gptoss": "harmony",
    "gpt-oss": "harmony",
}
"""Names of these parsers in vLLM and SGLang."""  # fmt: skip
OPENING = "<think>"
CLOSING = "</think>"


def reasoning_parser_of(parser: str, template: str) -> str | None:
    """Return the name of the parser of a model's reasoning; None if reasoning is not parsed.

    Args:
        parser: one of `PARSERS`, ``auto`` to choose by the chat template, or ``none``.
        template: text of the chat template; empty if there is none.
    """
    if parser == "auto" and "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    if parser == "auto":
        return "think" if CLOSING in template or OPENING in template else None
    return None if parser == "none" else parser


def begins_inside(parser: str, prompt_end: str) -> bool:
    """Return whether an output begins within reasoning, that is, without ``<think>``.

    Args:
        parser: one of `PARSERS`.
        prompt_end: end of the text of the prompt.
    """
    if prompt_end.rstrip().endswith(OPENING):
        return True
    return parser == "deepseek_r1" and not prompt_end.rstrip().endswith(CLOSING)


class ReasoningFirst:
    """A parser of reasoning at the start of an output. Whitespace around the reasoning is dropped.

    Args:
        inside: the output begins within reasoning; otherwise reasoning begins only with ``<think>``.
        after: parser of the text after the reasoning.
    """

    def __init__(self, inside: bool, after: OutputParser) -> None:
        self._after = after
        self._state = "start"
        self._without_opening = "inside" if inside else "after"
        self._text = ""
        self._begun = False
        """True if some reasoning has been returned."""

    def push(self, text: str, finished: bool) -> list[OutputEvent]:
        """See `OutputParser`."""
        if self._state == "after":
            return self._after.push(text, finished)
        self._text += text
        events: list[OutputEvent] = []
        if self._state == "start":
            self._start(finished)
        if self._state == "inside":
            self._inside(events, finished)
        if self._state == "space":
            self._space(finished)
        if self._state == "after":
            rest, self._text = self._text, ""
            events += self._after.push(rest, finished)
        return events

    def _start(self, finished: bool) -> None:
        """Look for ``<think>`` at the start of the output."""
        stripped = self._text.lstrip()
        if len(self._text) - len(stripped) > MAX_SPACE_CHARS:
            self._state = self._without_opening
        elif stripped.startswith(OPENING):  # some models write it although the prompt has it
            self._text, self._state = stripped[len(OPENING) :], "inside"
        elif finished or not OPENING.startswith(stripped):
            self._state = self._without_opening

    def _inside(self, events: list[OutputEvent], finished: bool) -> None:
        at = self._text.find(CLOSING)
        if at >= 0:
            self._reasoning(events, at - space_len(self._text[:at]))
            self._text = self._text.partition(CLOSING)[2]
            self._state = "space"
        elif finished:  # the output was cut off within the reasoning
            self._reasoning(events, len(self._text))
            self._state = "after"
        else:
            size = len(self._text) - held_len(self._text, CLOSING)
            self._reasoning(events, size - space_len(self._text[:size]))

    def _reasoning(self, events: list[OutputEvent], size: int) -> None:
        text, self._text = self._text[:size], self._text[size:]
        if not self._begun:
            text = text.lstrip()
        if text:
            self._begun = True
            events.append(ReasoningText(text))

    def _space(self, finished: bool) -> None:
        self._text = self._text.lstrip()
        if self._text or finished:
            self._state = "after"

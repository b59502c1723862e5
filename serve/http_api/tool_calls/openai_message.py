"""The message of one choice of a chat completion, in OpenAI's form."""

from typing import Any

from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, OutputParser, ReasoningText

Json = dict[str, Any]


class OpenAIMessage:
    """Turns the text of one output into deltas and, at its end, into the whole message.

    Args:
        parser: of the output.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []

    def push(self, text: str, finished: bool) -> Json:
        """Take more text. Returns the delta; a call in it comes with its name first, then with pieces of its
        arguments."""
        delta: Json = {}
        content, reasoning = len(self._content), len(self._reasoning)
        calls: dict[int, Json] = {}
        arguments: dict[int, list[str]] = {}
        for event in self._parser.push(text, finished):
            match event:
                case ContentText(piece):
                    self._content.append(piece)
                case ReasoningText(piece):
                    self._reasoning.append(piece)
                case CallStart(index, call_id, name):
                    self._calls.append((event, []))
                    calls[index] = {
                        "index": index,
                        "id": call_id,
                        "type": "function",
                        "function": {"name": name},
                    }
                case CallArguments(index, piece):
                    self._calls[-1][1].append(piece)
                    calls.setdefault(index, {"index": index, "function": {}})
                    arguments.setdefault(index, []).append(piece)
        if len(self._content) > content:
            delta["content"] = "".join(self._content[content:])
        if len(self._reasoning) > reasoning:
            delta["reasoning_content"] = "".join(self._reasoning[reasoning:])
        for index, call in calls.items():
            call["function"]["arguments"] = "".join(arguments.get(index, ()))
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def whole(self) -> Json:
        """The whole message, after the last text."""
        content = "".join(self._content)
        shown = content or None if self._calls or self._reasoning else content
        message: Json = {"role": "assistant", "content": shown, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": start.id,
                    "type": "function",
                    "function": {"name": start.name, "arguments": "".join(pieces)},
                }
                for start, pieces in self._calls
            ]
        return message

    def finish_reason(self, of_engine: str | None) -> str | None:
        """The finish reason in OpenAI's words."""
        return "tool_calls" if of_engine == "stop" and self._calls else of_engine

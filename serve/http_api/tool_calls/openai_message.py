"""The message of one choice of a chat completion, in OpenAI's format."""

from collections.abc import Collection
from typing import Any

from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, OutputParser, ReasoningText
from serve.http_api.tool_calls.other_forms import input_of

Json = dict[str, Any]


class OpenAIMessage:
    """Turns the text of one output into deltas and, at its end, into the complete message.

    Args:
        parser: parser of the output.
        custom_tools: names of functions that represent custom tools, whose input is sent once it is complete.
        only_calls: the message has no content, even if it has no call because the output was cut off.
        old_form: the call is given as `function_call`, which OpenAI has replaced by `tool_calls`.
    """

    def __init__(
        self,
        parser: OutputParser,
        custom_tools: Collection[str] = (),
        *,
        only_calls: bool = False,
        old_form: bool = False,
    ) -> None:
        self._parser = parser
        self._only_calls = only_calls
        self._custom, self._old_form = custom_tools, old_form
        self._num_inputs_said = 0
        """Number of complete calls. If they are calls of custom tools, their input has been sent."""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []

    def push(self, text: str, finished: bool) -> Json:
        """Process more text. Returns the delta. A call begins with a delta that has its name; its arguments follow."""
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
                    self._say_inputs(calls)
                    self._calls.append((event, []))
                    kind, empty = ("custom", {"input": ""}) if name in self._custom else ("function", {})
                    calls[index] = {"index": index, "id": call_id, "type": kind, kind: {"name": name, **empty}}
                case CallArguments(index, piece):
                    self._calls[-1][1].append(piece)
                    if self._calls[-1][0].name not in self._custom:
                        calls.setdefault(index, {"index": index, "function": {}})
                        arguments.setdefault(index, []).append(piece)
        if finished:
            self._say_inputs(calls)
        if len(self._content) > content:
            delta["content"] = "".join(self._content[content:])
        if len(self._reasoning) > reasoning:
            delta["reasoning_content"] = "".join(self._reasoning[reasoning:])
        for index, call in calls.items():
            if "function" in call:
                call["function"]["arguments"] = "".join(arguments.get(index, ()))
        if calls and self._old_form:  # one call at most
            delta["function_call"] = next(iter(calls.values()))["function"]
        elif calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def _say_inputs(self, calls: dict[int, Json]) -> None:
        """Add the last call's input to the delta's calls, if the call is of a custom tool and its input is unsent."""
        if self._num_inputs_said == len(self._calls):
            return
        self._num_inputs_said = len(self._calls)
        start, pieces = self._calls[-1]
        if start.name in self._custom:
            call = calls.setdefault(start.index, {"index": start.index, "custom": {}})
            call["custom"]["input"] = input_of("".join(pieces))

    def whole(self) -> Json:
        """Return the complete message. Call it after the last `push`."""
        content = "".join(self._content)
        shown = content or None if self._calls or self._reasoning or self._only_calls else content
        message: Json = {"role": "assistant", "content": shown, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        calls = [self._whole_call(start, "".join(pieces)) for start, pieces in self._calls]
        if calls and self._old_form:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        return message

    def _whole_call(self, start: CallStart, arguments: str) -> Json:
        if start.name in self._custom:
            return {"id": start.id, "type": "custom", "custom": {"name": start.name, "input": input_of(arguments)}}
        return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": arguments}}

    def finish_reason(self, of_engine: str | None) -> str | None:
        """Convert the engine's finish reason to OpenAI's finish reason for this choice."""
        if of_engine != "stop" or not self._calls:
            return of_engine
        return "function_call" if self._old_form else "tool_calls"

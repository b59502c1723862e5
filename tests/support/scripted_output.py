"""A parser of outputs that reads a script: one event a mark, so that builders of answers are tested without a model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from apt_jax.frontend.outputs import OutputDelta
from apt_jax.request import EngineRequest, FinishReason, RequestMetrics
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, OutputEvent, ReasoningText
from serve.http_api.tool_calls.plan import OutputPlan


class ScriptedParser:
    """``r...`` is reasoning, ``c...`` content, ``f...`` begins a call of that function, ``a...`` are arguments."""

    def __init__(self) -> None:
        self._calls = 0

    def push(self, text: str, finished: bool) -> list[OutputEvent]:
        return [self._event(line[0], line[1:]) for line in text.split("\n") if line]

    def _event(self, mark: str, text: str) -> OutputEvent:
        match mark:
            case "r":
                return ReasoningText(text)
            case "c":
                return ContentText(text)
            case "f":
                self._calls += 1
                return CallStart(self._calls - 1, f"call_{self._calls - 1}", text)
        return CallArguments(self._calls - 1, text)


def scripted(call: Any) -> Any:
    """A call of `/v1/responses` or `/v1/messages` whose output is read by a `ScriptedParser`."""
    plan = OutputPlan(parser=ScriptedParser, is_plain=False)
    return dataclasses.replace(call, chat=dataclasses.replace(call.chat, output=plan))


def deltas(request: EngineRequest, script: Sequence[str], reason: FinishReason = "stop") -> list[OutputDelta]:
    """Outputs of one token each, of which the last one ends with this reason."""
    return [
        OutputDelta(
            request=request,
            text=text,
            token_ids=[7],
            finish_reason=reason if at == len(script) - 1 else None,
            metrics=RequestMetrics(arrival_s=0.0, slo=request.slo),
        )
        for at, text in enumerate(script)
    ]


def merged(request: EngineRequest, script: Sequence[str], reason: FinishReason = "stop") -> OutputDelta:
    """The same as one output."""
    first, *others = deltas(request, [f"{text}\n" for text in script], reason)
    for other in others:
        first.merge(other)
    return first


def streamed(builder: Any, outputs: Sequence[OutputDelta], read: Callable[[str], list[dict]]) -> list[dict]:
    """The events of a stream."""
    text = b"".join(builder.events(0, output) for output in outputs) + builder.end()
    return read(text.decode())

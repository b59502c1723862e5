"""The plan for an output: its constraint, and the parser of its text."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.request import StructuredOutputsParams
from apt_jax.validation.structured import checked_structured_outputs
from serve.http_api.constraint_fields import RESPONSE_FORMAT, Constraint
from serve.http_api.tool_calls.constrained import ConstrainedCalls
from serve.http_api.tool_calls.definitions import NO_TOOLS, ToolSet
from serve.http_api.tool_calls.distinct import DistinctCalls
from serve.http_api.tool_calls.events import CallStart, OutputEvent, OutputParser, PlainText
from serve.http_api.tool_calls.forms import JSON_FORM, CallForm, form_of
from serve.http_api.tool_calls.grammar import (
    Literal,
    answer_grammar,
    answer_rules,
    calls_grammar,
    harmony_grammar,
    literals_of,
)
from serve.http_api.tool_calls.harmony import HarmonyOutput
from serve.http_api.tool_calls.reasoning import (
    CLOSING,
    OPENING,
    ReasoningFirst,
    begins_inside,
    reasoning_parser_of,
)

_PROMPT_END = 16
"""Number of tokens at the end of the prompt that are checked for the start of reasoning."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """Sampling parameters and parser for the outputs of one call."""

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `SamplingParams`, not validated, that override the fields of the body."""
    parser: Callable[[], OutputParser] = PlainText
    """Creates the parser of one output."""
    is_plain: bool = True
    """True if all text is content."""
    only_calls: bool = False
    """True if the output has no content."""
    constrains_calls: bool = False
    """True if the output is constrained by a grammar of calls, made from the schemas in `tools`."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the functions that represent custom tools."""


def plan_output(
    parts: EngineComponents,
    tools: ToolSet,
    prompt_token_ids: list[int],
    asked: Constraint | None,
    *,
    continues: bool = False,
) -> OutputPlan:
    """Return the plan for the outputs of a conversation.

    Args:
        parts: the engine's components.
        tools: tools from `serve.http_api.tool_calls.definitions.read_tools`.
        prompt_token_ids: token ids of the prompt, which includes the definitions of the tools.
        asked: the constraint of the body. If a call is required, `response_format` has no effect, because it constrains
            content and the output then has no content.
        continues: whether the output continues the last message. It then has no reasoning, unless the message ends with
            ``<think>``.

    Raises:
        InvalidRequestError: the constraint is malformed, or cannot be combined with the tools or with reasoning.
    """
    template, tokenizer = parts.chat_template, parts.tokenizer
    assert tokenizer is not None  # there is a prompt
    source = "" if template is None else template.source_for(tools.definitions is not None)
    form = form_of(parts.config.tool_call_parser, source) if tools.functions else None
    if tools.mode == "required":
        form = form or JSON_FORM
        if asked is not None and asked.field != RESPONSE_FORMAT:
            raise InvalidRequestError("tool_choice", f"requires a call; leave out {asked.field} or tool_choice")
        asked = None
    constraint = None if asked is None else asked.value
    literal = literals_of(tokenizer)
    answer = None if constraint is None else answer_rules(_checked(constraint))
    if reasoning_parser_of(parts.config.reasoning_parser, source) == "harmony":
        if constraint is not None and answer is None:
            raise _no_grammar()
        return _harmony(NO_TOOLS if form is None else tools, answer, literal, continues=continues)
    reasoning = _reasoning(parts, source, prompt_token_ids, continues)
    fields: dict[str, Any] = {}
    marks = [OPENING, CLOSING] if reasoning else []
    make_inner: Callable[[], OutputParser] = PlainText
    constrains = False
    if form is not None:
        marks += [form.prefix, form.opening, form.middle, form.closing, *form.other_marks]
        names = frozenset(function.name for function in tools.functions)
        make_inner = _free(form, names, tools.max_calls)
        # Without a mark, a call and an answer in JSON begin in the same way, so only the constraint is used.
        beside = answer is not None and bool(form.mark)
        if beside or (constraint is None and _needs_grammar(tools)):
            constrains, free_text = True, tools.mode == "auto"
            grammar = calls_grammar(
                form,
                tools.functions,
                literal,
                max_calls=tools.max_calls,
                free_text=free_text,
                answer=answer,
                reasoning=reasoning,
            )
            fields["structured_outputs"] = {"grammar": grammar}
            make_inner = _constrained(
                form,
                names,
                single=tools.max_calls == 1,
                free_text=free_text and answer is None,
                only_calls=tools.mode == "required",
            )
    if reasoning is not None and constraint is not None and not constrains:
        if answer is None:
            raise _no_grammar()
        fields["structured_outputs"] = {"grammar": answer_grammar(answer, literal, reasoning)}
    if tokenizer.special_pattern is not None and any(map(tokenizer.special_pattern.search, marks)):
        fields["skip_special_tokens"] = False
    if reasoning is None and make_inner is PlainText:
        return OutputPlan(fields=fields)
    parser = make_inner if reasoning is None else _reasoned(reasoning == "inside", make_inner)
    return OutputPlan(
        fields=fields,
        parser=parser,
        is_plain=False,
        only_calls=tools.mode == "required",
        constrains_calls=constrains,
        custom_tools=frozenset(function.name for function in tools.functions if function.is_custom),
    )


def _no_grammar() -> InvalidRequestError:
    return InvalidRequestError(
        "structured_outputs",
        "a grammar cannot follow the model's reasoning; use a JSON schema, or start the server with --reasoning-parser none",
    )


def _harmony(tools: ToolSet, answer: str | None, literal: Literal, *, continues: bool) -> OutputPlan:
    """Return the plan for outputs in channels. A model ends its output after a call, so there is one call at most."""
    fields: dict[str, Any] = {"skip_special_tokens": False}
    constrains = bool(tools.functions) and not continues and (answer is not None or _needs_grammar(tools))
    if not continues and (constrains or answer is not None):
        only_calls = tools.mode == "required"
        grammar = harmony_grammar(tools.functions, literal, answer=answer, only_calls=only_calls)
        fields["structured_outputs"] = {"grammar": grammar}
    max_calls = min(1, len(tools.functions)) if constrains else tools.max_calls if tools.functions else 0
    return OutputPlan(
        fields=fields,
        parser=lambda: HarmonyOutput(max_calls, constrained=constrains, in_content=continues),
        is_plain=False,
        only_calls=tools.mode == "required",
        constrains_calls=constrains,
        custom_tools=frozenset(function.name for function in tools.functions if function.is_custom),
    )


def told(plan: OutputPlan, tell: Callable[[bool], object]) -> OutputPlan:
    """Return a plan whose parsers call `tell` at the end of an output: True if it has calls."""
    return dataclasses.replace(plan, parser=lambda: _Telling(plan.parser(), tell))


class _Telling:
    """Parser that tells whether the output has calls; implements `OutputParser`."""

    def __init__(self, inner: OutputParser, tell: Callable[[bool], object]) -> None:
        self._inner, self._tell, self._has_calls = inner, tell, False

    def push(self, text: str, finished: bool) -> list[OutputEvent]:
        events = list(self._inner.push(text, finished))
        self._has_calls |= any(isinstance(event, CallStart) for event in events)
        if finished:
            self._tell(self._has_calls)
        return events


def _needs_grammar(tools: ToolSet) -> bool:
    return tools.mode == "required" or tools.max_calls == 1 or any(function.strict for function in tools.functions)


def _reasoning(parts: EngineComponents, template: str, prompt_token_ids: list[int], continues: bool) -> str | None:
    """Return where reasoning can be in the output: ``inside`` if the output begins within reasoning, ``optional`` if it may
    begin with reasoning, None if it has no reasoning."""
    parser = reasoning_parser_of(parts.config.reasoning_parser, template)
    if parser is None or parts.tokenizer is None:
        return None
    end = parts.tokenizer.decode(prompt_token_ids[-_PROMPT_END:], skip_special_tokens=False)
    if begins_inside("think" if continues else parser, end):
        return "inside"
    return None if continues or end.rstrip().endswith(CLOSING) else "optional"


def _checked(constraint: object) -> StructuredOutputsParams:
    checked = checked_structured_outputs(constraint)
    assert checked is not None
    return checked


def _constrained(
    form: CallForm, names: frozenset[str], *, single: bool, free_text: bool, only_calls: bool
) -> Callable[[], OutputParser]:
    return lambda: DistinctCalls(
        ConstrainedCalls(form, names, single=single, free_text=free_text, only_calls=only_calls)
    )


def _free(form: CallForm, names: frozenset[str], max_calls: int) -> Callable[[], OutputParser]:
    return lambda: form.parser(names, max_calls)


def _reasoned(inside: bool, make_inner: Callable[[], OutputParser]) -> Callable[[], OutputParser]:
    return lambda: ReasoningFirst(inside, make_inner())

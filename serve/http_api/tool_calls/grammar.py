"""Grammars for outputs with tool calls, in llguidance's dialect of Lark.

Each function has its own rule with its JSON schema, so that references in a schema stay within it. The text around
arguments is fixed exactly, and arguments have only the whitespace that `json.dumps` writes, as in training data.
`serve.http_api.tool_calls.constrained` parses the output.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from apt_jax.errors import InvalidRequestError
from apt_jax.request import StructuredOutputsParams
from apt_jax.structured.forms import field_of, json_schema_of
from apt_jax.structured.json_schema import closed, exact_schema
from apt_jax.text.tokenizer import Tokenizer
from serve.http_api.tool_calls.definitions import Function
from serve.http_api.tool_calls.forms import CallForm
from serve.http_api.tool_calls.harmony import AFTER_ANALYSIS, ANALYSIS, ARGUMENTS, CALL, FINAL
from serve.http_api.tool_calls.reasoning import CLOSING, OPENING

_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY = "(?s:.*)"
_SPACE = r"[ \t\r\n]"
_FREE = "FREE"
_NL = "\n"

Literal = Callable[[str], str]
"""Function that converts a string to a Lark expression."""


def literals_of(tokenizer: Tokenizer) -> Literal:
    """Return a function that converts a string to a Lark expression. Special tokens become token ids, because normal
    tokens never produce their text."""
    pattern = tokenizer.special_pattern

    def literal(text: str) -> str:
        pieces: list[str] = []
        at = 0
        for found in pattern.finditer(text) if pattern is not None else ():
            token_id = tokenizer.backend.token_to_id(found[0])
            if token_id is None:
                continue
            pieces += [json.dumps(text[at : found.start()])] if found.start() > at else []
            pieces.append(f"<[{token_id}]>")
            at = found.end()
        if at < len(text) or not pieces:
            pieces.append(json.dumps(text[at:]))
        return " ".join(pieces)

    return literal


def calls_grammar(
    form: CallForm,
    functions: Sequence[Function],
    literal: Literal,
    *,
    max_calls: int,
    free_text: bool,
    answer: str | None = None,
    reasoning: str | None,
) -> str:
    """Return the grammar for outputs with tool calls.

    Args:
        form: format of the calls.
        functions: functions that may be called.
        literal: function from `literals_of`.
        max_calls: maximum number of calls.
        free_text: True: content is allowed and calls are optional; False: at least one call and no content.
        answer: rules from `answer_rules` for the only content that is allowed instead of calls; None: no such rules.
        reasoning: ``inside`` if the output begins within reasoning, ``optional`` if it may begin with reasoning, None if
            it has no reasoning.
    """
    rules = [_start(literal, reasoning)]
    if free_text and form.mark and answer is None:
        rules += _marked(form, literal, max_calls, reasoning)
        opening = form.opening.removeprefix(form.mark)
        rules.append(f"call: {_call(form, opening, literal)}")
    else:
        if answer is not None:
            rules += ["output: calls | answer", answer]
        elif free_text:
            rules += [f"output: calls | {_FREE}", _leading_text(form, reasoning)]
        else:
            rules.append("output: calls")
        rules += _sequence(form, literal, max_calls)
    return "\n".join([*rules, *_function_rules(form.middle, functions, literal)]) + "\n"


def harmony_grammar(functions: Sequence[Function], literal: Literal, *, answer: str | None, only_calls: bool) -> str:
    """Return the grammar for harmony: an analysis, which may be left out, followed by one call or by the final message.

    Args:
        functions: functions that may be called; empty: no calls.
        literal: function from `literals_of`.
        answer: rules from `answer_rules` for the final message; None: any text.
        only_calls: there is no final message.
    """
    after = literal(AFTER_ANALYSIS)
    if after.startswith('"'):
        text = re.escape(AFTER_ANALYSIS).replace("/", r"\/")
        rules = [f"thought: {literal(ANALYSIS)} closed", f"closed[lazy]: /{_ANY}{text}/"]
    else:
        rules = [f"thought: {literal(ANALYSIS)} THOUGHT {after}", f"THOUGHT: /{_ANY}/"]
    outputs = []
    if functions:
        outputs.append("call")
        rules += [f"call: {literal(CALL)} function", *_function_rules(ARGUMENTS, functions, literal)]
    if not only_calls:
        outputs.append("final")
        rules.append(f"final: {literal(FINAL)} {_FREE if answer is None else 'answer'}")
        rules.append(f"{_FREE}: /{_ANY}/" if answer is None else answer)
    return "\n".join([f"start: thought? output\noutput: {' | '.join(outputs)}", *rules]) + "\n"


def answer_grammar(answer: str, literal: Literal, reasoning: str) -> str:
    """Return the grammar for reasoning followed by an answer.

    Args:
        answer: rules from `answer_rules`.
        literal, reasoning: see `calls_grammar`.
    """
    return f"{_start(literal, reasoning)}\noutput: answer\n{answer}\n"


def answer_rules(constraint: StructuredOutputsParams) -> str | None:
    """Return the rule ``answer`` for a checked constraint; None if the constraint is a grammar with its own rules.

    Raises:
        InvalidRequestError: the JSON schema is not supported.
    """
    if constraint.grammar is not None:
        return None
    if constraint.regex is not None:
        # An unescaped slash or line break would end the expression.
        regex = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), constraint.regex)
        return f"answer: ANSWER\nANSWER: /{regex}/"
    if constraint.choice is not None:
        return "answer: " + " | ".join(json.dumps(text) for text in constraint.choice)
    try:
        return "answer: %json " + json.dumps(json_schema_of(constraint))
    except ValueError as error:
        raise InvalidRequestError(f"structured_outputs.{field_of(constraint)}", str(error)) from None


def _start(literal: Literal, reasoning: str | None) -> str:
    """Return the first rules: reasoning, if the output may have it, followed by ``output``."""
    if reasoning is None:
        return "start: output"
    closing = literal(CLOSING)
    if closing.startswith('"'):
        thought = rf"closed SPACE{_NL}closed[lazy]: /{_ANY}<\/think>/"
    else:
        thought = rf"THOUGHT {closing} SPACE{_NL}THOUGHT: /{_ANY}/"
    start = "thought output" if reasoning == "inside" else f"(SPACE {literal(OPENING)} thought)? output"
    return f"start: {start}\nthought: {thought}\nSPACE: /{_SPACE}{{0,4}}/"


def _sequence(form: CallForm, literal: Literal, max_calls: int) -> list[str]:
    """Return the rules for a sequence of calls without content. The text before the first name is one lexeme, so output
    that begins like this text can still become other text."""
    if max_calls == 1:
        return [f"calls: {_call(form, form.opening, literal)}"]
    suffix = f" {literal(form.suffix)}" if form.suffix else ""
    return [
        f"calls: {_call(form, form.prefix + form.opening, literal)} call{{0,{max_calls - 1}}}{suffix}",
        f"call: {_call(form, form.separator + form.opening, literal)}",
    ]


def _call(form: CallForm, opening: str, literal: Literal) -> str:
    parts = [literal(opening) if opening else "", "function", literal(form.closing) if form.closing else ""]
    return " ".join(filter(None, parts))


def _leading_text(form: CallForm, reasoning: str | None) -> str:
    """Return the rule for text that does not begin like a call or, if the output may have reasoning, like reasoning."""
    openings = [rf'(\[{_SPACE}*)?\{{{_SPACE}*"name"'] if form.opening.startswith("{") else []
    openings += [OPENING] if reasoning == "optional" else []
    return f"{_FREE}: /{_ANY}/ & ~/{_SPACE}*({'|'.join(openings)}){_ANY}/"


def _marked(form: CallForm, literal: Literal, max_calls: int, reasoning: str | None) -> list[str]:
    """Return the rules for content with calls after marks. After the maximum number of calls, no text may follow."""
    mark = literal(form.mark)
    # Reasoning is not content: a mark in it does not begin a call.
    first = f" & ~/{_SPACE}*{OPENING}{_ANY}/" if reasoning == "optional" else ""
    calls = ["first_call"]
    if max_calls > 1:
        # Text after the last allowed call would be parsed for another call.
        before_text = f" (more_call){{0,{max_calls - 2}}}" if max_calls > 2 else ""
        calls = [f"first_call (more_call){{0,{max_calls - 1}}}", f"first_call{before_text} {_FREE}"]
    rules = [f"output: {' | '.join(['FIRST', *calls])}", f"FIRST: /{_ANY}/{first}", f"{_FREE}: /{_ANY}/"]
    if mark.startswith('"'):
        text = re.escape(form.mark).replace("/", r"\/")
        rules += [
            "first_call: first_mark call",
            "first_mark[lazy]: FIRST_MARK",
            f"FIRST_MARK: /{_ANY}{text}/{first}",
        ]
        if max_calls > 1:
            rules += ["more_call: more_mark call", f"more_mark[lazy]: /{_ANY}{text}/"]
    else:
        rules.append(f"first_call: FIRST {mark} call")
        if max_calls > 1:
            rules.append(f"more_call: {_FREE} {mark} call")
    return rules


def _function_rules(middle: str, functions: Sequence[Function], literal: Literal) -> list[str]:
    rules = [f"function: {' | '.join(f'function_{number}' for number in range(len(functions)))}"]
    for number, function in enumerate(functions):
        schema = _arguments_schema(function)
        rules.append(f"function_{number}: {literal(function.name + middle)} %json {json.dumps(schema)}")
    return rules


def _arguments_schema(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments for llguidance. If the function is not strict, keywords that
    llguidance cannot enforce are ignored.

    Raises:
        InvalidRequestError: the schema of a strict function cannot be enforced.
    """
    schema = {"type": "object", **function.parameters}
    try:
        exact = exact_schema(schema, _WHITESPACE)
    except ValueError as error:
        if function.strict:
            raise InvalidRequestError("tools", f"parameters of {function.name!r}: {error}") from None
        exact = {**closed(schema), "x-guidance": _WHITESPACE}
    if not function.strict:
        exact["x-guidance"] = {**exact["x-guidance"], "lenient": True}
    return exact

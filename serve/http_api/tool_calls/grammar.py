"""Grammars of outputs with calls, in llguidance's dialect of Lark.

Every function has a rule of its own with its JSON schema in it, so that references in a schema stay within it. The text
around the arguments is fixed to the character, and there is no whitespace in arguments but that of `json.dumps`, which
models were trained on: `serve.http_api.tool_calls.constrained` reads what comes of it.
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
from serve.http_api.tool_calls.reasoning import CLOSING, OPENING

_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY = "(?s:.*)"
_SPACE = r"[ \t\r\n]"
_FREE = "FREE"
_NL = "\n"

Literal = Callable[[str], str]
"""Writes a text as a Lark expression."""


def literals_of(tokenizer: Tokenizer) -> Literal:
    """Texts as Lark expressions for this tokenizer: special tokens in them by their ids, as no text makes them."""
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
    """The grammar of outputs with calls.

    Args:
        form: how calls are written.
        functions: which may be called.
        literal: from `literals_of`.
        max_calls: at most so many.
        free_text: there may be content, and no call; else there is at least one call and no content.
        answer: rules of what may stand in place of calls, from `answer_rules`; then there is no other content.
        reasoning: ``inside`` an output begins, ``optional``, or None for no reasoning.
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
    return "\n".join([*rules, *_function_rules(form, functions, literal)]) + "\n"


def answer_grammar(answer: str, literal: Literal, reasoning: str) -> str:
    """The grammar of reasoning and then an answer.

    Args:
        answer: from `answer_rules`.
        literal, reasoning: as for `calls_grammar`.
    """
    return f"{_start(literal, reasoning)}\noutput: answer\n{answer}\n"


def answer_rules(constraint: StructuredOutputsParams) -> str | None:
    """The rule ``answer`` of a checked constraint; None: it has rules of its own."""
    if constraint.grammar is not None:
        return None
    if constraint.regex is not None:
        # A slash would end the expression, and so would a line.
        regex = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), constraint.regex)
        return f"answer: ANSWER\nANSWER: /{regex}/"
    if constraint.choice is not None:
        return "answer: " + " | ".join(json.dumps(text) for text in constraint.choice)
    try:
        return "answer: %json " + json.dumps(json_schema_of(constraint))
    except ValueError as error:
        raise InvalidRequestError(f"structured_outputs.{field_of(constraint)}", str(error)) from None


def _start(literal: Literal, reasoning: str | None) -> str:
    """The first rules: reasoning if there is some, then ``output``."""
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
    """Calls and nothing else. What the first begins with is one lexeme: a lexer that has seen a part of it can still go
    on with other text."""
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
    """Text that does not begin as a call, nor as reasoning where there may be some."""
    openings = [rf'(\[{_SPACE}*)?\{{{_SPACE}*"name"'] if form.opening.startswith("{") else []
    openings += [OPENING] if reasoning == "optional" else []
    return f"{_FREE}: /{_ANY}/ & ~/{_SPACE}*({'|'.join(openings)}){_ANY}/"


def _marked(form: CallForm, literal: Literal, max_calls: int, reasoning: str | None) -> list[str]:
    """Content, and calls after their marks. After as many calls as are allowed nothing follows."""
    mark = literal(form.mark)
    # Reasoning is none of the content: a mark in it begins no call.
    first = f" & ~/{_SPACE}*{OPENING}{_ANY}/" if reasoning == "optional" else ""
    calls = ["first_call"]
    if max_calls > 1:
        # The text after the last call that is allowed would be read for another one.
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


def _function_rules(form: CallForm, functions: Sequence[Function], literal: Literal) -> list[str]:
    rules = [f"function: {' | '.join(f'function_{number}' for number in range(len(functions)))}"]
    for number, function in enumerate(functions):
        schema = _arguments_schema(function)
        rules.append(f"function_{number}: {literal(function.name + form.middle)} %json {json.dumps(schema)}")
    return rules


def _arguments_schema(function: Function) -> dict[str, Any]:
    """The schema of arguments as llguidance compiles it: to the letter for functions that are strict, else without the
    keywords that cannot be enforced."""
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

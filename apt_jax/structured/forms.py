"""Conversion of users' constraints to llguidance's notation.

`grammar_text` converts every kind of constraint; `apt_jax.validation` has already checked size and depth.
"""

import json
import re
from typing import Any

from apt_jax.request import StructuredOutputsParams
from apt_jax.structured.json_schema import exact_schema

FIELD = "structured_outputs"
DEFAULT_WHITESPACE = r"\r?\n[ \t]{0,20}|[ \t]{1,2}"
"""Whitespace between the parts of a JSON value, as pretty-printers write it. Its length is bounded, since small models
may write spaces endlessly."""

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)
_SCHEMA_GRAMMAR = '{ "grammars": [{ "json_schema"'
"""Prefix of llguidance's notation of a JSON schema."""


def field_of(wanted: StructuredOutputsParams) -> str:
    """Return the name of the field that is set."""
    for name in ("json", "regex", "choice", "grammar", "json_object"):
        if getattr(wanted, name) is not None:
            return name
    raise ValueError("no constraint")


def grammar_text(wanted: StructuredOutputsParams) -> str:
    """Return a checked constraint in llguidance's notation. `json` is JSON text here."""
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(re.escape(text) for text in wanted.choice))
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(_as_lark(wanted.grammar))
    return LLMatcher.grammar_from_json_schema(json_schema_of(wanted))


def json_schema_of(wanted: StructuredOutputsParams) -> dict[str, Any]:
    """Return the schema of a checked `json` or `json_object`, as llguidance compiles it.

    Raises:
        ValueError: a keyword cannot be enforced; the message is one line.
    """
    schema = json.loads(wanted.json) if isinstance(wanted.json, str) else {"type": "object"}
    whitespace: dict[str, Any] = (
        {"whitespace_flexible": False}
        if wanted.disable_any_whitespace
        else {"whitespace_pattern": wanted.whitespace_pattern or DEFAULT_WHITESPACE}
    )
    return exact_schema(schema, whitespace)


def _as_lark(grammar: str) -> str:
    """Return a grammar in llguidance's dialect of Lark. GBNF, recognised by ``::=`` in its rules, is rewritten in
    linear time."""
    if _GBNF_RULE.search(grammar) is None:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # the module also raises plain Exception
        raise ValueError(f"not GBNF: {error}") from None


def has_json(text: str) -> bool:
    """Return True if a grammar in llguidance's notation contains a JSON schema."""
    return text.startswith(_SCHEMA_GRAMMAR) or (not text.startswith("{") and "%json" in text)

"""The forms in which models write calls, one form per family of chat templates."""

import dataclasses
import re
from collections.abc import Callable

from serve.http_api.tool_calls import hermes, llama3_json, mistral, plain_json
from serve.http_api.tool_calls.events import OutputParser

PARSERS = ("hermes", "llama3_json", "mistral", "json")
"""Parsers that `--tool-call-parser` can choose, besides its values for automatic choice and for no parsing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallForm:
    """The text of calls under a constraint: `prefix`, the calls with `separator` between them, `suffix`. A call is
    `opening`, the name, `middle`, the arguments as a JSON object, and `closing`."""

    parser: Callable[[frozenset[str], int], OutputParser]
    """Creates the parser of unconstrained output from the function names and the maximum number of calls."""
    opening: str
    middle: str
    closing: str = ""
    separator: str = ""
    prefix: str = ""
    """Text before the first call, unless only one call is allowed."""
    suffix: str = ""
    """Text after the last call, unless only one call is allowed."""
    mark: str = ""
    """Text that begins a call anywhere in the output; empty: calls can only begin the output."""
    other_marks: tuple[str, ...] = ()
    """Other texts that models write around calls."""
    alphanumeric_ids: bool = False
    """True if ids of calls are nine letters and digits, as the chat templates require."""


_FORMS = {
    "hermes": CallForm(
        parser=hermes.HermesCalls,
        opening='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        closing="}\n</tool_call>",
        separator="\n",
        mark="<tool_call>",
    ),
    "llama3_json": CallForm(
        parser=llama3_json.Llama3Calls,
        opening='{"name": "',
        middle='", "parameters": ',
        closing="}",
        separator="; ",
        other_marks=(llama3_json.PYTHON_TAG,),
    ),
    "mistral": CallForm(
        parser=mistral.MistralCalls,
        opening="[TOOL_CALLS]",
        middle="[ARGS]",
        mark="[TOOL_CALLS]",
        alphanumeric_ids=True,
    ),
    "json": CallForm(
        parser=plain_json.JsonCalls,
        opening='{"name": "',
        middle='", "arguments": ',
        closing="}",
        separator=", ",
        prefix="[",
        suffix="]",
    ),
}
_MISTRAL_ARRAY = dataclasses.replace(
    _FORMS["mistral"],
    opening='{"name": "',
    middle='", "arguments": ',
    closing="}",
    separator=", ",
    prefix="[TOOL_CALLS][",
    suffix="]",
)
_TOOLS_WORD = re.compile(r"\btools\b")


def form_of(parser: str, template: str) -> CallForm | None:
    """Return the form in which a model writes calls.

    Args:
        parser: one of `PARSERS`, ``auto`` to choose by the chat template, or ``none``.
        template: text of the chat template; empty if there is none.

    Returns:
        The form; None for ``none``: text is never parsed for calls.
    """
    if parser == "none":
        return None
    name = _by_template(template) if parser == "auto" else parser
    # Models with a version of Mistral's tokenizer before 11 write an array.
    return _MISTRAL_ARRAY if name == "mistral" and "[ARGS]" not in template else _FORMS[name]


JSON_FORM = _FORMS["json"]
"""Form of required calls if text is not parsed for calls."""


def _by_template(template: str) -> str:
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if _TOOLS_WORD.search(template) and ("<|python_tag|>" in template or '"parameters": ' in template):
        return "llama3_json"
    return "json"

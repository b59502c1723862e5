"""How models write calls: one form a family of chat templates."""

import dataclasses
import re
from collections.abc import Callable

from serve.http_api.tool_calls import hermes, llama3_json, mistral, plain_json
from serve.http_api.tool_calls.events import OutputParser

PARSERS = ("hermes", "llama3_json", "mistral", "json")
"""Names for `--tool-call-parser`, besides the words for automatic choice and off."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallForm:
    """The text of calls as a constraint writes it: `prefix`, the calls with `separator` between them, `suffix`. A call is
    `opening`, the name, `middle`, the arguments as a JSON object, and `closing`."""

    parser: Callable[[frozenset[str], int], OutputParser]
    """Makes the parser for unconstrained output, from the names of functions and the number of calls."""
    opening: str
    middle: str
    closing: str = ""
    separator: str = ""
    prefix: str = ""
    """Text before several calls; a single one has none."""
    suffix: str = ""
    mark: str = ""
    """Text that tells a call from content wherever it stands. Empty: calls begin the output or there are none."""
    other_marks: tuple[str, ...] = ()
    """Other texts that models write around calls."""
    alphanumeric_ids: bool = False
    """Ids of calls are nine letters and digits, as the templates demand."""


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
    """The form of calls of a model.

    Args:
        parser: one of `PARSERS`, ``auto`` for the template's, or ``none``.
        template: text of the chat template; empty: there is none.

    Returns:
        None: text is never read as a call.
    """
    if parser == "none":
        return None
    name = _by_template(template) if parser == "auto" else parser
    # Models before Mistral's tokenizer of version 11 write an array.
    return _MISTRAL_ARRAY if name == "mistral" and "[ARGS]" not in template else _FORMS[name]


JSON_FORM = _FORMS["json"]
"""Form of required calls where text is not read for calls."""


def _by_template(template: str) -> str:
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if _TOOLS_WORD.search(template) and ("<|python_tag|>" in template or '"parameters": ' in template):
        return "llama3_json"
    return "json"

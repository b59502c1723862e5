"""Formats in which models write tool calls, one format for each family of chat templates."""

import dataclasses
import re
from collections.abc import Callable

from serve.http_api.tool_calls import hermes, llama3_json, mistral, plain_json
from serve.http_api.tool_calls.events import OutputParser

PARSERS = ("hermes", "llama3_json", "mistral", "json")
"""Values of `--tool-call-parser` that name a parser. The other values are ``auto`` and ``none``."""
ALIASES = {
    "llama4_json": "llama3_json",
    "llama3": "llama3_json",
    "qwen": "hermes",
    "qwen25": "hermes",
    "openai": "auto",
    "gpt-oss": "auto",
}
"""Names in vLLM and SGLang of these formats. Calls of gpt-oss are read with its reasoning, whatever the format."""  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallForm:
    """A format of tool calls. Constrained output consists of `prefix`, the calls separated by `separator`, and
    `suffix`; a call consists of `opening`, the name, `middle`, the arguments as a JSON object, and `closing`."""

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
    """Text that starts a call anywhere in the output; empty: calls are possible only at the start of the output."""
    other_marks: tuple[str, ...] = ()
    """Other strings that models write around calls."""
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
    """Return the format of a model's tool calls.

    Args:
        parser: one of `PARSERS`, ``auto`` to choose by the chat template, or ``none``.
        template: text of the chat template; empty if there is none.

    Returns:
        The format; None for ``none``, in which case text is never parsed for calls.
    """
    if parser == "none":
        return None
    name = _by_template(template) if parser == "auto" else parser
    # Models that use a version of Mistral's tokenizer before 11 write an array.
    return _MISTRAL_ARRAY if name == "mistral" and "[ARGS]" not in template else _FORMS[name]


JSON_FORM = _FORMS["json"]
"""Format of required calls if text is not parsed for calls."""


def _by_template(template: str) -> str:
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if _TOOLS_WORD.search(template) and ("<|python_tag|>" in template or '"parameters": ' in template):
        return "llama3_json"
    return "json"

"""Bodies of OpenAI's completions and chat completions, as typed records (`serve.http_api.records`).

The bounds of fields that the engine checks come from `apt_jax.validation`; the schemas of messages and tools describe
what `apt_jax.text.chat` and `serve.http_api.tool_calls` accept.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from apt_jax.request import SamplingParams
from apt_jax.text import chat, template_kwargs
from apt_jax.validation import MAX_INTEGER, MAX_LOGPROBS, REQUEST_ID_PATTERN
from serve.http_api import constraint_fields
from serve.http_api.json_schemas import FLAG, NULL, STRING, Facts, Schema, integer, list_of, object_of, or_null
from serve.http_api.records import HIDDEN, EngineField, Flag, Record, Refused, Text, fixed, shaped
from serve.http_api.tool_calls.definitions import NAME_PATTERN
from serve.http_api.unsupported_fields import REFUSED
from serve.slo_headers import TIERS

MAX_PRIORITY = 2**63 - 1
TEXT: Schema = {"type": "string", "minLength": 1}


# --- schemas of fields that other modules check ----------------------------------------------------------------------


def _message() -> Schema:
    """Return the schema of a message: content, calls or both; some roles may have neither. Other fields are ignored."""
    part = {
        "anyOf": [
            STRING,
            object_of(
                {"type": {"enum": ["text", "input_text", "output_text"]}, "text": STRING}, required=("type", "text")
            ),
            object_of({"type": {"const": "refusal"}, "refusal": STRING}, required=("type", "refusal")),
            object_of({"type": {"enum": ["thinking", "reasoning", "redacted_thinking"]}}, required=("type",)),
        ]
    }
    content = {"anyOf": [STRING, {"type": "array", "items": part}]}
    name = {"type": ["string", "null"], "maxLength": chat.MAX_NAME_CHARS}
    called = object_of({"name": STRING, "arguments": {"type": ["string", "object", "null"]}}, required=("name",))
    text = object_of({"name": STRING, "input": STRING}, required=("name", "input"))
    custom = object_of({"type": {"const": "custom"}, "custom": text}, required=("type", "custom"))
    function = object_of({"type": {"not": {"const": "custom"}}, "function": called}, required=("function",))
    calls = {"type": "array", "items": {"anyOf": [function, custom]}}
    fields = {
        "role": {"type": "string", "pattern": f"^{chat.ROLE_PATTERN}$"},
        "name": name,
        "tool_call_id": name,
        "reasoning_content": or_null(STRING),
    }
    says = {**fields, "content": content, "tool_calls": or_null(calls)}
    does = {**fields, "content": or_null(content), "tool_calls": calls | {"minItems": 1}}
    did = {**fields, "content": or_null(content), "tool_calls": {"enum": [[], None]}, "function_call": called}
    silent = {
        **fields,
        "role": {"enum": ["assistant", "tool", "function"]},
        "content": or_null(content),
        "tool_calls": or_null(calls),
    }
    return {
        "anyOf": [
            object_of(says, required=("role", "content")),
            object_of(does, required=("role", "tool_calls")),
            object_of(did, required=("role", "function_call")),
            object_of(silent, required=("role",)),
        ]
    }


def _tool() -> Schema:
    name = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
    fields = {
        "name": name,
        "parameters": {"type": ["object", "null"], "properties": {"type": {"const": "object"}}},
        "strict": or_null(FLAG),
    }
    function = object_of(fields, required=("name",))
    pattern = object_of({"syntax": {"const": "regex"}, "definition": STRING}, required=("syntax", "definition"))
    form = {
        "anyOf": [
            NULL,
            object_of({"type": {"const": "text"}}, required=("type",)),
            object_of({"type": {"const": "grammar"}, "grammar": pattern}, required=("type", "grammar")),
        ]
    }
    custom = object_of({"name": name, "description": or_null(STRING), "format": form}, required=("name",))
    return {
        "anyOf": [
            object_of({"type": {"const": "function"}, "function": function}, required=("type", "function")),
            object_of({"type": {"const": "custom"}, "custom": custom}, required=("type", "custom")),
        ]
    }


def _tool_choice() -> Schema:
    named = object_of({"name": STRING}, required=("name",))
    one = {
        "anyOf": [
            object_of({"type": {"const": kind}, kind: named}, required=("type", kind))
            for kind in ("function", "custom")
        ]
    }
    some = object_of(
        {"mode": {"enum": ["auto", "required"]}, "tools": list_of(one, 1, chat.MAX_TOOLS)}, required=("mode", "tools")
    )
    allowed = object_of({"type": {"const": "allowed_tools"}, "allowed_tools": some}, required=("type", "allowed_tools"))
    return {"anyOf": [{"enum": ["none", "auto", "required", None]}, one, allowed]}


def _functions() -> dict[str, Schema]:
    """Return the schemas of `functions` and `function_call`, which OpenAI has replaced by `tools`."""
    (function,) = (kind["properties"]["function"] for kind in _tool()["anyOf"] if "function" in kind["properties"])
    return {
        "functions": or_null(list_of(function, 0, chat.MAX_TOOLS))
        | {"description": "Older form of `tools`; a call is returned as `function_call`."},
        "function_call": {"anyOf": [{"enum": ["none", "auto", None]}, object_of({"name": STRING}, required=("name",))]},
    }


def prompts(facts: Facts) -> Schema:
    """Return the schema of `prompt`: a text, token ids, or a list of either."""
    most = facts.max_sequences
    kinds = [TEXT, list_of(TEXT, 1, most), facts.token_ids, list_of(facts.token_ids, 1, most)]
    return {"anyOf": kinds, "description": "A text, a list of texts, token ids, or a list of token id lists."}


# --- records ---------------------------------------------------------------------------------------------------------


Model = Annotated[Any, shaped(lambda facts: facts.model)]


class Slo(Record, forbid_unknown_fields=True):
    """Latency objectives. Unknown fields are rejected, because only this server defines the object."""

    ttft_ms: Annotated[Any, shaped(lambda facts: facts.optional("slo_ttft_ms"))] = None
    tbt_ms: Annotated[Any, shaped(lambda facts: facts.optional("slo_tbt_ms"))] = None
    e2e_ms: Annotated[Any, shaped(lambda facts: facts.optional("slo_e2e_ms"))] = None
    slo_class: Annotated[Any, shaped(lambda facts: facts.optional("slo_class"))] = msgspec.field(
        name="class", default=None
    )
    deadline_ms: EngineField = None


class Addressed(Record):
    """Fields with the same meaning in the bodies of all endpoints that run the model."""

    model: Model = None
    request_id: Annotated[Any, fixed(or_null({"type": "string", "pattern": f"^{REQUEST_ID_PATTERN}$"}))] = None
    cache_salt: EngineField = None
    session_id: EngineField = None
    prompt_cache_key: Text = None
    priority: (
        Annotated[
            int,
            Meta(
                ge=-MAX_PRIORITY,
                le=MAX_PRIORITY,
                description="If no class is given: above 0 is best effort, below 0 is real time.",
            ),
        ]
        | None
    ) = None
    slo: Slo | None = None
    slo_ttft_ms: EngineField = None
    slo_e2e_ms: EngineField = None
    slo_class: EngineField = None
    deadline_ms: EngineField = None
    service_tier: Annotated[Any, fixed({"enum": [*sorted(TIERS), None]})] = None  # fmt: skip


class StreamOptions(Record):
    include_usage: Flag = None
    continuous_usage_stats: Flag = None


def _outputs(text: str) -> Meta:
    return shaped(
        lambda facts: or_null(integer(1, facts.max_sequences)) | {"description": text.format(facts.max_sequences)}
    )


class PromptCacheOptions(Record):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Annotated[Text, Meta(description="Advice for `--retention`, such as 30m or 12h.")] = None


class Generation(Addressed):
    """Fields of completions and chat completions."""

    also: ClassVar = constraint_fields.schemas()
    slo_tbt_ms: EngineField = None
    temperature: EngineField = None
    top_k: EngineField = None
    top_p: EngineField = None
    min_p: EngineField = None
    seed: EngineField = None
    repetition_penalty: EngineField = None
    presence_penalty: EngineField = None
    frequency_penalty: EngineField = None
    logit_bias: EngineField = None
    min_tokens: EngineField = None
    stop: EngineField = None
    stop_token_ids: EngineField = None
    ignore_eos: EngineField = None
    include_stop_str_in_output: EngineField = None
    skip_special_tokens: EngineField = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_logprobs: EngineField = None
    bad_words: EngineField = None
    allowed_token_ids: EngineField = None
    truncate_prompt_tokens: EngineField = None
    n: Annotated[Any, _outputs("At most {} answers for all prompts together.")] = None
    best_of: Annotated[Any, _outputs("Must equal `n` if given.")] = None
    stream: Flag = None
    stream_options: StreamOptions | None = None
    return_token_ids: Flag = None
    return_tokens_as_token_ids: Flag = None
    aptjax_timings: Flag = None


class CompletionBody(Generation):
    refused: ClassVar = REFUSED | {
        "add_special_tokens": Refused(
            (True,), "can only be true here; for a prompt without special tokens, send token ids"
        )
    }
    needed: ClassVar = {"prompt": "missing; give text or token ids"}
    prompt: Annotated[Any, shaped(prompts)] = None
    max_tokens: Annotated[
        Any,
        shaped(
            lambda facts: or_null(integer(0, facts.max_output)) | {"default": SamplingParams().max_tokens},
            "0 is accepted only with `echo` or `prompt_logprobs`.",
        ),
    ] = None
    logprobs: EngineField = None
    echo: Flag = None
    suffix: Annotated[
        Text, Meta(description="Text after the part to fill in; for models with fill-in-the-middle tokens.")
    ] = None


Messages = Annotated[Any, fixed(list_of(_message(), 1, chat.MAX_MESSAGES))]
Tools = Annotated[Any, fixed(or_null(list_of(_tool(), 0, chat.MAX_TOOLS)))]
ToolChoice = Annotated[Any, fixed(_tool_choice())]
Parallel = Annotated[Flag, Meta(description="False: at most one call.")]
Continues = Annotated[
    Flag, Meta(description="Continue the last message; requires `add_generation_prompt` to be false or absent.")
]
TemplateKwargs = Annotated[
    Any,
    fixed(
        or_null(
            {
                "type": "object",
                "maxProperties": template_kwargs.MAX_KWARGS,
                "propertyNames": {
                    "pattern": "^[A-Za-z][A-Za-z0-9_]{0,63}$",
                    "not": {"enum": sorted(template_kwargs.RESERVED)},
                },
                "description": "Variables of the chat template.",
            }
        )
    ),
]


MaxTokens = Annotated[Any, shaped(lambda facts: or_null(integer(1, facts.max_output)))]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None


class ConversationBody(Record):
    """Fields that determine the prompt of a conversation. `ChatBody` repeats them, because a record can have only one
    base class."""

    needed: ClassVar = {"messages": "missing; give a list of messages"}

    also: ClassVar = _functions()
    model: Model = None
    messages: Messages = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Parallel = None
    add_generation_prompt: Flag = None
    continue_final_message: Continues = None
    chat_template_kwargs: TemplateKwargs = None
    reasoning_effort: Annotated[Any, HIDDEN] = None


class SharedBody(Generation):
    """Fields of chat completions that other chat APIs accept as well."""

    refused: ClassVar = REFUSED | {
        "add_special_tokens": Refused(
            (False,), "can only be false here, because the chat template adds special tokens"
        ),
        "echo": Refused((False,), "is not supported for chats"),
    }
    add_generation_prompt: Flag = None
    continue_final_message: Continues = None
    chat_template_kwargs: TemplateKwargs = None


class ChatBody(SharedBody):
    needed: ClassVar = {"messages": "missing; give a list of messages"}
    also: ClassVar = {**Generation.also, **_functions()}
    messages: Messages = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Parallel = None
    reasoning_effort: Annotated[Any, HIDDEN] = None
    max_tokens: Annotated[Any, fixed(or_null(integer(1, MAX_INTEGER)))] = None
    max_completion_tokens: MaxTokens = None
    logprobs: Flag = None
    top_logprobs: TopLogprobs = None


def elsewhere(**words: str) -> dict[str, Refused]:
    """Return the fields of chat completions that another API refuses, keyed by name.

    Args:
        words: for each refused field, its replacement for the error message: a field of that API, or an endpoint.
    """
    alone = {
        "best_of": (1,),
        "continuous_usage_stats": (False,),
        "n": (1,),
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
    }
    why, text = "is not supported here; use /v1/chat/completions", "Only chat completions support other values."
    return {name: Refused(harmless, why, text) for name, harmless in alone.items()} | {
        name: Refused(None, f"is not a field of this API; use {word}", f"Use {word}.") for name, word in words.items()
    }

"""Request bodies of the Responses API, and their conversion to chat completions.

A call may continue a stored response (`serve.http_api.responses.store`); fields that refer to a conversation or a stored
prompt are rejected.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.text.chat import MAX_MESSAGES, MAX_TOOLS
from apt_jax.validation import MAX_INTEGER, check_mapping
from serve.compact_json import json_bytes
from serve.http_api import openai_request
from serve.http_api.constraint_fields import RESPONSE_FORMAT
from serve.http_api.json_schemas import FLAG, NULL, STRING, Schema, integer, list_of, many, object_of, or_null
from serve.http_api.openai_bodies import ChatBody, SharedBody, TopLogprobs, elsewhere
from serve.http_api.openai_request import Body
from serve.http_api.records import Flag, Record, Refused, Text, fixed, quoted, read, shaped
from serve.http_api.responses.input_items import LEFT_OUT, ROLES, TEXT_PARTS, messages_of
from serve.http_api.responses.store import ResponseStore, StoredResponse
from serve.http_api.responses.tools import CHOICES, KINDS, chat_choice, chat_tools
from serve.http_api.translation import TranslatedCall, chat_fields, constraint_fields, read_chat, set_thinking

ID_PREFIX = "resp_"
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Accepted names for `include`. Only the first has an effect; the others ask for content that responses never have."""
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_CONTINUED_BYTES = 4 << 20
"""Maximum size of a stored conversation that a call may continue; fields that are ignored count too."""
SHOWN = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Fields that have no effect and are returned in the response."""
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


# --- schemas of fields that are checked where they are read ----------------------------------------------------------


def _item() -> Schema:
    text = object_of({"type": {"enum": list(TEXT_PARTS)}, "text": STRING}, required=("type", "text"))
    refusal = object_of({"type": {"const": "refusal"}, "refusal": STRING}, required=("type", "refusal"))
    content = {"anyOf": [STRING, many({"anyOf": [text, refusal]})]}
    message = {"type": {"enum": ["message", None]}, "role": {"enum": list(ROLES)}, "content": content}
    call = {"type": {"const": "function_call"}, **dict.fromkeys(("call_id", "name", "arguments"), STRING)}
    custom = {"type": {"const": "custom_tool_call"}, **dict.fromkeys(("call_id", "name", "input"), STRING)}
    outputs = ["function_call_output", "custom_tool_call_output"]
    output = {"type": {"enum": outputs}, "call_id": STRING, "output": content}
    thoughts = or_null(many(object_of({"text": STRING}, required=("text",))))
    return {
        "anyOf": [
            object_of(message, required=("role", "content")),
            object_of(call, required=tuple(call)),
            object_of(custom, required=tuple(custom)),
            object_of(output, required=tuple(output)),
            object_of({"type": {"enum": list(LEFT_OUT)}}, required=("type",)),
            object_of({"type": {"const": "reasoning"}, "content": thoughts, "summary": thoughts}, required=("type",)),
        ]
    }


def _format() -> Schema:
    plain = object_of({"type": {"enum": ["text", "json_object"]}}, required=("type",))
    schema: Schema = {"type": ["object", "boolean", "string"]}
    name = or_null({"type": "string", "maxLength": MAX_METADATA_VALUE})
    form = {"type": {"const": "json_schema"}, "name": name, "schema": schema}
    return {"anyOf": [plain, object_of(form, required=("type", "schema"))]}


def _tool() -> Schema:
    fields = {"type": {"const": "function"}, "name": STRING, "strict": or_null(FLAG)}
    named = {"type": {"const": "custom"}, "name": STRING, "description": or_null(STRING)}
    forms = {
        "anyOf": [
            NULL,
            object_of({"type": {"const": "text"}}, required=("type",)),
            object_of(
                {"type": {"const": "grammar"}, "syntax": {"enum": ["regex", "lark"]}, "definition": STRING},
                required=("type", "syntax", "definition"),
            ),
        ]
    }
    custom = object_of({**named, "format": forms}, required=("type", "name"))
    other = object_of({"type": {"type": "string", "not": {"enum": list(KINDS)}}}, required=("type",))
    other["description"] = "Left out of the prompt, because the server does not run it."
    return {"anyOf": [object_of(fields, required=("type", "name")), custom, other]}


def _choice() -> Schema:
    named = object_of({"type": {"enum": list(KINDS)}, "name": STRING}, required=("type", "name"))
    fields = {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]},
        "tools": list_of(named, 1, MAX_TOOLS),
    }
    return {"anyOf": [{"enum": list(CHOICES)}, named, object_of(fields, required=tuple(fields))]}


# --- bodies ----------------------------------------------------------------------------------------------------------

_NOT_STORED: dict[str, tuple[tuple[object, ...], str]] = {
    "conversation": ((), "no conversation is stored here; send the whole conversation as input"),
    "background": ((False,), "is not supported; leave it out, or send a batch"),
    "prompt": ((), "prompts are not stored here; use instructions and input"),
    "previous_response": ((), "send the whole conversation as input"),
    "previous_input_messages": (([],), "send the whole conversation as input"),
    "enable_response_messages": ((False,), "is not supported; /tokenize shows the prompt of a conversation"),
    "access_programs": (([],), "is not supported; only functions and custom tools can be called"),
    "image": ((), "is not supported; no model here generates images"),
    "context_management": (([],), "is not supported; shorten the input"),
}
_PAIRS: Schema = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": MAX_METADATA_KEY},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
}
Short = Annotated[str, Meta(max_length=MAX_METADATA_VALUE)] | None


class Reasoning(Record):
    effort: Short = None
    summary: Short = None


class TextOptions(Record):
    format: Annotated[Any, shaped(lambda _: or_null(_format()))] = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(SharedBody):
    refused: ClassVar = {
        **SharedBody.refused,
        **elsewhere(
            functions="tools",
            function_call="tool_choice",
            logprobs=f'include: ["{LOGPROBS}"]',
            max_completion_tokens="max_output_tokens",
            max_tokens="max_output_tokens",
            messages="input",
            reasoning_effort="reasoning.effort",
            response_format="text.format",
            verbosity="text.verbosity",
        ),
        **{name: Refused(harmless, why, f"Refused: {why}.") for name, (harmless, why) in _NOT_STORED.items()},
    }
    needed: ClassVar = {"input": "missing; give a text or a list of items"}
    input: Annotated[
        Any,
        fixed(
            {
                "anyOf": [STRING, list_of(_item(), 1, MAX_MESSAGES)],
                "description": "The user's text, or the items of the conversation.",
            }
        ),
    ] = None
    instructions: Annotated[Text, Meta(description="System message at the start of the conversation.")] = None
    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_INTEGER)] | None, shaped(lambda facts: or_null(integer(1, facts.max_output)))
    ] = None
    include: Annotated[list[Any] | None, fixed(or_null(many({"enum": list(INCLUDABLE)})))] = None
    top_logprobs: TopLogprobs = None
    metadata: Annotated[Any, fixed(or_null(_PAIRS))] = None
    store: Annotated[
        Flag, Meta(description="False: the response is not stored, whatever `--store-responses` says.")
    ] = None
    previous_response_id: Annotated[
        Text,
        shaped(lambda facts: or_null(STRING) if facts.stores_responses else dict(NULL), "Stored response to continue."),
    ] = None
    parallel_tool_calls: Flag = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=MAX_INTEGER)] | None = None
    truncation: (
        Annotated[
            Literal["auto", "disabled"],
            Meta(description="No effect: input that is too long is rejected, not truncated."),
        ]
        | None
    ) = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[Any, fixed(or_null(list_of(_tool(), 0, MAX_TOOLS)))] = None
    tool_choice: Annotated[Any, fixed(or_null(_choice()))] = None
    user: Short = None
    safety_identifier: Short = None
    prompt_cache_key: Short = None
    prompt_cache_retention: Short = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponsesCall(TranslatedCall):
    """A call to the Responses API."""

    facts: bytes
    """Response fields that do not depend on the output, encoded as a JSON object."""
    store: ResponseStore | None
    """Where the response is stored; None: it is not."""
    items: bytes
    """JSON list of the input items of the whole conversation; empty if the response is not stored."""

    @property
    def call_id(self) -> str:
        return ID_PREFIX + self.base_id

    @property
    def base_id(self) -> str:
        return self.chat.call_id.removeprefix("chatcmpl-")


def read_call(
    parts: EngineComponents,
    body: Body,
    headers: Mapping[str, str],
    arrival_s: float,
    tenant: str | None = None,
    *,
    store: ResponseStore | None = None,
) -> ResponsesCall:
    """Check a body and build its request; see `serve.http_api.openai_request.read_call`.

    Args:
        parts, body, headers, arrival_s, tenant: see `serve.http_api.openai_request.read_call`.
        store: stored responses; None: nothing is stored.

    Raises:
        InvalidRequestError: the body is invalid; `.field` names a field of the body or a header.
        UnknownModelError: the body names a model that the server does not serve.
        BadCallError: `previous_response_id` is not known.
    """
    openai_request.check_model(parts, body.get("model"))
    asked = read(ResponsesBody, body)
    before = _continue(asked, store, tenant)
    store = None if asked.store is False else store
    constraint = constraint_fields(body)
    shown, chat = _translated(asked, constraint)
    call = read_chat(parts, ChatBody(**chat), _NAMES, headers, arrival_s, tenant, constraint)
    params = call.requests[0].params
    shown |= {
        "service_tier": call.service_tier, "temperature": params.temperature, "top_p": params.top_p,
        "previous_response_id": asked.previous_response_id, "store": store is not None,
    }  # fmt: skip
    if before is not None:  # the same session, unless the call names another
        call = call.with_requests(
            [dataclasses.replace(r, session_id=r.session_id or before.session_id) for r in call.requests]
        )
    items = b"" if store is None else json_bytes(_items(asked.input))
    return ResponsesCall(chat=call, names=_NAMES, facts=json_bytes(shown), store=store, items=items)


def _items(given: Any) -> list[Any]:
    """Return the value of `input` as a list of items."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _continue(asked: ResponsesBody, store: ResponseStore | None, tenant: str | None) -> StoredResponse | None:
    """Put the conversation that a body continues before its input. Returns the continued response, if any."""
    if asked.previous_response_id is None:
        return None
    if store is None:
        raise InvalidRequestError(
            "previous_response_id",
            "no response is stored here; send the whole conversation as input, or start with --store-responses N",
        )
    before = store.get(tenant, asked.previous_response_id, "previous_response_id")
    if len(before.items) > MAX_CONTINUED_BYTES:
        raise InvalidRequestError(
            "previous_response_id",
            f"the conversation so far has more than {MAX_CONTINUED_BYTES >> 20} MiB; send a shorter one as input",
        )
    messages_of(None, asked.input)  # errors name its own items
    asked.input = [*json.loads(before.items), *_items(asked.input)]
    return before


def _translated(asked: ResponsesBody, constraint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the response fields that repeat fields of the body, and the fields of the equivalent chat completion. Adds
    `text.format` to `constraint`."""
    chat = chat_fields(asked) | {
        "messages": messages_of(asked.instructions, asked.input),
        "max_completion_tokens": asked.max_output_tokens,
    }
    tools, shown_tools = chat_tools(asked.tools)
    if asked.tool_choice is not None:
        chat["tool_choice"] = chat_choice(asked.tool_choice)
    if tools:
        chat |= {"tools": tools, "parallel_tool_calls": asked.parallel_tool_calls}
    text, effort = asked.text or TextOptions(), asked.reasoning or Reasoning()
    if effort.effort is not None:
        chat["reasoning_effort"] = effort.effort
        set_thinking(chat, effort.effort != "none")
    shown: dict[str, Any] = {
        "background": False,
        "conversation": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": _metadata(asked.metadata),
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "reasoning": {"effort": effort.effort, "summary": effort.summary},
        "text": {
            "format": _format_of(text.format, constraint),
            **({} if text.verbosity is None else {"verbosity": text.verbosity}),
        },
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "tools": shown_tools,
        "top_logprobs": _logprobs(asked, chat),
        "truncation": asked.truncation or "disabled",
        **{name: getattr(asked, name) for name in SHOWN},
    }
    return shown, chat


def _format_of(given: object, constraint: dict[str, Any]) -> dict[str, Any]:
    """Add `text.format` to `constraint`. Returns the format as the response shows it."""
    wanted = {"type": "text"} if given is None else check_mapping("text.format", given)
    match wanted.get("type"):
        case "text" | "json_object":
            shown = {"type": wanted["type"]}
            if given is not None:
                constraint[RESPONSE_FORMAT] = shown
        case "json_schema":
            names = ("name", "description", "schema", "strict")
            shown = {"type": "json_schema", **{name: wanted.get(name) for name in names}}
            name = shown["name"]
            if name is not None and (not isinstance(name, str) or len(name) > MAX_METADATA_VALUE):
                raise InvalidRequestError("text.format", f"its name can have at most {MAX_METADATA_VALUE} characters")
            constraint[RESPONSE_FORMAT] = {"type": "json_schema", "json_schema": {**wanted, "type": None}}
        case kind:
            raise InvalidRequestError(
                "text.format", f"type {quoted(kind)} must be one of text, json_object, json_schema"
            )
    return shown


def _logprobs(asked: ResponsesBody, chat: dict[str, Any]) -> int:
    """Set the fields of a chat completion that ask for log probabilities. Returns `top_logprobs`."""
    for name in asked.include or ():
        if name not in INCLUDABLE:
            raise InvalidRequestError("include", f"{quoted(name)} must be one of {', '.join(INCLUDABLE)}")
    top = asked.top_logprobs or 0
    if LOGPROBS in (asked.include or ()) or top:
        chat |= {"logprobs": True, "top_logprobs": top}
    return top


def _metadata(value: object) -> Mapping[str, object]:
    """Check that metadata is a mapping of strings within OpenAI's limits, and return it."""
    if value is None:
        return {}
    pairs = check_mapping("metadata", value)
    if len(pairs) > MAX_METADATA:
        raise InvalidRequestError("metadata", f"{len(pairs)} pairs; at most {MAX_METADATA}")
    for key, text in pairs.items():
        if len(key) > MAX_METADATA_KEY or not isinstance(text, str) or len(text) > MAX_METADATA_VALUE:
            raise InvalidRequestError(
                "metadata",
                f"keys can have at most {MAX_METADATA_KEY} characters; values must be strings of at most {MAX_METADATA_VALUE}",
            )
    return pairs

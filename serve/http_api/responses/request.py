"""Bodies of the Responses API, and the chat completions that they ask for.

Nothing is stored: whatever needs an earlier response, a conversation or a file of the server is refused by name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.frontend.components import EngineComponents
from apt_jax.validation import MAX_INTEGER, MAX_LOGPROBS, check_integer, check_mapping
from serve.compact_json import json_bytes
from serve.http_api import openai_request
from serve.http_api.json_schemas import Schema
from serve.http_api.openai_request import Body
from serve.http_api.responses.input_items import messages_of
from serve.http_api.responses.tools import chat_choice, chat_tools
from serve.http_api.translation import (
    TranslatedCall,
    chat_fields,
    chat_schemas,
    quoted,
    read_chat,
    set_thinking,
)

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
"""Names for `include`. Only the first adds something: the others belong to tools and contents that no answer has."""
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
TRUNCATIONS = ("auto", "disabled")

REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((), "no response is stored here; send the whole conversation as input"),
    "conversation": ((), "no conversation is stored here; send all of it as input"),
    "background": ((False,), "is not supported; leave it out, or send a batch"),
    "prompt": ((), "prompts are not stored here; use instructions and input"),
    "previous_response": ((), "send the whole conversation as input"),
    "previous_input_messages": (([],), "send the whole conversation as input"),
    "enable_response_messages": ((False,), "is not supported; /tokenize shows what a conversation becomes"),
    "access_programs": (([],), "is not supported; only functions and custom tools are called"),
    "image": ((), "is not supported; no model here makes images"),
    "context_management": (([],), "is not supported; shorten the input"),
}
"""Fields that are refused, with the values that ask for nothing, and what the message says."""

_TAKEN = ("include", "input", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "store",
          "text", "tool_choice", "tools", "top_logprobs", "truncation", "max_tool_calls")  # fmt: skip
SHOWN = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Fields that mean nothing here and come back in the answer."""
_OWN = (*_TAKEN, *SHOWN, *REFUSED)
_OF_CHAT = {
    "functions": "tools",
    "function_call": "tool_choice",
    "logprobs": f'include: ["{LOGPROBS}"]',
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponsesCall(TranslatedCall):
    facts: bytes
    """JSON object of the fields of the answer that only the body decides."""

    @property
    def call_id(self) -> str:
        return ID_PREFIX + self.base_id

    @property
    def base_id(self) -> str:
        return self.chat.call_id.removeprefix("chatcmpl-")


def read_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None = None
) -> ResponsesCall:
    """Check a body and build the request that it asks for; see `serve.http_api.openai_request.read_call`.

    Raises:
        InvalidRequestError: one line; `.field` names a field of the body or a header.
        UnknownModelError: another model is asked for.
    """
    openai_request.check_model(parts, body)
    shown, chat = _translated(body)
    call = read_chat(parts, chat, _NAMES, headers, arrival_s, tenant)
    params = call.requests[0].params
    shown |= {"service_tier": call.service_tier, "temperature": params.temperature, "top_p": params.top_p}
    return ResponsesCall(chat=call, names=_NAMES, facts=json_bytes(shown))


def chat_fields_of(of_chat: Mapping[str, Schema]) -> dict[str, Schema]:
    """Schemas of the fields that this API shares with chat completions; see `chat_schemas`."""
    return chat_schemas(of_chat, _OWN, _OF_CHAT)


def _translated(body: Body) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the answer shows of a body, and the body of the chat completion that it asks for."""
    _refuse(body)
    chat = chat_fields(body, _OWN, _OF_CHAT)
    chat["messages"] = messages_of(body.get("instructions"), body.get("input"))
    most = body.get("max_output_tokens")
    if most is not None:
        chat["max_completion_tokens"] = check_integer("max_output_tokens", most, 1, MAX_INTEGER)
    tools, shown_tools = chat_tools(body.get("tools"))
    choice = body.get("tool_choice")
    if choice is not None:
        chat["tool_choice"] = chat_choice(choice)
    if tools:
        chat |= {"tools": tools, "parallel_tool_calls": body.get("parallel_tool_calls")}
    for name in ("store", "parallel_tool_calls"):
        openai_request.flag(body, name)
    if body.get("max_tool_calls") is not None:  # of built-in tools, which there are none of
        check_integer("max_tool_calls", body["max_tool_calls"], 1, MAX_INTEGER)
    truncation = body.get("truncation")
    if truncation is not None and truncation not in TRUNCATIONS:
        raise InvalidRequestError("truncation", f"{quoted(truncation)} must be one of {', '.join(TRUNCATIONS)}")
    text, reasoning = _text(body, chat), _reasoning(body, chat)
    top = _logprobs(body, chat)
    shown: dict[str, Any] = {
        "background": False,
        "conversation": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": most,
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": _metadata(body.get("metadata")),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": reasoning,
        "store": False,
        "text": text,
        "tool_choice": "auto" if choice is None else choice,
        "tools": shown_tools,
        "top_logprobs": top,
        "truncation": truncation or "disabled",
        **{name: _short_text(name, body.get(name)) for name in SHOWN},
    }
    return shown, chat


def _refuse(body: Body) -> None:
    for name, (harmless, reason) in REFUSED.items():
        value = body.get(name)
        if value is not None and not any(value == v and type(value) is type(v) for v in harmless):
            raise InvalidRequestError(name, reason)


def _text(body: Body, chat: dict[str, Any]) -> dict[str, Any]:
    """Put `text.format` into a chat completion; returns what the answer shows of `text`."""
    text = {} if body.get("text") is None else check_mapping("text", body["text"])
    verbosity = text.get("verbosity")
    if verbosity not in (None, "low", "medium", "high"):
        raise InvalidRequestError("text.verbosity", "must be one of low, medium, high")
    given = text.get("format")
    wanted = {"type": "text"} if given is None else check_mapping("text.format", given)
    match wanted.get("type"):
        case "text" | "json_object":
            shown = {"type": wanted["type"]}
            if given is not None:
                chat["response_format"] = shown
        case "json_schema":
            names = ("name", "description", "schema", "strict")
            shown = {"type": "json_schema", **{name: wanted.get(name) for name in names}}
            if shown["name"] is not None:
                _short_text("text.format", shown["name"])
            chat["response_format"] = {"type": "json_schema", "json_schema": {**wanted, "type": None}}
        case kind:
            raise InvalidRequestError(
                "text.format", f"type {quoted(kind)} must be one of text, json_object, json_schema"
            )
    return {"format": shown, **({} if verbosity is None else {"verbosity": verbosity})}


def _reasoning(body: Body, chat: dict[str, Any]) -> dict[str, Any]:
    """Put `reasoning.effort` into a chat completion; returns what the answer shows of `reasoning`."""
    reasoning = {} if body.get("reasoning") is None else check_mapping("reasoning", body["reasoning"])
    shown = {name: _short_text(f"reasoning.{name}", reasoning.get(name)) for name in ("effort", "summary")}
    if shown["effort"] is not None:
        chat["reasoning_effort"] = shown["effort"]
        set_thinking(chat, shown["effort"] != "none")
    return shown


def _logprobs(body: Body, chat: dict[str, Any]) -> int:
    """Put the log probabilities that are asked for into a chat completion; returns how many most likely tokens."""
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        raise InvalidRequestError("include", f"{json_kind(include)} is not a list")
    for name in include or ():
        if name not in INCLUDABLE:
            raise InvalidRequestError("include", f"{quoted(name)} must be one of {', '.join(INCLUDABLE)}")
    top = body.get("top_logprobs")
    top = 0 if top is None else check_integer("top_logprobs", top, 0, MAX_LOGPROBS)
    if LOGPROBS in (include or ()) or top:
        chat |= {"logprobs": True, "top_logprobs": top}
    return top


def _metadata(value: object) -> Mapping[str, object]:
    """Return pairs of texts, as OpenAI bounds them."""
    if value is None:
        return {}
    pairs = check_mapping("metadata", value)
    if len(pairs) > MAX_METADATA:
        raise InvalidRequestError("metadata", f"{len(pairs)} pairs; at most {MAX_METADATA}")
    for key, text in pairs.items():
        if len(key) > MAX_METADATA_KEY or not isinstance(text, str) or len(text) > MAX_METADATA_VALUE:
            raise InvalidRequestError(
                "metadata",
                f"keys have at most {MAX_METADATA_KEY} characters, values are texts of at most {MAX_METADATA_VALUE}",
            )
    return pairs


def _short_text(field: str, value: object) -> object:
    if value is not None and (not isinstance(value, str) or len(value) > MAX_METADATA_VALUE):
        raise InvalidRequestError(field, f"must be a text of at most {MAX_METADATA_VALUE} characters")
    return value

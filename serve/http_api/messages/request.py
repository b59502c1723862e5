"""Bodies of Anthropic's Messages API, and the chat completions that they ask for."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.frontend.components import EngineComponents
from apt_jax.validation import MAX_INTEGER, check_integer, check_mapping
from apt_jax.validation.values import check_number
from serve.compact_json import json_bytes
from serve.http_api import openai_request
from serve.http_api.json_schemas import Schema
from serve.http_api.messages.content import messages_of
from serve.http_api.messages.tools import chat_choice, chat_tools
from serve.http_api.openai_request import Body
from serve.http_api.translation import (
    TranslatedCall,
    chat_fields,
    chat_schemas,
    field_renamer,
    quoted,
    read_chat,
    set_thinking,
)

ID_PREFIX = "msg_"
THINKING = ("enabled", "disabled", "adaptive", "between_tools")
DISPLAYS = ("summarized", "omitted")
SERVICE_TIERS = ("auto", "standard_only")
USED_TIERS = {"default": "standard", "flex": "batch", "priority": "priority"}
"""Anthropic's names of the tiers that answers name (`serve.slo_headers.USED_TIERS`)."""
MAX_TEMPERATURE = 1.0
MAX_USER_ID_CHARS = 512

REFUSED: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
}
"""Fields that are refused, with the values that ask for nothing."""

_TAKEN = ("cache_control", "context_management", "max_tokens", "messages", "metadata", "output_config", "output_format", "service_tier",
          "stop_sequences", "system", "temperature", "thinking", "tool_choice", "tools")  # fmt: skip
_OWN = (*_TAKEN, *REFUSED, "add_generation_prompt", "continue_final_message")
_OF_CHAT = {
    "functions": "tools",
    "function_call": "tool_choice",
    "logprobs": "/v1/chat/completions",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "top_logprobs": "/v1/chat/completions",
}
_NAMES = {
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessagesCall(TranslatedCall):
    hides_thinking: bool
    """Thinking blocks are empty."""

    @property
    def call_id(self) -> str:
        return ID_PREFIX + self.chat.call_id.removeprefix("chatcmpl-")


def read_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None = None
) -> MessagesCall:
    """Check a body and build the request that it asks for; see `serve.http_api.openai_request.read_call`.

    Raises:
        InvalidRequestError: one line; `.field` names a field of the body or a header.
        UnknownModelError: another model is asked for.
    """
    openai_request.check_model(parts, body)
    if body.get("max_tokens") is None:
        raise InvalidRequestError("max_tokens", "missing; give the most tokens of the answer")
    chat = _conversation(body)
    chat["max_tokens"] = check_integer("max_tokens", body["max_tokens"], 1, MAX_INTEGER)
    if body.get("stop_sequences") is not None:
        if not isinstance(body["stop_sequences"], list):
            raise InvalidRequestError("stop_sequences", f"{json_kind(body['stop_sequences'])} is not a list of texts")
        chat["stop"] = body["stop_sequences"]
    temperature = body.get("temperature")
    if temperature is not None:
        if check_number("temperature", temperature) > MAX_TEMPERATURE:
            raise InvalidRequestError("temperature", f"{temperature} must lie in [0, 1]")
        chat["temperature"] = temperature
    call = read_chat(parts, chat, _NAMES, headers, arrival_s, tenant)
    return MessagesCall(chat=call, names=_NAMES, hides_thinking=_hides_thinking(body))


def count_tokens(parts: EngineComponents, body: Body) -> bytes:
    """The length of the prompt that a body makes. Returns the body of the answer.

    Raises:
        InvalidRequestError, UnknownModelError: as for `read_call`.
    """
    openai_request.check_model(parts, body)
    chat = _conversation(body)
    try:
        tools, options = openai_request.tools_of(chat), openai_request.template_options(chat)
        ids = parts.chat_prompt(chat["messages"], tools=tools, **options)
    except InvalidRequestError as error:
        raise field_renamer(_NAMES)(error) from None
    return json_bytes({"input_tokens": len(ids)})


def chat_fields_of(of_chat: Mapping[str, Schema]) -> dict[str, Schema]:
    """Schemas of the fields that this API shares with chat completions; see `chat_schemas`."""
    return chat_schemas(of_chat, _OWN, _OF_CHAT)


def _conversation(body: Body) -> dict[str, Any]:
    """The body of a chat completion, less what only generation needs."""
    for name, harmless in REFUSED.items():
        value = body.get(name)
        if value is not None and not any(value == v and type(value) is type(v) for v in harmless):
            raise InvalidRequestError(name, "is not supported")
    chat = chat_fields(body, _OWN, _OF_CHAT)
    chat["messages"] = messages = messages_of(body.get("system"), body.get("messages"))
    if messages[-1]["role"] == "assistant":  # the answer goes on with it
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    tools = chat_tools(body.get("tools"))
    choice, parallel = chat_choice(body.get("tool_choice"))
    if tools:
        chat |= {"tools": tools, "parallel_tool_calls": parallel}
    if choice is not None:
        chat["tool_choice"] = choice
    _take_output_config(body, chat)
    _check_metadata(body.get("metadata"))
    _take_thinking(body, chat)
    tier = body.get("service_tier")
    if tier is not None and tier not in SERVICE_TIERS:
        raise InvalidRequestError("service_tier", f"{quoted(tier)} must be one of {', '.join(SERVICE_TIERS)}")
    return chat


def _take_output_config(body: Body, chat: dict[str, Any]) -> None:
    """Put the constraint and the effort that are asked for into a chat completion."""
    config = {} if body.get("output_config") is None else check_mapping("output_config", body["output_config"])
    wanted, field = config.get("format"), "output_config.format"
    if body.get("output_format") is not None:  # the older name
        if wanted is not None:
            raise InvalidRequestError("output_format", "stands in output_config.format too; give it once")
        wanted, field = body["output_format"], "output_format"
    if wanted is not None:
        wanted = check_mapping(field, wanted)
        if wanted.get("type") != "json_schema":
            raise InvalidRequestError(field, f"type {quoted(wanted.get('type'))} must be 'json_schema'")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}
    effort = config.get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise InvalidRequestError("output_config.effort", f"{json_kind(effort)} is not a word")
        chat["reasoning_effort"] = effort


def _check_metadata(metadata: object) -> None:
    user = None if metadata is None else check_mapping("metadata", metadata).get("user_id")
    if user is not None and (not isinstance(user, str) or len(user) > MAX_USER_ID_CHARS):
        raise InvalidRequestError("metadata.user_id", f"must be a text of at most {MAX_USER_ID_CHARS} characters")


def _take_thinking(body: Body, chat: dict[str, Any]) -> None:
    """Tell the chat template whether the model shall think. Blocks of it come wherever it does, and no budget bounds
    them."""
    if body.get("thinking") is None:
        return
    fields = check_mapping("thinking", body["thinking"])
    kind = fields.get("type")
    if kind not in THINKING:
        raise InvalidRequestError("thinking", f"type {quoted(kind)} must be one of {', '.join(THINKING)}")
    if fields.get("budget_tokens") is not None:
        check_integer("thinking.budget_tokens", fields["budget_tokens"], 1, MAX_INTEGER)
    if fields.get("display") not in (None, *DISPLAYS):
        raise InvalidRequestError("thinking.display", f"must be one of {', '.join(DISPLAYS)}")
    set_thinking(chat, kind != "disabled")


def _hides_thinking(body: Body) -> bool:
    return isinstance(body.get("thinking"), Mapping) and body["thinking"].get("display") == "omitted"

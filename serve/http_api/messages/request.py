"""Request bodies of Anthropic's Messages API, and their conversion to chat completions."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.text.chat import MAX_MESSAGES, MAX_TOOLS
from apt_jax.validation import MAX_INTEGER, check_integer, check_mapping, is_session_id
from apt_jax.validation.values import check_number
from serve.compact_json import json_bytes
from serve.http_api import openai_request
from serve.http_api.json_schemas import FLAG, STRING, Schema, integer, list_of, many, object_of, or_null
from serve.http_api.messages.cache_control import longest_ttl, mark_schema
from serve.http_api.messages.content import BLOCKS, ROLES, messages_of
from serve.http_api.messages.tools import OTHER_PATTERN, chat_choice, chat_tools
from serve.http_api.openai_bodies import ChatBody, PromptCacheOptions, SharedBody, elsewhere
from serve.http_api.openai_request import Body
from serve.http_api.records import HIDDEN, Record, Refused, Text, fixed, quoted, read, shaped
from serve.http_api.translation import (
    TranslatedCall,
    chat_fields,
    constraint_fields,
    field_renamer,
    read_chat,
    set_thinking,
)

ID_PREFIX = "msg_"
THINKING = ("enabled", "disabled", "adaptive", "between_tools")
DISPLAYS = ("summarized", "omitted")
USED_TIERS = {"default": "standard", "flex": "batch", "priority": "priority"}
"""Maps service tiers in responses (`serve.slo_headers.USED_TIERS`) to Anthropic's names for them."""
MAX_TEMPERATURE = 1.0
MAX_USER_ID_CHARS = 512

_NAMES = {
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}


class Metadata(Record):
    user_id: Annotated[str, Meta(max_length=MAX_USER_ID_CHARS)] | None = None


class OutputConfig(Record):
    format: Annotated[Any, shaped(lambda _: or_null(_format()))] = None
    effort: Text = None


# --- schemas of fields that are checked where they are read ----------------------------------------------------------


def _block(name: str, /, **fields: Schema) -> Schema:
    return object_of({"type": {"const": name}, **fields}, required=("type", *fields))


def _texts() -> Schema:
    return {"anyOf": [STRING, many(_block("text", text=STRING))]}


def _message() -> Schema:
    result = _block("tool_result", tool_use_id=STRING)
    result["properties"]["content"] = or_null(_texts())
    blocks = {
        "text": _block("text", text=STRING),
        "tool_result": result,
        "tool_use": _block("tool_use", id=STRING, name=STRING, input={"type": "object"}),
        "thinking": _block("thinking", thinking=STRING),
        "redacted_thinking": _block("redacted_thinking"),
        **{
            name: _block(name, id=STRING, name=STRING, input={"type": "object"})
            for name in ("server_tool_use", "mcp_tool_use")
        },
    }
    elsewhere = object_of(
        {"type": {"type": "string", "pattern": "_tool_result$"}, "tool_use_id": STRING},
        required=("type", "tool_use_id"),
    )
    of_roles = []
    for role in ROLES:
        more = [elsewhere] if role == "assistant" else []
        allowed = many({"anyOf": [*(blocks[name] for name in BLOCKS[role]), *more]})
        fields = {"role": {"const": role}, "content": {"anyOf": [STRING, allowed]}}
        of_roles.append(object_of(fields, required=("role", "content")))
    return {"anyOf": of_roles}


def _tool() -> Schema:
    fields = {
        "type": {"enum": ["custom", None]},
        "name": STRING,
        "input_schema": {"type": "object"},
        "strict": or_null(FLAG),
    }
    described = object_of(fields, required=("name", "input_schema"))
    other = object_of({"type": {"type": "string", "pattern": f"^{OTHER_PATTERN}$"}}, required=("type",))
    return {
        "anyOf": [described, other | {"description": "Left out of the prompt, because the server does not run it."}]
    }


def _choice() -> Schema:
    alone = {"disable_parallel_tool_use": or_null(FLAG)}
    plain = object_of({"type": {"enum": ["auto", "any", "none"]}, **alone}, required=("type",))
    named = object_of({"type": {"const": "tool"}, "name": STRING, **alone}, required=("type", "name"))
    return {"anyOf": [plain, named]}


def _thinking() -> Schema:
    fields = {
        "type": {"enum": list(THINKING)},
        "budget_tokens": or_null(integer(1, MAX_INTEGER)),
        "display": {"enum": [*DISPLAYS, None]},
    }
    return object_of(fields, required=("type",))


def _format() -> Schema:
    schema: Schema = {"type": ["object", "boolean", "string"]}
    return object_of({"type": {"const": "json_schema"}, "schema": schema}, required=("type", "schema"))


# --- bodies ----------------------------------------------------------------------------------------------------------


class CountTokensBody(SharedBody):
    refused: ClassVar = {
        **SharedBody.refused,
        **elsewhere(
            functions="tools",
            function_call="tool_choice",
            logprobs="/v1/chat/completions",
            max_completion_tokens="max_tokens",
            parallel_tool_calls="tool_choice.disable_parallel_tool_use",
            reasoning_effort="output_config.effort",
            response_format="output_config.format",
            stop="stop_sequences",
            top_logprobs="/v1/chat/completions",
        ),
        **{
            name: Refused(harmless, text="Not supported; these values have no effect.")
            for name, harmless in {"container": (), "mcp_servers": ([],)}.items()
        },
    }
    needed: ClassVar = {"messages": "missing; give a list of messages"}
    messages: Annotated[Any, fixed(list_of(_message(), 1, MAX_MESSAGES))] = None
    system: Annotated[Any, fixed(or_null(_texts()))] = None
    tools: Annotated[Any, fixed(or_null(list_of(_tool(), 0, MAX_TOOLS)))] = None
    tool_choice: Annotated[Any, fixed(or_null(_choice()))] = None
    thinking: Annotated[
        Any, shaped(lambda _: or_null(_thinking()), "Turns thinking on or off; `budget_tokens` has no effect.")
    ] = None
    cache_control: Annotated[Any, fixed(mark_schema())] = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INTEGER)] | None = None
    stop_sequences: Annotated[list[Any] | None, shaped(lambda facts: or_null(facts.field("stop")["anyOf"][1]))] = None
    temperature: Annotated[
        Any, shaped(lambda facts: {"allOf": [facts.optional("temperature"), {"maximum": MAX_TEMPERATURE}]})
    ] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[Any, shaped(lambda _: or_null(_format()), "The older name of `output_config.format`.")] = (
        None
    )
    add_generation_prompt: Annotated[Any, HIDDEN] = None
    continue_final_message: Annotated[Any, HIDDEN] = None


class MessagesBody(CountTokensBody):
    needed: ClassVar = {**CountTokensBody.needed, "max_tokens": "missing; give the maximum number of output tokens"}
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INTEGER)] = 1


COUNTED = (
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "metadata", "service_tier"),
    *("container", "mcp_servers", "cache_control"),
)
"""Fields of ``/v1/messages/count_tokens``: fields that affect the prompt, and others that Anthropic's API accepts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessagesCall(TranslatedCall):
    """A call to the Messages API."""

    hides_thinking: bool
    """True if thinking blocks in the response are empty."""
    marks_cache: bool
    """True if the body has `cache_control`, so that usage counts written tokens apart."""

    @property
    def call_id(self) -> str:
        return ID_PREFIX + self.chat.call_id.removeprefix("chatcmpl-")


def read_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None = None
) -> MessagesCall:
    """Check a body and build its request; see `serve.http_api.openai_request.read_call`.

    Raises:
        InvalidRequestError: the body is invalid; `.field` names a field of the body or a header.
        UnknownModelError: the body names a model that the server does not serve.
    """
    openai_request.check_model(parts, body.get("model"))
    asked = read(MessagesBody, body)
    chat, constraint = _conversation(asked, body)
    temperature = asked.temperature
    if temperature is not None and check_number("temperature", temperature) > MAX_TEMPERATURE:
        raise InvalidRequestError("temperature", f"{temperature} must lie in [0, 1]")
    if asked.metadata is not None and asked.session_id is None:
        chat["session_id"] = _session_of_user(asked.metadata.user_id)
    made = ChatBody(**chat, max_tokens=asked.max_tokens, temperature=temperature, stop=asked.stop_sequences)
    call = read_chat(parts, made, _NAMES, headers, arrival_s, tenant, constraint)
    hides = isinstance(asked.thinking, Mapping) and asked.thinking.get("display") == "omitted"
    marks = made.prompt_cache_options is not None
    return MessagesCall(chat=call, names=_NAMES, hides_thinking=hides, marks_cache=marks)


def _session_of_user(user_id: str | None) -> str | None:
    """Return the session in a `user_id` as Claude Code writes it, ``user_..._session_ID``; None: it has none."""
    _, mark, session = (user_id or "").rpartition("_session_")
    return session if mark and is_session_id(session) else None


def count_tokens(parts: EngineComponents, body: Body) -> bytes:
    """Count the prompt tokens of a body. Returns the response body.

    Raises:
        InvalidRequestError, UnknownModelError: see `read_call`.
    """
    openai_request.check_model(parts, body.get("model"))
    chat, _ = _conversation(read(CountTokensBody, body), body)
    try:
        ids = openai_request.conversation_ids(parts, ChatBody(**chat))
    except InvalidRequestError as error:
        raise field_renamer(_NAMES)(error) from None
    return json_bytes({"input_tokens": len(ids)})


def _conversation(asked: CountTokensBody, body: Body) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the equivalent chat completion, and the fields of its constraint. The fields do not include
    `max_tokens`, `temperature`, `stop` and `service_tier`."""
    chat = chat_fields(asked)
    for name in ("temperature", "service_tier"):
        chat.pop(name)
    chat["messages"] = messages = messages_of(asked.system, asked.messages)
    ttl = longest_ttl(asked.cache_control, asked.tools, asked.system, asked.messages)
    if ttl is not None:
        chat["prompt_cache_options"] = PromptCacheOptions(ttl=ttl)
    last = messages[-1]["role"] == "assistant"  # the response continues this message
    chat |= {"continue_final_message": last, "add_generation_prompt": not last}
    tools = chat_tools(asked.tools)
    choice, parallel = chat_choice(asked.tool_choice)
    if tools:
        chat |= {"tools": tools, "parallel_tool_calls": parallel}
    if choice is not None:
        chat["tool_choice"] = choice
    constraint = constraint_fields(body) | _take_output_config(asked, chat)
    _take_thinking(asked.thinking, chat)
    return chat, constraint


def _take_output_config(asked: CountTokensBody, chat: dict[str, Any]) -> dict[str, Any]:
    """Set the effort of `output_config` in the fields of a chat completion. Returns the constraint for its format."""
    config = asked.output_config or OutputConfig()
    wanted, field = config.format, "output_config.format"
    if asked.output_format is not None:  # the older name
        if wanted is not None:
            raise InvalidRequestError("output_format", "is also given in output_config.format; give it once")
        wanted, field = asked.output_format, "output_format"
    if config.effort is not None:
        chat["reasoning_effort"] = config.effort
    if wanted is None:
        return {}
    form = check_mapping(field, wanted)
    if form.get("type") != "json_schema":
        raise InvalidRequestError(field, f"type {quoted(form.get('type'))} must be 'json_schema'")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}


def _take_thinking(thinking: object, chat: dict[str, Any]) -> None:
    """Set the variable that turns thinking on or off in the chat template. `budget_tokens` is checked but has no
    effect."""
    if thinking is None:
        return
    fields = check_mapping("thinking", thinking)
    kind = fields.get("type")
    if kind not in THINKING:
        raise InvalidRequestError("thinking", f"type {quoted(kind)} must be one of {', '.join(THINKING)}")
    if fields.get("budget_tokens") is not None:
        check_integer("thinking.budget_tokens", fields["budget_tokens"], 1, MAX_INTEGER)
    if fields.get("display") not in (None, *DISPLAYS):
        raise InvalidRequestError("thinking.display", f"must be one of {', '.join(DISPLAYS)}")
    set_thinking(chat, kind != "disabled")

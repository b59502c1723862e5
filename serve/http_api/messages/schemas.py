"""Schemas of Anthropic's Messages API, for `serve.http_api.openapi`."""

from collections.abc import Mapping

from apt_jax.text import chat
from apt_jax.validation import MAX_INTEGER
from serve.http_api.json_schemas import (
    COUNT,
    FLAG,
    NULL,
    STRING,
    Schema,
    closed,
    integer,
    list_of,
    many,
    object_of,
    or_null,
    ref,
)
from serve.http_api.messages import content, request, tools

EVENT = "MessagesEvent"
ERROR = "MessagesError"
PREFIX = "Messages"
"""Begins the names of responses that are errors."""
OPERATIONS = ("Messages", "CountTokens")
"""Those whose errors have Anthropic's form."""
_HELLO = [{"role": "user", "content": "Hello"}]
EXAMPLES: Schema = {
    "text": {"value": {"messages": _HELLO, "max_tokens": 8}},
    "stream": {
        "value": {"system": "Be brief.", "messages": _HELLO, "max_tokens": 8, "stop_sequences": ["."], "stream": True}
    },
}
COUNT_EXAMPLES: Schema = {"text": {"value": {"messages": _HELLO}}}


def requests(of_chat: Mapping[str, Schema]) -> dict[str, Schema]:
    """Schemas of bodies.

    Args:
        of_chat: the fields of a chat completion.
    """
    stops = of_chat["stop"]["anyOf"][0]["anyOf"][1]
    effort = or_null(STRING)
    config = object_of({"format": or_null(_format()), "effort": effort})
    shared = {
        "model": of_chat["model"],
        "messages": list_of(_message(), 1, chat.MAX_MESSAGES),
        "system": or_null(_texts()),
        "tools": or_null(list_of(_tool(), 0, chat.MAX_TOOLS)),
        "tool_choice": or_null(_choice()),
        "thinking": or_null(_thinking())
        | {"description": "Accepted: blocks come wherever the model thinks, without a bound."},
        "metadata": or_null(
            object_of({"user_id": or_null({"type": "string", "maxLength": request.MAX_USER_ID_CHARS})})
        ),
        "service_tier": {"enum": [*request.SERVICE_TIERS, None]},
        **{
            name: {"enum": [*harmless, None], "description": "Not supported; these values ask for nothing."}
            for name, harmless in request.REFUSED.items()
        },
    }
    message = {
        **request.chat_fields_of(of_chat),
        **shared,
        "max_tokens": integer(1, MAX_INTEGER),
        "stop_sequences": or_null(stops),
        "temperature": {"allOf": [of_chat["temperature"], {"maximum": request.MAX_TEMPERATURE}]},
        "output_config": or_null(config),
        "output_format": or_null(_format()) | {"description": "The older name of `output_config.format`."},
    }
    return {
        "MessagesRequest": object_of(message, required=("messages", "max_tokens")),
        "CountTokensRequest": object_of(shared, required=("messages",)),
    }


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
    for role in content.ROLES:
        more = [elsewhere] if role == "assistant" else []
        allowed = many({"anyOf": [*(blocks[name] for name in content.BLOCKS[role]), *more]})
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
    other = object_of({"type": {"type": "string", "pattern": f"^{tools.OTHER_PATTERN}$"}}, required=("type",))
    return {"anyOf": [described, other | {"description": "Left out, as the server does not run it."}]}


def _choice() -> Schema:
    alone = {"disable_parallel_tool_use": or_null(FLAG)}
    plain = object_of({"type": {"enum": ["auto", "any", "none"]}, **alone}, required=("type",))
    named = object_of({"type": {"const": "tool"}, "name": STRING, **alone}, required=("type", "name"))
    return {"anyOf": [plain, named]}


def _thinking() -> Schema:
    fields = {
        "type": {"enum": list(request.THINKING)},
        "budget_tokens": or_null(integer(1, MAX_INTEGER)),
        "display": {"enum": [*request.DISPLAYS, None]},
    }
    return object_of(fields, required=("type",))


def _format() -> Schema:
    schema: Schema = {"type": ["object", "boolean", "string"]}
    return object_of({"type": {"const": "json_schema"}, "schema": schema}, required=("type", "schema"))


def answers(served: Schema) -> dict[str, Schema]:
    """Schemas of answers and events; objects are closed, so that every field is documented.

    Args:
        served: of `aptjax`.
    """
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    usage = closed({**dict.fromkeys(names, COUNT), "service_tier": {"enum": list(request.USED_TIERS.values())}})
    text = closed({"type": {"const": "text"}, "text": STRING})
    thinking = closed({"type": {"const": "thinking"}, "thinking": STRING, "signature": STRING})
    tool = closed({"type": {"const": "tool_use"}, "id": STRING, "name": STRING, "input": {"type": "object"}})
    block = {"anyOf": [text, thinking, tool]}
    stop = {
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": {"type": ["string", "null"]},
    }
    message = {
        "id": STRING,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": STRING,
        "content": many(block),
        **stop,
        "usage": usage,
        "aptjax": served,
    }
    begun = {**message, "content": list_of({}, 0, 0), "stop_reason": NULL, "stop_sequence": NULL}
    deltas = {
        "text_delta": "text",
        "thinking_delta": "thinking",
        "signature_delta": "signature",
        "input_json_delta": "partial_json",
    }
    delta = {"anyOf": [closed({"type": {"const": kind}, field: STRING}) for kind, field in deltas.items()]}
    events: dict[str, Schema] = {
        "message_start": {"message": closed({k: v for k, v in begun.items() if k != "aptjax"})},
        "content_block_start": {"index": COUNT, "content_block": block},
        "ping": {},
        "content_block_delta": {"index": COUNT, "delta": delta},
        "content_block_stop": {"index": COUNT},
        "message_delta": {"delta": closed(stop), "usage": usage, "aptjax": served},
        "message_stop": {},
    }
    error = closed({"type": STRING, "message": {"type": "string", "minLength": 1}})
    return {
        "Messages": closed(message, optional=("aptjax",)),
        "CountTokens": closed({"input_tokens": COUNT}),
        ERROR: closed({"type": {"const": "error"}, "error": error}),
        EVENT: {
            "anyOf": [
                *(closed({"type": {"const": name}, **fields}, optional=("aptjax",)) for name, fields in events.items()),
                ref(ERROR),
            ]
        },
    }

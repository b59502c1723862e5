"""Schemas of the Responses API, for `serve.http_api.openapi`."""

from collections.abc import Mapping

from apt_jax.text import chat
from apt_jax.validation import MAX_INTEGER, MAX_LOGPROBS
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
from serve.http_api.responses import input_items, request, tools
from serve.slo_headers import USED_TIERS

EVENT = "ResponsesEvent"
EXAMPLES: Schema = {
    "text": {"value": {"input": "Hello", "max_output_tokens": 8}},
    "stream": {
        "value": {
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": "Hello"}],
            "max_output_tokens": 8,
            "stream": True,
        }
    },
}
_OPEN: Schema = {"type": "object"}


def requests(of_chat: Mapping[str, Schema]) -> dict[str, Schema]:
    """Schemas of bodies.

    Args:
        of_chat: the fields of a chat completion.
    """
    fields = request.chat_fields_of(of_chat)
    short = or_null({"type": "string", "maxLength": request.MAX_METADATA_VALUE})
    pairs = {
        "type": "object",
        "maxProperties": request.MAX_METADATA,
        "propertyNames": {"maxLength": request.MAX_METADATA_KEY},
        "additionalProperties": {"type": "string", "maxLength": request.MAX_METADATA_VALUE},
    }
    own = {
        "input": {
            "anyOf": [STRING, list_of(_item(), 1, chat.MAX_MESSAGES)],
            "description": "A text of the user, or the items of the conversation.",
        },
        "instructions": or_null(STRING) | {"description": "The conversation begins with them, as its system message."},
        "max_output_tokens": of_chat["max_completion_tokens"],
        "include": or_null(many({"enum": list(request.INCLUDABLE)})),
        "top_logprobs": or_null(integer(0, MAX_LOGPROBS)),
        "metadata": or_null(pairs),
        "store": or_null(FLAG) | {"description": "Accepted, and nothing is stored."},
        "parallel_tool_calls": or_null(FLAG),
        "max_tool_calls": or_null(integer(1, MAX_INTEGER)),
        "truncation": {
            "enum": [*request.TRUNCATIONS, None],
            "description": "Nothing is dropped: input that is too long is refused.",
        },
        "text": or_null(
            object_of({"format": or_null(_format()), "verbosity": {"enum": ["low", "medium", "high", None]}})
        ),
        "reasoning": or_null(object_of({"effort": short, "summary": short})),
        "tools": or_null(list_of(_tool(), 0, chat.MAX_TOOLS)),
        "tool_choice": or_null(_choice()),
        **dict.fromkeys(request.SHOWN, short),
        **{
            name: {"enum": [*harmless, None], "description": f"Refused: {reason}."}
            for name, (harmless, reason) in request.REFUSED.items()
        },
    }
    return {"ResponsesRequest": object_of({**fields, **own}, required=("input",))}


def _item() -> Schema:
    text = object_of({"type": {"enum": list(input_items.TEXT_PARTS)}, "text": STRING}, required=("type", "text"))
    refusal = object_of({"type": {"const": "refusal"}, "refusal": STRING}, required=("type", "refusal"))
    content = {"anyOf": [STRING, many({"anyOf": [text, refusal]})]}
    message = {"type": {"enum": ["message", None]}, "role": {"enum": list(input_items.ROLES)}, "content": content}
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
            object_of({"type": {"enum": list(input_items.LEFT_OUT)}}, required=("type",)),
            object_of({"type": {"const": "reasoning"}, "content": thoughts, "summary": thoughts}, required=("type",)),
        ]
    }


def _format() -> Schema:
    plain = object_of({"type": {"enum": ["text", "json_object"]}}, required=("type",))
    schema: Schema = {"type": ["object", "boolean", "string"]}
    name = or_null({"type": "string", "maxLength": request.MAX_METADATA_VALUE})
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
    other = object_of({"type": {"type": "string", "not": {"enum": list(tools.KINDS)}}}, required=("type",))
    other["description"] = "Left out, as the server does not run it."
    return {"anyOf": [object_of(fields, required=("type", "name")), custom, other]}


def _choice() -> Schema:
    named = object_of({"type": {"enum": list(tools.KINDS)}, "name": STRING}, required=("type", "name"))
    fields = {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]},
        "tools": list_of(named, 1, chat.MAX_TOOLS),
    }
    return {"anyOf": [{"enum": list(tools.CHOICES)}, named, object_of(fields, required=tuple(fields))]}


def answers(served: Schema, logprobs: Schema) -> dict[str, Schema]:
    """Schemas of answers and events; objects are closed, so that every field is documented.

    Args:
        served: of `aptjax`.
        logprobs: of the log probabilities of some tokens.
    """
    status = {"enum": ["in_progress", "completed", "incomplete"]}
    text = closed(
        {"type": {"const": "output_text"}, "text": STRING, "annotations": list_of({}, 0, 0), "logprobs": logprobs}
    )
    thought = closed({"type": {"const": "reasoning_text"}, "text": STRING})
    message = {
        "id": STRING,
        "type": {"const": "message"},
        "status": status,
        "role": {"const": "assistant"},
        "content": many(text),
    }
    reasoning = {
        "id": STRING, "type": {"const": "reasoning"}, "status": status, "summary": list_of({}, 0, 0),
        "content": many(thought), "encrypted_content": NULL,
    }  # fmt: skip
    call = {
        "id": STRING, "type": {"const": "function_call"}, "status": status,
        **dict.fromkeys(("call_id", "name", "arguments"), STRING),
    }  # fmt: skip
    custom = {
        "id": STRING, "type": {"const": "custom_tool_call"}, "status": status,
        **dict.fromkeys(("call_id", "name", "input"), STRING),
    }  # fmt: skip
    item = ref("ResponsesItem")
    usage = closed({
        "input_tokens": COUNT,
        "input_tokens_details": closed({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": closed({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    })  # fmt: skip
    short = {"type": ["string", "null"]}
    error = closed({"code": {"enum": ["server_error", "rate_limit_exceeded"]}, "message": STRING})
    response = {
        "id": STRING,
        "object": {"const": "response"},
        "created_at": COUNT,
        "completed_at": or_null(COUNT),
        "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
        "error": or_null(error),
        "incomplete_details": or_null(closed({"reason": {"const": "max_output_tokens"}})),
        "model": STRING,
        "output": many(item),
        "usage": or_null(usage),
        "aptjax": served,
        "background": {"const": False},
        "conversation": NULL,
        "instructions": or_null(STRING),
        "max_output_tokens": or_null(COUNT),
        "max_tool_calls": or_null(COUNT),
        "metadata": _OPEN,
        "parallel_tool_calls": FLAG,
        "previous_response_id": NULL,
        "reasoning": closed({"effort": short, "summary": short}),
        "service_tier": {"enum": list(USED_TIERS)},
        "store": {"const": False},
        "temperature": {"type": "number"},
        "text": object_of({"format": _OPEN, "verbosity": STRING}, required=("format",), closed=True),
        "tool_choice": {"type": ["string", "object"]},
        "tools": many(_OPEN),
        "top_logprobs": COUNT,
        "top_p": {"type": "number"},
        "truncation": {"enum": list(request.TRUNCATIONS)},
        **dict.fromkeys(request.SHOWN, short),
    }
    whole = ref("Responses")
    place = {"item_id": STRING, "output_index": COUNT}
    part = {**place, "content_index": COUNT}
    events: dict[str, Schema] = {
        **{
            f"response.{name}": {"response": whole}
            for name in ("created", "in_progress", "completed", "incomplete", "failed")
        },
        **{f"response.output_item.{name}": {"output_index": COUNT, "item": item} for name in ("added", "done")},
        **{f"response.content_part.{name}": {**part, "part": {"anyOf": [text, thought]}} for name in ("added", "done")},
        "response.output_text.delta": {**part, "delta": STRING, "logprobs": logprobs},
        "response.output_text.done": {**part, "text": STRING, "logprobs": logprobs},
        "response.reasoning_text.delta": {**part, "delta": STRING},
        "response.reasoning_text.done": {**part, "text": STRING},
        "response.function_call_arguments.delta": {**place, "delta": STRING},
        "response.function_call_arguments.done": {**place, "name": STRING, "arguments": STRING},
        "response.custom_tool_call_input.delta": {**place, "delta": STRING},
        "response.custom_tool_call_input.done": {**place, "input": STRING},
        "error": {"code": STRING, "message": STRING, "param": short, "error": _OPEN},
    }
    return {
        "Responses": closed(response, optional=("aptjax",)),
        "ResponsesItem": {"anyOf": [closed(message), closed(reasoning), closed(call), closed(custom)]},
        EVENT: {
            "anyOf": [
                closed({"type": {"const": name}, "sequence_number": COUNT, **fields}) for name, fields in events.items()
            ]
        },
    }

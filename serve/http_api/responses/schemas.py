"""Schemas of the Responses API, for `serve.http_api.openapi`."""

from serve.http_api.json_schemas import (
    COUNT,
    FLAG,
    NULL,
    STRING,
    Schema,
    closed,
    list_of,
    many,
    object_of,
    or_null,
    ref,
)
from serve.http_api.responses.request import SHOWN
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


def answers(served: Schema, logprobs: Schema) -> dict[str, Schema]:
    """Return the schemas of responses and events, keyed by name. Objects allow no other fields, so every field must be
    listed.

    Args:
        served: schema of the field `aptjax`.
        logprobs: schema of a list of tokens with log probabilities.
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
        "previous_response_id": or_null(STRING),
        "reasoning": closed({"effort": short, "summary": short}),
        "service_tier": {"enum": list(USED_TIERS)},
        "store": FLAG,
        "temperature": {"type": "number"},
        "text": object_of({"format": _OPEN, "verbosity": STRING}, required=("format",), closed=True),
        "tool_choice": {"type": ["string", "object"]},
        "tools": many(_OPEN),
        "top_logprobs": COUNT,
        "top_p": {"type": "number"},
        "truncation": {"enum": ["auto", "disabled"]},
        **dict.fromkeys(SHOWN, short),
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
        "ResponsesDeleted": closed({"id": STRING, "object": {"const": "response"}, "deleted": {"const": True}}),
        "ResponsesItem": {"anyOf": [closed(message), closed(reasoning), closed(call), closed(custom)]},
        EVENT: {
            "anyOf": [
                closed({"type": {"const": name}, "sequence_number": COUNT, **fields}) for name, fields in events.items()
            ]
        },
    }

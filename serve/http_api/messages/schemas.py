"""Schemas of Anthropic's Messages API, for `serve.http_api.openapi`."""

from serve.http_api.json_schemas import COUNT, NULL, STRING, Schema, closed, list_of, many, ref
from serve.http_api.messages.request import USED_TIERS

EVENT = "MessagesEvent"
ERROR = "MessagesError"
PREFIX = "Messages"
"""Prefix of the names of error responses in Anthropic's format."""
OPERATIONS = ("Messages", "CountTokens")
"""Operations whose errors have Anthropic's format."""
_HELLO = [{"role": "user", "content": "Hello"}]
EXAMPLES: Schema = {
    "text": {"value": {"messages": _HELLO, "max_tokens": 8}},
    "stream": {
        "value": {"system": "Be brief.", "messages": _HELLO, "max_tokens": 8, "stop_sequences": ["."], "stream": True}
    },
}
COUNT_EXAMPLES: Schema = {"text": {"value": {"messages": _HELLO}}}


def answers(served: Schema) -> dict[str, Schema]:
    """Return the schemas of responses and events, keyed by name. Objects allow no other fields, so every field must be
    listed.

    Args:
        served: schema of the field `aptjax`.
    """
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    usage = closed({**dict.fromkeys(names, COUNT), "service_tier": {"enum": list(USED_TIERS.values())}})
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

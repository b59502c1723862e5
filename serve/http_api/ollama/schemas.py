"""Schemas of Ollama's API, for `serve.http_api.openapi`."""

from collections.abc import Mapping

from apt_jax.text import chat
from apt_jax.validation import MAX_LOGPROBS
from serve.http_api.json_schemas import COUNT, FLAG, STRING, Schema, closed, list_of, many, object_of, or_null
from serve.http_api.json_schemas import integer as integer_between
from serve.http_api.ollama import request

PREFIX = "Ollama"
"""Begins the names of its operations and of its schemas."""
ERROR = "OllamaError"
EXAMPLES: Schema = {
    "OllamaChat": {"text": {"value": {"messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 8}}}},
    "OllamaGenerate": {"text": {"value": {"prompt": "Hello", "raw": True, "stream": False, "options": {"num_predict": 8}}}},
    "OllamaEmbed": {"texts": {"value": {"input": ["One text.", "Another one."]}}},
    "OllamaEmbeddings": {"text": {"value": {"prompt": "One text."}}},
    "OllamaShow": {"model": {"value": {}}},
}  # fmt: skip


def requests(of_chat: Mapping[str, Schema], of_embedding: Mapping[str, Schema]) -> dict[str, Schema]:
    """Schemas of bodies.

    Args:
        of_chat: the fields of a chat completion.
        of_embedding: those of embeddings.
    """
    name = dict(of_chat["model"])
    if "enum" in name:
        name["enum"] = [*name["enum"], *(f"{known}:latest" for known in name["enum"] if known)]
    bound = integer_between(-(2**31), 2**31 - 1)
    options = {option: of_chat[field] for option, field in request.OPTIONS.items()}
    carried = {field: of_chat[field] for field in request.CARRIED if field in of_chat}
    common = {
        **carried,
        "model": name,
        "stream": or_null(FLAG) | {"default": True},
        "options": or_null(object_of({**options, "num_predict": or_null(bound)})),
        "format": {"anyOf": [{"enum": ["", "json", None]}, {"type": "object"}]},
        "think": {"enum": [True, False, *request.EFFORTS, None]},
        "logprobs": or_null(FLAG),
        "top_logprobs": or_null(integer_between(0, MAX_LOGPROBS)),
    }
    call = object_of({"function": object_of({"name": STRING, "arguments": {"type": "object"}}, required=("name",))}, required=("function",))  # fmt: skip
    message = {
        "role": {"type": "string", "pattern": f"^{chat.ROLE_PATTERN}$"},
        "content": or_null(STRING),
        "thinking": or_null(STRING),
        "tool_name": {"type": ["string", "null"], "maxLength": chat.MAX_NAME_CHARS},
        "tool_calls": or_null(many(call)),
        "images": {"enum": [[], None]},
    }
    text_input, texts_input, *_ = of_embedding["input"]["anyOf"]
    texts = {"anyOf": [text_input, texts_input]}
    text = or_null(STRING)
    return {
        "OllamaChatRequest": object_of({
            **common,
            "messages": or_null(list_of(object_of(message, required=("role",)), 0, chat.MAX_MESSAGES)),
            "tools": of_chat["tools"],
        }),
        "OllamaGenerateRequest": object_of({
            **common, "prompt": text, "system": text, "suffix": text, "raw": or_null(FLAG),
            **{field: {"enum": [*neutral, None]} for field, neutral in request.REFUSED.items()},
        }),
        "OllamaEmbedRequest": object_of(
            {**carried, "model": name, "input": texts, "truncate": or_null(FLAG), "dimensions": of_embedding["dimensions"]},
            required=("input",),
        ),
        "OllamaEmbeddingsRequest": object_of({**carried, "model": name, "prompt": text_input}, required=("prompt",)),
        "OllamaShowRequest": object_of({"model": name}),
    }  # fmt: skip


def answers() -> dict[str, Schema]:
    """Schemas of answers; objects are closed, so that every field is documented."""
    durations = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    counts = dict.fromkeys((*durations, "prompt_eval_count", "eval_count"), COUNT)
    named = {"token": STRING, "logprob": {"type": "number"}, "bytes": many(COUNT)}
    end = {
        "model": STRING,
        "created_at": STRING,
        "done": FLAG,
        "done_reason": {"enum": ["stop", "length", "load"]},
        **counts,
        "logprobs": many(closed({**named, "top_logprobs": many(closed(named))})),
    }
    optional = ("done_reason", *counts, "logprobs")
    function = closed({"index": COUNT, "name": STRING, "arguments": {"type": "object"}})
    call = closed({"id": STRING, "function": function})
    message = {"role": {"const": "assistant"}, "content": STRING, "thinking": STRING, "tool_calls": many(call)}
    details = closed(
        {**dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), STRING), "families": many(STRING)}
    )  # fmt: skip
    entry = {**dict.fromkeys(("name", "model", "modified_at", "digest"), STRING), "size": COUNT, "details": details}
    loaded = {**entry, "expires_at": STRING, "size_vram": COUNT, "context_length": COUNT}
    vector = many({"type": "number"})
    return {
        "OllamaChat": closed({**end, "message": closed(message, optional=("thinking", "tool_calls"))}, optional=optional),
        "OllamaGenerate": closed({**end, "response": STRING, "thinking": STRING}, optional=(*optional, "thinking")),
        "OllamaEmbed": closed({
            "model": STRING, "embeddings": many(vector),
            **dict.fromkeys(("total_duration", "load_duration", "prompt_eval_count"), COUNT),
        }),
        "OllamaEmbeddings": closed({"embedding": vector}),
        "OllamaTags": closed({"models": many(closed(entry))}),
        "OllamaPs": closed({"models": many(closed(loaded))}),
        "OllamaShow": closed({
            **dict.fromkeys(("modelfile", "parameters", "template"), STRING),
            "details": details, "model_info": {"type": "object"}, "capabilities": many(STRING),
        }),
        "OllamaVersion": closed({"version": STRING}),
        ERROR: closed({"error": {"type": "string", "minLength": 1}}),
    }  # fmt: skip

"""Schemas of Ollama's API, for `serve.http_api.openapi`."""

from serve.http_api.json_schemas import COUNT, FLAG, STRING, Schema, closed, many

PREFIX = "Ollama"
"""Prefix of the names of operations and schemas of Ollama's API."""
ERROR = "OllamaError"
EXAMPLES: Schema = {
    "OllamaChat": {"text": {"value": {"messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 8}}}},
    "OllamaGenerate": {"text": {"value": {"prompt": "Hello", "raw": True, "stream": False, "options": {"num_predict": 8}}}},
    "OllamaEmbed": {"texts": {"value": {"input": ["One text.", "Another one."]}}},
    "OllamaEmbeddings": {"text": {"value": {"prompt": "One text."}}},
    "OllamaShow": {"model": {"value": {}}},
}  # fmt: skip


def answers() -> dict[str, Schema]:
    """Return the schemas of responses, keyed by name. Objects allow no other fields, so every field must be listed."""
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

"""Paths that other servers have and this one does not, and what to use here: told in the answer 404."""

_CHOSEN = "the model is chosen when the server starts"
_NO_CLASSES = "models that classify are not served"
_MEDIA = "models of images and sound are not served"

ELSEWHERE: dict[str, str] = {
    # vLLM
    "/pooling": "use /v1/embeddings",
    "/classify": f"{_NO_CLASSES}; /v1/score compares texts",
    "/v1/load_lora_adapter": "adapters are loaded at the start (--lora-modules)",
    "/v1/unload_lora_adapter": "adapters are loaded at the start (--lora-modules)",
    "/inference/v1/generate": "use /v1/completions, with token ids",
    "/v1/chat/completions/render": "use /tokenize with messages",
    "/v1/completions/render": "use /tokenize",
    "/sleep": "the server does not sleep",
    "/wake_up": "the server does not sleep",
    "/reset_prefix_cache": "the prefix cache makes room by itself",
    # SGLang
    "/generate": "use /v1/completions; Ollama's is /api/generate",
    "/get_model_info": "use /v1/models",
    "/model_info": "use /v1/models",
    "/get_server_info": "use /server_info",
    "/flush_cache": "the prefix cache makes room by itself",
    "/encode": "use /v1/embeddings",
    "/health_generate": "use /health, which fails if the engine does",
    # llama.cpp
    "/props": "use /v1/models and /server_info",
    "/slots": "use /metrics and /load",
    "/apply-template": "use /tokenize with messages",
    "/lora-adapters": "use /v1/models, which lists adapters",
    "/completion": "use /v1/completions",
    "/completions": "use /v1/completions",
    "/embedding": "use /v1/embeddings",
    "/reranking": "use /v1/rerank",
    "/models/load": _CHOSEN,
    # text-generation-inference and text-embeddings-inference
    "/generate_stream": "use /v1/completions with stream",
    "/invocations": "use /v1/chat/completions",
    "/info": "use /server_info",
    "/embed": "use /v1/embeddings",
    "/predict": _NO_CLASSES,
    # OpenAI
    "/v1/moderations": _NO_CLASSES,
    "/v1/images/generations": _MEDIA,
    "/v1/audio/speech": _MEDIA,
    "/v1/audio/transcriptions": _MEDIA,
    "/v1/audio/translations": _MEDIA,
    "/v1/realtime": _MEDIA,
    "/v1/conversations": "nothing is stored; send the whole conversation to /v1/responses",
    "/v1/assistants": "nothing is stored; use /v1/responses",
    "/v1/threads": "nothing is stored; use /v1/responses",
    "/v1/fine_tuning/jobs": "models are not trained here",
    # Anthropic and Cohere
    "/v1/complete": "use /v1/messages",
    "/v1/messages/batches": "use /v1/batches",
    "/v1/chat": "use /v1/chat/completions",
    "/v2/chat": "use /v1/chat/completions",
    "/v2/embed": "use /v1/embeddings",
    # Ollama
    **dict.fromkeys(("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"), _CHOSEN),
    # pages
    "/docs": "/openapi.json describes the API",
    "/redoc": "/openapi.json describes the API",
}
"""By path."""

"""API paths that other servers have but this server does not, and the hints for them in 404 responses."""

import difflib
from collections.abc import Collection

_CHOSEN = "the model is chosen when the server starts"
_NO_CLASSES = "classification models are not served"
_MEDIA = "image, audio and video models are not served"
_NOT_STORED = "nothing is stored; send the whole conversation to /v1/responses"
_NO_RESPONSES = "responses are only stored with --store-responses; send the whole conversation to /v1/responses"
_NO_SLEEP = "the server does not sleep"
_NO_SESSIONS = "there are no sessions; the prefix cache reuses prefixes that prompts have in common"
_ADAPTERS = "adapters are loaded at the start (--lora-modules)"
_PREFIXES = "the prefix cache evicts prefixes automatically"
_DISCONNECT = "close the connection of a request to cancel it"
_PROFILER = "start the server with --set profiler_dir=DIR"
_WEIGHTS = "weights are read when the server starts"
_NO_TOOLS = "the server runs no tools; clients do"
_PARSED = "use /v1/chat/completions, which parses them (--tool-call-parser, --reasoning-parser)"
_DESCRIPTION = "/openapi.json describes the API"
_LONGEST_COMPARED = 100
"""Length in characters of the longest path that gets a hint."""

ELSEWHERE: dict[str, str] = {
    # vLLM
    "/pooling": "use /v1/embeddings",
    "/classify": f"{_NO_CLASSES}; /v1/score compares texts",
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/inference/v1/generate": "use /v1/completions, with token ids",
    "/v1/chat/completions/render": "use /tokenize with messages",
    "/v1/completions/render": "use /tokenize",
    "/v1/chat/completions/batch": "use /v1/batches",
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused"), _NO_SLEEP),
    "/reset_prefix_cache": _PREFIXES,
    "/reset_mm_cache": _MEDIA,
    "/reset_encoder_cache": _MEDIA,
    "/collective_rpc": "use /server_info and /metrics; workers do not accept calls by name",
    "/start_profile": _PROFILER,
    "/stop_profile": _PROFILER,
    "/abort_requests": _DISCONNECT,
    "/scale_elastic_ep": "the devices are chosen when the server starts",
    "/is_scaling_elastic_ep": "the devices are chosen when the server starts",
    "/update_weights": _WEIGHTS,
    "/generative_scoring": "use /v1/score",
    # SGLang
    "/generate": "use /v1/completions; Ollama's is /api/generate",
    "/get_model_info": "use /v1/models",
    "/model_info": "use /v1/models",
    "/get_server_info": "use /server_info",
    "/flush_cache": _PREFIXES,
    "/clear_hicache_storage_backend": _PREFIXES,
    "/encode": "use /v1/embeddings",
    "/get_load": "use /load",
    "/v1/loads": "use /load",
    "/get_weight_version": "use /v1/models",
    "/weight_version": "use /v1/models",
    "/v1/classify": f"{_NO_CLASSES}; /v1/score compares texts",
    "/load_lora_adapter": _ADAPTERS,
    "/unload_lora_adapter": _ADAPTERS,
    "/abort_request": _DISCONNECT,
    "/open_session": _NO_SESSIONS,
    "/close_session": _NO_SESSIONS,
    "/parse_function_call": _PARSED,
    "/separate_reasoning": _PARSED,
    "/update_weights_from_disk": _WEIGHTS,
    "/update_weights_from_tensor": _WEIGHTS,
    "/update_weights_from_distributed": _WEIGHTS,
    "/get_weights_by_name": _WEIGHTS,
    "/release_memory_occupation": _NO_SLEEP,
    "/resume_memory_occupation": _NO_SLEEP,
    "/pause_generation": _NO_SLEEP,
    "/continue_generation": _NO_SLEEP,
    "/set_internal_state": "settings are chosen when the server starts",
    "/configure_logging": "settings are chosen when the server starts",
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
    "/models/unload": _CHOSEN,
    "/tools": _NO_TOOLS,
    "/cors-proxy": _NO_TOOLS,
    # text-generation-inference and text-embeddings-inference
    "/generate_stream": "use /v1/completions with stream",
    "/invocations": "use /v1/chat/completions",
    "/info": "use /server_info",
    "/embed": "use /v1/embeddings",
    "/predict": _NO_CLASSES,
    "/embed_all": "use /v1/embeddings, which returns one vector per text",
    "/embed_sparse": "use /v1/embeddings, which returns one vector per text",
    "/similarity": "use /v1/score",
    "/decode": "use /detokenize",
    "/chat_tokenize": "use /tokenize with messages",
    "/vertex": "use /v1/chat/completions",
    "/vertex_generate": "use /v1/chat/completions",
    # OpenAI
    "/v1/moderations": _NO_CLASSES,
    **dict.fromkeys(("/v1/images", "/v1/audio", "/v1/realtime", "/v1/videos"), _MEDIA),
    "/v1/engines": "use /v1/models, /v1/completions and /v1/chat/completions",
    "/v1/edits": "use /v1/chat/completions",
    "/v1/conversations": _NOT_STORED,
    "/v1/responses/": _NO_RESPONSES,
    "/v1/chat/completions/": _NOT_STORED,
    "/v1/assistants": "nothing is stored; use /v1/responses",
    "/v1/threads": "nothing is stored; use /v1/responses",
    "/v1/vector_stores": "nothing is stored; use /v1/embeddings and your own vector store",
    "/v1/uploads": "use /v1/files, if the server has files",
    "/v1/containers": _NO_TOOLS,
    "/v1/evals": "outputs are not evaluated here; /v1/score compares texts",
    "/v1/fine_tuning": "models are not trained here",
    "/v1/organization": "there are no accounts; API keys are in a file (--api-key-file)",
    # Anthropic and Cohere
    "/v1/complete": "use /v1/messages",
    "/v1/messages/batches": "use /v1/batches",
    "/v1/chat": "use /v1/chat/completions",
    "/v2/chat": "use /v1/chat/completions",
    "/v2/embed": "use /v1/embeddings",
    # Ollama
    **dict.fromkeys(("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs"), _CHOSEN),
    **dict.fromkeys(
        ("/api/me", "/api/signout", "/api/user", "/api/status"), "the server has no account with ollama.com"
    ),
    "/api/experimental": _NO_TOOLS,
    "/api/web_search": _NO_TOOLS,
    "/api/web_fetch": _NO_TOOLS,
    # pages
    **dict.fromkeys(("/docs", "/redoc", "/scalar", "/swagger", "/swagger-ui", "/swagger.json"), _DESCRIPTION),
    **dict.fromkeys(("/api-docs", "/openapi", "/openapi.yaml"), _DESCRIPTION),
}
"""Hint for each path and all paths below it. If the path ends with a slash, the hint is only for the paths below it."""

_PREFIXES_OF_CLIENTS = ("/v1", "/api", "/openai", "/v1beta")
"""Prefixes that clients with a wrong base URL add to a path, possibly several times."""


def hint(path: str, known: Collection[str]) -> str:
    """Return a hint for the error message about an unknown path; may be empty.

    The hint names an alternative, the reason why the path does not exist, or a similar path of this server.

    Args:
        path: the requested path.
        known: all paths of this server.
    """
    if len(path) > _LONGEST_COMPARED:
        return ""
    bare = path.rstrip("/")
    rest = bare
    while (prefix := next((p for p in _PREFIXES_OF_CLIENTS if rest.startswith(f"{p}/")), None)) is not None:
        rest = rest.removeprefix(prefix)
    for near in (bare, f"/v1{rest}", rest, f"/api{rest}"):
        if near in known and near != "/":
            return f"; did you mean {near}?"
        if near in ELSEWHERE:
            return f"; {ELSEWHERE[near]}"
    for near in (bare, f"/v1{rest}", f"/api{rest}"):
        as_deep = [path for path in known if path.count("/") == near.count("/")]
        if meant := difflib.get_close_matches(near, as_deep, n=1, cutoff=0.9):
            return f"; did you mean {meant[0]}?"
    for end in reversed([at for at, letter in enumerate(bare) if letter == "/"]):
        for above in (bare[: end + 1], bare[:end]):
            if above in ELSEWHERE:
                return f"; {ELSEWHERE[above]}"
    return ""

"""OpenAPI 3.1 document of the HTTP server: ``GET /openapi.json``.

Bounds are those of the code that enforces them (`apt_jax.validation`, `apt_jax.text.chat`, `serve.http_api.openai_request`), and, once there is an
engine, those of its model: lengths, vocabulary, name. Whatever a schema here forbids is refused with 400, but for an
objective in a header where the body has the same one. The reverse does not hold: a schema cannot say that a prompt must
leave room for `max_tokens`, that two fields exclude each other, that 1.0 is not an integer or that a grammar must
compile. Fields that no schema names are ignored, where a schema does not close its object. The pages of the dashboard
and the chat are for people and not described.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import apt_jax
from apt_jax import validation
from apt_jax.core.kinds import KIND_NAMES
from apt_jax.request import SamplingParams
from apt_jax.text import chat, template_kwargs
from apt_jax.validation import MAX_INTEGER, MIN_POSITIVE, REQUEST_FIELDS, FieldSpec, RequestLimits
from serve import slo_headers as objectives
from serve.http_api import constraint_fields, embeddings, llama_infill, rerank
from serve.http_api import openai_request as openai_api
from serve.http_api.errors import DROPPED_REASON_KEYS
from serve.http_api.json_schemas import COUNT as _COUNT
from serve.http_api.json_schemas import FLAG as _FLAG
from serve.http_api.json_schemas import NULL as _NULL
from serve.http_api.json_schemas import STRING as _STRING
from serve.http_api.json_schemas import Schema
from serve.http_api.json_schemas import closed as _all
from serve.http_api.json_schemas import integer as _integer
from serve.http_api.json_schemas import list_of as _list
from serve.http_api.json_schemas import many as _many
from serve.http_api.json_schemas import number as _number
from serve.http_api.json_schemas import object_of as _object
from serve.http_api.json_schemas import or_null as _or_null
from serve.http_api.json_schemas import ref as _ref
from serve.http_api.messages import schemas as messages_schemas
from serve.http_api.ollama import schemas as ollama_schemas
from serve.http_api.openai_request import Kind
from serve.http_api.responses import schemas as responses_schemas
from serve.http_api.tool_calls.definitions import NAME_PATTERN
from serve.http_api.unsupported_fields import UNSUPPORTED

if TYPE_CHECKING:
    from serve.batches.config import BatchConfig

_JSON = "application/json"
_TEXT: Schema = {"type": "string", "minLength": 1}
_NUMBER: Schema = {"type": "number"}
_OPEN: Schema = {"type": "object"}

_ERRORS: dict[int, tuple[str, str]] = {
    400: ("BadRequest", "The request can never be served as it stands; `param` is the field that is wrong."),
    401: ("Unauthorized", "No valid API key."),
    403: ("Forbidden", "The call is for operators, or comes from a web page of another origin."),
    404: ("NotFound", "No such model, request or path."),
    405: ("MethodNotAllowed", "This path does not take this method."),
    408: ("Timeout", "The deadline has passed, or head or body came too slowly."),
    413: ("TooLarge", "The body is too large."),
    415: ("UnsupportedMediaType", "The body must be JSON and not compressed."),
    421: ("Misdirected", "This host is not served here."),
    429: ("QueueFull", "There is too much to do, or the objective is out of reach."),
    431: ("HeadTooLarge", "The head of the request is too large."),
    500: ("Failed", "This request failed because of its own content; do not send it again."),
    503: ("Unavailable", "Starting, draining, or the engine has ended."),
    507: ("DiskFull", "There is no room on the disk, or in the key's share of it: delete files."),
}  # fmt: skip
_LATER = (429, 503)
_ALWAYS = (400, 403, 405, 408, 421, 431, 500)
_OF_BODIES = (404, 413, 415)


def document(
    limits: RequestLimits | None = None,
    models: Iterable[str] = (),
    *,
    has_keys: bool = False,
    profiles: bool = False,
    batches: "BatchConfig | None" = None,
) -> Schema:
    """The whole document.

    Args:
        limits: of the engine; None: there is none yet, so that lengths and ids have no bound of a model.
        models: names that requests may use; none: any.
        has_keys: requests need one.
        profiles: there are paths for profiles (`serve.observability.profiler`).
        batches: bounds of files and batches; None: there are no paths for them.
    """
    names = sorted(set(models))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "apt-jax",
            "version": apt_jax.__version__,
            "description": (
                "OpenAI's completions, chat completions and responses, and Anthropic's messages, with latency objectives. Fields that no schema names are ignored. "
                "A request that its schema allows may be refused with 400 all the same, for what a schema cannot say: the "
                "prompt and `max_tokens` together exceed the model's length, two fields exclude each other, a grammar does "
                "not compile, 1.0 is given for an integer."
            ),
        },
        "paths": _paths(names, has_keys, profiles, batches is not None),
        "components": {
            "schemas": {**_requests(limits, names), **_answers(), **_of_batches(batches)},
            "responses": {
                prefix + name: _error(status, schema)
                for prefix, schema in (
                    ("", "Error"),
                    (messages_schemas.PREFIX, messages_schemas.ERROR),
                    (ollama_schemas.PREFIX, ollama_schemas.ERROR),
                )
                for status, (name, _) in _ERRORS.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "Or `x-api-key: KEY`."}},
        },
    }


# --- paths ---------------------------------------------------------------------------------------------------------


def _paths(models: list[str], has_keys: bool, profiles: bool, batches: bool) -> Schema:
    def get(name: str, summary: str, good: Schema, *more: int, open_: bool = False, parameters: Any = ()) -> Schema:
        operation = _operation(name, summary, good, more, has_keys and not open_)
        operation["parameters"] = list(parameters)
        # A GET without its body; frameworks serve it, so it is said.
        bare = {k: v for k, v in good.items() if k not in ("content", "links")}
        head = {**_operation(f"{name}Head", summary, bare, more, has_keys and not open_)}
        head["responses"] = {
            status: {"description": _ERRORS[int(status)][1]} if "$ref" in response else response
            for status, response in head["responses"].items()
        }
        return {"get": operation, "head": {**head, "parameters": list(parameters)}}

    def post(
        name: str, summary: str, good: Schema, *more: int, parameters: Any = (), body: str | None = None
    ) -> Schema:
        operation = _operation(name, summary, good, (*_OF_BODIES, 503, *more), has_keys)
        asks = body or name
        content = {"schema": _ref(f"{asks}Request"), "examples": {**_EXAMPLES, **examples}[asks]}
        given = {"required": True, "content": {_JSON: content}}
        return {"post": {**operation, "parameters": list(parameters), "requestBody": given}}

    def profile(name: str, summary: str) -> Schema:  # without a body
        return {"post": _operation(name, summary, _good(name), (415,), has_keys)}

    examples: dict[str, Schema] = {}
    files: Schema = {}
    if batches:
        from serve.http_api import openapi_batches  # nothing else needs its parser of forms

        examples = openapi_batches.EXAMPLES
        files = openapi_batches.paths(
            lambda name, summary, good, more: _operation(name, summary, good, more, has_keys), get, post
        )
    profiling = {
        "/start_profile": profile("StartProfile", "Begin a profile; 400 where one is being taken."),
        "/stop_profile": profile("StopProfile", "End the profile; 400 where none is being taken."),
    }
    decisions = {
        "operationId": "Decisions",
        "parameters": {"request_id": "$response.body#/id"},
        "description": "Timeline of the request.",
    }
    detokenize = {
        "operationId": "Detokenize",
        "requestBody": {"tokens": "$response.body#/tokens"},
    }
    model = {"operationId": "Model", "parameters": {"name": "$response.body#/data/0/id"}}
    name_schema = {**_STRING, "examples": models} if models else _STRING
    return {
        "/v1/completions": post("Completion", "Continue prompts.", _generated("Completion", decisions), 429, parameters=_slo_headers()),
        "/v1/chat/completions": post("ChatCompletion", "Answer a conversation.", _generated("ChatCompletion", decisions), 429, parameters=_slo_headers()),
        "/v1/responses": post("Responses", "Answer a conversation (OpenAI's Responses API); nothing is stored.", _generated("Responses", decisions, responses_schemas.EVENT), 429, parameters=_slo_headers()),
        "/v1/messages": post("Messages", "Answer a conversation (Anthropic's Messages API).", _generated("Messages", decisions, messages_schemas.EVENT), 429, parameters=_slo_headers()),
        "/v1/messages/count_tokens": post("CountTokens", "Length of the prompt that a conversation makes.", _good("CountTokens")),
        "/v1/embeddings": post("Embedding", "Embed texts: their pooled hidden states.", {**_good("Embedding"), "links": {"decisions": decisions}}, 429, parameters=_slo_headers()),
        "/v1/score": post("Score", "Similarity of texts: the cosine of their embeddings.", {**_good("Score"), "links": {"decisions": decisions}}, 429, parameters=_slo_headers()),
        **{
            path: post(name, "Documents by their similarity to a query.", {**_good("Rerank"), "links": {"decisions": decisions}}, 429, parameters=_slo_headers(), body="Rerank")
            for path, name in zip(rerank.PATHS, ("Rerank", "RerankBare", "RerankV2"), strict=True)
        },
        "/load": get("Load", "Number of calls that are being served.", _good("Load")),
        "/server_info": get("ServerInfo", "Facts about the server.", _good("ServerInfo"), 503),
        "/v1/models": get("Models", "The model that is served, once for each of its names, and its LoRA adapters, whose `parent` it is.", {**_good("Models"), "links": {"model": model}}, 503),
        "/v1/models/{name}": get("Model", "A model.", _good("Model"), 404, 503, parameters=[_in_path("name", name_schema, "It may hold slashes.")]),
        "/v1/requests/{request_id}/decisions": get(
            "Decisions", "Timeline of one of the last requests.", _good("Decisions"), 404, 503,
            parameters=[_in_path("request_id", _STRING, "The `id` of an answer, or the `request_id` of its request.")],
        ),
        "/tokenize": post("Tokenize", "Text or a conversation to token ids.", {**_good("Tokenize"), "links": {"detokenize": detokenize}}),
        "/detokenize": post("Detokenize", "Token ids to text.", _good("Detokenize")),
        "/tokenizer_info": get("TokenizerInfo", "Settings of the tokenizer.", _good("TokenizerInfo"), 404, 503),
        llama_infill.PATH: post("Infill", "Fill in between two texts (llama.cpp's API).", _without_last(_generated("Infill", decisions)), 429, parameters=_slo_headers()),
        **_ollama_paths(get, post, decisions),
        "/": _with_redirect(get("Index", "Names of pages and APIs; for browsers the chat.", _good("Index"), open_=True)),
        "/health": get("Health", "Liveness: 200 also while loading and draining.", {"description": "Alive."}, 503, open_=True),
        "/ping": {
            **get("Ping", "The same as /health, as SageMaker asks for it.", {"description": "Alive."}, 503, open_=True),
            "post": _operation("PingPost", "The same as /health.", {"description": "Alive."}, (503,), needs_key=False),
        },
        "/version": get("Version", "The version of the package.", _good("Version")),
        "/ready": get("Ready", "Readiness for new requests.", {"description": "Ready."}, 503, open_=True),
        "/metrics": get("Metrics", "Numbers for Prometheus, in the format that it accepts.", {
            "description": "The exposition.",
            "content": {name: {"schema": _STRING} for name in ("text/plain", "application/openmetrics-text")},
        }, 503),
        "/openapi.json": get("OpenApi", "This document.", {"description": "OpenAPI 3.1.", "content": {_JSON: {"schema": _OPEN}}}),
        **files,
        **(profiling if profiles else {}),
    }  # fmt: skip


def _with_redirect(path: Schema) -> Schema:
    for operation in path.values():
        operation["responses"]["307"] = {"description": "To the chat, for those who accept HTML."}
    return path


def _without_last(good: Schema) -> Schema:
    del good["content"]["text/event-stream"]["x-last-event"]
    return good


def _ollama_paths(get: Any, post: Any, decisions: Schema) -> Schema:
    def streamed(name: str) -> Schema:
        good = _generated(name, decisions)
        del good["content"]["text/event-stream"]
        good["content"]["application/x-ndjson"] = {"x-line-schema": {"anyOf": [_ref(name), _ref(ollama_schemas.ERROR)]}}
        return {**good, "description": "The answer; unless `stream` is false a line for each piece of it."}

    return {
        "/api/chat": post("OllamaChat", "Answer a conversation (Ollama's API).", streamed("OllamaChat"), 429, parameters=_slo_headers()),
        "/api/generate": post("OllamaGenerate", "Answer or continue a text (Ollama's API).", streamed("OllamaGenerate"), 429, parameters=_slo_headers()),
        "/api/embed": post("OllamaEmbed", "Embed texts (Ollama's API).", _good("OllamaEmbed"), 429, parameters=_slo_headers()),
        "/api/embeddings": post("OllamaEmbeddings", "Embed a text (Ollama's older API).", _good("OllamaEmbeddings"), 429, parameters=_slo_headers()),
        "/api/show": post("OllamaShow", "The model (Ollama's API).", _good("OllamaShow")),
        "/api/tags": get("OllamaTags", "The names of the model, and its adapters (Ollama's API).", _good("OllamaTags"), 503),
        "/api/ps": get("OllamaPs", "What is loaded (Ollama's API).", _good("OllamaPs"), 503),
        "/api/version": get("OllamaVersion", "The version of Ollama whose API this is.", _good("OllamaVersion")),
    }  # fmt: skip


def _of_batches(batches: "BatchConfig | None") -> Schema:
    if batches is None:
        return {}
    from serve.http_api import openapi_batches

    return {**openapi_batches.requests(batches), **openapi_batches.answers()}


def _operation(name: str, summary: str, good: Schema, more: Iterable[int], needs_key: bool) -> Schema:
    statuses = sorted({*_ALWAYS, *more, *((401,) if needs_key else ())})
    prefix = messages_schemas.PREFIX if name in messages_schemas.OPERATIONS else ""
    if name.startswith(ollama_schemas.PREFIX):
        prefix = ollama_schemas.PREFIX
    bad = {str(s): {"$ref": f"#/components/responses/{prefix}{_ERRORS[s][0]}"} for s in statuses}
    if name.removesuffix("Head") in ("Health", "Ping", "PingPost", "Ready"):
        bad["503"] = {"description": "No; without a body."}
    return {
        "operationId": name,
        "summary": summary,
        "security": [{"key": []}] if needs_key else [],
        "responses": {"200": good, **bad},
    }


def _good(name: str) -> Schema:
    return {"description": "The answer.", "content": {_JSON: {"schema": _ref(name)}}}


def _generated(name: str, link: Schema, event: str | None = None) -> Schema:
    """The answer of a completion, whole or in events, of this schema if they are no chunks."""
    good = _good(name)
    good["content"]["text/event-stream"] = (
        {"x-event-schema": _ref(event)}
        if event
        else {
            "x-event-schema": {"anyOf": [_ref(f"{name}Chunk"), _ref("Error")]},
            "x-last-event": "data: [DONE]; after an error there is none",
        }
    )
    return {
        **good,
        "description": "The answer; with `stream` as server-sent events, sent as it grows.",
        "headers": {"x-request-id": _header("The `id` of the answer.", _STRING)},
        "links": {"decisions": link},
    }


def _error(status: int, schema: str) -> Schema:
    headers = {"retry-after": _header("Seconds after which to come again.", _COUNT | {"minimum": 1})}
    if status not in _LATER:
        headers = {"x-should-retry": _header("The same would fail again.", {"const": "false"})}
    if status in _LATER:
        reasons = {"enum": [f"rejected-{why}" for why in ("saturated", "ttl-expired", "shutting-down", "no-endpoints")]}
        headers |= {
            key: {"description": "Why, where the engine did not take it.", "schema": reasons}
            for key in DROPPED_REASON_KEYS
        }
    if status == 401:
        headers["www-authenticate"] = _header("How to send a key.", {"const": "Bearer"})
    if status == 405:
        headers["allow"] = _header("Methods that the path takes.", _STRING)
    return {
        "description": _ERRORS[status][1],
        "headers": headers,
        "content": {_JSON: {"schema": _ref(schema)}},
    }


def _header(text: str, schema: Schema) -> Schema:
    return {"description": text, "required": True, "schema": schema}


def _in_path(name: str, schema: Schema, text: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": text}


def _slo_headers() -> list[Schema]:
    decimal = {
        "type": "string",
        "pattern": f"^{objectives.DECIMAL_PATTERN}$",
        "examples": ["250", "12.5"],
    }
    tier = {"type": "string", "enum": sorted(objectives.TIERS)}
    bounds = f"in {REQUEST_FIELDS['slo_ttft_ms'].range}"
    texts = {
        **dict.fromkeys(objectives.TTFT_KEYS, f"Objective for the first token, milliseconds {bounds}; where the body has none. The first of these names that is there counts."),
        **dict.fromkeys(objectives.TBT_KEYS, f"Objective for the P99 of the gaps between tokens, milliseconds {bounds}; where the body has none. The first of these names that is there counts."),
        objectives.TIER_KEY: "Class of the request, where the body has none.",
        objectives.QUEUE_TTL_KEY: "Longest time in the queue (1500ms, 2s, 1m30s), where that is shorter than --max-queue-s; then 429.",
    }  # fmt: skip
    ttl = {"type": "string", "pattern": f"^{objectives.DURATION_PATTERN}$", "examples": ["1500ms", "1m30s"]}
    schemas = {objectives.TIER_KEY: tier, objectives.QUEUE_TTL_KEY: ttl}
    return [
        {"name": name, "in": "header", "description": text, "schema": schemas.get(name, decimal)}
        for name, text in texts.items()
    ]  # fmt: skip


# --- bodies of requests --------------------------------------------------------------------------------------------

_HELLO = [{"role": "user", "content": "Hello"}]
_EXAMPLES: dict[str, Schema] = {
    "Completion": {
        "text": {"value": {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}},
        "stream": {"value": {"prompt": [[1, 2, 3], [4]], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}},
        "objectives": {"value": {"prompt": "Hi", "n": 2, "logprobs": 2, "slo": {"ttft_ms": 500, "tbt_ms": 100}, "aptjax_timings": True}},
    },
    "ChatCompletion": {
        "text": {"value": {"messages": _HELLO, "max_completion_tokens": 8}},
        "form": {"value": {"messages": _HELLO, "max_tokens": 8, "response_format": {"type": "json_object"}, "stream": True}},
    },
    "Responses": responses_schemas.EXAMPLES,
    "Messages": messages_schemas.EXAMPLES,
    "CountTokens": messages_schemas.COUNT_EXAMPLES,
    "Embedding": {"texts": {"value": {"input": ["One text.", "Another one."]}}},
    "Score": {"texts": {"value": {"text_1": "One text.", "text_2": ["Another one.", "A third."]}}},
    "Rerank": {"texts": {"value": {"query": "One text.", "documents": ["Another one.", "A third."], "top_n": 1}}},
    "Tokenize": {"text": {"value": {"prompt": "Hello"}}, "conversation": {"value": {"messages": _HELLO}}},
    **llama_infill.EXAMPLES,
    **ollama_schemas.EXAMPLES,
    "Detokenize": {"ids": {"value": {"tokens": [1, 2, 3]}}},
}  # fmt: skip


def _requests(limits: RequestLimits | None, models: list[str]) -> Schema:
    vocab = MAX_INTEGER if limits is None else limits.vocab_size - 1
    longest = MAX_INTEGER if limits is None else limits.max_model_len - 1
    most = longest
    if limits is not None and limits.max_pool_tokens is not None:
        most = min(longest, limits.max_pool_tokens - 1)
    token = _integer(0, vocab)
    ids = _list(token, 1, longest)
    sequences = int(REQUEST_FIELDS["n"].max or 1) if limits is None else limits.max_sequences
    texts = _list(_TEXT, 1, sequences)
    completion = {
        **_common("completion", models, token, most, limits),
        "prompt": {
            "anyOf": [_TEXT, texts, ids, _list(ids, 1, sequences)],
            "description": "A text, texts, token ids, or lists of them.",
        },
        "max_tokens": _or_null(_integer(0, most))
        | {"default": SamplingParams().max_tokens, "description": "0 with `echo` or `prompt_logprobs` alone."},
        "logprobs": _or_null(_field("logprobs")),
        "echo": _or_null(_FLAG),
        "suffix": _or_null(_STRING)
        | {"description": "Text after what is to be filled in; for models that have tokens for it."},
    }
    messages = _list(_message(), 1, chat.MAX_MESSAGES)
    conversation = {
        "messages": messages,
        "tools": _or_null(_list(_tool(), 0, chat.MAX_TOOLS)),
        "tool_choice": _tool_choice(),
        **_functions(),
        "parallel_tool_calls": _or_null(_FLAG) | {"description": "False: one call at most."},
        "add_generation_prompt": _or_null(_FLAG),
        "continue_final_message": _or_null(_FLAG)
        | {"description": "Go on with the last message; then without `add_generation_prompt`."},
        "chat_template_kwargs": _or_null(
            {
                "type": "object",
                "maxProperties": template_kwargs.MAX_KWARGS,
                "propertyNames": {
                    "pattern": "^[A-Za-z][A-Za-z0-9_]{0,63}$",
                    "not": {"enum": sorted(template_kwargs.RESERVED)},
                },
                "description": "Variables of the chat template.",
            }
        ),
    }
    answer = {
        **_common("chat", models, token, most, limits),
        **conversation,
        "max_tokens": _or_null(_integer(1, MAX_INTEGER)),
        "max_completion_tokens": _or_null(_integer(1, most)),
        "logprobs": _or_null(_FLAG),
        "top_logprobs": _or_null(_field("logprobs")),
        "echo": {"enum": [False, None]},
    }
    embedding = {
        **{name: completion[name] for name in embeddings.CARRIED if name in completion},
        "input": completion["prompt"],
        "pooling": {"enum": [*embeddings.POOLINGS, None], "default": embeddings.POOLINGS[0]},
        "normalize": _or_null(_FLAG) | {"default": True, "description": "Scale to length 1."},
        "dimensions": _or_null(_integer(1, MAX_INTEGER)) | {"description": "Keep the first ones."},
        "encoding_format": {"enum": [*embeddings.ENCODINGS, None], "default": embeddings.ENCODINGS[0]},
        **{name: {"enum": [*neutral, None]} for name, neutral in embeddings.REFUSED.items()},
    }
    score = {
        name: embedding[name] for name in embedding if name in (*embeddings.CARRIED, *embeddings.REFUSED, "pooling")
    }
    sides = {"anyOf": [_TEXT, _list(_TEXT, 1, sequences - 1)]}
    score |= {"text_1": {**sides, "description": "One text, or as many as in `text_2`."}, "text_2": sides}
    document = {"anyOf": [_TEXT, _object({"text": _TEXT}, required=("text",))]}
    reranking = {
        **{name: score[name] for name in score if name not in ("text_1", "text_2")},
        "query": _TEXT,
        "documents": _list(document, 1, sequences - 1),
        "top_n": _or_null(_integer(0, MAX_INTEGER)) | {"description": "Results in the answer; 0: all."},
        "return_documents": _or_null(_FLAG) | {"default": True},
    }
    shared = {"model": _model(models), "return_token_strs": _or_null(_FLAG)}
    text = {**shared, "prompt": _STRING, "messages": _NULL, "add_special_tokens": _or_null(_FLAG)}
    not_in_chats = {
        **{name: {"enum": [*values, None]} for name, values in UNSUPPORTED.items()},
        "add_special_tokens": {"enum": [False, None]},
    }
    ids_of_text = {"type": "array", "items": token, "maxItems": MAX_INTEGER if limits is None else limits.max_model_len}
    return {
        "CompletionRequest": _object(completion, required=("prompt",)),
        "ChatCompletionRequest": _object(answer, required=("messages",)),
        **responses_schemas.requests(answer),
        **messages_schemas.requests(answer),
        **llama_infill.requests(completion),
        **ollama_schemas.requests(answer, embedding),
        "EmbeddingRequest": _object(embedding, required=("input",)),
        "ScoreRequest": _object(score, required=("text_1", "text_2")),
        "RerankRequest": _object(reranking, required=("query", "documents")),
        "TokenizeRequest": {
            "anyOf": [
                _object(text, required=("prompt",)),
                _object({**shared, **conversation, **not_in_chats}, required=("messages",)),
            ]
        },
        "DetokenizeRequest": _object({"model": _model(models), "tokens": ids_of_text}, required=("tokens",)),
    }


def _common(kind: Kind, models: list[str], token: Schema, most: int, limits: RequestLimits | None) -> Schema:
    """Return the request schema that both kinds of completions share."""
    defaults = SamplingParams()
    sampling = {name: _field(name, token, most) for name in openai_api.PLAIN}
    sequences, stops = (REQUEST_FIELDS[name] for name in ("n", "stop"))
    most_outputs, most_stops = sequences.max, stops.max_items
    if limits is not None:
        most_outputs, most_stops = limits.max_sequences, limits.max_stop_strings
    sampling["stop"] = _texts(stops, most_stops)
    outputs = _or_null(_integer(1, most_outputs))
    special = openai_api.ADD_SPECIAL_TOKENS[kind]
    tier = sorted(objectives.TIERS)
    ttft, tbt, deadline, slo_class = (
        _or_null(_field(name)) for name in ("slo_ttft_ms", "slo_tbt_ms", "deadline_ms", "slo_class")
    )
    return {
        **{
            name: _or_null(schema) | ({} if getattr(defaults, name) in (None, ()) else {"default": getattr(defaults, name)})
            for name, schema in sampling.items()
        },
        "model": _model(models),
        "logit_bias": _or_null(_field("logit_bias", token, most)),
        "structured_outputs": _or_null(_structured_outputs()),
        **_constraint_names(),
        "response_format": _or_null(_response_format()),
        "n": outputs | {"description": f"With the prompts at most {most_outputs} answers."},
        "best_of": outputs | {"description": "Equal to `n`, or left out."},
        "stream": _or_null(_FLAG),
        "stream_options": _or_null(_object({name: _or_null(_FLAG) for name in ("include_usage", "continuous_usage_stats")})),
        "request_id": _or_null({"type": "string", "pattern": f"^{validation.REQUEST_ID_PATTERN}$"}),
        "cache_salt": _or_null(_field("cache_salt")),
        **{name: _or_null(_FLAG) for name in ("return_token_ids", "return_tokens_as_token_ids", "aptjax_timings")},
        "slo": _or_null(_object({"ttft_ms": ttft, "tbt_ms": tbt, "class": slo_class, "deadline_ms": deadline}, closed=True)),
        "slo_ttft_ms": ttft,
        "slo_tbt_ms": tbt,
        "slo_class": slo_class,
        "deadline_ms": deadline,
        "service_tier": {"enum": [*tier, None]},
        "priority": _or_null(_integer(-openai_api.MAX_PRIORITY, openai_api.MAX_PRIORITY))
        | {"description": "vLLM's: above 0 best effort, below 0 real time, where no class is named."},
        "add_special_tokens": {"enum": [special, None]},
        **{
            name: {"enum": [*values, None], "description": "Not supported; these values ask for nothing."}
            for name, values in UNSUPPORTED.items()
        },
    }  # fmt: skip


def _field(name: str, token: Schema = _COUNT, most: float = MAX_INTEGER) -> Schema:
    """The schema of a request field by its declaration; `most` bounds the fields that count output tokens."""
    spec = REQUEST_FIELDS[name]
    match spec.type:
        case "integer":
            bounds = _integer(spec.min, most if name == "min_tokens" else spec.max)
            return bounds | ({"not": {"const": 0}} if name == "truncate_prompt_tokens" else {})
        case "number":
            return _number(MIN_POSITIVE if spec.open_min else spec.min, spec.max)
        case "strings":
            texts = _texts(spec, spec.max_items)
            return texts["anyOf"][1] if name == "bad_words" else texts
        case "token ids":
            return _list(token, int(name == "allowed_token_ids"), spec.max_items)
        case "bias map":
            return {
                "type": "object",
                "maxProperties": spec.max_items,
                "propertyNames": {"pattern": "^(-0{1,10}|[0-9]{1,10})$"},
                "additionalProperties": _number(spec.min, spec.max),
            }
        case "string":
            text = {"type": "string", "minLength": 1, "maxLength": spec.max_chars}
            return {"enum": list(spec.choices)} if spec.choices else text
    return _FLAG


def _texts(spec: FieldSpec, most: float | None) -> Schema:
    """A text, or at most so many of them."""
    text = {"type": "string", "minLength": 1, "maxLength": spec.max_chars}
    return {"anyOf": [text, _list(text, 0, most)]}


def _model(models: list[str]) -> Schema:
    return {"enum": [*models, "", None]} if models else {"type": ["string", "null"]}


def _constraints() -> dict[str, Schema]:
    """Return the schemas of constraints, by the name that they have in `structured_outputs`."""
    text = {"type": "string", "minLength": 1, "maxLength": validation.MAX_GRAMMAR_BYTES}
    return {
        "json": {"anyOf": [text, {"type": ["object", "boolean"]}]},
        "regex": text,
        "choice": _list(text, 1, validation.MAX_CHOICES),
        "grammar": text,
        "json_object": {"const": True},
    }


def _whitespace() -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": validation.MAX_WHITESPACE_PATTERN_BYTES}


def _structured_outputs() -> Schema:
    """Return the schema of `structured_outputs`: closed, with exactly one constraint."""
    constraints = _constraints()
    given = {name: _object({name: wanted}, required=(name,)) for name, wanted in constraints.items()}
    options = {"disable_any_whitespace": _FLAG, "whitespace_pattern": _or_null(_whitespace())}
    fields = {**{name: _or_null(wanted) for name, wanted in constraints.items()}, **options}
    fields["json_object"] = _or_null(_FLAG)
    return {**_object(fields, closed=True), "oneOf": list(given.values())}


def _constraint_names() -> dict[str, Schema]:
    """Return the schemas of constraints under the names of other servers."""
    constraints = _constraints()
    made = {
        name: _or_null(constraints[ours]) | {"description": f"The same as `structured_outputs.{ours}`; instead of it."}
        for name, ours in constraint_fields.OTHER_NAMES.items()
    }
    made["grammar"] |= {"minLength": 0}  # llama.cpp's clients send an empty one for none
    whitespace = _or_null(_whitespace()) | {
        "description": "With `guided_json`: `structured_outputs.whitespace_pattern`."
    }
    return {**made, "guided_whitespace_pattern": whitespace}


def _response_format() -> Schema:
    schema = {"type": ["object", "boolean", "string"]}
    named = _object({"schema": schema}, required=("schema",))
    return {
        "anyOf": [
            _object({"type": {"const": "text"}}, required=("type",)),
            _object({"type": {"const": "json_object"}, "schema": _or_null(schema)}, required=("type",)),
            _object({"type": {"const": "json_schema"}, "json_schema": named}, required=("type", "json_schema")),
            _object(
                {"type": {"const": "json_schema"}, "schema": schema, "json_schema": _NULL}, required=("type", "schema")
            ),
        ]
    }


def _message() -> Schema:
    """One message: its content, or what it calls. Further fields are ignored."""
    part = {
        "anyOf": [
            _STRING,
            _object(
                {"type": {"enum": ["text", "input_text", "output_text"]}, "text": _STRING}, required=("type", "text")
            ),
            _object({"type": {"const": "refusal"}, "refusal": _STRING}, required=("type", "refusal")),
            _object({"type": {"enum": ["thinking", "reasoning", "redacted_thinking"]}}, required=("type",)),
        ]
    }
    content = {"anyOf": [_STRING, {"type": "array", "items": part}]}
    name = {"type": ["string", "null"], "maxLength": chat.MAX_NAME_CHARS}
    called = _object({"name": _STRING, "arguments": {"type": ["string", "object", "null"]}}, required=("name",))
    text = _object({"name": _STRING, "input": _STRING}, required=("name", "input"))
    custom = _object({"type": {"const": "custom"}, "custom": text}, required=("type", "custom"))
    function = _object({"type": {"not": {"const": "custom"}}, "function": called}, required=("function",))
    calls = {"type": "array", "items": {"anyOf": [function, custom]}}
    fields = {
        "role": {"type": "string", "pattern": f"^{chat.ROLE_PATTERN}$"},
        "name": name,
        "tool_call_id": name,
        "reasoning_content": _or_null(_STRING),
    }
    says = {**fields, "content": content, "tool_calls": _or_null(calls)}
    does = {**fields, "content": _or_null(content), "tool_calls": calls | {"minItems": 1}}
    did = {**fields, "content": _or_null(content), "tool_calls": {"enum": [[], None]}, "function_call": called}
    silent = {
        **fields,
        "role": {"enum": ["assistant", "tool", "function"]},
        "content": _or_null(content),
        "tool_calls": _or_null(calls),
    }
    return {
        "anyOf": [
            _object(says, required=("role", "content")),
            _object(does, required=("role", "tool_calls")),
            _object(did, required=("role", "function_call")),
            _object(silent, required=("role",)),
        ]
    }


def _tool() -> Schema:
    name = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
    fields = {
        "name": name,
        "parameters": {"type": ["object", "null"], "properties": {"type": {"const": "object"}}},
        "strict": _or_null(_FLAG),
    }
    function = _object(fields, required=("name",))
    pattern = _object({"syntax": {"const": "regex"}, "definition": _STRING}, required=("syntax", "definition"))
    form = {
        "anyOf": [
            _NULL,
            _object({"type": {"const": "text"}}, required=("type",)),
            _object({"type": {"const": "grammar"}, "grammar": pattern}, required=("type", "grammar")),
        ]
    }
    custom = _object({"name": name, "description": _or_null(_STRING), "format": form}, required=("name",))
    return {
        "anyOf": [
            _object({"type": {"const": "function"}, "function": function}, required=("type", "function")),
            _object({"type": {"const": "custom"}, "custom": custom}, required=("type", "custom")),
        ]
    }


def _tool_choice() -> Schema:
    named = _object({"name": _STRING}, required=("name",))
    one = {
        "anyOf": [
            _object({"type": {"const": kind}, kind: named}, required=("type", kind)) for kind in ("function", "custom")
        ]
    }
    some = _object(
        {"mode": {"enum": ["auto", "required"]}, "tools": _list(one, 1, chat.MAX_TOOLS)}, required=("mode", "tools")
    )
    allowed = _object({"type": {"const": "allowed_tools"}, "allowed_tools": some}, required=("type", "allowed_tools"))
    return {"anyOf": [{"enum": ["none", "auto", "required", None]}, one, allowed]}


def _functions() -> dict[str, Schema]:
    """The fields that came before `tools`."""
    (function,) = (kind["properties"]["function"] for kind in _tool()["anyOf"] if "function" in kind["properties"])
    named = _object({"name": _STRING}, required=("name",))
    return {
        "functions": _or_null(_list(function, 0, chat.MAX_TOOLS))
        | {"description": "In place of `tools`, as it was before; a call comes back as `function_call`."},
        "function_call": {"anyOf": [{"enum": ["none", "auto", None]}, named]},
    }


# --- answers -------------------------------------------------------------------------------------------------------


def _said() -> Schema:
    """The message of a chat's choice; where there are calls and no text its content is null."""
    function = _all({"name": _STRING, "arguments": _STRING})
    call = _all({"id": _STRING, "type": {"const": "function"}, "function": function})
    text = _all({"name": _STRING, "input": _STRING})
    custom = _all({"id": _STRING, "type": {"const": "custom"}, "custom": text})
    fields = {"role": {"const": "assistant"}, "content": _or_null(_STRING), "refusal": _NULL}
    calls = _many({"anyOf": [call, custom]})
    more = {"reasoning_content": _STRING, "tool_calls": calls, "function_call": function}
    return _all({**fields, **more}, optional=tuple(more))


def _delta() -> Schema:
    """Addition of a chunk to the message: of a call its name first, then pieces of its arguments."""
    function = _all({"name": _STRING, "arguments": _STRING}, optional=("name",))
    text = _all({"name": _STRING, "input": _STRING}, optional=("name",))
    head = {"index": _COUNT, "id": _STRING}
    call = _all({**head, "type": {"const": "function"}, "function": function}, optional=("id", "type"))
    custom = _all({**head, "type": {"const": "custom"}, "custom": text}, optional=("id", "type"))
    fields = {
        "role": {"const": "assistant"},
        "content": _or_null(_STRING),
        "reasoning_content": _STRING,
        "tool_calls": _many({"anyOf": [call, custom]}),
        "function_call": function,
    }
    return _all(fields, optional=tuple(fields))


def _answers() -> Schema:
    """Return the schemas of responses; their objects are closed, so that every field is documented."""
    maybe_number = _or_null(_NUMBER)
    tier = {"enum": list(objectives.USED_TIERS)}
    head = {"id": _STRING, "created": _COUNT, "model": _STRING, "service_tier": tier, "system_fingerprint": _NULL}
    usage = _all({
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _all({"cached_tokens": _COUNT}),
    })  # fmt: skip
    timings = ("queue_ms", "ttft_ms", "p99_tbt_ms", "p99_tbt_drop_first_ms", "total_ms")
    served = _all({
        "request_id": _STRING,
        "timings": _all({name: maybe_number for name in timings}),
        "slo": _all({
            "ttft_ms": maybe_number, "tbt_ms": maybe_number, "class": {"enum": ["rt", "be"]},
            **{name: _FLAG for name in ("ttft_attained", "tbt_attained", "attained")},
        }),
        "cache_kind": {"enum": [*KIND_NAMES, None]},
        **{n: _COUNT for n in ("cached_prompt_tokens", "num_preemptions", "num_kind_switches", "num_conversions", "recomputed_tokens")},
    })  # fmt: skip
    named = {"token": _STRING, "logprob": _NUMBER, "bytes": {"type": "array", "items": _integer(0, 255)}}
    of_chat = {"content": _many(_all({**named, "top_logprobs": _many(_all(named))}))}
    of_text = {
        "tokens": _many(_STRING),
        "token_logprobs": _many(maybe_number),
        "top_logprobs": _many(_or_null({"type": "object", "additionalProperties": _NUMBER})),
        "text_offset": _many(_COUNT),
    }
    end = {
        "stop_reason": {"type": ["integer", "string", "null"]},
    }
    of_prompt = _many(_or_null({
        "type": "object",
        "additionalProperties": _all({"logprob": _NUMBER, "rank": _COUNT, "decoded_token": _or_null(_STRING)}),
    }))  # fmt: skip
    prompt = {"prompt_logprobs": _or_null(of_prompt)}
    more = {"token_ids": _many(_COUNT), "prompt_token_ids": _many(_COUNT), "aptjax": served}
    made: Schema = {}
    for name, kind, logprobs in (
        ("Completion", "text_completion", of_text),
        ("ChatCompletion", "chat.completion", of_chat),
    ):
        is_chat = name == "ChatCompletion"
        common = {"index": _COUNT, "logprobs": _or_null(_all(logprobs))}
        whole = {"message": _said()} if is_chat else {"text": _STRING}
        piece = {"delta": _delta()} if is_chat else {"text": _STRING}
        end = {
            **end,
            "finish_reason": {
                "enum": ["stop", "length", *(["tool_calls", "function_call"] if is_chat else []), "abort"]
            },
        }
        going = {"finish_reason": _or_null(end["finish_reason"]), "stop_reason": end["stop_reason"]}
        of_choice = more if is_chat else {**more, **prompt}
        choice = _all({**common, **whole, **end, **of_choice}, optional=tuple(of_choice))
        chunk_choice = _all({**common, **piece, **going, **more}, optional=("stop_reason", *more))
        of_call = prompt if is_chat else {}
        made[name] = _all(
            {**head, "object": {"const": kind}, "choices": _many(choice), "usage": usage, **of_call},
            optional=tuple(of_call),
        )
        kind += ".chunk" if is_chat else ""
        made[f"{name}Chunk"] = _all(
            {**head, "object": {"const": kind}, "choices": _many(chunk_choice), "usage": _or_null(usage)},
            optional=("usage",),
        )
    model = _all({
        **{name: _STRING for name in ("id", "root")},
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": {"const": "apt-jax"},
        "parent": {"type": ["string", "null"]},
        "max_model_len": _COUNT,
    })  # fmt: skip
    event = _object({"event": _STRING, "at_ms": _NUMBER, "until_ms": _NUMBER}, required=("event", "at_ms", "until_ms"))
    maybe_text = {"type": ["string", "null"]}
    start = _all({"stage": _STRING, "number": _COUNT, "of": _COUNT, "estimated_seconds": {"type": ["number", "null"]}})
    error = {"message": _TEXT, "type": _STRING, "param": maybe_text, "code": maybe_text, "starting": start}
    return {
        **made,
        **responses_schemas.answers(served, _many(_all({**named, "top_logprobs": _many(_all(named))}))),
        **messages_schemas.answers(served),
        **llama_infill.answers(),
        **ollama_schemas.answers(),
        "Model": model,
        "Models": _all({"object": {"const": "list"}, "data": _many(_ref("Model"))}),
        "Decisions": _all({
            "object": {"const": "request.decisions"}, "request_id": _STRING, "num_dropped": _COUNT, "events": _many(event),
        }),
        "Tokenize": _all({
            "count": _COUNT, "max_model_len": _COUNT, "tokens": _many(_COUNT), "token_strs": _or_null(_many(_STRING)),
        }),
        "Detokenize": _all({"prompt": _STRING}),
        "Embedding": _all({
            "id": _STRING, "object": {"const": "list"}, "model": _STRING,
            "data": _many(_all({
                "object": {"const": "embedding"}, "index": _COUNT,
                "embedding": {"anyOf": [_many(_NUMBER), {**_STRING, "description": "float32, little endian, in base64."}]},
            })),
            "usage": _all({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
            "service_tier": tier,
        }),
        "Score": _all({
            "id": _STRING, "object": {"const": "list"}, "created": _COUNT, "model": _STRING,
            "data": _many(_all({"object": {"const": "score"}, "index": _COUNT, "score": _NUMBER})),
            "usage": _all({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
            "service_tier": tier,
        }),
        "Rerank": _all({
            "id": _STRING, "model": _STRING,
            "results": _many(_all({
                "index": _COUNT, "document": _all({"text": _STRING}), "relevance_score": _NUMBER,
            }, optional=("document",))),
            "usage": _all({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
            "service_tier": tier,
        }),
        "Load": _all({"server_load": _COUNT}),
        "ServerInfo": _all({
            **dict.fromkeys(("version", "model", "dtype", "scheduling_policy"), _STRING), "max_model_len": _COUNT,
        }),
        "Version": _all({"version": _STRING}),
        "Index": _all({"name": _STRING, "links": {"type": "object", "additionalProperties": _STRING}}),
        "TokenizerInfo": _object({"tokenizer_class": _STRING, "model_max_length": _COUNT}),
        "StartProfile": _all({"directory": _STRING, "ends_after_s": _NUMBER}),
        "StopProfile": _all({"directory": _STRING}),
        "Error": _all({"error": _all(error, optional=("starting",))}),
    }  # fmt: skip

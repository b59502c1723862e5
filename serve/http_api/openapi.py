"""OpenAPI 3.1 document of the HTTP server: ``GET /openapi.json``.

The bounds come from the code that enforces them (`apt_jax.validation`, `apt_jax.text.chat`,
`serve.http_api.openai_request`) and, once there is an engine, from its model: lengths, vocabulary, names. Values that a
schema forbids are rejected with status 400, except for an objective in a header if the body has the same objective.
Values that a schema allows may be rejected too, because a schema cannot express that the prompt and `max_tokens` must
fit the model's length, that two fields exclude each other, that 1.0 is not an integer or that a grammar must compile.
Fields that a schema does not list are ignored, unless it forbids other fields. The dashboard and chat pages are not
described.
"""

from collections.abc import Iterable
from typing import Any

import apt_jax
from apt_jax.core.kinds import KIND_NAMES
from apt_jax.validation import MAX_SESSION_ID_CHARS, REQUEST_FIELDS, RequestLimits
from serve import slo_headers as objectives
from serve.http_api import llama_infill, rerank
from serve.http_api.app_config import Description
from serve.http_api.embeddings import EmbeddingBody
from serve.http_api.errors import DROPPED_REASON_KEYS
from serve.http_api.json_schemas import (
    COUNT,
    FLAG,
    NULL,
    STRING,
    Facts,
    Schema,
    closed,
    integer,
    many,
    object_of,
    or_null,
    ref,
)
from serve.http_api.messages import schemas as messages_schemas
from serve.http_api.messages.request import COUNTED, CountTokensBody, MessagesBody
from serve.http_api.ollama import request as ollama_request
from serve.http_api.ollama import schemas as ollama_schemas
from serve.http_api.openai_bodies import TEXT, ChatBody, CompletionBody
from serve.http_api.records import Record, schema_of
from serve.http_api.responses import schemas as responses_schemas
from serve.http_api.responses.request import ResponsesBody
from serve.http_api.scores import ScoreBody
from serve.http_api.tokenization import DetokenizeBody, TokenizeBody, TokenizeConversation

_JSON = "application/json"
_NUMBER: Schema = {"type": "number"}
_OPEN: Schema = {"type": "object"}

_ERRORS: dict[int, tuple[str, str]] = {
    400: ("BadRequest", "The request is invalid and can never be served unchanged; `param` is the invalid field."),
    401: ("Unauthorized", "No valid API key."),
    403: ("Forbidden", "The call is for operators, or comes from a web page of another origin."),
    404: ("NotFound", "No such model, request, response or path."),
    405: ("MethodNotAllowed", "This path does not accept this method."),
    408: ("Timeout", "The deadline has passed, or the head or body arrived too slowly."),
    413: ("TooLarge", "The body is too large."),
    415: ("UnsupportedMediaType", "The body must be JSON and not compressed."),
    421: ("Misdirected", "This host name is not accepted."),
    429: ("QueueFull", "The server is overloaded, or the objective cannot be met."),
    431: ("HeadTooLarge", "The head of the request is too large."),
    500: ("Failed", "This request failed because of its own content; do not send it again."),
    503: ("Unavailable", "The server is starting or draining, or its engine has stopped."),
    507: ("DiskFull", "The disk, or the key's share of it, is full: delete files."),
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
    stores_responses: bool = False,
    batches: Description | None = None,
) -> Schema:
    """Return the OpenAPI document.

    Args:
        limits: limits of the model; None while there is no engine, so lengths and token ids have only general bounds.
        models: model names that requests may use; empty: any name.
        has_keys: whether calls need an API key.
        profiles: whether the profiling paths exist (`serve.observability.profiler`).
        stores_responses: whether responses are stored (`serve.http_api.responses.store`).
        batches: description of the paths for files and batches; None if they do not exist.
    """
    names = sorted(set(models))
    facts = Facts(limits=limits, models=names, stores_responses=stores_responses)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "apt-jax",
            "version": apt_jax.__version__,
            "description": (
                "OpenAI's completions, chat completions and responses, and Anthropic's messages, with latency objectives. Fields that no schema lists are ignored. "
                "A request that matches its schema may still be rejected with 400, for reasons that a schema cannot express: the "
                "prompt and `max_tokens` together exceed the model's length, two fields exclude each other, a grammar does "
                "not compile, 1.0 is given for an integer."
            ),
        },
        "paths": _paths(names, has_keys, profiles, stores_responses, batches),
        "components": {
            "schemas": {**_requests(facts), **_answers(), **({} if batches is None else batches.schemas())},
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


def _paths(
    models: list[str], has_keys: bool, profiles: bool, stores_responses: bool, batches: Description | None
) -> Schema:
    def get(name: str, summary: str, good: Schema, *more: int, open_: bool = False, parameters: Any = ()) -> Schema:
        operation = _operation(name, summary, good, more, has_keys and not open_)
        operation["parameters"] = list(parameters)
        # Frameworks also serve HEAD, as a GET without its body.
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
        content = {"schema": ref(f"{asks}Request"), "examples": {**_EXAMPLES, **examples}[asks]}
        given = {"required": True, "content": {_JSON: content}}
        return {"post": {**operation, "parameters": list(parameters), "requestBody": given}}

    def profile(name: str, summary: str) -> Schema:  # without a body
        return {"post": _operation(name, summary, _good(name), (415,), has_keys)}

    stored = {}
    if stores_responses:
        delete = _operation("DeleteResponse", "Remove a stored response.", _good("ResponsesDeleted"), (404,), has_keys)
        parameters = [_in_path("response_id", STRING, "The `id` of a stored response.")]
        found = get("StoredResponse", "A stored response.", _good("Responses"), 404, parameters=parameters)
        stored["/v1/responses/{response_id}"] = {**found, "delete": {**delete, "parameters": parameters}}
    examples, files = {}, {}
    if batches is not None:
        examples = batches.examples
        files = batches.paths(
            lambda name, summary, good, more: _operation(name, summary, good, more, has_keys), get, post
        )
    profiling = {
        "/start_profile": profile("StartProfile", "Start a profile; 400 if one is being taken."),
        "/stop_profile": profile("StopProfile", "Stop the profile; 400 if none is being taken."),
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
    name_schema = {**STRING, "examples": models} if models else STRING
    return {
        "/v1/completions": post("Completion", "Continue prompts.", _generated("Completion", decisions), 429, parameters=_slo_headers()),
        "/v1/chat/completions": post("ChatCompletion", "Answer a conversation.", _generated("ChatCompletion", decisions), 429, parameters=_slo_headers()),
        "/v1/responses": post("Responses", "Answer a conversation (OpenAI's Responses API).", _generated("Responses", decisions, responses_schemas.EVENT), 429, parameters=_slo_headers()),
        **stored,
        "/v1/messages": post("Messages", "Answer a conversation (Anthropic's Messages API).", _generated("Messages", decisions, messages_schemas.EVENT), 429, parameters=_slo_headers()),
        "/v1/messages/count_tokens": post("CountTokens", "Number of prompt tokens of a conversation.", _good("CountTokens")),
        "/v1/embeddings": post("Embedding", "Embed texts as pooled hidden states.", {**_good("Embedding"), "links": {"decisions": decisions}}, 429, parameters=_slo_headers()),
        "/v1/score": post("Score", "Similarity of texts: the cosine of their embeddings.", {**_good("Score"), "links": {"decisions": decisions}}, 429, parameters=_slo_headers()),
        **{
            path: post(name, "Rank documents by their similarity to a query.", {**_good("Rerank"), "links": {"decisions": decisions}}, 429, parameters=_slo_headers(), body="Rerank")
            for path, name in zip(rerank.PATHS, ("Rerank", "RerankBare", "RerankV2"), strict=True)
        },
        "/load": get("Load", "Number of calls that are being served.", _good("Load")),
        "/server_info": get("ServerInfo", "Facts about the server.", _good("ServerInfo"), 503),
        "/v1/models": get("Models", "The served model, once for each of its names, and its LoRA adapters, with the model as `parent`.", {**_good("Models"), "links": {"model": model}}, 503),
        "/v1/models/{name}": get("Model", "A model.", _good("Model"), 404, 503, parameters=[_in_path("name", name_schema, "It may contain slashes.")]),
        "/v1/requests/{request_id}/decisions": get(
            "Decisions", "Timeline of a recent request.", _good("Decisions"), 404, 503,
            parameters=[_in_path("request_id", STRING, "The `id` of an answer, or the `request_id` of its request.")],
        ),
        "/v1/sessions/{session_id}": {
            "delete": {
                **_operation("EndSession", "End a session: cached prefixes that only it needs are freed.", _good("SessionEnded"), (503,), has_keys),
                "parameters": [_in_path("session_id", STRING, "The session as the calls named it.")],
            }
        },
        "/tokenize": post("Tokenize", "Convert a text or a conversation to token ids.", {**_good("Tokenize"), "links": {"detokenize": detokenize}}),
        "/detokenize": post("Detokenize", "Convert token ids to text.", _good("Detokenize")),
        "/tokenizer_info": get("TokenizerInfo", "Settings of the tokenizer.", _good("TokenizerInfo"), 404, 503),
        llama_infill.PATH: post("Infill", "Fill in the text between two texts (llama.cpp's API).", _without_last(_generated("Infill", decisions)), 429, parameters=_slo_headers()),
        **_ollama_paths(get, post, decisions),
        "/": _with_redirect(get("Index", "Paths of pages and APIs; browsers are redirected to the chat.", _good("Index"), open_=True)),
        "/health": get("Health", "Liveness: 200 even while loading or draining.", {"description": "Alive."}, 503, open_=True),
        "/ping": {
            **get("Ping", "The same as /health, for SageMaker.", {"description": "Alive."}, 503, open_=True),
            "post": _operation("PingPost", "The same as /health.", {"description": "Alive."}, (503,), needs_key=False),
        },
        "/version": get("Version", "The version of the package.", _good("Version")),
        "/ready": get("Ready", "Readiness for new requests.", {"description": "Ready."}, 503, open_=True),
        "/metrics": get("Metrics", "Metrics for Prometheus, in a format that it accepts.", {
            "description": "The metrics.",
            "content": {name: {"schema": STRING} for name in ("text/plain", "application/openmetrics-text")},
        }, 503),
        "/arrivals": get(
            "Arrivals", "Lengths and times of recent requests, for operators; recording lasts a minute after each call.",
            _good("Arrivals"), 400, 503,
            parameters=[{"name": "after", "in": "query", "required": False, "schema": COUNT, "description": "The `number` of the last answer; without it no requests are returned, but settings and costs."}],
        ),
        "/openapi.json": get("OpenApi", "This document.", {"description": "OpenAPI 3.1.", "content": {_JSON: {"schema": _OPEN}}}),
        **files,
        **(profiling if profiles else {}),
    }  # fmt: skip


def _with_redirect(path: Schema) -> Schema:
    for operation in path.values():
        operation["responses"]["307"] = {"description": "To the chat, for clients that accept HTML."}
    return path


def _without_last(good: Schema) -> Schema:
    del good["content"]["text/event-stream"]["x-last-event"]
    return good


def _ollama_paths(get: Any, post: Any, decisions: Schema) -> Schema:
    def streamed(name: str) -> Schema:
        good = _generated(name, decisions)
        del good["content"]["text/event-stream"]
        good["content"]["application/x-ndjson"] = {"x-line-schema": {"anyOf": [ref(name), ref(ollama_schemas.ERROR)]}}
        return {**good, "description": "The answer; unless `stream` is false, one line for each piece of it."}

    return {
        "/api/chat": post("OllamaChat", "Answer a conversation (Ollama's API).", streamed("OllamaChat"), 429, parameters=_slo_headers()),
        "/api/generate": post("OllamaGenerate", "Answer or continue a text (Ollama's API).", streamed("OllamaGenerate"), 429, parameters=_slo_headers()),
        "/api/embed": post("OllamaEmbed", "Embed texts (Ollama's API).", _good("OllamaEmbed"), 429, parameters=_slo_headers()),
        "/api/embeddings": post("OllamaEmbeddings", "Embed a text (Ollama's older API).", _good("OllamaEmbeddings"), 429, parameters=_slo_headers()),
        "/api/show": post("OllamaShow", "Facts about the model (Ollama's API).", _good("OllamaShow")),
        "/api/tags": get("OllamaTags", "The names of the model, and its adapters (Ollama's API).", _good("OllamaTags"), 503),
        "/api/ps": get("OllamaPs", "The loaded model and its adapters (Ollama's API).", _good("OllamaPs"), 503),
        "/api/version": get("OllamaVersion", "The Ollama version whose API the server offers.", _good("OllamaVersion")),
    }  # fmt: skip


def _operation(name: str, summary: str, good: Schema, more: Iterable[int], needs_key: bool) -> Schema:
    statuses = sorted({*_ALWAYS, *more, *((401,) if needs_key else ())})
    prefix = messages_schemas.PREFIX if name in messages_schemas.OPERATIONS else ""
    if name.startswith(ollama_schemas.PREFIX):
        prefix = ollama_schemas.PREFIX
    bad = {str(s): {"$ref": f"#/components/responses/{prefix}{_ERRORS[s][0]}"} for s in statuses}
    if name.removesuffix("Head") in ("Health", "Ping", "PingPost", "Ready"):
        bad["503"] = {"description": "Not healthy or not ready; without a body."}
    return {
        "operationId": name,
        "summary": summary,
        "security": [{"key": []}] if needs_key else [],
        "responses": {"200": good, **bad},
    }


def _good(name: str) -> Schema:
    return {"description": "The answer.", "content": {_JSON: {"schema": ref(name)}}}


def _generated(name: str, link: Schema, event: str | None = None) -> Schema:
    """Return the successful response of a completion, as one body or as events.

    Args:
        name: name of the schema of the body.
        link: link from the response to the decisions about its request.
        event: name of the schema of events; None: the schema of chunks.
    """
    good = _good(name)
    good["content"]["text/event-stream"] = (
        {"x-event-schema": ref(event)}
        if event
        else {
            "x-event-schema": {"anyOf": [ref(f"{name}Chunk"), ref("Error")]},
            "x-last-event": "data: [DONE], except after an error",
        }
    )
    return {
        **good,
        "description": "The answer; with `stream`, its pieces as server-sent events as they are generated.",
        "headers": {"x-request-id": _header("The `id` of the answer.", STRING)},
        "links": {"decisions": link},
    }


def _error(status: int, schema: str) -> Schema:
    headers = {"retry-after": _header("Seconds after which to retry.", COUNT | {"minimum": 1})}
    if status not in _LATER:
        headers = {"x-should-retry": _header("The same request would fail again.", {"const": "false"})}
    if status in _LATER:
        reasons = {"enum": [f"rejected-{why}" for why in ("saturated", "ttl-expired", "shutting-down", "no-endpoints")]}
        headers |= {
            key: {"description": "Reason, if the engine did not accept the request.", "schema": reasons}
            for key in DROPPED_REASON_KEYS
        }
    if status == 401:
        headers["www-authenticate"] = _header("How to send a key.", {"const": "Bearer"})
    if status == 405:
        headers["allow"] = _header("Methods that the path accepts.", STRING)
    return {
        "description": _ERRORS[status][1],
        "headers": headers,
        "content": {_JSON: {"schema": ref(schema)}},
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
        **dict.fromkeys(objectives.TTFT_KEYS, f"Objective for the first token in milliseconds, {bounds}, if the body has none. If several of these headers are sent, the first in this list is used."),
        **dict.fromkeys(objectives.TBT_KEYS, f"Objective for the P99 of the gaps between tokens in milliseconds, {bounds}, if the body has none. If several of these headers are sent, the first in this list is used."),
        **dict.fromkeys(objectives.E2E_KEYS, f"Objective for the last token in milliseconds, {bounds}, if the body has none."),
        objectives.TIER_KEY: "Class of the request, if the body has none.",
        objectives.QUEUE_TTL_KEY: "Maximum time in the queue (1500ms, 2s, 1m30s), if shorter than --set max_queue_s; after that, status 429.",
    }  # fmt: skip
    ttl = {"type": "string", "pattern": f"^{objectives.DURATION_PATTERN}$", "examples": ["1500ms", "1m30s"]}
    schemas = {objectives.TIER_KEY: tier, objectives.QUEUE_TTL_KEY: ttl}
    session = {"type": "string", "maxLength": MAX_SESSION_ID_CHARS}
    return [
        {"name": name, "in": "header", "description": text, "schema": schemas.get(name, decimal)}
        for name, text in texts.items()
    ] + [
        {"name": name, "in": "header", "description": "Session of the call, if the body names none.", "schema": session}
        for name in objectives.SESSION_KEYS
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


_RECORDS: dict[str, type[Record]] = {
    "Completion": CompletionBody,
    "ChatCompletion": ChatBody,
    "Responses": ResponsesBody,
    "Messages": MessagesBody,
    "Embedding": EmbeddingBody,
    "Score": ScoreBody,
    "Rerank": rerank.RerankBody,
    "Infill": llama_infill.InfillBody,
    "Detokenize": DetokenizeBody,
    "OllamaChat": ollama_request.ChatBody,
    "OllamaGenerate": ollama_request.GenerateBody,
    "OllamaEmbed": ollama_request.EmbedBody,
    "OllamaEmbeddings": ollama_request.OldEmbedBody,
    "OllamaShow": ollama_request.ShowBody,
}


def _requests(facts: Facts) -> Schema:
    messages = schema_of(CountTokensBody, facts)["properties"]
    return {
        **{f"{name}Request": schema_of(record, facts) for name, record in _RECORDS.items()},
        "TokenizeRequest": {"anyOf": [schema_of(record, facts) for record in (TokenizeBody, TokenizeConversation)]},
        "CountTokensRequest": object_of({name: messages[name] for name in COUNTED}, required=("messages",)),
    }


# --- answers -------------------------------------------------------------------------------------------------------


def _said() -> Schema:
    """Return the schema of the message in a choice of a chat; its content is null if it has tool calls but no text."""
    function = closed({"name": STRING, "arguments": STRING})
    call = closed({"id": STRING, "type": {"const": "function"}, "function": function})
    text = closed({"name": STRING, "input": STRING})
    custom = closed({"id": STRING, "type": {"const": "custom"}, "custom": text})
    fields = {"role": {"const": "assistant"}, "content": or_null(STRING), "refusal": NULL}
    calls = many({"anyOf": [call, custom]})
    more = {"reasoning_content": STRING, "tool_calls": calls, "function_call": function}
    return closed({**fields, **more}, optional=tuple(more))


def _delta() -> Schema:
    """Return the schema of the part that a chunk adds to the message. Chunks add the name of a tool call first, then
    pieces of its arguments."""
    function = closed({"name": STRING, "arguments": STRING}, optional=("name",))
    text = closed({"name": STRING, "input": STRING}, optional=("name",))
    head = {"index": COUNT, "id": STRING}
    call = closed({**head, "type": {"const": "function"}, "function": function}, optional=("id", "type"))
    custom = closed({**head, "type": {"const": "custom"}, "custom": text}, optional=("id", "type"))
    fields = {
        "role": {"const": "assistant"},
        "content": or_null(STRING),
        "reasoning_content": STRING,
        "tool_calls": many({"anyOf": [call, custom]}),
        "function_call": function,
    }
    return closed(fields, optional=tuple(fields))


def _answers() -> Schema:
    """Return the schemas of responses, keyed by name. Objects allow no other fields, so every field must be listed."""
    maybe_number = or_null(_NUMBER)
    tier = {"enum": list(objectives.USED_TIERS)}
    head = {"id": STRING, "created": COUNT, "model": STRING, "service_tier": tier, "system_fingerprint": NULL}
    usage = closed({
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": closed({"cached_tokens": COUNT}),
    })  # fmt: skip
    timings = ("queue_ms", "ttft_ms", "p99_tbt_ms", "p99_tbt_drop_first_ms", "total_ms")
    served = closed({
        "request_id": STRING,
        "timings": closed({name: maybe_number for name in timings}),
        "slo": closed({
            "ttft_ms": maybe_number, "tbt_ms": maybe_number, "e2e_ms": maybe_number, "class": {"enum": ["rt", "be"]},
            **{name: FLAG for name in ("ttft_attained", "tbt_attained", "e2e_attained", "attained")},
        }),
        "cache_kind": {"enum": [*KIND_NAMES, None]},
        **{n: COUNT for n in ("cached_prompt_tokens", "num_preemptions", "num_kind_switches", "num_conversions", "recomputed_tokens")},
    })  # fmt: skip
    named = {"token": STRING, "logprob": _NUMBER, "bytes": {"type": "array", "items": integer(0, 255)}}
    of_chat = {"content": many(closed({**named, "top_logprobs": many(closed(named))}))}
    of_text = {
        "tokens": many(STRING),
        "token_logprobs": many(maybe_number),
        "top_logprobs": many(or_null({"type": "object", "additionalProperties": _NUMBER})),
        "text_offset": many(COUNT),
    }
    end = {
        "stop_reason": {"type": ["integer", "string", "null"]},
    }
    of_prompt = many(or_null({
        "type": "object",
        "additionalProperties": closed({"logprob": _NUMBER, "rank": COUNT, "decoded_token": or_null(STRING)}),
    }))  # fmt: skip
    prompt = {"prompt_logprobs": or_null(of_prompt)}
    more = {"token_ids": many(COUNT), "prompt_token_ids": many(COUNT), "aptjax": served}
    made: Schema = {}
    for name, kind, logprobs in (
        ("Completion", "text_completion", of_text),
        ("ChatCompletion", "chat.completion", of_chat),
    ):
        is_chat = name == "ChatCompletion"
        common = {"index": COUNT, "logprobs": or_null(closed(logprobs))}
        whole = {"message": _said()} if is_chat else {"text": STRING}
        piece = {"delta": _delta()} if is_chat else {"text": STRING}
        end = {
            **end,
            "finish_reason": {
                "enum": ["stop", "length", *(["tool_calls", "function_call"] if is_chat else []), "abort"]
            },
        }
        going = {"finish_reason": or_null(end["finish_reason"]), "stop_reason": end["stop_reason"]}
        of_choice = more if is_chat else {**more, **prompt}
        choice = closed({**common, **whole, **end, **of_choice}, optional=tuple(of_choice))
        chunk_choice = closed({**common, **piece, **going, **more}, optional=("stop_reason", *more))
        of_call = prompt if is_chat else {}
        made[name] = closed(
            {**head, "object": {"const": kind}, "choices": many(choice), "usage": usage, **of_call},
            optional=tuple(of_call),
        )
        kind += ".chunk" if is_chat else ""
        made[f"{name}Chunk"] = closed(
            {**head, "object": {"const": kind}, "choices": many(chunk_choice), "usage": or_null(usage)},
            optional=("usage",),
        )
    model = closed({
        **{name: STRING for name in ("id", "root")},
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": {"const": "apt-jax"},
        "parent": {"type": ["string", "null"]},
        "max_model_len": COUNT,
    })  # fmt: skip
    event = object_of({"event": STRING, "at_ms": _NUMBER, "until_ms": _NUMBER}, required=("event", "at_ms", "until_ms"))
    maybe_text = {"type": ["string", "null"]}
    start = closed({"stage": STRING, "number": COUNT, "of": COUNT, "estimated_seconds": {"type": ["number", "null"]}})
    error = {"message": TEXT, "type": STRING, "param": maybe_text, "code": maybe_text, "starting": start}
    return {
        **made,
        **responses_schemas.answers(served, many(closed({**named, "top_logprobs": many(closed(named))}))),
        **messages_schemas.answers(served),
        **llama_infill.answers(),
        **ollama_schemas.answers(),
        "Model": model,
        "Models": closed({"object": {"const": "list"}, "data": many(ref("Model"))}),
        "Decisions": closed({
            "object": {"const": "request.decisions"}, "request_id": STRING, "num_dropped": COUNT, "events": many(event),
        }),
        "Tokenize": closed({
            "count": COUNT, "max_model_len": COUNT, "tokens": many(COUNT), "token_strs": or_null(many(STRING)),
        }),
        "Detokenize": closed({"prompt": STRING}),
        "Embedding": closed({
            "id": STRING, "object": {"const": "list"}, "model": STRING,
            "data": many(closed({
                "object": {"const": "embedding"}, "index": COUNT,
                "embedding": {"anyOf": [many(_NUMBER), {**STRING, "description": "float32, little endian, in base64."}]},
            })),
            "usage": closed({"prompt_tokens": COUNT, "total_tokens": COUNT}),
            "service_tier": tier,
        }),
        "Score": closed({
            "id": STRING, "object": {"const": "list"}, "created": COUNT, "model": STRING,
            "data": many(closed({"object": {"const": "score"}, "index": COUNT, "score": _NUMBER})),
            "usage": closed({"prompt_tokens": COUNT, "total_tokens": COUNT}),
            "service_tier": tier,
        }),
        "Rerank": closed({
            "id": STRING, "model": STRING,
            "results": many(closed({
                "index": COUNT, "document": closed({"text": STRING}), "relevance_score": _NUMBER,
            }, optional=("document",))),
            "usage": closed({"prompt_tokens": COUNT, "total_tokens": COUNT}),
            "service_tier": tier,
        }),
        "Load": closed({"server_load": COUNT}),
        "SessionEnded": closed({"id": STRING, "object": {"const": "session.deleted"}, "deleted": FLAG}),
        "ServerInfo": closed({
            **dict.fromkeys(("version", "model", "dtype", "scheduling_policy"), STRING), "max_model_len": COUNT,
        }),
        "Arrivals": closed({
            "block_tokens": COUNT, "now_s": _NUMBER, "number": COUNT, "lost": COUNT, "requests": many(object_of({})),
            "running": object_of({}), "hardware": or_null(object_of({})),
        }, optional=("running", "hardware")),
        "Version": closed({"version": STRING}),
        "Index": closed({"name": STRING, "links": {"type": "object", "additionalProperties": STRING}}),
        "TokenizerInfo": object_of({"tokenizer_class": STRING, "model_max_length": COUNT}),
        "StartProfile": closed({"directory": STRING, "ends_after_s": _NUMBER}),
        "StopProfile": closed({"directory": STRING}),
        "Error": closed({"error": closed(error, optional=("starting",))}),
    }  # fmt: skip

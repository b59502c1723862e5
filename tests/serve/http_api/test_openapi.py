"""The OpenAPI document: whole, valid, and with the bounds that the server enforces. `test_http_fuzz` holds the server against it."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import schemathesis

from apt_jax.errors import InvalidRequestError
from apt_jax.text.chat import ChatTemplate
from serve.batches.config import BatchConfig
from serve.batches.http import Batches
from serve.batches.store import BatchStore
from serve.errors import UnknownModelError
from serve.http_api import openai_request as openai_api
from serve.http_api import openapi
from serve.http_api.app import HttpApp
from serve.http_api.app_config import AppConfig
from serve.http_api.constraint_fields import OTHER_NAMES
from serve.http_api.endpoints import ENDPOINTS, Endpoint
from serve.observability.profiler import Profiler
from serve.security.api_keys import ApiKeys
from tests.serve.http_api.test_infill import code_tokenizer
from tests.support.chat_templates import WITH_TOOLS
from tests.support.http_serving import http_serving
from tests.support.toy_serving import VOCAB_SIZE, toy_parts

KEY = "openapi-0123456789-0123456789"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def parts():
    made = toy_parts(chat_template=ChatTemplate(WITH_TOOLS))
    yield made
    assert made.chat_template is not None
    made.chat_template.close()


@pytest.fixture(scope="module")
def document(parts) -> dict[str, Any]:
    return openapi.document(parts.limits, (parts.model_name,))


def test_every_endpoint_is_described_and_nothing_else(document):
    described = [(m.upper(), path) for path, methods in document["paths"].items() for m in methods]
    routed = [(m, path.replace(":path}", "}")) for m, path in HttpApp(AppConfig(dashboard=False)).paths]
    assert sorted(described) == sorted(routed)


def test_the_paths_of_profiles_are_described_where_they_are_served(tmp_path):
    paths = {path for _, path in HttpApp(AppConfig(profiler=Profiler(tmp_path), dashboard=False)).paths}
    described = openapi.document(profiles=True)["paths"]
    assert {"/start_profile", "/stop_profile"} <= paths & set(described)
    assert len(paths) == len(described)


def test_the_paths_of_stored_responses_are_described_where_they_are_served():
    routed = HttpApp(AppConfig(store_responses=1, dashboard=False)).paths
    described = openapi.document(stores_responses=True)
    schemathesis.openapi.from_dict(described).validate()
    assert sorted((m.upper(), path) for path, methods in described["paths"].items() for m in methods) == sorted(
        (m, path.replace(":path}", "}")) for m, path in routed
    )


def test_the_paths_of_batches_are_described_where_they_are_served(tmp_path):
    store = BatchStore(BatchConfig(directory=tmp_path))
    batches = Batches(store)
    routed = HttpApp(AppConfig(batches=batches, dashboard=False)).paths
    described = openapi.document(batches=batches.description)
    schemathesis.openapi.from_dict(described).validate()
    assert sorted((m.upper(), path) for path, methods in described["paths"].items() for m in methods) == sorted(
        (m, path.replace(":path}", "}")) for m, path in routed
    )
    store.close()


def test_the_document_is_openapi_and_its_schemas_are_json_schemas(document):
    schemathesis.openapi.from_dict(document).validate()
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_it_is_served_to_whoever_has_a_key_from_the_start_and_then_with_the_bounds_of_the_model():
    async def scenario() -> None:
        async with http_serving(app={"keys": ApiKeys([KEY])}) as served:
            assert (await served.http.get("/openapi.json")).status_code == 401
            key = {"authorization": f"Bearer {KEY}"}
            response = await served.http.get("/openapi.json", headers=key)
            assert response.headers["content-type"] == "application/json"
            parts = served.parts
            assert response.json() == openapi.document(parts.limits, ["toy"], has_keys=True)
            limits = response.json()["components"]["schemas"]["CompletionRequest"]["properties"]
            assert limits["max_tokens"]["maximum"] == parts.limits.max_model_len - 1
            assert limits["stop_token_ids"]["items"]["maximum"] == VOCAB_SIZE - 1
        starting = openapi.document(has_keys=True)["components"]["schemas"]["CompletionRequest"]
        assert starting["properties"]["max_tokens"]["maximum"] == 2**31 - 1

    asyncio.run(scenario())


def test_without_keys_no_operation_asks_for_one(document):
    operations = [op for methods in document["paths"].values() for op in methods.values()]
    assert all(not op["security"] and "401" not in op["responses"] for op in operations)
    with_keys = openapi.document(has_keys=True)["paths"]
    open_paths = {path for path, methods in with_keys.items() if not all(op["security"] for op in methods.values())}
    assert open_paths == {"/", "/health", "/ping", "/ready"}


# --- bounds --------------------------------------------------------------------------------------------------------


def bounds(schema: dict[str, Any]) -> Iterator[Any]:
    """Values at and beyond the limits of a schema."""
    for branch in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        whole = "integer" in branch.get("type", ())
        step = 1 if whole else 0.125
        for name, sign in (("minimum", -1), ("maximum", 1)):
            if name in branch:
                yield from (branch[name], branch[name] + sign * step)
        if "maxLength" in branch:
            yield from ("a" * branch["maxLength"], "a" * (branch["maxLength"] + 1))
        yield from branch.get("enum", ())
    yield from ("a", True, [], {}, 3, None)


# What needs another field beside it, or has none of its own meaning.
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "best_of": {"n": 16},
    "stream_options": {"stream": True},
    "min_tokens": {"max_tokens": None},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "f"}}]},
}
NOT_ALONE = {
    "min_tokens",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "best_of",
    "suffix",
    "text_1",
    "guided_whitespace_pattern",
    *OTHER_NAMES,
}
"""Schemas allow what the length of the prompt, `n` or a compiler of constraints does not."""


READERS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions": ("CompletionRequest", {"prompt": "hi"}),
    "/v1/chat/completions": ("ChatCompletionRequest", {"messages": HELLO, "max_tokens": 4}),
    "/v1/responses": ("ResponsesRequest", {"input": "hi", "max_output_tokens": 4}),
    "/v1/messages": ("MessagesRequest", {"messages": HELLO, "max_tokens": 4}),
    "/v1/embeddings": ("EmbeddingRequest", {"input": "hi"}),
    "/v1/score": ("ScoreRequest", {"text_1": "hi", "text_2": ["you", "there"]}),
    **{
        path: ("RerankRequest", {"query": "hi", "documents": ["you"]})
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    },
    "/infill": ("InfillRequest", {"input_prefix": "hi", "input_suffix": "you", "n_predict": 4}),
    "/api/chat": ("OllamaChatRequest", {"messages": HELLO, "options": {"num_predict": 4}}),
    "/api/generate": ("OllamaGenerateRequest", {"prompt": "hi", "options": {"num_predict": 4}}),
    "/api/embed": ("OllamaEmbedRequest", {"input": "hi"}),
    "/api/embeddings": ("OllamaEmbeddingsRequest", {"prompt": "hi"}),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_every_bound_of_a_field_is_the_servers(parts, document, endpoint: Endpoint):
    name, base = READERS[endpoint.path]
    schema = document["components"]["schemas"][name]
    validator = jsonschema.Draft202012Validator(schema)
    if endpoint.path == "/infill":
        parts = toy_parts(tokenizer=code_tokenizer())
    seen = {True: 0, False: 0}
    for field, properties in schema["properties"].items():
        if field in base and field not in NOT_ALONE:
            continue
        for value in bounds(properties):
            body = {**base, **BESIDE.get(field, {}), field: value}
            allowed = validator.is_valid(body)
            seen[allowed] += 1
            read = openai_api.parse_json(json.dumps(body).encode())
            problem = None
            try:
                endpoint.read(parts, read, {}, 0.0, None)
            except (InvalidRequestError, UnknownModelError) as error:
                problem = str(error)
            if allowed:
                assert problem is None or field in NOT_ALONE, (field, value, problem)
            else:
                assert problem is not None, (field, value)
    assert min(seen.values()) > (60 if "max_tokens" in schema["properties"] or "/v1/responses" in endpoint.path else 25)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HELLO, "tools": 5, "tool_choice": "none"},
        {"messages": HELLO, "max_tokens": 2**31, "max_completion_tokens": 4},
    ],
)
def test_what_is_not_read_must_be_well_formed_all_the_same(parts, body):
    with pytest.raises(InvalidRequestError):
        openai_api.read_call(parts, "chat", body, {}, 0.0)

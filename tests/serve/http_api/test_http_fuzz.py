"""The HTTP server against its own OpenAPI document: whatever is sent, an answer that the document allows, and nothing
is left behind.

schemathesis makes valid and invalid requests of every operation, reads answers to the end, streams too, and checks
status, type, headers and shape. `make fuzz` sends 8,000.
"""

import collections
import functools
import json
from typing import Any

import httpx2
import jsonschema
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis.config import SchemathesisConfig
from schemathesis.core.parameters import ParameterLocation
from schemathesis.engine import events, from_schema
from schemathesis.specs.openapi.checks import negative_data_rejection

from serve.slo_headers import E2E_KEYS, TBT_KEYS, TIER_KEY, TTFT_KEYS
from tests.support.cases import num_cases
from tests.support.fuzzing import FULL, KEY, SEED, Fuzzed, cases, fuzz, fuzzing

OBJECTIVES = {"slo", "slo_ttft_ms", "slo_tbt_ms", "slo_e2e_ms", "slo_class", TIER_KEY}
EXAMPLES = {
    "Completion": cases(num_cases(7, 14), 2000, 16_000),
    "ChatCompletion": cases(num_cases(5, 10), 1300, 10_000),
    "Responses": cases(num_cases(4, 8), 1000, 8_000),
    "Messages": cases(num_cases(4, 8), 1000, 8_000),
    "Embedding": cases(num_cases(2, 4), 400, 3_000),
    "Score": cases(num_cases(2, 4), 300, 2_000),
    "Rerank": cases(num_cases(1, 2), 200, 1_000),
    "RerankBare": cases(1, 100, 500),
    "RerankV2": cases(1, 100, 500),
    "UploadFile": cases(num_cases(1, 4), 300, 2_000),
    "CreateBatch": cases(num_cases(2, 4), 300, 2_000),
    "CountTokens": cases(num_cases(2, 4), 400, 3_000),
    "Infill": cases(num_cases(1, 2), 200, 1_000),
    "OllamaChat": cases(num_cases(2, 4), 400, 3_000),
    "OllamaGenerate": cases(num_cases(2, 4), 400, 3_000),
    "OllamaEmbed": cases(num_cases(1, 2), 200, 1_000),
    "OllamaEmbeddings": cases(num_cases(1, 2), 200, 1_000),
    "OllamaShow": cases(num_cases(1, 2), 200, 1_000),
    "Tokenize": cases(num_cases(3, 6), 900, 7_000),
    "Detokenize": cases(num_cases(3, 6), 900, 7_000),
}
"""Number of examples of each operation with a body, in addition to those of every bound."""
LEAST = cases(num_cases(30, 60), 8000, 50_000)
"""Minimum number of requests in total."""


@pytest.fixture(scope="module")
def fuzzed():
    with fuzzing("HTTP", LEAST) as fuzzed:
        yield fuzzed


@pytest.fixture(scope="module")
def client(fuzzed):
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx2.Client(base_url=fuzzed.url, timeout=60, headers=headers) as client:
        yield client


@schemathesis.check
def invalid_data_is_refused(ctx: Any, response: Any, case: Any) -> None:
    """As the check that it calls; but an objective in a header is not read where another one comes first, and what is
    too long may be too large as a whole."""
    negated = {at for at, part in case.meta.components.items() if part.mode.is_negative}
    given_headers = {name.lower() for name in case.headers} & {*TTFT_KEYS, *TBT_KEYS, *E2E_KEYS, TIER_KEY}
    in_body = OBJECTIVES & case.body.keys() if isinstance(case.body, dict) else set()
    if negated == {ParameterLocation.HEADER} and (in_body or len(given_headers) > 1):
        return
    if response.status_code == 413:
        return
    negative_data_rejection(ctx, response, case)


@schemathesis.check
def streams_are_whole(ctx: Any, response: Any, case: Any) -> None:
    """Every event is a chunk or an error, every answer has its end, and the last event says so."""
    del ctx
    kind = (response.headers.get("content-type") or [""])[0]
    if not kind.startswith("text/event-stream"):
        return
    *events, last, rest = response.content.decode().split("\n\n")
    assert rest == ""
    document = case.operation.schema.raw_schema
    if not case.path.endswith("completions"):
        named_events_are_whole(document, "Responses" if case.path == "/v1/responses" else "Messages", [*events, last])
        return
    name = "ChatCompletion" if case.path.startswith("/v1/chat") else "Completion"
    schemas = {"components": document["components"]}
    chunk = jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}Chunk", **schemas})
    if last != "data: [DONE]":
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        return
    values = [json.loads(event.removeprefix("data: ")) for event in events]
    for value in values:
        chunk.validate(value)
    choices = [choice for value in values for choice in value["choices"]]
    ends = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
    assert sorted(ends) == sorted({choice["index"] for choice in choices})


ENDS = ("response.completed", "response.incomplete", "response.failed", "message_stop", "error")


def named_events_are_whole(document: Any, name: str, events: list[str]) -> None:
    """Every event is one of the API, under its name, and only the last one is an end."""
    schemas = {"components": document["components"]}
    event = jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}Event", **schemas})
    kinds = []
    for text in events:
        kind, _, data = text.removeprefix("event: ").partition("\ndata: ")
        value = json.loads(data)
        event.validate(value)
        assert value["type"] == kind
        kinds.append(kind)
    assert kinds[-1] in ENDS
    assert not {*ENDS} & {*kinds[:-1]} - {"error"}


CHECKS = [
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "unsupported_method", "allow_header_conformance", "ignored_auth", "invalid_data_is_refused",
    "streams_are_whole",
]  # fmt: skip


def config(url: str) -> SchemathesisConfig:
    """All phases in the full run; the one that goes through every bound of every field takes minutes."""
    return SchemathesisConfig.from_dict(
        {
            "base-url": url,
            "seed": SEED,
            "auth": {"openapi": {"key": {"bearer": KEY}}},
            "request-timeout": 30,
            "max-stream-events": 1_000_000,
            "continue-on-failure": True,
            "generation": {
                "mode": "all",
                "max-examples": cases(1, 40),
                "allow-x00": True,
                "with-security-parameters": False,  # `ignored_auth` sees to keys
                "database": "none",
                "no-shrink": not FULL,
            },
            "operations": [
                {"include-operation-id": name, "generation": {"max-examples": count}}
                for name, count in EXAMPLES.items()
            ],
            "phases": {
                "coverage": {"enabled": FULL},
                "stateful": {"generation": {"max-examples": cases(2, 100)}},
            },
            "checks": {"enabled": False, **{name: {"enabled": True} for name in CHECKS}},
        }
    )


@pytest.mark.seeds
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_every_answer_is_one_that_the_document_allows(fuzzed: Fuzzed, client: httpx2.Client):
    document = client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document, config=config(fuzzed.url))

    @schema.hook
    def after_call(ctx: Any, case: Any, response: Any) -> None:
        del ctx, case
        fuzzed.num_excluded += response.content.count(b'"no_token_left"')
        fuzzed.note()

    kinds: collections.Counter[str] = collections.Counter()
    statuses: collections.Counter[str] = collections.Counter()
    problems: list[str] = []
    for event in from_schema(schema).execute():
        if isinstance(event, events.NonFatalError | events.FatalError):
            problems.append(event.info.format() if isinstance(event, events.NonFatalError) else repr(event.exception))
        if not isinstance(event, events.ScenarioFinished):
            continue
        for case_id, node in event.recorder.cases.items():
            interaction = event.recorder.interactions.get(case_id)
            if interaction is None:
                continue
            assert interaction.response is not None, node.value
            statuses[str(interaction.response.status_code)] += 1
            if node.value.meta is not None:
                kinds[node.value.meta.generation.mode.value] += 1
            for check in event.recorder.checks.get(case_id, []):
                if check.failure_info is not None:
                    failure = check.failure_info.failure
                    problems.append(
                        f"{event.label} {check.name}: {failure.title} {failure.message}\n{node.value.body!r}"[:2000]
                    )
    print(f"\nHTTP: {fuzzed.num_cases} requests {dict(kinds)}, answers {dict(sorted(statuses.items()))}")
    assert not problems, "\n".join(problems[:20])
    assert fuzzed.num_cases >= LEAST
    assert min(kinds["positive"], kinds["negative"]) > LEAST / 20
    assert statuses["200"] > LEAST / 10
    fuzzed.check_clean()


# --- what no schema can say ----------------------------------------------------------------------------------------


NO_JSON = st.binary(max_size=200) | st.sampled_from(
    [b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b'{"n": 1, "n": 1}', b"[" * 5000, b'{"seed": ' + b"9" * 5000 + b"}"]
)


PATHS = ("/infill", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")


OLLAMA_PATHS = ("/api/embed", "/api/embeddings")  # others take any object


def check_no_json(client: httpx2.Client, data: bytes) -> None:
    for path in (*PATHS, "/v1/messages", "/v1/messages/count_tokens", *OLLAMA_PATHS):
        response = client.post(path, content=data, headers={"content-type": "application/json"})
        assert response.status_code == 400
        error = response.json()["error"]
        if path in OLLAMA_PATHS:
            assert isinstance(error, str)
            assert "\n" not in error
            continue
        assert list(error) == (["message", "type", "param", "code"] if path in PATHS else ["type", "message"])
        assert "\n" not in error["message"]


def test_bytes_that_are_no_json(client):
    fuzz("http-no-json", functools.partial(check_no_json, client), cases(40, 1000, 10_000), data=NO_JSON)


HEADERS = [
    "x-llm-d-slo-ttft-ms",
    "x-slo-tpot-ms",
    "x-slo-e2e-ms",
    "service_tier",
    "x-request-id",
    "accept",
    "content-length-x",
]


def test_any_header(client):
    characters = st.characters(min_codepoint=33, max_codepoint=255, exclude_categories=["Cc"])
    check = functools.partial(check_header, client)
    total = cases(40, 1000, 10_000)
    fuzz("http-header", check, total, name=st.sampled_from(HEADERS), value=st.text(characters, max_size=30))


def check_header(client: httpx2.Client, name: str, value: str) -> None:
    headers: list[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"),
        (name.encode(), value.encode("latin-1")),
    ]
    response = client.post("/v1/completions", content=b'{"prompt": "hi", "max_tokens": 1}', headers=headers)
    assert response.status_code in (200, 400)

"""Errors about bodies: JSON's words, and fields under the names that the client sent."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from apt_jax.errors import InvalidRequestError, counted, json_kind
from apt_jax.text.chat import ChatTemplate
from apt_jax.validation.values import described
from serve.errors import UnknownModelError
from serve.http_api import openapi
from serve.http_api.errors import BadCallError
from tests.serve.http_api.test_hostile_fields import READ
from tests.support.toy_server import TEMPLATE
from tests.support.toy_serving import toy_parts

USER = {"role": "user", "content": "a"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "a"},
    "/v1/rerank": {"query": "a", "documents": ["a"]},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/api/chat": {"messages": [USER], "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
WRONG = (None, True, -1, 1.5, "x", "", [], [None], [{}], [5], {}, {"x": None})
PYTHON = re.compile(r"\b(NoneType|None|True|False|dict|str|int|float|bool|tuple|Mapping)\b|\{'|\['|\[None|\[\{")


def fields_of(path: str) -> list[str]:
    document = openapi.document()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    parts = [schema, *schema.get("allOf", ()), *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return sorted({name for part in parts for name in part.get("properties", ())})


def refusal(read: Callable[[], object]) -> InvalidRequestError | None:
    try:
        read()
    except InvalidRequestError as error:
        return error
    except (BadCallError, UnknownModelError):
        pass
    return None


@pytest.mark.parametrize("path", BODIES)
def test_errors_about_wrong_values_name_the_field_that_was_sent_in_words_of_json(path):
    template = ChatTemplate(TEMPLATE)
    parts = toy_parts(chat_template=template)
    num_errors = 0
    try:
        for name in fields_of(path):
            for value in WRONG:
                body = {**BODIES[path], name: value}
                if (error := refusal(lambda body=body: READ[path](parts, body))) is not None:
                    num_errors += 1
                    assert not PYTHON.search(re.sub(r"'[^']*'", "''", str(error))), (name, value, str(error))
                    assert re.split(r"[.\[:]", error.field)[0] in body, (name, value, error.field)
    finally:
        template.close()
    assert num_errors > 3


@pytest.mark.parametrize(
    ("body", "headers", "field"),
    [
        ({"slo": {"ttft_ms": -1}}, {}, "slo.ttft_ms"),
        ({"slo": {"tbt_ms": 0}}, {}, "slo.tbt_ms"),
        ({"slo": {"e2e_ms": 0}}, {}, "slo.e2e_ms"),
        ({"slo": {"class": "x"}}, {}, "slo.class"),
        ({"slo": {"deadline_ms": 0}}, {}, "slo.deadline_ms"),
        ({"slo_ttft_ms": -1}, {}, "slo_ttft_ms"),
        ({"slo_e2e_ms": -1}, {}, "slo_e2e_ms"),
        ({"slo_e2e_ms": 5, "slo": {"e2e_ms": 5}}, {}, "slo_e2e_ms"),
        ({"slo_class": "x"}, {}, "slo_class"),
        ({"deadline_ms": "x"}, {}, "deadline_ms"),
        ({}, {"x-slo-ttft-ms": "0"}, "x-slo-ttft-ms"),
        ({}, {"x-llm-d-slo-tpot-ms": "0"}, "x-llm-d-slo-tpot-ms"),
        ({}, {"x-slo-e2e-ms": "0"}, "x-slo-e2e-ms"),
        ({}, {"x-slo-e2e-ms": "soon"}, "x-slo-e2e-ms"),
        ({"slo": {"ttft_ms": -1}}, {"x-slo-ttft-ms": "5"}, "slo.ttft_ms"),
    ],
)  # fmt: skip
def test_errors_about_objectives_name_them_as_they_were_sent(body, headers, field):
    from serve.http_api.endpoints import ENDPOINTS

    parts = toy_parts()
    for path in ("/v1/completions", "/v1/embeddings"):
        endpoint = next(e for e in ENDPOINTS if e.path == path)
        with pytest.raises(InvalidRequestError) as caught:
            endpoint.read(parts, {**BODIES[path], **body}, headers, 0.0, None)
        assert caught.value.field == field


def test_kinds_and_values_in_words_of_json():
    values = (None, True, 1, 1.5, "x", [], (), {}, 10**30, object())
    kinds = ("null", "a boolean", "a number", "a number", "a string", "an array", "an array", "an object", "a number")
    assert [json_kind(value) for value in values] == [*kinds, "a object"]
    shown = ("null", "true", "1", "1.5", "'x' (a string)", "an array", "an array", "an object", "a number", "a object")
    assert tuple(described(value) for value in values) == shown


def test_numbers_come_with_their_nouns():
    assert [counted(n, "request") for n in (0, 1, 2)] == ["0 requests", "1 request", "2 requests"]
    assert [counted(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]

"""The gateway's schema of required calls, with bounds."""

import json

import jsonschema
import pytest

from serve.grpc_api.gateway_calls import bounded_calls

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {
    "properties": {"name": {"type": "string", "enum": ["f"]}, "parameters": PARAMETERS},
    "required": ["name", "parameters"],
}
CALLS = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": [CALL]}}
GOOD = {"name": "f", "parameters": {"city": "Zürich"}}


def test_calls_have_an_end():
    schema = json.loads(bounded_calls(json.dumps(CALLS)))
    validator = jsonschema.Draft202012Validator(schema)
    for calls in ([GOOD], [GOOD] * 16):
        assert validator.is_valid(calls)
    for calls in (
        [],
        [GOOD] * 17,
        [{**GOOD, "more": 1}],
        [{"name": "f", "parameters": {"city": "Rome", "more": 1}}],
        [{"name": "g", "parameters": {"city": "Rome"}}],
    ):
        assert not validator.is_valid(calls), calls


@pytest.mark.parametrize(
    "schema",
    [
        PARAMETERS,
        {**CALLS, "maxItems": 3},
        {"type": "array", "items": {"anyOf": [CALL, {"type": "string"}]}},
        {"type": "array", "items": {"anyOf": []}},
        {"type": "array", "items": True},
        {"type": "array"},
        True,
    ],
)
def test_other_schemas_stay(schema):
    text = json.dumps(schema)
    assert bounded_calls(text) is text


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\ud800"])
def test_what_is_no_schema_is_left_to_validation(text):
    assert bounded_calls(text) is text

"""Typed records of bodies: what they refuse is told by the path of the field, and schemas follow from the types."""

import json
from typing import Annotated, Any, ClassVar, Literal

import jsonschema
import msgspec
import pytest
from msgspec import Meta

from apt_jax.errors import InvalidRequestError
from serve.http_api import openapi
from serve.http_api.json_schemas import Facts, integer
from serve.http_api.ollama.request import ShowBody
from serve.http_api.records import HIDDEN, EngineField, Flag, Record, Refused, Text, carried, read, schema_of, shaped
from serve.http_api.tokenization import TokenizeBody, TokenizeConversation

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 1.0, 0.5, 2**31, 2**63, 2**70, -(2**63), "", "a", "\ud800", "x" * 600, [], {}, ["a"], [1],
    [None], [[1]], [{}], [{"text": 5}], [{"text": "a"}], {"a": 1}, {"\ud800": 1}, {"ttft_ms": 1}, {"class": 5},
    {"include_usage": 1}, {"user_id": 5}, {"effort": 5}, {"verbosity": "x"}, {"num_predict": 2**40}, [1] * 5,
]  # fmt: skip


class Inner(Record, forbid_unknown_fields=True):
    flag: Flag = None
    size: Annotated[int, Meta(ge=1, le=9)] | None = None


class Body(Record):
    refused: ClassVar = {"far": Refused((1,), "is not supported; use near", "Not here.")}
    needed: ClassVar = {"text": "missing; give a text"}
    text: str = ""
    kind: Literal["a", "b"] | None = "a"
    inner: Inner | None = None
    items: Annotated[list[Inner], Meta(min_length=1, max_length=2)] | None = None
    either: str | list[str] | None = None
    short: Annotated[str, Meta(max_length=3)] | None = None
    most: Annotated[Any, shaped(lambda facts: integer(0, len(facts.models)), "Models.")] = None
    temperature: EngineField = None
    unseen: Annotated[Text, HIDDEN] = None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"text": None}, "text: missing; give a text"),
        ({"text": 5}, "text: a number is not text"),
        ({"kind": "c"}, "kind: 'c' must be one of 'a', 'b'"),
        ({"kind": ["a"]}, "kind: an array must be one of 'a', 'b'"),
        ({"inner": 5}, "inner: 5 is not an object"),
        ({"inner": {"flag": 1}}, "inner.flag: 1 is not true or false"),
        ({"inner": {"size": True}}, "inner.size: true is not an integer"),
        ({"inner": {"size": 1.0}}, "inner.size: 1.0 is not an integer"),
        ({"inner": {"size": 10}}, "inner.size: 10 must be an integer in [1, 9]"),
        ({"inner": {"size": 2**70}}, "inner.size: a number of more than 20 digits must be an integer in [1, 9]"),
        ({"inner": {"sizes": 1}}, "inner: 'sizes' is none of flag, size"),
        ({"items": {}}, "items: an object is not a list"),
        ({"items": []}, "items: must not be empty"),
        ({"items": [{}] * 3}, "items: 3 items; at most 2"),
        ({"items": [{}, {"size": 0}]}, "items[1].size: 0 must be an integer in [1, 9]"),
        ({"either": 5}, "either: a number is not text"),
        ({"either": ["a", 5]}, "either[1]: a number is not text"),
        ({"short": "abcd"}, "short: must be a string of at most 3 characters"),
        ({"far": 2}, "far: is not supported; use near"),
        ({"kind": "\ud800"}, "kind: '\\ud800' must be one of 'a', 'b'"),
        ({"\ud800": 1}, "body: contains a name or string that is not valid Unicode"),
    ],
)
def test_what_is_wrong_is_told_by_its_path(fields, says):
    with pytest.raises(InvalidRequestError) as caught:
        read(Body, {"text": "a", **fields})
    assert str(caught.value) == says


def test_null_is_absent_and_unknown_fields_are_ignored():
    body = read(Body, {"text": "a", "far": None, "inner": None, "near": 5, "temperature": "any", "unseen": "b"})
    assert (body.text, body.kind, body.inner, body.temperature, body.unseen) == ("a", "a", None, "any", "b")
    assert read(Body, {"text": "a", "far": 1.0}).text == "a"
    assert carried(read(Inner, {"size": 3}), Inner) == {"flag": None, "size": 3}
    with pytest.raises(InvalidRequestError):
        read(Body, {"text": "a", "far": True})


def test_the_schema_is_that_of_the_types():
    schema = schema_of(Body, Facts(models=("m", "n")))
    assert schema["required"] == ["text"]
    properties = schema["properties"]
    assert properties["kind"] == {"enum": ["a", "b", None], "default": "a"}
    inner = {
        "type": "object", "required": [], "additionalProperties": False,
        "properties": {"flag": {"type": ["boolean", "null"]}, "size": {"type": ["integer", "null"], "minimum": 1, "maximum": 9}},
    }  # fmt: skip
    assert properties["inner"] == {**inner, "type": ["object", "null"]}
    assert properties["items"] == {"type": ["array", "null"], "items": inner, "minItems": 1, "maxItems": 2}
    assert properties["most"] == {"type": "integer", "minimum": 0, "maximum": 2, "description": "Models."}
    assert properties["temperature"] == {"type": ["number", "null"], "minimum": 0, "maximum": 2, "default": 1.0}
    assert properties["far"] == {"enum": [1, None], "description": "Not here."}
    assert "unseen" not in properties


def problem(record: type[Record], body: dict[str, Any]) -> InvalidRequestError | None:
    try:
        read(record, body)
    except InvalidRequestError as error:
        return error
    return None


RECORDS = (*openapi._RECORDS.values(), TokenizeBody, TokenizeConversation)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.__module__}.{record.__name__}")
def test_whatever_the_library_refuses_has_a_field_and_words_of_ours(record):
    jsonschema.Draft202012Validator.check_schema(schema_of(record, Facts(models=("toy",))))
    refused = 0
    for name in (*record.__struct_fields__, *record.refused):
        for value in VALUES:
            body = {needed: "a" for needed in record.needed} | {name: value, "unknown": value}
            try:
                msgspec.convert(body, record)
                is_taken = True
            except (msgspec.ValidationError, UnicodeEncodeError):
                is_taken = False
            error = problem(record, body)
            if error is None:
                assert is_taken, body
            else:
                refused += 1
                assert error.field != "body" or "\\ud800" in json.dumps(body), body
    assert refused > 20 or record is ShowBody

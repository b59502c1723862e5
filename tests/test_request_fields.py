"""The table of request fields: complete, and of one mind with the protobuf comments."""

import dataclasses
import re
from pathlib import Path

import pytest

from apt_jax.request import SamplingParams
from apt_jax.validation import REQUEST_FIELDS, request_fields_table

PROTO = Path(__file__).parents[1] / "serve/protos/aptjax/v1/apt_serve.proto"
BOUND = re.compile(r"[\[(]-?[\d.]+, -?[\d.]+\]|at most \d+|1 to \d+ characters", re.IGNORECASE)


def proto_comments(message: str) -> dict[str, str]:
    """Comments of the fields of a message, by name."""
    body = re.search(rf"^message {message} {{\n(.*?)^}}", PROTO.read_text(), re.DOTALL | re.MULTILINE)
    assert body is not None
    found = re.findall(r"((?:^ *//.*\n)+) *(?:optional |repeated )?[\w<>, ]+? (\w+) = \d+;", body[1], re.MULTILINE)
    return {name: " ".join(comment.replace("//", "").split()) for comment, name in found}


def test_every_sampling_parameter_is_declared():
    # Pooling is for embeddings alone, which have fields of their own.
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name != "pooling"]
    assert list(REQUEST_FIELDS)[: len(names)] == names
    for spec in REQUEST_FIELDS.values():
        assert spec.description.endswith("."), spec.name


@pytest.mark.parametrize("message", ["SamplingParams", "GenerateRequest"])
def test_bounds_in_protobuf_comments_are_those_of_the_table(message):
    checked = 0
    for name, comment in proto_comments(message).items():
        for bound in BOUND.findall(comment) if name in REQUEST_FIELDS else ():
            assert re.search(rf"{re.escape(bound.lower())}(?!\d)", REQUEST_FIELDS[name].bounds), name
            checked += 1
    assert checked >= {"SamplingParams": 11, "GenerateRequest": 1}[message]


def test_defaults_in_protobuf_comments_are_those_of_the_table():
    for name, comment in proto_comments("SamplingParams").items():
        if found := re.search(r"Default ([\w.]+)\.", comment):
            assert str(REQUEST_FIELDS[name].default).lower().removesuffix(".0") == found[1], name


def test_the_docs_table_has_a_row_for_every_field():
    rows = request_fields_table().splitlines()
    assert [row.split("`")[1] for row in rows[2:]] == list(REQUEST_FIELDS)
    assert {row.count("|") for row in rows} == {6}

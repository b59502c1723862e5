"""Constraints under the names of other servers, and fields that are refused by name."""

import json
import re

import pytest

from apt_jax.errors import InvalidRequestError
from apt_jax.text.chat import ChatTemplate
from serve.http_api.constraint_fields import OTHER_NAMES, read_constraint
from serve.http_api.records import reject
from serve.http_api.unsupported_fields import REFUSED
from tests.support.chat_templates import CHATML
from tests.support.http_serving import HttpServed, run
from tests.support.toy_serving import toy_parts

SCHEMA = {"type": "integer", "minimum": 10, "maximum": 19}
GBNF = 'root ::= "x" [0-9]'


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"regex": "a"}, "regex", {"regex": "a"}),
        ({"ebnf": GBNF}, "ebnf", {"grammar": GBNF}),
        ({"grammar": GBNF}, "grammar", {"grammar": GBNF}),
        ({"json_schema": SCHEMA}, "json_schema", {"json": SCHEMA}),
        ({"json_schema": "{}"}, "json_schema", {"json": "{}"}),
        ({"guided_json": SCHEMA}, "guided_json", {"json": SCHEMA}),
        ({"guided_choice": ["a"]}, "guided_choice", {"choice": ["a"]}),
        ({"guided_regex": "a"}, "guided_regex", {"regex": "a"}),
        ({"guided_grammar": GBNF}, "guided_grammar", {"grammar": GBNF}),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": "_"},
            "guided_json",
            {"json": SCHEMA, "whitespace_pattern": "_"},
        ),
        ({"response_format": {"type": "json_object"}}, "response_format", {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format", {"json": SCHEMA}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format", {"json": SCHEMA}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            "response_format",
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", {"regex": "a"}),
        ({"structured_outputs": {"regex": "a"}, "regex": "a"}, "structured_outputs", {"regex": "a"}),
        ({"regex": "a", "response_format": {"type": "text"}}, "regex", {"regex": "a"}),
    ],
)
def test_every_name_is_a_structured_output(body, field, value):
    assert read_constraint(body) == (field, value)


@pytest.mark.parametrize("body", [{}, {"grammar": ""}, {"regex": None}, {"response_format": {"type": "text"}}])
def test_nothing_is_asked_for(body):
    assert read_constraint(body) is None


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"regex": "a", "ebnf": GBNF}, "ebnf: cannot be given together with regex"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex: cannot be given together with response_f"),
        ({"structured_outputs": {"regex": "b"}, "regex": "a"}, "regex: cannot be given together with structured_outp"),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern: requires guided_json"),
        ({"regex": "a", "guided_whitespace_pattern": "a"}, "guided_whitespace_pattern: requires guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: "),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema: has no schema"),
        ({"response_format": {"type": "yaml"}}, "response_format: type must be one of"),
    ],
)
def test_two_constraints_or_half_of_one_are_refused(body, says):
    with pytest.raises(InvalidRequestError) as caught:
        read_constraint(body)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_outputs_follow_a_constraint_of_any_name():
    pytest.importorskip("llguidance")
    patterns = {
        "guided_json": (SCHEMA, "1[0-9]"),
        "guided_regex": ("[ab]{3}", "[ab]{3}"),
        "guided_choice": (["yes", "no"], "yes|no"),
        "guided_grammar": (GBNF, "x[0-9]"),
        "regex": ("[ab]{3}", "[ab]{3}"),
        "ebnf": (GBNF, "x[0-9]"),
        "json_schema": (json.dumps(SCHEMA), "1[0-9]"),
        "grammar": (GBNF, "x[0-9]"),
        "response_format": ({"type": "json_object", "schema": SCHEMA}, "1[0-9]"),
    }
    assert set(OTHER_NAMES) < set(patterns)

    async def scenario(served: HttpServed) -> None:
        assert served.parts.grammars is not None
        for name, (value, pattern) in patterns.items():
            plain = {"temperature": 0.0, "max_tokens": 20, name: value}
            made = await served.post("/v1/completions", {"prompt": "hi", **plain})
            said = await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **plain})
            assert re.fullmatch(pattern, made.json()["choices"][0]["text"]), (name, made.text)
            assert re.fullmatch(pattern, said.json()["choices"][0]["message"]["content"]), (name, said.text)
        for name, value in (("regex", "("), ("ebnf", "root ::="), ("json_schema", 5), ("guided_choice", [])):
            bad = await served.post("/v1/completions", {"prompt": "hi", name: value})
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, name), bad.text
        served.parts.grammars.close()

    template = ChatTemplate(CHATML)
    run(scenario, parts=toy_parts(chat_template=template))
    template.close()


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_change_nothing_are_accepted_and_others_are_named(name):
    reject(REFUSED, {name: None})
    for value in REFUSED[name].harmless or ():
        reject(REFUSED, {name: value})
        if isinstance(value, int) and not isinstance(value, bool):
            reject(REFUSED, {name: float(value)})
            with pytest.raises(InvalidRequestError):
                reject(REFUSED, {name: bool(value)})
    with pytest.raises(InvalidRequestError) as caught:
        reject(REFUSED, {name: 0.77})
    assert caught.value.field == name


def test_the_field_that_does_the_same_is_named():
    with pytest.raises(InvalidRequestError, match=r"^n_predict: is not supported; use max_tokens$"):
        reject(REFUSED, {"n_predict": 5})
    reject(REFUSED, {"cache_prompt": True, "id_slot": 3, "user": "x", "mirostat_tau": 5.0})

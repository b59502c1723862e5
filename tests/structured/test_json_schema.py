"""JSON schemas: outputs drawn at random under the mask are valid by `jsonschema`, and what cannot be enforced is refused by name."""

import contextlib
import datetime
import itertools
import json
import re
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema
import pytest

from apt_jax.errors import InvalidRequestError
from apt_jax.structured import expressions, schema_branches
from apt_jax.structured.expressions import are_apart
from apt_jax.structured.json_schema import closed, exact_schema
from apt_jax.structured.schema_branches import _FORMAT_SHAPES
from apt_jax.structured.schema_names import Names
from tests.support.cases import num_cases
from tests.support.output_sampler import OutputSampler
from tests.support.suite_schemas import OTHER_FORMATS, suite_schema

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def sampler() -> Iterator[OutputSampler]:
    made = OutputSampler()
    yield made
    made.close()


# --- all of it at random ------------------------------------------------------------------------------------------------

CHECKER = jsonschema.FormatChecker(formats=["date", "email", "ipv4", "ipv6", "uuid"])


@CHECKER.checks("time", ValueError)
def is_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.time.fromisoformat(value) is not None


@CHECKER.checks("date-time", ValueError)
def is_date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.datetime.fromisoformat(value) is not None


def as_python_reads(schema: Any) -> Any:
    """The schema with expressions whose `$` is the end of a text, as in JSON Schema: Python's allows a newline after it."""
    if isinstance(schema, list):
        return [as_python_reads(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: as_python_reads(part) for key, part in schema.items()}
    if isinstance(made.get("pattern"), str):
        made["pattern"] = made["pattern"].replace("$", r"\Z")
    if isinstance(made.get("patternProperties"), dict):
        made["patternProperties"] = {name.replace("$", r"\Z"): part for name, part in made["patternProperties"].items()}
    return made


@pytest.mark.seeds
def test_outputs_of_any_schema_satisfy_it(sampler: OutputSampler, record_property: Any) -> None:
    refused = complete = 0
    count = num_cases(80, 1000)
    for seed in range(count):
        schema = suite_schema(Random(seed))
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(as_python_reads(schema), format_checker=CHECKER)
        try:
            sampler.start(schema)
        except InvalidRequestError:
            refused += 1
            continue
        for draw in range(3):
            output = sampler.sample(schema, Random(draw))
            if output.is_complete:
                complete += 1
                value = json.loads(output.text)
                assert validator.is_valid(value), (seed, schema, output.text)
    record_property("refused_schemas", refused / count)
    record_property("complete_outputs", complete)
    assert refused < 0.4 * count
    assert complete > count


# --- one by one -----------------------------------------------------------------------------------------------------------

OPEN = {"type": "object", "properties": {"b": {"type": "integer"}, "n\n": {"type": "null"}}, "required": ["b"], "additionalProperties": True}  # fmt: skip
CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LISTED = {"type": "object", "properties": {"a": {"type": "integer"}}}
OTHER = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
HALF = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ONE_NAME = {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": DIGIT, "b": DIGIT}, "additionalProperties": False}  # fmt: skip

TEXTS = [
    (OPEN, '{"b":1,"\\u0062":"x"}', 9), (OPEN, '{"b":1,"n\\u000a":1}', 10), (OPEN, '{"b":1,"c":"x"}', True), (OPEN, '{"b":1,"\\n":"x"}', True),
    ({"patternProperties": {"^b": {"type": "null"}}}, '{"\\u0062":1}', 3),
    (CLOSED | {"patternProperties": {"^a$": DIGIT}}, '{"a":1', False), (CLOSED | {"patternProperties": {"^a$": DIGIT}}, '{"a":1}', True),
    (CLOSED | {"patternProperties": {"^a$": DIGIT}}, '{"a":1,', 6), (CLOSED | {"patternProperties": {"^(a|bb)$": DIGIT}}, '{"a":1,"bb":1}', True),
    (CLOSED | {"patternProperties": {"^(a|bb)$": DIGIT}}, '{"a":1,"bb":1,', 13), (CLOSED | {"patternProperties": {"^a": DIGIT}}, '{"a":1,"ab":2}', True),
    ({"allOf": [{"type": "object"}], "patternProperties": {"^a$": DIGIT}, "anyOf": [{}], "additionalProperties": False}, '{"a":1}', True),
    (HALF, "0.25", True), (HALF, "0", False), ({"allOf": [{"type": "number", "exclusiveMaximum": 0}, {"minimum": -0.5}]}, "-0", False),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 1.5, "$schema": "http://json-schema.org/draft-04/schema#"}, "1", False),
    ({"type": "integer", "maximum": 9007199254740995}, "9007199254740996", 15), ({"type": "integer", "maximum": 18446744073709551615}, "7", True),
    ({"type": "array", "items": {"type": "boolean"}, "maxItems": 1.0, "uniqueItems": True}, "[true]", True),
    ({"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": DIGIT}, '{"x":1,"y":2}', True),
    ({"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": DIGIT}, '{"z', 2),
    ({"type": "object", "propertyNames": {"pattern": "^x"}, "minProperties": 1}, '{"x1":[]}', True), ({"propertyNames": {"pattern": "^x"}}, '{"y', 2),
    (ONE_NAME, '{"a":1}', True), (ONE_NAME, '{"b":1}', True), (ONE_NAME, "{}", 1), (ONE_NAME, '{"a":1,', 6),
    ({"type": "string", "format": "password"}, '"any"', True), ({"type": "string", "format": "hostname"}, '"a-b.org"', True),
    ({"type": "string", "format": "hostname"}, '"xn--a', 4),
    (LISTED, '{"a":1}', True), (LISTED, "{}", True), (LISTED, '{"a":1,', 6), (LISTED, '{"b', 2), (LISTED | {"required": ["a"]}, '{"a":1,', 6),
    ({"type": "array", "items": LISTED}, '[{"a":1,', 7), ({"anyOf": [LISTED, {"type": "null"}]}, '{"a":1,', 6),
    ({"oneOf": [LISTED, {"type": "null"}]}, '{"a":1,', 6), ({"properties": {"c": {"$ref": "#/$defs/d"}}, "$defs": {"d": LISTED}}, '{"c":{"a":1,', 11),
    (LISTED | {"additionalProperties": True}, '{"a":1,"b":2}', True), (LISTED | {"additionalProperties": DIGIT}, '{"b":2}', True),
    (LISTED | {"patternProperties": {"^b": DIGIT}}, '{"a":1,"b1":2}', True), (LISTED | {"required": ["b"]}, '{"b":2}', True),
    ({"allOf": [LISTED, OTHER]}, '{"a":1,"b":2}', True),
    (LISTED | {"anyOf": [OTHER, {"type": "null"}]}, '{"a":1,"b":2}', True),
    ({"properties": {"c": OTHER}, "patternProperties": {"^c": LISTED}}, '{"c":{"b":2,"a":1}}', True),
    ({"$ref": "#/$defs/d", "$defs": {"d": LISTED}, "properties": {"b": DIGIT}}, '{"a":1,"b":2}', True),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "accepted"), TEXTS, ids=lambda x: str(x)[:50])
def test_what_a_schema_allows(sampler: OutputSampler, schema: object, text: str, accepted: bool | int) -> None:
    assert repr(sampler.accepts(schema, text)) == repr(accepted)


def test_closed_schemas_allow_less_and_never_more() -> None:
    assert closed(LISTED) == {**LISTED, "additionalProperties": False}
    named = {"type": "object", "properties": {"if": {"type": "string"}, "not": LISTED}}  # names, no keywords
    assert closed(named)["additionalProperties"] is False
    assert closed(named)["properties"]["not"] == closed(LISTED)
    for composed in (
        {"allOf": [LISTED, OTHER]}, {"anyOf": [LISTED], "required": ["b"]}, {"anyOf": [LISTED], "oneOf": [OTHER]},
        {"$ref": "#/$defs/d", "anyOf": [OTHER], "$defs": {"d": LISTED}}, {"items": LISTED, "contains": OTHER},
        {"properties": {"a": {"not": LISTED}}}, {"if": LISTED}, {"dependentRequired": {"a": ["b"]}} | LISTED,
        {"oneOf": [LISTED, OTHER]}, {"patternProperties": {"a": LISTED, "b": OTHER}}, LISTED | {"minProperties": 2},
        LISTED | {"enum": [{"b": 1}]}, LISTED | {"const": {"b": 1}}, LISTED | {"required": ["b"]},
    ):  # fmt: skip
        assert closed(composed) == composed


def test_branches_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    overlap = schema_branches.Branches.overlap

    def counted(self: schema_branches.Branches, branches: list[object]) -> tuple[int, int] | None:
        compared.append(len(branches))
        return overlap(self, branches)

    monkeypatch.setattr(schema_branches.Branches, "overlap", counted)
    kinds = {"oneOf": [{"type": "string"}, {"type": "null"}, LISTED]}
    made = exact_schema({"type": "array", "items": kinds}, {})
    assert made["items"]["anyOf"][2]["additionalProperties"] is False
    assert compared == [3]


@pytest.mark.parametrize(
    "name", [*OTHER_FORMATS, "binary", "file-path", "ipvanyaddress", "iri", "json-pointer", "idn-email"]
)
def test_unknown_formats_are_annotations(sampler: OutputSampler, name: str) -> None:
    properties = {"format": {"type": "string", "format": name}, "b": {"enum": [{"format": name}]}}
    text = json.dumps({"format": "any text", "b": {"format": name}}, separators=(",", ":"))
    assert sampler.accepts({"properties": properties, "default": {"format": name}}, text) is True


def test_dates_are_days_of_the_calendar() -> None:
    pattern = re.compile(exact_schema({"format": "date"}, {})["pattern"].replace("$", r"\Z"))

    def exists(text: str) -> bool:
        try:
            return datetime.date.fromisoformat(text) is not None
        except ValueError:
            return False

    days = [f"{year:04}-{day}" for year in range(10_000) for day in ("01-01", "02-28", "02-29", "02-30", "12-31")]
    days += [f"{year}-{month:02}-{day:02}" for year in (1900, 2023, 2024) for month in range(14) for day in range(33)]
    assert [day for day in days if (pattern.match(day) is not None) != exists(day)] == []


OVERLAPPING = [
    [{"type": "integer"}, {"type": "number"}], [{"type": "string"}, {"type": "string", "format": "date"}], [{}, {"const": 1}],
    [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/any"}], [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}],
    [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^[ab]"}], [{"pattern": "^a"}, {"pattern": "^b"}],
    [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}], [{"type": "string", "format": name} for name in ("ipv6", "uri")],
    [{"maximum": 3}, {"minimum": 4}], [LISTED, OTHER], [{"required": ["a"]}, {"properties": {"a": True}}], [{"const": 1}, {"const": 1.0}],
]  # fmt: skip
DISJOINT = [
    [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}], [{"type": "number", "maximum": 3}, {"type": "number", "minimum": 4}],
    [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}], [{"enum": ["a", 1]}, {"enum": ["b", 2]}, {"const": True}],
    [{"allOf": [{"$ref": "#/$defs/cat"}, {"required": ["name"]}]}, {"anyOf": [{"$ref": "#/$defs/dog"}, {"type": "array"}]}],
    [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}, {"type": "string", "pattern": "^[0-9c]"}],
    [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}], [{"type": ["string", "null"]}, {"type": "object"}],
    [{"type": "object", "required": ["a"]}, {"type": "object", "properties": {"b": {}}, "additionalProperties": False}],
    [{"type": "object", "properties": {"k": {"properties": {"x": {"const": i}}, "required": ["x"], "type": "object"}}, "required": ["k"]} for i in range(3)],
]  # fmt: skip
DEFINITIONS = {
    kind: {"type": "object", "properties": {"kind": {"const": kind}, "a": DIGIT}, "required": ["kind"]}
    for kind in ("cat", "dog")
} | {"any": {"type": "object"}}


@pytest.mark.parametrize("branches", OVERLAPPING, ids=lambda x: str(x)[:60])
def test_branches_that_may_overlap_are_refused_with_advice(sampler: OutputSampler, branches: list[Any]) -> None:
    schema = {"type": "array", "items": {"oneOf": branches}, "$defs": DEFINITIONS}
    with pytest.raises(InvalidRequestError, match=r"items\.oneOf: its branches \d and \d may overlap.*anyOf") as caught:
        sampler.start(schema)
    assert caught.value.field == "structured_outputs.json"


@pytest.mark.parametrize("branches", DISJOINT, ids=lambda x: str(x)[:60])
def test_branches_that_differ_are_enforced(sampler: OutputSampler, branches: list[Any]) -> None:
    schema = {"oneOf": branches, "$defs": DEFINITIONS, "maxLength": 9, "maxItems": 4}
    for seed in range(4):
        output = sampler.sample(schema, Random(seed))
        if output.is_complete:
            jsonschema.validate(json.loads(output.text), schema)


def test_branches_that_require_properties_are_exact(sampler: OutputSampler) -> None:
    names = ["a", "b", "c"]
    subsets = [list(subset) for size in (1, 2) for subset in itertools.combinations(names, size)]
    properties = {"properties": dict.fromkeys(names, DIGIT), "type": "object", "additionalProperties": False}
    for branches in itertools.combinations(subsets, 2):
        schema = {**properties, "oneOf": [{"required": branch} for branch in branches]}
        for size in range(4):
            for present in itertools.combinations(names, size):
                value = dict.fromkeys(present, 1)
                valid = jsonschema.Draft202012Validator(schema).is_valid(value)
                assert (sampler.accepts(schema, json.dumps(value, separators=(",", ":"))) is True) == valid


REFUSED = {
    "const: 9007199254740993": {"const": {"a": [9007199254740993]}},
    "enum: .* control characters": {"enum": ["a", "\x01"]},
    "minimum: is beyond": {"type": "number", "minimum": 1e30},
    "multipleOf: ": {"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]},
    "minProperties: 2 ": {"type": "object", "minProperties": 2},
    "[Uu]nsatisfiable": {"type": "string", "pattern": "^\x07$"},
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(sampler: OutputSampler, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        sampler.start(REFUSED[says])


def test_formats_that_differ_are_told_apart(sampler: OutputSampler) -> None:
    names = ("date", "time", "date-time", "uuid", "ipv4", "email", "duration")
    schema = {"oneOf": [{"type": "string", "format": name} for name in names]}
    assert sampler.accepts(schema, '"2024-02-29"') is True
    assert sampler.accepts(schema, '"P1Y"') is True


@pytest.mark.parametrize("name", sorted({"uuid", "ipv4", "ipv6", "email", "uri", "duration"}))
def test_texts_of_a_format_match_the_expression_that_tells_it_apart(sampler: OutputSampler, name: str) -> None:
    for seed in range(8):
        output = sampler.sample({"type": "string", "format": name, "maxLength": 40}, Random(seed))
        if output.is_complete:
            assert re.search(_FORMAT_SHAPES[name], json.loads(output.text)), output.text


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": 2**60}, "const: "),
        ({"properties": {"a": {"oneOf": [{}, {"enum": [2**60]}]}}}, "properties.a.oneOf[1].enum: "),
        ({"items": {"anyOf": [{"minProperties": 3}]}}, "items.anyOf[0].minProperties: "),
        ({"properties": {"a b": {"oneOf": [{}, {}]}}}, 'properties."a b".oneOf: its branches 0 and 1 may'),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"minimum": 1e30}}}, "$defs.b.minimum: "),
        ({"patternProperties": {"^a$": {"oneOf": [True, 5, {}]}}}, 'patternProperties."^a$".oneOf: its branches 0 and'),
        ({"prefixItems": [{}, {"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}]}, "prefixItems[1].allOf["),
    ],
)  # fmt: skip
def test_a_refusal_names_its_place_in_the_schema(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=re.escape(place)) as caught:
        exact_schema(schema, {})
    assert str(caught.value).startswith(place)


def test_a_deep_place_is_cut() -> None:
    schema: dict[str, Any] = {"minProperties": 2}
    for number in range(60):
        schema = {"properties": {f"name{number}": schema}}
    with pytest.raises(ValueError, match="minProperties: 2") as caught:
        exact_schema(schema, {})
    assert str(caught.value).startswith("...")
    assert len(str(caught.value).partition("minProperties")[0]) < 130


def test_expressions_that_are_told_apart_have_no_text_in_common() -> None:
    parts = [
        "a",
        "b",
        "[ab]",
        "[^a]",
        "(a|b)",
        "(?:a|bb)",
        "a?",
        "b{0,2}",
        "b{2}",
        "a+",
        r"\d",
        r"\w",
        ".",
        "$",
        "(?=a)",
        r"\b",
        "(?:^|a)",
    ]
    texts = ["".join(letters) for size in range(6) for letters in itertools.product("ab1", repeat=size)]
    told = 0
    for seed in range(num_cases(400, 20_000)):
        random = Random(seed)
        first, second = (
            "".join(["^" * (random.random() < 0.8), *random.choices(parts, k=random.randint(1, 4)), "$" * (random.random() < 0.6)])
            for _ in range(2)
        )  # fmt: skip
        if are_apart(first, second):
            told += 1
            both = [text for text in texts if re.search(first, text) and re.search(second, text)]
            assert both == [], (first, second)
    assert told > 40


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        ("^a$", "^ab", True), ("^a$", "^a$", False), ("^(?:cat|dog)-", "^(?:fox|pig)-", True), ("^(?:cat|dog)-", "^(?:cow|pig)-", False), ("^[0-9]+$", "^[a-z]+$", True),
        ("^x[0-9]{3}y", "^x[0-9]{3}z", True), ("^[0-9]{4}-", "^[0-9]{2}:", True), ("^\\d", "^٣", False), ("^a|b", "^c", False),
        ("(?i)^a", "^A", False), ("^[[:alpha:]]", "^b", False), ("^a{,2}b", "^c", False), ("^(", "^b", False), ("^é", "^è", False),
        ("^((((a{99}){99}){99}){99})b", "^b", True),
    ],
)  # fmt: skip
def test_which_expressions_are_told_apart(first: str, second: str, apart: bool) -> None:
    assert are_apart(first, second) is apart
    assert are_apart(second, first) is apart


def test_without_the_parser_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "_parser", None)
    expressions._shape_of.cache_clear()
    assert not are_apart("^a", "^b")
    assert Names().matched("^a$", 9) is None
    expressions._shape_of.cache_clear()


def test_names_of_an_expression() -> None:
    parts = ["a", "b", "[ab]", "(a|b)", "(?:a|)", "a?", "b{0,2}", "^", "$", "x+", ".", "[^a]", r"\d"]
    texts = ["".join(letters) for size in range(5) for letters in itertools.product("ab", repeat=size)]
    told = 0
    for seed in range(num_cases(300, 5000)):
        random = Random(seed)
        pattern = "".join(["^" * (random.random() < 0.8), *random.choices(parts, k=random.randint(0, 4)), "$" * (random.random() < 0.8)])  # fmt: skip
        names = Names().matched(pattern, 1000)
        if names is not None:
            told += 1
            found = {text for text in texts if re.search(pattern.replace("$", r"\Z"), text)}
            assert found == {name for name in names if len(name) < 5 and set(name) <= set("ab")}, pattern
    assert told > 50
    assert Names().matched("^[a-z]{1,9}$", 1000) is None
    assert Names().matched("(?i)^a$", 1000) is None
    assert Names().matched("^(", 1000) is None


TANGLED = {
    "repeated": {"patternProperties": {f"^((((a{{9}}){{9}}){{9}}){{9}}){{9}}{i}$": {} for i in range(300)}},
    "many names": {"patternProperties": {f"^[a-d]{{4}}{'x' * 100}{i}$": {} for i in range(200)}},
    "in a circle": {"oneOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 60}}},
    "many branches": {"oneOf": [{"type": "object", "required": [f"p{i}"]} for i in range(1000)]},
    "many values": {"oneOf": [{"enum": list(range(100 * i, 100 * i + 100))} for i in range(60)]},
    "multiples": {"allOf": [{"multipleOf": 10.0**i} for i in range(300)]},
}


@pytest.mark.parametrize("name", TANGLED)
def test_the_work_on_a_schema_is_bounded(name: str) -> None:
    """Counted in calls, which do not depend on the machine."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with contextlib.suppress(ValueError):
            exact_schema(TANGLED[name], {})
    finally:
        sys.setprofile(before)
    assert calls < 3_000_000

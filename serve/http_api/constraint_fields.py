"""Constraints on the output, under the field names of OpenAI, vLLM, SGLang and llama.cpp.

All of them become fields of `apt_jax.request.StructuredOutputsParams`, which defines their meaning;
`apt_jax.validation` checks them. A body may have only one constraint, under one or more of these names.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from apt_jax import validation
from apt_jax.errors import InvalidRequestError
from apt_jax.validation import check_mapping
from serve.http_api.json_schemas import FLAG, NULL, Schema, list_of, object_of, or_null

OWN_FIELD = "structured_outputs"
RESPONSE_FORMAT = "response_format"

OTHER_NAMES: dict[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""Maps the constraint fields of older vLLM versions, SGLang and llama.cpp to the fields of `structured_outputs`."""

_WHITESPACE = "guided_whitespace_pattern"
_NONE = {"grammar": ""}
"""Values other than null that mean no constraint, keyed by field."""


class Constraint(NamedTuple):
    """The constraint in a body."""

    field: str
    """Name of the field in the body."""
    value: Any
    """The equivalent value of `structured_outputs`, not validated."""


def read_constraint(body: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint of a body; None if it has none.

    Raises:
        InvalidRequestError: the body has two different constraints, or `response_format` is malformed.
    """
    given: list[Constraint] = []
    if body.get(OWN_FIELD) is not None:
        given.append(Constraint(OWN_FIELD, body[OWN_FIELD]))
    wanted = _response_format(body.get(RESPONSE_FORMAT))
    if wanted is not None:
        given.append(Constraint(RESPONSE_FORMAT, wanted))
    for name, ours in OTHER_NAMES.items():
        value = body.get(name)
        if value is not None and value != _NONE.get(name):
            given.append(Constraint(name, {ours: value}))
    if not given:
        if body.get(_WHITESPACE) is not None:
            raise InvalidRequestError(_WHITESPACE, "requires guided_json")
        return None
    first = given[0]
    for other in given[1:]:
        if other.value != first.value:
            raise InvalidRequestError(
                other.field, f"cannot be given together with {first.field}; an output can have only one constraint"
            )
    if body.get(_WHITESPACE) is not None:
        if first.field != "guided_json":
            raise InvalidRequestError(_WHITESPACE, "requires guided_json")
        return Constraint(first.field, {**first.value, "whitespace_pattern": body[_WHITESPACE]})
    return first


def _response_format(value: object) -> dict[str, object] | None:
    """Return the `structured_outputs` equivalent of a `response_format`; None if it means plain text."""
    if value is None:
        return None
    answer = check_mapping(RESPONSE_FORMAT, value)
    match answer.get("type"):
        case "text":
            return None
        case "json_object":  # llama.cpp, Together and instructor before 1.4 give a schema here
            schema = answer.get("schema")
            return {"json_object": True} if schema is None else {"json": schema}
        case "json_schema":
            named = answer.get("json_schema")
            if named is None and answer.get("schema") is not None:
                return {"json": answer["schema"]}
            schema = check_mapping(f"{RESPONSE_FORMAT}.json_schema", named).get("schema")
            if schema is None:
                raise InvalidRequestError(f"{RESPONSE_FORMAT}.json_schema", "has no schema")
            return {"json": schema}
    raise InvalidRequestError(RESPONSE_FORMAT, "type must be one of text, json_object, json_schema")


# --- schemas ---------------------------------------------------------------------------------------------------------


def schemas() -> dict[str, Schema]:
    """Return the schemas of all constraint fields, keyed by name."""
    text = {"type": "string", "minLength": 1, "maxLength": validation.MAX_GRAMMAR_BYTES}
    whitespace = or_null({"type": "string", "minLength": 1, "maxLength": validation.MAX_WHITESPACE_PATTERN_BYTES})
    kinds: dict[str, Schema] = {
        "json": {"anyOf": [text, {"type": ["object", "boolean"]}]},
        "regex": text,
        "choice": list_of(text, 1, validation.MAX_CHOICES),
        "grammar": text,
        "json_object": {"const": True},
    }
    fields = {name: or_null(kind) for name, kind in kinds.items()}
    fields |= {"json_object": or_null(FLAG), "disable_any_whitespace": FLAG, "whitespace_pattern": whitespace}
    exactly_one = [object_of({name: kind}, required=(name,)) for name, kind in kinds.items()]
    others = {
        name: or_null(kinds[ours]) | {"description": f"The same as `{OWN_FIELD}.{ours}`; give only one of them."}
        for name, ours in OTHER_NAMES.items()
    }
    others["grammar"] |= {"minLength": 0}  # llama.cpp's clients send an empty string for no grammar
    return {
        OWN_FIELD: or_null({**object_of(fields, closed=True), "oneOf": exactly_one}),
        RESPONSE_FORMAT: or_null(_response_formats()),
        **others,
        _WHITESPACE: whitespace
        | {"description": f"Only with `guided_json`: the same as `{OWN_FIELD}.whitespace_pattern`."},
    }


def _response_formats() -> Schema:
    schema = {"type": ["object", "boolean", "string"]}
    named = object_of({"schema": schema}, required=("schema",))
    return {
        "anyOf": [
            object_of({"type": {"const": "text"}}, required=("type",)),
            object_of({"type": {"const": "json_object"}, "schema": or_null(schema)}, required=("type",)),
            object_of({"type": {"const": "json_schema"}, "json_schema": named}, required=("type", "json_schema")),
            object_of(
                {"type": {"const": "json_schema"}, "schema": schema, "json_schema": NULL}, required=("type", "schema")
            ),
        ]
    }

"""Building blocks of the JSON schemas in the OpenAPI document."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
STRING: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def integer(low: float | None, high: float | None) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float | None, high: float | None) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def list_of(item: Schema, least: int, most: float | None) -> Schema:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def object_of(fields: Mapping[str, Schema], *, required: tuple[str, ...] = (), closed: bool = False) -> Schema:
    made: Schema = {"type": "object", "properties": dict(fields), "required": list(required)}
    return made | ({"additionalProperties": False} if closed else {})


def closed(fields: Mapping[str, Schema], *, optional: tuple[str, ...] = ()) -> Schema:
    """A closed object that has all of the fields, but for those that are optional."""
    required = tuple(name for name in fields if name not in optional)
    return object_of(fields, required=required, closed=True)


def or_null(schema: Schema) -> Schema:
    """Also null, which is the same as absent."""
    kind = schema.get("type")
    if isinstance(kind, str) and not schema.keys() & {"anyOf", "oneOf", "enum", "const"}:
        return {**schema, "type": [kind, "null"]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {"anyOf": [schema, NULL]}

"""Typed records of request bodies: one declaration defines how a body is read, its bounds and its OpenAPI schema.

`msgspec` checks bodies that `serve.http_api.openai_request.parse_json` has parsed; this module writes the error messages,
in the style of `apt_jax.validation`. Fields that the engine checks have the type `Any`, and their schema comes from the
engine's declaration of the field. A null field means the same as an absent field. Unknown fields are ignored.
"""

import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.validation import check_flag, check_integer, check_mapping
from serve.http_api.json_schemas import FLAG, NULL, STRING, Facts, Schema, object_of, or_null

R = TypeVar("R", bound="Record")

Flag = bool | None
Text = str | None
Bits32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None


class Refused(NamedTuple):
    """A known field that is not supported."""

    harmless: tuple[object, ...] | None = ()
    """Values that are accepted, in addition to null, because they have no effect. None: only null is accepted, because
    the field belongs to another API."""
    why: str = "is not supported"
    """Text of the error for other values."""
    text: str | None = None
    """Description of the field in the schema."""


class Record(msgspec.Struct, kw_only=True):
    """A request body, or an object in it."""

    refused: ClassVar[Mapping[str, Refused]] = {}
    """Known fields that are not supported."""
    needed: ClassVar[Mapping[str, str]] = {}
    """Required fields, each with the text of the error if it is missing."""
    also: ClassVar[Mapping[str, Schema]] = {}
    """Schemas of additional fields, which other code reads from the raw body."""


EngineField = Annotated[Any, Meta(extra={"engine": True})]
"""Type of a record field that `apt_jax.validation.REQUEST_FIELDS` declares and the engine checks."""
HIDDEN = Meta(extra={"hidden": True})
"""Metadata of a field that is left out of schemas."""


def shaped(shape: Callable[[Facts], Schema], description: str | None = None) -> Meta:
    """Return the metadata of a field whose schema is computed by `shape` from facts about the model."""
    return Meta(extra={"shape": shape}, description=description)


def fixed(schema: Schema) -> Meta:
    """Return the metadata of a field that has this schema and is checked by other code."""
    return shaped(lambda facts: schema)


def read(record: type[R], body: Mapping[str, Any]) -> R:
    """Check a body and return it as a record.

    Raises:
        InvalidRequestError: the body is invalid; `.field` is the path of the field.
    """
    reject(record.refused, body)
    for name, why in record.needed.items():
        if body.get(name) is None:
            raise InvalidRequestError(name, why)
    try:
        return msgspec.convert(body, record)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter from a lone surrogate
        _explain(record, body, "")
        raise InvalidRequestError("body", "contains a name or string that is not valid Unicode") from None


def reject(refused: Mapping[str, Refused], body: Mapping[str, Any], prefix: str = "") -> None:
    """Check that a body does not use unsupported fields, except with values that have no effect.

    Args:
        refused: the unsupported fields.
        body: the body, or an object in it.
        prefix: put before field names in errors.

    Raises:
        InvalidRequestError: the body uses an unsupported field.
    """
    for name in [name for name in body if name in refused]:
        value = body[name]
        if value is not None and not any(equal_in_json(value, harmless) for harmless in refused[name].harmless or ()):
            raise InvalidRequestError(prefix + name, refused[name].why)


def carried(body: Record, base: type[Record]) -> dict[str, Any]:
    """Return the fields that a body inherits from `base`, as a map from name to value."""
    return {name: getattr(body, name) for name in base.__struct_fields__}


def quoted(value: object) -> str:
    """Return text for a client's value in an error message: a string's first 40 characters, else the JSON type."""
    return repr(value[:40]) if isinstance(value, str) else json_kind(value)


def equal_in_json(value: object, other: object) -> bool:
    """Return whether two values are equal in JSON, where 1 equals 1.0 but not true."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)


# --- error messages --------------------------------------------------------------------------------------------------


def _explain(kind: Any, value: Any, field: str, bounds: Meta | None = None) -> None:
    """Raise `InvalidRequestError` for the first part of a value that does not have this type."""
    origin, args = get_origin(kind), get_args(kind)
    low, high = (None, None) if bounds is None else (bounds.min_length, bounds.max_length)
    if origin is Annotated:
        _explain(args[0], value, field, args[1])
    elif origin in (Union, types.UnionType):
        kinds = [kind for kind in args if kind is not types.NoneType]
        if value is not None:
            _explain(next((kind for kind in kinds if _is_alike(kind, value)), kinds[0]), value, field)
    elif origin is Literal:
        if value not in args:
            raise InvalidRequestError(field, f"{quoted(value)} must be one of {', '.join(map(repr, args))}")
    elif origin is list:
        if not isinstance(value, list):
            raise InvalidRequestError(field, f"{json_kind(value)} is not a list")
        if low and not value:
            raise InvalidRequestError(field, "must not be empty")
        if high is not None and len(value) > high:
            raise InvalidRequestError(field, f"{len(value)} items; at most {high}")
        for number, item in enumerate(value):
            _explain(args[0], item, f"{field}[{number}]")
    elif kind is types.NoneType:
        if value is not None:
            raise InvalidRequestError(field, "must be null")
    elif kind is bool:
        check_flag(field, value)
    elif kind is int:
        assert bounds is not None
        check_integer(field, value, int(bounds.ge or 0), int(bounds.le or 0))
    elif kind is str:
        if high is not None and (not isinstance(value, str) or len(value) > high):
            raise InvalidRequestError(field, f"must be a string of at most {high} characters")
        if not isinstance(value, str):
            raise InvalidRequestError(field, f"{json_kind(value)} is not text")
        if low and not value:
            raise InvalidRequestError(field, "must not be empty")
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        given = check_mapping(field, value)
        names = _fields(kind)
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None and kind.__struct_config__.forbid_unknown_fields:
            raise InvalidRequestError(field, f"{unknown[:80]!r} is none of {', '.join(names)}")
        for name, part in names.items():
            if name in given:
                _explain(part.kind, given[name], _join(field, name))
            elif part.is_required:
                raise InvalidRequestError(_join(field, name), "missing")


def _is_alike(kind: Any, value: object) -> bool:
    """Return whether a value has the JSON type of this member of a union, in which case errors refer to this member."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    kind = get_origin(kind) or kind
    return isinstance(value, Mapping if issubclass(kind, msgspec.Struct) else kind) if isinstance(kind, type) else False


def _join(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


# --- schemas ---------------------------------------------------------------------------------------------------------


class _Field(NamedTuple):
    kind: Any
    is_required: bool
    default: object


@functools.cache
def _fields(record: type[msgspec.Struct]) -> Mapping[str, _Field]:
    """Return the fields of a record, keyed by their names in JSON."""
    kinds = typing.get_type_hints(record, include_extras=True)
    return {
        field.encode_name: _Field(kinds[field.name], field.required, None if field.required else field.default)
        for field in msgspec.structs.fields(record)
    }


def _extra(kind: Any) -> Mapping[str, Any]:
    return (get_args(kind)[1].extra or {}) if get_origin(kind) is Annotated else {}


def schema_of(kind: Any, facts: Facts) -> Schema:
    """Return the JSON schema of a record or of the type of a field."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner, meta = args
        shape = (meta.extra or {}).get("shape")
        made = schema_of(inner, facts) if shape is None else dict(shape(facts))
        length = "Items" if get_origin(inner) is list else "Length"
        bounds = {
            "minimum": meta.ge,
            "maximum": meta.le,
            f"min{length}": meta.min_length,
            f"max{length}": meta.max_length,
            "description": meta.description,
            **(meta.extra_json_schema or {}),
        }
        return made | {name: bound for name, bound in bounds.items() if bound is not None}
    if origin in (Union, types.UnionType):
        made = [schema_of(kind, facts) for kind in args if kind is not types.NoneType]
        one = made[0] if len(made) == 1 else {"anyOf": made}
        text = {"description": one.pop("description")} if "description" in one else {}
        return (or_null(one) if types.NoneType in args else one) | text
    if origin is Literal:
        return {"const": args[0]} if len(args) == 1 else {"enum": list(args)}
    if origin is list:
        return {"type": "array", "items": schema_of(args[0], facts)}
    if kind is types.NoneType:
        return dict(NULL)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _object(kind, facts)
    return dict({bool: FLAG, str: STRING, int: {"type": "integer"}}.get(kind, {}))


def _object(record: type[msgspec.Struct], facts: Facts) -> Schema:
    properties: Schema = dict(getattr(record, "also", {}))
    required = []
    needed: Mapping[str, str] = getattr(record, "needed", {})
    for name, field in _fields(record).items():
        extra = _extra(field.kind)
        if "hidden" in extra:
            continue
        properties[name] = facts.optional(name) if "engine" in extra else schema_of(field.kind, facts)
        if field.is_required or name in needed:
            required.append(name)
        elif field.default is not None:
            properties[name]["default"] = field.default
    refused: Mapping[str, Refused] = getattr(record, "refused", {})
    for name, (harmless, _, text) in refused.items():
        schema = dict(NULL) if harmless is None else {"enum": [*harmless, None]}
        properties[name] = schema | ({} if text is None else {"description": text})
    return object_of(properties, required=tuple(required), closed=record.__struct_config__.forbid_unknown_fields)

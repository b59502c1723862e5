"""Validation of structured output constraints: exactly one kind, bounded in size and depth, with schemas as compact
JSON text. Constraints are compiled later."""

import dataclasses
import json
from collections.abc import Mapping, Sequence

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.request import StructuredOutputsParams
from apt_jax.validation.limits import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_WHITESPACE_PATTERN_BYTES,
    UNSUPPORTED,
    unsupported,
)
from apt_jax.validation.values import check_bounded_text, check_flag, shown

_FIELDS = tuple(field.name for field in dataclasses.fields(StructuredOutputsParams))
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def checked_structured_outputs(value: object) -> StructuredOutputsParams | None:
    """Check and return a constraint of exactly one kind, bounded in size and depth, with `json` as compact text.

    Raises:
        InvalidRequestError: `value` is not such a constraint.
    """
    field = "structured_outputs"
    if value is None:
        return None
    if isinstance(value, Mapping):
        for name in value:
            if name in UNSUPPORTED:
                raise unsupported(name)
            if name not in _FIELDS:
                raise InvalidRequestError(field, f"{shown(name)} must be one of {', '.join(_FIELDS)}")
        value = StructuredOutputsParams(**value)  # checked field by field below
    elif not isinstance(value, StructuredOutputsParams):
        raise InvalidRequestError(
            field, f"{json_kind(value)} is neither StructuredOutputsParams nor an object of its fields"
        )
    given = [name for name in _KINDS if getattr(value, name) is not None]
    if value.json_object is not None and not check_flag(f"{field}.json_object", value.json_object):
        given.remove("json_object")
    if len(given) != 1:
        names = " and ".join(given) or "none"
        raise InvalidRequestError(field, f"{names} given; give exactly one of {', '.join(_KINDS)}")
    (kind,) = given
    whitespace = value.whitespace_pattern
    fixed = check_flag(f"{field}.disable_any_whitespace", value.disable_any_whitespace)
    if (fixed or whitespace is not None) and kind not in ("json", "json_object"):
        name = "disable_any_whitespace" if fixed else "whitespace_pattern"
        raise InvalidRequestError(f"{field}.{name}", f"applies to json and json_object, not to {kind}")
    if fixed and whitespace is not None:
        raise InvalidRequestError(f"{field}.whitespace_pattern", "cannot be given together with disable_any_whitespace")
    options = {
        "disable_any_whitespace": fixed,
        "whitespace_pattern": None
        if whitespace is None
        else check_bounded_text(f"{field}.whitespace_pattern", whitespace, MAX_WHITESPACE_PATTERN_BYTES),
    }
    name = f"{field}.{kind}"
    match kind:
        case "json":
            return StructuredOutputsParams(json=_schema(name, value.json), **options)
        case "choice":
            return StructuredOutputsParams(choice=_choices(name, value.choice))
        case "regex":
            return StructuredOutputsParams(regex=check_bounded_text(name, value.regex))
        case "grammar":
            return StructuredOutputsParams(grammar=check_bounded_text(name, value.grammar))
    return StructuredOutputsParams(json_object=True, **options)


def _choices(field: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise InvalidRequestError(field, f"{json_kind(value)} is not a list of strings")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequestError(field, f"{len(value)} strings; give 1 to {MAX_CHOICES}")
    texts = tuple(dict.fromkeys(check_bounded_text(field, text) for text in value))
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(field, f"{size} bytes in total, at most {MAX_GRAMMAR_BYTES} are allowed")
    return texts


def _schema(field: str, value: object) -> str:
    """Check a JSON schema and return it as compact JSON text, with keys in the given order."""

    def constant(name: str) -> object:
        raise ValueError(f"{name} is not JSON")

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(items)
        if len(made) != len(items):
            raise ValueError("a key occurs twice in one object")
        return made

    def check_keys(of: object) -> None:
        """Raise ValueError if a key is not a string; `json.dumps` would convert numbers to strings."""
        stack = [of]
        while stack:
            item = stack.pop()
            if isinstance(item, Mapping):
                if not all(isinstance(key, str) for key in item):
                    raise ValueError("a key that is not text")
                stack += item.values()
            elif isinstance(item, list | tuple):
                stack += item

    if isinstance(value, str):
        text = check_bounded_text(field, value)
    elif isinstance(value, Mapping | bool):
        try:
            text = json.dumps(
                dict(value) if isinstance(value, Mapping) else value,
                allow_nan=False,
                separators=(",", ":"),
            )
            check_keys(value)
        except RecursionError:
            raise InvalidRequestError(field, f"nested more deeply than {MAX_SCHEMA_DEPTH} levels") from None
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(field, f"not a JSON value: {str(error)[:80]}") from None
        text = check_bounded_text(field, text)
    else:
        raise InvalidRequestError(field, f"{json_kind(value)} is not a JSON schema: give an object, or its text")
    try:
        schema = json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
        compact = json.dumps(schema, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequestError(field, f"nested more deeply than {MAX_SCHEMA_DEPTH} levels") from None
    except ValueError as error:
        raise InvalidRequestError(field, f"not JSON: {str(error)[:80]}") from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(field, "a JSON schema is an object, true or false")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(field, f"nested more deeply than {MAX_SCHEMA_DEPTH} levels")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise InvalidRequestError(field, "'x-guidance' is not accepted; leave it out")
    return compact


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while containers := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [x for c in containers for x in (c.values() if isinstance(c, dict) else c)]
    return depth

"""Building blocks of the JSON schemas in the OpenAPI document."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from apt_jax.validation import MAX_INTEGER, MIN_POSITIVE, REQUEST_FIELDS, FieldSpec, RequestLimits

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
    """Return the schema of an object that has only these fields, of which all but `optional` are required."""
    required = tuple(name for name in fields if name not in optional)
    return object_of(fields, required=required, closed=True)


def or_null(schema: Schema) -> Schema:
    """Return the schema with null allowed as well, which means the same as an absent field."""
    kind = schema.get("type")
    if isinstance(kind, str) and not schema.keys() & {"anyOf", "oneOf", "enum", "const"}:
        return {**schema, "type": [kind, "null"]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {"anyOf": [schema, NULL]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about the model that determine bounds in the schemas."""

    limits: RequestLimits | None = None
    """Limits of the model; None while there is no engine, so lengths and token ids have only general bounds."""
    models: Sequence[str] = ()
    """Model names that requests may use; empty: any name."""
    stores_responses: bool = False
    """True if responses of the Responses API are stored."""

    @property
    def model(self) -> Schema:
        return {"enum": [*self.models, "", None]} if self.models else {"type": ["string", "null"]}

    @property
    def token(self) -> Schema:
        return integer(0, MAX_INTEGER if self.limits is None else self.limits.vocab_size - 1)

    @property
    def token_ids(self) -> Schema:
        """Schema of a prompt of token ids that is short enough for at least one output token."""
        return list_of(self.token, 1, MAX_INTEGER if self.limits is None else self.limits.max_model_len - 1)

    @property
    def max_output(self) -> int:
        if self.limits is None:
            return MAX_INTEGER
        pool = self.limits.max_pool_tokens
        return min(self.limits.max_model_len, MAX_INTEGER if pool is None else pool) - 1

    @property
    def max_sequences(self) -> int:
        return int(REQUEST_FIELDS["n"].max or 1) if self.limits is None else self.limits.max_sequences

    def optional(self, name: str) -> Schema:
        """Return the schema of a request field, with null allowed and with its default."""
        default = REQUEST_FIELDS[name].default
        return or_null(self.field(name)) | ({} if default in (None, ()) else {"default": default})

    def field(self, name: str) -> Schema:
        """Return the schema of a request field, derived from its declaration in `REQUEST_FIELDS`."""
        spec = REQUEST_FIELDS[name]
        match spec.type:
            case "integer":
                bounds = integer(spec.min, self.max_output if name == "min_tokens" else spec.max)
                return bounds | ({"not": {"const": 0}} if name == "truncate_prompt_tokens" else {})
            case "number":
                return number(MIN_POSITIVE if spec.open_min else spec.min, spec.max)
            case "strings":
                most = self.limits.max_stop_strings if name == "stop" and self.limits else spec.max_items
                texts = [text_of(spec), list_of(text_of(spec), 0, most)]
                return {"anyOf": texts} if name == "stop" else texts[1]
            case "token ids":
                return list_of(self.token, int(name == "allowed_token_ids"), spec.max_items)
            case "bias map":
                return {
                    "type": "object",
                    "maxProperties": spec.max_items,
                    "propertyNames": {"pattern": "^(-0{1,10}|[0-9]{1,10})$"},
                    "additionalProperties": number(spec.min, spec.max),
                }
            case "string":
                return {"enum": list(spec.choices)} if spec.choices else text_of(spec)
        return FLAG


def text_of(spec: FieldSpec) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": spec.max_chars}

"""Limits the JSON schemas that gateways send to require function calls, because they allow any number of calls."""

import contextlib
import json
from typing import Any

from apt_jax.structured.json_schema import closed
from apt_jax.validation.limits import MAX_TOOL_CALLS


def bounded_calls(text: str) -> str:
    """Limit a gateway's schema of function calls to `MAX_TOOL_CALLS` calls, and to the listed properties.

    Without these limits, small models add calls and properties endlessly. Any other schema is returned unchanged.

    Args:
        text: JSON schema, not validated yet.
    """
    with contextlib.suppress(ValueError, RecursionError):
        schema = json.loads(text)
        if isinstance(schema, dict) and schema.get("type") == "array" and "maxItems" not in schema:
            items = schema.get("items")
            calls = items.get("anyOf") if isinstance(items, dict) else None
            if isinstance(items, dict) and isinstance(calls, list) and calls and all(map(_is_call, calls)):
                schema["items"] = {**items, "anyOf": [_closed_call(call) for call in calls]}
                return json.dumps({**schema, "maxItems": MAX_TOOL_CALLS}, ensure_ascii=False)
    return text


def _is_call(schema: Any) -> bool:
    """Return True if the schema describes a function call: an object with the properties `name` and `parameters`."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return isinstance(properties, dict) and list(properties) == ["name", "parameters"]


def _closed_call(schema: dict[str, Any]) -> dict[str, Any]:
    name, parameters = schema["properties"].values()
    made = closed(parameters) if isinstance(parameters, dict) else parameters
    return {**schema, "properties": {"name": name, "parameters": made}, "additionalProperties": False}

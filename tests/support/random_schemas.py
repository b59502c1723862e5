"""Random JSON schemas of arguments, small enough that a model of any size comes to an end."""

from random import Random
from typing import Any

Schema = dict[str, Any]


def random_schema(random: Random, definition: str = "part") -> Schema:
    """The schema of an object with one to four properties, some of them by reference to `definition`."""
    properties = {
        name: _value(random, 2) for name in random.sample(["a", "city", "unit of x", "n", "é"], random.randint(1, 4))
    }
    schema: Schema = {
        "type": "object",
        "properties": properties,
        "required": random.sample(list(properties), random.randint(0, len(properties))),
    }
    if random.random() < 0.3:
        schema["$defs"] = {definition: _value(random, 1)}
        properties["by_reference"] = {"$ref": f"#/$defs/{definition}"}
    if random.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _value(random: Random, depth: int) -> Schema:
    kinds = ["string", "choice", "integer", "boolean", "pattern", "maybe"] + (["object", "array"] if depth else [])
    match random.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": random.randint(1, 8)}
        case "choice":
            return {"enum": ["celsius", 'a "quoted" word', 3, None][: random.randint(1, 4)]}
        case "integer":
            return {"type": "integer", "minimum": -5, "maximum": random.randint(0, 1000)}
        case "pattern":
            return {"type": "string", "pattern": "^[a-z]{2,4}$"}
        case "maybe":
            return {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
        case "object":
            return {"type": "object", "properties": {"x": _value(random, depth - 1)}, "required": ["x"]}
        case "array":
            return {"type": "array", "items": _value(random, depth - 1), "maxItems": random.randint(1, 3)}
    return {"type": "boolean"}


def closed(schema: Any) -> Any:
    """The schema with objects that have no other properties than those that it names."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(part) for name, part in schema.items()}
    return made | {"additionalProperties": False} if made.get("type") == "object" else made

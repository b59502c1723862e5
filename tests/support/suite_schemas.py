"""Random JSON schemas of the kind that JSON Schema's test suite has: all assertions, open objects, overlapping branches, odd names."""

from random import Random
from typing import Any

Schema = dict[str, Any] | bool

NAMES = ["a", "b", "foo", "bar", "x-y", "é", 'q"', "back\\slash", "new\nline", ""]
PATTERNS = ["^a$", "^(a|b|foo)$", "^f", "o$", "^[a-c]$", "^x-", "[0-9]", "^[a-z]{2}$", "^$"]
TEXT_PATTERNS = ["^[a-z]+$", "a", "^\\d{2,3}$", "^(?:x|yy)?$", "b$", "^\\S+$", "\\w-\\w"]
FORMATS = ["date", "date-time", "time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "duration"]
OTHER_FORMATS = ["path", "password", "int32", "uri-reference", "regex", "color", "unknown", ""]
CONSTANTS = [None, True, False, 0, 1, -7, 1.5, 1e6, "", "a", "b", "é\n", 'q"', [], [1], ["a", None], {}, {"a": 1}]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


def suite_schema(random: Random, depth: int = 3) -> Schema:
    """A schema, perhaps one that no value satisfies."""
    definitions = {name: _any(random, 1, ()) for name in ("one", "two")} if random.random() < 0.3 else {}
    schema = _any(random, depth, tuple(definitions))
    if definitions and isinstance(schema, dict):
        schema = {**schema, "$defs": definitions}
    return schema


def _any(random: Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    def inner() -> Schema:
        return _any(random, depth - 1, definitions)

    kinds = ["constant", "enum", "number", "string", "flag", "types"]
    kinds += ["object", "object", "object", "array", "combined", "combined"] if depth else []
    kinds += ["reference"] if definitions else []
    match random.choice(kinds):
        case "constant":
            return {"const": random.choice(CONSTANTS)}
        case "enum":
            return {"enum": random.sample(CONSTANTS, random.randint(1, 4))}
        case "number":
            return _number(random)
        case "string":
            return _string(random)
        case "flag":
            return random.random() < 0.8
        case "types":
            return {"type": random.sample(TYPES, random.randint(1, 3))}
        case "array":
            return _array(random, inner)
        case "object":
            return _object(random, inner)
        case "reference":
            return {"$ref": f"#/$defs/{random.choice(definitions)}"}
    return _combined(random, inner, definitions)


def _number(random: Random) -> Schema:
    schema: dict[str, Any] = {"type": random.choice(["integer", "integer", "number"])} if random.random() < 0.9 else {}
    low = random.choice([0, 1, -5, -1000, 3.5, 0.25, -0.5, 1e-7])
    if random.random() < 0.6:
        schema[random.choice(["minimum", "exclusiveMinimum"])] = low
    if random.random() < 0.6:
        schema[random.choice(["maximum", "exclusiveMaximum"])] = low + random.choice([0, 1, 0.5, 9, 10, 99, 1234])
    if random.random() < 0.2:
        schema["multipleOf"] = random.choice([1, 2, 5, 7, 10, 0.5, 1.5])
    return schema


def _string(random: Random) -> Schema:
    schema: dict[str, Any] = {"type": "string"} if random.random() < 0.9 else {}
    if random.random() < 0.3:
        schema["pattern"] = random.choice(TEXT_PATTERNS)
    elif random.random() < 0.5:
        schema["format"] = random.choice(random.choice([FORMATS, OTHER_FORMATS]))
    if random.random() < 0.4:
        schema["minLength"] = random.randint(0, 3)
    if random.random() < 0.6:
        schema["maxLength"] = random.randint(0, 40)
    return schema


def _array(random: Random, inner: Any) -> Schema:
    schema: dict[str, Any] = {"type": "array"} if random.random() < 0.9 else {}
    if random.random() < 0.3:
        schema["prefixItems"] = [inner() for _ in range(random.randint(1, 2))]
    if random.random() < 0.8:
        schema["items"] = inner()
    if random.random() < 0.3:
        schema["minItems"] = random.randint(0, 2)
    schema["maxItems"] = random.randint(0, 3)
    if random.random() < 0.1:
        schema["uniqueItems"] = random.random() < 0.3
    return schema


def _object(random: Random, inner: Any) -> Schema:
    schema: dict[str, Any] = {"type": "object"} if random.random() < 0.9 else {}
    names = random.sample(NAMES, random.randint(0, 3))
    if names or random.random() < 0.1:
        schema["properties"] = {name: inner() for name in names}
    if random.random() < 0.4:
        schema["patternProperties"] = {
            pattern: inner() for pattern in random.sample(PATTERNS, random.choice([1, 1, 1, 2]))
        }
    if random.random() < 0.6:
        schema["required"] = random.sample([*names, random.choice(NAMES)], random.randint(0, len(names)))
        schema["required"] = list(dict.fromkeys(schema["required"]))
    if random.random() < 0.6:
        schema["additionalProperties"] = random.choice([False, False, inner()])
    if random.random() < 0.15:
        schema["minProperties"] = random.randint(0, 3)
    if random.random() < 0.15:
        schema["maxProperties"] = random.randint(0, 3)
    if random.random() < 0.1:
        schema["propertyNames"] = random.choice([{"pattern": "^[a-z]"}, {"maxLength": 3}, {"enum": ["a", "b"]}, True])
    keys = list(schema)
    random.shuffle(keys)
    return {key: schema[key] for key in keys}


def _combined(random: Random, inner: Any, definitions: tuple[str, ...]) -> Schema:
    keyword = random.choice(["anyOf", "oneOf", "oneOf", "allOf"])
    if keyword == "oneOf" and random.random() < 0.4:  # a tagged union
        kinds = random.sample(["cat", "dog", "fish", 3], random.randint(1, 3))
        branches: list[Schema] = [
            {"type": "object", "properties": {"kind": {"const": kind}, "a": inner()}, "required": ["kind"]}
            for kind in kinds
        ]
    else:
        branches = [inner() for _ in range(random.randint(1, 3))]
    schema: dict[str, Any] = {keyword: branches}
    if random.random() < 0.3:
        beside = inner()
        schema = {**beside, **schema} if isinstance(beside, dict) and random.random() < 0.5 else schema
    return schema

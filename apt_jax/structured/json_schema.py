"""Rewriting of JSON schemas so that llguidance enforces them exactly; unsupported keywords are rejected by name.

`exact_schema` first forbids unlisted properties (`closed`), which small models would add endlessly. Then it walks over
the schema, its definitions and other referenced schemas, and changes a copy:

* `format`: an unknown format is an annotation and is left out; dates become regular expressions that respect leap
  years.
* `oneOf` becomes `anyOf` if no value can satisfy two branches. Branches that only require properties are made
  exclusive: each forbids properties that the others require.
* `patternProperties` whose expression matches a few names become `properties`; then a comma is allowed only if another
  of these names may follow.
* `propertyNames` with a regular expression or a list of names becomes `patternProperties` or `properties`.
* Bounds and constants that llguidance would round are made exact.

A `minProperties` that needs more than one name besides the required names is rejected, since nothing keeps unlisted
names distinct.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from apt_jax.structured.schema_branches import MAX_CASES, Branches, Node, is_number, resolved
from apt_jax.structured.schema_names import Names

_SCHEMA = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_COMPOSED = (
    "allOf", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "not", "then",
    "unevaluatedProperties",
)  # fmt: skip
_CHOICES = ("$ref", "anyOf", "oneOf")
_OF_OBJECTS = (
    "additionalProperties", "const", "enum", "maxProperties", "minProperties", "patternProperties", "properties",
    "propertyNames", "required",
)  # fmt: skip
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")

_LEAP = r"[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00"
_DATE = (
    r"(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    rf"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:{_LEAP})-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OWN_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Regular expressions for formats: they allow neither year 0 nor leap seconds, which most parsers reject, and at most
nine decimals of a second."""
_LABELS = r"(?:[a-zA-Z0-9]+-)*[a-zA-Z0-9]+"
_HOST_NAME = rf"^{_LABELS}(?:\.{_LABELS})*$"
"""Regular expression for host names without encoded labels (`xn--`), in which most letter combinations are invalid."""
_MAX_LENGTHS = {"hostname": 253, "email": 254}
FORMATS = frozenset({*_OWN_FORMATS, "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""The values of `format` that are enforced."""

_MAX_EXACT = 2**53
_GAP = 1e-9
"""Distance kept from an exclusive whole-number bound: llguidance would allow the bound itself."""
_MAX_NAMES = 64
"""Maximum number of matching names for which a pattern is replaced by properties."""

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_MAYBE_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f]|\\[xucpPavN0]|\[\^|\[:")
_WRITABLE = r"^[^\x00-\x07\x0b\x0e-\x1f\x7f]*$"

OVERLAP = (
    "oneOf: its branches {} and {} may overlap; give each a required property with its own const, another type, separate "
    "ranges, lengths or prefixes (pattern), or required properties that the others exclude (additionalProperties: false), "
    "or use anyOf"
)


def exact_schema(schema: Mapping[str, Any] | bool, whitespace: Mapping[str, Any]) -> Node:
    """Return the schema that llguidance compiles, which includes llguidance's options.

    Args:
        schema: JSON value, whose depth was checked by `apt_jax.validation`.
        whitespace: options of llguidance for whitespace between the parts of a value.

    Raises:
        ValueError: a keyword cannot be enforced exactly; the message is one line for users and names the keyword.
    """
    root: Node = ({} if schema else {"enum": []}) if isinstance(schema, bool) else json.loads(json.dumps(schema))
    _Rewriter(root, _close(root)).run()
    # Names of properties with unnecessary escapes would not be recognised.
    return {**root, "x-guidance": {**whitespace, "json_allowed_escapes": 'nrbtf\\"'}}


_Place: TypeAlias = "tuple[_Place, str | int] | None"
"""Location of a schema: the location of its parent, and a name or number there."""
_PLAIN_NAME = re.compile(r"[\w$-]{1,64}")
_MAX_PLACE_CHARS = 120


def _path(place: _Place) -> str:
    """Return a location as text, such as ``properties.a.oneOf[1]``; a long location is cut at the start."""
    path = ""
    while place is not None and len(path) <= _MAX_PLACE_CHARS:
        place, part = place
        if isinstance(part, int):
            path = f"[{part}]{path}"
        else:
            name = part if _PLAIN_NAME.fullmatch(part) else f"{json.dumps(part[:64])}"
            path = f"{'' if place is None else '.'}{name}{'' if path.startswith(('[', '.')) or not path else '.'}{path}"
    return path if len(path) <= _MAX_PLACE_CHARS else f"...{path[-_MAX_PLACE_CHARS:]}"


@contextlib.contextmanager
def _at(place: _Place) -> Iterator[None]:
    """Prefix a ValueError about a keyword with the location of its schema."""
    try:
        yield
    except ValueError as error:
        path = _path(place)
        raise ValueError(f"{path}.{error}" if path else str(error)) from None


def closed(schema: Mapping[str, Any]) -> Node:
    """Return a copy in which objects with listed properties allow no others, so that small models do not add properties
    endlessly.

    Objects with `additionalProperties`, `const` or `enum`, and objects whose `required` or `minProperties` needs
    unlisted properties, are not changed. If the document combines several schemas for one value anywhere, for example
    with `allOf` or `not`, nothing is changed.
    """
    root: Node = json.loads(json.dumps(schema))
    _close(root)
    return root


def _close(root: Node) -> set[int]:
    """Change a schema as `closed` does; return the identities of `oneOf` lists found to have exclusive branches."""
    branches = Branches(root)
    apart: set[int] = set()

    def overlap(members: list[Any]) -> bool:
        if branches.overlap(members) is not None:
            return True
        apart.add(id(members))
        return False

    def composed(value: Any) -> bool:
        if isinstance(value, list):
            return any(map(composed, value))
        if not isinstance(value, dict):
            return False
        choices = sum(key in value for key in _CHOICES)
        if choices > 1 or (choices and any(key in value for key in _OF_OBJECTS)):
            return True
        patterns = value.get("patternProperties")
        if isinstance(patterns, dict) and ("properties" in value or len(patterns) > 1):
            return True  # several schemas for one value
        if isinstance(value.get("oneOf"), list) and overlap(value["oneOf"]):
            return True  # a value that satisfies two branches might satisfy only one of them once they are closed
        named = [value[key].values() for key in _NAMED if isinstance(value.get(key), dict)]  # any names
        others = [item for key, item in value.items() if key not in _NAMED]
        return any(key in value for key in _COMPOSED) or any(map(composed, [*itertools.chain(*named), *others]))

    def close(value: Any) -> None:
        if not isinstance(value, dict):
            return
        named = [value[key].values() for key in _NAMED if isinstance(value.get(key), dict)]
        listed = [value[key] for key in ("anyOf", "oneOf", "prefixItems") if isinstance(value.get(key), list)]
        single = [value.get(key) for key in ("additionalProperties", "items")]
        for member in itertools.chain(*named, *listed, single):
            close(member)
        if isinstance(value.get("properties"), dict) and not value.keys() & {"additionalProperties", "const", "enum"}:
            names, required, fewest = (
                value["properties"].keys(),
                value.get("required", []),
                value.get("minProperties", 0),
            )
            suffices = isinstance(required, list) and isinstance(fewest, int | float) and fewest <= len(names)
            if suffices and names >= set(map(str, required)):
                value["additionalProperties"] = False

    # A combination of schemas that are each closed would allow nothing.
    if not composed(root):
        close(root)
    return apart


class _Rewriter:
    """Rewrites the nodes of one schema in place.

    Args:
        root: the schema.
        apart: identities of the `oneOf` lists known to have branches that exclude each other; branches of other lists
            are compared.
    """

    def __init__(self, root: Node, apart: set[int]) -> None:
        self._root, self._apart = root, apart
        self._branches = Branches(root)
        self._listed = Names()

    def run(self) -> None:
        nodes = self._nodes()
        places = {id(node): place for node, place in nodes}
        _check_multiples(nodes)
        for node, place in nodes:
            with _at(place):
                _drop_idle(node)
                self._numbers(node)
                self._constants(node)
                self._strings(node)
                self._names(node)
        for node, place in self._nodes():
            if isinstance(node.get("oneOf"), list):
                with _at(places.get(id(node), place)):
                    self._one_of(node)

    def _nodes(self) -> list[tuple[Node, "_Place"]]:
        """Return the root schema, all subschemas and all targets of `$ref`, each with its location; boolean schemas are
        left out."""
        found: dict[int, tuple[Node, _Place]] = {}
        referred: list[tuple[Any, _Place]] = []
        stack: list[tuple[Any, _Place]] = [(self._root, None)]
        while stack or referred:
            node, place = stack.pop() if stack else referred.pop()
            if not isinstance(node, dict) or id(node) in found:
                continue
            found[id(node)] = node, place
            for key in _SCHEMA:
                if key in node:
                    stack.append((node[key], (place, key)))
            for key in _SCHEMAS:
                if isinstance(node.get(key), list):
                    stack += [(member, ((place, key), number)) for number, member in enumerate(node[key])]
            for key in _NAMED:
                if isinstance(node.get(key), dict):
                    stack += [(member, ((place, key), name)) for name, member in node[key].items()]
            if "$ref" in node:
                referred.append((resolved(self._root, node["$ref"]), (None, str(node["$ref"]))))
        return list(found.values())

    def _numbers(self, node: Node) -> None:
        for key in _COUNTS:
            if isinstance(node.get(key), float) and node[key].is_integer():
                node[key] = int(node[key])
        for key, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
            if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and key in node:  # draft 4
                node[exclusive] = node.pop(key)
            for name in (key, exclusive):
                if is_number(node.get(name)):
                    node[name] = sign * _inner_bound(name, sign * node[name])
            bound = node.get(exclusive)
            if is_number(bound) and bound == int(bound) and node.get("type") != "integer":
                inner = bound + sign * max(_GAP, abs(bound) * 1e-12)
                other = node.get(key)
                del node[exclusive]
                node[key] = sign * max(sign * inner, sign * other) if is_number(other) else inner

    def _constants(self, node: Node) -> None:
        for key in ("const", "enum"):
            for part in _parts(node.get(key)):
                if is_number(part) and abs(part) > _MAX_EXACT:
                    raise ValueError(f"{key}: {part} is beyond 2^53 and would be rounded; give it as text")
                if isinstance(part, str) and _UNWRITABLE.search(part):
                    raise ValueError(f"{key}: {part[:40]!r} has control characters; leave them out")

    def _strings(self, node: Node) -> None:
        name = node.get("format")
        if isinstance(name, str):
            if name in _MAX_LENGTHS:
                longest = _MAX_LENGTHS[name]
                node["maxLength"] = min(node.get("maxLength", longest), longest)
            if name not in FORMATS or name in _OWN_FORMATS:
                del node["format"]
            if name in _OWN_FORMATS:
                _add_pattern(node, _OWN_FORMATS[name])
            if name == "hostname":
                _add_pattern(node, _HOST_NAME)
        pattern = node.get("pattern")
        if isinstance(pattern, str) and _MAYBE_UNWRITABLE.search(pattern):
            _add_pattern(node, _WRITABLE)

    def _names(self, node: Node) -> None:
        patterns, properties = node.get("patternProperties"), node.get("properties", {})
        required, fewest = node.get("required", []), node.get("minProperties", 0)
        if not isinstance(properties, dict) or not isinstance(required, list):
            return  # rejected by llguidance
        needed = set(map(str, required))
        if isinstance(patterns, dict):
            for pattern in list(patterns):
                names = self._listed.matched(pattern, len(properties) + _MAX_NAMES)
                if names is None or len(names - properties.keys()) > _MAX_NAMES:
                    continue
                if names - properties.keys() - needed and {"minProperties", "maxProperties"} & node.keys():
                    continue  # llguidance counts only names that are not listed
                inner = patterns.pop(pattern)
                for name in sorted(names):
                    properties[name] = {"allOf": [properties[name], inner]} if name in properties else inner
            node["properties"] = properties
        keys = ("properties", "patternProperties", "additionalProperties")
        if any(key in node for key in keys):
            _side_by_side(node, keys)
        if (allowed := _as_properties(_resolved_node(self._root, node.get("propertyNames")))) is not None:
            del node["propertyNames"]
            self._names(allowed)
            node["allOf"] = [*node.get("allOf", []), allowed]
        if isinstance(fewest, int) and fewest - len(needed) > 1:
            raise ValueError(
                f"minProperties: {fewest} counts names that the schema does not list, which could be equal; "
                "list them in properties and required"
            )

    def _one_of(self, node: Node) -> None:
        branches = node["oneOf"]
        overlap = None if id(branches) in self._apart else self._branches.overlap(branches)
        if overlap is None:
            replaced: Node = {"anyOf": branches}
        else:
            exclusive = _required_by_one(branches)
            if exclusive is None:
                raise ValueError(OVERLAP.format(*overlap))
            replaced = {"anyOf": exclusive}
        if "anyOf" in node:
            replaced = {"allOf": [*node.get("allOf", []), replaced]}
            node.pop("allOf", None)
        items = list(node.items())
        node.clear()
        for key, value in items:
            node.update(replaced if key == "oneOf" else {key: value})


def _drop_idle(node: Node) -> None:
    """Remove keywords that have no effect where they are, because llguidance would reject them."""
    idle = {"uniqueItems"} if node.get("uniqueItems") is False or node.get("maxItems") in (0, 1) else set()
    if "if" not in node:
        idle |= {"then", "else"}
    elif not {"then", "else"} & node.keys():
        idle.add("if")
    if "contains" not in node:
        idle |= {"minContains", "maxContains"}
    if node.get("propertyNames") in (True, {}):
        idle.add("propertyNames")
    for key in idle & node.keys():
        del node[key]


def _as_properties(names: Any) -> Node | None:
    """Return a schema of objects whose property names satisfy the schema `names`; None if there is no such schema."""
    if not isinstance(names, dict):
        return None
    asserts = names.keys() - {"type", "title", "description", "$comment"}
    if names.get("type", "string") != "string" or len(asserts) != 1:
        return None
    (keyword,) = asserts
    allowed = [names[keyword]] if keyword == "const" else names[keyword]
    if keyword in ("const", "enum") and isinstance(allowed, list):
        return {"properties": {name: True for name in allowed if isinstance(name, str)}, "additionalProperties": False}
    if keyword == "pattern" and isinstance(allowed, str):
        return {"patternProperties": {allowed: True}, "additionalProperties": False}
    return None


def _check_multiples(places: list[tuple[Node, _Place]]) -> None:
    """Raise ValueError if the product of `multipleOf` values that may apply together exceeds llguidance's 32 bits."""
    nodes = [node for node, _ in places]
    together = [node for node in nodes if node.keys() & {"allOf", "anyOf", "oneOf", "$ref"}]
    if not any("allOf" in node or "multipleOf" in node for node in together):
        return
    multiples = {Fraction(str(node["multipleOf"])) for node in nodes if is_number(node.get("multipleOf"))}
    if not multiples or 0 in multiples:
        return
    scale = max(multiple.denominator for multiple in multiples)
    common = 1
    for multiple in multiples if len(multiples) > 1 else ():
        common *= abs(multiple.numerator) * scale
        if common >= 2**32:
            place = next(place for node, place in places if "multipleOf" in node)
            path = "".join(f"{path}." for path in (_path(place),) if path)
            raise ValueError(
                f"{path}multipleOf: the values that may apply together are too large; give only their common multiple"
            )


# --- numbers, strings and names ---------------------------------------------------------------------------------------


def _inner_bound(name: str, lower: float) -> float:
    """Return a lower bound (or a negated upper bound) as a double that allows no additional values."""
    if abs(lower) <= _MAX_EXACT:
        return lower
    if abs(lower) >= 2**63:
        if lower > 0:
            raise ValueError(f"{name}: is beyond 2^63 and cannot be enforced")
        return -_MAX_EXACT
    rounded = float(lower)
    return int(rounded if rounded >= lower else math.nextafter(rounded, math.inf))


def _parts(value: Any) -> Iterator[Any]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            stack += item
        else:
            yield item


def _add_pattern(node: Node, pattern: str) -> None:
    if "pattern" not in node:
        node["pattern"] = pattern
    else:
        node["allOf"] = [*node.get("allOf", []), {"type": "string", "pattern": pattern}]
        if "type" not in node:  # restricts strings only
            node["allOf"][-1] = {"pattern": pattern}


def _side_by_side(node: Node, keys: Sequence[str]) -> None:
    """Move keywords next to the first of `keys`: llguidance reads related keywords only if they are adjacent."""
    there = [key for key in keys if key in node]
    moved = {key: node[key] for key in there}
    items = list(node.items())
    node.clear()
    for key, value in items:
        if key == there[0]:
            node.update(moved)
        elif key not in moved:
            node[key] = value


def _required_by_one(branches: list[Any]) -> list[Node] | None:
    """Rewrite the `oneOf` branches as `anyOf` branches that accept the objects that match exactly one of them. None: a
    branch has keywords other than `required` (and type object), or the result would have too many branches."""
    needed: list[set[str]] = []
    for branch in branches:
        if not isinstance(branch, dict) or not isinstance(branch.get("required"), list):
            return None
        rest = branch.keys() - {"required", "title", "description", "$comment"}
        if rest - {"type"} or branch.get("type", "object") != "object":
            return None
        needed.append(set(map(str, branch["required"])))
    made: list[Node] = []
    for own, branch in zip(needed, branches, strict=True):
        others = [sorted(other - own) for other in needed if other is not own]
        if math.prod(map(len, others)) + len(made) > MAX_CASES:
            return None
        for absent in itertools.product(*others):
            made.append({"type": "object", "required": branch["required"], "properties": dict.fromkeys(absent, False)})
    return made


def _resolved_node(root: Node, schema: Any) -> Any:
    """Return a schema, or its target if it is only a reference."""
    if isinstance(schema, dict) and schema.keys() == {"$ref"}:
        return resolved(root, schema["$ref"])
    return schema

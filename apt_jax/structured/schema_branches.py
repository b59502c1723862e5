"""Detects whether the branches of a `oneOf` exclude each other: no value satisfies two of them."""

import itertools
import json
import math
import urllib.parse
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeGuard

from apt_jax.structured.expressions import are_apart

Node: TypeAlias = dict[str, Any]

MAX_CASES = 64
"""Maximum number of alternatives per branch of `oneOf`."""
_MAX_COMPARISONS = 100_000
_ATOMS = {
    "null": {"null"}, "boolean": {"boolean"}, "integer": {"integer"}, "number": {"integer", "fraction"},
    "string": {"string"}, "array": {"array"}, "object": {"object"},
}  # fmt: skip
_ALL_ATOMS = frozenset().union(*_ATOMS.values())
_SIZES = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems"), "object": ("minProperties", "maxProperties")}  # fmt: skip
_MAX_DEPTH = 12


class Branches:
    """Detects whether schemas exclude each other: no value satisfies two of them.

    Here a schema is a list of alternatives, each of which is a list of nodes that a value must satisfy together.
    Unsupported keywords are ignored, as if they allowed every value: `overlap` may report schemas that exclude each
    other, but it finds all schemas that overlap.
    """

    def __init__(self, root: Node) -> None:
        self._root = root
        self._left = _MAX_COMPARISONS
        self._values: dict[int, dict[str, str]] = {}
        self._resolves = not any("$id" in part for part in _objects(root) if part is not root)

    def overlap(self, branches: list[Any]) -> tuple[int, int] | None:
        """Return the indices of two schemas that a value may satisfy together; None if no value satisfies two of
        them."""
        pairs = itertools.combinations(enumerate(branches), 2)
        return next(((i, j) for (i, a), (j, b) in pairs if not self._disjoint(a, b, _MAX_DEPTH)), None)

    def _disjoint(self, a: Any, b: Any, depth: int) -> bool:
        if depth == 0:
            return False
        for ours, theirs in itertools.product(self._alternatives(a, depth), self._alternatives(b, depth)):
            self._left -= 1
            if self._left < 0 or not self._exclude(ours, theirs, depth):
                return False
        return True

    def _alternatives(self, schema: Any, depth: int) -> list[list[Node]]:
        if not isinstance(schema, dict):
            return [] if schema is False else [[]]
        made: list[list[Node]] = [[schema]]
        self._left -= 1
        if depth == 0 or self._left < 0:
            return made
        further: list[list[list[Node]]] = []
        if self._resolves and "$ref" in schema:
            further.append(self._alternatives(resolved(self._root, schema["$ref"]), depth - 1))
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                members = [self._alternatives(member, depth - 1) for member in schema[key][:MAX_CASES]]
                if key == "allOf":
                    further += members
                elif len(schema[key]) <= MAX_CASES:
                    further.append([nodes for member in members for nodes in member])
        for options in further:
            if len(made) * len(options) <= MAX_CASES:
                made = [nodes + more for nodes in made for more in options]
        return made

    def _exclude(self, ours: list[Node], theirs: list[Node], depth: int) -> bool:
        nodes = ours + theirs
        atoms = set(_ALL_ATOMS)
        for node in nodes:
            if "type" in node:
                types = node["type"] if isinstance(node["type"], list) else [node["type"]]
                atoms &= set().union(*(_ATOMS.get(name, _ALL_ATOMS) for name in types if isinstance(name, str)))
        values = [found for node in nodes if (found := self._values_of(node)) is not None]
        if values:
            self._left -= sum(map(len, values)) // 8
            common = set(values[0]).intersection(*values[1:])
            atoms &= {values[0][value] for value in common}
        return all(self._impossible(atom, ours, theirs, depth) for atom in atoms)

    def _values_of(self, node: Node) -> dict[str, str] | None:
        """Return the types of the values that a node lists, keyed by the values in canonical form; None: it lists no
        values."""
        if "const" not in node and not isinstance(node.get("enum"), list):
            return None
        if id(node) not in self._values:
            values = [node["const"]] if "const" in node else node["enum"]
            self._values[id(node)] = {_canonical(value): _atom(value) for value in values}
        return self._values[id(node)]

    def _impossible(self, atom: str, ours: list[Node], theirs: list[Node], depth: int) -> bool:
        nodes = ours + theirs
        if atom in ("integer", "fraction"):
            low, high = _extreme(nodes, "minimum", max), _extreme(nodes, "maximum", min)
            over, under = _extreme(nodes, "exclusiveMinimum", max), _extreme(nodes, "exclusiveMaximum", min)
            return low > high or over >= min(high, under) or low >= under
        if atom in _SIZES:
            fewest, most = _SIZES[atom]
            if _extreme(nodes, fewest, max) > _extreme(nodes, most, min):
                return True
        if atom == "string":
            texts = [text for node in nodes if (text := _expression(node)) is not None]
            self._left -= sum(map(len, texts)) // 8
            return self._left > 0 and any(are_apart(a, b) for a, b in itertools.combinations(texts[:MAX_CASES], 2))
        if atom != "object":
            return False
        required = {str(name) for node in nodes if isinstance(node.get("required"), list) for name in node["required"]}
        return any(
            self._disjoint(_property(a, name), _property(b, name), depth - 1)
            for name in required
            for a, b in itertools.product(ours, theirs)
        )


_FORMAT_SHAPES = {
    "duration": "^P[0-9YMDTHSW.,]+$",
    "email": "@",
    "ipv4": "^[0-9.]+[.][0-9.]+$",
    "ipv6": "^[0-9a-fA-F.:]*:[0-9a-fA-F.:]*$",
    "uri": "^[a-zA-Z][a-zA-Z0-9+.-]*:",
    "uuid": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
}
"""Regular expressions that every string of a format matches; other strings may match too."""


def _expression(node: Node) -> str | None:
    """Return a regular expression that matches every string that satisfies a node; None: no such expression is
    known."""
    pattern = node.get("pattern")
    return pattern if isinstance(pattern, str) else _FORMAT_SHAPES.get(str(node.get("format")))


def _extreme(nodes: list[Node], key: str, of: Any) -> float:
    """Return the tightest bound that a keyword sets."""
    found = [node[key] for node in nodes if is_number(node.get(key))]
    return of(found) if found else -math.inf if of is max else math.inf


def _property(node: Node, name: str) -> Any:
    """Return a schema that the property called `name` must satisfy in objects that satisfy a node."""
    properties = node.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if "patternProperties" in node else node.get("additionalProperties", True)


def _atom(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _canonical(value: Any) -> str:
    """Return a string that is identical for equal JSON values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{json.dumps(key)}:{_canonical(item)}' for key, item in value.items()))}}}"
    return json.dumps(value)


def _objects(value: Any) -> Iterator[Node]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def resolved(root: Node, reference: Any) -> Any:
    """Return the target of a reference within the document; an empty schema if it is unknown."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return {}
    found: Any = root
    for part in filter(None, urllib.parse.unquote(reference[1:]).split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return {}
    return found


def is_number(value: Any) -> TypeGuard[float]:
    """Return True if a value is a number in JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)

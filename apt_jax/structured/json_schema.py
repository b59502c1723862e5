"""JSON schemas as llguidance enforces them to the letter: what it reads otherwise is rewritten, or rejected by name.

`exact_schema` walks over a schema, its definitions and whatever else it refers to, and changes a copy:

* `format`: an unknown one is an annotation and is left out; dates become expressions that know leap years.
* `oneOf` becomes `anyOf` if no value can satisfy two branches. Branches that only require properties are told apart
  by forbidding each other's.
* `patternProperties` whose expression matches a few names become `properties`: a comma is allowed only where one
  of them may still follow.
* `propertyNames` that are an expression or listed names become `patternProperties` or `properties`.
* Bounds and constants that llguidance would round.

`closed` takes out of a schema, before, what small models would not end: properties that it does not list.

`minProperties` that counts names which the schema does not list is rejected: nothing keeps them from being equal.
"""

import contextlib
import itertools
import json
import math
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias, TypeGuard

from apt_jax.structured.expressions import Part, are_apart, parsed

Node: TypeAlias = dict[str, Any]

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
"""No year 0 and no leap seconds, which most readers reject, and at most nanoseconds."""
_LABELS = r"(?:[a-zA-Z0-9]+-)*[a-zA-Z0-9]+"
_HOST_NAME = rf"^{_LABELS}(?:\.{_LABELS})*$"
"""Without labels that encode other characters (`xn--`): most combinations of letters there are not valid."""
_MAX_LENGTHS = {"hostname": 253, "email": 254}
FORMATS = frozenset({*_OWN_FORMATS, "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""The values of `format` that are enforced."""

_MAX_EXACT = 2**53
_GAP = 1e-9
"""Least distance from an exclusive bound that is a whole number: llguidance would allow the number itself."""
_MAX_NAMES = 64
"""Patterns that match no more names become properties."""
_MAX_NAME_CHARS = 128
"""A longer name is not listed."""
_MAX_CHARS = 400_000
"""Characters of names that are put together for one schema."""
_MAX_CASES = 64
"""Alternatives of one branch of `oneOf` that are looked at."""
_MAX_COMPARISONS = 100_000

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_MAYBE_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f]|\\[xucpPavN0]|\[\^|\[:")
_WRITABLE = r"^[^\x00-\x07\x0b\x0e-\x1f\x7f]*$"

OVERLAP = (
    "oneOf: its branches {} and {} may overlap; give each a required property with a const of its own, another type, separate "
    "ranges, lengths or beginnings (pattern), or required properties that the others exclude (additionalProperties: false), "
    "or use anyOf"
)


def exact_schema(schema: Mapping[str, Any] | bool, whitespace: Mapping[str, Any]) -> Node:
    """Return the schema that llguidance compiles, with its options in it.

    Args:
        schema: JSON values, nested no more deeply than validation allows.
        whitespace: options of llguidance for what stands between the parts of a value.

    Raises:
        ValueError: a keyword cannot be enforced exactly; one line for users, which names it.
    """
    root: Node = ({} if schema else {"enum": []}) if isinstance(schema, bool) else json.loads(json.dumps(schema))
    _Rewriter(root).run()
    # Names with escapes of characters that need none would not be recognised for the properties that they are.
    return {**root, "x-guidance": {**whitespace, "json_allowed_escapes": 'nrbtf\\"'}}


_Place: TypeAlias = "tuple[_Place, str | int] | None"
"""Where a schema is: the place above it, and a name or number there."""
_PLAIN_NAME = re.compile(r"[\w$-]{1,64}")
_MAX_PLACE_CHARS = 120


def _path(place: _Place) -> str:
    """A place as it is written, such as ``properties.a.oneOf[1]``; of a long one the end."""
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
    """Begin the text of a ValueError, which begins with a keyword, with the place of the schema that has the keyword."""
    try:
        yield
    except ValueError as error:
        path = _path(place)
        raise ValueError(f"{path}.{error}" if path else str(error)) from None


def closed(schema: Mapping[str, Any]) -> Node:
    """Return a schema that allows no more than the given one: objects whose properties are listed have no others, unless
    `additionalProperties` or `patternProperties` allow them, or one of the required ones is not listed. Small models
    would add properties without end.
    """
    branches = _Branches(dict(schema))

    def composed(value: Any) -> bool:
        if isinstance(value, list):
            return any(map(composed, value))
        if not isinstance(value, Mapping):
            return False
        choices = sum(key in value for key in _CHOICES)
        if choices > 1 or (choices and any(key in value for key in _OF_OBJECTS)):
            return True
        patterns = value.get("patternProperties")
        if isinstance(patterns, Mapping) and ("properties" in value or len(patterns) > 1):
            return True  # several schemas for one value
        if isinstance(value.get("oneOf"), list) and branches.overlap(value["oneOf"]) is not None:
            return True  # a value that one closed branch forbids may satisfy it as it was written
        named = [value[key].values() for key in _NAMED if isinstance(value.get(key), Mapping)]  # any names
        others = [item for key, item in value.items() if key not in _NAMED]
        return any(key in value for key in _COMPOSED) or any(map(composed, [*itertools.chain(*named), *others]))

    def close(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        made = dict(value)
        for key in _NAMED:
            if isinstance(made.get(key), Mapping):
                made[key] = {name: close(item) for name, item in made[key].items()}
        for key in ("additionalProperties", "items"):
            if key in made:
                made[key] = close(made[key])
        for key in ("anyOf", "oneOf", "prefixItems"):
            if isinstance(made.get(key), list):
                made[key] = [close(item) for item in made[key]]
        if isinstance(made.get("properties"), Mapping) and not made.keys() & {"additionalProperties", "const", "enum"}:
            names, required, fewest = made["properties"].keys(), made.get("required", []), made.get("minProperties", 0)
            suffices = isinstance(required, list) and isinstance(fewest, int | float) and fewest <= len(names)
            if suffices and names >= set(map(str, required)):
                made["additionalProperties"] = False
        return made

    # What is composed of several schemas that each close themselves would allow nothing.
    return dict(schema) if composed(schema) else close(schema)


class _Rewriter:
    """Rewrites the nodes of one schema in place."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._branches = _Branches(root)
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
        """Every schema that is an object, and where it is: those under keywords, and those that references name elsewhere."""
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
                referred.append((_resolved(self._root, node["$ref"]), (None, str(node["$ref"]))))
        return list(found.values())

    def _numbers(self, node: Node) -> None:
        for key in _COUNTS:
            if isinstance(node.get(key), float) and node[key].is_integer():
                node[key] = int(node[key])
        for key, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
            if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and key in node:  # draft 4
                node[exclusive] = node.pop(key)
            for name in (key, exclusive):
                if _is_number(node.get(name)):
                    node[name] = sign * _inner_bound(name, sign * node[name])
            bound = node.get(exclusive)
            if _is_number(bound) and bound == int(bound) and node.get("type") != "integer":
                inner = bound + sign * max(_GAP, abs(bound) * 1e-12)
                other = node.get(key)
                del node[exclusive]
                node[key] = sign * max(sign * inner, sign * other) if _is_number(other) else inner

    def _constants(self, node: Node) -> None:
        for key in ("const", "enum"):
            for part in _parts(node.get(key)):
                if _is_number(part) and abs(part) > _MAX_EXACT:
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
        overlap = self._branches.overlap(branches)
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
    """Take out keywords that say nothing where they are: llguidance rejects them."""
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
    """Return a schema of objects whose names satisfy the schema `names`; None: it is not so simple."""
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
    """llguidance computes the least common multiple of combined values in 32 bits, without a check."""
    nodes = [node for node, _ in places]
    together = [node for node in nodes if node.keys() & {"allOf", "anyOf", "oneOf", "$ref"}]
    if not any("allOf" in node or "multipleOf" in node for node in together):
        return
    multiples = {Fraction(str(node["multipleOf"])) for node in nodes if _is_number(node.get("multipleOf"))}
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
                f"{path}multipleOf: the values that may apply together are too large; give one, their common multiple"
            )


# --- numbers, texts and names -----------------------------------------------------------------------------------------


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _inner_bound(name: str, lower: float) -> float:
    """A lower bound, or a mirrored upper one, as a double that allows no more."""
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
        if "type" not in node:  # of texts alone
            node["allOf"][-1] = {"pattern": pattern}


def _side_by_side(node: Node, keys: Sequence[str]) -> None:
    """Move keywords to the place of the first of `keys`: llguidance reads those that belong together only there."""
    there = [key for key in keys if key in node]
    moved = {key: node[key] for key in there}
    items = list(node.items())
    node.clear()
    for key, value in items:
        if key == there[0]:
            node.update(moved)
        elif key not in moved:
            node[key] = value


_BEGIN, _END = "begin", "end"
_Text: TypeAlias = tuple[str, ...]
"""Characters and the two marks."""


class Names:
    """Lists the texts that expressions match; bounded in work over all of them."""

    def __init__(self) -> None:
        self._left = _MAX_CHARS

    def matched(self, pattern: str, most: int) -> frozenset[str] | None:
        """Return the texts that match an expression of JSON Schema; None: more than `most`, or it cannot be told.

        Raises:
            ValueError: the expressions are too large together.
        """
        try:
            parts = parsed(pattern)
            texts = None if parts is None else self._texts(parts, 4 * most + 16)
        except (re.error, RecursionError, OverflowError):
            return None
        found: set[str] = set()
        for text in texts or ():
            places = [place for place, part in enumerate(text) if part not in (_BEGIN, _END)]
            first, last = (places[0], places[-1] + 1) if places else (len(text), 0)
            inside = _END in text[:first] or _BEGIN in text[last:] or len(places) < last - first
            if places and inside:
                continue  # no text has its beginning or its end inside
            if _BEGIN not in text[:first] or _END not in text[last:]:
                return None
            found.add("".join(text[place] for place in places))
        return None if texts is None or len(found) > most else frozenset(found)

    def _texts(self, tree: Iterable[Part], most: int) -> set[_Text] | None:
        """Return the texts that a parsed expression matches; None: more than `most`, or unsupported parts."""
        made: set[_Text] = {()}
        for operator, argument in tree:
            parts: set[_Text] | None = None
            name = operator.name
            if name == "LITERAL":
                parts = {(chr(argument),)}
            elif name == "IN":
                parts = _characters(argument, most)
            elif name == "BRANCH":
                branches = [self._texts(branch, most) for branch in argument[1]]
                parts = None if None in branches else set().union(*filter(None, branches))
            elif name == "SUBPATTERN" and not argument[1] and not argument[2]:
                parts = self._texts(argument[3], most)
            elif name in ("MAX_REPEAT", "MIN_REPEAT") and argument[1] <= most:
                once = self._texts(argument[2], most)
                parts = None if once is None else self._repeated(once, argument[0], argument[1], most)
            elif name == "AT" and argument.name in ("AT_BEGINNING", "AT_END"):
                parts = {(_BEGIN if argument.name == "AT_BEGINNING" else _END,)}
            made = self._joined(made, parts or set(), most)
            if parts is None or not made:
                return None
        return made

    def _joined(self, before: set[_Text], after: set[_Text], most: int) -> set[_Text]:
        """Return each text of `before` with each of `after` behind it; none: more than `most`, or too long."""
        longest = max(map(len, before), default=0) + max(map(len, after), default=0)
        if len(before) * len(after) > most or longest > _MAX_NAME_CHARS:
            return set()
        self._left -= len(before) * len(after) * longest
        if self._left < 0:
            raise ValueError("patternProperties: the expressions match too many names; list the names in properties")
        return {first + second for first in before for second in after}

    def _repeated(self, once: set[_Text], fewest: int, longest: int, most: int) -> set[_Text] | None:
        found: set[_Text] = set()
        texts: set[_Text] = {()}
        for count in range(longest + 1):
            found |= texts if count >= fewest else set()
            if count < longest:
                texts = self._joined(texts, once, most)
            if not texts or len(found) > most:
                return None
        return found


def _characters(items: Iterable[Part], most: int) -> set[_Text] | None:
    found: set[_Text] = set()
    for operator, argument in items:
        if operator.name == "LITERAL":
            found.add((chr(argument),))
        elif operator.name == "RANGE" and argument[1] - argument[0] < most:
            found |= {(chr(code),) for code in range(argument[0], argument[1] + 1)}
        elif operator.name == "CATEGORY" and argument.name == "CATEGORY_DIGIT":
            found |= {(digit,) for digit in "0123456789"}
        else:
            return None
    return found


# --- branches of oneOf ------------------------------------------------------------------------------------------------

_ATOMS = {
    "null": {"null"}, "boolean": {"boolean"}, "integer": {"integer"}, "number": {"integer", "fraction"},
    "string": {"string"}, "array": {"array"}, "object": {"object"},
}  # fmt: skip
_ALL_ATOMS = frozenset().union(*_ATOMS.values())
_SIZES = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems"), "object": ("minProperties", "maxProperties")}  # fmt: skip
_MAX_DEPTH = 12


def _required_by_one(branches: list[Any]) -> list[Node] | None:
    """Return branches that together allow the values of exactly one of `branches`, all of which only require
    properties; None: they do more, or there would be too many."""
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
        if math.prod(map(len, others)) + len(made) > _MAX_CASES:
            return None
        for absent in itertools.product(*others):
            made.append({"type": "object", "required": branch["required"], "properties": dict.fromkeys(absent, False)})
    return made


class _Branches:
    """Tells which schemas no value satisfies together.

    A schema is seen as alternatives, each of which is a list of nodes that a value satisfies all at once. What is not
    understood is left out, which allows more: `overlap` may miss a difference and never invents one.
    """

    def __init__(self, root: Node) -> None:
        self._root = root
        self._left = _MAX_COMPARISONS
        self._values: dict[int, dict[str, str]] = {}
        self._resolves = not any("$id" in part for part in _objects(root) if part is not root)

    def overlap(self, branches: list[Any]) -> tuple[int, int] | None:
        """Return the numbers of two schemas that a value may satisfy together; None: no value satisfies two of them."""
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
            further.append(self._alternatives(_resolved(self._root, schema["$ref"]), depth - 1))
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                members = [self._alternatives(member, depth - 1) for member in schema[key][:_MAX_CASES]]
                if key == "allOf":
                    further += members
                elif len(schema[key]) <= _MAX_CASES:
                    further.append([nodes for member in members for nodes in member])
        for options in further:
            if len(made) * len(options) <= _MAX_CASES:
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
        """Return the values that a node lists, in a form that is the same for equal ones, with their kinds."""
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
            return self._left > 0 and any(are_apart(a, b) for a, b in itertools.combinations(texts[:_MAX_CASES], 2))
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
"""Expressions that at least all texts of a format match."""


def _expression(node: Node) -> str | None:
    """An expression that each text that satisfies a node matches; None: any text."""
    pattern = node.get("pattern")
    return pattern if isinstance(pattern, str) else _FORMAT_SHAPES.get(str(node.get("format")))


def _extreme(nodes: list[Node], key: str, of: Any) -> float:
    """The tightest bound under a keyword."""
    found = [node[key] for node in nodes if _is_number(node.get(key))]
    return of(found) if found else -math.inf if of is max else math.inf


def _property(node: Node, name: str) -> Any:
    """A schema that a property with this name satisfies."""
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
    """A text that is the same for equal JSON values."""
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


def _resolved_node(root: Node, schema: Any) -> Any:
    """A schema, or the target of a schema that is only a reference."""
    if isinstance(schema, dict) and schema.keys() == {"$ref"}:
        return _resolved(root, schema["$ref"])
    return schema


def _resolved(root: Node, reference: Any) -> Any:
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

"""Random JSON schemas whose outputs end: every string, array and number is bounded. No dependency but NumPy."""

from typing import Any

import numpy as np

_WORDS = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "ö",
    "two words",
    "",
    'quote"d',
    "back\\slash",
    "line\nbreak",
)
_PATTERNS = (r"^[a-z]{1,6}$", r"^\d{2}-\d{2}$", r"^(yes|no|maybe)$", r"^[A-F0-9]{4}$", "^x")
_FORMATS = ("date", "uuid", "ipv4")  # a time may have any number of digits
_NAMES = ("id", "name", "kind", "size", "tags", "on", "note", "at", "ref", "é")


class SchemaMaker:
    """Makes schemas from a seed.

    Args:
        rng: of the draws.
        max_depth: of nested objects and arrays.
    """

    def __init__(self, rng: np.random.Generator, max_depth: int = 3) -> None:
        self._rng, self._max_depth = rng, max_depth
        self._definitions: dict[str, Any] = {}

    def make(self) -> dict[str, Any]:
        """A schema, mostly of an object."""
        self._definitions = {}
        schema = self._object(0) if self._chance(0.8) else self._any(0)
        if self._definitions:
            schema = {**schema, "$defs": self._definitions}
        return schema

    def _chance(self, p: float) -> bool:
        return bool(self._rng.random() < p)

    def _pick(self, items: Any) -> Any:
        return items[int(self._rng.integers(len(items)))]

    def _integer(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))

    def _any(self, depth: int) -> dict[str, Any]:
        kinds = [self._string, self._number, self._enum, self._const, self._plain]
        if depth < self._max_depth:
            kinds += [self._object, self._array, self._any_of, self._reference]
        return self._pick(kinds)(depth)

    def _string(self, _: int) -> dict[str, Any]:
        kind = self._integer(0, 3)
        if kind == 0:
            pattern = self._pick(_PATTERNS)
            return {
                "type": "string",
                "pattern": pattern,
                **({"maxLength": 8} if pattern == "^x" else {}),
            }
        if kind == 1:
            return {"type": "string", "format": self._pick(_FORMATS)}
        low = self._integer(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self._integer(0, 12)}

    def _number(self, _: int) -> dict[str, Any]:
        low = self._integer(-1000, 1000)
        high = low + self._integer(0, 5000)
        if self._chance(0.3):
            return {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
        if self._chance(0.3):
            return {
                "type": "integer",
                "minimum": low,
                "maximum": high + 9,
                "multipleOf": self._pick((2, 5)),
            }
        return {"type": "integer", "minimum": low, "maximum": high}

    def _enum(self, _: int) -> dict[str, Any]:
        values = [*_WORDS[: self._integer(1, len(_WORDS))], 7, -1.5, None, True, [1, "a"], {"k": 1}]
        count = self._integer(1, 5)
        places = self._rng.permutation(len(values))[:count]
        return {"enum": [values[i] for i in places]}

    def _const(self, _: int) -> dict[str, Any]:
        return {"const": self._pick((*_WORDS, 3, False, None, {"a": [1]}))}

    def _plain(self, _: int) -> dict[str, Any]:
        return {"type": self._pick(("boolean", "null", ["boolean", "null"]))}

    def _object(self, depth: int) -> dict[str, Any]:
        names = [_NAMES[i] for i in self._rng.permutation(len(_NAMES))[: self._integer(1, 4)]]
        required = [name for name in names if self._chance(0.7)]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
            "required": required,
            "additionalProperties": False,
        }
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._integer(0, 2)
        if self._chance(0.2):
            items = [self._any(depth + 1) for _ in range(self._integer(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        high = low + self._integer(0, 2)
        return {"type": "array", "items": self._any(depth + 1), "minItems": low, "maxItems": high}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth + 1) for _ in range(self._integer(2, 3))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        if not self._definitions or self._chance(0.5):
            name = f"d{len(self._definitions)}"
            self._definitions[name] = {}  # its place; no definition refers to itself
            self._definitions[name] = self._any(max(depth + 1, self._max_depth))
        else:
            name = self._pick(tuple(self._definitions))
        return {"$ref": f"#/$defs/{name}"}

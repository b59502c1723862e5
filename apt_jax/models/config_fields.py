"""Typed, checked access to the fields of a Hugging Face ``config.json``."""

from collections.abc import Mapping
from typing import Any, TypeVar

from apt_jax.errors import ModelLoadError

_T = TypeVar("_T")

_REQUIRED = object()
_MAX_SIZE = 2**31 - 1  # sizes are used as int32 on the device
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 1024),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), 8192),
    "head_dim": 8192,
}
"""Upper limits of sizes for which the host creates one object per layer, head or lane; published models are far below
them."""


def shown(value: object, most: int = 80) -> str:
    """Return a value of a configuration as text for messages, of about `most` characters. A longer list or object is cut
    between its elements, and an element or another value within."""
    text = repr(value)
    if len(text) <= most:
        return text
    if not isinstance(value, list | tuple | Mapping):
        return f"{text[:most]}..."
    is_object = isinstance(value, Mapping)
    parts = [f"{key!r}: {one!r}" for key, one in value.items()] if is_object else [repr(one) for one in value]
    kept, size = list[str](), 0
    for part in parts:
        size += len(part) + 2
        if kept and size > most:
            break
        kept.append(part if len(part) <= most else f"{part[:most]}...")
    return f"{text[0]}{', '.join(kept)}{', ...' * (len(kept) < len(parts))}{text[-1]}"


class ConfigFields:
    """Reader of the fields of one configuration. If a field is invalid, its method raises a `ModelLoadError` that names
    the field and its value.

    JSON does not distinguish integers from floats, and in Python `True` equals 1, so types are checked strictly:
    ``768.0`` and ``true`` are not accepted as sizes.

    Args:
        fields: the JSON object.
        where: text before a field's name in messages.
    """

    def __init__(self, fields: Mapping[str, Any], where: str = "config.json: ") -> None:
        self._fields, self._where = fields, where

    def _value(self, name: str, default: Any) -> Any:
        value = self._fields.get(name, default)
        if value is _REQUIRED:
            raise ModelLoadError(f"{self._where}{name} is missing")
        return default if value is None and default is not _REQUIRED else value

    def positive(self, name: str, default: Any = _REQUIRED) -> int:
        """Return an integer from 1 to 2**31 - 1, or to the field's own limit in `_MOST`."""
        value, most = self._value(name, default), _MOST.get(name, _MAX_SIZE)
        if type(value) is not int or not 0 < value <= most:
            raise ModelLoadError(f"{self._where}{name}={shown(value, 60)} must be an integer in [1, {most}]")
        return value

    def named(self, *names: str) -> str:
        """Return the name that the configuration uses for a field with several names; the first name if the field is
        absent."""
        present = [name for name in names if self._fields.get(name) is not None]
        if any(self._fields[name] != self._fields[present[0]] for name in present):
            values = ", ".join(f"{name}={shown(self._fields[name], 40)}" for name in present)
            raise ModelLoadError(f"{self._where}{values} are the same field and differ")
        return present[0] if present else names[0]

    def number(self, name: str, default: Any = _REQUIRED, *, at_least: float | None = None) -> float:
        """Return a finite number (integer or float) as a float."""
        value = self._value(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) < 1e30 or (at_least is not None and value < at_least):
            least = "" if at_least is None else f" of at least {at_least:g}"
            raise ModelLoadError(f"{self._where}{name}={shown(value, 60)} must be a finite number{least}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a positive number, or None if the field is absent or null."""
        if self._fields.get(name) is None:
            return None
        value = self.number(name)
        if value <= 0:
            raise ModelLoadError(f"{self._where}{name}={shown(value, 60)} must be a positive number")
        return value

    def optional_positive(self, name: str) -> int | None:
        """Return a positive integer, or None if the field is absent or null."""
        return None if self._fields.get(name) is None else self.positive(name)

    def choice(self, name: str, default: str, known: Mapping[str, _T]) -> _T:
        """Return the entry of `known` for the field's value, a string."""
        value = self.text(name, default)
        if value not in known:
            raise ModelLoadError(
                f"{self._where}{name}={shown(value, 60)} is not supported; only {', '.join(map(repr, known))}"
            )
        return known[value]

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self._where}{name}={shown(value, 60)} must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise ModelLoadError(f"{self._where}{name}={shown(value, 60)} must be a string")
        return value

    def token_ids(self, name: str, default: int | None, vocab_size: int, file: str = "config.json") -> tuple[int, ...]:
        """Return a field that holds null, one token id or a list of token ids, as a tuple. Ids of at least `vocab_size`
        are left out, because no output can contain them."""
        if name not in self._fields:
            return (default,) if default is not None and default < vocab_size else ()
        value = self._fields[name]
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ModelLoadError(f"{file}: {name}={shown(value, 60)} must be token ids of at least 0")
        return tuple(i for i in ids if i < vocab_size)

    def attention_sizes(
        self, width: str, heads: str, default_width: Any = _REQUIRED, default_heads: Any = _REQUIRED
    ) -> tuple[int, int, int]:
        """Return model width, number of heads and head width, given the names of the fields for the first two."""
        size, count = self.positive(width, default_width), self.positive(heads, default_heads)
        if size % count:
            raise ModelLoadError(f"{self._where}{width}={size} must be a multiple of {heads}={count}")
        return size, count, size // count

    def special_ids(self, vocab_size: int, bos: int | None, eos: int | None, pad: int | None) -> dict[str, Any]:
        """Return the begin-of-sequence, end-of-sequence and padding ids as arguments of `ModelConfig`; `bos`, `eos` and
        `pad` are the family's defaults."""
        return {
            "bos_token_id": self.label_id("bos_token_id", bos, vocab_size),
            "eos_token_id": self.token_id("eos_token_id", eos, vocab_size),
            "pad_token_id": self.label_id("pad_token_id", pad, vocab_size),
        }

    def label_id(self, name: str, default: int | None, vocab_size: int) -> int | None:
        """Return a token id; None if it is null or outside the vocabulary: some models write -1 for a token that they
        do not use."""
        value = self._fields.get(name, default)
        if value is not None and type(value) is not int:
            raise ModelLoadError(f"{self._where}{name}={shown(value, 60)} must be a token id")
        return value if value is not None and 0 <= value < vocab_size else None

    def token_id(self, name: str, default: int | None, vocab_size: int) -> int | None:
        """Return the first id from `token_ids`; None if it returns no id."""
        ids = self.token_ids(name, default, vocab_size)
        return ids[0] if ids else None


__all__ = ["ConfigFields", "shown"]

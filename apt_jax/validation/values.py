"""Checks of single values: numbers, flags, strings. Values are not coerced: neither ``True`` nor ``"2"`` is a
number."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.validation.limits import MAX_GRAMMAR_BYTES, MIN_POSITIVE, FieldSpec


def shown(value: object) -> str:
    """Return a value as short text for messages; safe for values that are long or slow to print."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:37]!r}..."
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float | np.generic):
        return repr(value)
    if isinstance(value, int) and abs(value) < 10**20:
        return str(value)
    return json_kind(value)


def described(value: object) -> str:
    """Return a value as text for messages about a wrong type; strings are followed by their type."""
    return f"{shown(value)} ({json_kind(value)})" if isinstance(value, str) else shown(value)


def check_field(spec: FieldSpec, value: object) -> Any:
    """Check and return the value of a numeric field: a number in the field's range, an integer if its type is integer.

    Raises:
        InvalidRequestError: `value` is not such a number.
    """
    assert spec.min is not None
    assert spec.max is not None
    if spec.type == "integer":
        return check_integer(spec.name, value, int(spec.min), int(spec.max), spec.must)
    number = check_number(spec.name, value, signed=spec.min < 0)
    inside = spec.min < number <= spec.max if spec.open_min else spec.min <= number <= spec.max
    if not inside:
        raise InvalidRequestError(spec.name, f"{number} must {spec.must}")
    return number + 0.0  # -0.0 becomes 0.0


def check_integer(field: str, value: object, low: int, high: int, rule: str | None = None) -> int:
    """Check and return an integer in [low, high]; `rule` ends the message "VALUE must ...".

    Raises:
        InvalidRequestError: `value` is not such an integer.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise InvalidRequestError(field, f"{described(value)} is not an integer")
    number = int(value)
    if not low <= number <= high:
        text = shown(number) if abs(number) < 10**20 else "a number of more than 20 digits"
        raise InvalidRequestError(field, f"{text} must {rule or f'be an integer in [{low}, {high}]'}")
    return number


def check_number(field: str, value: object, *, signed: bool = True) -> float:
    """Check and return a finite number whose magnitude is 0 or at least that of the smallest normal float32. Unless
    `signed`, negative numbers and -0.0 are rejected.

    Raises:
        InvalidRequestError: `value` is not such a number.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidRequestError(field, f"{described(value)} is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise InvalidRequestError(field, "the number is too large") from None
    if not math.isfinite(number):
        raise InvalidRequestError(field, f"{number} must be a finite number")
    if number != 0.0 and abs(number) < MIN_POSITIVE:
        raise InvalidRequestError(field, f"{number!r} is too close to 0 for a 32-bit number; give 0 if that is meant")
    if not signed and math.copysign(1.0, number) < 0:
        raise InvalidRequestError(field, f"{number} must not be negative")
    return number


def check_flag(field: str, value: object) -> bool:
    """Check and return a boolean.

    Raises:
        InvalidRequestError: `value` is not true or false.
    """
    if not isinstance(value, bool | np.bool_):
        raise InvalidRequestError(field, f"{described(value)} is not true or false")
    return bool(value)


def check_text(field: str, value: object) -> str:
    """Check and return a string that is not empty and can be encoded as UTF-8.

    Raises:
        InvalidRequestError: `value` is not such a string.
    """
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"{json_kind(value)} is not text")
    if not value:
        raise InvalidRequestError(field, "must not be empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(field, f"not valid Unicode: a lone surrogate at character {error.start}") from None
    return value


def check_bounded_text(field: str, value: object, max_bytes: int = MAX_GRAMMAR_BYTES) -> str:
    """Check and return a string of at most `max_bytes` bytes in UTF-8.

    Raises:
        InvalidRequestError: `value` is not such a string.
    """
    if isinstance(value, str) and len(value) > max_bytes:  # before it is copied
        raise InvalidRequestError(field, f"{len(value)} characters, at most {max_bytes} bytes are allowed")
    text = check_text(field, value)
    size = len(text.encode())
    if size > max_bytes:
        raise InvalidRequestError(field, f"{size} bytes, at most {max_bytes} are allowed")
    return text


def check_mapping(field: str, value: object) -> Mapping[str, object]:
    """Check and return an object of named values.

    Raises:
        InvalidRequestError: `value` is not an object.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequestError(field, f"{described(value)} is not an object")
    return value


def check_token_id(field: str, value: object, vocab_size: int) -> int:
    """Check and return a token id of the vocabulary.

    Raises:
        InvalidRequestError: `value` is not a token id of the vocabulary.
    """
    rule = f"be a token id in [0, {vocab_size}), the vocabulary"
    return check_integer(field, value, 0, vocab_size - 1, rule)

"""Variables that a request passes to the chat template, such as ``enable_thinking``."""

import json
import re
from collections.abc import Mapping
from typing import Any

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.text.json_values import plain_json

FIELD = "chat_template_kwargs"
MAX_KWARGS = 64
_MAX_CHARS = 2**14
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
RESERVED = frozenset(
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "return_dict",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "sep_token",
        "cls_token",
        "mask_token",
        "additional_special_tokens",
        "raise_exception",
        "strftime_now",
        "namespace",
        "range",
        "dict",
        "lipsum",
        "cycler",
        "joiner",
        "loop",
        "self",
        "true",
        "false",
        "none",
        "True",
        "False",
        "None",
    ]
)
"""Names that requests cannot set: fields of the request, the model's tokens, and functions of templates."""


def checked_template_kwargs(value: object) -> dict[str, Any]:
    """Check and return the variables as plain JSON values.

    Raises:
        InvalidRequestError: the value is not an object, has too many or too large values, or uses a reserved name.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError(FIELD, f"{json_kind(value)} is not an object of named values")
    if len(value) > MAX_KWARGS:
        raise InvalidRequestError(FIELD, f"{len(value)} values; at most {MAX_KWARGS}")
    for name in value:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequestError(FIELD, f"{name!r:.40} is not a name of letters, digits and underscores")
        if name in RESERVED:
            raise InvalidRequestError(FIELD, f"{name!r} cannot be set by requests")
    checked = plain_json(FIELD, value)
    if len(json.dumps(checked)) > _MAX_CHARS:
        raise InvalidRequestError(FIELD, f"more than {_MAX_CHARS >> 10} KiB of JSON")
    return checked

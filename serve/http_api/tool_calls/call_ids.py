"""Ids of tool calls."""

import secrets
import string
import uuid

_LETTERS = string.ascii_letters + string.digits


def new_call_id(alphanumeric: bool = False) -> str:
    """Return a random id for a tool call: ``call_...`` like OpenAI's ids, or nine letters and digits if `alphanumeric`,
    as Mistral's chat templates require."""
    if alphanumeric:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"call_{uuid.uuid4().hex[:24]}"

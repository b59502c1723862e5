"""Ids of calls."""

import secrets
import string
import uuid

_LETTERS = string.ascii_letters + string.digits


def new_call_id(alphanumeric: bool = False) -> str:
    """An id that no other call has: ``call_...`` as OpenAI's, or nine letters and digits, all that Mistral's templates
    take."""
    if alphanumeric:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"call_{uuid.uuid4().hex[:24]}"

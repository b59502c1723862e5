"""The endpoints ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from collections.abc import Sequence
from typing import Any

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.text.tokenizer import special_token
from apt_jax.validation import check_flag, check_text, check_text_length, check_token_ids
from serve.compact_json import json_bytes
from serve.http_api.errors import BadCallError
from serve.http_api.openai_request import (
    Body,
    check_model,
    flag,
    template_options,
    tools_of,
)
from serve.http_api.tool_calls.other_forms import with_tools
from serve.http_api.unsupported_fields import reject_unsupported
from serve.tokenizer_settings import tokenizer_settings

_SLICE = 4096
"""Values that are encoded at a time: the encoder holds the interpreter's lock."""


def tokenize(parts: EngineComponents, body: Body) -> bytes:
    """Tokenize a text, or a conversation by the chat template. Returns the body of the answer.

    Raises:
        InvalidRequestError, UnknownModelError: as for `read_call`.
    """
    check_model(parts, body)
    tokenizer = parts.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("prompt", "this model has no tokenizer")
    if body.get("messages") is not None:
        reject_unsupported(body)
        if flag(body, "add_special_tokens"):
            raise InvalidRequestError(
                "add_special_tokens", "can only be false for messages: the chat template adds them"
            )
        body = with_tools(body)
        ids = parts.chat_prompt(body["messages"], tools=tools_of(body), **template_options(body))
    else:
        text = body.get("prompt")
        if text is None:
            hint = "; llama.cpp's 'content' is 'prompt' here" if body.get("content") is not None else ""
            raise InvalidRequestError("prompt", f"missing; give prompt, a text, or messages{hint}")
        special = body.get("add_special_tokens")
        special = True if special is None else check_flag("add_special_tokens", special)
        if text == "":
            ids = []
        else:
            text = check_text("prompt", text)
            check_text_length(parts.limits, tokenizer, text)
            token_id = tokenizer.special_id(text)
            # Who sends a special token alone asks for its id, as lm-eval does.
            ids = tokenizer.encode(text, add_special_tokens=special) if token_id is None else [token_id]
    strings = b"null"
    if flag(body, "return_token_strs"):
        strings = _array([tokenizer.backend.id_to_token(token_id) or "" for token_id in ids])
    counts = json_bytes({"count": len(ids), "max_model_len": parts.limits.max_model_len})
    return b'%s,"tokens":%s,"token_strs":%s}' % (counts[:-1], _array(ids), strings)


def _array(values: Sequence[Any]) -> bytes:
    """A JSON array."""
    slices = (json_bytes(values[start : start + _SLICE])[1:-1] for start in range(0, len(values), _SLICE))
    return b"[%s]" % b",".join(slices)


def tokenizer_info(parts: EngineComponents) -> bytes:
    """Settings of the tokenizer, as vLLM gives them; special tokens by their text. Returns the body of the answer.

    Raises:
        BadCallError: the model has no tokenizer.
    """
    settings = tokenizer_settings(parts)
    if settings is None:
        raise BadCallError(404, "no_tokenizer", "this model has no tokenizer")
    texts = {name: special_token(settings, name) for name in settings if name.endswith("_token")}
    return json_bytes(settings | {name: text for name, text in texts.items() if text is not None})


def detokenize(parts: EngineComponents, body: Body) -> bytes:
    """Decode token ids, as many as prompt and output can have. Returns the body of the answer.

    Raises:
        InvalidRequestError, UnknownModelError: as for `read_call`.
    """
    check_model(parts, body)
    if parts.tokenizer is None:
        raise InvalidRequestError("tokens", "this model has no tokenizer")
    ids = check_token_ids(parts.limits, "tokens", body.get("tokens"), parts.limits.max_model_len)
    return json_bytes({"prompt": parts.tokenizer.decode(ids, skip_special_tokens=False)})

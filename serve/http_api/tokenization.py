"""The endpoints ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.text.tokenizer import special_token
from apt_jax.validation import MAX_INTEGER, check_text, check_text_length, check_token_ids
from serve.compact_json import json_bytes
from serve.http_api.errors import BadCallError
from serve.http_api.openai_bodies import ConversationBody, Model
from serve.http_api.openai_request import Body, check_model, conversation_ids
from serve.http_api.records import Flag, Record, Refused, read, shaped
from serve.http_api.tool_calls.other_forms import with_tools
from serve.http_api.unsupported_fields import REFUSED
from serve.tokenizer_settings import tokenizer_settings

MISSING = "missing; give a text as prompt, or messages"


class TokenizeBody(Record):
    """Body of ``/tokenize`` with a text."""

    needed: ClassVar = {"prompt": MISSING}
    model: Model = None
    prompt: str = ""
    messages: None = None
    add_special_tokens: Flag = None
    return_token_strs: Flag = None


class TokenizeConversation(ConversationBody):
    refused: ClassVar = {name: refused._replace(text=None) for name, refused in REFUSED.items()} | {
        "add_special_tokens": Refused((False,), "can only be false for messages: the chat template adds them")
    }
    return_token_strs: Flag = None


class DetokenizeBody(Record, kw_only=True):
    model: Model = None
    tokens: Annotated[
        Any,
        shaped(
            lambda facts: {
                "type": "array",
                "items": facts.token,
                "maxItems": MAX_INTEGER if facts.limits is None else facts.limits.max_model_len,
            }
        ),
    ]


_SLICE = 4096
"""Number of values to encode at a time; limited because the encoder holds the GIL."""


def tokenize(parts: EngineComponents, body: Body) -> bytes:
    """Tokenize a text, or a conversation rendered with the chat template. Returns the response body.

    Raises:
        InvalidRequestError: the body is invalid, or the model has no tokenizer.
        UnknownModelError: the body names a model that the server does not serve.
    """
    check_model(parts, body.get("model"))
    tokenizer = parts.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("prompt", "this model has no tokenizer")
    if body.get("messages") is not None:
        conversation = read(TokenizeConversation, with_tools(body))
        ids, shows_texts = conversation_ids(parts, conversation), conversation.return_token_strs
    else:
        if body.get("prompt") is None and body.get("content") is not None:
            raise InvalidRequestError("prompt", f"{MISSING}; llama.cpp's 'content' is 'prompt' here")
        asked = read(TokenizeBody, body)
        text, shows_texts = asked.prompt, asked.return_token_strs
        if text == "":
            ids = []
        else:
            text = check_text("prompt", text)
            check_text_length(parts.limits, tokenizer, text)
            token_id = tokenizer.special_id(text)
            # If the whole text is a special token, return its id: lm-eval looks up token ids this way.
            special = asked.add_special_tokens is not False
            ids = tokenizer.encode(text, add_special_tokens=special) if token_id is None else [token_id]
    strings = b"null"
    if shows_texts:
        strings = _array([tokenizer.backend.id_to_token(token_id) or "" for token_id in ids])
    counts = json_bytes({"count": len(ids), "max_model_len": parts.limits.max_model_len})
    return b'%s,"tokens":%s,"token_strs":%s}' % (counts[:-1], _array(ids), strings)


def _array(values: Sequence[Any]) -> bytes:
    """Return a sequence as an encoded JSON array."""
    slices = (json_bytes(values[start : start + _SLICE])[1:-1] for start in range(0, len(values), _SLICE))
    return b"[%s]" % b",".join(slices)


def tokenizer_info(parts: EngineComponents) -> bytes:
    """Return the response body with the tokenizer's settings in vLLM's format; special tokens are given as text.

    Raises:
        BadCallError: the model has no tokenizer.
    """
    settings = tokenizer_settings(parts)
    if settings is None:
        raise BadCallError(404, "no_tokenizer", "this model has no tokenizer")
    texts = {name: special_token(settings, name) for name in settings if name.endswith("_token")}
    return json_bytes(settings | {name: text for name, text in texts.items() if text is not None})


def detokenize(parts: EngineComponents, body: Body) -> bytes:
    """Decode at most `max_model_len` token ids. Returns the response body.

    Raises:
        InvalidRequestError: the body is invalid, or the model has no tokenizer.
        UnknownModelError: the body names a model that the server does not serve.
    """
    check_model(parts, body.get("model"))
    if parts.tokenizer is None:
        raise InvalidRequestError("tokens", "this model has no tokenizer")
    ids = check_token_ids(parts.limits, "tokens", read(DetokenizeBody, body).tokens, parts.limits.max_model_len)
    return json_bytes({"prompt": parts.tokenizer.decode(ids, skip_special_tokens=False)})

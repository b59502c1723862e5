"""The endpoints ``/tokenize`` and ``/detokenize``."""

from typing import Any

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.validation import check_flag, check_text, check_token_ids
from serve.http_api.openai_request import (
    MAX_DETOKENIZE,
    Body,
    check_model,
    flag,
    generation_prompt,
    tools_of,
)


def tokenize(parts: EngineComponents, body: Body) -> dict[str, Any]:
    """Tokenize a text, or a conversation by the chat template.

    Raises:
        InvalidRequestError, UnknownModelError: as for `read_call`.
    """
    check_model(parts, body)
    tokenizer = parts.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("prompt", "this model has no tokenizer")
    if body.get("messages") is not None:
        ids = parts.chat_prompt(body["messages"], tools=tools_of(body), add_generation_prompt=generation_prompt(body))
    else:
        text = body.get("prompt")
        special = body.get("add_special_tokens")
        special = True if special is None else check_flag("add_special_tokens", special)
        ids = [] if text == "" else tokenizer.encode(check_text("prompt", text), add_special_tokens=special)
    strings = None
    if flag(body, "return_token_strs"):
        strings = [tokenizer.backend.id_to_token(token_id) or "" for token_id in ids]
    return {
        "count": len(ids),
        "max_model_len": parts.limits.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


def detokenize(parts: EngineComponents, body: Body) -> dict[str, Any]:
    """Decode token ids.

    Raises:
        InvalidRequestError, UnknownModelError: as for `read_call`.
    """
    check_model(parts, body)
    if parts.tokenizer is None:
        raise InvalidRequestError("tokens", "this model has no tokenizer")
    ids = check_token_ids(parts.limits, "tokens", body.get("tokens"), MAX_DETOKENIZE)
    return {"prompt": parts.tokenizer.decode(ids, skip_special_tokens=False)}

"""Validation of prompts: text or token ids become a read-only array, and the lengths of prompt and output are
checked."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.errors import InvalidRequestError, counted, json_kind
from apt_jax.request import SamplingParams
from apt_jax.validation.limits import TOO_LONG, Encoder, RequestLimits
from apt_jax.validation.values import check_text, check_token_id

MAX_CHARS_PER_TOKEN = 256
"""Upper bound on the number of characters per token: even the longest tokens, runs of spaces, are shorter."""


def checked_prompt(
    limits: RequestLimits,
    tokenizer: Encoder | None,
    prompt: object,
    prompt_token_ids: object,
    keep_last: int | None = None,
) -> NDArray[np.int32]:
    """Return the prompt's token ids, read-only.

    Args:
        limits: limits of the engine.
        tokenizer: tokenizer of the model; None: only token ids are accepted.
        prompt, prompt_token_ids: text or token ids of the prompt; exactly one is given.
        keep_last: number of tokens to keep at the end of the prompt; None: keep all.

    Raises:
        InvalidRequestError: the prompt is missing, given twice, empty or too long, or a token is not in the vocabulary.
    """
    if prompt is not None and prompt_token_ids is not None:
        raise InvalidRequestError("prompt", "give either text or token ids, not both")
    if prompt_token_ids is not None:
        return _prompt_from_ids(limits, prompt_token_ids, keep_last)
    if prompt is None:
        raise InvalidRequestError("prompt", "missing; give text or token ids")
    text = check_text("prompt", prompt)
    if tokenizer is None:
        raise InvalidRequestError(
            "prompt",
            "this model has no tokenizer; send token ids, or start with one (--tokenizer DIR)",
        )
    check_text_length(limits, tokenizer, text, truncated=keep_last is not None)
    ids = tokenizer.encode(text)
    if keep_last is not None and len(ids) > keep_last:
        ids = _last_tokens(tokenizer, text, ids, keep_last)
    if not ids:
        raise InvalidRequestError("prompt", "the text encodes to no tokens; at least one is needed")
    check_rows(limits, ids, "prompt")
    return _frozen(np.array(ids, np.int32))


def check_rows(limits: RequestLimits, ids: Sequence[int], field: str) -> None:
    """Raise InvalidRequestError if a text contains a token that the tokenizer knows but the model does not."""
    token_id = max(ids, default=0)
    if token_id >= limits.vocab_size:
        raise InvalidRequestError(
            field,
            f"the text contains the token id {token_id}, outside the model's vocabulary of {limits.vocab_size} ids; leave "
            "that token out",
        )


def _last_tokens(tokenizer: Encoder, text: str, ids: list[int], keep: int) -> list[int]:
    """Cut a tokenized text to its last `keep` tokens. Special tokens that the tokenizer has added at the start and end
    are kept and counted, unless they cannot be identified or would leave no text.

    Args:
        text: the text.
        ids: its tokens, including added special tokens.
        keep: number of tokens to return, less than the length of `ids`.
    """
    bare = tokenizer.encode(text, add_special_tokens=False)
    added = len(ids) - len(bare)
    for start in range(added + 1 if 0 < added < keep else 0):
        end = start + len(bare)
        if ids[start:end] == bare:
            return [*ids[:start], *bare[len(bare) - (keep - added) :], *ids[end:]]
    return ids[-keep:]


def check_text_length(
    limits: RequestLimits, tokenizer: Encoder, text: str, field: str = "prompt", *, truncated: bool = False
) -> None:
    """Raise InvalidRequestError if a text is too long for the model, without tokenizing it.

    The first limit is on `Encoder.min_tokens`; it does not apply to text that will be truncated. It has no effect with
    tokenizers that drop characters such as spaces, so there is a second limit: `MAX_CHARS_PER_TOKEN` characters per
    token of the model's maximum length, more than ordinary text needs.
    """
    least = 0 if truncated else tokenizer.min_tokens(text)
    if least >= limits.max_model_len:
        raise InvalidRequestError(
            field,
            f"{len(text)} characters are at least {least} tokens, no less than max_model_len={limits.max_model_len}; shorten it",
            code=TOO_LONG,
        )
    most = MAX_CHARS_PER_TOKEN * limits.max_model_len
    if len(text) > most:
        raise InvalidRequestError(
            field,
            f"{len(text)} characters, at most {most} are tokenized with max_model_len={limits.max_model_len}; shorten it",
            code=TOO_LONG,
        )


def _prompt_from_ids(limits: RequestLimits, value: object, keep_last: int | None) -> NDArray[np.int32]:
    field = "prompt_token_ids"
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise InvalidRequestError(field, f"an array {value.dtype}{list(value.shape)} is not a row of integers")
        ids: Sequence[object] = value  # type: ignore[assignment]  # has len, iteration and indices
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        ids = value
    else:
        raise InvalidRequestError(field, f"{json_kind(value)} is not a list of token ids")
    if len(ids) == 0:
        raise InvalidRequestError(field, "must not be empty")
    if keep_last is not None:
        ids = ids[-keep_last:]
    if len(ids) >= limits.max_model_len:  # before anything is copied
        raise InvalidRequestError(
            field,
            f"{counted(len(ids), 'prompt token')}: no room for output within max_model_len={limits.max_model_len}; shorten it",
            code=TOO_LONG,
        )
    checked = np.empty(len(ids), np.int32)
    for index, token_id in enumerate(ids):
        if type(token_id) is int and 0 <= token_id < limits.vocab_size:
            checked[index] = token_id
        else:
            checked[index] = check_token_id(f"{field}[{index}]", token_id, limits.vocab_size)
    return _frozen(checked)


def _frozen(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    ids.flags.writeable = False
    return ids


def with_room_filled(limits: RequestLimits, params: SamplingParams, prompt_len: int) -> SamplingParams:
    """Return `params` with `max_tokens` set to the number of tokens that fit after the prompt. If none fits, it is set
    to 1, and `check_length` then rejects the request.

    Raises:
        InvalidRequestError: `min_tokens` exceeds that number.
    """
    room = min(limits.max_model_len, limits.max_pool_tokens or limits.max_model_len) - prompt_len
    if room >= 1 and params.min_tokens > room:
        raise InvalidRequestError(
            "min_tokens",
            f"{params.min_tokens} must not exceed the number of tokens that fit after the prompt, {room}",
        )
    return dataclasses.replace(params, max_tokens=max(room, 1))


def check_length(limits: RequestLimits, prompt_len: int, max_tokens: int) -> None:
    """Raise InvalidRequestError if prompt and output exceed the model's length or the cache."""
    total = prompt_len + max_tokens
    if prompt_len >= limits.max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"{counted(prompt_len, 'prompt token')}: no room for output within max_model_len={limits.max_model_len}; "
            f"shorten it by at least {prompt_len - limits.max_model_len + 1}",
            code=TOO_LONG,
        )
    if total > limits.max_model_len:
        raise InvalidRequestError(
            "max_tokens",
            f"a prompt of {counted(prompt_len, 'token')} and max_tokens={max_tokens} exceed max_model_len={limits.max_model_len} "
            f"by {total - limits.max_model_len}; max_tokens can be at most {limits.max_model_len - prompt_len}",
            code=TOO_LONG,
        )
    pool = limits.max_pool_tokens
    if pool is not None and total > pool:
        raise InvalidRequestError(
            "max_tokens",
            f"a prompt of {counted(prompt_len, 'token')} and max_tokens={max_tokens} can never fit in the cache, which holds {pool} "
            f"tokens in total: {total - pool} too many; ask for fewer or start with a larger pool (--num-blocks-override)",
            code=TOO_LONG,
        )

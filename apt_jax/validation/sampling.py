"""Validation of sampling parameters. Values are checked and not clamped, except for very small temperatures."""

import dataclasses
import difflib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from apt_jax.errors import InvalidRequestError, counted, json_kind
from apt_jax.request import WAYS_OUT, SamplingParams
from apt_jax.validation.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MIN_TEMPERATURE,
    REQUEST_FIELDS,
    UNSUPPORTED,
    Encoder,
    RequestLimits,
    unsupported,
)
from apt_jax.validation.structured import checked_structured_outputs
from apt_jax.validation.values import (
    check_field,
    check_flag,
    check_text,
    check_token_id,
    shown,
)

logger = logging.getLogger(__name__)

AS_MANY_AS_FIT = 2**31
"""Placeholder for a `max_tokens` of None until the prompt's length is known; larger than any valid `max_tokens`."""
_RANDOM_SEED = -1
"""Value of `seed` that lets the server pick a seed, as in llama.cpp and vLLM."""
_WARN_EVERY_S = 60.0
_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


def checked_sampling_params(
    limits: RequestLimits,
    tokenizer: Encoder | None,
    params: SamplingParams | Mapping[str, object] | None,
    fallback_seed: int,
) -> SamplingParams:
    """Return checked sampling parameters with a seed, and with EOS among the stop tokens unless `ignore_eos`.

    Raises:
        InvalidRequestError: a value is not allowed, or a mapping has an unknown name.
    """
    if params is None:
        params = SamplingParams()
    elif isinstance(params, Mapping):
        for name in params:
            if name in UNSUPPORTED:
                raise unsupported(name)
            if name not in _SAMPLING_FIELDS:
                hint = f"; {WAYS_OUT[name]}" if name in WAYS_OUT else ""
                if not hint and isinstance(name, str) and len(name) <= 64:
                    near = difflib.get_close_matches(name, _SAMPLING_FIELDS, n=1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidRequestError(shown(name).strip("'"), f"no sampling parameter has this name{hint}")
        params = SamplingParams(**params)  # type: ignore[arg-type]  # checked field by field below
    elif not isinstance(params, SamplingParams):
        raise InvalidRequestError("params", f"{type(params).__name__} is not a SamplingParams")

    max_tokens = AS_MANY_AS_FIT
    if params.max_tokens is not None:
        max_tokens = _checked("max_tokens", params.max_tokens)
    min_tokens = _checked("min_tokens", params.min_tokens)
    if min_tokens > max_tokens:
        raise InvalidRequestError("min_tokens", f"{min_tokens} must not exceed max_tokens={max_tokens}")
    return SamplingParams(  # the first wrong field in this order is reported
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_temperature(params.temperature),
        # -1 (vLLM's older "off") and all of V become 0
        top_k=top_k if 0 < (top_k := _checked("top_k", params.top_k)) < limits.vocab_size else 0,
        top_p=_checked("top_p", params.top_p),
        min_p=_checked("min_p", params.min_p),
        repetition_penalty=_checked("repetition_penalty", params.repetition_penalty),
        seed=_seed(params.seed, fallback_seed),
        presence_penalty=_checked("presence_penalty", params.presence_penalty),
        frequency_penalty=_checked("frequency_penalty", params.frequency_penalty),
        logit_bias=_logit_bias(limits, params.logit_bias),
        stop=_stop(limits, tokenizer, params.stop),
        stop_token_ids=_stop_token_ids(limits, params.stop_token_ids, check_flag("ignore_eos", params.ignore_eos)),
        ignore_eos=bool(params.ignore_eos),
        include_stop_str_in_output=check_flag("include_stop_str_in_output", params.include_stop_str_in_output),
        skip_special_tokens=check_flag("skip_special_tokens", params.skip_special_tokens),
        logprobs=None if params.logprobs is None else _checked("logprobs", params.logprobs),
        prompt_logprobs=None if params.prompt_logprobs is None else _checked("prompt_logprobs", params.prompt_logprobs),
        pooling=_pooling(params.pooling),
        structured_outputs=checked_structured_outputs(params.structured_outputs),
        bad_words=_bad_words(tokenizer, params.bad_words),
        allowed_token_ids=_allowed_token_ids(limits, params.allowed_token_ids),
        truncate_prompt_tokens=_truncation(params.truncate_prompt_tokens),
        n=_checked("n", params.n),
    )


def _pooling(value: object) -> Literal["mean", "last"] | None:
    if value is not None and value not in ("mean", "last"):
        raise InvalidRequestError("pooling", f"{shown(value)} is neither 'mean' nor 'last'")
    return cast('Literal["mean", "last"] | None', value)


def _checked(name: str, value: object) -> Any:
    return check_field(REQUEST_FIELDS[name], value)


class _RaisedTemperatures:
    """Logs that temperatures were raised, at most once per minute, with the number of times since the last message."""

    def __init__(self) -> None:
        self._count, self._said_s = 0, -float("inf")

    def add(self, temperature: float) -> None:
        self._count += 1
        now_s = time.monotonic()
        if now_s - self._said_s < _WARN_EVERY_S:
            return
        logger.warning(
            "temperature %.3g is raised to %g, below which results may overflow (%s since the last such message)",
            temperature,
            MIN_TEMPERATURE,
            counted(self._count, "time"),
        )
        self._count, self._said_s = 0, now_s


_raised_temperatures = _RaisedTemperatures()


def _temperature(value: object) -> float:
    temperature = _checked("temperature", value)
    if 0.0 < temperature < MIN_TEMPERATURE:
        _raised_temperatures.add(temperature)
        return MIN_TEMPERATURE
    return temperature


def _seed(value: object, fallback: int) -> int:
    seed = fallback if value is None else _checked("seed", value)
    return fallback if seed == _RANDOM_SEED else seed & MAX_SEED


def _truncation(value: object) -> int | None:
    if value is None:
        return None
    tokens = _checked("truncate_prompt_tokens", value)
    if tokens == 0:
        raise InvalidRequestError("truncate_prompt_tokens", f"0 must {REQUEST_FIELDS['truncate_prompt_tokens'].must}")
    return tokens


def _logit_bias(limits: RequestLimits, value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequestError("logit_bias", f"{json_kind(value)} is not a mapping of token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequestError("logit_bias", f"{len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    checked = {
        check_token_id("logit_bias", token_id, limits.vocab_size): _checked("logit_bias", bias)
        for token_id, bias in value.items()
    }
    return checked or None


def _strings(field: str, value: object, most: int, most_chars: int, flag: str = "") -> tuple[str, ...]:
    """Check that each string is neither empty nor too long; return the strings without duplicates."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise InvalidRequestError(field, f"{json_kind(value)} is not a list of strings")
    if len(value) > most:
        raise InvalidRequestError(field, f"{len(value)} strings, at most {most} are allowed{flag}")
    for text in value:
        if len(check_text(field, text)) > most_chars:
            raise InvalidRequestError(field, f"a string of {len(text)} characters, at most {most_chars} are allowed")
    return tuple(dict.fromkeys(value))


def _stop(limits: RequestLimits, tokenizer: Encoder | None, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = (value,) if isinstance(value, str) else value
    strings = _strings("stop", listed, limits.max_stop_strings, MAX_STOP_CHARS, " (--set max_stop_strings)")
    if strings and tokenizer is None:
        raise InvalidRequestError("stop", "this model has no tokenizer, so its output has no text; use stop_token_ids")
    return strings


def _bad_words(tokenizer: Encoder | None, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    words = _strings("bad_words", value, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    if words and tokenizer is None:
        raise InvalidRequestError("bad_words", "this model has no tokenizer; use logit_bias or allowed_token_ids")
    return words


def bad_words_token_ids(
    limits: RequestLimits, tokenizer: Encoder | None, words: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that generate any of `words`, to be forbidden.

    Each word, without leading whitespace, is tokenized as at the start of a text and also after a space. The second
    sequence is included only if it is as long as the first and starts with a different token.

    Raises:
        InvalidRequestError: a word encodes to no tokens, or to a token outside the model's vocabulary.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        assert tokenizer is not None
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not plain:
            raise InvalidRequestError("bad_words", f"{shown(word)} has no tokens")
        found[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[spaced] = None
        if max(*plain, *spaced) >= limits.vocab_size:
            raise InvalidRequestError("bad_words", f"{shown(word)} contains a token outside the model's vocabulary")
    return tuple(found)


def _allowed_token_ids(limits: RequestLimits, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    field = "allowed_token_ids"
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise InvalidRequestError(field, f"{json_kind(value)} is not a list of ids")
    if not 1 <= len(value) <= MAX_ALLOWED_TOKEN_IDS:
        raise InvalidRequestError(
            field, f"{len(value)} ids; give 1 to {MAX_ALLOWED_TOKEN_IDS}, or leave it out to allow all"
        )
    return tuple(dict.fromkeys(check_token_id(field, token_id, limits.vocab_size) for token_id in value))


def _stop_token_ids(limits: RequestLimits, value: object, ignore_eos: bool) -> tuple[int, ...]:
    """Check and return the user's ids, followed by the EOS ids unless `ignore_eos`. EOS ids outside the model's
    vocabulary are harmless, because they are never sampled."""
    if value is None:
        value = ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise InvalidRequestError("stop_token_ids", f"{json_kind(value)} is not a list of ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError("stop_token_ids", f"{len(value)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed")
    ids = [check_token_id("stop_token_ids", token_id, limits.vocab_size) for token_id in value]
    return tuple(dict.fromkeys([*ids, *(() if ignore_eos else limits.eos_token_ids)]))

"""Sampling parameters: every value checked, none clamped."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from apt_jax.errors import InvalidRequestError
from apt_jax.request import SamplingParams
from apt_jax.validation.limits import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
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

AS_MANY_AS_FIT = 2**31
"""Stands for a `max_tokens` of None until the length of the prompt is known; no request may ask for this many."""
_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


def checked_sampling_params(
    limits: RequestLimits,
    tokenizer: Encoder | None,
    params: SamplingParams | Mapping[str, object] | None,
    fallback_seed: int,
) -> SamplingParams:
    """Return checked sampling parameters, with a seed, and EOS among the stop tokens.

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
                near = (
                    difflib.get_close_matches(name, _SAMPLING_FIELDS, n=1)
                    if isinstance(name, str) and len(name) <= 64
                    else []
                )
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
    return SamplingParams(  # in this order the first wrong field is reported
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_checked("temperature", params.temperature),
        # -1 (vLLM's older "off") and all of V become 0
        top_k=top_k if 0 < (top_k := _checked("top_k", params.top_k)) < limits.vocab_size else 0,
        top_p=_checked("top_p", params.top_p),
        min_p=_checked("min_p", params.min_p),
        repetition_penalty=_checked("repetition_penalty", params.repetition_penalty),
        seed=fallback_seed if params.seed is None else _checked("seed", params.seed),
        presence_penalty=_checked("presence_penalty", params.presence_penalty),
        frequency_penalty=_checked("frequency_penalty", params.frequency_penalty),
        logit_bias=_logit_bias(limits, params.logit_bias),
        stop=_stop(tokenizer, params.stop),
        stop_token_ids=_stop_token_ids(limits, params.stop_token_ids, check_flag("ignore_eos", params.ignore_eos)),
        ignore_eos=bool(params.ignore_eos),
        include_stop_str_in_output=check_flag("include_stop_str_in_output", params.include_stop_str_in_output),
        skip_special_tokens=check_flag("skip_special_tokens", params.skip_special_tokens),
        logprobs=None if params.logprobs is None else _checked("logprobs", params.logprobs),
        prompt_logprobs=None if params.prompt_logprobs is None else _checked("prompt_logprobs", params.prompt_logprobs),
        pooling=_pooling(params.pooling),
        structured_outputs=checked_structured_outputs(params.structured_outputs),
    )


def _pooling(value: object) -> Literal["mean", "last"] | None:
    if value is not None and value not in ("mean", "last"):
        raise InvalidRequestError("pooling", f"{value!r:.40} is none of 'mean' and 'last'")
    return cast('Literal["mean", "last"] | None', value)


def _checked(name: str, value: object) -> Any:
    return check_field(REQUEST_FIELDS[name], value)


def _logit_bias(limits: RequestLimits, value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequestError("logit_bias", f"{type(value).__name__} is not a mapping of token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequestError("logit_bias", f"{len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    checked = {
        check_token_id("logit_bias", token_id, limits.vocab_size): _checked("logit_bias", bias)
        for token_id, bias in value.items()
    }
    return checked or None


def _stop(tokenizer: Encoder | None, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or isinstance(strings, bytes | bytearray):
        raise InvalidRequestError("stop", f"{type(value).__name__} is not a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", f"{len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed")
    for text in strings:
        if len(check_text("stop", text)) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                "stop", f"a string of {len(text)} characters, at most {MAX_STOP_CHARS} are allowed"
            )
    if strings and tokenizer is None:
        raise InvalidRequestError("stop", "this model has no tokenizer, so its output has no text; use stop_token_ids")
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(limits: RequestLimits, value: object, ignore_eos: bool) -> tuple[int, ...]:
    """Return the user's ids, then EOS as it is: only ids of the model's vocabulary can be sampled."""
    if value is None:
        value = ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise InvalidRequestError("stop_token_ids", f"{type(value).__name__} is not a list of ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError("stop_token_ids", f"{len(value)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed")
    ids = [check_token_id("stop_token_ids", token_id, limits.vocab_size) for token_id in value]
    return tuple(dict.fromkeys([*ids, *(() if ignore_eos else limits.eos_token_ids)]))

"""The one door to the engine: raw user input in, a complete and checked `EngineRequest` out.

Every front end (Python, gRPC, command line) calls `build_request` with whatever it was given, so that no path can skip
a check. Nothing is clamped silently and nothing is coerced: ``True`` is not a number, ``"2"`` is not a number, and a
message says what was wrong, what the rule is and what to do. Messages never hold the prompt.
"""

import dataclasses
import difflib
import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO
from apt_jax.errors import InvalidRequestError
from apt_jax.request import EngineRequest, Grammar, SamplingParams, StructuredOutputsParams

MAX_INTEGER = 2**31 - 1
"""Of counts, whatever the model."""
MAX_REQUEST_ID_CHARS = 128
REQUEST_ID_PATTERN = rf"[A-Za-z0-9._-]{{1,{MAX_REQUEST_ID_CHARS}}}"
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_BIAS = 100.0
"""Of one entry of `logit_bias`, either way."""
MAX_PENALTY = 2.0
"""Presence and frequency, either way."""
MAX_SEED = 2**63 - 1
MAX_GRAMMAR_BYTES = 64 << 10
"""Of a schema, expression or grammar, and of all choices together."""
MAX_SCHEMA_DEPTH = 64
MAX_CHOICES = 1024
MAX_WHITESPACE_PATTERN_BYTES = 256
MIN_TEMPERATURE = 0.01
"""Smallest temperature other than 0: below it scaled logits leave float32, and the result is greedy anyway."""
MAX_TEMPERATURE = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 2.0
MIN_SLO_S = 1e-6
MAX_SLO_S = 86_400.0
MAX_DEADLINE_S = 86_400.0
MAX_WATCH_CAPACITY = 4096
MAX_SEQUENCES = 16
"""Of one call: its prompts times `n`."""
TOO_LONG = "context_length_exceeded"
"""`InvalidRequestError.code` of prompts and outputs that are too long for the model or the cache."""

_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
MIN_POSITIVE = float(np.finfo(np.float32).tiny)
"""Numbers closer to 0 that are not 0 are refused: they would be 0 on the device."""
_AS_MANY_AS_FIT = 2**31
"""Stands for a `max_tokens` of None until the length of the prompt is known; no request may ask for this many."""
_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_FORM_FIELDS = tuple(field.name for field in dataclasses.fields(StructuredOutputsParams))
_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_TEXT_ALONE = "the model takes text alone; leave it out"
_ONE_PLACE = "a request is computed in one place; leave it out"
_UNSUPPORTED = {
    "prompt_logprobs": "log probabilities of prompt tokens are not computed; leave it out",
    "truncate_prompt_tokens": "prompts are never cut; leave it out and send what shall be read",
    "structural_tag": "structural tags are not supported; use json, regex, choice or grammar",
    "mm_inputs": _TEXT_ALONE,
    "extra_mm_inputs": _TEXT_ALONE,
    "media_refs": _TEXT_ALONE,
    "kv_transfer_params": _ONE_PLACE,
    "kv_transfer_params_json": _ONE_PLACE,
    "data_parallel_rank": "there is one rank, 0; leave it out",
    "dp_rank": "there is one rank, 0; leave it out",
}
"""What other engines' clients may ask for."""


class Encoder(Protocol):
    """What validation needs of a tokenizer."""

    vocab_size: int
    """Ids are in [0, vocab_size)."""

    def encode(self, text: str) -> list[int]: ...

    def min_tokens(self, text: str) -> int:
        """A lower bound on `len(encode(text))` that is cheap to have."""
        ...


class GrammarSource(Protocol):
    """What makes grammars; see `apt_jax.grammar.GrammarCompiler`."""

    def compile(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool) -> Grammar: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What one engine can serve."""

    vocab_size: int
    """V: token ids are in [0, V); the smaller one of the tokenizer's and the model's."""
    max_model_len: int
    """Longest prompt plus output, tokens."""
    max_pool_tokens: int | None = None
    """Tokens that the whole cache pool can hold with its smallest kind; None: not known."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end an output unless `ignore_eos`."""
    default_slo: SLO = SLO()  # noqa: RUF009 - frozen
    """Objectives of requests that bring none."""


def build_request(
    limits: RequestLimits,
    tokenizer: Encoder | None,
    *,
    prompt: object = None,
    prompt_token_ids: object = None,
    params: SamplingParams | Mapping[str, object] | None = None,
    request_id: object = None,
    slo: SLO | None = None,
    slo_ttft_ms: object = None,
    slo_tbt_ms: object = None,
    slo_class: object = None,
    arrival_s: float,
    fallback_seed: int = 0,
    grammars: GrammarSource | None = None,
    tenant: str | None = None,
) -> EngineRequest:
    """Check raw input and make the request that the engine takes.

    Args:
        limits: of the engine that will serve it.
        tokenizer: None: only token ids are accepted, and no stop strings.
        prompt: text; exactly one of `prompt` and `prompt_token_ids` is given.
        prompt_token_ids: token ids, taken as they are (nothing is prepended).
        params: None: the defaults. A mapping may hold any subset of the fields of `SamplingParams`, by name; a `max_tokens` of
            None asks for as many as the model's length and the cache leave.
        request_id: None: one is made up.
        slo: None: the server's default.
        slo_ttft_ms, slo_tbt_ms: raw objectives in milliseconds, each replacing that part of `slo`; None: absent.
        slo_class: "rt" (real time, the default) or "be" (best effort).
        arrival_s: on the engine's clock.
        fallback_seed: seed of a request that brings none.
        grammars: for structured outputs, which may take it two seconds; None: they are refused.
        tenant: see `EngineRequest`; from the caller, not from input.

    Raises:
        InvalidRequestError: one line; `.field` names the input.
        QueueFullError: too many new grammars at once.
    """
    checked_id = _request_id(request_id)
    checked_slo = _slo(limits.default_slo if slo is None else slo, slo_ttft_ms, slo_tbt_ms)
    checked_class = _slo_class(slo_class)
    checked_params = _sampling_params(limits, tokenizer, params, fallback_seed)
    token_ids = _prompt(limits, tokenizer, prompt, prompt_token_ids)
    if checked_params.max_tokens == _AS_MANY_AS_FIT:
        checked_params = _filled(limits, checked_params, token_ids.size)
    _check_length(limits, token_ids.size, checked_params.max_tokens)
    grammar = None
    if checked_params.structured_outputs is not None:  # the slowest check, last
        if grammars is None:
            raise InvalidRequestError(
                "structured_outputs",
                "this model has no tokenizer, so its output has no text; start with one (--tokenizer DIR)",
            )
        grammar = grammars.compile(
            checked_params.structured_outputs, ends_at_eos=not checked_params.ignore_eos
        )
    return EngineRequest(
        request_id=checked_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=token_ids,
        params=checked_params,
        slo=checked_slo,
        arrival_s=arrival_s,
        slo_class=checked_class,
        grammar=grammar,
        tenant=tenant,
    )


def build_requests(
    limits: RequestLimits, tokenizer: Encoder | None, *, n: object = 1, **fields: Any
) -> list[EngineRequest]:
    """The requests for `n` outputs to one prompt; see `build_request` for the other arguments.

    Returns:
        n requests. They differ in their ids (``ID``, ``ID#1``, ``ID#2``, ..., which no client can give) and in their seeds
        (``seed + i``, as in vLLM).

    Raises:
        InvalidRequestError, QueueFullError: as `build_request`.
    """
    count = check_sequences(1, n)
    first = build_request(limits, tokenizer, **fields)
    seed = first.params.seed
    assert seed is not None
    return [first] + [
        dataclasses.replace(
            first,
            request_id=f"{first.request_id}#{i}",
            params=dataclasses.replace(first.params, seed=(seed + i) % (MAX_SEED + 1)),
        )
        for i in range(1, count)
    ]


def check_watch_capacity(value: object) -> int:
    """Iterations kept for a watcher of the scheduler.

    Raises:
        InvalidRequestError: no integer in [1, `MAX_WATCH_CAPACITY`].
    """
    return _integer("capacity", value, 1, MAX_WATCH_CAPACITY)


# --- what some front ends take beside a request ------------------------------------------------------------------


def check_deadline_ms(value: object) -> float:
    """The time that a request may take, in seconds, from raw milliseconds.

    Raises:
        InvalidRequestError: no positive number, or more than a day.
    """
    seconds = _number("deadline_ms", value) / 1e3
    if not 0.0 < seconds <= MAX_DEADLINE_S:
        raise InvalidRequestError(
            "deadline_ms",
            f"{_shown(value)} must be a positive number of milliseconds, a day at most",
        )
    return seconds


def check_flag(field: str, value: object) -> bool:
    """True or false and nothing else.

    Raises:
        InvalidRequestError: it is not.
    """
    return _flag(field, value)


def check_integer(field: str, value: object, low: int, high: int) -> int:
    """An integer in [low, high].

    Raises:
        InvalidRequestError: it is not.
    """
    return _integer(field, value, low, high)


def check_text(field: str, value: object) -> str:
    """A string that is not empty and can be written as UTF-8.

    Raises:
        InvalidRequestError: it is not.
    """
    return _text(field, value)


def check_mapping(field: str, value: object) -> Mapping[str, object]:
    """An object of named values.

    Raises:
        InvalidRequestError: it is not.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequestError(field, f"{_shown(value)} ({type(value).__name__}) is no object")
    return value


def check_sequences(num_prompts: int, n: object) -> int:
    """`n`, the number of answers to each prompt.

    Raises:
        InvalidRequestError: no integer, or with the prompts more than `MAX_SEQUENCES`.
    """
    count = _integer("n", n, 1, MAX_SEQUENCES)
    if num_prompts * count > MAX_SEQUENCES:
        field = "prompt" if count == 1 else "n"
        raise InvalidRequestError(
            field,
            f"{num_prompts} prompts and n={count} ask for more than {MAX_SEQUENCES} answers at once; send several requests",
        )
    return count


def check_token_ids(limits: RequestLimits, field: str, value: object, most: int) -> list[int]:
    """Token ids of the vocabulary, at most so many, possibly none.

    Raises:
        InvalidRequestError: they are not.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise InvalidRequestError(field, f"{type(value).__name__} is not a list of token ids")
    if len(value) > most:
        raise InvalidRequestError(field, f"{len(value)} ids, at most {most} are allowed")
    return [_token_id(f"{field}[{i}]", t, limits.vocab_size) for i, t in enumerate(value)]


def unsupported(field: str) -> InvalidRequestError:
    """The refusal of an input that other engines take and this one does not."""
    return InvalidRequestError(field, _UNSUPPORTED[field])


# --- values ------------------------------------------------------------------------------------------------------


def _shown(value: object) -> str:
    """A value for a message, never long, and never slow or impossible to print."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:37]!r}..."
    if value is None or isinstance(value, bool | float | np.generic):
        return repr(value)
    if isinstance(value, int) and abs(value) < 10**20:
        return str(value)
    return f"a {type(value).__name__}"


def _integer(field: str, value: object, low: int, high: int, rule: str | None = None) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise InvalidRequestError(
            field, f"{_shown(value)} ({type(value).__name__}) is not an integer"
        )
    number = int(value)
    if not low <= number <= high:
        shown = _shown(number) if abs(number) < 10**20 else "a number of more than 20 digits"
        raise InvalidRequestError(
            field, f"{shown} must be {rule or f'an integer in [{low}, {high}]'}"
        )
    return number


def _number(field: str, value: object) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(
        value, int | float | np.integer | np.floating
    ):
        raise InvalidRequestError(
            field, f"{_shown(value)} ({type(value).__name__}) is not a number"
        )
    try:
        number = float(value)
    except OverflowError:
        raise InvalidRequestError(field, "the number is too large") from None
    if not math.isfinite(number):
        raise InvalidRequestError(field, f"{number} must be a finite number")
    if number != 0.0 and abs(number) < MIN_POSITIVE:
        raise InvalidRequestError(
            field, f"{number!r} is too close to 0 for a 32-bit number; give 0 if that is meant"
        )
    return number


def _unsigned_number(field: str, value: object) -> float:
    number = _number(field, value)
    if math.copysign(1.0, number) < 0:
        raise InvalidRequestError(field, f"{number} must not be negative")
    return number


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InvalidRequestError(
            field, f"{_shown(value)} ({type(value).__name__}) is not true or false"
        )
    return bool(value)


def _text(field: str, value: object) -> str:
    """A non-empty string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"{type(value).__name__} is not text")
    if not value:
        raise InvalidRequestError(field, "must not be empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            field, f"not valid Unicode: a lone surrogate at character {error.start}"
        ) from None
    return value


# --- parts of a request ------------------------------------------------------------------------------------------


def _request_id(value: object) -> str:
    if value is None:
        return f"req-{uuid.uuid4().hex}"
    if not isinstance(value, str) or not _REQUEST_ID.fullmatch(value):
        raise InvalidRequestError(
            "request_id",
            f"{_shown(value)} must be 1 to {MAX_REQUEST_ID_CHARS} characters of [A-Za-z0-9._-]; leave it out to get one",
        )
    return value


def _slo_class(value: object) -> Literal["rt", "be"]:
    if value is None:
        return "rt"
    if value == "rt":
        return "rt"
    if value == "be":
        return "be"
    raise InvalidRequestError(
        "slo_class", f"{_shown(value)} must be 'rt' (real time) or 'be' (best effort)"
    )


def _slo(slo: object, ttft_ms: object, tbt_ms: object) -> SLO:
    if not isinstance(slo, SLO):
        raise InvalidRequestError(
            "slo", f"{type(slo).__name__} is not an SLO(ttft_s=..., tbt_s=...)"
        )

    def objective(field: str, value: object, raw_ms: object) -> float:
        if raw_ms is not None:
            seconds = _unsigned_number(field, raw_ms) / 1e3
        elif isinstance(value, float) and value == math.inf:
            return math.inf  # no objective
        else:
            seconds = _unsigned_number(field, value)
        if not MIN_SLO_S <= seconds <= MAX_SLO_S:
            raise InvalidRequestError(
                field,
                f"an objective of {seconds:.3g} s must lie in [{MIN_SLO_S:g}, {MAX_SLO_S:g}] s; leave it out for none",
            )
        return seconds

    return SLO(
        ttft_s=objective(
            "slo_ttft_ms" if ttft_ms is not None else "slo.ttft_s", slo.ttft_s, ttft_ms
        ),
        tbt_s=objective("slo_tbt_ms" if tbt_ms is not None else "slo.tbt_s", slo.tbt_s, tbt_ms),
    )


def _sampling_params(
    limits: RequestLimits,
    tokenizer: Encoder | None,
    params: SamplingParams | Mapping[str, object] | None,
    fallback_seed: int,
) -> SamplingParams:
    if params is None:
        params = SamplingParams()
    elif isinstance(params, Mapping):
        for name in params:
            if name in _UNSUPPORTED:
                raise unsupported(name)
            if name not in _SAMPLING_FIELDS:
                near = (
                    difflib.get_close_matches(name, _SAMPLING_FIELDS, n=1)
                    if isinstance(name, str) and len(name) <= 64
                    else []
                )
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidRequestError(
                    _shown(name).strip("'"), f"no sampling parameter has this name{hint}"
                )
        params = SamplingParams(**params)  # type: ignore[arg-type]  # checked field by field below
    elif not isinstance(params, SamplingParams):
        raise InvalidRequestError("params", f"{type(params).__name__} is not a SamplingParams")

    max_tokens = _AS_MANY_AS_FIT
    if params.max_tokens is not None:
        max_tokens = _integer("max_tokens", params.max_tokens, 1, MAX_INTEGER, "at least 1")
    min_tokens = _integer("min_tokens", params.min_tokens, 0, MAX_INTEGER, "at least 0")
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            "min_tokens", f"{min_tokens} must not exceed max_tokens={max_tokens}"
        )
    temperature = _unsigned_number("temperature", params.temperature)
    if temperature != 0.0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise InvalidRequestError(
            "temperature",
            f"{temperature} must be 0 (greedy) or lie in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE:g}]",
        )
    top_k = _integer("top_k", params.top_k, -1, MAX_INTEGER, "at least 1, or 0 for off")
    top_p = _unsigned_number("top_p", params.top_p)
    if not 0.0 < top_p <= 1.0:
        raise InvalidRequestError("top_p", f"{top_p} must lie in (0, 1]; 1 is off")
    min_p = _unsigned_number("min_p", params.min_p)
    if min_p > 1.0:
        raise InvalidRequestError("min_p", f"{min_p} must lie in [0, 1]; 0 is off")
    repetition = _unsigned_number("repetition_penalty", params.repetition_penalty)
    if not MIN_REPETITION_PENALTY <= repetition <= MAX_REPETITION_PENALTY:
        raise InvalidRequestError(
            "repetition_penalty",
            f"{repetition} must lie in [{MIN_REPETITION_PENALTY}, {MAX_REPETITION_PENALTY:g}]; 1 is off",
        )
    seed = params.seed
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k if 0 < top_k < limits.vocab_size else 0,  # -1 (vLLM's older "off") and all of V
        top_p=top_p,
        min_p=min_p,
        seed=fallback_seed if seed is None else _integer("seed", seed, 0, MAX_SEED),
        repetition_penalty=repetition,
        presence_penalty=_penalty("presence_penalty", params.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", params.frequency_penalty),
        logit_bias=_logit_bias(limits, params.logit_bias),
        min_tokens=min_tokens,
        stop=_stop(tokenizer, params.stop),
        stop_token_ids=_stop_token_ids(
            limits, params.stop_token_ids, _flag("ignore_eos", params.ignore_eos)
        ),
        ignore_eos=bool(params.ignore_eos),
        include_stop_str_in_output=_flag(
            "include_stop_str_in_output", params.include_stop_str_in_output
        ),
        skip_special_tokens=_flag("skip_special_tokens", params.skip_special_tokens),
        logprobs=None
        if params.logprobs is None
        else _integer("logprobs", params.logprobs, 0, MAX_LOGPROBS),
        structured_outputs=_structured_outputs(params.structured_outputs),
    )


def _penalty(field: str, value: object) -> float:
    number = _number(field, value)
    if not -MAX_PENALTY <= number <= MAX_PENALTY:
        raise InvalidRequestError(
            field, f"{number} must lie in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]; 0 is off"
        )
    return number + 0.0  # -0.0 becomes 0.0


def _token_id(field: str, value: object, vocab_size: int) -> int:
    return _integer(
        field, value, 0, vocab_size - 1, f"a token id in [0, {vocab_size}), the vocabulary"
    )


def _logit_bias(limits: RequestLimits, value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            "logit_bias", f"{type(value).__name__} is not a mapping of token ids to numbers"
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            "logit_bias", f"{len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed"
        )
    checked: dict[int, float] = {}
    for token_id, bias in value.items():
        number = _number("logit_bias", bias)
        if not -MAX_BIAS <= number <= MAX_BIAS:
            raise InvalidRequestError(
                "logit_bias", f"{number} must lie in [-{MAX_BIAS:g}, {MAX_BIAS:g}]"
            )
        checked[_token_id("logit_bias", token_id, limits.vocab_size)] = number
    return checked or None


def _stop(tokenizer: Encoder | None, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or isinstance(strings, bytes | bytearray):
        raise InvalidRequestError("stop", f"{type(value).__name__} is not a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            "stop", f"{len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed"
        )
    for text in strings:
        if len(_text("stop", text)) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                "stop", f"a string of {len(text)} characters, at most {MAX_STOP_CHARS} are allowed"
            )
    if strings and tokenizer is None:
        raise InvalidRequestError(
            "stop", "this model has no tokenizer, so its output has no text; use stop_token_ids"
        )
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(limits: RequestLimits, value: object, ignore_eos: bool) -> tuple[int, ...]:
    """The user's ids, then EOS. Those in the vocabulary of the model alone can be sampled, so EOS is taken as it is."""
    if value is None:
        value = ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise InvalidRequestError("stop_token_ids", f"{type(value).__name__} is not a list of ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            "stop_token_ids", f"{len(value)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    ids = [_token_id("stop_token_ids", token_id, limits.vocab_size) for token_id in value]
    return tuple(dict.fromkeys([*ids, *(() if ignore_eos else limits.eos_token_ids)]))


def _structured_outputs(value: object) -> StructuredOutputsParams | None:
    """Bounded in size and depth, `json` as text; what it means is the grammar compiler's to find out."""
    field = "structured_outputs"
    if value is None:
        return None
    if isinstance(value, Mapping):
        for name in value:
            if name in _UNSUPPORTED:
                raise unsupported(name)
            if name not in _FORM_FIELDS:
                raise InvalidRequestError(
                    field, f"{_shown(name)} must be one of {', '.join(_FORM_FIELDS)}"
                )
        value = StructuredOutputsParams(**value)  # checked field by field below
    elif not isinstance(value, StructuredOutputsParams):
        raise InvalidRequestError(field, f"{type(value).__name__} is not StructuredOutputsParams")
    given = [name for name in _FORMS if getattr(value, name) is not None]
    if value.json_object is not None and not _flag(f"{field}.json_object", value.json_object):
        given.remove("json_object")
    if len(given) != 1:
        shown = " and ".join(given) or "none"
        raise InvalidRequestError(field, f"{shown} given; give exactly one of {', '.join(_FORMS)}")
    (form,) = given
    whitespace = value.whitespace_pattern
    fixed = _flag(f"{field}.disable_any_whitespace", value.disable_any_whitespace)
    if (fixed or whitespace is not None) and form not in ("json", "json_object"):
        name = "disable_any_whitespace" if fixed else "whitespace_pattern"
        raise InvalidRequestError(f"{field}.{name}", f"goes with json and json_object, not {form}")
    if fixed and whitespace is not None:
        raise InvalidRequestError(
            f"{field}.whitespace_pattern", "cannot be given together with disable_any_whitespace"
        )
    options = {
        "disable_any_whitespace": fixed,
        "whitespace_pattern": None
        if whitespace is None
        else _bounded_text(f"{field}.whitespace_pattern", whitespace, MAX_WHITESPACE_PATTERN_BYTES),
    }
    name = f"{field}.{form}"
    match form:
        case "json":
            return StructuredOutputsParams(json=_schema(name, value.json), **options)
        case "choice":
            return StructuredOutputsParams(choice=_choices(name, value.choice))
        case "regex":
            return StructuredOutputsParams(regex=_bounded_text(name, value.regex))
        case "grammar":
            return StructuredOutputsParams(grammar=_bounded_text(name, value.grammar))
    return StructuredOutputsParams(json_object=True, **options)


def _bounded_text(field: str, value: object, most: int = MAX_GRAMMAR_BYTES) -> str:
    if isinstance(value, str) and len(value) > most:  # before it is copied
        raise InvalidRequestError(
            field, f"{len(value)} characters, at most {most} bytes are allowed"
        )
    text = _text(field, value)
    size = len(text.encode())
    if size > most:
        raise InvalidRequestError(field, f"{size} bytes, at most {most} are allowed")
    return text


def _choices(field: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise InvalidRequestError(field, f"{type(value).__name__} is not a list of texts")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequestError(field, f"{len(value)} texts; give 1 to {MAX_CHOICES}")
    texts = tuple(dict.fromkeys(_bounded_text(field, text) for text in value))
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            field, f"{size} bytes in all, at most {MAX_GRAMMAR_BYTES} are allowed"
        )
    return texts


def _schema(field: str, value: object) -> str:
    """A JSON schema as compact JSON text, in the order in which it was written."""

    def constant(name: str) -> object:
        raise ValueError(f"{name} is not JSON")

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(items)
        if len(made) != len(items):
            raise ValueError("a key comes twice in one object")
        return made

    def key_check(of: object) -> None:
        """`json.dumps` would make text of numbers."""
        stack = [of]
        while stack:
            item = stack.pop()
            if isinstance(item, Mapping):
                if not all(isinstance(key, str) for key in item):
                    raise ValueError("a key that is not text")
                stack += item.values()
            elif isinstance(item, list | tuple):
                stack += item

    if isinstance(value, str):
        text = _bounded_text(field, value)
    elif isinstance(value, Mapping | bool):
        try:
            text = json.dumps(
                dict(value) if isinstance(value, Mapping) else value,
                allow_nan=False,
                separators=(",", ":"),
            )
            key_check(value)
        except RecursionError:
            raise InvalidRequestError(
                field, f"nested more deeply than {MAX_SCHEMA_DEPTH} levels"
            ) from None
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(field, f"not a JSON value: {str(error)[:80]}") from None
        text = _bounded_text(field, text)
    else:
        raise InvalidRequestError(
            field, f"{type(value).__name__} is not a JSON schema: give an object, or its text"
        )
    try:
        schema = json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
        compact = json.dumps(schema, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequestError(
            field, f"nested more deeply than {MAX_SCHEMA_DEPTH} levels"
        ) from None
    except ValueError as error:
        raise InvalidRequestError(field, f"not JSON: {str(error)[:80]}") from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(field, "a JSON schema is an object, true or false")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(field, f"nested more deeply than {MAX_SCHEMA_DEPTH} levels")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise InvalidRequestError(field, "'x-guidance' is not accepted; leave it out")
    return compact


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while containers := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [x for c in containers for x in (c.values() if isinstance(c, dict) else c)]
    return depth


def _prompt(
    limits: RequestLimits, tokenizer: Encoder | None, prompt: object, prompt_token_ids: object
) -> NDArray[np.int32]:
    if prompt is not None and prompt_token_ids is not None:
        raise InvalidRequestError("prompt", "give either text or token ids, not both")
    if prompt_token_ids is not None:
        return _prompt_from_ids(limits, prompt_token_ids)
    if prompt is None:
        raise InvalidRequestError("prompt", "missing; give text or token ids")
    text = _text("prompt", prompt)
    if tokenizer is None:
        raise InvalidRequestError(
            "prompt",
            "this model has no tokenizer; send token ids, or start with one (--tokenizer DIR)",
        )
    least = tokenizer.min_tokens(text)
    if least >= limits.max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"{len(text)} characters are at least {least} tokens, no less than max_model_len={limits.max_model_len}; shorten it",
            code=TOO_LONG,
        )
    ids = tokenizer.encode(text)
    if not ids:
        raise InvalidRequestError("prompt", "the text holds no token; give at least one")
    if max(ids) >= limits.vocab_size:
        raise InvalidRequestError("prompt", "the text holds a token outside the model's vocabulary")
    return _frozen(np.array(ids, np.int32))


def _prompt_from_ids(limits: RequestLimits, value: object) -> NDArray[np.int32]:
    field = "prompt_token_ids"
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise InvalidRequestError(
                field, f"an array {value.dtype}{list(value.shape)} is not a row of integers"
            )
        ids: Sequence[object] = value  # type: ignore[assignment]  # has len, iteration and indices
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        ids = value
    else:
        raise InvalidRequestError(field, f"{type(value).__name__} is not a list of token ids")
    if len(ids) == 0:
        raise InvalidRequestError(field, "must not be empty")
    if len(ids) >= limits.max_model_len:  # before anything is copied
        raise InvalidRequestError(
            field,
            f"{len(ids)} tokens leave no room for output within max_model_len={limits.max_model_len}; shorten it",
            code=TOO_LONG,
        )
    checked = np.empty(len(ids), np.int32)
    for index, token_id in enumerate(ids):
        if type(token_id) is int and 0 <= token_id < limits.vocab_size:
            checked[index] = token_id
        else:
            checked[index] = _token_id(f"{field}[{index}]", token_id, limits.vocab_size)
    return _frozen(checked)


def _frozen(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    ids.flags.writeable = False
    return ids


def _filled(limits: RequestLimits, params: SamplingParams, prompt_len: int) -> SamplingParams:
    """With `max_tokens` of what the prompt leaves; 1 where that is nothing, for `_check_length` to refuse."""
    room = min(limits.max_model_len, limits.max_pool_tokens or limits.max_model_len) - prompt_len
    if room >= 1 and params.min_tokens > room:
        raise InvalidRequestError(
            "min_tokens",
            f"{params.min_tokens} must not exceed the {room} tokens for which there is room after the prompt",
        )
    return dataclasses.replace(params, max_tokens=max(room, 1))


def _check_length(limits: RequestLimits, prompt_len: int, max_tokens: int) -> None:
    total = prompt_len + max_tokens
    if prompt_len >= limits.max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"{prompt_len} tokens leave no room for output within max_model_len={limits.max_model_len}; "
            f"shorten it by at least {prompt_len - limits.max_model_len + 1}",
            code=TOO_LONG,
        )
    if total > limits.max_model_len:
        raise InvalidRequestError(
            "max_tokens",
            f"a prompt of {prompt_len} tokens and max_tokens={max_tokens} exceed max_model_len={limits.max_model_len} "
            f"by {total - limits.max_model_len}; max_tokens can be {limits.max_model_len - prompt_len} at most",
            code=TOO_LONG,
        )
    pool = limits.max_pool_tokens
    if pool is not None and total > pool:
        raise InvalidRequestError(
            "max_tokens",
            f"a prompt of {prompt_len} tokens and max_tokens={max_tokens} can never fit the cache, which holds {pool} "
            f"tokens in all: {total - pool} too many; ask for less or start with a larger pool (--num-blocks-override)",
            code=TOO_LONG,
        )

"""Builds validated `EngineRequest`s from raw user input: the only way into the engine.

Every front end (Python, HTTP, gRPC, command line) calls `build_request` with its raw input, so that no check is
skipped. Values are neither clamped silently nor coerced. Messages state the error, the rule and a remedy; they never
contain the prompt.
"""

import dataclasses
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from apt_jax.config import SLO, SloClass
from apt_jax.errors import InvalidRequestError, counted, json_kind
from apt_jax.request import EngineRequest, SamplingParams, engine_id
from apt_jax.validation.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_DEADLINE_S,
    MAX_REQUEST_ID_CHARS,
    MAX_RETAIN_S,
    MAX_SEED,
    MAX_SESSION_ID_CHARS,
    MAX_SLO_S,
    MAX_WATCH_CAPACITY,
    MIN_SLO_S,
    REQUEST_ID_PATTERN,
    Encoder,
    GrammarSource,
    RequestLimits,
)
from apt_jax.validation.prompt import check_length, checked_prompt, with_room_filled
from apt_jax.validation.sampling import AS_MANY_AS_FIT, bad_words_token_ids, checked_sampling_params
from apt_jax.validation.values import (
    check_integer,
    check_number,
    check_text,
    check_token_id,
    shown,
)

_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


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
    slo_e2e_ms: object = None,
    slo_class: object = None,
    arrival_s: float,
    fallback_seed: int = 0,
    grammars: GrammarSource | None = None,
    max_queue_s: float | None = None,
    adapter: object = None,
    cache_salt: object = None,
    session_id: object = None,
    retain_s: object = None,
    work: Literal["", "tool", "person"] = "",
    tenant: str | None = None,
) -> EngineRequest:
    """Check raw input and return the request for the engine.

    Args:
        limits: limits of the engine that will serve the request.
        tokenizer: tokenizer of the model; None: the prompt must be token ids, and stop strings and bad words are
            rejected.
        prompt: text of the prompt; exactly one of `prompt` and `prompt_token_ids` is given.
        prompt_token_ids: token ids, used unchanged (no BOS token is prepended).
        params: sampling parameters, or a mapping with any subset of the fields of `SamplingParams`; None: the defaults.
            A `max_tokens` of None allows as many tokens as fit in the model's length and the cache.
        request_id: the client's label; None: a random label.
        slo: latency SLO; None: the server's default for real-time requests, no SLO for best-effort requests.
        slo_ttft_ms, slo_tbt_ms, slo_e2e_ms: raw TTFT, TBT and end-to-end SLOs in milliseconds, which replace the
            corresponding part of `slo`; None: not given.
        slo_class: "rt" (real time) or "be" (best effort); None: the server's default.
        arrival_s: arrival time on the engine's clock.
        fallback_seed: seed if the request specifies none.
        grammars: compiler for structured outputs, which may take up to two seconds; None: structured outputs are
            rejected.
        max_queue_s: see `EngineRequest`; checked by the caller.
        adapter: name of a LoRA adapter; None: no adapter.
        cache_salt, session_id, work: see `EngineRequest`.
        retain_s: raw number of seconds, see `EngineRequest`; more than `MAX_RETAIN_S` counts as `MAX_RETAIN_S`.
        tenant: see `EngineRequest`; from authentication, not from the request's input.

    Raises:
        InvalidRequestError: the input is invalid; the message is one line, and `.field` names the input.
        QueueFullError: too many new grammars are being compiled.
    """
    checked_id = check_request_id(request_id)
    checked_class = limits.default_slo_class if slo_class is None else _slo_class(slo_class)
    default_slo = limits.default_slo if checked_class == "rt" else SLO()
    checked_slo = _slo(default_slo if slo is None else slo, slo_ttft_ms, slo_tbt_ms, slo_e2e_ms)
    checked_adapter = _adapter(limits, adapter)
    checked_salt = None if cache_salt is None else _name("cache_salt", cache_salt, MAX_CACHE_SALT_CHARS)
    session = None if session_id is None else _session_id(session_id)
    checked_retain_s = None if retain_s is None else check_number("retain_s", retain_s, signed=False)
    checked_params = checked_sampling_params(limits, tokenizer, params, fallback_seed)
    keep_last = _kept_tokens(limits, checked_params)
    token_ids = checked_prompt(limits, tokenizer, prompt, prompt_token_ids, keep_last)
    if checked_params.max_tokens == AS_MANY_AS_FIT:
        checked_params = with_room_filled(limits, checked_params, token_ids.size)
    check_length(limits, token_ids.size, checked_params.max_tokens)
    check_prompt_logprobs(limits, [(token_ids.size, checked_params)])
    grammar = None
    if checked_params.structured_outputs is not None:  # the slowest check, last
        if grammars is None:
            raise InvalidRequestError(
                "structured_outputs",
                "this model has no tokenizer, so its output has no text; start with one (--tokenizer DIR)",
            )
        grammar = grammars.compile(checked_params.structured_outputs, ends_at_eos=not checked_params.ignore_eos)
    return EngineRequest(
        request_id=engine_id(tenant, checked_id),
        prompt=prompt if isinstance(prompt, str) and keep_last is None else None,
        prompt_token_ids=token_ids,
        params=checked_params,
        slo=checked_slo,
        arrival_s=arrival_s,
        slo_class=checked_class,
        grammar=grammar,
        bad_words_token_ids=bad_words_token_ids(limits, tokenizer, checked_params.bad_words),
        max_queue_s=max_queue_s,
        adapter=checked_adapter,
        cache_salt=checked_salt,
        session_id=session,
        retain_s=None if checked_retain_s is None else min(checked_retain_s, MAX_RETAIN_S),
        work=work,
        tenant=tenant,
    )


def _name(field: str, value: object, max_chars: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= max_chars:
        raise InvalidRequestError(field, f"must be a string of 1 to {max_chars} characters")
    return check_text(field, value)


def is_session_id(value: object) -> bool:
    """Return whether `value` can name a session: 1 to `MAX_SESSION_ID_CHARS` characters, without control characters and
    lone surrogates."""
    return isinstance(value, str) and 1 <= len(value) <= MAX_SESSION_ID_CHARS and not _CONTROL.search(value)


def _session_id(value: object) -> str:
    checked = _name("session_id", value, MAX_SESSION_ID_CHARS)
    if not is_session_id(checked):
        raise InvalidRequestError("session_id", f"{shown(checked)} must not contain control characters")
    return checked


def build_requests(
    limits: RequestLimits, tokenizer: Encoder | None, *, n: object = None, **fields: Any
) -> list[EngineRequest]:
    """Build `n` requests, one for each output of a prompt; None: the `n` of the sampling parameters. See
    `build_request` for the other arguments.

    Returns:
        The requests, which differ only in their ids (``ID``, ``ID#1``, ``ID#2``, ...; clients cannot choose ids with
        ``#``) and seeds (``seed + i``, as in vLLM).

    Raises:
        InvalidRequestError, QueueFullError: see `build_request`.
    """
    count = None if n is None else check_sequences(limits, 1, n)
    first = build_request(limits, tokenizer, **fields)
    if count is None:
        count = check_sequences(limits, 1, first.params.n)
    first = dataclasses.replace(first, num_outputs=count)
    check_prompt_logprobs(limits, [(first.prompt_token_ids.size, first.params)] * count)
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
    """Check and return the capacity of a subscriber's buffer, in scheduler iterations.

    Raises:
        InvalidRequestError: `value` is not an integer in [1, `MAX_WATCH_CAPACITY`].
    """
    return check_integer("capacity", value, 1, MAX_WATCH_CAPACITY)


def check_deadline_ms(value: object) -> float:
    """Convert a raw deadline in milliseconds to seconds.

    Raises:
        InvalidRequestError: `value` is not a positive number, or is more than a day.
    """
    seconds = check_number("deadline_ms", value) / 1e3
    if not 0.0 < seconds <= MAX_DEADLINE_S:
        raise InvalidRequestError(
            "deadline_ms",
            f"{shown(value)} must be a positive number of milliseconds, at most one day",
        )
    return seconds


def check_sequences(limits: RequestLimits, num_prompts: int, n: object) -> int:
    """Check and return `n`, the number of outputs per prompt.

    Raises:
        InvalidRequestError: `n` is not a valid integer, or prompts times `n` exceeds `RequestLimits.max_sequences`.
    """
    most = limits.max_sequences
    count = check_integer("n", n, 1, most)
    if num_prompts * count > most:
        field = "prompt" if count == 1 else "n"
        raise InvalidRequestError(
            field,
            f"{counted(num_prompts, 'prompt')} and n={count} ask for more than {most} answers at once; send several requests (--set max_sequences_per_call)",
        )
    return count


def _kept_tokens(limits: RequestLimits, params: SamplingParams) -> int | None:
    """Return the number of tokens to keep at the end of the prompt; None: all."""
    keep = params.truncate_prompt_tokens
    if keep != -1:
        return keep
    longest = min(limits.max_model_len, limits.max_pool_tokens or limits.max_model_len)
    output = max(params.min_tokens, 1) if params.max_tokens == AS_MANY_AS_FIT else params.max_tokens
    return max(longest - output, 1)  # if nothing fits, the length check rejects the request


def check_prompt_logprobs(limits: RequestLimits, requests: Sequence[tuple[int, SamplingParams]]) -> None:
    """Check that the requests of a call do not ask for too many prompt log probabilities in total.

    Args:
        limits: limits of the engine.
        requests: prompt length and sampling parameters of each request.

    Raises:
        InvalidRequestError: the number exceeds `RequestLimits.max_prompt_logprobs`.
    """
    wanted = sum(size * (p.prompt_logprobs + 1) for size, p in requests if p.prompt_logprobs is not None)
    if wanted > limits.max_prompt_logprobs:
        raise InvalidRequestError(
            "prompt_logprobs",
            f"the prompts ask for {wanted} log probabilities, at most {limits.max_prompt_logprobs} are returned at once; "
            "send shorter or fewer prompts, or ask for fewer tokens at each position",
        )


def check_token_ids(limits: RequestLimits, field: str, value: object, most: int) -> list[int]:
    """Check and return a list of at most `most` token ids of the vocabulary, possibly empty.

    Raises:
        InvalidRequestError: `value` is not such a list.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise InvalidRequestError(field, f"{json_kind(value)} is not a list of token ids")
    if len(value) > most:
        raise InvalidRequestError(field, f"{len(value)} ids, at most {most} are allowed")
    return [check_token_id(f"{field}[{i}]", t, limits.vocab_size) for i, t in enumerate(value)]


def check_request_id(value: object) -> str:
    """Check and return the label of a request; None: return a random label.

    Raises:
        InvalidRequestError: `value` is not a valid label.
    """
    if value is None:
        return f"req-{uuid.uuid4().hex}"
    if not isinstance(value, str) or not _REQUEST_ID.fullmatch(value):
        raise InvalidRequestError(
            "request_id",
            f"{shown(value)} must be 1 to {MAX_REQUEST_ID_CHARS} characters of [A-Za-z0-9._-]; leave it out for a random one",
        )
    return value


def _adapter(limits: RequestLimits, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and value in limits.adapters:
        return value
    known = ", ".join(repr(name) for name in limits.adapters[:8]) or "none"
    raise InvalidRequestError("adapter", f"{shown(value)} is not a LoRA adapter here; known: {known} (--lora-modules)")


def _slo_class(value: object) -> SloClass:
    if value == "rt":
        return "rt"
    if value == "be":
        return "be"
    raise InvalidRequestError("slo_class", f"{shown(value)} must be 'rt' (real time) or 'be' (best effort)")


def _slo(slo: object, ttft_ms: object, tbt_ms: object, e2e_ms: object) -> SLO:
    if not isinstance(slo, SLO):
        parts = "ttft_s=..., tbt_s=..."
        if isinstance(slo, Mapping) and slo:
            parts = ", ".join(f"{name}={shown(value)}" for name, value in list(slo.items())[:2])
        raise InvalidRequestError("slo", f"{json_kind(slo)} is not an SLO; use SLO({parts:.100})")

    def objective(field: str, value: object, raw_ms: object) -> float:
        if raw_ms is not None:
            seconds = check_number(field, raw_ms, signed=False) / 1e3
        elif isinstance(value, float) and value == math.inf:
            return math.inf
        else:
            seconds = check_number(field, value, signed=False)
        if not MIN_SLO_S <= seconds <= MAX_SLO_S:
            raise InvalidRequestError(
                field,
                f"an objective of {seconds:.3g} s must lie in [{MIN_SLO_S:g}, {MAX_SLO_S:g}] s; leave it out for none",
            )
        return seconds

    return SLO(
        ttft_s=objective("slo_ttft_ms" if ttft_ms is not None else "slo.ttft_s", slo.ttft_s, ttft_ms),
        tbt_s=objective("slo_tbt_ms" if tbt_ms is not None else "slo.tbt_s", slo.tbt_s, tbt_ms),
        e2e_s=objective("slo_e2e_ms" if e2e_ms is not None else "slo.e2e_s", slo.e2e_s, e2e_ms),
    )

"""Builds engine requests from bodies of OpenAI's completions and chat completions.

This module defines the meaning of the fields; `apt_jax.validation` checks their values, as for every other protocol.
Unknown fields are ignored, as in vLLM. Known fields that would change the output but are not supported are rejected
(`serve.http_api.unsupported_fields`), because ignoring them silently would give wrong results.
"""

import dataclasses
import functools
import json
import re
import time
import types
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from apt_jax.errors import DuplicateRequestError, InvalidRequestError, json_kind
from apt_jax.frontend.components import EngineComponents
from apt_jax.request import WAYS_OUT, EngineRequest, SamplingParams
from apt_jax.text.detokenizer import IncrementalDetokenizer
from apt_jax.text.tokenizer import Tokenizer
from apt_jax.validation import (
    MAX_INTEGER,
    check_deadline_ms,
    check_integer,
    check_prompt_logprobs,
    check_request_id,
    check_sequences,
    is_session_id,
)
from serve.generate_call import LONG_PROMPT_CHARS, require_served_model
from serve.http_api.constraint_fields import OWN_FIELD, Constraint, read_constraint
from serve.http_api.errors import Renamer
from serve.http_api.infill import ending_with_middle, prompt_around
from serve.http_api.openai_bodies import ChatBody, CompletionBody, ConversationBody, Generation, StreamOptions
from serve.http_api.records import read
from serve.http_api.tool_calls.definitions import ToolSet, read_tools
from serve.http_api.tool_calls.other_forms import OLD_NAMES, uses_functions, with_tools
from serve.http_api.tool_calls.plan import OutputPlan, plan_output, told
from serve.slo_headers import OBJECTIVE_KEYS, TIER_KEY, class_of_tier, max_queue_s, milliseconds, session_id, used_tier

Kind = Literal["completion", "chat"]
Body = Mapping[str, Any]

MAX_CONTAINERS = 2**16
"""Maximum number of lists and objects in one body; limited because the parser holds the GIL while it creates them."""
MAX_NAMES = 3 * 2**15
"""Maximum number of names in one body; limited because the parser holds the GIL, but enough for any conversation."""
MAX_VALUES = 2**19
"""Maximum number of values in one body; limited because the parser holds the GIL, but enough for any prompt."""
_MAX_EFFORT_CHARS = 32
_TTL = re.compile(r"([1-9][0-9]{0,5})([smh])", re.ASCII)
_TOKEN_ID = re.compile(r"-?[0-9]{1,10}")

# Sampling parameters that have the same names in bodies as in `SamplingParams`.
PLAIN = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("max_tokens", "logprobs", "logit_bias", "structured_outputs", "pooling", "n")
)


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a body. Unlike `json.loads`, reject duplicate names, NaN and infinity.

    Raises:
        InvalidRequestError: the body is not a JSON object, or has more than `MAX_CONTAINERS` lists and objects,
            `MAX_NAMES` names or `MAX_VALUES` values.
    """
    surplus = _surplus(data)
    if surplus is not None:
        raise InvalidRequestError("body", f"contains more than {surplus}; send less at once")

    def constant(name: str) -> object:
        raise ValueError(f"{name} is not JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            raise ValueError("a name is repeated in one object")
        return made

    try:
        value = json.loads(
            data.decode("utf-8"), parse_constant=constant, parse_float=_fraction, object_pairs_hook=pairs
        )
    except UnicodeDecodeError:
        raise InvalidRequestError("body", "is not UTF-8") from None
    except RecursionError:
        raise InvalidRequestError("body", "is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError("body", f"is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:
        ours = str(error).startswith(("a name", "NaN", "Infinity", "-Infinity"))
        raise InvalidRequestError("body", str(error) if ours else "contains a number that is too long") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("body", "is not a JSON object")
    return value


def _fraction(text: str) -> float:
    """Parse a number with a fraction or exponent. Because this is a Python function, the parser can release the GIL
    while it parses a long list of such numbers."""
    return float(text)


def _surplus(data: bytes) -> str | None:
    """Return the limit that a JSON body exceeds, as text for the error message, such as "65536 lists and objects".

    None if it exceeds no limit. Characters in strings are not counted. Takes time linear in the size of `data`. The
    counts are exact up to the first syntax error, where the parser stops.
    """
    bounds = ((MAX_CONTAINERS, "lists and objects", b"[{"), (MAX_NAMES, "names", b":"), (MAX_VALUES, "values", b","))
    doubtful = [bound for bound in bounds if sum(map(data.count, bound[2])) > bound[0]]
    if not doubtful:
        return None
    # Without escaped backslashes, then without escaped quotes, every quote begins or ends a string.
    text = np.frombuffer(data.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    in_string = np.bitwise_xor.accumulate((text == ord('"')).view(np.uint8)).astype(bool)
    outside = text[~in_string]
    for most, what, marks in doubtful:
        if sum(int(np.count_nonzero(outside == mark)) for mark in marks) > most:
            return f"{most} {what}"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionCall:
    """The engine requests built from one body, and the format of the response."""

    kind: Kind
    call_id: str
    created_s: int
    model: str
    requests: Sequence[EngineRequest]
    """`n` requests per prompt, in the order of the prompts."""
    n: int
    """Number of completions per prompt."""
    deadline_s: float | None
    """Deadline in seconds on the engine's clock; None if there is no deadline."""
    stream: bool
    include_usage: bool
    """True if the last chunk of a stream has the token usage."""
    continuous_usage: bool
    """True if every chunk of a stream has the token usage so far."""
    echoes: Sequence[str] | None
    """Text of each prompt, which is repeated before its completions; None without `echo`."""
    echo_logprobs: bool = False
    """True if log probabilities begin with the log probabilities of the echoed prompt."""
    prompt_logprobs: bool = False
    """True if choices have the log probabilities of the prompt."""
    without_output: bool = False
    """True if the response is only about the prompt, in which case the single generated token is left out."""
    token_ids: bool
    """True if choices have token ids."""
    tokens_as_ids: bool
    """True if log probabilities show tokens as ids instead of text."""
    timings: bool
    """True if choices have timings and SLO attainment."""
    service_tier: str
    """Service tier of the call (`serve.slo_headers.USED_TIERS`)."""
    renamed: Renamer
    """Renames an error's field to its name in the body."""
    output: OutputPlan = OutputPlan()  # noqa: RUF009 - frozen
    """Determines how outputs are parsed: `output.parser()` creates the parser of one choice."""
    functions: bool = False
    """True if the body has `functions`, in which case choices have `function_call` instead of `tool_calls`."""

    def with_requests(self, requests: Sequence[EngineRequest]) -> "CompletionCall":
        return dataclasses.replace(self, requests=requests)


def is_slow(kind: Kind, body: Body) -> bool:
    """Return whether `read_call` must run in a thread because it waits for other processes or tokenizes long text."""
    texts = body.get("prompt"), body.get("suffix") or ""
    return kind == "chat" or not all(isinstance(text, str) and len(text) <= LONG_PROMPT_CHARS for text in texts)


def read_call(
    parts: EngineComponents,
    kind: Kind,
    body: Body,
    headers: Mapping[str, str],
    arrival_s: float,
    tenant: str | None = None,
) -> CompletionCall:
    """Check a body and build its requests. Their constraints may not be compiled yet
    (`apt_jax.structured.compiler.PendingGrammar`).

    Args:
        parts: the engine's components.
        kind: whether the endpoint is for completions or chat completions.
        body: the body from `parse_json`.
        headers: headers of the call, with names in lower case.
        arrival_s: arrival time on the engine's clock.
        tenant: owner of the call's API key; None without keys.

    Raises:
        InvalidRequestError: the body is invalid; `.field` names a field of the body or a header.
        UnknownModelError: the body names a model that the server does not serve.
    """
    if kind == "completion":
        return build_call(parts, read(CompletionBody, body), headers, arrival_s, tenant, body)
    return build_call(parts, read(ChatBody, with_tools(body)), headers, arrival_s, tenant, body)


def build_call(
    parts: EngineComponents,
    asked: CompletionBody | ChatBody,
    headers: Mapping[str, str],
    arrival_s: float,
    tenant: str | None,
    given: Body = types.MappingProxyType({}),
) -> CompletionCall:
    """Build the requests for a body that has already been converted to a record; see `read_call`.

    Args:
        parts, headers, arrival_s, tenant: see `read_call`.
        asked: the body as a record.
        given: the raw body, for constraints and field names in errors.
    """
    check_model(parts, asked.model)
    kind: Kind = "chat" if isinstance(asked, ChatBody) else "completion"
    options = StreamOptions() if asked.stream_options is None else asked.stream_options
    if asked.stream_options is not None and not asked.stream:
        raise InvalidRequestError("stream_options", "requires stream=true")
    constraint = read_constraint(given)
    fields = {
        "params": _sampling_fields(asked, constraint),
        "arrival_s": arrival_s,
        "adapter": parts.adapter_named(asked.model),
        "cache_salt": asked.cache_salt,
        "session_id": _session(asked, headers),
        "retain_s": _retain_s(asked),
        "work": _work(asked),
        "tenant": tenant,
        "grammars": parts.pending_grammars,
        **_slo_fields(asked, headers),
        "max_queue_s": max_queue_s(headers),
    }
    base_id = f"req-{uuid.uuid4().hex}" if asked.request_id is None else asked.request_id
    output, slo_names = OutputPlan(), _slo_names(asked, headers)
    try:
        if isinstance(asked, ChatBody):
            prompts = _conversation(parts, asked)
            ids, continues = prompts[0]["prompt_token_ids"], bool(asked.continue_final_message)
            output = plan_output(parts, _tools(asked), ids, constraint, continues=continues)
            fields["params"].update(output.fields)
        else:
            prompts = _prompts(parts, asked)
        n = check_sequences(parts.limits, len(prompts), 1 if asked.n is None else asked.n)
        _check_best_of(parts, asked.best_of, n)
        requests = _requests(parts, prompts, n, base_id, fields)
        if isinstance(asked, CompletionBody) and asked.suffix:
            requests = [ending_with_middle(parts, request) for request in requests]
        check_prompt_logprobs(parts.limits, [(r.prompt_token_ids.size, r.params) for r in requests])
        deadline_ms = _slo_value(asked, "deadline_ms")
        deadline_s = None if deadline_ms is None else arrival_s + check_deadline_ms(deadline_ms)
    except InvalidRequestError as error:
        raise _renamed(error, kind, given, output, slo_names) from None
    if fields["work"] == "tool" and len(requests) == 1:
        request_id = requests[0].request_id
        output = told(output, lambda has_calls: parts.engine.note_answer(request_id, "tool" if has_calls else "person"))
    echoes = _echoes(parts, requests[::n]) if isinstance(asked, CompletionBody) and asked.echo else None
    return CompletionCall(
        kind=kind,
        call_id=f"{'cmpl' if kind == 'completion' else 'chatcmpl'}-{base_id}",
        created_s=int(time.time()),
        model=requests[0].adapter or parts.model_name,
        requests=requests,
        n=n,
        deadline_s=deadline_s,
        stream=bool(asked.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        echoes=echoes,
        echo_logprobs=echoes is not None and asked.logprobs is not None,
        prompt_logprobs=asked.prompt_logprobs is not None,
        without_output=kind == "completion" and asked.max_tokens == 0,
        token_ids=bool(asked.return_token_ids),
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        timings=bool(asked.aptjax_timings),
        service_tier=used_tier(requests[0].slo_class, _tier(asked, headers)),
        renamed=functools.partial(_renamed, kind=kind, body=given, output=output, slo_names=slo_names),
        output=output,
        functions=kind == "chat" and uses_functions(given),
    )


def _session(asked: CompletionBody | ChatBody, headers: Mapping[str, str]) -> object:
    """Return the session of a call: as the body names it, by its own field or OpenAI's, or else a header."""
    if asked.session_id is not None:
        return asked.session_id
    key = asked.prompt_cache_key  # for other servers it is advice, so an invalid one is ignored
    return key if is_session_id(key) else session_id(headers)


def _retain_s(asked: CompletionBody | ChatBody) -> float | None:
    """Return the time for which a client asks to keep the cached prefix, in seconds; None: it does not ask."""
    ttl = None if asked.prompt_cache_options is None else asked.prompt_cache_options.ttl
    if ttl is None:
        return None
    found = _TTL.fullmatch(ttl)
    if found is None:
        raise InvalidRequestError("prompt_cache_options.ttl", f"{ttl[:40]!r} is not a duration such as 5m, 30m or 12h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _work(asked: CompletionBody | ChatBody) -> Literal["", "tool", "person"]:
    """Return the most likely kind of work between the answer and the next call."""
    if not isinstance(asked, ChatBody):
        return ""
    return "tool" if asked.tools and asked.tool_choice != "none" else "person"


def check_model(parts: EngineComponents, model: object) -> None:
    """Check that a body names a served model or omits the name.

    Raises:
        UnknownModelError: the server does not serve this model.
        InvalidRequestError: the name is not text.
    """
    if model is None or model == "":
        return
    if not isinstance(model, str):
        raise InvalidRequestError("model", f"{json_kind(model)} is not a name")
    require_served_model(parts, model)


def _check_best_of(parts: EngineComponents, best_of: object, n: int) -> None:
    if best_of is not None and check_integer("best_of", best_of, 1, parts.limits.max_sequences) != n:
        raise InvalidRequestError("best_of", f"must equal n; {WAYS_OUT['best_of']}")


def _sampling_fields(body: Generation, constraint: Constraint | None) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a body sets, not yet validated."""
    fields = {name: value for name in PLAIN if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    if constraint is not None:
        fields["structured_outputs"] = constraint.value
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs", "is not available with stream=true")
    if isinstance(body, CompletionBody):
        most = body.max_tokens
        if most is not None:
            fields["max_tokens"] = most
        if body.logprobs is not None:
            fields["logprobs"] = body.logprobs
            if body.echo:
                fields.setdefault("prompt_logprobs", body.logprobs)
        if most == 0 and type(most) is int and (body.echo or "prompt_logprobs" in fields):
            fields["max_tokens"] = 1  # the engine generates at least one token; the response leaves it out
        return fields
    assert isinstance(body, ChatBody)
    most, newer = body.max_tokens, body.max_completion_tokens
    if newer is not None and most is not None:
        check_integer("max_tokens", most, 1, MAX_INTEGER)
    fields["max_tokens"] = most if newer is None else newer  # None: as many as fit
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidRequestError("top_logprobs", "requires logprobs=true")
    return fields


def _logit_bias(value: object) -> object:
    """Convert the keys of `logit_bias`, which JSON requires to be strings, to token ids. Other keys are kept for
    validation to reject."""
    if not isinstance(value, Mapping):
        return value
    changed = {int(k) if _TOKEN_ID.fullmatch(k) else k: v for k, v in value.items()}
    if len(changed) != len(value):
        raise InvalidRequestError("logit_bias", "a token id is given twice")
    return changed


_SLO_PARTS = {
    **{part: f"slo_{part}" for part in OBJECTIVE_KEYS},
    "class": "slo_class",
    "deadline_ms": "deadline_ms",
}
"""Maps fields of `slo` to the equivalent top-level fields."""


def _nested_slo(body: Generation, part: str) -> object:
    return None if body.slo is None else getattr(body.slo, "slo_class" if part == "class" else part)


def _slo_names(body: Generation, headers: Mapping[str, str]) -> dict[str, str]:
    """Return a map from the names of SLO fields and the deadline in errors to the names that the client used."""
    names: dict[str, str] = {}
    for part, flat in _SLO_PARTS.items():
        sent = [flat] if getattr(body, flat) is not None else []
        sent += [f"slo.{part}"] if _nested_slo(body, part) is not None else []
        sent += [key for key in OBJECTIVE_KEYS.get(part, ()) if key in headers]
        names |= dict.fromkeys((flat, f"slo.{part}"), sent[0]) if sent else {}
    return names


def _slo_value(body: Generation, part: str) -> object:
    """Return a field of `slo` or the equivalent top-level field.

    Raises:
        InvalidRequestError: the body has both.
    """
    nested, flat = _nested_slo(body, part), getattr(body, _SLO_PARTS[part])
    if nested is not None and flat is not None:
        raise InvalidRequestError(_SLO_PARTS[part], f"is also given in slo.{part}; give it once")
    return flat if nested is None else nested


def _slo_fields(body: Generation, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the latency objectives and SLO class from the body, or else from headers; None: the server's default."""
    *objectives, slo_class = (_slo_value(body, part) for part in (*OBJECTIVE_KEYS, "class"))
    of_priority = ("be" if body.priority > 0 else "rt") if body.priority else None  # as in vLLM, lower values run first
    return {
        **{
            _SLO_PARTS[part]: milliseconds(headers, keys) if value is None else value
            for (part, keys), value in zip(OBJECTIVE_KEYS.items(), objectives, strict=True)
        },
        "slo_class": of_priority or class_of_tier(_tier(body, headers)) if slo_class is None else slo_class,
    }


def _tier(body: Generation, headers: Mapping[str, str]) -> object:
    """Return the requested service tier from the body or a header; None if there is none."""
    return headers.get(TIER_KEY) if body.service_tier is None else body.service_tier


def _prompts(parts: EngineComponents, body: CompletionBody) -> list[dict[str, Any]]:
    """Return a `prompt` or `prompt_token_ids` field for each prompt, not yet validated."""
    prompt = body.prompt
    if body.suffix:
        return [{"prompt_token_ids": ids} for ids in _around_middle(parts, body, body.suffix)]
    if isinstance(prompt, list):
        if not prompt:  # validation rejects it
            return [{"prompt_token_ids": prompt}]
        if all(isinstance(item, str) for item in prompt):
            return [{"prompt": item} for item in prompt]
        if all(isinstance(item, list) for item in prompt):
            return [{"prompt_token_ids": item} for item in prompt]
        return [{"prompt_token_ids": prompt}]
    return [{"prompt": prompt}]


def _around_middle(parts: EngineComponents, body: CompletionBody, suffix: str) -> list[list[int]]:
    """Return the token ids of each prompt in a body that has a `suffix`."""
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise InvalidRequestError(name, "cannot be given together with suffix")
    texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("prompt", "must be a text or a list of texts if there is a suffix")
    return [prompt_around(parts, text, suffix) for text in texts]


def _conversation(parts: EngineComponents, body: ChatBody) -> list[dict[str, Any]]:
    """Return a list of one prompt: the token ids of the conversation."""
    return [{"prompt_token_ids": conversation_ids(parts, body, truncated=body.truncate_prompt_tokens is not None)}]


def conversation_ids(
    parts: EngineComponents, body: ChatBody | ConversationBody, *, truncated: bool = False
) -> list[int]:
    """Return the token ids of a conversation's prompt; see `EngineComponents.chat_prompt`.

    Raises:
        InvalidRequestError: the conversation is malformed, or both `continue_final_message` and
            `add_generation_prompt` are true.
    """
    continues = bool(body.continue_final_message)
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and begins:
        raise InvalidRequestError(
            "continue_final_message", "requires add_generation_prompt=false: the answer continues the last message"
        )
    variables, effort = body.chat_template_kwargs, body.reasoning_effort
    if isinstance(effort, str) and len(effort) <= _MAX_EFFORT_CHARS and isinstance(variables, Mapping | None):
        variables = {"reasoning_effort": effort, **(variables or {})}  # the name of the variable in chat templates
    return parts.chat_prompt(
        body.messages,
        tools=_tools(body).definitions,
        truncated=truncated,
        add_generation_prompt=begins,
        continue_final_message=continues,
        template_kwargs=variables,
    )


def _tools(body: ChatBody | ConversationBody) -> ToolSet:
    return read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)


def _requests(
    parts: EngineComponents,
    prompts: Sequence[Mapping[str, Any]],
    n: int,
    base_id: object,
    fields: Mapping[str, Any],
) -> list[EngineRequest]:
    """Build `n` requests per prompt."""
    base_id = check_request_id(base_id)
    requests: list[EngineRequest] = []
    for number, prompt in enumerate(prompts):
        request_id = f"{base_id}-{number}" if len(prompts) > 1 else base_id
        try:
            requests += parts.build_requests(n=n, request_id=request_id, **prompt, **fields)
        except InvalidRequestError as error:
            name, bracket, rest = error.field.partition("[")
            if len(prompts) == 1 or name not in prompt:
                raise
            raise error.renamed(f"{name}[{number}]{bracket}{rest}") from None
    return requests


def _echoes(parts: EngineComponents, requests: Iterable[EngineRequest]) -> Sequence[str]:
    if parts.tokenizer is None:
        raise InvalidRequestError("echo", "this model has no tokenizer, so its prompts have no text")
    return [_echo(parts.tokenizer, r) if r.prompt is None else r.prompt for r in requests]


def _echo(tokenizer: Tokenizer, request: EngineRequest) -> str:
    """Return the text of a prompt of token ids.

    An incomplete last character is left out, because the output completes it. With a constraint, the output does not,
    so the character is kept.
    """
    text = tokenizer.decode(request.prompt_token_ids.tolist(), skip_special_tokens=False)
    if request.grammar is not None:
        return text
    return text.removesuffix(IncrementalDetokenizer(tokenizer, request.prompt_token_ids).flush())


def _renamed(
    error: InvalidRequestError, kind: Kind, body: Body, output: OutputPlan, slo_names: Mapping[str, str]
) -> InvalidRequestError:
    """Return the error with its field renamed to the name in the body."""
    if isinstance(error, DuplicateRequestError):
        return error
    name, bracket, rest = error.field.partition("[")
    prompt = "prompt" if kind == "completion" else "messages"
    names = {**slo_names, "prompt": prompt, "prompt_token_ids": prompt}
    if kind == "chat" and body.get("max_completion_tokens") is not None:
        names["max_tokens"] = "max_completion_tokens"
    if kind == "chat":
        names["logprobs"] = "top_logprobs"
    if name.startswith(OWN_FIELD):
        constraint = read_constraint(body)
        if constraint is not None and constraint.field != OWN_FIELD:
            names[name] = constraint.field
        if output.constrains_calls:
            names[name] = "tools"
    if kind == "chat" and uses_functions(body):
        names |= {**OLD_NAMES, **{key: OLD_NAMES.get(value, value) for key, value in names.items()}}
    return error if name not in names else error.renamed(names[name] + bracket + rest)

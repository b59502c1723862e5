"""Bodies of OpenAI's completions and chat completions, and the engine requests that they ask for.

This module decides what a field means, `apt_jax.validation` whether its value is valid, as for every other protocol.
Unknown fields are ignored, as in vLLM. Known fields that would change the output and are not supported are rejected
(`serve.http_api.unsupported_fields`): a response that silently ignores them would be worse than none.
"""

import dataclasses
import functools
import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from apt_jax.errors import DuplicateRequestError, InvalidRequestError, json_kind
from apt_jax.frontend.components import EngineComponents
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.text.detokenizer import IncrementalDetokenizer
from apt_jax.text.tokenizer import Tokenizer
from apt_jax.validation import (
    MAX_INTEGER,
    MAX_LOGPROBS,
    check_deadline_ms,
    check_flag,
    check_integer,
    check_mapping,
    check_prompt_logprobs,
    check_request_id,
    check_sequences,
)
from serve.generate_call import LONG_PROMPT_CHARS, require_served_model
from serve.http_api.constraint_fields import OWN_FIELD, read_constraint
from serve.http_api.infill import ending_with_middle, prompt_around
from serve.http_api.tool_calls.definitions import ToolSet, read_tools
from serve.http_api.tool_calls.other_forms import OLD_NAMES, uses_functions, with_tools
from serve.http_api.tool_calls.plan import OutputPlan, plan_output
from serve.http_api.unsupported_fields import reject_unsupported
from serve.slo_headers import TBT_KEYS, TIER_KEY, TTFT_KEYS, class_of_tier, max_queue_s, milliseconds, used_tier

Kind = Literal["completion", "chat"]
Body = Mapping[str, Any]

MAX_CONTAINERS = 2**16
"""Lists and objects of one body: the parser makes them with the interpreter's lock held."""
MAX_NAMES = 3 * 2**15
"""Names in all objects of one body, for the same reason: more than the longest conversation has."""
MAX_VALUES = 2**19
"""Values of one body, for the same reason: more than there are token ids in a prompt."""
MAX_PRIORITY = 2**63 - 1
_MAX_EFFORT_CHARS = 32
_TOKEN_ID = re.compile(r"-?[0-9]{1,10}")

# Sampling parameters that bodies hold under the names of `SamplingParams`.
PLAIN = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("max_tokens", "logprobs", "logit_bias", "structured_outputs", "pooling")
)

ADD_SPECIAL_TOKENS = {"completion": True, "chat": False}


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a body; stricter than `json.loads`, which accepts duplicate names.

    Raises:
        InvalidRequestError: it is not a JSON object, or holds more than `MAX_CONTAINERS` lists and objects,
            `MAX_NAMES` names or `MAX_VALUES` values.
    """
    surplus = _surplus(data)
    if surplus is not None:
        raise InvalidRequestError("body", f"holds more than {surplus}; send less at once")

    def constant(name: str) -> object:
        raise ValueError(f"{name} is not JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            raise ValueError("a name comes twice in one object")
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
        raise InvalidRequestError("body", str(error) if ours else "holds a number that is too long") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("body", "is not a JSON object")
    return value


def _fraction(text: str) -> float:
    """Parse a number that is not an integer. The parser's own function would hold the interpreter's lock over all of them."""
    return float(text)


def _surplus(data: bytes) -> str | None:
    """Return the bound that a body exceeds outside of strings; None: it exceeds none. Linear in `data` of any content.

    Exact for as much of `data` as is JSON, beyond which the parser does not go.
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
    """The engine requests of one body, and the format of the response."""

    kind: Kind
    call_id: str
    created_s: int
    model: str
    requests: Sequence[EngineRequest]
    """Those of the first prompt, then of the second, and so on."""
    n: int
    """Completions of each prompt."""
    deadline_s: float | None
    """On the engine's clock."""
    stream: bool
    include_usage: bool
    """A stream ends with a chunk of usage."""
    continuous_usage: bool
    """Every chunk of a stream has the usage so far."""
    echoes: Sequence[str] | None
    """Text before the completion, by prompt."""
    echo_logprobs: bool = False
    """Log probabilities begin with those of the prompt."""
    prompt_logprobs: bool = False
    """Choices hold the log probabilities of the prompt."""
    without_output: bool = False
    """The response is about the prompt alone: the one token that was generated is left out."""
    token_ids: bool
    """Choices hold token ids."""
    tokens_as_ids: bool
    """Log probabilities name tokens by their ids."""
    timings: bool
    """Choices hold timings and SLO attainment."""
    service_tier: str
    """The tier that it is served in (`serve.slo_headers.USED_TIERS`)."""
    renamed: Callable[[InvalidRequestError], InvalidRequestError]
    """Gives the field in an error the name that it has in the body."""
    output: OutputPlan = OutputPlan()  # noqa: RUF009 - frozen
    """How outputs are read: `output.parser()` makes the parser of one choice."""
    functions: bool = False
    """The call in a choice is `function_call`, as the body has `functions`."""

    def with_requests(self, requests: Sequence[EngineRequest]) -> "CompletionCall":
        return dataclasses.replace(self, requests=requests)


def is_slow(kind: Kind, body: Body) -> bool:
    """Return whether `read_call` waits for other processes or tokenizes much, and so belongs in a thread."""
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
    """Check a body and build the requests that it asks for. Their constraints may be yet to be compiled
    (`apt_jax.structured.compiler.PendingGrammar`).

    Args:
        parts: of the engine.
        kind: of endpoint.
        body: from `parse_json`.
        headers: of the call, lower case.
        arrival_s: on the engine's clock.
        tenant: owner of the call's API key.

    Raises:
        InvalidRequestError: one line; `.field` names a field of the body or a header.
        UnknownModelError: another model is asked for.
    """
    check_model(parts, body)
    _reject_unsupported(kind, body)
    given = body
    if kind == "chat":
        body = with_tools(body)
    stream = flag(body, "stream")
    options = body.get("stream_options")
    if options is not None:
        options = check_mapping("stream_options", options)
        if not stream:
            raise InvalidRequestError("stream_options", "goes with stream=true alone")
    fields = {
        "params": _sampling_fields(kind, body),
        "arrival_s": arrival_s,
        "adapter": parts.adapter_named(body.get("model")),
        "cache_salt": body.get("cache_salt"),
        "tenant": tenant,
        "grammars": parts.pending_grammars,
        **_slo_fields(body, headers),
        "max_queue_s": max_queue_s(headers),
    }
    base_id = body.get("request_id")
    if base_id is None:
        base_id = f"req-{uuid.uuid4().hex}"
    output, slo_names = OutputPlan(), _slo_names(body, headers)
    try:
        prompts = _prompts(parts, body) if kind == "completion" else _conversation(parts, body)
        if kind == "chat":
            continues, ids = flag(body, "continue_final_message"), prompts[0]["prompt_token_ids"]
            output = plan_output(parts, _tools(body), ids, read_constraint(body), continues=continues)
            fields["params"].update(output.fields)
        n = check_sequences(parts.limits, len(prompts), 1 if body.get("n") is None else body["n"])
        _check_best_of(parts, body, n)
        requests = _requests(parts, prompts, n, base_id, fields)
        if kind == "completion" and body.get("suffix"):
            requests = [ending_with_middle(parts, request) for request in requests]
        check_prompt_logprobs(parts.limits, [(r.prompt_token_ids.size, r.params) for r in requests])
        deadline_ms = _slo_value(body, "deadline_ms")
        deadline_s = None if deadline_ms is None else arrival_s + check_deadline_ms(deadline_ms)
    except InvalidRequestError as error:
        raise _renamed(error, kind, given, output, slo_names) from None
    echoes = _echoes(parts, body, requests[::n]) if kind == "completion" else None
    return CompletionCall(
        kind=kind,
        call_id=f"{'cmpl' if kind == 'completion' else 'chatcmpl'}-{base_id}",
        created_s=int(time.time()),
        model=requests[0].adapter or parts.model_name,
        requests=requests,
        n=n,
        deadline_s=deadline_s,
        stream=stream,
        include_usage=options is not None and flag(options, "include_usage", "stream_options."),
        continuous_usage=options is not None and flag(options, "continuous_usage_stats", "stream_options."),
        echoes=echoes,
        echo_logprobs=echoes is not None and body.get("logprobs") is not None,
        prompt_logprobs=body.get("prompt_logprobs") is not None,
        without_output=kind == "completion" and body.get("max_tokens") == 0,
        token_ids=flag(body, "return_token_ids"),
        tokens_as_ids=flag(body, "return_tokens_as_token_ids"),
        timings=flag(body, "aptjax_timings"),
        service_tier=used_tier(requests[0].slo_class, _tier(body, headers)),
        renamed=functools.partial(_renamed, kind=kind, body=given, output=output, slo_names=slo_names),
        output=output,
        functions=kind == "chat" and uses_functions(given),
    )


def check_model(parts: EngineComponents, body: Body) -> None:
    """Check that the body names this model, or none.

    Raises:
        UnknownModelError, InvalidRequestError: it names another one, or no name.
    """
    model = body.get("model")
    if model is None or model == "":
        return
    if not isinstance(model, str):
        raise InvalidRequestError("model", f"{json_kind(model)} is not a name")
    require_served_model(parts, model)


def flag(body: Body, name: str, prefix: str = "") -> bool:
    value = body.get(name)
    return value is not None and check_flag(prefix + name, value)


def _reject_unsupported(kind: Kind, body: Body) -> None:
    reject_unsupported(body)
    if kind == "chat" and flag(body, "echo"):
        raise InvalidRequestError("echo", "is not supported for chats")
    add_special = body.get("add_special_tokens")
    if add_special is not None:
        usual = ADD_SPECIAL_TOKENS[kind]
        if check_flag("add_special_tokens", add_special) is not usual:
            shown = "true" if usual else "false"
            raise InvalidRequestError(
                "add_special_tokens", f"can only be {shown} here; send token ids for other prompts"
            )


def _check_best_of(parts: EngineComponents, body: Body, n: int) -> None:
    best_of = body.get("best_of")
    if best_of is not None and check_integer("best_of", best_of, 1, parts.limits.max_sequences) != n:
        raise InvalidRequestError("best_of", "is not supported beyond n; ask for n and choose by logprobs")


def _sampling_fields(kind: Kind, body: Body) -> dict[str, Any]:
    """Fields of `SamplingParams`, raw."""
    fields = {name: body[name] for name in PLAIN if body.get(name) is not None}
    if body.get("logit_bias") is not None:
        fields["logit_bias"] = _logit_bias(body["logit_bias"])
    constraint = read_constraint(body)
    if constraint is not None:
        fields["structured_outputs"] = constraint.value
    most = body.get("max_tokens")
    if fields.get("prompt_logprobs") is not None and flag(body, "stream"):
        raise InvalidRequestError("prompt_logprobs", "is not available with stream=true")
    if kind == "completion":
        if most is not None:
            fields["max_tokens"] = most
        if body.get("logprobs") is not None:
            fields["logprobs"] = body["logprobs"]
            if flag(body, "echo"):
                fields.setdefault("prompt_logprobs", body["logprobs"])
        if most == 0 and type(most) is int and (flag(body, "echo") or "prompt_logprobs" in fields):
            fields["max_tokens"] = 1  # the least that the engine computes; the response leaves it out
        return fields
    newer = body.get("max_completion_tokens")
    if newer is not None and most is not None:
        check_integer("max_tokens", most, 1, MAX_INTEGER)
    fields["max_tokens"] = most if newer is None else newer  # None: as many as fit
    top = body.get("top_logprobs")
    if flag(body, "logprobs"):
        fields["logprobs"] = 0 if top is None else check_integer("top_logprobs", top, 0, MAX_LOGPROBS)
    elif top is not None and check_integer("top_logprobs", top, 0, MAX_LOGPROBS) > 0:
        raise InvalidRequestError("top_logprobs", "goes with logprobs=true alone")
    return fields


def _logit_bias(value: object) -> object:
    """Convert the keys, token ids that JSON holds as strings, to numbers; validation rejects what is none."""
    if not isinstance(value, Mapping):
        return value
    changed = {int(k) if _TOKEN_ID.fullmatch(k) else k: v for k, v in value.items()}
    if len(changed) != len(value):
        raise InvalidRequestError("logit_bias", "a token id comes twice")
    return changed


_SLO_PARTS = {"ttft_ms": "slo_ttft_ms", "tbt_ms": "slo_tbt_ms", "class": "slo_class", "deadline_ms": "deadline_ms"}
"""Fields of `slo`, and their flat twins."""
_SLO_KEYS = {"ttft_ms": TTFT_KEYS, "tbt_ms": TBT_KEYS}
"""Headers for them."""


def _slo_names(body: Body, headers: Mapping[str, str]) -> dict[str, str]:
    """Names under which objectives were sent, by those that they may have in errors."""
    nested = body.get("slo") or {}
    names: dict[str, str] = {}
    for part, flat in _SLO_PARTS.items():
        sent = [flat] if body.get(flat) is not None else []
        sent += [f"slo.{part}"] if nested.get(part) is not None else []
        sent += [key for key in _SLO_KEYS.get(part, ()) if key in headers]
        names |= dict.fromkeys((flat, f"slo.{part}"), sent[0]) if sent else {}
    return names


def _slo_value(body: Body, name: str) -> object:
    """A field of `slo`, or its flat twin."""
    flat_name = _SLO_PARTS[name]
    slo = {} if body.get("slo") is None else check_mapping("slo", body["slo"])
    unknown = next((part for part in slo if part not in _SLO_PARTS), None)
    if unknown is not None:  # not an OpenAI field: no client sends it for another server
        raise InvalidRequestError("slo", f"{unknown[:80]!r} is none of {', '.join(_SLO_PARTS)}")
    nested = slo.get(name)
    flat = body.get(flat_name)
    if nested is not None and flat is not None:
        raise InvalidRequestError(flat_name, f"stands in slo.{name} too; give it once")
    return flat if nested is None else nested


def _slo_fields(body: Body, headers: Mapping[str, str]) -> dict[str, Any]:
    """SLOs and class: those of the body, else of headers, else the server's default."""
    ttft, tbt, slo_class = (_slo_value(body, name) for name in ("ttft_ms", "tbt_ms", "class"))
    of_tier = _class_of_priority(body.get("priority")) or class_of_tier(_tier(body, headers))
    return {
        "slo_ttft_ms": milliseconds(headers, TTFT_KEYS) if ttft is None else ttft,
        "slo_tbt_ms": milliseconds(headers, TBT_KEYS) if tbt is None else tbt,
        "slo_class": of_tier if slo_class is None else slo_class,
    }


def _class_of_priority(value: object) -> str | None:
    """The class that vLLM's `priority` asks for, of which lower ones come first; None: none."""
    if value is None:
        return None
    number = check_integer("priority", value, -MAX_PRIORITY, MAX_PRIORITY)
    return None if number == 0 else "be" if number > 0 else "rt"


def _tier(body: Body, headers: Mapping[str, str]) -> object:
    """The service tier that is asked for; None: none."""
    tier = body.get(TIER_KEY)
    return headers.get(TIER_KEY) if tier is None else tier


def _prompts(parts: EngineComponents, body: Body) -> list[dict[str, Any]]:
    """`prompt` or `prompt_token_ids` of each prompt, raw."""
    prompt, suffix = body.get("prompt"), body.get("suffix")
    if suffix is not None and suffix != "":
        return [{"prompt_token_ids": ids} for ids in _around_middle(parts, body, suffix)]
    if isinstance(prompt, list):
        if not prompt:  # validation rejects it
            return [{"prompt_token_ids": prompt}]
        if all(isinstance(item, str) for item in prompt):
            return [{"prompt": item} for item in prompt]
        if all(isinstance(item, list) for item in prompt):
            return [{"prompt_token_ids": item} for item in prompt]
        return [{"prompt_token_ids": prompt}]
    return [{"prompt": prompt}]


def _around_middle(parts: EngineComponents, body: Body, suffix: object) -> list[list[int]]:
    """Token ids of the prompts of a body with a `suffix`."""
    for name in ("echo", "truncate_prompt_tokens"):
        if body.get(name):
            raise InvalidRequestError(name, "cannot be given together with suffix")
    prompt = body.get("prompt")
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("prompt", "must be a text, or a list of texts, where there is a suffix")
    return [prompt_around(parts, text, suffix) for text in texts]


def _conversation(parts: EngineComponents, body: Body) -> list[dict[str, Any]]:
    """The token ids of the conversation."""
    messages = body.get("messages")
    if messages is None:
        raise InvalidRequestError("messages", "missing; give a list of messages")
    truncated = body.get("truncate_prompt_tokens") is not None
    ids = parts.chat_prompt(messages, tools=tools_of(body), truncated=truncated, **template_options(body))
    return [{"prompt_token_ids": ids}]


def tools_of(body: Body) -> Sequence[Mapping[str, Any]] | None:
    """Definitions of the tools that the prompt tells of."""
    return _tools(body).definitions


def _tools(body: Body) -> ToolSet:
    return read_tools(body.get("tools"), body.get("tool_choice"), body.get("parallel_tool_calls"))


def template_options(body: Body) -> dict[str, Any]:
    """How the chat template is used: arguments of `EngineComponents.chat_prompt`.

    Raises:
        InvalidRequestError: the last message is to be continued and another one to be begun.
    """
    continues = flag(body, "continue_final_message")
    given = body.get("add_generation_prompt")
    begins = not continues if given is None else check_flag("add_generation_prompt", given)
    if continues and begins:
        raise InvalidRequestError(
            "continue_final_message", "goes with add_generation_prompt=false alone: the answer is no new message"
        )
    variables, effort = body.get("chat_template_kwargs"), body.get("reasoning_effort")
    if isinstance(effort, str) and len(effort) <= _MAX_EFFORT_CHARS and isinstance(variables, Mapping | None):
        variables = {"reasoning_effort": effort, **(variables or {})}  # the name that templates have for it
    return {
        "add_generation_prompt": begins,
        "continue_final_message": continues,
        "template_kwargs": variables,
    }


def _requests(
    parts: EngineComponents,
    prompts: Sequence[Mapping[str, Any]],
    n: int,
    base_id: object,
    fields: Mapping[str, Any],
) -> list[EngineRequest]:
    """`n` requests a prompt."""
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
            raise with_field(error, f"{name}[{number}]{bracket}{rest}") from None
    return requests


def _echoes(parts: EngineComponents, body: Body, requests: Iterable[EngineRequest]) -> Sequence[str] | None:
    if not flag(body, "echo"):
        return None
    if parts.tokenizer is None:
        raise InvalidRequestError("echo", "this model has no tokenizer, so its prompts have no text")
    return [_echo(parts.tokenizer, r) if r.prompt is None else r.prompt for r in requests]


def _echo(tokenizer: Tokenizer, request: EngineRequest) -> str:
    """Text of a prompt of token ids. Where a character begins at its end, the output completes it."""
    text = tokenizer.decode(request.prompt_token_ids.tolist(), skip_special_tokens=False)
    if request.grammar is not None:
        return text
    return text.removesuffix(IncrementalDetokenizer(tokenizer, request.prompt_token_ids).flush())


def _renamed(
    error: InvalidRequestError, kind: Kind, body: Body, output: OutputPlan, slo_names: Mapping[str, str]
) -> InvalidRequestError:
    """Rename the field in an error to the name that the body has for it."""
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
    return error if name not in names else with_field(error, names[name] + bracket + rest)


def with_field(error: InvalidRequestError, field: str) -> InvalidRequestError:
    """The same error under another name of its field."""
    message = str(error).removeprefix(f"{error.field}: ")
    return InvalidRequestError(field, message, code=error.code)

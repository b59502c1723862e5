"""OpenAI's completions and chat completions: bodies to requests of the engine, outputs to answers. No sockets here.

What a field means is decided here, whether its value is allowed by `apt_jax.validation`, as for every other door. Fields that
nobody knows are ignored, as vLLM does. Fields that are known, would change the answer and are not supported are refused: an
answer that silently is not what was asked for is worse than none.
"""

import dataclasses
import json
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from apt_jax.chat import checked_tools
from apt_jax.errors import DuplicateRequestError, InvalidRequestError
from apt_jax.llm import EngineParts, OutputDelta
from apt_jax.metrics import RequestRecord
from apt_jax.request import EngineRequest, Logprob, RequestMetrics, SamplingParams
from apt_jax.validation import (
    MAX_INTEGER,
    MAX_LOGPROBS,
    MAX_SEQUENCES,
    check_deadline_ms,
    check_flag,
    check_integer,
    check_mapping,
    check_sequences,
    check_text,
    check_token_ids,
)
from serve.grpc_api.errors import UnknownModelError
from serve.http_api.errors import json_bytes
from serve.slo_headers import TBT_KEYS, TIER_KEY, TTFT_KEYS, class_of_tier, milliseconds

Kind = Literal["completion", "chat"]
Body = Mapping[str, Any]

MAX_DETOKENIZE = 2**20
"""Token ids of one call of /detokenize."""
_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; as in vLLM."""
_TOKEN_ID = re.compile(r"-?[0-9]{1,10}")

# Sampling parameters that bodies hold under the names of `SamplingParams`.
PLAIN = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("max_tokens", "logprobs", "logit_bias", "structured_outputs")
)

# Fields that would change the answer and are not supported, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_HINTS = {
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), "use structured_outputs"),
    **dict.fromkeys(("functions", "function_call"), "use tools"),
}  # fmt: skip
ADD_SPECIAL_TOKENS = {"completion": True, "chat": False}


# --- bodies ----------------------------------------------------------------------------------------------------------


def parse_json(data: bytes) -> dict[str, Any]:
    """A body as an object of named values; stricter than `json.loads`, which takes the last of two equal names.

    Raises:
        InvalidRequestError: it is none.
    """

    def constant(name: str) -> object:
        raise ValueError(f"{name} is not JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            raise ValueError("a name comes twice in one object")
        return made

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=constant, object_pairs_hook=pairs)
    except UnicodeDecodeError:
        raise InvalidRequestError("body", "is not UTF-8") from None
    except RecursionError:
        raise InvalidRequestError("body", "is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            "body", f"is not JSON: {error.msg} at character {error.pos}"
        ) from None
    except ValueError as error:
        ours = str(error).startswith(("a name", "NaN", "Infinity", "-Infinity"))
        raise InvalidRequestError(
            "body", str(error) if ours else "holds a number that is too long"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("body", "is not a JSON object")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What one body asks for: requests of the engine, and how to answer."""

    kind: Kind
    call_id: str
    created_s: int
    model: str
    requests: Sequence[EngineRequest]
    """Answers to the first prompt, then to the second, and so on."""
    n: int
    """Answers to each prompt."""
    deadline_s: float | None
    """On the engine's clock."""
    stream: bool
    include_usage: bool
    """A stream ends with a chunk of the usage."""
    continuous_usage: bool
    """Every chunk of a stream has the usage so far."""
    echoes: Sequence[str] | None
    """Text before the answer, by prompt."""
    token_ids: bool
    """Answers hold token ids."""
    tokens_as_ids: bool
    """Log probabilities name tokens by their ids."""
    timings: bool
    """Answers hold how they were served."""

    @property
    def num_prompts(self) -> int:
        return len(self.requests) // self.n


def is_slow(kind: Kind, body: Body, long_chars: int) -> bool:
    """Whether `read_call` waits for other processes or works for a while, so that it wants a thread."""
    prompt = body.get("prompt")
    short = isinstance(prompt, str) and len(prompt) <= long_chars
    return kind == "chat" or not short or is_formed(body)


def is_formed(body: Body) -> bool:
    """Whether the answer must have a form, whose compilation may take seconds."""
    return any(body.get(name) is not None for name in ("structured_outputs", "response_format"))


def read_call(
    parts: EngineParts,
    kind: Kind,
    body: Body,
    headers: Mapping[str, str],
    arrival_s: float,
    tenant: str | None = None,
) -> Call:
    """Check a body and make the requests that it asks for.

    Args:
        parts: of the engine.
        kind: of endpoint.
        body: from `parse_json`.
        headers: of the call, lower case.
        arrival_s: on the engine's clock.
        tenant: whose key came with the call.

    Raises:
        InvalidRequestError: one line; `.field` names a field of the body or a header.
        UnknownModelError: another model is asked for.
        QueueFullError: too many new forms at once.
    """
    check_model(parts, body)
    _refuse_unsupported(kind, body)
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None:
        options = check_mapping("stream_options", options)
        if not stream:
            raise InvalidRequestError("stream_options", "goes with stream=true alone")
    fields = {
        "params": _sampling_fields(kind, body),
        "arrival_s": arrival_s,
        "tenant": tenant,
        **_objectives(body, headers),
    }
    base_id = body.get("request_id")
    if base_id is None:
        base_id = f"req-{uuid.uuid4().hex}"
    try:
        prompts = _prompts(parts, body) if kind == "completion" else _conversation(parts, body)
        n = check_sequences(len(prompts), 1 if body.get("n") is None else body["n"])
        _check_best_of(body, n)
        requests = _requests(parts, prompts, n, base_id, fields)
    except InvalidRequestError as error:
        raise _renamed(error, kind, body) from None
    deadline_ms = _of_slo(body, "deadline_ms", "deadline_ms")
    return Call(
        kind=kind,
        call_id=f"{'cmpl' if kind == 'completion' else 'chatcmpl'}-{base_id}",
        created_s=int(time.time()),
        model=parts.model_name,
        requests=requests,
        n=n,
        deadline_s=None if deadline_ms is None else arrival_s + check_deadline_ms(deadline_ms),
        stream=stream,
        include_usage=options is not None and _flag(options, "include_usage", "stream_options."),
        continuous_usage=options is not None
        and _flag(options, "continuous_usage_stats", "stream_options."),
        echoes=_echoes(parts, body, requests[::n]) if kind == "completion" else None,
        token_ids=_flag(body, "return_token_ids"),
        tokens_as_ids=_flag(body, "return_tokens_as_token_ids"),
        timings=_flag(body, "aptjax_timings"),
    )


def check_model(parts: EngineParts, body: Body) -> None:
    """Whether the body names this model, or none.

    Raises:
        UnknownModelError, InvalidRequestError: it names another one, or no name.
    """
    model = body.get("model")
    if model is None or model == "":
        return
    if not isinstance(model, str):
        raise InvalidRequestError("model", f"{type(model).__name__} is not a name")
    if model not in (parts.model_name, parts.config.model):
        raise UnknownModelError(
            f"model {model[:80]!r} is not served here; this server has {parts.model_name!r}"
        )


def _flag(body: Body, name: str, prefix: str = "") -> bool:
    value = body.get(name)
    return value is not None and check_flag(prefix + name, value)


def _refuse_unsupported(kind: Kind, body: Body) -> None:
    for name in body.keys() & UNSUPPORTED.keys():
        value = body[name]
        if value is None or any(value == v and type(value) is type(v) for v in UNSUPPORTED[name]):
            continue
        hint = f"; {_HINTS[name]}" if name in _HINTS else ""
        raise InvalidRequestError(name, f"is not supported{hint}")
    if kind == "chat" and _flag(body, "echo"):
        raise InvalidRequestError("echo", "is not supported for chats")
    add_special = body.get("add_special_tokens")
    if add_special is not None:
        usual = ADD_SPECIAL_TOKENS[kind]
        if check_flag("add_special_tokens", add_special) is not usual:
            shown = "true" if usual else "false"
            raise InvalidRequestError(
                "add_special_tokens", f"can only be {shown} here; send token ids for other prompts"
            )


def _check_best_of(body: Body, n: int) -> None:
    best_of = body.get("best_of")
    if best_of is not None and check_integer("best_of", best_of, 1, MAX_SEQUENCES) != n:
        raise InvalidRequestError("best_of", "is not supported beyond n; leave it out")


def _sampling_fields(kind: Kind, body: Body) -> dict[str, Any]:
    """Fields of `SamplingParams`, raw."""
    fields = {name: body[name] for name in PLAIN if body.get(name) is not None}
    if body.get("logit_bias") is not None:
        fields["logit_bias"] = _logit_bias(body["logit_bias"])
    form = _form(body)
    if form is not None:
        fields["structured_outputs"] = form
    most = body.get("max_tokens")
    if kind == "completion":
        if most is not None:
            fields["max_tokens"] = most
        if body.get("logprobs") is not None:
            fields["logprobs"] = body["logprobs"]
        return fields
    newer = body.get("max_completion_tokens")
    if newer is not None and most is not None:
        check_integer("max_tokens", most, 1, MAX_INTEGER)
    fields["max_tokens"] = most if newer is None else newer  # None: as many as fit
    top = body.get("top_logprobs")
    if _flag(body, "logprobs"):
        fields["logprobs"] = (
            0 if top is None else check_integer("top_logprobs", top, 0, MAX_LOGPROBS)
        )
    elif top is not None and check_integer("top_logprobs", top, 0, MAX_LOGPROBS) > 0:
        raise InvalidRequestError("top_logprobs", "goes with logprobs=true alone")
    return fields


def _logit_bias(value: object) -> object:
    """With token ids as numbers, which JSON cannot have as names; what is no number is left for validation to refuse."""
    if not isinstance(value, Mapping):
        return value
    changed = {int(k) if _TOKEN_ID.fullmatch(k) else k: v for k, v in value.items()}
    if len(changed) != len(value):
        raise InvalidRequestError("logit_bias", "a token id comes twice")
    return changed


def _form(body: Body) -> object | None:
    """What `structured_outputs` or `response_format` asks for, raw."""
    form, answer = body.get("structured_outputs"), body.get("response_format")
    if answer is None:
        return form
    answer = check_mapping("response_format", answer)
    wanted: dict[str, object] | None
    match answer.get("type"):
        case "text":
            wanted = None
        case "json_object":
            wanted = {"json_object": True}
        case "json_schema":
            named = check_mapping("response_format.json_schema", answer.get("json_schema"))
            schema = named.get("schema")
            if schema is None:
                raise InvalidRequestError("response_format.json_schema", "has no schema")
            wanted = {"json": schema}
        case _:
            raise InvalidRequestError(
                "response_format", "type must be one of text, json_object, json_schema"
            )
    if wanted is not None and form is not None:
        raise InvalidRequestError(
            "response_format", "cannot be given together with structured_outputs"
        )
    return form if wanted is None else wanted


_SLO_PARTS = ("ttft_ms", "tbt_ms", "class", "deadline_ms")


def _of_slo(body: Body, name: str, flat_name: str) -> object:
    """A part of `slo`, or the same beside it."""
    slo = {} if body.get("slo") is None else check_mapping("slo", body["slo"])
    unknown = next((part for part in slo if part not in _SLO_PARTS), None)
    if unknown is not None:  # it is ours alone: nobody sends it for another server
        raise InvalidRequestError("slo", f"{unknown[:80]!r} is none of {', '.join(_SLO_PARTS)}")
    nested = slo.get(name)
    flat = body.get(flat_name)
    if nested is not None and flat is not None:
        raise InvalidRequestError(flat_name, f"stands in slo.{name} too; give it once")
    return flat if nested is None else nested


def _objectives(body: Body, headers: Mapping[str, str]) -> dict[str, Any]:
    """Objectives and class: the body's, else of headers, else the server's default."""
    ttft, tbt = _of_slo(body, "ttft_ms", "slo_ttft_ms"), _of_slo(body, "tbt_ms", "slo_tbt_ms")
    slo_class = _of_slo(body, "class", "slo_class")
    tier = body.get(TIER_KEY)
    of_tier = class_of_tier(headers.get(TIER_KEY) if tier is None else tier)
    return {
        "slo_ttft_ms": milliseconds(headers, TTFT_KEYS) if ttft is None else ttft,
        "slo_tbt_ms": milliseconds(headers, TBT_KEYS) if tbt is None else tbt,
        "slo_class": of_tier if slo_class is None else slo_class,
    }


def _prompts(parts: EngineParts, body: Body) -> list[dict[str, Any]]:
    """`prompt` or `prompt_token_ids` of each prompt, raw."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        if not prompt:  # validation says so, in its turn
            return [{"prompt_token_ids": prompt}]
        if all(isinstance(item, str) for item in prompt):
            return [{"prompt": item} for item in prompt]
        if all(isinstance(item, list) for item in prompt):
            return [{"prompt_token_ids": item} for item in prompt]
        return [{"prompt_token_ids": prompt}]
    return [{"prompt": prompt}]


def _conversation(parts: EngineParts, body: Body) -> list[dict[str, Any]]:
    """The token ids of the conversation."""
    messages = body.get("messages")
    if messages is None:
        raise InvalidRequestError("messages", "missing; give a list of messages")
    ids = parts.chat_prompt(
        messages, tools=_tools(body), add_generation_prompt=_generation_prompt(body)
    )
    return [{"prompt_token_ids": ids}]


def _tools(body: Body) -> Any:
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise InvalidRequestError("tool_choice", "must be 'auto' or 'none': calls come as text")
    tools = body.get("tools")
    if choice == "none":
        checked_tools(tools)  # malformed ones are refused though nobody reads them
        return None
    return tools


def _generation_prompt(body: Body) -> bool:
    value = body.get("add_generation_prompt")
    return True if value is None else check_flag("add_generation_prompt", value)


def _requests(
    parts: EngineParts,
    prompts: Sequence[Mapping[str, Any]],
    n: int,
    base_id: object,
    fields: Mapping[str, Any],
) -> list[EngineRequest]:
    """`n` requests a prompt."""
    requests: list[EngineRequest] = []
    for number, prompt in enumerate(prompts):
        # An id that is no text is refused as it is.
        several = len(prompts) > 1 and isinstance(base_id, str)
        request_id = f"{base_id}-{number}" if several else base_id
        requests += parts.build_requests(n=n, request_id=request_id, **prompt, **fields)
    return requests


def _echoes(
    parts: EngineParts, body: Body, requests: Iterable[EngineRequest]
) -> Sequence[str] | None:
    if not _flag(body, "echo"):
        return None
    if body.get("logprobs") is not None:
        raise InvalidRequestError("echo", "is not supported together with logprobs")
    if parts.tokenizer is None:
        raise InvalidRequestError("echo", "this model has no tokenizer, so its prompts have no text")  # fmt: skip
    return [
        parts.tokenizer.decode(r.prompt_token_ids.tolist(), skip_special_tokens=False)
        if r.prompt is None
        else r.prompt
        for r in requests
    ]


def _renamed(error: InvalidRequestError, kind: Kind, body: Body) -> InvalidRequestError:
    """The same with the names that the fields have here."""
    if isinstance(error, DuplicateRequestError):
        return error
    name, bracket, rest = error.field.partition("[")
    prompt = "prompt" if kind == "completion" else "messages"
    names = {"prompt": prompt, "prompt_token_ids": prompt}
    if kind == "chat" and body.get("max_completion_tokens") is not None:
        names["max_tokens"] = "max_completion_tokens"
    if kind == "chat":
        names["logprobs"] = "top_logprobs"
    if body.get("response_format") is not None and body.get("structured_outputs") is None:
        names |= {f: "response_format" for f in (name,) if f.startswith("structured_outputs")}
    if name not in names:
        return error
    message = str(error).removeprefix(f"{error.field}: ")
    return InvalidRequestError(names[name] + bracket + rest, message, code=error.code)


# --- answers ---------------------------------------------------------------------------------------------------------


class Answers:
    """What goes back for one call, as chunks while it grows, or whole.

    Args:
        parts: of the engine.
        call: from `read_call`.
    """

    def __init__(self, parts: EngineParts, call: Call) -> None:
        self._parts, self._call = parts, call
        self._is_chat = call.kind == "chat"
        count = len(call.requests)
        self._begun = [False] * count
        self._text_len = [0] * count
        """Characters of the token texts that `text_offset` has counted."""
        self._num_tokens = [0] * count
        self._num_cached = [0] * count
        self._around: list[tuple[bytes, bytes] | None] = [None] * count
        """Of each answer, what stands before and after the text in chunks that differ in nothing else."""

    @property
    def num_tokens(self) -> int:
        """Output tokens of all answers so far."""
        return sum(self._num_tokens)

    def event(self, index: int, delta: OutputDelta) -> bytes:
        """`chunk` as JSON. Chunks between the first and the last usually differ in their text alone: the rest is written once."""
        call, begun = self._call, self._begun[index]
        varies = call.token_ids or call.continuous_usage or delta.logprobs is not None
        if varies or delta.finished or not begun:
            return json_bytes(self.chunk(index, delta))
        around, text = self._around[index], json_bytes(delta.text)
        if around is not None:
            self._count(index, delta)
            return text.join(around)
        whole = json_bytes(self.chunk(index, delta))
        # No string of JSON can hold this: its quotes would be escaped.
        before, key, rest = whole.partition(b'"content":' if self._is_chat else b'"text":')
        self._around[index] = before + key, rest[len(text) :]
        return whole

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        """The next piece of answer `index`."""
        self._count(index, delta)
        choice: dict[str, Any] = {"index": index}
        text = delta.text
        first, self._begun[index] = not self._begun[index], True
        if self._is_chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = {**role, "content": text}
        else:
            choice["text"] = self._echo(index) + text if first else text
        choice["logprobs"] = self._logprobs(index, delta.token_ids, delta.logprobs)
        choice["finish_reason"] = delta.finish_reason
        if delta.finished:
            choice["stop_reason"] = delta.stop_reason
        if self._call.token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = delta.request.prompt_token_ids.tolist()
        if delta.finished and self._call.timings:
            choice["aptjax"] = served(delta)
        chunk = self._head("chat.completion.chunk" if self._is_chat else "text_completion")
        chunk["choices"] = [choice]
        if self._call.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._call.include_usage:
            chunk["usage"] = None
        return chunk

    def last_chunk(self) -> dict[str, Any] | None:
        """What follows the answers in a stream."""
        if not self._call.include_usage:
            return None
        chunk = self._head("chat.completion.chunk" if self._is_chat else "text_completion")
        return {**chunk, "choices": [], "usage": self._usage()}

    def whole(self, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        """All answers at once.

        Args:
            deltas: one an answer, everything merged into it.
        """
        answer = self._head("chat.completion" if self._is_chat else "text_completion")
        answer["choices"] = [self._choice(i, delta) for i, delta in enumerate(deltas)]
        answer["usage"] = self._usage()
        return answer

    def _choice(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        self._count(index, delta)
        choice: dict[str, Any] = {"index": index}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": delta.text, "refusal": None}
        else:
            choice["text"] = self._echo(index) + delta.text
        choice["logprobs"] = self._logprobs(index, delta.token_ids, delta.logprobs)
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        if self._call.token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = delta.request.prompt_token_ids.tolist()
        if self._call.timings:
            choice["aptjax"] = served(delta)
        return choice

    def _head(self, kind: str) -> dict[str, Any]:
        call = self._call
        return {
            "id": call.call_id,
            "object": kind,
            "created": call.created_s,
            "model": call.model,
            "system_fingerprint": None,
        }

    def _count(self, index: int, delta: OutputDelta) -> None:
        self._num_tokens[index] += len(delta.token_ids)
        self._num_cached[index] = delta.metrics.num_cached_tokens

    def _echo(self, index: int) -> str:
        echoes = self._call.echoes
        return "" if echoes is None else echoes[index // self._call.n]

    def _usage(self) -> dict[str, Any]:
        """Each prompt counts once, however many answers it has."""
        call = self._call
        firsts = range(0, len(call.requests), call.n)
        prompt = sum(int(call.requests[i].prompt_token_ids.size) for i in firsts)
        output = self.num_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached[i] for i in firsts)},
        }

    # --- log probabilities

    def _logprobs(
        self, index: int, token_ids: Sequence[int], entries: Sequence[dict[int, Logprob]] | None
    ) -> dict[str, Any] | None:
        if entries is None:
            return None
        most = self._call.requests[index].params.logprobs or 0
        pairs = list(zip(token_ids, entries, strict=True))
        if self._is_chat:
            return {"content": [self._chat_logprob(t, entry, most) for t, entry in pairs]}
        tokens = [self._token(t, entry[t]) for t, entry in pairs]
        offsets = []
        for token in tokens:
            offsets.append(self._text_len[index])
            self._text_len[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry[t].logprob) for t, entry in pairs],
            "top_logprobs": [self._by_text(entry) for _, entry in pairs],
            "text_offset": offsets,
        }

    def _by_text(self, entry: dict[int, Logprob]) -> dict[str, float]:
        """Of several tokens with one text the sampled one, else the most likely one, which come first."""
        named: dict[str, float] = {}
        for token_id, one in entry.items():
            named.setdefault(self._token(token_id, one), _finite(one.logprob))
        return named

    def _chat_logprob(self, token_id: int, entry: dict[int, Logprob], most: int) -> dict[str, Any]:
        ranked = sorted(
            (one.rank, t) for t, one in entry.items() if one.rank is not None and one.rank <= most
        )
        return {
            **self._named(token_id, entry[token_id]),
            "top_logprobs": [self._named(t, entry[t]) for _, t in ranked],
        }

    def _named(self, token_id: int, one: Logprob) -> dict[str, Any]:
        return {
            "token": self._token(token_id, one),
            "logprob": _finite(one.logprob),
            "bytes": self._bytes(token_id, one),
        }

    def _token(self, token_id: int, one: Logprob) -> str:
        if self._call.tokens_as_ids or one.decoded_token is None:
            return f"token_id:{token_id}"
        return one.decoded_token

    def _bytes(self, token_id: int, one: Logprob) -> list[int]:
        tokenizer = self._parts.tokenizer
        if tokenizer is not None and tokenizer.is_byte_level:
            return list(tokenizer.piece(token_id))
        return list((one.decoded_token or "").encode())


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def served(delta: OutputDelta) -> dict[str, Any]:
    """How a request was served, for those who ask; what it does not have is None."""
    metrics, request = delta.metrics, delta.request
    record = RequestRecord.from_metrics(metrics, ok=delta.finish_reason in ("stop", "length"))
    return {
        "request_id": request.request_id,
        "timings": {
            "queue_ms": _since(metrics, metrics.first_scheduled_s),
            "ttft_ms": _ms(record.ttft_s),
            "p99_tbt_ms": _ms(record.tbt_s),
            "p99_tbt_drop_first_ms": _ms(record.tbt_drop_first_s),
            "total_ms": _since(metrics, metrics.finished_s),
        },
        "slo": {
            "ttft_ms": _ms(metrics.slo.ttft_s),
            "tbt_ms": _ms(metrics.slo.tbt_s),
            "class": request.slo_class,
            "ttft_attained": record.ttft_attained,
            "tbt_attained": record.tbt_attained,
            "attained": record.slo_attained,
        },
        "cache_kind": metrics.cache_kind,
        "cached_prompt_tokens": metrics.num_cached_tokens,
        "num_preemptions": metrics.num_preemptions,
        "num_kind_switches": metrics.num_kind_switches,
        "num_conversions": metrics.num_conversions,
        "recomputed_tokens": metrics.recomputed_tokens,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or seconds == float("inf") else seconds * 1e3


def _since(metrics: RequestMetrics, at_s: float | None) -> float | None:
    return None if at_s is None else _ms(at_s - metrics.arrival_s)


# --- models and tokens -----------------------------------------------------------------------------------------------


def model_card(parts: EngineParts, created_s: int) -> dict[str, Any]:
    """An entry of ``/v1/models``."""
    return {
        "id": parts.model_name,
        "object": "model",
        "created": created_s,
        "owned_by": "apt-jax",
        "root": parts.config.model,
        "parent": None,
        "max_model_len": parts.limits.max_model_len,
    }


def tokenize(parts: EngineParts, body: Body) -> dict[str, Any]:
    """The answer of ``/tokenize``: of a text, or of a conversation as the model would see it.

    Raises:
        InvalidRequestError, UnknownModelError: as for `read_call`.
    """
    check_model(parts, body)
    tokenizer = parts.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("prompt", "this model has no tokenizer")
    if body.get("messages") is not None:
        ids = parts.chat_prompt(
            body["messages"], tools=_tools(body), add_generation_prompt=_generation_prompt(body)
        )
    else:
        text = body.get("prompt")
        special = body.get("add_special_tokens")
        special = True if special is None else check_flag("add_special_tokens", special)
        ids = [] if text == "" else tokenizer.encode(check_text("prompt", text), add_special_tokens=special)  # fmt: skip
    strings = None
    if _flag(body, "return_token_strs"):
        strings = [tokenizer.backend.id_to_token(token_id) or "" for token_id in ids]
    return {
        "count": len(ids),
        "max_model_len": parts.limits.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


def detokenize(parts: EngineParts, body: Body) -> dict[str, Any]:
    """The answer of ``/detokenize``.

    Raises:
        InvalidRequestError, UnknownModelError: as for `read_call`.
    """
    check_model(parts, body)
    if parts.tokenizer is None:
        raise InvalidRequestError("tokens", "this model has no tokenizer")
    ids = check_token_ids(parts.limits, "tokens", body.get("tokens"), MAX_DETOKENIZE)
    return {"prompt": parts.tokenizer.decode(ids, skip_special_tokens=False)}

"""llama.cpp's ``/infill``, which its editor plugins call to fill in text between a prefix and a suffix.

Request bodies are converted to completion requests. llama.cpp's options for sampler order, time limits, cache and slots
are ignored. Sampling options that are not given have llama.cpp's defaults.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.request import RequestMetrics
from apt_jax.text.fill_in_middle import ExtraFile
from serve.compact_json import json_bytes
from serve.errors import RequestFailedError
from serve.generate_call import LONG_PROMPT_CHARS
from serve.http_api import openai_request
from serve.http_api.errors import HttpError
from serve.http_api.infill import ending_with_middle, prompt_around
from serve.http_api.json_schemas import COUNT, FLAG, STRING, Schema, closed
from serve.http_api.openai_bodies import Addressed, CompletionBody, Generation
from serve.http_api.openai_request import Body
from serve.http_api.records import Bits32, EngineField, Flag, Record, Text, carried, read, shaped
from serve.http_api.translation import TranslatedCall, field_renamer
from serve.http_api.unsupported_fields import REFUSED

PATH = "/infill"

Json = dict[str, Any]

DEFAULTS: Json = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
NAMES = {"repetition_penalty": "repeat_penalty", "prompt": "input_prefix", "max_tokens": "n_predict"}
"""Maps fields of completions to their names in bodies of ``/infill``."""
_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("ignore_eos", "logit_bias", "stream"),
)
"""Fields that have the same name and meaning as in completions."""
_CONSTRAINTS = ("grammar", "json_schema")
_PREFIX, _SUFFIX, _EXTRA, _SHOWN = "input_prefix", "input_suffix", "input_extra", "response_fields"
_MAX_FILES = 256
_MAX_SHOWN = 64
_UNNAMED = "tmp"
"""File name used for a file without a name, as in llama.cpp."""


class FileBody(Record):
    text: str
    filename: Text = None


class InfillBody(Addressed):
    refused: ClassVar = {
        name: REFUSED[name] for name in ("mirostat", "typical_p", "xtc_probability", "dry_multiplier", "n_probs")
    }
    needed: ClassVar = dict.fromkeys((_PREFIX, _SUFFIX), "missing; give a text, which may be empty")
    also: ClassVar = {name: Generation.also[name] for name in _CONSTRAINTS}
    input_prefix: str = ""
    input_suffix: str = ""
    prompt: Annotated[Text, Meta(description="Start of the text to fill in; the output continues it.")] = None
    input_extra: Annotated[list[FileBody], Meta(min_length=0, max_length=_MAX_FILES)] | None = None
    n_predict: Annotated[
        Bits32, Meta(description="Maximum number of output tokens; below 0: as many as fit; 0: only cache the prompt.")
    ] = None
    stream: Flag = None
    response_fields: Annotated[list[str], Meta(min_length=0, max_length=_MAX_SHOWN)] | None = None
    temperature: EngineField = None
    top_k: EngineField = None
    top_p: EngineField = None
    min_p: EngineField = None
    seed: EngineField = None
    stop: EngineField = None
    repeat_penalty: Annotated[Any, shaped(lambda facts: facts.optional("repetition_penalty"))] = None
    presence_penalty: EngineField = None
    frequency_penalty: EngineField = None
    ignore_eos: EngineField = None
    logit_bias: EngineField = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfillCall(TranslatedCall):
    shown: tuple[str, ...] = ()
    """Fields to return in a response that is not streamed, as paths such as ``timings/prompt_n``; empty: all fields."""
    is_silent: bool = False
    """True if the call only computes the prompt to cache it; the single generated token is not shown."""

    @property
    def call_id(self) -> str:
        return self.chat.call_id


def is_slow(body: Body) -> bool:
    """Return whether `read_call` must run in a thread because it tokenizes long text."""
    extra = body.get(_EXTRA)
    texts = [body.get(name) for name in (_PREFIX, _SUFFIX, "prompt")]
    return bool(extra) or sum(len(text) for text in texts if isinstance(text, str)) > LONG_PROMPT_CHARS


def read_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None = None
) -> InfillCall:
    """Check a body and build its request; see `serve.http_api.openai_request.read_call`.

    Raises:
        InvalidRequestError: the body is invalid; `.field` names a field of the body or a header.
        UnknownModelError: the body names a model that the server does not serve.
    """
    asked = read(InfillBody, body)
    openai_request.check_model(parts, asked.model)
    files = [ExtraFile(file.filename or _UNNAMED, file.text) for file in asked.input_extra or ()]
    ids = prompt_around(
        parts,
        asked.input_prefix,
        asked.input_suffix,
        names=(_PREFIX, _SUFFIX),
        begun=asked.prompt or "",
        files=files,
    )
    count = -1 if asked.n_predict is None else asked.n_predict
    fields = {name: value for name in _SAME if (value := getattr(asked, name)) is not None}
    completion = CompletionBody(
        **carried(asked, Addressed),
        **DEFAULTS | fields,
        repetition_penalty=asked.repeat_penalty,
        prompt=ids,
        max_tokens=_room(parts, ids) if count < 0 else max(count, 1),
    )
    constraints = {name: body[name] for name in _CONSTRAINTS if name in body}
    try:
        call = openai_request.build_call(parts, completion, headers, arrival_s, tenant, constraints)
    except InvalidRequestError as error:
        raise field_renamer(NAMES)(error) from None
    requests = [ending_with_middle(parts, request) for request in call.requests]
    shown = tuple(asked.response_fields or ())
    return InfillCall(chat=call.with_requests(requests), names=NAMES, shown=shown, is_silent=count == 0)


def _room(parts: EngineComponents, ids: Sequence[int]) -> int:
    """Return the number of output tokens that fit after a prompt; at least 1."""
    limits = parts.limits
    most = limits.max_model_len
    if limits.max_pool_tokens is not None:
        most = min(most, limits.max_pool_tokens)
    return max(1, most - len(ids))


class InfillResponse:
    """Builds the response to one call; implements `serve.http_api.endpoints.ResponseBuilder`.

    Args:
        parts: the engine's components; not used.
        call: the call from `read_call`.
    """

    def __init__(self, parts: EngineComponents, call: InfillCall) -> None:
        del parts
        self._call = call
        self._num_tokens = 0
        self._has_new_line = False
        self._last: OutputDelta | None = None

    def events(self, index: int, delta: OutputDelta) -> bytes:
        del index  # there is one request
        text = self._push(delta)
        return _event({"content": text, **self._counts(), "stop": False}) if text else b""

    def end(self) -> bytes:
        return _event(self._whole(""))

    def failure(self, error: HttpError) -> bytes:
        return _event(error.body())

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        (delta,) = deltas
        return json_bytes(_only(self._whole(self._push(delta)), self._call.shown))

    def _push(self, delta: OutputDelta) -> str:
        if delta.finish_reason not in (None, "stop", "length"):
            raise RequestFailedError("the request was aborted")
        self._last = delta
        if self._call.is_silent:
            return ""
        self._num_tokens += len(delta.token_ids)
        self._has_new_line = self._has_new_line or "\n" in delta.text
        return delta.text

    def _counts(self) -> Json:
        prompt_len = int(self._call.requests[0].prompt_token_ids.size)
        return {"index": 0, "id_slot": 0, "tokens_predicted": self._num_tokens, "tokens_evaluated": prompt_len}

    def _whole(self, text: str) -> Json:
        last = self._last
        assert last is not None
        word = last.stop_reason if isinstance(last.stop_reason, str) else ""
        counts = self._counts()
        return {
            "content": text,
            **counts,
            "model": self._call.chat.model,
            "stop": True,
            "stop_type": "limit" if last.finish_reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "has_new_line": self._has_new_line,
            "truncated": False,
            "tokens_cached": counts["tokens_evaluated"] + self._num_tokens,
            "timings": _timings(last.metrics, counts["tokens_evaluated"], self._num_tokens),
        }


def _timings(metrics: RequestMetrics, prompt_len: int, num_tokens: int) -> Json:
    begun, times = metrics.first_scheduled_s, metrics.token_times_s
    begun = metrics.arrival_s if begun is None else begun
    first, last = (times[0], times[-1]) if times else (begun, begun)
    made: Json = {"cache_n": metrics.num_cached_tokens}
    for name, count, seconds in (
        ("prompt", prompt_len - metrics.num_cached_tokens, first - begun),
        ("predicted", num_tokens, last - first),
    ):
        milliseconds = max(0.0, 1e3 * seconds)
        made |= {
            f"{name}_n": count,
            f"{name}_ms": milliseconds,
            f"{name}_per_token_ms": milliseconds / count if count else 0.0,
            f"{name}_per_second": 1e3 * count / milliseconds if milliseconds else 0.0,
        }
    return made


def _only(answer: Json, shown: Sequence[str]) -> Json:
    """Return the fields that the client asked for, keyed by path; all fields if it asked for none.

    Fields that do not exist are left out.
    """
    if not shown:
        return answer
    made: Json = {}
    for path in shown:
        at: Any = answer
        for name in path.split("/", 3):
            at = at.get(name) if isinstance(at, dict) else None
        if at is not None:
            made[path] = at
    return made


def _event(value: Json) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


# --- schemas, for `serve.http_api.openapi` ---------------------------------------------------------------------------

EXAMPLES: Schema = {
    "Infill": {"text": {"value": {_PREFIX: "def add(a, b):\n", _SUFFIX: "\n\nprint(add(1, 2))\n", "n_predict": 16}}}
}


def answers() -> dict[str, Schema]:
    """Return the schemas of responses, keyed by name. Objects allow no other fields, so every field must be listed."""
    counts = dict.fromkeys(("index", "id_slot", "tokens_predicted", "tokens_evaluated"), COUNT)
    number = {"type": "number"}
    timings = {"cache_n": COUNT}
    for name in ("prompt", "predicted"):
        timings |= {f"{name}_n": COUNT, **{f"{name}_{what}": number for what in ("ms", "per_token_ms", "per_second")}}
    whole = {
        "content": STRING, **counts, "model": STRING, "stop": {"const": True}, "stop_type": {"enum": ["eos", "limit", "word"]},
        "stopping_word": STRING, "has_new_line": FLAG, "truncated": {"const": False}, "tokens_cached": COUNT,
        "timings": closed(timings),
    }  # fmt: skip
    picked = {"type": "object", "description": f"If `{_SHOWN}` is given: only these fields."}
    return {
        "Infill": {"anyOf": [closed(whole), picked]},
        "InfillChunk": {"anyOf": [closed({"content": STRING, **counts, "stop": {"const": False}}), closed(whole)]},
    }

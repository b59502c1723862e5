"""``/infill`` of llama.cpp, which its editor plugins call: what belongs between two texts, in llama.cpp's words.

Bodies become completions. Its samplers' order, its bounds of time and its options of cache and slots are ignored. Options
of sampling that are not given have llama.cpp's defaults.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.request import RequestMetrics
from apt_jax.text.fill_in_middle import ExtraFile
from apt_jax.validation import check_integer, check_mapping
from serve.compact_json import json_bytes
from serve.errors import RequestFailedError
from serve.generate_call import LONG_PROMPT_CHARS
from serve.http_api import embeddings, openai_request
from serve.http_api.errors import HttpError
from serve.http_api.infill import ending_with_middle, prompt_around
from serve.http_api.json_schemas import COUNT, FLAG, STRING, Schema, closed, list_of, object_of, or_null
from serve.http_api.json_schemas import integer as integer_between
from serve.http_api.openai_request import Body, flag
from serve.http_api.translation import TranslatedCall, field_renamer

PATH = "/infill"

Json = dict[str, Any]

DEFAULTS: Json = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
OPTIONS = {
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
            *("ignore_eos", "logit_bias", "grammar", "json_schema", "mirostat", "typical_p", "xtc_probability"),
            *("dry_multiplier", "n_probs"),
        )
    },
    "repeat_penalty": "repetition_penalty",
}
"""Options, and the fields of completions that they are."""
CARRIED = tuple(name for name in embeddings.CARRIED if name != "truncate_prompt_tokens")
"""Fields that mean the same as in a completion."""
NAMES = {**{field: name for name, field in OPTIONS.items()}, "prompt": "input_prefix", "max_tokens": "n_predict"}

_PREFIX, _SUFFIX, _EXTRA, _SHOWN = "input_prefix", "input_suffix", "input_extra", "response_fields"
_MAX_FILES = 256
_MAX_SHOWN = 64
_UNNAMED = "tmp"
"""Name of a file that has none, as in llama.cpp."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfillCall(TranslatedCall):
    shown: tuple[str, ...] = ()
    """Fields of a whole answer, such as ``timings/prompt_n``; (): all."""
    is_silent: bool = False
    """The prompt is computed, so that it is cached; one token is generated and not shown."""

    @property
    def call_id(self) -> str:
        return self.chat.call_id


def is_slow(body: Body) -> bool:
    """Return whether much is tokenized."""
    extra = body.get(_EXTRA)
    texts = [body.get(name) for name in (_PREFIX, _SUFFIX, "prompt")]
    return bool(extra) or sum(len(text) for text in texts if isinstance(text, str)) > LONG_PROMPT_CHARS


def read_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None = None
) -> InfillCall:
    """Check a body and build its request; see `serve.http_api.openai_request.read_call`.

    Raises:
        InvalidRequestError: one line; `.field` names a field of the body or a header.
        UnknownModelError: another model is asked for.
    """
    fields: Json = {name: body[name] for name in CARRIED if name in body}
    fields["stream"] = flag(body, "stream")
    given = {name: value for name, value in body.items() if name in OPTIONS and value is not None}
    fields |= {OPTIONS[name]: value for name, value in {**DEFAULTS, **given}.items()}
    shown = _shown(body.get(_SHOWN))
    openai_request.check_model(parts, body)
    ids = prompt_around(
        parts,
        _text(body, _PREFIX, required=True),
        _text(body, _SUFFIX, required=True),
        names=(_PREFIX, _SUFFIX),
        begun=_text(body, "prompt"),
        files=_files(body.get(_EXTRA)),
    )
    count = body.get("n_predict")
    count = -1 if count is None else check_integer("n_predict", count, -(2**31), 2**31 - 1)
    fields |= {"prompt": ids, "max_tokens": _room(parts, ids) if count < 0 else max(count, 1)}
    try:
        call = openai_request.read_call(parts, "completion", fields, headers, arrival_s, tenant)
    except InvalidRequestError as error:
        raise field_renamer(NAMES)(error) from None
    requests = [ending_with_middle(parts, request) for request in call.requests]
    return InfillCall(chat=call.with_requests(requests), names=NAMES, shown=shown, is_silent=count == 0)


def _text(body: Body, name: str, *, required: bool = False) -> str:
    value = body.get(name)
    if value is None:
        if required:
            raise InvalidRequestError(name, "missing; give a text, which may be empty")
        return ""
    if not isinstance(value, str):
        raise InvalidRequestError(name, f"{json_kind(value)} is not text")
    return value


def _files(extra: object) -> list[ExtraFile]:
    if extra is None:
        return []
    if not isinstance(extra, list):
        raise InvalidRequestError(_EXTRA, f"{json_kind(extra)} is not a list of files")
    if len(extra) > _MAX_FILES:
        raise InvalidRequestError(_EXTRA, f"{len(extra)} files must be at most {_MAX_FILES}")
    files = []
    for number, file in enumerate(extra):
        name = f"{_EXTRA}[{number}]"
        made: dict[str, str] = {}
        for part, default in (("filename", _UNNAMED), ("text", None)):
            given = check_mapping(name, file).get(part)
            given = default if given is None else given
            if not isinstance(given, str):
                raise InvalidRequestError(f"{name}.{part}", f"{json_kind(given)} is not text")
            made[part] = given
        files.append(ExtraFile(made["filename"], made["text"]))
    return files


def _shown(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MAX_SHOWN or not all(isinstance(name, str) for name in value):
        raise InvalidRequestError(_SHOWN, f"must be a list of at most {_MAX_SHOWN} names")
    return tuple(value)


def _room(parts: EngineComponents, ids: Sequence[int]) -> int:
    """Return how many tokens of output fit the context."""
    limits = parts.limits
    most = limits.max_model_len
    if limits.max_pool_tokens is not None:
        most = min(most, limits.max_pool_tokens)
    return max(1, most - len(ids))


class InfillResponse:
    """Builds the answer to one call, a `serve.http_api.endpoints.ResponseBuilder`.

    Args:
        parts: of the engine.
        call: from `read_call`.
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
    """The fields that are asked for, by their paths; what is not there is left out."""
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


def requests(of_completion: Mapping[str, Schema]) -> dict[str, Schema]:
    """Schema of bodies, from the fields of a completion."""
    file = object_of({"text": STRING, "filename": or_null(STRING)}, required=("text",))
    own = {
        _PREFIX: STRING,
        _SUFFIX: STRING,
        "prompt": or_null(STRING) | {"description": "The beginning of what is filled in."},
        _EXTRA: or_null(list_of(file, 0, _MAX_FILES)),
        "n_predict": or_null(integer_between(-(2**31), 2**31 - 1))
        | {"description": "Below 0: as many as fit; 0: the prompt is cached."},
        "stream": or_null(FLAG),
        _SHOWN: or_null(list_of(STRING, 0, _MAX_SHOWN)),
    }
    options = {name: of_completion[field] for name, field in OPTIONS.items() if field in of_completion}
    carried = {name: of_completion[name] for name in CARRIED if name in of_completion}
    return {"InfillRequest": object_of({**options, **carried, **own}, required=(_PREFIX, _SUFFIX))}


def answers() -> dict[str, Schema]:
    """Schemas of answers; objects are closed, so that every field is documented."""
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
    picked = {"type": "object", "description": f"With `{_SHOWN}`: those."}
    return {
        "Infill": {"anyOf": [closed(whole), picked]},
        "InfillChunk": {"anyOf": [closed({"content": STRING, **counts, "stop": {"const": False}}), closed(whole)]},
    }

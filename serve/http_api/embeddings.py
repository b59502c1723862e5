"""``/v1/embeddings``: pooled hidden states of texts, in OpenAI's format.

A body becomes completions of one token that is not shown: its tokens are read, scheduled and bounded as any prompt.
"""

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, cast

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.embedding import check_dimensions, embedding
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.request import EngineRequest
from apt_jax.validation import MAX_INTEGER
from apt_jax.validation.values import shown
from serve.compact_json import json_bytes
from serve.errors import RequestFailedError
from serve.http_api.errors import HttpError
from serve.http_api.openai_request import Body, flag, with_field
from serve.http_api.openai_request import is_slow as completion_is_slow
from serve.http_api.openai_request import read_call as read_completion

PATH = "/v1/embeddings"
ID_PREFIX = "embd-"
POOLINGS = ("last", "mean")
ENCODINGS = ("float", "base64")
REFUSED: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "padding": ("do_not_pad",),
    "truncation_side": ("left",),
    "use_activation": (True,),
}
"""Fields of vLLM that are refused, with the values that ask for nothing."""
# Fields that mean the same as in a completion.
CARRIED = (
    "model",
    "request_id",
    "cache_salt",
    "priority",
    "truncate_prompt_tokens",
    "slo",
    "slo_ttft_ms",
    "slo_class",
    "deadline_ms",
    "service_tier",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingsCall:
    """The engine requests of one body, and the form of its answer."""

    call_id: str
    model: str
    requests: Sequence[EngineRequest]
    deadline_s: float | None
    dimensions: int | None
    normalize: bool
    encoding: str
    service_tier: str
    """See `serve.http_api.openai_request.CompletionCall`."""
    stream: bool = False

    @property
    def renamed(self) -> Callable[[InvalidRequestError], InvalidRequestError]:
        """Gives the field in an error the name that it has in the body."""
        return _renamed

    def with_requests(self, requests: Sequence[EngineRequest]) -> Self:
        return dataclasses.replace(self, requests=requests)


def is_slow(body: Body) -> bool:
    """Return whether `read_call` tokenizes much, and so belongs in a thread."""
    return completion_is_slow("completion", {"prompt": body.get("input")})


def read_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None
) -> EmbeddingsCall:
    """Check a body and build a request of the engine for each input.

    Raises:
        InvalidRequestError: one line; `.field` names a field of the body or a header.
        UnknownModelError: another model is asked for.
    """
    if body.get("input") is None:
        raise InvalidRequestError("input", "missing; give a text, texts, token ids or lists of them")
    for name, neutral in REFUSED.items():
        if body.get(name) is not None and body[name] not in neutral:
            allowed = " or ".join(json.dumps(value) for value in neutral)
            raise InvalidRequestError(name, f"can only be {allowed} here" if neutral else "is not supported; use input")
    pooling = _choice(body, "pooling", POOLINGS)
    encoding = _choice(body, "encoding_format", ENCODINGS)
    dimensions = body.get("dimensions")
    config = parts.model_config
    check_dimensions(dimensions, MAX_INTEGER if config is None else config.embedding_size or config.hidden_size)
    if flag(body, "stream"):
        raise InvalidRequestError("stream", "is not possible for embeddings; leave it out")
    fields = {name: body[name] for name in CARRIED if name in body}
    fields |= {"prompt": body["input"], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    try:
        call = read_completion(parts, "completion", fields, headers, arrival_s, tenant)
    except InvalidRequestError as error:
        raise _renamed(error) from None
    pooled = cast('Literal["mean", "last"]', pooling)
    return EmbeddingsCall(
        call_id=ID_PREFIX + call.call_id.partition("-")[2],
        model=call.model,
        requests=[
            dataclasses.replace(request, params=dataclasses.replace(request.params, pooling=pooled))
            for request in call.requests
        ],
        deadline_s=call.deadline_s,
        dimensions=dimensions,
        normalize=True if body.get("normalize") is None else flag(body, "normalize"),
        encoding=encoding,
        service_tier=call.service_tier,
    )


def _choice(body: Body, name: str, known: Sequence[str]) -> str:
    value = body.get(name)
    if value is None:
        return known[0]
    if value not in known:
        raise InvalidRequestError(name, f"{shown(value)} is none of {', '.join(map(repr, known))}")
    return value


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    name, bracket, rest = error.field.partition("[")
    return with_field(error, f"input{bracket}{rest}") if name == "prompt" else error


class EmbeddingsResponse:
    """The answer to a call, which is always whole."""

    def __init__(self, parts: EngineComponents, call: EmbeddingsCall) -> None:
        del parts
        self._call = call

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """See `serve.http_api.endpoints.ResponseBuilder`."""
        raise AssertionError("embeddings are not streamed")

    def end(self) -> bytes:
        """See `serve.http_api.endpoints.ResponseBuilder`."""
        raise AssertionError("embeddings are not streamed")

    def failure(self, error: HttpError) -> bytes:
        """See `serve.http_api.endpoints.ResponseBuilder`."""
        raise AssertionError("embeddings are not streamed")

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        """See `serve.http_api.endpoints.ResponseBuilder`."""
        call = self._call
        num_tokens = sum(request.prompt_token_ids.size for request in call.requests)
        return json_bytes(
            {
                "id": call.call_id,
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": self._embedding(delta)}
                    for index, delta in enumerate(deltas)
                ],
                "model": call.model,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
                "service_tier": call.service_tier,
            }
        )

    def _embedding(self, delta: OutputDelta) -> Any:
        if delta.pooled is None:
            raise RequestFailedError(delta.error or "the request was aborted")
        made = embedding(delta.pooled, dimensions=self._call.dimensions, normalize=self._call.normalize)
        if self._call.encoding == "base64":
            return base64.b64encode(made.astype("<f4").tobytes()).decode()
        return made.tolist()

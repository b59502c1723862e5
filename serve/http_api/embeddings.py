"""``/v1/embeddings``: pooled hidden states of texts, in OpenAI's format.

Each input runs as a completion of one token, which the response leaves out. Inputs are therefore tokenized, checked and
scheduled like any other prompt.
"""

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.embedding import check_dimensions, embedding
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.request import EngineRequest
from apt_jax.validation import MAX_INTEGER
from serve.compact_json import json_bytes
from serve.errors import RequestFailedError
from serve.http_api.errors import HttpError, Renamer
from serve.http_api.openai_bodies import Addressed, CompletionBody, prompts
from serve.http_api.openai_request import Body, build_call
from serve.http_api.openai_request import is_slow as completion_is_slow
from serve.http_api.records import HIDDEN, EngineField, Flag, Refused, carried, read, shaped

PATH = "/v1/embeddings"
ID_PREFIX = "embd-"
_HERE = {name: Refused(harmless, f"can only be {' or '.join(map(json.dumps, harmless))} here") for name, harmless in {
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "padding": ("do_not_pad",),
    "truncation_side": ("left",),
    "use_activation": (True,),
}.items()}  # fmt: skip


Dimensions = (
    Annotated[int, Meta(ge=1, le=MAX_INTEGER, description="Number of dimensions to keep, counted from the first.")]
    | None
)


class PooledBody(Addressed):
    """Fields of request bodies for embeddings, scores and reranking."""

    refused: ClassVar = _HERE | {"messages": Refused((), "is not supported; use input")}
    truncate_prompt_tokens: EngineField = None
    pooling: Literal["mean", "last"] | None = "last"
    stream: Annotated[Flag, HIDDEN] = None


class EmbeddingBody(PooledBody):
    needed: ClassVar = {"input": "missing; give a text, token ids, or a list of either"}
    input: Annotated[Any, shaped(prompts)] = None
    normalize: Annotated[Flag, Meta(description="Scale to length 1.")] = True
    dimensions: Dimensions = None
    encoding_format: Literal["float", "base64"] | None = "float"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingsCall:
    """The engine requests built from one body, and the format of the response."""

    call_id: str
    model: str
    requests: Sequence[EngineRequest]
    deadline_s: float | None
    service_tier: str
    """See `serve.http_api.openai_request.CompletionCall`."""
    renamed: Renamer
    """Renames an error's field to its name in the body."""
    dimensions: int | None = None
    normalize: bool = True
    encoding: str = "float"
    stream: bool = False

    def with_requests(self, requests: Sequence[EngineRequest]) -> Self:
        return dataclasses.replace(self, requests=requests)


def is_slow(body: Body) -> bool:
    """Return whether `read_call` must run in a thread because it tokenizes long text."""
    return completion_is_slow("completion", {"prompt": body.get("input")})


def read_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None
) -> EmbeddingsCall:
    """Check a body and build an engine request for each input.

    Raises:
        InvalidRequestError: the body is invalid; `.field` names a field of the body or a header.
        UnknownModelError: the body names a model that the server does not serve.
    """
    asked = read(EmbeddingBody, body)
    check_dimensions_of(parts, asked.dimensions)
    call = embed(parts, asked, asked.input, lambda place: f"input{place}", headers, arrival_s, tenant)
    return dataclasses.replace(
        call,
        dimensions=asked.dimensions,
        normalize=asked.normalize is not False,
        encoding=asked.encoding_format or "float",
    )


def check_dimensions_of(parts: EngineComponents, dimensions: int | None) -> None:
    """Check a body's `dimensions`.

    Raises:
        InvalidRequestError: the model's embeddings have fewer dimensions.
    """
    config = parts.model_config
    check_dimensions(dimensions, MAX_INTEGER if config is None else config.embedding_size or config.hidden_size)


def embed(
    parts: EngineComponents,
    body: PooledBody,
    texts: object,
    name: Callable[[str], str],
    headers: Mapping[str, str],
    arrival_s: float,
    tenant: str | None,
) -> EmbeddingsCall:
    """Build an engine request for each text.

    Args:
        parts, headers, arrival_s, tenant: see `serve.http_api.openai_request.read_call`.
        body: the other fields of the body.
        texts: a text, a list of texts, token ids or a list of token id lists.
        name: returns the field name for errors about one text, given its index such as ``[3]``, or about the whole
            field, given "".

    Raises:
        InvalidRequestError, UnknownModelError: see `read_call`.
    """
    if body.stream:
        raise InvalidRequestError("stream", "is not supported for embeddings; leave it out")
    asked = CompletionBody(
        **carried(body, Addressed),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        prompt=texts,
        max_tokens=1,
        temperature=0,
        ignore_eos=True,
    )

    def renamed(error: InvalidRequestError) -> InvalidRequestError:
        field, bracket, rest = error.field.partition("[")
        return error.renamed(name(bracket + rest)) if field == "prompt" else error

    try:
        call = build_call(parts, asked, headers, arrival_s, tenant)
    except InvalidRequestError as error:
        raise renamed(error) from None
    pooling = body.pooling or "last"
    return EmbeddingsCall(
        call_id=ID_PREFIX + call.call_id.partition("-")[2],
        model=call.model,
        requests=[
            dataclasses.replace(request, params=dataclasses.replace(request.params, pooling=pooling))
            for request in call.requests
        ],
        deadline_s=call.deadline_s,
        service_tier=call.service_tier,
        renamed=renamed,
    )


class EmbeddingsResponse:
    """Builds a response, which is never streamed; implements `serve.http_api.endpoints.ResponseBuilder`."""

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

"""``/v1/score``: similarity of texts, the cosine of their embeddings, as vLLM's for models that embed."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.embedding import embedding
from apt_jax.frontend.outputs import OutputDelta
from serve.compact_json import json_bytes
from serve.errors import RequestFailedError
from serve.http_api.embeddings import CARRIED, REFUSED, EmbeddingsCall, EmbeddingsResponse
from serve.http_api.embeddings import is_slow as embeddings_is_slow
from serve.http_api.embeddings import read_call as read_embeddings
from serve.http_api.openai_request import Body, with_field

PATH = "/v1/score"
ID_PREFIX = "score-"
SIDES = ("text_1", "text_2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreCall(EmbeddingsCall):
    """The engine requests of one body: those of `text_1`, then those of `text_2`."""

    num_first: int
    """Texts in `text_1`."""

    @property
    def renamed(self) -> Callable[[InvalidRequestError], InvalidRequestError]:
        """Gives the field in an error the name that it has in the body."""
        return lambda error: _renamed(super(ScoreCall, self).renamed(error), self.num_first)


def is_slow(body: Body) -> bool:
    """Return whether `read_call` tokenizes much, and so belongs in a thread."""
    return any(embeddings_is_slow({"input": body.get(side)}) for side in SIDES)


def read_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None
) -> ScoreCall:
    """Check a body and build a request of the engine for each of its texts.

    Raises:
        InvalidRequestError: one line; `.field` names a field of the body or a header.
        UnknownModelError: another model is asked for.
    """
    first, second = (_texts(body, side) for side in SIDES)
    if len(first) not in (1, len(second)):
        raise InvalidRequestError("text_1", f"has {len(first)} texts and text_2 {len(second)}; give one, or as many")
    fields = {name: body[name] for name in (*CARRIED, *REFUSED, "pooling", "stream") if name in body}
    try:
        call = read_embeddings(parts, fields | {"input": [*first, *second]}, headers, arrival_s, tenant)
    except InvalidRequestError as error:
        raise _renamed(error, len(first)) from None
    call_id = ID_PREFIX + call.call_id.partition("-")[2]
    return ScoreCall(**vars(call) | {"call_id": call_id, "num_first": len(first)})


def _texts(body: Body, side: str) -> list[str]:
    """The texts of one side."""
    value = body.get(side)
    if value is None:
        raise InvalidRequestError(side, "missing; give a text or texts")
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise InvalidRequestError(side, "has no text")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            field = f"{side}[{index}]" if isinstance(value, list) else side
            raise InvalidRequestError(field, f"{json_kind(text)} is not text")
    return texts


def _renamed(error: InvalidRequestError, num_first: int) -> InvalidRequestError:
    """The error with its field as the body has it: the texts of both sides are one input."""
    name, _, rest = error.field.partition("[")
    if name != "input":
        return error
    index = rest.partition("]")[0]
    if not index.isdecimal():
        return with_field(error, "text_2")
    place = int(index)
    return with_field(error, f"text_1[{place}]" if place < num_first else f"text_2[{place - num_first}]")


class ScoreResponse(EmbeddingsResponse):
    """The answer to a call, which is always whole."""

    def __init__(self, parts: EngineComponents, call: ScoreCall) -> None:
        super().__init__(parts, call)
        self._num_first = call.num_first

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        """See `serve.http_api.endpoints.ResponseBuilder`."""
        call, scores = self._call, self.scores(deltas)
        num_tokens = sum(request.prompt_token_ids.size for request in call.requests)
        return json_bytes(
            {
                "id": call.call_id,
                "object": "list",
                "created": int(time.time()),
                "model": call.model,
                "data": [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)],
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
                "service_tier": call.service_tier,
            }
        )

    def scores(self, deltas: Sequence[OutputDelta]) -> list[float]:
        """Cosines of the second texts, each to its first one.

        Raises:
            RequestFailedError: a text has no embedding.
        """
        units = []
        for delta in deltas:
            if delta.pooled is None:
                raise RequestFailedError(delta.error or "the request was aborted")
            units.append(embedding(delta.pooled, dimensions=None, normalize=True))
        first, second = units[: self._num_first], units[self._num_first :]
        return [float(np.dot(first[n % len(first)], unit)) for n, unit in enumerate(second)]

"""``/v1/score``: similarity of texts as the cosine of their embeddings, as in vLLM for embedding models."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.embedding import embedding
from apt_jax.frontend.outputs import OutputDelta
from serve.compact_json import json_bytes
from serve.errors import RequestFailedError
from serve.http_api.embeddings import EmbeddingsCall, EmbeddingsResponse, PooledBody, embed
from serve.http_api.embeddings import is_slow as embeddings_is_slow
from serve.http_api.json_schemas import Facts, Schema, list_of
from serve.http_api.openai_bodies import TEXT
from serve.http_api.openai_request import Body
from serve.http_api.records import read, shaped

PATH = "/v1/score"
ID_PREFIX = "score-"
SIDES = ("text_1", "text_2")


def texts_of(facts: Facts) -> Schema:
    """Return the schema of a text or a list of texts. The list's limit leaves space for one text in the other field."""
    return {"anyOf": [TEXT, list_of(TEXT, 1, facts.max_sequences - 1)]}


class ScoreBody(PooledBody):
    needed: ClassVar = dict.fromkeys(SIDES, "missing; give a text or a list of texts")
    text_1: Annotated[str | list[str], shaped(texts_of, "One text, or as many as in `text_2`.")] = ""
    text_2: Annotated[str | list[str], shaped(texts_of)] = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreCall(EmbeddingsCall):
    """The engine requests built from one body: first the texts in `text_1`, then the texts in `text_2`."""

    num_first: int
    """Number of texts in `text_1`."""


def is_slow(body: Body) -> bool:
    """Return whether `read_call` must run in a thread because it tokenizes long text."""
    return any(embeddings_is_slow({"input": body.get(side)}) for side in SIDES)


def read_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None
) -> ScoreCall:
    """Check a body and build an engine request for each of its texts.

    Raises:
        InvalidRequestError: the body is invalid; `.field` names a field of the body or a header.
        UnknownModelError: the body names a model that the server does not serve.
    """
    asked = read(ScoreBody, body)
    first, second = ([side] if isinstance(side, str) else side for side in (asked.text_1, asked.text_2))
    for side, texts in zip(SIDES, (first, second), strict=True):
        if not texts:
            raise InvalidRequestError(side, "has no text")
    if len(first) not in (1, len(second)):
        raise InvalidRequestError(
            "text_1", f"has {len(first)} texts and text_2 has {len(second)}; give one text, or as many"
        )
    return score(parts, asked, first, second, ("text_1[{}]", "text_2"), headers, arrival_s, tenant)


def score(
    parts: EngineComponents,
    body: PooledBody,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
    headers: Mapping[str, str],
    arrival_s: float,
    tenant: str | None,
) -> ScoreCall:
    """Build an engine request for each text.

    Args:
        parts, headers, arrival_s, tenant: see `serve.http_api.openai_request.read_call`.
        body: the other fields of the body.
        first, second: the texts on the two sides.
        names: field names for errors: for a text in `first`, with ``{}`` in place of its index, and for `second`.

    Raises:
        InvalidRequestError, UnknownModelError: see `read_call`.
    """

    def name(place: str) -> str:
        index = place[1:].partition("]")[0]
        if not index.isdecimal():
            return names[1]
        number = int(index)
        return names[0].format(number) if number < len(first) else f"{names[1]}[{number - len(first)}]"

    call = embed(parts, body, [*first, *second], name, headers, arrival_s, tenant)
    call_id = ID_PREFIX + call.call_id.partition("-")[2]
    return ScoreCall(**vars(call) | {"call_id": call_id, "num_first": len(first)})


class ScoreResponse(EmbeddingsResponse):
    """Builds the response to one call, which is never streamed."""

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
        """Return the cosine similarity of each text on the second side to its counterpart on the first side.

        Raises:
            RequestFailedError: the request of a text was aborted or failed.
        """
        units = []
        for delta in deltas:
            if delta.pooled is None:
                raise RequestFailedError(delta.error or "the request was aborted")
            units.append(embedding(delta.pooled, dimensions=None, normalize=True))
        first, second = units[: self._num_first], units[self._num_first :]
        return [float(np.dot(first[n % len(first)], unit)) for n, unit in enumerate(second)]

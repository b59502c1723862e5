"""``/v1/rerank``: documents ranked by similarity to a query, in the format of Cohere and Jina, which vLLM also uses."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.validation import MAX_INTEGER
from serve.compact_json import json_bytes
from serve.http_api.embeddings import PooledBody
from serve.http_api.json_schemas import list_of, object_of
from serve.http_api.openai_bodies import TEXT
from serve.http_api.openai_request import Body
from serve.http_api.records import Flag, fixed, read, shaped
from serve.http_api.scores import ScoreCall, ScoreResponse, score
from serve.http_api.scores import is_slow as scores_are_slow

PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
ID_PREFIX = "rerank-"

_DOCUMENT = {"anyOf": [TEXT, object_of({"text": TEXT}, required=("text",))]}


class RerankBody(PooledBody, kw_only=True):
    query: Annotated[str, fixed(TEXT)]
    documents: Annotated[list[Any], shaped(lambda facts: list_of(_DOCUMENT, 1, facts.max_sequences - 1))]
    top_n: Annotated[int, Meta(ge=0, le=MAX_INTEGER, description="Maximum number of results; 0: all.")] | None = None
    return_documents: Flag = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankCall(ScoreCall):
    """The engine requests built from one body: first the query, then the documents."""

    documents: Sequence[str]
    top_n: int
    """Maximum number of results in the response."""
    return_documents: bool


def is_slow(body: Body) -> bool:
    """Return whether `read_call` must run in a thread because it tokenizes long text."""
    return scores_are_slow({"text_1": body.get("query"), "text_2": body.get("documents")})


def read_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None
) -> RerankCall:
    """Check a body and build an engine request for its query and each document.

    Raises:
        InvalidRequestError: the body is invalid; `.field` names a field of the body or a header.
        UnknownModelError: the body names a model that the server does not serve.
    """
    asked = read(RerankBody, body)
    if not asked.documents:
        raise InvalidRequestError("documents", "must have at least one document")
    documents: list[str] = []
    for number, document in enumerate(asked.documents):
        text = document.get("text") if isinstance(document, Mapping) else document
        if not isinstance(text, str):
            raise InvalidRequestError(f"documents[{number}]", f"{json_kind(text)} is not text")
        documents.append(text)
    call = score(parts, asked, [asked.query], documents, ("query", "documents"), headers, arrival_s, tenant)
    own: dict[str, Any] = {
        "call_id": ID_PREFIX + call.call_id.partition("-")[2],
        "documents": documents,
        "top_n": asked.top_n or len(documents),
        "return_documents": asked.return_documents is not False,
    }
    return RerankCall(**vars(call) | own)


class RerankResponse(ScoreResponse):
    """Builds the response to one call, which is never streamed: the most similar documents first."""

    def __init__(self, parts: EngineComponents, call: RerankCall) -> None:
        super().__init__(parts, call)
        self._rerank = call

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        """See `serve.http_api.endpoints.ResponseBuilder`."""
        call, scores = self._rerank, self.scores(deltas)
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: call.top_n]
        num_tokens = sum(request.prompt_token_ids.size for request in call.requests)
        return json_bytes(
            {
                "id": call.call_id,
                "model": call.model,
                "results": [
                    {
                        "index": index,
                        **({"document": {"text": call.documents[index]}} if call.return_documents else {}),
                        "relevance_score": scores[index],
                    }
                    for index in ranked
                ],
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
                "service_tier": call.service_tier,
            }
        )

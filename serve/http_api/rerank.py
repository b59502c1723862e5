"""``/v1/rerank``: documents by their similarity to a query, in the form of Cohere and Jina, as vLLM's."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.validation import MAX_INTEGER, check_integer
from serve.compact_json import json_bytes
from serve.http_api.embeddings import CARRIED, REFUSED
from serve.http_api.openai_request import Body, flag, with_field
from serve.http_api.scores import ScoreCall, ScoreResponse
from serve.http_api.scores import is_slow as scores_are_slow
from serve.http_api.scores import read_call as read_scores

PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
ID_PREFIX = "rerank-"
_NAMES = {"text_1": "query", "text_2": "documents"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankCall(ScoreCall):
    """The engine requests of one body: that of the query, then those of the documents."""

    documents: Sequence[str]
    top_n: int
    """Results in the answer."""
    return_documents: bool

    @property
    def renamed(self) -> Callable[[InvalidRequestError], InvalidRequestError]:
        """Gives the field in an error the name that it has in the body."""
        return lambda error: _renamed(super(RerankCall, self).renamed(error))


def is_slow(body: Body) -> bool:
    """Return whether `read_call` tokenizes much, and so belongs in a thread."""
    return scores_are_slow({"text_1": body.get("query"), "text_2": body.get("documents")})


def read_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None
) -> RerankCall:
    """Check a body and build a request of the engine for its query and each document.

    Raises:
        InvalidRequestError: one line; `.field` names a field of the body or a header.
        UnknownModelError: another model is asked for.
    """
    query, given, top_n = body.get("query"), body.get("documents"), body.get("top_n")
    if not isinstance(query, str):
        raise InvalidRequestError("query", "must be a text")
    if not isinstance(given, list) or not given:
        raise InvalidRequestError("documents", "must be a list of at least one text")
    documents = [document.get("text") if isinstance(document, Mapping) else document for document in given]
    count = len(documents) if top_n is None else check_integer("top_n", top_n, 0, MAX_INTEGER) or len(documents)
    fields = {name: body[name] for name in (*CARRIED, *REFUSED, "pooling", "stream") if name in body}
    try:
        call = read_scores(parts, {**fields, "text_1": query, "text_2": documents}, headers, arrival_s, tenant)
    except InvalidRequestError as error:
        raise _renamed(error) from None
    own: dict[str, Any] = {
        "call_id": ID_PREFIX + call.call_id.partition("-")[2],
        "documents": documents,
        "top_n": count,
        "return_documents": body.get("return_documents") is None or flag(body, "return_documents"),
    }
    return RerankCall(**vars(call) | own)


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    name, bracket, rest = error.field.partition("[")
    if name not in _NAMES:
        return error
    return with_field(error, _NAMES[name] + (bracket + rest if name == "text_2" else ""))


class RerankResponse(ScoreResponse):
    """The answer to a call, which is always whole: the best documents first."""

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

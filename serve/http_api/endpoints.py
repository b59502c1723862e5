"""Differences between the endpoints that generate text: how a body is read, and how the answer is written.

Their calls have one life (`serve.http_api.calls.HttpCall`). A further endpoint is an entry of `ENDPOINTS`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.request import EngineRequest
from serve.http_api import embeddings, llama_infill, openai_request, rerank, scores
from serve.http_api.errors import HttpError, Renamer
from serve.http_api.messages.request import ID_PREFIX as MESSAGES_ID_PREFIX
from serve.http_api.messages.request import read_call as read_messages
from serve.http_api.messages.response import MessagesResponse
from serve.http_api.ollama import request as ollama
from serve.http_api.ollama.request import OllamaCall
from serve.http_api.ollama.response import STREAM_TYPE as OLLAMA_STREAM_TYPE
from serve.http_api.ollama.response import EmbedResponse, OldEmbedResponse, OllamaResponse
from serve.http_api.openai_request import Body, CompletionCall, Kind
from serve.http_api.openai_response import CompletionResponse
from serve.http_api.responses.request import ID_PREFIX as RESPONSES_ID_PREFIX
from serve.http_api.responses.request import read_call as read_responses
from serve.http_api.responses.response import ResponsesResponse


class TextCall(Protocol):
    """The engine requests of one body, and the parameters of its answer."""

    @property
    def call_id(self) -> str:
        """The `id` of the answer."""
        ...

    @property
    def requests(self) -> Sequence[EngineRequest]: ...

    @property
    def deadline_s(self) -> float | None:
        """On the engine's clock; None: no deadline."""
        ...

    @property
    def stream(self) -> bool: ...

    @property
    def renamed(self) -> Renamer:
        """Gives the field in an error the name that it has in the body."""
        ...

    def with_requests(self, requests: Sequence[EngineRequest]) -> Self:
        """The same call with these requests, whose constraints are compiled."""
        ...


class ResponseBuilder(Protocol):
    """Writes the answer to one call: as server-sent events, or whole."""

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """The events that new output of request `index` makes, ready to send; maybe none.

        Raises:
            RequestFailedError: the output has an end that this kind of answer cannot tell.
        """
        ...

    def end(self) -> bytes:
        """The events after the output of all requests."""
        ...

    def failure(self, error: HttpError) -> bytes:
        """The events that end a stream with an error."""
        ...

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        """The body of the whole answer.

        Args:
            deltas: one a request, with its whole output; where the endpoint is `piecewise`, those of its one request.

        Raises:
            RequestFailedError: as `events`.
        """
        ...


Reader = Callable[[EngineComponents, Body, Mapping[str, str], float, str | None], TextCall]
"""Checks a body and builds its requests, from the engine's parts, the body, headers in lower case, the time of arrival on
the engine's clock, and the tenant. Raises what `openai_request.read_call` raises."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One endpoint that generates text."""

    path: str
    id_prefix: str
    """Begins the `id` of an answer, before that of its request."""
    read: Reader
    is_slow: Callable[[Body], bool]
    """Tells whether `read` belongs in a thread: it waits for other processes, or works for long."""
    respond: Callable[[EngineComponents, Any], ResponseBuilder]
    """Makes the builder of the answer to a call that `read` returned."""
    piecewise: bool = False
    """A whole answer is made of the pieces in which its one output came."""
    stream_type: str = "text/event-stream; charset=utf-8"
    """Media type of an answer that is streamed."""


def _completions(kind: Kind, path: str, id_prefix: str) -> Endpoint:
    def read(
        parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None
    ) -> CompletionCall:
        return openai_request.read_call(parts, kind, body, headers, arrival_s, tenant)

    return Endpoint(
        path=path,
        id_prefix=id_prefix,
        read=read,
        is_slow=lambda body: openai_request.is_slow(kind, body),
        respond=CompletionResponse,
    )


def _of_ollama(path: str, id_prefix: str, read: Callable[..., OllamaCall]) -> Endpoint:
    return Endpoint(
        path=path,
        id_prefix=id_prefix,
        read=read,
        is_slow=ollama.is_slow,
        respond=OllamaResponse,
        stream_type=OLLAMA_STREAM_TYPE,
    )


def _renders_a_template(body: Body) -> bool:
    """Another process does."""
    del body
    return True


ENDPOINTS: tuple[Endpoint, ...] = (
    _completions("completion", "/v1/completions", "cmpl-"),
    _completions("chat", "/v1/chat/completions", "chatcmpl-"),
    Endpoint(
        path="/v1/responses",
        id_prefix=RESPONSES_ID_PREFIX,
        read=read_responses,
        is_slow=_renders_a_template,
        respond=ResponsesResponse,
        piecewise=True,
    ),
    Endpoint(
        path="/v1/messages",
        id_prefix=MESSAGES_ID_PREFIX,
        read=read_messages,
        is_slow=_renders_a_template,
        respond=MessagesResponse,
    ),
    Endpoint(
        path=embeddings.PATH,
        id_prefix=embeddings.ID_PREFIX,
        read=embeddings.read_call,
        is_slow=embeddings.is_slow,
        respond=embeddings.EmbeddingsResponse,
    ),
    Endpoint(
        path=scores.PATH,
        id_prefix=scores.ID_PREFIX,
        read=scores.read_call,
        is_slow=scores.is_slow,
        respond=scores.ScoreResponse,
    ),
    *(
        Endpoint(
            path=path,
            id_prefix=rerank.ID_PREFIX,
            read=rerank.read_call,
            is_slow=rerank.is_slow,
            respond=rerank.RerankResponse,
        )
        for path in rerank.PATHS
    ),
    Endpoint(
        path=llama_infill.PATH,
        id_prefix="cmpl-",
        read=llama_infill.read_call,
        is_slow=llama_infill.is_slow,
        respond=llama_infill.InfillResponse,
    ),
    _of_ollama("/api/chat", "chatcmpl-", ollama.read_chat_call),
    _of_ollama("/api/generate", "cmpl-", ollama.read_generate),
    *(
        Endpoint(
            path=path,
            id_prefix=embeddings.ID_PREFIX,
            read=ollama.read_embed,
            is_slow=ollama.is_slow_embedding,
            respond=respond,
        )
        for path, respond in (("/api/embed", EmbedResponse), ("/api/embeddings", OldEmbedResponse))
    ),
)


def request_id_of(answer_id: str) -> str:
    """The id of the request whose answer has this `id`."""
    prefix = next((e.id_prefix for e in ENDPOINTS if answer_id.startswith(e.id_prefix)), "")
    return answer_id.removeprefix(prefix)

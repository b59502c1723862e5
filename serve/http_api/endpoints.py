"""Differences between the endpoints that generate text: how each reads its body and writes its response.

Otherwise, their calls are served in the same way (`serve.http_api.calls.HttpCall`). To add an endpoint, add an entry to
`ENDPOINTS`.
"""

import dataclasses
import functools
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
from serve.http_api.responses.store import ResponseStore


class TextCall(Protocol):
    """The engine requests built from one body, and the parameters of the response."""

    @property
    def call_id(self) -> str:
        """The `id` of the response."""
        ...

    @property
    def requests(self) -> Sequence[EngineRequest]: ...

    @property
    def deadline_s(self) -> float | None:
        """Deadline of the call in seconds on the engine's clock; None if it has no deadline."""
        ...

    @property
    def stream(self) -> bool: ...

    @property
    def renamed(self) -> Renamer:
        """Function that renames an error's field to its name in the body."""
        ...

    def with_requests(self, requests: Sequence[EngineRequest]) -> Self:
        """Return a copy of the call with these requests, whose constraints have been compiled."""
        ...


class ResponseBuilder(Protocol):
    """Writes the response to one call, as a stream of events or as one body."""

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """Return the encoded events for new output of request `index`; may be empty.

        Raises:
            RequestFailedError: the request was aborted or failed, which responses of this API cannot express.
        """
        ...

    def end(self) -> bytes:
        """Return the encoded events after the output of all requests."""
        ...

    def failure(self, error: HttpError) -> bytes:
        """Return the encoded events that end a stream with an error."""
        ...

    def whole(self, deltas: Sequence[OutputDelta]) -> bytes:
        """Return the body of a response that is not streamed.

        Args:
            deltas: the complete output of each request, one item per request; if the endpoint is `piecewise`, all
                pieces of output of its only request.

        Raises:
            RequestFailedError: the request was aborted or failed, which responses of this API cannot express.
        """
        ...


Reader = Callable[[EngineComponents, Body, Mapping[str, str], float, str | None], TextCall]
"""Function that checks a body and builds its requests. Its arguments are the engine's components, the body, the headers
(names in lower case), the arrival time on the engine's clock, and the tenant. Raises the same exceptions as
`openai_request.read_call`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One endpoint that generates text."""

    path: str
    id_prefix: str
    """Prefix of a response's `id`; the request id follows it."""
    read: Reader
    """Checks a body and builds its requests."""
    is_slow: Callable[[Body], bool]
    """Returns whether `read` must run in a thread because it waits for other processes or takes long."""
    respond: Callable[[EngineComponents, Any], ResponseBuilder]
    """Creates the response builder for a call that `read` returned."""
    piecewise: bool = False
    """True if a response that is not streamed is built from the unmerged pieces of its only request's output."""
    stream_type: str = "text/event-stream; charset=utf-8"
    """Media type of a streamed response."""


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
    """Return True: these endpoints always wait for the process that renders the chat template."""
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


def endpoints(store: ResponseStore | None) -> tuple[Endpoint, ...]:
    """Return all endpoints; responses of the Responses API are stored in `store`, if it is not None."""
    read = functools.partial(read_responses, store=store)
    return tuple(dataclasses.replace(e, read=read) if e.read is read_responses else e for e in ENDPOINTS)


def request_id_of(answer_id: str) -> str:
    """Return the request id that a response's `id` contains: the `id` without the prefix of its endpoint."""
    prefix = next((e.id_prefix for e in ENDPOINTS if answer_id.startswith(e.id_prefix)), "")
    return answer_id.removeprefix(prefix)

"""Parts of the readers of other APIs, whose bodies become chat completions.

Fields that an API does not have, but chat completions do under the same name, mean the same there: objectives, sampling
parameters of vLLM, constraints. A name that its API has another word for is refused with that word, so that nothing is
ignored that would change the answer.
"""

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from apt_jax.errors import DuplicateRequestError, InvalidRequestError, json_kind
from apt_jax.frontend.components import EngineComponents
from apt_jax.request import EngineRequest
from apt_jax.text.chat import MAX_MESSAGES
from serve.http_api import openai_request
from serve.http_api.constraint_fields import RESPONSE_FORMAT
from serve.http_api.errors import Renamer
from serve.http_api.openai_bodies import ChatBody, SharedBody
from serve.http_api.openai_request import Body, CompletionCall
from serve.http_api.records import carried, quoted
from serve.http_api.tool_calls.other_forms import with_tools

_logger = logging.getLogger(__name__)
_MAX_LEFT_OUT = 64
_left_out: set[str] = set()
"""Kinds of tools that the log has named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedCall:
    """The engine request of a body of another API, and the parameters of its answer."""

    chat: CompletionCall
    """The same call as a chat completion."""
    names: Mapping[str, str]
    """Names of fields of chat completions and their names in that API."""

    @property
    def renamed(self) -> Renamer:
        """Gives the field in an error its name in that API."""
        return field_renamer(self.names, self.chat.renamed)

    @property
    def requests(self) -> Sequence[EngineRequest]:
        return self.chat.requests

    @property
    def deadline_s(self) -> float | None:
        return self.chat.deadline_s

    @property
    def stream(self) -> bool:
        return self.chat.stream

    def with_requests(self, requests: Sequence[EngineRequest]) -> Self:
        return dataclasses.replace(self, chat=self.chat.with_requests(requests))


def read_chat(
    parts: EngineComponents,
    chat: ChatBody,
    names: Mapping[str, str],
    headers: Mapping[str, str],
    arrival_s: float,
    tenant: str | None,
    constraint: Body,
) -> CompletionCall:
    """Build the request of a body that has been made one of chat completions; `names` are those of `field_renamer`, and
    `constraint` has the fields of constraints.

    Raises:
        InvalidRequestError: see `serve.http_api.openai_request.build_call`; `.field` is the other API's.
    """
    try:
        chat.messages = with_tools({"messages": chat.messages})["messages"]
        return openai_request.build_call(parts, chat, headers, arrival_s, tenant, constraint)
    except InvalidRequestError as error:
        raise field_renamer(names)(error) from None


def chat_fields(asked: SharedBody) -> dict[str, Any]:
    """The fields of a chat completion that a body of another API has as well."""
    refused = type(asked).refused
    return {name: value for name, value in carried(asked, SharedBody).items() if name not in refused}


def constraint_fields(body: Body) -> dict[str, Any]:
    """The fields of a body of another API that hold a constraint as chat completions do."""
    return {name: body[name] for name in body.keys() & SharedBody.also.keys() if name != RESPONSE_FORMAT}


def field_renamer(names: Mapping[str, str], inner: Renamer = lambda error: error) -> Renamer:
    """Make a function that gives the field in an error of a chat completion the name that another API has for it.

    Args:
        names: by the name of chat completions; a name stands for what it begins, up to a dot or a bracket.
        inner: is applied before.
    """

    def rename(error: InvalidRequestError) -> InvalidRequestError:
        error = inner(error)
        if isinstance(error, DuplicateRequestError):
            return error
        end = min((at for at in map(error.field.find, ".[") if at >= 0), default=len(error.field))
        name = names.get(error.field[:end])
        return error if name is None else error.renamed(name)

    return rename


def leave_out_tools(field: str, kinds: Collection[str], are_others: bool) -> None:
    """Leave out tools that the server would have to run, and say so in the log, once for each kind. Coding agents list
    them beside their own tools whatever the server is.

    Args:
        field: of the first one.
        kinds: of these tools.
        are_others: there are tools that the client runs.

    Raises:
        InvalidRequestError: there are none, so that the request asks for these.
    """
    for kind in kinds:
        if not are_others:
            raise InvalidRequestError(field, f"the tool {quoted(kind)} is not supported; only tools of the client are")
        if kind not in _left_out and len(_left_out) < _MAX_LEFT_OUT:
            _left_out.add(kind)
            _logger.warning("requests list the tool %s, which this server does not run: it is left out", quoted(kind))


def set_thinking(chat: dict[str, Any], wanted: bool) -> None:
    """Tell the chat template whether the model shall think, by the variable that most templates have for it; one that
    the body sets itself stays."""
    given = chat.get("chat_template_kwargs")
    if given is None or isinstance(given, Mapping):
        chat["chat_template_kwargs"] = {"enable_thinking": wanted, **(given or {})}


def check_items(field: str, value: object) -> Sequence[Any]:
    """Return a list that is not empty, of no more items than a conversation may have messages.

    Raises:
        InvalidRequestError: it is not one.
    """
    if not isinstance(value, list):
        raise InvalidRequestError(field, f"{json_kind(value)} is not a list")
    if not value:
        raise InvalidRequestError(field, "must not be empty")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequestError(field, f"{len(value)} items; at most {MAX_MESSAGES}")
    return value

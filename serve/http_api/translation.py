"""Functions shared by the modules that convert bodies of other APIs to chat completions.

Fields of chat completions that an API does not define (objectives, vLLM's sampling parameters, constraints) keep their
meaning. If the API has its own name for such a field, the field is rejected and the error gives that name. Unsupported
fields that would change the output are rejected, except hints such as `thinking.budget_tokens` and `text.verbosity`.
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
"""Kinds of tools that have been logged as left out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedCall:
    """A call of another API that is served as a chat completion or completion."""

    chat: CompletionCall
    """The chat completion or completion."""
    names: Mapping[str, str]
    """Maps fields of chat completions to their names in the other API."""

    @property
    def renamed(self) -> Renamer:
        """Function that renames an error's field to its name in the other API."""
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
    """Build the request for a body of another API that has already been converted to a chat completion.

    Args:
        parts, headers, arrival_s, tenant: see `serve.http_api.openai_request.read_call`.
        chat: the body as a chat completion.
        names: names of fields in the other API; see `field_renamer`.
        constraint: fields of the body's constraint, as in chat completions.

    Raises:
        InvalidRequestError: see `serve.http_api.openai_request.build_call`; `.field` is named as in the other API.
    """
    try:
        chat.messages = with_tools({"messages": chat.messages})["messages"]
        return openai_request.build_call(parts, chat, headers, arrival_s, tenant, constraint)
    except InvalidRequestError as error:
        raise field_renamer(names)(error) from None


def chat_fields(asked: SharedBody) -> dict[str, Any]:
    """Return the fields of a body of another API that have the same names in chat completions."""
    refused = type(asked).refused
    return {name: value for name, value in carried(asked, SharedBody).items() if name not in refused}


def constraint_fields(body: Body) -> dict[str, Any]:
    """Return the constraint fields of a body that have the same names in chat completions, except `response_format`."""
    return {name: body[name] for name in body.keys() & SharedBody.also.keys() if name != RESPONSE_FORMAT}


def field_renamer(names: Mapping[str, str], inner: Renamer = lambda error: error) -> Renamer:
    """Return a function that renames an error's field from its name in chat completions to its name in another API.

    Args:
        names: maps field names in chat completions to names in the other API. The rest of a field, from the first dot
            or bracket, is dropped.
        inner: renamer that is applied first.
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
    """Log a warning for each new kind of tool that is left out because the server would have to run it. Coding agents
    list such tools in addition to their own, regardless of the server.

    Args:
        field: field of the first such tool.
        kinds: kinds of the tools that are left out.
        are_others: True if the request also has tools that the client runs.

    Raises:
        InvalidRequestError: the request has only tools that the server would have to run.
    """
    for kind in kinds:
        if not are_others:
            raise InvalidRequestError(
                field, f"the tool {quoted(kind)} is not supported; only tools that the client runs are"
            )
        if kind not in _left_out and len(_left_out) < _MAX_LEFT_OUT:
            _left_out.add(kind)
            _logger.warning("requests list the tool %s, which this server does not run: it is left out", quoted(kind))


def set_thinking(chat: dict[str, Any], wanted: bool) -> None:
    """Set the variable `enable_thinking`, which turns thinking on or off in most chat templates, unless the body sets
    it."""
    given = chat.get("chat_template_kwargs")
    if given is None or isinstance(given, Mapping):
        chat["chat_template_kwargs"] = {"enable_thinking": wanted, **(given or {})}


def check_items(field: str, value: object) -> Sequence[Any]:
    """Check that a value is a list of 1 to `MAX_MESSAGES` items, and return it.

    Raises:
        InvalidRequestError: it is not a list, is empty or has too many items.
    """
    if not isinstance(value, list):
        raise InvalidRequestError(field, f"{json_kind(value)} is not a list")
    if not value:
        raise InvalidRequestError(field, "must not be empty")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequestError(field, f"{len(value)} items; at most {MAX_MESSAGES}")
    return value

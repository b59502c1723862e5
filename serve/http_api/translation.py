"""Parts of the readers of other APIs, whose bodies become those of chat completions.

Fields that an API does not have, but chat completions do under the same name, mean the same there: objectives, sampling
parameters of vLLM, constraints. A name that its API has another word for is refused with that word, so that nothing is
ignored that would change the answer.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from apt_jax.errors import DuplicateRequestError, InvalidRequestError, json_kind
from apt_jax.frontend.components import EngineComponents
from apt_jax.request import EngineRequest
from apt_jax.text.chat import MAX_MESSAGES
from serve.http_api import openai_request
from serve.http_api.json_schemas import NULL, Schema
from serve.http_api.openai_request import Body, CompletionCall, with_field

_logger = logging.getLogger(__name__)
_MAX_LEFT_OUT = 64
_left_out: set[str] = set()
"""Kinds of tools that the log has named."""

_OF_CHAT_ALONE: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "continuous_usage_stats": (False,),
    "n": (1,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
"""Fields whose answer only chat completions have, with the values that ask for nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedCall:
    """The engine request of a body of another API, and what the answer needs to know."""

    chat: CompletionCall
    """The same call as a chat completion."""
    names: Mapping[str, str]
    """Names of fields of chat completions and what that API has for them."""

    @property
    def renamed(self) -> Callable[[InvalidRequestError], InvalidRequestError]:
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
    chat: dict[str, Any],
    names: Mapping[str, str],
    headers: Mapping[str, str],
    arrival_s: float,
    tenant: str | None,
) -> CompletionCall:
    """Build the request of a body that has been made one of chat completions; `names` are those of `field_renamer`.

    Raises:
        InvalidRequestError: see `serve.http_api.openai_request.read_call`; `.field` is the other API's.
    """
    try:
        return openai_request.read_call(parts, "chat", chat, headers, arrival_s, tenant)
    except InvalidRequestError as error:
        raise field_renamer(names)(error) from None


def chat_fields(body: Body, own: Collection[str], renamed: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a body that a chat completion has too.

    Args:
        body: of another API.
        own: fields of that API, which are left out.
        renamed: names of fields of chat completions and what that API has for them.

    Raises:
        InvalidRequestError: there is a field that only chat completions have.
    """
    for name in body.keys() & renamed.keys():
        if name not in own and body[name] is not None:
            raise InvalidRequestError(name, f"is not a field of this API; use {renamed[name]}")
    for name in body.keys() & _OF_CHAT_ALONE.keys():
        value = body[name]
        if value is not None and not any(value == v and type(value) is type(v) for v in _OF_CHAT_ALONE[name]):
            raise InvalidRequestError(name, "is not supported here; use /v1/chat/completions")
    return {name: value for name, value in body.items() if name not in own and name not in _OF_CHAT_ALONE}


def chat_schemas(of_chat: Mapping[str, Schema], own: Collection[str], renamed: Mapping[str, str]) -> dict[str, Schema]:
    """Schemas of the fields of chat completions that `chat_fields` with these arguments takes.

    Args:
        of_chat: the schemas of all fields of chat completions.
        own, renamed: as for `chat_fields`.
    """
    alone = {
        name: {"enum": [*values, None], "description": "Only chat completions have more."}
        for name, values in _OF_CHAT_ALONE.items()
    }
    refused = {name: {**NULL, "description": f"Use {word}."} for name, word in renamed.items() if name not in own}
    kept = {name: schema for name, schema in of_chat.items() if name not in own and name != "echo"}
    return {**kept, **alone, **refused}


def field_renamer(
    names: Mapping[str, str], inner: Callable[[InvalidRequestError], InvalidRequestError] = lambda error: error
) -> Callable[[InvalidRequestError], InvalidRequestError]:
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
        return error if name is None else with_field(error, name)

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


def quoted(value: object) -> str:
    """A client's word for a message, never long."""
    return repr(value[:40]) if isinstance(value, str) else json_kind(value)

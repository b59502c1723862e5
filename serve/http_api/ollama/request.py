"""Request bodies of Ollama's API, and their conversion to completions, chat completions and embeddings.

Options for loading a model are ignored, because the server's flags determine how it is loaded. Sampling options that
are not given have Ollama's defaults.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.frontend.components import EngineComponents
from apt_jax.text import chat
from apt_jax.validation import MAX_LOGPROBS, check_text, check_text_length
from serve.generate_call import LONG_PROMPT_CHARS
from serve.http_api import embeddings, openai_bodies, openai_request
from serve.http_api.infill import prompt_around
from serve.http_api.json_schemas import STRING, Facts, Schema, list_of, many, object_of, or_null
from serve.http_api.openai_bodies import TEXT, Addressed, CompletionBody, Tools
from serve.http_api.openai_request import Body
from serve.http_api.records import (
    HIDDEN,
    Bits32,
    EngineField,
    Flag,
    Record,
    Refused,
    Text,
    carried,
    fixed,
    quoted,
    read,
    reject,
    shaped,
)
from serve.http_api.translation import TranslatedCall, field_renamer, read_chat, set_thinking
from serve.http_api.unsupported_fields import REFUSED

Shape = Literal["chat", "generate"]
Json = dict[str, Any]
B = TypeVar("B", bound="_AnswerBody")

DEFAULTS: Json = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's default sampling options."""
EFFORTS = ("low", "medium", "high", "max")
_LATEST = ":latest"
_OPTIONS = "options."


class Options(Record):
    """Sampling options. Options for loading a model are ignored, because the server's flags replace them."""

    refused: ClassVar = {name: REFUSED[name] for name in ("mirostat", "tfs_z", "typical_p")}
    temperature: EngineField = None
    top_k: EngineField = None
    top_p: EngineField = None
    min_p: EngineField = None
    seed: EngineField = None
    stop: EngineField = None
    repetition_penalty: Annotated[Any, shaped(lambda facts: facts.optional("repetition_penalty"))] = msgspec.field(
        name="repeat_penalty", default=None
    )
    presence_penalty: EngineField = None
    frequency_penalty: EngineField = None
    num_predict: Bits32 = None


NAMES = {
    **{field: f"{_OPTIONS}{field}" for field in Options.__struct_fields__},
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "structured_outputs": "format",
    "reasoning_effort": "think",
}


def _names(facts: Facts) -> Schema:
    made = facts.model
    if "enum" in made:
        made["enum"] += [f"{known}{_LATEST}" for known in made["enum"] if known]
    return made


def _message() -> Schema:
    function = object_of({"name": STRING, "arguments": {"type": "object"}}, required=("name",))
    fields = {
        "role": {"type": "string", "pattern": f"^{chat.ROLE_PATTERN}$"},
        "content": or_null(STRING),
        "thinking": or_null(STRING),
        "tool_name": {"type": ["string", "null"], "maxLength": chat.MAX_NAME_CHARS},
        "tool_calls": or_null(many(object_of({"function": function}, required=("function",)))),
        "images": {"enum": [[], None]},
    }
    return object_of(fields, required=("role",))


class ShowBody(Record):
    model: Annotated[Any, shaped(_names)] = None
    name: Annotated[Any, HIDDEN] = None


class _NamedBody(Addressed):
    """Fields of the bodies of all endpoints except ``/api/show``."""

    model: Annotated[Any, shaped(_names)] = None
    name: Annotated[Any, HIDDEN] = None


class _AnswerBody(_NamedBody):
    stream: Flag = True
    options: Options | None = None
    format: Annotated[Any, fixed({"anyOf": [{"enum": ["", "json", None]}, {"type": "object"}]})] = None
    think: Annotated[Any, fixed({"enum": [True, False, *EFFORTS, None]})] = None
    logprobs: Flag = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class ChatBody(_AnswerBody):
    messages: Annotated[Any, fixed(or_null(list_of(_message(), 0, chat.MAX_MESSAGES)))] = None
    tools: Tools = None


class GenerateBody(_AnswerBody):
    refused: ClassVar = {
        "images": Refused(([],), "are not supported; send text"),
        "context": Refused(([],), "is not kept here; send the conversation to /api/chat"),
        "template": Refused(("",), "cannot be chosen by a request; operators choose it (--chat-template)"),
    }
    prompt: Text = None
    system: Text = None
    suffix: Text = None
    raw: Flag = None


class EmbedBody(_NamedBody):
    needed: ClassVar = {"input": "missing; give a text or a list of texts"}
    input: Annotated[Any, shaped(lambda facts: {"anyOf": [TEXT, list_of(TEXT, 1, facts.max_sequences)]})] = None
    truncate: Flag = None
    dimensions: embeddings.Dimensions = None


class OldEmbedBody(_NamedBody):
    needed: ClassVar = {"prompt": "missing; give a text"}
    prompt: Annotated[Any, fixed(TEXT)] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OllamaCall(TranslatedCall):
    """A call to ``/api/chat`` or ``/api/generate``."""

    shape: Shape
    """Format of the response."""
    model: str
    """Name of the model in the response."""
    loads: bool = False
    """True if the call only asks to load the model, in which case the response has no text."""

    @property
    def call_id(self) -> str:
        return self.chat.call_id


def is_slow_embedding(body: Body) -> bool:
    """Return whether `read_embed` must run in a thread because it tokenizes long text."""
    return embeddings.is_slow({"input": body.get("input", body.get("prompt"))})


def is_slow(body: Body) -> bool:
    """Return whether the body must be read in a thread, because it may need a chat template or contain long text."""
    prompt = body.get("prompt")
    return not (body.get("raw") is True and isinstance(prompt, str) and len(prompt) <= LONG_PROMPT_CHARS)


def read_chat_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None = None
) -> OllamaCall:
    """Check a body of ``/api/chat`` and build its request; see `serve.http_api.openai_request.read_call`.

    Raises:
        InvalidRequestError: the body is invalid; `.field` names a field of the body or a header.
        UnknownModelError: the body names a model that the server does not serve.
    """
    asked = _read(ChatBody, body)
    if not asked.messages and asked.messages in (None, []):
        return _load(parts, "chat", asked, headers, arrival_s, tenant)
    fields, form = _fields(parts, asked)
    made = openai_bodies.ChatBody(
        **fields,
        messages=messages_of(asked.messages),
        tools=asked.tools,
        logprobs=asked.logprobs,
        top_logprobs=asked.top_logprobs,
        **_thinking(asked.think),
    )
    return _call(parts, made, form, asked, NAMES, "chat", headers, arrival_s, tenant)


def read_generate(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None = None
) -> OllamaCall:
    """Check a body of ``/api/generate`` and build its request.

    Raises:
        InvalidRequestError, UnknownModelError: see `read_chat_call`.
    """
    asked = _read(GenerateBody, body)
    prompt, system, suffix = asked.prompt or "", asked.system or "", asked.suffix or ""
    if not prompt and not suffix:
        return _load(parts, "generate", asked, headers, arrival_s, tenant)
    (fields, form), thinking = _fields(parts, asked), _thinking(asked.think)
    if suffix or asked.raw or parts.chat_template is None:
        text = f"{system}\n\n{prompt}" if system and not asked.raw and not suffix else prompt
        fields = {"max_tokens": _room(parts, text, suffix), **fields}
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        made = CompletionBody(**fields, prompt=text, suffix=suffix or None, logprobs=logprobs)
    else:
        messages = [{"role": "system", "content": system}] if system else []
        made = openai_bodies.ChatBody(
            **fields,
            messages=[*messages, {"role": "user", "content": prompt}],
            logprobs=asked.logprobs,
            top_logprobs=asked.top_logprobs,
            **thinking,
        )
    return _call(parts, made, form, asked, {**NAMES, "messages": "prompt"}, "generate", headers, arrival_s, tenant)


def read_embed(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None
) -> embeddings.EmbeddingsCall:
    """Check a body of ``/api/embed``, or of the older ``/api/embeddings`` with its `prompt`, and build its requests.

    Raises:
        InvalidRequestError, UnknownModelError: see `read_chat_call`.
    """
    name = "prompt" if "prompt" in body and body.get("input") is None else "input"
    asked = read(EmbedBody if name == "input" else OldEmbedBody, body)
    texts = asked.input if isinstance(asked, EmbedBody) else asked.prompt
    if texts == []:
        raise InvalidRequestError(name, "missing; give a text or a list of texts")
    wrong = next((text for text in (texts if isinstance(texts, list) else [texts]) if not isinstance(text, str)), None)
    if wrong is not None:
        raise InvalidRequestError(name, f"{json_kind(wrong)} is not text")
    made = embeddings.PooledBody(**carried(asked, Addressed))
    made.model = served_name(parts, asked)
    if isinstance(asked, OldEmbedBody) or asked.truncate is not False:
        made.truncate_prompt_tokens = -1
    dimensions = asked.dimensions if isinstance(asked, EmbedBody) else None
    embeddings.check_dimensions_of(parts, dimensions)
    call = embeddings.embed(parts, made, texts, lambda place: f"{name}{place}", headers, arrival_s, tenant)
    return dataclasses.replace(call, model=_shown(call.model, asked), dimensions=dimensions)


def served_name(parts: EngineComponents, body: _NamedBody | ShowBody) -> object:
    """Return the model name in a body, without ``:latest`` if only the name without it is served.

    Raises:
        InvalidRequestError: the name is not text.
    """
    name = body.name if body.model is None else body.model
    if name is not None and not isinstance(name, str):
        raise InvalidRequestError("model", f"{json_kind(name)} is not a name")
    known = (*parts.model_names, parts.config.model, *parts.limits.adapters)
    if isinstance(name, str) and name not in known and name.removesuffix(_LATEST) in known:
        return name.removesuffix(_LATEST)
    return name


def messages_of(given: object) -> object:
    """Return the messages in the format of chat completions. Tool calls without an id get an id; results without an id
    get the ids of the preceding calls in order.

    Raises:
        InvalidRequestError: a message is malformed or not supported.
    """
    if not isinstance(given, list):
        raise InvalidRequestError("messages", f"{json_kind(given)} is not a list of messages")
    made: list[Any] = []
    waiting: list[str] = []
    for number, message in enumerate(given):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages[{number}]", f"{json_kind(message)} is not a message")
        if message.get("images"):
            raise InvalidRequestError(f"messages[{number}].images", "are not supported; send text")
        turn = {
            key: message[key] for key in ("role", "content", "name", "tool_call_id") if message.get(key) is not None
        }
        turn.setdefault("content", "")
        if message.get("thinking"):
            turn["reasoning_content"] = message["thinking"]
        if message.get("tool_name") is not None:
            turn["name"] = message["tool_name"]
        if turn.get("role") == "tool" and "tool_call_id" not in turn and waiting:
            turn["tool_call_id"] = waiting.pop()
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
                raise InvalidRequestError(f"messages[{number}].tool_calls", "is not a list of calls")
            ids = [call.get("id") or f"o{number % 100000:05}{at % 1000:03}" for at, call in enumerate(calls)]
            turn["tool_calls"] = [
                {"type": "function", **call, "id": call_id} for call, call_id in zip(calls, ids, strict=True)
            ]
            waiting = ids[::-1]
        made.append(turn)
    return made


def _read(record: type[B], body: Body) -> B:
    asked = read(record, body)
    reject(Options.refused, body.get("options") or {}, _OPTIONS)
    return asked


def _fields(parts: EngineComponents, asked: _AnswerBody) -> tuple[Json, Json]:
    """Return the fields that completions and chat completions share, and the fields of the constraint."""
    options = asked.options or Options()
    given = {name: value for name, value in carried(options, Options).items() if value is not None}
    most = given.pop("num_predict", 0)
    fields = {**carried(asked, Addressed), **DEFAULTS, **given, "model": served_name(parts, asked)}
    fields["stream"] = asked.stream is not False
    if most > 0:
        fields["max_tokens"] = most  # else as many as fit
    wanted, form = asked.format, {}
    if wanted == "json":
        form = {"type": "json_object"}
    elif isinstance(wanted, Mapping):
        form = {"type": "json_schema", "json_schema": {"schema": wanted}}
    elif wanted is not None and wanted != "":
        raise InvalidRequestError("format", f"{quoted(wanted)} must be json or a JSON schema")
    return fields, {"response_format": form} if form else {}


def _thinking(think: object) -> Json:
    """Return the fields of a chat completion that turn thinking on or off and set its effort."""
    fields: Json = {}
    if isinstance(think, str) and think in EFFORTS:
        set_thinking(fields, True)
        fields["reasoning_effort"] = think
    elif think is not None:
        if not isinstance(think, bool):
            raise InvalidRequestError("think", f"{quoted(think)} must be true, false or one of {', '.join(EFFORTS)}")
        set_thinking(fields, think)
    return fields


def _call(
    parts: EngineComponents,
    made: openai_bodies.ChatBody | CompletionBody,
    constraint: Json,
    asked: _AnswerBody,
    names: Mapping[str, str],
    shape: Shape,
    headers: Mapping[str, str],
    arrival_s: float,
    tenant: str | None,
) -> OllamaCall:
    if isinstance(made, openai_bodies.ChatBody):
        call = read_chat(parts, made, names, headers, arrival_s, tenant, constraint)
    else:
        try:
            call = openai_request.build_call(parts, made, headers, arrival_s, tenant, constraint)
        except InvalidRequestError as error:
            raise field_renamer(names)(error) from None
    return OllamaCall(chat=call, names=names, shape=shape, model=_shown(call.model, asked))


def _room(parts: EngineComponents, prompt: str, suffix: str) -> int:
    """Return the number of output tokens that fit after a prompt; at least 1."""
    tokenizer, most = parts.tokenizer, parts.limits.max_model_len
    if tokenizer is None:
        return 1
    if parts.limits.max_pool_tokens is not None:
        most = min(most, parts.limits.max_pool_tokens)
    if suffix:
        used = len(prompt_around(parts, prompt, suffix))
    else:
        check_text_length(parts.limits, tokenizer, check_text("prompt", prompt))
        used = len(tokenizer.encode(prompt))
    return max(1, most - used)


def _load(
    parts: EngineComponents,
    shape: Shape,
    asked: _AnswerBody,
    headers: Mapping[str, str],
    arrival_s: float,
    tenant: str | None,
) -> OllamaCall:
    """Build the call for a body without a prompt, which Ollama's clients send to load the model. One token is generated
    but not shown."""
    fields, _ = _fields(parts, asked)
    _thinking(asked.think)
    carries = {name: fields[name] for name in Addressed.__struct_fields__}
    made = CompletionBody(**carries, prompt=[0], max_tokens=1, temperature=0, ignore_eos=True)
    call = openai_request.build_call(parts, made, headers, arrival_s, tenant)
    return OllamaCall(chat=call, names=NAMES, shape=shape, model=_shown(call.model, asked), loads=True)


def _shown(name: str, asked: _NamedBody) -> str:
    given = asked.name if asked.model is None else asked.model
    return given if isinstance(given, str) and given else name

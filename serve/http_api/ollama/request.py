"""Bodies of Ollama's API, and the completions, chat completions and embeddings that they ask for.

Options of how a model is loaded are ignored: the server's flags decide. Options of sampling that are not given have Ollama's
defaults.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from apt_jax.errors import InvalidRequestError, json_kind
from apt_jax.frontend.components import EngineComponents
from apt_jax.validation import check_integer, check_mapping, check_text, check_text_length
from serve.generate_call import LONG_PROMPT_CHARS
from serve.http_api import embeddings, openai_request
from serve.http_api.infill import prompt_around
from serve.http_api.openai_request import Body, flag
from serve.http_api.translation import TranslatedCall, field_renamer, quoted, read_chat, set_thinking

Shape = Literal["chat", "generate"]
Json = dict[str, Any]

DEFAULTS: Json = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Options that Ollama has where none are given."""
OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "mirostat": "mirostat",
    "tfs_z": "tfs_z",
    "typical_p": "typical_p",
}
"""Options of `options`, and the fields of completions that they are."""
EFFORTS = ("low", "medium", "high", "max")
CARRIED = tuple(name for name in embeddings.CARRIED if name not in ("model", "truncate_prompt_tokens"))
"""Fields that mean the same as in a chat completion."""
REFUSED: dict[str, tuple[object, ...]] = {"images": ([],), "context": ([],), "template": ("",)}
"""Fields of ``/api/generate`` that are refused, with the values that ask for nothing."""
_REASONS = {
    "images": "are not supported; send text",
    "context": "is not kept here; send the conversation to /api/chat",
    "template": "is not the request's to choose (--chat-template)",
}
_LATEST = ":latest"
NAMES = {
    **{field: f"options.{name}" for name, field in OPTIONS.items()},
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "structured_outputs": "format",
    "reasoning_effort": "think",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OllamaCall(TranslatedCall):
    shape: Shape
    """Form of the answer."""
    model: str
    """Its name in the answer."""
    loads: bool = False
    """It asks that the model be loaded: nothing is said."""

    @property
    def call_id(self) -> str:
        return self.chat.call_id


def is_slow_embedding(body: Body) -> bool:
    """Return whether `read_embed` tokenizes much, and so belongs in a thread."""
    return embeddings.is_slow({"input": body.get("input", body.get("prompt"))})


def is_slow(body: Body) -> bool:
    """Return whether a template may be rendered, or much is tokenized."""
    prompt = body.get("prompt")
    return not (body.get("raw") is True and isinstance(prompt, str) and len(prompt) <= LONG_PROMPT_CHARS)


def read_chat_call(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None = None
) -> OllamaCall:
    """Check a body of ``/api/chat`` and build its request; see `serve.http_api.openai_request.read_call`.

    Raises:
        InvalidRequestError: one line; `.field` names a field of the body or a header.
        UnknownModelError: another model is asked for.
    """
    given = body.get("messages")
    if given is None or given == []:
        return _load(parts, "chat", body, headers, arrival_s, tenant)
    chat = _fields(parts, body, stream=True)
    chat["messages"] = messages_of(given)
    for name in ("tools", "logprobs", "top_logprobs"):
        if body.get(name) is not None:
            chat[name] = body[name]
    call = read_chat(parts, chat, NAMES, headers, arrival_s, tenant)
    return OllamaCall(chat=call, names=NAMES, shape="chat", model=_shown(call.model, body))


def read_generate(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None = None
) -> OllamaCall:
    """Check a body of ``/api/generate`` and build its request; raises as `read_chat_call`."""
    for name, neutral in REFUSED.items():
        value = body.get(name)
        if value is not None and not any(value == v and type(value) is type(v) for v in neutral):
            raise InvalidRequestError(name, _REASONS[name])
    prompt, system, suffix = (_text(body, name) for name in ("prompt", "system", "suffix"))
    if not prompt and not suffix:
        return _load(parts, "generate", body, headers, arrival_s, tenant)
    fields = _fields(parts, body, stream=True)
    if suffix or flag(body, "raw") or parts.chat_template is None:
        fields["prompt"] = f"{system}\n\n{prompt}" if system and not flag(body, "raw") and not suffix else prompt
        fields |= {"suffix": suffix} if suffix else {}
        if body.get("logprobs") is not None and flag(body, "logprobs"):
            fields["logprobs"] = body.get("top_logprobs") or 0
        fields.setdefault("max_tokens", _room(parts, fields["prompt"], suffix))
        try:
            call = openai_request.read_call(parts, "completion", fields, headers, arrival_s, tenant)
        except InvalidRequestError as error:
            raise field_renamer(NAMES)(error) from None
    else:
        messages = [{"role": "system", "content": system}] if system else []
        fields["messages"] = [*messages, {"role": "user", "content": prompt}]
        for name in ("logprobs", "top_logprobs"):
            if body.get(name) is not None:
                fields[name] = body[name]
        call = read_chat(parts, fields, {**NAMES, "messages": "prompt"}, headers, arrival_s, tenant)
    return OllamaCall(
        chat=call, names={**NAMES, "messages": "prompt"}, shape="generate", model=_shown(call.model, body)
    )


def read_embed(
    parts: EngineComponents, body: Body, headers: Mapping[str, str], arrival_s: float, tenant: str | None
) -> embeddings.EmbeddingsCall:
    """Check a body of ``/api/embed``, or of the older ``/api/embeddings`` with one `prompt`, and build its requests; raises
    as `read_chat_call`."""
    fields = {name: body[name] for name in (*CARRIED, "dimensions") if name in body}
    name = "prompt" if "prompt" in body and body.get("input") is None else "input"
    texts = body.get(name)
    wrong = next((t for t in (texts if isinstance(texts, list) else [texts]) if not isinstance(t, str)), None)
    if wrong is not None:
        raise InvalidRequestError(name, f"{json_kind(wrong)} is not text")
    if texts == [] or texts is None:
        raise InvalidRequestError(name, "missing; give a text or texts")
    if body.get("truncate") is None or flag(body, "truncate"):
        fields["truncate_prompt_tokens"] = -1
    fields |= {"input": texts, "model": served_name(parts, body)}
    try:
        call = embeddings.read_call(parts, fields, headers, arrival_s, tenant)
    except InvalidRequestError as error:
        raise field_renamer({"input": name})(error) from None
    return dataclasses.replace(call, model=_shown(call.model, body))


def served_name(parts: EngineComponents, body: Body) -> object:
    """The name of the model in a body, without ``:latest`` if no model is served under it with that.

    Raises:
        InvalidRequestError: it is not text.
    """
    name = body.get("model", body.get("name"))
    if name is not None and not isinstance(name, str):
        raise InvalidRequestError("model", f"{json_kind(name)} is not a name")
    known = (*parts.model_names, parts.config.model, *parts.limits.adapters)
    if isinstance(name, str) and name not in known and name.removesuffix(_LATEST) in known:
        return name.removesuffix(_LATEST)
    return name


def messages_of(given: object) -> object:
    """Messages as chat completions have them. Calls without an id get one, which their results get in their order."""
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


def _fields(parts: EngineComponents, body: Body, *, stream: bool) -> Json:
    """The fields of a completion that both kinds of calls have."""
    fields: Json = {name: body[name] for name in CARRIED if name in body}
    fields["model"] = served_name(parts, body)
    fields["stream"] = stream if body.get("stream") is None else flag(body, "stream")
    options = {} if body.get("options") is None else check_mapping("options", body["options"])
    given = {name: value for name, value in options.items() if name in OPTIONS and value is not None}
    fields |= {OPTIONS[name]: value for name, value in {**DEFAULTS, **given}.items()}
    most = options.get("num_predict")
    if most is not None and check_integer("options.num_predict", most, -(2**31), 2**31 - 1) > 0:
        fields["max_tokens"] = most  # else as many as fit
    wanted = body.get("format")
    if wanted is not None and wanted != "":
        if wanted == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(wanted, Mapping):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted}}
        else:
            raise InvalidRequestError("format", f"{quoted(wanted)} must be json or a JSON schema")
    think = body.get("think")
    if isinstance(think, str) and think in EFFORTS:
        set_thinking(fields, True)
        fields["reasoning_effort"] = think
    elif think is not None:
        if not isinstance(think, bool):
            raise InvalidRequestError("think", f"{quoted(think)} must be true, false or one of {', '.join(EFFORTS)}")
        set_thinking(fields, think)
    return fields


def _room(parts: EngineComponents, prompt: str, suffix: str) -> int:
    """An upper bound on what is left for the output of a text, so that it may fill the context."""
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
    body: Body,
    headers: Mapping[str, str],
    arrival_s: float,
    tenant: str | None,
) -> OllamaCall:
    """A call without a prompt, which is answered when the model is there: one token is computed and not shown."""
    fields = _fields(parts, body, stream=False)
    asked = {name: fields[name] for name in (*CARRIED, "model") if name in fields}
    asked |= {"prompt": [0], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    call = openai_request.read_call(parts, "completion", asked, headers, arrival_s, tenant)
    return OllamaCall(chat=call, names=NAMES, shape=shape, model=_shown(call.model, body), loads=True)


def _text(body: Body, name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(name, f"{json_kind(value)} is not text")
    return value or ""


def _shown(name: str, body: Body) -> str:
    given = body.get("model", body.get("name"))
    return given if isinstance(given, str) and given else name

"""Messages to the tokens of a prompt, by the chat template that a model brings.

A template is a Jinja program by whoever published the model. It is rendered in a process of its own (`chat_worker`),
with limits on time, memory and output. The special tokens of the prompt come from the template alone: special-token
text in a message is taken out before rendering, put back afterwards, and encoded as the plain text that it is.

Operators choose the template, requests cannot.
"""

import contextlib
import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from apt_jax.errors import InvalidRequestError, ModelLoadError, one_line
from apt_jax.text.json_values import plain_json
from apt_jax.text.long_texts import LONG_CHARS
from apt_jax.text.template_kwargs import checked_template_kwargs
from apt_jax.text.tokenizer import Tokenizer, special_token, tokenizer_config
from apt_jax.text.tool_messages import tools_as_text
from apt_jax.utils.worker_process import ChildDiedError, ChildProcess, ChildTimeoutError

_logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``; content is a text or a list of ``{"type": "text", "text": ...}``. What a model has
called stands in ``tool_calls``, in OpenAI's form, and the answer of a tool names its ``tool_call_id``."""

Tool = Mapping[str, Any]
"""A function that the model may call, in OpenAI's form: ``{"type": "function", "function": {"name": ..., ...}}``."""

_MAX_TEMPLATE_BYTES = 2**20
MAX_TOOLS = 128
_MAX_TOOLS_CHARS = 2**18
_MAX_OUTPUT = 2**20
MAX_MESSAGES = 8192
_WALL_S = 20.0  # the worker's own limit is CPU time: a busy machine is no reason to fail
MAX_NAME_CHARS = 256
"""Length limit of a message's `name` and `tool_call_id`."""
ROLE_PATTERN = r"[A-Za-z][A-Za-z0-9_-]{0,31}"
_ROLE = re.compile(ROLE_PATTERN)
_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_TOOLS_WORD = re.compile(r"\btools\b")
_NO_WORD = re.compile(r"[^A-Za-z0-9_. -]")
_SLICE_CHARS = 2**16
_PROBE = [{"role": "user", "content": "Hi"}]
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class _TemplateFailed(Exception):
    """The template did not render; the text says why."""


class _Worker:
    """The rendering process of one template; started when it is first needed, and again after it was ended."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None

    def render(self, contexts: Sequence[Mapping[str, Any]], limit: int) -> list[str]:
        with self._lock:
            if self._child is None:
                self._child = ChildProcess(Path(__file__).with_name("chat_worker.py"))
                self._ask({"template": self._template})
            return self._ask({"contexts": contexts, "limit": limit})

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None

    def _ask(self, job: Mapping[str, Any]) -> list[str]:
        assert self._child is not None
        try:
            answer = self._child.ask(job, _WALL_S)
        except ChildTimeoutError:
            self._end()
            raise _TemplateFailed(f"it did not finish within {_WALL_S:g} s") from None
        except ChildDiedError:
            self._end()
            raise _TemplateFailed("it did not finish within 1 s of computing") from None
        except BaseException:
            self._end()
            raise
        if "error" in answer:
            raise _TemplateFailed(str(answer["error"]))
        return answer["texts"]


class ChatTemplate:
    """A chat template, ready to render; may be used from several threads.

    Args:
        source: the Jinja text.
        special_tokens: ``bos_token`` and the like, which templates may use.
        where: what messages call it: a file.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str] | None = None, where: str = "chat template"
    ) -> None:
        self.source = source
        self.where = where
        self.special_tokens = dict(special_tokens or {})
        self._worker, self._long_worker = _Worker(source), _Worker(source)
        """Long conversations have a process of their own, so that short ones never wait for them."""

    def validate(self) -> None:
        """Render a conversation of one message.

        Raises:
            ModelLoadError: the template does not do so within its limits.
        """
        try:
            import jinja2  # noqa: F401
        except ImportError:
            raise ModelLoadError(f"{self.where}: chat templates need the package jinja2 (pip install jinja2)") from None
        try:
            self._render([_PROBE], add_generation_prompt=True)
        except _TemplateFailed as error:
            raise ModelLoadError(
                f"{self.where}: the chat template fails on a plain message: {one_line(str(error))[:300]}; another one can be given, or "
                "none (--chat-template)"
            ) from None

    @property
    def takes_tools(self) -> bool:
        """True if the template renders tools."""
        return _TOOLS_WORD.search(self.source) is not None

    def close(self) -> None:
        """End the rendering processes; they would be started again."""
        self._worker.close()
        self._long_worker.close()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text that transformers' `apply_chat_template(tokenize=False)` makes.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
        """
        try:
            return self._render([_checked(messages)], add_generation_prompt)[0]
        except _TemplateFailed as error:
            raise self._refused(error) from None

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the prompt: those of transformers, where no message holds the text of a special token.

        Args:
            tokenizer: of the model.
            messages: the conversation.
            tools: that the model may call, for templates that take them.
            add_generation_prompt: end the prompt where the model's answer begins.
            continue_final_message: end the prompt where the content of the last message ends, so that the model goes on
                with it.
            template_kwargs: variables of the template (`apt_jax.text.template_kwargs`).

        Raises:
            InvalidRequestError: messages, tools or variables are malformed, the template refuses them, or it would join
                parts of them to special tokens.
        """
        checked, functions = _checked(messages), checked_tools(tools)
        if continue_final_message and checked[-1].get("tool_calls"):  # which stand behind what the model goes on with
            raise InvalidRequestError(
                "messages", "the last message has calls: it cannot be continued; add their results"
            )
        variables = checked_template_kwargs(template_kwargs)
        if not self.takes_tools:  # what it does not render would be lost
            checked, functions = tools_as_text(checked, functions), None
        nonce = "".join(secrets.choice("0123456789") for _ in range(12))
        marks: dict[str, str] = {}  # by the special token's text: few, however often they occur

        def take_out(match: re.Match[str]) -> str:
            return marks.setdefault(match[0], f"\ue000{nonce}.{len(marks)}\ue001")

        pattern = tokenizer.special_pattern
        marked, marked_tools, marked_variables = checked, functions, variables
        if pattern is not None:
            marked = _changed_messages(checked, lambda text: pattern.sub(take_out, text))
            marked_tools = _changed(functions, lambda text: pattern.sub(take_out, text))
            # Of variables the values alone: their names are checked, and the template's.
            changed = _changed(list(variables.values()), lambda text: pattern.sub(take_out, text))
            marked_variables = dict(zip(variables, changed, strict=True))
        # The same conversation with nothing in it shows how many special tokens are the template's own. Names and words
        # of tools stay, since templates look at them, without the characters that special tokens are made of.
        bare_tools = _changed(functions, _words)
        contents = [f"\ue000{nonce}\ue001" if m["content"].strip() else m["content"] for m in checked]
        bare = _changed_messages([{**m, "content": ""} for m in checked], _words)
        for message, content in zip(bare, contents, strict=True):
            message["content"] = content
        bare_variables = {k: _changed(v, _words) for k, v in variables.items()}
        end = f"\ue000{nonce}.end\ue001"
        if continue_final_message:
            marked, bare = _with_end(marked, end), _with_end(bare, end)
        try:
            text, skeleton = self._render(
                [marked, bare], add_generation_prompt, [marked_tools, bare_tools], [marked_variables, bare_variables]
            )
        except _TemplateFailed as error:
            raise self._refused(error) from None
        if continue_final_message:
            text, skeleton = _up_to_end(text, end), _up_to_end(skeleton, end)
        ids = tokenizer.encode_template(text, {mark: token for token, mark in marks.items()})
        special = tokenizer.special_ids
        most = sum(i in special for i in tokenizer.encode_template(skeleton, {}))
        if sum(i in special for i in ids) > most:
            raise InvalidRequestError("messages", "the chat template would join parts of the content to special tokens")
        return ids

    def _refused(self, error: _TemplateFailed) -> InvalidRequestError:
        return InvalidRequestError("messages", f"the chat template refuses them: {one_line(str(error))[:300]}")

    def _render(
        self,
        conversations: Sequence[Sequence[Message]],
        add_generation_prompt: bool,
        tools: Sequence[Sequence[Tool] | None] | None = None,
        variables: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[str]:
        contexts = [
            {
                **their_variables,
                **self.special_tokens,
                "messages": messages,
                "tools": their_tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            for messages, their_tools, their_variables in zip(
                conversations,
                tools or [None] * len(conversations),
                variables or [{}] * len(conversations),
                strict=True,
            )
        ]
        size = sum(len(m["content"]) for messages in conversations for m in messages)
        worker = self._worker if size <= LONG_CHARS else self._long_worker
        return worker.render(contexts, _MAX_OUTPUT + 2 * size)


def _words(text: str) -> str:
    """A text without the characters that special tokens are made of; in slices, as each holds the interpreter's lock."""
    slices = range(0, len(text), _SLICE_CHARS)
    return "".join(_NO_WORD.sub("_", text[start : start + _SLICE_CHARS]) for start in slices)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _changed(item, change) for key, item in value.items()}
    return value


def _with_end(messages: Sequence[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """The messages with a mark after the content of the last one. A space follows it: where the template takes it away,
    it takes what is before the mark as well."""
    *others, last = messages
    return [*others, {**last, "content": f"{last['content']}{mark} "}]


def _up_to_end(text: str, mark: str) -> str:
    """Return the text before the mark, without spaces at its end if the template takes them from contents."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise InvalidRequestError(
            "continue_final_message", "the chat template does not write the content of the last message as it is"
        )
    return before if after.startswith(" ") else before.rstrip()


def _changed_messages(messages: Sequence[dict[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """Messages with every text in them changed but their roles, which are names that were checked."""
    return [{key: value if key == "role" else _changed(value, change) for key, value in m.items()} for m in messages]


def checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Descriptions of functions, None where there are none.

    Raises:
        InvalidRequestError: they are malformed.
    """
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidRequestError("tools", f"{type(tools).__name__} is not a list of tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"{len(tools)} tools; at most {MAX_TOOLS}")
    checked = []
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not named or tool.get("type") != "function":
            raise InvalidRequestError(
                "tools",
                f'[{number}] must be {{"type": "function", "function": {{"name": ..., ...}}}}',
            )
        checked.append(plain_json(f"tools[{number}]", tool))
    if len(json.dumps(checked)) > _MAX_TOOLS_CHARS:
        raise InvalidRequestError("tools", f"more than {_MAX_TOOLS_CHARS >> 10} KiB of JSON")
    return checked or None


def _checked_calls(field: str, calls: Any) -> list[dict[str, Any]]:
    """Calls of tools, their arguments as objects, which is what templates write."""
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidRequestError(field, f"{type(calls).__name__} is not a list of calls")
    checked = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(field, 'a call must be {"function": {"name": ..., "arguments": ...}}')
        plain = plain_json(field, call)
        arguments = plain["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = plain_json(field, json.loads(arguments)) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                if isinstance(error, InvalidRequestError):
                    raise
                raise InvalidRequestError(field, "arguments are not JSON") from None
        if not isinstance(arguments, dict | None):
            raise InvalidRequestError(field, "arguments are not a JSON object")
        plain["function"]["arguments"] = arguments or {}
        checked.append(plain)
    if len(json.dumps(checked)) > _MAX_TOOLS_CHARS:
        raise InvalidRequestError(field, f"more than {_MAX_TOOLS_CHARS >> 10} KiB of JSON")
    return checked


def text_of(messages: Any) -> str:
    """The contents of messages, of which nothing is known yet, one after another; other contents are left out."""
    texts: list[str] = []
    for message in messages if isinstance(messages, Sequence) and not isinstance(messages, str) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else [{"text": content}]
        given = (part.get("text") for part in parts if isinstance(part, Mapping))
        texts += [text for text in given if isinstance(text, str)]
    return "".join(texts)


def _checked(messages: Any) -> list[dict[str, Any]]:
    """Plain messages of role, text and tool calls, nothing else that a template could take for its own."""

    def refuse(problem: str) -> InvalidRequestError:
        return InvalidRequestError("messages", problem)

    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise refuse("must be a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise refuse(f"{len(messages)} messages; at most {MAX_MESSAGES}")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise refuse(f"[{number}] must have role and content")
        # Clients send back what they were given, with everything in it that was absent.
        given = {key: value for key, value in message.items() if value is not None}
        calls = given.get("tool_calls")
        if calls is not None:
            calls = _checked_calls("messages", calls)
        if not {"role", "content"} <= given.keys() | ({"content"} if calls else set()):
            raise refuse(f"[{number}] must have role and content")
        surplus = sorted(str(key) for key in given.keys() - set(_MESSAGE_FIELDS))
        if surplus:
            raise refuse(f"[{number}] has {surplus[0]!r:.40}; only {', '.join(_MESSAGE_FIELDS)} are supported")
        role, content = given["role"], given.get("content", "")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise refuse(f"[{number}] has the role {role!r:.40}, which is not a name")
        if isinstance(content, Sequence) and not isinstance(content, str | bytes):
            texts = [p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else None for p in content]
            for part, text in zip(content, texts, strict=True):
                if not isinstance(text, str):
                    kind = part.get("type") if isinstance(part, Mapping) else None
                    what = f" of type {kind!r:.40}" if isinstance(kind, str) and kind != "text" else ""
                    raise refuse(f"[{number}] has content{what} that is not text")
            content = "".join(text for text in texts if text is not None)
        if not isinstance(content, str):
            raise refuse(f"[{number}] has content that is not text")
        try:
            content.encode("utf-8")
        except UnicodeEncodeError:
            raise refuse(f"[{number}] has content that is not Unicode text") from None
        made: dict[str, Any] = {"role": role, "content": content}
        for name in ("name", "tool_call_id"):
            if name in given:
                if not isinstance(given[name], str) or len(given[name]) > MAX_NAME_CHARS:
                    raise refuse(f"[{number}] has a {name} that is no short text")
                made[name] = plain_json("messages", given[name])
        if "reasoning_content" in given:
            if not isinstance(given["reasoning_content"], str):
                raise refuse(f"[{number}] has a reasoning_content that is not text")
            made["reasoning_content"] = plain_json("messages", given["reasoning_content"])
        if calls:
            made["tool_calls"] = calls
        checked.append(made)
    return checked


# --- finding templates ---------------------------------------------------------------------------------------------


def load_chat_template(path: Path | str, override: str | None = None) -> ChatTemplate | None:
    """The chat template of a model, not yet validated.

    Args:
        path: a directory with chat_template.jinja or a template in tokenizer_config.json, or a ``.gguf`` file.
        override: a file to use instead, or ``none``.

    Returns:
        None: the model has no template.

    Raises:
        ModelLoadError: a file is damaged or too large.
    """
    source = Path(path)
    if override == "none":
        return None
    from_gguf = source.suffix.lower() == ".gguf" and not source.is_dir()
    text, tokens = _from_gguf(source) if from_gguf else _from_directory(source)
    where = str(source)
    if override is not None:
        text, where = _read(Path(override)), override
    if text is None:
        return None
    if len(text.encode("utf-8", "surrogatepass")) > _MAX_TEMPLATE_BYTES:
        raise ModelLoadError(f"{where}: the chat template is larger than {_MAX_TEMPLATE_BYTES >> 20} MiB")
    return ChatTemplate(text, special_tokens=tokens, where=where)


def _from_gguf(path: Path) -> tuple[str | None, dict[str, str]]:
    from apt_jax.models.loading.gguf.file import GgufFile
    from apt_jax.models.loading.gguf.tokenizer import gguf_chat_template, gguf_special_tokens

    with contextlib.closing(GgufFile(path)) as file:
        text = gguf_chat_template(file)
        return text, {} if text is None else gguf_special_tokens(file)


def _from_directory(directory: Path) -> tuple[str | None, dict[str, str]]:
    config = tokenizer_config(directory)
    tokens = {name: special_token(config, name) for name in _TOKEN_NAMES}
    found = {name: token for name, token in tokens.items() if token is not None}
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _read(file), found
    value, where = config.get("chat_template"), directory / "tokenizer_config.json"
    if isinstance(value, list):
        if not all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in value):
            raise ModelLoadError(f"{where}: chat_template must be a text or a list of named texts")
        named = {entry["name"]: entry.get("template") for entry in value}
        if named and "default" not in named:
            _logger.warning("%s: none of the chat templates is the default; none is used", where)
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelLoadError(f"{where}: chat_template must be a text or a list of named texts")
    return value, found


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_TEMPLATE_BYTES + 1)
        return text.decode("utf-8")
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror}) (--chat-template)") from None
    except UnicodeDecodeError:
        raise ModelLoadError(f"{path}: damaged, not UTF-8") from None


__all__ = ["ChatTemplate", "Message", "Tool", "load_chat_template", "text_of"]

"""Encodes messages as prompt tokens with the chat template of a model.

A template is a Jinja program from the publisher of the model. It is rendered in a separate process (`chat_worker`),
with limits on time, memory and output. The special tokens of the prompt come only from the template: the process
reports which parts of the text the template wrote. In all other parts, the text of a special token is encoded as plain
text.

Operators choose the template; requests cannot.
"""

import contextlib
import functools
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apt_jax.errors import InvalidRequestError, ModelLoadError, json_kind, one_line
from apt_jax.text.chat_messages import (
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_TOOLS_CHARS,
    ROLE_PATTERN,
    checked_messages,
    text_of,
    with_system_role,
)
from apt_jax.text.json_values import plain_json
from apt_jax.text.long_texts import LONG_CHARS
from apt_jax.text.template_forms import TemplateForms, find_forms, joined
from apt_jax.text.template_kwargs import checked_template_kwargs
from apt_jax.text.tokenizer import Tokenizer, special_token, tokenizer_config
from apt_jax.text.tool_messages import tools_as_text
from apt_jax.utils.worker_process import ChildDiedError, ChildProcess, ChildTimeoutError

_logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``; content is a string or a list of ``{"type": "text", "text": ...}``. The model's
tool calls are in ``tool_calls``, in OpenAI's format, and the result of a tool names its ``tool_call_id``."""

Tool = Mapping[str, Any]
"""A function that the model may call, in OpenAI's format: ``{"type": "function", "function": {"name": ..., ...}}``."""

_MAX_TEMPLATE_BYTES = 2**20
MAX_TOOLS = 128
_MAX_OUTPUT = 2**20
_WALL_S = 20.0  # for busy machines; the worker itself limits its CPU time
_TOOLS_WORD = re.compile(r"\btools\b")
_PROBE = [{"role": "user", "content": "Hi"}]
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "description": "A number."} for name in "ab"},
            "required": ["a", "b"],
        },
    },
}
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
TOOL_USE = "tool_use"
"""Name of the template for conversations with tools, if a model has several templates."""

Runs = Sequence[Sequence[int]]
"""Half-open ranges of characters that a template wrote."""


class _TemplateFailed(Exception):
    """The template could not be rendered; the message gives the reason."""


class _Worker:
    """The rendering process of one template. It is started at the first use, and again after it has exited."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None

    def render(self, job: Mapping[str, Any]) -> tuple[str, Runs]:
        """Return the text and the ranges that the template wrote; see `chat_worker`."""
        with self._lock:
            if self._child is None:
                self._child = ChildProcess(Path(__file__).with_name("chat_worker.py"))
                self._ask({"template": self._template})
            answer = self._ask(job)
            return answer["text"], answer["runs"]

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None

    def _ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
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
        return answer


class _Program:
    """One Jinja template, ready to render. Thread-safe."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], probe_tools: Sequence[Tool] | None = None
    ) -> None:
        self.source, self._special_tokens = source, special_tokens
        self._probe_tools = probe_tools
        """Tools passed to the template when it is tested."""
        self.takes_tools = _TOOLS_WORD.search(source) is not None
        self._worker, self._long_worker = _Worker(source), _Worker(source)
        """Long conversations have a separate process, so that short conversations never wait for them."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, Runs]:
        context = {
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        size = len(text_of(messages))
        worker = self._worker if size <= LONG_CHARS else self._long_worker
        return worker.render({"context": context, "written": self._special_tokens, "limit": _MAX_OUTPUT + 2 * size})

    @functools.cached_property
    def forms(self) -> TemplateForms:
        def render(messages: Sequence[Message]) -> str | None:
            try:
                return self.render(messages, tools=self._probe_tools)[0]
            except _TemplateFailed:
                return None

        return find_forms(self.source, render)

    def validate(self) -> None:
        """Render a conversation of one message; may raise _TemplateFailed."""
        messages, _ = self.prepared(_PROBE, None)
        self.render(messages, tools=self._probe_tools)

    def prepared(
        self, messages: Sequence[dict[str, Any]], functions: Sequence[dict[str, Any]] | None
    ) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]] | None]:
        """Return checked messages and tools in the formats that the template accepts."""
        if "developer" not in self.source:
            messages = with_system_role(messages)
        if not self.takes_tools and (functions or any(m["role"] == "tool" or "tool_calls" in m for m in messages)):
            plain = [{**message, "content": joined(message["content"])} for message in messages]
            messages, functions = tools_as_text(plain, functions), None  # the template would omit the tools
        made = [{**message, "content": self.forms.content(message["role"], message["content"])} for message in messages]
        if self.forms.arguments_as_text:
            for message in made:
                if "tool_calls" in message:
                    message["tool_calls"] = list(map(_with_text_arguments, message["tool_calls"]))
        return made, functions

    def close(self) -> None:
        self._worker.close()
        self._long_worker.close()


class ChatTemplate:
    """A chat template, ready to render. Thread-safe.

    Args:
        source: the Jinja source.
        special_tokens: ``bos_token`` and the like, which templates may use.
        where: name of the template in error messages, for example its file.
        tool_source: Jinja source for conversations with tools; None: `source`.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        where: str = "chat template",
        tool_source: str | None = None,
    ) -> None:
        self.source = source
        self.where = where
        self.special_tokens = dict(special_tokens or {})
        self._program = _Program(source, self.special_tokens)
        self._tool_program = self._program
        if tool_source is not None:
            self._tool_program = _Program(tool_source, self.special_tokens, [_PROBE_TOOL])

    def validate(self) -> None:
        """Render a conversation of one message. If only the separate template for tools fails, this is logged.

        Raises:
            ModelLoadError: the template fails, or exceeds its limits.
        """
        try:
            import jinja2  # noqa: F401
        except ImportError:
            raise ModelLoadError(f"{self.where}: chat templates need the package jinja2 (pip install jinja2)") from None
        try:
            self._program.validate()
        except _TemplateFailed as error:
            raise ModelLoadError(
                f"{self.where}: the chat template fails on a plain message: {one_line(str(error))[:300]}; choose another template, or "
                "none (--chat-template)"
            ) from None
        try:
            self._tool_program.validate()
        except _TemplateFailed as error:
            reason = one_line(str(error))[:300]
            _logger.warning("%s: the chat template %s fails on a plain message: %s", self.where, TOOL_USE, reason)

    @property
    def stored(self) -> str | list[dict[str, str]]:
        """Return the template in the format of tokenizer_config.json."""
        if self._tool_program is self._program:
            return self.source
        named = {"default": self.source, TOOL_USE: self._tool_program.source}
        return [{"name": name, "template": source} for name, source in named.items()]

    def source_for(self, has_tools: bool) -> str:
        """Return the Jinja source for conversations with or without tools."""
        return self._program_for(has_tools).source

    def _program_for(self, has_tools: bool) -> _Program:
        return self._tool_program if has_tools else self._program

    def close(self) -> None:
        """Stop the rendering processes. The next call starts them again."""
        self._program.close()
        self._tool_program.close()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the text that transformers' `apply_chat_template(tokenize=False)` returns.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
        """
        prepared, _ = self._program.prepared(checked_messages(messages, self.source), None)
        try:
            return self._program.render(prepared, add_generation_prompt=add_generation_prompt)[0]
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
        """Return the token ids of the prompt.

        They are equal to the ids from transformers unless a message contains the text of a special token.

        Args:
            tokenizer: tokenizer of the model.
            messages: the conversation.
            tools: functions that the model may call. Templates without support for tools get them as text.
            add_generation_prompt: end the prompt where the model's answer begins.
            continue_final_message: end the prompt where the content of the last message ends, so that the model
                continues it.
            template_kwargs: variables of the template (`apt_jax.text.template_kwargs`).

        Raises:
            InvalidRequestError: messages, tools or variables are malformed, or the template refuses them.
        """
        functions = checked_tools(tools)
        program = self._program_for(functions is not None)
        checked = checked_messages(messages, program.source)
        if continue_final_message and checked[-1].get("tool_calls"):  # calls follow the content
            raise InvalidRequestError(
                "messages", "the last message has tool calls, so it cannot be continued; add their results"
            )
        variables = checked_template_kwargs(template_kwargs)
        end = f"\ue000{secrets.token_hex(8)}\ue001"
        if continue_final_message:
            checked = _with_end(checked, end)
        prepared, functions = program.prepared(checked, functions)
        try:
            text, runs = program.render(
                prepared, add_generation_prompt=add_generation_prompt, tools=functions, variables=variables
            )
        except _TemplateFailed as error:
            raise self._refused(error) from None
        if continue_final_message:
            text = _up_to_end(text, end)
            runs = [(start, min(stop, len(text))) for start, stop in runs if start < len(text)]
        return tokenizer.encode_template(text, runs)

    def _refused(self, error: _TemplateFailed) -> InvalidRequestError:
        return InvalidRequestError("messages", f"the chat template refuses them: {one_line(str(error))[:300]}")


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _with_end(messages: Sequence[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Return the messages with a mark after the content of the last message. A space follows the mark: if the template
    strips this space, it would also have stripped spaces at the end of the content."""
    *others, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*others, {**last, "content": f"{content}{mark} "}]
    *before, part = content or [{"type": "text", "text": ""}]
    return [*others, {**last, "content": [*before, {**part, "text": f"{part['text']}{mark} "}]}]


def _up_to_end(text: str, mark: str) -> str:
    """Return the text before the mark, without trailing spaces if the template strips trailing spaces from content."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise InvalidRequestError(
            "continue_final_message", "the chat template does not write the content of the last message unchanged"
        )
    return before if after.startswith(" ") else before.rstrip()


def checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Check a request's tools and return them as plain JSON values; None: no tools.

    Raises:
        InvalidRequestError: the tools are malformed, too many or too large.
    """
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidRequestError("tools", f"{json_kind(tools)} is not a list of tools")
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
    if len(json.dumps(checked)) > MAX_TOOLS_CHARS:
        raise InvalidRequestError("tools", f"more than {MAX_TOOLS_CHARS >> 10} KiB of JSON")
    return checked or None


# --- finding templates ---------------------------------------------------------------------------------------------


def load_chat_template(path: Path | str, override: str | None = None) -> ChatTemplate | None:
    """Load the chat template of a model, without validating it.

    If a model has several named templates, `tool_use` is for conversations with tools and `default` for all others, as
    in transformers.

    Args:
        path: a directory with chat_template.jinja (and others in additional_chat_templates) or a template in
            tokenizer_config.json, or a ``.gguf`` file.
        override: a file to use instead, the name of one of the model's templates, or ``none``.

    Returns:
        The template. None if the model has no template, or only named templates but no `default`, or `override` is
        "none".

    Raises:
        ModelLoadError: a file cannot be read, is damaged or is too large.
    """
    source = Path(path)
    if override == "none":
        return None
    from_gguf = source.suffix.lower() == ".gguf" and not os.path.isdir(source)
    named, tokens = _from_gguf(source) if from_gguf else _from_directory(source)
    where = str(source)
    if override is not None:
        if override in named and not os.path.exists(override):
            named = {"default": named[override]}
        else:
            named, where = {"default": _read(Path(override))}, override
    elif named and "default" not in named:
        _logger.warning("%s: no chat template is named default, so none is used", where)
    if "default" not in named:
        return None
    for text in named.values():
        if len(text.encode("utf-8", "surrogatepass")) > _MAX_TEMPLATE_BYTES:
            raise ModelLoadError(f"{where}: the chat template is larger than {_MAX_TEMPLATE_BYTES >> 20} MiB")
    return ChatTemplate(named["default"], special_tokens=tokens, where=where, tool_source=named.get(TOOL_USE))


def _from_gguf(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    from apt_jax.models.loading.gguf.file import GgufFile
    from apt_jax.models.loading.gguf.tokenizer import gguf_chat_templates, gguf_special_tokens

    with contextlib.closing(GgufFile(path)) as file:
        named = gguf_chat_templates(file)
        return named, gguf_special_tokens(file) if named else {}


def _from_directory(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the templates by name, and the special tokens that they may use."""
    config = tokenizer_config(directory)
    tokens = {name: special_token(config, name) for name in _TOKEN_NAMES}
    found = {name: token for name, token in tokens.items() if token is not None}
    file = directory / "chat_template.jinja"
    more = sorted(directory.glob("additional_chat_templates/*.jinja"))
    if file.is_file() or more:
        named = {path.stem: _read(path) for path in more}
        return named | ({"default": _read(file)} if file.is_file() else {}), found
    value, where = config.get("chat_template"), directory / "tokenizer_config.json"
    if isinstance(value, str):
        return {"default": value}, found
    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        for entry in entries
    ):
        raise ModelLoadError(f"{where}: chat_template must be a text or a list of named texts")
    return {entry["name"]: entry["template"] for entry in entries}, found


def _read(path: Path) -> str:
    if "{{" in str(path) or "{%" in str(path):
        raise ModelLoadError("the chat template must be a file, not the template itself (--chat-template)")
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_TEMPLATE_BYTES + 1)
        return text.decode("utf-8")
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror}) (--chat-template)") from None
    except UnicodeDecodeError:
        raise ModelLoadError(f"{path}: damaged, not UTF-8") from None


__all__ = [
    "MAX_MESSAGES",
    "MAX_NAME_CHARS",
    "MAX_TOOLS",
    "ROLE_PATTERN",
    "ChatTemplate",
    "Message",
    "Tool",
    "checked_tools",
    "load_chat_template",
    "text_of",
]

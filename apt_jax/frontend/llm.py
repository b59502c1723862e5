"""The offline interface `LLM`: an engine in this process, driven by the caller's thread."""

import collections
import contextlib
import dataclasses
import inspect
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from apt_jax.config import SLO, CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from apt_jax.engine import Engine
from apt_jax.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
    counted,
    explained,
    json_kind,
    nearest,
)
from apt_jax.frontend.builder import build_engine
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.embedding import check_dimensions, embedding
from apt_jax.frontend.other_servers import SIMILAR, option_advice
from apt_jax.frontend.outputs import RequestState
from apt_jax.frontend.progress import ProgressBars
from apt_jax.options import check_option, check_type, option_type, options_of
from apt_jax.request import WAYS_OUT, EngineRequest, RequestOutput, SamplingParams
from apt_jax.text.chat import Message, Tool
from apt_jax.text.tokenizer import Tokenizer
from apt_jax.validation.values import shown

if TYPE_CHECKING:
    from apt_jax.models import ModelParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with one of ``"prompt"`` and ``"prompt_token_ids"``, and optionally ``"cache_salt"``, ``"session_id"`` and ``"retain_s"``."""
Adapter = str | Any | None
"""Name of a LoRA adapter, an object with the attribute `lora_name`, or None."""

_SECTIONS = {"cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}
"""Fields of `EngineConfig` that are configuration sections, with their types."""


def _find_options() -> dict[str, tuple[str | None, dataclasses.Field[Any]]]:
    """Map each option of `LLM` to its section, None for `EngineConfig` itself, and its field."""
    options: dict[str, tuple[str | None, dataclasses.Field[Any]]] = {}
    for section, of_type in {None: EngineConfig, **_SECTIONS}.items():
        declared = options_of(of_type)
        for field in dataclasses.fields(of_type):
            if of_type is not EngineConfig or field.name not in ("model", *_SECTIONS):
                name = declared[field.name][1].keyword if field.name in declared else field.name
                options[name] = (section, field)
    return options


_OPTIONS = _find_options()


def _find_flags() -> dict[str, str]:
    """Map the flags of the options of `LLM` to the keyword arguments that replace them."""
    found = {}
    for keyword, (section, field) in _OPTIONS.items():
        cls = EngineConfig if section is None else _SECTIONS[section]
        flags: tuple[str, ...] = (f"--{field.name.replace('_', '-')}",)
        if field.name in options_of(cls):
            made = options_of(cls)[field.name][1]
            flags = (*made.flags, made.given_by)
        kind = option_type(cls, field.name)
        for flag in flags:
            found[flag] = keyword
            if kind is bool:
                found[flag.replace("--", "--no-", 1)] = f"{keyword}=False"
            if typing.get_origin(kind) is Literal:
                found |= {f"{flag} {choice}": f"{keyword}={choice!r}" for choice in typing.get_args(kind)}
    return found


_FLAGS = _find_flags()
_FLAG = re.compile(rf"(?<![\w/'\"-])(?:{'|'.join(sorted(map(re.escape, _FLAGS), reverse=True))})(?![\w-])")


@contextlib.contextmanager
def _naming_keywords() -> Iterator[None]:
    """Write the flags in error messages as keyword arguments of `LLM`: ``--load-format dummy`` becomes
    ``load_format='dummy'``."""
    try:
        yield
    except (ConfigError, ModelLoadError, InvalidRequestError) as error:
        message = _FLAG.sub(lambda flag: _FLAGS[flag[0]], str(error))
        subject = message.partition("=")[0]
        error.args = (message.removesuffix(f" ({subject})"),)
        raise


def configure(model: str, config: EngineConfig | None, overrides: Mapping[str, Any]) -> EngineConfig:
    """Return a configuration in which the model and individual options are replaced.

    Args:
        model: see `EngineConfig`.
        config: configuration to start from; None: the defaults.
        overrides: values keyed by option; None leaves an option unchanged unless None is one of its valid values.
            `max_num_batched_tokens` is raised to `max_num_seqs` unless it is given.

    Raises:
        TypeError: an option is unknown.
        ConfigError: a value has the wrong type or is not allowed.
    """
    if config is not None:
        check_type("config", config, EngineConfig)
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    config = EngineConfig(model=model) if config is None else dataclasses.replace(config, model=model)
    changes: dict[str | None, dict[str, Any]] = {None: {}, **{section: {} for section in _SECTIONS}}
    for name, value in overrides.items():
        if name not in _OPTIONS:
            keywords = {field.name: keyword for keyword, (_, field) in _OPTIONS.items()}
            hint = option_advice(name, _OPTIONS) or nearest(keywords.get(name, name), _OPTIONS, cutoff=SIMILAR)
            if name in ("default_slo_ttft_ms", "default_slo_tbt_ms", "default_slo_e2e_ms"):
                hint = (
                    f"; use default_slo=SLO({name.removeprefix('default_slo_').removesuffix('_ms')}_s=...), in seconds"
                )
            raise TypeError(f"LLM has no option {name!r:.80}{hint}")
        section, field = _OPTIONS[name]
        if value is not None or field.default is None:
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            check_option(EngineConfig if section is None else _SECTIONS[section], field.name, value)
            changes[section][field.name] = value
    scheduler = changes["scheduler"]
    least = scheduler.get("max_num_seqs", config.scheduler.max_num_seqs)
    scheduler.setdefault("max_num_batched_tokens", max(config.scheduler.max_num_batched_tokens, least))
    sections = {name: dataclasses.replace(getattr(config, name), **changes[name]) for name in _SECTIONS}
    return dataclasses.replace(config, **changes[None], **sections)


_OF_CALLS = {
    "prompt_token_ids": "give token ids as the first argument: [1, 2, 3] or {'prompt_token_ids': [1, 2, 3]}",
    "guided_options_request": WAYS_OUT["guided_decoding"],
    "priority": "use slo_class",
    **dict.fromkeys(
        ("cache_salt", "session_id", "retain_s"), "give it with the prompt, as in {'prompt': ..., 'session_id': ...}"
    ),
    **dict.fromkeys(
        ("slo_ttft_ms", "slo_tbt_ms", "slo_e2e_ms", "ttft_s", "tbt_s", "e2e_s"),
        "use slo=SLO(ttft_s=..., tbt_s=...), in seconds",
    ),
    **dict.fromkeys(SamplingParams.__annotations__, "use sampling_params=SamplingParams(...)"),
    "chat_template": "give a file to LLM(chat_template=FILE)",
    "pooling_params": "use pooling, normalize and dimensions",
}
"""Replacements for arguments of vLLM's `generate`, `chat` and `embed`, and of misplaced ones."""


class LLM:
    """A model and its engine in this process.

    Args:
        model: a bundled name (``tiny-opt``), a directory in Hugging Face or Orbax format, a ``.gguf`` file, a hub id
            (``owner/model``), or with ``load_format="dummy"`` any known size (``opt-125m``).
        config: configuration of the engine; `model` replaces its model. None: the defaults.
        params: weights that replace the weights in the model's files, as returned by `apt_jax.models.load_model` and
            `apt_jax.lab.training.from_nnx`; configuration and tokenizer still come from `model`. They are cast to
            ``dtype``; arrays of that dtype are shared, and must not be donated while the engine lives.
        warm_up: compile all programs now rather than when they are first needed.
        calibrate: measure step costs if none are stored for this machine; stored costs are always used.
        use_tqdm: show progress while preparing programs and calibrating.
        **options: individual values that replace those of `config`, named like the fields of `EngineConfig`,
            `CacheConfig`, `SchedulerConfig` and `ParallelConfig`, for example ``dtype="bfloat16", max_num_seqs=128``.
            Exceptions: ``cache`` sets `CacheConfig.mode`, ``scheduling_policy`` sets `SchedulerConfig.policy`.
            ``help(LLM)`` lists them.

    Raises:
        TypeError: unknown option.
        ModelLoadError, ConfigError: see `build_engine`.
    """

    def __init__(
        self,
        model: str,
        *,
        config: EngineConfig | None = None,
        params: "ModelParams | None" = None,
        warm_up: bool = True,
        calibrate: bool = False,
        use_tqdm: bool = True,
        **options: Any,
    ) -> None:
        for name, value in (("warm_up", warm_up), ("calibrate", calibrate), ("use_tqdm", use_tqdm)):
            check_type(name, value, bool)
        with _naming_keywords():
            config = configure(model, config, options)
            with contextlib.closing(ProgressBars(disable=None if use_tqdm else True)) as bars:
                self.parts = build_engine(config, params=params, warm_up=warm_up, calibrate=calibrate, progress=bars)

    @classmethod
    def from_parts(cls, parts: EngineComponents) -> "LLM":
        """Make an `LLM` over an existing engine."""
        llm = cls.__new__(cls)
        llm.parts = parts
        return llm

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.parts.tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        """Return `tokenizer`, as in vLLM."""
        return self.parts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters of calls, as in vLLM."""
        return SamplingParams()

    @property
    def engine(self) -> Engine:
        return self.parts.engine

    @explained(_OF_CALLS)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams
        | Mapping[str, object]
        | Sequence[SamplingParams | Mapping[str, object]]
        | None = None,
        *,
        slo: SLO | Sequence[SLO | None] | None = None,
        slo_class: str | Sequence[str | None] | None = None,
        lora_request: Adapter | Sequence[Adapter] = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts as one batch; the outputs are in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, vLLM's ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``, each
                optionally with ``"cache_salt"``, ``"session_id"`` and ``"retain_s"``, or a list of them. `retain_s`
                asks `retention` to keep the session's cache for so many seconds after the answer, at most an hour.
            sampling_params: for all prompts, or one entry per prompt; None: the defaults (16 tokens at temperature 1).
            slo: latency objectives, for all prompts or one entry per prompt; None: `default_slo`.
            slo_class: "rt" (real time) or "be" (best effort), for all prompts or one entry per prompt; None:
                `default_slo_class`.
            lora_request: LoRA adapter from `lora_modules`, for all prompts or one entry per prompt: its name, or an
                object with the attribute `lora_name`, such as vLLM's `LoRARequest`; None: no adapter.
            use_tqdm: show progress.

        Returns:
            One result per prompt, with `n` outputs and the metrics of the first: times, attainment, and the number of
            prompt tokens that were found cached (`metrics.num_cached_tokens`). A request that failed because of its
            own content has `finish_reason == "error"` and a message in `error`; other requests are not affected.

        Raises:
            InvalidRequestError: a prompt or parameter is invalid; then no request has run.
            EngineDeadError: the engine has stopped.
        """
        with _naming_keywords():
            of_prompts = self._requests(prompts, sampling_params, slo, slo_class, lora_request)
        requests = [request for group in of_prompts for request in group]
        states = {request: RequestState(request, self.parts.tokenizer) for request in requests}
        waiting = collections.deque(requests)
        engine, assembler = self.parts.engine, self.parts.assembler
        num_open = len(requests)
        scheduler = self.parts.config.scheduler
        most_live = scheduler.max_num_queued_reqs + scheduler.max_num_seqs
        try:
            # disable=None: show the bar only if stderr is a terminal.
            with tqdm(total=num_open, unit="output", disable=None if use_tqdm else True) as bar:
                while num_open:
                    while waiting and engine.num_live < most_live:
                        try:
                            engine.add_request(waiting[0])
                        except QueueFullError:
                            break  # requests leave the queue as they are scheduled
                        waiting.popleft()
                    for output in engine.step():
                        delta = assembler.delta(output)
                        state = states.get(output.request)
                        if state is None:
                            continue  # output of an earlier call that was interrupted
                        state.add(delta)
                        if delta.finished:
                            num_open -= 1
                            bar.update()
                    if engine.dead_reason is not None:
                        raise EngineDeadError(f"the engine has ended: {engine.dead_reason}")
        finally:
            if num_open and engine.dead_reason is None:
                self._abort_unfinished(requests)
        return [_joined([states[request].output() for request in group]) for group in of_prompts]

    @explained(_OF_CALLS)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams
        | Mapping[str, object]
        | Sequence[SamplingParams | Mapping[str, object]]
        | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        session_id: str | Sequence[str | None] | None = None,
        retain_s: float | Sequence[float | None] | None = None,
        slo: SLO | Sequence[SLO | None] | None = None,
        slo_class: str | Sequence[str | None] | None = None,
        lora_request: Adapter | Sequence[Adapter] = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete conversations, formatted with the model's chat template.

        Args:
            messages: a conversation, or a list of them: messages of ``{"role": ..., "content": ...}``. Text that looks
                like a special token is encoded as plain text.
            tools: functions that the model may call, for chat templates that support them; calls are returned as text.
            add_generation_prompt: end the prompt with the start of the model's turn.
            session_id, retain_s: as in the prompts of `generate`, for all conversations or one entry per conversation;
                None: not given.
            sampling_params, slo, slo_class, lora_request, use_tqdm: see `generate`.

        Returns:
            One output per conversation.

        Raises:
            InvalidRequestError: messages are malformed or the model has no chat template; also see `generate`.
            EngineDeadError: the engine has stopped.
        """
        conversations: Sequence[Any] = messages
        if len(messages) and isinstance(messages[0], Mapping):
            conversations = [messages]
        with _naming_keywords():
            sessions = _one_each("session_id", session_id, len(conversations))
            times = _one_each("retain_s", retain_s, len(conversations))
            prompts = [
                {
                    "prompt_token_ids": self.parts.chat_prompt(
                        one, tools=tools, add_generation_prompt=add_generation_prompt
                    ),
                    "session_id": session,
                    "retain_s": time_s,
                }
                for one, session, time_s in zip(conversations, sessions, times, strict=True)
            ]
        return self.generate(
            prompts, sampling_params, slo=slo, slo_class=slo_class, lora_request=lora_request, use_tqdm=use_tqdm
        )

    @explained(_OF_CALLS)
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Literal["mean", "last"] = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        slo_class: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[NDArray[np.float32]]:
        """Embed prompts: return their pooled hidden states after the model's final norm.

        Args:
            prompts: see `generate`; each must be at least one token shorter than the maximum length.
            pooling: the mean over all tokens, or the last token's states.
            normalize: scale each embedding to length 1.
            dimensions: number of leading dimensions to keep, before scaling; None: all.
            slo_class: see `generate`.
            use_tqdm: show progress.

        Returns:
            One (D,) float32 array per prompt.

        Raises:
            InvalidRequestError: a prompt or parameter is invalid; then no request has run.
            RuntimeError: the model's output for a prompt is not finite.
            EngineDeadError: the engine has stopped.
        """
        config = self.parts.model_config
        if config is not None:
            check_dimensions(dimensions, config.embedding_size or config.hidden_size)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, pooling=pooling)
        found = []
        for number, output in enumerate(self.generate(prompts, params, slo_class=slo_class, use_tqdm=use_tqdm)):
            if output.pooled is None:
                raise RuntimeError(f"prompts[{number}] has no embedding: {output.error}")
            found.append(embedding(output.pooled, dimensions=dimensions, normalize=normalize))
        return found

    def shutdown(self) -> None:
        """Write all cached prefixes to `prefix_cache_dir`, if it is set, so that the next engine finds them. The object
        must not be used afterwards."""
        self.engine.close()

    def _abort_unfinished(self, requests: Sequence[EngineRequest]) -> None:
        """Abort the unfinished requests of an interrupted call, so that the next call starts with an empty engine."""
        for request in requests:
            self.engine.abort(request.request_id)
        while self.engine.has_work and self.engine.dead_reason is None:
            for output in self.engine.step():
                self.parts.assembler.delta(output)

    def _requests(
        self, prompts: Any, sampling_params: Any, slo: Any, slo_class: Any, lora_request: Any
    ) -> list[list[EngineRequest]]:
        """Build all requests of each prompt, so that invalid input is rejected before anything runs."""
        single = isinstance(prompts, str | Mapping) or (
            isinstance(prompts, Sequence | np.ndarray)
            and not isinstance(prompts, bytes | bytearray)
            and len(prompts) > 0
            and isinstance(prompts[0], int | np.integer)
            and not isinstance(prompts[0], bool)
        )
        items = [prompts] if single else prompts
        if not isinstance(items, Sequence | np.ndarray) or isinstance(items, bytes | bytearray):
            raise InvalidRequestError("prompts", f"{json_kind(items)} is not a string, a list of strings, or token ids")
        if len(items) == 0:
            return []
        all_params = _one_each("sampling_params", sampling_params, len(items))
        all_slos = _one_each("slo", slo, len(items))
        classes = _one_each("slo_class", slo_class, len(items))
        adapters = [getattr(a, "lora_name", a) for a in _one_each("lora_request", lora_request, len(items))]
        arrival_s = self.parts.clock.now_s()
        requests = []
        of_each = zip(items, all_params, all_slos, classes, adapters, strict=True)
        for number, (prompt, params, objectives, name_of_class, adapter) in enumerate(of_each):
            try:
                built = self.parts.build_requests(
                    **_prompt_fields(prompt),
                    params=params,
                    slo=objectives,
                    slo_class=name_of_class,
                    arrival_s=arrival_s,
                    adapter=adapter,
                )
            except InvalidRequestError as error:
                if len(items) == 1:
                    raise
                message = str(error).removeprefix(f"{error.field}: ")
                raise InvalidRequestError(error.field, f"{message} (prompts[{number}])") from None
            requests.append(built)
        return requests


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "session_id", "retain_s")


def _prompt_fields(prompt: Any) -> dict[str, Any]:
    """Return the arguments of `build_request` for one prompt."""
    if not isinstance(prompt, Mapping):
        return {"prompt" if isinstance(prompt, str) or prompt is None else "prompt_token_ids": prompt}
    fields = {key: value for key, value in prompt.items() if value is not None}
    unknown = next((key for key in fields if key not in _PROMPT_KEYS), None)
    if unknown is not None:
        raise InvalidRequestError("prompt", f"{shown(unknown)} is not one of {', '.join(_PROMPT_KEYS)}; leave it out")
    return fields


def _joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Return the outputs of one prompt's requests as one."""
    return dataclasses.replace(
        outputs[0],
        outputs=[dataclasses.replace(one.outputs[0], index=index) for index, one in enumerate(outputs)],
        finished=all(one.finished for one in outputs),
        error=next((one.error for one in outputs if one.error is not None), None),
    )


def _one_each(name: str, value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(name, f"{counted(len(value), 'entry', 'entries')} for {counted(count, 'prompt')}")
    return value


def _signature() -> inspect.Signature:
    """Return the constructor's signature with every option listed, for `help` and editors."""
    *own, _ = inspect.signature(LLM).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, kind, default=field.default, annotation=field.type)
        for name, (_, field) in _OPTIONS.items()
    ]
    return inspect.Signature([*own, *options])


LLM.__signature__ = _signature()  # type: ignore[attr-defined]

"""From a configuration to an engine that runs, and the offline interface `LLM`.

`build_engine` makes everything once, for every front end: model, tokenizer, executor (compiled), costs (calibrated or
loaded), policy, engine. `OutputAssembler` turns the engine's news into text, `RequestState` sums it up.
"""

import collections
import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import logging
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from tqdm import tqdm

from apt_jax.cache_dir import private_dir
from apt_jax.chat import ChatTemplate, Message, Tool, load_chat_template
from apt_jax.clock import Clock, WallClock
from apt_jax.config import (
    SLO,
    CacheConfig,
    CacheMode,
    DType,
    EngineConfig,
    HiddenAttention,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from apt_jax.engine import Engine, StepOutput, TokenLogprobs
from apt_jax.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError
from apt_jax.executor import Executor, is_out_of_memory
from apt_jax.grammar import GrammarCompiler, MaskFiller
from apt_jax.request import (
    CompletionOutput,
    EngineRequest,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from apt_jax.sched import KindSpec, Policy, StepCosts, make_policy
from apt_jax.sched.view import converts
from apt_jax.tokenizer import OutputText, Tokenizer, load_tokenizer
from apt_jax.validation import RequestLimits, build_requests

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from apt_jax.hosts import Hosts, Leader
    from apt_jax.jax_executor import JaxExecutor
    from apt_jax.models import LoadedModel
    from apt_jax.sched.cost_model import CostModel

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(stage, done, total), after each part of a stage: "preparing" (programs: compiled, or loaded from disk), "calibrating"."""

DEFAULT_CALIBRATION_S = 10.0
"""Time that a calibration at start takes, about; `apt-jax calibrate` takes longer and measures better."""


# --- outputs -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True, slots=True)
class OutputDelta:
    """News of one request as text. Several may be merged into one that says the same."""

    request: EngineRequest
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """One entry a token where the request asked for it: the sampled token first, then the most likely ones."""
    cumulative_logprob: float = 0.0
    """Sum over `token_ids`; 0 without `logprobs`."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: RequestMetrics
    """Goes on changing until the request has ended."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def merge(self, later: "OutputDelta") -> None:
        """Append what came after this one, before this one was read."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += later.logprobs
        self.cumulative_logprob += later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.metrics = later.error, later.metrics


class OutputAssembler:
    """The engine's `OutputProcessor`: detokenises, looks for stop strings, and makes `OutputDelta`s.

    Requests are told apart as objects: an id may be used again while the last output of its former owner is on its way.

    Args:
        tokenizer: None: outputs are token ids alone.
        eos_token_ids: ids whose name is not worth telling as a stop reason.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._texts: dict[EngineRequest, OutputText] = {}
        self._token_texts: dict[int, str | None] = {}

    @property
    def num_open(self) -> int:
        """Requests with text on the way."""
        return len(self._texts)

    def on_token(self, request: EngineRequest, token_id: int) -> str | None:
        """See `apt_jax.engine.OutputProcessor`."""
        text = self._text(request)
        return None if text is None else text.push(token_id)

    def delta(self, output: StepOutput) -> OutputDelta:
        """The engine's news as text; call it once for each, in order."""
        request, params = output.request, output.request.params
        text, piece = self._text(request), ""
        stop_reason = output.stop_reason
        if text is not None:
            by_token = output.finish_reason == "stop" and isinstance(stop_reason, int)
            if by_token and params.include_stop_str_in_output:
                text.push(output.new_token_ids[-1])
            piece = text.take(final=output.finished)
        if output.finished:
            self._texts.pop(request, None)
        if isinstance(stop_reason, int) and stop_reason in self._eos_token_ids:
            stop_reason = None
        logprobs, total = None, 0.0
        if output.logprobs is not None:
            pairs = list(zip(output.new_token_ids, output.logprobs, strict=True))
            logprobs = [self._logprobs(token_id, entry) for token_id, entry in pairs]
            total = sum(entry.logprob for _, entry in pairs)
        return OutputDelta(
            request=request,
            text=piece,
            token_ids=list(output.new_token_ids),
            logprobs=logprobs,
            cumulative_logprob=total,
            finish_reason=output.finish_reason,
            stop_reason=stop_reason,
            error=output.error,
            metrics=output.metrics,
        )

    def _text(self, request: EngineRequest) -> OutputText | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(request)
        if text is None:
            params = request.params
            text = self._texts[request] = OutputText(
                self._tokenizer,
                stop=params.stop,
                min_tokens=params.min_tokens,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        return text

    def _logprobs(self, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        top = dict(zip(entry.top_ids.tolist(), entry.top_logprobs.tolist(), strict=True))
        ranks = {top_id: rank for rank, top_id in enumerate(top, 1)}
        values = {token_id: entry.logprob, **{t: v for t, v in top.items() if t != token_id}}
        return {
            t: Logprob(logprob=v, rank=ranks.get(t), decoded_token=self._token_text(t))
            for t, v in values.items()
        }

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self._tokenizer.token_text(token_id)
        return self._token_texts[token_id]


class RequestState:
    """All that one request has said so far, from its deltas."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self._parts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None
        self._cumulative_logprob = 0.0
        self._last: OutputDelta | None = None

    def add(self, delta: OutputDelta) -> None:
        self._parts.append(delta.text)
        self._token_ids += delta.token_ids
        self._cumulative_logprob += delta.cumulative_logprob
        if delta.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += delta.logprobs
        self._last = delta

    def output(self) -> RequestOutput:
        """The state as users see it; later deltas do not change the object."""
        request, last = self.request, self._last
        self._parts = ["".join(self._parts)]
        metrics = (
            RequestMetrics(arrival_s=request.arrival_s, slo=request.slo)
            if last is None
            else dataclasses.replace(
                last.metrics, token_times_s=last.metrics.token_times_s[: len(self._token_ids)]
            )
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            outputs=[
                CompletionOutput(
                    index=0,
                    text=self._parts[0],
                    token_ids=list(self._token_ids),
                    cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
                    logprobs=None if self._logprobs is None else list(self._logprobs),
                    finish_reason=last.finish_reason if last else None,
                    stop_reason=last.stop_reason if last else None,
                )
            ],
            finished=last is not None and last.finished,
            metrics=metrics,
            error=last.error if last else None,
        )


# --- building ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineParts:
    """An engine and everything around it that a front end needs."""

    config: EngineConfig
    model_config: ModelConfig | None
    """None for an executor without a model."""
    tokenizer: Tokenizer | None
    executor: Executor
    policy: Policy
    engine: Engine
    clock: Clock
    limits: RequestLimits
    assembler: OutputAssembler
    grammars: GrammarCompiler | None = None
    """For structured outputs; None: outputs have no text."""
    cost_model: "CostModel | None" = None
    """None: not calibrated, the policy weighs kinds as equally fast."""
    chat_template: ChatTemplate | None = None
    """None: the model brings none, or there is no tokenizer."""
    hf_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Contents of the model's config.json, or the same fields made from the metadata of a GGUF file."""
    stored: tuple[str, str] = ("none", "none")
    """Format of the model's files, and how the weights are stored in them."""
    load_s: float = 0.0
    warm_up_s: float = 0.0
    calibration_s: float = 0.0
    _numbers: "itertools.count[int]" = dataclasses.field(default_factory=itertools.count)

    @property
    def model_name(self) -> str:
        """The name that requests call the model by."""
        return self.config.served_model_name or self.config.model

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation. Waits for another process: call it outside of event loops.

        Raises:
            InvalidRequestError: malformed messages or tools, the model has no chat template, or one without tools.
        """
        if self.chat_template is None or self.tokenizer is None:
            raise InvalidRequestError(
                "messages", f"model {self.model_name!r:.80} has no chat template (--chat-template)"
            )
        return self.chat_template.encode(
            self.tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def build_request(self, **fields: Any) -> EngineRequest:
        """`apt_jax.validation.build_request` with this engine's limits, arriving now unless `arrival_s` is given.

        A request without a seed gets one from the engine's seed and its number among all requests.
        """
        return self.build_requests(**fields)[0]

    def build_requests(self, *, n: object = 1, **fields: Any) -> list[EngineRequest]:
        """`apt_jax.validation.build_requests`, likewise: one request for each of `n` outputs."""
        text = f"{self.config.seed}/{next(self._numbers)}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
        fields.setdefault("arrival_s", self.clock.now_s())
        fields.setdefault("grammars", self.grammars)
        return build_requests(self.limits, self.tokenizer, n=n, fallback_seed=seed, **fields)


def make_parts(
    config: EngineConfig,
    executor: Executor,
    *,
    kinds: Sequence[KindSpec],
    vocab_size: int,
    max_model_len: int,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: Sequence[int] = (),
    policy: Policy | None = None,
    clock: Clock | None = None,
    costs: StepCosts | None = None,
    debug: bool = False,
    **facts: Any,
) -> EngineParts:
    """An engine over any executor.

    Args:
        config: its scheduler, cache and seed are used here.
        executor: ready to run.
        kinds: cache kinds, indexed by `sched.KV` and `sched.HIDDEN`.
        vocab_size: V of the model.
        max_model_len: longest prompt plus output, tokens.
        tokenizer: None: tokens only.
        eos_token_ids: end an output.
        policy: None: the one that `config.scheduler` names.
        clock: None: the machine's.
        costs: None: all zero.
        debug: the engine checks its accounting after every step.
        **facts: further fields of `EngineParts`.
    """
    clock = WallClock() if clock is None else clock
    policy = make_policy(config=config.scheduler, seed=config.seed) if policy is None else policy
    assembler = OutputAssembler(tokenizer, eos_token_ids)
    cache = dataclasses.replace(config.cache, block_size=executor.block_size)
    engine = Engine(
        executor,
        policy,
        clock,
        kinds,
        config.scheduler,
        cache,
        costs=StepCosts() if costs is None else costs,
        vocab_size=vocab_size,
        output_processor=assembler,
        fill_masks=MaskFiller(),
        debug=debug,
    )
    pool_tokens = max(
        executor.num_blocks // kind.blocks_per_group * size
        for kind, size in zip(kinds, engine.cache.block_sizes, strict=True)
        if kind.offered
    )
    limits = RequestLimits(
        vocab_size=vocab_size if tokenizer is None else min(vocab_size, tokenizer.vocab_size),
        max_model_len=max_model_len,
        max_pool_tokens=pool_tokens,
        eos_token_ids=tuple(eos_token_ids),
        default_slo=config.scheduler.default_slo,
    )
    facts.setdefault("model_config", None)
    if tokenizer is not None:
        grammars = GrammarCompiler(
            tokenizer.backend.to_str,
            vocab_size=vocab_size,
            num_tokens=min(vocab_size, tokenizer.vocab_size),
            eos_token_ids=eos_token_ids,
        )
        facts.setdefault("grammars", grammars)
    return EngineParts(
        config=config,
        tokenizer=tokenizer,
        executor=executor,
        policy=policy,
        engine=engine,
        clock=clock,
        limits=limits,
        assembler=assembler,
        **facts,
    )


def with_scheduler(parts: EngineParts, policy: str, cache: CacheMode) -> EngineParts:
    """A fresh engine over the same executor with another policy and other cache kinds; compiles and loads nothing.

    Only one of them may run at a time: they share the executor's pool. With prefix caching an engine must not be used again
    after another one has run: what it believes to be cached has been written over.

    Args:
        parts: from `build_engine`, with both kinds compiled where `cache` needs them.
        policy: name of the policy.
        cache: kinds that it may use.

    Raises:
        ConfigError: unknown policy, or a kind that the executor was not built for.
    """
    scheduler = dataclasses.replace(parts.config.scheduler, policy=policy)
    config = dataclasses.replace(parts.config, scheduler=scheduler)
    offered = (cache != "hidden", cache != "kv")
    kinds = [
        dataclasses.replace(kind, offered=kind.offered and wanted)
        for kind, wanted in zip(parts.engine.kinds, offered, strict=True)
    ]
    return make_parts(
        config,
        parts.executor,
        kinds=kinds,
        vocab_size=parts.limits.vocab_size,
        max_model_len=parts.limits.max_model_len,
        tokenizer=parts.tokenizer,
        eos_token_ids=parts.limits.eos_token_ids,
        costs=parts.engine.costs,
        model_config=parts.model_config,
        cost_model=parts.cost_model,
        chat_template=parts.chat_template,
        hf_config=parts.hf_config,
        stored=parts.stored,
    )


def recalibrated(
    parts: EngineParts, budget_s: float, progress: Callable[[int, int], None] | None = None
) -> EngineParts:
    """The same engine with step costs measured now, about `budget_s` seconds; nothing is loaded or stored.

    The pool is overwritten: call it before anything is served.
    """
    from apt_jax.calibrate import calibrate
    from apt_jax.jax_executor import JaxExecutor

    assert isinstance(parts.executor, JaxExecutor)
    model = calibrate(parts.executor, budget_s, progress)
    parts.engine.kinds = tuple(
        model.kinds(parts.executor.kinds_offered, absorbs=parts.executor.absorbs)
    )
    parts.engine.costs = model.step_costs()
    return dataclasses.replace(parts, cost_model=model)


def build_engine(
    config: EngineConfig,
    *,
    warm_up: bool = True,
    calibrate: bool = True,
    calibration_s: float = DEFAULT_CALIBRATION_S,
    progress: Progress | None = None,
    on_joined: "Callable[[Leader], None]" = lambda leader: None,
) -> EngineParts:
    """Load a model and make the engine that serves it.

    Args:
        config: what to build.
        warm_up: compile every program now; without it each is compiled when it is first needed.
        calibrate: measure step costs where none are stored for this model, machine and configuration; without it
            stored ones are still used.
        calibration_s: about how long to measure, seconds.
        progress: told how far preparing programs and calibrating are.

    Raises:
        ModelLoadError: model or tokenizer cannot be used.
        ConfigError: the configuration does not suit the model or the machine.
    """
    # JAX takes a second to import; who only validates or simulates need not wait for it.
    from apt_jax.calibrate import calibration_path, load_calibration, load_or_calibrate
    from apt_jax.hosts import Leader

    policy = make_policy(config=config.scheduler, seed=config.seed)  # a wrong name fails first
    started = time.monotonic()
    with _all_hosts(config) as hosts:
        if isinstance(hosts, Leader):
            on_joined(hosts)
        loaded, mesh = _load(config)
        tokenizer = _find_tokenizer(config, loaded.path, loaded.config.vocab_size)
        template = None if tokenizer is None else _find_template(config, tokenizer)
        executor = _make_executor(config, loaded, mesh, conversion=converts(policy))
        loaded_s = time.monotonic()
        with _room_for("the largest steps beside weights and cache", _SMALLER_STEPS):
            if warm_up:
                executor.warm_up(_stage(progress, "preparing"))
            warm_s = time.monotonic()
            executor.leader = hosts if isinstance(hosts, Leader) else None
            if calibrate:
                cost_model = load_or_calibrate(executor, calibration_s, _stage(progress, "calibrating"))  # fmt: skip
            else:
                cost_model = load_calibration(calibration_path(executor))
        return make_parts(
            config,
            executor,
            kinds=_kinds(executor, cost_model),
            vocab_size=loaded.config.vocab_size,
            max_model_len=executor.max_model_len,
            tokenizer=tokenizer,
            eos_token_ids=_end_ids(loaded.eos_token_ids, tokenizer, template),
            policy=policy,
            costs=None if cost_model is None else cost_model.step_costs(),
            model_config=loaded.config,
            cost_model=cost_model,
            chat_template=template,
            hf_config=loaded.hf_config,
            stored=(loaded.format, loaded.weights),
            load_s=loaded_s - started,
            warm_up_s=warm_s - loaded_s,
            calibration_s=time.monotonic() - warm_s,
        )


def freeze_loaded() -> None:
    """For a process that serves until it ends: what model and programs left behind lives as long.

    A full collection of garbage that reads it again would hold up every request, and every other host, for some tenths of a
    second.
    """
    gc.collect()
    gc.freeze()


def run_headless(config: EngineConfig, progress: Progress | None = None) -> None:
    """Be one of the hosts of a replica that do not serve: run what rank 0 runs, until it ends.

    Raises:
        ModelLoadError, ConfigError, HostError: as `build_engine`.
        StepError: a step failed.
    """
    from apt_jax.hosts import Follower, follow

    with _all_hosts(config) as hosts:
        assert isinstance(hosts, Follower), "rank 0 serves"
        signal.signal(signal.SIGTERM, lambda *_: hosts.ask_to_drain())
        signal.signal(signal.SIGINT, lambda *_: hosts.ask_to_drain())
        loaded, mesh = _load(config)
        executor = _make_executor(config, loaded, mesh)
        with _room_for("the largest steps beside weights and cache", _SMALLER_STEPS):
            executor.warm_up(_stage(progress, "preparing"))
            freeze_loaded()
            logger.info("rank %d runs what rank 0 runs", config.parallel.node_rank)
            follow(executor, hosts)


@contextlib.contextmanager
def _all_hosts(config: EngineConfig) -> Iterator["Hosts | None"]:
    """The other hosts of this replica, which are told of what is raised within; None: there are none."""
    from apt_jax import parallel
    from apt_jax.models import read_model_config, resolve_model

    ours = config.parallel
    if ours.tensor_parallel_size == 1:
        yield None
        return
    # Before there is anything to load.
    resolved = resolve_model(config.model, allow_preset=config.load_format == "dummy")
    model = read_model_config(resolved.fields, config.max_model_len)[1]
    parallel.check_size(model, ours.tensor_parallel_size)
    if ours.nnodes == 1:
        yield None
        return
    from apt_jax.hosts import join

    hosts = join(config, model, resolved)
    with hosts.telling():
        yield hosts


def _load(config: EngineConfig) -> "tuple[LoadedModel, Mesh | None]":
    """The model, and the devices that it is cut for; None: it is not cut."""
    from apt_jax import parallel
    from apt_jax.models import load_model

    ours = config.parallel
    if ours.nnodes == 1:  # JAX stores what rank 0 compiles alone, and all must do the same
        use_compile_cache()
    mesh = None
    if ours.tensor_parallel_size > 1:
        mesh = parallel.tensor_mesh(ours.tensor_parallel_size, ours.nnodes)
    sharding = None if mesh is None else functools.partial(parallel.leaf_sharding, mesh)
    with _room_for("the weights", _SMALLER_WEIGHTS):
        return load_model(config, sharding), mesh


def _make_executor(
    config: EngineConfig, loaded: "LoadedModel", mesh: "Mesh | None", *, conversion: bool = False
) -> "JaxExecutor":
    from apt_jax.jax_executor import JaxExecutor

    with _room_for("the weights as they are used", _SMALLER_WEIGHTS):
        return JaxExecutor(
            loaded.params,
            loaded.config,
            cache=config.cache,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=config.max_model_len or loaded.config.max_position,
            attention=config.attention_backend,
            quantization=config.quantization,
            mesh=mesh,
            conversion=conversion,
        )


_SMALLER_WEIGHTS = "choose a smaller model, a 16-bit --dtype or --quantization"
_SMALLER_STEPS = "lower --device-memory-utilization, --num-blocks-override, --max-num-batched-tokens or --max-num-seqs"


@contextlib.contextmanager
def _room_for(what: str, advice: str) -> Iterator[None]:
    """Want of memory within is a `ConfigError` of one line: how much was asked for, how much there is, and what to change."""
    from apt_jax.models.loader import free_memory_bytes

    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"(\d+) ?bytes", str(error))
        needed = "" if asked is None else f" ({int(asked[1]):,} bytes were asked for)"
        free = free_memory_bytes()
        there = "" if free is None else f"; {free:,} bytes are free"
        raise ConfigError(f"no memory for {what}{needed}{there}: {advice}") from error


def use_compile_cache() -> bool:
    """Keep compiled programs on disk, so that the next start is quick; False where that is not done.

    JAX trusts what it finds there, so the directory must be ours alone. A directory that JAX was already told to use
    stays.
    """
    import jax

    if jax.config.jax_compilation_cache_dir:
        return True
    directory = private_dir("compiled")
    if directory is None:
        return False
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return True


def _find_tokenizer(config: EngineConfig, model_path: Any, vocab_size: int) -> Tokenizer | None:
    """The tokenizer asked for, else the model's own; a shape without files (`load_format="dummy"`) may have none."""
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer, model_vocab_size=vocab_size)
    if model_path is None or (
        config.load_format == "dummy"
        and model_path.is_dir()
        and not (model_path / "tokenizer.json").is_file()
    ):
        return None
    return load_tokenizer(model_path, model_vocab_size=vocab_size)


def _find_template(config: EngineConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template beside the tokenizer, or the one asked for; rendered once to see that it works."""
    if tokenizer.path is None:
        return None
    template = load_chat_template(tokenizer.path, config.chat_template)
    if template is not None:
        template.validate()
    return template


def _end_ids(
    ids: Sequence[int], tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> Sequence[int]:
    """Of a model with a chat template also the tokenizer's own end token: it may be what ends a turn."""
    if tokenizer is None or template is None:
        return ids
    end = tokenizer.backend.token_to_id(template.special_tokens.get("eos_token", ""))
    return ids if end is None else tuple(dict.fromkeys([*ids, end]))


def _kinds(executor: "JaxExecutor", cost_model: "CostModel | None") -> Sequence[KindSpec]:
    kv, hidden = executor.kinds_offered
    if cost_model is not None:
        return cost_model.kinds((kv, hidden), absorbs=executor.absorbs)
    return (
        KindSpec(name="kv", blocks_per_group=2, offered=kv),
        KindSpec(
            name="hidden", blocks_per_group=1, offered=hidden, reprojected=not executor.absorbs
        ),
    )


def _stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(stage, done, total)


class ProgressBars:
    """A `Progress` that draws one bar a stage where stderr is a terminal, else says when starting begins and ends.

    Args:
        disable: True: nothing is drawn or said.
        say: told the lines where there is no terminal; None: they are logged.
    """

    _DONE: ClassVar = {"preparing": ("program", "prepared"), "calibrating": ("step", "calibrated")}
    """Stages of starting: what is counted, and what has been done to it in the end."""

    def __init__(
        self, *, disable: bool | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self._disable, self._say = disable, say or logger.info
        self._bar: tqdm | None = None
        self._stage = ""
        self._started = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        unit, ended = self._DONE.get(stage, ("step", None))
        if self._bar is None or stage != self._stage:
            self.close()
            # disable=None: only where stderr is a terminal. Some say that they have no size (containers).
            columns, lines = shutil.get_terminal_size()
            self._bar = tqdm(
                total=total,
                desc=stage,
                unit=unit,
                disable=self._disable,
                ncols=columns,
                nrows=lines,
            )
            self._stage, self._started = stage, time.monotonic()
            self._tell(ended, f"{stage} {total} {unit}s")
        self._bar.update(done - self._bar.n)
        if done >= total:
            seconds = time.monotonic() - self._started
            self._tell(ended, f"{ended} {total} {unit}s in {seconds:.1f} s")
            self.close()

    def _tell(self, ended: str | None, line: str) -> None:
        if ended and not self._disable and self._bar is not None and self._bar.disable:
            self._say(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


# --- the offline interface ---------------------------------------------------------------------------------------

Prompt = str | Sequence[int]


class LLM:
    """A model and its engine in this process.

    Args:
        model: a bundled name (``tiny-opt``), a directory in Hugging Face format or in ours for Orbax, a ``.gguf`` file, a
            hub id (``owner/model``), or with ``load_format="dummy"`` any known size (``opt-125m``).
        cache: which cache kinds the scheduler may use.
        scheduling_policy: a name from `apt_jax.sched.POLICIES`, ``package.module:Class`` or an installed one; with options
            of its own as in ``apt?violation_decay=0.4``.
        hidden_attention: how attention over a hidden cache is computed.
        dtype: of weights, activations and cache.
        tensor_parallel_size: devices that share the model.
        max_num_seqs: most requests in one step.
        num_blocks_override: size of the cache pool in blocks; None: from the memory at hand.
        seed: of dummy weights, and of sampled requests that bring no seed of their own.
        block_size: keys, or values, that a block holds; as many layer inputs, more where they are narrower.
        device_memory_utilization: share of the free device memory for the pool, in (0, 1].
        max_num_batched_tokens: most tokens in one step; None: 512, and at least `max_num_seqs`.
        max_model_len: longest prompt plus output; None: the model's limit.
        load_format, tokenizer, chat_template, served_model_name, quantization, attention_backend: see `EngineConfig`.
        violation_decay: see `SchedulerConfig`.
        default_slo: objectives of requests that bring none.
        enable_prefix_caching: requests with the same beginning share the cache of it.
        warm_up: compile everything now rather than when it is first needed.
        calibrate: measure step costs if none are stored for this machine; without it stored ones are still used.
        use_tqdm: show progress while preparing programs and calibrating.

    Raises:
        ModelLoadError, ConfigError: see `build_engine`.
    """

    def __init__(
        self,
        model: str,
        *,
        cache: CacheMode = "hybrid",
        scheduling_policy: str = "apt",
        hidden_attention: HiddenAttention = "auto",
        dtype: DType = "float32",
        tensor_parallel_size: int = 1,
        max_num_seqs: int = 64,
        num_blocks_override: int | None = None,
        seed: int = 0,
        block_size: int = 16,
        device_memory_utilization: float = 0.9,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        load_format: Any = "auto",
        tokenizer: str | None = None,
        chat_template: str | None = None,
        served_model_name: str | None = None,
        quantization: Any = None,
        attention_backend: str | None = None,
        violation_decay: float = 0.0,
        default_slo: SLO | None = None,
        enable_prefix_caching: bool = True,
        warm_up: bool = True,
        calibrate: bool = False,
        use_tqdm: bool = True,
    ) -> None:
        config = EngineConfig(
            model=model,
            tokenizer=tokenizer,
            chat_template=chat_template,
            dtype=dtype,
            load_format=load_format,
            max_model_len=max_model_len,
            served_model_name=served_model_name,
            quantization=quantization,
            attention_backend=attention_backend,
            seed=seed,
            cache=CacheConfig(
                block_size=block_size,
                num_blocks_override=num_blocks_override,
                device_memory_utilization=device_memory_utilization,
                mode=cache,
                hidden_attention=hidden_attention,
                enable_prefix_caching=enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(
                policy=scheduling_policy,
                violation_decay=violation_decay,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens or max(512, max_num_seqs),
                default_slo=SLO() if default_slo is None else default_slo,
            ),
            parallel=ParallelConfig(tensor_parallel_size=tensor_parallel_size),
        )
        bars = ProgressBars(disable=None if use_tqdm else True)
        try:
            self.parts = build_engine(config, warm_up=warm_up, calibrate=calibrate, progress=bars)
        finally:
            bars.close()

    @classmethod
    def from_parts(cls, parts: EngineParts) -> "LLM":
        """Around an engine that is there already."""
        llm = cls.__new__(cls)
        llm.parts = parts
        return llm

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.parts.tokenizer

    @property
    def engine(self) -> Engine:
        return self.parts.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams
        | Mapping[str, object]
        | Sequence[SamplingParams | Mapping[str, object]]
        | None = None,
        *,
        slo: SLO | Sequence[SLO | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once; the answers come in the order of the prompts.

        Args:
            prompts: a text, a list of texts, a list of token ids, or a list of such lists.
            sampling_params: for all prompts, or one entry a prompt; None: the defaults (16 tokens at temperature 1).
            slo: objectives, likewise; None: the default ones.
            use_tqdm: show progress.

        Returns:
            One output a prompt. A request that failed for its own sake has `finish_reason == "error"` and says why in
            `error`; the others are untouched by it.

        Raises:
            InvalidRequestError: a prompt or parameter can never be served; then nothing has run.
            EngineDeadError: the engine ended.
        """
        requests = self._requests(prompts, sampling_params, slo)
        states = {request: RequestState(request) for request in requests}
        waiting = collections.deque(requests)
        engine, assembler = self.parts.engine, self.parts.assembler
        num_open = len(requests)
        scheduler = self.parts.config.scheduler
        most_live = scheduler.max_num_queued_reqs + scheduler.max_num_seqs
        try:
            # disable=None: only where stderr is a terminal.
            with tqdm(total=num_open, unit="prompt", disable=None if use_tqdm else True) as bar:
                while num_open:
                    while waiting and engine.num_live < most_live:
                        try:
                            engine.add_request(waiting[0])
                        except QueueFullError:
                            break  # place comes free as others begin
                        waiting.popleft()
                    for output in engine.step():
                        delta = assembler.delta(output)
                        state = states.get(output.request)
                        if state is None:
                            continue  # of a call that was interrupted
                        state.add(delta)
                        if delta.finished:
                            num_open -= 1
                            bar.update()
                    if engine.dead_reason is not None:
                        raise EngineDeadError(f"the engine has ended: {engine.dead_reason}")
        finally:
            if num_open and engine.dead_reason is None:
                self._abandon(requests)
        return [states[request].output() for request in requests]

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
        slo: SLO | Sequence[SLO | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations, by the chat template of the model.

        Args:
            messages: a conversation, or a list of them: messages of ``{"role": ..., "content": ...}``. Text that looks like a
                special token is encoded as the text that it is.
            tools: functions that the model may call, for chat templates with a place for them; calls come back as text.
            add_generation_prompt: end the prompt where the model's answer begins.
            sampling_params, slo, use_tqdm: see `generate`.

        Returns:
            One output a conversation.

        Raises:
            InvalidRequestError: malformed messages, or the model has no chat template; or see `generate`.
            EngineDeadError: the engine ended.
        """
        conversations: Sequence[Any] = messages
        if len(messages) and isinstance(messages[0], Mapping):
            conversations = [messages]
        prompts = [
            self.parts.chat_prompt(one, tools=tools, add_generation_prompt=add_generation_prompt)
            for one in conversations
        ]
        return self.generate(prompts, sampling_params, slo=slo, use_tqdm=use_tqdm)

    def _abandon(self, requests: Sequence[EngineRequest]) -> None:
        """After an interruption: end what is left, so that the next call starts clean."""
        for request in requests:
            self.engine.abort(request.request_id)
        while self.engine.has_work and self.engine.dead_reason is None:
            for output in self.engine.step():
                self.parts.assembler.delta(output)

    def _requests(self, prompts: Any, sampling_params: Any, slo: Any) -> list[EngineRequest]:
        """Check everything before anything runs."""
        single = isinstance(prompts, str) or (
            isinstance(prompts, Sequence | np.ndarray)
            and not isinstance(prompts, bytes | bytearray)
            and len(prompts) > 0
            and isinstance(prompts[0], int | np.integer)
            and not isinstance(prompts[0], bool)
        )
        items = [prompts] if single else prompts
        if not isinstance(items, Sequence | np.ndarray) or isinstance(items, bytes | bytearray):
            raise InvalidRequestError(
                "prompts", f"{type(items).__name__} is not a text, a list of texts, or token ids"
            )
        if len(items) == 0:
            return []
        all_params = _one_each("sampling_params", sampling_params, len(items))
        all_slos = _one_each("slo", slo, len(items))
        arrival_s = self.parts.clock.now_s()
        requests = []
        for number, (prompt, params, objectives) in enumerate(
            zip(items, all_params, all_slos, strict=True)
        ):
            name = "prompt" if isinstance(prompt, str) or prompt is None else "prompt_token_ids"
            try:
                request = self.parts.build_request(
                    **{name: prompt}, params=params, slo=objectives, arrival_s=arrival_s
                )
            except InvalidRequestError as error:
                if len(items) == 1:
                    raise
                message = str(error).removeprefix(f"{error.field}: ")
                raise InvalidRequestError(error.field, f"{message} (prompts[{number}])") from None
            requests.append(request)
        return requests


def _one_each(name: str, value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(name, f"{len(value)} entries for {count} prompts")
    return value

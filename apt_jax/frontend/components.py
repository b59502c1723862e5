"""An engine and the other parts that front ends need: tokenizer, limits of requests, output assembler."""

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from apt_jax.config import CacheMode, EngineConfig
from apt_jax.core.kinds import KV, CacheKindSpec
from apt_jax.core.tiers import DiskStore, Tiers
from apt_jax.engine import Engine
from apt_jax.engine.batch import reserver_for
from apt_jax.errors import InvalidRequestError
from apt_jax.executor import Executor
from apt_jax.frontend.outputs import OutputAssembler
from apt_jax.models.config import ModelConfig
from apt_jax.request import EngineRequest
from apt_jax.sched import Policy, StepCosts, make_policy
from apt_jax.structured.compiler import GrammarCompiler, PendingGrammars
from apt_jax.text.chat import ChatTemplate, Message, Tool, text_of
from apt_jax.text.tokenizer import Tokenizer
from apt_jax.utils.clock import Clock, WallClock
from apt_jax.validation import GrammarSource, RequestLimits, build_requests, check_rows, check_text_length

if TYPE_CHECKING:
    from apt_jax.costs.fit import CostModel
    from apt_jax.executor.compiling.warm_up import Program
    from apt_jax.executor.jax_executor import JaxExecutor


class FallbackSeeds:
    """Source of seeds for requests without a seed, derived from the engine's seed and a counter. Calls from several
    threads get different seeds under the GIL."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers = itertools.count()

    def next(self) -> int:
        text = f"{self._seed}/{next(self._numbers)}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unprepared:
    """Programs and step costs that an engine still lacks when it starts to serve early."""

    programs: "Sequence[Program]"
    """Programs not compiled yet, most useful first."""
    calibration_s: float | None
    """Approximate duration of the calibration, in seconds; None: step costs are known, or calibration is off."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineComponents:
    """An engine and everything around it that a front end needs."""

    config: EngineConfig
    tokenizer: Tokenizer | None
    executor: Executor
    policy: Policy
    engine: Engine
    clock: Clock
    vocab_size: int
    """Vocabulary size V of the model; `limits.vocab_size` is smaller if the tokenizer has fewer tokens (padded
    embeddings)."""
    limits: RequestLimits
    assembler: OutputAssembler
    seeds: FallbackSeeds
    grammars: GrammarCompiler | None
    """Compiler of grammars for structured outputs; None: the model has no tokenizer."""
    model_config: ModelConfig | None = None
    """Configuration of the model; None for an executor without a model."""
    cost_model: "CostModel | None" = None
    """Measured step costs; None: not calibrated, so the policy assumes that all cache kinds are equally fast."""
    chat_template: ChatTemplate | None = None
    """Chat template of the model; None: it has no template or no tokenizer."""
    hf_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Contents of the model's config.json, or the same fields from the metadata of a GGUF file."""
    stored: tuple[str, str] = ("none", "none")
    """Format of the model's files, and format of the weights in them."""
    load_s: float = 0.0
    warm_up_s: float = 0.0
    calibration_s: float = 0.0
    unprepared: Unprepared | None = None
    """Programs and costs still to be prepared while the engine serves; None: all are prepared."""

    @property
    def model_name(self) -> str:
        """Model name that requests use."""
        return self.config.served_model_name or self.config.model

    def adapter_named(self, model: object) -> str | None:
        """Return the LoRA adapter that a request's model name selects; None: the model without an adapter."""
        return model if isinstance(model, str) and model in self.limits.adapters else None

    @property
    def model_names(self) -> tuple[str, ...]:
        """All model names that requests may use; `model_name` first."""
        return tuple(dict.fromkeys([self.model_name, *self.config.served_model_aliases]))

    @property
    def pool_tokens(self) -> dict[str, int]:
        """Number of tokens that fit the pool if all have one cache kind, keyed by the names of the offered kinds; tokens of
        one request if windowed layers keep their window alone."""
        return {
            kind.name: kind.longest(self.executor.num_blocks, size)
            for kind, size in zip(self.engine.kinds, self.engine.cache.block_sizes, strict=True)
            if kind.offered
        }

    @property
    def pending_grammars(self) -> GrammarSource | None:
        """Like `grammars`, but for event loops: grammars whose compilation takes time are returned as `PendingGrammar`,
        to be compiled before the request is submitted."""
        return None if self.grammars is None else PendingGrammars(self.grammars)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        truncated: bool = False,
        **options: Any,
    ) -> list[int]:
        """Encode a conversation as token ids. This waits for another process: call it outside of event loops.

        Args:
            messages, tools, add_generation_prompt: see `ChatTemplate.encode`.
            truncated: True if the prompt will be truncated; then a long prompt is not an error.
            options: `continue_final_message` and `template_kwargs` of `ChatTemplate.encode`.

        Raises:
            InvalidRequestError: messages or tools are malformed, the text is too long for the model, or the model has
                no chat template or a template without tools.
        """
        if self.chat_template is None or self.tokenizer is None:
            raise InvalidRequestError(
                "messages",
                f"model {self.model_name!r:.80} has no chat template: send text to /v1/completions or LLM.generate, or start with one (--chat-template FILE)",
            )
        check_text_length(self.limits, self.tokenizer, text_of(messages), "messages", truncated=truncated)
        ids = self.chat_template.encode(
            self.tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt, **options
        )
        check_rows(self.limits, ids, "messages")
        return ids

    def build_request(self, **fields: Any) -> EngineRequest:
        """Call `apt_jax.validation.build_request` with this engine's limits; the request arrives now unless `arrival_s`
        is given. A request without a seed gets the next seed from `seeds`.

        Raises:
            InvalidRequestError: a value is not allowed, or `n` is more than 1.
        """
        requests = self.build_requests(**fields)
        if len(requests) > 1:
            raise InvalidRequestError("n", f"{len(requests)} outputs are {len(requests)} requests (build_requests)")
        return requests[0]

    def build_requests(self, *, n: object = None, **fields: Any) -> list[EngineRequest]:
        """Like `build_request`, but return one request for each of `n` outputs
        (`apt_jax.validation.build_requests`)."""
        fields.setdefault("arrival_s", self.clock.now_s())
        fields.setdefault("grammars", self.grammars)
        return build_requests(self.limits, self.tokenizer, n=n, fallback_seed=self.seeds.next(), **fields)


def build_components(
    config: EngineConfig,
    executor: Executor,
    *,
    kinds: Sequence[CacheKindSpec],
    vocab_size: int,
    max_model_len: int,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: Sequence[int] = (),
    policy: Policy | None = None,
    clock: Clock | None = None,
    costs: StepCosts | None = None,
    debug: bool = False,
    disk: DiskStore | None = None,
) -> EngineComponents:
    """Build an engine over any executor.

    Args:
        config: configuration of the engine; only its scheduler, cache and seed are used here.
        executor: executor that is ready to run.
        kinds: cache kinds, indexed by `sched.KV` and `sched.HIDDEN`.
        vocab_size: V of the model.
        max_model_len: maximum length of prompt plus output, in tokens.
        tokenizer: tokenizer of the model; None: requests and outputs have token ids only.
        eos_token_ids: tokens that end an output.
        policy: scheduling policy; None: the policy that `config.scheduler` names.
        clock: clock of the engine; None: the machine's clock.
        costs: step costs; None: all zero.
        debug: True if the engine checks its accounting after every step.
        disk: store of cached prefixes; None: prefixes are not stored on disk.
    """
    clock = WallClock() if clock is None else clock
    policy = make_policy(config=config.scheduler, seed=config.seed) if policy is None else policy
    assembler = OutputAssembler(tokenizer, eos_token_ids)
    engine = Engine(
        executor,
        policy,
        clock,
        kinds,
        config.scheduler,
        dataclasses.replace(config.cache, block_size=executor.block_size),
        costs=StepCosts() if costs is None else costs,
        vocab_size=vocab_size,
        output_processor=assembler,
        tiers=Tiers(host=getattr(executor, "host", None) if config.cache.swap_space else None, disk=disk),
        reserver=reserver_for(policy, config.cache),
        debug=debug,
    )
    pool_tokens = max(
        kind.longest(executor.num_blocks, size)
        for kind, size in zip(kinds, engine.cache.block_sizes, strict=True)
        if kind.offered
    )
    num_tokens = vocab_size if tokenizer is None else min(vocab_size, tokenizer.vocab_size)
    limits = RequestLimits(
        vocab_size=num_tokens,
        max_model_len=max_model_len,
        max_pool_tokens=pool_tokens,
        eos_token_ids=tuple(eos_token_ids),
        max_sequences=config.max_sequences_per_call,
        max_stop_strings=config.max_stop_strings,
        default_slo=config.scheduler.default_slo,
        default_slo_class=config.scheduler.default_slo_class,
        max_prompt_logprobs=config.scheduler.max_prompt_logprobs,
        adapters=tuple(config.lora_modules or ()),
    )
    grammars = None
    if tokenizer is not None:
        grammars = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    return EngineComponents(
        config=config,
        tokenizer=tokenizer,
        executor=executor,
        policy=policy,
        engine=engine,
        clock=clock,
        vocab_size=vocab_size,
        limits=limits,
        assembler=assembler,
        seeds=FallbackSeeds(config.seed),
        grammars=grammars,
    )


def with_policy(parts: EngineComponents, policy: str, cache: CacheMode) -> EngineComponents:
    """Build a fresh engine, with the given policy and cache kinds, over the same executor; nothing is compiled or
    loaded.

    Only one of the engines may run at a time: they share the executor's pool. With prefix caching, an engine must not
    be used again after another engine has run, because its cached blocks have been overwritten.

    Args:
        parts: result of `build_engine`, with the programs of both kinds compiled if `cache` needs both.
        policy: name of the policy.
        cache: cache kinds that the policy may use.

    Raises:
        ConfigError: the policy is unknown, or the executor was not built for a cache kind.
    """
    scheduler = dataclasses.replace(parts.config.scheduler, policy=policy)
    wanted = (cache != "hidden", cache != "kv")
    fresh = build_components(
        dataclasses.replace(parts.config, scheduler=scheduler),
        parts.executor,
        kinds=[
            dataclasses.replace(kind, offered=kind.offered and is_wanted)
            for kind, is_wanted in zip(parts.engine.kinds, wanted, strict=True)
        ],
        vocab_size=parts.vocab_size,
        max_model_len=parts.limits.max_model_len,
        tokenizer=parts.tokenizer,
        eos_token_ids=parts.limits.eos_token_ids,
        costs=parts.engine.costs,
    )
    return dataclasses.replace(
        fresh,
        model_config=parts.model_config,
        cost_model=parts.cost_model,
        chat_template=parts.chat_template,
        hf_config=parts.hf_config,
        stored=parts.stored,
    )


def cache_kinds(executor: "JaxExecutor", cost_model: "CostModel | None") -> Sequence[CacheKindSpec]:
    """Return the cache kinds that the executor offers, with their costs if known."""
    groups, (kv, hidden) = executor.plan.layer_groups, executor.kinds_offered
    if cost_model is not None:
        kinds = cost_model.kinds(executor.kinds_offered, absorbs=executor.absorbs)
        if groups is None:
            return kinds
        of_kv = dataclasses.replace(kinds[KV], blocks_per_group=groups.blocks_per_group, windows=groups.windows)
        return (of_kv, *kinds[1:])
    return (
        CacheKindSpec(
            name="kv",
            blocks_per_group=2 if groups is None else groups.blocks_per_group,
            offered=kv,
            windows=executor.plan.windows,
        ),
        CacheKindSpec(name="hidden", blocks_per_group=1, offered=hidden, reprojected=not executor.absorbs),
    )


def with_costs(parts: EngineComponents, model: "CostModel") -> EngineComponents:
    """Use measured step costs in a running engine, between two steps."""
    executor: Any = parts.executor
    parts.engine.kinds = tuple(cache_kinds(executor, model))
    parts.engine.costs = model.step_costs()
    return dataclasses.replace(parts, cost_model=model)

"""A whole engine without a model: `FakeExecutor`, a tokenizer of bytes, the real scheduler, engine and front end."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from apt_jax.config import CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.core.step import StepBatch
from apt_jax.frontend.components import EngineComponents, build_components
from apt_jax.request import EngineRequest
from apt_jax.text.chat import ChatTemplate
from apt_jax.text.tokenizer import Tokenizer
from apt_jax.utils.clock import Clock
from tests.support.fake_executor import FakeExecutor, Fault, reference_tokens

SPECIALS = ("<s>", "<pad>", "</s>")
VOCAB_SIZE = 259
EOS = 2


def byte_tokenizer() -> Tokenizer:
    """One token a byte; `</s>` (id 2) is prepended."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate([*SPECIALS, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", EOS)])
    return Tokenizer(backend)


class GatedExecutor(FakeExecutor):
    """A `FakeExecutor` whose steps can be held.

    Attributes:
        gate: steps wait for it; clear it to hold the engine within a step.
        step_s: seconds that each step sleeps.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gate = threading.Event()
        self.gate.set()
        self.step_s = 0.0

    def execute(self, batch: StepBatch):
        self.gate.wait(30)
        if self.step_s:
            time.sleep(self.step_s)
        return super().execute(batch)


def toy_parts(
    *,
    num_blocks: int = 256,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_model_len: int = 256,
    tokenizer: Tokenizer | str | None = "bytes",
    fault: Callable[[StepBatch], Fault | None] | None = None,
    policy: str = "fcfs",
    debug: bool = True,
    step_s: float = 0.0,
    eos_token_ids: Sequence[int] = (EOS,),
    chat_template: ChatTemplate | None = None,
    clock: Clock | None = None,
    adapters: Sequence[str] = (),
    share_prefixes: bool = False,
    retention: str = "lru",
    vocab_size: int = VOCAB_SIZE,
    **scheduler: Any,
) -> EngineComponents:
    """An engine with both cache kinds, on the machine's clock unless another one is given."""
    executor = GatedExecutor(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        vocab_size=vocab_size,
        fault=fault,
    )
    executor.step_s = step_s
    config = EngineConfig(
        model="toy",
        lora_modules={name: f"adapters/{name}" for name in adapters},
        cache=CacheConfig(block_size=block_size, share_prefixes=share_prefixes, retention=retention),
        scheduler=SchedulerConfig(
            policy=policy,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(64, max_num_seqs),
            **scheduler,
        ),
    )
    executor.adapters = tuple(adapters)
    parts = build_components(
        config,
        executor,
        kinds=(
            CacheKindSpec(name="kv", blocks_per_group=2),
            CacheKindSpec(name="hidden", blocks_per_group=1),
        ),
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        tokenizer=byte_tokenizer() if tokenizer == "bytes" else tokenizer,  # type: ignore[arg-type]
        eos_token_ids=eos_token_ids,
        debug=debug,
        clock=clock,
    )
    return dataclasses.replace(parts, chat_template=chat_template)


def executor_of(parts: EngineComponents) -> GatedExecutor:
    assert isinstance(parts.executor, GatedExecutor)
    return parts.executor


def expected_tokens(request: EngineRequest) -> list[int]:
    """The stream that the request must have, computed without engine or cache (stop strings are not looked for)."""
    return reference_tokens(
        request.prompt_token_ids,
        request.params.max_tokens,
        vocab_size=VOCAB_SIZE,
        params=request.params,
        grammar=request.grammar,
    )


def assert_clean(parts: EngineComponents) -> None:
    """The clean check (L0) after whatever has happened: nothing is left of any request, and every gauge says so.

    Blocks, references to them, slots, rows, text; what is cached of prefixes may stay. That bystanders got their tokens
    and that a next request succeeds is for the test to see (`expected_tokens`).
    """
    engine, cache = parts.engine, parts.engine.cache
    engine.check_integrity()  # recounts references, free lists, tables
    stats = engine.stats()
    assert stats.free_blocks == stats.total_blocks
    assert (stats.num_running, stats.num_waiting, stats.num_ending) == (0, 0, 0)
    assert (stats.waiting_prompt_tokens, stats.waiting_uncached_tokens) == (0, 0)
    assert not any(stats.requests_by_kind.values())
    assert not any(stats.blocks_by_kind.values())
    assert not cache.num_refs.any()
    assert len(cache.free_slots) == engine.max_num_seqs
    assert not engine.table.live.any()
    assert engine.num_live == 0
    # A step may still be on its way: all of its requests have ended.
    assert parts.assembler.num_open == 0

"""A tiny random model, an executor for it, and a driver that feeds executors by hand."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
import pytest

from apt_jax.config import CacheConfig, CacheMode, HiddenAttention
from apt_jax.core.kinds import KV
from apt_jax.core.step import TOKEN_ON_DEVICE, StepBatch, WindowBlocks
from apt_jax.executor import Executor, MaskedStepHandle
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.lab.reference_model import forward
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import dummy_params
from apt_jax.ops import sampling
from apt_jax.ops.backend import KernelBackend
from apt_jax.request import SamplingParams
from tests.support.cases import ALL

CONFIG = ModelConfig(
    family="opt", vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, ffn_size=64, max_position=256, eos_token_id=2,
)  # fmt: skip
PARAMS = dummy_params(CONFIG, "float32", 7)
PARAMS = dataclasses.replace(PARAMS, embed=PARAMS.embed * 20)  # random tiny models are near-uniform otherwise
GREEDY = SamplingParams(temperature=0.0)
BLOCK = 4


def make_executor(
    mode: CacheMode = "hybrid",
    attention: HiddenAttention = "auto",
    mixed: bool = False,
    ops: str | KernelBackend | None = None,
    **kwargs: Any,
) -> JaxExecutor:
    cache = CacheConfig(
        block_size=BLOCK,
        num_blocks_override=kwargs.pop("num_blocks", 400),
        mode=mode,
        hidden_attention=attention,
        swap_space=kwargs.pop("swap_space", 0.0),
    )
    return JaxExecutor(
        kwargs.pop("params", PARAMS),
        kwargs.pop("config", CONFIG),
        cache=cache,
        max_num_seqs=kwargs.pop("max_num_seqs", 8),
        max_num_batched_tokens=64,
        max_model_len=128,
        mixed=mixed,
        attention=ops,
        conversion=kwargs.pop("conversion", False),
        adapters=kwargs.pop("adapters", ()),
        both_ends=kwargs.pop("both_ends", False),
    )


def few_programs(executor: Executor) -> JaxExecutor:
    """Leave `executor` one size of every program, the largest, so that few are compiled; `make test-slow` has all."""
    assert isinstance(executor, JaxExecutor)
    buckets = executor.buckets
    for sizes in () if ALL else (buckets.decode, buckets.masked, buckets.prefill, buckets.prefixed, buckets.scored):
        del sizes[:-1]
    return executor


def draw_greedily(patch: pytest.MonkeyPatch) -> None:
    """Let programs that draw take the most likely token, as draws take long to compile; `make test-slow` has them."""
    if not ALL:
        patch.setattr(sampling, "sample", lambda scores, settings, branches: sampling.greedy(scores))


class Driver:
    """Feeds an executor by hand: contiguous blocks per request, no scheduler."""

    def __init__(self, executor: JaxExecutor) -> None:
        self.executor = executor
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.kind: dict[int, int] = {}
        self.table: dict[int, np.ndarray] = {}
        self.adapter: dict[int, int] = {}
        """Number of the LoRA adapter, of slots that have one."""

    def add(self, slot: int, prompt: list[int], kind: int) -> None:
        per_row = 2 * (128 // BLOCK)
        blocks = 1 + (slot * 48 + np.random.default_rng(slot).permutation(48)) % self.executor.num_blocks
        self.table[slot] = (
            np.stack([blocks[:24], blocks[24:48]]) if kind == KV else np.stack([blocks[:24], np.zeros(24, np.int64)])
        )
        assert per_row >= 48
        spec = self.executor.plan.windows
        if spec is not None:  # positions that left the window may stay: they are not read
            first = 1 + slot * 24 * (2 + spec.blocks_per_group)
            self.table[slot] = first + np.arange(24 * (2 + spec.blocks_per_group)).reshape(-1, 24)
            assert self.table[slot].max() <= self.executor.num_blocks
        self.tokens[slot], self.cached[slot], self.kind[slot] = list(prompt), 0, kind

    def step(
        self,
        counts: dict[int, int],
        params: SamplingParams = GREEDY,
        on_device: bool = False,
        masks: dict[int, np.ndarray] | None = None,
    ):
        """One step; `masks` (words of bits) by slot, of rows that sample."""
        slots = list(counts)
        ids, samples = [], []
        for s in slots:
            start, n = self.cached[s], counts[s]
            piece = self.tokens[s][start : start + n]
            complete = start + n == len(self.tokens[s])
            if on_device and n == 1 and complete and start:
                piece = [TOKEN_ON_DEVICE]
            ids += piece
            samples.append(complete)
        batch = StepBatch(
            slots=np.array(slots, np.int32),
            num_tokens=np.array([counts[s] for s in slots], np.int32),
            start=np.array([self.cached[s] for s in slots], np.int32),
            kind=np.array([self.kind[s] for s in slots], np.int8),
            token_ids=np.array(ids, np.int32),
            block_tables=np.stack([self.table[s][:2] for s in slots]).astype(np.int32),
            windows=None
            if self.executor.plan.windows is None
            else WindowBlocks(
                first=np.zeros(len(slots), np.int32),
                blocks=np.stack([self.table[s][2:] for s in slots]).astype(np.int32),
            ),
            samples=np.array(samples),
            position=np.zeros(len(slots), np.int32),
            params=[params] * len(slots),
            history=[np.array(self.tokens[s], np.int32) for s in slots],
            prompt_len=np.array([len(self.tokens[s]) for s in slots], np.int32),
            masked=np.array([i for i, s in enumerate(slots) if s in masks]) if masks else None,
            adapters=np.array([self.adapter.get(s, 0) for s in slots], np.int32) if self.adapter else None,
        )
        handle = self.executor.execute(batch)
        if masks:
            assert batch.masked is not None
            assert all(samples[i] for i in batch.masked)
            cast("MaskedStepHandle", handle).sample(np.stack([masks[s] for s in slots if s in masks]))
        result = handle.result()
        for i, s in enumerate(slots):
            self.cached[s] += counts[s]
            if samples[i]:
                self.tokens[s].append(int(result.token_ids[i]))
            else:
                assert result.token_ids[i] == -1
        broken = np.flatnonzero(~result.finite).tolist()
        assert not broken, f"not finite: {broken}"
        return result


@jax.jit
def padded_forward(tokens):
    return forward(PARAMS, tokens, CONFIG)


def reference_greedy(prompt: list[int], steps: int, model: Callable[[Any], Any] = padded_forward) -> list[int]:
    """Without a cache; padded at the end, where causal attention does not look."""
    tokens = list(prompt)
    for _ in range(steps):
        padded = np.zeros(80, np.int32)
        padded[: len(tokens)] = tokens
        tokens.append(int(np.argmax(np.asarray(model(padded))[len(tokens) - 1])))
    return tokens

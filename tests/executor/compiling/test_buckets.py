"""Padded sizes of steps: which there are, and which of them a step takes."""

import itertools
from typing import Any

import numpy as np
import pytest

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import StepBatch
from apt_jax.executor.compiling.buckets import Buckets, PromptSize, prompt_buckets
from apt_jax.executor.programs.packing import StepFormat, pack_forward
from apt_jax.request import SamplingParams


def buckets(tokens: int = 512, context: int = 2048, **changed: Any) -> Buckets:
    """Those of OPT-13B on a GPU at the engine's defaults."""
    of_gpu = {"sparse": True, "has_rooms": True, "few_tokens": 128} | changed
    limits = {"max_num_seqs": 64, "hidden_block_size": 16, "rows_multiple": 8, **of_gpu}
    return Buckets.for_limits(max_num_batched_tokens=tokens, max_model_len=context, **limits)


def step(prefixes: list[int], kinds: list[int], tokens: int = 2) -> StepBatch:
    """Chunks of so many tokens behind prefixes."""
    n = len(prefixes)
    return StepBatch(
        slots=np.arange(n, dtype=np.int32),
        num_tokens=np.full(n, tokens, np.int32),
        start=np.array(prefixes, np.int32),
        kind=np.array(kinds, np.int8),
        token_ids=np.full(n * tokens, 3, np.int32),
        block_tables=np.ones((n, 2, 600), np.int32),
        samples=np.ones(n, bool),
        position=np.zeros(n, np.int32),
        params=[SamplingParams()] * n,
        history=[np.zeros(0, np.int32)] * n,
        prompt_len=np.zeros(n, np.int32),
    )


def room_of(sizes: Buckets, prefixes: list[int], kinds: list[int], tokens: int = 2) -> tuple[int, int | None]:
    step_format = StepFormat(
        block_size=16, hidden_block_size=16, num_blocks=100, max_num_seqs=64, table_len=200, vocab_size=99, num_biases=4,
        buckets=sizes,
    )  # fmt: skip
    packed = pack_forward(step(prefixes, kinds, tokens), step_format, np.zeros((2, 0), np.int32), mixed=True)
    return packed.num_prefill, packed.prefix_room


@pytest.mark.parametrize("largest", [512, 1000, 2048, 8192])
def test_prompts_on_gpus_are_padded_little_where_tokens_take_time(largest: int) -> None:
    sizes = prompt_buckets(largest)
    assert sizes[:3] == [64, 128, 256]
    assert sizes[-1] == largest
    assert all(high / (low + 1) < 1.17 for low, high in itertools.pairwise(sizes[2:]))
    assert len(sizes) <= 4 + 5 * np.log2(largest / 256)


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (64, [64]), (100, [64, 100]), (256, [64, 128, 256])])
def test_the_last_size_is_the_limit(largest: int, sizes: list[int]) -> None:
    assert prompt_buckets(largest) == sizes


def test_sizes_on_cpus_are_powers_of_two() -> None:
    sizes = buckets(sparse=False, has_rooms=False)
    assert (sizes.prefill, sizes.scored, sizes.prefixed) == ([32, 64, 128, 256, 512], [32, 128, 512], [])
    assert sizes.prompts == [PromptSize(tokens, None) for tokens in sizes.prefill]


def test_few_programs_have_room_for_hidden_prefixes_and_one_of_them_holds_any_step() -> None:
    every = PromptSize(512, None)
    assert buckets().prefixed == [
        PromptSize(64, None), PromptSize(256, 8192), PromptSize(512, 8192), PromptSize(512, 32_768), every,
    ]  # fmt: skip
    assert buckets(few_tokens=0).prefixed[0] == PromptSize(64, 8192)
    assert buckets(context=100, few_tokens=0).prefixed[-2:] == [PromptSize(512, 8192), every]  # 64 rows of 256
    assert buckets(context=100, few_tokens=0, max_num_seqs=32).prefixed == [
        PromptSize(64, None), PromptSize(256, None), every,
    ]  # fmt: skip
    assert buckets(in_pieces=False).prefixed == [PromptSize(64, None), PromptSize(256, None), every]
    assert buckets(tokens=64).prefixed == [PromptSize(64, None)]


@pytest.mark.parametrize(
    ("prefixes", "size"),
    [
        ([0], (64, 0)),
        ([1], (64, 8192)),
        ([8192], (64, 8192)),  # exactly
        ([8192 - 256, 1], (64, 8192)),
        ([8192, 1], (512, 32_768)),  # one above
        ([2048] * 16, (512, 32_768)),
        ([2048] * 16 + [1], (512, None)),
    ],
)
def test_a_step_takes_the_program_that_holds_its_prefixes(prefixes: list[int], size: tuple[int, int | None]) -> None:
    assert room_of(buckets(few_tokens=0), prefixes, [HIDDEN] * len(prefixes)) == size


def test_prefixes_of_keys_and_values_take_no_room() -> None:
    sizes = buckets()
    assert room_of(sizes, [2000, 100], [KV, KV]) == (64, 0)
    assert room_of(sizes, [2000, 0], [KV, HIDDEN]) == (64, 0)
    assert room_of(sizes, [2000, 100], [KV, HIDDEN]) == (64, None)
    assert room_of(sizes, [2000, 100], [KV, HIDDEN], tokens=33) == (256, 8192)
    assert room_of(sizes, [2000, 0], [KV, HIDDEN], tokens=33) == (128, 0)
    assert room_of(sizes, [100], [HIDDEN], tokens=300) == (512, 8192)

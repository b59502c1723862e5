"""Layers that cache keys and values as one tensor: greedy tokens are those of two tensors without a cache, however
requests are batched, preempted and share prefixes."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

from apt_jax.config import CacheConfig
from apt_jax.errors import ConfigError
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.lab.reference_model import reference_generate_greedy
from apt_jax.models.config import AttentionShape
from apt_jax.models.params import ModelParams, abstract_params
from apt_jax.models.sharding import offers_hidden
from tests.support.generation import CONDITIONS, greedy
from tests.support.parallel_cases import MODELS, distinct_params

ONE = MODELS["gemma4"]
SHAPE = ONE.attention_of(1)
WIDE = dataclasses.replace(ONE, global_attention=dataclasses.replace(SHAPE, num_kv_heads=8))
"""Layers without a window cache more than the others."""
TWO = dataclasses.replace(ONE, global_attention=dataclasses.replace(SHAPE, turned_lanes=None))
CONFIGS = {"narrower": ONE, "wider": WIDE, "two tensors": TWO, "experts": MODELS["gemma4 experts"]}
RNG = np.random.default_rng(3)
SHARED = RNG.integers(3, 97, 24).tolist()
PROMPTS = [RNG.integers(3, 97, n).tolist() for n in (1, 5, 53, 18)]
PROMPTS += [SHARED + RNG.integers(3, 97, n).tolist() for n in (2, 9)]


@functools.cache
def model(name: str) -> tuple[ModelParams, list[list[int]]]:
    """The parameters, and what the model says to the prompts."""
    config = CONFIGS[name]
    params = distinct_params(config)
    return params, [reference_generate_greedy(params, prompt, 12, config) for prompt in PROMPTS]


@functools.cache
def executor(name: str, ops: str) -> JaxExecutor:
    cache = CacheConfig(block_size=8, num_blocks_override=120, enable_prefix_caching=True)
    found = JaxExecutor(
        model(name)[0], CONFIGS[name], cache=cache, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=96,
        attention=ops,
    )  # fmt: skip
    for sizes in (found.buckets.decode, found.buckets.prefill):
        del sizes[:-1]  # fewer programs to compile
    return found


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("ops", ["cpu", "xla"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_two_tensors_without_a_cache(name: str, ops: str, condition: str) -> None:
    """Two of the prompts share whole blocks, which the second finds in the cache."""
    assert greedy(executor(name, ops), PROMPTS, 12, "kv", condition) == model(name)[1]


def test_a_slot_holds_the_wider_of_both_shapes_and_the_hidden_kind_is_refused() -> None:
    assert (ONE.lane, WIDE.lane, TWO.lane) == (64, 8 * 20, 64)
    for config in (ONE, MODELS["gemma4 experts"]):
        leaves: list[Any] = jax.tree.leaves(abstract_params(config, "float32"))
        assert config.num_params == sum(math.prod(leaf.shape) for leaf in leaves)
    assert not ONE.supports_hidden
    with pytest.raises(ConfigError, match=r"cached as one tensor.*use --cache kv"):
        offers_hidden(ONE, CacheConfig(mode="hidden"), 1)


def test_shapes_that_do_not_fit_are_refused() -> None:
    for changed in ({"attention_scale": None}, {"value_norm": False}, {"qk_norm": None}):
        with pytest.raises(ConfigError, match="global_attention"):
            dataclasses.replace(ONE, **changed)
    with pytest.raises(ConfigError, match="global_attention"):
        dataclasses.replace(ONE, global_attention=AttentionShape(num_kv_heads=3, head_dim=16))


def test_single_slots_are_not_copied_to_host_memory() -> None:
    cache = CacheConfig(block_size=8, num_blocks_override=16, swap_space=1 / 1024)
    with pytest.raises(ConfigError, match="leave out --swap-space, or use --set share_blocks=false"):
        JaxExecutor(
            distinct_params(ONE), ONE, cache=cache, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32,
            attention="xla", both_ends=True,
        )  # fmt: skip

"""Layers with an attention window keep their blocks in groups of their own: tokens are those of a plain forward pass,
and no request holds more than its window."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from apt_jax.config import CacheConfig
from apt_jax.core.kinds import KV, CacheKindSpec, WindowSpec
from apt_jax.executor.calibrate import synthetic_batch
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.lab.reference_model import forward
from apt_jax.models.config import ModelConfig, RopeConfig
from apt_jax.models.params import dummy_params
from tests.support.cases import num_cases
from tests.support.paged_driver import few_programs
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy
from tests.support.served_model import Served

pytestmark = pytest.mark.seeds

WINDOW, BLOCK = 19, 4


def model(windowed: str) -> ModelConfig:
    """A model with a windowed layer for every ``w``."""
    return ModelConfig(
        family="test", vocab_size=97, hidden_size=48, num_layers=len(windowed), num_heads=4, num_kv_heads=2, head_dim=8,
        ffn_size=48, max_position=512, norm="rms", norm_bias=False, gated=True, activation="silu", position="rope",
        rope=RopeConfig(inv_freq=(1.0, 0.1, 0.01)), qkv_bias=False, out_bias=False, ffn_bias=False,
        layer_windows=tuple(WINDOW if layer == "w" else None for layer in windowed),
    )  # fmt: skip


@functools.cache
def parameters(windowed: str):
    params = dummy_params(model(windowed), "float32", 5)
    return dataclasses.replace(params, embed=params.embed * 20)


@functools.cache
def plain_pass(windowed: str):
    return jax.jit(lambda tokens: forward(parameters(windowed), tokens, model(windowed)))


def executor_of(windowed: str, num_blocks: int, **changes) -> JaxExecutor:
    return few_programs(
        JaxExecutor(
            parameters(windowed), model(windowed), cache=CacheConfig(block_size=BLOCK, num_blocks_override=num_blocks),
            max_num_seqs=4, max_num_batched_tokens=changes.pop("max_num_batched_tokens", 32), max_model_len=192, **changes,
        )
    )  # fmt: skip


def assert_most_likely(windowed: str, prompt: list[int], said: list[int]) -> None:
    """`said` is what a plain forward pass finds most likely after `prompt`, and nowhere is there a tie."""
    tokens = np.zeros(192, np.int32)
    tokens[: len(prompt) + len(said)] = [*prompt, *said]
    scores = np.asarray(plain_pass(windowed)(tokens))[len(prompt) - 1 :][: len(said)]
    top = np.sort(scores, axis=1)
    assert (top[:, -1] - top[:, -2] > 1e-3).all()  # no tie that rounding decides
    assert said == scores.argmax(axis=1).tolist()


def kinds_of(executor: JaxExecutor) -> tuple[CacheKindSpec, ...]:
    assert executor.plan.windows is not None
    return (
        CacheKindSpec(name="kv", blocks_per_group=2, windows=executor.plan.windows),
        CacheKindSpec(name="hidden", blocks_per_group=1, offered=False),
    )


def spec_of(served: Served) -> WindowSpec:
    windows = served.engine.cache.windows
    assert windows is not None
    return windows.spec


def converse(served: Served, windowed: str, seed: int = 3, turns: int = 3) -> None:
    """Turns of conversations that begin alike, all answered as by a plain forward pass."""
    rng = np.random.default_rng(seed)
    system = rng.integers(3, 97, 33).tolist()
    talks = [system + rng.integers(3, 97, n).tolist() for n in rng.integers(1, 60, 6)]
    for _ in range(turns):
        answers = served.serve(talks, 12)
        for talk, answer in zip(talks, answers, strict=True):
            assert_most_likely(windowed, talk, answer)
        talks = [
            [*talk, *answer, *rng.integers(3, 97, 5).tolist()] for talk, answer in zip(talks, answers, strict=True)
        ]


LEAST = {"wwgww": 2 * 36 + 2 * 6 * 8, "wg": 2 * 36 + 2 * 6 * 2, "gwwwg": 2 * 36 + 2 * 6 * 4}
"""Blocks that the longest request needs at once, by model."""


@pytest.mark.in_turn(3, group="executors with models")
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("windowed", LEAST)
def test_tokens_equal_a_plain_forward_pass_in_tight_pools(windowed, prefix_caching):
    executor = executor_of(windowed, LEAST[windowed] + 7)
    whims = RandomPlanPolicy(preempt=0.02, chunk=0.3, skip=0.1)
    for policy in ("fcfs", "apt", RandomPolicy(1, whims)):
        served = Served(executor, kinds_of(executor), policy, prefix_caching)
        converse(served, windowed)
        assert served.most_held <= 2 * spec_of(served).max_groups


@pytest.mark.slow
def test_random_conversations():
    whims = RandomPlanPolicy(preempt=0.05, chunk=0.5, skip=0.2, shuffle=0.2)
    executors = {windowed: executor_of(windowed, least + 20) for windowed, least in LEAST.items()}
    for seed in range(num_cases(3, 300)):
        windowed = list(LEAST)[seed % len(LEAST)]
        executor = executors[windowed]
        converse(Served(executor, kinds_of(executor), RandomPolicy(seed, whims)), windowed, seed)


def test_steps_of_a_calibration_are_finite():
    executor = executor_of("gwwwg", 90)
    for starts, lens in (([0, 0], [20, 7]), ([100, 3], [1, 1]), ([60, 12], [1, 30]), ([40], [32])):
        batch = synthetic_batch(executor, [KV] * len(starts), starts, lens)
        assert executor.execute(batch).result().finite.all()
    executor.check_integrity()


def test_found_prefixes_and_blocks_of_long_requests():
    """A later turn finds all of the turn before; a request holds its window alone."""
    windowed = "wwgww"
    executor = executor_of(windowed, 400)
    served = Served(executor, kinds_of(executor), "fcfs")
    prompt = np.random.default_rng(0).integers(3, 97, 120).tolist()
    answer = served.serve([prompt], 40)[0]
    assert_most_likely(windowed, prompt, answer)
    assert served.most_held == spec_of(served).max_groups
    again = [*prompt, *answer, 5, 6, 7]
    assert_most_likely(windowed, again, served.serve([again], 8)[0])
    assert served.found == (len(prompt) + len(answer) - 1) // BLOCK * BLOCK

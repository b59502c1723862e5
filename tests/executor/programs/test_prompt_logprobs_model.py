"""Log probabilities of prompts from the paged decoder against those of a plain forward pass."""

import dataclasses
import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.config import SLO, CacheConfig, SchedulerConfig
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.engine import Engine
from apt_jax.engine.stats import EngineStats
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.lab.reference_model import forward
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import ModelParams, dummy_params
from apt_jax.request import EngineRequest, PromptLogprobs, SamplingParams
from apt_jax.sched import Policy, make_policy
from apt_jax.utils.clock import WallClock
from tests.support.fake_grammars import FakeGrammar
from tests.support.parallel_cases import MODELS
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy

TOLERANCE = 2e-4
"""Absolute error of log probabilities, which reach -40 here."""


def weights(config: ModelConfig) -> ModelParams:
    params = dummy_params(config, "float32", 7)
    layers = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, params.layers)
    return dataclasses.replace(params, embed=params.embed * 8, layers=layers)


@functools.cache
def executor_of(name: str, *, mixed: bool = False, quantization=None) -> JaxExecutor:
    config = dataclasses.replace(MODELS[name], num_layers=1)
    executor = JaxExecutor(
        weights(config), config, cache=CacheConfig(block_size=4, num_blocks_override=60), max_num_seqs=4,
        max_num_batched_tokens=160, max_model_len=128, conversion=True, mixed=mixed, quantization=quantization,
    )  # fmt: skip
    executor.buckets.decode, executor.buckets.prefill = [4], [160]  # fewer programs to compile
    executor.buckets.masked, executor.buckets.conversions = [4], [2]
    executor._prompts.buckets = [160]
    return executor


def serve(
    executor: JaxExecutor,
    policy: Policy,
    prompts: list[np.ndarray],
    *,
    budget: int = 32,
    offered=(True, True),
    grammar=None,
) -> tuple[dict[str, PromptLogprobs], EngineStats]:
    """Serve all prompts at once, every second with log probabilities; the first with a constraint, if there is one."""
    kinds = [
        CacheKindSpec(name=name, blocks_per_group=n, offered=o)
        for name, n, o in zip(("kv", "hidden"), (2, 1), offered, strict=True)
    ]
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget)
    engine = Engine(executor, policy, WallClock(), kinds, scheduler, executor.cache_config, vocab_size=97, debug=True)
    for i, text in enumerate(prompts):
        params = SamplingParams(
            temperature=0.0, max_tokens=5, ignore_eos=True, prompt_logprobs=3 if i % 2 else None, logprobs=i or None
        )
        engine.add_request(EngineRequest(
            request_id=f"r{i}", prompt=None, prompt_token_ids=text, params=params, slo=SLO(), arrival_s=0.0,
            grammar=grammar if i == 0 else None,
        ))  # fmt: skip
    found: dict[str, PromptLogprobs] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason in (None, "length"), output.error
            if output.prompt_logprobs is not None:
                found[output.request_id] = output.prompt_logprobs
    assert engine.stats().used_blocks == 0
    return found, engine.stats()


def texts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 97, n).astype(np.int32) for n in lengths]


@functools.cache
def reference_logprobs(executor: JaxExecutor) -> Callable[[np.ndarray], np.ndarray]:
    """Log probabilities after each of 96 tokens, by the plain forward pass."""
    params = weights(executor.config)
    after = jax.jit(lambda tokens: jax.nn.log_softmax(forward(params, tokens, executor.config), axis=-1))
    return lambda tokens: np.asarray(after(jnp.asarray(tokens)))


def assert_close(executor: JaxExecutor, prompts: list[np.ndarray], found: dict[str, PromptLogprobs], tolerance: float):
    """Compare with one forward pass over each whole prompt."""
    assert set(found) == {f"r{i}" for i in range(len(prompts)) if i % 2}
    for name, scores in found.items():
        text = prompts[int(name[1:])]
        wanted = reference_logprobs(executor)(np.pad(text, (0, 96 - text.size)))[: text.size - 1]
        own = np.take_along_axis(wanted, text[1:, None], axis=1)[:, 0]
        np.testing.assert_allclose(scores.logprob, own, atol=tolerance)
        np.testing.assert_allclose(scores.top_logprobs, np.sort(wanted)[:, ::-1][:, :3], atol=tolerance)
        chosen = np.take_along_axis(wanted, scores.top_ids, axis=1)
        np.testing.assert_allclose(scores.top_logprobs, chosen, atol=tolerance)
        low, high = ((wanted > own[:, None] + d).sum(1) + 1 for d in (2 * tolerance, -2 * tolerance))
        assert ((low <= scores.rank) & (scores.rank <= high)).all()


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize("offered", [(True, False), (False, True)], ids=["kv", "hidden"])
@pytest.mark.parametrize("budget", [7, 160])
def test_chunks_and_kinds_give_those_of_a_forward_pass(offered, budget):
    executor, prompts = executor_of("llama"), texts(5, 90, 1, 61, 30, 2)
    found, stats = serve(executor, make_policy("fcfs"), prompts, budget=budget, offered=offered)
    assert_close(executor, prompts, found, TOLERANCE)
    assert stats.compilations == executor.programs.num_compiled()  # of the programs that all requests use


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("opt", "bloom", "neox", "qwen3", "olmo2"))],
)
def test_preempted_switched_and_converted_requests_lose_nothing(name):
    executor, prompts = executor_of(name), texts(9, 40, 3, 55, 12, 21)
    whims = RandomPlanPolicy(preempt=0.1, chunk=0.5, flip=0.3, convert=0.4)
    found, stats = serve(executor, RandomPolicy(2, whims), prompts, budget=24)
    assert_close(executor, prompts, found, TOLERANCE)
    assert stats.num_preemptions > 0


@pytest.mark.in_turn(10, group="executors with models")
def test_steps_with_masks_and_mixed_steps():
    executor, prompts = executor_of("llama", mixed=True), texts(9, 40, 3, 55)
    found, _ = serve(executor, make_policy("fcfs"), prompts, budget=24, grammar=FakeGrammar("any", 97))
    assert_close(executor, prompts, found, TOLERANCE)


@pytest.mark.slow
def test_integer_weights():
    executor, prompts = executor_of("llama", quantization="int8"), texts(3, 40)
    found, _ = serve(executor, make_policy("fcfs"), prompts)
    whole, _ = serve(executor, make_policy("fcfs"), prompts, budget=160)
    np.testing.assert_allclose(found["r1"].logprob, whole["r1"].logprob, atol=5e-3)
    assert_close(executor, prompts, found, 3.0)


def test_it_is_prepared_once_by_any_thread_and_then_compiles_nothing():
    executor = executor_of("llama")
    threads = [threading.Thread(target=executor.prepare_prompt_logprobs) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    programs = dict(executor.programs.executables)
    assert sorted(key[0] for key in programs) == ["forward_all", "pool_prompts", "score_prompts"]
    serve(executor, make_policy("fcfs"), texts(3, 40))
    assert executor.programs.executables == programs
    assert executor.programs.jitted["forward_all"]._cache_size() == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_prompt_of_100_000_tokens_takes_little_more_memory_than_one_of_4_000(tmp_path):
    def peak_mib(length: int) -> int:
        command = [sys.executable, "-m", "tests.support.long_prompt", str(tmp_path), str(length)]
        done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
        return int(done.stdout.split()[-1])

    short, long = peak_mib(4_000), peak_mib(100_000)
    print(f"{short} MiB, {long} MiB")
    assert long < short + 256

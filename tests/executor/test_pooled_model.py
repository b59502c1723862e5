"""Pooled states of prompts from the paged decoder against those of a plain forward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.config import SLO, CacheConfig, SchedulerConfig
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.engine import Engine
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.lab.reference_model import forward
from apt_jax.models.params import dummy_params
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import Policy, make_policy
from apt_jax.utils.clock import WallClock
from tests.support.parallel_cases import MODELS
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy


@functools.cache
def executor_of(name: str) -> JaxExecutor:
    config = dataclasses.replace(MODELS[name], num_layers=1)
    executor = JaxExecutor(
        dummy_params(config, "float32", 7), config, cache=CacheConfig(block_size=4, num_blocks_override=60),
        max_num_seqs=4, max_num_batched_tokens=160, max_model_len=128, conversion=True,
    )  # fmt: skip
    executor.buckets.decode, executor.buckets.prefill = [4], [160]  # fewer programs to compile
    executor.buckets.conversions = [2]
    executor._prompts.buckets = [160]
    return executor


def serve(executor: JaxExecutor, policy: Policy, prompts, *, budget=32, offered=(True, True)):
    """Serve all prompts at once: mean, last, none in turn."""
    kinds = [
        CacheKindSpec(name=name, blocks_per_group=n, offered=o)
        for name, n, o in zip(("kv", "hidden"), (2, 1), offered, strict=True)
    ]
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget)
    engine = Engine(executor, policy, WallClock(), kinds, scheduler, executor.cache_config, vocab_size=97, debug=True)
    for i, text in enumerate(prompts):
        params = SamplingParams(
            temperature=0.0, max_tokens=(1, 1, 5)[i % 3], ignore_eos=True, pooling=("mean", "last", None)[i % 3]
        )
        engine.add_request(EngineRequest(
            request_id=f"r{i}", prompt=None, prompt_token_ids=text, params=params, slo=SLO(), arrival_s=0.0,
        ))  # fmt: skip
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason in (None, "length"), output.error
            if output.pooled is not None:
                assert output.request_id not in found
                found[output.request_id] = output.pooled
    assert engine.stats().used_blocks == 0
    return found, engine.stats()


def assert_close(executor: JaxExecutor, prompts, found) -> None:
    # Logits of the plain forward pass under an output head that is the identity are its states after the final norm.
    assert set(found) == {f"r{i}" for i in range(len(prompts)) if i % 3 < 2}
    for name, pooled in found.items():
        text = prompts[int(name[1:])]
        states = np.asarray(states_of(executor)(jnp.asarray(np.pad(text, (0, 96 - text.size)))))[: text.size]
        wanted = states.mean(0) if int(name[1:]) % 3 == 0 else states[-1]
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(pooled, wanted, atol=1e-5)


@functools.cache
def states_of(executor: JaxExecutor):
    config = executor.config
    params = dummy_params(config, "float32", 7)
    assert not config.tie_embeddings
    eye = jnp.eye(config.hidden_size, dtype=jnp.float32)
    params = dataclasses.replace(params, head=eye)
    return jax.jit(lambda tokens: forward(params, tokens, config))


def texts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 97, n).astype(np.int32) for n in lengths]


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize("offered", [(True, False), (False, True)], ids=["kv", "hidden"])
@pytest.mark.parametrize("budget", [7, 160])
def test_chunks_and_kinds_give_those_of_a_forward_pass(offered, budget):
    executor, prompts = executor_of("llama"), texts(5, 61, 9, 90, 1, 30, 2)
    found, _ = serve(executor, make_policy("fcfs"), prompts, budget=budget, offered=offered)
    assert_close(executor, prompts, found)


def test_preempted_switched_and_converted_requests_count_no_state_twice():
    executor, prompts = executor_of("llama"), texts(40, 21, 9, 55, 30, 12, 3)
    whims = RandomPlanPolicy(preempt=0.1, chunk=0.5, flip=0.3, convert=0.4)
    found, stats = serve(executor, RandomPolicy(2, whims), prompts, budget=24)
    assert_close(executor, prompts, found)
    assert stats.num_preemptions > 0

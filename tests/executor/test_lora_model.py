"""Requests with LoRA adapters, several in a batch, by real models: each says what the model with merged weights says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.config import SLO, CacheConfig, HiddenAttention, SchedulerConfig
from apt_jax.engine import Engine
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.components import cache_kinds
from apt_jax.lab.reference_model import forward
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import ModelParams, dummy_params
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import Policy, make_policy
from apt_jax.utils.clock import WallClock
from tests.support.lora_adapters import merged, random_adapter
from tests.support.parallel_cases import MODELS
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy

FAMILIES: dict[str, ModelConfig] = {
    **{
        name: MODELS[name]
        for name in ("opt", "bloom", "neox", "llama", "llama grouped", "qwen3", "gemma2", "gemma3", "gemma4")
    },
    "latent": dataclasses.replace(MODELS["latent"], experts=None),
    "narrow inputs": dataclasses.replace(MODELS["llama"], hidden_size=48),
}
MAX_LEN, NUM_OUTPUTS = 64, 8


@functools.cache
def model_of(name: str) -> ModelParams:
    params = dummy_params(FAMILIES[name], "float32", 7)
    # Random tiny models say the same whatever was said before, unless their matrices are large.
    layers = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, params.layers)
    return dataclasses.replace(params, embed=params.embed * 8, head=params.head * 20, layers=layers)


@functools.cache
def adapters_of(name: str):
    """Adapters of all matrices, of another rank, of queries and values alone, of one layer's feed-forward alone."""
    config = FAMILIES[name]
    return (
        random_adapter(config, "all", 1),
        random_adapter(config, "wide", 2, rank=7, fields=("wk", "wv", "wo", "w_up")),
        random_adapter(config, "qv", 3, rank=2, fields=("wq", "wv"), size=1.0),
        random_adapter(config, "ffn", 4, fields=("w_up", "w_down"), layers=(1,), size=1.0),
    )


def executor_of(
    name: str, attention: HiddenAttention = "absorb", mode: str = "hybrid", ops: str | None = None
) -> JaxExecutor:
    return _made_executor(name, attention, mode, ops)  # positional, so that equal ones are one to the cache


@functools.cache
def _made_executor(name: str, attention: HiddenAttention, mode: str, ops: str | None) -> JaxExecutor:
    executor = JaxExecutor(
        model_of(name), FAMILIES[name],
        cache=CacheConfig(block_size=4, num_blocks_override=56, hidden_attention=attention, mode=mode),  # type: ignore[arg-type]
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=MAX_LEN, attention=ops, conversion=True,
        adapters=adapters_of(name),
    )  # fmt: skip
    executor.buckets.decode, executor.buckets.prefill = [4], [32]  # fewer programs to compile
    executor.buckets.masked, executor.buckets.conversions = [], [2, 3]
    return executor


def prompts() -> list[list[int]]:
    """Some begin alike: what one adapter has cached is there when another comes."""
    rng = np.random.default_rng(3)
    system = rng.integers(3, 97, 13).tolist()
    return [system + rng.integers(3, 97, n).tolist() for n in (1, 9, 9, 2, 17, 9)]


def asked(name: str) -> list[tuple[str | None, list[int]]]:
    """Every prompt by several adapters and by none."""
    names = [None, *(adapter.name for adapter in adapters_of(name))]
    return [(names[(i + j) % 5], prompt) for j in (0, 2, 3) for i, prompt in enumerate(prompts())]


@functools.cache
def expected(name: str) -> list[list[int]]:
    """By the plain forward pass of merged weights."""
    config = FAMILIES[name]
    run = jax.jit(functools.partial(forward, config=config))
    weights = {a.name: merged(model_of(name), a) for a in adapters_of(name)} | {None: model_of(name)}
    said = []
    for adapter, prompt in asked(name):
        tokens = list(prompt)
        for _ in range(NUM_OUTPUTS):
            padded = jnp.asarray(tokens + [0] * (MAX_LEN - len(tokens)), jnp.int32)
            tokens.append(int(jnp.argmax(run(weights[adapter], padded)[len(tokens) - 1])))
        said.append(tokens[len(prompt) :])
    return said


def serve(executor: JaxExecutor, name: str, policy: Policy, offered: tuple[bool, bool], *, caching: bool = True):
    """Outputs of requests of all adapters at once; and the engine's statistics."""
    executor.reset()
    offers = zip(cache_kinds(executor, None), offered, strict=True)
    kinds = [dataclasses.replace(kind, offered=is_offered) for kind, is_offered in offers]
    engine = Engine(
        executor, policy, WallClock(), kinds, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        dataclasses.replace(executor.cache_config, enable_prefix_caching=caching), vocab_size=97,
        debug=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for i, (adapter, prompt) in enumerate(asked(name)):
        answers[str(i)] = []
        engine.add_request(EngineRequest(
            request_id=str(i), prompt=None, prompt_token_ids=np.array(prompt, np.int32), params=params, slo=SLO(),
            arrival_s=engine.clock.now_s(), adapter=adapter,
        ))  # fmt: skip
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason in (None, "length"), output.error
            answers[output.request_id] += output.new_token_ids
    engine.check_integrity()
    return list(answers.values()), engine.stats()


def test_adapters_change_what_the_model_says():
    said = expected("opt")
    by_prompt: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for (_, prompt), answer in zip(asked("opt"), said, strict=True):
        by_prompt.setdefault(tuple(prompt), set()).add(tuple(answer))
    assert all(len(answers) == 3 for answers in by_prompt.values())


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "absorb") for name in ("opt", "llama", "gemma2")),
        ("narrow inputs", "reproject"),
        *(
            pytest.param(name, "absorb", marks=pytest.mark.slow)
            for name in ("bloom", "neox", "qwen3", "gemma3", "narrow inputs")
        ),
        *(pytest.param(name, "reproject", marks=pytest.mark.slow) for name in ("opt", "llama", "qwen3")),
    ],
)
def test_a_batch_says_what_merged_weights_say(name, attention):
    """Beside chunks, preemptions, kinds mixed, switched and converted, and prefixes found and copied."""
    executor = executor_of(name, attention)
    whims = RandomPlanPolicy(preempt=0.03, chunk=0.2, flip=0.3, convert=0.5)
    said, stats = serve(executor, name, RandomPolicy(1, whims), (True, True))
    assert said == expected(name)
    assert stats.num_conversions > 2
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize(
    ("name", "mode"), [("llama grouped", "kv"), ("gemma4", "kv"), ("opt", "hidden"), ("latent", "hidden")]
)
def test_one_kind_alone(name, mode):
    executor = executor_of(name, mode=mode)
    said, _ = serve(executor, name, make_policy("fcfs"), (mode == "kv", mode == "hidden"))
    assert said == expected(name)


@pytest.mark.in_turn(10, group="executors with models")
def test_without_our_kernels():
    executor = executor_of("llama grouped", mode="kv", ops="xla")
    assert serve(executor, "llama grouped", make_policy("fcfs"), (True, False))[0] == expected("llama grouped")


def test_a_prefix_of_one_adapter_is_no_hit_for_another():
    executor = executor_of("opt")
    _, stats = serve(executor, "opt", make_policy("fcfs"), (True, False))
    by_adapter: dict[str | None, list[list[int]]] = {}
    for adapter, prompt in asked("opt"):
        by_adapter.setdefault(adapter, []).append(prompt)
    most = 0
    for same in by_adapter.values():
        for i, prompt in enumerate(same):
            shared = [sum(1 for _ in _alike(prompt, other)) for other in same[:i]]
            most += max(shared, default=0)
    assert 0 < stats.prefix_cache_hits <= most


def _alike(a: list[int], b: list[int]):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def test_executors_without_adapters_are_as_before():
    config = FAMILIES["opt"]
    executor = JaxExecutor(
        model_of("opt"), config, cache=CacheConfig(num_blocks_override=16), max_num_seqs=2, max_num_batched_tokens=32,
        max_model_len=32,
    )  # fmt: skip
    assert executor.adapters == ()
    assert all(layer.adapters is None for layer in executor.params.layers)
    assert "adapters" not in executor.step_format.forward_layout(2, 0).zeros()[0]

"""The engine over each implementation of the kernels: greedy tokens are those of the XLA path, whatever the cache."""

import dataclasses

import jax
import pytest

from apt_jax.config import HiddenAttention
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.executor.compiling import buckets
from apt_jax.lab.reference_model import forward
from apt_jax.models.params import dummy_params
from tests.support.cases import cover
from tests.support.paged_driver import CONFIG, PARAMS, Driver, few_programs, make_executor, reference_greedy
from tests.support.parallel_cases import MODELS, distinct_params

ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)
FIRST = dataclasses.replace(PARAMS, layers=PARAMS.layers[:1])
CASES = [(ops, attention) for ops in ("triton-interpret", "tpu-interpret") for attention in ("reproject", "absorb")]


@jax.jit
def plain(tokens):
    return forward(FIRST, tokens, ONE_LAYER)


# The TPU's kernels do not reproject: XLA does there. Absorption by Triton's kernels differs from it in one op, which
# the test of the benchmarks' script takes from the same registry.
@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    ("ops", "attention"), cover(CASES, [("triton-interpret", "reproject"), ("tpu-interpret", "absorb")])
)
def test_tokens_equal_a_plain_forward_pass(ops: str, attention: HiddenAttention) -> None:
    """Both kinds side by side, a chunk over a cached prefix of either, decode steps of a mixture and of one kind."""
    prompts = {0: [5, 6, 7], 1: list(range(10, 41)), 2: list(range(60, 69))}
    kinds = {0: KV, 1: HIDDEN, 2: KV} if attention == "absorb" else {0: HIDDEN, 1: KV, 2: HIDDEN}
    driver = Driver(few_programs(make_executor(attention=attention, ops=ops, params=FIRST, config=ONE_LAYER)))
    for slot, prompt in prompts.items():
        driver.add(slot, prompt, kinds[slot])
    driver.step({0: 3, 1: 20, 2: 4})
    driver.step({1: 11, 2: 5})
    for _ in range(3):
        driver.step({0: 1, 1: 1, 2: 1})
    driver.step({1: 1})
    for slot, prompt in prompts.items():
        generated = len(driver.tokens[slot]) - len(prompt)
        assert driver.tokens[slot] == reference_greedy(prompt, generated, plain), slot


@pytest.mark.slow  # tests/executor has the same over XLA's ops, tests/pallas/test_triton_prefill.py the kernels
def test_tokens_are_the_same_with_room_for_any_hidden_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_PREFIX_ROOMS", (256, 512))
    executor = make_executor(attention="absorb", ops="triton-interpret", params=FIRST, config=ONE_LAYER, max_num_seqs=4)
    for sizes in (executor.buckets.decode, executor.buckets.masked):
        del sizes[:-1]
    assert [room for _, room in executor.buckets.prompts] == [0, 256, 512, None]
    driver = Driver(executor)
    prompts = {slot: list(range(10 + slot, 30 + slot)) for slot in range(4)}
    for slot, prompt in prompts.items():
        driver.add(slot, prompt, KV if slot == 3 else HIDDEN)
    driver.step(dict.fromkeys(prompts, 4))
    driver.step({0: 3, 3: 4})
    driver.step({0: 3, 1: 4})
    driver.step({0: 3, 1: 4, 2: 4})
    driver.step({0: 7, 1: 8, 2: 12, 3: 12})
    for slot, prompt in prompts.items():
        assert driver.tokens[slot] == reference_greedy(prompt, 1, plain), slot


@pytest.mark.slow
def test_tokens_with_windows_and_soft_caps_equal_a_plain_forward_pass() -> None:
    """A layer with a window and one without, requests of both kinds."""
    config = dataclasses.replace(CONFIG, layer_windows=(9, None), attention_softcap=2.0)
    plain = jax.jit(lambda tokens: forward(PARAMS, tokens, config))
    prompts = {0: [5, 6, 7], 1: list(range(10, 41)), 2: list(range(60, 69))}
    driver = Driver(few_programs(make_executor(attention="absorb", ops="triton-interpret", config=config)))
    for slot, prompt in prompts.items():
        driver.add(slot, prompt, HIDDEN if slot == 1 else KV)
    driver.step({0: 3, 1: 20, 2: 4})
    driver.step({1: 11, 2: 5})
    for _ in range(4):
        driver.step({0: 1, 1: 1, 2: 1})
    for slot, prompt in prompts.items():
        generated = len(driver.tokens[slot]) - len(prompt)
        assert driver.tokens[slot] == reference_greedy(prompt, generated, plain), slot


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    ("ops", "attention"), cover(CASES, [("triton-interpret", "absorb"), ("triton-interpret", "reproject")])
)
def test_tokens_of_latents_equal_a_plain_forward_pass(ops: str, attention: HiddenAttention) -> None:
    """The pool holds no keys: its slots are as wide as latents, and values are narrower than keys."""
    config = dataclasses.replace(MODELS["latent"], num_layers=1, experts=None)
    params = distinct_params(config)
    plain = jax.jit(lambda tokens: forward(params, tokens, config))
    executor = make_executor(attention=attention, ops=ops, params=params, config=config)
    assert executor.runner.pools[0].shape[2] == config.input_width
    driver = Driver(few_programs(executor))
    prompts = {0: [5, 6, 7], 1: list(range(10, 41))}
    for slot, prompt in prompts.items():
        driver.add(slot, prompt, HIDDEN)
    driver.step({0: 3, 1: 20})
    driver.step({0: 1, 1: 11})
    driver.step({0: 1, 1: 1})
    for slot, prompt in prompts.items():
        generated = len(driver.tokens[slot]) - len(prompt)
        assert driver.tokens[slot] == reference_greedy(prompt, generated, plain), slot


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["absorb", "reproject"])
def test_tokens_of_gemma_3_equal_a_plain_forward_pass(attention: HiddenAttention) -> None:
    """A rotary embedding of its own in the layer with a window; norms of keys whose scale is stored less one."""
    config = MODELS["gemma3"]
    params = dummy_params(config, "float32", 7)
    layers = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, params.layers)  # so that context counts
    params = dataclasses.replace(params, layers=layers)
    plain = jax.jit(lambda tokens: forward(params, tokens, config))
    prompts = {0: [5, 6, 7], 1: list(range(10, 41)), 2: list(range(60, 69))}
    executor = make_executor(attention=attention, ops="triton-interpret", params=params, config=config)
    driver = Driver(few_programs(executor))
    for slot, prompt in prompts.items():
        driver.add(slot, prompt, KV if slot == 2 else HIDDEN)
    driver.step({0: 3, 1: 20, 2: 4})
    driver.step({1: 11, 2: 5})
    for _ in range(4):
        driver.step({0: 1, 1: 1, 2: 1})
    for slot, prompt in prompts.items():
        generated = len(driver.tokens[slot]) - len(prompt)
        assert driver.tokens[slot] == reference_greedy(prompt, generated, plain), slot

"""The jitted steps against a plain forward pass: kinds, attention modes, chunks, batching, mixed steps, sampling."""

import dataclasses
import functools
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.backends import attention_ops
from apt_jax.config import CacheConfig, CacheMode, HiddenAttention
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import NO_TOKEN
from apt_jax.errors import ConfigError
from apt_jax.executor.calibrate import synthetic_batch
from apt_jax.executor.compiling import buckets as buckets_module
from apt_jax.executor.compiling.buckets import power_of_two_buckets
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.executor.programs.handles import DeviceStepHandle
from apt_jax.lab.reference_model import forward
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import ModelParams, dummy_params
from apt_jax.ops import sampling
from apt_jax.ops.backend import KernelBackend
from apt_jax.request import SamplingParams
from tests.support.cases import ALL
from tests.support.paged_driver import (
    CONFIG,
    GREEDY,
    PARAMS,
    Driver,
    draw_greedily,
    few_programs,
    make_executor,
    reference_greedy,
)

PROMPTS = {0: [5, 6, 7], 1: list(range(10, 47)), 2: [3], 3: list(range(60, 77))}

pytestmark = pytest.mark.seeds  # sizes of programs


GRAPHS = dataclasses.replace(attention_ops("cpu", "xla"), name="xla-graphs", branches=False)
"""Nothing branches on the device, decode steps are one program: what an executor does on GPUs."""


@pytest.fixture(scope="module", autouse=True)
def thresholds_by_a_loop() -> Generator[None]:
    """In `make test`, thresholds of top-k and top-p are found in a loop even where nothing else branches: unrolled, it
    takes longer to compile than the rest of the model. tests/ops/test_sampling.py has both."""
    threshold = sampling._largest_threshold
    with pytest.MonkeyPatch.context() as patch:
        if not ALL:
            patch.setattr(
                sampling,
                "_largest_threshold",
                lambda bits, weigh, wanted, unroll: threshold(bits, weigh, wanted, unroll=False),
            )
        yield


def only(*ids: int) -> np.ndarray:
    """A mask that allows these tokens."""
    bits = np.zeros(128, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    ("mixed", "ops", "attention"),
    [
        # What an executor takes by itself; without graphs, the layouts below have "reproject".
        (False, None, "absorb"),
        (True, GRAPHS, "absorb"),
        (True, GRAPHS, "reproject"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (False, None, "reproject"),
                (True, None, "absorb"),
                (True, None, "reproject"),
                (False, GRAPHS, "absorb"),
                (False, GRAPHS, "reproject"),
            )
        ),
    ],
)
def test_tokens_equal_a_plain_forward_pass(attention: HiddenAttention, mixed: bool, ops: KernelBackend | None) -> None:
    """Both kinds side by side, chunked prompts over a cached prefix, decodes beside chunks, tokens fed on the
    device."""
    driver = Driver(executor_of_four(ops, mixed=mixed, attention=attention))
    for kind_of in ({0: KV, 1: HIDDEN, 2: HIDDEN, 3: KV}, {0: HIDDEN, 1: KV, 2: KV, 3: HIDDEN}):
        for slot, prompt in PROMPTS.items():
            driver.add(slot, prompt, kind_of[slot])
        driver.step({0: 3, 1: 20, 2: 1})
        driver.step({0: 1, 1: 10, 2: 1, 3: 5})
        driver.step({0: 1, 1: 7, 2: 1, 3: 12})
        for i in range(12):
            driver.step({0: 1, 1: 1, 2: 1, 3: 1}, on_device=i % 2 == 0)
        for slot, prompt in PROMPTS.items():
            assert driver.tokens[slot] == reference_greedy(prompt, len(driver.tokens[slot]) - len(prompt)), slot


def plain_pass(params: ModelParams, tokens: list[int], config: ModelConfig) -> np.ndarray:
    """Logits of every position."""
    return np.asarray(jax.jit(lambda tokens: forward(params, tokens, config))(np.array(tokens, np.int32)))


LAYOUTS = {
    "350m": {"norm_placement": "post", "final_norm": False, "embedding_size": 16},
    "projected pre-norm": {"embedding_size": 48},
    "no bias": {"qkv_bias": False, "out_bias": False, "ffn_bias": False},
    "untied": {"tie_embeddings": False},
    "one head": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 32},
}


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize(
    ("layout", "attention"),
    [
        *((layout, "absorb") for layout in LAYOUTS),
        # The other layouts are alike where the kinds differ.
        *((layout, "reproject") for layout in ("no bias", "one head")),
        *(
            pytest.param(layout, "reproject", marks=pytest.mark.slow)
            for layout in ("350m", "projected pre-norm", "untied")
        ),
    ],
)
def test_log_probabilities_of_every_layout_are_those_of_the_plain_pass(layout: str, attention: HiddenAttention) -> None:
    """float32, within 1e-4, both kinds, for a whole prompt, a chunk over a cached prefix, and a decode step."""
    config = dataclasses.replace(CONFIG, **LAYOUTS[layout])
    params = dummy_params(config, "float32", 3)
    params = dataclasses.replace(params, embed=params.embed * 10)
    tokens = PROMPTS[1]
    expected = np.asarray(plain_pass(params, tokens, config)[-1], np.float64)
    expected -= np.log(np.exp(expected).sum())
    driver = Driver(few_programs(make_executor(attention=attention, params=params, config=config, max_num_seqs=4)))
    wanted = SamplingParams(temperature=0.0, logprobs=20)
    for kind in (KV, HIDDEN):
        for cut in (0, len(tokens) // 2, len(tokens) - 1):
            driver.add(0, tokens, kind)
            if cut:
                driver.step({0: cut}, wanted)
            result = driver.step({0: len(tokens) - cut}, wanted)
            assert result.top_logprobs is not None
            assert result.top_ids is not None
            np.testing.assert_allclose(result.top_logprobs[0], expected[result.top_ids[0]], atol=1e-4)


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize("mode", ["kv", "hidden"])
def test_executors_of_one_kind(mode: CacheMode) -> None:
    driver = Driver(few_programs(make_executor(mode)))
    kind = KV if mode == "kv" else HIDDEN
    for slot, prompt in PROMPTS.items():
        driver.add(slot, prompt, kind)
    driver.step({s: len(p) for s, p in PROMPTS.items()})
    for _ in range(5):
        driver.step(dict.fromkeys(PROMPTS, 1))
    for slot, prompt in PROMPTS.items():
        assert driver.tokens[slot] == reference_greedy(prompt, 6)


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_16_bit_log_probabilities_stay_near_float32(dtype: str) -> None:
    """One prefill and one decode step of each kind: log probabilities within 0.05 (bfloat16) of the float32 model."""
    params = dummy_params(CONFIG, dtype, 7)
    exact = dummy_params(CONFIG, "float32", 7)
    expected = plain_pass(exact, PROMPTS[1][:30], CONFIG)[-1]
    expected = expected - np.log(np.exp(expected).sum())
    driver = Driver(few_programs(make_executor(params=params, max_num_seqs=4)))
    for slot, kind in ((0, KV), (1, HIDDEN)):
        driver.add(slot, PROMPTS[1][:30], kind)
    driver.step({0: 29, 1: 29})
    result = driver.step({0: 1, 1: 1}, SamplingParams(temperature=0.0, logprobs=5))
    assert result.top_logprobs is not None
    assert result.top_ids is not None
    for row in range(2):
        np.testing.assert_allclose(result.top_logprobs[row], expected[result.top_ids[row]], atol=0.05)


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize(
    ("mode", "ops", "mixed", "slots", "all_sizes"),
    [
        ("hybrid", None, False, 2, True),
        ("kv", GRAPHS, True, 2, False),
        pytest.param("hybrid", None, True, 4, True, marks=pytest.mark.slow),
        pytest.param("hybrid", None, True, 8, True, marks=pytest.mark.slow),
        pytest.param("kv", GRAPHS, True, 2, True, marks=pytest.mark.slow),
    ],
)
def test_Q8_serving_after_warm_up_compiles_nothing(
    mode: CacheMode,
    ops: KernelBackend | None,
    mixed: bool,
    slots: int,
    all_sizes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw_greedily(monkeypatch)  # which programs there are does not depend on how they draw
    executor = make_executor(mode, mixed=mixed, ops=ops, max_num_seqs=slots)
    if not all_sizes:
        few_programs(executor)
    seen = []
    executor.warm_up(lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(seen[-1][1] + 1))
    assert executor.compilations == 0
    driver = Driver(executor)
    rng = np.random.default_rng(0)
    for slot in range(slots):
        kind = int(rng.integers(2)) if mode == "hybrid" else KV
        driver.add(slot, list(rng.integers(3, 97, int(rng.integers(1, 40)))), kind)
    variants = [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=5, top_p=0.9, min_p=0.01),
        SamplingParams(repetition_penalty=1.2, logprobs=3, seed=2),
    ]
    for i in range(30):
        counts, budget = {}, 64
        for slot in rng.permutation(slots)[: rng.integers(1, slots + 1)]:
            left = len(driver.tokens[slot]) - driver.cached[slot]
            n = min(budget, int(rng.integers(1, left + 1)))
            if n and driver.cached[slot] + n < 90:
                counts[int(slot)] = n
                budget -= n
        if counts:
            ends = [s for s, n in counts.items() if driver.cached[s] + n == len(driver.tokens[s])]
            masks = {s: only(*range(10, 60)) for s in ends[: i % 3]}
            driver.step(counts, variants[i % 4], masks=masks)
            assert all(10 <= driver.tokens[s][-1] < 60 for s in masks)
    assert executor.compilations == 0


@pytest.mark.in_turn(10, group="executors with models")
def test_prompts_with_hidden_prefixes_compile_nothing_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each room for prefixes is taken, beside decode rows and without; tokens are those of a plain forward pass."""
    draw_greedily(monkeypatch)
    monkeypatch.setattr(buckets_module, "_PREFIX_ROOMS", (256, 512))
    executor = make_executor("hybrid", "absorb", mixed=True, ops=GRAPHS, max_num_seqs=4)
    buckets = executor.buckets
    for sizes in (buckets.decode, buckets.masked, buckets.prefill):
        del sizes[:-1]
    assert [room for _, room in buckets.prompts] == [0, 256, 512, None]
    executor.warm_up()
    taken, forward_call = [], executor.runner.forward_call

    def recorded(*args: Any) -> Any:
        taken.append((args[1] > 0, args[3], args[5]))
        return forward_call(*args)

    monkeypatch.setattr(executor.runner, "forward_call", recorded)
    driver = Driver(executor)
    prompts = {slot: list(range(10 + slot, 30 + slot)) for slot in range(4)}
    for slot, prompt in prompts.items():
        driver.add(slot, prompt, KV if slot == 3 else HIDDEN)
    driver.step(dict.fromkeys(prompts, 4))  # no prefixes
    driver.step({0: 3, 3: 4})
    driver.step({0: 3, 1: 4})
    driver.step({0: 3, 1: 4, 2: 4})
    driver.step({0: 7, 3: 12})  # both end
    driver.step({0: 1, 1: 8, 3: 1})
    driver.step({0: 1, 2: 12, 1: 1})
    driver.step(dict.fromkeys(prompts, 1))
    driver.add(3, prompts[3], KV)
    driver.step({3: 19, 0: 1})
    assert executor.compilations == 0
    assert [room for _, _, room in taken[:5]] == [0, 256, 512, None, 256]
    assert {(beside, room) for beside, _, room in taken[5:]} >= {(True, 256)}
    for slot in (0, 1, 2):
        made = len(driver.tokens[slot]) - 20
        assert driver.tokens[slot] == reference_greedy(prompts[slot], made), slot


@functools.cache
def executor_of_a_broken_model() -> JaxExecutor:
    """Token 50 is embedded as NaN."""
    broken = dataclasses.replace(PARAMS, embed=PARAMS.embed.at[50].set(jnp.nan), head=PARAMS.embed)
    config = dataclasses.replace(CONFIG, tie_embeddings=False)
    return few_programs(make_executor(params=broken, config=config, max_num_seqs=4))


@pytest.mark.parametrize("kind", [KV, HIDDEN])
def test_M6_nan_stays_with_its_own_request(kind: int) -> None:
    """A request whose numbers break is flagged alone; neither its neighbour nor the next owner of its blocks sees
    NaN."""
    executor = executor_of_a_broken_model()
    executor.reset()
    driver = Driver(executor)
    driver.add(0, [5, 6, 7], kind)
    driver.add(1, [5, 50, 7, 9, 50], kind)
    with pytest.raises(AssertionError, match="not finite: \\[1\\]"):
        driver.step({0: 3, 1: 5})
    for prompt in ([5, 6, 7], list(range(10, 40))):
        driver.add(1, prompt, kind)
        driver.step({1: len(prompt)})
        for _ in range(3):
            driver.step({1: 1})
        assert driver.tokens[1] == reference_greedy(prompt, 4)


def test_buckets() -> None:
    assert power_of_two_buckets(1, 64, 16) == [1, 2, 4, 8, 16, 32, 64]
    assert power_of_two_buckets(1, 48, 16) == [1, 2, 4, 8, 16, 32, 48]
    assert power_of_two_buckets(1, 50, 16) == [1, 2, 4, 8, 16, 32, 64]
    assert power_of_two_buckets(1, 5, 16) == [1, 2, 4, 8]
    assert power_of_two_buckets(32, 100) == [32, 64, 100]


def test_a_model_that_is_too_short_for_max_model_len_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=512 exceeds"):
        JaxExecutor(
            PARAMS,
            CONFIG,
            cache=CacheConfig(),
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_model_len=512,
        )


def test_an_unknown_attention_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no attention implementation 'flash'.*known: .*'xla'.*"):
        make_executor(ops="flash")


def executor_of_four(
    ops: KernelBackend | None, mixed: bool | None = None, attention: HiddenAttention = "absorb"
) -> JaxExecutor:
    """Mixed steps, unless told otherwise, where nothing branches."""
    return _made_executor_of_four(ops, ops is not None if mixed is None else mixed, attention)


@functools.cache
def _made_executor_of_four(ops: KernelBackend | None, mixed: bool, attention: HiddenAttention) -> JaxExecutor:
    return few_programs(make_executor(attention=attention, mixed=mixed, ops=ops, max_num_seqs=4))


@pytest.mark.in_turn(10, group="executors with models")
def test_sampled_tokens_do_not_depend_on_how_steps_are_cut_into_programs() -> None:
    seeded = SamplingParams(seed=7, temperature=0.9, top_k=20, top_p=0.95)
    tokens = []
    for ops in (None, GRAPHS):
        driver = Driver(executor_of_four(ops))
        for slot, prompt in PROMPTS.items():
            driver.add(slot, prompt, HIDDEN if slot % 2 else KV)
        driver.step({0: 3, 1: 37, 2: 1, 3: 17}, seeded)
        for _ in range(4):
            driver.step({0: 1, 1: 1, 2: 1, 3: 1}, seeded)
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]


def settings() -> dict[str, SamplingParams]:
    return {
        "greedy": GREEDY,
        "drawn": SamplingParams(seed=3),
        "restricted": SamplingParams(seed=3, top_k=7, top_p=0.8, min_p=0.01),
        "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5),
        "bias": SamplingParams(seed=3, logit_bias={20: -100.0, 21: 5.0}),
        "min_tokens": SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(22, 23)),
        "logprobs": SamplingParams(temperature=0.0, logprobs=5),
    }


@pytest.fixture(scope="module", params=[None, GRAPHS], ids=["branches", "graphs"])
def four_slots(request: pytest.FixtureRequest) -> JaxExecutor:
    return executor_of_four(request.param)


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize("name", settings())
def test_R25_a_mask_goes_with_every_setting(name: str, four_slots: JaxExecutor) -> None:
    """Masked rows take allowed tokens only, and rows without a mask the same as in a step without masks."""
    params = settings()[name]
    streams = []
    for masked in (True, False):
        driver = Driver(four_slots)
        for slot, prompt in PROMPTS.items():
            driver.add(slot, prompt, HIDDEN if slot % 2 else KV)
        masks = {1: only(*range(20, 30)), 2: only(40, 96), 3: only(*range(97))} if masked else None
        driver.step({0: 3, 1: 37, 2: 1, 3: 17}, params, masks=masks)
        for i in range(5):
            result = driver.step({0: 1, 1: 1, 2: 1, 3: 1}, params, on_device=i % 2 == 0, masks=masks)
        streams.append({s: driver.tokens[s][len(p) :] for s, p in PROMPTS.items()})
        if params.logprobs is not None:
            assert result.top_logprobs is not None
            assert result.logprob is not None
            assert (result.logprob <= result.top_logprobs[:, 0] + 1e-6).all()  # of the model's own distribution
    assert set(streams[0][1]) <= set(range(20, 30))
    assert set(streams[0][2]) <= {40, 96}
    assert streams[0][0] == streams[1][0]
    assert streams[0][3] == streams[1][3]  # all tokens allowed: no mask
    if name == "bias":
        assert 20 not in streams[0][1]
    if name == "min_tokens":
        assert not {22, 23} & set(streams[0][1])


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, repetition_penalty=1.2)])
def test_R21_a_row_whose_mask_leaves_nothing_has_no_token(params: SamplingParams, four_slots: JaxExecutor) -> None:
    """Alone, and as something else than a row whose logits are not finite."""
    driver = Driver(four_slots)
    driver.add(0, [5, 6, 7], KV)
    driver.add(1, [5, 6, 7], HIDDEN)
    result = driver.step({0: 3, 1: 3}, params, masks={0: only(8), 1: only()})
    assert result.token_ids.tolist() == [8, NO_TOKEN]
    assert result.finite.all()


def test_M6_a_row_with_a_mask_whose_logits_are_not_finite_is_flagged() -> None:
    executor = executor_of_a_broken_model()
    executor.reset()
    driver = Driver(executor)
    driver.add(0, [5, 6, 7], KV)
    driver.add(1, [5, 7, 50], KV)
    with pytest.raises(AssertionError, match="not finite: \\[1\\]"):
        driver.step({0: 3, 1: 3}, masks={0: only(8), 1: only()})
    assert driver.tokens[0][-1] == 8


def test_tokens_beyond_a_narrow_mask_are_forbidden(four_slots: JaxExecutor) -> None:
    driver = Driver(four_slots)
    driver.add(0, [5, 6, 7], KV)
    driver.add(1, [5, 6, 7], HIDDEN)
    driver.step({0: 3, 1: 3}, masks={0: only(*range(97))[:1]})
    assert driver.tokens[0][-1] < 32


def test_a_step_that_waits_for_masks_has_no_result_before(
    four_slots: JaxExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(four_slots)
    driver.add(0, [5, 6, 7], KV)
    execute = driver.executor.execute

    def keep(batch):
        handle = execute(batch)
        with pytest.raises(RuntimeError, match="not sampled"):
            handle.result()
        return handle

    monkeypatch.setattr(four_slots, "execute", keep)
    driver.add(1, [5, 6, 7], HIDDEN)
    driver.step({0: 3, 1: 3}, masks={0: only(9)})
    assert driver.tokens[0][-1] == 9


def test_a_step_without_a_row_that_samples_ends_when_it_is_computed(four_slots: JaxExecutor) -> None:
    """Else a step beside it would end early, and the next late by as much."""
    whole = synthetic_batch(four_slots, [KV], [0], [6])
    handle = four_slots.execute(dataclasses.replace(whole, samples=np.zeros(1, np.bool_)))
    assert isinstance(handle, DeviceStepHandle)
    assert handle.states is not None
    waited = []
    handle.states = SimpleNamespace(block_until_ready=lambda: waited.append(True))  # pyright: ignore[reportAttributeAccessIssue]
    assert handle.result().token_ids.tolist() == [NO_TOKEN]
    assert waited == [True]


def test_copies_are_read_before_any_is_written_and_compile_nothing() -> None:
    executor = make_executor()
    rng = np.random.default_rng(0)
    before = [rng.standard_normal(np.shape(pool)).astype(np.float32) for pool in executor.runner.pools]
    executor.runner.pools = tuple(jnp.asarray(pool) for pool in before)
    executor.runner.copy_call(np.array([[1, 2], [2, 3], [5, 1]], np.int32), 8).run()
    for pool, old in zip(executor.runner.pools, before, strict=True):
        expected = old.copy()
        expected[[2, 3, 1]] = old[[1, 2, 5]]
        np.testing.assert_array_equal(np.asarray(pool), expected)

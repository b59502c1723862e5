"""Layer inputs narrower or wider than the keys of a token: how many a block holds, and that the tokens are the same."""

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apt_jax.backends import attention_ops
from apt_jax.cache import HybridCache
from apt_jax.config import CacheConfig, CacheMode, HiddenAttention
from apt_jax.core.kinds import HIDDEN, KV, CacheKindSpec
from apt_jax.errors import ConfigError
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.lab.reference_model import forward
from apt_jax.models.config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from apt_jax.models.families import PRESETS
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.models.params import dummy_params
from apt_jax.ops.backend import KernelBackend
from apt_jax.sched import Policy
from apt_jax.sched.request_table import RequestTable
from apt_jax.sched.view import SchedulerView
from tests.support.cases import cover, num_cases
from tests.support.paged_driver import Driver, few_programs
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy
from tests.support.served_model import Served

KINDS = (CacheKindSpec(name="kv", blocks_per_group=2), CacheKindSpec(name="hidden", blocks_per_group=1))

pytestmark = pytest.mark.seeds  # sizes of programs


def model(hidden_size: int, num_kv_heads: int, head_dim: int, rotary: bool) -> ModelConfig:
    return ModelConfig(
        family="test", vocab_size=97, hidden_size=hidden_size, num_layers=2, num_heads=4, num_kv_heads=num_kv_heads,
        head_dim=head_dim, ffn_size=48, max_position=2048, norm="rms", norm_bias=False, gated=True, activation="silu",
        position="rope" if rotary else "learned", rope=RopeConfig(inv_freq=(1.0, 0.1, 0.01)) if rotary else None,
        qkv_bias=False, out_bias=False, ffn_bias=False,
    )  # fmt: skip


MODELS = {
    "narrow": model(48, 4, 16, rotary=True),  # D / 2E = 0.375, as Gemma-7B
    "narrow, absorbed": model(40, 4, 16, rotary=False),
    "wide": model(56, 2, 16, rotary=True),  # 0.875, as Gemma-2-9B
    "wide, absorbed": model(40, 2, 16, rotary=False),
    "latent": dataclasses.replace(
        model(40, 4, 22, rotary=True), latent=LatentConfig(rank=20, value_dim=12, query_rank=18), residual_scale=0.7,
        logits_scale=1.5, experts=ExpertsConfig(
            num_experts=6, per_token=2, size=16, normalize=True, scoring="sigmoid", num_groups=3, groups_per_token=2, factor=1.8,
            dense_layers=(0,), shared_size=32, shared_gate=False,
        ),
    ),
}  # fmt: skip


@functools.cache
def parameters(name: str):
    params = dummy_params(MODELS[name], "float32", 5)
    return dataclasses.replace(params, embed=params.embed * 20)


@functools.cache
def plain_pass(name: str):
    """Logits of every position of as many tokens as a context holds, by a plain forward pass."""
    return jax.jit(lambda tokens: forward(parameters(name), tokens, MODELS[name]))


def executor_of(
    name: str,
    block_size: int = 16,
    num_blocks: int = 400,
    mode: CacheMode = "hybrid",
    attention: HiddenAttention = "auto",
    max_model_len: int = 128,
    ops: str | KernelBackend | None = None,
) -> JaxExecutor:
    return JaxExecutor(
        parameters(name), MODELS[name],
        cache=CacheConfig(block_size=block_size, num_blocks_override=num_blocks, mode=mode, hidden_attention=attention),
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=max_model_len, attention=ops,
    )  # fmt: skip


@functools.cache
def shared_executor(name: str, block_size: int, mode: CacheMode, attention: HiddenAttention) -> JaxExecutor:
    """For long contexts; tests reset it."""
    length = num_cases(384, 2048)
    return few_programs(executor_of(name, block_size, mode=mode, attention=attention, max_model_len=length))


def mode_of(name: str) -> CacheMode:
    """Both kinds, or the hidden one where a choice is not offered."""
    return "hybrid" if MODELS[name].offers_hybrid else "hidden"


# --- how many, and how many blocks -----------------------------------------------------------------------------------


@st.composite
def widths(draw: st.DrawFn) -> tuple[int, int, int]:
    """(C, E, D) with D < 2 E."""
    lane = draw(st.integers(1, 24))
    return draw(st.integers(1, 40)), lane, draw(st.integers(1, 2 * lane - 1))


@pytest.mark.seeds
@settings(max_examples=num_cases(60, 300), deadline=None)
@given(widths=widths(), tokens=st.integers(1, 200))
def test_blocks_of_a_request_are_those_of_laying_its_vectors_down_one_by_one(widths, tokens):
    block_size, lane, width = widths
    inputs = model(width, 1, lane, rotary=False).hidden_block_size(block_size)
    if not inputs:
        assert width > block_size * lane
        return

    def laid_down(size: int) -> tuple[int, int]:
        """Blocks that `tokens` vectors of `size` values take, and vectors of the first one; none is cut."""
        blocks, at, first = 1, 0, 0
        for _ in range(tokens):
            if at + size > block_size * lane:
                blocks, at = blocks + 1, 0
            at += size
            first += blocks == 1
        return blocks, first

    keys, hidden = laid_down(lane), laid_down(width)
    assert (min(tokens, block_size), min(tokens, inputs)) == (keys[1], hidden[1])
    cache = HybridCache(num_blocks=500, block_size=block_size, hidden_block_size=inputs, max_num_seqs=2)
    view = SchedulerView(
        now_s=0.0, table=RequestTable(1), waiting=np.zeros(0, np.int32), running=np.zeros(0, np.int32), free_blocks=500,
        total_blocks=500, block_size=block_size, hidden_block_size=inputs, kinds=KINDS, max_num_seqs=1,
        max_num_batched_tokens=1,
    )  # fmt: skip
    counts = np.array([tokens], np.int32)
    options = view.block_options(counts)[0].tolist()
    assert options == [2 * keys[0], hidden[0]]
    for kind in (KV, HIDDEN):
        assert cache.blocks_needed(tokens, kind) == options[kind]
        assert view.blocks_for(counts, kind).tolist() == [options[kind]]
    if width <= lane:
        assert options[HIDDEN] <= -(-tokens // block_size)  # what it takes with as many as keys
    if 2 * inputs > block_size:
        assert options[HIDDEN] <= options[KV]


@pytest.mark.parametrize(
    ("name", "block_size", "inputs"),
    [
        ("gemma-7b", 16, 21),
        ("gemma-7b", 24, 32),
        ("gemma-2-9b", 16, 9),
        ("gemma-2-9b", 14, 8),
        ("opt-13b", 16, 16),
        ("llama-2-7b", 16, 16),
        ("qwen3-0.6b", 16, 16),
    ],
)
def test_published_models(name, block_size, inputs):
    config = read_model_config(PRESETS[name])[1]
    assert config.hidden_block_size(block_size) == inputs
    in_pool = block_size / (2 * inputs)
    assert config.hidden_ratio <= in_pool <= 1.02 * config.hidden_ratio
    assert (in_pool == config.hidden_ratio) == (block_size * config.lane % config.hidden_size == 0)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_block_size_that_saves_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"block_size=4: such a block holds 2 .*--block-size"):
        executor_of("wide", block_size=4, mode="hidden")
    assert executor_of("wide", block_size=7, mode="hidden").hidden_block_size == 4  # 0.875


def test_hybrid_means_kv_where_less_than_half_is_saved():
    for name in MODELS:
        executor = executor_of(name)
        is_wide, is_latent = name.startswith("wide"), name == "latent"
        assert executor.kinds_offered == (not is_latent, not is_wide)
        assert (executor.hidden_block_size == 16) == (is_wide or is_latent)


@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_attention_that_cannot_do_it_is_refused(name):
    plain = dataclasses.replace(attention_ops("cpu", "xla"), name="plain", extras=frozenset())
    with pytest.raises(ConfigError, match=r"'plain' lacks .*input width.*xla"):
        executor_of(name, mode="hidden", ops=plain)
    assert executor_of(name, mode="hidden", ops="triton-interpret").attention_name == "triton-interpret"


# --- the executor ----------------------------------------------------------------------------------------------------


def assert_most_likely(name: str, prompt: list[int], said: list[int]) -> None:
    """`said` is what a plain forward pass finds most likely after `prompt`, and nowhere is there a tie."""
    tokens = np.zeros(128, np.int32)  # padded at the end, where causal attention does not look
    tokens[: len(prompt) + len(said)] = [*prompt, *said]
    scores = np.asarray(plain_pass(name)(tokens))[len(prompt) - 1 :][: len(said)]
    top = np.sort(scores, axis=1)
    assert (top[:, -1] - top[:, -2] > 1e-3).all()  # no tie that rounding decides
    assert said == scores.argmax(axis=1).tolist()


BLOCK_SIZES = dict(zip(MODELS, (16, 7, 14, 16, 5), strict=True))


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    ("name", "attention"),
    cover(
        itertools.product(MODELS, ("absorb", "reproject")),
        [
            *((name, "absorb") for name in MODELS),
            *((name, "reproject") for name in ("narrow", "wide, absorbed", "latent")),
        ],
    ),
)
def test_tokens_equal_a_plain_forward_pass(name, attention):
    """Prompts in chunks over a cached prefix, both kinds side by side where the model offers both."""
    config, block_size = MODELS[name], BLOCK_SIZES[name]
    executor = shared_executor(name, block_size, mode_of(name), attention)
    executor.reset()
    first = KV if executor.kinds_offered[KV] else HIDDEN
    assert executor.hidden_block_size == config.hidden_block_size(block_size)
    driver = Driver(executor)
    prompts = {0: list(range(5, 43)), 1: list(range(50, 88)), 2: [3, 4], 3: list(range(9, 30))}
    for slot, prompt in prompts.items():
        driver.add(slot, prompt, (first, HIDDEN, HIDDEN, HIDDEN)[slot])
        driver.table[slot] = driver.table[slot][:, : executor.step_format.table_len]
    driver.step({0: 10, 1: 11, 2: 1})
    driver.step({1: 10, 3: 21})
    driver.step({0: 12, 1: 16, 2: 1, 3: 1})
    driver.step({0: 15, 1: 1, 2: 1, 3: 1})
    driver.step({0: 1, 1: 1, 2: 1, 3: 1})
    for _ in range(20):
        driver.step({0: 1, 1: 1, 2: 1, 3: 1}, on_device=True)
    for slot, prompt in prompts.items():
        assert_most_likely(name, prompt, driver.tokens[slot][len(prompt) :])


# --- the engine ------------------------------------------------------------------------------------------------------


def kinds_of(name: str) -> tuple[CacheKindSpec, ...]:
    """The kinds, of which only `name` is offered, or both for hybrid."""
    return tuple(dataclasses.replace(kind, offered=name in (kind.name, "hybrid")) for kind in KINDS)


def converse(served: Served, name: str) -> None:
    """Three turns of six conversations that begin alike, all answered as by a plain forward pass."""
    rng = np.random.default_rng(3)
    system = rng.integers(3, 97, 33).tolist()
    talks = [system + rng.integers(3, 97, n).tolist() for n in (1, 9, 10, 2, 17, 24)]
    different = set()
    for _ in range(3):
        answers = served.serve(talks, 12)
        for talk, answer in zip(talks, answers, strict=True):
            assert_most_likely(name, talk, answer)
            different.add(tuple(answer))
        talks = [
            [*talk, *answer, *rng.integers(3, 97, 5).tolist()] for talk, answer in zip(talks, answers, strict=True)
        ]
    assert len(different) > 12  # the model says something


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize(
    ("name", "block_size"),
    [("narrow", 16), pytest.param("narrow", 6, marks=pytest.mark.slow), ("wide", 7), ("latent", 16)],
)
def test_engine_says_the_same_with_every_kind_in_tight_pools(name, block_size):
    """Preemptions for want of blocks and from outside, chunks, prefixes found and copied, kinds mixed and switched."""
    longest = 33 + 24 + 3 * 12 + 2 * 5
    least = 2 * -(-longest // block_size)
    tight = few_programs(executor_of(name, block_size, num_blocks=least + 2, mode=mode_of(name)))
    assert (tight.hidden_block_size == block_size) == (name == "latent")
    whims = RandomPlanPolicy(preempt=0.02, chunk=0.3, flip=0.7)
    cases: dict[str, tuple[str, Policy | str]] = {
        "hidden": ("hidden", "apt"),
        "hidden, random": ("hidden", RandomPolicy(1, whims)),
    }
    if tight.kinds_offered[KV]:
        cases |= {
            "kv": ("kv", "fcfs"),
            "hybrid": ("hybrid", "apt"),
            "hybrid, random": ("hybrid", RandomPolicy(1, whims)),
        }
    two_tensors = (
        few_programs(executor_of(name, block_size, num_blocks=least + 2, mode="kv")) if name == "latent" else tight
    )
    if name == "latent":
        cases["kv"] = ("kv", "fcfs")
    for case, (kind, policy) in cases.items():
        served = Served(two_tensors if kind == "kv" else tight, kinds_of(kind), policy, p_preempt=0.1)
        converse(served, name)
        stats = served.engine.stats()
        assert stats.num_preemptions > 0, case
        assert stats.prefix_cache_hits > 0, case
        assert kind == "hybrid" or served.kinds <= {-1, KV if kind == "kv" else HIDDEN}
        if case == "hybrid, random":
            assert served.kinds >= {KV, HIDDEN}
            assert sum(stats.kind_switches.values()) > 0


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize(
    ("name", "block_size", "exact"),
    [
        ("narrow", 16, False),
        ("wide", 14, True),
        ("latent", 7, True),
        pytest.param("narrow", 24, True, marks=pytest.mark.slow),
        pytest.param("wide", 16, False, marks=pytest.mark.slow),
    ],
)
def test_bytes_of_the_pool_that_a_token_takes(name, block_size, exact):
    """Counted in the arrays: blocks that a prompt that fills them wrote to, and values in them that are not zero."""
    config = MODELS[name]
    tokens = num_cases(math.lcm(block_size, config.hidden_block_size(block_size)), 2016)
    taken: list[int] = []
    modes: list[CacheMode] = ["hybrid"] * 2 if config.offers_hybrid else ["kv", "hidden"]
    values = config.num_kv_heads * config.value_dim
    for kind, width in ((KV, config.lane + values), (HIDDEN, config.input_width)):
        executor = shared_executor(name, block_size, modes[kind], "absorb")
        served = Served(executor, kinds_of(KINDS[kind].name), "fcfs", prefix_caching=False)
        served.serve([np.random.default_rng(0).integers(3, 97, tokens).tolist()], 1)
        pools = np.stack(executor.runner.pools)
        written = (pools != 0).any(axis=(2, 3))
        taken.append(int(written.sum()) * pools[0, 0].nbytes)
        assert taken[kind] == served.engine.cache.blocks_needed(tokens, kind) * executor.block_bytes
        assert np.count_nonzero(pools) == config.num_layers * tokens * width
    ratio = taken[HIDDEN] / taken[KV]
    assert ratio == pytest.approx(config.hidden_ratio, rel=1e-9 if exact else 0.02)
    inputs = config.hidden_block_size(block_size)
    assert exact == (inputs * config.input_width == block_size * config.pool_lane(kv=config.latent is None))

"""Layer inputs that become keys and values, computed by real models of every family."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from apt_jax.config import SLO, CacheConfig, HiddenAttention, SchedulerConfig
from apt_jax.core.kinds import HIDDEN, KV, CacheKindSpec
from apt_jax.core.step import Conversions, StepBatch
from apt_jax.engine import Engine
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import dummy_params
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import Policy, check_plan, make_policy
from apt_jax.utils.clock import WallClock
from tests.support.paged_driver import GREEDY, draw_greedily
from tests.support.parallel_cases import MODELS
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy

FAMILIES: dict[str, ModelConfig] = {
    **{name: MODELS[name] for name in ("opt", "bloom", "neox", "llama", "qwen3", "olmo2", "gemma2", "gemma3")},
    "opt post-norm": dataclasses.replace(MODELS["opt"], norm_placement="post"),
    "llama biases": dataclasses.replace(MODELS["llama"], qkv_bias=True),
    "narrow inputs": dataclasses.replace(MODELS["llama"], hidden_size=48),
}  # fmt: skip


HAVE_NOTHING_NEW = ("bloom", "llama", "qwen3", "opt post-norm", "llama biases")
"""Where keys come from layer inputs: these are past the norm, and biases, rotation and norms of keys are in others
too."""


def executor_of(
    name: str, attention: HiddenAttention = "absorb", dtype: str = "float32", ops: str | None = None
) -> JaxExecutor:
    return _made_executor(name, attention, dtype, ops)  # positional, so that equal ones are one to the cache


@functools.cache
def _made_executor(name: str, attention: HiddenAttention, dtype: str, ops: str | None) -> JaxExecutor:
    config = FAMILIES[name]
    params = dummy_params(config, dtype, 7)
    # Random tiny models say the same whatever was said before, unless their matrices are large.
    layers = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, params.layers)
    params = dataclasses.replace(params, embed=params.embed * 8, head=params.head * 20, layers=layers)
    executor = JaxExecutor(
        params, config, cache=CacheConfig(block_size=4, num_blocks_override=56, hidden_attention=attention),
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96, attention=ops, conversion=True,
    )  # fmt: skip
    executor.buckets.decode, executor.buckets.prefill = [4], [32]  # fewer programs to compile
    executor.buckets.masked, executor.buckets.conversions = [], [2, 3]
    return executor


# --- what is written -------------------------------------------------------------------------------------------------


def chunk(kind: int, tokens: list[int], start: int, table: np.ndarray, conversions: Conversions | None) -> StepBatch:
    """A step of one row."""
    return StepBatch(
        slots=np.zeros(1, np.int32),
        num_tokens=np.array([len(tokens)], np.int32),
        start=np.array([start], np.int32),
        kind=np.array([kind], np.int8),
        token_ids=np.array(tokens, np.int32),
        block_tables=table[None].astype(np.int32),
        samples=np.ones(1, np.bool_),
        position=np.zeros(1, np.int32),
        params=[GREEDY],
        history=[np.zeros(0, np.int32)],
        prompt_len=np.zeros(1, np.int32),
        conversions=conversions,
    )


def cached(executor: JaxExecutor, table: np.ndarray, num: int) -> np.ndarray:
    """(layers, 2, num, lane): keys and values of the first positions."""
    pools = np.stack([np.asarray(pool, np.float32) for pool in executor.runner.pools])
    blocks = pools[:, table]  # (layers, 2, J, block_size, lane)
    return blocks.reshape(*blocks.shape[:2], -1, executor.config.lane)[:, :, :num]


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(name, "float32", marks=pytest.mark.slow if name in HAVE_NOTHING_NEW else ())
            for name in FAMILIES
        ),
        ("opt", "bfloat16"),
        pytest.param("qwen3", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_converted_rows_hold_what_kv_rows_hold(name, dtype):
    """Positions within and at the end of blocks, in more blocks than one program takes."""
    executor = executor_of(name, dtype=dtype)
    per_block = executor.hidden_block_size
    text = np.random.default_rng(1).integers(3, 97, 33).tolist()
    blocks = 1 + np.random.default_rng(2).permutation(55)
    kv, hidden, new = blocks[:18].reshape(2, 9), blocks[18:27], blocks[27:45].reshape(2, 9)
    one_kind = np.stack([hidden, np.zeros(9, np.int64)])
    for start in (per_block, 23, 32):
        executor.reset()
        for kind, table in ((KV, kv), (HIDDEN, one_kind)):
            executor.execute(chunk(kind, text[:start], 0, table, None)).result()
        before = cached(executor, kv, start)
        inputs = hidden[None, : -(-start // per_block)].astype(np.int32)
        wanted = Conversions(rows=np.zeros(1, np.int64), inputs=inputs)
        tokens = [
            executor.execute(chunk(KV, text[start : start + 1], start, table, c)).result().token_ids.tolist()
            for table, c in ((kv, None), (new, wanted))
        ]
        after = cached(executor, new, start)
        scale = np.abs(before).max()
        assert scale > 0.1
        assert np.array_equal(cached(executor, kv, start), before)
        error = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(after, before, rtol=0, atol=error * scale)
        if dtype == "float32":
            assert tokens[0] == tokens[1]


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize("ops", ["xla"])
def test_other_attention_reads_what_was_converted(ops):
    name = "llama"
    executor = executor_of(name, "reproject", ops=ops)
    text = list(range(5, 28))
    blocks = 1 + np.arange(55)
    kv, hidden, new = blocks[:12].reshape(2, 6), blocks[12:18], blocks[18:30].reshape(2, 6)
    executor.execute(chunk(KV, text[:22], 0, kv, None)).result()
    executor.execute(chunk(HIDDEN, text[:22], 0, np.stack([hidden, 0 * hidden]), None)).result()
    wanted = Conversions(rows=np.zeros(1, np.int64), inputs=hidden[None].astype(np.int32))
    tokens = [
        executor.execute(chunk(KV, text[22:], 22, table, c)).result().token_ids.tolist()
        for table, c in ((kv, None), (new, wanted))
    ]
    assert tokens[0] == tokens[1]


# --- the engine ------------------------------------------------------------------------------------------------------


class Checked:
    """A policy whose plans are checked."""

    def __init__(self, inner: Policy) -> None:
        self.name, self._inner = inner.name, inner

    def schedule(self, view):
        plan = self._inner.schedule(view)
        check_plan(view, plan)
        return plan


def serve(executor: JaxExecutor, policy: Policy, offered: tuple[bool, bool], caching: bool, at_once: int = 4):
    """Two turns of five conversations that begin alike; all that was said, and the engine."""
    executor.reset()
    kinds = (
        CacheKindSpec(name="kv", blocks_per_group=2, offered=offered[KV]),
        CacheKindSpec(name="hidden", blocks_per_group=1, offered=offered[HIDDEN]),
    )
    engine = Engine(
        executor, Checked(policy), WallClock(), kinds,
        SchedulerConfig(max_num_seqs=at_once, max_num_batched_tokens=32),
        dataclasses.replace(executor.cache_config, enable_prefix_caching=caching), vocab_size=97, debug=True,
    )  # fmt: skip
    rng = np.random.default_rng(3)
    system = rng.integers(3, 97, 13).tolist()
    talks = [system + rng.integers(3, 97, n).tolist() for n in (1, 9, 10, 2, 17)]
    said: list[list[int]] = []
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for turn in range(2):
        answers: dict[str, list[int]] = {f"{turn}-{i}": [] for i in range(len(talks))}
        for name, talk in zip(answers, talks, strict=True):
            engine.add_request(EngineRequest(
                request_id=name, prompt=None, prompt_token_ids=np.array(talk, np.int32), params=params, slo=SLO(),
                arrival_s=engine.clock.now_s(),
            ))  # fmt: skip
        while engine.has_work:
            for output in engine.step():
                assert output.finish_reason in (None, "length"), output.error
                answers[output.request_id] += output.new_token_ids
        said += answers.values()
        talks = [[*talk, *a, 5, 7] for talk, a in zip(talks, answers.values(), strict=True)]
    engine.check_integrity()
    stats = engine.stats()
    assert stats.free_blocks == stats.total_blocks
    return said, stats


@functools.cache
def expected(name: str) -> list[list[int]]:
    """One after another, keys and values alone, nothing cached, nobody preempted."""
    said, stats = serve(executor_of(name), make_policy("fcfs"), (True, False), caching=False, at_once=1)
    assert stats.num_preemptions == 0
    assert len({tuple(answer) for answer in said}) > 7  # the model says something
    return said


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        # Post-norm: of random weights the same token whatever came before.
        *((name, "absorb") for name in ("opt", "gemma2", "narrow inputs")),
        ("narrow inputs", "reproject"),
        # What differs between the rest is above, without an engine.
        *(
            pytest.param(name, "absorb", marks=pytest.mark.slow)
            for name in ("bloom", "neox", "llama", "qwen3", "olmo2", "gemma3", "llama biases")
        ),
        *(pytest.param(name, "reproject", marks=pytest.mark.slow) for name in ("opt", "llama")),
    ],
)
def test_engine_says_the_same_with_conversions_at_random(name, attention):
    """Beside chunks, preemptions, kinds mixed and switched, and prefixes found and copied."""
    executor = executor_of(name, attention)
    whims = RandomPlanPolicy(preempt=0.03, chunk=0.2, flip=0.3, convert=0.5)
    said, stats = serve(executor, RandomPolicy(1, whims), (True, True), caching=True)
    assert said == expected(name)
    assert stats.num_conversions > 3
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.seeds
def test_nothing_is_compiled_while_it_serves(monkeypatch):
    draw_greedily(monkeypatch)
    executor = executor_of("opt")
    executor.warm_up()
    assert len([key for key in executor.programs.executables if key[0] == "convert"]) >= 2
    policy = RandomPolicy(0, RandomPlanPolicy(convert=0.7, preempt=0.02))
    _, stats = serve(executor, policy, (True, True), caching=True)
    assert stats.num_conversions > 3
    assert stats.compilations == executor.compilations == 0


@pytest.mark.parametrize(
    ("conversion", "mode", "can"),
    [(True, "hybrid", True), (True, "kv", False), (True, "hidden", False), (False, "hybrid", False)],
)
def test_programs_are_there_only_where_they_can_be_asked_for(conversion, mode, can):
    config = dataclasses.replace(FAMILIES["opt"], num_layers=1)
    executor = JaxExecutor(
        dummy_params(config, "float32", 7), config, cache=CacheConfig(num_blocks_override=16, mode=mode), max_num_seqs=1,
        max_num_batched_tokens=32, max_model_len=32, conversion=conversion,
    )  # fmt: skip
    assert executor.can_convert == can
    executor.buckets.decode, executor.buckets.prefill, executor.buckets.masked = [], [], []  # of the others none
    executor.warm_up()
    assert any(key[0] == "convert" for key in executor.programs.executables) == can

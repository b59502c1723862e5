"""Prefix caching over the real executor: greedy tokens of a model do not depend on it, and nothing is compiled for
it."""

import dataclasses
import functools

import numpy as np
import pytest

from apt_jax.config import CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.core.step import StepBatch
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import build_engine
from apt_jax.frontend.components import EngineComponents, build_components
from apt_jax.request import EngineRequest, SamplingParams
from tests.support.cases import num_cases
from tests.support.paged_driver import draw_greedily

pytestmark = pytest.mark.seeds  # draws


@functools.cache
def built(max_tokens: int, num_blocks: int = 400) -> EngineComponents:
    """An executor of steps of up to `max_tokens` tokens."""
    config = EngineConfig(
        model="tiny-opt",
        cache=CacheConfig(num_blocks_override=num_blocks),
        scheduler=SchedulerConfig(policy="fcfs", max_num_seqs=4, max_num_batched_tokens=max_tokens),
    )
    parts = build_engine(config, warm_up=False, calibrate=False)
    assert isinstance(parts.executor, JaxExecutor)
    buckets = parts.executor.buckets
    buckets.decode, buckets.masked = [4], []  # fewer programs to compile
    buckets.prefill = sorted({max_tokens, num_cases(max_tokens, 64)})
    with pytest.MonkeyPatch.context() as patch:
        draw_greedily(patch)
        parts.executor.warm_up()
    return parts


class Served:
    """A fresh engine over the one executor, with its steps."""

    def __init__(self, kind: str, prefix_caching: bool, policy: str = "fcfs", max_tokens: int = 256) -> None:
        parts = built(max_tokens)
        config = dataclasses.replace(
            parts.config,
            cache=dataclasses.replace(parts.config.cache, enable_prefix_caching=prefix_caching),
            scheduler=dataclasses.replace(parts.config.scheduler, policy=policy),
        )
        kinds = [dataclasses.replace(k, offered=kind in (k.name, "hybrid")) for k in parts.engine.kinds]
        self.parts = build_components(
            config,
            parts.executor,
            kinds=kinds,
            vocab_size=parts.limits.vocab_size,
            max_model_len=parts.limits.max_model_len,
            debug=True,
        )
        self.batches: list[StepBatch] = []
        self.tokens: dict[str, list[int]] = {}

    def serve(self, prompts: list[np.ndarray], max_tokens: int) -> list[list[int]]:
        """All at once; tokens in the order of the prompts."""
        engine = self.parts.engine
        names = [f"{len(self.tokens)}-{i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.tokens[name] = []
            engine.add_request(
                EngineRequest(
                    request_id=name,
                    prompt=None,
                    prompt_token_ids=prompt.astype(np.int32),
                    params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                    slo=self.parts.limits.default_slo,
                    arrival_s=engine.clock.now_s(),
                )
            )
        executor = engine.executor
        execute = executor.execute

        def noting(batch: StepBatch):
            self.batches.append(batch)
            return execute(batch)

        executor.execute = noting  # type: ignore[method-assign]
        try:
            while engine.has_work:
                for output in engine.step():
                    assert output.finish_reason in (None, "length"), output.error
                    self.tokens[output.request_id] += output.new_token_ids
        finally:
            executor.execute = execute  # type: ignore[method-assign]
        stats = engine.stats()
        assert (stats.used_blocks, stats.compilations) == (0, 0)
        return [self.tokens[name] for name in names]


def prompt(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(300, 4000, num)


def test_what_another_executor_compiles_is_not_counted() -> None:
    executor = built(256).executor
    assert isinstance(executor, JaxExecutor)
    before = executor.compilations
    built(64, num_blocks=40)  # a pool of another size: none of its programs are these
    assert executor.compilations == before == 0


@pytest.mark.parametrize("num", [248, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["kv", "hidden"])
def test_a_second_identical_prompt_computes_its_last_block_only(kind, num):
    without, served = (Served(kind, on, max_tokens=256 if num < 256 else 1024) for on in (False, True))
    first, second = (served.serve([prompt(num)], 6)[0] for _ in range(2))
    assert first == second == without.serve([prompt(num)], 6)[0]
    prefills = [b for b in served.batches if b.position[0] == 0 and b.start[0] < num]
    assert [(int(b.start[0]), int(b.num_tokens[0])) for b in prefills] == [(0, num), (num - 8, 8)]


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize("kind", ["kv", "hidden", "hybrid"])
def test_turns_of_conversations_are_answered_alike(kind):
    answers = []
    for on in (False, True):
        served = Served(kind, on, "apt" if kind == "hybrid" else "fcfs")
        system = prompt(48, 1)
        served.serve([system], 1)
        talks = [np.concatenate([system, prompt(n, n)]) for n in (1, 16, 37)] + [system]
        for turn in range(3):
            said = served.serve(talks, 9)
            answers.append(said)
            talks = [
                np.concatenate([talk, answer, prompt(5 + i, turn)])
                for i, (talk, answer) in enumerate(zip(talks, said, strict=True))
            ]
        stats = served.parts.engine.stats()
        copied = any(len(b.copies) for b in served.batches)
        assert (stats.prefix_cache_hits > 0) == copied == on
    assert answers[:3] == answers[3:]

"""The engine decides over a real model what it decides in the simulator, given the same times of steps."""

import dataclasses
from typing import cast

import numpy as np
import pytest

from apt_jax.config import CacheMode
from apt_jax.core.step import StepBatch
from apt_jax.costs.hardware import Hardware
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.lab.recording import (
    RecordingExecutor,
    Replay,
    Run,
    difference,
    run_recorded,
    run_replayed,
)
from apt_jax.sched import StepCosts, all_policies
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.workload import Workload
from apt_jax.utils.clock import VirtualClock
from tests.support.paged_driver import few_programs, make_executor

NUM_BLOCKS = 60
"""A pool in which a few requests fit: preemptions happen."""

HARDWARE = Hardware(
    name="here",
    model="tiny",
    num_devices=1,
    max_model_len=128,
    block_size=4,
    num_blocks=NUM_BLOCKS,
    hidden_blocks_per_group=1,
    costs={
        "absorb": StepCosts(
            prefill_base_s=1e-3,
            prefill_per_token_s=1e-5,
            decode_base_s=1e-3,
            decode_per_hidden_request_s=1e-5,
            decode_per_hidden_token_s=1e-6,
        )
    },
    basis={},
    source="a test",
)


KV_ALONE = ("apt", "apt-plus", "fcfs", "sarathi", "vllm-v1")
"""Policies that `make test` runs without the hidden kind too."""


@pytest.fixture(scope="module")
def executor() -> JaxExecutor:
    made = few_programs(make_executor("hybrid", num_blocks=NUM_BLOCKS))
    made.warm_up()
    return made


def workload(num: int = 14, seed: int = 0) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload(
        prompt_tokens=rng.integers(3, 40, num).astype(np.int32),
        output_tokens=rng.integers(4, 40, num).astype(np.int32),
        arrival_s=np.cumsum(rng.exponential(3e-3, num)),
        best_effort=np.zeros(num, np.bool_),
    )


def config_of(policy: str, cache: CacheMode) -> SimulationConfig:
    return SimulationConfig(policy=policy, cache=cache, seed=5, max_num_seqs=8, max_num_batched_tokens=64)


@pytest.mark.in_turn(5)
@pytest.mark.seeds
@pytest.mark.parametrize(
    ("policy", "cache"),
    [(policy, "hybrid") for policy in sorted(all_policies())]
    + [(policy, "kv") for policy in KV_ALONE]
    + [pytest.param(policy, "kv", marks=pytest.mark.slow) for policy in sorted(set(all_policies()) - set(KV_ALONE))],
)
def test_the_same_trace_and_times_give_the_same_decisions(executor: JaxExecutor, policy: str, cache: CacheMode) -> None:
    config, work = config_of(policy, cache), workload()
    real = run_recorded(config, HARDWARE, work, executor)
    assert all(m is not None and m.finished_s is not None for m in real.result.requests)
    lengths = [len(m.token_times_s) for m in real.result.requests if m is not None]
    assert lengths == work.output_tokens.tolist()
    assert min(real.durations_s) > 0
    assert executor.compilations == 0
    simulated = run_replayed(config, HARDWARE, work, real)
    assert difference(real, simulated) is None
    assert len(real.decisions) >= len(real.durations_s) > 50
    if policy in ("apt", "fcfs"):
        assert real.result.preemptions > 0
        assert simulated.result.preemptions == real.result.preemptions
        assert any(d.preempt for d in simulated.decisions)


def test_other_times_give_other_decisions_and_the_difference_is_told(executor: JaxExecutor) -> None:
    config, work = config_of("fcfs", "kv"), workload()
    real = run_recorded(config, HARDWARE, work, executor)
    slower = dataclasses.replace(real, durations_s=[3 * s for s in real.durations_s] * 2)
    with pytest.raises((AssertionError, RuntimeError), match="recorded"):
        run_replayed(config, HARDWARE, work, slower)
    told = difference(real, dataclasses.replace(real, decisions=real.decisions[:-1]))
    assert told is not None
    assert "iterations" in told
    changed = [*real.decisions]
    changed[3] = dataclasses.replace(changed[3], preempt=(99,))
    told = difference(real, dataclasses.replace(real, decisions=changed))
    assert told is not None
    assert told.startswith("iteration 3:")
    late = dataclasses.replace(real.result, requests=[None, *real.result.requests[1:]])
    told = difference(real, dataclasses.replace(real, result=late))
    assert told is not None
    assert told.startswith("request 0:")
    assert isinstance(real, Run)


def test_the_recorder_queues_steps_and_passes_the_rest_on(executor: JaxExecutor) -> None:
    ticks = iter([0.0, 2.0, 10.0, 13.0])
    clock = VirtualClock(1.0)

    class Inner:
        num_blocks, block_size, hidden_block_size, max_num_seqs, compilations = 7, 4, 4, 2, 3
        can_convert, adapters, lengths_only = True, (), False
        calls: list[str] = []  # noqa: RUF012 - a test

        def execute(self, batch: StepBatch):
            return self

        def result(self):
            return "tokens"

        def reset(self) -> None:
            self.calls.append("reset")

        def warm_up(self, progress=None) -> None:
            self.calls.append("warm_up")

    recorder = RecordingExecutor(Inner(), clock, lambda: next(ticks))  # type: ignore[arg-type]
    nothing = cast("StepBatch", None)
    first, second = recorder.execute(nothing), recorder.execute(nothing)
    assert clock.now_s() == 1.0
    assert first.result() == "tokens"
    assert clock.now_s() == 3.0
    second.result()
    assert clock.now_s() == 6.0
    assert (recorder.num_steps, recorder.busy_s) == (2, 5.0)
    recorder.reset()
    recorder.warm_up()
    assert Inner.calls == ["reset", "warm_up"]
    assert (recorder.num_blocks, recorder.compilations) == (7, 3)


def test_a_replay_gives_each_duration_once() -> None:
    replay = Replay([0.5, 0.25])
    nothing = cast("StepBatch", None)
    assert [replay(nothing), replay(nothing)] == [0.5, 0.25]
    with pytest.raises(AssertionError, match="more steps than the 2"):
        replay(nothing)

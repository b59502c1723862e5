"""InferMax Figs. 13 and 14 on the engine itself: the schedulers of Figs. 5 and 9, small, on this machine's CPU.

The paper runs its workloads on vLLM and an A100. Here the engine that serves computes a small model (`tiny-opt` with
its weights, or any named shape with random ones) on the CPU, every step timed on its own; the same workload is then
simulated with a cost model calibrated on the same executor. "Device" is the sum of the steps, "host" what else a run
takes (scheduling, accounting, commits), as the paper's GPU and non-GPU time. Latencies and rates are by device time
alone, as the paper's.

Sizes are scaled down: B = 32, C = 256, P = 32 for Sarathi, blocks of 16 tokens, M in tokens.
"""

import dataclasses
import functools
import math
import time
from typing import Any

import numpy as np

from apt_jax.config import SLO, CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.core.step import StepBatch
from apt_jax.costs.hardware import Hardware
from apt_jax.executor import Executor, StepHandle
from apt_jax.executor.calibrate import calibrate, describe
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import build_engine
from apt_jax.lab.recording import RecordingExecutor
from apt_jax.request import RequestMetrics
from apt_jax.sched import FcfsPolicy, Policy, UnifiedPolicy
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import SimulationResult, simulate
from apt_jax.sim.workload import Workload
from apt_jax.utils.clock import VirtualClock

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, CHUNK = 64, 256, 32
POOL_TOKENS = 4096
BLOCK_SIZE = 16


def policy_of(name: str) -> Policy:
    """The schedulers of Figs. 5 and 9 with C and P as above; `-ef` reserves whole lengths."""
    if name == "fcfs":
        return FcfsPolicy()
    reserve = "all" if name.endswith("-ef") else "input"
    if name == "fcfs-ef":
        return UnifiedPolicy(
            name,
            first="prefill",
            hybrid=False,
            chunked=False,
            prefill_tokens=MAX_NUM_BATCHED_TOKENS,
            reserve=reserve,
        )
    chunk = MAX_NUM_BATCHED_TOKENS if name.startswith("sarathi-pc") else CHUNK
    return UnifiedPolicy(name, prefill_tokens=chunk, reserve=reserve)


class _Part:
    """An executor with a smaller pool than it has."""

    def __init__(self, inner: Executor, num_blocks: int) -> None:
        self.inner, self.num_blocks = inner, num_blocks
        self.block_size, self.hidden_block_size = inner.block_size, inner.hidden_block_size
        self.max_num_seqs, self.can_convert = inner.max_num_seqs, inner.can_convert
        self.adapters, self.lengths_only = inner.adapters, inner.lengths_only

    def execute(self, batch: StepBatch) -> StepHandle:
        return self.inner.execute(batch)

    def reset(self) -> None:
        self.inner.reset()

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def prepare_prompt_logprobs(self) -> None:
        self.inner.prepare_prompt_logprobs()

    def warm_up(self, progress: Any = None) -> None:
        self.inner.warm_up(progress)

    @property
    def compilations(self) -> int:
        return self.inner.compilations


@functools.cache
def machine(model: str, seconds: float) -> tuple[JaxExecutor, Hardware, dict[str, float]]:
    """The executor, its calibration as a description, and how well that fits. Made once a process.

    Args:
        model: `tiny-opt`, or a named shape that gets random weights.
        seconds: of calibration.
    """
    config = EngineConfig(
        model=model,
        load_format="auto" if model == "tiny-opt" else "dummy",
        cache=CacheConfig(
            mode="kv",
            block_size=BLOCK_SIZE,
            num_blocks_override=2 * POOL_TOKENS // BLOCK_SIZE,
            enable_prefix_caching=False,
        ),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
        max_model_len=512,
    )
    parts = build_engine(config, calibrate=False)
    executor = parts.executor
    assert isinstance(executor, JaxExecutor)
    fitted = calibrate(executor, seconds)
    quality = {
        "prefill_r2": fitted.prefill_quality.r2,
        "decode_r2": fitted.decode_quality.r2,
        "prefill_error": fitted.prefill_quality.mean_relative_error,
        "decode_error": fitted.decode_quality.mean_relative_error,
    }
    return executor, describe(fitted, executor, parts.model_name), quality


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnEngine:
    """Equal requests, all there at the start, on the engine and in the simulator."""

    policy: str
    prompt: int
    output: int
    num_requests: int = 32
    capacity: int = 1024
    """M, tokens."""
    model: str = "tiny-opt"
    calibration_s: float = 20.0
    repeats: int = 1
    """The run with the least device time counts: what else a shared machine does only ever adds."""

    def run(self) -> dict[str, Any]:
        executor, hardware, _ = machine(self.model, self.calibration_s)
        num_blocks = 2 * (self.capacity // BLOCK_SIZE)
        hardware = dataclasses.replace(hardware, num_blocks=num_blocks)
        n = self.num_requests
        workload = Workload(
            prompt_tokens=np.full(n, self.prompt, np.int32),
            output_tokens=np.full(n, self.output, np.int32),
            arrival_s=np.zeros(n),
            best_effort=np.zeros(n, np.bool_),
        )
        config = SimulationConfig(
            model=self.model,
            policy="fcfs",
            cache="kv",
            slo=SLO(ttft_s=1e9, tbt_s=1e9),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            num_requests=n,
        )
        real, device_s, host_s = min(
            (self._serve(executor, hardware, config, workload) for _ in range(self.repeats)),
            key=lambda run: run[1],
        )
        simulated = simulate(config, hardware=hardware, workload=workload, policy=policy_of(self.policy))
        measured, predicted = _measure(real), _measure(simulated)
        return {
            **measured,
            "device_s": device_s,
            "host_s": host_s,
            "simulated_latency_s": predicted["latency_s"],
            "simulated_tokens_per_s": predicted["tokens_per_s"],
            "error": predicted["latency_s"] / measured["latency_s"] - 1,
        }

    def _serve(
        self,
        executor: JaxExecutor,
        hardware: Hardware,
        config: SimulationConfig,
        workload: Workload,
    ) -> tuple[SimulationResult, float, float]:
        """A run that computes, the time of its steps, and what else it took."""
        executor.reset()
        timed: list[RecordingExecutor] = []

        def record(clock: VirtualClock) -> RecordingExecutor:
            timed.append(RecordingExecutor(_Part(executor, hardware.num_blocks), clock))
            return timed[0]

        began_s = time.perf_counter()
        real = simulate(
            config,
            hardware=hardware,
            workload=workload,
            policy=policy_of(self.policy),
            executor=record,
        )
        wall_s = time.perf_counter() - began_s
        return real, timed[0].busy_s, wall_s - timed[0].busy_s


def _measure(result: SimulationResult) -> dict[str, Any]:
    ended: list[RequestMetrics] = [m for m in result.requests if m is not None and m.finished_s is not None]
    latency_s = max((m.finished_s or 0.0 for m in ended), default=math.nan)
    gaps_s = [
        (m.token_times_s[-1] - m.token_times_s[0]) / (len(m.token_times_s) - 1)
        for m in ended
        if len(m.token_times_s) > 1
    ]
    return {
        "num_completed": len(ended),
        "latency_s": latency_s,
        "tokens_per_s": sum(len(m.token_times_s) for m in ended) / latency_s,
        "ttft_s": float(np.mean([m.ttft_s or 0.0 for m in ended])),
        "tpot_s": float(np.mean(gaps_s)) if gaps_s else 0.0,
        "evictions": result.preemptions,
        "iterations": result.iterations,
    }

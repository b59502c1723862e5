"""How close is the simulator to the engine on this machine? Same decisions, predicted step times, and latencies side by
side.

    python -m benchmarks.scheduling.simulator_fidelity [--requests N] [--seconds S]

1. Calibrate tiny-opt on this machine (`apt_jax.executor.calibrate`), as a server does at its start.
2. Serve a trace with the engine as it serves: wall clock, the next step dispatched while one runs.
3. Serve it with every step timed on its own; replay the times in the simulator: every decision must be the same.
4. Simulate it with the calibrated cost model: predicted against measured time of every step of 3, and TTFT and TBT
   percentiles of all three.

Single steps of one shape (kinds, rows and tokens, rounded up to powers of two) take times that vary by more than any
model could explain; such steps are therefore also compared by their medians.
"""

import argparse
import collections
import csv
import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from apt_jax.config import SLO, CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.core.step import StepBatch
from apt_jax.costs.fit import CostModel
from apt_jax.costs.hardware import Hardware
from apt_jax.executor import Executor, StepHandle
from apt_jax.executor.calibrate import calibrate, describe
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import build_engine
from apt_jax.frontend.components import EngineComponents, with_policy
from apt_jax.frontend.progress import ProgressBars
from apt_jax.lab.recording import difference, run_recorded, run_replayed
from apt_jax.metrics import RequestRecord, Summary, summarize
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate
from apt_jax.sim.trace import draw_arrivals
from apt_jax.sim.workload import Workload
from apt_jax.utils.clock import WallClock

RESULTS = Path(__file__).resolve().parents[1] / "results" / "simulator-fidelity"


class Watched:
    """Passes steps on and keeps what was in them."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_blocks, self.block_size = inner.num_blocks, inner.block_size
        self.hidden_block_size, self.can_convert = inner.hidden_block_size, inner.can_convert
        self.max_num_seqs = inner.max_num_seqs
        self.adapters, self.lengths_only = inner.adapters, inner.lengths_only
        self.steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def execute(self, batch: StepBatch) -> StepHandle:
        self.steps.append((batch.num_tokens.copy(), batch.start.copy(), batch.kind.copy()))
        return self.inner.execute(batch)

    def reset(self) -> None:
        self.inner.reset()

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def prepare_prompt_logprobs(self) -> None:
        self.inner.prepare_prompt_logprobs()

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        self.inner.warm_up(progress)

    @property
    def compilations(self) -> int:
        return self.inner.compilations


def draw(num_requests: int, rate: float, max_len: int, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    prompt = np.clip(rng.lognormal(3.6, 0.7, num_requests), 4, max_len // 2).astype(np.int32)
    output = np.clip(rng.lognormal(3.4, 0.5, num_requests), 4, max_len // 3).astype(np.int32)
    return Workload(
        prompt_tokens=prompt,
        output_tokens=output,
        arrival_s=draw_arrivals(num_requests, rate, 1.0, rng),
        best_effort=np.zeros(num_requests, np.bool_),
    )


def serve(parts: EngineComponents, config: SimulationConfig, workload: Workload) -> Summary:
    """Serve in real time: what the requests saw."""
    engine, clock = with_policy(parts, config.policy, config.cache).engine, WallClock()
    begin_s, n = clock.now_s() + 0.1, workload.arrival_s.size
    records: list[RequestRecord] = []
    sent = 0
    while len(records) < n:
        while sent < n and begin_s + workload.arrival_s[sent] <= clock.now_s():
            length = int(workload.output_tokens[sent])
            params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
            engine.add_request(
                EngineRequest(
                    request_id=str(sent),
                    prompt=None,
                    prompt_token_ids=np.full(int(workload.prompt_tokens[sent]), 3, np.int32),
                    params=params,
                    slo=config.slo,
                    arrival_s=float(begin_s + workload.arrival_s[sent]),
                )
            )
            sent += 1
        if not engine.has_work:
            time.sleep(1e-4)
            continue
        for output in engine.step():
            if output.finish_reason is not None:
                records.append(RequestRecord.from_metrics(output.metrics, ok=True))
    return summarize(records)


def shape_of(step: tuple[np.ndarray, np.ndarray, np.ndarray]) -> tuple[int, ...]:
    num_tokens, start, kind = step

    def up(n: float) -> int:
        return 1 << max(int(np.ceil(np.log2(max(n, 1)))), 0)

    return up(kind.size), up(num_tokens.sum()), up((start + num_tokens).sum()), up(kind.sum())


def percentiles(s: Summary) -> list[float]:
    values = [s.ttft_s.p50, s.ttft_s.p90, s.ttft_s.p99, s.tbt_s.p50, s.tbt_s.p90, s.tbt_s.p99]
    return [1e3 * (v or 0.0) for v in values]


def calibrated(config: EngineConfig, seconds: float) -> tuple[EngineComponents, JaxExecutor, CostModel, Hardware]:
    """An engine that weighs this machine's costs, its executor, the costs, and what it is to the simulator.

    Args:
        config: the engine's.
        seconds: about how long the calibration may take.
    """
    bars = ProgressBars()
    parts = build_engine(config, calibrate=False, progress=bars)
    executor = parts.executor
    assert isinstance(executor, JaxExecutor)
    model = calibrate(executor, seconds, lambda done, total: bars("calibrating", done, total))
    bars.close()
    parts.engine.kinds = tuple(model.kinds(executor.kinds_offered, absorbs=executor.absorbs))
    parts.engine.costs = model.step_costs()
    return parts, executor, model, describe(model, executor, parts.model_name)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=6.0, help="requests/s")
    parser.add_argument("--seconds", type=float, default=30.0, help="for calibration")
    parser.add_argument("--policies", nargs="*", default=["fcfs", "apt", "sarathi", "apt-plus"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)

    config = EngineConfig(
        model="tiny-opt",
        # Prompts are synthetic and all alike: nothing may be found of them.
        cache=CacheConfig(num_blocks_override=160, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
    )
    parts, executor, model, hardware = calibrated(config, args.seconds)
    workload = draw(args.requests, args.rate, executor.max_model_len, seed=1)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.date.today()}")
    print(
        f"calibration, held back: prefill R² {model.prefill_quality.r2:.3f}, mean error "
        f"{100 * model.prefill_quality.mean_relative_error:.0f} %, worst {100 * model.prefill_quality.worst_relative_error:.0f} %; "
        f"decode R² {model.decode_quality.r2:.3f}, {100 * model.decode_quality.mean_relative_error:.0f} %, "
        f"{100 * model.decode_quality.worst_relative_error:.0f} %"
    )
    rows = []
    for policy in args.policies:
        run_config = SimulationConfig(
            policy=policy,
            cache="hybrid",
            slo=SLO(ttft_s=0.5, tbt_s=0.2),
            max_num_seqs=16,
            max_num_batched_tokens=256,
            num_requests=args.requests,
        )
        executor.reset()
        served = percentiles(serve(parts, run_config, workload))
        executor.reset()
        watched = Watched(executor)
        recorded = run_recorded(run_config, hardware, workload, watched)
        replayed = run_replayed(run_config, hardware, workload, recorded)
        parted = difference(recorded, replayed)
        simulated = simulate(run_config, hardware=hardware, workload=workload)

        measured = np.array(recorded.durations_s)
        predicted = np.array([model.programs.step_s(*step) for step in watched.steps])
        error = np.abs(predicted - measured) / measured
        groups = collections.defaultdict(list)
        for i, step in enumerate(watched.steps):
            groups[shape_of(step)].append(i)
        by_shape = [
            abs(np.median(predicted[g]) - np.median(measured[g])) / np.median(measured[g])
            for g in groups.values()
            if len(g) >= 5
        ]
        rows.append(
            [
                policy,
                "the same" if parted is None else parted[:60],
                len(recorded.decisions),
                *(f"{100 * v:.0f}" for v in (error.mean(), *np.percentile(error, [50, 90, 99]))),
                f"{100 * np.mean(by_shape):.0f}" if by_shape else "-",
                f"{100 * np.max(by_shape):.0f}" if by_shape else "-",
                *(f"{v:.0f}" for v in served),
                *(f"{v:.0f}" for v in percentiles(recorded.result.summary)),
                *(f"{v:.0f}" for v in percentiles(simulated.summary)),
            ]
        )
    header = ["policy", "decisions replayed", "iterations",
              "step error mean %", "p50 %", "p90 %", "p99 %", "by shape mean %", "by shape worst %",
              *(f"{what} {q} {side}" for side in ("served ms", "step by step ms", "simulated ms")
                for what in ("TTFT", "TBT") for q in ("p50", "p90", "p99"))]  # fmt: skip
    with (args.out / "fidelity.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    for i, name in enumerate(header):
        print(f"{name:24s}", *(f"{row[i]!s:>12}" for row in rows))


if __name__ == "__main__":
    main()

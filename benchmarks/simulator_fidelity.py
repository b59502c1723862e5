"""How close is the simulator to the engine on this machine? Same decisions, predicted step times, and latencies side by side.

    python -m benchmarks.simulator_fidelity [--requests N] [--seconds S]

1. Calibrate tiny-opt on this machine (`apt_jax.calibrate`), as a server does at its start.
2. Serve a trace with the real executor, steps timed; replay the times in the simulator: every decision must be the same.
3. Simulate the trace with the calibrated cost model instead: predicted against measured time of every step, and TTFT and TBT
   percentiles of both.

On a machine with other work the measured times vary by more than any model could explain: steps of one shape (kinds, rows and tokens,
rounded up to powers of two) are therefore also compared by their medians.
"""

import argparse
import collections
import csv
import datetime
import os
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np

from apt_jax.calibrate import calibrate
from apt_jax.config import SLO, CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.executor import Executor, StepBatch, StepHandle
from apt_jax.jax_executor import JaxExecutor
from apt_jax.llm import ProgressBars, build_engine
from apt_jax.sim.hardware import Hardware
from apt_jax.sim.record import difference, run_recorded, run_replayed
from apt_jax.sim.simulate import SimulationConfig, SimulationResult, Workload, simulate
from apt_jax.sim.trace import draw_arrivals

RESULTS = Path(__file__).resolve().parent / "results" / "simulator-fidelity"


class Watched:
    """Passes steps on and keeps what was in them."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_blocks, self.block_size = inner.num_blocks, inner.block_size
        self.max_num_seqs = inner.max_num_seqs
        self.steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def execute(self, batch: StepBatch) -> StepHandle:
        self.steps.append((batch.num_tokens.copy(), batch.start.copy(), batch.kind.copy()))
        return self.inner.execute(batch)

    def reset(self) -> None:
        self.inner.reset()

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


def shape_of(step: tuple[np.ndarray, np.ndarray, np.ndarray]) -> tuple[int, ...]:
    num_tokens, start, kind = step

    def up(n: float) -> int:
        return 1 << max(int(np.ceil(np.log2(max(n, 1)))), 0)

    return up(kind.size), up(num_tokens.sum()), up((start + num_tokens).sum()), up(kind.sum())


def percentiles(result: SimulationResult) -> list[float]:
    s = result.summary
    values = [s.ttft_s.p50, s.ttft_s.p90, s.ttft_s.p99, s.tbt_s.p50, s.tbt_s.p90, s.tbt_s.p99]
    return [1e3 * (v or 0.0) for v in values]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=6.0, help="requests/s")
    parser.add_argument("--seconds", type=float, default=30.0, help="for calibration")
    parser.add_argument("--policies", nargs="*", default=["fcfs", "apt"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    bars = ProgressBars()
    config = EngineConfig(
        model="tiny-opt",
        cache=CacheConfig(num_blocks_override=160),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
    )
    parts = build_engine(config, calibrate=False, progress=bars)
    executor = parts.executor
    assert isinstance(executor, JaxExecutor)
    model = calibrate(executor, args.seconds, lambda done, total: bars("calibrating", done, total))
    bars.close()
    costs = model.step_costs()
    hardware = Hardware(
        name="this-machine",
        model="tiny-opt",
        num_devices=1,
        max_model_len=executor.max_model_len,
        block_size=executor.block_size,
        num_blocks=executor.num_blocks,
        hidden_blocks_per_group=1,
        costs={"reproject": costs, "absorb": costs},
        basis={},
        source="calibration",
    )
    workload = draw(args.requests, args.rate, executor.max_model_len, seed=1)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.date.today()}"
    )
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
        watched = Watched(executor)
        recorded = run_recorded(run_config, hardware, workload, watched)
        replayed = run_replayed(run_config, hardware, workload, recorded)
        parted = difference(recorded, replayed)
        simulated = simulate(run_config, hardware=hardware, workload=workload)

        measured = np.array(recorded.durations_s)
        predicted = np.array([costs.step_s(*step) for step in watched.steps])
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
                *(f"{v:.0f}" for v in percentiles(recorded.result)),
                *(f"{v:.0f}" for v in percentiles(simulated)),
            ]
        )
    header = ["policy", "decisions replayed", "iterations",
              "step error mean %", "p50 %", "p90 %", "p99 %", "by shape mean %", "by shape worst %",
              *(f"{what} {q} {side}" for side in ("engine ms", "simulator ms")
                for what in ("TTFT", "TBT") for q in ("p50", "p90", "p99"))]  # fmt: skip
    with (args.out / "fidelity.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    for i, name in enumerate(header):
        print(f"{name:24s}", *(f"{row[i]!s:>12}" for row in rows))


if __name__ == "__main__":
    main()

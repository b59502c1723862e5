"""Stage `serve`: OPT-13B under five policies in real time, from a pool of 12 GB, beside the simulator.

Requests have ShareGPT's lengths and arrive at random at one rate after another, with objectives of 1 s to the first token
and 100 ms between tokens. Step costs are measured minutes before, on the same engine. Requests that are not done some
seconds after the last arrival count as failed, in the simulator as well. `points` are served less simulated attainment.
Last, the simulator's clock is driven by real steps, one by one: `predictions.csv` has measured and predicted times.
"""

import csv
import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apt_jax.config import SLO, CacheMode
from apt_jax.core.kinds import HIDDEN
from apt_jax.costs.fit import CostModel
from apt_jax.costs.hardware import Hardware
from apt_jax.errors import QueueFullError
from apt_jax.executor import calibrate
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.components import EngineComponents, build_components, with_policy
from apt_jax.lab.recording import run_recorded
from apt_jax.metrics import RequestRecord, Summary, summarize
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import save_hardware
from apt_jax.sim.simulator import simulate
from apt_jax.sim.workload import Workload
from benchmarks.gpu import whole_model
from benchmarks.gpu.harness import Stage, Table
from benchmarks.gpu.served_steps import TimedSteps, step_error_row

POOL_BYTES = 12e9
"""Part of the pool that serving uses: the memory that OPT-13B's weights leave on an A100 40 GB."""
POLICIES: tuple[tuple[str, CacheMode], ...] = (
    ("apt", "kv"), ("apt", "hybrid"), ("apt-plus", "hybrid"), ("fcfs", "kv"), ("sarathi", "kv"),
)  # fmt: skip
_DRAIN_S = 12.0
"""Time after the last arrival that requests have."""
_MAX_PREDICTIONS = 20_000
_CALIBRATION_S = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bench:
    """The engine under test and what all its runs share."""

    stage: Stage
    executor: JaxExecutor
    limited: Any
    """`TimedSteps` over `executor`."""
    parts: EngineComponents
    model: CostModel
    hardware: Hardware
    slo: SLO

    @property
    def longest(self) -> int:
        """Tokens that a request may have."""
        return min(self.executor.max_model_len, self.limited.num_blocks // 2 * self.executor.block_size)

    def configured(self, policy: str, cache: CacheMode, requests: int) -> SimulationConfig:
        return SimulationConfig(
            model=self.hardware.model, policy=policy, cache=cache, slo=self.slo, num_requests=requests,
            max_num_seqs=self.executor.max_num_seqs, max_num_batched_tokens=self.executor.max_num_batched_tokens,
            num_blocks=self.limited.num_blocks,
        )  # fmt: skip


def serve(stage: Stage) -> None:
    """At each rate: each policy served, then simulated; then steps one by one under apt-plus."""
    table = stage.table()
    rates = stage.settings.get("rates") or [16.0]
    count = 8 if stage.tiny else int(stage.settings.get("requests", 128))
    served = {f"served {policy} {cache} {rate:g}" for rate in rates for policy, cache in POLICIES}
    if served <= table.done and f"step by step apt-plus hybrid {rates[0]:g}" in table.done:
        return
    bench = _make_bench(stage, table)
    for rate in rates[:1] if stage.tiny else rates:
        workload = whole_model.sharegpt(count, rate, bench.longest, tiny=stage.tiny)
        needs_s = 0.0 if stage.tiny else count / rate + _DRAIN_S
        for policy, cache in POLICIES:
            case = f"{policy} {cache} {rate:g}"
            if stage.wanted(table, f"served {case}", needs_s=needs_s):
                work = functools.partial(_served, bench, policy, cache, workload)
                stage.run(table, f"served {case}", lambda work=work, rate=rate: {"rate": rate, **work()}, limit_s=120.0)
            if f"served {case}" in table.done and stage.wanted(table, f"simulated {case}"):
                there = next(row for row in table.rows() if row["case"] == f"served {case}")
                work = functools.partial(_simulated, bench, policy, cache, workload, there.get("attainment"))
                stage.run(table, f"simulated {case}", lambda work=work, rate=rate: {"rate": rate, **work()})
        case = f"step by step apt-plus hybrid {rate:g}"
        if rate == rates[0] and stage.wanted(table, case, needs_s=2 * needs_s):
            stage.run(
                table, case, functools.partial(_step_by_step, bench, "apt-plus", "hybrid", workload), limit_s=120.0
            )
    print(f"  {stage.num_skipped} not reached", flush=True)


def _make_bench(stage: Stage, table: Table) -> _Bench:
    """Build the engine, measure step costs, and describe the machine in `hardware.json`."""
    begin = time.perf_counter()
    name = whole_model.model_of(stage)
    config = whole_model.engine_config(
        name, stage.settings, tiny=stage.tiny, scheduling_policy="apt-plus",  # which wants programs of its own
        enable_prefix_caching=False,  # prompts are alike
    )  # fmt: skip
    parts = whole_model.build(whole_model.with_known_pool(config, stage), warm_up=True)
    executor: Any = parts.executor
    print(f"  ready after {time.perf_counter() - begin:.0f} s", flush=True)
    begin = time.perf_counter()
    # Kept beside the programs, so that the command that goes on with this stage need not measure again.
    directory = (stage.work or stage.out) / "calibrations"
    model = calibrate.load_or_calibrate(executor, 0.3 if stage.tiny else _CALIBRATION_S, directory=directory)
    hardware = calibrate.describe(model, executor, name)
    short = executor.device.device_kind.lower().removeprefix("nvidia ").replace(" ", "-")
    save_hardware(dataclasses.replace(hardware, name=short), stage.out / "hardware.json")
    for phase, quality in (("prompts", model.prefill_quality), ("decode", model.decode_quality)):
        again = " again" if f"calibration {phase}" in table.done else ""
        table.add(
            f"calibration {phase}{again}", r2=quality.r2, mean_relative_error=quality.mean_relative_error,
            worst_relative_error=quality.worst_relative_error, num_points=quality.num_points,
            seconds=time.perf_counter() - begin,
        )  # fmt: skip
        print(
            f"  calibration of {phase}: R2 {quality.r2:.3f}, mean error {100 * quality.mean_relative_error:.1f} %",
            flush=True,
        )
    limited: Any = TimedSteps(executor, None if stage.tiny else int(POOL_BYTES // executor.block_bytes))
    parts = build_components(
        config, limited, kinds=model.kinds(executor.kinds_offered, absorbs=executor.absorbs), vocab_size=parts.vocab_size,
        max_model_len=executor.max_model_len, costs=model.step_costs(),
    )  # fmt: skip
    slo = SLO(ttft_s=1.0, tbt_s=1.0 if stage.tiny else 0.1)
    return _Bench(stage=stage, executor=executor, limited=limited, parts=parts, model=model, hardware=hardware, slo=slo)


def _served(bench: _Bench, policy: str, cache: CacheMode, workload: Workload) -> dict[str, Any]:
    bench.executor.reset()
    bench.limited.clear()
    parts = with_policy(bench.parts, policy, cache)
    records, unfinished = _in_real_time(parts, bench.slo, workload)
    return {
        "side": "served", "policy": policy, "cache": cache, "requests": len(records), **_of(summarize(records)),
        "unfinished": unfinished, "iterations": len(bench.limited.steps), "compilations": bench.executor.compilations,
        **step_error_row(bench.limited, bench.model),
    }  # fmt: skip


def _in_real_time(parts: EngineComponents, slo: SLO, workload: Workload) -> tuple[list[RequestRecord], int]:
    """Serve, the next step dispatched while one runs; gives a record of each request, and how many were not done."""
    engine, clock = parts.engine, parts.clock
    begin_s, n = clock.now_s() + 0.05, workload.arrival_s.size
    ends_s = begin_s + float(workload.arrival_s[-1]) + _DRAIN_S
    records: list[RequestRecord] = []
    sent, open_requests = 0, {}
    while len(records) < n:
        while sent < n and begin_s + workload.arrival_s[sent] <= clock.now_s():
            request = EngineRequest(
                request_id=str(sent), prompt=None,
                prompt_token_ids=np.full(int(workload.prompt_tokens[sent]), 3, np.int32),
                params=SamplingParams(max_tokens=int(workload.output_tokens[sent]), temperature=0.0, ignore_eos=True),
                slo=slo, arrival_s=float(begin_s + workload.arrival_s[sent]),
            )  # fmt: skip
            try:
                engine.add_request(request)
                open_requests[request.request_id] = request
            except QueueFullError:
                records.append(RequestRecord(arrival_s=request.arrival_s, ok=False, slo=slo))
            sent += 1
        if not engine.has_work:
            time.sleep(1e-4)
            continue
        for output in engine.step():
            if output.finish_reason is not None:
                del open_requests[output.request.request_id]
                records.append(RequestRecord.from_metrics(output.metrics, ok=True))
        if clock.now_s() > ends_s:
            break
    late = [RequestRecord(arrival_s=request.arrival_s, ok=False, slo=slo) for request in open_requests.values()]
    return [*records, *late], len(late)


def _simulated(
    bench: _Bench, policy: str, cache: CacheMode, workload: Workload, served: float | None
) -> dict[str, Any]:
    """Simulate a run; `served` is the attainment that the engine had, None: it failed."""
    result = simulate(
        bench.configured(policy, cache, workload.arrival_s.size), hardware=bench.hardware, workload=workload,
        can_convert=bench.executor.can_convert,
    )  # fmt: skip
    ends_s = float(workload.arrival_s[-1]) + _DRAIN_S
    records = []
    for metrics, arrival_s in zip(result.requests, workload.arrival_s.tolist(), strict=True):
        if metrics is None or metrics.finished_s is None or metrics.finished_s > ends_s:
            records.append(RequestRecord(arrival_s=arrival_s, ok=False, slo=bench.slo))
        else:
            records.append(RequestRecord.from_metrics(metrics))
    found = _of(summarize(records))
    points = None if served is None else 100 * (served - found["attainment"])
    return {
        "side": "simulated", "policy": policy, "cache": cache, "requests": len(records), **found, "points": points,
        "iterations": result.iterations,
    }  # fmt: skip


def _step_by_step(bench: _Bench, policy: str, cache: CacheMode, workload: Workload) -> dict[str, Any]:
    bench.executor.reset()
    bench.limited.clear()
    recorded = run_recorded(
        bench.configured(policy, cache, workload.arrival_s.size), bench.hardware, workload, bench.limited
    )
    measured = np.array(recorded.durations_s)
    predicted = np.array([bench.model.programs.step_s(*step) for step in bench.limited.steps])
    error = np.abs(predicted - measured) / measured
    _write_predictions(bench.stage.out / "predictions.csv", bench.limited.steps, measured, predicted)
    quantiles = np.percentile(error, [50, 99])
    return {
        "side": "step by step", "policy": policy, "cache": cache, "requests": int(workload.arrival_s.size),
        **_of(recorded.result.summary), "iterations": len(measured), "step_error_mean": float(error.mean()),
        "step_error_p50": float(quantiles[0]), "step_error_p99": float(quantiles[1]),
    }  # fmt: skip


def _of(summary: Summary) -> dict[str, Any]:
    return {
        "attainment": summary.slo_attainment, "ttft_attainment": summary.ttft_attainment, "tbt_attainment": summary.tbt_attainment,
        "tokens_s": summary.tokens_per_s, "duration_s": summary.duration_s, "completed": summary.num_completed,
    } | {
        f"{what}_{q}_ms": 1e3 * (getattr(values, q) or 0.0)
        for what, values in (("ttft", summary.ttft_s), ("tbt", summary.tbt_s)) for q in ("p50", "p90", "p99")
    }  # fmt: skip


def _write_predictions(path: Path, steps: Sequence[Any], measured: Any, predicted: Any) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["rows", "tokens", "context", "hidden_rows", "measured_ms", "predicted_ms"])
        for (tokens, start, kind), took, guess in list(zip(steps, measured, predicted, strict=True))[:_MAX_PREDICTIONS]:
            sizes = (kind.size, tokens.sum(), (start + tokens).sum(), (kind == HIDDEN).sum())
            writer.writerow([*sizes, f"{1e3 * took:.4g}", f"{1e3 * guess:.4g}"])

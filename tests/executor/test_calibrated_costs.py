"""Calibrations of machines whose costs are known: how well they predict steps and attainment as served."""

from types import SimpleNamespace

import numpy as np
import pytest

from apt_jax.config import SLO
from apt_jax.executor import StepBatch
from apt_jax.executor.calibrate import (
    calibrate,
    describe,
)
from apt_jax.sched.costs.fit import CostModel, StepPoint, fit_cost_model
from apt_jax.sched.costs.programs import ProgramShapes
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate
from apt_jax.sim.trace import draw_arrivals, load_trace
from apt_jax.sim.workload import Workload
from tests.support.timed_executor import Accelerator, PrefixSize, Processor, TimedExecutor, opt_buckets

BUDGET_S, NOISE = 30.0, 0.05
PROMPTS = [64, 128, 256, 288, 336, 384, 448, 512, 576, 672, 768, 896, 1024, 1152, 1344, 1536, 1792, 2048]
ROWS = [1, 4, 16, 64, 128, 192]
PREFIXED = tuple(
    PrefixSize(*size) for size in ((64, 8192), (256, 8192), (1024, 8192), (2048, 8192), (2048, 32_768), (2048, None))
)
MACHINES = {
    "accelerator": Accelerator(buckets=opt_buckets(PROMPTS, ROWS)),
    "accelerator with programs for prefixes": Accelerator(buckets=opt_buckets(PROMPTS, ROWS), prefixed=PREFIXED),
    "accelerator with slow hidden prompts": Accelerator(buckets=opt_buckets(PROMPTS, ROWS), hidden_prompt_s=57e-3),
    "processor": Processor(
        buckets=opt_buckets([32, 64, 128, 256, 512, 1024, 2048], [1, 2, 4, 8, 16, 32, 64, 128, 256])
    ),
}


def calibrated(
    machine: Accelerator | Processor, monkeypatch: pytest.MonkeyPatch, budget_s: float = BUDGET_S
) -> tuple[CostModel, TimedExecutor, list[StepPoint]]:
    """What a calibration finds of a machine with noise, its executor, and the points."""
    executor, points = TimedExecutor(machine, noise=NOISE), list[StepPoint]()

    def fit(measured: list[StepPoint], shapes: ProgramShapes) -> CostModel:
        points.extend(measured)
        return fit_cost_model(measured, shapes)

    with monkeypatch.context() as patch:
        patch.setattr("apt_jax.executor.calibrate.time", SimpleNamespace(perf_counter=lambda: executor.now_s))
        patch.setattr("apt_jax.executor.calibrate.fit_cost_model", fit)
        return calibrate(executor.as_executor(), budget_s), executor, points


@pytest.fixture(scope="module", params=list(MACHINES))
def found(request: pytest.FixtureRequest) -> tuple[CostModel, TimedExecutor, list[StepPoint]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return calibrated(MACHINES[request.param], monkeypatch)


def workload_of(rate: float, count: int, seed: int = 0) -> Workload:
    """Lengths of ShareGPT and Poisson arrivals."""
    rng = np.random.default_rng(seed)
    trace = load_trace("sharegpt")
    fits = np.flatnonzero((trace.prompt_tokens + trace.output_tokens <= 2048) & (trace.prompt_tokens > 1))
    chosen = rng.choice(fits, count)
    return Workload(
        prompt_tokens=trace.prompt_tokens[chosen].astype(np.int32),
        output_tokens=trace.output_tokens[chosen].astype(np.int32),
        arrival_s=draw_arrivals(count, rate, 1.0, rng),
        best_effort=np.zeros(count, np.bool_),
    )


def true_s(machine: Accelerator | Processor, batch: StepBatch) -> float:
    """Seconds from one step to the next."""
    step_s = machine.step_s(batch.num_tokens, batch.start, batch.kind)
    return max(step_s, machine.host_s) if machine.platform == "gpu" else step_s + machine.host_s


def errors(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """R2 and mean relative error."""
    r2 = 1 - ((predicted - measured) ** 2).sum() / ((measured - measured.mean()) ** 2).sum()
    return float(r2), float(np.mean(np.abs(predicted - measured) / measured))


POLICIES = (("apt", "kv"), ("apt", "hybrid"), ("apt-plus", "hybrid"))


def test_steps_of_served_requests_are_predicted(found) -> None:
    """Steps that policies chose, on a machine that no longer makes noise."""
    model, executor, _ = found
    machine = executor.machine
    hardware = describe(model, executor.as_executor(), "opt-13b")
    for policy, cache in POLICIES:
        steps: list[tuple[bool, float, float]] = []

        def step_s(batch: StepBatch, steps: list[tuple[bool, float, float]] = steps) -> float:
            rows = batch.num_tokens, batch.start, batch.kind
            steps.append((int(batch.num_tokens.max()) > 1, true_s(machine, batch), model.programs.step_s(*rows)))
            return steps[-1][1]

        config = SimulationConfig(policy=policy, cache=cache, slo=SLO(ttft_s=1.0, tbt_s=0.2), num_blocks=2000)
        simulate(config, hardware=hardware, workload=workload_of(6.0, 60), step_s=step_s)
        for of_prompts in (True, False):
            chosen = np.array([step[1:] for step in steps if step[0] == of_prompts])
            r2, error = errors(chosen[:, 1], chosen[:, 0])
            print(policy, cache, of_prompts, r2, error)

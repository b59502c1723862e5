"""Rows that say how well a calibration predicts what was served."""

import dataclasses
from typing import cast

import numpy as np
import pytest

from apt_jax.config import SLO
from apt_jax.executor import Executor, StepBatch
from apt_jax.executor.calibrate import describe, synthetic_batch
from apt_jax.sched.costs.fit import CostModel, FitQuality
from apt_jax.sched.costs.model import StepCosts
from apt_jax.sched.costs.programs import ProgramCosts, ProgramShapes
from apt_jax.sched.request_table import KV
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate
from apt_jax.sim.workload import Workload
from benchmarks.gpu.simulated_twin import TimedSteps, quality_rows, step_error_row, twin_lines, twin_row
from tests.support.timed_executor import Processor, TimedExecutor, opt_buckets

SHAPES = ProgramShapes(
    decode_buckets=(4,),
    prefill_buckets=(64,),
    max_num_seqs=4,
    mixed=False,
    rows_per_tile=1,
    tokens_per_tile=64,
    query_tile=64,
    key_tile=64,
)
GOOD = FitQuality(num_points=40, num_held_back=10, r2=0.99, worst_relative_error=0.1, mean_relative_error=0.03)


def model_of(prompt_s: float, decode_s: float) -> CostModel:
    """Steps of known times, whatever is in them."""
    names = SHAPES.feature_names()
    known = {"program_4_0": decode_s, "program_0_64": prompt_s}
    return CostModel(
        costs=StepCosts(decode_base_s=decode_s, prefill_base_s=prompt_s, one_program=False),
        programs=ProgramCosts(shapes=SHAPES, coefficients=tuple(known.get(name, 0.0) for name in names)),
        prefill_quality=GOOD,
        decode_quality=dataclasses.replace(GOOD, mean_relative_error=0.05),
        linear_prefill_quality=GOOD,
        linear_decode_quality=GOOD,
    )


def test_a_calibration_beyond_its_goal_is_marked() -> None:
    prompts, decode = quality_rows(model_of(0.1, 0.01))
    assert (prompts["case"], prompts["r2"], prompts["held_back"]) == ("calibration prompts", 0.99, 10)
    assert (prompts["meets_goal"], decode["meets_goal"]) == (True, False)


def machine() -> TimedExecutor:
    return TimedExecutor(Processor(buckets=opt_buckets([64], [4])), num_blocks=100)


def test_steps_are_timed_from_the_end_of_the_one_before() -> None:
    executor = machine()
    timed = TimedSteps(cast("Executor", executor), timer=lambda: executor.now_s)
    batch = synthetic_batch(executor.as_executor(), [KV], [10], [1])
    own_s = executor.machine.step_s(batch.num_tokens, batch.start, batch.kind)
    first, second = timed.execute(batch), timed.execute(batch)
    first.result()
    second.result()
    executor.now_s += 1.0  # nothing to do for a while
    timed.execute(batch).result()
    pending = timed.execute(batch)
    durations_s = timed.durations_s()
    assert sorted(durations_s) == [0, 1, 2]
    assert durations_s[1] == pytest.approx(own_s)
    assert durations_s[2] == pytest.approx(own_s + executor.machine.host_s)
    exact = model_of(0.1, own_s)
    assert step_error_row(timed, exact)["decode_step_error_p50"] == pytest.approx(
        executor.machine.host_s / (own_s + executor.machine.host_s)
    )
    assert "prompt_step_error_p50" not in step_error_row(timed, exact)
    timed.clear()
    pending.result()
    assert timed.durations_s() == {}
    assert timed.num_blocks == 100


@pytest.mark.parametrize(("slower", "meets"), [(1.0, True), (3.0, False)])
def test_served_and_simulated_are_compared_in_points(slower: float, meets: bool) -> None:
    """Here "served" is simulated, with steps that are slower than the model says."""
    model = model_of(0.05, 0.01)
    hardware = describe(model, machine().as_executor(), "tiny")
    workload = Workload(
        prompt_tokens=np.full(20, 40, np.int32),
        output_tokens=np.full(20, 10, np.int32),
        arrival_s=np.arange(20, dtype=np.float64) * np.float64(0.1),
        best_effort=np.zeros(20, np.bool_),
    )
    config = SimulationConfig(policy="fcfs", cache="kv", slo=SLO(ttft_s=0.2, tbt_s=0.1), max_num_seqs=4)

    def step_s(batch: StepBatch) -> float:
        return slower * model.programs.step_s(batch.num_tokens, batch.start, batch.kind)

    served = simulate(config, hardware=hardware, workload=workload, step_s=step_s).summary
    row = twin_row(served, config, hardware, workload)
    assert row["simulated_attainment"] == 1.0
    assert row["meets_goal"] is meets
    assert row["difference_points"] == pytest.approx(100 * (served.slo_attainment - 1.0))
    line = twin_lines([{"case": "fcfs kv", "attainment": served.slo_attainment} | row])[-1]
    assert line.split()[:2] == ["fcfs", "kv"]
    assert float(line.split()[-1]) == pytest.approx(row["difference_points"], abs=0.06)

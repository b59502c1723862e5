"""How well a calibration predicts the steps that were served."""

import pytest

from apt_jax.core.kinds import KV
from apt_jax.costs.fit import CostModel, FitQuality
from apt_jax.costs.model import StepCosts
from apt_jax.costs.programs import ProgramCosts, ProgramShapes
from apt_jax.executor.calibrate import synthetic_batch
from benchmarks.gpu.served_steps import TimedSteps, step_error_row
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
        decode_quality=GOOD,
        linear_prefill_quality=GOOD,
        linear_decode_quality=GOOD,
    )


def machine() -> TimedExecutor:
    return TimedExecutor(Processor(buckets=opt_buckets([64], [4])), num_blocks=100)


def test_steps_are_timed_from_the_end_of_the_one_before() -> None:
    executor = machine()
    timed = TimedSteps(executor.as_executor(), timer=lambda: executor.now_s)
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
    assert (timed.num_blocks, timed.block_size) == (100, 16)
    assert TimedSteps(executor.as_executor(), 30).num_blocks == 30

"""A workload that is derived from a calibration, at lengths and pools that the calibrated engine hardly serves."""

import pytest

from apt_jax.costs.fit import CostModel, FitQuality
from apt_jax.costs.programs import ProgramCosts, ProgramShapes
from apt_jax.sched import StepCosts
from serve.demo.workload import derive_workload

SHAPES = ProgramShapes(
    decode_buckets=(1, 2, 4, 8),
    prefill_buckets=(32, 64),
    max_num_seqs=8,
    mixed=False,
    rows_per_tile=4,
    tokens_per_tile=16,
    query_tile=32,
    key_tile=32,
)
QUALITY = FitQuality(num_points=9, num_held_back=2, r2=0.99, worst_relative_error=0.1, mean_relative_error=0.05)
MODEL = CostModel(
    costs=StepCosts(),
    programs=ProgramCosts(shapes=SHAPES, coefficients=tuple(1e-3 for _ in SHAPES.feature_names())),
    prefill_quality=QUALITY,
    decode_quality=QUALITY,
    linear_prefill_quality=QUALITY,
    linear_decode_quality=QUALITY,
)


@pytest.mark.parametrize("num_blocks", [2, 9, 400])
@pytest.mark.parametrize("prompt_len", [1, 2, 63, 64, 65, 200])
def test_prompts_of_any_length_make_a_workload(prompt_len: int, num_blocks: int) -> None:
    workload = derive_workload(
        MODEL,
        ["x"],
        [prompt_len],
        num_blocks=num_blocks,
        block_size=4,
        hidden_block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        duration_s=2.0,
    )
    assert len(workload.arrivals) == 40
    assert 0 < workload.kv_capacity <= workload.hybrid_capacity
    assert 0 < workload.slo.tbt_s < workload.slo.ttft_s

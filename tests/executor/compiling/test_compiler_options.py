"""Options of the compiler: those of all programs, and of those with few rows."""

from pathlib import Path
from typing import Any

import pytest

from apt_jax.backends import attention_ops
from apt_jax.config import CacheConfig
from apt_jax.core.kinds import KindSet
from apt_jax.executor.compiling.buckets import EVERYTHING, GREEDY
from apt_jax.executor.compiling.compiler_options import (
    TRITON_TOKENS,
    compiler_options,
    options_of_program,
    without_places,
)
from apt_jax.executor.plan import plan_executor
from apt_jax.executor.pool_memory import PoolMemory
from apt_jax.executor.programs.runner import ProgramRunner
from apt_jax.models.params import abstract_params
from tests.support.parallel_cases import MODELS

ALONE: dict[str, Any] = {"num_devices": 1, "num_hosts": 1}
TRITON = "xla_gpu_enable_triton_gemm"


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_products_are_compiled_by_triton_in_programs_of_few_rows_alone(platform: str) -> None:
    assert compiler_options(platform, **ALONE)[TRITON] is False
    assert options_of_program(platform, 1) == options_of_program(platform, TRITON_TOKENS) == {TRITON: True}
    assert options_of_program(platform, TRITON_TOKENS + 1) == options_of_program(platform, 0) == {}


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_platforms_have_no_options_of_gpus(platform: str, tmp_path: Path) -> None:
    assert not any("gpu" in name for name in compiler_options(platform, **ALONE, tuning_dir=tmp_path))
    assert options_of_program(platform, 1) == {}


def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = "xla_gpu_per_fusion_autotune_cache_dir"
    assert compiler_options("gpu", **ALONE, tuning_dir=tmp_path)[results] == str(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", f"--{TRITON}=true --{results}=/elsewhere")
    assert compiler_options("gpu", **ALONE, tuning_dir=tmp_path) == {}
    assert options_of_program("gpu", 1) == {}


def test_where_results_lie_is_no_part_of_what_a_program_depends_on(tmp_path: Path) -> None:
    found = without_places(compiler_options("gpu", **ALONE, tuning_dir=tmp_path))
    assert found == compiler_options("gpu", **ALONE)


def test_a_program_counts_the_rows_of_its_products() -> None:
    import jax

    config = MODELS["opt"]
    plan = plan_executor(
        config, cache=CacheConfig(mode="hybrid", block_size=4), max_num_seqs=128, max_num_batched_tokens=128, max_model_len=128,
        num_devices=1, platform="cuda", chip="sm_90", attention=attention_ops("cpu", "triton-interpret"),
    )  # fmt: skip
    memory = PoolMemory(plan.config, 4, "float32", jax.devices()[0], None)
    runner = ProgramRunner(abstract_params(plan.config, "float32"), plan.programs(8, None, None), memory)
    both = KindSet(True, True)
    few = {TRITON: True}
    assert runner.empty_decode_call(64, both, GREEDY).options == few
    assert runner.empty_decode_call(128, both, GREEDY).options == {}
    assert runner.empty_forward_call(0, 32, both).options == few
    assert runner.empty_forward_call(64, 32, both).options == {}  # 96 rows
    assert runner.empty_sample_call(16, EVERYTHING).options == few
    assert runner.empty_tables_call().options == {}

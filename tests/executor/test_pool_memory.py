"""The pool of an accelerator: sized after the temporaries of steps are known, allocated after everything is compiled."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apt_jax.config import CacheConfig
from apt_jax.errors import ConfigError
from apt_jax.executor import pool_memory
from apt_jax.executor.compiling.compiler_options import compiler_options
from apt_jax.executor.compiling.warm_up import all_programs, largest_programs
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.executor.pool_memory import PoolMemory, rounded_down
from tests.support.generation import greedy
from tests.support.paged_driver import CONFIG, PARAMS

PROMPTS = [[5, 6, 7], list(range(10, 47))]
BLOCK_BYTES = CONFIG.num_layers * 16 * CONFIG.lane * 4


@pytest.fixture
def device_of(monkeypatch):
    """Have the CPU stand for an accelerator with so many bytes of memory."""

    def set_bytes(count: int) -> None:
        monkeypatch.setattr(PoolMemory, "_is_host", False)
        monkeypatch.setattr(PoolMemory, "free_bytes", lambda self: count)

    return set_bytes


def executor(**cache) -> JaxExecutor:
    return JaxExecutor(
        PARAMS,
        CONFIG,
        cache=CacheConfig(**cache),
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=128,
        attention="xla",
    )


def step_bytes(made: JaxExecutor) -> int:
    programs = all_programs(made.runner, mixed=made.mixed, copies=False, conversions=False)
    return max(program.temporary_bytes() for program in largest_programs(programs))


@pytest.mark.in_turn(1, group="pools of real models")
def test_nothing_is_allocated_before_all_programs_are_compiled_and_none_is_compiled_twice(device_of):
    device_of(1 << 40)
    made = executor(num_blocks_override=64)
    assert not made.runner.is_allocated
    assert all(isinstance(pool, jax.ShapeDtypeStruct) for pool in made.runner.pools)
    seen = []

    def on_progress(done: int, total: int) -> None:
        seen.append((done, total, made.runner.is_allocated))

    made.warm_up(on_progress)
    assert seen[-1][0] == seen[-1][1]
    assert not any(allocated for *_, allocated in seen)
    assert made.runner.is_allocated
    tokens = greedy(made, PROMPTS, 6, "kv", "batched")
    assert made.compilations == 0
    assert tokens == greedy(executor(num_blocks_override=64), PROMPTS, 6, "kv", "batched")


@pytest.mark.in_turn(10, group="executors with models")
def test_what_is_not_warmed_up_allocates_at_its_first_step(device_of):
    device_of(1 << 40)
    made = executor(num_blocks_override=64)
    assert greedy(made, PROMPTS, 4, "hidden", "batched")
    assert made.runner.is_allocated


@pytest.mark.in_turn(10, group="executors with models")
def test_the_pool_leaves_room_for_two_steps(device_of):
    device_of(1 << 26)
    temporaries = step_bytes(executor(num_blocks_override=64))
    for free in (20 * temporaries + 1000 * BLOCK_BYTES, 3 * temporaries + 40 * BLOCK_BYTES):
        device_of(free)
        made = executor()
        # A pool has one block more than are given out.
        assert made.num_blocks * BLOCK_BYTES <= min(0.9 * free, free - 2 * step_bytes(made))
        assert made.num_blocks * BLOCK_BYTES >= min(0.9 * free, free - 2 * step_bytes(made)) * 0.97 - BLOCK_BYTES


def test_temporaries_that_leave_no_room_are_refused_with_the_numbers(device_of):
    device_of(1 << 26)
    temporaries = step_bytes(executor(num_blocks_override=64))
    device_of(2 * temporaries + BLOCK_BYTES)
    with pytest.raises(
        ConfigError,
        match=r"two steps take [\d,]+ and block tables and token counts take [\d,]+; lower --max-num-batched-tokens",
    ):
        executor()


@given(st.integers(1, 1 << 31))
def test_rounding_loses_at_most_a_sixty_fourth(num_blocks):
    rounded = rounded_down(num_blocks)
    assert num_blocks * 63 / 64 < rounded <= num_blocks
    assert rounded_down(rounded) == rounded


def test_the_largest_number_of_blocks_on_a_host_is_not_rounded(monkeypatch):
    monkeypatch.setattr(pool_memory, "free_memory_bytes", lambda device: 1 << 34)
    memory = PoolMemory(CONFIG, 16, "float32", jax.devices()[0], None)
    assert memory.num_blocks_that_fit(0.9, most=1001, least=2) == 1001


def test_options_of_the_compiler():
    assert compiler_options("cpu", num_devices=8, num_hosts=2) == {}
    assert not any("gpu" in name for name in compiler_options("tpu", num_devices=8, num_hosts=2))
    assert "xla_gpu_enable_command_buffer" not in compiler_options("cuda", num_devices=1, num_hosts=1)
    one_host = compiler_options("gpu", num_devices=4, num_hosts=1)
    assert one_host["xla_gpu_enable_command_buffer"].endswith(",COLLECTIVES")
    assert "xla_gpu_shard_autotuning" not in one_host
    assert compiler_options("gpu", num_devices=4, num_hosts=2)["xla_gpu_shard_autotuning"] is False

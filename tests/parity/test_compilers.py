"""Properties of compiled decode steps, with every supported version of JAX: `make reference` runs these with an
older one than `make test`."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from apt_jax.config import CacheMode
from apt_jax.cpu import build
from apt_jax.executor import pool_memory
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.models.params import dummy_params
from apt_jax.sched import KV
from tests.support.paged_driver import CONFIG, Driver, few_programs, make_executor

build.load()
WHOLE_TILES = dataclasses.replace(CONFIG, hidden_size=48, head_dim=16, ffn_size=96)
"""A model whose layers `cpu.ops.decode_layer` takes."""
needs_one_call = pytest.mark.skipif(build.has_tiles(), reason="matrix tiles take parts one after another")


def _executor(mode: CacheMode, dtype: str) -> JaxExecutor:
    params = dummy_params(WHOLE_TILES, dtype, 7)
    return few_programs(make_executor(mode=mode, max_num_seqs=4, config=WHOLE_TILES, params=params))


@needs_one_call
@pytest.mark.parametrize("mode", ["kv", "hybrid"])
def test_a_decode_step_copies_no_pool(mode: CacheMode) -> None:
    executor = _executor(mode, "float32")
    compiled = executor.compiled_decode_step()
    shape = f"f32[{','.join(map(str, executor.runner.pools[0].shape))}]"
    assert "apt_decode" in compiled
    assert shape in compiled
    assert re.findall(rf"= {re.escape(shape)}\S* copy\(.*", compiled) == []


@needs_one_call
@pytest.mark.parametrize("pool", ["of this JAX", "float32"])
def test_a_layer_of_bfloat16_is_one_call_only_with_a_pool_of_bfloat16(
    pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pool == "float32":
        monkeypatch.setattr(pool_memory, "pool_dtype", lambda dtype, platform: jnp.dtype(jnp.float32))
    executor = _executor("kv", "bfloat16")
    in_one_call = "apt_decode_layer" in executor.compiled_decode_step()
    assert in_one_call == (executor.runner.pools[0].dtype == jnp.bfloat16)
    driver = Driver(executor)
    driver.add(0, list(range(5, 40)), KV)
    for count in (35, 1, 1):
        driver.step({0: count})

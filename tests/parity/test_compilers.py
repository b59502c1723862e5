"""Compiled decode steps and where they are kept, with every supported version of JAX: `make reference` runs these with
an older one than `make test`."""

import dataclasses
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from apt_jax.config import CacheMode
from apt_jax.core.kinds import KV
from apt_jax.cpu import build
from apt_jax.executor import pool_memory
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import use_compile_cache
from apt_jax.models.params import dummy_params
from tests.support.compiled_programs import compiled_decode_step
from tests.support.paged_driver import CONFIG, Driver, few_programs, make_executor

build.load()
WHOLE_TILES = dataclasses.replace(CONFIG, hidden_size=48, head_dim=16, ffn_size=96)
"""A model whose layers `cpu.ops.decode_layer` takes."""
needs_one_call = pytest.mark.skipif(build.has_tiles(), reason="matrix tiles take parts one after another")


def _executor(mode: CacheMode, dtype: str) -> JaxExecutor:
    params = dummy_params(WHOLE_TILES, dtype, 7)
    return few_programs(make_executor(mode=mode, max_num_seqs=4, config=WHOLE_TILES, params=params))


def _hits(events: list[str]) -> int:
    return events.count("/jax/compilation_cache/cache_hits")


@pytest.mark.parametrize("size", [0, 1, 200, None])
def test_H8_F10_a_damaged_compiled_program_is_compiled_and_kept_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: int | None
) -> None:
    """With a size: cut to it; without: one bit is changed."""
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

    def compiled() -> None:
        compilation_cache.reset_cache()
        with warnings.catch_warnings(action="error"):
            jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) * 3)(np.ones(5, np.float32)))

    try:
        jax.config.update(names[0], None)
        (tmp_path / "compiled").mkdir(mode=0o700)
        (tmp_path / "compiled" / "jit__lambda-0123-cache").write_bytes(b"of JAX itself")
        assert use_compile_cache()
        jax.config.update(names[1], 0.0)
        compiled()
        whole = {path: path.read_bytes() for path in (tmp_path / "compiled").iterdir()}
        assert all(path.suffix == ".program" for path in whole)
        events.clear()
        compiled()
        assert _hits(events) == len(whole) > 0
        for path, data in whole.items():
            path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:] if size is None else data[:size])
        events.clear()
        compiled()
        assert _hits(events) == 0
        assert caplog.text.count("damaged; removed, and made again") == len(whole)
        compiled()
        assert _hits(events) == len(whole)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@needs_one_call
@pytest.mark.parametrize("mode", ["kv", "hybrid"])
def test_a_decode_step_copies_no_pool(mode: CacheMode) -> None:
    executor = _executor(mode, "float32")
    compiled = compiled_decode_step(executor)
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
    in_one_call = "apt_decode_layer" in compiled_decode_step(executor)
    assert in_one_call == (executor.runner.pools[0].dtype == jnp.bfloat16)
    driver = Driver(executor)
    driver.add(0, list(range(5, 40)), KV)
    for count in (35, 1, 1):
        driver.step({0: count})

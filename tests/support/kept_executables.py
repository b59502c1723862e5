"""Starts of small executors whose executables are kept: python -m tests.support.kept_executables, a start in a process of
its own with two simulated devices. Its output is a line of JSON, by number of devices."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax
from jax.experimental.compilation_cache import compilation_cache

from apt_jax.config import CacheConfig
from apt_jax.core.kinds import KV
from apt_jax.executor.compiling.warm_up import Program, warm_up
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import use_compile_cache
from apt_jax.models import sharding as parallel
from tests.support.paged_driver import BLOCK, CONFIG, PARAMS, Driver, few_programs

_CONFIG = dataclasses.replace(CONFIG, num_layers=1)
_PARAMS = dataclasses.replace(PARAMS, layers=PARAMS.layers[:1])
_OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
TRACING = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration")


@contextlib.contextmanager
def programs_are_kept() -> Iterator[None]:
    """Have this process keep compiled programs in $APT_JAX_CACHE_DIR."""
    before = {name: getattr(jax.config, name) for name in _OPTIONS}
    compilation_cache.reset_cache()
    jax.config.update(_OPTIONS[0], None)
    assert use_compile_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def make_executor(num_devices: int = 1, *, load_executables: bool = True, weights: str = "float32") -> JaxExecutor:
    """Make an executor with `weights`: a dtype, or int8 for quantized ones."""
    dtype = "float32" if weights == "int8" else weights
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), _PARAMS)
    executor = JaxExecutor(
        params, _CONFIG, cache=CacheConfig(mode="kv", block_size=BLOCK, num_blocks_override=100),
        max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128, mixed=False,
        mesh=None if num_devices == 1 else parallel.tensor_mesh(num_devices), load_executables=load_executables, keep_params=True,
        quantization="int8" if weights == "int8" else None,
    )  # fmt: skip
    return few_programs(executor)


def greedy_programs(executor: JaxExecutor) -> list[Program]:
    """Those of greedy requests."""
    return [
        program
        for program in executor._all_programs()
        if program.name.kind in ("decode", "prefill", "tables")
        or (program.name.variant is not None and program.name.variant.greedy)
    ]


def greedy_tokens(executor: JaxExecutor) -> list[int]:
    driver = Driver(executor)
    driver.add(0, list(range(5, 25)), KV)
    for count in (20, 1, 1, 1, 1):
        driver.step({0: count})
    return driver.tokens[0][20:]


def start(num_devices: int = 1, weights: str = "float32") -> dict[str, Any]:
    """Prepare an executor and generate with it."""
    executor = make_executor(num_devices, weights=weights)
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: events.append(event.rpartition("/")[2])
    )
    programs = greedy_programs(executor)
    executor.allocate()
    for program in programs:
        program.call()  # makes its padding
    events.clear()
    warm_up(programs)
    tokens, traced = greedy_tokens(executor), sum(events.count(name) for name in TRACING)
    store = executor.programs.store
    assert store is not None
    return {
        "programs": len(programs),
        "loaded": store.num_loaded,
        "traced": traced,
        "tokens": tokens,
        "compilations": executor.compilations,
    }


if __name__ == "__main__":
    with programs_are_kept():
        print(json.dumps({size: start(size) for size in (1, 2)}))

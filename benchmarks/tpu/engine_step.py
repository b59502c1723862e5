"""The engine's programs for the TPU gate: a step of decode rows with its sampler, or one of prompt chunks, on one TPU
or cut over several.

They are the jitted functions of `apt_jax.executor.programs.programs.Programs`, with the attention backend that the engine
chooses on TPUs or one by name. Weights and pools are shapes.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from apt_jax.config import CacheConfig, CacheMode
from apt_jax.executor.compiling.buckets import GREEDY
from apt_jax.executor.plan import plan_executor
from apt_jax.executor.programs.runner import ProgramRunner
from apt_jax.models import sharding as parallel
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import abstract_params, param_names
from apt_jax.ops.backend import KernelBackend
from benchmarks.gpu import engine_step as gpu
from benchmarks.tpu.compile_only import Chip, TpuReport, compile_program, make_mesh

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuCase:
    """Model, shapes and options that a step is compiled for."""

    model: str
    num_layers: int | None
    """None: all of the model."""
    cache: CacheMode = "hybrid"
    prefill_tokens: int = 0
    """Number of prompt tokens; if there are any, the step has no decode rows."""
    backend: str | None = None
    """None: the engine's choice."""
    num_devices: int = 1
    num_rows: int = 64
    context: int = 2048
    """Longest context of a row, in tokens."""
    num_blocks: int = 6144
    """Pool of one layer."""
    dtype: str = "bfloat16"
    donate: bool = True

    @property
    def name(self) -> str:
        what = f"{self.prefill_tokens} prompt tokens" if self.prefill_tokens else f"{self.num_rows} decode rows"
        return f"{self.cache}, {what}"


def config_of(case: TpuCase) -> ModelConfig:
    """The whole model, with as many layers as the case has."""
    return gpu.model_of(
        gpu.StepCase(model=case.model, dtype=case.dtype, kinds=(True, True), num_layers=case.num_layers)
    )


def compile_step(case: TpuCase, chip: Chip, ops: KernelBackend | None = None) -> tuple[TpuReport, int]:
    """Compile a step without allocating weights or pools.

    Args:
        ops: in place of the case's backend.

    Returns:
        What was found, and the bytes that the step must move beside reading its cache: weights, new cache, and where
        rows decode the scores over the vocabulary and the wide queries and results of absorption.
    """
    runner, absorbs = _runner(case, chip, ops)
    params, pool, size = runner.params, runner.pools[0], case.num_devices
    num_layers = len(runner.pools)
    elements = math.prod(pool.shape) // size
    pool_bytes = elements * pool.dtype.itemsize * num_layers
    decode, chunks = (0, case.prefill_tokens) if case.prefill_tokens else (case.num_rows, 0)
    call = runner.empty_forward_call(decode, chunks, runner.programs.kind_sets(decode, chunks)[-1])
    lower = functools.partial(gpu.lower, call, donate=case.donate)
    forward = compile_program(lower, pool_elements=elements, pool_bytes=pool_bytes)
    # Without the tables of embeddings: of these a step reads a few rows.
    layers = dataclasses.replace(params, embed=None, position=None, head=None)
    config = config_of(case)
    floor = _device_bytes(layers) + 2 * case.num_rows * pool.shape[2] * pool.dtype.itemsize * num_layers // size
    if case.prefill_tokens:
        return forward, floor
    sampling = runner.empty_sample_call(case.num_rows, GREEDY)
    sample = compile_program(sampling.lower, pool_elements=elements, pool_bytes=0)
    floor += _device_bytes(params.embed if params.head is None else params.head)
    # Written and read once each. Every device samples from the scores of all.
    scores = 2 * case.num_rows * config.vocab_size * 4
    floor += scores if size == 1 else scores + scores // size
    if absorbs:
        wide = case.num_rows * config.num_heads * config.hidden_size * pool.dtype.itemsize // size
        floor += 4 * wide * num_layers
    return _together(forward, sample), floor


def _runner(case: TpuCase, chip: Chip, ops: KernelBackend | None) -> tuple[ProgramRunner, bool]:
    """The engine's programs for TPUs that are not there, with shapes for weights and pools, and whether they absorb."""
    mesh = make_mesh(chip, case.num_devices)
    plan = plan_executor(
        config_of(case),
        cache=CacheConfig(mode=case.cache, block_size=BLOCK_SIZE),
        max_num_seqs=case.num_rows,
        max_num_batched_tokens=max(case.num_rows, case.prefill_tokens),
        max_model_len=case.context,
        num_devices=case.num_devices,
        platform="tpu",
        chip=chip.name,
        attention=ops or case.backend,
    )
    return gpu.described_runner(plan, mesh, case.dtype, case.num_blocks), plan.hidden_mode == "absorb"


def weight_bytes(case: TpuCase) -> int:
    """Bytes of the weights of one device, those that are not cut included."""
    config = parallel.with_repeated_heads(config_of(case), case.num_devices)
    shapes = abstract_params(config, jnp.dtype(case.dtype))
    specs = jax.tree.map(functools.partial(parallel.leaf_spec, config, case.num_devices), param_names(config))
    sizes = jax.tree.map(
        lambda leaf, spec: leaf.size * leaf.dtype.itemsize // (case.num_devices if any(spec) else 1), shapes, specs
    )
    return sum(jax.tree.leaves(sizes))


def _device_bytes(tree: Any) -> int:
    """Bytes that one device has of arrays."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _together(forward: TpuReport, sample: TpuReport) -> TpuReport:
    """A step of two programs: one after the other, so that memory is that of the larger."""
    return dataclasses.replace(
        forward,
        moved_bytes=forward.moved_bytes + sample.moved_bytes,
        temporary_bytes=max(forward.temporary_bytes, sample.temporary_bytes),
        loops=forward.loops + sample.loops,
        collectives=f"{forward.collectives}; {sample.collectives}"
        if sample.collectives != "none"
        else forward.collectives,
    )

"""The engine's programs for the gate: a decode step from embedding to sampled tokens, on one GPU or cut over
several, and a step of prompt chunks."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from apt_jax.config import CacheConfig
from apt_jax.core.kinds import KindSet
from apt_jax.executor.compiling.buckets import GREEDY, SAMPLED
from apt_jax.executor.plan import ExecutorPlan, plan_executor
from apt_jax.executor.pool_memory import PoolMemory
from apt_jax.executor.programs.runner import ProgramCall, ProgramRunner
from apt_jax.models import PRESETS
from apt_jax.models import sharding as parallel
from apt_jax.models.config import ModelConfig
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.models.params import abstract_params
from apt_jax.ops.backend import KernelBackend
from benchmarks.gpu.compile_only import Chip
from benchmarks.gpu.device_free import ProgramReport, compile_program, make_mesh

BLOCK_SIZE = 16
VARIANTS = {"greedy": GREEDY, "sample": SAMPLED}
_INPUT_BYTES_A_ROW = 128
_INPUT_BYTES_A_TOKEN = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCase:
    """Model, shapes and options that a step is compiled for."""

    model: str
    dtype: str
    kinds: tuple[bool, bool]
    """Presence of KV rows and of hidden rows."""
    absorb: bool = True
    """Hidden rows are absorbed; else reprojected."""
    num_devices: int = 1
    num_layers: int | None = None
    """None: all of the model."""
    num_rows: int = 64
    prefill_tokens: int = 0
    """Number of prompt tokens; if there are any, the step has no decode rows."""
    prefix_room: int | None = 0
    """Positions of hidden prefixes of prompts that there is room for; None: as many as block tables hold."""
    context: int = 2048
    """Longest context of a row, in tokens."""
    num_blocks: int = 6144
    """Pool of one layer."""
    sampling: str = "greedy"
    """One of `VARIANTS`."""
    quarter: bool = False
    """Scores over several devices have room for a quarter of the context of all rows."""
    donate: bool = True
    backend: str = "triton"
    """A name of `apt_jax.backends`."""

    @property
    def num_loops(self) -> int:
        """Layers with a loop whose length depends on data: one over hidden prefixes of prompts, on one GPU where there is no
        bound on them, or on several XLA's over the layer inputs of rows that are not absorbed."""
        config = model_of(self)
        absorbs = self.absorb and config.hidden_mode == "absorb"
        if not self.kinds[1]:
            return 0
        if self.prefill_tokens:
            has_loop = self.prefix_room != 0 if self.num_devices > 1 else self.prefix_room is None
        else:
            has_loop = self.num_devices > 1 and not absorbs
        return config.num_layers if has_loop else 0

    @property
    def name(self) -> str:
        hidden = "absorbed" if self.absorb else "reprojected"
        kinds = [name for name, used in zip(("kv", hidden), self.kinds, strict=True) if used]
        step = f"{self.prefill_tokens} prompt tokens" if self.prefill_tokens else self.sampling
        if self.prefill_tokens and self.prefix_room != 0:
            step += f", {'any' if self.prefix_room is None else self.prefix_room} positions before"
        rows = f", {self.num_rows} rows" if self.num_rows != StepCase.num_rows else ""
        context = f", context {self.context}" if self.context != StepCase.context else ""
        room = ", contexts a quarter full" if self.quarter else ""
        backend = f", {self.backend}" if self.backend != StepCase.backend else ""
        return f"{' + '.join(kinds)}, {step}{rows}{context}{room}{backend}"


def model_of(case: StepCase) -> ModelConfig:
    _, config = read_model_config(PRESETS[case.model])
    if case.num_layers is None:
        return config
    return dataclasses.replace(
        config, num_layers=case.num_layers, layer_windows=config.layer_windows[: case.num_layers]
    )


def compile_step(case: StepCase, chip: Chip, ops: KernelBackend) -> ProgramReport:
    """Compile a step of the engine without allocating weights or pools."""
    runner = abstract_runner(case, chip, ops)
    call = _call(case, runner)
    pool = runner.pools[0]
    report = compile_program(
        functools.partial(lower, call, donate=case.donate),
        chip,
        pool=(math.prod(pool.shape) // case.num_devices, pool.dtype.itemsize),
        num_pools=len(runner.pools),
        own=call.options,
    )
    whole = model_of(dataclasses.replace(case, num_layers=None)).num_layers
    return dataclasses.replace(report, input_bytes=sent_bytes(call), layers_share=len(runner.pools) / whole)


def max_input_bytes(num_rows: int, prefill_tokens: int) -> int:
    """The most that a step may send from the host, the settings of its sampler included: nothing that grows with the
    context."""
    return _INPUT_BYTES_A_ROW * num_rows + _INPUT_BYTES_A_TOKEN * prefill_tokens


def sent_bytes(call: ProgramCall) -> int:
    """Bytes that a call sends from the host."""
    return sum(argument.nbytes for argument in call.args if isinstance(argument, np.ndarray))


def input_failures(num_rows: int, prefill_tokens: int, num_bytes: int) -> list[str]:
    """Return the fault of a step that sends so many bytes; empty: it has none."""
    most = max_input_bytes(num_rows, prefill_tokens)
    return [f"{num_bytes} bytes come from the host (must be at most {most})"] if num_bytes > most else []


def abstract_runner(case: StepCase, chip: Chip, ops: KernelBackend | None) -> ProgramRunner:
    """The programs of `JaxExecutor` for GPUs that are not there, with shapes for weights and pools."""
    mesh = make_mesh(chip, case.num_devices)
    return described_runner(plan_of(case, chip, ops), mesh, case.dtype, case.num_blocks)


def plan_of(case: StepCase, chip: Chip, ops: KernelBackend | None) -> ExecutorPlan:
    """The plan of an executor whose largest step is the case's."""
    return plan_executor(
        model_of(case),
        cache=CacheConfig(
            mode="hybrid" if case.kinds[1] else "kv",
            block_size=BLOCK_SIZE,
            hidden_attention="absorb" if case.absorb else "reproject",
        ),
        max_num_seqs=case.num_rows,
        max_num_batched_tokens=max(case.num_rows, case.prefill_tokens),
        max_model_len=case.context,
        num_devices=case.num_devices,
        platform="gpu",
        chip=chip.arch,
        attention=ops,
    )


def described_runner(
    plan: ExecutorPlan, mesh: Any, dtype: Any, num_blocks: int, tuning_dir: Path | None = None
) -> ProgramRunner:
    """The programs of an executor on devices that are only described, with shapes for weights and pools.

    Args:
        mesh: of the devices, one or several.
        num_blocks: of a layer's pool, the reserved one included.
        tuning_dir: as of `compiler_options`.
    """
    device, dtype = mesh.devices.flat[0], jnp.dtype(dtype)
    if plan.num_devices == 1:
        mesh, specs, there = None, None, SingleDeviceSharding(device)
        shapes = abstract_params(plan.config, dtype)
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there), shapes)
    else:
        params, specs = parallel.abstract_shards(plan.loaded_config, dtype, mesh, by_feature=plan.cuts_by_feature)
    memory = PoolMemory(plan.config, plan.block_size, dtype, device, mesh)
    return ProgramRunner(params, plan.programs(num_blocks - 1, mesh, specs, tuning_dir), memory)


def lower(call: ProgramCall, *, donate: bool = True) -> Any:
    """Lower a call of the engine; without `donate` as if nothing were updated in place, for tests of the gates."""
    if donate:
        return call.lower()
    function = call.runner.programs.jitted[call.program].__wrapped__
    return jax.jit(functools.partial(function, **call.static)).lower(*call.args)


def _call(case: StepCase, runner: ProgramRunner) -> ProgramCall:
    """The call that the engine makes for such a step."""
    kinds = KindSet(*case.kinds)
    if case.prefill_tokens:
        return runner.empty_forward_call(0, case.prefill_tokens, kinds, None, case.prefix_room)
    room = runner.programs.hidden_rooms(case.num_rows, kinds)[0] if case.quarter else None
    return runner.empty_decode_call(case.num_rows, kinds, VARIANTS[case.sampling], room)

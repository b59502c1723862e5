"""The engine's programs for the gate: a decode step from embedding to sampled tokens, on one GPU or cut over
several, and a step of prompt chunks."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from apt_jax.backends import with_sharded_hidden
from apt_jax.config import CacheConfig
from apt_jax.executor.buckets import GREEDY, KindSet, SamplerVariant
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.models import PRESETS
from apt_jax.models import sharding as parallel
from apt_jax.models.config import ModelConfig
from apt_jax.models.decoder import decoder_step, greedy_tokens
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.models.params import ModelParams, abstract_params, param_names
from apt_jax.models.step import DecoderBatch, StepOptions
from apt_jax.ops.backend import KernelBackend
from apt_jax.ops.weights import NormParams
from benchmarks.gpu.compile_only import Chip
from benchmarks.gpu.device_free import ProgramReport, compile_program, make_mesh

BLOCK_SIZE = 16
VARIANTS = {"greedy": GREEDY, "draw": SamplerVariant(filtered=False), "sample": SamplerVariant()}


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
    context: int = 2048
    """Longest context of a row, in tokens."""
    num_blocks: int = 6144
    """Pool of one layer."""
    sampling: str = "greedy"
    """One of `VARIANTS`; over several GPUs only greedy."""
    donate: bool = True

    @property
    def num_loops(self) -> int:
        """Layers whose hidden rows are XLA's over several GPUs: tiles of rows and positions, as many as there are."""
        if self.num_devices == 1 or not self.kinds[1]:
            return 0
        return self.num_layers or PRESETS[self.model]["num_hidden_layers"]

    @property
    def name(self) -> str:
        hidden = "absorbed" if self.absorb else "reprojected"
        kinds = [name for name, used in zip(("kv", hidden), self.kinds, strict=True) if used]
        if self.prefill_tokens:
            return f"{' + '.join(kinds)}, {self.prefill_tokens} prompt tokens"
        return f"{' + '.join(kinds)}, {self.sampling}"


def _model(case: StepCase) -> ModelConfig:
    _, config = read_model_config(PRESETS[case.model])
    return config if case.num_layers is None else dataclasses.replace(config, num_layers=case.num_layers)


def compile_step(case: StepCase, chip: Chip, ops: KernelBackend) -> ProgramReport:
    """Compile a step without allocating weights or pools."""
    mesh = make_mesh(chip, case.num_devices)
    config = _model(case)
    dtype = jnp.dtype(case.dtype)
    pool_shape = (case.num_blocks, BLOCK_SIZE, config.lane)
    params, specs = _params(case, config)
    pools = tuple(jax.ShapeDtypeStruct(pool_shape, dtype) for _ in range(config.num_layers))
    if case.num_devices == 1:
        function, rest, donated = _engine_step(case, config, ops)
    else:
        function, rest, donated = _sharded_step(case, config, ops, mesh)
    lanes = parallel.POOL_SPEC if case.num_devices > 1 else PartitionSpec()
    arguments = (
        _placed(params, specs, mesh),
        _placed(pools, (lanes,) * len(pools), mesh),
        *(_placed(tree, jax.tree.map(lambda _: PartitionSpec(), tree), mesh) for tree in rest),
    )
    return compile_program(
        function,
        arguments,
        chip,
        donated=donated if case.donate else (),
        pool=(math.prod(pool_shape) // case.num_devices, dtype.itemsize),
        num_pools=config.num_layers,
        collectives_in_graphs=case.num_devices > 1,
    )


def _engine_step(case: StepCase, config: ModelConfig, ops: KernelBackend) -> tuple[Any, Any, Any]:
    """A program of `JaxExecutor`, its arguments after the pools, and which of all are donated."""
    nothing = NormParams(scale=None, bias=None)
    executor = JaxExecutor(
        # The executor looks at the device and dtype of its weights; those of the program are its arguments.
        ModelParams(
            embed=jnp.zeros((1, 1), case.dtype), embed_norm=None, position=None, project_in=None, project_out=None,
            final_norm=nothing, head=None, head_bias=None, layers=(),
        ),
        config,
        cache=CacheConfig(
            mode="hybrid",
            block_size=BLOCK_SIZE,
            num_blocks_override=2,
            hidden_attention="absorb" if case.absorb else "reproject",
        ),
        max_num_seqs=case.num_rows,
        max_num_batched_tokens=max(case.num_rows, case.prefill_tokens),
        max_model_len=case.context,
        attention=ops,
    )  # fmt: skip
    kinds = KindSet(*case.kinds)
    if case.prefill_tokens:
        function = functools.partial(
            executor.programs.forward, num_decode=0, num_prefill=case.prefill_tokens, kinds=kinds
        )
        sizes = (case.num_rows, executor.step_format.forward_layout(0, case.prefill_tokens).size)
        return function, tuple(jax.ShapeDtypeStruct((n,), jnp.int32) for n in sizes), (1,)
    function = functools.partial(
        executor.programs.decode, num_decode=case.num_rows, kinds=kinds, variant=VARIANTS[case.sampling]
    )
    sizes = (
        case.num_rows,
        executor.step_format.forward_layout(case.num_rows, 0).size,
        executor.step_format.sample_layout(case.num_rows).size,
    )
    rest = tuple(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes)
    return function, rest, (1, 2)


def _params(case: StepCase, config: ModelConfig) -> tuple[ModelParams, ModelParams]:
    """Shapes of the weights, and how they are cut."""
    params = abstract_params(config, jnp.dtype(case.dtype))
    specs = jax.tree.map(functools.partial(parallel.leaf_spec, config, case.num_devices), param_names(config))
    if case.num_devices == 1 or not (case.kinds[1] and case.absorb):
        return params, specs

    def with_inputs(tree: ModelParams, *inputs: Any) -> ModelParams:
        layers = [
            dataclasses.replace(p, **dict(zip(("wk_inputs", "wv_inputs"), inputs or (p.wk, p.wv), strict=True)))
            for p in tree.layers
        ]
        return dataclasses.replace(tree, layers=tuple(layers))

    by_feature = PartitionSpec(None, None, parallel.AXIS)
    return with_inputs(params), with_inputs(specs, by_feature, by_feature)


def _placed(tree: Any, specs: Any, mesh: Any) -> Any:
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        tree,
        specs,
    )


def _sharded_step(case: StepCase, config: ModelConfig, ops: KernelBackend, mesh: Any) -> tuple[Any, Any, Any]:
    """A step over several GPUs, as `JaxExecutor` runs it; as `_engine_step`."""
    tensor, ops = parallel.TensorParallel(case.num_devices, config), with_sharded_hidden(ops)
    own = parallel.own_config(config, case.num_devices)
    options = StepOptions(
        num_decode=case.num_rows,
        block_size=BLOCK_SIZE,
        hidden_block_size=BLOCK_SIZE,
        hidden_mode="absorb" if case.absorb else None,
        kinds=case.kinds,
        ops=ops,
        tensor=tensor,
    )

    def step(params: ModelParams, pools: Any, fields: dict[str, Array]) -> Any:
        pools, hidden = decoder_step(params, pools, DecoderBatch(**fields), own, options)
        return pools, greedy_tokens(params, hidden, own, ops, tensor)

    alike, lanes = PartitionSpec(), parallel.POOL_SPEC
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(_params(case, config)[1], lanes, alike),
        out_specs=(lanes, alike),
        check_vma=False,  # kernels do not say how their results vary over the mesh
    )
    return sharded, (_batch(case),), (1,)


def _batch(case: StepCase) -> dict[str, Any]:
    """The fields of `DecoderBatch`."""
    rows, table = case.num_rows, case.context // BLOCK_SIZE

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def flags(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bool_)

    return dict(
        token_ids=ints(rows),
        positions=ints(rows),
        first_slots=ints(rows),
        second_slots=ints(rows),
        token_hidden=flags(rows),
        decode_tables=ints(rows, 2, table),
        decode_lens=ints(rows),
        num_kv_rows=ints(),
        num_decode_rows=ints(),
        prefill_tables=ints(0, 2, table),
        prefill_offsets=ints(0),
        prefill_lens=ints(0),
        prefix_lens=ints(0),
        prefill_hidden=flags(0),
        num_prefill_rows=ints(),
    )

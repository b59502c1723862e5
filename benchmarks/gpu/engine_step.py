"""The engine's programs for the gate: a decode step from embedding to sampled tokens, on one GPU or with its heads over
several, and a step of prompt chunks."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from apt_jax import jax_executor, sampling
from apt_jax.config import CacheConfig, ModelConfig
from apt_jax.jax_executor import JaxExecutor
from apt_jax.models import PRESETS, decoder
from apt_jax.models.decoder import DecoderBatch, StepOptions, logits
from apt_jax.models.loader import read_model_config
from apt_jax.models.params import ModelParams, NormParams, abstract_params, param_axes
from apt_jax.pallas import AttentionOps
from benchmarks.gpu.compile_only import Chip
from benchmarks.gpu.device_free import ProgramReport, compile_program, make_mesh

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCase:
    """What a step is compiled for."""

    model: str
    dtype: str
    kinds: tuple[bool, bool]
    """Whether rows of the KV and of the hidden kind occur."""
    absorb: bool = True
    """Hidden rows are absorbed; else reprojected."""
    num_devices: int = 1
    num_layers: int | None = None
    """None: all of the model."""
    num_rows: int = 64
    prefill_tokens: int = 0
    """Of prompt chunks: the step has these instead of decode rows."""
    context: int = 2048
    """Longest context of a row, in tokens."""
    num_blocks: int = 6144
    """Pool of one layer."""
    sampling: str = "greedy"
    """The sampler's program, which more than one GPU has only greedy."""
    donate: bool = True

    @property
    def name(self) -> str:
        hidden = "absorbed" if self.absorb else "reprojected"
        kinds = [name for name, used in zip(("kv", hidden), self.kinds, strict=True) if used]
        if self.prefill_tokens:
            return f"{' + '.join(kinds)}, {self.prefill_tokens} prompt tokens"
        return f"{' + '.join(kinds)}, {self.sampling}"


def _model(case: StepCase) -> ModelConfig:
    _, config = read_model_config(PRESETS[case.model])
    return config if case.num_layers is None else dataclasses.replace(config, num_layers=case.num_layers)  # fmt: skip


def _sharded_layers(
    params: ModelParams,
    pools: tuple[Array, ...],
    fields: dict[str, Array],
    *,
    config: ModelConfig,
    options: StepOptions,
    num_devices: int,
) -> tuple[tuple[Array, ...], Array]:
    """`decoder_step` on one device's heads, feed-forward columns and pool lanes: two all-reduces a layer."""
    batch = DecoderBatch(**fields)
    dtype = params.embed.dtype
    # One device's share of heads and lanes: what attention is told.
    mine = dataclasses.replace(
        config,
        num_heads=config.num_heads // num_devices,
        num_kv_heads=config.num_kv_heads // num_devices,
        ffn_size=config.ffn_size // num_devices,
    )
    h = decoder.embed(params, batch.token_ids, batch.positions, config)
    new_pools = []
    for p, pool in zip(params.layers, pools, strict=True):
        assert p.attn_norm is not None
        assert p.ffn_norm is not None
        x = decoder._norm(h, p.attn_norm, config).astype(dtype)
        attention = decoder._Attention(
            params=p, config=mine, options=options, batch=batch, turns=None, all_angles=None, rules=None
        )  # fmt: skip
        out, pool = attention(x, pool)
        new_pools.append(pool)
        out = decoder._dense(out, p.wo.reshape(p.wo.shape[0], -1), None, options.ops.dense)
        h = h + jax.lax.psum(out, "x") + p.bo.astype(jnp.float32)[None]
        x = decoder._norm(h, p.ffn_norm, config).astype(dtype)
        part = decoder._feed_forward(x, dataclasses.replace(p, b_down=None), mine, options.ops)
        h = h + jax.lax.psum(part, "x") + p.b_down.astype(jnp.float32)[None]
    assert params.final_norm is not None
    return tuple(new_pools), decoder._norm(h, params.final_norm, config).astype(dtype)


def compile_step(case: StepCase, chip: Chip, ops: AttentionOps) -> ProgramReport:
    """Compile a step without allocating weights or pools."""
    mesh = make_mesh(chip, case.num_devices)
    config = _model(case)
    dtype = jnp.dtype(case.dtype)
    pool_shape = (case.num_blocks, BLOCK_SIZE * config.lane)
    params = abstract_params(config, dtype)
    pools = tuple(jax.ShapeDtypeStruct(pool_shape, dtype) for _ in range(config.num_layers))
    if case.num_devices == 1:
        function, rest, donated = _engine_step(case, config, ops)
    else:
        function, rest, donated = _sharded_step(case, config, ops, mesh)
    specs = _specs(config, case.num_devices > 1)
    arguments = (
        _placed(params, specs.params, mesh),
        _placed(pools, (specs.pool,) * len(pools), mesh),
        *(_placed(tree, jax.tree.map(lambda _: specs.replicated, tree), mesh) for tree in rest),
    )
    return compile_program(
        function,
        arguments,
        chip,
        donated=donated if case.donate else (),
        pool=(pool_shape[0] * pool_shape[1] // case.num_devices, dtype.itemsize),
        num_pools=config.num_layers,
        collectives_in_graphs=case.num_devices > 1,
    )


def _engine_step(case: StepCase, config: ModelConfig, ops: AttentionOps) -> tuple[Any, Any, Any]:
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
    if case.prefill_tokens:
        function = functools.partial(
            executor._forward, num_decode=0, num_prefill=case.prefill_tokens, kinds=case.kinds
        )
        sizes = (case.num_rows, executor._layout(0, case.prefill_tokens).size)
        return function, tuple(jax.ShapeDtypeStruct((n,), jnp.int32) for n in sizes), (1,)
    function = functools.partial(
        executor._decode, num_decode=case.num_rows, kinds=case.kinds, variant=case.sampling
    )
    sizes = (
        case.num_rows,
        executor._layout(case.num_rows, 0).size,
        jax_executor._sample_layout(case.num_rows).size,
    )
    rest = tuple(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes)
    return function, rest, (1, 2)


class _Specs(NamedTuple):
    params: Any
    pool: PartitionSpec
    replicated: PartitionSpec


def _specs(config: ModelConfig, sharded: bool) -> _Specs:
    """How weights and pools lie on the mesh: heads, feed-forward columns and lanes over `x`, the rest everywhere."""
    split = {"heads", "kv_heads", "ffn"} if sharded else set()
    params = jax.tree.map(
        lambda axes: PartitionSpec(*("x" if axis in split else None for axis in axes)),
        param_axes(config),
        is_leaf=lambda axes: isinstance(axes, tuple) and all(isinstance(a, str) for a in axes),
    )
    return _Specs(params, PartitionSpec(None, "x" if sharded else None), PartitionSpec())


def _placed(tree: Any, specs: Any, mesh: Any) -> Any:
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        tree,
        specs,
    )


def _sharded_step(
    case: StepCase, config: ModelConfig, ops: AttentionOps, mesh: Any
) -> tuple[Any, Any, Any]:
    """A step with the heads over several GPUs; as `_engine_step`."""
    options = StepOptions(
        num_decode=case.num_rows,
        block_size=BLOCK_SIZE,
        hidden_block_size=BLOCK_SIZE,
        hidden_mode="absorb" if case.absorb else None,
        kinds=case.kinds,
        ops=ops,
    )
    specs = _specs(config, sharded=True)
    forward = jax.shard_map(
        functools.partial(
            _sharded_layers, config=config, options=options, num_devices=case.num_devices
        ),
        mesh=mesh,
        in_specs=(specs.params, specs.pool, specs.replicated),
        out_specs=(specs.pool, specs.replicated),
        check_vma=False,  # kernels do not say how their results vary over the mesh
    )

    def step(params: ModelParams, pools: Any, fields: dict[str, Array]) -> Any:
        pools, hidden = forward(params, pools, fields)
        return pools, sampling.greedy(logits(params, hidden, config))

    return step, (_batch(case),), (1,)


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

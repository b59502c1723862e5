"""The engine's decode step as one program: embedding to sampled tokens, on one GPU or with its heads over several."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from apt_jax import sampling
from apt_jax.config import ModelConfig
from apt_jax.models import PRESETS, decoder
from apt_jax.models.decoder import DecoderBatch, StepOptions, decoder_step, logits
from apt_jax.models.loader import read_model_config
from apt_jax.models.params import ModelParams, abstract_params, param_axes
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
    context: int = 2048
    """Longest context of a row, in tokens."""
    num_blocks: int = 6144
    """Pool of one layer."""
    donate: bool = True

    @property
    def name(self) -> str:
        hidden = "absorbed" if self.absorb else "reprojected"
        kinds = [name for name, used in zip(("kv", hidden), self.kinds, strict=True) if used]
        return f"decode step, {' + '.join(kinds)}"


def _model(case: StepCase) -> ModelConfig:
    _, config = read_model_config(PRESETS[case.model])
    return config if case.num_layers is None else dataclasses.replace(config, num_layers=case.num_layers)  # fmt: skip


def _batch(case: StepCase) -> DecoderBatch:
    rows, table = case.num_rows, case.context // BLOCK_SIZE

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def flags(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bool_)

    return DecoderBatch(
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


def _sharded_layers(
    params: ModelParams, pools: tuple[Array, ...], batch: DecoderBatch, config: ModelConfig, options: StepOptions
) -> tuple[tuple[Array, ...], Array]:  # fmt: skip
    """`decoder_step` on one device's heads, feed-forward columns and pool lanes: two all-reduces a layer."""
    dtype = params.embed.dtype
    h = params.embed[batch.token_ids].astype(jnp.float32) + params.position[
        batch.positions + config.position_offset
    ].astype(jnp.float32)
    new_pools = []
    for p, pool in zip(params.layers, pools, strict=True):
        x = decoder._norm(h, p.attn_norm, config.norm_eps).astype(dtype)
        out, pool = decoder._attention(x, pool, batch, p, options)
        new_pools.append(pool)
        out = decoder._dense(out, p.wo.reshape(p.wo.shape[0], -1), None)
        h = h + jax.lax.psum(out, "x") + p.bo.astype(jnp.float32)[None]
        x = decoder._norm(h, p.ffn_norm, config.norm_eps).astype(dtype)
        up = jax.nn.relu(decoder._dense(x, p.w_up, p.b_up)).astype(dtype)
        h = h + jax.lax.psum(decoder._dense(up, p.w_down, None), "x") + p.b_down.astype(jnp.float32)[None]  # fmt: skip
    assert params.final_norm is not None
    return tuple(new_pools), decoder._norm(h, params.final_norm, config.norm_eps).astype(dtype)


_SHARDED_AXES = {"heads", "kv_heads", "ffn"}


def compile_step(case: StepCase, chip: Chip, ops: AttentionOps) -> ProgramReport:
    """Compile a step without allocating weights or pools."""
    config = _model(case)
    dtype = jnp.dtype(case.dtype)
    mesh = make_mesh(chip, case.num_devices)
    options = StepOptions(
        num_decode=case.num_rows,
        block_size=BLOCK_SIZE,
        absorb=case.absorb,
        kinds=case.kinds,
        ops=ops,
    )
    sharded = case.num_devices > 1
    params = abstract_params(config, dtype)
    pool_shape = (case.num_blocks, BLOCK_SIZE * config.lane)
    pools = tuple(jax.ShapeDtypeStruct(pool_shape, dtype) for _ in range(config.num_layers))
    batch = _batch(case)

    everywhere = PartitionSpec()
    pool_spec = PartitionSpec(None, "x") if sharded else everywhere
    param_specs = jax.tree.map(
        lambda axes: PartitionSpec(
            *("x" if sharded and a in _SHARDED_AXES else None for a in axes)
        ),
        param_axes(config),
        is_leaf=lambda axes: isinstance(axes, tuple) and all(isinstance(a, str) for a in axes),
    )

    def forward(params: ModelParams, pools: Any, batch: DecoderBatch) -> Any:
        return (_sharded_layers if sharded else decoder_step)(params, pools, batch, config, options)

    if sharded:
        # Kernels do not say how their results vary over the mesh, which the check would ask of them.
        forward = jax.shard_map(
            forward,
            mesh=mesh,
            in_specs=(param_specs, pool_spec, everywhere),
            out_specs=(pool_spec, everywhere),
            check_vma=False,
        )

    def step(params: ModelParams, pools: Any, batch: DecoderBatch) -> Any:
        pools, hidden = forward(params, pools, batch)
        return pools, sampling.greedy(logits(params, hidden))

    def placed(tree: Any, specs: Any) -> Any:
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
            ),
            tree,
            specs,
        )

    arguments = (
        placed(params, param_specs),
        placed(pools, tuple(pool_spec for _ in pools)),
        placed(batch, jax.tree.map(lambda _: everywhere, batch)),
    )
    return compile_program(
        step,
        arguments,
        chip,
        donated=(1,) if case.donate else (),
        pool=(pool_shape[0] * pool_shape[1] // case.num_devices, dtype.itemsize),
        num_pools=config.num_layers,
        collectives_in_graphs=sharded,
    )

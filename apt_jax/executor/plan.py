"""Plan of an executor, derived from the model's configuration and the limits of a step: cache kinds, attention ops,
buckets, programs. Planning allocates nothing and needs no device, so programs can be compiled for absent devices
(`benchmarks.gpu`) and before the size of the pool is known."""

import dataclasses
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from apt_jax.backends import with_sharded_hidden
from apt_jax.config import CacheConfig
from apt_jax.core.kinds import KindSet, WindowSpec
from apt_jax.errors import ConfigError
from apt_jax.executor.attention_choice import choose_attention, needed_extras
from apt_jax.executor.compiling.buckets import Buckets
from apt_jax.executor.programs.packing import StepFormat
from apt_jax.executor.programs.programs import Programs
from apt_jax.models import sharding as parallel
from apt_jax.models.config import HiddenMode, ModelConfig
from apt_jax.models.layer_groups import LayerGroups, layer_groups
from apt_jax.ops import sampling
from apt_jax.ops.backend import KernelBackend
from apt_jax.ops.xla_decode import ROWS_PER_TILE

MAX_MODEL_LEN = 1 << 22
"""Maximum context length in tokens; every slot has a block table for the whole context."""
_MAX_ENTRIES = 2**31 - 1
"""Maximum number of entries of a per-slot array, because its indices are int32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorPlan:
    """Decisions of `plan_executor`."""

    loaded_config: ModelConfig
    """Configuration of the model as loaded, without attention windows that are at least as long as every context."""
    config: ModelConfig
    """`loaded_config` with key heads repeated so that they divide among the devices."""
    kinds_offered: KindSet
    hidden_block_size: int
    """Number of layer inputs in a block."""
    hidden_mode: HiddenMode | None
    """Parts of attention over layer inputs that are absorbed; None: reprojection."""
    ops: KernelBackend
    mixed: bool
    """True if one program may have decode rows and prompt chunks."""
    kv_table_len: int
    hidden_table_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    buckets: Buckets
    num_devices: int
    platform: str
    has_adapters: bool
    both_ends: bool
    layer_groups: LayerGroups | None
    """Groups of layers that share arrays of the pool; None: every layer has an array of its own."""

    @property
    def windows(self) -> WindowSpec | None:
        """Cache of windowed layers in groups of their own; None: all layers keep all positions."""
        return None if self.layer_groups is None else self.layer_groups.windows

    @property
    def cuts_by_feature(self) -> bool:
        """True if devices share W_k and W_v by feature (`parallel.cuts_by_feature`)."""
        return self.hidden_mode == "absorb" and self.num_devices > 1

    def step_format(self, num_blocks: int) -> StepFormat:
        """Return the format of packed steps for a pool of `num_blocks` blocks."""
        return StepFormat(
            block_size=self.block_size,
            hidden_block_size=self.hidden_block_size,
            num_blocks=num_blocks,
            max_num_seqs=self.max_num_seqs,
            table_len=max(self.kv_table_len, self.hidden_table_len),
            vocab_size=self.config.vocab_size,
            num_biases=sampling.NUM_BIASES,
            buckets=self.buckets,
            has_adapters=self.has_adapters,
            both_ends=self.both_ends,
            windows=self.windows,
        )

    def programs(self, num_blocks: int, mesh: Mesh | None, specs: Any, tuning_dir: Path | None = None) -> Programs:
        """Return the programs for a pool of `num_blocks` blocks.

        Args:
            mesh: mesh of the devices that share the model; None: one device.
            specs: partition specs of the weights over the mesh.
            tuning_dir: see `compiler_options`.
        """
        return Programs(
            parallel.own_config(self.config, self.num_devices),
            self.ops,
            self.step_format(num_blocks),
            kinds_offered=self.kinds_offered,
            hidden_mode=self.hidden_mode,
            tensor=None if mesh is None else parallel.TensorParallel(mesh.size, self.config),
            mesh=mesh,
            specs=specs,
            platform=self.platform,
            tuning_dir=tuning_dir,
            layer_groups=self.layer_groups,
        )


def plan_executor(
    config: ModelConfig,
    *,
    cache: CacheConfig,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_devices: int,
    platform: str,
    chip: str | None,
    attention: str | KernelBackend | None = None,
    mixed: bool | None = None,
    adapt_keys: bool | None = None,
    both_ends: bool = False,
) -> ExecutorPlan:
    """Plan the programs of an executor.

    Args:
        cache, max_num_seqs, max_num_batched_tokens, max_model_len, attention, mixed: see `JaxExecutor`.
        num_devices: number of devices that share the model.
        platform: JAX's name of the devices' platform.
        chip: chip that the tiles of GPU kernels are chosen for.
        adapt_keys: True if adapters change W_k or W_v; None: no adapters.
        both_ends: see `JaxExecutor`.

    Raises:
        ConfigError: the cache mode does not suit the model, the attention implementation is unknown, or the model
            cannot be sharded over `num_devices` devices.
    """
    parallel.check_size(config, num_devices)
    if max_model_len > MAX_MODEL_LEN:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than this version supports; use at most {MAX_MODEL_LEN} (--max-model-len)"
        )
    # A window that is at least as long as every context has no effect.
    windows = tuple(w if w is not None and w < max_model_len else None for w in config.layer_windows)
    loaded = dataclasses.replace(config, layer_windows=windows if any(windows) else ())
    config = parallel.with_repeated_heads(loaded, num_devices)
    if max_model_len > config.max_position:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the model's {config.max_position} positions (--max-model-len)"
        )
    kinds = parallel.kinds_offered(config, cache, num_devices)
    hidden = kinds.hidden
    hidden_block_size = config.hidden_block_size(cache.block_size) if hidden else cache.block_size
    hidden_mode: HiddenMode | None = None
    if hidden and cache.hidden_attention != "reproject":
        hidden_mode = config.hidden_mode
    if num_devices > 1 and platform == "cpu":
        # Several devices simulated on a CPU are for tests; the CPU kernels use all of its threads.
        attention = attention or "xla"
        if attention == "cpu":
            raise ConfigError("the kernels for CPUs run on one device; leave out -tp or --attention-backend cpu")
    # Over several devices, hidden rows need no features that the ops in `takes_shards` lack (`sharding.hidden_refusal`
    # rejects such models, and there are no adapters); the other ops are XLA's.
    extras = needed_extras(
        config, hidden_mode, kv=kinds.kv, hidden=hidden and num_devices == 1, adapted_keys=bool(adapt_keys)
    )
    ops = choose_attention(platform, attention, chip, extras)
    if num_devices > 1:
        ops = with_sharded_hidden(ops)
    groups = layer_groups(config, cache, hidden=hidden, max_model_len=max_model_len, both_ends=both_ends)
    block_size = cache.block_size if groups is None else groups.block_size
    smallest = block_size if groups is None else min(block_size, groups.windows.block_size)
    table_lens = {
        "kv_table_len": -(-max_model_len // smallest) * kinds.kv,
        "hidden_table_len": -(-max_model_len // hidden_block_size) * hidden,
    }
    absorbs_prompts = hidden_mode == "absorb" and config.input_width == config.lane and not extras["prefill"]
    halves = 2 if groups is None else 2 + groups.windows.blocks_per_group
    entries = max_num_seqs * max(halves * max(table_lens.values()), config.vocab_size)
    if entries > _MAX_ENTRIES:
        raise ConfigError(
            f"the block tables or token counts of {max_num_seqs} requests have {entries:,} entries, but at most {_MAX_ENTRIES:,} "
            f"are supported; lower --max-num-seqs{'' if entries == max_num_seqs * config.vocab_size else ' or --max-model-len, or use a larger --block-size'}"
        )
    return ExecutorPlan(
        loaded_config=loaded,
        config=config,
        kinds_offered=kinds,
        hidden_block_size=hidden_block_size,
        hidden_mode=hidden_mode,
        ops=ops,
        mixed=not ops.branches if mixed is None else mixed,
        **table_lens,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        buckets=Buckets.for_limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            hidden_block_size=hidden_block_size,
            rows_multiple=ROWS_PER_TILE,
            sparse=not ops.branches,
            has_rooms=hidden and not ops.branches,
            in_pieces=num_devices == 1,
            few_tokens=config.head_dim if absorbs_prompts else 0,
        ),
        num_devices=num_devices,
        platform=platform,
        has_adapters=adapt_keys is not None,
        both_ends=both_ends,
        layer_groups=groups,
    )

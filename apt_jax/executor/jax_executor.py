"""The executor that runs a real model with JAX.

A step is packed on the host (`packing`) and runs as one or two jitted programs (`programs`), called by the
`ProgramRunner` (`runner`). `warm_up` compiles all programs for every bucket. `warm_up_first` compiles only the smallest
set that can run every step, and the others are compiled while steps run (`ready_programs`). A step compiles no programs
except those for prompt log probabilities and embeddings, if they are not ready (`prompt_logprobs`).

The pools and the per-slot arrays (block tables, last tokens, token counts for penalties) are donated to the programs
and replaced by their results. All integers of a program are sent to the device as one vector and split there by static
offsets. The vector includes the changes of block tables and token counts (`block_tables`, `token_counts`); changes that
do not fit are sent before it. Sampled tokens are fed into the next step on the device, so the next step can be
dispatched before the host has fetched them. Masks arrive late: forward is dispatched without them, and sampling when
they are available (`MaskedStepHandle`).

Over several devices every program is one `jax.shard_map`: weights and pools are sharded (`apt_jax.models.sharding`),
all other arrays are replicated.
"""

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from apt_jax.config import CacheConfig, Quantization
from apt_jax.core.step import StepBatch
from apt_jax.distributed.hosts import Leader
from apt_jax.distributed.messages import Plan
from apt_jax.errors import ConfigError, one_line
from apt_jax.executor.attention_choice import chip_of
from apt_jax.executor.base import MaskedStepHandle, StepHandle, is_out_of_memory
from apt_jax.executor.compiling.buckets import SamplerVariant
from apt_jax.executor.compiling.ready_programs import ReadyPrograms
from apt_jax.executor.compiling.tuning_results import prepare_tuning_dir
from apt_jax.executor.compiling.warm_up import (
    MAX_COMPILERS,
    MAX_COMPILERS_FOR_GPU,
    Program,
    all_programs,
    first_and_others,
    largest_programs,
    warm_up,
)
from apt_jax.executor.plan import plan_executor
from apt_jax.executor.pool_memory import PoolMemory
from apt_jax.executor.programs.handles import DeviceStepHandle, JoinedStepHandle, PendingMaskHandle
from apt_jax.executor.programs.packing import (
    Ints,
    pack_forward,
    pack_masks,
    pack_penalties,
    pack_sampling,
    rows_that_count,
)
from apt_jax.executor.programs.prompt_logprobs import PromptPrograms
from apt_jax.executor.programs.runner import ProgramRunner
from apt_jax.executor.transfers.before_step import Transfers
from apt_jax.executor.transfers.host_memory import HostPool
from apt_jax.executor.transfers.host_saver import stages_in_pinned_memory
from apt_jax.models import sharding as parallel
from apt_jax.models.config import ModelConfig
from apt_jax.models.lora import LoraAdapter, adapt_keys, with_adapters
from apt_jax.models.params import ModelParams
from apt_jax.models.quantize import delete_replaced, quantize_params, widen_keys
from apt_jax.models.weight_layout import by_layers, fuse_products, tile_params
from apt_jax.ops.backend import KernelBackend
from apt_jax.utils.activity import activity
from apt_jax.utils.allocator import huge_pages_for, keep_freed_memory, use_huge_pages
from apt_jax.utils.swap_space import blocks_of

logger = logging.getLogger(__name__)


class JaxExecutor:
    """Implements `apt_jax.executor.Executor` on one device, or on several devices that share the model.

    Args:
        params: weights, all of one dtype, which is also the dtype of activations and cache. Without a `mesh`, they must
            be on the device.
        cache: block size, pool size, cache kinds that may occur, and attention of hidden rows.
        max_num_seqs, max_num_batched_tokens, max_model_len: bounds of a step, which determine the buckets.
        mixed: run steps with decode rows and prompt chunks as one program, which computes attention separately for the
            two. False: such a step runs as two programs, one after the other, or, if some rows sample under a mask, as
            one program that computes all rows as chunks. None: True unless programs branch (`KernelBackend.branches`).
        attention: attention implementation, or its name for `apt_jax.backends.attention_ops`; None: the platform's
            default.
        quantization: "int8": see `models.quantize`; "gguf": each `GroupedMatrix` stays in integers; None: weights are
            unchanged.
        mesh: mesh of the devices that share the model, from `models.sharding.tensor_mesh`; None: one device.
        conversion: also compile the programs that compute keys and values from cached layer inputs (`Plan.convert`), if
            both kinds are offered; False: `can_convert` is False.
        adapters: LoRA adapters that rows may use; one step may use all of them. Supported only on one device.
        both_ends: rows may fill blocks from the right end (`StepBatch.block_tables`). Blocks are then not converted.
        huge_pages: on CPUs, move weights and pool to pages of 2 MiB immediately; False: the caller does so later
            (`host_buffers`).
        load_executables: load programs that an earlier start compiled and stored (`executables`).
        keep_params: the caller continues to use `params`. False: arrays that sharding or int8 quantization replaces are
            deleted.

    Raises:
        ConfigError: the cache mode does not suit the model, the attention implementation is unknown, the pool does not
            fit in memory, or the model cannot be sharded over the devices.
    """

    lengths_only = False

    def __init__(
        self,
        params: ModelParams,
        config: ModelConfig,
        *,
        cache: CacheConfig,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        mixed: bool | None = None,
        attention: str | KernelBackend | None = None,
        quantization: Quantization = None,
        mesh: Mesh | None = None,
        conversion: bool = False,
        adapters: Sequence[LoraAdapter] = (),
        both_ends: bool = False,
        huge_pages: bool = True,
        load_executables: bool = False,
        keep_params: bool = False,
    ) -> None:
        mesh = None if mesh is None or mesh.size == 1 else mesh
        self.num_devices = 1 if mesh is None else mesh.size
        if quantization == "gguf" and mesh is not None:
            raise ConfigError("quantization='gguf' runs on one device; use int8, or leave out -tp or --quantization")
        if adapters and mesh is not None:
            raise ConfigError("LoRA adapters run on one device; leave out -tp or --lora-modules")
        # A device of this process.
        self.device = mesh.local_devices[0] if mesh else next(iter(jax.tree.leaves(params.embed)[0].devices()))
        self.platform: str = self.device.platform
        self.plan = plan = plan_executor(
            config,
            cache=cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_devices=self.num_devices,
            platform=self.platform,
            chip=None if attention == "xla" else chip_of(self.device),
            attention=attention,
            mixed=mixed,
            adapt_keys=adapt_keys(adapters) if adapters else None,
            both_ends=both_ends,
        )
        self.config, self.quantization = plan.config, quantization
        self.cache_config = dataclasses.replace(cache, block_size=plan.block_size)
        self.adapters = tuple(adapter.name for adapter in adapters)
        self.block_size, self.max_num_seqs = plan.block_size, max_num_seqs
        self.max_num_batched_tokens, self.max_model_len = max_num_batched_tokens, max_model_len
        self.kinds_offered, self.hidden_block_size = plan.kinds_offered, plan.hidden_block_size
        self.hidden_mode, self.mixed, self.buckets = plan.hidden_mode, plan.mixed, plan.buckets
        self.can_convert = conversion and all(self.kinds_offered) and not both_ends
        self.attention_name, self.rows_per_tile = plan.ops.name, plan.ops.rows_per_tile
        params = self._prepared(params, plan.ops, keep=keep_params)
        specs = None
        if mesh is None:
            self.params = with_adapters(params, self.config, adapters)
        else:
            self.params, specs = parallel.shard_params(
                params, plan.loaded_config, mesh, by_feature=plan.cuts_by_feature, keep=keep_params
            )
        self._memory = PoolMemory(
            self.config,
            cache.block_size,
            self.params.dtype,
            self.device,
            mesh,
            plan.layer_groups,
            holds_keys=self.kinds_offered.kv,
        )
        self._load_executables = load_executables
        self.runner = self._sized_runner(mesh, specs)
        self.programs, self.step_format = self.runner.programs, self.runner.step_format
        self.num_blocks = self.step_format.num_blocks
        self.ready = ReadyPrograms(self.buckets, branches=plan.ops.branches)
        self.host: HostPool | None = None
        if cache.swap_space:
            if both_ends and self.config.global_attention is not None:
                raise ConfigError(
                    "swap_space with shared blocks is not offered for models whose layers cache slots of different widths; leave "
                    "out --swap-space, or use --set share_blocks=false"
                )
            blocks = self._memory.host_blocks()
            self.host = HostPool(
                self.runner,
                self.ready,
                blocks,
                blocks_of(cache.swap_space, blocks.block_bytes),
                self._memory.placed_rows,
                pinned=stages_in_pinned_memory(self.device),
            )
            if both_ends:
                kv, hidden = self.kinds_offered
                widths = (self.config.lane if kv else None, self.config.input_width if hidden else None)
                self.host.add_slots(widths, self._memory.placed_slots)
        self.transfers = Transfers(self.runner, self.ready, self.host)
        self._prompts = PromptPrograms(self.runner, self.buckets.scored)
        self._compiled_at_warm_up = 0
        self._huge_pages = huge_pages
        if self.platform == "cpu":
            keep_freed_memory()
        if not self._memory.is_allocated_late:
            self.allocate()

    def _sized_runner(self, mesh: Mesh | None, specs: Any) -> ProgramRunner:
        """Return a program runner for a pool of `num_blocks_override` blocks; if that is None, for the largest pool
        that fits in memory.

        If the pool is in device memory, the programs with the largest temporaries are compiled first to measure them;
        temporaries do not depend on the size of the pool.
        """
        plan, memory, cache = self.plan, self._memory, self.cache_config
        tuning_dir = prepare_tuning_dir(self.device)

        def runner(num_blocks: int) -> ProgramRunner:
            programs = plan.programs(num_blocks, mesh, specs, tuning_dir)
            if self._load_executables:
                programs.use_store([self.device] if mesh is None else list(mesh.devices.flat))
            return ProgramRunner(self.params, programs, memory)

        if cache.num_blocks_override is not None:
            return runner(cache.num_blocks_override)
        windowed = 0 if plan.windows is None else int(plan.windows.num_blocks(plan.max_model_len))
        sizes: dict[str, Any] = {
            "utilization": cache.device_memory_utilization,
            "most": plan.max_num_seqs * (max(2 * plan.kv_table_len, plan.hidden_table_len) + windowed),
            "least": (2 if plan.kinds_offered.kv else 1)
            + (0 if plan.windows is None else plan.windows.blocks_per_group),
            "slot_bytes": plan.step_format(0).slot_bytes,
        }
        num_blocks = memory.num_blocks_that_fit(**sizes)
        made = runner(num_blocks)
        if not memory.is_allocated_late:
            return made
        with activity("compiling the largest steps"):
            largest = all_programs(made, mixed=self.mixed, copies=False, conversions=False)
            temporaries = max(program.temporary_bytes() for program in largest_programs(largest))
        left = memory.num_blocks_that_fit(**sizes, temporary_bytes=temporaries)
        return made if left >= num_blocks else runner(left)

    def allocate(self) -> None:
        """Allocate the pool and the per-slot arrays, if they are not allocated yet.

        Raises:
            ConfigError: they do not fit in memory.
        """
        if self.runner.is_allocated:
            return
        free = self._memory.free_bytes()
        try:
            self.clear()
        except Exception as error:
            if is_out_of_memory(error):
                raise self._memory.shortage(self.num_blocks, free) from error
            raise

    def _prepared(self, params: ModelParams, ops: KernelBackend, *, keep: bool) -> ModelParams:
        """Return the weights in the layout that programs use, before any sharding. Unless `keep`, weights that int8
        quantization replaces are deleted layer by layer."""
        hidden, dtype, alone = self.kinds_offered.hidden, params.dtype, self.num_devices == 1
        tiles = alone and ops.tiles and dtype in (jnp.float32, jnp.bfloat16)
        integers = ops.integer_products or dtype == jnp.float32

        def prepared(given: ModelParams) -> ModelParams:
            params = given
            if alone and self.platform == "cpu":
                params = fuse_products(params, keep=hidden)
            if self.quantization == "int8":
                params = quantize_params(params, keep=hidden)
                if not keep:
                    delete_replaced(given, params)
            if self.quantization == "gguf" and hidden:
                params = widen_keys(params, dtype)
            return tile_params(params, keep=hidden, integers=integers) if tiles else params

        return by_layers(params, prepared)

    @property
    def absorbs(self) -> bool:
        """True if attention over layer inputs absorbs projections, as far as the model allows."""
        return self.hidden_mode is not None

    @property
    def adapter_shapes(self) -> list[list[tuple[int, ...]]]:
        """Shapes of the adapter matrices of each layer, on which step times depend."""
        return [[leaf.shape for leaf in jax.tree.leaves(layer.adapters)] for layer in self.params.layers]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and devices."""
        return self._memory.block_bytes

    @property
    def leader(self) -> Leader | None:
        """Object that announces every call to other hosts, which make the same call; None: one host."""
        return self.runner.leader

    @leader.setter
    def leader(self, leader: Leader | None) -> None:
        self.runner.leader = leader

    @property
    def compilations(self) -> int:
        """See `Executor.compilations`."""
        return self.programs.num_compiled() - self._compiled_at_warm_up

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every program, and run each once on padding that touches no block."""
        self._warm_up(self._all_programs(), progress)

    def _warm_up(self, programs: list[Program], progress: Callable[[int, int], None] | None) -> None:
        prepare = functools.partial(
            warm_up, programs, progress, allocate=self.allocate, num_threads=self._num_compilers
        )
        try:
            prepare()
        except Exception as error:
            if isinstance(error, ConfigError) or is_out_of_memory(error) or not self.programs.forget_loaded():
                raise
            logger.warning("a loaded program did not run; compiling all programs (%s)", one_line(str(error)))
            if self.runner.is_allocated:
                self.clear()
            prepare()
        self._compiled_at_warm_up = self.programs.num_compiled()
        store = self.programs.store
        if store is not None and store.num_loaded:
            logger.info("%d of %d programs loaded without lowering", store.num_loaded, len(programs))

    def prepare_prompt_logprobs(self) -> None:
        """See `Executor.prepare_prompt_logprobs`."""
        self._prompts.prepare()

    @property
    def _num_compilers(self) -> int:
        """Maximum number of programs compiled at once; 1 with several hosts, which must compile in the same order."""
        if self.programs.num_hosts > 1:
            return 1
        return MAX_COMPILERS_FOR_GPU if self.platform in ("gpu", "cuda") else MAX_COMPILERS

    def _all_programs(self) -> list[Program]:
        copies = self.cache_config.enable_prefix_caching
        programs = all_programs(self.runner, mixed=self.mixed, copies=copies, conversions=self.can_convert)
        return programs if self.host is None else [*programs, *self.host.programs()]

    @property
    def can_start_early(self) -> bool:
        """True if `warm_up_first` may replace `warm_up`: every step has a general program that serves it, and one host
        and one device are used."""
        return self.mixed != self.programs.branches and self.leader is None and self.num_devices == 1

    @property
    def num_background_compilers(self) -> int:
        """Maximum number of programs compiled at once while serving; 1 on a CPU, whose cores also run the steps."""
        return 1 if self.platform == "cpu" else max(1, min(self._num_compilers, (os.cpu_count() or 1) - 2))

    def warm_up_first(self, progress: Callable[[int, int], None] | None = None) -> list[Program]:
        """Compile and run the smallest set of programs that can run every step, although some steps are slower with
        them.

        Returns:
            The other programs, the most useful first. Each must be compiled, in any thread, and then passed to
            `add_program`.
        """
        first, others = first_and_others(self._all_programs(), self.ready)
        self._warm_up(first, progress)
        self.ready.forget()
        for program in first:
            self.ready.add(program.name)
        return others

    def add_program(self, program: Program, *, last: bool = False) -> None:
        """Let steps use a compiled program. Must be called between two steps, in the thread that executes them.

        Args:
            last: True for the last of the programs that `warm_up_first` returned.
        """
        try:
            program.run()
        except Exception:
            self.programs.forget_loaded()  # for the next start; the pool is lost now
            raise
        self.ready.add(program.name)
        if last:
            self.ready.finish()

    def reset(self) -> None:
        """Allocate the pool and the per-slot arrays again after a failed step; all cache is lost.

        Raises:
            RuntimeError: there are several hosts, which cannot be reset together.
        """
        if self.leader is not None:
            time.sleep(1.0)  # if a lost rank caused the failure, its message comes first
            raise RuntimeError("a step failed, and several hosts cannot be reset together")
        self.clear()

    def check_integrity(self) -> None:
        """See `Executor.check_integrity`."""
        if self.runner.is_allocated:
            self.runner.check_integrity()

    def clear(self) -> None:
        """Allocate the pool and the per-slot arrays again, on all hosts; all cache is lost."""
        if self.platform != "cpu" or not self._huge_pages:
            self.runner.clear()
            return
        with huge_pages_for((self.num_blocks + 1) * self.block_bytes):
            self.runner.clear()
        for _ in use_huge_pages(self.host_buffers()):
            pass

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in the layout that programs use; shared arrays count once."""
        return sum(array.nbytes for array in {id(array): array for array in jax.tree.leaves(self.params)}.values())

    def host_buffers(self) -> list[tuple[int, int]]:
        """Return address and size in bytes of each array of weights and pools that is on one device; empty if the
        platform is not a CPU. Pools allocated later use huge pages."""
        if self.platform != "cpu":
            return []
        self._huge_pages = True
        arrays = [*jax.tree.leaves(self.params), *self.runner.pools]
        return [(array.unsafe_buffer_pointer(), array.nbytes) for array in arrays if len(array.devices()) == 1]

    def run_plan(self, plan: Plan) -> Any:
        """Make a call that rank 0 announced, and return arrays that the caller can wait for."""
        return self.runner.run_plan(plan)

    def execute(self, batch: StepBatch) -> StepHandle | MaskedStepHandle:
        """Dispatch one step. The pools are donated to it: after an exception, call `reset`."""
        self.transfers.announce(batch)
        self.allocate()
        self.transfers.before(batch)
        single = batch.num_tokens == 1
        single[[*batch.prompt_targets, *batch.pool_spans]] = False
        if (self.mixed and not batch.needs_all_states) or batch.masked is not None or single.all() or not single.any():
            return self._dispatch(batch)
        # Decode rows computed as chunks of one token take several times as long as in a decode program.
        parts = [np.flatnonzero(single), np.flatnonzero(~single)]
        return JoinedStepHandle(
            num_rows=len(batch.slots), parts=[(rows, self._dispatch(batch.part(rows))) for rows in parts]
        )

    def send_tables(self, batch: StepBatch) -> None:
        """Send the block tables of a step in advance and wait, so that the step itself is timed without this
        transfer."""
        self.allocate()
        self.runner.send_tables(self.runner.sent_tables.take_changes(batch.slots, batch.block_tables, batch.windows))
        jax.block_until_ready(self.runner.tables)

    def _dispatch(self, batch: StepBatch) -> StepHandle | MaskedStepHandle:
        """Dispatch a step: one forward program and, if sampling is a separate program, the sampling program."""
        runner, step_format, branches = self.runner, self.step_format, self.programs.branches
        rows = np.flatnonzero(batch.samples)
        params = [batch.params[r] for r in rows.tolist()]
        masked = batch.masked if batch.masked is not None and len(batch.masked) else None
        variant = SamplerVariant.for_rows(params, masked=masked is not None)
        in_one = not branches and len(rows) and not variant.penalised and not variant.masked
        in_one = in_one and self.ready.runs_in_one(variant)
        sizes = self.ready.sizes
        step = pack_forward(
            batch,
            step_format,
            runner.sent_tables.take_changes(batch.slots, batch.block_tables, batch.windows),
            mixed=self.mixed,
            sizes=sizes if branches or in_one else dataclasses.replace(sizes, decode=sizes.masked),
            only_chunks=self._prompts.buckets if batch.needs_all_states else None,
        )
        runner.send_tables(step.table_changes)
        in_one = in_one and not step.num_prefill
        kinds, room = self.kinds_offered, None
        if self.ready.is_complete and (in_one or step.num_prefill):
            kinds = self.programs.kind_set_of(batch.kind, step.num_decode, step.num_prefill, step.prefix_room)
            decodes = batch.num_tokens == 1
            room = self.programs.hidden_room_of(step.num_decode, kinds, batch.kind[decodes], batch.start[decodes] + 1)
        done = functools.partial(DeviceStepHandle, num_rows=len(batch.slots), rows=rows)
        if in_one:
            sample_ints = pack_sampling(batch, rows, params, step.num_decode, variant, step_format)
            tokens = runner.decode_call(step.ints, sample_ints, step.num_decode, kinds, variant, room).run()
            return done(tokens=tokens, logprobs=None)
        if batch.needs_all_states:
            states, of_all = self._prompts.run(runner.forward_all_call(step.ints, step.num_prefill))
            places = np.cumsum(batch.num_tokens) - batch.num_tokens
            if batch.prompt_targets:
                done = functools.partial(done, prompts=self._prompts.score(batch, places, of_all))
            if batch.pool_spans:
                pooled = (list(batch.pool_spans), self._prompts.pool(batch, places, of_all))
                done = functools.partial(done, pooled=pooled)
        else:
            states = runner.forward_call(
                step.ints, step.num_decode, step.num_prefill, kinds, room, step.prefix_room
            ).run()
        if not len(rows):
            # The result waits for these states: otherwise steps would queue up on the device and delay tokens.
            return done(tokens=None, logprobs=None, states=states)
        bucket, variant = self.ready.sampler(len(rows), variant)
        ints = pack_sampling(batch, rows, params, bucket, variant, step_format)
        penalties = self._pack_penalties(batch, rows, bucket) if variant.penalised else None

        def sample(masks: Ints | None) -> DeviceStepHandle:
            tokens, logprobs = runner.sample_call(states, ints, penalties, masks, bucket, variant).run()
            return done(tokens=tokens, logprobs=logprobs)

        if masked is None:
            return sample(step_format.empty_masks(bucket) if variant.masked else None)
        places = np.searchsorted(rows, masked)
        return PendingMaskHandle(dispatch=lambda masks: sample(pack_masks(masks, places, bucket, step_format)))

    def _pack_penalties(self, batch: StepBatch, rows: NDArray[np.int64], bucket: int) -> Ints:
        """Pack the sampler's inputs for penalties, and send the changes of token counts that do not fit into them."""
        runner, counting = self.runner, rows_that_count(batch, rows)
        changes = runner.sent_counts.take_changes(
            batch.slots[counting].tolist(), [batch.history[r] for r in counting], batch.prompt_len[counting].tolist()
        )
        ints, more = pack_penalties(batch, rows, bucket, self.config.eos_token_id, self.step_format, changes)
        runner.send_counts(more)
        return ints

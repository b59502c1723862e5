"""The traced programs of a step, compiled for one device or as one `jax.shard_map` over several.

A step is two jitted programs, so the numbers of their shapes add up instead of multiplying:

* forward: (decode bucket, prefill bucket) -> writes the cache, returns hidden states of the sampling rows;
* sample: (bucket of sampling rows, `SamplerVariant`) -> computes logits, returns tokens, updates the last tokens on the
  device.

If the device runs a program as one graph (`KernelBackend.branches` is False), a step of only decode rows is one
program, "decode", with forward and sampling. Programs then do not branch on the device but are compiled for each
`KindSet`. Decode steps that need more sampler features than that program offers run as two programs, which are compiled
in few sizes and for all kinds.

With prefix caching, a third program, "copy", initializes blocks that a step writes to as copies of cached blocks
(`StepBatch.copies`); it is compiled for a few numbers of copies. If policies may convert layer inputs to keys and
values (`StepBatch.conversions`), a fourth program, "convert", does so; it is compiled for two numbers of X blocks, and
more blocks are converted in several calls. Both run before the step and only if needed, as do "change_tables" and
"change_counts" for changes that do not fit into the step.

The block tables of all slots stay on the device; so do, for penalties, the counts of each token in each slot. A step
applies the changes to them and gathers the entries of its rows.

With host memory for blocks that leave the pool, "save" reads several blocks at a time and "load" writes them
(`apt_jax.executor.transfers.host_memory`).

Steps that return log probabilities of prompts run as "forward_all", which treats all rows as chunks and returns the
hidden states of all tokens, and "score_prompts", which computes log probabilities from several of them at a time. For
embeddings, "pool_prompts" sums the states instead. They are compiled in few sizes, when the first such request arrives
(`apt_jax.executor.programs.prompt_logprobs`).
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV, KindSet
from apt_jax.core.step import NO_TOKEN, NULL_BLOCK
from apt_jax.executor.compiling.buckets import SamplerVariant
from apt_jax.executor.compiling.compiler_options import compiler_options, options_of_program, without_places
from apt_jax.executor.compiling.executables import ExecutableStore, kernel_facts
from apt_jax.executor.programs.packing import StepFormat
from apt_jax.executor.programs.token_counts import IN_PROMPT
from apt_jax.models import sharding as parallel
from apt_jax.models.config import HiddenMode, ModelConfig
from apt_jax.models.decoder import convert_inputs, decoder_step, greedy_tokens, logits
from apt_jax.models.layer_groups import LayerGroups
from apt_jax.models.params import ModelParams, output_head
from apt_jax.models.step import ConvertBatch, DecoderBatch, StepOptions, slot_ranges
from apt_jax.ops import sampling
from apt_jax.ops.backend import KernelBackend
from apt_jax.ops.lowered_once import lowered_once
from apt_jax.ops.xla_common import ROOM_STEP

Pools = tuple[Any, ...]
_OPS_FACTS = ("name", "branches", "tiles", "integer_products", "skips_rows", "rows_per_tile")

_ROOM_ROWS = 16
"""Minimum number of decode rows of programs that are compiled for more than one `StepOptions.hidden_room`."""


class Programs:
    """The programs of one executor.

    Args:
        config: configuration of one device's share of the model.
        ops: kernel backend.
        step_format: layout of the vectors from the host.
        kinds_offered: cache kinds that can occur.
        hidden_mode: parts of attention over layer inputs that are absorbed; None: reprojection.
        tensor: collectives over the `mesh`; None: one device.
        mesh: mesh of the devices that share the model; None: one device.
        platform: JAX's name of the devices' platform.
        specs: partition specs of the weights over the mesh.
        tuning_dir: see `compiler_options`.
        layer_groups: groups of layers that share arrays of the pool; None: every layer has an array of its own.

    Attributes:
        jitted: jitted functions by name; programs compiled ahead of time are called without them.
        executables: programs compiled ahead of time or loaded, by `ProgramCall.key`.
        store: store that keeps executables for later starts; None: executables are not kept.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: KernelBackend,
        step_format: StepFormat,
        *,
        kinds_offered: KindSet,
        hidden_mode: HiddenMode | None,
        tensor: parallel.TensorParallel | None,
        mesh: Mesh | None,
        specs: Any,
        platform: str,
        tuning_dir: Path | None = None,
        layer_groups: LayerGroups | None = None,
    ) -> None:
        self._layer_groups = layer_groups
        self.config, self.ops, self.step_format, self.kinds_offered = config, ops, step_format, kinds_offered
        self._hidden_mode: HiddenMode | None = hidden_mode
        self._tensor, self._mesh, self._specs = tensor, mesh, specs
        self.num_hosts = 1 if mesh is None else len({device.process_index for device in mesh.devices.flat})
        size = 1 if mesh is None else mesh.size
        self._platform, self._num_late = platform, 0
        self._draw: Callable[..., Any] = self._draw_rows
        if platform in ("gpu", "cuda"):  # most of a sampling program, and part of many programs
            self._draw = lowered_once(self._draw_rows, static_argnames=(), platform="cuda")
        self._compiler_options = compiler_options(
            platform, num_devices=size, num_hosts=self.num_hosts, tuning_dir=tuning_dir
        )
        pools, alike = parallel.POOL_SPEC, P()
        self.jitted: dict[str, Any] = {
            "forward": self._jit(self.forward, donate=("pools", "tables"), results=(pools, alike, alike)),
            "decode": self._jit(
                self.decode, donate=("pools", "tables", "last_tokens"), results=(pools, alike, alike, alike)
            ),
            "sample": self._jit(self.sample, donate=("last_tokens", "token_counts"), results=alike),
            "copy": self._jit(self.copy, donate=("pools",), results=(pools,)),
            "change_tables": self._jit(self.change_tables, donate=("tables",), results=(alike,)),
            "change_counts": self._jit(self.change_counts, donate=("token_counts",), results=(alike,)),
            "forward_all": self._jit(
                self.forward_all, donate=("pools", "tables"), results=(pools, alike, alike, alike)
            ),
            "score_prompts": self._jit(self.score_prompts, donate=(), results=alike),
            "pool_prompts": self._jit(self.pool_prompts, donate=(), results=alike),
            "convert": self._jit(self.convert, donate=("pools",), results=(pools,)),
            "save": self._jit(self.save, donate=(), results=(parallel.HOST_SPEC,)),
            "load": self._jit(self.load, donate=("pools",), results=(pools,)),
            "save_slots": self._jit(self.save_slots, donate=(), results=(parallel.HOST_SLOTS_SPEC,)),
            "load_slots": self._jit(self.load_slots, donate=("pools",), results=(pools,)),
        }
        self.executables: dict[tuple[Any, ...], Compiled] = {}
        self.store: ExecutableStore | None = None

    def _jit(self, function: Callable[..., Any], *, donate: tuple[str, ...], results: Any) -> Any:
        """Return `function` jitted for the devices; its keyword-only arguments are static.

        Args:
            results: partition specs of the results over several devices, as a prefix of their tree.
        """
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        static = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        if self._mesh is None:
            return jax.jit(
                function, static_argnames=static, donate_argnames=donate, compiler_options=self._compiler_options
            )
        cut = {
            "params": self._specs,
            "head": output_head(self._specs),
            "pools": parallel.POOL_SPEC,
            "rows": parallel.HOST_SPEC,
            "slots": parallel.HOST_SLOTS_SPEC,
        }
        in_specs = tuple(cut.get(name, P()) for name in names)

        def on_all(*args: Any, **fixed: Any) -> Any:
            own = functools.partial(function, **fixed)
            return jax.shard_map(own, mesh=self._mesh, in_specs=in_specs, out_specs=results, check_vma=False)(*args)

        donated = tuple(names.index(name) for name in donate)
        return jax.jit(on_all, static_argnames=static, donate_argnums=donated, compiler_options=self._compiler_options)

    def use_store(self, devices: Sequence[Any]) -> None:
        """Load executables stored by an earlier start, and store newly compiled executables.

        Args:
            devices: devices that the programs run on, in the order of the mesh.
        """
        facts = {
            "config": self.config,
            "step": self.step_format,
            "kinds": self.kinds_offered,
            "hidden": self._hidden_mode,
            "groups": self._layer_groups,
            "ops": {name: getattr(self.ops, name) for name in _OPS_FACTS},
            "tensor": None if self._tensor is None else (self._tensor.size, self._tensor.config),
            "mesh": None if self._mesh is None else self._mesh.shape_tuple,
            "options": without_places(self._compiler_options),
        }
        self.store = ExecutableStore.find(devices, [repr(facts), *kernel_facts(self.ops.name)])

    def forget_loaded(self) -> bool:
        """Discard loaded programs and their stored entries, so that they are compiled again; return False if no program
        was loaded."""
        if self.store is None or not self.store.forget_loaded():
            return False
        self.executables.clear()
        return True

    def options_of(self, num_tokens: int) -> dict[str, Any]:
        """Return the additional compiler options of a program whose matrix products have `num_tokens` rows."""
        return options_of_program(self._platform, num_tokens)

    def count_late(self) -> None:
        """Count a program with its own compiler options that was compiled at its first call."""
        self._num_late += 1

    def num_compiled(self) -> int:
        """Return the number of programs compiled at their first call instead of ahead of time."""
        # The size of a jitted function's cache has no public name yet.
        return self._num_late + sum(getattr(f, "_cache_size")() for f in self.jitted.values())  # noqa: B009

    # --- available programs ----------------------------------------------------------------------------------------

    @property
    def branches(self) -> bool:
        """True if programs branch on the device to skip work that no row needs."""
        return self.ops.branches

    def kind_sets(self, num_decode: int, num_prefill: int, prefix_room: int | None = None) -> list[KindSet]:
        """Return the sets of cache kinds that programs of a size are compiled for; the last set has all kinds. For
        steps of only decode rows, these are the sets of programs that also sample. For prompts, no program is compiled
        without the KV kind, because prompts compute keys and values in any case, and writing either kind costs the
        same."""
        if self.branches or not all(self.kinds_offered):
            return [self.kinds_offered]
        both = KindSet(True, True)
        if not num_prefill:
            return [KindSet(True, False), KindSet(False, True), both]
        return [KindSet(True, False), both] if num_decode and prefix_room == 0 else [both]

    def kind_set_of(
        self, kind: NDArray[np.int8], num_decode: int, num_prefill: int, prefix_room: int | None = None
    ) -> KindSet:
        """Return the smallest of `kind_sets` that has the kinds of a step's rows."""
        sets = self.kind_sets(num_decode, num_prefill, prefix_room)
        has = [not num_prefill and bool((kind == KV).any()), bool((kind == HIDDEN).any())]
        return next(
            kinds for kinds in sets if all(offered or not needed for offered, needed in zip(kinds, has, strict=True))
        )

    def hidden_rooms(self, num_decode: int, kinds: KindSet) -> list[int | None]:
        """Return the values of `StepOptions.hidden_room` that programs with a number of decode rows are compiled for,
        ascending.

        In a CUDA graph, the array of attention scores that is summed over devices has a fixed size. A quarter of the
        capacity of the block tables suffices for most steps of many rows, and then only a quarter of the bytes is
        summed.
        """
        if (
            self.branches
            or not kinds.hidden
            or num_decode < _ROOM_ROWS
            or "decode_absorbed" not in self.ops.takes_shards
        ):
            return [None]
        if not self._options(num_decode, kinds).cuts_by_feature:
            return [None]
        return [num_decode * self.step_format.table_len * self.step_format.hidden_block_size // 4, None]

    def hidden_room_of(self, num_decode: int, kinds: KindSet, kind: NDArray[np.int8], lens: NDArray[np.int32]) -> Any:
        """Return the smallest of `hidden_rooms` that holds the hidden rows among decode rows with these kinds and
        lengths."""
        rooms = self.hidden_rooms(num_decode, kinds)
        if rooms == [None]:
            return None
        needed = int((-(-lens[kind == HIDDEN] // ROOM_STEP) * ROOM_STEP).sum())
        return next(room for room in rooms if room is None or room >= needed)

    # --- traced ----------------------------------------------------------------------------------------------------

    def _options(self, num_decode: int, kinds: KindSet) -> StepOptions:
        return StepOptions(
            num_decode=num_decode,
            block_size=self.step_format.block_size,
            hidden_block_size=self.step_format.hidden_block_size,
            hidden_mode=self._hidden_mode,
            kinds=kinds,
            ops=self.ops,
            tensor=self._tensor,
            layer_groups=self._layer_groups,
        )

    def forward(
        self,
        params: ModelParams,
        pools: Pools,
        tables: Array,
        last_tokens: Array,
        ints: Array,
        *,
        num_decode: int,
        num_prefill: int,
        kinds: KindSet,
        hidden_room: int | None = None,
        prefix_room: int | None = None,
    ) -> tuple[Pools, Array, Array]:
        """Write the cache, and return pools, block tables and the hidden states of the sampling rows."""
        tables, batch, options, sample_rows = self._step(tables, last_tokens, ints, num_decode, num_prefill, kinds)
        options = dataclasses.replace(options, hidden_room=hidden_room, prefix_room=prefix_room)
        pools, states = decoder_step(params, pools, batch, self.config, options, sample_rows)
        return pools, tables, states

    def forward_all(
        self, params: ModelParams, pools: Pools, tables: Array, last_tokens: Array, ints: Array, *, num_prefill: int
    ) -> tuple[Pools, Array, Array, Array]:
        """Like `forward`, but for steps in which all rows are chunks; also returns the hidden states of all tokens."""
        kinds = self.kinds_offered
        tables, batch, options, sample_rows = self._step(tables, last_tokens, ints, 0, num_prefill, kinds)
        pools, states = decoder_step(params, pools, batch, self.config, options)
        return pools, tables, states.at[sample_rows].get(mode="fill", fill_value=0), states

    def _step(
        self, tables: Array, last_tokens: Array, ints: Array, num_decode: int, num_prefill: int, kinds: KindSet
    ) -> tuple[Array, DecoderBatch, StepOptions, Array]:
        """Unpack a step. Returns the changed block tables of all slots, the batch, its options, and the indices of the
        tokens that are sampled from."""
        parts = self.step_format.forward_layout(num_decode, num_prefill).split(ints)
        slots, counts, sample_rows = (parts.pop(n) for n in ("token_slots", "counts", "sample_rows"))
        on_device = last_tokens.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        parts["token_ids"] = jnp.where(parts["token_ids"] < 0, on_device, parts["token_ids"])
        for name in ("token_hidden", "prefill_hidden"):
            parts[name] = parts[name] > 0
        (tables,) = self.change_tables(tables, parts.pop("table_changes"))
        decode_tables = self._tables_of_rows(
            tables, slots[:num_decode], parts["decode_lens"], parts["token_hidden"][:num_decode]
        )
        prefill_tables = self._tables_of_rows(
            tables,
            parts.pop("prefill_slots"),
            parts["prefix_lens"] + parts["prefill_lens"],
            parts["prefill_hidden"],
        )
        decode_ranges = prefill_ranges = None
        if self.step_format.both_ends:
            decode_ranges = self._slot_ranges(decode_tables, parts["decode_lens"], parts["token_hidden"][:num_decode])
            prefill_ranges = self._slot_ranges(prefill_tables, parts["prefix_lens"], parts["prefill_hidden"])
            decode_tables, prefill_tables = jnp.abs(decode_tables), jnp.abs(prefill_tables)
        batch = DecoderBatch(
            **parts,
            decode_tables=decode_tables,
            decode_ranges=decode_ranges,
            prefill_tables=prefill_tables,
            prefill_ranges=prefill_ranges,
            num_kv_rows=counts[0],
            num_decode_rows=counts[1],
            num_prefill_rows=counts[2],
        )
        return tables, batch, self._options(num_decode, kinds), sample_rows

    def _tables_of_rows(self, tables: Array, slots: Array, lens: Array, hidden: Array) -> Array:
        """Return the block tables, (n, H, J), of rows that have `lens` positions. Entries after the blocks in use,
        where a slot's table may still name blocks of an earlier request, are `NULL_BLOCK`."""
        block_size = jnp.where(hidden, self.step_format.hidden_block_size, self.step_format.block_size)
        num_blocks = jax.lax.div(lens + block_size - 1, block_size)  # none is negative
        halves = jnp.stack([num_blocks, jnp.where(hidden, 0, num_blocks)], axis=1)
        if self.step_format.windows is not None:
            size = self.step_format.windows.block_size
            windowed = jax.lax.div(lens + size - 1, jnp.int32(size))[:, None]
            halves = jnp.concatenate([halves, jnp.repeat(windowed, self.step_format.num_windowed, axis=1)], axis=1)
        used = jnp.arange(self.step_format.table_len, dtype=jnp.int32)[None, None, :] < halves[:, :, None]
        # Slots of padding are out of range, and no block of theirs is used.
        return jnp.where(used, tables.at[slots].get(mode="clip", wrap_negative_indices=False), NULL_BLOCK)

    def _slot_ranges(self, tables: Array, lens: Array, hidden: Array) -> Array:
        """Return the slots of shared blocks that belong to each row; see `DecoderBatch.decode_ranges`."""
        sizes = jnp.where(hidden, self.step_format.hidden_block_size, self.step_format.block_size)
        return slot_ranges(tables[:, 0] < 0, lens, sizes)

    def pool_prompts(self, states: Array, segments: Array) -> Array:
        """Return the sums of hidden states by row of a step.

        Args:
            states: (T, D) hidden states of a step, from `forward_all`.
            segments: (T,) int32 row of each token; `max_num_seqs` for tokens that are not summed.

        Returns:
            (max_num_seqs, D) float32.
        """
        rows = self.step_format.max_num_seqs
        return jax.ops.segment_sum(states.astype(jnp.float32), segments, num_segments=rows + 1)[:rows]

    def score_prompts(
        self, head: ModelParams, states: Array, ints: Array, *, rows: int
    ) -> tuple[Array, Array, Array, Array]:
        """Return log probabilities of `rows` prompt tokens: only a few at a time, because their logits take rows * V
        floats.

        Args:
            states: (T, D) hidden states of a step, from `forward_all`.
            ints: (2, rows) indices into `states`, and the tokens that follow.

        Returns:
            The fields of `apt_jax.request.PromptLogprobs`, with the `sampling.NUM_LOGPROBS` most likely tokens.
        """
        assert ints.shape == (2, rows)
        ops = self.ops.for_rows(jnp.int32(rows))
        scores = logits(head, states[ints[0]], self.config, ops.dense, self._tensor)
        chosen, ids, values = sampling.log_probabilities(scores, ints[1])
        own = jnp.take_along_axis(scores, ints[1][:, None], axis=1)
        return chosen, 1 + jnp.sum(scores > own, axis=1, dtype=jnp.int32), ids, values

    def sample(
        self,
        head: ModelParams,
        hidden: Array,
        last_tokens: Array,
        token_counts: Array | None,
        ints: Array,
        penalties: Array | None,
        masks: Array | None,
        *,
        rows: int,
        variant: SamplerVariant,
    ) -> tuple[Array, Array | None, Array, tuple[Array, Array, Array] | None]:
        """Sample tokens. Returns the last tokens, the token counts, a (2, rows) array of the tokens and of flags that
        are 1 if the row's logits were finite, and log probabilities if the variant has them.

        Args:
            token_counts: (max_num_seqs, V), see `SentCounts`; only with `penalties`.
        """
        parts = self.step_format.sample_layout(rows).split(ints)
        ops = self.ops.for_rows(jnp.sum(parts["slots"] < self.step_format.max_num_seqs))
        if variant.greedy:
            tokens, finite = greedy_tokens(head, hidden[:rows], self.config, ops, self._tensor)
            last_tokens = last_tokens.at[parts["slots"]].set(tokens, mode="drop", wrap_negative_indices=False)
            return last_tokens, None, jnp.stack([tokens, finite.astype(jnp.int32)]), None
        raw = logits(head, hidden[:rows], self.config, ops.dense, self._tensor)
        scores = raw
        if penalties is not None and token_counts is not None:
            extra = self.step_format.penalty_layout(rows).split(penalties)
            (token_counts,) = self.change_counts(token_counts, extra.pop("count_changes"))
            counts = token_counts.at[extra.pop("count_slots")].get(mode="fill", fill_value=0)
            extra |= {"in_prompt": counts >= IN_PROMPT, "outputs": counts & (IN_PROMPT - 1)}
            for name in ("repetition", "presence", "frequency", "bias_values"):
                extra[name] = _as_float(extra[name])
            scores = sampling.penalise(raw, sampling.PenaltyRows(**extra), last_tokens)
        unmasked = scores
        if masks is not None:
            scores = sampling.allow(scores, masks)
        settings = sampling.SamplingRows(
            temperature=_as_float(parts["temperature"]),
            top_k=parts["top_k"],
            top_p=_as_float(parts["top_p"]),
            min_p=_as_float(parts["min_p"]),
            seed=jax.lax.bitcast_convert_type(parts["seed"], jnp.uint32),
            position=parts["position"],
        )
        if self.branches and variant.masked and not variant.penalised:  # most such rows are greedy
            tokens, finite = jax.lax.cond(
                jnp.any(settings.temperature > 0.0),
                self._draw,
                lambda scores, _: sampling.greedy(scores),
                scores,
                settings,
            )
        else:
            tokens, finite = self._draw(scores, settings)
        last_tokens = last_tokens.at[parts["slots"]].set(tokens, mode="drop", wrap_negative_indices=False)
        if masks is not None:
            model_is_finite = sampling.is_finite_row(unmasked)
            tokens = jnp.where(model_is_finite & ~finite, NO_TOKEN, tokens)
            finite = model_is_finite
        packed = jnp.stack([tokens, finite.astype(jnp.int32)])
        logprobs = sampling.log_probabilities(raw, tokens) if variant.penalised else None
        return last_tokens, token_counts, packed, logprobs

    def _draw_rows(self, scores: Array, settings: sampling.SamplingRows) -> tuple[Array, Array]:
        return sampling.sample(scores, settings, branches=self.branches)

    def decode(
        self,
        params: ModelParams,
        pools: Pools,
        tables: Array,
        last_tokens: Array,
        forward_ints: Array,
        sample_ints: Array,
        *,
        num_decode: int,
        kinds: KindSet,
        variant: SamplerVariant,
        hidden_room: int | None = None,
    ) -> tuple[Pools, Array, Array, Array]:
        """Run forward and sampling of decode rows as one program."""
        rows: dict[str, Any] = {"num_decode": num_decode, "num_prefill": 0, "kinds": kinds, "hidden_room": hidden_room}
        pools, tables, hidden = self.forward(params, pools, tables, last_tokens, forward_ints, **rows)
        last_tokens, _, tokens, _ = self.sample(
            params, hidden, last_tokens, None, sample_ints, None, None, rows=num_decode, variant=variant
        )
        return pools, tables, last_tokens, tokens

    def convert(self, params: ModelParams, pools: Pools, ints: Array, *, num_blocks: int) -> tuple[Pools]:
        """Compute keys and values from cached layer inputs, and write them to the pools."""
        batch = ConvertBatch(**self.step_format.convert_layout(num_blocks).split(ints))
        return (convert_inputs(params, pools, batch, self.config, self._options(0, self.kinds_offered)),)

    def change_tables(self, tables: Array, changes: Array) -> tuple[Array]:
        """Apply changes, a (2, m) array of flat indices and blocks, to the block tables, which are donated."""
        slot, rest = _divided(changes[0], self.step_format.tables_shape[1] * self.step_format.table_len)
        half, column = _divided(rest, self.step_format.table_len)
        changed = tables.at[slot, half, column].set(changes[1], mode="drop", wrap_negative_indices=False)
        return (changed,)

    def change_counts(self, token_counts: Array, changes: Array) -> tuple[Array]:
        """Apply changes, a (2, m) array of flat indices and increments, to the token counts, which are donated."""
        slot, token = _divided(changes[0], self.step_format.vocab_size)
        return (token_counts.at[slot, token].add(changes[1], mode="drop", wrap_negative_indices=False),)

    # A method although it does not use `self`: `jax.jit` caches by function, and each executor counts its own programs.
    def copy(self, pools: Pools, pairs: Array) -> tuple[Pools]:
        """Compute `pool[pairs[:, 1]] = pool[pairs[:, 0]]` for each pool, all reads before all writes; donates the
        pools."""
        source, destination = pairs[:, 0], pairs[:, 1]
        return (tuple(pool.at[destination].set(pool[source], mode="drop") for pool in pools),)

    def save(self, pools: Pools, blocks: Array) -> tuple[Array]:
        """Return the contents of n blocks over all layers, (n, L, block_size, lane)."""
        return (jnp.stack([pool[blocks] for pool in pools], axis=1),)

    def load(self, pools: Pools, blocks: Array, rows: Array) -> tuple[Pools]:
        """Write contents returned by `save` into n blocks of the pools, which are donated. Blocks outside the pool are
        dropped."""
        return (tuple(pool.at[blocks].set(rows[:, layer], mode="drop") for layer, pool in enumerate(pools)),)

    def save_slots(self, pools: Pools, places: Array, *, width: int) -> tuple[Array]:
        """Return the contents of n slots over all layers, (n, L, `width`). `places`: (n, 2) block and slot, counted in
        slots of `width` values."""
        columns = self._columns(places, width)
        by_layer = [pool.reshape(pool.shape[0], -1)[places[:, :1], columns] for pool in pools]
        return (jnp.stack(by_layer, axis=1),)

    def load_slots(self, pools: Pools, places: Array, slots: Array, *, width: int) -> tuple[Pools]:
        """Write contents returned by `save_slots` into n slots of the pools, which are donated. Blocks outside the pool
        are dropped."""
        columns = self._columns(places, width)

        def loaded(pool: Array, rows: Array) -> Array:
            by_block = pool.reshape(pool.shape[0], -1)
            return by_block.at[places[:, :1], columns].set(rows, mode="drop").reshape(pool.shape)

        return (tuple(loaded(pool, slots[:, layer]) for layer, pool in enumerate(pools)),)

    def _columns(self, places: Array, width: int) -> Array:
        """Return the indices of the values of slots in a flattened block, (n, values of a slot on this device); a slot
        has `width` values over all devices."""
        own = width if self._tensor is None else width // self._tensor.size
        return places[:, 1:] * own + jnp.arange(own, dtype=jnp.int32)[None]


def _divided(places: Array, by: int) -> tuple[Array, Array]:
    """Return quotient and remainder of nonnegative numbers; `jnp.divmod` takes 20 operations to support negative
    numbers."""
    divisor = jnp.asarray(by, places.dtype)
    return jax.lax.div(places, divisor), jax.lax.rem(places, divisor)


def _as_float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)

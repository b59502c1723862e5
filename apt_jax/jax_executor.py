"""The executor that runs a real model with JAX.

A step is two jitted programs, so that their shapes do not multiply:

* forward: (decode bucket, prefill bucket) -> cache written, hidden states of the rows that sample;
* sample: (bucket of sampling rows, variant) -> logits, tokens, device memory of last tokens. Variants: "greedy" is argmax
  alone, "sample" draws, "full" draws with penalties, bias and log probabilities; "masked" and "masked full" are "sample"
  and "full" for steps with rows of which only some tokens are allowed.

Where the device runs a program as one graph (`AttentionOps.branches` is False), a step of decode rows alone is one
program, forward and sampling, and programs do not branch: they are compiled for each mixture of cache kinds, and for draws
without top-k and top-p ("draw").

With prefix caching there is a third program, for a few numbers of copies: blocks that a step writes to begin as copies of
cached ones (`StepBatch.copies`). It runs before the step and only where there is something to copy. Where policies may convert
layer inputs to keys and values (`StepBatch.conversions`), a fourth does it likewise, for two numbers of X blocks: many of them
are done in several calls.

All are compiled for every bucket by `warm_up`; serving never compiles. The pools and the last-token memory are donated
and rebound in the statement that calls the program. The host crosses to the device once a program: all integers of a
step travel as one vector, cut up by static offsets on the device. Sampled tokens are fed into the next step on the
device, so the next step can be dispatched before the host has seen them. Masks come late: forward is dispatched without
them, sampling when they are there (`MaskedStepHandle`).

Over several devices every program is one `jax.shard_map`: weights and pools are cut (`apt_jax.parallel`), everything else is
the same on all of them. Where they are of several hosts, rank 0 announces every call to the others (`apt_jax.hosts`).
"""

import concurrent.futures
import dataclasses
import functools
import inspect
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from apt_jax import parallel, sampling
from apt_jax.config import CacheConfig, HiddenMode, ModelConfig, Quantization
from apt_jax.cpu.tiles import tile_params
from apt_jax.errors import ConfigError
from apt_jax.executor import (
    NO_TOKEN,
    Conversions,
    MaskedStepHandle,
    StepBatch,
    StepHandle,
    StepResult,
    is_out_of_memory,
)
from apt_jax.hosts import Leader, Plan
from apt_jax.models.decoder import (
    ConvertBatch,
    DecoderBatch,
    StepOptions,
    convert_inputs,
    decoder_step,
    greedy_tokens,
    logits,
)
from apt_jax.models.loader import free_memory_bytes
from apt_jax.models.params import ModelParams, by_layers, fuse_products
from apt_jax.models.quantize import quantize_params
from apt_jax.pallas import AttentionOps, attention_ops, over_devices
from apt_jax.pallas.xla import ROWS_PER_TILE
from apt_jax.request import SamplingParams
from apt_jax.sched.view import HIDDEN, KV

logger = logging.getLogger(__name__)

MAX_CPU_POOL_BYTES = 4 << 30
"""Largest pool that is chosen without being asked for on a CPU."""
MAX_MODEL_LEN = 1 << 22
"""Longest context: block tables and histories are as long for every seat."""
_MIN_PREFILL_BUCKET = 32
_MAX_COMPILERS = 8
"""Programs that are compiled at once."""


CONVERT_TOKENS = (128, 1024)
"""About how many layer inputs the programs convert that make keys and values of them."""

_NO_COPIES = np.zeros((0, 2), np.int32)


def power_of_two_buckets(smallest: int, largest: int, multiple: int = 1) -> list[int]:
    """Powers of two from `smallest`, and last the smallest multiple of `multiple` that holds `largest`."""
    buckets = []
    size = smallest
    while size < largest:
        buckets.append(size)
        size *= 2
    last = largest if largest <= multiple else -(-largest // multiple) * multiple
    if largest <= multiple:
        last = size
    return [b for b in buckets if b < last] + [last]


def pool_dtype(dtype: Any, platform: str) -> Any:
    """The pool's dtype. jax 0.10 upcasts a whole 16-bit pool at every cache write on CPU; float32 avoids that there."""
    old = tuple(int(p) for p in jax.__version__.split(".")[:2]) < (0, 11)
    return jnp.float32 if old and platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16 else dtype


class _Layout:
    """Named int32 arrays in one vector: packed on the host, cut up by static offsets on the device."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._parts: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.size = 0
        for name, shape in shapes.items():
            self._parts[name] = (self.size, shape)
            self.size += int(np.prod(shape, dtype=np.int64))

    def views(self, vector: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
        """Writeable views of a host vector."""
        return {
            n: vector[o : o + int(np.prod(s, dtype=np.int64))].reshape(s)
            for n, (o, s) in self._parts.items()
        }

    def unpack(self, vector: Array) -> dict[str, Array]:
        return {
            n: vector[o : o + int(np.prod(s, dtype=np.int64))].reshape(s)
            for n, (o, s) in self._parts.items()
        }


def _forward_layout(
    num_decode: int, num_prefill: int, num_rows: int, table_len: int, num_samples: int
) -> _Layout:
    t = num_decode + num_prefill
    return _Layout(
        token_ids=(t,),
        token_seats=(t,),
        positions=(t,),
        first_slots=(t,),
        second_slots=(t,),
        token_hidden=(t,),
        decode_tables=(num_decode, 2, table_len),
        decode_lens=(num_decode,),
        prefill_tables=(num_rows, 2, table_len),
        prefill_offsets=(num_rows,),
        prefill_lens=(num_rows,),
        prefix_lens=(num_rows,),
        prefill_hidden=(num_rows,),
        counts=(3,),
        sample_rows=(num_samples,),
    )


def _convert_layout(num_blocks: int, block_size: int) -> _Layout:
    slots = (num_blocks * block_size,)
    return _Layout(blocks=(num_blocks,), positions=slots, first_slots=slots, second_slots=slots)


def _sample_layout(rows: int) -> _Layout:
    # temperature, top_p and min_p are float32 bit patterns.
    return _Layout(
        seats=(rows,), top_k=(rows,), seed=(rows,), position=(rows,),
        temperature=(rows,), top_p=(rows,), min_p=(rows,),
    )  # fmt: skip


def _penalty_layout(rows: int, context: int) -> _Layout:
    # repetition, presence, frequency and bias_values are float32 bit patterns.
    return _Layout(
        history=(rows, context), prompt_len=(rows,), history_len=(rows,), last_seat=(rows,),
        repetition=(rows,), presence=(rows,), frequency=(rows,),
        bias_ids=(rows, sampling.NUM_BIASES), bias_values=(rows, sampling.NUM_BIASES),
    )  # fmt: skip


def _as_float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@dataclasses.dataclass(kw_only=True)
class _Handle:
    """A dispatched step; `rows` are the batch rows that sampled, in the order of the device arrays."""

    num_rows: int
    rows: NDArray[np.int64]
    tokens: Array | None
    logprobs: tuple[Array, Array, Array] | None

    def result(self) -> StepResult:
        token_ids = np.full(self.num_rows, NO_TOKEN, np.int32)
        finite = np.ones(self.num_rows, bool)
        if self.tokens is None:
            return StepResult(token_ids=token_ids, finite=finite)
        host = np.asarray(self.tokens)
        n = len(self.rows)
        token_ids[self.rows] = host[0, :n]
        finite[self.rows] = host[1, :n] > 0
        if self.logprobs is None:
            return StepResult(token_ids=token_ids, finite=finite)
        chosen, ids, values = (np.asarray(a)[:n] for a in self.logprobs)
        logprob = np.zeros(self.num_rows, np.float32)
        top_ids = np.zeros((self.num_rows, ids.shape[1]), np.int32)
        top_logprobs = np.zeros((self.num_rows, ids.shape[1]), np.float32)
        logprob[self.rows], top_ids[self.rows], top_logprobs[self.rows] = chosen, ids, values
        return StepResult(
            token_ids=token_ids,
            finite=finite,
            logprob=logprob,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _JoinedHandle:
    """A step in several parts, each with the rows of the batch that it ran."""

    num_rows: int
    parts: Sequence[tuple[NDArray[np.int64], StepHandle]]

    def result(self) -> StepResult:
        results = [(rows, handle.result()) for rows, handle in self.parts]

        def joined(name: str) -> Any:
            given = [
                (rows, getattr(r, name)) for rows, r in results if getattr(r, name) is not None
            ]
            if not given:
                return None
            first = given[0][1]
            out = np.zeros((self.num_rows, *first.shape[1:]), first.dtype)
            for rows, values in given:
                out[rows] = values
            return out

        return StepResult(**{f.name: joined(f.name) for f in dataclasses.fields(StepResult)})


@dataclasses.dataclass(kw_only=True)
class _MaskedHandle:
    """A step whose forward program is dispatched, and that is sampled with masks."""

    dispatch: Callable[[NDArray[np.int32]], _Handle]
    sampled: _Handle | None = None

    def sample(self, masks: NDArray[np.int32]) -> None:
        self.sampled = self.dispatch(masks)

    def result(self) -> StepResult:
        if self.sampled is None:
            raise RuntimeError("a step with masked rows was not sampled")
        return self.sampled.result()


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a jitted program that donates some of the executor's arrays."""

    executor: "JaxExecutor"
    name: str
    """Of the program."""
    args: tuple[Any, ...]
    static: dict[str, Any]
    keeps: tuple[str, ...]
    """The executor's attributes that the first results replace."""

    def lower(self) -> Any:
        """The program for these arguments, as JAX hands it to the compiler."""
        return self.executor.programs[self.name].lower(*self.args, **self.static)

    def run(self) -> Any:
        """The results that replace nothing."""
        if self.executor.leader is not None:
            host = [a for a in self.args if a is None or isinstance(a, np.ndarray)]
            self.executor.leader.announce(Plan(program=self.name, arrays=host, static=self.static))
        results = self.executor.programs[self.name](*self.args, **self.static)
        for name, value in zip(self.keeps, results, strict=False):
            setattr(self.executor, name, value)
        rest = results[len(self.keeps) :]
        return rest[0] if len(rest) == 1 else rest


def _extras(config: ModelConfig, hidden_mode: HiddenMode | None, hidden: bool) -> frozenset[str]:
    """What of `pallas.registry.EXTRAS` a model needs."""
    needed = {
        "softcap": config.attention_softcap is not None,
        "alibi": bool(config.alibi_slopes),
        "window": any(window is not None for window in config.layer_windows),
        "key norm": hidden and config.qk_norm is not None,
        "grouped absorption": hidden_mode in ("partial", "v-absorb") and config.num_heads > config.num_kv_heads,
        "input width": hidden and config.hidden_size != config.lane,
    }  # fmt: skip
    return frozenset(name for name, is_needed in needed.items() if is_needed)


def _attention_ops(
    platform: str, wanted: str | AttentionOps | None, chip: str | None, extras: frozenset[str]
) -> AttentionOps:
    """The ops asked for, or the platform's; XLA's where those cannot do what the model needs and nobody named them."""
    if isinstance(wanted, AttentionOps):
        ops = wanted
    else:
        try:
            ops = attention_ops(platform, wanted, chip)
        except ValueError as error:
            raise ConfigError(f"{error} (--attention-backend)") from None
    missing = ", ".join(sorted(extras - ops.extras))
    if not missing:
        return ops
    if wanted is not None:
        raise ConfigError(
            f"attention backend {ops.name!r} cannot do what this model needs: {missing}; use xla (--attention-backend)"
        )
    logger.warning("attention: %s cannot do %s; this model runs on xla", ops.name, missing)
    return attention_ops(platform, "xla", chip)


class JaxExecutor:
    """Implements `apt_jax.executor.Executor` on one device, or on several as one.

    Args:
        params: weights on the device, or anywhere with a `mesh`, all of one dtype; activations and cache take it.
        cache: block size, pool size, which kinds may occur, and how hidden rows attend.
        max_num_seqs, max_num_batched_tokens, max_model_len: bounds of a step; they fix the buckets.
        mixed: also compile steps in which decode rows and prompt chunks have their own attention paths; without it a
            step with both is two programs, one after another (one that computes all rows as chunks where some sample under
            a mask). None: where decode attention is a kernel of its own.
        attention: implementation, or its name for `apt_jax.pallas.attention_ops`; None: the platform's default.
        quantization: "int8": see `models.quantize`; None: weights as they are.
        mesh: of the devices that share the model, from `parallel.tensor_mesh`; None: one.
        conversion: also compile what makes keys and values of cached layer inputs (`Plan.convert`), where both kinds are
            offered. Without it `can_convert` is False.

    Raises:
        ConfigError: the cache mode does not suit the model, there is no such implementation of attention, no memory for the
            pool, or the model cannot be cut for so many devices.
    """

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
        attention: str | AttentionOps | None = None,
        quantization: Quantization = None,
        mesh: Mesh | None = None,
        conversion: bool = False,
    ) -> None:
        mesh = None if mesh is None or mesh.size == 1 else mesh
        self.num_devices = 1 if mesh is None else mesh.size
        parallel.check_size(config, self.num_devices)
        if quantization is not None and mesh is not None:
            raise ConfigError(f"quantization={quantization!r} runs on one device; leave out -tp or --quantization")  # fmt: skip
        if max_model_len > MAX_MODEL_LEN:
            raise ConfigError(
                f"max_model_len={max_model_len} is more than this version serves; give at most {MAX_MODEL_LEN} (--max-model-len)"
            )
        windows = tuple(
            w if w is not None and w < max_model_len else None for w in config.layer_windows
        )  # one that no context outgrows is none
        loaded = dataclasses.replace(config, layer_windows=windows if any(windows) else ())
        config = parallel.with_repeated_heads(loaded, self.num_devices)
        self._own = parallel.own_config(config, self.num_devices)
        self._tensor = None if mesh is None else parallel.TensorParallel(mesh.size, config)
        self._mesh = mesh
        self.config, self.cache_config, self.quantization = config, cache, quantization
        self.block_size, self.max_num_seqs = cache.block_size, max_num_seqs
        self.max_num_batched_tokens, self.max_model_len = max_num_batched_tokens, max_model_len
        if max_model_len > config.max_position:
            raise ConfigError(
                f"max_model_len={max_model_len} exceeds the model's {config.max_position} positions (--max-model-len)"
            )
        hidden = parallel.offers_hidden(config, cache, self.num_devices)
        self.kinds_offered = (cache.mode != "hidden", hidden)
        self.hidden_block_size = (
            config.hidden_block_size(cache.block_size) if hidden else cache.block_size
        )
        self.can_convert = conversion and all(self.kinds_offered)
        absorbs = hidden and cache.hidden_attention != "reproject"
        self.hidden_mode: HiddenMode | None = config.hidden_mode if absorbs else None
        # One that this process can ask.
        self._device = mesh.local_devices[0] if mesh else next(iter(params.embed.devices()))
        self.platform = self._device.platform
        if mesh is not None and self.platform == "cpu":
            # Devices that a CPU plays are for tests; kernels there own all of its threads.
            attention = attention or "xla"
            if attention == "cpu":
                raise ConfigError("the kernels for CPUs run on one device; leave out -tp or --attention-backend cpu")  # fmt: skip
        # Over several devices hidden rows are not the kernels'.
        extras = _extras(config, self.hidden_mode, hidden and mesh is None)
        self._ops = _attention_ops(self.platform, attention, _chip(self._device), extras)
        if mesh is not None:
            self._ops = over_devices(self._ops)
        tiles = self._ops.tiles and params.dtype == jnp.bfloat16

        def prepared(params: ModelParams) -> ModelParams:
            if self.platform == "cpu":
                params = fuse_products(params, keep=hidden)
            if quantization is not None:
                params = quantize_params(params, keep=hidden)
            return tile_params(params, keep=hidden) if tiles else params

        if mesh is None:
            self.params, self._specs = by_layers(params, prepared), None
        else:
            self.params, self._specs = parallel.shard_params(params, loaded, mesh, absorbs=self.hidden_mode == "absorb")  # fmt: skip
        self.attention_name, self.rows_per_tile = self._ops.name, self._ops.rows_per_tile
        self.mixed = not self._ops.branches if mixed is None else mixed
        self._pool_dtype = pool_dtype(self.params.dtype, self.platform)
        kv_len = -(-max_model_len // cache.block_size) * self.kinds_offered[KV]
        hidden_len = -(-max_model_len // self.hidden_block_size) * hidden
        self._table_len = max(kv_len, hidden_len)
        self._blocks_per_seq = max(2 * kv_len, hidden_len)
        self.decode_buckets = power_of_two_buckets(1, max_num_seqs, ROWS_PER_TILE)
        # Every second one: half as many programs to compile, for at most twice the rows in the sampler.
        self.masked_buckets = sorted({self.decode_buckets[0], *self.decode_buckets[::-2]})
        self.prefill_buckets = power_of_two_buckets(
            min(_MIN_PREFILL_BUCKET, max_num_batched_tokens), max_num_batched_tokens
        )
        self.num_blocks = cache.num_blocks_override or self._blocks_from_memory()
        pools, alike = P(None, parallel.AXIS), P()
        program = self._program
        self.programs: dict[str, Any] = {
            "forward": program(self._forward, donate=("pools",), results=(pools, alike)),
            "decode": program(self._decode, donate=("pools", "last_tokens"), results=(pools, alike, alike)),
            "sample": program(self._sample, donate=("last_tokens",), results=alike),
            "copy": program(_copy_blocks, donate=("pools",), results=(pools,)),
            "convert": program(self._convert, donate=("pools",), results=(pools,)),
        }  # fmt: skip
        self.copy_buckets = sorted({min(8, 2 * max_num_seqs), 2 * max_num_seqs})
        per_block = self.hidden_block_size
        self.convert_buckets = sorted(
            {-(-min(n, max_model_len) // per_block) for n in CONVERT_TOKENS}
        )
        """X blocks, by program."""
        self._compiled_at_warm_up = 0
        self.leader: Leader | None = None
        """Told of every call, where there are other hosts that must make it too."""
        self._states: Array | None = None  # of the last forward program that `run_plan` ran
        self._pools: tuple[Array, ...] = ()
        free = self._free_bytes()
        try:
            self.reset()
        except Exception as error:
            if is_out_of_memory(error):
                raise self._no_room(self.num_blocks, free) from error
            raise

    def _program(
        self, function: Callable[..., Any], *, donate: tuple[str, ...], results: Any
    ) -> Any:
        """`function` compiled for the devices; its keyword-only arguments are static.

        Args:
            results: how what it returns is cut over several devices, as a prefix of its tree.
        """
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        static = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        if self._mesh is None:
            return jax.jit(function, static_argnames=static, donate_argnames=donate)
        cut = {"params": self._specs, "pools": P(None, parallel.AXIS)}
        in_specs = tuple(cut.get(name, P()) for name in names)

        def on_all(*args: Any, **fixed: Any) -> Any:
            own = functools.partial(function, **fixed)
            return jax.shard_map(
                own, mesh=self._mesh, in_specs=in_specs, out_specs=results, check_vma=False
            )(*args)

        donated = tuple(names.index(name) for name in donate)
        return jax.jit(on_all, static_argnames=static, donate_argnums=donated)

    @property
    def absorbs(self) -> bool:
        """Whether attention over layer inputs absorbs what of it can be."""
        return self.hidden_mode is not None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and devices."""
        return (
            self.config.num_layers
            * self.block_size
            * self.config.lane
            * jnp.dtype(self._pool_dtype).itemsize
        )

    def _free_bytes(self) -> int:
        """Of the device, the host's where the device has none of its own or does not tell."""
        free = free_memory_bytes(self._device)
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if free is None else free

    def _blocks_from_memory(self) -> int:
        """As many as there is memory for; where it is the host's, no more than all seats can fill."""
        free = self._free_bytes()
        budget = int(free * self.cache_config.device_memory_utilization)
        if self.platform != "cpu":
            budget *= self.num_devices
        if self.platform == "cpu" or free_memory_bytes(self._device) is None:
            wanted = self.max_num_seqs * self._blocks_per_seq
            budget = min(budget, MAX_CPU_POOL_BYTES, wanted * self.block_bytes)
        blocks, least = budget // self.block_bytes, 2 if self.kinds_offered[KV] else 1
        if self._mesh is not None:
            blocks = self._least(blocks)
        if blocks < least:
            raise self._no_room(least, free)
        return blocks

    def _least(self, number: int) -> int:
        """The smallest of what each device's process says."""
        assert self._mesh is not None
        own = np.full(1, min(number, 2**31 - 1), np.int32)
        all_said = jax.make_array_from_callback(
            (self.num_devices,), self._placed(P(parallel.AXIS)), lambda _: own
        )
        return int(jax.jit(jnp.min, out_shardings=self._placed(P()))(all_said))

    def _no_room(self, num_blocks: int, free: int) -> ConfigError:
        shares = (
            1 if self.platform == "cpu" else self.num_devices
        )  # devices that a CPU plays share its memory
        needed = (num_blocks + 1) * self.block_bytes // shares
        return ConfigError(
            f"the cache pool of {num_blocks} blocks takes {needed:,} bytes, but {free:,} bytes of memory are free; "
            "lower --num-blocks-override, --block-size or --device-memory-utilization, or choose a smaller model, --dtype or --quantization"
        )

    # ---- device programs

    def _options(self, num_decode: int, kinds: tuple[bool, bool]) -> StepOptions:
        return StepOptions(
            num_decode=num_decode,
            block_size=self.block_size,
            hidden_block_size=self.hidden_block_size,
            hidden_mode=self.hidden_mode,
            kinds=kinds,
            ops=self._ops,
            tensor=self._tensor,
        )

    def _layout(self, num_decode: int, num_prefill: int) -> _Layout:
        return _forward_layout(
            num_decode,
            num_prefill,
            min(self.max_num_seqs, num_prefill),
            self._table_len,
            self.decode_buckets[-1],
        )

    def _forward(
        self,
        params: ModelParams,
        pools: tuple[Array, ...],
        last_tokens: Array,
        ints: Array,
        *,
        num_decode: int,
        num_prefill: int,
        kinds: tuple[bool, bool],
    ) -> tuple[tuple[Array, ...], Array]:
        parts = self._layout(num_decode, num_prefill).unpack(ints)
        seats, counts, sample_rows = (
            parts.pop(n) for n in ("token_seats", "counts", "sample_rows")
        )
        on_device = last_tokens.at[seats].get(mode="fill", fill_value=0)
        parts["token_ids"] = jnp.where(parts["token_ids"] < 0, on_device, parts["token_ids"])
        for name in ("token_hidden", "prefill_hidden"):
            parts[name] = parts[name] > 0
        batch = DecoderBatch(
            **parts, num_kv_rows=counts[0], num_decode_rows=counts[1], num_prefill_rows=counts[2]
        )
        pools, hidden = decoder_step(
            params, pools, batch, self._own, self._options(num_decode, kinds)
        )
        return pools, hidden.at[sample_rows].get(mode="fill", fill_value=0)

    def _sample(
        self,
        params: ModelParams,
        hidden: Array,
        last_tokens: Array,
        ints: Array,
        penalties: Array | None,
        masks: Array | None,
        *,
        rows: int,
        variant: str,
    ) -> tuple[Array, Array, tuple[Array, Array, Array] | None]:
        parts = _sample_layout(rows).unpack(ints)
        if variant == "greedy":
            tokens, finite = greedy_tokens(
                params, hidden[:rows], self._own, self._ops, self._tensor
            )
            last_tokens = last_tokens.at[parts["seats"]].set(tokens, mode="drop")
            return last_tokens, jnp.stack([tokens, finite.astype(jnp.int32)]), None
        raw = logits(params, hidden[:rows], self._own, self._ops.dense, self._tensor)
        scores = raw
        if penalties is not None:
            extra = _penalty_layout(rows, self.max_model_len).unpack(penalties)
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
        draw = functools.partial(sampling.sample, borders=self._borders(variant))
        if variant == "masked" and self._ops.branches:  # most of them are greedy
            tokens, finite = jax.lax.cond(
                jnp.any(settings.temperature > 0.0),
                draw,
                lambda scores, _: sampling.greedy(scores),
                scores,
                settings,
            )
        else:
            tokens, finite = draw(scores, settings)
        last_tokens = last_tokens.at[parts["seats"]].set(tokens, mode="drop")
        if masks is not None:
            model_is_finite = sampling.is_trusted(unmasked)
            tokens = jnp.where(model_is_finite & ~finite, NO_TOKEN, tokens)
            finite = model_is_finite
        packed = jnp.stack([tokens, finite.astype(jnp.int32)])
        extras = sampling.log_probabilities(raw, tokens) if variant.endswith("full") else None
        return last_tokens, packed, extras

    def _decode(
        self,
        params: ModelParams,
        pools: tuple[Array, ...],
        last_tokens: Array,
        forward_ints: Array,
        sample_ints: Array,
        *,
        num_decode: int,
        kinds: tuple[bool, bool],
        variant: str,
    ) -> tuple[tuple[Array, ...], Array, Array]:
        """Forward and sampling of decode rows as one program."""
        pools, hidden = self._forward(
            params,
            pools,
            last_tokens,
            forward_ints,
            num_decode=num_decode,
            num_prefill=0,
            kinds=kinds,
        )
        last_tokens, tokens, _ = self._sample(
            params, hidden, last_tokens, sample_ints, None, None, rows=num_decode, variant=variant
        )
        return pools, last_tokens, tokens

    def _convert(
        self, params: ModelParams, pools: tuple[Array, ...], ints: Array, *, num_blocks: int
    ) -> tuple[tuple[Array, ...]]:
        batch = ConvertBatch(**_convert_layout(num_blocks, self.hidden_block_size).unpack(ints))
        options = self._options(0, self.kinds_offered)
        return (convert_inputs(params, pools, batch, self._own, options),)

    # ---- host side

    def reset(self) -> None:
        """Make the pool and the last-token memory anew after a step that failed; all cache is lost.

        Raises:
            RuntimeError: other hosts are in that step too, and who knows where.
        """
        if self.leader is not None:
            time.sleep(1.0)  # where it failed for want of another rank, that is said first
            raise RuntimeError("a step failed, and several hosts do not begin anew together")
        self.clear()

    def clear(self) -> None:
        """Make the pool and the last-token memory anew, on all hosts; all cache is lost."""
        if self.leader is not None:
            self.leader.announce(Plan(program="clear", arrays=[], static={}))
        for pool in self._pools:
            pool.delete()  # a step that failed early has not taken it, and there is no room for two
        shape = (self.num_blocks + 1, self.block_size * self.config.lane)
        where = self._placed(P(None, parallel.AXIS))
        self._pools = tuple(
            jnp.zeros(shape, self._pool_dtype, device=where) for _ in range(self.config.num_layers)
        )
        self._last_tokens = jnp.zeros(self.max_num_seqs, jnp.int32, device=self._placed(P()))

    def _placed(self, spec: P) -> Any:
        """The device, or how something is cut over all of them."""
        return self._device if self._mesh is None else NamedSharding(self._mesh, spec)

    @property
    def compilations(self) -> int:
        """Programs compiled since `warm_up` ended."""
        return self._num_programs() - self._compiled_at_warm_up

    def _num_programs(self) -> int:
        # The size of a jitted function's cache has no public name yet.
        return sum(getattr(f, "_cache_size")() for f in self.programs.values())  # noqa: B009

    def _mixtures(self) -> list[tuple[bool, bool]]:
        """Mixtures of kinds that forward programs are compiled for."""
        if self._ops.branches or not all(self.kinds_offered):
            return [self.kinds_offered]
        return [(True, False), (False, True), (True, True)]

    def _mixture(self, kind: NDArray[np.int8]) -> tuple[bool, bool]:
        """The one that a step's rows need."""
        if self._ops.branches or not all(self.kinds_offered):
            return self.kinds_offered
        return bool((kind == KV).any()), bool((kind == HIDDEN).any())

    def _borders(self, variant: str) -> sampling.Borders:
        if self._ops.branches:
            return "maybe"
        return "no" if variant == "draw" else "yes"

    def _variant(self, params: Sequence[SamplingParams], *, masked: bool) -> str:
        """The sampler's program that some rows need."""
        if any(p.needs_penalties or p.logprobs is not None for p in params):
            return "masked full" if masked else "full"
        if masked:
            return "masked"
        if all(p.is_greedy for p in params):
            return "greedy"
        plain = all(p.top_k <= 0 and p.top_p >= 1.0 for p in params)
        return "draw" if plain and not self._ops.branches else "sample"

    def _variants(self) -> list[str]:
        return (
            ["greedy", "sample", "full"]
            if self._ops.branches
            else ["greedy", "draw", "sample", "full"]
        )

    def _forward_shapes(self) -> list[tuple[int, int]]:
        shapes = [(b, 0) for b in self.decode_buckets] + [(0, t) for t in self.prefill_buckets]
        if self.mixed:
            shapes += [(self.decode_buckets[-1], t) for t in self.prefill_buckets]
        return shapes

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile and run every program once, on empty batches that touch no block.

        Where programs are many, as nothing branches on the device, they are compiled side by side first.
        """
        shapes = [(*shape, kinds) for shape in self._forward_shapes() for kinds in self._mixtures()]
        variants = [(rows, variant) for rows in self.decode_buckets for variant in self._variants()]
        variants += [
            (r, variant) for r in self.masked_buckets for variant in ("masked", "masked full")
        ]
        decodes = [
            (rows, kinds, variant)
            for rows in (() if self._ops.branches else self.decode_buckets)
            for kinds in self._mixtures()
            for variant in self._variants()
            if variant != "full"
        ]
        copies = self.copy_buckets if self.cache_config.enable_prefix_caching else []
        converts = self.convert_buckets if self.can_convert else []
        calls = [
            *(functools.partial(self._empty_forward_call, *shape) for shape in shapes),
            *(functools.partial(self._empty_sample_call, *variant) for variant in variants),
            *(functools.partial(self._empty_decode_call, *decode) for decode in decodes),
            *(functools.partial(self._copy_call, _NO_COPIES, size) for size in copies),
            *(
                functools.partial(self._convert_call, self._empty_convert(n)[1], n)
                for n in converts
            ),
        ]
        ahead = 0 if self._ops.branches else len(calls)
        total = ahead + len(calls)
        if progress:
            progress(0, total)
        if ahead:
            workers = min(_MAX_COMPILERS, os.cpu_count() or 1)
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                compiled = [
                    pool.submit(lambda call=call: call().lower().compile()) for call in calls
                ]
                for done, future in enumerate(concurrent.futures.as_completed(compiled), 1):
                    future.result()
                    if progress:
                        progress(done, total)
        for done, call in enumerate(calls, ahead + 1):
            jax.block_until_ready(call().run())
            if progress:
                progress(done, total)
        self._compiled_at_warm_up = self._num_programs()

    def compiled_decode_step(self) -> str:
        """The program of a step of as many decode rows as there can be, as the compiler left it."""
        kinds = self._mixtures()[-1]
        call = self._empty_forward_call(self.decode_buckets[-1], 0, kinds)
        return call.lower().compile().as_text()

    def _empty_forward_call(
        self, num_decode: int, num_prefill: int, kinds: tuple[bool, bool]
    ) -> "_Call":
        _, ints = self._empty_forward(num_decode, num_prefill)
        return self._forward_call(ints, num_decode, num_prefill, kinds)

    def _empty_sample_call(self, rows: int, variant: str) -> "_Call":
        _, ints = self._empty_sample(rows)
        # Placed as a forward program's result is: another placement would be another program.
        shape = (self.decode_buckets[-1], self.config.hidden_size)
        hidden = jnp.zeros(shape, self.params.dtype, device=self._placed(P()))
        size = _penalty_layout(rows, self.max_model_len).size
        penalties = np.zeros(size, np.int32) if variant.endswith("full") else None
        masks = self._no_masks(rows) if variant.startswith("masked") else None
        return self._sample_call(hidden, ints, penalties, masks, rows, variant)

    def _empty_decode_call(self, rows: int, kinds: tuple[bool, bool], variant: str) -> "_Call":
        _, ints = self._empty_forward(rows, 0)
        _, sample_ints = self._empty_sample(rows)
        return self._decode_call(ints, sample_ints, rows, kinds, variant)

    def _empty_forward(
        self, num_decode: int, num_prefill: int
    ) -> tuple[dict[str, NDArray[np.int32]], NDArray[np.int32]]:
        """A forward batch of padding alone. Fresh memory every time: the device may read it after the call returns."""
        layout = self._layout(num_decode, num_prefill)
        ints = np.zeros(layout.size, np.int32)
        views = layout.views(ints)
        views["first_slots"][:] = views["second_slots"][:] = self._dropped_slot
        views["token_seats"][:] = self.max_num_seqs
        views["sample_rows"][:] = num_decode + num_prefill
        return views, ints

    def _empty_sample(self, rows: int) -> tuple[dict[str, NDArray[np.int32]], NDArray[np.int32]]:
        layout = _sample_layout(rows)
        ints = np.zeros(layout.size, np.int32)
        views = layout.views(ints)
        views["seats"][:] = self.max_num_seqs
        return views, ints

    def _empty_convert(
        self, num_blocks: int
    ) -> tuple[dict[str, NDArray[np.int32]], NDArray[np.int32]]:
        """A conversion of padding alone; fresh memory, as above."""
        layout = _convert_layout(num_blocks, self.hidden_block_size)
        ints = np.zeros(layout.size, np.int32)
        views = layout.views(ints)
        views["first_slots"][:] = views["second_slots"][:] = self._dropped_slot
        return views, ints

    def _no_masks(self, rows: int) -> NDArray[np.int32]:
        """Masks that allow everything; fresh memory, as above."""
        return np.full((rows, -(-self.config.vocab_size // 32)), -1, np.int32)

    @property
    def _dropped_slot(self) -> int:
        return (self.num_blocks + 1) * self.block_size

    # The programs. A call's results that replace donated arrays are kept by `_Call.run`.

    def _forward_call(
        self,
        ints: NDArray[np.int32],
        num_decode: int,
        num_prefill: int,
        kinds: tuple[bool, bool],
    ) -> "_Call":
        """Gives hidden states of the rows that sample."""
        return _Call(
            self,
            "forward",
            (self.params, self._pools, self._last_tokens, ints),
            {"num_decode": num_decode, "num_prefill": num_prefill, "kinds": kinds},
            keeps=("_pools",),
        )

    def _decode_call(
        self,
        forward_ints: NDArray[np.int32],
        sample_ints: NDArray[np.int32],
        num_decode: int,
        kinds: tuple[bool, bool],
        variant: str,
    ) -> "_Call":
        """Gives tokens."""
        return _Call(
            self,
            "decode",
            (self.params, self._pools, self._last_tokens, forward_ints, sample_ints),
            {"num_decode": num_decode, "kinds": kinds, "variant": variant},
            keeps=("_pools", "_last_tokens"),
        )

    def _sample_call(
        self,
        hidden: Array,
        ints: NDArray[np.int32],
        penalties: NDArray[np.int32] | None,
        masks: NDArray[np.int32] | None,
        rows: int,
        variant: str,
    ) -> "_Call":
        """Gives tokens and log probabilities, if the variant has them."""
        return _Call(
            self,
            "sample",
            (self.params, hidden, self._last_tokens, ints, penalties, masks),
            {"rows": rows, "variant": variant},
            keeps=("_last_tokens",),
        )

    def _copy_call(self, copies: NDArray[np.int32], size: int) -> "_Call":
        """Gives nothing; padded with copies of the reserved block to nowhere."""
        pairs = np.full((size, 2), (0, self.num_blocks + 1), np.int32)
        pairs[: len(copies)] = copies
        return _Call(self, "copy", (self._pools, pairs), {}, keeps=("_pools",))

    def _convert_call(self, ints: NDArray[np.int32], num_blocks: int) -> "_Call":
        """Gives nothing."""
        return _Call(
            self,
            "convert",
            (self.params, self._pools, ints),
            {"num_blocks": num_blocks},
            keeps=("_pools",),
        )

    def execute(self, batch: StepBatch) -> StepHandle | MaskedStepHandle:
        """Dispatch one step. The pools are donated to it: after an exception, call `reset`."""
        if len(batch.copies):
            self._copy_call(batch.copies, _bucket(self.copy_buckets, len(batch.copies))).run()
        if batch.conversions is not None:
            self._run_conversions(batch, batch.conversions)
        single = batch.num_tokens == 1
        if self.mixed or batch.masked is not None or single.all() or not single.any():
            return self._dispatch(batch)
        # Decode rows as chunks of one token take several times as long as in a program of their own.
        parts = [np.flatnonzero(single), np.flatnonzero(~single)]
        return _JoinedHandle(
            num_rows=len(batch.seats),
            parts=[(rows, self._dispatch(batch.part(rows))) for rows in parts],
        )

    def _dispatch(self, batch: StepBatch) -> StepHandle | MaskedStepHandle:
        """`execute` by one forward program; where both kinds of rows are there and `mixed` is False, all as chunks."""
        chunked = np.any(batch.num_tokens > 1)
        decodes = (
            np.flatnonzero(batch.num_tokens == 1)
            if self.mixed or not chunked
            else np.zeros(0, np.int64)
        )
        # KV rows first, then hidden ones; by length within, so that a tile of rows wastes little.
        decodes = decodes[np.lexsort((-batch.start[decodes], batch.kind[decodes]))]
        prefills = (
            np.flatnonzero(batch.num_tokens > 1)
            if len(decodes)
            else np.arange(len(batch.seats))
            if chunked
            else np.zeros(0, np.int64)
        )
        num_prefill_tokens = int(batch.num_tokens[prefills].sum())
        if not len(prefills):
            num_decode, num_prefill = _bucket(self.decode_buckets, len(decodes)), 0
        else:
            num_decode = self.decode_buckets[-1] if len(decodes) else 0
            num_prefill = _bucket(self.prefill_buckets, num_prefill_tokens)
        views, ints = self._empty_forward(num_decode, num_prefill)
        token_start = np.cumsum(batch.num_tokens) - batch.num_tokens
        table_len = batch.block_tables.shape[2]

        n = len(decodes)
        views["decode_tables"][:n, :, :table_len] = batch.block_tables[decodes]
        views["decode_lens"][:n] = batch.start[decodes] + 1
        m = len(prefills)
        lens = batch.num_tokens[prefills]
        views["prefill_tables"][:m, :, :table_len] = batch.block_tables[prefills]
        views["prefill_offsets"][:m] = np.cumsum(lens) - lens
        views["prefill_lens"][:m] = lens
        views["prefix_lens"][:m] = batch.start[prefills]
        views["prefill_hidden"][:m] = batch.kind[prefills] == HIDDEN
        views["counts"][:] = (np.count_nonzero(batch.kind[decodes] == KV), n, m)

        # Flat tokens: (row, offset in the row's chunk) of every token, decode rows first.
        owner = np.concatenate([decodes, np.repeat(prefills, lens)])
        offset = np.concatenate(
            [
                np.zeros(n, np.int64),
                np.arange(num_prefill_tokens) - np.repeat(np.cumsum(lens) - lens, lens),
            ]
        )
        place = np.concatenate([np.arange(n), num_decode + np.arange(num_prefill_tokens)])
        position = batch.start[owner] + offset
        hidden = batch.kind[owner] == HIDDEN
        per_block = np.where(hidden, self.hidden_block_size, self.block_size)
        block, slot = np.divmod(position, per_block)
        views["token_ids"][place] = batch.token_ids[token_start[owner] + offset]
        views["token_seats"][place] = batch.seats[owner]
        views["positions"][place] = position
        views["first_slots"][place] = batch.block_tables[owner, 0, block] * per_block + slot
        second = batch.block_tables[owner, 1, block] * self.block_size + slot
        views["second_slots"][place] = np.where(hidden, self._dropped_slot, second)
        views["token_hidden"][place] = hidden

        last_place = np.zeros(len(batch.seats), np.int64)
        last_place[decodes] = np.arange(n)
        last_place[prefills] = num_decode + np.cumsum(lens) - 1
        sampling_rows = np.flatnonzero(batch.samples)
        views["sample_rows"][: len(sampling_rows)] = last_place[sampling_rows]
        kinds = self._mixture(batch.kind)
        params = [batch.params[r] for r in sampling_rows.tolist()]
        masked = batch.masked is not None and len(batch.masked) > 0
        variant = self._variant(params, masked=masked)
        done = functools.partial(_Handle, num_rows=len(batch.seats), rows=sampling_rows)
        two_programs = num_prefill or self._ops.branches or variant.endswith("full") or masked
        if two_programs or not len(sampling_rows):
            states = self._forward_call(ints, num_decode, num_prefill, kinds).run()
            if not len(sampling_rows):
                return done(tokens=None, logprobs=None)
            buckets = self.masked_buckets if masked else self.decode_buckets
            bucket = _bucket(buckets, len(sampling_rows))
            sample_ints = self._sample_ints(batch, sampling_rows, params, bucket, variant)
            full = variant.endswith("full")
            penalties = self._penalties(batch, sampling_rows, bucket) if full else None

            def sample(masks: NDArray[np.int32] | None) -> _Handle:
                call = self._sample_call(states, sample_ints, penalties, masks, bucket, variant)
                tokens, extras = call.run()
                return done(tokens=tokens, logprobs=extras)

            if batch.masked is None or not masked:
                return sample(None)
            places = np.searchsorted(sampling_rows, batch.masked)
            return _MaskedHandle(dispatch=lambda m: sample(self._masks(m, places, bucket)))
        sample_ints = self._sample_ints(batch, sampling_rows, params, num_decode, variant)
        tokens = self._decode_call(ints, sample_ints, num_decode, kinds, variant).run()
        return done(tokens=tokens, logprobs=None)

    def _run_conversions(self, batch: StepBatch, conversions: Conversions) -> None:
        """Dispatch `StepBatch.conversions`: all X blocks of all rows, one after another, as many as a program takes at a time."""
        start, inputs = batch.start[conversions.rows], conversions.inputs
        per_block, block_size = self.hidden_block_size, self.block_size
        i, group = np.nonzero(np.arange(inputs.shape[1]) < -(-start // per_block)[:, None])
        positions = group[:, None] * per_block + np.arange(per_block)
        used = positions < start[i, None]
        positions = np.where(used, positions, 0)
        column, slot = np.divmod(positions, block_size)
        slots = []
        for half in range(2):
            blocks = batch.block_tables[conversions.rows[i, None], half, column]
            slots.append(np.where(used, blocks * block_size + slot, self._dropped_slot))
        at = 0
        while at < len(i):
            part = slice(at, at + self.convert_buckets[-1])
            num_blocks = _bucket(self.convert_buckets, len(i[part]))
            views, ints = self._empty_convert(num_blocks)
            for name, values in (
                ("blocks", inputs[i, group]),
                ("positions", positions),
                ("first_slots", slots[0]),
                ("second_slots", slots[1]),
            ):
                flat = values[part].reshape(-1)
                views[name][: flat.size] = flat
            self._convert_call(ints, num_blocks).run()
            at += num_blocks

    def run_plan(self, plan: Plan) -> Any:
        """Make a call as rank 0 makes it; what it gives can be waited for."""
        arrays: Sequence[Any] = plan.arrays
        if plan.program == "forward":
            self._states = self._forward_call(*arrays, **plan.static).run()
            return self._states
        if plan.program == "decode":
            return self._decode_call(*arrays, **plan.static).run()
        if plan.program == "sample":
            assert self._states is not None, "rank 0 samples after a forward program"
            return self._sample_call(self._states, *arrays, **plan.static).run()
        if plan.program == "clear":
            return self.clear()
        if plan.program == "convert":
            return self._convert_call(*arrays, **plan.static).run()
        return self._copy_call(arrays[0], len(arrays[0])).run()

    def _masks(
        self, masks: NDArray[np.int32], places: NDArray[np.int64], bucket: int
    ) -> NDArray[np.int32]:
        """One mask a sampling row; what a narrower mask does not speak of is forbidden."""
        rows = self._no_masks(bucket)
        width = min(rows.shape[1], masks.shape[1])
        rows[places, :width] = masks[:, :width]
        rows[places, width:] = 0
        return rows

    def _sample_ints(
        self,
        batch: StepBatch,
        rows: NDArray[np.int64],
        params: list[SamplingParams],
        bucket: int,
        variant: str,
    ) -> NDArray[np.int32]:
        n = len(rows)
        views, ints = self._empty_sample(bucket)
        views["seats"][:n] = batch.seats[rows]
        if variant != "greedy":
            views["top_k"][:n] = [p.top_k for p in params]
            views["seed"][:n] = np.array(
                [(p.seed or 0) & 0xFFFFFFFF for p in params], np.uint32
            ).view(np.int32)
            views["position"][:n] = batch.position[rows]
            for name in ("temperature", "top_p", "min_p"):
                views[name][:n] = np.array([getattr(p, name) for p in params], np.float32).view(
                    np.int32
                )
        return ints

    def _penalties(
        self, batch: StepBatch, rows: NDArray[np.int64], bucket: int
    ) -> NDArray[np.int32]:
        layout = _penalty_layout(bucket, self.max_model_len)
        ints = np.zeros(layout.size, np.int32)
        views = layout.views(ints)
        views["last_seat"][:] = self.max_num_seqs
        views["repetition"][:] = np.float32(1.0).view(np.int32)
        views["bias_ids"][:] = self.config.vocab_size
        token_end = np.cumsum(batch.num_tokens)
        for i, r in enumerate(rows):
            p, history = batch.params[r], batch.history[r]
            views["history"][i, : len(history)] = history
            views["prompt_len"][i], views["history_len"][i] = batch.prompt_len[r], len(history)
            if batch.token_ids[token_end[r] - 1] < 0:
                views["last_seat"][i] = batch.seats[r]
            for name, value in (
                ("repetition", p.repetition_penalty),
                ("presence", p.presence_penalty),
                ("frequency", p.frequency_penalty),
            ):
                views[name][i] = np.float32(value).view(np.int32)
            bias = dict(p.logit_bias or {})
            if batch.position[r] < p.min_tokens:
                bias.update(dict.fromkeys(p.stop_token_ids, -np.inf))
                if self.config.eos_token_id is not None:
                    bias[self.config.eos_token_id] = -np.inf
            views["bias_ids"][i, : len(bias)] = list(bias)
            views["bias_values"][i, : len(bias)] = np.array(list(bias.values()), np.float32).view(
                np.int32
            )
        return ints


def _copy_blocks(pools: tuple[Array, ...], pairs: Array) -> tuple[tuple[Array, ...]]:
    """`pool[pairs[:, 1]] = pool[pairs[:, 0]]` for each pool, all reads before all writes. The pools are donated."""
    source, destination = pairs[:, 0], pairs[:, 1]
    return (tuple(pool.at[destination].set(pool[source], mode="drop") for pool in pools),)


def _chip(device: Any) -> str | None:
    """What the tiles of GPU kernels are chosen for; None where there is no GPU."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return None
    if float(capability) < 8.0:
        raise ValueError(
            f"{device.device_kind} has compute capability {capability}; the kernels need 8.0 or newer"
        )
    return "sm_90" if float(capability) >= 9.0 else "sm_80"


def _bucket(buckets: list[int], size: int) -> int:
    return next(b for b in buckets if b >= size)

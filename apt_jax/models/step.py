"""Inputs and static settings of one decoder step, and the products and norms that its parts share."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from apt_jax.models.config import HiddenMode, ModelConfig
from apt_jax.models.sharding import TensorParallel
from apt_jax.ops.backend import KernelBackend
from apt_jax.ops.weights import FLAT_MATRICES, NormParams, QuantizedMatrix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderBatch:
    """One step on the device. T flat tokens: B decode rows of one token, then the chunks of R prefill rows."""

    token_ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    """Position of each token in its request; padding tokens have 0."""
    first_slots: Int32[Array, " T"]
    """Pool slot for the token's k or x, counted in slots of its kind; out of range for padding, which is dropped."""
    second_slots: Int32[Array, " T"]
    """Pool slot for its v; out of range for hidden requests and padding."""
    token_hidden: Bool[Array, " T"]
    decode_tables: Int32[Array, "B 2 J"]
    decode_lens: Int32[Array, " B"]
    """Positions to attend to, the row's own included; 0 for padding rows."""
    num_kv_rows: Int32[Array, ""]
    """Decode rows [0, num_kv_rows) have the KV kind,"""
    num_decode_rows: Int32[Array, ""]
    """rows [num_kv_rows, num_decode_rows) the hidden kind."""
    prefill_tables: Int32[Array, "R 2 J"]
    prefill_offsets: Int32[Array, " R"]
    """Start of each chunk among the prefill tokens."""
    prefill_lens: Int32[Array, " R"]
    prefix_lens: Int32[Array, " R"]
    prefill_hidden: Bool[Array, " R"]
    num_prefill_rows: Int32[Array, ""]
    decode_ranges: Int32[Array, "B J 2"] | None = None
    """`slot_ranges` of the decode rows (`ops.reference`), where requests share blocks; None: every block is its row's."""
    prefill_ranges: Int32[Array, "R J 2"] | None = None
    """The same of the cached prefixes of the prefill rows."""
    adapters: Int32[Array, " T"] | None = None
    """Adapter of each token, 0: none; None: the model has none."""


def slot_ranges(
    downwards: Bool[Array, "R J"], lens: Int32[Array, " R"], sizes: Int32[Array, " R"]
) -> Int32[Array, "R J 2"]:
    """Slots that rows have of each of their blocks, as `ops.reference` has them.

    Args:
        downwards: whether the row has the block from its right end (`apt_jax.cache.block_sharing`).
        lens: positions of each row.
        sizes: slots of its blocks.
    """
    entry = jnp.arange(downwards.shape[1], dtype=jnp.int32)[None]
    size = sizes[:, None]
    used = jnp.clip(lens[:, None] - entry * size, 0, size)
    first = jnp.where(downwards, size, 0)
    return jnp.stack([first, jnp.where(downwards, size - used, used)], axis=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertBatch:
    """Layer inputs that become keys and values. G of their blocks, T = G * `hidden_block_size` slots, block after
    block."""

    blocks: Int32[Array, " G"]
    """The reserved block for padding."""
    positions: Int32[Array, " T"]
    """Position of each slot in its request."""
    first_slots: Int32[Array, " T"]
    """Pool slot for the slot's k, counted in keys; out of range for slots without a layer input, which are dropped."""
    second_slots: Int32[Array, " T"]
    """The same for its v."""
    adapters: Int32[Array, " T"] | None = None
    """Adapter of each slot's request, as in `DecoderBatch`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Static settings of a compiled step."""

    num_decode: int
    """B: decode rows, padding included."""
    block_size: int
    hidden_block_size: int
    """Layer inputs per block."""
    hidden_mode: HiddenMode | None
    """Projections that hidden decode rows absorb, as in `ModelConfig.hidden_mode`; None: they are reprojected."""
    kinds: tuple[bool, bool]
    """(KV rows can occur, hidden rows can occur)."""
    ops: KernelBackend
    """`ops.branches` says whether the device branches around parts that no row needs."""
    tensor: TensorParallel | None = None
    """None: the device has the whole model. Else the step runs one device's shard of it, within `jax.shard_map`, and
    its `ModelConfig` is `sharding.own_config`."""
    hidden_room: int | None = None
    """With `cuts_by_feature`: positions of all hidden decode rows together, each row's rounded up to a multiple of
    `xla_common.ROOM_STEP`, at most; None: as many as block tables hold. The size of the sum of scores over devices."""
    prefix_room: int | None = None
    """Positions of the hidden prefixes of all prompts, as of `executor.compiling.buckets.PromptSize`; 0: there are none, and
    nothing is launched for them; None: as many as block tables hold."""

    @property
    def cuts_by_feature(self) -> bool:
        """True: the device has its features of W_k and W_v, of all heads (`sharding.cuts_by_feature`)."""
        return self.tensor is not None and self.hidden_mode == "absorb"


Product = Callable[..., Array]
"""`KernelBackend.dense`."""


def apply_dense(
    x: Float[Array, "T I"],
    w: Any,
    b: Float[Array, " O"] | None,
    product: Product,
    activation: str | None = None,
    dtype: Any = jnp.float32,
) -> Float[Array, "T O"]:
    """`activate(x @ w.T + b)` in `dtype`, by the platform's product; w (O, I), an array or one of `FLAT_MATRICES`."""
    return product(x, *product_args(w), bias=b, activation=activation, dtype=dtype)


def apply_dense_summed(
    x: Float[Array, "T I"],
    w: Any,
    b: Float[Array, " O"] | None,
    options: StepOptions,
) -> Float[Array, "T O"]:
    """`apply_dense`, summed over devices where each holds a shard of the inputs: in the dtype of x, half the bytes of
    float32 in 16-bit models."""
    if options.tensor is None:
        return apply_dense(x, w, b, options.ops.dense)
    share = apply_dense(x, w, None, options.ops.dense).astype(x.dtype)
    out = options.tensor.sum(share).astype(jnp.float32)
    return out if b is None else out + b.astype(jnp.float32)[None, :]


def product_args(w: Any) -> tuple[Any, ...]:
    """The weight arguments of a product: a matrix, or integers and their scales, one an output."""
    return (w.values, w.scale) if isinstance(w, QuantizedMatrix) else (w,)


def flatten_inputs(w: Any, inputs_from: int) -> Any:
    """A matrix as (outputs, inputs); axes from `inputs_from` on are inputs. Quantized and tiled ones are flat
    already."""
    if isinstance(w, FLAT_MATRICES):
        return w
    return w.reshape(math.prod(w.shape[:inputs_from]), -1)


def apply_norm(x: Float[Array, "T D"], p: NormParams, config: ModelConfig) -> Float[Array, "T D"]:
    """The norm that the model has, in float32."""
    x = x.astype(jnp.float32)
    if config.norm == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    scaled = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
    scale = p.scale.astype(jnp.float32)
    if config.norm_offset:
        scale = scale + config.norm_offset
    out = scaled * scale[None, :]
    return out if p.bias is None else out + p.bias.astype(jnp.float32)[None, :]


def zero_non_finite(x: Array) -> Array:
    """`x` with zeros for NaN and infinities."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))

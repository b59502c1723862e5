"""Inputs and static settings of one decoder step, and the products and norms that its parts share."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from apt_jax.models.config import HiddenMode, ModelConfig
from apt_jax.models.layer_groups import LayerGroups
from apt_jax.models.sharding import TensorParallel
from apt_jax.ops.backend import KernelBackend
from apt_jax.ops.weights import FLAT_MATRICES, JoinedMatrix, NormParams, QuantizedMatrix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderBatch:
    """Inputs of one step on the device. Its T tokens are those of B decode rows, one token each, followed by the chunks
    of R prefill rows."""

    token_ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    """Position of each token in its request; 0 for padding tokens."""
    first_slots: Int32[Array, " T"]
    """Pool slot of the token's k or x, counted in slots of its kind; out of range for padding, which is dropped."""
    second_slots: Int32[Array, " T"]
    """Pool slot of the token's v; out of range for hidden requests and padding."""
    token_hidden: Bool[Array, " T"]
    decode_tables: Int32[Array, "B TABLES J"]
    """Block tables of keys and of values, then of each set of windowed layers (`LayerGroups`)."""
    decode_lens: Int32[Array, " B"]
    """Number of positions that each row attends to, including its own; 0 for padding rows."""
    num_kv_rows: Int32[Array, ""]
    """Number of decode rows of the KV kind, which come first."""
    num_decode_rows: Int32[Array, ""]
    """Number of decode rows of both kinds: rows [num_kv_rows, num_decode_rows) are of the hidden kind."""
    prefill_tables: Int32[Array, "R TABLES J"]
    prefill_offsets: Int32[Array, " R"]
    """Start of each chunk among the prefill tokens."""
    prefill_lens: Int32[Array, " R"]
    prefix_lens: Int32[Array, " R"]
    prefill_hidden: Bool[Array, " R"]
    num_prefill_rows: Int32[Array, ""]
    decode_ranges: Int32[Array, "B J 2"] | None = None
    """`slot_ranges` of the decode rows (`apt_jax.ops.calls`) if rows fill blocks from both ends; None: every block has
    one owner."""
    prefill_ranges: Int32[Array, "R J 2"] | None = None
    """`slot_ranges` of the cached prefixes of the prefill rows, like `decode_ranges`."""
    adapters: Int32[Array, " T"] | None = None
    """Adapter of each token, 0: no adapter; None: the model has no adapters."""
    window_slots: Int32[Array, "WINDOWED T"] | None = None
    """Pool slots of the token's k and v in each set of windowed layers, like `first_slots` and `second_slots`; None: there
    are no sets."""

    def of_set(self, index: int | None) -> "DecoderBatch":
        """Return the batch with the slots and block tables of one set of windowed layers; None: of the other layers."""
        if self.window_slots is None:
            return self
        at = 0 if index is None else 2 + 2 * index
        first, second = self.first_slots, self.second_slots
        if index is not None:
            first, second = self.window_slots[at - 2], self.window_slots[at - 1]
        return dataclasses.replace(
            self,
            first_slots=first,
            second_slots=second,
            decode_tables=self.decode_tables[:, at : at + 2],
            prefill_tables=self.prefill_tables[:, at : at + 2],
            window_slots=None,
        )


def slot_ranges(
    downwards: Bool[Array, "R J"], lens: Int32[Array, " R"], sizes: Int32[Array, " R"]
) -> Int32[Array, "R J 2"]:
    """Return the range of slots that each row owns in each of its blocks, as defined in `apt_jax.ops.calls`.

    Args:
        downwards: True if the row fills the block from its right end (`apt_jax.cache.placement`).
        lens: number of positions of each row.
        sizes: number of slots in each of the row's blocks.
    """
    entry = jnp.arange(downwards.shape[1], dtype=jnp.int32)[None]
    size = sizes[:, None]
    used = jnp.clip(lens[:, None] - entry * size, 0, size)
    first = jnp.where(downwards, size, 0)
    return jnp.stack([first, jnp.where(downwards, size - used, used)], axis=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertBatch:
    """Layer inputs to convert to keys and values: G blocks with T = G * `hidden_block_size` slots, block after
    block."""

    blocks: Int32[Array, " G"]
    """Blocks to read; padding entries are the reserved block."""
    positions: Int32[Array, " T"]
    """Position of each slot in its request."""
    first_slots: Int32[Array, " T"]
    """Pool slot of the slot's k, counted in keys; out of range for slots without a layer input, which are dropped."""
    second_slots: Int32[Array, " T"]
    """Pool slot of the slot's v, like `first_slots`."""
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
    """Projections that attention of hidden decode rows absorbs, as in `ModelConfig.hidden_mode`; None: keys and values
    are reprojected."""
    kinds: tuple[bool, bool]
    """(KV rows can occur, hidden rows can occur)"""
    ops: KernelBackend
    """Kernel backend; if `ops.branches` is true, the device skips parts of the step that no row needs."""
    layer_groups: LayerGroups | None = None
    """Groups of layers that share arrays of the pool; None: every layer has an array of its own."""
    tensor: TensorParallel | None = None
    """Collectives if the step runs one device's shard of the model within `jax.shard_map`, with `sharding.own_config`
    as its `ModelConfig`; None: the device has the whole model."""
    hidden_room: int | None = None
    """With `cuts_by_feature`: largest total number of positions of all hidden decode rows, whose scores are summed over
    devices; each row is rounded up to a multiple of `xla_common.ROOM_STEP`. None: as many as block tables hold."""
    prefix_room: int | None = None
    """Largest total number of positions in the hidden prefixes of all prompts, as in
    `executor.compiling.buckets.PromptSize`; 0: no hidden prefixes, and no kernel is launched for them; None: as many as
    block tables hold."""

    @property
    def cuts_by_feature(self) -> bool:
        """True if the device holds its features of W_k and W_v for all heads (`sharding.cuts_by_feature`)."""
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
    """Return `activate(x @ w.T + b)` in `dtype`, computed by `product`; w (O, I) is an array or one of
    `FLAT_MATRICES`."""
    if isinstance(w, JoinedMatrix):
        cuts = list(itertools.accumulate(part.shape[0] for part in w.parts[:-1]))
        biases = [None] * len(w.parts) if b is None else jnp.split(b, cuts)
        parts = zip(w.parts, biases, strict=True)
        return jnp.concatenate([apply_dense(x, part, bias, product, activation, dtype) for part, bias in parts], axis=1)
    return product(x, *product_args(w), bias=b, activation=activation, dtype=dtype)


def apply_dense_summed(
    x: Float[Array, "T I"],
    w: Any,
    b: Float[Array, " O"] | None,
    options: StepOptions,
) -> Float[Array, "T O"]:
    """Apply `apply_dense` and sum over devices if each holds a shard of the inputs. The sum is in the dtype of x, which
    halves the traffic in 16-bit models."""
    if options.tensor is None:
        return apply_dense(x, w, b, options.ops.dense)
    share = apply_dense(x, w, None, options.ops.dense).astype(x.dtype)
    out = options.tensor.sum(share).astype(jnp.float32)
    return out if b is None else out + b.astype(jnp.float32)[None, :]


def product_args(w: Any) -> tuple[Any, ...]:
    """Return the weight arguments of a product: a matrix, or an integer matrix and its scales (one per output)."""
    return (w.values, w.scale) if isinstance(w, QuantizedMatrix) else (w,)


def flatten_inputs(w: Any, inputs_from: int) -> Any:
    """Return a matrix as (outputs, inputs); axes from `inputs_from` on are inputs. Quantized and tiled matrices are
    already flat."""
    if isinstance(w, FLAT_MATRICES):
        return w
    return w.reshape(math.prod(w.shape[:inputs_from]), -1)


def apply_norm(x: Float[Array, "T D"], p: NormParams, config: ModelConfig) -> Float[Array, "T D"]:
    """Apply the model's kind of norm, in float32."""
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
    """Return `x` with zeros in place of NaN and infinities."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))

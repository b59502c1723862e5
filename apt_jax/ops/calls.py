"""Records of the arguments of attention ops: the part of a layer's pool that a call reads, and the logit modifiers.

Every attention op of `backend.KernelBackend` takes its queries and one record, so a backend cannot overlook a feature,
and a new feature needs only a new field. The fields of the record determine the keys and values:

tables      projection   keys                      values
(R, 2, J)   None         the first cached tensor   the second
(R, J)      None         the cached tensor         the same: attention on layer inputs, absorbed
(R, J)      given        computed from it          computed from it (`wv`), or the cached tensor itself (`wv` is None)

Query heads share key heads; the number of key heads follows from the pool's width or the projection. Operands of
products have the dtype of the pool, and products are accumulated in float32.

All ops work on one layer's pool, `(P, C, E)`: P blocks of C slots of E elements. A block holds, for C positions of
one request, keys (K * H = E elements per slot) or values, or layer inputs (D elements per slot; latents are layer inputs
here). Slots may be narrower than those of the pool (layer inputs whose D is not E, or the `lane` of the record): the
flattened block then starts with `block_size` slots, where `block_size` is that of the record. Block tables map
position t of a request to slot `t % C` of block `table[t // C]`; padding entries of a table are 0, and the slots of
block 0 are never used.

Two requests can share a block by growing towards each other (BROS §5). Then `slot_ranges[b, j] = (first, last)` is the
range of slots that row b owns in its j-th block. If first <= last, the slots are `[first, last)`, with positions in
ascending order; if last < first, they are `[last, first)` in descending order, with the first position in slot
`first - 1`. Keys and values of a position lie in the same slot of their two blocks. Without `slot_ranges` the range of
every block is `(0, min(C, len - j * C))`. `lens` is the number of positions in both cases: `C` per block except in the
last block. With `rows = (a, b)`, rows outside [a, b) are skipped: they give zeros and read nothing.

Rotary embedding rotates lanes i and i + R / 2 of the first R lanes of every head by `angle[position, i]` ("rotate
half", as in Llama and GPT-NeoX); cached layer inputs are not rotated, so keys computed from them are rotated by their
position.

Dimension key: B rows, T query tokens, N query heads, K key/value heads, H head width, D model width, E lane width, R
rotary lanes of a head, P blocks, C slots per block, J table entries per row, S positions.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from apt_jax.ops.weights import KeyValueAdapters

_STATIC = {"static": True}

if TYPE_CHECKING:
    AnyArray = Array
else:  # records hold abstract arrays when programs are compiled, and NumPy arrays in the reference code
    AnyArray = Any


@runtime_checkable
class Shards(Protocol):
    """Devices over which layer inputs are sharded by feature: `apt_jax.models.sharding.TensorParallel`."""

    @property
    def size(self) -> int:
        """Number of devices."""
        ...

    def sum(self, x: Array) -> Array:
        """Return the sum of an array over the devices."""
        ...

    def scatter_sum(self, x: Array, axis: int) -> Array:
        """Return this device's shard, along an axis, of the sum over the devices."""
        ...

    def gather(self, x: Array, axis: int) -> Array:
        """Return the shards of all devices, concatenated along an axis."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitModifiers:
    """Modifiers of attention scores before the softmax, applied in this order, and the sinks of the softmax."""

    softcap: float | None = dataclasses.field(default=None, metadata=_STATIC)
    """Soft cap of the scores: s becomes `cap * tanh(s / cap)` (Gemma-2); None: no cap."""
    slopes: Float[AnyArray, " N"] | None = None
    """ALiBi: `slope * (j - i)` is added to the score of query i and key j (Press et al., 2022); None: no ALiBi."""
    window: int | None = dataclasses.field(default=None, metadata=_STATIC)
    """Number of positions that a query attends to, its own included; None: all positions."""
    sinks: Float[AnyArray, " N"] | None = None
    """Score of each head that is part of the softmax's denominator and has no value (gpt-oss): weights are `exp(s) /
    (exp(sink) + sum exp(s))`; None: none."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyNorm:
    """RMS norm of projected keys, before their rotation (Qwen3, OLMo-2)."""

    scale: Float[AnyArray, " S"]
    """(H,): norm of each head; (K * H,): norm of all heads together."""
    eps: float = dataclasses.field(metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection:
    """Keys and values from a cached tensor x: k = rotate(norm(W_k x + b_k)), v = W_v x + b_v."""

    wk: Float[AnyArray, "K H D"]
    """Weights of the keys; in `decode_v_absorbed` only of the lanes that are computed: (K, R, D)."""
    bk: Float[AnyArray, "OWN H"] | None = None
    """Bias of the keys, (K, H). If `wk` and `wv` have this device's features of all heads, it has only this device's
    heads."""
    wv: Float[AnyArray, "K H D"] | None = None
    """Weights of the values; None: x itself is the value (`decode_v_absorbed`)."""
    bv: Float[AnyArray, "OWN H"] | None = None
    angles: Float[AnyArray, "S HALF"] | None = None
    """Rotary angles of every position; None: keys are not rotated. Queries are rotated by the caller."""
    key_norm: KeyNorm | None = None
    adapters: KeyValueAdapters | None = None
    """LoRA adapters of W_k and W_v, one for each row; None: no adapters."""

    @property
    def value_weights(self) -> Float[AnyArray, "K H D"]:
        """`wv`, which must not be None."""
        assert self.wv is not None
        return self.wv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """Cached positions that decode rows attend to, with one query per row."""

    pool: Float[AnyArray, "P C E"]
    tables: Int32[AnyArray, "R 2 J"] | Int32[AnyArray, "R J"]
    """Blocks of keys and of values, (R, 2, J), or blocks of one tensor, (R, J)."""
    lens: Int32[AnyArray, " B"]
    """Number of positions of each row; rows of length 0 give zeros."""
    block_size: int = dataclasses.field(metadata=_STATIC)
    """Number of positions per block; they are at the start of the block."""
    lane: int | None = dataclasses.field(default=None, metadata=_STATIC)
    """E: elements of a slot of keys and values; None: as many as in the pool."""
    rows: tuple[AnyArray, AnyArray] | None = None
    """Half-open range of rows to compute; other rows give zeros. None: all rows."""
    slot_ranges: Int32[AnyArray, "R J 2"] | None = None
    """Slots that the row owns in each block (see the module docstring); None: it fills every block from the start."""
    table_of_row: Int32[AnyArray, " B"] | None = None
    """Row of `tables` and `slot_ranges` that each query row reads; None: the row of the same index (R = B)."""
    rules: LogitModifiers | None = None
    projection: Projection | None = None
    tensor: Shards | None = dataclasses.field(default=None, metadata=_STATIC)
    """Devices over which the features of x are sharded; None: this device has all features."""
    room: int | None = dataclasses.field(default=None, metadata=_STATIC)
    """With `tensor`: maximum total length of all rows, in positions, where the length of each row is rounded up to a
    multiple of `xla_common.ROOM_STEP`; rows beyond the maximum give zeros. None: the capacity of the tables."""

    @property
    def width(self) -> int:
        """`lane`, or that of the pool if it is None."""
        return self.pool.shape[2] if self.lane is None else self.lane

    @property
    def projected(self) -> Projection:
        """`projection`, which must not be None."""
        assert self.projection is not None
        return self.projection

    @property
    def capacity(self) -> int:
        """Maximum number of positions of one row of the tables."""
        return self.tables.shape[-1] * self.block_size

    def by_row(self) -> "DecodeCall":
        """Return the same call with one row of tables for every query row."""
        if self.table_of_row is None:
            return self
        ranges = None if self.slot_ranges is None else self.slot_ranges[self.table_of_row]
        tables = self.tables[self.table_of_row]
        return dataclasses.replace(self, tables=tables, slot_ranges=ranges, table_of_row=None)

    def row_range(self) -> tuple[Array, Array]:
        """Return `rows`, or the range of all rows if it is None."""
        return self.rows or (jnp.int32(0), jnp.int32(self.lens.shape[0]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenPrefixes:
    """Settings for prompt chunks whose prefixes are cached as layer inputs."""

    projection: Projection
    block_size: int = dataclasses.field(metadata=_STATIC)
    """Number of layer inputs per block."""
    tensor: Shards | None = dataclasses.field(default=None, metadata=_STATIC)
    """See `DecodeCall.tensor`. `projection` has this device's heads, or this device's features of all heads."""
    room: int | None = dataclasses.field(default=None, metadata=_STATIC)
    """Maximum total length of all prefixes, in positions, where the length of each prefix is rounded up to whole tiles
    of a kernel; None: the capacity of the tables."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCall:
    """Prompt chunks, concatenated to T tokens; each chunk attends to its cached prefix and itself.

    Row r has tokens [offsets[r], offsets[r] + chunk_lens[r]) and positions [0, prefix_lens[r]) of the pool.
    """

    pool: Float[AnyArray, "P C E"]
    tables: Int32[AnyArray, "B 2 J"]
    offsets: Int32[AnyArray, " B"]
    chunk_lens: Int32[AnyArray, " B"]
    prefix_lens: Int32[AnyArray, " B"]
    hidden: Bool[AnyArray, " B"]
    """True for rows whose prefix is cached as layer inputs, in the blocks of `tables[:, 0]`."""
    num_rows: Int32[AnyArray, ""]
    """Number of rows to compute; they come first."""
    block_size: int = dataclasses.field(metadata=_STATIC)
    lane: int | None = dataclasses.field(default=None, metadata=_STATIC)
    """See `DecodeCall.lane`."""
    slot_ranges: Int32[AnyArray, "B J 2"] | None = None
    rules: LogitModifiers | None = None
    hidden_prefixes: HiddenPrefixes | None = None
    """Settings for prefixes cached as layer inputs; None: no row has such a prefix, `hidden` is ignored, and no kernel
    for such prefixes is launched."""

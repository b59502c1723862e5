"""Records of the attention ops' arguments: what a call reads from the pool of one layer, and by which rules.

Every op of `backend.KernelBackend` takes its queries and one record, so that a backend cannot overlook a feature and a
new feature is one field. The tensors that play key and value follow from the record:

tables      projection   keys                      values
(R, 2, J)   None         the first cached tensor   the second
(R, J)      None         the cached tensor         the same: attention on layer inputs, absorbed
(R, J)      given        computed from it          computed from it (`wv`), or the cached tensor itself (`wv` is None)

Heads of queries share the key heads that the pool's width, or the projection, has. Products take the dtype of the pool
and accumulate in float32. Dimension key: `reference.py`.
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
else:  # programs are compiled for abstract arrays, and references for NumPy's
    AnyArray = Any


@runtime_checkable
class Shards(Protocol):
    """Devices that layer inputs are spread over by feature: `apt_jax.models.sharding.TensorParallel`."""

    @property
    def size(self) -> int:
        """Their number."""
        ...

    def sum(self, x: Array) -> Array:
        """The sum over them."""
        ...

    def scatter_sum(self, x: Array, axis: int) -> Array:
        """This device's shard along an axis of the sum over them."""
        ...

    def gather(self, x: Array, axis: int) -> Array:
        """The shares of all of them, one after another."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitModifiers:
    """Modifiers of attention scores before the softmax, applied in this order."""

    softcap: float | None = dataclasses.field(default=None, metadata=_STATIC)
    """`cap * tanh(s / cap)` (Gemma-2)."""
    slopes: Float[AnyArray, " N"] | None = None
    """ALiBi: `slope * (j - i)` is added for query i and key j (Press et al., 2022)."""
    window: int | None = dataclasses.field(default=None, metadata=_STATIC)
    """A query sees only its last `window` positions, its own included."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyNorm:
    """RMS norm of projected keys, before they are turned (Qwen3, OLMo-2)."""

    scale: Float[AnyArray, " S"]
    """(H,): each head by itself; (K * H,): all heads together."""
    eps: float = dataclasses.field(metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection:
    """Keys and values from a cached tensor x: k = turn(norm(W_k x + b_k)), v = W_v x + b_v."""

    wk: Float[AnyArray, "K H D"]
    """In `decode_v_absorbed` only the lanes that are computed: (K, R, D)."""
    bk: Float[AnyArray, "OWN H"] | None = None
    """(K, H), or this device's heads where `wk` and `wv` have this device's features of all."""
    wv: Float[AnyArray, "K H D"] | None = None
    """None: x itself is the value, `decode_v_absorbed`."""
    bv: Float[AnyArray, "OWN H"] | None = None
    angles: Float[AnyArray, "S HALF"] | None = None
    """Rotary angles of every position; None: keys are not turned. Queries are turned by the caller."""
    key_norm: KeyNorm | None = None
    adapters: KeyValueAdapters | None = None
    """Added to W_k and W_v, by row."""

    @property
    def value_weights(self) -> Float[AnyArray, "K H D"]:
        """`wv`, which must be given."""
        assert self.wv is not None
        return self.wv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """Cached positions that decode rows attend to, one query a row."""

    pool: Float[AnyArray, "P C E"]
    tables: Int32[AnyArray, "R 2 J"] | Int32[AnyArray, "R J"]
    """Blocks of keys and of values, or blocks of one tensor."""
    lens: Int32[AnyArray, " B"]
    """Positions of each row; rows of length 0 give zeros."""
    block_size: int = dataclasses.field(metadata=_STATIC)
    """Positions of a block, which lie at its start."""
    rows: tuple[AnyArray, AnyArray] | None = None
    """Half-open range of rows to compute; the others give zeros. None: all."""
    slot_ranges: Int32[AnyArray, "R J 2"] | None = None
    """The row's slots of each block (`reference.py`); None: every block from its first slot on."""
    table_of_row: Int32[AnyArray, " B"] | None = None
    """Row of `tables` and `slot_ranges` that each query row reads; None: its own (R = B)."""
    rules: LogitModifiers | None = None
    projection: Projection | None = None
    tensor: Shards | None = dataclasses.field(default=None, metadata=_STATIC)
    """Devices that the features of x are spread over; None: this device has all of them."""
    room: int | None = dataclasses.field(default=None, metadata=_STATIC)
    """With `tensor`: positions of all rows together, each row's rounded up to a multiple of `xla_common.ROOM_STEP`, that
    there is memory for; rows beyond it give zeros. None: as many as tables hold."""

    @property
    def projected(self) -> Projection:
        """`projection`, which must be given."""
        assert self.projection is not None
        return self.projection

    @property
    def capacity(self) -> int:
        """Positions that a row of the tables can hold."""
        return self.tables.shape[-1] * self.block_size

    def by_row(self) -> "DecodeCall":
        """The same call with a row of tables for every query row."""
        if self.table_of_row is None:
            return self
        ranges = None if self.slot_ranges is None else self.slot_ranges[self.table_of_row]
        tables = self.tables[self.table_of_row]
        return dataclasses.replace(self, tables=tables, slot_ranges=ranges, table_of_row=None)

    def row_range(self) -> tuple[Array, Array]:
        """`rows`, or all."""
        return self.rows or (jnp.int32(0), jnp.int32(self.lens.shape[0]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenPrefixes:
    """Prefixes of prompt chunks that are cached as layer inputs."""

    projection: Projection
    block_size: int = dataclasses.field(metadata=_STATIC)
    """Layer inputs of a block."""
    tensor: Shards | None = dataclasses.field(default=None, metadata=_STATIC)
    """As in `DecodeCall`. `projection` has this device's heads, or this device's features of all heads."""
    room: int | None = dataclasses.field(default=None, metadata=_STATIC)
    """Positions of all prefixes together, each row's rounded up to whole tiles of a kernel, at most; None: as many as
    tables hold."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCall:
    """Prompt chunks that lie one after another among T tokens, each over its cached prefix and itself.

    Row r has tokens [offsets[r], offsets[r] + chunk_lens[r]) and positions [0, prefix_lens[r]) of the pool.
    """

    pool: Float[AnyArray, "P C E"]
    tables: Int32[AnyArray, "B 2 J"]
    offsets: Int32[AnyArray, " B"]
    chunk_lens: Int32[AnyArray, " B"]
    prefix_lens: Int32[AnyArray, " B"]
    hidden: Bool[AnyArray, " B"]
    """The row's prefix is layer inputs, whose blocks are the first of `tables`."""
    num_rows: Int32[AnyArray, ""]
    """Rows to compute, the first ones."""
    block_size: int = dataclasses.field(metadata=_STATIC)
    slot_ranges: Int32[AnyArray, "B J 2"] | None = None
    rules: LogitModifiers | None = None
    hidden_prefixes: HiddenPrefixes | None = None
    """None: no row has a prefix of layer inputs, whatever `hidden` says, and nothing is launched for one."""

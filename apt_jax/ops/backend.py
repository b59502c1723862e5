"""Contract of a kernel backend: the ops of one implementation, and what it can do beside plain attention."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jax import Array

from apt_jax.ops import linear, low_rank

RULES: frozenset[str] = frozenset({"softcap", "alibi", "window"})
"""Features that layers need each by itself: the fields of `LogitModifiers`."""

EXTRAS: frozenset[str] = RULES | {"key norm", "lane norm", "grouped absorption", "input width", "adapters"}
"""Features that some models need beside plain attention: those of `RULES`, `KeyNorm` of each head or of all together,
`decode_v_absorbed` with fewer key heads than query heads, layer inputs narrower or wider than the lane, and adapters of
W_k or W_v where keys and values are computed from layer inputs."""

ATTENTION_OPS = ("decode_kv", "decode_absorbed", "decode_reprojected", "decode_v_absorbed", "prefill")
"""Fields of `KernelBackend`. Features are named for them and for `prefill_hidden`: `prefill` with `hidden_prefixes`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelBackend:
    """One implementation of the attention ops and the products around them. Ops take queries, and a record of what they
    read (`calls.py`); contracts in `reference.py`."""

    name: str
    decode_kv: Callable[..., Any]
    decode_absorbed: Callable[..., Any]
    decode_reprojected: Callable[..., Any]
    decode_v_absorbed: Callable[..., Any]
    prefill: Callable[..., Any]
    dense: Callable[..., Array] = linear.dense
    """Products of rows with weights, `linear.dense`."""
    head_products: Callable[..., Array] = linear.head_products
    """Products of heads with matrices of their own, `linear.head_products`."""
    add_low_rank: Callable[..., Array] = low_rank.add_low_rank
    """Low-rank additions of adapters to products, `low_rank.add_low_rank`."""
    dense_argmax: Callable[..., tuple[Array, Array]] | None = None
    """`sampling.greedy` of the products of `dense`, from the same arguments; None: not provided."""
    gated: Callable[[Array, Any, str], Array] | None = None
    """The first half of a gated feed-forward in one: rows (T, I), gate and up as one matrix (2 F, I), and the name of
    the activation, to (T, F) in the dtype of the rows; None: not provided."""
    add_norm: Callable[..., tuple[Array, Array]] | None = None
    """Sum of the residual stream and an addend, and its norm (`cpu.ops.add_norm`); None: not provided, like the next."""
    split_qkv: Callable[..., tuple[Array, Array, Array]] | None = None
    """Cut one product for q, k and v into the three (`cpu.ops.split_qkv`)."""
    decode_layer: Callable[..., tuple[Array, Array]] | None = None
    """A whole layer of decode rows that cache keys and values (`cpu.ops.decode_layer`); None: not provided."""
    takes_layer: Callable[..., bool] = lambda *_: False
    """True if `decode_layer` computes the layers of a model (`cpu.ops.takes_layer`)."""
    skips_rows: bool = False
    """`dense` and the ops after it take `live`, the number of rows to compute; those behind are padding and give zeros."""
    tiles: bool = False
    """Products of float32 and bfloat16 take their weights as `models.weight_layout.tile_params` lays them out."""
    integer_products: bool = False
    """With `tiles`: products of matrices of integers round rows to 8 bits and multiply integers, faster than widened
    weights would be."""
    rows_per_tile: int
    """Decode rows that attend together, reading up to the longest of their contexts."""
    extras: frozenset[str] | Mapping[str, frozenset[str]] = dataclasses.field(hash=False)
    """Features of `EXTRAS` that all ops support, or each op by itself; one that is not named supports none."""
    takes_shards: frozenset[str] = frozenset()
    """Ops of `ATTENTION_OPS` that take `tensor` (`calls.Shards`): layer inputs spread over devices by feature."""
    branches: bool
    """The decoder may branch around ops that have no rows. False: ops are called for every step and must cost little
    where they have none, as a branch on the device would break up a CUDA graph."""

    def extras_of(self, op: str) -> frozenset[str]:
        """Features of `EXTRAS` that an op supports: one of `ATTENTION_OPS`, or `prefill_hidden`."""
        if isinstance(self.extras, Mapping):
            return self.extras.get(op, frozenset())
        return self.extras

    def for_rows(self, live: Array) -> "KernelBackend":
        """The same backend for steps of which only the first `live` rows matter."""
        if not self.skips_rows:
            return self
        bound = {name: functools.partial(getattr(self, name), live=live) for name in _OF_ROWS}
        return dataclasses.replace(self, skips_rows=False, **bound)


_OF_ROWS = ("dense", "dense_argmax", "gated", "add_norm", "split_qkv")

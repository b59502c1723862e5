"""Interface of a kernel backend: the ops of one implementation, and the features that it supports."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jax import Array

from apt_jax.ops import linear, low_rank

RULES: frozenset[str] = frozenset({"softcap", "alibi", "window", "sinks"})
"""Features for the fields of `LogitModifiers`."""

BY_LAYER: frozenset[str] = RULES | {"slot width"}
"""Features that only some layers of a model may need: `RULES`, and `lane` of the calls ("slot width")."""

EXTRAS: frozenset[str] = BY_LAYER | {"key norm", "lane norm", "grouped absorption", "input width", "adapters"}
"""Features that some models need in addition to plain attention: `BY_LAYER`, `KeyNorm` of each head ("key norm") or of all
heads together ("lane norm"), `decode_v_absorbed` with fewer key heads than query heads, layer inputs narrower or wider
than the lanes, and adapters of W_k or W_v where keys and values are computed from layer inputs."""

ATTENTION_OPS = ("decode_kv", "decode_absorbed", "decode_reprojected", "decode_v_absorbed", "prefill")
"""Fields of `KernelBackend` that are attention ops. As a key of `KernelBackend.extras`, `prefill_hidden` stands for
`prefill` with `hidden_prefixes`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelBackend:
    """One implementation of the attention ops and of the products around them. Attention ops take queries and a record
    with their other arguments (`calls.py`); `lab/reference.py` defines their results."""

    name: str
    decode_kv: Callable[..., Any]
    decode_absorbed: Callable[..., Any]
    decode_reprojected: Callable[..., Any]
    decode_v_absorbed: Callable[..., Any]
    prefill: Callable[..., Any]
    dense: Callable[..., Array] = linear.dense
    """Products of rows with weights, like `linear.dense`."""
    head_products: Callable[..., Array] = linear.head_products
    """Products of heads with one matrix per head, like `linear.head_products`."""
    add_low_rank: Callable[..., Array] = low_rank.add_low_rank
    """Adds the LoRA terms of adapters to products, like `low_rank.add_low_rank`."""
    experts: Callable[..., Array] = linear.experts
    """Mixture of experts, like `linear.experts`."""
    dense_argmax: Callable[..., tuple[Array, Array]] | None = None
    """`dense` followed by `sampling.greedy`, with the arguments of `dense`; None: not provided."""
    gated: Callable[[Array, Any, str], Array] | None = None
    """Computes the first half of a gated feed-forward layer in one op. Arguments: rows (T, I), gate and up as one
    matrix (2 F, I), and the name of the activation; returns (T, F) in the dtype of the rows. None: not provided."""
    add_norm: Callable[..., tuple[Array, Array]] | None = None
    """Returns the sum of the residual stream and an addend, and the norm of the sum (`cpu.ops.add_norm`); None: not
    provided."""
    split_qkv: Callable[..., tuple[Array, Array, Array]] | None = None
    """Splits one product into q, k and v (`cpu.ops.split_qkv`); None: not provided."""
    decode_layer: Callable[..., tuple[Array, Array]] | None = None
    """Computes a whole layer for decode rows that cache keys and values (`cpu.ops.decode_layer`); None: not
    provided."""
    takes_layer: Callable[..., bool] = lambda *_: False
    """Returns True if `decode_layer` supports a layer (`cpu.ops.takes_layer`)."""
    skips_rows: bool = False
    """True if `dense`, `experts`, `dense_argmax`, `gated`, `add_norm` and `split_qkv` take `live`, the number of rows to compute;
    rows from `live` on are padding and give zeros."""
    tiles: bool = False
    """True if float32 and bfloat16 products take weights in the layout of `models.weight_layout.tile_params`."""
    integer_products: bool = False
    """True if, with `tiles`, products with integer matrices round rows to 8 bits and multiply integers, which is faster
    than dequantizing the weights."""
    rows_per_tile: int
    """Number of decode rows in a tile; a tile is read up to the longest context of its rows."""
    extras: frozenset[str] | Mapping[str, frozenset[str]] = dataclasses.field(hash=False)
    """Features of `EXTRAS` that all ops support, or a map from each op to the features that it supports; an op without
    an entry supports none of them."""
    takes_shards: frozenset[str] = frozenset()
    """Ops of `ATTENTION_OPS` that take `tensor` (`calls.Shards`), for layer inputs sharded over devices by feature."""
    branches: bool
    """True if the decoder may branch around ops that have no rows. False: all ops are called in every step and must
    cost little without rows, because a branch on the device would split a CUDA graph."""

    def extras_of(self, op: str) -> frozenset[str]:
        """Return the features of `EXTRAS` that an op supports; `op` is one of `ATTENTION_OPS`, or `prefill_hidden`."""
        if isinstance(self.extras, Mapping):
            return self.extras.get(op, frozenset())
        return self.extras

    def for_rows(self, live: Array) -> "KernelBackend":
        """Return a copy of the backend for steps in which only the first `live` rows are used."""
        if not self.skips_rows:
            return self
        bound = {name: functools.partial(getattr(self, name), live=live) for name in _OF_ROWS}
        return dataclasses.replace(self, skips_rows=False, **bound)


_OF_ROWS = ("dense", "experts", "dense_argmax", "gated", "add_norm", "split_qkv")

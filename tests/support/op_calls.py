"""Attention ops with their arguments one by one, as tests draw and change them, instead of a record (`ops.calls`)."""

from collections.abc import Callable
from typing import Any

from apt_jax.ops.calls import DecodeCall, HiddenPrefixes, PrefillCall, Projection

_OF_PROJECTION = ("angles", "key_norm", "adapters")


def _taken(named: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: named.pop(name) for name in names if name in named}


def decode_call(pool: Any, tables: Any, lens: Any, *weights: Any, **named: Any) -> DecodeCall:
    """The record of a decode op. `weights`: W_k, b_k, W_v, b_v; or, with absorbed values, W_k, b_k and angles."""
    of_projection = _taken(named, *_OF_PROJECTION)
    if len(weights) == 3:
        of_projection["angles"] = weights[2]
    projection = None
    if weights:
        names = ("wk", "bk", "wv", "bv") if len(weights) == 4 else ("wk", "bk")
        projection = Projection(**dict(zip(names, weights, strict=False)), **of_projection)
    return DecodeCall(pool=pool, tables=tables, lens=lens, projection=projection, **named)


def prefill_call(
    pool: Any,
    tables: Any,
    offsets: Any,
    chunk_lens: Any,
    prefix_lens: Any,
    hidden: Any,
    num_rows: Any,
    *weights: Any,
    block_size: int,
    with_hidden: bool,
    **named: Any,
) -> PrefillCall:
    """The record of `prefill`. `weights`: W_k, b_k, W_v, b_v, which count only `with_hidden`."""
    of_projection, of_inputs = _taken(named, *_OF_PROJECTION), _taken(named, "tensor", "room")
    slots = named.pop("hidden_block_size", None) or block_size
    prefixes = None
    if with_hidden:
        projection = Projection(**dict(zip(("wk", "bk", "wv", "bv"), weights, strict=True)), **of_projection)
        prefixes = HiddenPrefixes(projection=projection, block_size=slots, **of_inputs)
    return PrefillCall(
        pool=pool,
        tables=tables,
        offsets=offsets,
        chunk_lens=chunk_lens,
        prefix_lens=prefix_lens,
        hidden=hidden,
        num_rows=num_rows,
        block_size=block_size,
        hidden_prefixes=prefixes,
        **named,
    )


_QUERIES = {"decode_v_absorbed": 2, "prefill": 3}
"""Arguments before the record, where they are not one."""

_OF_CALLS = {
    "block_size", "rows", "slot_ranges", "table_of_row", "rules", "tensor", "room", "with_hidden", "hidden_block_size",
    *_OF_PROJECTION,
}  # fmt: skip


def flat(op: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """The op with arguments one by one: its queries, then those of `decode_call` or `prefill_call`, and keywords of
    either or of the op itself. `name` is that of the op in `KernelBackend`; None: that of the function."""
    queries = _QUERIES.get(name or op.__name__, 1)
    make = prefill_call if queries == 3 else decode_call

    def call(*arguments: Any, **named: Any) -> Any:
        of_call = {name: named.pop(name) for name in list(named) if name in _OF_CALLS}
        return op(*arguments[:queries], make(*arguments[queries:], **of_call), **named)

    return call

"""The set of compiled programs: padded sizes, cache kinds that can occur, and variants of the sampler. Needs no JAX."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from apt_jax.request import SamplingParams

_MIN_PREFILL_BUCKET = 32
_SPARSE_ROWS, _SPARSE_TOKENS = 64, 512
"""Rows and tokens of a step below which the weights take its time, on GPUs."""
_CONVERT_TOKENS = (128, 1024)
"""About how many layer inputs the programs convert that compute keys and values from them."""

CHANGES_PER_CALL = 4096
"""Entries of what the device keeps by slot that one program changes, where they do not fit into a step."""


def power_of_two_buckets(smallest: int, largest: int, multiple: int = 1, *, sparse_below: int = 0) -> list[int]:
    """Powers of two from `smallest`, and last the smallest multiple of `multiple` that holds `largest`; below
    `sparse_below`, of which it is a multiple by a power of four, powers of four alone."""
    buckets = []
    size = smallest
    while size < largest:
        buckets.append(size)
        size *= 4 if size < sparse_below else 2
    last = size if largest <= multiple else -(-largest // multiple) * multiple
    return [b for b in buckets if b < last] + [last]


def bucket_for(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that holds `size`."""
    return next(b for b in buckets if b >= size)


@dataclasses.dataclass(kw_only=True)
class Buckets:
    """Padded sizes that programs are compiled for, ascending."""

    decode: list[int]
    """Rows that decode, and rows that sample."""
    masked: list[int]
    """Rows that sample, where some do so under a mask."""
    prefill: list[int]
    """Tokens of prompt chunks."""
    copies: list[int]
    """Blocks that are copied before a step."""
    conversions: list[int]
    """X blocks that are converted by one program."""

    @classmethod
    def for_limits(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        hidden_block_size: int,
        rows_multiple: int,
        sparse: bool = False,
    ) -> "Buckets":
        """Buckets up to the limits of a step; the largest number of rows is a multiple of `rows_multiple`.

        Args:
            sparse: half as many of them where a step takes as long with some rows more, because it reads the weights once in
                any case.
        """
        decode = power_of_two_buckets(1, max_num_seqs, rows_multiple, sparse_below=_SPARSE_ROWS if sparse else 0)
        return cls(
            decode=decode,
            # Every second one: half as many programs to compile, for at most twice the rows in the sampler.
            masked=sorted({decode[0], *decode[::-2]}),
            prefill=power_of_two_buckets(
                min(_MIN_PREFILL_BUCKET, max_num_batched_tokens),
                max_num_batched_tokens,
                sparse_below=_SPARSE_TOKENS if sparse else 0,
            ),
            copies=sorted({min(8, 2 * max_num_seqs), 2 * max_num_seqs}),
            conversions=sorted({-(-min(n, max_model_len) // hidden_block_size) for n in _CONVERT_TOKENS}),
        )

    def forward_shapes(self, *, mixed: bool) -> list[tuple[int, int]]:
        """(decode rows, prefill tokens) of all forward programs; `mixed`: also of those with both."""
        shapes = [(rows, 0) for rows in self.decode] + [(0, tokens) for tokens in self.prefill]
        return shapes + [(self.decode[-1], tokens) for tokens in self.prefill] if mixed else shapes


class KindSet(NamedTuple):
    """Cache kinds that a program handles; indexed by `sched.request_table.KV` and `HIDDEN`."""

    kv: bool
    hidden: bool


@dataclasses.dataclass(frozen=True)
class SamplerVariant:
    """Features of a sampling program; each needed combination is compiled."""

    greedy: bool = False
    """All rows take the most likely token, their settings are not read."""
    penalised: bool = False
    """Rows may have penalties, bias or a minimum of tokens, and get log probabilities."""
    masked: bool = False
    """Rows may have a mask of allowed tokens."""

    @classmethod
    def for_rows(cls, params: Sequence[SamplingParams], *, masked: bool) -> "SamplerVariant":
        """The cheapest variant of `variants` that serves the rows."""
        if any(p.needs_penalties or p.logprobs is not None for p in params):
            return cls(penalised=True, masked=masked)
        if masked:
            return cls(masked=True)
        return GREEDY if all(p.is_greedy for p in params) else cls()

    def broader(self) -> "list[SamplerVariant]":
        """Others that serve the same rows with the same tokens, where programs branch; the cheapest first."""
        others = [SAMPLED, SamplerVariant(masked=True), SamplerVariant(penalised=True), EVERYTHING]
        needed = {name for name in ("penalised", "masked") if getattr(self, name)}
        return [v for v in others if v != self and all(getattr(v, name) for name in needed)]

    @classmethod
    def variants(cls) -> "list[SamplerVariant]":
        """All variants without masks."""
        return [GREEDY, cls(), cls(penalised=True)]

    @classmethod
    def masked_variants(cls) -> "list[SamplerVariant]":
        """All variants with masks."""
        return [cls(masked=True), cls(penalised=True, masked=True)]


GREEDY = SamplerVariant(greedy=True)
SAMPLED = SamplerVariant()
EVERYTHING = SamplerVariant(penalised=True, masked=True)
"""Serves all rows, where programs branch."""
